// Multi-head attention on top of attune_run: four projections by the generated matmul kernels around one attention
// plan.
//
// The projections write [B, N, H*d], and attention reads and writes that memory through strides (a head is d columns),
// so nothing is ever transposed. A call's workspace holds q | k | v | attention's output | the plan's own workspace.
#include "attune/attune.h"
#include "matmul.h"
#include "safetensors.h"
#include "status.h"

#include <array>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <limits>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace attune::rt {
namespace {

constexpr size_t kAlignment = 64;
constexpr int64_t kMaxFeatures = std::numeric_limits<int32_t>::max(); // of a matrix side: kernels index with int32
constexpr size_t kMaxPlans = 256; // of the cache below; a plan is small, but a server sees every length there is

struct FreeDeleter {
    void operator()(void *p) const { std::free(p); }
};

// One projection y = x W + b, its matrix packed.
struct Projection {
    int64_t in = 0, out = 0;
    std::unique_ptr<void, FreeDeleter> packed;
    std::vector<float> bias; // empty: none
};

// A parameter matrix as it comes in: whole, or one matrix for each head.
struct MatrixSource {
    const char *name;
    const float *whole;
    const float *const *heads;
    const float *bias;
};

// Everything that decides which plan a call gets. The number of threads is part of it, because a plan made for another
// number has another workspace. Kernels that are registered later are for plans that are made later.
using PlanKey = std::array<int64_t, 16>;

int64_t bits_of(float x) {
    int32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    return bits;
}

PlanKey plan_key(const attune_problem &p) {
    return {p.B,
            p.Hq,
            p.Hkv,
            p.N,
            p.M,
            p.dk,
            p.dv,
            int64_t(p.flags),
            bits_of(p.scale),
            bits_of(p.softcap),
            p.offset,
            p.window_left,
            p.window_right,
            int64_t(p.scores_stage),
            int64_t(attune_get_num_threads()),
            int64_t(std::hash<std::string_view>{}(p.mods ? p.mods : ""))};
}

// The plans of one module, most recently used first. Looking one up allocates nothing.
class PlanCache {
  public:
    // The plan for `problem`, made at need. On failure null, and the status in `status`.
    std::shared_ptr<const attune_plan> get(const attune_problem &problem, attune_status &status) {
        status = ATTUNE_OK;
        const PlanKey key = plan_key(problem);
        {
            std::lock_guard lock(mutex_);
            if (auto found = index_.find(key); found != index_.end()) {
                order_.splice(order_.begin(), order_, found->second);
                return found->second->plan;
            }
        }
        attune_plan *made = nullptr;
        status = attune_plan_create(&problem, nullptr, &made);
        if (status != ATTUNE_OK) return nullptr;
        std::shared_ptr<const attune_plan> plan(made, attune_plan_destroy);
        std::lock_guard lock(mutex_);
        if (auto found = index_.find(key); found != index_.end())
            return found->second->plan; // another thread was faster
        order_.push_front({key, plan});
        index_[key] = order_.begin();
        if (order_.size() > kMaxPlans) {
            index_.erase(order_.back().key);
            order_.pop_back(); // a run that still uses it holds its own reference
        }
        return plan;
    }

  private:
    struct Entry {
        PlanKey key;
        std::shared_ptr<const attune_plan> plan;
    };
    std::mutex mutex_;
    std::list<Entry> order_;
    std::map<PlanKey, std::list<Entry>::iterator> index_;
};

std::optional<size_t> checked_bytes(std::initializer_list<int64_t> extents) {
    size_t bytes = sizeof(float);
    for (int64_t extent : extents)
        if (__builtin_mul_overflow(bytes, size_t(extent), &bytes)) return std::nullopt;
    if (bytes > size_t(std::numeric_limits<int64_t>::max()) / 8)
        return std::nullopt; // sums of a few must not overflow either
    return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

// The C structs say their own size, so that a caller that forgot the *_init function is told so.
template <class T> attune_status check_struct(const T *argument, const char *name, const char *init) {
    if (!argument) return fail(ATTUNE_INVALID_ARGUMENT, "{} is null: expected a struct of {}", name, init);
    if (argument->struct_size != sizeof(T))
        return fail(ATTUNE_INVALID_ARGUMENT, "{}.struct_size is {}: expected {}; call {} first", name,
                    argument->struct_size, sizeof(T), init);
    return ATTUNE_OK;
}

} // namespace
} // namespace attune::rt

