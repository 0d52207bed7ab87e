#include "tiles.h"

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

namespace attune::rt {

namespace {

int32_t magnitude(float x) {
    return std::bit_cast<int32_t>(x) & 0x7fffffff;
}

// Its top bit is set for infinities and NaN: their magnitudes are those from kNonFinite on. An or over many floats
// tells whether any is among them, with operations that every x86 has for vectors (a maximum of integers is not in
// SSE2).
uint32_t overflow(float x) {
    return uint32_t(magnitude(x)) + (0x80000000u - uint32_t(kNonFinite));
}

// Whether the rows of a tile, `n` features each, lie one after the other: the usual case, done in one go. (Row by row
// costs 2 % at n 128, d 64.)
bool one_piece(const attune_tensor &t, const Tile &tile, const attune_problem &p, int64_t n) {
    return t.shape[3] == n && t.stride[3] == 1 && t.stride[2] == n && tile.first % p.N + tile.rows <= p.N;
}

// y = x * scale, and the OR of overflow(y).
ATTUNE_VECTOR_CLONES uint32_t scale_row(const float *x, int64_t stride, int64_t n, float scale, float *y) {
    uint32_t any = 0;
    if (stride == 1) {
        for (int64_t d = 0; d < n; d++) {
            y[d] = x[d] * scale;
            any |= overflow(y[d]);
        }
    } else {
        for (int64_t d = 0; d < n; d++) {
            y[d] = x[d * stride] * scale;
            any |= overflow(y[d]);
        }
    }
    return any;
}

ATTUNE_VECTOR_CLONES uint32_t overflow_of(const float *x, int64_t n) {
    uint32_t any = 0;
    for (int64_t i = 0; i < n; i++) any |= overflow(x[i]);
    return any;
}

} // namespace

bool gather_query(const attune_args &args, const Tile &tile, int64_t q, int64_t dk, float scale, float *out) {
    const attune_problem &p = *args.problem;
    const attune_tensor &t = args.tensors->q;
    uint32_t any = 0;
    RowWalk row(p, tile);
    // y = x * scale; what is no f32 is widened in place first.
    const auto scaled = [&](const char *x, int64_t stride, int64_t n, float *y) {
        if (t.dtype == ATTUNE_F32) return scale_row(reinterpret_cast<const float *>(x), stride, n, scale, y);
        widen(t.dtype, x, stride, n, y);
        return scale_row(y, 1, n, scale, y);
    };
    if (one_piece(t, tile, p, dk)) {
        any = scaled(address(t, tile.b, row.h, row.i), 1, tile.rows * dk, out);
    } else {
        for (int64_t r = 0; r < tile.rows; r++, row.next()) {
            float *y = out + r * dk;
            any |= scaled(address(t, tile.b, row.h, row.i), t.stride[3], p.dk, y);
            std::fill(y + p.dk, y + dk, 0.0f);
        }
    }
    std::fill(out + tile.rows * dk, out + q * dk, 0.0f);
    return !(any >> 31) && finite_slopes(args, tile);
}

bool finite_slopes(const attune_args &args, const Tile &tile) {
    const attune_problem &p = *args.problem;
    if (!(p.flags & ATTUNE_ALIBI)) return true;
    const int64_t group = p.Hq / p.Hkv;
    const float *slopes = args.tensors->alibi_slopes + tile.hkv * group;
    return std::all_of(slopes, slopes + group, [](float x) { return std::isfinite(x); });
}

bool all_finite(const float *x, int64_t rows, int64_t n, int64_t stride) {
    uint32_t any = 0;
    if (stride == n) return !(overflow_of(x, rows * n) >> 31);
    for (int64_t r = 0; r < rows; r++) any |= overflow_of(x + r * stride, n);
    return !(any >> 31);
}

// Writes the finished rows of a tile to O and LSE. The sink, one more logit in the denominator, comes in here: l grows
// by e^(sink - m), which scales the row by l / (l + e^(sink - m)).
void scatter(const attune_args &args, const Tile &tile, float *out, int64_t out_stride, const float *row_max,
             const float *row_sum, float unit) {
    const attune_problem &p = *args.problem;
    const attune_tensors &t = *args.tensors;
    const bool sink = p.flags & ATTUNE_SINK;
    RowWalk row(p, tile);
    if (!sink && !t.lse && one_piece(t.o, tile, p, out_stride)) {
        narrow(t.o.dtype, out, tile.rows * out_stride, address(t.o, tile.b, row.h, row.i), 1);
        return;
    }
    for (int64_t r = 0; r < tile.rows; r++, row.next()) {
        const int64_t h = row.h, i = row.i;
        float scale = 1.0f;
        if (sink || t.lse) {
            float lse = row_sum[r] > 0           ? row_max[r] * (unit == 1.0f ? kLn2 : 1.0f) + std::log(row_sum[r])
                        : std::isnan(row_sum[r]) ? row_sum[r]
                                                 : -std::numeric_limits<float>::infinity();
            if (sink) {
                const float s = args.tensors->sinks[h];
                if (lse == -std::numeric_limits<float>::infinity()) { // no key: the sink alone
                    scale = 0;
                    lse = s;
                } else { // NaN in either, or a sink of +inf, makes a row of NaN
                    const float top = std::max(s, lse), weight = std::exp(lse - top), sum = weight + std::exp(s - top);
                    scale = weight / sum;
                    lse = top + std::log(sum);
                }
            }
            if (t.lse) *at<float>(*t.lse, tile.b, h, i) = lse;
        }
        float *x = out + r * out_stride;
        if (sink)
            for (int64_t c = 0; c < p.dv; c++) x[c] *= scale;
        narrow(t.o.dtype, x, p.dv, address(t.o, tile.b, h, i), t.o.stride[3]);
    }
}

bool in_natural_units(const attune_problem &p) {
    return p.flags & (ATTUNE_BIAS | ATTUNE_SOFTCAP | ATTUNE_ALIBI) ||
           (p.flags & ATTUNE_SCORES && p.scores_stage != ATTUNE_SCORES_PROBABILITIES);
}

Seen see(const attune_args &args, const Tile &tile, int64_t q, Interval part, int32_t *lo, int32_t *hi) {
    const attune_problem &p = *args.problem;
    const bool structured = is_structured(p);
    Seen s{p.M, 0, 0, p.M};
    RowWalk row(p, tile);
    for (int64_t r = 0; r < q; r++, row.next()) {
        Interval seen{0, 0};
        if (r < tile.rows) {
            seen = structured ? visible_keys(args, tile.b, row.i) : Interval{0, p.M};
            seen.begin = std::max(seen.begin, part.begin);
            seen.end = std::max(seen.begin, std::min(seen.end, part.end));
            if (seen.begin < seen.end) s.first = std::min(s.first, seen.begin), s.last = std::max(s.last, seen.end);
            s.all_first = std::max(s.all_first, seen.begin);
            s.all_last = std::min(s.all_last, seen.end);
        }
        lo[r] = int32_t(seen.begin);
        hi[r] = int32_t(seen.end);
    }
    if (s.first >= s.last) s.first = s.last = 0;
    if (s.all_first >= s.all_last) s.all_first = s.all_last = s.first;
    return s;
}

void place_rows(const attune_args &args, const Tile &tile, int64_t q, int32_t *position, float *slope) {
    const attune_problem &p = *args.problem;
    const int64_t offset = p.flags & ATTUNE_OFFSETS ? args.tensors->offsets[tile.b] : p.offset;
    RowWalk row(p, tile);
    for (int64_t r = 0; r < q; r++) {
        // |i + offset - j| becomes a float: positions beyond 2^30 lose nothing that it could hold.
        position[r] = int32_t(std::clamp<int64_t>(row.i + offset, -(1 << 30), 1 << 30));
        slope[r] = args.tensors->alibi_slopes[row.h];
        if (r + 1 < tile.rows) row.next(); // rows that are not there repeat the last one
    }
}

bool Packed::keys_finite(const Seen &seen) const {
    const int64_t chunk = panel * kPackChunk;
    for (int64_t c = seen.first / chunk; c * chunk < seen.last; c++)
        if (bits[c] >= kNonFinite) return false;
    return true;
}

namespace {

// Copies a 16-bit K's rows [0, keys) to dense f32, along whichever of its dimensions is dense. Gives the copy's
// strides.
void widen_keys(const attune_tensor &t, const char *k, int64_t row, int64_t feature, int64_t keys, int64_t features,
                float *out, int64_t &out_row, int64_t &out_feature) {
    const int64_t width = bytes_of(t.dtype);
    const bool by_feature = row == 1 && feature != 1;
    out_row = by_feature ? 1 : features;
    out_feature = by_feature ? keys : 1;
    if (by_feature)
        for (int64_t d = 0; d < features; d++) widen(t.dtype, k + d * feature * width, row, keys, out + d * keys);
    else
        for (int64_t j = 0; j < keys; j++) widen(t.dtype, k + j * row * width, feature, features, out + j * features);
}

// V's rows [0, keys) to dense, zero-padded f32.
void pack_values(const attune_tensor &t, const char *v, int64_t keys, int64_t features, int64_t padded, float *out) {
    const int64_t row = keys > 1 ? t.stride[2] : 0, feature = t.stride[3], width = bytes_of(t.dtype);
    if (feature == 1 || features == 1) {
        for (int64_t j = 0; j < keys; j++) {
            widen(t.dtype, v + j * row * width, 1, features, out + j * padded);
            std::fill(out + j * padded + features, out + (j + 1) * padded, 0.0f);
        }
        return;
    }
    constexpr int64_t kSquare = 16; // walks both sides of a transpose by cache lines
    for (int64_t j0 = 0; j0 < keys; j0 += kSquare)
        for (int64_t c0 = 0; c0 < padded; c0 += kSquare)
            for (int64_t j = j0; j < std::min(j0 + kSquare, keys); j++) {
                const int64_t end = std::min(c0 + kSquare, padded), real = std::clamp(features, c0, end);
                widen(t.dtype, v + (j * row + c0 * feature) * width, feature, real - c0, out + j * padded + c0);
                std::fill(out + j * padded + real, out + j * padded + end, 0.0f);
            }
}

} // namespace

int pack_chunk(const attune_args &args, const Packed &s, int64_t task, int64_t max_extent, PackWhole pack_whole,
               const void *context, float *widened) {
    const attune_problem &p = *args.problem;
    const attune_tensors &t = *args.tensors;
    const int64_t w = s.panel, first_panel = task * kPackChunk, b = args.group / p.Hkv, h = args.group % p.Hkv;
    const int64_t first = first_panel * w, keys = std::min(kPackChunk * w, p.M - first);
    const Interval seen = keys_of_some_row(args, b);
    if (!s.packs_unseen && (first >= seen.end || first + keys <= seen.begin))
        return 0; // nobody asks for the chunk, nor for its bits
    float *packed = s.keys + first_panel * w * s.dk;
    const char *k = address(t.k, b, h, first);
    const int64_t row = keys > 1 ? t.k.stride[2] : 0, feature = p.dk > 1 ? t.k.stride[3] : 1;
    const bool halves = t.k.dtype != ATTUNE_F32;
    // Packs `panels` panels from `from` on; what is ragged by hand. 16-bit keys come a panel at a time, in f32.
    int32_t largest = 0;
    const auto pack_some = [&](const float *from, int64_t row, int64_t feature, int64_t panel, int64_t panels) {
        float *to = packed + panel * w * s.dk;
        const int64_t left = std::min(keys - panel * w, panels * w);
        int64_t whole = left / w;
        if (p.dk != s.dk || std::abs(row) > max_extent / keys || std::abs(feature) > max_extent / p.dk) whole = 0;
        int32_t found = 0;
        if (whole)
            if (int error = pack_whole(context, from, row, feature, to, whole, &found)) return error;
        for (int64_t i = whole; i < panels; i++)
            for (int64_t d = 0; d < s.dk; d++)
                for (int64_t j = 0; j < w; j++) {
                    const int64_t key = i * w + j;
                    const float x = key < left && d < p.dk ? from[key * row + d * feature] : 0.0f;
                    found = std::max(found, magnitude(x));
                    to[i * w * s.dk + d * w + j] = x;
                }
        largest = std::max(largest, found);
        return 0;
    };
    const int64_t panels = ceil_div(keys, w);
    if (!halves)
        if (int error = pack_some(reinterpret_cast<const float *>(k), row, feature, 0, panels)) return error;
    for (int64_t i = 0; i < panels && halves; i++) {
        int64_t wide_row, wide_feature;
        widen_keys(t.k, k + i * w * row * bytes_of(t.k.dtype), row, feature, std::min(w, keys - i * w), p.dk, widened,
                   wide_row, wide_feature);
        if (int error = pack_some(widened, wide_row, wide_feature, i, 1)) return error;
    }
    s.bits[task] = largest;
    if (s.packs_values) pack_values(t.v, address(t.v, b, h, first), keys, p.dv, s.dv, s.values + first * s.dv);
    return 0;
}

} // namespace attune::rt
