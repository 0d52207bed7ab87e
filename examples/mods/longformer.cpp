// Longformer: a window to both sides, and some tokens at the beginning that see all and are seen by all.
#include <attune/mods.h>

ATTUNE_MASK_MOD(Scalar<int32_t> window, Scalar<int32_t> global_tokens) {
    return abs(q - k) <= window || q < global_tokens || k < global_tokens;
}
