#include "phases.h"

#include "buffer.h"

#include "../arena.h"
#include "../strict.h"
#include "../tiles.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <new>

namespace attune::rt::halide {

namespace {

constexpr int32_t kMaxIndex = std::numeric_limits<int32_t>::max();

constexpr int64_t kMaxLanes = 16; // run-time sizes of features are rounded up to whole vectors of any ISA

// Sizes that the kernel sees.
struct Sizes {
    int64_t dk, dv, panels, chunks, splits;
    bool packs_values;

    Sizes(const KernelMeta &meta, const attune_problem &p)
        : dk(meta.dk      ? meta.dk
             : meta.panel ? p.dk
                          : round_up(p.dk, kMaxLanes)),
          dv(meta.dv ? meta.dv : round_up(p.dv, kMaxLanes)), panels(meta.panel ? ceil_div(p.M, meta.panel) : 0),
          chunks(ceil_div(panels, kPackChunk)),
          splits(meta.split_keys ? std::max<int64_t>(1, ceil_div(p.M, meta.split_keys)) : 1),
          packs_values(meta.panel && (dv != p.dv || p.flags & ATTUNE_STRIDED_V)) {}
};

// What the phases of a group share: packed K with a flag for each chunk, packed V, and the parts of a split key axis.
struct Shared {
    float *keys, *values, *part_out, *part_max, *part_sum, *scores, *row_max, *row_sum;
    int32_t *bits, *strict, *lo, *hi;
    size_t bytes;

    Shared(const KernelMeta &meta, const attune_problem &p, void *base) {
        const Sizes s(meta, p);
        Pieces pieces(base);
        const int64_t rows = p.Hq / p.Hkv * p.N; // of a group
        keys = pieces.take<float>(s.panels * meta.panel * s.dk);
        bits = pieces.take<int32_t>(s.chunks);
        values = pieces.take<float>(s.packs_values ? p.M * s.dv : 0);
        // Parts of a split key axis; kernels for a whole batch element keep its rows here.
        const int64_t part_rows = meta.split_keys ? rows * s.splits : meta.whole ? p.Hq * p.N : 0;
        part_out = pieces.take<float>(part_rows * s.dv);
        part_max = pieces.take<float>(part_rows);
        part_sum = pieces.take<float>(part_rows);
        lo = pieces.take<int32_t>(meta.whole ? p.N : 0);
        hi = pieces.take<int32_t>(meta.whole ? p.N : 0);
        const int64_t tiles = meta.keeps_scores ? Tiling(p, meta.q).tiles_per_kv_head() : 0;
        scores = pieces.take<float>(tiles * meta.q * s.panels * meta.panel);
        row_max = pieces.take<float>(tiles * meta.q);
        row_sum = pieces.take<float>(tiles * meta.q);
        strict = pieces.take<int32_t>(tiles);
        bytes = pieces.used();
    }
};

// The scratch memory of a thread: the tile's own arrays, then what the generated code asks for.
struct Scratch {
    float *query, *out, *row_max, *row_sum, *slope;
    uint32_t *bias_tail; // bits of floats, see stages/mask.h
    int32_t *lo, *hi, *position;
    uint8_t *mask_tail;
    size_t used;

