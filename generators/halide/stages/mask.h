// Stage 2: who sees whom, and what is added to the scores that are seen.
//
// Causality, window, kv_len and offset all reduce to one interval of keys for each row: lo(r) <= j < hi(r). The runtime
// works it out (24 rows: nothing), so a kernel knows no difference between them, and rows of several query heads can
// share a tile. The bool mask and the bias are read here, through their own strides.
#pragma once

#include "../mods.h"
#include "types.h"

#include <functional>

namespace attune_gen {

// The optional tensors of a task, and how a row of the tile finds its own row in them: rows are numbered over the query
// heads of one kv head, row number = head in group * N + i. Keys are read by whole panels; the panel at the end of the
// key axis, if the panel size does not divide it, comes from a copy that the runtime makes (so that nothing is read
// past the last element, and every load is one dense vector).
struct RowTensors {
    Func lo, hi;               // (r): interval of visible keys
    Func position, slope;      // (r): where the row stands among the keys; ALiBi's slope of its head
    Func mask, bias;           // (j, i, g): nonzero = attend; the bits of a summand
    Func mask_tail, bias_tail; // (j in panel, r)
    Expr use_mask, use_bias, use_softcap, use_alibi;
    Expr softcap;
    Expr first_row, rows_per_head, num_rows, num_keys;
    int panel = 0;
    std::function<UserScore(Expr score, Expr key, Expr r, Expr slot)> user; // user functions; empty: there are none

    Expr row(const Expr &r) const { return min(first_row + r, num_rows - 1); }
    // Value of `t` (mask or bias) for key j of panel p (counted from key 0). Where it is not `used`, one panel of
    // anything stands in for it.
    Expr at(const Func &t, const Func &tail, const Expr &used, const Expr &j, const Expr &p, const Expr &r) const {
        const Expr whole = num_keys / panel, first = select(used, clamp(p, 0, max(whole, 1) - 1) * panel, 0);
        return select(p >= whole, tail(j, r), t(first + j, row(r) % rows_per_head, row(r) / rows_per_head));
    }
};

// A key index that is safe to read: tails of the key axis are clamped, and masked by the interval.
inline Expr safe_key(const RowTensors &t, const Expr &j) {
    return min(j, t.num_keys - 1);
}

inline Expr soft_cap(const Expr &s, const Expr &cap) {
    return cap * fast_tanh(s / cap);
}

// What happens to one score after the matmul (contract 3.5), wherever the pieces come from.
struct ScoreTerms {
    Expr visible; // by structure: an interval of keys
    Expr use_mask, mask;
    Expr use_bias, bias_bits; // of a float
    Expr use_softcap, softcap;
    Expr use_alibi, slope, distance;           // |position - key|
    std::function<UserScore(Expr score)> user; // user functions; empty: there are none
};

// Soft cap, user functions, ALiBi, bias and mask, in this order; kInvisible where the key is not seen.
//
// The bias comes as the bits of its floats: a bias of -inf masks, and under no-infinities rules the compiler turns a
// test of a float's own bits into a comparison with infinity, which it then folds away. A NaN becomes +inf, which no
// maximum drops: the runtime finds it in the row's state and gives the tile to the strict code.
inline Expr shaped_score(const ScoreTerms &t, const Expr &score) {
    const Expr minus_infinity = Expr(uint32_t(0xff800000)), infinity = Expr(uint32_t(0x7f800000));
    const Expr bits = t.bias_bits;
    const Expr bias = reinterpret<float>(select((bits & Expr(uint32_t(0x7fffffff))) > infinity, infinity, bits));
    Expr visible = t.visible;
    visible = visible && (!t.use_mask || t.mask != cast<uint8_t>(0));
    visible = visible && (!t.use_bias || bits != minus_infinity);
    Expr s = select(t.use_softcap, soft_cap(score, t.softcap), score);
    if (t.user) {
        const UserScore u = t.user(s);
        s = u.score;
        if (u.visible.defined()) visible = visible && u.visible;
    }
    s = s - select(t.use_alibi, t.slope * t.distance, 0.0f);
    s = s + select(t.use_bias, bias, 0.0f);
    return select(visible, max(s, kLowestVisible), kInvisible);
}

// The score of key p * panel + j. `slot`: where the panel stands in a list of panels, for user functions.
inline Expr masked_score(const RowTensors &t, const Expr &score, const Expr &j, const Expr &p, const Expr &r,
                         const Expr &slot) {
    const Expr key = p * t.panel + j;
    ScoreTerms x;
    x.visible = key >= t.lo(r) && key < t.hi(r);
    x.use_mask = t.use_mask, x.mask = t.at(t.mask, t.mask_tail, t.use_mask, j, p, r);
    x.use_bias = t.use_bias, x.bias_bits = t.at(t.bias, t.bias_tail, t.use_bias, j, p, r);
    x.use_softcap = t.use_softcap, x.softcap = t.softcap;
    x.use_alibi = t.use_alibi, x.slope = t.slope(r), x.distance = cast<float>(abs(t.position(r) - key));
    if (t.user) x.user = [&](const Expr &s) { return t.user(s, key, r, slot); };
    return shaped_score(x, score);
}

inline Expr is_visible(const Expr &masked) {
    return masked != kInvisible;
}

// Compiles a Func that calls masked_score once for each usual combination of what it may read, so that absent parts
// cost nothing. Soft cap and ALiBi share a version without mask and bias, and the general one: flash with ALiBi at
// n 1024, d 64 takes 1.23 times as long as without in the former, 2.76 times in the latter.
inline void specialize_for_tensors(Stage f, const RowTensors &t) {
    const Expr plain = !t.use_softcap && !t.use_alibi;
    f.specialize(plain && !t.use_mask && !t.use_bias);
    if (t.user) return; // what these need is more than the rest, and the code is long already
    f.specialize(plain && t.use_mask && !t.use_bias);
    f.specialize(plain && !t.use_mask && t.use_bias);
    f.specialize(plain);
    f.specialize(!t.use_mask && !t.use_bias);
}

} // namespace attune_gen
