// The independent reference. Compiled with -ffp-contract=off: the plain f32 stages round after every operation.
#include "reference.h"

#include "numbers.h"

#include <algorithm>
#include <cmath>
#include <fmt/format.h>
#include <limits>
#include <type_traits>

namespace attune::tools {
namespace {

__extension__ typedef __int128 wide; // i + offset of any int64 offset

constexpr double kInfinity = std::numeric_limits<double>::infinity();

int64_t at(const attune_tensor &t, int64_t b, int64_t h, int64_t s, int64_t d) {
    return b * t.stride[0] + h * t.stride[1] + s * t.stride[2] + d * t.stride[3];
}

// Where rows and keys lie: a batch of equal sizes, or (ATTUNE_VARLEN) sequences of different lengths end to end.
class Shape {
  public:
    Shape(const attune_problem &p, const attune_tensors &t) : p_(p), t_(t), packed_((p.flags & ATTUNE_VARLEN) != 0) {}

    int64_t rows_of(int64_t b) const { return packed_ ? t_.cu_seqlens_q[b + 1] - t_.cu_seqlens_q[b] : p_.N; }
    int64_t keys_of(int64_t b) const { return packed_ ? t_.cu_seqlens_k[b + 1] - t_.cu_seqlens_k[b] : p_.M; }
    // All rows of all heads are numbered through: batch, head, row; packed ones head, row.
    int64_t rows_in_all() const {
        if (p_.B == 0) return 0;
        return packed_ ? p_.Hq * t_.cu_seqlens_q[p_.B] : p_.B * p_.Hq * p_.N;
    }
    struct Row {
        int64_t b, h, i;
    };
    Row row(int64_t number) const {
        if (!packed_) return {number / p_.N / p_.Hq, number / p_.N % p_.Hq, number % p_.N};
        const int64_t total = t_.cu_seqlens_q[p_.B], at = number % total;
        const int64_t b = std::upper_bound(t_.cu_seqlens_q, t_.cu_seqlens_q + p_.B + 1, at) - t_.cu_seqlens_q - 1;
        return {b, number / total, at - t_.cu_seqlens_q[b]};
    }
    // Of Q, O and LSE; of K and V.
    int64_t row_element(const attune_tensor &t, const Row &r, int64_t d) const {
        return packed_ ? at(t, 0, r.h, t_.cu_seqlens_q[r.b] + r.i, d) : at(t, r.b, r.h, r.i, d);
    }
    int64_t key_element(const attune_tensor &t, int64_t b, int64_t kv_head, int64_t j, int64_t d) const {
        return packed_ ? at(t, 0, kv_head, t_.cu_seqlens_k[b] + j, d) : at(t, b, kv_head, j, d);
    }

  private:
    const attune_problem &p_;
    const attune_tensors &t_;
    const bool packed_;
};

// K and V of one (batch, kv head), as Real: K transposed so that the inner loop runs over keys while every score still
// sums over the features from left to right.
template <typename Real> struct Keys {
    std::vector<Real> kt, v;     // [dk, M], [M, dv]
    std::vector<double> largest; // max|V| of each key, of what is finite
};

// What a row sees: keys [begin, end) of the structure, less those of the bool mask.
struct Visible {
    int64_t begin = 0, end = 0;
};

class Computer {
  public:
    Computer(const attune_problem &p, const attune_tensors &t, const ReferenceOptions &options)
        : p_(p), t_(t), options_(options), shape_(p, t) {
        // 1/sqrt(dk) in double and in f32: the f32 reference gets what any kernel gets.
        scale_ = (p.flags & ATTUNE_SCALE) ? double(p.scale) : 1.0 / std::sqrt(double(p.dk));
        scale_f32_ = (p.flags & ATTUNE_SCALE) ? p.scale : 1.0f / std::sqrt(float(p.dk));
    }

