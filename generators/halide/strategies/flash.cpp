// flash: one pass over key blocks, O(tile) memory.
//
//   for each key block kb:  S = Q K^T (block), M_kb = row maximum, P = 2^(S - M_kb), L_kb = row sum, O_kb = P V
//                           (m, l, O) = merge((m, l, O), (M_kb, L_kb, O_kb))
//
// The softmax is local to the block, so that the only state carried from block to block is that of the merge: a Tuple
// of dv/lanes vector chunks, m and l, updated over the key blocks, with everything else computed inside the loop over
// them. An update runs through its whole reduction domain before the next one starts, hence two chains: whole blocks
// without any mask, clamp or bound (a mask on every score costs 7 %), then the blocks at the edges of the visible range
// and, when a mask or a bias is given, all of them. An edge block computes only the panels of keys that some row sees.
//
// In bf16 (`pairs`) the two matmuls take pairs; scores, softmax and the state are f32 as ever. Q and K are multiplied
// as they are, and the scale comes in where a factor is due anyway: in the exponent, of a whole block.
#include "phases.h"
#include "space.h"
#include "stages/matmul.h"
#include "stages/merge.h"
#include "stages/scaled_score.h"
#include "stages/softmax.h"

#include <algorithm>

namespace attune_gen {

class FlashAttend : public AttendPhase<FlashAttend> {
  public:
    // Register tiles, in rows x vectors: 12 x 2 and 6 x 4 make 24 accumulators of the 32 registers of AVX-512, the rest
    // holds operands; 14 x 2 and 7 x 4 spill (10 % slower). The vectors of the score tile are those of a panel.
    GeneratorParam<int> qk_rows{"qk_rows", 12};
    GeneratorParam<int> pv_rows{"pv_rows", 6}, pv_vectors{"pv_vectors", 4};

    void generate() {
        const int k = this->k, panel = this->panel, panels = k / panel;
        const RowTensors rows = row_tensors();
        const Expr num_panels = key.dim(2).extent();

        auto chain = [&](const std::string &name, bool edge) {
            const Expr block = kb * k;
            Expr first, limit; // panels of the block that matter
            if (edge) first = max(begin - block, 0) / panel, limit = (min(end - block, k) + panel - 1) / panel;
            Chain x;
            x.score = scaled_score(
                name + "_score", {j, p, r, kb}, dk_extent(),
                [&](const Expr &d) {
                    const Expr at = panel_at(kb * panels + p);
                    return factor(key(j, d, edge ? min(at, num_panels - 1) : at));
                },
                [&](const Expr &d) { return query(d, r); });
            const Expr s = x.score.acc(j, p, r, kb);
            const Expr slot = kb * panels + p;
            x.masked = Func(name + "_masked");
            x.masked(j, p, r, kb) = edge ? masked_score(rows, scaled(s), j, panel_at(slot), r, slot) : s;
            RDom strip(0, panels, name + "_panels");
            if (edge) strip.where(strip.x >= first && strip.x < limit);
            RDom exact;
            if (pairs) exact = RDom(0, panels, name + "_exact");
            if (pairs && edge) exact.where(exact.x >= first && exact.x < limit);
            x.softmax = softmax(
                name, x.masked, {j, p, r, kb}, panel, strip,
                edge    ? Expr(unit)
                : pairs ? Expr(scale)
                        : Expr(),
                [&](const Expr &s, const Expr &w) { return edge ? select(is_visible(s), w, 0.0f) : w; },
                exp2_nonpositive, exact, pairs && !edge);
            const Func maximum = x.softmax.max;
            x.max = [this, edge, maximum](const Expr &r, const Expr &kb) {
                return edge ? Expr(maximum(r, kb)) : scaled(maximum(r, kb));
            };
            const int terms = per_term(panel);
            RDom t(0, terms, 0, panels, name + "_t");
            if (edge) t.where(t.y >= first && t.y < limit);
            const Expr term = panel_at(kb * panels + t.y) * terms + t.x;
            x.product = matmul(name + "_product", {c, r, kb}, t,
                               pairs ? x.softmax.pair_at(t.x, {t.y, r, kb}) : x.softmax.weight(t.x, t.y, r, kb),
                               factor(value(c, edge && !pairs ? safe_key(rows, term) : term))); // pairs are padded
            x.tile = Func(name + "_tile");
            x.tile(c, r, kb) = x.product.acc(c, r, kb);
            return x;
        };
        Chain whole = chain("whole", false), edge = chain("edge", true);

        // Whole blocks are [whole_begin, whole_end); the edges are what is left of [first_block, last_block) on either
        // side.
        const Expr first_block = begin / k, last_block = (end + k - 1) / k;
        const Expr whole_begin = (full_begin + k - 1) / k, whole_end = max(full_end / k, whole_begin);
        const Expr front = whole_begin - first_block;
        RDom whole_dom(whole_begin, whole_end - whole_begin, "whole");
        RDom edge_dom(0, front + last_block - whole_end, "edge");
        const Expr edge_block = select(edge_dom.x < front, first_block + edge_dom.x, whole_end + edge_dom.x - front);

        if (dv)
            merge_fixed(whole, edge, whole_dom, edge_dom, edge_block);
        else
            merge_any(whole, edge, whole_dom, edge_dom, edge_block);

        promise_layout();
        merged.compute_root();
        schedule(whole, whole_dom.x, false);
        schedule(edge, edge_dom.x, true);
        specialize_for_tensors(edge.masked, rows);
    }

