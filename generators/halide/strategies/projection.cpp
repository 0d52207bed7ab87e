// projection: Y(c, r) = sum_k X(k, r) W(k, c) + bias(c), the linear maps of multi-head attention.
//
// W is packed once into panels of `panel` columns, so that a step of the inner loop reads one dense run of `panel`
// weights and a broadcast for each row: rows x panel/lanes accumulators stay in registers over all of k. Loop order: a
// panel (in * panel floats, 64 KiB at 512 x 32) stays in L2 while all rows of the task pass by; the rows of a tile (24
// KiB at 12 x 512) in L1. Whole panels, and at least `rows` rows: the runtime takes care of ragged columns and of few
// rows (by a kernel with rows = 1).
#include "stages/matmul.h"

namespace attune_gen {

class Projection : public Generator<Projection> {
  public:
    GeneratorParam<int> rows{"rows", 12};   // of a register tile: 12 x 2 vectors are 24 of 32 registers
    GeneratorParam<int> panel{"panel", 32}; // columns of a packed panel

    Input<Buffer<float, 2>> x{"x"};           // (k, r)
    Input<Buffer<float, 3>> weight{"weight"}; // (c in panel, k, panel)
    Input<Buffer<float, 1>> bias{"bias"};     // (c)
    Output<Buffer<float, 2>> y{"y"};          // (c, r)

    void generate() {
        const int v = natural_vector_size(Float(32)), w = panel, tile = rows;
        RDom k(0, weight.dim(1).extent(), "k");
        Accumulation product = matmul("product", {c, r}, k, x(k, r), weight(c % w, k, c / w));
        y(c, r) = product.acc(c, r) + bias(c);

        x.dim(0).set_min(0).set_stride(1);
        x.dim(1).set_min(0);
        weight.dim(0).set_bounds(0, w).set_stride(1);
        weight.dim(1).set_min(0).set_stride(w);
        weight.dim(2).set_min(0);
        bias.dim(0).set_min(0).set_stride(1);
        y.dim(0).set_min(0).set_stride(1);
        y.dim(1).set_min(0);
        Func f = y;
        f.split(c, co, ci, w, TailStrategy::RoundUp).split(r, ro, ri, tile, TailStrategy::ShiftInwards);
        f.reorder(ci, ri, ro, co).vectorize(ci, v).unroll(ci).unroll(ri);
        product.acc.compute_at(f, ro).vectorize(c, v).unroll(c).unroll(r);
        product.acc.update().reorder(c, r, k).vectorize(c, v).unroll(c).unroll(r);
    }

  private:
    Var c{"c"}, r{"r"}, co{"co"}, ci{"ci"}, ro{"ro"}, ri{"ri"};
};

} // namespace attune_gen

HALIDE_REGISTER_GENERATOR(attune_gen::Projection, projection)
