// attune for C++20: a header-only layer over attune.h. Same shapes, same order of operations, same rules; what it adds
// is ownership (Plan, Workspace, MultiHeadAttention), named arguments with defaults (Problem, Tensors, MhaConfig, ...),
// types that know const, and sizes of buffers that are checked.
//
//     std::vector<float> q(...), k(...), v(...), o(...);
//     attune::Plan plan = attune::plan({.Hq = 8, .N = 128, .M = 256, .dk = 64, .causal = true});
//     attune::Workspace workspace;
//     attune::run(plan, {.q = attune::bhsd(q, 1, 8, 128, 64), .k = ..., .v = ..., .o = ...}, workspace);
//
// Errors: every function that can fail throws attune::Error with the C interface's status and message; those named
// try_* return the status instead (the message is attune_last_error()) and never throw.
#ifndef ATTUNE_ATTUNE_HPP
#define ATTUNE_ATTUNE_HPP

#include "attune/attune.h"

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <limits>
#include <memory>
#include <new>
#include <optional>
#include <ranges>
#include <span>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace attune {

using Status = attune_status;

// What went wrong. what() names the argument, its value and what was expected.
class Error : public std::runtime_error {
  public:
    Error(Status status, const std::string &message) : std::runtime_error(message), status_(status) {}
    Status status() const noexcept { return status_; }

  private:
    Status status_;
};

// Throws Error with the calling thread's last message unless `status` is ATTUNE_OK.
inline void check(Status status) {
    if (status == ATTUNE_OK) return;
    const std::string message = attune_last_error();
    throw Error(status, message.empty() ? attune_status_string(status) : message);
}

enum class Dtype : int {
    f32 = ATTUNE_F32,
    bf16 = ATTUNE_BF16,
    f16 = ATTUNE_F16,
    u8 = ATTUNE_U8,
    i64 = ATTUNE_I64,
    i32 = ATTUNE_I32
};

enum class Device : int { cpu = ATTUNE_CPU, opencl = ATTUNE_OPENCL, vulkan = ATTUNE_VULKAN, cuda = ATTUNE_CUDA };

// Storage of the 16-bit types; attune converts in its kernels, so these carry bits only.
struct Bf16 {
    std::uint16_t bits;
};
struct F16 {
    std::uint16_t bits;
};

namespace detail {

template <class T> constexpr bool always_false = false;

template <class T> constexpr attune_dtype dtype_of() {
    using U = std::remove_const_t<T>;
    if constexpr (std::is_same_v<U, float>) {
        return ATTUNE_F32;
    } else if constexpr (std::is_same_v<U, Bf16>) {
        return ATTUNE_BF16;
    } else if constexpr (std::is_same_v<U, F16>) {
        return ATTUNE_F16;
    } else if constexpr (std::is_same_v<U, std::uint8_t> || std::is_same_v<U, bool>) {
        return ATTUNE_U8;
    } else if constexpr (std::is_same_v<U, std::int64_t>) {
        return ATTUNE_I64;
    } else if constexpr (std::is_same_v<U, std::int32_t>) {
        return ATTUNE_I32;
    } else {
        static_assert(always_false<T>,
                      "elements must be float, attune::Bf16, attune::F16, uint8_t, bool, int32_t or int64_t");
    }
}

[[noreturn]] inline void invalid(const std::string &message) {
    throw Error(ATTUNE_INVALID_ARGUMENT, message);
}

inline std::string text(const std::array<std::int64_t, 4> &shape) {
    std::string result = "[";
    for (int i = 0; i < 4; i++) result += (i ? ", " : "") + std::to_string(shape[i]);
    return result + "]";
}

} // namespace detail

// A view of memory that is only read: pointer, shape and strides (in elements) of the four dimensions batch, head, row,
// feature. Make one with bhsd, bshd, col, rows, per_key or strided below. A default one is "not given".
struct ConstTensorView {
    const void *data = nullptr;
    Dtype dtype = Dtype::f32;
    std::array<std::int64_t, 4> shape{};
    std::array<std::int64_t, 4> stride{};
    Device device = Device::cpu;

    attune_tensor to_c() const noexcept {
        attune_tensor t{};
        t.data = const_cast<void *>(data); // the C struct serves inputs and outputs; inputs are never written
        t.dtype = static_cast<attune_dtype>(dtype);
        t.device = static_cast<attune_device>(device);
        for (int i = 0; i < 4; i++) {
            t.shape[i] = shape[i];
            t.stride[i] = stride[i];
        }
        return t;
    }
};

// A view of memory that may be written; every TensorView is also a ConstTensorView.
struct TensorView : ConstTensorView {};

