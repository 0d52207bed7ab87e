#include "run.h"

#include "convert.h"
#include "device.h"
#include "staging.h"
#include "status.h"

#include "HalideRuntime.h"

#include <array>
#include <chrono>
#include <cstdlib>
#include <limits>
#include <optional>
#include <string_view>

namespace attune::rt::device {

namespace {

// Offsets are 32 bits wide in device code, and Halide checks that buffers have fewer than 2^31 bytes.
constexpr int64_t kMaxIndex = std::numeric_limits<int32_t>::max();

// The elements from the lowest to the highest, and how far the first lies above the lowest.
struct Span {
    __extension__ typedef __int128 wide; // validated strides may be huge
    int64_t below = 0;
    bool fits = true, reversed = false;

    explicit Span(const attune_tensor &t) {
        wide low = 0, high = 0;
        for (int i = 0; i < 4; i++) {
            if (t.shape[i] <= 1) continue;
            const wide reach = wide(t.stride[i]) * (t.shape[i] - 1);
            (reach < 0 ? low : high) += reach;
            reversed = reversed || t.stride[i] < 0;
            fits = fits && t.stride[i] <= kMaxIndex && t.stride[i] >= -kMaxIndex;
        }
        const int bytes = int(bytes_of(t.dtype));
        fits = fits && (high - low + 1) * bytes < kMaxIndex - 2 * kAlign;
        below = fits ? int64_t(-low) : 0;
    }
};

// Tensor core kernels count in 64 bits.
bool takes_any_span(const attune_kernel &k) {
    return std::string_view(k.backend) == "mlir";
}

// Checks a tensor that is on the device.
attune_status check_span(const attune_kernel &k, const char *name, const attune_tensor &t) {
    const attune_device device = k.device;
    for (int64_t extent : t.shape)
        if (extent == 0) return ATTUNE_OK;
    const Span span(t);
    if (!span.fits && !takes_any_span(k))
        return fail(ATTUNE_UNSUPPORTED,
                    "{} has strides {}, {}, {}, {}: expected less than 2 GiB from the first element to the last, which "
                    "is what kernel {} can address",
                    name, t.stride[0], t.stride[1], t.stride[2], t.stride[3], k.name);
    Place place;
    if (!locate(device, t.data, place))
        return fail(ATTUNE_INVALID_ARGUMENT, "{}.data is {}: expected an address of attune_device_malloc for {}", name,
                    static_cast<const void *>(t.data), title(device));
    return ATTUNE_OK;
}

attune_status status_of(int error) {
    return error == halide_error_code_out_of_memory || error == halide_error_code_device_malloc_failed
               ? ATTUNE_OUT_OF_MEMORY
               : ATTUNE_DEVICE_ERROR;
}

} // namespace

std::string refusal(const attune_kernel &k, const attune_problem &p) {
    const Backend &b = backend(k.device);
    if (!b.why_not.empty()) return b.why_not;
    const attune_device_info &d = *b.chosen;
    if (k.device == ATTUNE_CUDA && std::string_view(k.isa).starts_with("sm_") && std::atoi(k.isa + 3) > d.capability)
        return formatted("{} is sm_{}, and it is built for {}", d.name, d.capability, k.isa);
    for (int64_t i = 0; i < k.num_code; i++) {
        const attune_device_code &c = k.code[i];
        if (c.shared_bytes > d.shared_bytes && d.shared_bytes > 0 && k.device != ATTUNE_CUDA)
            return formatted("it needs {} bytes of shared memory, and {} has {}", c.shared_bytes, d.name,
                             d.shared_bytes);
        if (c.threads > d.max_threads && d.max_threads > 0)
            return formatted("it needs {} threads in a workgroup, and {} has {}", c.threads, d.name, d.max_threads);
    }
    constexpr int64_t kMostKeys = 1 << 24, kMostRows = 1 << 30, kMostHeads = 65535; // of its grid
    if (p.M > kMostKeys || p.N > kMostRows) return "it takes 2^24 keys and 2^30 rows at most";
    if (p.B > kMostHeads || p.Hq > kMostHeads || p.B * p.Hq > kMostHeads)
        return "it takes 65535 heads, those of all batch elements together, at most";
    // Mesa's software Vulkan ends the loops of a shader, without a word, after 65535 turns in all. The strict phase has
    // the most: three times over keys and groups of 32 features.
    if (k.device == ATTUNE_VULKAN && d.is_software && p.M * (3 * ((p.dk + 31) / 32) + 3) > 65000)
        return formatted("{} ends loops after 65535 turns, which do not suffice for {} keys of d {}", d.name, p.M,
                         p.dk);
    if (k.traits & ATTUNE_TRAIT_QUADRATIC) {
        __extension__ typedef __int128 wide;
        if (wide(p.B) * p.Hq * p.N * (p.M + 8) * 4 > kMaxIndex) return "it keeps scores of less than 2 GiB";
    }
    return "";
}

attune_status run(const attune_kernel &k, const attune_args &args, double *seconds) {
    const attune_device device = args.problem->device;
    Backend &b = backend(device);
    if (!b.why_not.empty()) return fail(ATTUNE_DEVICE_ERROR, "{}", b.why_not);

    // Batch elements that see keys in different ways may be launched one by one.
    const bool by_batch =
        !b.has_pointers() && args.problem->B > 1 && args.problem->flags & (ATTUNE_KV_LEN | ATTUNE_OFFSETS);
    Staging staging(device, by_batch);
    if (attune_status s = staging.zeros()) return s;
    attune_tensors t = *args.tensors;
    std::optional<attune_tensor> mask, bias, lse, scores;
    const auto own = [](std::optional<attune_tensor> &copy, const attune_tensor *&pointer) {
        if (!pointer) return;
        copy = *pointer;
        pointer = &*copy;
    };
    own(mask, t.mask);
    own(bias, t.bias);
    own(lse, t.lse);
    own(scores, t.scores);
    struct Named {
        const char *name;
        attune_tensor *tensor;
    };
    for (const Named &n : {Named{"tensors.q", &t.q},
                           {"tensors.k", &t.k},
                           {"tensors.v", &t.v},
                           {"tensors.mask", mask ? &*mask : nullptr},
                           {"tensors.bias", bias ? &*bias : nullptr}}) {
        if (!n.tensor) continue;
        if (attune_status s = staging.input(*n.tensor)) return s;
        if (attune_status s = check_span(k, n.name, *n.tensor)) return s;
    }
    std::array<attune_param, ATTUNE_MAX_PARAMS> params;
    for (int64_t i = 0; i < t.num_params; i++) {
        params[size_t(i)] = t.params[i];
        if (attune_status s = staging.input(params[size_t(i)])) return s;
    }
    t.params = params.data();
    for (const Named &n : {Named{"tensors.o", &t.o},
                           {"tensors.lse", lse ? &*lse : nullptr},
                           {"tensors.scores", scores ? &*scores : nullptr}}) {
        if (!n.tensor) continue;
        if (attune_status s = staging.output(*n.tensor)) return s;
        if (attune_status s = check_span(k, n.name, *n.tensor)) return s;
        // An output starts where its buffer's view does: at a multiple of kAlign where handles are no addresses.
        Place place;
        locate(device, n.tensor->data, place);
        const int64_t batch = n.tensor->stride[0] * bytes_of(n.tensor->dtype);
        const bool aligned = b.has_pointers() || (place.offset % kAlign == 0 && !(by_batch && batch % kAlign));
        if (!aligned || Span(*n.tensor).reversed)
            if (attune_status s = staging.detour(*n.tensor)) return s;
    }

    attune_args on_device = args;
    on_device.tensors = &t;
    for (int64_t i = 0; i < k.num_phases; i++) {
        const attune_phase &phase = k.phases[i];
        const auto start = std::chrono::steady_clock::now();
        const int64_t tasks = phase.tasks(&on_device);
        if (const int error = tasks ? phase.run(&on_device, 0, tasks, nullptr) : 0)
            return fail(status_of(error), "kernel {}, phase {}: error {}: {}", k.name, phase.name, error,
                        std::string(attune_last_error()));
        if (!seconds) continue;
        if (attune_status s = b.synchronize()) return s;
        seconds[i] = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    }
    return staging.finish();
}

} // namespace attune::rt::device
