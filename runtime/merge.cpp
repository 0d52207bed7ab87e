// attune_merge: attentions over parts of the keys become the attention over all of them.
//
// A pass over memory, a row at a time: first the weights' maximum and sum from the parts' LSE, then O by chunks of
// features that stay in the first cache. Rows are read before they are written, so that the output may lie in place.
#include "attune/attune.h"

#include "half.h"
#include "rows.h"
#include "status.h"
#include "threads.h"
#include "tiles.h"
#include "validate.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <limits>

namespace attune::rt {

namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr int64_t kChunk = 256;

struct Merge {
    const attune_partial *parts;
    int64_t num_parts;
    const float *sinks;
    const attune_tensor &o;
    const attune_tensor *lse;
    int64_t rows_per_task;

    int64_t rows() const { return o.shape[0] * o.shape[1] * o.shape[2]; }
    float part_lse(int64_t n, int64_t b, int64_t h, int64_t i) const { return *at<float>(parts[n].lse, b, h, i); }
};

// sum[c] += weight * x[c], for `n` features from `first` on of a row of `t`.
void accumulate(const attune_tensor &t, int64_t b, int64_t h, int64_t i, int64_t first, int64_t n, float weight,
                float *sum) {
    const int64_t stride = t.stride[3];
    if (t.dtype == ATTUNE_F32) {
        const float *x = at<float>(t, b, h, i, first);
        if (stride == 1)
            for (int64_t c = 0; c < n; c++) sum[c] += weight * x[c];
        else
            for (int64_t c = 0; c < n; c++) sum[c] += weight * x[c * stride];
        return;
    }
    const uint16_t *x = at<uint16_t>(t, b, h, i, first);
    if (t.dtype == ATTUNE_BF16)
        for (int64_t c = 0; c < n; c++) sum[c] += weight * bf16_to_float(x[c * stride]);
    else
        for (int64_t c = 0; c < n; c++) sum[c] += weight * f16_to_float(x[c * stride]);
}

void store(const attune_tensor &t, int64_t b, int64_t h, int64_t i, int64_t first, int64_t n, const float *x) {
    const int64_t stride = t.stride[3];
    if (t.dtype == ATTUNE_F32) {
        float *y = at<float>(t, b, h, i, first);
        for (int64_t c = 0; c < n; c++) y[c * stride] = x[c];
        return;
    }
    uint16_t *y = at<uint16_t>(t, b, h, i, first);
    for (int64_t c = 0; c < n; c++) y[c * stride] = t.dtype == ATTUNE_BF16 ? float_to_bf16(x[c]) : float_to_f16(x[c]);
}

void merge_row(const Merge &m, int64_t row) {
    const int64_t i = row % m.o.shape[2], h = row / m.o.shape[2] % m.o.shape[1], b = row / m.o.shape[2] / m.o.shape[1];
    const float sink = m.sinks ? m.sinks[h] : -kInf;
    float top = -kInf;
    bool any = false, poisoned = false;
    for (int64_t n = 0; n < m.num_parts; n++) {
        const float l = m.part_lse(n, b, h, i);
        poisoned = poisoned || std::isnan(l) || l == kInf;
        any = any || l > -kInf;
        top = std::max(top, l);
    }
    if (any) {
        poisoned = poisoned || std::isnan(sink) || sink == kInf;
        top = std::max(top, sink);
    }
    double sum = 0;
    if (any && !poisoned) {
        for (int64_t n = 0; n < m.num_parts; n++) sum += std::exp(double(m.part_lse(n, b, h, i)) - double(top));
        if (m.sinks) sum += std::exp(double(sink) - double(top));
    }
    float acc[kChunk];
    for (int64_t first = 0; first < m.o.shape[3]; first += kChunk) {
        const int64_t chunk = std::min(kChunk, m.o.shape[3] - first);
        std::fill_n(acc, chunk, poisoned ? kNan : 0.0f);
        for (int64_t n = 0; n < m.num_parts && any && !poisoned; n++) {
            const float l = m.part_lse(n, b, h, i);
            if (l == -kInf) continue;
            // Never quite 0, so that an infinity stays one: the smallest float times the largest is 5e-7.
            const float weight =
                std::max(float(std::exp(double(l) - double(top)) / sum), std::numeric_limits<float>::denorm_min());
            accumulate(m.parts[n].o, b, h, i, first, chunk, weight, acc);
        }
        store(m.o, b, h, i, first, chunk, acc);
    }
    if (m.lse) *at<float>(*m.lse, b, h, i) = poisoned ? kNan : any ? float(double(top) + std::log(sum)) : sink;
}

void merge_part(void *context, const Part &part) {
    const Merge &m = *static_cast<const Merge *>(context);
    for (int64_t row = part.begin * m.rows_per_task; row < std::min(part.end * m.rows_per_task, m.rows()); row++)
        merge_row(m, row);
}

} // namespace

} // namespace attune::rt