namespace detail {

template <class T> using ViewOf = std::conditional_t<std::is_const_v<T>, ConstTensorView, TensorView>;

// What the functions below take for memory: a pointer, or a contiguous range that outlives the expression (a vector, an
// array, a span), whose size is then checked.
template <class R>
concept Memory = std::is_pointer_v<std::remove_cvref_t<R>> ||
    (std::ranges::contiguous_range<R> &&
     (std::is_lvalue_reference_v<R> || std::ranges::borrowed_range<std::remove_cvref_t<R>>));

template <class R> auto data_of(R &&memory) {
    if constexpr (std::is_pointer_v<std::remove_cvref_t<R>>) {
        return memory;
    } else {
        return std::ranges::data(memory);
    }
}

template <Memory R>
auto view(R &&memory, const std::array<std::int64_t, 4> &shape, const std::array<std::int64_t, 4> &stride) {
    auto *data = data_of(memory);
    using T = std::remove_pointer_t<decltype(data)>;
    bool empty = false;
    for (std::int64_t extent : shape) {
        if (extent < 0) invalid("shape is " + text(shape) + ": expected extents of 0 or more");
        empty = empty || extent == 0;
    }
    if constexpr (!std::is_pointer_v<std::remove_cvref_t<R>>) {
        // The furthest element, in arithmetic that saturates; negative strides need a pointer into the middle.
        constexpr std::uint64_t most = std::numeric_limits<std::uint64_t>::max();
        std::uint64_t last = 0;
        for (int i = 0; i < 4 && !empty; i++) {
            if (shape[i] == 1) continue;
            if (stride[i] < 0)
                invalid("stride is " + text(stride) + ": expected 0 or more for a range (pass a pointer)");
            const std::uint64_t steps = std::uint64_t(shape[i] - 1), step = std::uint64_t(stride[i]);
            last = step != 0 && steps > (most - last) / step ? most : last + steps * step;
        }
        const std::uint64_t size = std::ranges::size(memory);
        if (!empty && last >= size)
            invalid("the memory holds " + std::to_string(size) + " elements, but shape " + text(shape) +
                    " with stride " + text(stride) + " reaches element " + std::to_string(last));
    }
    ViewOf<T> result;
    result.data = data;
    result.dtype = static_cast<Dtype>(dtype_of<T>());
    result.shape = shape;
    result.stride = stride;
    return result;
}

} // namespace detail

// Any shape and strides, in elements; 0 broadcasts an input along that dimension.
template <detail::Memory R>
auto strided(R &&memory, const std::array<std::int64_t, 4> &shape, const std::array<std::int64_t, 4> &stride) {
    return detail::view(std::forward<R>(memory), shape, stride);
}

// Dense memory [batch, heads, rows, features].
template <detail::Memory R>
auto bhsd(R &&memory, std::int64_t batch, std::int64_t heads, std::int64_t rows, std::int64_t features) {
    return detail::view(std::forward<R>(memory), {batch, heads, rows, features},
                        {heads * rows * features, rows * features, features, 1});
}

// Dense memory [batch, rows, heads, features], as projections leave it. The view's shape is still batch, head, row,
// feature.
template <detail::Memory R>
auto bshd(R &&memory, std::int64_t batch, std::int64_t rows, std::int64_t heads, std::int64_t features) {
    return detail::view(std::forward<R>(memory), {batch, heads, rows, features},
                        {rows * heads * features, features, heads * features, 1});
}

// Dense memory [batch, heads, features, rows]: the column convention of the literature, where a query is a column.
template <detail::Memory R>
auto col(R &&memory, std::int64_t batch, std::int64_t heads, std::int64_t rows, std::int64_t features) {
    return detail::view(std::forward<R>(memory), {batch, heads, rows, features},
                        {heads * rows * features, rows * features, 1, rows});
}

// Dense memory [batch, rows, features]: the inputs and the output of MultiHeadAttention.
template <detail::Memory R> auto rows(R &&memory, std::int64_t batch, std::int64_t rows, std::int64_t features) {
    return detail::view(std::forward<R>(memory), {batch, 1, rows, features}, {rows * features, 0, features, 1});
}

// Dense memory [rows, heads, features] of packed sequences, one after the other, as projections leave it:
// Problem::varlen. (Packed with the heads outermost, [heads, rows, features], is bhsd(memory, 1, heads, rows,
// features).)
template <detail::Memory R> auto packed(R &&memory, std::int64_t rows, std::int64_t heads, std::int64_t features) {
    return detail::view(std::forward<R>(memory), {1, heads, rows, features},
                        {rows * heads * features, features, heads * features, 1});
}

// One value for each key, [batch, keys], the same for all heads and query rows: a mask or a bias of shape [B, Hq, N,
// M].
template <detail::Memory R>
auto per_key(R &&memory, std::int64_t batch, std::int64_t heads, std::int64_t rows, std::int64_t keys) {
    return detail::view(std::forward<R>(memory), {batch, heads, rows, keys}, {keys, 0, 0, 1});
}

