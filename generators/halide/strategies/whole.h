// The literal algorithm for a whole batch element: every head, every row, with Halide's plain reductions. What auto_*
// and the steps of the ladder schedule.
#pragma once

#include "phases.h"
#include "stages/matmul.h"
#include "stages/scaled_score.h"

namespace attune_gen {

template <typename Self> class WholePhase : public Generator<Self> {
  public:
    template <typename T> using Param = GeneratorParam<T>;
    template <typename T> using In = GeneratorInput<T>;
    template <typename T> using Out = GeneratorOutput<T>;

    Param<Type> kv_type{"kv_type", Float(32)};
    Param<int> dk{"dk", 64}, dv{"dv", 64}, q{"q", 1}, k{"k", 1};

    In<Buffer<float, 3>> query{"query"};                          // (d, n, h)
    In<Buffer<>> key{"key"}, value{"value"};                      // (d, m, h of kv), (c, m, h of kv)
    In<Buffer<int32_t, 1>> lo{"lo"}, hi{"hi"};                    // (n): row n sees the keys lo <= j < hi
    In<float> scale{"scale"};                                     // times log2 e
    In<int32_t> group{"group"};                                   // query heads of a kv head
    Out<Buffer<float, 3>> out{"out"};                             // (c, n, h)
    Out<Buffer<float, 2>> row_max{"row_max"}, row_sum{"row_sum"}; // (n, h)

    void configure() {
        for (auto *b : {&key, &value}) b->set_type(kv_type), b->set_dimensions(3);
    }

  protected:
    Var j{"j"}, n{"n"}, h{"h"}, c{"c"}, d{"d"};
    Func keys{"keys"}, score, masked{"masked"}, maximum{"maximum"}, weight{"weight"}, sum{"sum"}, product,
        inverse{"inverse"};
    RDom features, max_keys, sum_keys, product_keys;

    void define() {
        const Expr m = key.dim(1).extent();
        max_keys = RDom(0, m, "m"), sum_keys = RDom(0, m, "s"), product_keys = RDom(0, m, "t");
        keys(j, d, h) = cast<float>(key(d, j, h));
        Accumulation s = scaled_score(
            "score", {j, n, h}, Expr(int(dk)), [&](const Expr &x) { return keys(j, x, h / group); },
            [&](const Expr &x) { return query(x, n, h); });
        score = s.acc, features = s.dom;
        masked(j, n, h) = select(j >= lo(n) && j < hi(n), max(score(j, n, h) * scale, kLowestVisible), kInvisible);
        maximum(n, h) = kInvisible;
        maximum(n, h) = max(maximum(n, h), masked(max_keys, n, h));
        weight(j, n, h) = select(is_visible(masked(j, n, h)), exp2_nonpositive(masked(j, n, h) - maximum(n, h)), 0.0f);
        sum(n, h) = 0.0f;
        sum(n, h) += weight(sum_keys, n, h);
        product = matmul("product", {c, n, h}, product_keys, weight(product_keys, n, h),
                         cast<float>(value(c, product_keys, h / group)))
                      .acc;
        inverse(n, h) = select(sum(n, h) > 0.0f, 1.0f / sum(n, h), 0.0f);
        out(c, n, h) = product(c, n, h) * inverse(n, h);
        row_max(n, h) = maximum(n, h);
        row_sum(n, h) = sum(n, h);
    }

    void promise_layout() {
        query.dim(0).set_bounds(0, int(dk));
        key.dim(0).set_bounds(0, int(dk));
        value.dim(0).set_bounds(0, int(dv));
        out.dim(0).set_bounds(0, int(dv));
        for (int i : {1, 2}) {
            query.dim(i).set_min(0), key.dim(i).set_min(0), value.dim(i).set_min(0), out.dim(i).set_min(0);
            row_max.dim(i - 1).set_min(0), row_sum.dim(i - 1).set_min(0);
        }
        row_max.dim(0).set_stride(1), row_sum.dim(0).set_stride(1);
        lo.dim(0).set_min(0), hi.dim(0).set_min(0);
    }
};

} // namespace attune_gen
