// stagewise: the literal definition. Each stage is a kernel pass of its own over all N*M scores, with its own schedule,
// and the time of each can be read off `attune compare`. The baseline that fusion is measured against.
//
//   score:   S = Q K^T            register tiles, as in the fused strategies
//   mask:    S = cap, ALiBi, bias, mask   elementwise, in place
//   softmax: P = 2^(S - max S), L = row sums   row by row, in place
//   matmul:  O = P V / L           register tiles
//
// Rows of S lie one after the other, padded to whole panels: S(j, p, r) is key p * panel + j of row r.
#include "phases.h"
#include "space.h"
#include "stages/matmul.h"
#include "stages/scaled_score.h"
#include "stages/softmax.h"

#include <algorithm>

namespace attune_gen {

// The knobs that an entry of the catalogue gives to all phases of a kernel.
template <typename Self> class StagewisePhase : public Generator<Self> {
  public:
    GeneratorParam<Type> kv_type{"kv_type", Float(32)};
    GeneratorParam<int> dk{"dk", 64}, dv{"dv", 64}, q{"q", 24}, k{"k", 32}, panel{"panel", 32};

  protected:
    Var j{"j"}, p{"p"}, r{"r"}, c{"c"}, ro{"ro"}, ri{"ri"}, co{"co"}, ci{"ci"};
    int lanes() const { return this->natural_vector_size(Float(32)); }
};

template <typename B> void promise_scores(B &scores, int panel, int rows) {
    scores.dim(0).set_bounds(0, panel).set_stride(1);
    scores.dim(1).set_min(0).set_stride(panel);
    scores.dim(2).set_bounds(0, rows);
}

// An elementwise pass over whole rows.
void rowwise(Func f, const Var &j, const Var &p, const Var &r, int panel, int rows, int v) {
    f.bound(j, 0, panel).bound(r, 0, rows).reorder(j, p, r).vectorize(j, v).unroll(j);
}

class StagewiseScore : public StagewisePhase<StagewiseScore> {
  public:
    GeneratorParam<int> rows{"rows", 12};      // of the register tile; its vectors are those of a panel
    Input<Buffer<float, 2>> query{"query"};    // (d, r)
    Input<Buffer<>> key{"key"};                // (j in panel, d, panel)
    Output<Buffer<float, 3>> scores{"scores"}; // (j, p, r)

    void configure() {
        key.set_type(kv_type);
        key.set_dimensions(3);
    }
    void generate() {
        const int v = lanes(), w = panel;
        const Expr features = dk ? Expr(int(dk)) : query.dim(0).extent();
        Accumulation s = scaled_score(
            "score", {j, p, r}, features, [&](const Expr &d) { return cast<float>(key(j, d, p)); },
            [&](const Expr &d) { return query(d, r); });
        scores(j, p, r) = s.acc(j, p, r);

        promise_scores(scores, panel, q);
        query.dim(0).set_min(0).set_stride(1);
        query.dim(1).set_bounds(0, int(q));
        key.dim(0).set_bounds(0, w).set_stride(1);
        key.dim(1).set_min(0).set_stride(w);
        key.dim(2).set_min(0);
        Func f = scores;
        f.bound(j, 0, w)
            .bound(r, 0, int(q))
            .split(r, ro, ri, rows)
            .reorder(j, ri, ro, p)
            .vectorize(j, v)
            .unroll(j)
            .unroll(ri);
        s.acc.compute_at(f, ro).vectorize(j, v).unroll(j).unroll(r);
        s.acc.update().reorder(j, r, s.dom.x).vectorize(j, v).unroll(j).unroll(r);
    }
};

class StagewiseMask : public MaskedPhase<StagewiseMask> {
  public:
    Input<Buffer<float, 3>> raw{"raw"}; // (j, p, r); may be the output's memory
    Output<Buffer<float, 3>> masked{"masked"};

    void configure() { configure_user(); }
    void generate() {
        const RowTensors t = row_tensors();
        masked(j, p, r) = masked_score(t, raw(j, p, r), j, p, r, p);

        promise_mask_layout();
        promise_scores(raw, panel, q);
        promise_scores(masked, panel, q);
        Func f = masked;
        rowwise(f, j, p, r, panel, q, lanes());
        specialize_for_tensors(f, t);
    }

  private:
    Var j{"j"}, p{"p"}, r{"r"};
};

class StagewiseSoftmax : public StagewisePhase<StagewiseSoftmax> {
  public:
    Input<Buffer<float, 3>> scores{"scores"}; // (j, p, r); may be the output's memory
    Input<float> unit{"unit"};
    Output<Buffer<float, 3>> weights{"weights"};
    Output<Buffer<float, 1>> row_max{"row_max"}, row_sum{"row_sum"};

