// From a problem to a kernel, and from a kernel to a run.
//
// The choice has four steps and no heuristics in code: what each kernel says it can do, then what `attune tune` has
// found on this machine, then the checked-in ranking of strategies (made by measurements), then the best ISA with
// specialised sizes ahead of run-time sizes.
#include "arena.h"
#include "cpu_features.h"
#include "device/run.h"
#include "registry.h"
#include "status.h"
#include "threads.h"
#include "tuning.h"
#include "validate.h"
#include "varlen.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <memory>
#include <string>
#include <tuple>

using namespace attune::rt;

struct attune_plan {
    attune_problem problem;
    std::string mods; // problem.mods points to it
    const attune_kernel *kernel;
    int threads, workers;
    float scale;
    size_t shared, scratch, stack, workspace;
    std::string explain;
};

namespace {

constexpr size_t kAlign = 64, kDeviceAlign = 256;
size_t aligned(size_t n, size_t to = kAlign) {
    return (n + to - 1) & ~(to - 1);
}

// Place of a kernel's strategy in the ranking for this problem: by STRATEGY@ISA, or STRATEGY; unranked ones come last.
size_t rank(const attune_problem &p, const attune_kernel &k) {
    const auto names = [&k](std::string_view entry) {
        const std::string_view strategy = k.strategy, isa = k.isa;
        if (!entry.starts_with(strategy)) return false;
        entry.remove_prefix(strategy.size());
        return entry.empty() || (entry.front() == '@' && entry.substr(1) == isa);
    };
    const int64_t rows = p.Hkv ? p.Hq / p.Hkv * p.N : 0;
    for (const RankingRule &rule : ranking()) {
        if (rows < rule.rows_min || rows > rule.rows_max) continue;
        for (size_t i = 0; i < rule.strategies.size(); i++)
            if (names(rule.strategies[i])) return i;
        return rule.strategies.size();
    }
    return 0;
}

bool nothing_to_do(const attune_problem &p) {
    return !p.B || !p.Hq || !p.N || !p.dv;
}

// Of the thread's last run that measured them; a fixed array, since a run allocates nothing.
thread_local std::array<double, kMaxPhases> phase_seconds;
thread_local int64_t num_phase_seconds = 0;
thread_local bool time_phases = false;

attune_status run_on_device(const attune_plan &plan, const attune_tensors &tensors, void *workspace) {
    const attune_kernel &k = *plan.kernel;
    const attune_args args{sizeof(attune_args),
                           &plan.problem,
                           &tensors,
                           plan.scale,
                           0,
                           reinterpret_cast<void *>(aligned(reinterpret_cast<size_t>(workspace), kDeviceAlign)),
                           0};
    const bool timed = time_phases && k.num_phases <= int64_t(phase_seconds.size());
    num_phase_seconds = 0;
    if (attune_status s = device::run(k, args, timed ? phase_seconds.data() : nullptr)) return s;
    num_phase_seconds = timed ? k.num_phases : 0;
    return ATTUNE_OK;
}

// What the workers of a run share.
struct Run {
    const attune_args *args;
    const attune_phase *phases;
    char *shared, *scratch;
    size_t shared_bytes, scratch_bytes;
    TaskError error;
};

void run_part(void *context, const Part &part) {
    Run &run = *static_cast<Run *>(context);
    if (run.error.any()) return;
    const attune_phase &phase = run.phases[part.phase];
    attune_args args = *run.args;
    args.group = part.group;
    args.shared = run.shared + size_t(part.slot) * run.shared_bytes;
    int64_t end = part.end;
    Sequence sequence;
    if (args.problem->flags & ATTUNE_VARLEN) end = std::min(end, sequence.enter(args, phase));
    if (part.begin >= end) return;
    run.error.watch(phase.name, [&] {
        return phase.run(&args, part.begin, end, run.scratch + size_t(part.worker) * run.scratch_bytes);
    });
}

// Kernels with threads of their own take a batch element at a time.
int64_t num_groups(const attune_kernel &k, const attune_problem &p) {
    return k.traits & ATTUNE_TRAIT_OWN_THREADS ? p.B : p.B * p.Hkv;
}

attune_status kernel_failed(const attune_kernel &k, const TaskError &error) {
    return fail(ATTUNE_KERNEL_FAILED, "kernel {}, phase {}: error {}: {}", k.name, error.where(), error.code(),
                error.message());
}

} // namespace

