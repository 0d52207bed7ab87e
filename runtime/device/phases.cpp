#include "phases.h"

#include "device.h"
#include "halide/arguments.h"
#include "staging.h"
#include "status.h"
#include "tiles.h"
#include "validate.h"

#include "HalideRuntime.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <deque>
#include <limits>
#include <string>
#include <vector>

namespace attune::rt::gpu {

namespace {

using device::Backend;
using device::Place;

constexpr int64_t kFar = int64_t(1) << 30;
enum BatchEntry { kLow, kHigh, kKeys, kPosition, kBatchEntries }; // as in gpu_phases.h
enum HeadEntry { kSlope, kSink, kHeadEntries };
enum Use { kUseBatch = 1, kUseMask = 2, kUseBias = 4, kUseSoftcap = 8, kUseAlibi = 16, kUseSink = 32 };

halide_type_t halide_type(attune_dtype t, bool half_as_bits) {
    switch (t) {
    case ATTUNE_F16:
        return halide_type_t(half_as_bits ? halide_type_uint : halide_type_float, 16);
    case ATTUNE_U8:
        return halide_type_t(halide_type_uint, 8);
    case ATTUNE_I32:
        return halide_type_t(halide_type_int, 32);
    case ATTUNE_I64:
        return halide_type_t(halide_type_int, 64);
    default:
        return halide_type_t(halide_type_float, 32);
    }
}

// Workspace of a kernel: the per-batch and per-head arrays, then what its phases keep.
struct Layout {
    int64_t batch_at, head_at, nowhere_at, scores_at, parts_at, bytes = 0;
    int64_t score_row, splits;

    Layout(const KernelMeta &meta, const attune_problem &p) {
        const auto take = [this](int64_t n) {
            const int64_t at = bytes;
            bytes = round_up(bytes + n, device::kAlign);
            return at;
        };
        batch_at = take(p.B * kBatchEntries * 4);
        head_at = take(p.Hq * kHeadEntries * 4);
        // Of each row its own place: two threads that write different values to one would race.
        nowhere_at = take(p.B * p.Hq * p.N * 4);
        // A row of scores is followed by its maximum and its sum.
        score_row = round_up(std::max<int64_t>(p.M, 1), 4) + 4;
        scores_at = take(meta.keeps_scores ? p.B * p.Hq * p.N * score_row * 4 : 0);
        splits = meta.split_keys ? std::max<int64_t>(ceil_div(p.M, meta.split_keys), 1) : 0;
        parts_at = take(p.B * p.Hq * p.N * splits * (meta.dv + 2) * 4);
    }
};

// One call of a generated function: its buffers, and what they are views of.
class Call {
  public:
    Call(const KernelMeta &meta, const attune_args &args, bool natural_units)
        : meta_(meta), args_(args), p_(*args.problem), t_(*args.tensors),
          backend_(device::backend(args.problem->device)), layout_(meta, p_) {
        natural_ = natural_units || in_natural_units(p_) || (meta.user && meta.user->scores);
    }
    ~Call() {
        for (device::Handle h : cropped_) backend_.end_crop(h);
    }
    Call(const Call &) = delete;
    Call &operator=(const Call &) = delete;

