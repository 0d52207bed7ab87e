// split_kv: the key axis is split into parts that run in parallel, and their states are merged: decode, and few heads.
//
//   partial: for one part of at most k keys:  S = Q K^T, M, P, L, O = P V / L
//   merge:   over the parts of a row:         m = max m_s, w_s = l_s 2^(m_s - m), O = sum w_s O_s / sum w_s, l = sum
//   w_s
//
// With few rows the work is reading K and V once, so neither is packed. K and V must be touched in strictly sequential
// address order, whole rows after one another: chunk-major order (four rows by eight chunks) reads 13.5 GB/s instead of
// 22, half rows 21 instead of 31, and prefetching loses 20 %. So a score is a dot product along d: one partial sum for
// each lane, all rows of the tile for every row of K (the query heads of a group share it), and 16 keys' lanes are
// transposed and folded together.
//
// In bf16 (`pairs`) the dot product takes pairs of features, and P V pairs of rows of V, interleaved in registers.
#include "phases.h"
#include "space.h"
#include "stages/matmul.h"
#include "stages/merge.h"
#include "stages/softmax.h"

#include <algorithm>

namespace attune_gen {

class SplitKvPartial : public AttendPhase<SplitKvPartial> {
  public:
    void generate() {
        const int v = lanes(), q = this->q, k = this->k, group = 32; // keys are masked and reduced in groups
        RowTensors rows = row_tensors();
        rows.panel = k;
        const Expr first = begin / group, last = (end + group - 1) / group, count = last - first;

        // dots(l, j, p, r) = sum over d = l, l + lanes, … of Q(d, r) K(d, key). The query is zero padded to whole
        // vectors; the last, ragged vector of a row of K is read with clamped indices, so that nothing is read past the
        // end.
        const Expr dk_real = key.dim(0).extent();
        const Expr vector = pairs ? 2 * v : v; // features
        auto k_row = [&](const Expr &d, bool clamped) {
            auto at = [&](const Expr &d) {
                return key(clamped ? min(d, dk_real - 1) : d, safe_key(rows, panel_at(p) * group + j));
            };
            return pairs ? pair(at(2 * d), at(2 * d + 1)) : cast<float>(at(d));
        };
        RDom whole(0, dk ? Expr(per_term(dk) / v) : dk_real / vector, "chunk");
        dots(l, j, p, r) = 0.0f;
        dots(l, j, p, r) = multiply_add(dots(l, j, p, r), k_row(whole * v + l, false), query(whole * v + l, r));
        RDom ragged(0, dk ? Expr(0) : (dk_real + vector - 1) / vector - dk_real / vector, "ragged");
        if (!dk) {
            const Expr d = (dk_real / vector + ragged) * v + l;
            dots(l, j, p, r) = multiply_add(dots(l, j, p, r), k_row(d, true), query(d, r));
        }
        copied(l, j, p, r) = dots(l, j, p, r);
        RDom fold(0, v, "fold");
        score(j, p, r) = 0.0f;
        score(j, p, r) += copied(fold, j, p, r);
        const Expr first_key = panel_at(p) * group;
        masked(j, p, r) = masked_score(rows, scaled(score(j, p, r)), first_key % k + j, first_key / k, r, p);

        // Nobody has looked at K, and a maximum may drop a NaN: the largest magnitude among the scores, as an integer,
        // tells.
        RDom all(first, count, "all");
        magnitude(j, r) = 0;
        magnitude(j, r) = max(magnitude(j, r), reinterpret<int>(score(j, all, r)) & 0x7fffffff);
        RDom keys(0, group, "keys");
        largest(r) = 0;
        largest(r) = max(largest(r), magnitude(keys, r));

        RDom exact;
        if (pairs) exact = RDom(first, select(exact_sum, count, 0), "exact");
        Softmax soft = softmax(
            "row", masked, {j, p, r}, group, RDom(first, count, "strip"), unit,
            [&](const Expr &s, const Expr &w) { return select(is_visible(s), w, 0.0f); }, exp2_nonpositive, exact);
        RDom t(0, per_term(group), first, count, "t");
        const Expr feature =
            dv ? Expr(c) : min(likely(c), value.dim(0).extent() - 1); // the output is padded to whole vectors, V is not
        auto v_at = [&](const Expr &j) { return value(feature, safe_key(rows, panel_at(t.y) * group + j)); };
        Accumulation product =
            pairs ? matmul("product", {c, r}, t, soft.pair_at(t.x, {t.y, r}), pair(v_at(2 * t.x), v_at(2 * t.x + 1)))
                  : matmul("product", {c, r}, t, soft.weight(t.x, t.y, r), cast<float>(v_at(t.x)));
        // A NaN sum is how the runtime learns of it.
        auto told = [&](const Expr &sum) {
            return reinterpret<float>(select(largest(r) >= 0x7f800000, 0x7fc00000, reinterpret<int>(sum)));
        };
        const Expr sum = pairs ? select(exact_sum, soft.exact(r), soft.sum(r)) : Expr(soft.sum(r));
        if (bool(dv) || bool(pairs)) {
            inverse(r) = select(soft.sum(r) > 0.0f, 1.0f / soft.sum(r), 0.0f);
            inverse.compute_root().store_in(MemoryType::Stack).bound(r, 0, q);
        }
        if (dv) {
            out(c, r) = product.acc(c, r) * inverse(r);
            row_max(r) = soft.max(r);
            row_sum(r) = told(sum);
        } else {
            out(c, r) = pairs ? product.acc(c, r) * inverse(r) : Expr(product.acc(c, r));
            row_max(c, r) = soft.max(r);
            row_sum(c, r) = told(sum);
            for (Func f : {Func(row_max), Func(row_sum)}) f.vectorize(c, v, TailStrategy::RoundUp);
        }

        promise_layout();
        for (Func f : {score, masked, soft.weight})
            f.compute_root()
                .bound(j, 0, group)
                .bound(p, first, count)
                .bound(r, 0, q)
                .reorder_storage(j, r, p)
                .bound_storage(p, k / group);
        score.vectorize(j, v);
        score.update().split(j, jo, ji, v).reorder(fold, ji, r, jo, p).atomic().vectorize(fold).vectorize(ji);
        // The copy loop walks key by key: all of a row of K for all rows of the tile.
        copied.compute_at(score, jo)
            .bound(l, 0, v)
            .bound(r, 0, q)
            .bound_extent(j, v)
            .reorder(l, r, j)
            .vectorize(l)
            .unroll(r)
            .unroll(j);
        dots.compute_at(copied, j).bound(l, 0, v).vectorize(l).unroll(r);
        dots.update(0).reorder(l, r, whole).vectorize(l).unroll(r);
        if (dk)
            dots.update(0).unroll(whole);
        else
            dots.update(1).reorder(l, r, ragged).vectorize(l).unroll(r);
        magnitude.compute_root().store_in(MemoryType::Stack).bound(j, 0, group).bound(r, 0, q).vectorize(j, v);
        magnitude.update().reorder(j, all, r).vectorize(j, v).unroll(j);
        largest.compute_root().store_in(MemoryType::Stack).bound(r, 0, q).update().atomic().vectorize(keys);
        masked.reorder(j, r, p).vectorize(j, v).unroll(j);
        specialize_for_tensors(masked, rows);
        const int pair_vector = pairs ? 2 * v : v;
        soft.weight.reorder(j, r, p).vectorize(j, pair_vector).unroll(j);
        auto on_stack = [&](Func f) { return f.compute_root().store_in(MemoryType::Stack).bound(r, 0, q); };
        on_stack(soft.lane_max).bound(soft.lane, 0, group);
        on_stack(soft.lane_sum).bound(soft.lane, 0, per_term(group));
        on_stack(soft.max), on_stack(soft.sum);
        if (pairs) on_stack(soft.exact_lanes).bound(soft.lane, 0, group), on_stack(soft.exact);
        schedule_rows(soft, r, v);
        // All features and all rows for one row of V; where these are more accumulators than registers (d 128, 4 rows:
        // 32), two passes over V would be slower than the spills (26.7 against 30.8 GB/s).
        Func o = out;
        o.bound(r, 0, q);
        if (dv) {
            o.bound(c, 0, int(dv)).vectorize(c, v).unroll(c).unroll(r);
            product.acc.compute_root().store_in(MemoryType::Stack).bound(c, 0, int(dv)).bound(r, 0, q);
            product.acc.vectorize(c, v).unroll(c).unroll(r);
            // Two whole vectors of bf16 become two of pairs.
            product.acc.update().reorder(c, r, t.x, t.y).vectorize(c, pair_vector).unroll(c).unroll(r);
        } else {
            o.reorder(r, c).vectorize(c, v, TailStrategy::RoundUp).unroll(r);
            product.acc.compute_at(o, c).vectorize(c, v).unroll(r);
            product.acc.update().reorder(c, r, t.x, t.y).vectorize(c, v).unroll(r);
        }
    }