    Visible visible(int64_t b, int64_t i) const {
        const wide position = wide(i) + ((p_.flags & ATTUNE_OFFSETS) ? t_.offsets[b] : p_.offset);
        wide begin = 0, end = shape_.keys_of(b);
        if (p_.flags & ATTUNE_KV_LEN) end = std::min<wide>(end, t_.kv_len[b]);
        if (p_.flags & ATTUNE_CAUSAL) end = std::min(end, position + 1);
        if (p_.window_left >= 0) begin = std::max(begin, position - p_.window_left);
        if (p_.window_right >= 0) end = std::min(end, position + p_.window_right + 1);
        if (end <= begin) return {};
        return {int64_t(begin), int64_t(end)};
    }

    template <typename Real> void load(int64_t b, int64_t kv_head, Keys<Real> &keys) const {
        const int64_t m = shape_.keys_of(b);
        keys.kt.resize(size_t(p_.dk * m));
        keys.v.resize(size_t(m * p_.dv));
        keys.largest.assign(size_t(m), 0.0);
        for (int64_t j = 0; j < m; ++j) {
            for (int64_t d = 0; d < p_.dk; ++d)
                keys.kt[size_t(d * m + j)] =
                    Real(load_element(t_.k.data, p_.kv_dtype, shape_.key_element(t_.k, b, kv_head, j, d)));
            for (int64_t d = 0; d < p_.dv; ++d) {
                const float value = load_element(t_.v.data, p_.kv_dtype, shape_.key_element(t_.v, b, kv_head, j, d));
                keys.v[size_t(j * p_.dv + d)] = Real(value);
                if (std::isfinite(value))
                    keys.largest[size_t(j)] = std::max(keys.largest[size_t(j)], std::abs(double(value)));
            }
        }
    }