    // With no key at all, kernels see one that no row sees. Runs fn on batch elements [b, b + n): with per-batch arrays
    // if their values differ, unless n is 1. The last `outputs` of the phase's own buffers are written.
    template <size_t outputs, typename Fn, typename... Own> int run(Fn *fn, int64_t b, int64_t n, Own... own) {
        if (status_) return status_;
        const Bounds same = bounds(b);
        const bool per_batch = n > 1 && p_.flags & (ATTUNE_KV_LEN | ATTUNE_OFFSETS);
        halide_buffer_t *batch = per_batch ? upload_batch() : dummy({kBatchEntries, p_.B});
        batch->type = halide_type_t(halide_type_int, 32);
        const bool heads = p_.flags & (ATTUNE_ALIBI | ATTUNE_SINK);
        halide_buffer_t *head = heads ? upload_heads() : dummy({kHeadEntries, p_.Hq});
        const auto flag = [this](uint32_t f) { return (p_.flags & f) != 0; };
        const std::vector<int64_t> keys_of_rows{p_.M, p_.N, p_.Hq, n};
        halide_buffer_t *q = tensor(t_.q, b, n), *k = tensor(t_.k, b, n), *v = tensor(t_.v, b, n);
        halide_buffer_t *mask = flag(ATTUNE_MASK) ? tensor(*t_.mask, b, n) : absent(keys_of_rows, ATTUNE_U8);
        halide_buffer_t *bias = flag(ATTUNE_BIAS) ? tensor(*t_.bias, b, n) : absent(keys_of_rows, ATTUNE_F32);
        bias->type = halide_type_t(halide_type_uint, 32);
        if (status_) return status_;
        const int32_t uses = (per_batch ? kUseBatch : 0) | (flag(ATTUNE_MASK) ? kUseMask : 0) |
                             (flag(ATTUNE_BIAS) ? kUseBias : 0) | (flag(ATTUNE_SOFTCAP) ? kUseSoftcap : 0) |
                             (flag(ATTUNE_ALIBI) ? kUseAlibi : 0) | (flag(ATTUNE_SINK) ? kUseSink : 0);
        const auto call = [&](auto... all) {
            if constexpr (std::is_same_v<Fn, UserFn>)
                return with_user<outputs>(fn, int32_t(b), all...);
            else
                return fn(all...);
        };
        return call(q, k, v, mask, bias, batch, head, same.low, same.high, same.keys, same.position, uses,
                    flag(ATTUNE_SOFTCAP) ? p_.softcap : 1.0f, int32_t(p_.N), std::max(int32_t(p_.M), 1), int32_t(p_.dk),
                    int32_t(p_.dv), int32_t(p_.Hq / p_.Hkv), args_.scale * (natural_ ? 1.0f : kLog2e),
                    natural_ ? kLog2e : 1.0f, natural_ ? 1.0f : kLn2, own...);
    }

    // With the parameters of user functions, whose arrays are dense and on the device (run.cpp).
    template <size_t outputs, typename... All> int with_user(UserFn *fn, int32_t first_batch, All... all) {
        const uint32_t zero = 0;
        std::array<halide_buffer_t *, ATTUNE_MAX_PARAMS> arrays{};
        for (int64_t i = 0; i < meta_.user->num_params; i++)
            if (meta_.user->params[i].rank) arrays[size_t(i)] = param(param_of(t_, meta_.user->params[i]));
        if (status_) return status_;
        const auto add = [&](halide::Arguments &a) {
            a.add(first_batch);
            a.add(zero);
            for (int64_t i = 0; i < meta_.user->num_params; i++) {
                if (arrays[size_t(i)])
                    a.add(arrays[size_t(i)]);
                else
                    a.add(*static_cast<const char *>(param_of(t_, meta_.user->params[i]).data));
            }
        };
        return halide::call_with_user<outputs>(fn, add, all...);
    }

    // O, or LSE as its bits with a first dimension of stride 0; only written.
    halide_buffer_t *output(int64_t b, int64_t n) { return out_view(t_.o, b, n, p_.dv, false); }
    halide_buffer_t *lse(int64_t b, int64_t n) {
        halide_buffer_t *x;
        if (t_.lse) {
            x = out_view(*t_.lse, b, n, p_.dv, true);
        } else { // nobody wants it
            x = workspace(layout_.nowhere_at, {p_.dv, p_.N, p_.Hq, n}, {0, 1, p_.N, p_.N * p_.Hq});
        }
        x->type = halide_type_t(halide_type_uint, 32);
        return x;
    }
    // (j, i, h, b), with the maximum and the sum of a row behind its keys.
    halide_buffer_t *scores() {
        const int64_t r = layout_.score_row;
        return workspace(layout_.scores_at, {r, p_.N, p_.Hq, p_.B}, {1, r, r * p_.N, r * p_.N * p_.Hq});
    }
    // (c, split, i, h, b): O, then maximum and sum of a part.
    halide_buffer_t *parts() {
        const int64_t c = meta_.dv + 2, s = layout_.splits;
        return workspace(layout_.parts_at, {c, s, p_.N, p_.Hq, p_.B},
                         {1, c, c * s, c * s * p_.N, c * s * p_.N * p_.Hq});
    }

