// Kernels as the tools see them: the registry's names, plans that clean up after themselves, and running one kernel on
// the arrays of a case with everything checked. Uses the public C API only.
#pragma once

#include "attune/kernel.h"
#include "inputs.h"
#include "reference.h"

#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

namespace attune::tools {

struct PlanDeleter {
    void operator()(attune_plan *plan) const { attune_plan_destroy(plan); }
};
using Plan = std::unique_ptr<attune_plan, PlanDeleter>;

// An empty kernel or strategy leaves the choice to the planner. On failure the result is empty, `why` the planner's
// message.
Plan make_plan(const attune_problem &problem, const std::string &kernel, const std::string &strategy, int threads,
               std::string &why);

std::vector<const attune_kernel *> all_kernels();

// The steps of compare --ladder are strategies of their own, which other commands leave out of their tables.
bool is_ladder(const std::string &strategy);

// Strategies of the registry, each once, in the registry's order.
std::vector<std::string> all_strategies();

// Which kernels a command was asked for. Unknown names throw Error with the list of the known.
struct KernelFilter {
    std::vector<std::string> strategies, kernels; // empty: all
    attune_device device = ATTUNE_CPU;

    void check_names() const;
    bool accepts(const attune_kernel &kernel) const;
};

attune_device parse_device(const std::string &name);
std::string device_name(attune_device device);
std::string default_device(attune_device device);       // "OpenCL device NAME (DRIVER)", or why there is none
std::string kernel_dtypes(const attune_kernel &kernel); // "f32", "f32 (kv bf16)", or "bf16 (o any)"
bool takes_types(const attune_kernel &kernel, attune_dtype q, attune_dtype kv); // with O as Q
std::string kernel_features(const attune_kernel &kernel); // "64", "64/128", "57–64" (sizes in that range), "any"
std::string first_line(const std::string &text);

// The knobs that the kernel was made with, by name: an empty object where it names none.
nlohmann::json kernel_knobs(const attune_kernel &kernel);
int64_t knob(const attune_kernel &kernel, const char *name, int64_t otherwise);

// The plan, a guarded workspace, O and LSE filled with NaN, the run, the comparison, and the memory around the outputs.
// Everything that goes wrong ends up in Verdict::why.
struct KernelCheck {
    Verdict verdict;
    size_t workspace = 0;
    uint64_t hash = 0; // of the outputs' bits
};
KernelCheck check_kernel(const attune_kernel &kernel, Inputs &inputs, const Reference &reference, int threads,
                         Guard guard);

} // namespace attune::tools