  private:
    Var j{"j"}, p{"p"}, r{"r"}, c{"c"}, l{"l"}, jo{"jo"}, ji{"ji"};
    Func magnitude{"magnitude"}, largest{"largest"};
    Func dots{"dots"}, copied{"copied"}, score{"score"}, masked{"masked"}, inverse{"inverse"};
};

// The parts of one row, side by side, become one. Each is divided by its sum already.
class Merge : public Generator<Merge> {
  public:
    Input<Buffer<float, 2>> part_out{"part_out"};                       // (c, s)
    Input<Buffer<float, 1>> part_max{"part_max"}, part_sum{"part_sum"}; // (s)
    Input<float> unit{"unit"};
    Output<Buffer<float, 1>> out{"out"};                             // (c)
    Output<Buffer<float, 1>> row_max{"row_max"}, row_sum{"row_sum"}; // a single value

    void generate() {
        const int v = natural_vector_size(Float(32));
        RDom s(0, part_out.dim(1).extent(), "s");
        maximum() = kInvisible;
        maximum() = max(maximum(), part_max(s));
        // A part without a visible key has m = kInvisible and l = 0: its share is 0 whatever the others are.
        auto share = [&](const Expr &i) { return part_sum(i) * exp2_nonpositive((part_max(i) - maximum()) * unit); };
        sum() = 0.0f;
        sum() += share(s);
        // Shares are divided by their sum first: values near the largest number would overflow otherwise.
        inverse() = select(sum() > 0.0f, 1.0f / sum(), 0.0f);
        acc(c) = 0.0f;
        acc(c) += (share(s) * inverse()) * part_out(c, s);
        out(c) = acc(c);
        row_max(i) = maximum();
        row_sum(i) = sum();

        for (int d : {0, 1}) part_out.dim(d).set_min(0);
        for (auto *b : {&part_max, &part_sum}) b->dim(0).set_min(0).set_stride(1);
        part_out.dim(0).set_stride(1);
        for (auto *b : {&row_max, &row_sum}) b->dim(0).set_bounds(0, 1);
        out.dim(0).set_min(0).set_stride(1);
        Func o = out;
        o.vectorize(c, v, TailStrategy::RoundUp); // dv is padded to whole vectors
        acc.compute_at(o, c).bound_extent(c, v).vectorize(c, v).update().reorder(c, s).vectorize(c, v);
        for (Func f : {maximum, sum, inverse}) f.compute_root();
    }