// What the scores output holds.
enum class Scores : int {
    raw = ATTUNE_SCORES_RAW,                    // scale * q.k
    capped = ATTUNE_SCORES_CAPPED,              // after the soft cap
    biased = ATTUNE_SCORES_BIASED,              // after ALiBi, bias and mask: -inf where a key is invisible
    probabilities = ATTUNE_SCORES_PROBABILITIES // the attention weights
};

// One attention problem: everything but the pointers.
//   O[b,h,i,:] = sum_j softmax_j(scale * Q[b,h,i,:] . K[b,h/(Hq/Hkv),j,:]) V[b,h/(Hq/Hkv),j,:]
// with Q [B, Hq, N, dk], K [B, Hkv, M, dk], V [B, Hkv, M, dv], O [B, Hq, N, dv].
struct Problem {
    std::int64_t B = 1;                // batch
    std::int64_t Hq = 1;               // query heads
    std::optional<std::int64_t> Hkv{}; // key and value heads, a divisor of Hq; not given: Hq
    std::int64_t N = 0;                // query rows
    std::optional<std::int64_t> M{};   // keys; not given: N
    std::int64_t dk = 0;               // features of a query and a key
    std::optional<std::int64_t> dv{};  // features of a value; not given: dk
    Dtype q_dtype = Dtype::f32, kv_dtype = Dtype::f32, o_dtype = Dtype::f32;
    Device device = Device::cpu;
    std::optional<float> scale{};   // not given: 1/sqrt(dk); any finite value is legal
    std::optional<float> softcap{}; // s = softcap * tanh(s / softcap); must be > 0 where given
    bool causal = false;            // key j is visible to row i iff j <= i + offset
    std::int64_t offset = 0;        // row i stands at position i + offset among the keys
    bool offsets = false;           // Tensors::offsets has one for each batch entry, in place of offset
    std::int64_t window_left = -1;  // keys i+offset-left .. i+offset+right are visible, inclusive; -1: unbounded
    std::int64_t window_right = -1;
    bool mask = false;              // Tensors::mask
    bool bias = false;              // Tensors::bias
    bool kv_len = false;            // Tensors::kv_len
    bool alibi = false;             // Tensors::alibi_slopes
    bool sinks = false;             // Tensors::sinks
    std::optional<Scores> scores{}; // Tensors::scores receives this stage; only strategy `stagewise` can
    bool strided_v = false;         // V's feature stride is not 1: make room for a packed copy
    bool deterministic = false;     // the planner's choice depends neither on the number of threads nor on B
    // B packed sequences, cut by Extras::cu_seqlens_q and _k; N and M are the longest that a run may have. See
    // packed().
    bool varlen = false;
    // User functions by their names, e.g. "alibi"; Extras::params has their parameters. The caller's text; a plan
    // copies it.
    const char *mods = nullptr;

    attune_problem to_c() const noexcept {
        attune_problem p;
        attune_problem_init(&p);
        p.q_dtype = static_cast<attune_dtype>(q_dtype);
        p.kv_dtype = static_cast<attune_dtype>(kv_dtype);
        p.o_dtype = static_cast<attune_dtype>(o_dtype);
        p.device = static_cast<attune_device>(device);
        p.B = B;
        p.Hq = Hq;
        p.Hkv = Hkv.value_or(Hq);
        p.N = N;
        p.M = M.value_or(N);
        p.dk = dk;
        p.dv = dv.value_or(dk);
        auto flag = [&p](bool wanted, unsigned bit) {
            if (wanted) p.flags |= bit;
        };
        flag(scale.has_value(), ATTUNE_SCALE);
        flag(causal, ATTUNE_CAUSAL);
        flag(mask, ATTUNE_MASK);
        flag(bias, ATTUNE_BIAS);
        flag(kv_len, ATTUNE_KV_LEN);
        flag(offsets, ATTUNE_OFFSETS);
        flag(softcap.has_value(), ATTUNE_SOFTCAP);
        flag(alibi, ATTUNE_ALIBI);
        flag(sinks, ATTUNE_SINK);
        flag(scores.has_value(), ATTUNE_SCORES);
        flag(strided_v, ATTUNE_STRIDED_V);
        flag(deterministic, ATTUNE_DETERMINISTIC);
        flag(varlen, ATTUNE_VARLEN);
        p.scale = scale.value_or(0.0f);
        p.softcap = softcap.value_or(0.0f);
        p.offset = offset;
        p.window_left = window_left;
        p.window_right = window_right;
        p.scores_stage = static_cast<attune_scores_stage>(scores.value_or(Scores::raw));
        p.mods = mods;
        return p;
    }
};

