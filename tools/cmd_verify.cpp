// attune verify: every kernel of the registry that can do a case, against float64.
//
// Arrays end (or, for odd seeds, begin) at unreadable pages, and, for every third seed, keys that no row may see hold
// NaN and infinities: all follows from the seed alone, so that a case and a seed reproduce a failure.
#include "commands.h"

#include "lib/error.h"
#include "lib/running.h"
#include "lib/verifier.h"

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <exception>
#include <map>
#include <mutex>
#include <thread>

namespace attune::tools {
namespace {

struct VerifyOptions {
    CommonOptions common;
    std::vector<std::string> kernels, dtypes;
    int64_t random = 0;
    bool keep_going = false, verbose = false;
};

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

std::string plural(int64_t n, const char *what) {
    return fmt::format("{} {}{}", n, what, n == 1 ? "" : "s");
}

// Random cases, shared among as many threads as there are cores: `--random 20000` is a matter of minutes.
class RandomRun {
  public:
    RandomRun(const VerifyOptions &options, const KernelFilter &filter)
        : options_(options), filter_(filter), progress_("verify", double(options.random)) {
        std::string unclaimed;
        space_ = claimed_space(filter, unclaimed);
        if (space_.dtypes.empty())
            fail("--random: no kernel is left after --strategy, --kernel and --device; expected at least one");
        keep_types(options.dtypes);
        if (!unclaimed.empty()) fmt::print("left out, as no kernel does it: {}\n", unclaimed);
    }

    bool run(std::vector<ResultRow> &rows) {
        // Kernels for other devices have a queue of their own: one case at a time.
        const int jobs = filter_.device == ATTUNE_CPU ? std::min<int>(attune_get_num_threads(), 16) : 1;
        std::vector<std::thread> others;
        for (int n = 1; n < jobs; ++n) others.emplace_back([this] { guarded_work(); });
        guarded_work();
        for (std::thread &other : others) other.join();
        progress_.finish();
        if (thrown_) std::rethrow_exception(thrown_);
        std::stable_sort(rows_.begin(), rows_.end(),
                         [](const ResultRow &a, const ResultRow &b) { return a.seed < b.seed; });
        rows.insert(rows.end(), rows_.begin(), rows_.end());
        if (stopped_) fmt::print("stopped at the first failing case; --keep-going tries the rest\n");
        print_summary();
        return wrong_ == 0 && runs_ > 0;
    }

  private:
    void keep_types(const std::vector<std::string> &names) {
        const auto known = [](const std::string &name) { return name == "f32" || name == "bf16" || name == "f16"; };
        for (const std::string &name : names)
            if (!known(name)) fail("--dtype={}: expected f32, bf16 or f16", name);
        const auto kept = [&names](attune_dtype t) {
            return names.empty() || std::find(names.begin(), names.end(), dtype_name(t)) != names.end();
        };
        std::erase_if(space_.dtypes, [&](const auto &t) { return !kept(t.first) || !kept(t.second); });
        if (space_.dtypes.empty()) fail("--dtype={}: no kernel takes these", fmt::join(names, ","));
    }

    struct Tally {
        int64_t runs = 0, wrong = 0;
        double worst = 0; // error / bound
    };

    // Without --threads: one, as the cases run in parallel; every eighth with three too, for the bits.
    std::vector<int> threads_of(uint64_t seed) const {
        if (!options_.common.threads.empty()) return options_.common.thread_counts();
        return seed % 8 == 0 ? std::vector<int>{1, 3} : std::vector<int>{1};
    }

    void guarded_work() {
        try {
            work();
        } catch (...) {
            const std::lock_guard lock(mutex_);
            if (!thrown_) thrown_ = std::current_exception();
            stopped_ = true;
        }
    }

    void work() {
        for (int64_t n; !stopped_ && (n = next_++) < options_.random;) {
            const uint64_t seed = options_.common.seed + uint64_t(n);
            const Case c = random_case(seed, space_);
            const CaseOutcome outcome = verify_case(c, seed, filter_, threads_of(seed));
            const std::lock_guard lock(mutex_);
            progress_.update(double(n), to_string(c));
            if (outcome.outcomes.empty()) ++unclaimed_;
            for (const Outcome &o : outcome.outcomes) take(c, seed, o);
            if (wrong_ > 0 && !options_.keep_going) stopped_ = true;
        }
    }