  private:
    struct Bounds {
        int32_t low, high, keys, position;
    };
    struct View {
        halide_buffer_t buffer{};
        std::array<halide_dimension_t, 5> dims{};
    };

    const KernelMeta &meta_;
    const attune_args &args_;
    const attune_problem &p_;
    const attune_tensors &t_;
    Backend &backend_;
    const Layout layout_;
    bool natural_;
    int status_ = 0;
    std::deque<View> views_; // addresses stay
    std::vector<device::Handle> cropped_;

    // Which keys row i of a batch element sees: i + low <= j < min(i + high, keys).
    Bounds bounds(int64_t b) const {
        const int64_t offset = p_.flags & ATTUNE_OFFSETS ? t_.offsets[b] : p_.offset;
        const auto near = [](int64_t x) { return int32_t(std::clamp<int64_t>(x, -kFar, kFar)); };
        int64_t high = kFar;
        if (p_.flags & ATTUNE_CAUSAL) high = offset + 1;
        // Offsets are within 2^60: a window cut to twice that cannot overflow.
        constexpr int64_t kWide = int64_t(1) << 61;
        if (p_.window_right >= 0) high = std::min(high, offset + std::min(p_.window_right, kWide) + 1);
        const int64_t low = p_.window_left >= 0 ? offset - std::min(p_.window_left, kWide) : -kFar;
        const int64_t keys = p_.flags & ATTUNE_KV_LEN ? std::clamp<int64_t>(t_.kv_len[b], 0, p_.M) : p_.M;
        return {near(low), near(high), int32_t(keys), near(offset)};
    }

    halide_buffer_t *upload_batch() {
        std::vector<Bounds> all;
        for (int64_t b = 0; b < p_.B; b++) all.push_back(bounds(b));
        return upload(layout_.batch_at, all.data(), all.size() * sizeof(Bounds), {kBatchEntries, p_.B});
    }
    halide_buffer_t *upload_heads() {
        std::vector<float> all(size_t(p_.Hq * kHeadEntries), 0.0f);
        for (int64_t h = 0; h < p_.Hq; h++) {
            if (p_.flags & ATTUNE_ALIBI) all[size_t(h * kHeadEntries + kSlope)] = t_.alibi_slopes[h];
            if (p_.flags & ATTUNE_SINK) all[size_t(h * kHeadEntries + kSink)] = t_.sinks[h];
        }
        return upload(layout_.head_at, all.data(), all.size() * sizeof(float), {kHeadEntries, p_.Hq});
    }
    halide_buffer_t *upload(int64_t at, const void *from, size_t bytes, const std::vector<int64_t> &extents) {
        halide_buffer_t *x = workspace(at, extents, {1, extents[0]});
        Place place;
        if (!status_ && (!device::locate(p_.device, static_cast<char *>(args_.shared) + at, place) ||
                         backend_.copy_in(place.handle, place.offset, from, bytes)))
            status_ = halide_error_code_copy_to_device_failed;
        return x;
    }

