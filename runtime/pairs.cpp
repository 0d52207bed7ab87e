#include "pairs.h"

#include <bit>
#include <cmath>

namespace attune::rt {

namespace {

constexpr uint16_t kSign = 0x8000, kLeastNormal = 0x0080, kHuge = 0x5d80; // kHuge: 2^60
constexpr float kSmall = 0x1p-60f;

// Its top bit is set unless x is zero or within [2^-126, 2^60); an or over many tells whether all are.
uint16_t unusual(uint16_t x) {
    const uint16_t magnitude = x & 0x7fff;
    const bool denormal = magnitude - 1 < kLeastNormal - 1 && magnitude != 0, huge = magnitude >= kHuge;
    return denormal || huge ? kSign : 0;
}

ATTUNE_VECTOR_CLONES uint16_t copy_row(const uint16_t *x, int64_t stride, int64_t n, uint16_t sign, uint16_t *y) {
    uint16_t any = 0;
    if (stride == 1) {
        for (int64_t d = 0; d < n; d++) {
            y[d] = x[d] ^ sign;
            any |= unusual(x[d]);
        }
    } else {
        for (int64_t d = 0; d < n; d++) {
            y[d] = x[d * stride] ^ sign;
            any |= unusual(x[d * stride]);
        }
    }
    return any;
}

// Rows a and b, interleaved; b may be null.
ATTUNE_VECTOR_CLONES void interleave(const uint16_t *a, const uint16_t *b, int64_t stride, int64_t n, uint32_t *out) {
    if (stride == 1 && b)
        for (int64_t c = 0; c < n; c++) out[c] = a[c] | uint32_t(b[c]) << 16;
    else
        for (int64_t c = 0; c < n; c++) out[c] = a[c * stride] | uint32_t(b ? b[c * stride] : 0) << 16;
}

ATTUNE_VECTOR_CLONES uint16_t largest_of(const uint16_t *x, int64_t stride, int64_t n) {
    uint16_t most = 0;
    if (stride == 1)
        for (int64_t c = 0; c < n; c++) most = std::max(most, uint16_t(x[c] & 0x7fff));
    else
        for (int64_t c = 0; c < n; c++) most = std::max(most, uint16_t(x[c * stride] & 0x7fff));
    return most;
}

ATTUNE_VECTOR_CLONES float largest_of(const float *x, int64_t n) {
    float most = 0;
    for (int64_t c = 0; c < n; c++) most = std::max(most, std::fabs(x[c]));
    return most;
}

} // namespace

bool gather_pairs(const attune_args &args, const Tile &tile, int64_t q, int64_t dk, bool negate, uint16_t *out) {
    const attune_problem &p = *args.problem;
    const attune_tensor &t = args.tensors->q;
    uint16_t any = 0;
    RowWalk row(p, tile);
    for (int64_t r = 0; r < tile.rows; r++, row.next()) {
        uint16_t *y = out + r * dk;
        any |= copy_row(at<uint16_t>(t, tile.b, row.h, row.i), t.stride[3], p.dk, negate ? kSign : 0, y);
        std::fill(y + p.dk, y + dk, uint16_t(0));
    }
    std::fill(out + tile.rows * dk, out + q * dk, uint16_t(0));
    return !any && finite_slopes(args, tile);
}

int pack_pairs_chunk(const attune_args &args, const Packed &s, int64_t task, int64_t max_extent, PackWhole pack_whole,
                     const void *context) {
    const attune_problem &p = *args.problem;
    const attune_tensors &t = *args.tensors;
    const int64_t w = s.panel, first = task * kPackChunk * w, b = args.group / p.Hkv, h = args.group % p.Hkv;
    const int64_t keys = std::min(kPackChunk * w, p.M - first), pairs = s.dk / 2;
    const Interval seen = keys_of_some_row(args, b);
    if (first >= seen.end || first + keys <= seen.begin) return 0; // nobody asks for the chunk, nor for its bits
    uint32_t *packed = reinterpret_cast<uint32_t *>(s.keys) + first * pairs;
    const uint16_t *k = at<uint16_t>(t.k, b, h, first);
    const int64_t row = keys > 1 ? t.k.stride[2] : 0, feature = p.dk > 1 ? t.k.stride[3] : 1;
    // Whole panels where two features lie as a pair already. Rows of an odd number of features do not.
    int64_t whole = keys / w;
    if (p.dk != s.dk || feature != 1 || row % 2 || std::abs(row) > max_extent / keys) whole = 0;
    int32_t largest = 0;
    if (whole)
        if (int error = pack_whole(context, reinterpret_cast<const float *>(k), row / 2, 1,
                                   reinterpret_cast<float *>(packed), whole, &largest))
            return error;
    uint16_t found = 0;
    const int64_t panels = ceil_div(keys, w);
    for (int64_t panel = whole; panel < panels; panel++)
        for (int64_t d = 0; d < pairs; d++) {
            uint32_t *to = packed + (panel * pairs + d) * w;
            const int64_t real = std::min(w, keys - panel * w), at = 2 * d * feature;
            const bool has_first = 2 * d < p.dk, has_second = 2 * d + 1 < p.dk;
            const uint16_t *from = k + panel * w * row;
            for (int64_t j = 0; j < real; j++) {
                const uint16_t x = has_first ? from[j * row + at] : uint16_t(0);
                const uint16_t y = has_second ? from[j * row + at + feature] : uint16_t(0);
                found = std::max({found, uint16_t(x & 0x7fff), uint16_t(y & 0x7fff)});
                to[j] = x | uint32_t(y) << 16;
            }
            std::fill(to + real, to + w, 0u);
        }
    s.bits[task] = std::max(largest, int32_t(found) << 16);

    uint32_t *values = reinterpret_cast<uint32_t *>(s.values) + first / 2 * s.dv;
    const uint16_t *v = at<uint16_t>(t.v, b, h, first);
    const int64_t v_row = keys > 1 ? t.v.stride[2] : 0, v_feature = t.v.stride[3];
    for (int64_t j = 0; j < panels * w; j += 2, values += s.dv) {
        int64_t real = 0;
        if (j < keys) {
            real = p.dv;
            interleave(v + j * v_row, j + 1 < keys ? v + (j + 1) * v_row : nullptr, p.dv > 1 ? v_feature : 1, real,
                       values);
        }
        std::fill(values + real, values + s.dv, 0u);
    }
    return 0;
}

bool lost_values(const attune_args &args, const Tile &tile, const Seen &seen, const float *out, int64_t stride) {
    const attune_problem &p = *args.problem;
    const attune_tensor &v = args.tensors->v;
    for (int64_t r = 0; r < tile.rows; r++)
        if (largest_of(out + r * stride, p.dv) >= kSmall) return false; // what was lost is nothing beside it
    uint16_t most = 0;
    for (int64_t j = seen.first; j < seen.last; j++)
        most = std::max(most, largest_of(at<uint16_t>(v, tile.b, tile.hkv, j), v.stride[3], p.dv));
    return most > 0 && most < uint16_t(std::bit_cast<uint32_t>(kSmall) >> 16);
}

} // namespace attune::rt
