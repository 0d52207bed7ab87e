// gpu_split_kv: few query rows against many keys (decode) on a GPU. The key axis is split into parts of split_keys; a
// workgroup takes a row and a part, a second launch merges the parts of a row.
//
//   partial: S = Q K^T, M = max S, P = 2^(S - M), L = sum P, O = P V      for each part
//   merge:   (m, l, O) = merge of the parts' (M, L, O), then O / l
//
// With a row or two the work is to read K and V once. All threads of a workgroup read along rows of K and of V, TX
// of them a row in groups of 4 features, so that a warp reads whole lines; a key that is not seen reads a line that
// is read anyway.
#include "gpu_phases.h"
#include "stages/matmul.h"

namespace attune_gen {

class GpuPartial : public GpuPhase<GpuPartial> {
  public:
    GeneratorParam<int> split_keys{"split_keys", 256}, ty{"ty", 16}, unroll_k{"unroll_k", 4};
    GeneratorParam<int> folds{"folds", 16}; // keys of a row maximum and sum that a thread folds
    Out<Buffer<float, 5>> parts{"parts"};   // (c, s, i, h, b): O, then maximum and sum, of part s

    void generate() {
        const int D = dk, CH = split_keys, TY = ty, TX = D / kWidth, NT = TX * TY, G = folds, NG = CH / G;
        const std::vector<Var> at{s, i, h, b};
        const auto with = [&](std::vector<Var> front) {
            front.insert(front.end(), at.begin(), at.end());
            return front;
        };
        const Expr key = s * CH + j, seen_first = first_key(i, b), seen_end = clamp(end_key(i, b), 0, num_keys);
        const auto near = [&](const Expr &k) { return clamp(k, clamp(seen_first, 0, num_keys), max(seen_end, 1) - 1); };

        // Scores: partial sums over 4 features of each thread, then over the threads of a key.
        Expr sum = 0.0f;
        for (int n = 0; n < kWidth; n++)
            sum += query_at(x * kWidth + n, i, h, b) * key_at(x * kWidth + n, near(key), h, b);
        dots(with({x, j})) = sum;
        sum = 0.0f;
        for (int n = 0; n < TX; n++) sum += dots(n, j, s, i, h, b);
        scores(with({j})) = select(use_extras(b), full_score(sum, key, i, h, b), edge_score(sum, key, i, b));

        // Maximum and sum: of groups of keys, then of the groups.
        Expr most = scores(u, s, i, h, b);
        for (int n = 1; n < G; n++) most = max(most, scores(u + n * NG, s, i, h, b));
        part_max(with({u})) = most;
        most = part_max(0, s, i, h, b);
        for (int n = 1; n < NG; n++) most = max(most, part_max(n, s, i, h, b));
        maximum(at) = most;
        const Expr score = scores(j, s, i, h, b);
        weights(with({j})) = select(is_visible(score), exp2_device((score - maximum(s, i, h, b)) * unit), 0.0f);
        Expr total = weights(u, s, i, h, b);
        for (int n = 1; n < G; n++) total += weights(u + n * NG, s, i, h, b);
        part_sum(with({u})) = total;

        // P V: each row of threads has every TY-th key.
        RDom t(0, CH / TY, "t");
        const Expr mine = t.x * TY + y, weight = weights(mine, s, i, h, b);
        product = matmul("product", with({c, y}), t, weight,
                         select(weight == 0.0f, 0.0f, value_at(c, near(s * CH + mine), h, b)));
        products(with({c, y})) = product.acc(with_expr(c, y));
        Expr o = products(clamp(c, 0, D - 1), 0, s, i, h, b), l = part_sum(0, s, i, h, b);
        for (int n = 1; n < TY; n++) o += products(clamp(c, 0, D - 1), n, s, i, h, b);
        for (int n = 1; n < NG; n++) l += part_sum(n, s, i, h, b);
        parts(c, s, i, h, b) = select(c < D, o, c == D, maximum(s, i, h, b), l);

        promise_inputs();
        for (int n = 0; n < 5; n++) parts.dim(n).set_min(0);
        Var co("co"), ct("ct"), jo("jo"), ji("ji"), ci("ci"), block("block");
        Func out = parts;
        const int width = std::min(NT, (D + 2 + TX - 1) / TX * TX);
        out.bound(c, 0, D + 2).split(c, co, ct, width, TailStrategy::GuardWithIf).split(ct, y, x, TX);
        out.reorder(x, y, co, i, s, h, b).fuse(h, b, block).gpu_blocks(i, s, block).gpu_threads(x, y);
        const auto shared = [&](Func f) {
            f.compute_at(out, i).store_in(MemoryType::GPUShared);
            for (const Var &v : {i, h, b}) f.bound_extent(v, 1);
            f.bound_extent(s, 1);
        };
        shared(dots);
        dots.bound_extent(x, TX).bound_extent(j, CH).align_storage(x, TX + 1).split(j, jo, ji, TY);
        dots.reorder(jo, x, ji).unroll(jo, int(unroll_k)).gpu_threads(x, ji);
        const auto flat = [&](Func f, const Var &v, int n) { // n elements by all threads
            shared(f);
            Var vo("vo"), vt("vt"), vi("vi");
            f.bound_extent(v, n);
            if (n > NT) f.split(v, vo, v, NT).reorder(v, vo).unroll(vo).reorder(vo, v);
            if (n > TX)
                f.split(v, vt, vi, TX).gpu_threads(vi, vt);
            else
                f.gpu_threads(v);
        };
        flat(scores, j, CH);
        flat(part_max, u, NG);
        flat(weights, j, CH);
        flat(part_sum, u, NG);
        shared(maximum);
        shared(products);
        products.bound_extent(c, D).bound_extent(y, TY).split(c, x, ci, kWidth).unroll(ci).gpu_threads(x, y);
        product.acc.compute_at(products, x).bound_extent(c, kWidth).unroll(c);
        product.acc.update().reorder(c, t.x).unroll(c).unroll(t.x, int(unroll_k));
    }

