// A learned bias for each head and distance, up to a greatest one to both sides (T5, Swin): table(h, distance).
#include <attune/mods.h>

ATTUNE_SCORE_MOD(Buffer<float, 2> table, Scalar<int32_t> furthest) {
    return score + table(h, clamp(k - q, -furthest, furthest) + furthest);
}
