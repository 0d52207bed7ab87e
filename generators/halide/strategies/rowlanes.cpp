// rowlanes: the lanes of a vector are query rows, and K and V are read one scalar at a time: small heads.
//
//   S(r, j) = Q(r) . K(j) for all keys, M = maximum, P = 2^(S - M), L = sum, O = P V / L, each for q rows at once
//
// With few features there is nothing to gain from keys or features in lanes: a panel of 32 keys padded with zeros, a V
// padded to whole vectors and their packing cost more than the problem (n 16, d 2: 1.46 us a head by flash, of which
// 0.2 us are arithmetic). Here nothing is packed, nothing padded but rows, and no reduction is horizontal.
#include "phases.h"
#include "stages/matmul.h"
#include "stages/scaled_score.h"

namespace attune_gen {

class RowlanesAttend : public AttendPhase<RowlanesAttend> {
  public:
    void generate() {
        const int v = lanes(), q = this->q, k = this->k;
        const RowTensors rows = row_tensors();
        const Expr first = begin / k, last = (end + k - 1) / k, count = last - first;
        const Expr dk_real = key.dim(0).extent(), dv_real = value.dim(0).extent();

        lane_query(r, d) = query(d, r);
        Accumulation score = scaled_score(
            "score", {r, j, p}, dk_real, [&](const Expr &d) { return cast<float>(key(d, safe_key(rows, p * k + j))); },
            [&](const Expr &d) { return lane_query(r, d); });
        raw(r, j, p) = score.acc(r, j, p);
        masked(r, j, p) = masked_score(rows, raw(r, j, p), j, p, r, p);

        // Nobody has looked at K, and a maximum may drop a NaN: the largest magnitude among the scores, as an integer,
        // tells.
        RDom all(0, k, first, count, "all");
        const Expr s = masked(r, all.x, all.y);
        largest(r) = 0;
        largest(r) = max(largest(r), reinterpret<int>(raw(r, all.x, all.y)) & 0x7fffffff);
        maximum(r) = kInvisible;
        maximum(r) = max(maximum(r), s);
        weight(r, j, p) =
            select(is_visible(masked(r, j, p)), exp2_nonpositive((masked(r, j, p) - maximum(r)) * unit), 0.0f);
        sum(r) = 0.0f;
        sum(r) += weight(r, all.x, all.y);
        inverse(r) = select(sum(r) > 0.0f, 1.0f / sum(r), 0.0f);

        RDom t(0, k, first, count, "t");
        Accumulation product =
            matmul("product", {r, c}, t, weight(r, t.x, t.y), cast<float>(value(c, safe_key(rows, t.y * k + t.x))));
        lane_out(r, c) = product.acc(r, c) * inverse(r);
        RDom feature(0, dv_real, "feature");
        out(c, r) = undef<float>(); // nobody reads features that are not there
        out(feature, r) = lane_out(r, feature);
        row_max(r) = maximum(r);
        // A NaN sum is how the runtime learns of it.
        row_sum(r) = reinterpret<float>(select(largest(r) >= 0x7f800000, 0x7fc00000, reinterpret<int>(sum(r))));

        promise_layout();
        lane_query.compute_root().store_in(MemoryType::Stack).bound(r, 0, q).bound_storage(d, kMaxFeatures);
        lane_query.reorder(r, d).vectorize(r, v);
        for (Func f : {raw, masked, weight})
            f.compute_root()
                .bound(r, 0, q)
                .bound(j, 0, k)
                .bound(p, first, count)
                .reorder(r, j, p)
                .vectorize(r, v)
                .unroll(r);
        score.acc.compute_at(raw, j).vectorize(r, v).unroll(r);
        score.acc.update().reorder(r, score.dom.x).vectorize(r, v).unroll(r);
        specialize_for_tensors(masked, rows);
        for (Func f : {largest, maximum, sum}) {
            f.compute_root().store_in(MemoryType::Stack).bound(r, 0, q).vectorize(r, v);
            f.update().reorder(r, all.x, all.y).vectorize(r, v).unroll(r);
        }
        inverse.compute_root().store_in(MemoryType::Stack).bound(r, 0, q).vectorize(r, v);
        lane_out.compute_root().store_in(MemoryType::Stack).bound(r, 0, q).bound_storage(c, kMaxFeatures);
        lane_out.reorder(r, c).vectorize(r, v).unroll(r);
        product.acc.compute_at(lane_out, c).vectorize(r, v).unroll(r);
        product.acc.update().reorder(r, t.x, t.y).vectorize(r, v).unroll(r);
        Func o = out;
        o.bound(r, 0, q).bound(c, 0, int(dv)).update().reorder(feature, r);
    }

  private:
    static constexpr int kMaxFeatures = 8; // the catalogue's limit
    Var r{"r"}, j{"j"}, p{"p"}, d{"d"}, c{"c"};
    Func lane_query{"lane_query"}, raw{"raw"}, masked{"masked"}, weight{"weight"}, largest{"largest"},
        maximum{"maximum"};
    Func sum{"sum"}, inverse{"inverse"}, lane_out{"lane_out"};
};

} // namespace attune_gen

HALIDE_REGISTER_GENERATOR(attune_gen::RowlanesAttend, rowlanes_attend)