extern "C" attune_status attune_plan_create(const attune_problem *problem, const attune_plan_options *options,
                                            attune_plan **plan) try {
    if (!plan) return fail(ATTUNE_INVALID_ARGUMENT, "plan is null: expected the address of an attune_plan pointer");
    *plan = nullptr;
    if (attune_status s = validate_problem(problem)) return s;
    const attune_problem &p = *problem;
    attune_plan_options o;
    attune_plan_options_init(&o);
    if (options) {
        if (options->struct_size != sizeof(attune_plan_options))
            return fail(ATTUNE_INVALID_ARGUMENT,
                        "options.struct_size is {}: expected {}; call attune_plan_options_init first",
                        options->struct_size, sizeof(attune_plan_options));
        if (options->threads < 0 || options->threads > 1024)
            return fail(ATTUNE_INVALID_ARGUMENT, "options.threads is {}: expected 0 (the default) to 1024",
                        options->threads);
        o = *options;
    }
    std::string isa_error;
    dispatch_isa(&isa_error);
    if (!isa_error.empty()) return fail(ATTUNE_INVALID_ARGUMENT, "{}", isa_error);

    const auto kernels = all_kernels();
    if (o.kernel && !attune_find_kernel(o.kernel))
        return fail(ATTUNE_INVALID_ARGUMENT,
                    "options.kernel is '{}': no kernel of that name among the {} that are linked", o.kernel,
                    kernels.size());
    if (o.strategy) {
        std::string known;
        bool found = false;
        for (const attune_kernel *k : kernels) {
            found = found || std::string_view(k->strategy) == o.strategy;
            if (known.find(std::string(" ") + k->strategy + ",") == std::string::npos)
                known += formatted(" {},", k->strategy);
        }
        if (!known.empty()) known.pop_back();
        if (!found)
            return fail(ATTUNE_INVALID_ARGUMENT, "options.strategy is '{}': expected one of{}", o.strategy, known);
    }

    // Lower is better, compared from left to right.
    using Order = std::tuple<size_t, int, int, int64_t, std::string_view>;
    struct Candidate {
        const attune_kernel *kernel;
        Order order;
    };
    std::vector<Candidate> able;
    std::string reasons;
    for (const attune_kernel *k : kernels) {
        std::string why = refusal(*k, p);
        if (why.empty() && o.kernel && std::string_view(k->name) != o.kernel) why = "another kernel was asked for";
        if (why.empty() && o.strategy && std::string_view(k->strategy) != o.strategy)
            why = "another strategy was asked for";
        if (why.empty() && !o.kernel && !o.strategy && k->traits & ATTUNE_TRAIT_ON_REQUEST)
            why = "it is only run when asked for";
        if (!why.empty()) {
            reasons += formatted("{}: {}\n", k->name, why);
            continue;
        }
        const int64_t waste = k->dk ? k->dk - p.dk + k->dv - p.dv : 0;
        able.push_back(
            {k, {rank(p, *k), k->device == ATTUNE_CPU ? -isa_rank(k->isa) : 0, k->dk ? 0 : 1, waste, k->name}});
    }
    if (able.empty()) {
        return fail(ATTUNE_UNSUPPORTED, "no kernel can do this problem:\n{}",
                    reasons.empty() ? "no kernel is linked" : reasons);
    }
    std::sort(able.begin(), able.end(), [](const Candidate &a, const Candidate &b) { return a.order < b.order; });

    auto made = std::make_unique<attune_plan>();
    made->problem = p;
    made->mods = p.mods ? p.mods : "";
    made->problem.mods = made->mods.empty() ? nullptr : made->mods.c_str();
    made->threads = o.threads ? o.threads : attune_get_num_threads();
    std::string tuned;
    if (!o.kernel && !o.strategy && p.device == ATTUNE_CPU && !(p.flags & ATTUNE_DETERMINISTIC) && made->mods.empty()) {
        const TuningStore &store = tuning_store();
        if (!store.warning().empty()) tuned = formatted("tuning store: {}\n", store.warning());
        if (const TuningEntry *e = store.find(bucket_of(p, made->threads))) {
            const auto it =
                std::find_if(able.begin(), able.end(), [&](const Candidate &c) { return e->kernel == c.kernel->name; });
            if (it != able.end()) std::rotate(able.begin(), it, it + 1);
            tuned += formatted("tuning store: {} {}\n", it != able.end() ? "chose" : "prefers",
                               it != able.end() ? formatted("it, {:.3g} x as fast as the ranking's choice for {}",
                                                            e->speedup, e->case_text)
                               : attune_find_kernel(e->kernel.c_str())
                                   ? e->kernel + ", which cannot do this problem"
                                   : e->kernel + ", which is neither linked nor loaded (attune_load_kernels)");
        }
    }
    made->kernel = able[0].kernel;
    made->scale = p.flags & ATTUNE_SCALE ? p.scale : 1.0f / std::sqrt(float(p.dk));
    if (!nothing_to_do(p)) {
        const attune_kernel &k = *made->kernel;
        made->workers = k.traits & ATTUNE_TRAIT_OWN_THREADS ? 1 : made->threads;
        made->shared = k.shared_bytes ? aligned(k.shared_bytes(&p)) : 0;
        made->scratch = k.scratch_bytes ? aligned(k.scratch_bytes(&p)) : 0;
        made->stack = k.stack_bytes ? k.stack_bytes(&p) : 0;
        made->workspace =
            made->shared * size_t(slots(made->workers, num_groups(k, p))) + made->scratch * size_t(made->workers);
        if (p.device != ATTUNE_CPU) made->workspace = made->shared; // of the whole problem
        // The caller's pointer may have any alignment.
        if (made->workspace) made->workspace += p.device == ATTUNE_CPU ? kAlign : kDeviceAlign;
    }
    made->explain =
        formatted("{}: chosen{}\n", made->kernel->name,
                  made->kernel->traits & ATTUNE_TRAIT_QUADRATIC ? " (it keeps all N*M scores in memory)" : "");
    made->explain += tuned;
    for (size_t i = 1; i < able.size(); i++)
        made->explain += formatted("{}: can do it, ranked {} of {}\n", able[i].kernel->name, i + 1, able.size());
    made->explain += reasons;
    *plan = made.release();
    return ATTUNE_OK;
} catch (const std::bad_alloc &) {
    return fail(ATTUNE_OUT_OF_MEMORY, "a plan could not be allocated");
}