  private:
    struct Chain {
        Accumulation score, product;
        Func masked, tile;
        Softmax softmax;
        std::function<Expr(Expr r, Expr kb)> max; // the row maximum in the units of the state
    };
    Var j{"j"}, p{"p"}, r{"r"}, c{"c"}, kb{"kb"}, e{"e"};
    Var jo{"jo"}, ji{"ji"}, ro{"ro"}, ri{"ri"}, co{"co"}, ci{"ci"};
    Func merged{"merged"}, inverse{"inverse"}, sum{"sum"}, exact_total{"exact_total"};

    // The merge state for a given dv: lane e of chunk x is feature x * lanes + e; m and l are the same in all lanes.
    // With pairs there are two l, of the rounded weights and of the exact ones, each the sum of its lanes: no block has
    // to add these up.
    void merge_fixed(const Chain &whole, const Chain &edge, const RDom &whole_dom, const RDom &edge_dom,
                     const Expr &edge_block) {
        const int v = lanes(), chunks = dv / v, q = this->q;
        std::vector<Expr> state(chunks, 0.0f);
        state.push_back(kInvisible);
        state.push_back(0.0f);
        if (pairs) state.push_back(0.0f);
        merged(e, r) = Tuple(state);
        auto merge = [&](const Chain &x, const Expr &block, const Expr &u) {
            const FuncRef old = merged(e, r);
            const Merged m = merge_maxima(old[chunks], x.max(r, block), u);
            for (int i = 0; i < chunks; i++) state[i] = old[i] * m.keep + x.tile(e + i * v, r, block) * m.add;
            state[chunks] = m.max;
            const auto lanes_of = [&](const Func &f, int n) {
                Expr sum = f(e, r, block);
                for (int i = v; i < n; i += v) sum += f(e + i, r, block);
                return sum;
            };
            const Expr l = pairs ? lanes_of(x.softmax.lane_sum, panel / 2) : Expr(x.softmax.sum(r, block));
            state[chunks + 1] = old[chunks + 1] * m.keep + l * m.add;
            // Where nobody asks for it, its stage is skipped.
            if (pairs)
                state[chunks + 2] =
                    old[chunks + 2] * m.keep + select(exact_sum, lanes_of(x.softmax.exact_lanes, panel), 0.0f) * m.add;
            merged(e, r) = Tuple(state);
        };
        merge(whole, whole_dom.x, Expr());
        merge(edge, edge_block, unit);

        Expr l = merged(0, r)[chunks + 1];
        if (pairs) {
            RDom lane(0, v, "lane");
            for (auto [f, part] : {std::pair{&sum, chunks + 1}, {&exact_total, chunks + 2}}) {
                (*f)(r) = 0.0f;
                (*f)(r) += merged(lane, r)[part];
                f->compute_root().store_in(MemoryType::Stack).bound(r, 0, q).update().atomic().vectorize(lane);
            }
            l = sum(r);
        }
        inverse(r) = select(l > 0.0f, 1.0f / l, 0.0f);
        Expr o = merged(c % v, r)[0];
        for (int i = 1; i < chunks; i++) o = select(c / v == i, merged(c % v, r)[i], o);
        out(c, r) = o * inverse(r);
        row_max(r) = merged(0, r)[chunks];
        row_sum(r) = pairs ? select(exact_sum, exact_total(r), l) : l;

        merged.store_in(MemoryType::Stack).bound(e, 0, v).bound(r, 0, q).vectorize(e);
        merged.update(0).reorder(e, r, whole_dom.x).vectorize(e);
        merged.update(1).reorder(e, r, edge_dom.x).vectorize(e);
        inverse.compute_root().store_in(MemoryType::Stack).bound(r, 0, q);
        Func o_func = out;
        o_func.bound(c, 0, dv).bound(r, 0, q).split(c, co, ci, v).vectorize(ci).unroll(co);
    }

    // The same for a dv that is known at run time only: the outputs are the state, m and l stand beside every feature.
    // The factors of a merge are computed for each vector of features, which is why a given dv is faster.
    void merge_any(const Chain &whole, const Chain &edge, const RDom &whole_dom, const RDom &edge_dom,
                   const Expr &edge_block) {
        const int v = lanes(), q = this->q;
        merged(c, r) = Tuple(0.0f, kInvisible, 0.0f);
        auto merge = [&](const Chain &x, const Expr &block, const Expr &u) {
            const FuncRef old = merged(c, r);
            const Merged m = merge_maxima(old[1], x.softmax.max(r, block), u);
            merged(c, r) = Tuple(old[0] * m.keep + x.tile(c, r, block) * m.add, m.max,
                                 old[2] * m.keep + x.softmax.sum(r, block) * m.add);
        };
        merge(whole, whole_dom.x, Expr());
        merge(edge, edge_block, unit);
        out(c, r) = merged(c, r)[0];
        row_max(c, r) = merged(c, r)[1];
        row_sum(c, r) = merged(c, r)[2];
        merged.bound(r, 0, q).vectorize(c, v, TailStrategy::RoundUp);
        merged.update(0).reorder(c, r, whole_dom.x).vectorize(c, v, TailStrategy::RoundUp);
        merged.update(1).reorder(c, r, edge_dom.x).vectorize(c, v, TailStrategy::RoundUp);
        for (Func f : {Func(out), Func(row_max), Func(row_sum)}) f.vectorize(c, v, TailStrategy::RoundUp);
    }

