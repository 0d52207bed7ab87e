// auto_adams, auto_mullapudi, auto_li: the literal algorithm scheduled by one of Halide's autoschedulers. What a
// machine makes of the stages that the other strategies schedule by hand: lanes, panels and tiles are schedule, and
// finding them is the autoscheduler's job. Parallel loops are its own too, so these kernels bring their threads along.
#include "whole.h"

namespace attune_gen {

class AutomaticWhole : public WholePhase<AutomaticWhole> {
  public:
    GeneratorParam<int> rows{"rows", 1024}, heads{"heads", 8}; // the problem that it plans for

    void generate() {
        define();
        promise_layout();
        const int rows = this->rows, heads = this->heads;
        query.set_estimates({{0, int(dk)}, {0, rows}, {0, heads}});
        key.set_estimates({{0, int(dk)}, {0, rows}, {0, heads}});
        value.set_estimates({{0, int(dv)}, {0, rows}, {0, heads}});
        lo.set_estimates({{0, rows}});
        hi.set_estimates({{0, rows}});
        scale.set_estimate(0.125f * kLog2e);
        group.set_estimate(1);
        out.set_estimates({{0, int(dv)}, {0, rows}, {0, heads}});
        row_max.set_estimates({{0, rows}, {0, heads}});
        row_sum.set_estimates({{0, rows}, {0, heads}});
    }
};

} // namespace attune_gen

HALIDE_REGISTER_GENERATOR(attune_gen::AutomaticWhole, automatic_whole)
