// Stage 4: O(c, r) = sum_j P(j, r) V(c, j). Also the projections of multi-head attention: Y(c, r) = sum_k X(k, r) W(c,
// k).
#pragma once

#include "types.h"

#include <functional>

namespace attune_gen {

// `dims` are the dimensions of the product; `dom` the terms of the sum, as the caller has bounded them. left and right
// give the factors of a term.
inline Accumulation matmul(const std::string &name, const std::vector<Var> &dims, const RDom &dom, const Expr &left,
                           const Expr &right) {
    Accumulation o{Func(name), dom};
    o.acc(dims) = 0.0f;
    o.acc(dims) = multiply_add(o.acc(dims), left, right);
    return o;
}

} // namespace attune_gen
