// attune verify: every kernel of the registry that can do a case, against float64.
//
// Arrays end (or, for odd seeds, begin) at unreadable pages, and keys that no row may see hold NaN and infinities: both
// follow from the seed alone, so that a case and a seed reproduce a failure.
#include "commands.h"

#include "lib/error.h"

#include <algorithm>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <map>
#include <set>
#include <unistd.h>

namespace attune::tools {
namespace {

struct VerifyOptions {
    CommonOptions common;
    std::vector<std::string> kernels;
    int64_t random = 0;
    bool keep_going = false, verbose = false;
};

Guard guard_of(uint64_t seed) {
    return seed % 2 == 0 ? Guard::end : Guard::start;
}

InputOptions input_options(uint64_t seed) {
    InputOptions options;
    options.seed = seed;
    options.guard = guard_of(seed);
    options.poison_invisible = true;
    return options;
}

// What runs now, for the handler of a memory fault. A fixed buffer: a signal handler may not allocate.
char running[1024];

void set_running(const std::string &kernel, const std::string &case_text, uint64_t seed) {
    const auto result = fmt::format_to_n(running, sizeof running - 1,
                                         "\nattune: {} touched memory outside its arrays (or crashed).\n"
                                         "Again: attune verify --case '{}' --seed {} --kernel {}\n",
                                         kernel, case_text, seed, kernel);
    *result.out = '\0';
}

extern "C" void on_memory_fault(int) {
    if (write(STDERR_FILENO, running, std::strlen(running)) < 0) _exit(3);
    _exit(1);
}

void install_fault_handler() {
    static char stack[64 * 1024]; // of its own, so that an overflow of the kernel's stack is reported too
    stack_t alternative{};
    alternative.ss_sp = stack;
    alternative.ss_size = sizeof stack;
    sigaltstack(&alternative, nullptr);
    struct sigaction action {};
    action.sa_handler = on_memory_fault;
    action.sa_flags = SA_ONSTACK;
    sigemptyset(&action.sa_mask);
    for (int signal : {SIGSEGV, SIGBUS, SIGILL, SIGFPE}) sigaction(signal, &action, nullptr);
}

struct Outcome {
    const attune_kernel *kernel;
    int threads;
    KernelCheck check;
};

struct CaseOutcome {
    std::vector<Outcome> outcomes;
    std::map<std::string, std::vector<std::string>> refusals; // reason -> kernels
    bool all_ok() const {
        return std::all_of(outcomes.begin(), outcomes.end(), [](const Outcome &o) { return o.check.verdict.ok; });
    }
};

CaseOutcome verify_case(const Case &c, uint64_t seed, const KernelFilter &filter, const std::vector<int> &threads) {
    CaseOutcome result;
    attune_problem problem = to_problem(c);
    problem.device = filter.device;
    std::vector<const attune_kernel *> eligible;
    for (const attune_kernel *k : all_kernels()) {
        if (!filter.accepts(*k)) continue;
        if (const char *reason = attune_kernel_refuses(k, &problem))
            result.refusals[reason].push_back(k->name);
        else
            eligible.push_back(k);
    }
    if (eligible.empty()) return result;
    Inputs inputs(c, input_options(seed));
    const Reference reference = make_reference(inputs.problem(), inputs.tensors());
    const std::string text = to_string(c);
    for (const attune_kernel *k : eligible) {
        uint64_t hash = 0;
        for (size_t t = 0; t < threads.size(); ++t) {
            set_running(k->name, text, seed);
            Outcome outcome{k, threads[t], check_kernel(*k, inputs, reference, threads[t], guard_of(seed))};
            Verdict &verdict = outcome.check.verdict;
            if (t == 0)
                hash = outcome.check.hash;
            else if (verdict.ok && hash != outcome.check.hash) {
                verdict.ok = false;
                verdict.why = fmt::format("its bits differ between {} and {} threads", threads[0], threads[t]);
            }
            result.outcomes.push_back(std::move(outcome));
        }
    }
    return result;
}

ResultRow to_row(const Case &c, uint64_t seed, const Outcome &o) {
    ResultRow row;
    row.case_text = to_string(c);
    row.kernel = o.kernel->name;
    row.strategy = o.kernel->strategy;
    row.dtype = dtype_name(c.dtype);
    row.threads = o.threads;
    row.workspace_bytes = int64_t(o.check.workspace);
    row.max_err = o.check.verdict.o_error;
    row.err_bound = o.check.verdict.o_bound;
    row.lse_err = o.check.verdict.lse_error;
    row.lse_bound = o.check.verdict.lse_bound;
    row.ok = o.check.verdict.ok;
    row.why_not = o.check.verdict.why;
    row.input = fmt::format("seed {}", seed);
    row.seed = seed;
    return row;
}

// Makes a failing case smaller, greedily, as long as the same kernel still fails.
Case shrink(Case c, const std::function<bool(const Case &)> &fails) {
    const auto candidates = [](const Case &c) {
        std::vector<Case> smaller;
        const auto add = [&](auto &&change) {
            Case s = c;
            change(s);
            if (!(s == c)) smaller.push_back(std::move(s));
        };
        add([](Case &s) { s.layout = Layout::bhsd; });
        add([](Case &s) { s.scale.reset(); });
        add([](Case &s) { s.softcap.reset(); });
        add([](Case &s) { s.alibi = false; });
        add([](Case &s) { s.sink = false; });
        add([](Case &s) { s.bias = false; });
        add([](Case &s) { s.mask = false; });
        add([](Case &s) { s.kv_len.clear(); });
        add([](Case &s) { s.window_left = s.window_right = -1; });
        add([](Case &s) {
            s.offset = 0;
            s.offsets.clear();
        });
        add([](Case &s) { s.causal = Causal::none; });
        add([](Case &s) {
            if (s.B <= 1) return;
            s.B = 1;
            if (!s.kv_len.empty()) s.kv_len = {s.kv_len[0]};
            if (!s.offsets.empty()) s.offsets = {s.offsets[0]};
        });
        add([](Case &s) { s.Hq = s.Hkv = 1; });
        add([](Case &s) { s.Hq = s.Hkv; });
        add([](Case &s) { s.dv = s.dk; });
        for (int64_t Case::*size : {&Case::N, &Case::M, &Case::dk, &Case::dv})
            for (const bool half : {true, false})
                add([&](Case &s) {
                    if (s.*size <= 1) return;
                    s.*size = half ? s.*size / 2 : s.*size - 1;
                    for (int64_t &length : s.kv_len) length = std::min(length, s.M);
                });
        return smaller;
    };
    int budget = 150;
    for (bool progress = true; progress && budget > 0;) {
        progress = false;
        for (Case &s : candidates(c)) {
            if (--budget <= 0) break;
            if (!fails(s)) continue;
            c = std::move(s);
            progress = true;
            break;
        }
    }
    return c;
}

std::string again(const Case &c, uint64_t seed, const Outcome &o) {
    return fmt::format("attune verify --case '{}' --seed {} --kernel {} --threads {}", to_string(c), seed,
                       o.kernel->name, o.threads);
}

void print_refusals(const CaseOutcome &outcome, bool verbose) {
    for (const auto &[reason, kernels] : outcome.refusals) {
        if (verbose || kernels.size() <= 2)
            fmt::print("cannot: {}: {}\n", fmt::join(kernels, ", "), reason);
        else
            fmt::print("cannot: {} and {} more: {}\n", kernels[0], kernels.size() - 1, reason);
    }
}

bool verify_named(const VerifyOptions &options, const KernelFilter &filter, std::vector<ResultRow> &rows) {
    bool ok = true;
    const auto threads = options.common.thread_counts();
    const bool several = threads.size() > 1;
    for (const Case &c : options.common.cases()) {
        const uint64_t seed = options.common.seed;
        const CaseOutcome outcome = verify_case(c, seed, filter, threads);
        fmt::print("{}  (seed {})\n", to_string(c), seed);
        if (outcome.outcomes.empty()) {
            ok = false;
            fmt::print("no kernel can do this case:\n");
            print_refusals(outcome, true);
            fmt::print("\n");
            continue;
        }
        const auto right = Table::Align::right, left = Table::Align::left;
        Table table({{"kernel", left},
                     {"threads", right},
                     {"max error", right},
                     {"bound", right},
                     {"LSE error", right},
                     {"bound", right},
                     {"ok", left}});
        for (const Outcome &o : outcome.outcomes) {
            const Verdict &v = o.check.verdict;
            table.add({o.kernel->name, several || o.threads ? std::to_string(o.threads) : "", format_error(v.o_error),
                       format_error(v.o_bound), format_error(v.lse_error), format_error(v.lse_bound),
                       v.ok ? "ok" : "WRONG"});
            if (!v.ok) table.add_note("  " + v.why);
            rows.push_back(to_row(c, seed, o));
        }
        fmt::print("{}", table.text());
        print_refusals(outcome, options.verbose);
        const Verdict &first = outcome.outcomes.front().check.verdict;
        const auto wrong = std::count_if(outcome.outcomes.begin(), outcome.outcomes.end(),
                                         [](const Outcome &o) { return !o.check.verdict.ok; });
        fmt::print("{} of {} right; {} of {} rows checked\n\n", int64_t(outcome.outcomes.size()) - wrong,
                   outcome.outcomes.size(), first.rows_checked, first.rows_total);
        ok = ok && wrong == 0;
    }
    return ok;
}

// The part of the problem space that some kernel claims; what none claims is named once, not tried in vain.
CaseSpace claimed_space(const KernelFilter &filter) {
    CaseSpace space;
    space.flags = 0;
    space.window = space.gqa = false;
    std::set<std::pair<attune_dtype, attune_dtype>> dtypes;
    for (const attune_kernel *k : all_kernels()) {
        if (!filter.accepts(*k)) continue;
        space.flags |= k->flags;
        space.window = space.window || k->window;
        space.gqa = space.gqa || k->gqa;
        dtypes.insert({k->q_dtype, k->kv_dtype});
    }
    space.dtypes.assign(dtypes.begin(), dtypes.end());
    std::string unclaimed;
    const auto feature = [&](bool claimed, const char *name) {
        if (!claimed) unclaimed += fmt::format("{}{}", unclaimed.empty() ? "" : ", ", name);
    };
    feature(space.flags & ATTUNE_CAUSAL, "causal");
    feature(space.window, "window");
    feature(space.flags & ATTUNE_OFFSETS, "offset per batch");
    feature(space.flags & ATTUNE_KV_LEN, "kvlen");
    feature(space.flags & ATTUNE_MASK, "mask=bool");
    feature(space.flags & ATTUNE_BIAS, "mask=bias");
    feature(space.flags & ATTUNE_SOFTCAP, "softcap");
    feature(space.flags & ATTUNE_ALIBI, "alibi");
    feature(space.flags & ATTUNE_SINK, "sink");
    feature(space.gqa, "grouped heads");
    if (!unclaimed.empty()) fmt::print("left out, as no kernel does it: {}\n", unclaimed);
    return space;
}

bool verify_random(const VerifyOptions &options, const KernelFilter &filter, std::vector<ResultRow> &rows) {
    const CaseSpace space = claimed_space(filter);
    if (space.dtypes.empty())
        fail("--random: no kernel is left after --strategy, --kernel and --device; expected at least one");
    const auto threads = options.common.thread_counts();
    struct Tally {
        int64_t runs = 0, wrong = 0;
        double worst = 0; // error / bound
    };
    std::map<std::string, Tally> tallies;
    int64_t runs = 0, wrong = 0, unclaimed = 0;
    Progress progress("verify", double(options.random));
    for (int64_t n = 0; n < options.random; ++n) {
        const uint64_t seed = options.common.seed + uint64_t(n);
        const Case c = random_case(seed, space);
        progress.update(double(n), to_string(c));
        const CaseOutcome outcome = verify_case(c, seed, filter, threads);
        if (outcome.outcomes.empty()) ++unclaimed;
        for (const Outcome &o : outcome.outcomes) {
            const Verdict &v = o.check.verdict;
            Tally &tally = tallies[o.kernel->name];
            ++runs;
            ++tally.runs;
            if (v.o_bound > 0) tally.worst = std::max(tally.worst, v.o_error / v.o_bound);
            rows.push_back(to_row(c, seed, o));
            if (v.ok) continue;
            ++wrong;
            ++tally.wrong;
            progress.finish();
            fmt::print("WRONG  {}\n  {}\n  again: {}\n", o.kernel->name, v.why, again(c, seed, o));
            std::fflush(stdout);           // before shrinking, which may crash
            if (tally.wrong > 1) continue; // one small case for each kernel is enough
            KernelFilter same = filter;
            same.kernels = {o.kernel->name};
            const Case small = shrink(c, [&](const Case &s) { return !verify_case(s, seed, same, threads).all_ok(); });
            if (!(small == c)) fmt::print("  smaller: {}\n", again(small, seed, o));
        }
        if (wrong > 0 && !options.keep_going) {
            fmt::print("stopped at the first failing case; --keep-going tries the rest\n");
            break;
        }
    }
    progress.finish();
    Table table({{"kernel", Table::Align::left},
                 {"cases", Table::Align::right},
                 {"wrong", Table::Align::right},
                 {"worst error / bound", Table::Align::right}});
    for (const auto &[name, t] : tallies)
        table.add({name, std::to_string(t.runs), std::to_string(t.wrong), fmt::format("{:.2f}", t.worst)});
    fmt::print("{}", table.text());
    fmt::print("{} runs of {} kernels on random cases from seed {}: {} wrong", runs, tallies.size(),
               options.common.seed, wrong);
    if (unclaimed) fmt::print("; {} cases that no kernel does", unclaimed);
    fmt::print("\n");
    if (runs == 0) fmt::print("nothing was checked\n");
    return wrong == 0 && runs > 0;
}

void run_verify(const VerifyOptions &options, Status &status) {
    KernelFilter filter = options.common.filter();
    filter.kernels = options.kernels;
    filter.check_names();
    options.common.check_json();
    if (options.random < 0) fail("--random={}: expected a number of cases, at least 1", options.random);
    if (options.random == 0 && options.common.case_texts.empty())
        fail("verify: neither --case nor --random is given; expected, for example, --case f32:b1:h8:n128:d64 or "
             "--random 100");
    install_fault_handler();
    std::vector<ResultRow> rows;
    bool ok = true;
    if (!options.common.case_texts.empty()) ok = verify_named(options, filter, rows) && ok;
    if (options.random > 0) ok = verify_random(options, filter, rows) && ok;
    if (!options.common.json.empty())
        write_json(options.common.json, to_json(detect_machine(), attune_isa(), {}, rows));
    status.code = ok ? 0 : 1;
}

} // namespace

void add_verify(CLI::App &app, Status &status) {
    auto options = std::make_shared<VerifyOptions>();
    CLI::App *command = app.add_subcommand("verify", "Check kernels against float64, on named or random cases");
    options->common.add_to(*command);
    command->add_option("--kernel", options->kernels, "Only these kernels (full names, as attune info lists them)")
        ->type_name("NAME")
        ->delimiter(',')
        ->allow_extra_args(false);
    command->add_option("--random", options->random, "Number of random cases, from --seed on")->type_name("N");
    command->add_flag("--keep-going", options->keep_going, "With --random: do not stop at the first failing case");
    command->add_flag("--verbose", options->verbose, "List every kernel that cannot do a case, with its reason");
    command->footer(
        "Each kernel's output is compared with an independent float64 computation; the bound is twice the error of\n"
        "the plain f32 stages plus a few units in the last place. Arrays lie against unreadable pages, and keys that\n"
        "no row may see hold NaN. Exit status 1 if anything is wrong.\n\n"
        "  attune verify --case f32:b2:h8/2:n100:m333:d64:causal-br\n"
        "  attune verify --random 500 --seed 7 --strategy flash\n\n" +
        case_syntax());
    command->callback([options, &status] { run_verify(*options, status); });
}

} // namespace attune::tools