  private:
    static constexpr int kWidth = 4;
    Var s{"s"}, x{"x"}, y{"y"}, u{"u"};
    Func dots{"dots"}, scores{"scores"}, part_max{"part_max"}, maximum{"maximum"}, weights{"weights"},
        part_sum{"part_sum"}, products{"products"};
    Accumulation product;

    std::vector<Expr> with_expr(const Var &first, const Var &second) { return {first, second, s, i, h, b}; }
};

class GpuMerge : public GpuPhase<GpuMerge> {
  public:
    GeneratorParam<int> split_keys{"split_keys", 256}, ty{"ty", 16}, unroll_k{"unroll_k", 4}, folds{"folds", 16};
    In<Buffer<float, 5>> parts{"parts"}; // (c, s, i, h, b)
    Out<Func> out{"out", 4};             // (c, i, h, b): O, bits of LSE

    void generate() {
        const int D = dv;
        const Expr row = clamp(i, 0, rows - 1), splits = parts.dim(1).extent();
        RDom r(0, splits, "r");
        const auto part = [&](const Expr &c, const RVar &s) { return parts(c, s, row, h, b); };
        // The state of a thread: one element of O, and m and l besides.
        state(c, i, h, b) = Tuple(0.0f, kInvisible, 0.0f);
        const FuncRef old = state(c, i, h, b);
        const Merged m = merge(old[1], part(D, r.x));
        state(c, i, h, b) = Tuple(old[0] * m.keep + part(clamp(c, 0, D - 1), r.x) * m.add, m.max,
                                  old[2] * m.keep + part(D + 1, r.x) * m.add);
        const RowEnd end = finish_row(state(c, i, h, b)[1], state(c, i, h, b)[2], h);
        result(c, i, h, b) = Tuple(store(state(c, i, h, b)[0] * end.factor), end.lse);
        out = result;

        promise_inputs();
        promise_outputs(result);
        for (int n = 0; n < 5; n++) parts.dim(n).set_min(0);
        Var co("co"), ci("ci");
        result.split(c, co, ci, 32, TailStrategy::GuardWithIf).fuse(h, b, h).reorder(ci, i, co, h);
        result.gpu_blocks(i, co, h).gpu_threads(ci);
        state.compute_at(result, ci);
    }

  private:
    Func state{"state"}, result{"result"};
};

} // namespace attune_gen

HALIDE_REGISTER_GENERATOR(attune_gen::GpuPartial, gpu_partial)
HALIDE_REGISTER_GENERATOR(attune_gen::GpuMerge, gpu_merge)
