// Google Benchmark over the registry: every kernel that the run-time registry lists, on each case that it can do, and
// on one of its own sizes if it can do none. The result of each is checked against the float64 reference before its
// time counts. `attune compare` is the better tool for comparing two kernels (it interleaves them); this one is for
// watching a kernel over time, with the library's own statistics and output formats.
#include "lib/case.h"
#include "lib/inputs.h"
#include "lib/reference.h"
#include "lib/runner.h"

#include <benchmark/benchmark.h>

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <memory>
#include <string>
#include <vector>

namespace {

using namespace attune::tools;

// One of each kind (with f32 for the kernel's type): short, long, causal, masked, grouped decode, sizes that divide
// nothing.
constexpr const char *kCases[] = {
    "f32:b1:h8:n128:d64",         "f32:b1:h12:n256:d32",           "f32:b1:h8:n1024:d64",
    "f32:b1:h8:n1024:d64:causal", "f32:b1:h8:n1024:d64:mask=bool", "f32:b1:h8:n1000:m777:d80",
    "f32:b1:h8:n512:d128",        "f32:b1:h32/8:n1:m4096:d128"};

// Inputs and reference of a case, made when its first benchmark runs.
struct Prepared {
    Inputs inputs;
    Reference reference;
    explicit Prepared(const Case &c) : inputs(c, {}), reference(make_reference(inputs.problem(), inputs.tensors())) {}
};

Prepared &prepare(const std::string &text) {
    static std::map<std::string, std::unique_ptr<Prepared>> cases;
    auto &entry = cases[text];
    if (!entry) entry = std::make_unique<Prepared>(parse_case(text));
    return *entry;
}

void run(benchmark::State &state, const attune_kernel *kernel, const std::string &text) {
    Prepared &p = prepare(text);
    const int threads = int(state.range(0));
    const KernelCheck check = check_kernel(*kernel, p.inputs, p.reference, threads, Guard::none);
    if (!check.verdict.ok) return state.SkipWithError(check.verdict.why.c_str());
    std::string why;
    const Plan plan = make_plan(p.inputs.problem(), kernel->name, "", threads, why);
    if (!plan) return state.SkipWithError(why.c_str());
    std::vector<std::byte> workspace(attune_plan_workspace(plan.get()));
    for (auto _ : state)
        if (attune_run(plan.get(), &p.inputs.tensors(), workspace.data(), workspace.size()) != ATTUNE_OK)
            return state.SkipWithError(attune_last_error());
    state.counters["GFLOP/s"] = benchmark::Counter(
        useful_flops(p.inputs.input_case()) * 1e-9 * double(state.iterations()), benchmark::Counter::kIsRate);
}

// Those of kCases that the kernel can do, and for the sizes that none of them has one of its own.
std::vector<std::string> cases_of(const attune_kernel &k) {
    const auto can = [&](const std::string &text) {
        const attune_problem problem = to_problem(parse_case(text));
        return !attune_kernel_refuses(&k, &problem);
    };
    // In the type that the kernel computes in.
    const std::string type(dtype_name(k.q_dtype));
    std::vector<std::string> cases;
    for (const char *text : kCases)
        if (const std::string typed = type + (text + 3); can(typed)) cases.push_back(typed);
    const int64_t dk = std::clamp<int64_t>(k.dk ? k.dk : 64, k.dk_min, k.dk_max),
                  dv = std::clamp<int64_t>(k.dv ? k.dv : 64, k.dv_min, k.dv_max);
    const std::string own = fmt::format("{}:b1:h{}:n{}:m{}:d{}/{}", type, std::max<int64_t>(8, k.h_min),
                                        std::max<int64_t>(512, k.n_min), std::max<int64_t>(512, k.m_min), dk, dv);
    if (cases.empty() && can(own)) cases.push_back(own);
    return cases;
}

} // namespace

int main(int argc, char **argv) {
    for (const attune_kernel *kernel : all_kernels())
        for (const std::string &text : cases_of(*kernel)) {
            auto *b = benchmark::RegisterBenchmark(fmt::format("{}/{}/threads", kernel->name, text).c_str(),
                                                   [=](benchmark::State &state) { run(state, kernel, text); });
            b->Arg(1)->UseRealTime()->Unit(benchmark::kMicrosecond);
            if (attune_get_num_threads() > 1) b->Arg(attune_get_num_threads());
        }
    benchmark::Initialize(&argc, argv);
    if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 1;
    benchmark::RunSpecifiedBenchmarks();
    benchmark::Shutdown();
    return 0;
}