// Causal masks by where the last query row stands. Top-left is offset 0; these two are the others in use.
inline std::int64_t bottom_right(std::int64_t N, std::int64_t M) noexcept {
    return M - N;
}
inline std::int64_t decode_offset(std::int64_t past_length) noexcept {
    return past_length;
}

// How a plan is to be made. Errors: ATTUNE_INVALID_ARGUMENT for a kernel or a strategy that is not there.
struct PlanOptions {
    std::string kernel{};   // take this kernel (its full name), or fail; "": the planner's choice
    std::string strategy{}; // take a kernel of this strategy, or fail; "": any
    int threads = 0;        // of a run; 0: attune_get_num_threads() when the plan is made
};

// A chosen kernel for a problem. Immutable; may be run by several threads at once, each with its own workspace.
class Plan {
  public:
    // Throws Error: ATTUNE_INVALID_ARGUMENT (a wrong problem) or ATTUNE_UNSUPPORTED (no kernel can; the message says
    // why).
    explicit Plan(const Problem &problem, const PlanOptions &options = {}) { check(make(problem, options, handle_)); }

    // The plan, or nothing and a status.
    static std::optional<Plan> try_make(const Problem &problem, const PlanOptions &options = {},
                                        Status *status = nullptr) noexcept {
        Handle handle;
        const Status result = make(problem, options, handle);
        if (status) *status = result;
        if (result != ATTUNE_OK) return std::nullopt;
        return Plan(std::move(handle));
    }

    std::size_t workspace_size() const noexcept { return attune_plan_workspace(handle_.get()); } // bytes
    std::size_t scratch_size() const noexcept { return attune_plan_scratch(handle_.get()); } // bytes for each thread
    std::string kernel() const { return attune_plan_kernel(handle_.get()); }
    std::string explain() const {
        return attune_plan_explain(handle_.get());
    } // a line for each kernel: chosen, or why not
    const attune_problem &problem() const noexcept { return *attune_plan_problem(handle_.get()); }
    const attune_plan *get() const noexcept { return handle_.get(); }

  private:
    struct Destroy {
        void operator()(attune_plan *plan) const noexcept { attune_plan_destroy(plan); }
    };
    using Handle = std::unique_ptr<attune_plan, Destroy>;

    explicit Plan(Handle handle) noexcept : handle_(std::move(handle)) {}

    static Status make(const Problem &problem, const PlanOptions &options, Handle &handle) noexcept {
        const attune_problem p = problem.to_c();
        attune_plan_options o;
        attune_plan_options_init(&o);
        o.kernel = options.kernel.empty() ? nullptr : options.kernel.c_str();
        o.strategy = options.strategy.empty() ? nullptr : options.strategy.c_str();
        o.threads = options.threads;
        attune_plan *plan = nullptr;
        const Status status = attune_plan_create(&p, &o, &plan);
        handle.reset(plan);
        return status;
    }

    Handle handle_;
};

// See Plan's constructor.
inline Plan plan(const Problem &problem, const PlanOptions &options = {}) {
    return Plan(problem, options);
}

// Owned scratch memory, 64-byte aligned. One for each thread that runs at the same time; it may serve any number of
// plans.
class Workspace {
  public:
    Workspace() = default;
    // Throws Error with ATTUNE_OUT_OF_MEMORY.
    explicit Workspace(std::size_t bytes) { reserve(bytes); }

    // Grows to at least `bytes`, never shrinks; the contents are lost on growth. Throws Error with
    // ATTUNE_OUT_OF_MEMORY.
    void reserve(std::size_t bytes) {
        if (bytes <= size_) return;
        memory_.reset();
        size_ = 0;
        memory_.reset(static_cast<std::byte *>(::operator new(bytes, kAlignment, std::nothrow)));
        if (!memory_)
            throw Error(ATTUNE_OUT_OF_MEMORY,
                        "workspace of " + std::to_string(bytes) + " bytes could not be allocated");
        size_ = bytes;
    }

    std::byte *data() noexcept { return memory_.get(); }
    std::size_t size() const noexcept { return size_; }

  private:
    static constexpr std::align_val_t kAlignment{64};
    struct Free {
        void operator()(std::byte *p) const noexcept { ::operator delete(p, kAlignment); }
    };
    std::unique_ptr<std::byte, Free> memory_;
    std::size_t size_ = 0;
};

// The value of a parameter of user functions. Make one with param below.
struct Param {
    std::string name;
    Dtype dtype = Dtype::f32;
    int rank = 0; // 0: a scalar
    const void *data = nullptr;
    std::array<std::int64_t, 4> shape{}, stride{};
    alignas(8) std::array<std::byte, 8> scalar{}; // in place of data

