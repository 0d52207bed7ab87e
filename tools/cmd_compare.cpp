// attune compare: the scheduling strategies of one attention problem side by side, on this machine.
//
// Every contestant is checked against float64 before and after it is timed; the rounds are interleaved, and the peak is
// calibrated before and after them in the same process.
#include "commands.h"

#include "lib/bench.h"
#include "lib/device_memory.h"
#include "lib/error.h"
#include "lib/peer_rows.h"
#include "lib/peers.h"
#include "lib/workload.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <map>

namespace attune::tools {
namespace {

constexpr const char *kSyntheticCases[] = {"f32:b1:h8:n2048:d64", "f32:b1:h8:n2048:d64:causal"};
constexpr const char *kLadderCase = "f32:b1:h8:n1024:d64";

struct CompareOptions {
    CommonOptions common;
    std::vector<std::string> kernels;
    bool all_isas = false, ladder = false, peers = false;
    int rounds = 15;
    double time_limit = 1.5;
};

struct Entry { // a strategy's kernel, or why it has none
    const attune_kernel *kernel = nullptr;
    std::string strategy, why_not;
};

struct Row {
    Entry entry;
    ResultRow result;
};

attune_problem device_problem(const Workload &w, attune_device device) {
    attune_problem problem = to_problem(w.problem);
    problem.device = device;
    return problem;
}

// Why no kernel of the strategy takes the problem: each reason once, with one kernel it comes from.
std::string reasons(const std::string &strategy, const attune_problem &problem, const KernelFilter &filter) {
    std::map<std::string, std::string> by_reason;
    std::string text;
    for (const attune_kernel *k : all_kernels()) {
        if (k->strategy != strategy || !filter.accepts(*k)) continue;
        const char *reason = attune_kernel_refuses(k, &problem);
        if (!reason || !by_reason.emplace(reason, k->name).second) continue;
        text += fmt::format("{}{}", text.empty() ? "" : "; ", reason);
    }
    return text;
}

// One kernel a strategy, the one that the planner takes for it; with all_isas (or named kernels) all that can.
std::vector<Entry> choose_entries(const attune_problem &problem, const CompareOptions &options,
                                  const KernelFilter &filter, int threads) {
    std::vector<std::string> strategies;
    for (const std::string &s : all_strategies()) {
        const bool wanted = options.ladder ? is_ladder(s)
                                           : !is_ladder(s) || !options.kernels.empty() ||
                                                 std::find(filter.strategies.begin(), filter.strategies.end(), s) !=
                                                     filter.strategies.end();
        const auto has_kernel = [&](const attune_kernel *k) { return k->strategy == s && filter.accepts(*k); };
        const auto kernels = all_kernels();
        if (wanted && std::any_of(kernels.begin(), kernels.end(), has_kernel)) strategies.push_back(s);
    }
    if (options.ladder) {
        std::sort(strategies.begin(), strategies.end());
        if (filter.strategies.empty()) strategies.push_back("flash");
    }

    std::vector<Entry> entries;
    for (const std::string &s : strategies) {
        if (options.all_isas || !options.kernels.empty()) {
            const size_t before = entries.size();
            for (const attune_kernel *k : all_kernels())
                if (k->strategy == s && filter.accepts(*k) && !attune_kernel_refuses(k, &problem))
                    entries.push_back({k, s, ""});
            if (entries.size() == before) entries.push_back({nullptr, s, reasons(s, problem, filter)});
            continue;
        }
        std::string why;
        const Plan plan = make_plan(problem, "", s, threads, why);
        const attune_kernel *kernel = plan ? attune_find_kernel(attune_plan_kernel(plan.get())) : nullptr;
        if (kernel) {
            entries.push_back({kernel, s, ""});
            continue;
        }
        const std::string detail = reasons(s, problem, filter);
        entries.push_back({nullptr, s, detail.empty() ? why : detail});
    }
    return entries;
}

// The merge of the parts' verdicts: the largest error, in relation to its bound.
void add_verdict(ResultRow &row, const Verdict &v) {
    const auto worse = [](double error, double bound, const std::optional<double> &e, const std::optional<double> &b) {
        if (!e) return true;
        return std::isinf(error) || error * *b > *e * bound;
    };
    if (worse(v.o_error, v.o_bound, row.max_err, row.err_bound)) {
        row.max_err = v.o_error;
        row.err_bound = v.o_bound;
    }
    if (worse(v.lse_error, v.lse_bound, row.lse_err, row.lse_bound)) {
        row.lse_err = v.lse_error;
        row.lse_bound = v.lse_bound;
    }
    if (!v.ok && row.why_not.empty()) row.why_not = v.why;
    row.ok = row.ok && v.ok;
}

// The tensors that a comparison runs on: those of the workload, or copies that stay on a device.
class Arrays {
  public:
    Arrays(Workload &workload, attune_device device) : workload_(workload), device_(device) {
        for (const auto &part : workload.parts)
            if (device != ATTUNE_CPU) copies_.push_back(std::make_unique<DeviceTensors>(device, part->tensors()));
    }
    size_t size() const { return workload_.parts.size(); }
    const attune_tensors &tensors(size_t i) const {
        return device_ == ATTUNE_CPU ? workload_.parts[i]->tensors() : copies_[i]->tensors();
    }
    void reset_outputs() {
        for (const auto &part : workload_.parts) part->reset_outputs();
        for (const auto &copy : copies_) copy->fill_outputs(0xff);
    }
    void fetch_outputs() {
        for (const auto &copy : copies_) copy->fetch_outputs();
    }
    // What is queued on a device is done when this returns.
    attune_status wait() const { return device_ == ATTUNE_CPU ? ATTUNE_OK : attune_device_synchronize(device_); }