    void take(const Case &c, uint64_t seed, const Outcome &o) {
        const Verdict &v = o.check.verdict;
        Tally &tally = tallies_[o.kernel->name];
        ++runs_;
        ++tally.runs;
        if (v.o_bound > 0) tally.worst = std::max(tally.worst, v.o_error / v.o_bound);
        rows_.push_back(to_row(c, seed, o));
        if (v.ok) return;
        ++wrong_;
        ++tally.wrong;
        progress_.finish();
        fmt::print("WRONG  {}\n  {}\n  again: {}\n  (number {} of --seed {}: the same by --random 1 --seed {})\n",
                   o.kernel->name, v.why, again(c, seed, o), int64_t(seed - options_.common.seed), options_.common.seed,
                   seed);
        std::fflush(stdout);         // before shrinking, which may crash
        if (tally.wrong > 1) return; // one small case for each kernel is enough
        KernelFilter same = filter_;
        same.kernels = {o.kernel->name};
        std::vector<int> threads{o.threads};
        if (o.threads != 1) threads.insert(threads.begin(), 1); // its bits may be what is wrong
        const Case small = shrink(c, [&](const Case &s) { return !verify_case(s, seed, same, threads).all_ok(); });
        if (!(small == c)) fmt::print("  smaller: {}\n", again(small, seed, o));
    }

    void print_summary() const {
        Table table({{"kernel", Table::Align::left},
                     {"cases", Table::Align::right},
                     {"wrong", Table::Align::right},
                     {"worst error / bound", Table::Align::right}});
        for (const auto &[name, t] : tallies_)
            table.add({name, std::to_string(t.runs), std::to_string(t.wrong), fmt::format("{:.2f}", t.worst)});
        fmt::print("{}", table.text());
        fmt::print("{} of {} on {} from seed {}: {} wrong", plural(runs_, "run"),
                   plural(int64_t(tallies_.size()), "kernel"), plural(options_.random, "random case"),
                   options_.common.seed, wrong_);
        if (unclaimed_) {
            const bool all = filter_.strategies.empty() && filter_.kernels.empty();
            fmt::print("; {} that {} can do", plural(unclaimed_, "case"),
                       all ? "no kernel" : "none of the kernels asked for");
        }
        fmt::print("\n");
        if (runs_ == 0) fmt::print("nothing was checked\n");
    }

    const VerifyOptions &options_;
    const KernelFilter &filter_;
    CaseSpace space_;
    std::atomic<int64_t> next_{0};
    std::atomic<bool> stopped_{false};
    std::mutex mutex_; // of all that follows
    Progress progress_;
    std::map<std::string, Tally> tallies_;
    std::vector<ResultRow> rows_;
    int64_t runs_ = 0, wrong_ = 0, unclaimed_ = 0;
    std::exception_ptr thrown_;
};

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
    if (options.random > 0) ok = RandomRun(options, filter).run(rows) && ok;
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
    command->add_option("--dtype", options->dtypes, "With --random: only these types of Q, K, V and O (f32, bf16, f16)")
        ->type_name("TYPE")
        ->delimiter(',')
        ->allow_extra_args(false);
    command->add_flag("--keep-going", options->keep_going, "With --random: do not stop at the first failing case");
    command->add_flag("--verbose", options->verbose, "List every kernel that cannot do a case, with its reason");
    command->footer(
        "Each kernel's output is compared with an independent float64 computation; the bound is twice the error of\n"
        "the plain stages in the case's type plus a few units in the last place. Arrays lie against unreadable pages, "
        "and keys that\n"
        "no row may see hold NaN for every third seed. Random cases run in parallel, one on each core. Exit status 1 "
        "if anything is wrong.\n\n"
        "  attune verify --case f32:b2:h8/2:n100:m333:d64:causal-br\n"
        "  attune verify --random 500 --seed 7 --strategy flash --dtype bf16,f16\n\n" +
        case_syntax());
    command->callback([options, &status] { run_verify(*options, status); });
}

} // namespace attune::tools