    attune_param to_c() const noexcept {
        attune_param p{};
        p.name = name.c_str();
        p.dtype = static_cast<attune_dtype>(dtype);
        p.rank = rank;
        p.data = rank ? data : scalar.data();
        for (std::size_t i = 0; i < 4; i++) {
            p.shape[i] = shape[i];
            p.stride[i] = stride[i];
        }
        return p;
    }
};

// A scalar: float, int32_t, int64_t or uint8_t, as the user function has it.
template <class T>
requires std::is_arithmetic_v<T> Param param(std::string name, T value) {
    Param p;
    p.name = std::move(name);
    p.dtype = static_cast<Dtype>(detail::dtype_of<T>());
    std::memcpy(p.scalar.data(), &value, sizeof value);
    return p;
}

// A dense array of that shape, of memory that outlives the run.
template <detail::Memory R> Param param(std::string name, R &&memory, std::initializer_list<std::int64_t> shape) {
    if (shape.size() < 1 || shape.size() > 4)
        detail::invalid(name + " has rank " + std::to_string(shape.size()) + ": expected 1 to 4");
    std::array<std::int64_t, 4> extents{1, 1, 1, 1}, strides{};
    std::size_t rank = 0;
    for (const std::int64_t extent : shape) extents[rank++] = extent;
    std::int64_t step = 1;
    for (std::size_t d = rank; d-- > 0; step *= extents[d]) strides[d] = step;
    const auto view = detail::view(std::forward<R>(memory), extents, strides); // checks the size
    Param p;
    p.name = std::move(name);
    p.dtype = view.dtype;
    p.rank = int(rank);
    p.data = view.data;
    p.shape = extents;
    p.stride = strides;
    return p;
}

// The optional tensors of a run: given exactly when the problem's flags ask for them; lse always may be given.
struct Extras {
    std::optional<ConstTensorView> mask{};   // uint8_t or bool [B, Hq, N, M], nonzero = attend
    std::optional<ConstTensorView> bias{};   // float [B, Hq, N, M], added to the scores; -inf masks
    std::optional<TensorView> lse{};         // float [B, Hq, N, 1], written: natural log of the sum of exp(scores)
    std::optional<TensorView> scores{};      // float [B, Hq, N, M], written: see Problem::scores
    std::span<const std::int64_t> kv_len{};  // [B]: keys from kv_len[b] on do not exist
    std::span<const std::int64_t> offsets{}; // [B]
    std::span<const float> alibi_slopes{};   // [Hq]
    std::span<const float> sinks{};          // [Hq]
    // [B + 1] each, from 0, never falling: sequence b is rows (keys) cu_seqlens[b] to cu_seqlens[b + 1]
    std::span<const std::int64_t> cu_seqlens_q{}, cu_seqlens_k{};
    std::vector<Param> params{}; // of Problem::mods, in any order
};

// The tensors of one run: Q [B, Hq, N, dk], K [B, Hkv, M, dk], V [B, Hkv, M, dv] and O [B, Hq, N, dv], the output.
struct Tensors {
    ConstTensorView q{}, k{}, v{};
    TensorView o{};
    Extras extras{};
};

namespace detail {

// An empty span means "not given", whatever pointer it carries.
template <class T> const T *pointer(std::span<const T> span) noexcept {
    return span.empty() ? nullptr : span.data();
}

// Keeps the C structs alive that attune_tensors points to.
struct CTensors {
    attune_tensors c;
    attune_tensor mask, bias, lse, scores;
    std::array<attune_param, ATTUNE_MAX_PARAMS> params;

    explicit CTensors(const Extras &extras) noexcept {
        attune_tensors_init(&c);
        auto set = [](const auto &view, attune_tensor &storage) -> const attune_tensor * {
            if (!view) return nullptr;
            storage = view->to_c();
            return &storage;
        };
        c.mask = set(extras.mask, mask);
        c.bias = set(extras.bias, bias);
        c.lse = set(extras.lse, lse);
        c.scores = set(extras.scores, scores);
        c.kv_len = pointer(extras.kv_len);
        c.offsets = pointer(extras.offsets);
        c.alibi_slopes = pointer(extras.alibi_slopes);
        c.sinks = pointer(extras.sinks);
        c.cu_seqlens_q = pointer(extras.cu_seqlens_q);
        c.cu_seqlens_k = pointer(extras.cu_seqlens_k);
        for (std::size_t i = 0; i < extras.params.size() && i < params.size(); i++) params[i] = extras.params[i].to_c();
        c.params = params.data();
        c.num_params = std::int64_t(extras.params.size()); // too many are refused
    }
    CTensors(const CTensors &) = delete;
    CTensors &operator=(const CTensors &) = delete;
};

// The C interface takes bare pointers for these; here their lengths are known.
inline void check_lengths(const Extras &extras, std::int64_t B, std::int64_t Hq) {
    auto one = [](const char *name, std::size_t size, const char *dimension, std::int64_t expected) {
        if (size != 0 && size != std::size_t(expected))
            invalid(std::string(name) + " has " + std::to_string(size) + " entries: expected " + dimension + " = " +
                    std::to_string(expected));
    };
    one("kv_len", extras.kv_len.size(), "B", B);
    one("offsets", extras.offsets.size(), "B", B);
    one("alibi_slopes", extras.alibi_slopes.size(), "Hq", Hq);
    one("sinks", extras.sinks.size(), "Hq", Hq);
    one("cu_seqlens_q", extras.cu_seqlens_q.size(), "B + 1", B + 1);
    one("cu_seqlens_k", extras.cu_seqlens_k.size(), "B + 1", B + 1);
}

} // namespace detail

