// Stage 5: two partial results (m, l, O), each over its own keys, become one:
//   m = max(m1, m2), a_k = 2^((m_k - m) * unit), l = a_1 l_1 + a_2 l_2, O = a_1 O_1 + a_2 O_2.
// The neutral element is (kInvisible, 0, 0); O is not yet divided by l.
#pragma once

#include "types.h"

#include <functional>

namespace attune_gen {

struct Merged {
    Expr max, keep, add; // the new maximum, the factors of the old and of the new part
};

// `exp2` is 2^x for x <= 0; the polynomial unless given.
inline Merged merge_maxima(const Expr &old_max, const Expr &new_max, const Expr &unit = Expr(),
                           const std::function<Expr(Expr)> &exp2 = {}) {
    Expr m = max(old_max, new_max);
    auto factor = [&](const Expr &x) {
        Expr e = x - m;
        if (unit.defined()) e = e * unit;
        if (exp2) return exp2(e);
        // Exactly 1 where the maximum stays: the polynomial's 1 - 7.5e-8 would be raised to the number of blocks.
        return select(e == 0.0f, 1.0f, exp2_nonpositive(e));
    };
    return {m, factor(old_max), factor(new_max)};
}

} // namespace attune_gen
