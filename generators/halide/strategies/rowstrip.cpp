// rowstrip: a tile of query rows against all of its keys at once; the strip of scores (q * M floats) stays in L2.
//
//   S = Q K^T (strip), mask on the panels at the edges, M = row maximum, P = 2^(S - M), L = row sum, O = P V / L
//
// The plain definition, tile by tile: nothing is merged or rescaled, which makes it the most exact of the fused
// strategies, and the fastest as long as the strip fits (24 rows x 1024 keys: 96 KiB for S and as much for P).
#include "phases.h"
#include "space.h"
#include "stages/matmul.h"
#include "stages/scaled_score.h"
#include "stages/softmax.h"

#include <algorithm>

namespace attune_gen {

class RowstripAttend : public AttendPhase<RowstripAttend> {
  public:
    // Register tiles, in rows x vectors: as in flash.
    GeneratorParam<int> qk_rows{"qk_rows", 12};
    GeneratorParam<int> pv_rows{"pv_rows", 6}, pv_vectors{"pv_vectors", 4};
    GeneratorParam<bool> registers{"registers", true}; // false: sums are updated in memory (the ladder's fourth step)

    void generate() {
        const int v = lanes(), q = this->q, panel = this->panel;
        const RowTensors rows = row_tensors();
        // Panels that some row sees, and of these the ones that need the mask: those outside [whole_first, whole_last).
        const Expr first = begin / panel, last = (end + panel - 1) / panel, count = last - first;
        const Expr whole_first = clamp((full_begin + panel - 1) / panel, first, last);
        const Expr whole_last = clamp(full_end / panel, whole_first, last);
        const Expr front = whole_first - first;
        RDom edge(0, front + last - whole_last, "edge");
        const Expr edge_panel = in_slots() ? whole_last + edge.x // loops are parted by it
                                           : select(edge.x < front, first + edge.x, whole_last + edge.x - front);

        Accumulation score = scaled_score(
            "score", {j, p, r}, dk_extent(), [&](const Expr &d) { return cast<float>(key(j, d, panel_at(p))); },
            [&](const Expr &d) { return query(d, r); });
        masked(j, p, r) = score.acc(j, p, r);
        masked(j, edge_panel, r) = masked_score(rows, masked(j, edge_panel, r), j, panel_at(edge_panel), r, edge_panel);

        Softmax soft = softmax("row", masked, {j, p, r}, panel, RDom(first, count, "strip"), unit,
                               [&](const Expr &s, const Expr &w) { return select(is_visible(s), w, 0.0f); });

        RDom t(0, panel, first, count, "t");
        Accumulation product = matmul("product", {c, r}, t, soft.weight(t.x, t.y, r),
                                      cast<float>(value(c, safe_key(rows, panel_at(t.y) * panel + t.x))));
        if (dv) {
            inverse(r) = select(soft.sum(r) > 0.0f, 1.0f / soft.sum(r), 0.0f);
            out(c, r) = product.acc(c, r) * inverse(r);
            row_max(r) = soft.max(r);
            row_sum(r) = soft.sum(r);
            inverse.compute_root().store_in(MemoryType::Stack).bound(r, 0, q);
        } else { // see AttendPhase: not divided, the row state beside every feature
            out(c, r) = product.acc(c, r);
            row_max(c, r) = soft.max(r);
            row_sum(c, r) = soft.sum(r);
            for (Func f : {Func(row_max), Func(row_sum)}) f.vectorize(c, v, TailStrategy::RoundUp);
        }

        promise_layout();
        for (Func f : {masked, soft.weight})
            f.compute_root().bound(j, 0, panel).bound(p, first, count).bound(r, 0, q).reorder_storage(j, r, p);
        masked.split(r, ro, ri, qk_rows).reorder(j, ri, ro, p).vectorize(j, v).unroll(j).unroll(ri);
        if (registers) {
            score.acc.compute_at(masked, ro).vectorize(j, v).unroll(j).unroll(r);
            score.acc.update().reorder(j, r, score.dom.x).vectorize(j, v).unroll(j).unroll(r);
        } else {
            score.acc.compute_at(masked, p).store_in(MemoryType::Heap).vectorize(j, v);
            score.acc.update().split(score.dom.x, to, ti, 8).reorder(ti, j, r, to).vectorize(j, v).unroll(j).unroll(ti);
        }
        masked.update().reorder(j, r, edge.x).vectorize(j, v).unroll(j);
        specialize_for_tensors(masked.update(), rows);
        soft.weight.reorder(j, r, p).vectorize(j, v).unroll(j);
        for (Func f : {soft.lane_max, soft.lane_sum})
            f.compute_root().store_in(MemoryType::Stack).bound(soft.lane, 0, panel).bound(r, 0, q);
        for (Func f : {soft.max, soft.sum}) f.compute_root().store_in(MemoryType::Stack).bound(r, 0, q);
        schedule_rows(soft, r, v);
        Func o = out;
        o.bound(r, 0, q);
        if (dv) o.bound(c, 0, int(dv));
        o.split(c, co, ci, v * int(pv_vectors), TailStrategy::RoundUp).split(r, ro, ri, pv_rows);
        o.reorder(ci, ri, ro, co).vectorize(ci, v).unroll(ci).unroll(ri);
        if (registers) {
            product.acc.compute_at(o, ro).vectorize(c, v).unroll(c).unroll(r);
            product.acc.update().reorder(c, r, t.x, t.y).vectorize(c, v).unroll(c).unroll(r);
        } else {
            product.acc.compute_root().store_in(MemoryType::Heap).bound(c, 0, int(dv)).bound(r, 0, q).vectorize(c, v);
            product.acc.update().split(t.x, to, ti, 8).reorder(ti, c, r, to, t.y).vectorize(c, v).unroll(c).unroll(ti);
        }
    }

  private:
    Var j{"j"}, p{"p"}, r{"r"}, c{"c"}, ro{"ro"}, ri{"ri"}, co{"co"}, ci{"ci"};
    RVar to{"to"}, ti{"ti"};
    Func masked{"masked"}, inverse{"inverse"};
};

} // namespace attune_gen

HALIDE_REGISTER_GENERATOR(attune_gen::RowstripAttend, rowstrip_attend)

// There are no key blocks: k is not a knob.
ATTUNE_SPACE(rowstrip, attune_gen::Space("rowstrip")
                           .phase("pack", "pack_keys")
                           .phase("main", "rowstrip_attend")
                           .knob("q", "q", {4, 8, 12, 16, 24, 32, 48}, 24)
                           .knob("panel", "p", {8, 16, 32, 48, 64}, 32)
                           .knob("qk_rows", "s", {2, 3, 4, 6, 8, 12}, 12)
                           .knob("pv_rows", "m", {1, 2, 3, 4, 6, 8, 12, 24}, 6)
                           .knob("pv_vectors", "c", {1, 2, 3, 4, 5, 6, 8}, 4)
                           .same("k", "panel")
                           .register_tiles("qk_rows", "pv_rows", "pv_vectors")
                           .require("the strips of scores and weights fit into L2", [](const auto &x, const auto &s) {
                               return 8 * x["q"] * (s.keys + x["panel"]) <= s.l2;
                           }))
