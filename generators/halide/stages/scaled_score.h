// Stage 1: S(j, r) = sum_d Q(d, r) K(d, j).
//
// The scale (and log2 e, where no bias is added later) is multiplied into the query tile beforehand: N*dk products
// instead of N*M. A zero or negative scale needs no special case that way.
#pragma once

#include "types.h"

#include <functional>

namespace attune_gen {

// With pairs of bf16 it cannot: the product would be rounded. There the score is scaled, and d counts pairs.
//
// `dims` are the dimensions of S, key first. key(d) and query(d) give the factors for the point dims.
inline Accumulation scaled_score(const std::string &name, const std::vector<Var> &dims, const Expr &dk,
                                 const std::function<Expr(Expr)> &key, const std::function<Expr(Expr)> &query) {
    Accumulation s{Func(name), RDom(0, dk, name + "_d")};
    s.acc(dims) = 0.0f;
    s.acc(dims) = multiply_add(s.acc(dims), key(s.dom.x), query(s.dom.x));
    return s;
}

} // namespace attune_gen