    // A view of memory `offset` bytes behind an address. Its residual, where the driver cannot start a view there, is
    // left to the minimum of dimension z.
    View &view(const void *address, int64_t offset, const std::vector<int64_t> &extents,
               const std::vector<int64_t> &strides, halide_type_t type, int64_t z_bytes = -1) {
        View &v = views_.emplace_back();
        Place place;
        if (!device::locate(p_.device, static_cast<const char *>(address) + offset, place)) {
            set_last_error(formatted("{} is no address of {}: expected a tensor or workspace on the device", address,
                                     device::title(p_.device)));
            status_ = halide_error_code_buffer_is_null;
        }
        int64_t start = place.offset;
        if (!backend_.has_pointers()) start = start / device::kAlign * device::kAlign;
        v.buffer.device = place.handle;
        if (start && !status_) {
            device::Handle part = 0;
            if (backend_.crop(place.handle, start, part))
                status_ = halide_error_code_device_crop_failed;
            else
                cropped_.push_back(part);
            v.buffer.device = part;
        }
        for (size_t i = 0; i < extents.size(); i++)
            v.dims[i] = halide_dimension_t(0, int32_t(std::max<int64_t>(extents[i], 1)), int32_t(strides[i]));
        v.buffer.dimensions = int32_t(extents.size());
        if (z_bytes >= 0) {
            const auto z = int32_t((place.offset - start + z_bytes) / type.bytes());
            v.dims[extents.size()] = halide_dimension_t(-z, z + 1, 1);
            v.buffer.dimensions++;
        }
        v.buffer.dim = v.dims.data();
        v.buffer.type = type;
        v.buffer.device_interface = backend_.interface();
        return v;
    }

    // (innermost … b, z) of an input, from batch element b on.
    halide_buffer_t *tensor(const attune_tensor &t, int64_t b, int64_t n) {
        if (!t.shape[0] || !t.shape[1] || !t.shape[2] || !t.shape[3])
            return absent({t.shape[3], t.shape[2], t.shape[1], n}, t.dtype);
        const halide_type_t type = halide_type(t.dtype, meta_.half_as_bits);
        const std::array<int64_t, 4> extents{t.shape[3], t.shape[2], t.shape[1], n};
        std::array<int64_t, 4> strides{};
        int64_t lowest = b * t.stride[0];
        for (int i = 0; i < 4; i++) {
            strides[size_t(i)] = extents[size_t(i)] > 1 ? t.stride[3 - i] : 0;
            if (strides[size_t(i)] < 0) lowest += strides[size_t(i)] * (extents[size_t(i)] - 1);
        }
        if (t.shape[0] <= 1) lowest -= b * t.stride[0];
        const int64_t bytes = type.bytes();
        return &view(t.data, lowest * bytes, {extents.begin(), extents.end()}, {strides.begin(), strides.end()}, type,
                     (first_of(t, b) - lowest) * bytes)
                    .buffer;
    }
    static int64_t first_of(const attune_tensor &t, int64_t b) { return t.shape[0] > 1 ? b * t.stride[0] : 0; }

