// The registry and single checked runs.
#include "runner.h"

#include "device_memory.h"
#include "error.h"

#include <algorithm>
#include <cstring>

namespace attune::tools {

Plan make_plan(const attune_problem &problem, const std::string &kernel, const std::string &strategy, int threads,
               std::string &why) {
    attune_plan_options options;
    attune_plan_options_init(&options);
    options.kernel = kernel.empty() ? nullptr : kernel.c_str();
    options.strategy = strategy.empty() ? nullptr : strategy.c_str();
    options.threads = threads;
    attune_plan *plan = nullptr;
    if (attune_plan_create(&problem, &options, &plan) != ATTUNE_OK) {
        why = attune_last_error();
        return nullptr;
    }
    return Plan(plan);
}

std::vector<const attune_kernel *> all_kernels() {
    std::vector<const attune_kernel *> kernels;
    for (int64_t i = 0; i < attune_num_kernels(); ++i) kernels.push_back(attune_kernel_at(i));
    return kernels;
}

bool is_ladder(const std::string &strategy) {
    return strategy.starts_with("ladder_");
}

std::vector<std::string> all_strategies() {
    std::vector<std::string> names;
    for (const attune_kernel *k : all_kernels())
        if (std::find(names.begin(), names.end(), k->strategy) == names.end()) names.push_back(k->strategy);
    return names;
}

void KernelFilter::check_names() const {
    const auto known = all_strategies();
    for (const std::string &s : strategies)
        if (std::find(known.begin(), known.end(), s) == known.end())
            fail("--strategy={}: unknown; expected one of: {}", s, fmt::join(known, ", "));
    for (const std::string &k : kernels)
        if (!attune_find_kernel(k.c_str())) {
            std::string similar;
            for (const attune_kernel *other : all_kernels()) similar += fmt::format("\n  {}", other->name);
            fail("--kernel={}: unknown; expected one of:{}", k, similar);
        }
}

bool KernelFilter::accepts(const attune_kernel &kernel) const {
    const auto contains = [](const std::vector<std::string> &list, const char *name) {
        return list.empty() || std::find(list.begin(), list.end(), name) != list.end();
    };
    return kernel.device == device && contains(strategies, kernel.strategy) && contains(kernels, kernel.name);
}

attune_device parse_device(const std::string &name) {
    for (attune_device d : {ATTUNE_CPU, ATTUNE_OPENCL, ATTUNE_VULKAN, ATTUNE_CUDA})
        if (device_name(d) == name) return d;
    fail("--device={}: unknown; expected cpu, opencl, vulkan or cuda", name);
}

std::string device_name(attune_device device) {
    switch (device) {
    case ATTUNE_CPU:
        return "cpu";
    case ATTUNE_OPENCL:
        return "opencl";
    case ATTUNE_VULKAN:
        return "vulkan";
    case ATTUNE_CUDA:
        return "cuda";
    }
    return "?";
}

std::string default_device(attune_device device) {
    int64_t count = 0;
    if (attune_device_count(device, &count) != ATTUNE_OK)
        return fmt::format("{}: {}", device_name(device), attune_last_error());
    for (int64_t i = 0; i < count; ++i) {
        attune_device_info info;
        attune_device_info_init(&info);
        if (attune_device_describe(device, i, &info) == ATTUNE_OK && info.is_default)
            return fmt::format("{} device {} ({}){}", device_name(device), info.name, info.driver,
                               info.is_software ? ", a CPU" : "");
    }
    return fmt::format("{}: no default device", device_name(device));
}

std::string kernel_dtypes(const attune_kernel &k) {
    std::string s(dtype_name(k.q_dtype)), any;
    if (k.kv_dtype != k.q_dtype) s += fmt::format(" (kv {})", dtype_name(k.kv_dtype));
    if (k.o_dtype != k.q_dtype) s += fmt::format(" (o {})", dtype_name(k.o_dtype));
    for (const auto &[trait, name] :
         {std::pair{ATTUNE_TRAIT_ANY_Q, "q"}, {ATTUNE_TRAIT_ANY_KV, "kv"}, {ATTUNE_TRAIT_ANY_O, "o"}})
        if (k.traits & uint32_t(trait)) any += fmt::format("{}{}", any.empty() ? "" : ", ", name);
    return any.empty() ? s : fmt::format("{} ({} any)", s, any);
}

bool takes_types(const attune_kernel &k, attune_dtype q, attune_dtype kv) {
    return (k.q_dtype == q || k.traits & ATTUNE_TRAIT_ANY_Q) && (k.kv_dtype == kv || k.traits & ATTUNE_TRAIT_ANY_KV) &&
           (k.o_dtype == q || k.traits & ATTUNE_TRAIT_ANY_O);
}

// Descriptors give their range as numbers; from here on it is as good as none.
constexpr int64_t kNoLimit = 1 << 20;

std::string kernel_features(const attune_kernel &k) {
    const auto one = [](int64_t fixed, int64_t least, int64_t most) {
        if (least == most) return fmt::format("{}", least);
        if (fixed == 0 && least <= 1 && most >= kNoLimit) return std::string("any");
        return fmt::format("{}–{}", least, most);
    };
    const std::string dk = one(k.dk, k.dk_min, k.dk_max), dv = one(k.dv, k.dv_min, k.dv_max);
    return dk == dv ? dk : dk + "/" + dv;
}

std::string first_line(const std::string &text) {
    return text.substr(0, text.find('\n'));
}

nlohmann::json kernel_knobs(const attune_kernel &k) {
    auto knobs = nlohmann::json::parse(k.params ? k.params : "", nullptr, false);
    return knobs.is_object() ? knobs : nlohmann::json::object();
}

int64_t knob(const attune_kernel &k, const char *name, int64_t otherwise) {
    const auto knobs = kernel_knobs(k);
    const auto found = knobs.find(name);
    return found != knobs.end() && found->is_number_integer() ? found->get<int64_t>() : otherwise;
}

KernelCheck check_kernel(const attune_kernel &kernel, Inputs &inputs, const Reference &reference, int threads,
                         Guard guard) {
    KernelCheck check;
    const auto wrong = [&check](std::string why) {
        check.verdict.ok = false;
        if (check.verdict.why.empty()) check.verdict.why = std::move(why);
    };
    std::string why;
    attune_problem problem = inputs.problem();
    problem.device = kernel.device;
    const Plan plan = make_plan(problem, kernel.name, "", threads, why);
    if (!plan) {
        wrong("no plan, though the kernel does not refuse the problem: " + why);
        return check;
    }
    if (std::strcmp(attune_plan_kernel(plan.get()), kernel.name) != 0) {
        wrong(fmt::format("the plan took {} instead", attune_plan_kernel(plan.get())));
        return check;
    }
    check.workspace = attune_plan_workspace(plan.get());
    const Workspace workspace(kernel.device, check.workspace, guard);
    inputs.reset_outputs();
    const attune_status status = attune_run(plan.get(), &inputs.tensors(), workspace.data(), check.workspace);
    if (status != ATTUNE_OK) {
        wrong(fmt::format("{}: {}", attune_status_string(status), attune_last_error()));
        return check;
    }
    check.verdict = check_outputs(reference, inputs.tensors());
    check.hash = inputs.output_hash();
    if (!inputs.surroundings_intact()) wrong("it wrote beside O or LSE");
    if (!workspace.slack_intact()) wrong("it wrote beside its workspace");
    return check;
}

} // namespace attune::tools
