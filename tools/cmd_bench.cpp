// attune bench: a fixed suite of cases, attune's own choice for each, beside the peers, each in a process of its own.
#include "commands.h"

#include "lib/error.h"
#include "lib/manifest.h"
#include "lib/peer_bench.h"
#include "lib/peers.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <set>

#ifndef ATTUNE_SUITE_DIR
#error "ATTUNE_SUITE_DIR: the folder of the suites"
#endif

namespace attune::tools {
namespace {

struct Options {
    CommonOptions common;
    std::string suite;
    std::vector<std::string> impls; // only these peers
    bool peers = false;
    int rounds = PeerBenchOptions{}.rounds, attempts = 2;
    double time_limit = PeerBenchOptions{}.time_limit, peer_limit = 300;
};

struct Suite {
    std::string name, why;
    std::vector<Case> cases;
};

// By name, or a file.
Suite load_suite(const std::string &name) {
    namespace fs = std::filesystem;
    const std::string builtin = std::string(ATTUNE_SUITE_DIR) + "/" + name + ".json";
    const std::string path = name.find('/') == std::string::npos && fs::exists(builtin) ? builtin : name;
    if (!fs::is_regular_file(path)) {
        std::vector<std::string> known;
        std::error_code ignored;
        for (const auto &entry : fs::directory_iterator(ATTUNE_SUITE_DIR, ignored))
            if (entry.path().extension() == ".json") known.push_back(entry.path().stem());
        std::sort(known.begin(), known.end());
        fail("--suite={}: neither a suite nor a file; expected one of: {}, or the path of such a file", name,
             fmt::join(known, ", "));
    }
    Suite suite;
    try {
        const auto json = nlohmann::json::parse(read_file(path));
        suite.name = json.value("name", fs::path(path).stem().string());
        suite.why = json.value("why", "");
        for (const auto &text : json.at("cases")) suite.cases.push_back(parse_case(text.get<std::string>()));
    } catch (const nlohmann::json::exception &e) {
        fail("--suite={}: {}; expected {{\"name\": …, \"cases\": [\"f32:b1:h8:n128:d64\", …]}}", path, e.what());
    }
    if (suite.cases.empty()) fail("--suite={}: has no case; expected at least one", path);
    return suite;
}

std::vector<std::unique_ptr<Remote>> make_contestants(const Options &options) {
    RemoteLimits limits;
    limits.start = limits.prepare = options.peer_limit;
    limits.call = std::min(limits.call, options.peer_limit);
    std::vector<std::unique_ptr<Remote>> all;
    const auto add = [&](RemoteSpec spec) { all.push_back(std::make_unique<Remote>(std::move(spec), limits)); };
    add(attune_spec());
    auto peers = options.peers ? peer_specs() : std::vector<RemoteSpec>{};
    for (const std::string &name : options.impls)
        if (std::none_of(peers.begin(), peers.end(), [&](const RemoteSpec &p) { return p.impl == name; })) {
            std::vector<std::string> known;
            for (const auto &p : peers) known.push_back(p.impl);
            fail("--peer={}: unknown; expected some of: {}", name, fmt::join(known, ", "));
        }
    if (!options.impls.empty())
        std::erase_if(peers, [&](const RemoteSpec &p) {
            return std::find(options.impls.begin(), options.impls.end(), p.impl) == options.impls.end();
        });
    // attune's second process stands in the middle of the round, so that its neighbours are others.
    for (size_t i = 0; i <= peers.size(); ++i) {
        if (i == peers.size() / 2) {
            RemoteSpec again = attune_spec();
            again.impl = kAttuneAgain;
            add(std::move(again));
        }
        if (i < peers.size()) add(peers[i]);
    }
    return all;
}

double self_ratio(const BenchResult &result) {
    const ResultRow *own = row_of(result.rows, "attune"), *again = row_of(result.rows, kAttuneAgain);
    return own && again ? *again->median_s / *own->median_s : NAN;
}

// How far attune against itself is from 1, as a factor.
double noise(const BenchResult &result) {
    const double ratio = self_ratio(result);
    return std::isnan(ratio) ? INFINITY : std::fabs(std::log(ratio));
}
const double kQuiet = std::log(1.02);

// attune's speed over the best peer's; 0: one of them is missing.
double lead(const BenchResult &result) {
    const ResultRow *own = row_of(result.rows, "attune"), *best = best_peer(result.rows);
    return own && best ? *best->median_s / *own->median_s : 0;
}

void print_case(const BenchResult &result, const BenchCase &bench, int threads, const std::set<std::string> &missing) {
    std::string read;
    if (result.read > 0)
        read = fmt::format(", reading {:.1f} GB/s, {} cop{} of K and V", result.read, bench.shared->copies(),
                           bench.shared->copies() == 1 ? "y" : "ies");
    fmt::print("{}\n{} thread{}, peak {:.0f} GFLOP/s{}, attune against itself {:.3f}{}\n\n", to_string(bench.problem),
               threads, threads == 1 ? "" : "s", result.peak, read, self_ratio(result),
               noise(result) > kQuiet ? " (noisy: 1.00 ± 0.02 expected)" : "");
    const auto left = Table::Align::left, right = Table::Align::right;
    Table table({{"", left},
                 {"median", right},
                 {"min", right},
                 {"p90", right},
                 {result.read > 0 ? "GB/s" : "GFLOP/s", right},
                 {result.read > 0 ? "of reading" : "of peak", right},
                 {"attune is", right},
                 {"memory", right},
                 {"allocs", right},
                 {"max error", right},
                 {"", left}});
    std::vector<const ResultRow *> order;
    std::string notes;
    for (const ResultRow &row : result.rows) {
        if (row.median_s)
            order.push_back(&row);
        else if (!missing.contains(row.impl))
            notes += fmt::format("cannot  {}: {}\n", peer_title(row.impl), row.why_not);
        if (row.median_s && !row.ok) notes += fmt::format("WRONG   {}: {}\n", peer_title(row.impl), row.why_not);
        if (row.median_s && row.ok && !row.why_not.empty())
            notes += fmt::format("less exact  {}: {}\n", peer_title(row.impl), row.why_not);
    }
    std::stable_sort(order.begin(), order.end(),
                     [](const auto *a, const auto *b) { return *a->median_s < *b->median_s; });
    const ResultRow *own = row_of(result.rows, "attune");
    for (const ResultRow *row : order) {
        const bool is_attune = row->impl == "attune" || row->impl == kAttuneAgain;
        table.add(
            {peer_title(row->impl), format_seconds(*row->median_s), format_seconds(*row->min_s),
             format_seconds(*row->p90_s), fmt::format("{:.1f}", result.read > 0 ? *row->gbps : *row->gflops),
             fmt::format("{:.1f} %", result.read > 0 ? 100 * *row->gbps / result.read : row->pct_peak.value_or(0)),
             is_attune || !own ? "" : fmt::format("{:.2f}×", *row->median_s / *own->median_s),
             row->rss_growth_bytes ? format_bytes(double(*row->rss_growth_bytes)) : "",
             row->allocs_per_call ? fmt::format("{:.3g}", *row->allocs_per_call) : "–",
             format_error(row->max_err.value_or(0)),
             !row->ok                ? "WRONG"
             : row->impl == "attune" ? row->kernel
                                     : row->how});
    }
    fmt::print("{}{}\n", table.size() ? table.text() : "", notes);
}

struct Line { // of the summary
    std::string case_text;
    int threads;
    BenchResult result;
};

void print_summary(const std::vector<Line> &lines, bool peers) {
    if (lines.size() < 2) return;
    const auto left = Table::Align::left, right = Table::Align::right;
    Table table({{"case", left},
                 {"threads", right},
                 {"attune", right},
                 {"of peak", right},
                 {peers ? "best peer" : "", left},
                 {peers ? "attune is" : "", right},
                 {"itself", right}});
    double logs = 0, least = INFINITY;
    int count = 0;
    for (const Line &line : lines) {
        const ResultRow *own = row_of(line.result.rows, "attune"), *best = best_peer(line.result.rows);
        const double ratio = lead(line.result), read = line.result.read;
        table.add({line.case_text, std::to_string(line.threads),
                   !own       ? "–"
                   : read > 0 ? fmt::format("{:.1f} GB/s", *own->gbps)
                              : fmt::format("{:.1f} GFLOP/s", *own->gflops),
                   !own       ? ""
                   : read > 0 ? fmt::format("{:.1f} % r", 100 * *own->gbps / read)
                              : fmt::format("{:.1f} %", own->pct_peak.value_or(0)),
                   best ? peer_title(best->impl) : "", ratio > 0 ? fmt::format("{:.2f}×", ratio) : "",
                   fmt::format("{:.3f}", self_ratio(line.result))});
        if (ratio <= 0) continue;
        logs += std::log(ratio);
        least = std::min(least, ratio);
        ++count;
    }
    fmt::print("{}", table.text());
    if (count > 0)
        fmt::print("attune over the best peer: {:.2f}× in the geometric mean of {}, {:.2f}× at least\n",
                   std::exp(logs / count), count, least);
    fmt::print("% r: of the read loop on the same arrays\n");
}

class Bench {
  public:
    Bench(const Options &options, const std::vector<Case> &cases)
        : options_(options), cases_(cases), machine_(detect_machine()), contestants_(make_contestants(options)) {}

