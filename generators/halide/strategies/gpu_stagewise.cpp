// gpu_stagewise: the literal definition on a GPU, each stage a launch over all N*M scores, which lie in global memory
// in between. The baseline for gpu_block, and what takes any number of features.
//
//   score:   S = Q K^T                       a thread has tile_rows x tile_cols scores
//   mask:    S = cap, ALiBi, bias, mask      elementwise, in place
//   softmax: P = 2^(S - max S), and behind each row its maximum and sum; a workgroup a row, in place
//   matmul:  O = P V / L                     a thread has tile_rows x tile_cols elements of O
#include "gpu_phases.h"
#include "stages/matmul.h"
#include "stages/scaled_score.h"
#include "stages/softmax.h"

namespace attune_gen {

template <typename Self> class GpuStage : public GpuPhase<Self> {
  public:
    using Base = GpuPhase<Self>;
    template <typename T> using Param = GeneratorParam<T>;
    Param<int> tx{"tx", 16}, ty{"ty", 8};                            // threads of a workgroup
    Param<int> tile_rows{"tile_rows", 4}, tile_cols{"tile_cols", 4}; // adjacent elements of a thread

  protected:
    using Base::num_keys, Base::i, Base::h, Base::b;

    // Where the maximum and the sum of a row of scores lie, behind its keys: see runtime/device/phases.cpp.
    Expr max_at() { return (num_keys + 3) / 4 * 4; }
    Expr sum_at() { return max_at() + 1; }

    template <typename B> static void promise_scores(B &scores) {
        for (int n = 0; n < 4; n++) scores.dim(n).set_min(0);
        scores.dim(0).set_stride(1);
    }

    // Workgroups over tiles of f(x, i, h, b); the sums of a thread are in its registers.
    void tile(Func f, Accumulation &sums, const Var &x, const RVar &term) {
        Var xo("xo"), xt("xt"), xi("xi"), io("io"), it("it"), ii("ii");
        const int R = tile_rows, C = tile_cols;
        f.split(x, xo, xt, int(tx) * C, TailStrategy::GuardWithIf).split(xt, xt, xi, C);
        f.split(i, io, it, int(ty) * R, TailStrategy::GuardWithIf).split(it, it, ii, R);
        f.reorder(xi, ii, xt, it, xo, io, h, b).unroll(xi).unroll(ii).fuse(h, b, h);
        f.gpu_blocks(xo, io, h).gpu_threads(xt, it);
        sums.acc.compute_at(f, xt).bound_extent(x, C).bound_extent(i, R).unroll(x).unroll(i);
        sums.acc.update().reorder(x, i, term).unroll(x).unroll(i);
    }
};

class GpuScore : public GpuStage<GpuScore> {
  public:
    Out<Buffer<float, 4>> scores{"scores"}; // (j, i, h, b)

    void generate() {
        Accumulation s = scaled_score(
            "score", {j, i, h, b}, features, [&](const Expr &d) { return key_at(d, j, h, b); },
            [&](const Expr &d) { return query_at(d, i, h, b); });
        scores(j, i, h, b) = s.acc(j, i, h, b);
        promise_inputs();
        promise_scores(scores);
        tile(scores, s, j, s.dom.x);
    }
};

class GpuMask : public GpuStage<GpuMask> {
  public:
    In<Buffer<float, 4>> raw{"raw"}; // (j, i, h, b); the output's memory
    Out<Buffer<float, 4>> scores{"scores"};

    void generate() {
        const Expr s = raw(j, i, h, b);
        scores(j, i, h, b) = select(use_extras(b), full_score(s, j, i, h, b), edge_score(s, j, i, b));
        promise_inputs();
        promise_scores(raw);
        promise_scores(scores);
        Var jo("jo"), ji("ji"), io("io"), ii("ii");
        Func f = scores;
        f.gpu_tile(j, i, jo, io, ji, ii, int(tx), int(ty), TailStrategy::GuardWithIf).fuse(h, b, h).gpu_blocks(h);
    }
};

class GpuSoftmax : public GpuStage<GpuSoftmax> {
  public:
    GeneratorParam<int> lanes{"lanes", 64}; // threads of a row
    In<Buffer<float, 4>> scores{"scores"};  // (j, i, h, b); the output's memory
    Out<Buffer<float, 4>> weights{"weights"};

    void generate() {
        const int n = lanes;
        Var p("p"), jo("jo"), ji("ji");
        // Keys beyond the last: invisible. What is read for them and dropped is what the thread itself writes, if any
        // does: others may have written already.
        Func padded("padded");
        const Expr key = p * n + j;
        padded(j, p, i, h, b) = select(key < num_keys, scores(min(key, sum_at()), i, h, b), kInvisible);
        RDom panels(0, (num_keys + n - 1) / n, "panels");
        Softmax s = softmax("row", padded, {j, p, i, h, b}, n, panels, unit, visible_weight,
                            [this](const Expr &x) { return exp2_device(x); });
        weights(j, i, h, b) =
            select(j == max_at(), s.max(i, h, b), j == sum_at(), s.sum(i, h, b), s.weight(j % n, j / n, i, h, b));
        promise_inputs();
        promise_scores(scores);
        promise_scores(weights);
        Func f = weights;
        f.split(j, jo, ji, n, TailStrategy::GuardWithIf).reorder(ji, jo, i, h, b).gpu_blocks(i, h, b).gpu_threads(ji);
        for (Func x : {s.lane_max, s.lane_sum}) {
            x.compute_at(f, i).store_in(MemoryType::GPUShared).gpu_threads(s.lane);
            x.update().reorder(panels.x, s.lane).gpu_threads(s.lane);
        }
        for (Func x : {s.max, s.sum}) x.compute_at(f, i).store_in(MemoryType::GPUShared);
    }
};

class GpuMatmul : public GpuStage<GpuMatmul> {
  public:
    In<Buffer<float, 4>> weights{"weights"}; // (j, i, h, b)
    Out<Func> out{"out", 4};                 // (c, i, h, b): O, bits of LSE

    void generate() {
        RDom t(0, num_keys, "t");
        const Expr row = clamp(i, 0, rows - 1), w = weights(t.x, row, h, b);
        // Whatever V holds at a key of weight 0 has no influence.
        Accumulation o = matmul("product", {c, i, h, b}, t, w, select(w == 0.0f, 0.0f, value_at(c, t.x, h, b)));
        const RowEnd end = finish_row(weights(max_at(), row, h, b), weights(sum_at(), row, h, b), h);
        result(c, i, h, b) = Tuple(store(o.acc(c, i, h, b) * end.factor), end.lse);
        out = result;
        promise_inputs();
        promise_scores(weights);
        promise_outputs(result);
        tile(result, o, c, t.x);
    }

  private:
    Func result{"result"};
};

} // namespace attune_gen

HALIDE_REGISTER_GENERATOR(attune_gen::GpuScore, gpu_score)
HALIDE_REGISTER_GENERATOR(attune_gen::GpuMask, gpu_mask)
HALIDE_REGISTER_GENERATOR(attune_gen::GpuSoftmax, gpu_softmax)
HALIDE_REGISTER_GENERATOR(attune_gen::GpuMatmul, gpu_matmul)
