#include "validate.h"

#include "convert.h"
#include "status.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <tuple>

namespace attune::rt {

namespace {

bool known_dtype(attune_dtype t) {
    return t == ATTUNE_F32 || t == ATTUNE_BF16 || t == ATTUNE_F16;
}

// The cumulative lengths of packed sequences. `longest`: the most rows (keys) that a sequence may have by the plan;
// `rows`: those of the packed tensor.
attune_status check_lengths(const char *name, const int64_t *cu, const attune_problem &p, const char *longest_name,
                            int64_t longest, const char *tensor, int64_t rows) {
    if (cu[0] != 0) return fail(ATTUNE_INVALID_ARGUMENT, "tensors.{}[0] is {}: expected 0", name, cu[0]);
    for (int64_t b = 0; b < p.B; b++) {
        if (cu[b + 1] < cu[b])
            return fail(ATTUNE_INVALID_ARGUMENT, "tensors.{}[{}] is {}: expected at least the {} before it", name,
                        b + 1, cu[b + 1], cu[b]);
        if (cu[b + 1] - cu[b] > longest)
            return fail(ATTUNE_INVALID_ARGUMENT,
                        "tensors.{}[{}] is {}, after {}: expected sequences of at most {} = {}, the plan's longest",
                        name, b + 1, cu[b + 1], cu[b], longest_name, longest);
    }
    if (cu[p.B] != rows)
        return fail(ATTUNE_INVALID_ARGUMENT, "tensors.{}[{}], the last, is {}: expected {}.shape[2] = {}", name, p.B,
                    cu[p.B], tensor, rows);
    return ATTUNE_OK;
}

} // namespace

attune_status check_tensor(const Expected &e) {
    const attune_tensor &t = e.tensor;
    for (int i = 0; i < 4; i++)
        if (t.shape[i] != e.shape[i])
            return fail(ATTUNE_INVALID_ARGUMENT, "{}.shape is {}: expected {}", e.name, list(t.shape), list(e.shape));
    if (t.dtype != e.dtype)
        return fail(ATTUNE_INVALID_ARGUMENT, "{}.dtype is {}: expected {}", e.name, attune_dtype_string(t.dtype),
                    attune_dtype_string(e.dtype));
    if (t.device != e.device && t.device != ATTUNE_CPU) // a device takes tensors of the host as well
        return fail(ATTUNE_INVALID_ARGUMENT, "{}.device is {}: expected {}", e.name, int(t.device), int(e.device));
    bool empty = false;
    for (int i = 0; i < 4; i++) empty = empty || t.shape[i] == 0;
    if (empty) return ATTUNE_OK;
    if (!t.data) return fail(ATTUNE_INVALID_ARGUMENT, "{}.data is null: expected a pointer to its elements", e.name);
    if (reinterpret_cast<uintptr_t>(t.data) % size_t(bytes_of(t.dtype)))
        return fail(ATTUNE_INVALID_ARGUMENT, "{}.data is {}: expected an address aligned to its {}-byte elements",
                    e.name, static_cast<const void *>(t.data), bytes_of(t.dtype));
    // No address may overflow: the largest offset in bytes must fit 63 bits.
    long double reach = 0;
    for (int i = 0; i < 4; i++) {
        if (t.shape[i] > 1 && t.stride[i] == 0 && !e.broadcast)
            return fail(ATTUNE_INVALID_ARGUMENT,
                        "{}.stride[{}] is 0: expected another value for an output of extent {} there", e.name, i,
                        t.shape[i]);
        if (t.shape[i] > 1)
            reach += std::fabs(static_cast<long double>(t.stride[i])) * static_cast<long double>(t.shape[i] - 1);
    }
    if (reach * bytes_of(t.dtype) > static_cast<long double>(std::numeric_limits<int64_t>::max()))
        return fail(ATTUNE_INVALID_ARGUMENT, "{}.stride is {}: expected strides whose largest offset fits 63 bits",
                    e.name, list(t.stride));
    return ATTUNE_OK;
}

attune_status validate_problem(const attune_problem *problem) {
    if (!problem) return fail(ATTUNE_INVALID_ARGUMENT, "problem is null: expected an attune_problem");
    const attune_problem &p = *problem;
    if (p.struct_size != sizeof(attune_problem))
        return fail(ATTUNE_INVALID_ARGUMENT, "problem.struct_size is {}: expected {}; call attune_problem_init first",
                    p.struct_size, sizeof(attune_problem));
    for (auto [name, t] : {std::pair{"q_dtype", p.q_dtype}, {"kv_dtype", p.kv_dtype}, {"o_dtype", p.o_dtype}})
        if (!known_dtype(t))
            return fail(ATTUNE_INVALID_ARGUMENT, "problem.{} is {}: expected ATTUNE_F32, ATTUNE_BF16 or ATTUNE_F16",
                        name, int(t));
    if (p.device < ATTUNE_CPU || p.device > ATTUNE_CUDA)
        return fail(ATTUNE_INVALID_ARGUMENT,
                    "problem.device is {}: expected ATTUNE_CPU, ATTUNE_OPENCL, ATTUNE_VULKAN or ATTUNE_CUDA",
                    int(p.device));
    for (auto [name, n] : {std::pair{"B", p.B}, {"Hq", p.Hq}, {"N", p.N}, {"M", p.M}, {"dv", p.dv}})
        if (n < 0) return fail(ATTUNE_INVALID_ARGUMENT, "problem.{} is {}: expected 0 or more", name, n);
    if (p.dk < 1) return fail(ATTUNE_INVALID_ARGUMENT, "problem.dk is {}: expected 1 or more", p.dk);
    if (p.Hkv < 0 || (p.Hkv == 0 && p.Hq != 0))
        return fail(ATTUNE_INVALID_ARGUMENT, "problem.Hkv is {}: expected 1 or more", p.Hkv);
    if (p.Hkv > 0 && p.Hq % p.Hkv)
        return fail(ATTUNE_INVALID_ARGUMENT, "problem.Hq is {}, problem.Hkv is {}: expected Hq to be a multiple of Hkv",
                    p.Hq, p.Hkv);
    long double elements = 1;
    for (int64_t n : {p.B, std::max(p.Hq, p.Hkv), std::max(p.N, p.M), std::max(p.dk, p.dv)})
        elements *= static_cast<long double>(std::max<int64_t>(n, 1));
    if (elements > 4e18L)
        return fail(ATTUNE_INVALID_ARGUMENT,
                    "problem sizes B {}, Hq {}, N {}, M {}, dk {}, dv {}: expected tensors of fewer than 2^62 elements",
                    p.B, p.Hq, p.N, p.M, p.dk, p.dv);
    constexpr uint32_t kKnown = ATTUNE_SCALE | ATTUNE_CAUSAL | ATTUNE_MASK | ATTUNE_BIAS | ATTUNE_KV_LEN |
                                ATTUNE_OFFSETS | ATTUNE_SOFTCAP | ATTUNE_ALIBI | ATTUNE_SINK | ATTUNE_SCORES |
                                ATTUNE_STRIDED_V | ATTUNE_DETERMINISTIC | ATTUNE_VARLEN;
    if (p.flags & ~kKnown)
        return fail(ATTUNE_INVALID_ARGUMENT, "problem.flags is {:#x}: expected only bits of {:#x}", p.flags, kKnown);
    if (p.flags & ATTUNE_SCALE && !std::isfinite(p.scale))
        return fail(ATTUNE_INVALID_ARGUMENT, "problem.scale is {}: expected a finite number", p.scale);
    if (p.flags & ATTUNE_SOFTCAP && !(std::isfinite(p.softcap) && p.softcap > 0))
        return fail(ATTUNE_INVALID_ARGUMENT, "problem.softcap is {}: expected a finite number above 0", p.softcap);
    for (auto [name, n] : {std::pair{"window_left", p.window_left}, {"window_right", p.window_right}})
        if (n < -1) return fail(ATTUNE_INVALID_ARGUMENT, "problem.{} is {}: expected -1 (unbounded) or more", name, n);
    constexpr int64_t kFar = int64_t(1) << 60;
    if (p.offset < -kFar || p.offset > kFar)
        return fail(ATTUNE_INVALID_ARGUMENT, "problem.offset is {}: expected a value between -2^60 and 2^60", p.offset);
    if (p.flags & ATTUNE_SCORES && (p.scores_stage < ATTUNE_SCORES_RAW || p.scores_stage > ATTUNE_SCORES_PROBABILITIES))
        return fail(ATTUNE_INVALID_ARGUMENT,
                    "problem.scores_stage is {}: expected ATTUNE_SCORES_RAW to ATTUNE_SCORES_PROBABILITIES",
                    int(p.scores_stage));
    return ATTUNE_OK;
}

attune_status validate_tensors(const attune_problem &p, const attune_tensors *tensors) {
    if (!tensors) return fail(ATTUNE_INVALID_ARGUMENT, "tensors is null: expected an attune_tensors");
    const attune_tensors &t = *tensors;
    if (t.struct_size != sizeof(attune_tensors))
        return fail(ATTUNE_INVALID_ARGUMENT, "tensors.struct_size is {}: expected {}; call attune_tensors_init first",
                    t.struct_size, sizeof(attune_tensors));
    auto pass = [](attune_status s) { return s == ATTUNE_OK; };
    // Packed sequences: one batch element of as many rows and keys as the caller has.
    const bool varlen = p.flags & ATTUNE_VARLEN;
    int64_t B = p.B, N = p.N, M = p.M;
    if (varlen) {
        B = 1;
        N = t.q.shape[2];
        M = t.k.shape[2];
        for (auto [name, n, total, total_name] : {std::tuple{"q", N, p.B * p.N, "B * N"}, {"k", M, p.B * p.M, "B * M"}})
            if (n < 0 || n > total)
                return fail(ATTUNE_INVALID_ARGUMENT, "tensors.{}.shape[2] is {}: expected 0 to {} = {}", name, n,
                            total_name, total);
    }
    if (attune_status s = check_tensor({"tensors.q", t.q, p.q_dtype, p.device, {B, p.Hq, N, p.dk}, true}); !pass(s))
        return s;
    if (attune_status s = check_tensor({"tensors.k", t.k, p.kv_dtype, p.device, {B, p.Hkv, M, p.dk}, true}); !pass(s))
        return s;
    if (attune_status s = check_tensor({"tensors.v", t.v, p.kv_dtype, p.device, {B, p.Hkv, M, p.dv}, true}); !pass(s))
        return s;
    if (attune_status s = check_tensor({"tensors.o", t.o, p.o_dtype, p.device, {B, p.Hq, N, p.dv}, false}); !pass(s))
        return s;
    struct Optional {
        const char *name;
        const attune_tensor *tensor;
        uint32_t flag;
        const char *flag_name;
        attune_dtype dtype;
        int64_t columns;
        bool output;
    };
    for (const Optional &o : {Optional{"tensors.mask", t.mask, ATTUNE_MASK, "ATTUNE_MASK", ATTUNE_U8, p.M, false},
                              {"tensors.bias", t.bias, ATTUNE_BIAS, "ATTUNE_BIAS", ATTUNE_F32, p.M, false},
                              {"tensors.scores", t.scores, ATTUNE_SCORES, "ATTUNE_SCORES", ATTUNE_F32, p.M, true}}) {
        if (!(p.flags & o.flag)) {
            if (o.tensor)
                return fail(ATTUNE_INVALID_ARGUMENT,
                            "{} is given: expected null, since the plan's problem lacks the flag {}", o.name,
                            o.flag_name);
            continue;
        }
        if (!o.tensor)
            return fail(ATTUNE_INVALID_ARGUMENT, "{} is null: expected a tensor, since problem.flags has {}", o.name,
                        o.flag_name);
        if (attune_status s =
                check_tensor({o.name, *o.tensor, o.dtype, p.device, {p.B, p.Hq, p.N, o.columns}, !o.output});
            !pass(s))
            return s;
    }
    if (t.lse)
        if (attune_status s = check_tensor({"tensors.lse", *t.lse, ATTUNE_F32, p.device, {B, p.Hq, N, 1}, false});
            !pass(s))
            return s;
    struct Array {
        const char *name;
        const void *data;
        uint32_t flag;
        const char *flag_name;
    };
    for (const Array &a : {Array{"tensors.kv_len", t.kv_len, ATTUNE_KV_LEN, "ATTUNE_KV_LEN"},
                           {"tensors.offsets", t.offsets, ATTUNE_OFFSETS, "ATTUNE_OFFSETS"},
                           {"tensors.alibi_slopes", t.alibi_slopes, ATTUNE_ALIBI, "ATTUNE_ALIBI"},
                           {"tensors.sinks", t.sinks, ATTUNE_SINK, "ATTUNE_SINK"},
                           {"tensors.cu_seqlens_q", t.cu_seqlens_q, ATTUNE_VARLEN, "ATTUNE_VARLEN"},
                           {"tensors.cu_seqlens_k", t.cu_seqlens_k, ATTUNE_VARLEN, "ATTUNE_VARLEN"}}) {
        if (p.flags & a.flag && !a.data && p.B > 0)
            return fail(ATTUNE_INVALID_ARGUMENT, "{} is null: expected an array, since problem.flags has {}", a.name,
                        a.flag_name);
        if (!(p.flags & a.flag) && a.data)
            return fail(ATTUNE_INVALID_ARGUMENT,
                        "{} is given: expected null, since the plan's problem lacks the flag {}", a.name, a.flag_name);
    }
    if (varlen && p.B > 0) {
        if (attune_status s = check_lengths("cu_seqlens_q", t.cu_seqlens_q, p, "N", p.N, "tensors.q", N); !pass(s))
            return s;
        if (attune_status s = check_lengths("cu_seqlens_k", t.cu_seqlens_k, p, "M", p.M, "tensors.k", M); !pass(s))
            return s;
    }
    constexpr int64_t kFar = int64_t(1) << 60;
    for (int64_t b = 0; b < p.B; b++) {
        const int64_t keys = varlen ? t.cu_seqlens_k[b + 1] - t.cu_seqlens_k[b] : p.M;
        if (p.flags & ATTUNE_KV_LEN && (t.kv_len[b] < 0 || t.kv_len[b] > keys))
            return fail(ATTUNE_INVALID_ARGUMENT, "tensors.kv_len[{}] is {}: expected 0 to {} = {}", b, t.kv_len[b],
                        varlen ? "the sequence's keys" : "M", keys);
        if (p.flags & ATTUNE_OFFSETS && (t.offsets[b] < -kFar || t.offsets[b] > kFar))
            return fail(ATTUNE_INVALID_ARGUMENT, "tensors.offsets[{}] is {}: expected a value between -2^60 and 2^60",
                        b, t.offsets[b]);
    }
    return ATTUNE_OK;
}

} // namespace attune::rt

extern "C" void attune_problem_init(attune_problem *problem) {
    if (!problem) return;
    *problem = attune_problem{};
    problem->struct_size = sizeof(attune_problem);
    problem->B = 1;
    problem->window_left = problem->window_right = -1;
}

extern "C" void attune_tensors_init(attune_tensors *tensors) {
    if (!tensors) return;
    *tensors = attune_tensors{};
    tensors->struct_size = sizeof(attune_tensors);
}

extern "C" void attune_plan_options_init(attune_plan_options *options) {
    if (!options) return;
    *options = attune_plan_options{};
    options->struct_size = sizeof(attune_plan_options);
}