    // Exit status: 1 if attune was wrong somewhere or did not run.
    int run() {
        const DeferredInterrupts deferred;
        bool interrupted = false;
        fmt::print("{}, {} core{}, {}\n\n", machine_.cpu, machine_.cores, machine_.cores == 1 ? "" : "s", attune_isa());
        for (const auto &c : contestants_)
            if (!c->spec().missing.empty()) {
                missing_.insert(c->spec().impl);
                fmt::print("without {}: {}\n", peer_title(c->spec().impl), c->spec().missing);
            }
        fmt::print("{}", missing_.empty() ? "" : "\n");
        std::fflush(stdout);
        try {
            const auto threads = options_.common.thread_counts();
            size_t done = 0;
            for (const Case &c : cases_) {
                const BenchCase bench(c, machine_, options_.common.seed);
                for (int t : threads) {
                    measure(bench, t, double(done++) / double(cases_.size() * threads.size()));
                    if (DeferredInterrupts::requested()) throw Interrupted();
                }
            }
        } catch (const Interrupted &) {
            interrupted = true;
        }
        contestants_.clear(); // ends the processes
        print_summary(lines_, options_.peers);
        if (interrupted) {
            fmt::print(stderr, "attune: interrupted after {} of {} measurements{}\n", lines_.size(),
                       cases_.size() * options_.common.thread_counts().size(),
                       options_.common.json.empty() || lines_.empty() ? "" : ", which are in " + options_.common.json);
            return 128 + DeferredInterrupts::signal();
        }
        return wrong_ ? 1 : 0;
    }