  private:
    Workload &workload_;
    attune_device device_;
    std::vector<std::unique_ptr<DeviceTensors>> copies_;
};

// One strategy's kernel on a workload: its plan and what its runs yield.
class Runner {
  public:
    Runner(Workload &workload, Arrays &arrays, const attune_kernel &kernel, const attune_problem &problem, int threads,
           ResultRow &row)
        : workload_(workload), arrays_(arrays), kernel_(kernel), row_(row) {
        std::string why;
        plan_ = make_plan(problem, kernel.name, "", threads, why);
        if (!plan_) fail_with("no plan: " + first_line(why));
        phase_seconds_.resize(size_t(std::max<int64_t>(kernel.num_phases, 1)));
        phase_samples_.resize(phase_seconds_.size());
    }

    bool usable() const { return plan_ != nullptr && !broken_; }
    size_t workspace() const { return plan_ ? attune_plan_workspace(plan_.get()) : 0; }
    void use_workspace(const Workspace &workspace) { workspace_ = &workspace; }

    // All parts once. With `want_phases`, the phases' times add up.
    bool run(bool want_phases) {
        attune_time_phases(want_phases);
        for (size_t part = 0; part < arrays_.size(); ++part) {
            if (attune_run(plan_.get(), &arrays_.tensors(part), workspace_->data(), workspace_->size()) != ATTUNE_OK) {
                fail_with(attune_last_error());
                return false;
            }
            if (!want_phases) continue;
            double seconds[16] = {};
            const int64_t count = attune_last_phase_seconds(seconds, 16);
            for (int64_t i = 0; i < std::min<int64_t>(count, int64_t(phase_seconds_.size())) && i < 16; ++i)
                phase_seconds_[size_t(i)] += seconds[i];
        }
        if (arrays_.wait() != ATTUNE_OK) {
            fail_with(attune_last_error());
            return false;
        }
        ++calls_;
        return true;
    }

    // The first run: into outputs full of NaN, compared with float64.
    void check() {
        arrays_.reset_outputs();
        reset_peak_rss();
        if (!run(false)) return;
        row_.peak_rss_bytes = peak_rss();
        arrays_.fetch_outputs();
        for (size_t i = 0; i < workload_.parts.size(); ++i) {
            add_verdict(row_, check_outputs(workload_.references[i], workload_.parts[i]->tensors()));
            hash_ ^= std::rotl(workload_.parts[i]->output_hash(), int(i));
        }
    }

    void count_allocations() {
        if (!AllocationCounter::available()) return;
        const AllocationCounter counter;
        const bool ok = run(false);
        const int64_t count = counter.count();
        if (ok) row_.allocs_per_call = double(count) / double(workload_.parts.size());
    }

    void after_sample() {
        for (size_t i = 0; i < phase_seconds_.size(); ++i) {
            phase_samples_[i].push_back(phase_seconds_[i] / double(std::max<int64_t>(calls_, 1)));
            phase_seconds_[i] = 0;
        }
        calls_ = 0;
    }