    Scratch(const KernelMeta &meta, const attune_problem &p, void *base) {
        const Sizes s(meta, p);
        Pieces pieces(base);
        query = pieces.take<float>(meta.q * s.dk);
        out = pieces.take<float>(meta.q * s.dv);
        const int64_t row_state = meta.dv ? meta.q : meta.q * s.dv; // see AttendPhase in generators/halide/phases.h
        row_max = pieces.take<float>(row_state);
        row_sum = pieces.take<float>(row_state);
        lo = pieces.take<int32_t>(meta.q);
        hi = pieces.take<int32_t>(meta.q);
        position = pieces.take<int32_t>(meta.q);
        slope = pieces.take<float>(meta.q);
        const int64_t tail = meta.q * (meta.panel ? meta.panel : meta.k);
        bias_tail = pieces.take<uint32_t>(tail);
        mask_tail = pieces.take<uint8_t>(tail);
        used = pieces.used();
    }
};

int64_t heap_bytes(const KernelMeta &meta, const Memory &memory, const attune_problem &p) {
    return memory.heap + memory.heap_per_key * p.M + memory.heap_per_feature * Sizes(meta, p).dv;
}

// Whether a kernel may read K or V in place (otherwise a packed copy or the strict code serves).
bool readable(const attune_tensor &t) {
    const int64_t rows = t.shape[2], features = t.shape[3], row = rows > 1 ? t.stride[2] : 0;
    return (t.stride[3] == 1 || features == 1) && row >= 0 && row <= kMaxIndex &&
           (rows - 1) * row + features <= kMaxIndex;
}

bool readable_mask(const attune_tensor &t, const attune_problem &p, int64_t group) {
    if (t.stride[3] != 1 && p.M > 1) return false;
    const int64_t i = p.N > 1 ? std::abs(t.stride[2]) : 0, g = group > 1 ? std::abs(t.stride[1]) : 0;
    return i <= kMaxIndex && g <= kMaxIndex && (p.N - 1) * i + (group - 1) * g + p.M <= kMaxIndex;
}

// The tail panel of a mask or bias for the rows of a tile: [q][panel], the keys from `first` on. Keys past M are not
// read.
template <typename T> void gather_tail(const attune_args &args, const attune_tensor &t, const Tile &tile, int64_t first,
                                       int64_t panel, T *out) {
    const attune_problem &p = *args.problem;
    const int64_t group = p.Hq / p.Hkv;
    for (int64_t r = 0; r < tile.rows; r++) {
        const int64_t row = tile.first + r;
        const T *x = at<T>(t, tile.b, tile.hkv * group + row / p.N, row % p.N);
        for (int64_t j = first; j < p.M; j++) out[r * panel + j - first] = x[j * t.stride[3]];
    }
}

Packed packed_of(const KernelMeta &meta, const attune_problem &p, void *memory) {
    const Sizes s(meta, p);
    const Shared shared(meta, p, memory);
    return {s.dk,        s.dv,          meta.panel, s.panels, s.chunks, s.packs_values, meta.keeps_scores,
            shared.keys, shared.values, shared.bits};
}

// What decides who sees whom in a tile, as kernels read it: an interval of keys for each row, positions and slopes, and
// the optional tensors: whole panels in place, the ragged one at the end from a copy.
class TileMask {
  public:
    TileMask(const attune_args &args, const KernelMeta &meta, const Scratch &scratch)
        : args_(args), p_(*args.problem), scratch_(scratch), q_(meta.q), group_(p_.Hq / p_.Hkv),
          w_(meta.panel ? meta.panel : meta.k), whole_panel_(p_.M >= w_), structured_(is_structured(p_)),
          lo_(scratch.lo, {q_}, {1}), hi_(scratch.hi, {q_}, {1}), position_(scratch.position, {q_}, {1}),
          slope_(scratch.slope, {q_}, {1}), mask_(scratch.mask_tail, extents(), strides(args.tensors->mask)),
          bias_(scratch.bias_tail, extents(), strides(args.tensors->bias)),
          mask_tail_(scratch.mask_tail, {w_, q_}, {1, w_}), bias_tail_(scratch.bias_tail, {w_, q_}, {1, w_}) {}

    // Whether the optional tensors have strides that a kernel takes.
    bool readable() const {
        return (!has(ATTUNE_MASK) || readable_mask(*args_.tensors->mask, p_, group_)) &&
               (!has(ATTUNE_BIAS) || readable_mask(*args_.tensors->bias, p_, group_));
    }