  private:
    void measure(const BenchCase &bench, int threads, double done) {
        Progress progress(fmt::format("{} {} threads", to_string(bench.problem), threads), 1.0);
        PeerBenchOptions o;
        o.rounds = options_.rounds;
        o.time_limit = options_.time_limit;
        o.seed = options_.common.seed;
        o.progress = [&](double share, const std::string &name) {
            progress.update(share, fmt::format("{} (suite {:.0f} %)", name, 100 * done));
        };
        BenchResult best;
        for (int attempt = 0; attempt < options_.attempts; ++attempt) {
            BenchResult result = bench_case(bench, contestants_, machine_, threads, o);
            if (attempt == 0 || noise(result) < noise(best)) best = std::move(result);
            if (noise(best) <= kQuiet || std::isinf(noise(best))) break;
        }
        progress.finish();
        print_case(best, bench, threads, missing_);
        std::fflush(stdout);
        const ResultRow *own = row_of(best.rows, "attune");
        wrong_ = wrong_ || !own || !own->ok;
        calibration_.peak_f32 = std::max(
            calibration_.peak_f32, bench.problem.dtype == ATTUNE_F32 && threads == machine_.cores ? best.peak : 0);
        rows_.insert(rows_.end(), best.rows.begin(), best.rows.end());
        lines_.push_back({to_string(bench.problem), threads, std::move(best)});
        if (!options_.common.json.empty()) write(); // after each case: whatever happens next, this is known
    }

