// attune tune: searches strategies and their knobs for a problem on this machine, and keeps what it finds.
// docs/tuning.md describes the search and the store.
#include "commands.h"

#include "lib/case_list.h"
#include "lib/defaults.h"
#include "lib/error.h"
#include "lib/manifest.h"
#include "lib/searchers.h"
#include "lib/tune_store.h"
#include "lib/tuner.h"

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <map>

namespace attune::tools {
namespace {

using nlohmann::json;

struct Options {
    CommonOptions common;
    std::vector<std::string> positional;
    std::string effort = "quick", export_file, cases_file, model_file, defaults_file;
    double budget = 0, build_limit = 60;
    bool dry_run = false, again = false, compare = false;
};

constexpr std::pair<const char *, double> kEfforts[] = {{"quick", 60}, {"full", 900}};

double budget_of(const Options &o) {
    if (o.budget != 0) {
        if (!(o.budget >= 1)) fail("--budget={}: expected at least 1 second", o.budget);
        return o.budget;
    }
    for (const auto &[name, seconds] : kEfforts)
        if (o.effort == name) return seconds;
    fail("--effort={}: unknown; expected quick or full", o.effort);
}

// With commas, as large numbers of points are read.
std::string grouped(int64_t n) {
    const std::string digits = std::to_string(n);
    std::string text;
    for (size_t i = 0; i < digits.size(); ++i) {
        if (i && (digits.size() - i) % 3 == 0) text += ',';
        text += digits[i];
    }
    return text;
}

// The constraint to name where nothing is left: the last one that removed something.
std::string emptied_by(const TuningSpace &space) {
    std::string text = "no constraint";
    for (const auto &[constraint, count] : space.removed)
        if (count > 0) text = constraint;
    return text;
}

void print_spaces(const std::vector<TuningSpace> &spaces) {
    for (const TuningSpace &s : spaces) {
        fmt::print("{}, {}: {} points\n", s.strategy, s.backend, grouped(s.total));
        for (const auto &[text, count] : s.removed)
            if (count > 0) fmt::print("{:>11}  {}\n", grouped(count), text);
        fmt::print("{:>11}  left{}\n", grouped(int64_t(s.points.size())),
                   s.points.empty() ? fmt::format(": emptied by '{}'", emptied_by(s)) : "");
    }
}

void check_not_empty(const std::vector<TuningSpace> &spaces, const Case &c) {
    std::string why;
    for (const TuningSpace &s : spaces) {
        if (!s.points.empty()) return;
        why += fmt::format("\n  {}: emptied by '{}'", s.strategy, emptied_by(s));
    }
    fail("{}: the space is empty; expected at least one point:{}", to_string(c), why);
}

void dry_run(const Case &c, const Options &o) {
    const Setting setting = setting_of(c, detect_machine());
    const auto spaces = tuning_spaces(find_toolchain(), c, setting, o.common.strategies);
    fmt::print("{}: {}, {} lanes, {} registers, L1 {}, L2 {}\n", to_string(c), setting.isa, setting.lanes,
               setting.registers, format_bytes(double(setting.l1)), format_bytes(double(setting.l2)));
    print_spaces(spaces);
    fmt::print("\nthe first points with --seed {}:\n", o.common.seed);
    for (const DrawnPoint &p : drawn_points(spaces, o.common.seed, 8))
        fmt::print("  {:<14}{}\n", spaces[p.space].strategy, spaces[p.space].text(p.point));
    check_not_empty(spaces, c);
}

void line(const std::string &name, const std::string &text) {
    fmt::print("{:<10}{}\n", name, text);
}

std::string tried(const TuneResult &r) {
    std::map<std::string, int> by_status;
    for (const Trial &t : r.trials) ++by_status[t.status];
    std::string text = fmt::format("{} in {:.0f} s:", r.trials.size(), r.seconds);
    for (const auto &[status, words] : {std::pair{"right", "right"},
                                        {"slow", "slower than 3 x the best"},
                                        {"not built", "not built"},
                                        {"wrong", "wrong"},
                                        {"crashed", "crashed"}})
        if (by_status[status]) text += fmt::format(" {} {},", by_status[status], words);
    text.pop_back();
    return text;
}

// One case with one number of threads. False: something was found and could not be kept.
bool tune_one(const Case &c, int threads, double budget, const Options &o, json &results) {
    fmt::print("{}, {} thread{}, seed {}, {:.0f} s\n", to_string(c), threads, threads == 1 ? "" : "s", o.common.seed,
               budget);
    json known = o.again ? json::object() : read_trials(c, threads);
    if (known.contains("done") && known["done"].value("budget", 0.0) >= budget && o.common.strategies.empty()) {
        const json &done = known["done"];
        const std::string library = done.at("library"), kernel = done.at("kernel");
        if (library.empty() ? attune_find_kernel(kernel.c_str()) != nullptr : std::filesystem::exists(library)) {
            rt::TuningEntry e{rt::bucket_of(to_problem(c), threads),
                              rt::sources_hash(),
                              kernel,
                              library,
                              to_string(c),
                              done.at("gain")};
            if (!stored_result(c, threads)) store_result(e);
            line("stored", fmt::format("{}, {:.2f} x the default; --again searches anew", kernel, e.speedup));
            results.push_back(known);
            return true;
        }
    }
    TuneOptions options;
    options.threads = threads;
    options.seed = o.common.seed;
    options.budget = budget;
    options.build_limit = o.build_limit;
    options.strategies = o.common.strategies;
    json saved = known;
    options.save = [&](const json &trials) {
        saved = trials;
        write_trials(c, threads, trials);
    };
    TuneResult r;
    {
        Progress progress("tune", budget);
        options.progress = [&](double done, const std::string &note) { progress.update(std::min(done, budget), note); };
        const DeferredInterrupts interrupts;
        r = tune(c, options, known);
    }
    int64_t total = 0, left = 0;
    for (const TuningSpace &s : r.spaces) total += s.total, left += int64_t(s.points.size());
    line("space", fmt::format("{} strategies, {} points, {} left (--dry-run tells what removed the others)",
                              r.spaces.size(), grouped(total), grouped(left)));
    line("tried", tried(r));
    if (r.interrupted) {
        line("", "interrupted: the same command goes on from here");
        results.push_back(saved);
        return true;
    }
    line("default", fmt::format("{}  {}", r.default_kernel, format_seconds(r.default_seconds)));
    if (r.best)
        line("best", fmt::format("{}  {}  {:.3f} x ± {:.3f}", r.best->name, format_seconds(r.best_seconds), r.gain.mean,
                                 r.gain.error));
    else
        line("best", "the default: nothing is faster by more than 1 % and the noise");
    rt::TuningEntry e{
        rt::bucket_of(to_problem(c), threads), rt::sources_hash(), r.best ? r.best->name : r.default_kernel,
        r.best ? r.best->library : "",         to_string(c),       r.best ? r.gain.mean : 1};
    saved["done"] = {{"budget", budget},
                     {"kernel", e.kernel},
                     {"library", e.library},
                     {"gain", e.speedup},
                     {"error", r.best ? r.gain.error : 0},
                     {"seconds", r.seconds},
                     {"default_s", r.default_seconds},
                     {"best_s", r.best_seconds}};
    saved["flops"] = useful_flops(c);
    saved["peak_gflops"] = measure_peak_gflops(detect_machine(), c.dtype, threads);
    results.push_back(saved);
    try {
        store_result(e);
        if (o.common.strategies.empty())
            write_trials(c, threads, saved); // of the whole space only: a part of it is not done
        line("stored", rt::tuning_path());
    } catch (const Error &error) {
        fmt::print(stderr, "attune: the result is not kept: {}\n", error.what());
        return false;
    }
    return true;
}

// Searches beside one another, from scratch, each with the whole budget. Nothing is stored.
void compare_searchers(const Case &c, int threads, double budget, const Options &o, json &results) {
    fmt::print("{}, {} thread{}, seed {}, {:.0f} s for each search\n", to_string(c), threads, threads == 1 ? "" : "s",
               o.common.seed, budget);
    Table table({{"search", Table::Align::left},
                 {"tried", Table::Align::right},
                 {"at 1/4", Table::Align::right},
                 {"at 1/2", Table::Align::right},
                 {"at the end", Table::Align::right},
                 {"best", Table::Align::left}});
    json list = json::array();
    for (const Searcher &s : searchers()) {
        const TemporaryFolder folder;
        TuneOptions options;
        options.threads = threads;
        options.seed = o.common.seed;
        options.budget = budget;
        options.build_limit = o.build_limit;
        json trials;
        options.save = [&](const json &known) { trials = known; };
        TuneResult r;
        {
            Progress progress(s.name, budget);
            options.progress = [&](double done, const std::string &note) {
                progress.update(std::min(done, budget), note);
            };
            const DeferredInterrupts interrupts;
            r = run_searcher(s.name, c, options, folder.file("kernels"));
        }
        const auto best = [&](double share) { return fmt::format("{:.3f} x", best_until(r, share * budget)); };
        const Trial *winner = nullptr;
        for (const Trial &t : r.trials)
            if (t.status == "right" && (!winner || t.gain > winner->gain)) winner = &t;
        table.add(
            {s.name, std::to_string(r.trials.size()), best(0.25), best(0.5), best(10), winner ? winner->name : ""});
        list.push_back({{"name", s.name},
                        {"about", s.about},
                        {"budget", budget},
                        {"trials", trials.value("trials", json::array())}});
        if (r.interrupted) break;
    }
    fmt::print("{}", table.text());
    results.push_back({{"case", to_string(c)}, {"threads", threads}, {"searchers", list}});
}

std::vector<WeightedCase> cases_of(const Options &o) {
    std::vector<WeightedCase> cases;
    for (const auto *texts : {&o.positional, &o.common.case_texts})
        for (const std::string &text : *texts) cases.push_back({parse_case(text), 1});
    if (!o.cases_file.empty())
        for (WeightedCase &w : read_cases(o.cases_file)) cases.push_back(std::move(w));
    if (!o.model_file.empty())
        for (WeightedCase &w : model_cases(o.model_file)) cases.push_back(std::move(w));
    return cases;
}

// The ranking that the build takes, ordered anew by what these cases take.
void write_defaults(const std::vector<WeightedCase> &cases, const Options &o) {
    const std::string path = o.defaults_file;
    const auto ranking = nlohmann::ordered_json::parse(read_file(path), nullptr, false);
    if (!ranking.is_object() || !ranking.contains("rules"))
        fail("--defaults={}: has no rules; expected a ranking, as generators/catalogue/ranking.json is one", path);
    std::vector<Observation> observations;
    Progress progress("measuring", double(cases.size()));
    for (size_t i = 0; i < cases.size(); ++i)
        for (int threads : o.common.thread_counts()) {
            progress.update(double(i), to_string(cases[i].c));
            for (Observation &x : observe(cases[i].c, threads, o.common.seed)) {
                x.case_text += fmt::format(" {}", threads);
                observations.push_back(std::move(x));
            }
        }
    progress.finish();
    const auto written = ranked(ranking, observations);
    std::string text =
        "{\n  \"about\": " + written.value("about", nlohmann::ordered_json()).dump() + ",\n  \"rules\": [\n";
    for (size_t i = 0; i < written["rules"].size(); ++i) {
        const auto &rule = written["rules"][i];
        std::string line;
        for (const auto &[key, value] : rule.items()) {
            if (key != "strategies") {
                line += fmt::format("\"{}\": {}, ", key, value.dump());
                continue;
            }
            std::string names;
            for (const auto &name : value) names += (names.empty() ? "" : ", ") + name.dump();
            line += fmt::format("\"strategies\": [{}]", names);
        }
        text += fmt::format("    {{{}}}{}\n", line, i + 1 < written["rules"].size() ? "," : "");
    }
    write_file(path, text + "  ]\n}\n");
    fmt::print("{}: ranked by {} measurements on {} cases\n", path, observations.size(), cases.size());
}

void export_catalogue(const std::string &path) {
    const nlohmann::ordered_json entries = stored_catalogue(find_toolchain().catalogues);
    if (entries.empty())
        fail("--export={}: nothing of this state of the generators is stored in {}; expected a tuned case", path,
             rt::tuning_path());
    write_file(path, entries.dump(1) + "\n");
    fmt::print("{}: {} kernels\n", path, entries.size());
}

} // namespace

void add_tune(CLI::App &app, Status &status) {
    auto options = std::make_shared<Options>();
    CLI::App *command =
        app.add_subcommand("tune", "Searches for the fastest kernel of a case on this machine, and keeps it");
    command
        ->add_option("CASE", options->positional,
                     "A problem, e.g. f32:b1:h8:n1000:d72 (more than one: one after the other)")
        ->type_name("");
    options->common.add_to(*command);
    command
        ->add_option("--cases", options->cases_file,
                     "Cases of a file: a suite of bench, or lines of CASE [COUNT]; time is shared by their weight")
        ->type_name("FILE");
    command
        ->add_option("--model", options->model_file,
                     "The attention shapes of a safetensors file (NAME.q, NAME.k, NAME.v)")
        ->type_name("FILE");
    command
        ->add_option(
            "--defaults", options->defaults_file,
            "Orders the strategies of a ranking (generators/catalogue/ranking.json) by their times on the cases given")
        ->type_name("FILE");
    command->add_option("--effort", options->effort, "quick (60 s a case, the default) or full (900 s)")
        ->type_name("NAME");
    command->add_option("--budget", options->budget, "Seconds a case, in place of --effort")->type_name("SECONDS");
    command
        ->add_option("--build-limit", options->build_limit, "Seconds that building one candidate may take (default 60)")
        ->type_name("SECONDS");
    command->add_flag("--dry-run", options->dry_run, "Only tells what would be searched, and what removed the rest");
    command->add_flag(
        "--compare-searchers", options->compare,
        "Random drawing, this search and Halide's autoschedulers, each with the whole budget; stores nothing");
    command->add_flag("--again", options->again, "Searches anew what is stored already");
    command->add_option("--export", options->export_file, "Writes the stored kernels as a catalogue for attune build")
        ->type_name("FILE");
    command->callback([options, &status] {
        Options &o = *options;
        const auto cases = cases_of(o);
        if (cases.empty() && o.export_file.empty())
            fail("no CASE is given; expected one, --cases FILE, --model FILE, or --export FILE");
        if (parse_device(o.common.device) != ATTUNE_CPU)
            fail("--device={}: expected cpu, which is what can be tuned so far", o.common.device);
        o.common.check_json();
        budget_of(o);
        if (!(o.build_limit > 0)) fail("--build-limit={}: expected more than 0 seconds", o.build_limit);
        if (!o.defaults_file.empty()) {
            write_defaults(cases, o);
            return;
        }
        if (o.dry_run) {
            for (const WeightedCase &w : cases) dry_run(w.c, o);
            return;
        }
        if (!cases.empty()) check_store();
        json results = json::array(), searches = json::array();
        const Machine machine = detect_machine();
        if (!cases.empty()) fmt::print("{}, {} cores, {}\n", machine.cpu, machine.cores, attune_isa());
        double total = 0;
        for (const WeightedCase &w : cases) total += w.weight();
        for (const WeightedCase &w : cases)
            for (int threads : o.common.thread_counts()) {
                if (status.code == 130) break;
                // All cases together take as long as one each would; the time goes to where it is spent.
                const double share = budget_of(o) * double(cases.size()) * w.weight() / total;
                const double budget = cases.size() == 1 ? budget_of(o) : std::clamp(share, 5.0, 900.0);
                if (o.compare) {
                    compare_searchers(w.c, threads, budget, o, searches);
                    continue;
                }
                if (!tune_one(w.c, threads, budget, o, results)) status.code = 1;
                if (!results.back().contains("done")) status.code = 130;
            }
        if (!o.common.json.empty()) {
            json file = to_json(machine, attune_isa(), {}, {});
            file["tuned"] = results;
            file["searchers"] = searches;
            write_json(o.common.json, file);
        }
        if (!o.export_file.empty()) export_catalogue(o.export_file);
    });
}

} // namespace attune::tools