    // Prepares for `tile` and the keys of `part`. Keys by structure only: a mask may hide more.
    Seen move_to(const Tile &tile, Interval part) {
        tile_ = tile;
        Seen s = see(args_, tile, q_, part, scratch_.lo, scratch_.hi);
        if (has(ATTUNE_MASK | ATTUNE_BIAS | ATTUNE_SOFTCAP | ATTUNE_ALIBI)) s.all_first = s.all_last = s.first;
        const int64_t tail = p_.M / w_ * w_;
        const bool ragged = tail < p_.M && s.last > tail;
        if (has(ATTUNE_MASK)) move(mask_, *args_.tensors->mask, tail, ragged, scratch_.mask_tail);
        if (has(ATTUNE_BIAS)) move(bias_, *args_.tensors->bias, tail, ragged, scratch_.bias_tail);
        if (has(ATTUNE_ALIBI)) place_rows(args_, tile, q_, scratch_.position, scratch_.slope);
        return s;
    }

    // fn(context, mask arguments…, rest…)
    template <typename Fn, typename... Rest> int call(Fn fn, void *context, Rest... rest) {
        return fn(context, &lo_, &hi_, &position_, &slope_, &mask_, &bias_, &mask_tail_, &bias_tail_, has(ATTUNE_MASK),
                  has(ATTUNE_BIAS), has(ATTUNE_SOFTCAP), has(ATTUNE_ALIBI), has(ATTUNE_SOFTCAP) ? p_.softcap : 1.0f,
                  int32_t(tile_.first), int32_t(p_.N), int32_t(group_ * p_.N), int32_t(p_.M), rest...);
    }

  private:
    const attune_args &args_;
    const attune_problem &p_;
    const Scratch &scratch_;
    const int64_t q_, group_, w_;
    const bool whole_panel_, structured_;
    Tile tile_{};
    Buffer<1> lo_, hi_, position_, slope_;
    Buffer<3> mask_, bias_;
    Buffer<2> mask_tail_, bias_tail_;

