// Several answers to one prompt: all see the prompt, and each its own tokens up to the row. Keys and rows from `prompt`
// on have the number of their answer, which never falls.
#include <attune/mods.h>

ATTUNE_MASK_MOD(Scalar<int32_t> prompt, Buffer<int32_t, 1> answer) {
    return k <= q && (k < prompt || answer(q) == answer(k));
}

ATTUNE_BLOCK_MOD(Scalar<int32_t> prompt, Buffer<int32_t, 1> answer) {
    const Expr other = answer(k.last) < answer(q.first) || answer(q.last) < answer(k.first);
    return {.none = k.first > q.last || (k.first >= prompt && other), .all = k.last <= q.first && k.last < prompt};
}