// Runs the plan in the caller's memory: workspace of at least plan.workspace_size() bytes, any alignment. Allocates
// nothing. Nothing is written unless all arguments are right. The lengths of kv_len, offsets, ... are the caller's
// business here.
inline Status try_run(const Plan &plan, const Tensors &tensors, std::span<std::byte> workspace) noexcept {
    detail::CTensors t(tensors.extras);
    t.c.q = tensors.q.to_c();
    t.c.k = tensors.k.to_c();
    t.c.v = tensors.v.to_c();
    t.c.o = tensors.o.to_c();
    return attune_run(plan.get(), &t.c, workspace.data(), workspace.size());
}

// As above, throwing Error: ATTUNE_INVALID_ARGUMENT for a wrong tensor or too small a workspace, ATTUNE_KERNEL_FAILED.
inline void run(const Plan &plan, const Tensors &tensors, std::span<std::byte> workspace) {
    detail::check_lengths(tensors.extras, plan.problem().B, plan.problem().Hq);
    check(try_run(plan, tensors, workspace));
}

// As above with a workspace that grows at need: the first run of the largest plan allocates, no other does.
inline void run(const Plan &plan, const Tensors &tensors, Workspace &workspace) {
    workspace.reserve(plan.workspace_size());
    run(plan, tensors, std::span(workspace.data(), workspace.size()));
}

// Attention over a part of the keys: O [B, Hq, N, dv] and LSE float [B, Hq, N, 1].
struct Partial {
    ConstTensorView o{}, lse{};
};

// Merges attentions of the same queries over disjoint parts of the keys into the attention over all of them; see
// attune_merge. `sinks` ([Hq], or empty) in the last merge only. The output may be one of the parts' memory.
inline Status try_merge(std::span<const Partial> parts, const TensorView &o, const std::optional<TensorView> &lse = {},
                        std::span<const float> sinks = {}) {
    std::vector<attune_partial> c;
    c.reserve(parts.size());
    for (const Partial &part : parts) c.push_back({part.o.to_c(), part.lse.to_c()});
    const attune_tensor out = o.to_c(), out_lse = lse ? lse->to_c() : attune_tensor{};
    return attune_merge(c.data(), std::int64_t(c.size()), detail::pointer(sinks), &out, lse ? &out_lse : nullptr);
}

// As above, throwing Error.
inline void merge(std::span<const Partial> parts, const TensorView &o, const std::optional<TensorView> &lse = {},
                  std::span<const float> sinks = {}) {
    if (!sinks.empty() && sinks.size() != std::size_t(o.shape[1]))
        detail::invalid("sinks has " + std::to_string(sinks.size()) +
                        " entries: expected Hq = " + std::to_string(o.shape[1]));
    check(try_merge(parts, o, lse, sinks));
}

// How weight matrices are stored: [in, out] as in y = x W, or [out, in] as PyTorch's Linear keeps them.
enum class WeightLayout : int { in_out = ATTUNE_WEIGHT_IN_OUT, out_in = ATTUNE_WEIGHT_OUT_IN };

// Sizes of a multi-head attention module. Those not given follow the usual rule.
struct MhaConfig {
    std::int64_t d_model = 0;    // features of the queries' input
    std::int64_t d_model_kv = 0; // features of the keys' and values' input; 0: d_model
    std::int64_t d_out = 0;      // features of the output; 0: d_model
    std::int64_t Hq = 0;         // query heads
    std::int64_t Hkv = 0;        // key and value heads, a divisor of Hq; 0: Hq
    std::int64_t dk = 0;         // features of a query and a key in each head; 0: d_model / Hq
    std::int64_t dv = 0;         // features of a value in each head; 0: d_model / Hq
    WeightLayout layout = WeightLayout::in_out;

    attune_mha_config to_c() const noexcept {
        attune_mha_config c;
        attune_mha_config_init(&c);
        c.d_model = d_model;
        c.d_model_kv = d_model_kv;
        c.d_out = d_out;
        c.Hq = Hq;
        c.Hkv = Hkv;
        c.dk = dk;
        c.dv = dv;
        c.layout = static_cast<attune_weight_layout>(layout);
        return c;
    }
};

