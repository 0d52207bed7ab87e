// Scores stay within (-cap, cap).
#include <attune/mods.h>

ATTUNE_SCORE_MOD(Scalar<float> cap) {
    return cap * tanh(score / cap);
}