    // One row. Returns LSE; scores (if not null) takes the values of its keys of the problem's scores_stage.
    template <typename Real>
    Real row(const Shape::Row &where, const Keys<Real> &keys, Real *o, double *scores, Reference *maxima) {
        const Real kMinusInfinity = -std::numeric_limits<Real>::infinity();
        const Real kNaN = std::numeric_limits<Real>::quiet_NaN();
        const auto [b, h, i] = where;
        const int64_t m = shape_.keys_of(b);
        const Visible range = visible(b, i);
        std::vector<Real> &s = buffer<Real>();
        s.assign(size_t(m), Real(0));

        // With a scores output the raw scores of all keys are wanted; otherwise those of the visible range will do.
        const bool raw_wanted = scores && p_.scores_stage <= ATTUNE_SCORES_CAPPED;
        const int64_t begin = raw_wanted ? 0 : range.begin, end = raw_wanted ? m : range.end;
        for (int64_t d = 0; d < p_.dk; ++d) {
            const Real q = Real(load_element(t_.q.data, p_.q_dtype, shape_.row_element(t_.q, where, d)));
            const Real *kt = keys.kt.data() + d * m;
            Real *sum = s.data();
            for (int64_t j = begin; j < end; ++j) sum[j] += q * kt[j];
        }
        const Real scale = std::is_same_v<Real, double> ? Real(scale_) : Real(scale_f32_);
        for (int64_t j = begin; j < end; ++j) s[j] = stored(scale * s[j]);
        if (scores && p_.scores_stage == ATTUNE_SCORES_RAW) std::copy(s.begin(), s.end(), scores);

        if (p_.flags & ATTUNE_SOFTCAP) {
            const Real cap = Real(p_.softcap);
            for (int64_t j = begin; j < end; ++j) s[j] = cap * std::tanh(s[j] / cap);
        }
        if (scores && p_.scores_stage == ATTUNE_SCORES_CAPPED) std::copy(s.begin(), s.end(), scores);

        // Visibility is a predicate: `seen`, never a value that a score could reach.
        std::vector<char> &seen = seen_;
        seen.assign(size_t(m), 0);
        const wide position = wide(i) + ((p_.flags & ATTUNE_OFFSETS) ? t_.offsets[b] : p_.offset);
        Real maximum = kMinusInfinity;
        bool any = false, broken = false;
        for (int64_t j = range.begin; j < range.end; ++j) {
            if ((p_.flags & ATTUNE_MASK) && !static_cast<const uint8_t *>(t_.mask->data)[at(*t_.mask, b, h, i, j)])
                continue;
            if (options_.user) {
                double changed = double(s[j]);
                if (!options_.user(b, h, i, j, changed)) continue;
                s[j] = Real(changed);
            }
            if (p_.flags & ATTUNE_ALIBI) {
                const wide distance = position > j ? position - j : j - position;
                s[j] -= Real(t_.alibi_slopes[h]) * Real(distance);
            }
            if (p_.flags & ATTUNE_BIAS) {
                const float bias = load_element(t_.bias->data, ATTUNE_F32, at(*t_.bias, b, h, i, j));
                if (bias == -std::numeric_limits<float>::infinity()) continue; // -inf masks
                s[j] += Real(bias);
            }
            s[j] = stored(s[j]);
            if (s[j] == kMinusInfinity) continue;
            if (std::isnan(s[j]) || s[j] > std::numeric_limits<float>::max()) broken = true; // scores are f32
            seen[size_t(j)] = 1;
            any = true;
            maximum = std::max(maximum, s[j]);
            if (maxima && !broken) {
                maxima->max_score = std::max(maxima->max_score, std::abs(double(s[j])));
                maxima->max_value = std::max(maxima->max_value, keys.largest[size_t(j)]);
            }
        }
        if (scores && p_.scores_stage == ATTUNE_SCORES_BIASED)
            for (int64_t j = 0; j < m; ++j) scores[j] = seen[size_t(j)] ? double(s[j]) : -kInfinity;

        const bool has_sink = (p_.flags & ATTUNE_SINK) != 0;
        const Real sink = has_sink ? Real(t_.sinks[h]) : kMinusInfinity;
        std::fill(o, o + p_.dv, Real(0));
        if (scores && p_.scores_stage == ATTUNE_SCORES_PROBABILITIES) std::fill(scores, scores + m, 0.0);
        if (!any) return sink;
        if (broken) {
            std::fill(o, o + p_.dv, kNaN);
            if (scores && p_.scores_stage == ATTUNE_SCORES_PROBABILITIES)
                for (int64_t j = 0; j < m; ++j) scores[j] = seen[size_t(j)] ? double(kNaN) : 0.0;
            return kNaN;
        }

        const Real top = std::max(maximum, sink);
        Real sum = 0;
        for (int64_t j = range.begin; j < range.end; ++j)
            if (seen[size_t(j)]) sum += s[j] = std::exp(s[j] - top);
        if (has_sink) sum += std::exp(sink - top);
        for (int64_t j = range.begin; j < range.end; ++j) {
            if (!seen[size_t(j)]) continue;
            const Real weight = stored(s[j] / sum);
            const Real *v = keys.v.data() + j * p_.dv;
            for (int64_t d = 0; d < p_.dv; ++d) o[d] += weight * v[d];
            if (scores && p_.scores_stage == ATTUNE_SCORES_PROBABILITIES) scores[j] = double(weight);
        }
        if constexpr (std::is_same_v<Real, float>)
            for (int64_t d = 0; d < p_.dv; ++d) o[d] = round_to(o[d], p_.o_dtype);
        return top + std::log(sum);
    }

  private:
    // A stage's result as the plain reference keeps it: in the input type.
    double stored(double x) const { return x; }
    float stored(float x) const { return round_to(x, p_.q_dtype); }

    template <typename Real> std::vector<Real> &buffer() {
        if constexpr (std::is_same_v<Real, double>)
            return s64_;
        else
            return s32_;
    }