using namespace attune::rt;

extern "C" attune_status attune_merge(const attune_partial *parts, int64_t num_parts, const float *sinks,
                                      const attune_tensor *o, const attune_tensor *lse) try {
    if (num_parts < 0) return fail(ATTUNE_INVALID_ARGUMENT, "num_parts is {}: expected 0 or more", num_parts);
    if (!parts && num_parts) return fail(ATTUNE_INVALID_ARGUMENT, "parts is null: expected {} partials", num_parts);
    if (!o) return fail(ATTUNE_INVALID_ARGUMENT, "o is null: expected the tensor to write");
    for (int d = 0; d < 4; d++)
        if (o->shape[d] < 0)
            return fail(ATTUNE_INVALID_ARGUMENT, "o.shape[{}] is {}: expected 0 or more", d, o->shape[d]);
    const auto float_type = [](attune_dtype t) { return t == ATTUNE_F32 || t == ATTUNE_BF16 || t == ATTUNE_F16; };
    const auto check = [&](const char *name, const attune_tensor &t, bool is_lse, bool output) {
        const attune_dtype dtype = is_lse ? ATTUNE_F32 : t.dtype;
        if (!is_lse && !float_type(t.dtype))
            return fail(ATTUNE_INVALID_ARGUMENT, "{}.dtype is {} ({}): expected f32, bf16 or f16", name,
                        attune_dtype_string(t.dtype), int(t.dtype));
        return check_tensor(
            {name, t, dtype, ATTUNE_CPU, {o->shape[0], o->shape[1], o->shape[2], is_lse ? 1 : o->shape[3]}, !output});
    };
    if (attune_status s = check("o", *o, false, true)) return s;
    if (lse)
        if (attune_status s = check("lse", *lse, true, true)) return s;
    for (int64_t n = 0; n < num_parts; n++) {
        char name[40]; // a string might allocate; and fmt::format_to_n brings 150 KiB of fmt into the object
        const auto part = [&](const char *what) {
            std::snprintf(name, sizeof name, "parts[%lld].%s", static_cast<long long>(n), what);
            return name;
        };
        if (attune_status s = check(part("o"), parts[n].o, false, false)) return s;
        if (attune_status s = check(part("lse"), parts[n].lse, true, false)) return s;
    }
    Merge m{parts, num_parts, sinks, *o, lse, 1};
    if (!m.rows()) return ATTUNE_OK;
    // Tasks of 64 KiB or more; a smaller merge is not worth a second thread.
    const int64_t row_bytes = 4 * (o->shape[3] + 1) * (num_parts + 1);
    m.rows_per_task = std::max<int64_t>(1, 65536 / row_bytes);
    const int64_t tasks = ceil_div(m.rows(), m.rows_per_task);
    parallel_groups(attune_get_num_threads(), 1, {&tasks, 1}, merge_part, &m);
    return ATTUNE_OK;
} catch (const std::bad_alloc &) { // messages take memory
    return fail(ATTUNE_OUT_OF_MEMORY, "no memory for the message of an error");
}