    void generate() {
        const int v = lanes(), w = panel;
        const Expr panels = scores.dim(1).extent();
        Softmax s = softmax("row", scores, {j, p, r}, w, RDom(0, panels, "strip"), unit, visible_weight);
        weights = s.weight;
        row_max(r) = s.max(r);
        row_sum(r) = s.sum(r);

        promise_scores(scores, panel, q);
        promise_scores(weights, panel, q);
        for (auto *b : {&row_max, &row_sum}) b->dim(0).set_bounds(0, int(q)).set_stride(1);
        rowwise(s.weight, j, p, r, w, q, v);
        for (Func x : {s.lane_max, s.lane_sum})
            x.compute_root().store_in(MemoryType::Stack).bound(s.lane, 0, w).bound(r, 0, int(q));
        for (Func x : {s.max, s.sum}) x.compute_root().store_in(MemoryType::Stack).bound(r, 0, int(q));
        schedule_rows(s, r, v);
    }
};

class StagewiseMatmul : public StagewisePhase<StagewiseMatmul> {
  public:
    GeneratorParam<int> rows{"rows", 6}, vectors{"vectors", 4};
    Input<Buffer<float, 3>> weights{"weights"}; // (j, p, r)
    Input<Buffer<>> value{"value"};             // (c, j)
    Input<Buffer<float, 1>> row_sum{"row_sum"};
    Input<int32_t> num_keys{"num_keys"};
    Output<Buffer<float, 2>> out{"out"}; // (c, r)

    void configure() {
        value.set_type(kv_type);
        value.set_dimensions(2);
    }
    void generate() {
        const int v = lanes(), w = panel;
        RDom t(0, w, 0, weights.dim(1).extent(), "t");
        Accumulation o =
            matmul("product", {c, r}, t, weights(t.x, t.y, r), cast<float>(value(c, min(t.y * w + t.x, num_keys - 1))));
        inverse(r) = select(row_sum(r) > 0.0f, 1.0f / row_sum(r), 0.0f);
        out(c, r) = o.acc(c, r) * inverse(r);

        promise_scores(weights, panel, q);
        value.dim(0).set_min(0).set_stride(1);
        value.dim(1).set_min(0);
        out.dim(0).set_min(0).set_stride(1);
        out.dim(1).set_bounds(0, int(q));
        row_sum.dim(0).set_bounds(0, int(q)).set_stride(1);
        inverse.compute_root().store_in(MemoryType::Stack).bound(r, 0, int(q));
        Func f = out;
        if (dv) f.bound(c, 0, int(dv));
        f.bound(r, 0, int(q)).split(c, co, ci, v * int(vectors), TailStrategy::RoundUp).split(r, ro, ri, rows);
        f.reorder(ci, ri, ro, co).vectorize(ci, v).unroll(ci).unroll(ri);
        o.acc.compute_at(f, ro).vectorize(c, v).unroll(c).unroll(r);
        o.acc.update().reorder(c, r, t.x, t.y).vectorize(c, v).unroll(c).unroll(r);
    }

  private:
    Func inverse{"inverse"};
};

} // namespace attune_gen

HALIDE_REGISTER_GENERATOR(attune_gen::StagewiseScore, stagewise_score)
HALIDE_REGISTER_GENERATOR(attune_gen::StagewiseMask, stagewise_mask)
HALIDE_REGISTER_GENERATOR(attune_gen::StagewiseSoftmax, stagewise_softmax)
HALIDE_REGISTER_GENERATOR(attune_gen::StagewiseMatmul, stagewise_matmul)

ATTUNE_SPACE(stagewise, attune_gen::Space("stagewise")
                            .phase("pack", "pack_keys")
                            .phase("score", "stagewise_score")
                            .phase("mask", "stagewise_mask")
                            .phase("softmax", "stagewise_softmax")
                            .phase("matmul", "stagewise_matmul")
                            .knob("q", "q", {8, 12, 16, 24, 32, 48}, 24)
                            .knob("panel", "p", {8, 16, 32, 48, 64}, 32)
                            .knob("score.rows", "s", {2, 3, 4, 6, 8, 12}, 12)
                            .knob("matmul.rows", "m", {1, 2, 3, 4, 6, 8, 12, 24}, 6)
                            .knob("matmul.vectors", "c", {1, 2, 3, 4, 5, 6, 8}, 4)
                            .same("k", "panel")
                            .quadratic()
                            .require("all scores of a head fit into L2",
                                     [](const auto &, const auto &s) { return 4 * s.rows * s.keys <= s.l2; })
                            .register_tiles("score.rows", "matmul.rows", "matmul.vectors"))
