// ladder_1 to ladder_3: the literal algorithm, one scheduling step after the other, up to where blocks of rows begin
// (ladder_4 and ladder_5 are rowstrip without and with register accumulators). For `attune compare --ladder`; the
// planner never takes them.
//
//   1  every stage on its own, scalar loops as written
//   2  vectorised over keys (K transposed once, so that they are side by side) and over the features of V; heads in
//   parallel 3  tiled: both matmuls in blocks of rows that reuse a block of K and V from cache; results still updated
//   in memory
#include "whole.h"

namespace attune_gen {

class LadderWhole : public WholePhase<LadderWhole> {
  public:
    GeneratorParam<int> step{"step", 1};

    void generate() {
        define();
        promise_layout();
        const int v = natural_vector_size(Float(32)), rows = 24;
        for (Func f : {score, masked, maximum, weight, sum, product, inverse}) f.compute_root();
        if (step == 1) return;

        Func o = out;
        keys.compute_root().reorder(j, d, h).vectorize(j, v).parallel(h);
        o.bound(c, 0, int(dv)).vectorize(c, v).parallel(h);
        masked.vectorize(j, v).parallel(h);
        weight.vectorize(j, v).parallel(h);
        maximum.parallel(h).update().atomic().vectorize(max_keys.x, v).parallel(h);
        sum.parallel(h).update().atomic().vectorize(sum_keys.x, v).parallel(h);
        product.bound(c, 0, int(dv)).vectorize(c, v).parallel(h);
        score.vectorize(j, v).parallel(h);
        if (step == 2) {
            score.update().reorder(j, features.x, n).vectorize(j, v).parallel(h);
            product.update().reorder(c, product_keys.x, n).vectorize(c, v).parallel(h);
        } else {
            // A score is loaded and stored once for 8 features, an output once for 8 keys.
            score.update().split(j, jo, ji, 4 * v).split(n, no, ni, rows, TailStrategy::GuardWithIf);
            score.update().split(features.x, fo, fi, 8).reorder(fi, ji, ni, fo, jo, no);
            score.update().vectorize(ji, v).unroll(fi).parallel(h);
            product.update().split(n, no, ni, rows, TailStrategy::GuardWithIf).split(product_keys.x, fo, fi, 8);
            product.update().reorder(fi, c, ni, fo, no).vectorize(c, v).unroll(fi).unroll(c).parallel(h);
        }
    }

  private:
    Var no{"no"}, ni{"ni"}, jo{"jo"}, ji{"ji"};
    RVar fo{"fo"}, fi{"fi"};
};

} // namespace attune_gen

HALIDE_REGISTER_GENERATOR(attune_gen::LadderWhole, ladder_whole)
