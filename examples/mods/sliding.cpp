// A row sees itself and the `left` keys before it.
#include <attune/mods.h>

ATTUNE_MASK_MOD(Scalar<int32_t> left) {
    return k <= q && q - k <= left;
}
