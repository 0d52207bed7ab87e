// Adapters of the stages of `stagewise`, and of kernels that do a whole batch element.
#include "task.h"

#include "../strict.h"

#include <cmath>

namespace attune::rt::halide {

// The stages of `stagewise`, each a phase over the tiles of a group. Scores, weights and the state of the rows stay in
// the shared memory in between; every tile has room for meta.q rows there, since kernels do whole tiles.
namespace {

struct Stage {
    const attune_args &args;
    const attune_problem &p;
    const Sizes s;
    const Shared shared;
    const Scratch scratch;
    const Tiling tiling;
    const int64_t w, stride; // of a row of S
    Tile tile{};
    float *scores = nullptr, *row_max = nullptr, *row_sum = nullptr;
    int32_t *strict = nullptr;

    Stage(const KernelMeta &meta, const attune_args &args, void *scratch_memory)
        : args(args), p(*args.problem), s(meta, p), shared(meta, p, args.shared), scratch(meta, p, scratch_memory),
          tiling(p, meta.q), w(meta.panel), stride(s.panels * meta.panel) {}

    void move_to(int64_t task) {
        tile = tiling.tile(p, args.group, task);
        scores = shared.scores + task * tiling.q * stride;
        row_max = shared.row_max + task * tiling.q;
        row_sum = shared.row_sum + task * tiling.q;
        strict = shared.strict + task;
    }
    std::array<int64_t, 3> extents() const { return {w, s.panels, tiling.q}; }
    std::array<int64_t, 3> strides() const { return {1, w, stride}; }

