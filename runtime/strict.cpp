#include "strict.h"

#include "half.h"

#include <atomic>
#include <cmath>
#include <limits>

namespace attune::rt {

namespace {

std::atomic<uint64_t> strict_tiles{0};

constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

// Element `index` of a row of `t`.
double element(const attune_tensor &t, const char *row, int64_t index) {
    if (t.dtype == ATTUNE_F32) return double(reinterpret_cast<const float *>(row)[index]);
    const uint16_t half = reinterpret_cast<const uint16_t *>(row)[index];
    return double(t.dtype == ATTUNE_BF16 ? bf16_to_float(half) : f16_to_float(half));
}

// One row of one query head, and its scores as they go through the stages.
struct Row {
    const attune_args &args;
    const attune_problem &p;
    const UserRow *user;
    int64_t b, h, hkv, i;
    Interval seen;
    // What user functions say of some keys from user_first on: they are asked for many at a time.
    static constexpr int64_t kUserKeys = 64;
    mutable int64_t user_first = -kUserKeys;
    mutable float user_scores[kUserKeys];
    mutable uint8_t user_visible[kUserKeys];

    Row(const attune_args &args, const Tile &tile, int64_t r, const UserRow *user)
        : args(args), p(*args.problem), user(user), b(tile.b), hkv(tile.hkv) {
        const int64_t row = tile.first + r;
        h = hkv * (p.Hq / p.Hkv) + row / p.N;
        i = row % p.N;
        seen = visible_keys(args, b, i);
    }

    double raw(int64_t j) const {
        const attune_tensors &t = *args.tensors;
        const char *q = address(t.q, b, h, i), *k = address(t.k, b, hkv, j);
        double dot = 0;
        for (int64_t d = 0; d < p.dk; d++)
            dot += element(t.q, q, d * t.q.stride[3]) * element(t.k, k, d * t.k.stride[3]);
        return float(double(args.scale) * dot); // a score that overflows f32 is infinite
    }

    double capped(int64_t j) const {
        const double s = raw(j);
        return p.flags & ATTUNE_SOFTCAP ? double(p.softcap) * std::tanh(s / double(p.softcap)) : s;
    }

    // The same after user functions; false if these hide key j.
    bool modified(int64_t j, double &s) const {
        if (!user) {
            s = capped(j);
            return true;
        }
        if (j < user_first || j >= user_first + kUserKeys) {
            user_first = j;
            const int64_t count = std::min(kUserKeys, p.M - j);
            for (int64_t n = 0; n < count; n++) user_scores[n] = float(capped(j + n));
            user->apply(b, h, i, j, count, user_scores, user_visible);
        }
        s = double(user_scores[j - user_first]);
        return user_visible[j - user_first] != 0;
    }

    // False if key j is invisible.
    bool biased(int64_t j, double &s) const {
        const attune_tensors &t = *args.tensors;
        if (j < seen.begin || j >= seen.end) return false;
        if (p.flags & ATTUNE_MASK && !*at<uint8_t>(*t.mask, b, h, i, j)) return false;
        double bias = 0;
        if (p.flags & ATTUNE_BIAS) bias = *at<float>(*t.bias, b, h, i, j);
        if (bias == -kInf) return false;
        if (!modified(j, s)) return false;
        if (p.flags & ATTUNE_ALIBI) {
            const int64_t offset = p.flags & ATTUNE_OFFSETS ? t.offsets[b] : p.offset;
            s -= double(t.alibi_slopes[h]) * std::fabs(double(i + offset - j));
        }
        s += bias;
        return s != -kInf;
    }
};

struct State {
    double max = -kInf, sum = 0;
    bool any = false, poisoned = false; // by a NaN or +inf in a visible score
};

State reduce(const Row &row, Interval keys) {
    State x;
    double s;
    for (int64_t j = keys.begin; j < keys.end; j++) {
        if (!row.biased(j, s)) continue;
        x.any = true;
        x.poisoned = x.poisoned || std::isnan(s) || s == kInf;
        x.max = std::max(x.max, s);
    }
    if (x.any && !x.poisoned)
        for (int64_t j = keys.begin; j < keys.end; j++)
            if (row.biased(j, s)) x.sum += std::exp(s - x.max);
    return x;
}

} // namespace

void strict_attend(const attune_args &args, const Tile &tile, Interval keys, float *out, int64_t out_stride,
                   float *row_max, float *row_sum, const UserRow *user) {
    strict_tiles.fetch_add(1, std::memory_order_relaxed);
    const attune_problem &p = *args.problem;
    const attune_tensors &t = *args.tensors;
    // No heap: features are summed a chunk at a time, with the scores computed anew for each.
    constexpr int64_t kChunk = 128;
    double acc[kChunk];
    for (int64_t r = 0; r < tile.rows; r++) {
        const Row row(args, tile, r, user);
        const State x = reduce(row, keys);
        for (int64_t c0 = 0; c0 < p.dv; c0 += kChunk) {
            const int64_t chunk = std::min(kChunk, p.dv - c0);
            std::fill_n(acc, chunk, 0.0);
            double s;
            for (int64_t j = keys.begin; j < keys.end && x.any && !x.poisoned; j++) {
                if (!row.biased(j, s)) continue;
                const double w = std::exp(s - x.max);
                const char *v = address(t.v, tile.b, tile.hkv, j, c0);
                for (int64_t c = 0; c < chunk; c++) acc[c] += w * element(t.v, v, c * t.v.stride[3]);
            }
            for (int64_t c = 0; c < chunk; c++)
                out[r * out_stride + c0 + c] = float(x.poisoned ? kNan : x.any ? acc[c] / x.sum : 0.0);
        }
        row_max[r] = float(x.poisoned ? kNan : x.any ? x.max : -double(std::numeric_limits<float>::max()));
        row_sum[r] = float(x.poisoned ? kNan : x.sum);
    }
}

void strict_scores(const attune_args &args, const Tile &tile, const UserRow *user) {
    const attune_problem &p = *args.problem;
    const attune_tensor &t = *args.tensors->scores;
    for (int64_t r = 0; r < tile.rows; r++) {
        const Row row(args, tile, r, user);
        State x = p.scores_stage == ATTUNE_SCORES_PROBABILITIES ? reduce(row, {0, p.M}) : State{};
        if (p.flags & ATTUNE_SINK && x.any) x.sum += std::exp(double(args.tensors->sinks[row.h]) - x.max);
        for (int64_t j = 0; j < p.M; j++) {
            double s = -kInf, value = 0;
            switch (p.scores_stage) {
            case ATTUNE_SCORES_RAW:
                value = row.raw(j);
                break;
            case ATTUNE_SCORES_CAPPED:
                value = row.capped(j);
                break;
            case ATTUNE_SCORES_BIASED:
                value = row.biased(j, s) ? s : -kInf;
                break;
            case ATTUNE_SCORES_PROBABILITIES:
                value = x.poisoned ? kNan : row.biased(j, s) ? std::exp(s - x.max) / x.sum : 0.0;
                break;
            }
            *at<float>(t, row.b, row.h, row.i, j) = float(value);
        }
    }
}

} // namespace attune::rt

extern "C" uint64_t attune_strict_tiles(void) {
    return attune::rt::strict_tiles;
}
