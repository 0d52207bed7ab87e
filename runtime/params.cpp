// Parameters of user functions: what a run has to bring for its kernel.
#include "validate.h"

#include "convert.h"
#include "status.h"

#include <limits>
#include <string>
#include <string_view>
#include <tuple>

namespace attune::rt {

namespace {

std::string names(const attune_kernel &kernel) {
    std::string text;
    for (int64_t i = 0; i < kernel.num_mod_params; i++) text += std::string(i ? ", " : "") + kernel.mod_params[i].name;
    return text.empty() ? "none" : text;
}

attune_status check_param(const std::string &where, const attune_param &param, const attune_mod_param &wanted,
                          const attune_problem &p) {
    if (param.dtype != wanted.dtype || param.rank != wanted.rank)
        return fail(ATTUNE_INVALID_ARGUMENT, "{} ({}) is of type {} and rank {}: expected {} and rank {}", where,
                    wanted.name, attune_dtype_string(param.dtype), param.rank, attune_dtype_string(wanted.dtype),
                    wanted.rank);
    if (!param.data)
        return fail(ATTUNE_INVALID_ARGUMENT, "{} ({}).data is null: expected a pointer to its elements", where,
                    wanted.name);
    if (reinterpret_cast<uintptr_t>(param.data) % size_t(bytes_of(param.dtype)))
        return fail(ATTUNE_INVALID_ARGUMENT, "{} ({}).data is {}: expected an address aligned to its {}-byte elements",
                    where, wanted.name, param.data, bytes_of(param.dtype));
    constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
    int64_t reach = 0;
    for (int d = 0; d < param.rank; d++) {
        int64_t least = 1;
        const char *name = "";
        for (const auto &[by, extent, what] : {std::tuple{ATTUNE_BY_BATCH, p.B, "B"},
                                               {ATTUNE_BY_HEAD, p.Hq, "Hq"},
                                               {ATTUNE_BY_ROW, p.N, "N"},
                                               {ATTUNE_BY_KEY, p.M, "M"}})
            if (wanted.by[d] & by && extent > least) least = extent, name = what;
        if (param.shape[d] < least || param.shape[d] > kMost)
            return fail(ATTUNE_INVALID_ARGUMENT, "{} ({}).shape[{}] is {}: expected {}{}{} to 2^31 - 1", where,
                        wanted.name, d, param.shape[d], name, *name ? " = " : "", least);
        const bool innermost = d == param.rank - 1;
        if (param.shape[d] > 1 && innermost && param.stride[d] != 1)
            return fail(ATTUNE_INVALID_ARGUMENT, "{} ({}).stride[{}] is {}: expected 1 for the last dimension", where,
                        wanted.name, d, param.stride[d]);
        if (param.shape[d] > 1 && (param.stride[d] < 0 || param.stride[d] > (kMost - reach) / (param.shape[d] - 1)))
            return fail(ATTUNE_INVALID_ARGUMENT,
                        "{} ({}).stride[{}] is {}: expected 0 or more, and offsets of fewer than 2^31 elements", where,
                        wanted.name, d, param.stride[d]);
        if (param.shape[d] > 1) reach += param.stride[d] * (param.shape[d] - 1);
    }
    return ATTUNE_OK;
}

} // namespace

attune_status validate_params(const attune_kernel &kernel, const attune_problem &p, const attune_tensors &t) {
    if (t.num_params < 0 || t.num_params > ATTUNE_MAX_PARAMS)
        return fail(ATTUNE_INVALID_ARGUMENT, "tensors.num_params is {}: expected 0 to {}", t.num_params,
                    ATTUNE_MAX_PARAMS);
    if (t.num_params && !t.params)
        return fail(ATTUNE_INVALID_ARGUMENT, "tensors.params is null: expected {} parameters", t.num_params);
    for (int64_t i = 0; i < kernel.num_mod_params; i++) {
        const attune_mod_param &wanted = kernel.mod_params[i];
        int64_t found = -1;
        for (int64_t n = 0; n < t.num_params && found < 0; n++)
            if (t.params[n].name && std::string_view(t.params[n].name) == wanted.name) found = n;
        if (found < 0)
            return fail(ATTUNE_INVALID_ARGUMENT, "tensors.params lacks {}: expected {} of rank {} (user functions {})",
                        wanted.name, attune_dtype_string(wanted.dtype), wanted.rank, kernel.mods);
        if (attune_status s = check_param(formatted("tensors.params[{}]", found), t.params[found], wanted, p)) return s;
    }
    for (int64_t n = 0; n < t.num_params; n++) {
        const std::string_view name = t.params[n].name ? t.params[n].name : "";
        int64_t uses = 0;
        for (int64_t i = 0; i < kernel.num_mod_params; i++) uses += name == kernel.mod_params[i].name;
        for (int64_t other = 0; other < n; other++)
            if (t.params[other].name && name == t.params[other].name) uses = 0;
        if (!uses)
            return fail(ATTUNE_INVALID_ARGUMENT, "tensors.params[{}].name is '{}': expected each of these once: {}", n,
                        name, names(kernel));
    }
    return ATTUNE_OK;
}

const attune_param &param_of(const attune_tensors &t, const attune_mod_param &wanted) {
    int64_t n = 0;
    while (std::string_view(t.params[n].name) != wanted.name) n++;
    return t.params[n];
}

} // namespace attune::rt
