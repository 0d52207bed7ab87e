// ALiBi: a penalty that grows with the distance, at a slope of the head's.
#include <attune/mods.h>

ATTUNE_SCORE_MOD(Buffer<float, 1> slopes) {
    return score - slopes(h) * cast<float>(abs(q - k));
}