    void schedule(Chain &x, const RVar &blocks, bool edge) {
        const int v = lanes(), dv = this->dv, q = this->q, panel = this->panel, panels = this->k / panel;
        const int qk_rows = this->qk_rows, pv_rows = this->pv_rows, pv_vectors = this->pv_vectors;
        auto in_block = [&](Func f) {
            return f.compute_at(merged, blocks).store_in(MemoryType::Stack).bound_extent(kb, 1);
        };
        // A block's scores lie panel by panel, rows within: a row stride of the whole block would put all rows of a
        // tile into the same L1 set when k is a power of two.
        auto panelled = [&](Func f) {
            in_block(f).bound(j, 0, panel).bound(r, 0, q);
            if (pairs)
                f.reorder_storage(j, p, r, kb);
            else
                f.reorder_storage(j, r, p, kb);
            if (edge)
                f.bound_storage(p, panels);
            else
                f.bound_extent(p, panels);
        };
        // The accumulators of the two matmuls are Funcs of their own, computed at the register tile and copied out
        // once: 20 -> 99 GFLOP/s against updating the block in memory.
        panelled(x.masked);
        x.masked.split(r, ro, ri, qk_rows).reorder(j, ri, ro, p).vectorize(j, v).unroll(j).unroll(ri);
        x.score.acc.compute_at(x.masked, ro).vectorize(j, v).unroll(j).unroll(r);
        x.score.acc.update().reorder(j, r, x.score.dom.x).vectorize(j, v).unroll(j).unroll(r);

        Softmax &s = x.softmax;
        panelled(s.weight);
        if (pairs)
            s.weight.reorder(j, p, r).vectorize(j, 2 * v).unroll(j);
        else
            s.weight.reorder(j, r, p).vectorize(j, v).unroll(j);
        in_block(s.lane_max).bound(s.lane, 0, panel).bound(r, 0, q);
        in_block(s.lane_sum).bound(s.lane, 0, per_term(panel)).bound(r, 0, q);
        for (Func f : {s.max, s.sum}) in_block(f).bound(r, 0, q);
        if (pairs) in_block(s.exact_lanes).bound(s.lane, 0, panel).bound(r, 0, q), in_block(s.exact).bound(r, 0, q);
        schedule_rows(s, r, v);
        if (pairs) s.exact_weight.compute_at(s.exact_lanes, s.exact_panels.x).vectorize(s.key, v).unroll(s.key);

        in_block(x.tile).bound(r, 0, q);
        if (dv) x.tile.bound(c, 0, dv);
        x.tile.split(c, co, ci, v * pv_vectors, TailStrategy::RoundUp).split(r, ro, ri, pv_rows);
        x.tile.reorder(ci, ri, ro, co).vectorize(ci, v).unroll(ci).unroll(ri);
        x.product.acc.compute_at(x.tile, ro).vectorize(c, v).unroll(c).unroll(r);
        x.product.acc.update().reorder(c, r, x.product.dom.x, x.product.dom.y).vectorize(c, v).unroll(c).unroll(r);
    }
};

} // namespace attune_gen

HALIDE_REGISTER_GENERATOR(attune_gen::FlashAttend, flash_attend)

ATTUNE_SPACE(flash,
             attune_gen::Space("flash")
                 .phase("pack", "pack_keys")
                 .phase("main", "flash_attend")
                 .knob("q", "q", {4, 8, 12, 16, 24, 32, 48, 64, 96}, 24)
                 .knob("k", "k", {64, 96, 128, 192, 256, 384, 512, 768}, 192)
                 .knob("panel", "p", {8, 16, 32, 48, 64}, 32)
                 .knob("qk_rows", "s", {2, 3, 4, 6, 8, 12}, 12)
                 .knob("pv_rows", "m", {1, 2, 3, 4, 6, 8, 12, 24}, 6)
                 .knob("pv_vectors", "c", {1, 2, 3, 4, 5, 6, 8}, 4)
                 .register_tiles("qk_rows", "pv_rows", "pv_vectors")
                 .require("a key block is whole panels, two at least",
                          [](const auto &x, const auto &) { return x["k"] % x["panel"] == 0 && x["k"] > x["panel"]; })
                 .require("no longer than the keys are",
                          [](const auto &x, const auto &s) { return x["k"] <= std::max<int64_t>(s.keys, 192); })
                 .require("scores and weights of a block fit into half of L2",
                          [](const auto &x, const auto &s) { return 8 * x["q"] * x["k"] <= s.l2 / 2; }))