    bool has(uint32_t flags) const { return p_.flags & flags; }
    std::array<int64_t, 3> extents() const { return {p_.M, p_.N, group_}; }
    // Where there is no whole panel to read, the kernel reads (and drops) the tail's.
    std::array<int64_t, 3> strides(const attune_tensor *t) const {
        const bool real = t && whole_panel_;
        return {1, real && p_.N > 1 ? t->stride[2] : 0, real && group_ > 1 ? t->stride[1] : 0};
    }
    template <typename T> void move(Buffer<3> &b, const attune_tensor &t, int64_t tail, bool ragged, T *copy) {
        if (whole_panel_) b.move_to(at<T>(t, tile_.b, tile_.hkv * group_, 0));
        if (ragged) gather_tail(args_, t, tile_, tail, w_, copy);
    }
};

// The merge of one row's parts when a NaN or an infinity is among them: a NaN sum is a NaN score and makes the row NaN;
// a NaN in a part's output is one of V, and stays in its feature.
void merge_strictly(const float *o, const float *m, const float *l, int64_t splits, int64_t dv, int64_t stride,
                    float unit, float *out, float &row_max, float &row_sum) {
    float top = -std::numeric_limits<float>::max();
    for (int64_t i = 0; i < splits; i++)
        if (l[i] > 0) top = std::max(top, m[i]);
    auto share = [&](int64_t i) { return l[i] == 0 ? 0.0 : std::exp2(double(m[i] - top) * unit) * l[i]; };
    double sum = 0;
    for (int64_t i = 0; i < splits; i++) sum += share(i);
    std::fill_n(out, dv, 0.0f);
    for (int64_t i = 0; i < splits; i++) {
        if (l[i] == 0) continue;
        const double w = share(i) / sum;
        for (int64_t c = 0; c < dv; c++) out[c] += float(w * o[i * stride + c]);
    }
    row_max = std::isnan(sum) ? std::numeric_limits<float>::quiet_NaN() : top;
    row_sum = float(sum);
}

} // namespace

size_t shared_bytes(const KernelMeta &meta, const attune_problem &problem) {
    return Shared(meta, problem, nullptr).bytes;
}

size_t scratch_bytes(const KernelMeta &meta, const Memory &memory, const attune_problem &problem) {
    const int64_t heap = heap_bytes(meta, memory, problem);
    return Scratch(meta, problem, nullptr).used + (heap ? align64(size_t(heap)) + 128 : 0);
}

// pack: a task is kPackChunk panels of one (batch, kv head), and the values of the same keys.
int64_t pack_tasks(const KernelMeta &meta, const attune_args &args) {
    return Sizes(meta, *args.problem).chunks;
}

int pack(const KernelMeta &meta, const Memory &, PackFn fn, const attune_args &args, int64_t begin, int64_t end,
         void *) {
    struct Context {
        PackFn fn;
        int64_t dk, w;
    } const context{fn, Sizes(meta, *args.problem).dk, meta.panel};
    const auto whole = [](const void *c, const float *k, int64_t row, int64_t feature, float *packed, int64_t panels,
                          int32_t *largest) {
        const auto &[fn, dk, w] = *static_cast<const Context *>(c);
        int32_t bits[kPackChunk] = {};
        Buffer<2> key(k, {dk, panels * w}, {feature, row});
        Buffer<3> out(packed, {w, dk, panels}, {1, w, w * dk});
        Buffer<1> each(bits, {panels}, {1});
        const int error = fn(nullptr, &key, &out, &each);
        *largest = *std::max_element(bits, bits + kPackChunk);
        return error;
    };
    const Packed packed = packed_of(meta, *args.problem, args.shared);
    for (int64_t task = begin; task < end; task++)
        if (int error = pack_chunk(args, packed, task, kMaxIndex, whole, &context)) return error;
    return 0;
}

// attend: a task is one tile of rows, and one split of the keys where the key axis is split.
int64_t attend_tasks(const KernelMeta &meta, const attune_args &args) {
    const attune_problem &p = *args.problem;
    return Tiling(p, meta.q).tiles_per_kv_head() * Sizes(meta, p).splits;
}

int attend(const KernelMeta &meta, const Memory &memory, AttendFn fn, const attune_args &args, int64_t task_begin,
           int64_t task_end, void *scratch_memory) {
    const attune_problem &p = *args.problem;
    const attune_tensors &t = *args.tensors;
    const Sizes s(meta, p);
    const Shared shared(meta, p, args.shared);
    const Scratch scratch(meta, p, scratch_memory);
    Arena arena(static_cast<char *>(scratch_memory) + scratch.used + 64, size_t(heap_bytes(meta, memory, p)));
    const Tiling tiling(p, meta.q);
    const int64_t w = meta.panel;
    const bool natural = in_natural_units(p);
    const float unit = natural ? kLog2e : 1.0f, scale = natural ? args.scale : args.scale * kLog2e;
    TileMask tile_mask(args, meta, scratch);
    const bool kernel_can = (s.packs_values || readable(t.v)) && tile_mask.readable() && (meta.panel || readable(t.k));

    // Buffers that stay the same, and those whose address changes from tile to tile.
    Buffer<2> query(scratch.query, {s.dk, meta.q}, {1, s.dk});
    Buffer<3> packed(shared.keys, {w, s.dk, s.panels}, {1, w, w * s.dk});
    Buffer<2> raw(static_cast<const float *>(t.k.data), {p.dk, p.M}, {1, p.M > 1 ? t.k.stride[2] : p.dk});
    // A V that is read in place may have fewer features than the kernel's vectors cover: it clamps them.
    Buffer<2> value(static_cast<const float *>(t.v.data), {s.packs_values ? s.dv : p.dv, p.M},
                    {1, s.packs_values ? s.dv
                        : p.M > 1      ? t.v.stride[2]
                                       : p.dv});
    Buffer<1> row_max(scratch.row_max, {meta.q}, {1}), row_sum(scratch.row_sum, {meta.q}, {1});
    Buffer<2> any_max(scratch.row_max, {s.dv, meta.q}, {1, s.dv}), any_sum(scratch.row_sum, {s.dv, meta.q}, {1, s.dv});
    halide_buffer_t *max_out = meta.dv ? static_cast<halide_buffer_t *>(&row_max) : &any_max;
    halide_buffer_t *sum_out = meta.dv ? static_cast<halide_buffer_t *>(&row_sum) : &any_sum;
    Buffer<2> out(scratch.out, {s.dv, meta.q}, {1, s.dv});

    for (int64_t task = task_begin; task < task_end; task++) {
        Tile tile = tiling.tile(p, args.group, task / s.splits);
        tile.split = task % s.splits;
        Interval part{0, p.M};
        if (meta.split_keys) part = {tile.split * meta.split_keys, std::min(p.M, (tile.split + 1) * meta.split_keys)};

        const Seen seen = tile_mask.move_to(tile, part);

        float *o = scratch.out, *m = scratch.row_max, *l = scratch.row_sum;
        bool ok = kernel_can;
        if (meta.panel) ok = ok && packed_of(meta, p, args.shared).keys_finite(seen);
        ok = gather_query(args, tile, meta.q, s.dk, scale, scratch.query) && ok;
        if (ok) {
            if (!meta.panel) raw.move_to(at<float>(t.k, tile.b, tile.hkv, 0));
            value.move_to(s.packs_values ? shared.values : at<float>(t.v, tile.b, tile.hkv, 0));
            halide_buffer_t *key = meta.panel ? static_cast<halide_buffer_t *>(&packed) : &raw;
            arena.reset();
            if (int error =
                    tile_mask.call(fn, &arena, base(query), key, base(value), int32_t(seen.first), int32_t(seen.last),
                                   int32_t(seen.all_first), int32_t(seen.all_last), unit, base(out), max_out, sum_out))
                return error;
            if (!meta.dv)
                for (int64_t r = 0; r < tile.rows; r++) {
                    m[r] = m[r * s.dv];
                    l[r] = l[r * s.dv];
                    const float inverse = l[r] > 0 ? 1.0f / l[r] : 0.0f;
                    for (int64_t c = 0; c < p.dv; c++) o[r * s.dv + c] *= inverse;
                }
            ok = all_finite(o, tile.rows, p.dv, s.dv) && all_finite(m, 1, tile.rows, 0) &&
                 all_finite(l, 1, tile.rows, 0);
        }
        if (!ok) {
            strict_attend(args, tile, part, o, s.dv, m, l);
            if (!natural)
                for (int64_t r = 0; r < tile.rows; r++) m[r] *= l[r] > 0 ? kLog2e : 1.0f;
        }
        if (!meta.split_keys) {
            scatter(args, tile, o, s.dv, m, l, unit);
            continue;
        }
        // Parts are kept as [row][split].
        for (int64_t r = 0; r < tile.rows; r++) {
            const int64_t at = (tile.first + r) * s.splits + tile.split;
            std::memcpy(shared.part_out + at * s.dv, o + r * s.dv, size_t(s.dv) * sizeof(float));
            shared.part_max[at] = m[r];
            shared.part_sum[at] = l[r];
        }
    }
    return 0;
}

// merge: a task is one tile of rows; the parts of a row lie side by side.
int64_t merge_tasks(const KernelMeta &meta, const attune_args &args) {
    return Tiling(*args.problem, meta.q).tiles_per_kv_head();
}

int merge(const KernelMeta &meta, const Memory &, MergeFn fn, const attune_args &args, int64_t begin, int64_t end,
          void *scratch_memory) {
    const attune_problem &p = *args.problem;
    const Sizes s(meta, p);
    const Shared shared(meta, p, args.shared);
    const Scratch scratch(meta, p, scratch_memory);
    const Tiling tiling(p, meta.q);
    const float unit = in_natural_units(p) ? kLog2e : 1.0f;
    for (int64_t task = begin; task < end; task++) {
        const Tile tile = tiling.tile(p, args.group, task);
        const int64_t row0 = tile.first * s.splits;
        float *part_out = shared.part_out + row0 * s.dv, *part_max = shared.part_max + row0,
              *part_sum = shared.part_sum + row0;
        if (s.splits == 1) {
            scatter(args, tile, part_out, s.dv, part_max, part_sum, unit);
            continue;
        }
        for (int64_t r = 0; r < tile.rows; r++) {
            const float *o = part_out + r * s.splits * s.dv, *m = part_max + r * s.splits, *l = part_sum + r * s.splits;
            if (all_finite(o, s.splits, p.dv, s.dv) && all_finite(l, 1, s.splits, 0)) {
                Buffer<2> outs(o, {s.dv, s.splits}, {1, s.dv});
                Buffer<1> maxima(m, {s.splits}, {1}), sums(l, {s.splits}, {1});
                Buffer<1> out(scratch.out + r * s.dv, {s.dv}, {1}), row_max(scratch.row_max + r, {1}, {1}),
                    row_sum(scratch.row_sum + r, {1}, {1});
                if (int error = fn(nullptr, &outs, &maxima, &sums, unit, &out, &row_max, &row_sum)) return error;
                continue;
            }
            merge_strictly(o, m, l, s.splits, p.dv, s.dv, unit, scratch.out + r * s.dv, scratch.row_max[r],
                           scratch.row_sum[r]);
        }
        scatter(args, tile, scratch.out, s.dv, scratch.row_max, scratch.row_sum, unit);
    }
    return 0;
}

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
    const float scale = in_natural_units(st.p) ? args.scale : args.scale * kLog2e;
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
    return p.M == 0 || (plain && !padded && !(p.flags & ATTUNE_SCORES)) ? 0 : stage_tasks(meta, args);
}

