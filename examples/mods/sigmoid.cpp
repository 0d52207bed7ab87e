// Sigmoid attention, which is not divided by a sum: O = sum_j sigmoid(s_j + shift) V_j. The softmax of log(sigmoid) is
// the same divided by the sum of the sigmoids, and that is what LSE is the logarithm of: multiply each row of O by
// e^LSE.
#include <attune/mods.h>

ATTUNE_SCORE_MOD(Scalar<float> shift) {
    const Expr s = score + shift;
    return min(s, 0.0f) - log(1.0f + exp(-abs(s)));
}
