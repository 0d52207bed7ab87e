// An image's pixels, row by row: each sees those at most `radius` away in both directions.
#include <attune/mods.h>

ATTUNE_MASK_MOD(Scalar<int32_t> width, Scalar<int32_t> radius) {
    return abs(q / width - k / width) <= radius && abs(q % width - k % width) <= radius;
}
