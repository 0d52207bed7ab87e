#include "options.h"

#include <nanobind/stl/string.h>

#include <functional>
#include <map>

namespace attune::python {

namespace {

// A keyword's value as T, or a message that says what it is instead.
template <class T> T value(nb::handle object, const char *name, const char *expected) {
    T result{};
    if (!nb::try_cast(object, result))
        wrong_type(std::string(name) + " is " + nb::cast<std::string>(nb::repr(object)) + ": expected " + expected);
    return result;
}

std::int64_t window_edge(nb::handle object) {
    if (object.is_none()) return -1;
    const auto edge = value<std::int64_t>(object, "window", "(left, right), each a number of keys, -1 or None");
    if (edge < -1) wrong("window has the edge " + std::to_string(edge) + ": expected 0 or more, -1 or None");
    return edge;
}

} // namespace

Options::Options(const nb::kwargs &keywords) {
    const std::map<std::string, std::function<void(nb::handle)>> known = {
        {"causal", [&](nb::handle x) { problem.causal = value<bool>(x, "causal", "True or False"); }},
        {"offset",
         [&](nb::handle x) {
             if (nb::isinstance<nb::int_>(x)) {
                 problem.offset = value<std::int64_t>(x, "offset", "a whole number");
             } else {
                 problem.offsets = true;
                 offsets = int64_vector(x, "offset");
             }
         }},
        {"window",
         [&](nb::handle x) {
             if (!nb::isinstance<nb::sequence>(x) || nb::len(x) != 2)
                 wrong_type("window is " + nb::cast<std::string>(nb::repr(x)) + ": expected (left, right)");
             problem.window_left = window_edge(x[0]);
             problem.window_right = window_edge(x[1]);
         }},
        {"mask", [&](nb::handle x) { mask = nb::borrow(x), problem.mask = true; }},
        {"bias", [&](nb::handle x) { bias = nb::borrow(x), problem.bias = true; }},
        {"lse", [&](nb::handle x) { lse = nb::borrow(x); }},
        {"scale", [&](nb::handle x) { problem.scale = float(value<double>(x, "scale", "a number")); }},
        {"softcap", [&](nb::handle x) { problem.softcap = float(value<double>(x, "softcap", "a number above 0")); }},
        {"alibi_slopes", [&](nb::handle x) { alibi_slopes = f32_vector(x, "alibi_slopes"), problem.alibi = true; }},
        {"sinks", [&](nb::handle x) { sinks = f32_vector(x, "sinks"), problem.sinks = true; }},
        {"kv_len", [&](nb::handle x) { kv_len = int64_vector(x, "kv_len"), problem.kv_len = true; }},
        {"deterministic",
         [&](nb::handle x) { problem.deterministic = value<bool>(x, "deterministic", "True or False"); }},
        {"kernel", [&](nb::handle x) { plan.kernel = value<std::string>(x, "kernel", "the name of a kernel"); }},
        {"strategy",
         [&](nb::handle x) { plan.strategy = value<std::string>(x, "strategy", "the name of a strategy"); }},
        {"threads", [&](nb::handle x) { plan.threads = value<int>(x, "threads", "a whole number"); }},
    };
    for (const auto &[key, object] : keywords) {
        const auto name = nb::cast<std::string>(key);
        const auto found = known.find(name);
        if (found == known.end()) wrong_type("unexpected keyword '" + name + "'");
        if (!object.is_none()) found->second(object);
    }
}

BoundExtras::BoundExtras(const Options &options, std::int64_t B, std::int64_t Hq, std::int64_t N, std::int64_t M) {
    const std::array<std::int64_t, 4> scores{B, Hq, N, M};
    if (options.mask.is_valid()) {
        mask = scores_like(options.mask, "mask", Dtype::u8, scores);
        extras.mask = mask->view;
    }
    if (options.bias.is_valid()) {
        bias = scores_like(options.bias, "bias", Dtype::f32, scores);
        extras.bias = bias->view;
    }
    if (options.lse.is_valid()) {
        lse = scores_like(options.lse, "lse", Dtype::f32, {B, Hq, N, 1}, true);
        extras.lse = lse->view;
    }
    extras.kv_len = options.kv_len.values;
    extras.offsets = options.offsets.values;
    extras.alibi_slopes = options.alibi_slopes.values;
    extras.sinks = options.sinks.values;
    // An empty vector would be taken for one that is not given.
    if (options.problem.kv_len && extras.kv_len.empty() && B)
        wrong("kv_len is empty: expected B = " + std::to_string(B));
    detail::check_lengths(extras, B, Hq);
}

} // namespace attune::python