    bool gives(attune_scores_stage stage) const { return p.flags & ATTUNE_SCORES && p.scores_stage == stage; }
    // Copies the tile's rows of S, as value(row, score), to the caller's scores.
    template <typename F> void give(F value) const {
        const attune_tensor &t = *args.tensors->scores;
        for (int64_t r = 0; r < tile.rows; r++) {
            const int64_t row = tile.first + r;
            float *y = at<float>(t, tile.b, tile.hkv * tiling.group + row / p.N, row % p.N);
            for (int64_t j = 0; j < p.M; j++) y[j * t.stride[3]] = value(r, scores[r * stride + j]);
        }
    }
};

int64_t stage_tasks(const KernelMeta &meta, const attune_args &args) {
    return Tiling(*args.problem, meta.q).tiles_per_kv_head();
}

} // namespace

int64_t score_tasks(const KernelMeta &meta, const attune_args &args) {
    return stage_tasks(meta, args);
}

int score(const KernelMeta &meta, const Memory &, ScoreFn fn, const attune_args &args, int64_t begin, int64_t end,
          void *scratch_memory) {
    Stage st(meta, args, scratch_memory);
    const float scale = natural_units(meta, st.p) ? args.scale : args.scale * kLog2e;
    for (int64_t task = begin; task < end; task++) {
        st.move_to(task);
        bool finite = gather_query(args, st.tile, meta.q, st.s.dk, scale, st.scratch.query);
        finite = finite && packed_of(meta, st.p, args.shared).keys_finite(Seen{0, st.p.M, 0, 0});
        *st.strict = !finite;
        if (!st.s.panels) continue;
        Buffer<2> query(st.scratch.query, {st.s.dk, meta.q}, {1, st.s.dk});
        Buffer<3> key(st.shared.keys, {st.w, st.s.dk, st.s.panels}, {1, st.w, st.w * st.s.dk});
        Buffer<3> scores(st.scores, st.extents(), st.strides());
        if (int error = fn(nullptr, &query, &key, &scores)) return error;
        if (st.gives(ATTUNE_SCORES_RAW)) st.give([](int64_t, float x) { return x; });
        const float cap = st.p.softcap;
        if (st.gives(ATTUNE_SCORES_CAPPED))
            st.give([&](int64_t, float x) { return st.p.flags & ATTUNE_SOFTCAP ? cap * std::tanh(x / cap) : x; });
    }
    return 0;
}

// The mask stage also hides the keys that pad the last panel; it has nothing to do where no key is hidden or shifted.
int64_t mask_tasks(const KernelMeta &meta, const attune_args &args) {
    const attune_problem &p = *args.problem;
    const bool plain = !is_structured(p) && !(p.flags & (ATTUNE_MASK | ATTUNE_BIAS | ATTUNE_SOFTCAP | ATTUNE_ALIBI));
    const bool padded = p.M % meta.panel != 0;
    return p.M == 0 || (plain && !padded && !meta.user && !(p.flags & ATTUNE_SCORES)) ? 0 : stage_tasks(meta, args);
}

namespace {

template <typename Fn>
int mask_by(const KernelMeta &meta, Fn fn, const attune_args &args, int64_t begin, int64_t end, void *scratch_memory) {
    Stage st(meta, args, scratch_memory);
    TileMask tile_mask(args, meta, st.scratch);
    for (int64_t task = begin; task < end; task++) {
        st.move_to(task);
        if (!tile_mask.readable()) *st.strict = 1;
        if (*st.strict) continue;
        tile_mask.move_to(st.tile, {0, st.p.M});
        Buffer<3> raw(st.scores, st.extents(), st.strides()), masked(st.scores, st.extents(), st.strides());
        if (int error = tile_mask.template call<1>(fn, nullptr, base(raw), base(masked))) return error;
        if (st.gives(ATTUNE_SCORES_BIASED)) {
            constexpr float kInf = std::numeric_limits<float>::infinity();
            st.give([](int64_t, float x) { return x == -std::numeric_limits<float>::max() ? -kInf : x; });
        }
    }
    return 0;
}

} // namespace

int mask(const KernelMeta &meta, const Memory &, MaskFn fn, const attune_args &args, int64_t begin, int64_t end,
         void *scratch) {
    return mask_by(meta, fn, args, begin, end, scratch);
}
int mask_user(const KernelMeta &meta, const Memory &, UserFn fn, const attune_args &args, int64_t begin, int64_t end,
              void *scratch) {
    return mask_by(meta, fn, args, begin, end, scratch);
}
int64_t mask_user_tasks(const KernelMeta &meta, const attune_args &args) {
    return mask_tasks(meta, args);
}

int64_t softmax_tasks(const KernelMeta &meta, const attune_args &args) {
    return stage_tasks(meta, args);
}

int softmax(const KernelMeta &meta, const Memory &, SoftmaxFn fn, const attune_args &args, int64_t begin, int64_t end,
            void *scratch_memory) {
    Stage st(meta, args, scratch_memory);
    const float unit = natural_units(meta, st.p) ? kLog2e : 1.0f;
    for (int64_t task = begin; task < end; task++) {
        st.move_to(task);
        if (*st.strict) continue;
        Buffer<3> scores(st.scores, st.extents(), st.strides()), weights(st.scores, st.extents(), st.strides());
        Buffer<1> row_max(st.row_max, {meta.q}, {1}), row_sum(st.row_sum, {meta.q}, {1});
        if (int error = fn(nullptr, &scores, unit, &weights, &row_max, &row_sum)) return error;
        if (st.gives(ATTUNE_SCORES_PROBABILITIES))
            st.give([&](int64_t r, float x) {
                float sum = st.row_sum[r];
                if (sum > 0 && st.p.flags & ATTUNE_SINK) { // the sink is part of the denominator
                    const int64_t h = st.tile.hkv * st.tiling.group + (st.tile.first + r) / st.p.N;
                    sum += std::exp(args.tensors->sinks[h] - st.row_max[r] * (unit == 1.0f ? kLn2 : 1.0f));
                }
                return sum > 0 ? x / sum : 0.0f;
            });
    }
    return 0;
}

int64_t matmul_tasks(const KernelMeta &meta, const attune_args &args) {
    return stage_tasks(meta, args);
}

int matmul(const KernelMeta &meta, const Memory &, MatmulFn fn, const attune_args &args, int64_t begin, int64_t end,
           void *scratch_memory) {
    Stage st(meta, args, scratch_memory);
    const attune_problem &p = st.p;
    const attune_tensor &v = args.tensors->v;
    const bool natural = natural_units(meta, p), kernel_can = st.s.packs_values || readable(v);
    const UserRowOf user_row(args, meta.user);
    float *o = st.scratch.out;
    for (int64_t task = begin; task < end; task++) {
        st.move_to(task);
        bool ok = !*st.strict && kernel_can;
        if (ok) {
            Buffer<3> weights(st.scores, st.extents(), st.strides());
            Buffer<2> value(st.s.packs_values ? st.shared.values : at<float>(v, st.tile.b, st.tile.hkv, 0),
                            {st.s.dv, p.M},
                            {1, st.s.packs_values ? st.s.dv
                                : p.M > 1         ? v.stride[2]
                                                  : st.s.dv});
            Buffer<1> row_sum(st.row_sum, {meta.q}, {1});
            Buffer<2> out(o, {st.s.dv, meta.q}, {1, st.s.dv});
            if (int error = fn(nullptr, &weights, &value, &row_sum, int32_t(p.M), &out)) return error;
            ok = all_finite(o, st.tile.rows, p.dv, st.s.dv) && all_finite(st.row_max, 1, st.tile.rows, 0) &&
                 all_finite(st.row_sum, 1, st.tile.rows, 0);
        }
        if (!ok) {
            strict_attend(args, st.tile, {0, p.M}, o, st.s.dv, st.row_max, st.row_sum, user_row.get());
            if (p.flags & ATTUNE_SCORES) strict_scores(args, st.tile, user_row.get());
        }
        scatter(args, st.tile, o, st.s.dv, st.row_max, st.row_sum, natural || !ok ? kLog2e : 1.0f);
    }
    return 0;
}

// whole: one task, a batch element; the kernel has its own parallel loops. Used by the autoscheduled kernels.
int64_t whole_tasks(const KernelMeta &, const attune_args &) {
    return 1;
}

int whole(const KernelMeta &meta, const Memory &, WholeFn fn, const attune_args &args, int64_t, int64_t, void *) {
    const attune_problem &p = *args.problem;
    const attune_tensors &t = *args.tensors;
    const Shared shared(meta, p, args.shared);
    const int64_t group = p.Hq / p.Hkv;
    // These kernels keep Halide's check that a buffer spans less than 2^31 bytes.
    auto fits = [&](const attune_tensor &x, int64_t rows, int64_t heads) {
        constexpr int64_t kLimit = kMaxIndex / int64_t(sizeof(float));
        const int64_t row = rows > 1 ? std::abs(x.stride[2]) : 0, head = heads > 1 ? std::abs(x.stride[1]) : 0;
        return (x.shape[3] == 1 || x.stride[3] == 1) && row <= kLimit && head <= kLimit &&
               row * (rows - 1) + head * (heads - 1) + x.shape[3] <= kLimit;
    };
    const bool kernel_can = p.M > 0 && fits(t.q, p.N, p.Hq) && fits(t.k, p.M, p.Hkv) && fits(t.v, p.M, p.Hkv);
    auto buffer = [](const attune_tensor &x, int64_t rows, int64_t heads) {
        return std::array<int64_t, 3>{1, rows > 1 ? x.stride[2] : x.shape[3],
                                      heads > 1 ? x.stride[1] : rows * x.shape[3]};
    };
    const int64_t b = args.group;
    for (int64_t i = 0; i < p.N; i++) {
        const Interval seen = visible_keys(args, b, i);
        shared.lo[i] = int32_t(seen.begin);
        shared.hi[i] = int32_t(seen.end);
    }
    bool ok = kernel_can;
    if (ok) {
        Buffer<3> query(at<float>(t.q, b, 0, 0), {p.dk, p.N, p.Hq}, buffer(t.q, p.N, p.Hq));
        Buffer<3> key(at<float>(t.k, b, 0, 0), {p.dk, p.M, p.Hkv}, buffer(t.k, p.M, p.Hkv));
        Buffer<3> value(at<float>(t.v, b, 0, 0), {p.dv, p.M, p.Hkv}, buffer(t.v, p.M, p.Hkv));
        Buffer<1> lo(shared.lo, {p.N}, {1}), hi(shared.hi, {p.N}, {1});
        Buffer<3> out(shared.part_out, {p.dv, p.N, p.Hq}, {1, p.dv, p.dv * p.N});
        Buffer<2> row_max(shared.part_max, {p.N, p.Hq}, {1, p.N}), row_sum(shared.part_sum, {p.N, p.Hq}, {1, p.N});
        if (int error =
                fn(&query, &key, &value, &lo, &hi, args.scale * kLog2e, int32_t(group), &out, &row_max, &row_sum))
            return error;
    }
    // These kernels look at no bits: a NaN that a maximum dropped is found in the inputs.
    for (int64_t h = 0; h < p.Hkv && ok; h++)
        for (int64_t j = 0; j < p.M && ok; j++) ok = all_finite(at<float>(t.k, b, h, j), 1, p.dk, 0);
    for (int64_t h = 0; h < p.Hq; h++) {
        const Tile tile{b, h / group, h % group * p.N, p.N, 0};
        float *o = shared.part_out + h * p.N * p.dv, *m = shared.part_max + h * p.N, *l = shared.part_sum + h * p.N;
        bool finite = ok;
        for (int64_t i = 0; i < p.N && finite; i++) finite = all_finite(at<float>(t.q, b, h, i), 1, p.dk, 0);
        finite = finite && all_finite(o, p.N, p.dv, p.dv) && all_finite(m, 1, p.N, 0) && all_finite(l, 1, p.N, 0);
        if (!finite) strict_attend(args, tile, {0, p.M}, o, p.dv, m, l);
        scatter(args, tile, o, p.dv, m, l, finite ? 1.0f : kLog2e);
    }
    return 0;
}

} // namespace attune::rt::halide
