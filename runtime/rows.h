// Rows and keys of a problem: how tasks number the rows of query heads, and which keys a row sees. Shared by the
// adapters of generated kernels and by the strict code.
#pragma once

#include "attune/kernel.h"

#include "convert.h"

#include <algorithm>
#include <cstdint>

namespace attune::rt {

// One tile of query rows of one kv head. Rows of the heads of a group are numbered through: row = head in group * N +
// i.
struct Tile {
    int64_t b, hkv;
    int64_t first; // row number of the tile's first row
    int64_t rows;  // in the tile, all of them real
    int64_t split; // which part of the key axis (0 where it is not split)
};

// How the rows of a kv head are cut into tiles of at most `q` rows: by query head, or, where a head has fewer rows than
// a tile, through the heads of a group (decode, chunked prefill of grouped queries). A function of the shape alone.
struct Tiling {
    int64_t q, group, N, tiles_per_unit, units; // a unit is a query head, or all heads of a group

    Tiling(const attune_problem &p, int64_t tile_rows) : q(tile_rows), group(p.Hq / p.Hkv), N(p.N) {
        units = N < q ? 1 : group;
        const int64_t unit_rows = N < q ? group * N : N;
        tiles_per_unit = (unit_rows + q - 1) / q;
    }
    int64_t tiles_per_kv_head() const { return units * tiles_per_unit; }

    // Tile `index` of kv head `head`, counted through the batch. Tiles of a unit come last first: under a causal mask
    // those are the long ones.
    Tile tile(const attune_problem &p, int64_t head, int64_t index) const {
        const int64_t unit = index / tiles_per_unit, block = tiles_per_unit - 1 - index % tiles_per_unit;
        const int64_t unit_rows = units == 1 ? group * N : N;
        return {head / p.Hkv, head % p.Hkv, unit * unit_rows + block * q, std::min(q, unit_rows - block * q), 0};
    }
};

// The query head and the row in it of one row of a tile after the other: a division for each row would be dear.
struct RowWalk {
    int64_t h, i, N;

    RowWalk(const attune_problem &p, const Tile &tile)
        : h(tile.hkv * (p.Hq / p.Hkv) + tile.first / p.N), i(tile.first % p.N), N(p.N) {}
    void next() {
        if (++i == N) i = 0, h++;
    }
};

struct Interval {
    int64_t begin, end; // begin <= end; empty: 0, 0
};

// Bounds of the keys that row i of batch element b may see; begin may lie at or past end. Neither falls with i.
inline Interval key_bounds(const attune_args &args, int64_t b, int64_t i) {
    const attune_problem &p = *args.problem;
    int64_t begin = 0, end = p.M;
    if (p.flags & ATTUNE_KV_LEN) end = std::clamp<int64_t>(args.tensors->kv_len[b], 0, p.M);
    const int64_t position = i + (p.flags & ATTUNE_OFFSETS ? args.tensors->offsets[b] : p.offset);
    if (p.flags & ATTUNE_CAUSAL) end = std::min(end, position + 1);
    // Offsets are within 2^60: a window cut to twice that cannot overflow.
    constexpr int64_t kFar = int64_t(1) << 61;
    if (p.window_right >= 0) end = std::min(end, position + std::min(p.window_right, kFar) + 1);
    if (p.window_left >= 0) begin = std::max(begin, position - std::min(p.window_left, kFar));
    return {begin, end};
}

// Keys that row i of batch element b may see by structure: kv_len, causality, window (contract 3.6, 3.7).
inline Interval visible_keys(const attune_args &args, int64_t b, int64_t i) {
    const Interval keys = key_bounds(args, b, i);
    return keys.begin < keys.end ? keys : Interval{0, 0};
}

// Keys outside it are seen by no row of batch element b.
inline Interval keys_of_some_row(const attune_args &args, int64_t b) {
    return {key_bounds(args, b, 0).begin, key_bounds(args, b, args.problem->N - 1).end};
}

inline bool is_structured(const attune_problem &p) {
    return (p.flags & (ATTUNE_CAUSAL | ATTUNE_KV_LEN)) || p.window_left >= 0 || p.window_right >= 0;
}

// Element (b, h, i, j) of a tensor.
template <typename T> T *at(const attune_tensor &t, int64_t b, int64_t h, int64_t i, int64_t j = 0) {
    return static_cast<T *>(t.data) + (b * t.stride[0] + h * t.stride[1] + i * t.stride[2] + j * t.stride[3]);
}

// The same where the tensor's type decides how far apart elements are.
inline char *address(const attune_tensor &t, int64_t b, int64_t h, int64_t i, int64_t j = 0) {
    const int64_t element = b * t.stride[0] + h * t.stride[1] + i * t.stride[2] + j * t.stride[3];
    return static_cast<char *>(t.data) + element * bytes_of(t.dtype);
}

} // namespace attune::rt
