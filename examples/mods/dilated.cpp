// Every step-th key to both sides, `count` of them to each.
#include <attune/mods.h>

ATTUNE_MASK_MOD(Scalar<int32_t> step, Scalar<int32_t> count) {
    return abs(q - k) % step == 0 && abs(q - k) <= step * count;
}
