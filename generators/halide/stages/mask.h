// Stage 2: who sees whom, and what is added to the scores that are seen.
//
// Causality, window, kv_len and offset all reduce to one interval of keys for each row: lo(r) <= j < hi(r). The runtime
// works it out (24 rows: nothing), so a kernel knows no difference between them, and rows of several query heads can
// share a tile. The bool mask and the bias are read here, through their own strides.
#pragma once

#include "types.h"

namespace attune_gen {

// The optional tensors of a task, and how a row of the tile finds its own row in them: rows are numbered over the query
// heads of one kv head, row number = head in group * N + i. Keys are read by whole panels; the panel at the end of the
// key axis, if the panel size does not divide it, comes from a copy that the runtime makes (so that nothing is read
// past the last element, and every load is one dense vector).
struct RowTensors {
    Func lo, hi;               // (r): interval of visible keys
    Func mask, bias;           // (j, i, g): nonzero = attend; a summand
    Func mask_tail, bias_tail; // (j in panel, r)
    Expr use_mask, use_bias;
    Expr first_row, rows_per_head, num_rows, num_keys;
    int panel = 0;

    Expr row(const Expr &r) const { return min(first_row + r, num_rows - 1); }
    // Value of `t` (mask or bias) for key j of panel p (counted from key 0).
    Expr at(const Func &t, const Func &tail, const Expr &j, const Expr &p, const Expr &r) const {
        const Expr whole = num_keys / panel;
        const Expr inside =
            t(clamp(p, 0, max(whole, 1) - 1) * panel + j, row(r) % rows_per_head, row(r) / rows_per_head);
        return select(p >= whole, tail(j, r), inside);
    }
};

// A key index that is safe to read: tails of the key axis are clamped, and masked by the interval.
inline Expr safe_key(const RowTensors &t, const Expr &j) {
    return min(j, t.num_keys - 1);
}

// The masked score of key p * panel + j. A bias of -inf masks; it is recognised by its bits, since the compiler may
// assume that no float is infinite.
inline Expr masked_score(const RowTensors &t, const Expr &score, const Expr &j, const Expr &p, const Expr &r) {
    const Expr key = p * t.panel + j;
    const Expr bias = t.at(t.bias, t.bias_tail, j, p, r);
    Expr visible = key >= t.lo(r) && key < t.hi(r);
    visible = visible && (!t.use_mask || t.at(t.mask, t.mask_tail, j, p, r) != cast<uint8_t>(0));
    visible = visible && (!t.use_bias || reinterpret<uint32_t>(bias) != Expr(uint32_t(0xff800000)));
    const Expr s = score + select(t.use_bias, bias, 0.0f);
    return select(visible, max(s, kLowestVisible), kInvisible);
}

inline Expr is_visible(const Expr &masked) {
    return masked != kInvisible;
}

// Compiles a Func that calls masked_score once for each combination of optional tensors, so that absent ones cost
// nothing.
inline void specialize_for_tensors(Stage f, const RowTensors &t) {
    f.specialize(!t.use_mask && !t.use_bias);
    f.specialize(t.use_mask && !t.use_bias);
    f.specialize(!t.use_mask && t.use_bias);
}

} // namespace attune_gen
