// What the adapters of Halide's functions share: the sizes that a kernel sees, the pieces of its memory, and what
// decides who sees whom in a tile.
#pragma once

#include "buffer.h"
#include "phases.h"
#include "user.h"

#include "../pairs.h"
#include "../tiles.h"

#include <array>
#include <cstdlib>
#include <limits>
#include <optional>

namespace attune::rt::halide {

constexpr int32_t kMaxIndex = std::numeric_limits<int32_t>::max();

constexpr int64_t kMaxLanes = 16; // run-time sizes of features are rounded up to whole vectors of any ISA

// Sizes that the kernel sees.
struct Sizes {
    int64_t dk, words, dv, panels, chunks, splits; // words: a row of Q or K in 32 bits each
    bool packs_values;

    Sizes(const KernelMeta &meta, const attune_problem &p)
        : dk(meta.dk      ? meta.dk
             : meta.panel ? p.dk
                          : round_up(p.dk, meta.pairs ? 2 * kMaxLanes : kMaxLanes)),
          words(meta.pairs ? dk / 2 : dk), dv(meta.dv ? meta.dv : round_up(p.dv, kMaxLanes)),
          panels(meta.panel ? ceil_div(p.M, meta.panel) : 0), chunks(ceil_div(panels, kPackChunk)),
          splits(meta.split_keys ? std::max<int64_t>(1, ceil_div(p.M, meta.split_keys)) : 1),
          packs_values(meta.panel && (dv != p.dv || p.flags & ATTUNE_STRIDED_V || p.kv_dtype != ATTUNE_F32)) {}
};

// What the phases of a group share: packed K with a flag for each chunk, packed V, and the parts of a split key axis.
// Packed K and V, and a tile's query, are floats, or pairs of bf16 in their place.
struct Shared {
    float *keys, *values, *part_out, *part_max, *part_sum, *scores, *row_max, *row_sum;
    int32_t *bits, *strict, *lo, *hi;
    size_t bytes;

    Shared(const KernelMeta &meta, const attune_problem &p, void *base) {
        const Sizes s(meta, p);
        Pieces pieces(base);
        const int64_t rows = p.Hq / p.Hkv * p.N; // of a group
        keys = pieces.take<float>(s.panels * meta.panel * s.words);
        bits = pieces.take<int32_t>(s.chunks);
        const int64_t value_rows = meta.pairs ? s.panels * meta.panel / 2 : p.M;
        values = pieces.take<float>(s.packs_values ? value_rows * s.dv : 0);
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
    float *query, *out, *row_max, *row_sum, *slope, *widened;
    uint32_t *bias_tail; // bits of floats, see stages/mask.h
    int32_t *lo, *hi, *position;
    uint8_t *mask_tail;
    UserScratch user;
    size_t used;

    Scratch(const KernelMeta &meta, const attune_problem &p, void *base) {
        const Sizes s(meta, p);
        Pieces pieces(base);
        query = pieces.take<float>(meta.q * s.words);
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
        widened = pieces.take<float>(meta.panel && !meta.pairs ? widened_floats(p, meta.panel) : 0);
        user = UserScratch(meta, p, pieces);
        used = pieces.used();
    }
};

// Functions of scores add something to them, and are given what was computed so far in natural units.
inline bool natural_units(const KernelMeta &meta, const attune_problem &p) {
    return in_natural_units(p) || (meta.user && meta.user->scores);
}

inline int64_t heap_bytes(const KernelMeta &meta, const Memory &memory, const attune_problem &p) {
    return memory.heap + memory.heap_per_key * p.M + memory.heap_per_feature * Sizes(meta, p).dv;
}

// Whether a kernel may read K or V in place (otherwise a packed copy or the strict code serves).
inline bool readable(const attune_tensor &t) {
    const int64_t rows = t.shape[2], features = t.shape[3], row = rows > 1 ? t.stride[2] : 0;
    return (t.stride[3] == 1 || features == 1) && row >= 0 && row <= kMaxIndex &&
           (rows - 1) * row + features <= kMaxIndex;
}

inline bool readable_mask(const attune_tensor &t, const attune_problem &p, int64_t group) {
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

inline Packed packed_of(const KernelMeta &meta, const attune_problem &p, void *memory) {
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
          mask_tail_(scratch.mask_tail, {w_, q_}, {1, w_}), bias_tail_(scratch.bias_tail, {w_, q_}, {1, w_}) {
        if (meta.user) user_.emplace(args, meta, scratch.user);
    }

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
        if (user_) user_error_ = user_->move_to(tile, s);
        return s;
    }

    // What `seen` is to the kernel: with user functions a list of panels.
    Seen as_called(const Seen &seen) const { return user_ ? user_->listed() : seen; }

    // fn(context, mask arguments…, rest…), of which the last `outputs` are the function's.
    template <size_t outputs, typename Fn, typename... Rest> int call(Fn fn, void *context, Rest... rest) {
        if constexpr (std::is_same_v<Fn, UserFn>) {
            if (user_error_) return user_error_;
            return call_plain(
                [&](auto... all) {
                    return call_with_user<outputs>(
                        fn, [this](Arguments &a) { user_->add_to(a); }, all...);
                },
                context, rest...);
        } else {
            return call_plain(fn, context, rest...);
        }
    }

  private:
    template <typename Fn, typename... Rest> int call_plain(Fn fn, void *context, Rest... rest) {
        return fn(context, &lo_, &hi_, &position_, &slope_, &mask_, &bias_, &mask_tail_, &bias_tail_, has(ATTUNE_MASK),
                  has(ATTUNE_BIAS), has(ATTUNE_SOFTCAP), has(ATTUNE_ALIBI), has(ATTUNE_SOFTCAP) ? p_.softcap : 1.0f,
                  int32_t(tile_.first), int32_t(p_.N), int32_t(group_ * p_.N), int32_t(p_.M), rest...);
    }

    const attune_args &args_;
    const attune_problem &p_;
    const Scratch &scratch_;
    const int64_t q_, group_, w_;
    const bool whole_panel_, structured_;
    Tile tile_{};
    Buffer<1> lo_, hi_, position_, slope_;
    Buffer<3> mask_, bias_;
    Buffer<2> mask_tail_, bias_tail_;
    std::optional<UserTile> user_;
    int user_error_ = 0;

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

} // namespace attune::rt::halide