  private:
    Var c{"c"}, i{"i"};
    Func maximum{"maximum"}, sum{"sum"}, inverse{"inverse"}, acc{"acc"};
};

} // namespace attune_gen

HALIDE_REGISTER_GENERATOR(attune_gen::SplitKvPartial, split_kv_partial)
HALIDE_REGISTER_GENERATOR(attune_gen::Merge, merge)

// Keys are masked and reduced in groups of 32, and a row's lanes folded 16 keys at a time.
ATTUNE_SPACE(split_kv, attune_gen::Space("split_kv")
                           .phase("main", "split_kv_partial")
                           .phase("merge", "merge")
                           .knob("q", "q", {1, 2, 4, 8}, 4)
                           .knob("k", "k", {128, 256, 512, 1024, 2048, 4096}, 1024)
                           .same("split_keys", "k")
                           .fixed("panel", 0)
                           .exact_sizes()
                           .require("few rows for a kv head (16 at most): K and V are read for each tile of rows",
                                    [](const auto &, const auto &s) { return s.rows <= 16; })
                           .require("no more rows than the problem has",
                                    [](const auto &x, const auto &s) { return x["q"] < 2 * s.rows; })
                           .require("no longer than the keys are", [](const auto &x, const auto &s) {
                               return x["k"] <= std::max<int64_t>(s.keys, 128);
                           }))