int mask(const KernelMeta &meta, const Memory &, MaskFn fn, const attune_args &args, int64_t begin, int64_t end,
         void *scratch_memory) {
    Stage st(meta, args, scratch_memory);
    TileMask tile_mask(args, meta, st.scratch);
    for (int64_t task = begin; task < end; task++) {
        st.move_to(task);
        if (!tile_mask.readable()) *st.strict = 1;
        if (*st.strict) continue;
        tile_mask.move_to(st.tile, {0, st.p.M});
        Buffer<3> raw(st.scores, st.extents(), st.strides()), masked(st.scores, st.extents(), st.strides());
        if (int error = tile_mask.call(fn, nullptr, base(raw), base(masked))) return error;
        if (st.gives(ATTUNE_SCORES_BIASED)) {
            constexpr float kInf = std::numeric_limits<float>::infinity();
            st.give([](int64_t, float x) { return x == -std::numeric_limits<float>::max() ? -kInf : x; });
        }
    }
    return 0;
}

int64_t softmax_tasks(const KernelMeta &meta, const attune_args &args) {
    return stage_tasks(meta, args);
}

int softmax(const KernelMeta &meta, const Memory &, SoftmaxFn fn, const attune_args &args, int64_t begin, int64_t end,
            void *scratch_memory) {
    Stage st(meta, args, scratch_memory);
    const float unit = in_natural_units(st.p) ? kLog2e : 1.0f;
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
    const bool natural = in_natural_units(p), kernel_can = st.s.packs_values || readable(v);
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
            strict_attend(args, st.tile, {0, p.M}, o, st.s.dv, st.row_max, st.row_sum);
            if (p.flags & ATTUNE_SCORES) strict_scores(args, st.tile);
            if (!natural)
                for (int64_t r = 0; r < st.tile.rows; r++) st.row_max[r] *= st.row_sum[r] > 0 ? kLog2e : 1.0f;
        }
        scatter(args, st.tile, o, st.s.dv, st.row_max, st.row_sum, natural ? kLog2e : 1.0f);
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
        if (!finite) {
            strict_attend(args, tile, {0, p.M}, o, p.dv, m, l);
            for (int64_t i = 0; i < p.N; i++) m[i] *= l[i] > 0 ? kLog2e : 1.0f;
        }
        scatter(args, tile, o, p.dv, m, l, 1.0f);
    }
    return 0;
}

} // namespace attune::rt::halide