    const attune_problem &p_;
    const attune_tensors &t_;
    const ReferenceOptions &options_;
    const Shape shape_;
    double scale_;
    float scale_f32_;
    std::vector<double> s64_;
    std::vector<float> s32_;
    std::vector<char> seen_;
};

// |got - expected|; 0 if both are NaN or the same infinity, infinity if only one of them is.
double difference(double got, double expected) {
    if (std::isnan(got) || std::isnan(expected)) return std::isnan(got) == std::isnan(expected) ? 0 : kInfinity;
    if (std::isinf(got) || std::isinf(expected)) return got == expected ? 0 : kInfinity;
    return std::abs(got - expected);
}

double max_difference(const std::vector<double> &a, const std::vector<double> &b) {
    double most = 0;
    for (size_t i = 0; i < a.size(); ++i) {
        const double d = difference(a[i], b[i]);
        // Where the plain f32 stages themselves leave the range, they say nothing about what can be reached.
        if (std::isfinite(d)) most = std::max(most, d);
    }
    return most;
}

std::string show(double x) {
    return std::isnan(x) ? "NaN" : fmt::format("{:.9g}", x);
}

std::string element(const Shape::Row &row, int64_t d, const char *array, const char *last) {
    return fmt::format("{}[b={}, h={}, i={}{}]", array, row.b, row.h, row.i,
                       last ? fmt::format(", {}={}", last, d) : "");
}

} // namespace

double Reference::lse_bound(size_t row) const {
    const double size = std::isfinite(lse[row]) ? std::abs(lse[row]) : 0;
    return 2 * lse_plain_error + 8 * 0x1p-23 * std::max(1.0, size);
}

Reference make_reference(const attune_problem &p, const attune_tensors &t, const ReferenceOptions &options) {
    Reference r;
    r.problem = p;
    const Shape shape(p, t);
    r.total_rows = shape.rows_in_all();
    if (r.total_rows == 0) return r;
    Computer computer(p, t, options);

    // The cost of a typical row, from the rows' own visible ranges: a window makes long problems cheap.
    double pairs = 0;
    const int64_t step = std::max<int64_t>(1, p.N / 64);
    int64_t sampled = 0;
    for (int64_t b = 0; b < p.B; ++b)
        for (int64_t i = 0; i < shape.rows_of(b); i += step, ++sampled) {
            const Visible v = computer.visible(b, i);
            pairs += double(v.end - v.begin);
        }
    const double cost = std::max(1.0, pairs / double(sampled) * double(p.dk + p.dv));
    int64_t count = std::max<int64_t>(options.least_rows, int64_t(double(options.budget) / cost));
    count = std::min(count, r.total_rows);
    for (int64_t k = 0; k < count; ++k)
        r.rows.push_back(count == 1 ? 0 : int64_t(wide(k) * (r.total_rows - 1) / (count - 1)));

    const bool with_scores = (p.flags & ATTUNE_SCORES) != 0;
    r.o.resize(size_t(count * p.dv));
    r.o_plain.resize(r.o.size());
    r.lse.resize(size_t(count));
    r.lse_plain.resize(size_t(count));
    if (with_scores) {
        r.scores.resize(size_t(count * p.M));
        r.scores_plain.resize(r.scores.size());
    }
    Keys<double> keys64;
    Keys<float> keys32;
    std::vector<float> o32(size_t(p.dv), 0.0f);
    int64_t loaded = -1;
    for (int64_t k = 0; k < count; ++k) {
        const Shape::Row row = shape.row(r.rows[size_t(k)]);
        const int64_t kv_head = row.h / (p.Hq / p.Hkv), head = row.b * p.Hkv + kv_head;
        if (head != loaded) {
            computer.load(row.b, kv_head, keys64);
            computer.load(row.b, kv_head, keys32);
            loaded = head;
        }
        double *scores = with_scores ? r.scores.data() + k * p.M : nullptr;
        double *scores_plain = with_scores ? r.scores_plain.data() + k * p.M : nullptr;
        r.lse[size_t(k)] = computer.row(row, keys64, r.o.data() + k * p.dv, scores, &r);
        r.lse_plain[size_t(k)] = double(computer.row(row, keys32, o32.data(), scores_plain, nullptr));
        std::copy(o32.begin(), o32.end(), r.o_plain.begin() + k * p.dv);
    }
    for (double x : r.o)
        if (!std::isfinite(x)) r.finite = false;

    const double epsilon = dtype_epsilon(p.o_dtype);
    r.o_bound = 2 * max_difference(r.o_plain, r.o) + epsilon * (8 + 4 * r.max_score) * r.max_value;
    r.lse_plain_error = max_difference(r.lse_plain, r.lse);
    if (with_scores) {
        const bool weights = p.scores_stage == ATTUNE_SCORES_PROBABILITIES;
        double size = 8 + 4 * r.max_score;
        if (!weights) {
            size = 1;
            for (double x : r.scores)
                if (std::isfinite(x)) size = std::max(size, std::abs(x));
            size *= 8;
        }
        r.scores_bound = 2 * max_difference(r.scores_plain, r.scores) + dtype_epsilon(ATTUNE_F32) * size;
    }
    return r;
}

Verdict check_outputs(const Reference &r, const attune_tensors &t) {
    const attune_problem &p = r.problem;
    const Shape shape(p, t);
    Verdict v;
    v.o_bound = r.o_bound;
    v.scores_bound = r.scores_bound;
    v.rows_checked = int64_t(r.rows.size());
    v.rows_total = r.total_rows;
    const auto wrong = [&v](const std::string &where, double got, double expected, double bound) {
        if (v.why.empty())
            v.why =
                where + " = " + show(got) + "; expected " + show(expected) + " within " + fmt::format("{:.3g}", bound);
        v.ok = false;
    };
    double worst_lse = -1;
    for (size_t k = 0; k < r.rows.size(); ++k) {
        const Shape::Row row = shape.row(r.rows[k]);
        for (int64_t d = 0; d < p.dv; ++d) {
            const double got = load_element(t.o.data, t.o.dtype, shape.row_element(t.o, row, d));
            const double expected = r.o[k * size_t(p.dv) + size_t(d)], error = difference(got, expected);
            v.o_error = std::max(v.o_error, error);
            if (!(error <= r.o_bound)) wrong(element(row, d, "O", "d"), got, expected, r.o_bound);
        }
        if (t.lse) {
            const double got = load_element(t.lse->data, ATTUNE_F32, shape.row_element(*t.lse, row, 0));
            const double error = difference(got, r.lse[k]), bound = r.lse_bound(k);
            if (error / bound > worst_lse) {
                worst_lse = error / bound;
                v.lse_error = error;
                v.lse_bound = bound;
            }
            if (!(error <= bound)) wrong(element(row, 0, "LSE", nullptr), got, r.lse[k], bound);
        }
        if ((p.flags & ATTUNE_SCORES) && t.scores)
            for (int64_t j = 0; j < shape.keys_of(row.b); ++j) {
                const double got = load_element(t.scores->data, ATTUNE_F32, at(*t.scores, row.b, row.h, row.i, j));
                const double expected = r.scores[k * size_t(p.M) + size_t(j)], error = difference(got, expected);
                v.scores_error = std::max(v.scores_error, error);
                if (!(error <= r.scores_bound)) wrong(element(row, j, "scores", "j"), got, expected, r.scores_bound);
            }
    }
    // Rows outside the sample: at least written, and with numbers.
    if (v.rows_checked < v.rows_total && r.finite)
        for (int64_t number = 0; number < r.total_rows && v.ok; ++number)
            for (int64_t d = 0; d < p.dv; ++d) {
                const Shape::Row row = shape.row(number);
                const double got = load_element(t.o.data, t.o.dtype, shape.row_element(t.o, row, d));
                if (std::isfinite(got)) continue;
                v.ok = false;
                v.o_error = kInfinity;
                v.why = element(row, d, "O", "d") + " = " + show(got) + "; expected a finite number";
                break;
            }
    return v;
}

} // namespace attune::tools