    halide_buffer_t *param(const attune_param &p) {
        std::vector<int64_t> extents, strides;
        for (int d = p.rank - 1; d >= 0; d--) extents.push_back(p.shape[d]), strides.push_back(p.stride[d]);
        return &view(p.data, 0, extents, strides, halide_type(p.dtype, false)).buffer;
    }
    // What stands in for a tensor, or an array of the workspace, that is not there: zeros, which are read and not used.
    halide_buffer_t *absent(const std::vector<int64_t> &extents, attune_dtype type) {
        return &view(device::zeros_of(p_.device), 0, extents, {0, 0, 0, 0}, halide_type(type, meta_.half_as_bits), 0)
                    .buffer;
    }
    halide_buffer_t *dummy(const std::vector<int64_t> &extents) {
        return &view(device::zeros_of(p_.device), 0, extents, {1, 0}, halide_type(ATTUNE_F32, false)).buffer;
    }
    halide_buffer_t *workspace(int64_t at, const std::vector<int64_t> &extents, const std::vector<int64_t> &strides) {
        return &view(args_.shared, at, extents, strides, halide_type(ATTUNE_F32, false)).buffer;
    }
    halide_buffer_t *out_view(const attune_tensor &t, int64_t b, int64_t n, int64_t columns, bool broadcast) {
        const halide_type_t type = halide_type(t.dtype, meta_.half_as_bits);
        return &view(t.data, first_of(t, b) * type.bytes(), {columns, t.shape[2], t.shape[1], n},
                     {broadcast ? 0 : t.stride[3], t.stride[2], t.stride[1], t.stride[0]}, type)
                    .buffer;
    }
};

} // namespace

size_t shared_bytes(const KernelMeta &meta, const attune_problem &p) {
    return size_t(Layout(meta, p).bytes);
}

// Phases, for functions without user functions and with some.
namespace {

// Batch elements that see keys in different ways are launched one by one: see gpu_phases.h.
template <typename Fn> int block_by(const KernelMeta &meta, Fn *fn, const attune_args &args) {
    const attune_problem &p = *args.problem;
    const bool differ = p.B > 1 && p.flags & (ATTUNE_KV_LEN | ATTUNE_OFFSETS);
    for (int64_t b = 0; b < p.B; b += differ ? 1 : p.B) {
        const int64_t n = differ ? 1 : p.B;
        Call call(meta, args, false);
        if (int error = call.run<2>(fn, b, n, call.output(b, n), call.lse(b, n))) return error;
    }
    return 0;
}

template <typename Fn> int strict_by(const KernelMeta &meta, Fn *fn, const attune_args &args) {
    const int64_t n = args.problem->B;
    Call call(meta, args, true);
    return call.run<2>(fn, 0, n, call.output(0, n), call.output(0, n), call.lse(0, n));
}

template <typename Fn> int mask_by(const KernelMeta &meta, Fn *fn, const attune_args &args) {
    Call call(meta, args, false);
    return call.run<1>(fn, 0, args.problem->B, call.scores(), call.scores());
}

template <typename Fn> int partial_by(const KernelMeta &meta, Fn *fn, const attune_args &args) {
    Call call(meta, args, false);
    return call.run<1>(fn, 0, args.problem->B, call.parts());
}

} // namespace

#define ATTUNE_BOTH(name, Fn)                                                                                          \
    int name(const KernelMeta &meta, Fn *fn, const attune_args &args) {                                                \
        return name##_by(meta, fn, args);                                                                              \
    }                                                                                                                  \
    int name(const KernelMeta &meta, UserFn *fn, const attune_args &args) {                                            \
        return name##_by(meta, fn, args);                                                                              \
    }
ATTUNE_BOTH(block, BlockFn)
ATTUNE_BOTH(strict, StrictFn)
ATTUNE_BOTH(mask, MaskFn)
ATTUNE_BOTH(partial, PartialFn)
#undef ATTUNE_BOTH

int score(const KernelMeta &meta, ScoreFn *fn, const attune_args &args) {
    Call call(meta, args, false);
    return call.run<1>(fn, 0, args.problem->B, call.scores());
}

int softmax(const KernelMeta &meta, SoftmaxFn *fn, const attune_args &args) {
    Call call(meta, args, false);
    return call.run<1>(fn, 0, args.problem->B, call.scores(), call.scores());
}

int matmul(const KernelMeta &meta, MatmulFn *fn, const attune_args &args) {
    const int64_t n = args.problem->B;
    Call call(meta, args, false);
    return call.run<2>(fn, 0, n, call.scores(), call.output(0, n), call.lse(0, n));
}

int merge(const KernelMeta &meta, MergeFn *fn, const attune_args &args) {
    const int64_t n = args.problem->B;
    Call call(meta, args, false);
    return call.run<2>(fn, 0, n, call.parts(), call.output(0, n), call.lse(0, n));
}

} // namespace attune::rt::gpu