struct attune_mha {
    attune_mha_config config; // with all sizes resolved
    attune::rt::Projection q, k, v, o;
    mutable attune::rt::PlanCache plans;
};

namespace attune::rt {
namespace {

#define ATTUNE_RETURN_IF_ERROR(expression)                                                                             \
    if (const attune_status status_ = (expression); status_ != ATTUNE_OK) return status_

// Fills in the defaults, or says what is wrong.
attune_status resolve(const attune_mha_config *given, attune_mha_config &config) {
    ATTUNE_RETURN_IF_ERROR(check_struct(given, "config", "attune_mha_config_init"));
    config = *given;
    auto wrong = [](const char *name, int64_t value, const std::string &expected) {
        return fail(ATTUNE_INVALID_ARGUMENT, "config.{} is {}: expected {}", name, value, expected);
    };
    if (config.d_model < 1 || config.d_model > kMaxFeatures)
        return wrong("d_model", config.d_model, formatted("1 to {}", kMaxFeatures));
    if (config.Hq < 1 || config.Hq > kMaxFeatures) return wrong("Hq", config.Hq, formatted("1 to {}", kMaxFeatures));
    if (config.Hkv < 0) return wrong("Hkv", config.Hkv, "0 (as many as Hq) or a divisor of Hq");
    if (config.Hkv == 0) config.Hkv = config.Hq;
    if (config.Hq % config.Hkv != 0) return wrong("Hkv", config.Hkv, formatted("a divisor of Hq = {}", config.Hq));
    for (auto [name, value] : {std::pair("d_model_kv", &config.d_model_kv), std::pair("d_out", &config.d_out)}) {
        if (*value < 0 || *value > kMaxFeatures)
            return wrong(name, *value, formatted("0 (as d_model) or 1 to {}", kMaxFeatures));
        if (*value == 0) *value = config.d_model;
    }
    for (auto [name, value] : {std::pair("dk", &config.dk), std::pair("dv", &config.dv)}) {
        const int64_t most = kMaxFeatures / config.Hq;
        if (*value < 0 || *value > most)
            return wrong(name, *value, formatted("0 (d_model / Hq) or 1 to {} with Hq = {}", most, config.Hq));
        if (*value == 0 && config.d_model % config.Hq != 0)
            return wrong(
                name, 0,
                formatted("a size, because d_model = {} is not a multiple of Hq = {}", config.d_model, config.Hq));
        if (*value == 0) *value = config.d_model / config.Hq;
    }
    if (config.layout != ATTUNE_WEIGHT_IN_OUT && config.layout != ATTUNE_WEIGHT_OUT_IN)
        return wrong("layout", int64_t(config.layout), "0 (ATTUNE_WEIGHT_IN_OUT) or 1 (ATTUNE_WEIGHT_OUT_IN)");
    return ATTUNE_OK;
}

// Where the matrices of a per-head list go in the whole matrix: side by side (wq, wk, wv) or one below the other (wo).
enum class HeadAxis { out, in };

attune_status make_projection(const MatrixSource &source, int64_t in, int64_t out, int64_t heads, HeadAxis axis,
                              attune_weight_layout layout, Projection &result) {
    if (source.whole && source.heads)
        return fail(ATTUNE_INVALID_ARGUMENT, "weights.{0} and weights.{0}_heads are both given: expected one of them",
                    source.name);
    if (!source.whole && !source.heads)
        return fail(ATTUNE_INVALID_ARGUMENT, "weights.{0} is null: expected {1} x {2} floats (or weights.{0}_heads)",
                    source.name, in, out);
    const bool in_out = layout == ATTUNE_WEIGHT_IN_OUT;
    const float *matrix = source.whole;
    int64_t in_stride = in_out ? out : 1, out_stride = in_out ? 1 : in;
    std::vector<float> gathered;
    if (source.heads) {
        const int64_t head_in = axis == HeadAxis::in ? in / heads : in;
        const int64_t head_out = axis == HeadAxis::out ? out / heads : out;
        gathered.resize(size_t(in) * size_t(out));
        for (int64_t h = 0; h < heads; h++) {
            const float *head = source.heads[h];
            if (!head)
                return fail(ATTUNE_INVALID_ARGUMENT, "weights.{}_heads[{}] is null: expected {} x {} floats",
                            source.name, h, head_in, head_out);
            float *to = gathered.data() + (axis == HeadAxis::in ? h * head_in * out : h * head_out);
            for (int64_t i = 0; i < head_in; i++)
                for (int64_t c = 0; c < head_out; c++)
                    to[i * out + c] = in_out ? head[i * head_out + c] : head[c * head_in + i];
        }
        matrix = gathered.data();
        in_stride = out;
        out_stride = 1;
    }
    result.in = in;
    result.out = out;
    const size_t bytes = (matmul_packed_bytes(in, out) + kAlignment - 1) / kAlignment * kAlignment;
    result.packed.reset(std::aligned_alloc(kAlignment, bytes));
    if (!result.packed)
        return fail(ATTUNE_OUT_OF_MEMORY, "weights.{}: {} bytes for the packed matrix could not be allocated",
                    source.name, bytes);
    matmul_pack(matrix, in, out, in_stride, out_stride, result.packed.get());
    if (source.bias) result.bias.assign(source.bias, source.bias + out);
    return ATTUNE_OK;
}

attune_status create(const attune_mha_config &config, const std::array<MatrixSource, 4> &sources, attune_mha **mha) {
    auto made = std::make_unique<attune_mha>();
    made->config = config;
    const auto &c = config;
    const auto &[wq, wk, wv, wo] = sources;
    ATTUNE_RETURN_IF_ERROR(make_projection(wq, c.d_model, c.Hq * c.dk, c.Hq, HeadAxis::out, c.layout, made->q));
    ATTUNE_RETURN_IF_ERROR(make_projection(wk, c.d_model_kv, c.Hkv * c.dk, c.Hkv, HeadAxis::out, c.layout, made->k));
    ATTUNE_RETURN_IF_ERROR(make_projection(wv, c.d_model_kv, c.Hkv * c.dv, c.Hkv, HeadAxis::out, c.layout, made->v));
    ATTUNE_RETURN_IF_ERROR(make_projection(wo, c.Hq * c.dv, c.d_out, c.Hq, HeadAxis::in, c.layout, made->o));
    *mha = made.release();
    return ATTUNE_OK;
}

// One of the call's three tensors [B, 1, rows, features].
attune_status check_tensor(const char *name, const attune_tensor &t, int64_t features, const char *features_name) {
    auto wrong = [&](const std::string &what) { return fail(ATTUNE_INVALID_ARGUMENT, "call.{}{}", name, what); };
    if (t.dtype != ATTUNE_F32)
        return wrong(formatted(".dtype is {} ({}): expected f32", attune_dtype_string(t.dtype), int(t.dtype)));
    if (t.device != ATTUNE_CPU) return wrong(formatted(".device is {}: expected 0 (ATTUNE_CPU)", int(t.device)));
    for (int i : {0, 2})
        if (t.shape[i] < 0) return wrong(formatted(".shape[{}] is {}: expected 0 or more", i, t.shape[i]));
    if (t.shape[1] != 1) return wrong(formatted(".shape[1] is {}: expected 1: [batch, 1, rows, features]", t.shape[1]));
    if (t.shape[3] != features)
        return wrong(formatted(".shape[3] is {}: expected {} = {}", t.shape[3], features_name, features));
    if (features > 1 && t.stride[3] != 1) return wrong(formatted(".stride[3] is {}: expected 1", t.stride[3]));
    if (t.shape[0] == 0 || t.shape[2] == 0) return ATTUNE_OK;
    if (!t.data)
        return wrong(formatted(".data is null: expected {} x {} x {} floats", t.shape[0], t.shape[2], features));
    if (reinterpret_cast<uintptr_t>(t.data) % alignof(float) != 0)
        return wrong(formatted(".data is {}: expected an address aligned to its 4-byte elements", t.data));
    __int128 reach = features;
    for (int i : {0, 2}) {
        const __int128 offset = __int128(t.shape[i] - 1) * t.stride[i];
        reach += offset < 0 ? -offset : offset;
    }
    if (reach > std::numeric_limits<int64_t>::max() / int64_t(sizeof(float)))
        return wrong(formatted(".stride is [{}, {}, {}, {}]: expected strides whose largest offset fits 63 bits",
                               t.stride[0], t.stride[1], t.stride[2], t.stride[3]));
    return ATTUNE_OK;
}

// Where a call's parts lie in its workspace, and its attention problem.
struct Layout {
    attune_problem problem;
    int64_t B, N, M;
    size_t q, k, v, o, plan; // offsets from the aligned start
    size_t total;            // bytes, with room for the alignment; 0: there is nothing to compute
    std::shared_ptr<const attune_plan> attention;
};

attune_status lay_out(const attune_mha *mha, const attune_mha_call *call, Layout &layout) {
    if (!mha) return fail(ATTUNE_INVALID_ARGUMENT, "mha is null: expected a module of attune_mha_create");
    ATTUNE_RETURN_IF_ERROR(check_struct(call, "call", "attune_mha_call_init"));
    const attune_mha_config &c = mha->config;
    ATTUNE_RETURN_IF_ERROR(check_tensor("x_q", call->x_q, c.d_model, "d_model"));
    ATTUNE_RETURN_IF_ERROR(check_tensor("x_kv", call->x_kv, c.d_model_kv, "d_model_kv"));
    ATTUNE_RETURN_IF_ERROR(check_tensor("y", call->y, c.d_out, "d_out"));
    const int64_t B = call->x_q.shape[0], N = call->x_q.shape[2], M = call->x_kv.shape[2];
    auto same = [](const char *name, int dimension, int64_t value, int64_t expected) {
        if (value == expected) return ATTUNE_OK;
        return fail(ATTUNE_INVALID_ARGUMENT, "call.{}.shape[{}] is {}: expected {} as in call.x_q", name, dimension,
                    value, expected);
    };
    ATTUNE_RETURN_IF_ERROR(same("x_kv", 0, call->x_kv.shape[0], B));
    ATTUNE_RETURN_IF_ERROR(same("y", 0, call->y.shape[0], B));
    ATTUNE_RETURN_IF_ERROR(same("y", 2, call->y.shape[2], N));

    attune_problem &p = layout.problem;
    attune_problem_init(&p);
    if (call->problem) {
        ATTUNE_RETURN_IF_ERROR(check_struct(call->problem, "call.problem", "attune_problem_init"));
        p = *call->problem;
        for (auto [name, dtype] :
             {std::pair("q_dtype", p.q_dtype), std::pair("kv_dtype", p.kv_dtype), std::pair("o_dtype", p.o_dtype)})
            if (dtype != ATTUNE_F32)
                return fail(ATTUNE_INVALID_ARGUMENT, "call.problem.{} is {} ({}): expected f32", name,
                            attune_dtype_string(dtype), int(dtype));
        if (p.device != ATTUNE_CPU)
            return fail(ATTUNE_INVALID_ARGUMENT, "call.problem.device is {}: expected 0 (ATTUNE_CPU)", int(p.device));
        if (p.flags & ATTUNE_VARLEN)
            return fail(ATTUNE_INVALID_ARGUMENT,
                        "call.problem.flags has ATTUNE_VARLEN: expected a padded batch, with ATTUNE_KV_LEN");
    }
    if (call->extras) ATTUNE_RETURN_IF_ERROR(check_struct(call->extras, "call.extras", "attune_tensors_init"));
    p.B = B;
    p.Hq = c.Hq;
    p.Hkv = c.Hkv;
    p.N = N;
    p.M = M;
    p.dk = c.dk;
    p.dv = c.dv;
    layout.B = B;
    layout.N = N;
    layout.M = M;

    // Rows of y that share memory would be written twice. Batch outside rows or rows outside batch, both are fine.
    const int64_t row = N > 1 ? call->y.stride[2] : 0, batch = B > 1 ? call->y.stride[0] : 0, width = c.d_out;
    auto apart = [](__int128 inner, int64_t inner_count, __int128 outer, int64_t outer_count, int64_t features) {
        if (inner < 0) inner = -inner;
        if (outer < 0) outer = -outer;
        const __int128 span = inner_count > 1 ? (inner_count - 1) * inner + features : features;
        return (inner_count <= 1 || inner >= features) && (outer_count <= 1 || outer >= span);
    };
    if (B > 0 && N > 0 && !apart(row, N, batch, B, width) && !apart(batch, B, row, N, width))
        return fail(ATTUNE_INVALID_ARGUMENT,
                    "call.y.stride is [{}, {}, {}, {}]: expected rows that do not overlap: {} rows of {} "
                    "floats in each of {} batch entries",
                    call->y.stride[0], call->y.stride[1], call->y.stride[2], call->y.stride[3], N, width, B);

    layout.q = layout.k = layout.v = layout.o = layout.plan = layout.total = 0;
    // An empty problem is planned all the same, so that its mistakes are found.
    attune_status status;
    layout.attention = mha->plans.get(p, status);
    if (!layout.attention) return status;
    if (B == 0 || N == 0) return ATTUNE_OK;

    const auto q = checked_bytes({B, N, c.Hq, c.dk}), k = checked_bytes({B, M, c.Hkv, c.dk});
    const auto v = checked_bytes({B, M, c.Hkv, c.dv}), o = checked_bytes({B, N, c.Hq, c.dv});
    if (!q || !k || !v || !o)
        return fail(ATTUNE_INVALID_ARGUMENT,
                    "call.x_q.shape[0] is {}, call.x_q.shape[2] is {} and call.x_kv.shape[2] is {}: the projections "
                    "would need more than 2^60 bytes",
                    B, N, M);
    layout.k = layout.q + *q;
    layout.v = layout.k + *k;
    layout.o = layout.v + *v;
    layout.plan = layout.o + *o;
    layout.total = layout.plan + attune_plan_workspace(layout.attention.get()) + kAlignment;
    return ATTUNE_OK;
}

// y[b, r, :] = x[b, r, :] W + bias. Batches in a row of equal strides are one matrix; others go one by one.
attune_status project(const char *name, const Projection &p, const float *x, int64_t x_batch, int64_t x_row, float *y,
                      int64_t y_batch, int64_t y_row, int64_t B, int64_t rows) {
    if (B == 0 || rows == 0) return ATTUNE_OK;
    if (rows == 1) {
        rows = B;
        x_row = x_batch;
        y_row = y_batch;
        B = 1;
    } else if (B == 1 || (x_batch == __int128(rows) * x_row && y_batch == __int128(rows) * y_row)) {
        rows *= B;
        B = 1;
    }
    // Kernels take row strides that are positive and fit int32; a single row has no stride.
    auto fits = [](int64_t stride) { return stride >= 0 && stride <= std::numeric_limits<int32_t>::max(); };
    const bool row_by_row = rows > 1 && !(fits(x_row) && fits(y_row));
    const int64_t step = row_by_row ? 1 : rows;
    const float *bias = p.bias.empty() ? nullptr : p.bias.data();
    for (int64_t b = 0; b < B; b++)
        for (int64_t r = 0; r < rows; r += step)
            if (const int error =
                    matmul_run(p.packed.get(), p.in, p.out, x + b * x_batch + r * x_row, step > 1 ? x_row : p.in, step,
                               bias, y + b * y_batch + r * y_row, step > 1 ? y_row : p.out))
                return fail(ATTUNE_KERNEL_FAILED, "the projection {} ({} rows, {} x {}) failed with error {}", name,
                            step, p.in, p.out, error);
    return ATTUNE_OK;
}

attune_tensor heads_view(float *data, int64_t B, int64_t H, int64_t rows, int64_t d) {
    attune_tensor t{};
    t.data = data;
    t.dtype = ATTUNE_F32;
    t.device = ATTUNE_CPU;
    const int64_t shape[4] = {B, H, rows, d}, stride[4] = {rows * H * d, d, H * d, 1};
    for (int i = 0; i < 4; i++) {
        t.shape[i] = shape[i];
        t.stride[i] = stride[i];
    }
    return t;
}

attune_status run(const attune_mha *mha, const attune_mha_call *call, void *workspace, size_t workspace_size) {
    Layout at;
    ATTUNE_RETURN_IF_ERROR(lay_out(mha, call, at));
    if (at.B == 0 || at.N == 0) return ATTUNE_OK;
    if (workspace_size < at.total)
        return fail(ATTUNE_INVALID_ARGUMENT, "workspace_size is {}: expected at least {} (attune_mha_workspace)",
                    workspace_size, at.total);
    if (!workspace) return fail(ATTUNE_INVALID_ARGUMENT, "workspace is null: expected {} bytes", at.total);
    const attune_mha_config &c = mha->config;
    std::byte *base = static_cast<std::byte *>(workspace);
    base += (kAlignment - reinterpret_cast<uintptr_t>(base) % kAlignment) % kAlignment;
    auto part = [&](size_t offset) { return reinterpret_cast<float *>(base + offset); };
    float *q = part(at.q), *k = part(at.k), *v = part(at.v), *o = part(at.o);

    auto project_in = [&](const char *name, const Projection &p, const attune_tensor &x, float *to) {
        return project(name, p, static_cast<const float *>(x.data), x.stride[0], x.stride[2], to, x.shape[2] * p.out,
                       p.out, at.B, x.shape[2]);
    };
    ATTUNE_RETURN_IF_ERROR(project_in("wq", mha->q, call->x_q, q));
    ATTUNE_RETURN_IF_ERROR(project_in("wk", mha->k, call->x_kv, k));
    ATTUNE_RETURN_IF_ERROR(project_in("wv", mha->v, call->x_kv, v));

    attune_tensors tensors;
    attune_tensors_init(&tensors);
    if (call->extras) tensors = *call->extras;
    tensors.q = heads_view(q, at.B, c.Hq, at.N, c.dk);
    tensors.k = heads_view(k, at.B, c.Hkv, at.M, c.dk);
    tensors.v = heads_view(v, at.B, c.Hkv, at.M, c.dv);
    tensors.o = heads_view(o, at.B, c.Hq, at.N, c.dv);
    ATTUNE_RETURN_IF_ERROR(attune_run(at.attention.get(), &tensors, base + at.plan,
                                      workspace_size - size_t(base - static_cast<std::byte *>(workspace)) - at.plan));

    return project("wo", mha->o, o, at.N * c.Hq * c.dv, c.Hq * c.dv, static_cast<float *>(call->y.data),
                   call->y.stride[0], call->y.stride[2], at.B, at.N);
}

// Nothing may throw across the C interface.
template <class F> attune_status guarded(F &&f) noexcept {
    try {
        return f();
    } catch (const std::bad_alloc &) {
        return fail(ATTUNE_OUT_OF_MEMORY, "memory for the multi-head attention module could not be allocated");
    } catch (const std::exception &e) {
        return fail(ATTUNE_KERNEL_FAILED, "unexpected exception in the multi-head attention module: {}", e.what());
    }
}

template <class T> void init(T *argument) {
    if (!argument) return;
    *argument = T{};
    argument->struct_size = sizeof(T);
}

} // namespace
} // namespace attune::rt