    // Warm calls before the samples are not the phases' business.
    void forget_phases() {
        std::fill(phase_seconds_.begin(), phase_seconds_.end(), 0.0);
        calls_ = 0;
    }

    // The last run must give the bits of the first.
    void check_again() {
        arrays_.reset_outputs();
        if (!run(false)) return;
        arrays_.fetch_outputs();
        uint64_t hash = 0;
        for (size_t i = 0; i < workload_.parts.size(); ++i)
            hash ^= std::rotl(workload_.parts[i]->output_hash(), int(i));
        if (hash != hash_) fail_with("the last run gave other bits than the first");
    }

    void keep_phases() {
        for (int64_t i = 0; i < kernel_.num_phases; ++i)
            row_.phases.emplace_back(kernel_.phases[i].name, median(phase_samples_[size_t(i)]));
    }

  private:
    void fail_with(const std::string &why) {
        broken_ = true;
        row_.ok = false;
        if (row_.why_not.empty()) row_.why_not = why;
    }

    Workload &workload_;
    Arrays &arrays_;
    const attune_kernel &kernel_;
    ResultRow &row_;
    Plan plan_;
    const Workspace *workspace_ = nullptr;
    bool broken_ = false;
    uint64_t hash_ = 0;
    int64_t calls_ = 0;
    std::vector<double> phase_seconds_;
    std::vector<std::vector<double>> phase_samples_;
};

// The strategies whose phases are stages, with a time of their own.
bool has_stages(const ResultRow &row) {
    return row.strategy == "stagewise" || row.strategy == "gpu_stagewise";
}

struct Comparison {
    std::vector<Row> rows;
    double peak = 0;
};

Comparison compare_on(Workload &w, const CompareOptions &options, const KernelFilter &filter, const Machine &machine,
                      int threads, uint64_t seed, PeerRows &peers) {
    Comparison result;
    load_tuned_for(w.problem, threads);
    const attune_problem problem = device_problem(w, filter.device);
    std::string chosen, why;
    if (const Plan plan = make_plan(problem, "", "", threads, why)) chosen = attune_plan_kernel(plan.get());

    auto entries = choose_entries(problem, options, filter, threads);
    const auto is_there = [&](const Entry &e) { return e.kernel && e.kernel->name == chosen; };
    if (!chosen.empty() && !options.ladder && std::none_of(entries.begin(), entries.end(), is_there))
        if (const attune_kernel *k = attune_find_kernel(chosen.c_str()); k && filter.accepts(*k))
            entries.push_back({k, k->strategy, ""});
    for (Entry &e : entries) {
        Row row{e, {}};
        ResultRow &r = row.result;
        r.case_text = to_string(w.problem);
        r.strategy = e.strategy;
        r.dtype = dtype_name(w.problem.dtype);
        r.threads = threads;
        r.input = w.input;
        r.seed = seed;
        r.ok = e.kernel != nullptr;
        r.why_not = e.why_not;
        if (e.kernel) {
            r.kernel = e.kernel->name;
            r.chosen = r.kernel == chosen;
        }
        result.rows.push_back(std::move(row));
    }

    const size_t first_peer = result.rows.size();
    result.rows.resize(first_peer + peers.size());

    const bool on_cpu = filter.device == ATTUNE_CPU;
    const bool any = std::any_of(entries.begin(), entries.end(), [](const Entry &e) { return e.kernel; });
    Arrays arrays(w, any ? filter.device : ATTUNE_CPU);
    // One workspace for all, as large as the largest needs: warm pages for each of them alike.
    std::vector<std::unique_ptr<Runner>> runners;
    size_t most = 0;
    for (Row &row : result.rows) {
        runners.push_back( // none for a peer
            row.entry.kernel ? std::make_unique<Runner>(w, arrays, *row.entry.kernel, problem, threads, row.result)
                             : nullptr);
        if (!runners.back()) continue;
        const size_t bytes = runners.back()->workspace();
        row.result.workspace_bytes = int64_t(bytes);
        if (double(bytes) > 0.5 * double(machine.memory)) {
            row.result.ok = false;
            row.result.why_not = fmt::format("its workspace of {} is more than half of this machine's memory",
                                             format_bytes(double(bytes)));
            runners.back() = nullptr;
            continue;
        }
        most = std::max(most, bytes);
    }
    Workspace workspace(any ? filter.device : ATTUNE_CPU, most, Guard::none);

    const std::string label = fmt::format("{} threads", threads);
    Progress progress(label, 1.0);
    std::vector<Contestant> contestants;
    std::vector<size_t> index; // of the row
    for (size_t i = 0; i < result.rows.size(); ++i) {
        if (!runners[i] || !runners[i]->usable()) continue;
        Runner *runner = runners[i].get();
        progress.update(0.2 * double(i) / double(result.rows.size()), "checking " + result.rows[i].result.kernel);
        runner->use_workspace(workspace);
        workspace.drop_pages();
        runner->check();
        if (runner->usable()) runner->count_allocations();
        if (!runner->usable()) continue;
        const bool staged = has_stages(result.rows[i].result);
        Contestant c;
        c.name = result.rows[i].result.kernel;
        c.run = [runner, staged] { return runner->run(staged); };
        c.after_sample = [runner] { runner->after_sample(); };
        contestants.push_back(std::move(c));
        index.push_back(i);
    }
    std::vector<ResultRow *> peer_rows;
    for (size_t i = first_peer; i < result.rows.size(); ++i) peer_rows.push_back(&result.rows[i].result);
    for (size_t peer : peers.enter(w, threads, seed, peer_rows, contestants)) index.push_back(first_peer + peer);
    // The peak of a device is not measured: its table has no share.
    const auto peak = [&] { return on_cpu ? measure_peak_gflops(machine, w.problem.dtype, threads) : 0.0; };
    const double peak_before = peak();
    BenchOptions bench;
    bench.rounds = options.rounds;
    bench.time_limit = options.time_limit;
    bench.hard_limit = std::max(4 * options.time_limit, 2.0);
    bench.before_samples = [&] {
        for (const auto &runner : runners)
            if (runner) runner->forget_phases();
    };
    bench.progress = [&](double share, const std::string &name) { progress.update(0.2 + 0.8 * share, name); };
    const auto measured = measure_interleaved(contestants, bench);
    result.peak = std::max(peak_before, peak());

    for (size_t k = 0; k < measured.size(); ++k) {
        ResultRow &row = result.rows[index[k]].result;
        if (measured[k].failed || measured[k].samples.empty()) {
            row.ok = false;
            continue;
        }
        if (index[k] >= first_peer) {
            peers.finish(w, index[k] - first_peer, measured[k].samples, result.peak, row);
            continue;
        }
        const Statistics s = statistics(measured[k].samples);
        row.median_s = s.median;
        row.min_s = s.min;
        row.p90_s = s.p90;
        row.gflops = w.flops() / s.median * 1e-9;
        row.gbps = w.bytes() / s.median * 1e-9;
        if (result.peak > 0) row.pct_peak = 100 * *row.gflops / result.peak;
        if (has_stages(row)) runners[index[k]]->keep_phases();
        if (s.median < 2 * options.time_limit) runners[index[k]]->check_again();
    }
    return result;
}

std::string share_text(const ResultRow &r) {
    return r.pct_peak ? fmt::format("{:.1f} %", *r.pct_peak) : "–";
}

void print_heading(const Workload &w, const Comparison &comparison, int threads) {
    if (!w.title.empty()) fmt::print("{}\n", w.title);
    fmt::print("{}\n", to_string(w.problem));
    const std::string peak = comparison.peak > 0 ? fmt::format("{} thread{}, peak {:.0f} GFLOP/s, ", threads,
                                                               threads == 1 ? "" : "s", comparison.peak)
                                                 : "";
    fmt::print("{}{} of {} rows checked against float64\n\n", peak, w.rows_checked(), w.rows_total());
}

void print_comparison(const Workload &w, const Comparison &comparison, int threads) {
    print_heading(w, comparison, threads);
    std::vector<const Row *> order;
    for (const Row &row : comparison.rows) order.push_back(&row);
    std::stable_sort(order.begin(), order.end(), [](const Row *a, const Row *b) {
        return a->result.median_s.value_or(INFINITY) < b->result.median_s.value_or(INFINITY);
    });
    const auto left = Table::Align::left, right = Table::Align::right;
    Table table({{"strategy", left},
                 {"kernel", left},
                 {"median", right},
                 {"min", right},
                 {"GFLOP/s", right},
                 {"of peak", right},
                 {"workspace", right},
                 {"max error", right},
                 {"bound", right},
                 {"", left}});
    std::string notes;
    for (const Row *row : order) {
        const ResultRow &r = row->result;
        const bool peer = r.impl != "attune";
        const std::string name = peer ? peer_title(r.impl) : r.strategy;
        if (!r.ok)
            notes += row->entry.kernel || r.median_s
                         ? fmt::format("WRONG   {}: {}\n", peer ? name : r.kernel, r.why_not)
                         : fmt::format("cannot  {}: {}\n", name, r.why_not);
        if (!r.median_s) continue;
        table.add({name, peer ? r.version + (r.how.empty() ? "" : ", ") + r.how : r.kernel, format_seconds(*r.median_s),
                   format_seconds(*r.min_s), fmt::format("{:.1f}", *r.gflops), share_text(r),
                   r.workspace_bytes ? format_bytes(double(*r.workspace_bytes)) : "–",
                   format_error(r.max_err.value_or(0)), format_error(r.err_bound.value_or(0)),
                   !r.ok      ? "WRONG"
                   : r.chosen ? "◀ chosen"
                              : ""});
        double total = 0;
        for (const auto &phase : r.phases) total += phase.second;
        for (size_t i = 0; i < r.phases.size(); ++i)
            table.add({i + 1 < r.phases.size() ? "  ├" : "  └", r.phases[i].first, format_seconds(r.phases[i].second),
                       "", "", total > 0 ? fmt::format("({:.0f} %)", 100 * r.phases[i].second / total) : ""});
    }
    fmt::print("{}{}", table.size() ? table.text() : "", notes);
    const auto allocating = std::count_if(order.begin(), order.end(),
                                          [](const Row *row) { return row->result.allocs_per_call.value_or(0) > 0; });
    if (allocating > 0)
        for (const Row *row : order)
            if (row->entry.kernel && row->result.allocs_per_call.value_or(0) > 0)
                fmt::print("allocates  {}: {:.3g} times a call\n", row->result.kernel, *row->result.allocs_per_call);
    fmt::print("\n");
}

void print_ladder(const Workload &w, const Comparison &comparison, int threads) {
    print_heading(w, comparison, threads);
    const auto left = Table::Align::left, right = Table::Align::right;
    Table table({{"step", left},
                 {"median", right},
                 {"faster", right},
                 {"GFLOP/s", right},
                 {"of peak", right},
                 {"", left},
                 {"what it does", left}});
    double previous = 0;
    for (const Row &row : comparison.rows) {
        const ResultRow &r = row.result;
        if (!r.median_s) {
            table.add({r.strategy, "–", "", "", "", "", r.why_not});
            continue;
        }
        const std::string name = is_ladder(r.strategy) ? r.strategy.substr(7) : r.strategy;
        table.add({name, format_seconds(*r.median_s),
                   previous > 0 ? fmt::format("{:.1f}×", previous / *r.median_s) : "", fmt::format("{:.1f}", *r.gflops),
                   share_text(r), bar(r.pct_peak.value_or(0) / 100, 30),
                   r.ok ? row.entry.kernel->why : "WRONG: " + r.why_not});
        previous = *r.median_s;
    }
    fmt::print("{}\n", table.text());
}

// The cases to run, made one at a time: their arrays need not be in memory together.
struct Job {
    std::string title;
    std::function<Workload()> make;
};

std::vector<Job> make_jobs(const CompareOptions &options) {
    std::vector<Job> jobs;
    const uint64_t seed = options.common.seed;
    const auto synthetic = [&jobs, seed](const Case &c) {
        jobs.push_back({to_string(c), [c, seed] { return synthetic_workload(c, seed); }});
    };
    const auto named = options.common.cases();
    for (const Case &c : named) synthetic(c);
    if (!named.empty()) return jobs;
    if (options.ladder) {
        synthetic(parse_case(kLadderCase));
        return jobs;
    }
    const std::string path = model_path();
    if (!std::filesystem::exists(path))
        fail("{}: not there; expected Q, K and V of the sentence encoder's layers, which ./attune compare prepares "
             "(give --case for a problem without them, or set ATTUNE_QKV)",
             path);
    jobs.push_back({"sentence encoder", [path] { return model_workload(path, "all-MiniLM-L6-v2 on data/text.txt"); }});
    for (const char *text : kSyntheticCases) synthetic(parse_case(text));
    return jobs;
}

void run_compare(const CompareOptions &options, Status &status) {
    KernelFilter filter = options.common.filter();
    filter.kernels = options.kernels;
    filter.check_names();
    options.common.check_json();
    if (options.rounds < 1) fail("--rounds={}: expected at least 1", options.rounds);
    if (!(options.time_limit > 0)) fail("--time-limit={}: expected seconds above 0", options.time_limit);
    auto thread_counts = options.common.thread_counts();
    if (filter.device != ATTUNE_CPU) thread_counts.resize(1); // of the host: a device kernel uses one
    const auto jobs = make_jobs(options);
    const Machine machine = detect_machine();
    if (filter.device == ATTUNE_CPU)
        fmt::print("{}, {} core{}, {}\n\n", machine.cpu, machine.cores, machine.cores == 1 ? "" : "s", attune_isa());
    else
        fmt::print("{}\n\n", default_device(filter.device));

    std::vector<ResultRow> rows;
    bool wrong = false;
    PeerRows peers(options.peers);
    for (const Job &job : jobs) {
        std::fflush(stdout);
        Workload workload = job.make();
        bool measured = false;
        for (int threads : thread_counts) {
            const Comparison comparison =
                compare_on(workload, options, filter, machine, threads, options.common.seed, peers);
            if (comparison.rows.empty())
                fail("compare: no kernel is left after --strategy, --kernel, --device and --ladder; expected at least "
                     "one");
            (options.ladder ? print_ladder : print_comparison)(workload, comparison, threads);
            std::fflush(stdout);
            for (const Row &row : comparison.rows) {
                wrong = wrong || (row.entry.kernel && !row.result.ok);
                measured = measured || row.result.median_s.has_value();
                rows.push_back(row.result);
            }
        }
        if (!measured) {
            fmt::print(stderr, "attune: no kernel ran {}\n", job.title);
            wrong = true;
        }
    }
    if (!options.common.json.empty()) {
        Calibration calibration;
        calibration.peak_f32 = measure_peak_gflops(machine, ATTUNE_F32, machine.cores);
        calibration.peak_bf16 = measure_peak_gflops(machine, ATTUNE_BF16, machine.cores);
        calibration.read = measure_read_gbps(machine, machine.cores);
        write_json(options.common.json, to_json(machine, attune_isa(), calibration, rows));
    }
    status.code = wrong ? 1 : 0;
}

} // namespace

void add_compare(CLI::App &app, Status &status) {
    auto options = std::make_shared<CompareOptions>();
    CLI::App *command =
        app.add_subcommand("compare", "Time the scheduling strategies for attention side by side, checked");
    options->common.add_to(*command);
    command->add_option("--kernel", options->kernels, "Only these kernels (full names, as attune info lists them)")
        ->type_name("NAME")
        ->delimiter(',')
        ->allow_extra_args(false);
    command->add_flag("--all-isas", options->all_isas, "Every kernel that can, not just the best one of each strategy");
    command->add_flag("--peers", options->peers, "Also the installed peers (./attune bench --help), one process each");
    command->add_flag("--ladder", options->ladder,
                      "One problem from the unscheduled algorithm step by step to the full flash schedule");
    command->add_option("--rounds", options->rounds, "Samples of each kernel, at most (default 15)")->type_name("N");
    command
        ->add_option("--time-limit", options->time_limit,
                     "Seconds of measuring for each kernel and case (default 1.5; at least one call runs)")
        ->type_name("SECONDS");
    command->footer(
        "Without --case: Q, K and V of the six layers of a sentence encoder on real text, then a long synthetic case,\n"
        "plain and causal. One row a strategy, fastest first. GFLOP/s count useful work, 2(d_k + d_v) for each "
        "visible\n"
        "(query, key) pair; the peak is measured in the same process with the same number of threads. Every kernel's\n"
        "output is checked against float64 before and after it is timed; exit status 1 if one is wrong.\n\n"
        "  attune compare\n"
        "  attune compare --case f32:b1:h32/8:n512:d128:causal --threads 1,2 --json result.json\n"
        "  attune compare --ladder\n\n" +
        case_syntax());
    command->callback([options, &status] { run_compare(*options, status); });
}

} // namespace attune::tools