    void write() {
        if (calibration_.read == 0) {
            calibration_.read = measure_read_gbps(machine_, machine_.cores);
            calibration_.peak_bf16 = measure_peak_gflops(machine_, ATTUNE_BF16, machine_.cores);
            calibration_.peak_f32 =
                std::max(calibration_.peak_f32, measure_peak_gflops(machine_, ATTUNE_F32, machine_.cores));
        }
        write_json(options_.common.json, to_json(machine_, attune_isa(), calibration_, rows_));
    }

    const Options &options_;
    const std::vector<Case> &cases_;
    Machine machine_;
    std::vector<std::unique_ptr<Remote>> contestants_;
    std::vector<Line> lines_;
    std::vector<ResultRow> rows_;
    Calibration calibration_;
    std::set<std::string> missing_; // peers that are not installed
    bool wrong_ = false;
};

void run_bench(const Options &options, Status &status) {
    options.common.check_json();
    if (!options.common.strategies.empty())
        fail("--strategy: bench takes the planner's own choice; expected compare for single strategies");
    if (parse_device(options.common.device) != ATTUNE_CPU)
        fail("--device={}: bench measures the CPU; expected compare --device for others", options.common.device);
    if (options.rounds < 1) fail("--rounds={}: expected at least 1", options.rounds);
    if (options.attempts < 1) fail("--attempts={}: expected at least 1", options.attempts);
    if (!(options.time_limit > 0)) fail("--time-limit={}: expected seconds above 0", options.time_limit);
    if (!(options.peer_limit > 0)) fail("--peer-limit={}: expected seconds above 0", options.peer_limit);
    if (!options.impls.empty() && !options.peers) fail("--peer: only with --peers");
    std::vector<Case> cases = options.common.cases();
    if (cases.empty() || !options.suite.empty()) {
        const Suite suite = load_suite(options.suite.empty() ? "cpu-f32" : options.suite);
        cases.insert(cases.end(), suite.cases.begin(), suite.cases.end());
    }
    status.code = Bench(options, cases).run();
}

} // namespace

void add_bench(CLI::App &app, Status &status) {
    auto options = std::make_shared<Options>();
    CLI::App *command = app.add_subcommand("bench", "A suite of cases, attune beside other libraries, checked");
    options->common.add_to(*command);
    command->add_option("--suite", options->suite, "A suite's name or file (default cpu-f32, unless --case is given)")
        ->type_name("NAME");
    command->add_flag("--peers", options->peers, "Measure the installed peers too");
    command->add_option("--peer", options->impls, "Only these peers, e.g. torch_sdpa,openvino")
        ->type_name("A,B")
        ->delimiter(',')
        ->allow_extra_args(false);
    command->add_option("--rounds", options->rounds, "Samples of each contestant, at most (default 11)")
        ->type_name("N");
    command
        ->add_option("--time-limit", options->time_limit,
                     "Seconds of samples for each contestant and case (default 1.5)")
        ->type_name("SECONDS");
    command
        ->add_option("--attempts", options->attempts,
                     "A case is measured again, so often at most, while attune against itself is not 1.00 ± 0.02 "
                     "(default 2)")
        ->type_name("N");
    command
        ->add_option("--peer-limit", options->peer_limit,
                     "Seconds after which a peer that does not answer is ended (default 300)")
        ->type_name("SECONDS");
    command->footer(
        "Each contestant is a process of its own. They take turns, A B C A B C …; all but the one that runs are\n"
        "stopped. Results are checked against float64. Exit status 1 if attune is wrong somewhere.\n\n"
        "  attune bench --suite cpu-f32 --peers --threads 1,2 --json result.json\n"
        "  attune bench --case f32:b1:h8:n1024:d64:causal --peers\n\n" +
        case_syntax());
    command->callback([options, &status] { run_bench(*options, status); });
}

} // namespace attune::tools