using namespace attune::rt;

void attune_mha_config_init(attune_mha_config *config) {
    init(config);
}
void attune_mha_weights_init(attune_mha_weights *weights) {
    init(weights);
}
void attune_mha_call_init(attune_mha_call *call) {
    init(call);
}

attune_status attune_mha_create(const attune_mha_config *config, const attune_mha_weights *weights, attune_mha **mha) {
    return guarded([&]() -> attune_status {
        if (!mha) return fail(ATTUNE_INVALID_ARGUMENT, "mha is null: expected a pointer to receive the module");
        *mha = nullptr;
        attune_mha_config resolved;
        ATTUNE_RETURN_IF_ERROR(resolve(config, resolved));
        ATTUNE_RETURN_IF_ERROR(check_struct(weights, "weights", "attune_mha_weights_init"));
        const auto &w = *weights;
        return create(resolved,
                      {{{"wq", w.wq, w.wq_heads, w.bq},
                        {"wk", w.wk, w.wk_heads, w.bk},
                        {"wv", w.wv, w.wv_heads, w.bv},
                        {"wo", w.wo, w.wo_heads, w.bo}}},
                      mha);
    });
}

attune_status attune_mha_load(const attune_mha_config *config, const char *safetensors_path, const char *const names[8],
                              attune_mha **mha) {
    return guarded([&]() -> attune_status {
        if (!mha) return fail(ATTUNE_INVALID_ARGUMENT, "mha is null: expected a pointer to receive the module");
        *mha = nullptr;
        attune_mha_config c;
        ATTUNE_RETURN_IF_ERROR(resolve(config, c));
        if (!safetensors_path) return fail(ATTUNE_INVALID_ARGUMENT, "safetensors_path is null: expected a file name");
        if (!names) return fail(ATTUNE_INVALID_ARGUMENT, "names is null: expected a list of 8 tensor names");
        static constexpr const char *kParameters[8] = {"wq", "wk", "wv", "wo", "bq", "bk", "bv", "bo"};
        for (int i = 0; i < 4; i++)
            if (!names[i])
                return fail(ATTUNE_INVALID_ARGUMENT, "names[{}] is null: expected the name of the tensor for {}", i,
                            kParameters[i]);
        std::string error;
        const auto file = SafetensorsFile::open(safetensors_path, error);
        if (!file) return fail(ATTUNE_IO_ERROR, "{}", error);
        const int64_t in[4] = {c.d_model, c.d_model_kv, c.d_model_kv, c.Hq * c.dv};
        const int64_t out[4] = {c.Hq * c.dk, c.Hkv * c.dk, c.Hkv * c.dv, c.d_out};
        const float *data[8] = {};
        for (int i = 0; i < 8; i++) {
            if (!names[i]) continue;
            const int m = i % 4;
            std::vector<int64_t> shape = {out[m]};
            if (i < 4)
                shape = c.layout == ATTUNE_WEIGHT_IN_OUT ? std::vector{in[m], out[m]} : std::vector{out[m], in[m]};
            const auto *tensor = file->require(names[i], "F32", shape, error);
            if (!tensor) return fail(ATTUNE_IO_ERROR, "{} for {}", error, kParameters[i]);
            data[i] = reinterpret_cast<const float *>(tensor->data);
        }
        std::array<MatrixSource, 4> sources;
        for (int i = 0; i < 4; i++) sources[i] = {kParameters[i], data[i], nullptr, data[i + 4]};
        return create(c, sources, mha);
    });
}

void attune_mha_destroy(attune_mha *mha) {
    delete mha;
}

attune_status attune_mha_workspace(const attune_mha *mha, const attune_mha_call *call, size_t *bytes) {
    return guarded([&]() -> attune_status {
        if (!bytes) return fail(ATTUNE_INVALID_ARGUMENT, "bytes is null: expected a pointer to receive the size");
        *bytes = 0;
        Layout layout;
        ATTUNE_RETURN_IF_ERROR(lay_out(mha, call, layout));
        *bytes = layout.total;
        return ATTUNE_OK;
    });
}

attune_status attune_mha_run(const attune_mha *mha, const attune_mha_call *call, void *workspace,
                             size_t workspace_size) {
    return guarded([&]() -> attune_status { return run(mha, call, workspace, workspace_size); });
}