// Parameters, dense float. Matrices (in the config's layout, given here as in x out):
//   wq d_model x Hq*dk, wk d_model_kv x Hkv*dk, wv d_model_kv x Hkv*dv, wo Hq*dv x d_out
// either whole or as a list of one matrix per head: wq_heads[h] d_model x dk, ..., wo_heads[h] dv x d_out.
// Biases may be left out. All sizes are checked; everything is copied by the module's constructor.
struct MhaWeights {
    std::span<const float> wq{}, wk{}, wv{}, wo{};
    std::vector<std::span<const float>> wq_heads{}, wk_heads{}, wv_heads{}, wo_heads{};
    std::span<const float> bq{}, bk{}, bv{}, bo{};
};

// Names of the parameters in a .safetensors file. An empty name of a bias means that there is none.
struct MhaNames {
    std::string wq{}, wk{}, wv{}, wo{};
    std::string bq{}, bk{}, bv{}, bo{};
};

// One call of the module.
struct MhaCall {
    ConstTensorView x_q{};                 // [B, N, d_model]: see rows()
    std::optional<ConstTensorView> x_kv{}; // [B, M, d_model_kv]; not given: x_q (self-attention)
    TensorView y{};                        // [B, N, d_out], written; may be x_q's memory
    Problem attention{}; // causal, offset, window, scale, softcap, mask, bias, kv_len, ...; sizes are ignored
    Extras extras{};     // what these ask for: shapes as for a run, with the call's B, N, M and the module's heads
};

// Multi-head attention: Y = concat_h(attention(X_q W^Q_h, X_kv W^K_h, X_kv W^V_h)) W^O, each product with an optional
// bias. The weights are packed once. Calls are const and may come from several threads at once, each with its own
// workspace.
class MultiHeadAttention {
  public:
    // Throws Error with ATTUNE_INVALID_ARGUMENT (a wrong size, a missing matrix) or ATTUNE_OUT_OF_MEMORY.
    MultiHeadAttention(const MhaConfig &config, const MhaWeights &weights) : Hq_(config.Hq) {
        const attune_mha_config c = config.to_c();
        attune_mha_weights w;
        attune_mha_weights_init(&w);
        check_sizes(config, weights);
        std::vector<const float *> lists[4];
        auto list = [](const std::vector<std::span<const float>> &heads, std::vector<const float *> &pointers) {
            for (const auto &head : heads) pointers.push_back(detail::pointer(head));
            return pointers.empty() ? nullptr : pointers.data();
        };
        w.wq = detail::pointer(weights.wq);
        w.wk = detail::pointer(weights.wk);
        w.wv = detail::pointer(weights.wv);
        w.wo = detail::pointer(weights.wo);
        w.wq_heads = list(weights.wq_heads, lists[0]);
        w.wk_heads = list(weights.wk_heads, lists[1]);
        w.wv_heads = list(weights.wv_heads, lists[2]);
        w.wo_heads = list(weights.wo_heads, lists[3]);
        w.bq = detail::pointer(weights.bq);
        w.bk = detail::pointer(weights.bk);
        w.bv = detail::pointer(weights.bv);
        w.bo = detail::pointer(weights.bo);
        attune_mha *mha = nullptr;
        check(attune_mha_create(&c, &w, &mha));
        handle_.reset(mha);
    }

    // Reads float matrices from a .safetensors file. Throws Error: ATTUNE_IO_ERROR for a file that cannot be read, is
    // malformed, lacks a tensor or has one of another dtype or shape, ATTUNE_INVALID_ARGUMENT for a wrong config.
    static MultiHeadAttention load(const MhaConfig &config, const std::string &path, const MhaNames &names) {
        const attune_mha_config c = config.to_c();
        auto name = [](const std::string &text) { return text.empty() ? nullptr : text.c_str(); };
        const char *const list[8] = {name(names.wq), name(names.wk), name(names.wv), name(names.wo),
                                     name(names.bq), name(names.bk), name(names.bv), name(names.bo)};
        attune_mha *mha = nullptr;
        check(attune_mha_load(&c, path.c_str(), list, &mha));
        return MultiHeadAttention(mha, config.Hq);
    }

    // Bytes that this call needs; any later call of the same shapes and flags needs the same.
    std::size_t workspace_size(const MhaCall &call) const {
        std::size_t bytes = 0;
        check(with_c(call, [&](const attune_mha_call *c) { return attune_mha_workspace(handle_.get(), c, &bytes); }));
        return bytes;
    }

