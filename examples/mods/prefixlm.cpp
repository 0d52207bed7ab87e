// Prefix language model: causal, but for the prompt, which all rows see. Each batch element has its own.
#include <attune/mods.h>

ATTUNE_MASK_MOD(Buffer<int32_t, 1> prefix) {
    return k <= q || k < prefix(b);
}

// Of a mask that depends on an array, the compiler knows nothing by itself.
ATTUNE_BLOCK_MOD(Buffer<int32_t, 1> prefix) {
    return {.none = k.first > q.last && k.first >= prefix(b), .all = k.last <= q.first || k.last < prefix(b)};
}