extern "C" void attune_plan_destroy(attune_plan *plan) {
    delete plan;
}
extern "C" size_t attune_plan_workspace(const attune_plan *plan) {
    return plan ? plan->workspace : 0;
}
extern "C" size_t attune_plan_scratch(const attune_plan *plan) {
    return plan ? plan->scratch + plan->stack : 0;
}
extern "C" const char *attune_plan_kernel(const attune_plan *plan) {
    return plan ? plan->kernel->name : "";
}
extern "C" const char *attune_plan_explain(const attune_plan *plan) {
    return plan ? plan->explain.c_str() : "";
}
extern "C" const attune_problem *attune_plan_problem(const attune_plan *plan) {
    return plan ? &plan->problem : nullptr;
}

extern "C" attune_status attune_run(const attune_plan *plan, const attune_tensors *tensors, void *workspace,
                                    size_t workspace_size) try {
    if (!plan) return fail(ATTUNE_INVALID_ARGUMENT, "plan is null: expected a plan of attune_plan_create");
    const attune_problem &p = plan->problem;
    if (attune_status s = validate_tensors(p, tensors)) return s;
    if (attune_status s = validate_params(*plan->kernel, p, *tensors)) return s;
    if (workspace_size < plan->workspace)
        return fail(ATTUNE_INVALID_ARGUMENT, "workspace_size is {}: expected at least {} (attune_plan_workspace)",
                    workspace_size, plan->workspace);
    if (!workspace && plan->workspace)
        return fail(ATTUNE_INVALID_ARGUMENT, "workspace is null: expected {} bytes", plan->workspace);
    if (nothing_to_do(p)) return ATTUNE_OK;
    install_halide_hooks();
    if (p.device != ATTUNE_CPU) return run_on_device(*plan, *tensors, workspace);

    const attune_kernel &k = *plan->kernel;
    char *base = reinterpret_cast<char *>(aligned(reinterpret_cast<size_t>(workspace)));
    const attune_args args{sizeof(attune_args), &p, tensors, plan->scale, 0, nullptr, 0};
    const int64_t groups = num_groups(k, p);
    std::array<int64_t, kMaxPhases> tasks;
    const auto phases = size_t(k.num_phases);
    for (size_t i = 0; i < phases; i++)
        tasks[i] = p.flags & ATTUNE_VARLEN ? most_tasks(args, k.phases[i]) : k.phases[i].tasks(&args);
    Run run{&args,        k.phases,      base, base + plan->shared * size_t(slots(plan->workers, groups)),
            plan->shared, plan->scratch, {}};
    if (k.traits & ATTUNE_TRAIT_OWN_THREADS) limit_own_threads(plan->threads);
    if (time_phases) num_phase_seconds = k.num_phases;
    parallel_groups(plan->workers, groups, {tasks.data(), phases}, run_part, &run,
                    {phase_seconds.data(), time_phases ? phases : 0});
    if (run.error.any()) return kernel_failed(k, run.error);
    return ATTUNE_OK;
} catch (const std::bad_alloc &) { // a run takes no memory, but messages do
    return fail(ATTUNE_OUT_OF_MEMORY, "no memory for the message of an error");
}

extern "C" void attune_time_phases(int on) {
    time_phases = on != 0;
}

extern "C" int64_t attune_last_phase_seconds(double *seconds, int64_t capacity) {
    const int64_t n = std::clamp<int64_t>(capacity, 0, num_phase_seconds);
    if (seconds) std::copy_n(phase_seconds.begin(), n, seconds);
    return num_phase_seconds;
}