    // Runs in the caller's memory. y is not written unless all arguments are right.
    Status try_run(const MhaCall &call, std::span<std::byte> workspace) const noexcept {
        return with_c(call, [&](const attune_mha_call *c) {
            return attune_mha_run(handle_.get(), c, workspace.data(), workspace.size());
        });
    }

    // As above, throwing Error.
    void run(const MhaCall &call, std::span<std::byte> workspace) const {
        detail::check_lengths(call.extras, call.x_q.shape[0], Hq_);
        check(try_run(call, workspace));
    }

    // As above with a workspace that grows at need.
    void run(const MhaCall &call, Workspace &workspace) const {
        workspace.reserve(workspace_size(call));
        run(call, std::span(workspace.data(), workspace.size()));
    }

    const attune_mha *get() const noexcept { return handle_.get(); }

  private:
    struct Destroy {
        void operator()(attune_mha *mha) const noexcept { attune_mha_destroy(mha); }
    };

    MultiHeadAttention(attune_mha *mha, std::int64_t Hq) noexcept : handle_(mha), Hq_(Hq) {}

    template <class F> static Status with_c(const MhaCall &call, F &&f) noexcept {
        detail::CTensors extras(call.extras);
        const attune_problem problem = call.attention.to_c();
        attune_mha_call c;
        attune_mha_call_init(&c);
        c.x_q = call.x_q.to_c();
        c.x_kv = call.x_kv ? call.x_kv->to_c() : c.x_q;
        c.y = call.y.to_c();
        c.problem = &problem;
        c.extras = &extras.c;
        return f(&c);
    }

    // The C interface takes bare pointers; here the sizes are known. Wrong configs are left for the C interface to
    // name: it does so before it touches a matrix.
    static void check_sizes(const MhaConfig &config, const MhaWeights &weights) {
        if (config.d_model <= 0 || config.Hq <= 0 || config.Hkv < 0 || config.d_model_kv < 0 || config.d_out < 0 ||
            config.dk < 0 || config.dv < 0)
            return;
        if (config.Hkv != 0 && config.Hq % config.Hkv != 0) return;
        if ((config.dk == 0 || config.dv == 0) && config.d_model % config.Hq != 0) return;
        const std::int64_t d_kv = config.d_model_kv ? config.d_model_kv : config.d_model;
        const std::int64_t d_out = config.d_out ? config.d_out : config.d_model;
        const std::int64_t Hkv = config.Hkv ? config.Hkv : config.Hq;
        const std::int64_t dk = config.dk ? config.dk : config.d_model / config.Hq;
        const std::int64_t dv = config.dv ? config.dv : config.d_model / config.Hq;
        auto one = [](const std::string &name, std::size_t size, std::int64_t rows, std::int64_t columns) {
            // Compared by division: rows * columns may overflow for sizes that the C interface refuses.
            const bool right =
                columns == 0 ? size == 0
                             : size % std::size_t(columns) == 0 && size / std::size_t(columns) == std::size_t(rows);
            if (!right)
                detail::invalid(name + " has " + std::to_string(size) + " elements: expected " + std::to_string(rows) +
                                " x " + std::to_string(columns));
        };
        auto matrix = [&](const std::string &name, std::span<const float> whole,
                          const std::vector<std::span<const float>> &heads, std::int64_t H, std::int64_t rows,
                          std::int64_t columns, std::int64_t head_rows, std::int64_t head_columns) {
            if (!whole.empty()) one(name, whole.size(), rows, columns);
            if (heads.empty()) return;
            if (heads.size() != std::size_t(H))
                detail::invalid(name + "_heads has " + std::to_string(heads.size()) + " matrices: expected " +
                                std::to_string(H));
            for (std::size_t h = 0; h < heads.size(); h++)
                one(name + "_heads[" + std::to_string(h) + "]", heads[h].size(), head_rows, head_columns);
        };
        matrix("wq", weights.wq, weights.wq_heads, config.Hq, config.d_model, config.Hq * dk, config.d_model, dk);
        matrix("wk", weights.wk, weights.wk_heads, Hkv, d_kv, Hkv * dk, d_kv, dk);
        matrix("wv", weights.wv, weights.wv_heads, Hkv, d_kv, Hkv * dv, d_kv, dv);
        matrix("wo", weights.wo, weights.wo_heads, config.Hq, config.Hq * dv, d_out, dv, d_out);
        if (!weights.bq.empty()) one("bq", weights.bq.size(), 1, config.Hq * dk);
        if (!weights.bk.empty()) one("bk", weights.bk.size(), 1, Hkv * dk);
        if (!weights.bv.empty()) one("bv", weights.bv.size(), 1, Hkv * dv);
        if (!weights.bo.empty()) one("bo", weights.bo.size(), 1, d_out);
    }

    std::unique_ptr<attune_mha, Destroy> handle_;
    std::int64_t Hq_ = 0;
};

} // namespace attune
#endif
