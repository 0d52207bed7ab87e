// attune explain: one case, the kernel that is chosen for it, why, where its time goes, and how far from the machine's
// limits it is.
#include "commands.h"

#include "lib/bench.h"
#include "lib/error.h"
#include "lib/manifest.h"
#include "lib/numbers.h"
#include "lib/profile.h"
#include "lib/remote.h"

#include <algorithm>
#include <sstream>

namespace attune::tools {
namespace {

using nlohmann::json;

struct Options {
    CommonOptions common;
    std::string case_text, kernel;
    bool all = false;
    double seconds = 1;
};

// The case's arrays, with as many copies as bench would rotate over.
struct Arrays {
    std::vector<std::unique_ptr<Inputs>> copies;

    Arrays(const Case &c, uint64_t seed, int count) {
        InputOptions options;
        options.seed = seed;
        options.huge_pages = true;
        for (int i = 0; i < count; ++i) copies.push_back(std::make_unique<Inputs>(c, options));
    }

    std::vector<std::span<const std::byte>> keys_and_values() const {
        std::vector<std::span<const std::byte>> all;
        for (const auto &copy : copies)
            for (const attune_tensor *t : {&copy->tensors().k, &copy->tensors().v})
                all.emplace_back(static_cast<const std::byte *>(t->data),
                                 size_t(t->shape[0] * t->shape[1] * t->shape[2] * t->shape[3]) * dtype_size(t->dtype));
        return all;
    }
};

// A plan, its workspace, and calls of it, which go through the copies in turn.
class Subject {
  public:
    Subject(Arrays &arrays, const std::string &kernel, const std::string &strategy, int threads)
        : arrays_(arrays), plan_(make_plan(arrays.copies[0]->problem(), kernel, strategy, threads, why_)) {
        if (plan_) workspace_ = Buffer(attune_plan_workspace(plan_.get()), Guard::none);
    }
    explicit operator bool() const { return plan_ != nullptr; }
    const std::string &why() const { return why_; }
    const attune_plan *plan() const { return plan_.get(); }
    const attune_kernel *kernel() const { return attune_find_kernel(attune_plan_kernel(plan_.get())); }

    void run() {
        const attune_tensors &tensors = arrays_.copies[next_]->tensors();
        next_ = (next_ + 1) % arrays_.copies.size();
        if (attune_run(plan_.get(), &tensors, workspace_.data(), workspace_.size()) != ATTUNE_OK)
            fail("{}: {}", attune_plan_kernel(plan_.get()), attune_last_error());
    }

    // Seconds of each phase, the median of several calls.
    std::vector<std::pair<std::string, double>> phases(int calls) {
        const attune_kernel &k = *kernel();
        std::vector<std::vector<double>> samples(size_t(k.num_phases));
        for (int call = 0; call < calls; ++call) {
            run();
            double seconds[16] = {};
            const int64_t count = std::min<int64_t>(attune_last_phase_seconds(seconds, 16), k.num_phases);
            for (int64_t i = 0; i < count; ++i) samples[size_t(i)].push_back(seconds[i]);
        }
        std::vector<std::pair<std::string, double>> out;
        for (int64_t i = 0; i < k.num_phases; ++i) out.emplace_back(k.phases[i].name, median(samples[size_t(i)]));
        return out;
    }

  private:
    Arrays &arrays_;
    std::string why_;
    Plan plan_;
    Buffer workspace_;
    size_t next_ = 0;
};

void line(const std::string &name, const std::string &text) {
    fmt::print("{:<11}{}\n", name, text);
}

// The lines of the plan's own explanation: the first few, or all.
void print_choice(const Subject &subject, bool all) {
    const attune_kernel &k = *subject.kernel();
    line("kernel", fmt::format("{} ({}, made by {}, {})", k.name, k.strategy, k.backend, k.isa));
    if (k.why && *k.why) line("", k.why);
    std::istringstream lines(attune_plan_explain(subject.plan()));
    constexpr size_t kFew = 6;
    size_t shown = 0, hidden = 0;
    for (std::string text; std::getline(lines, text);) {
        if (all || shown < kFew)
            line(shown++ ? "" : "choice", text);
        else
            ++hidden;
    }
    if (hidden) line("", fmt::format("and {} more (--all)", hidden));
}

struct Roofline {
    double flops, bytes, peak, read, seconds;

    double intensity() const { return flops / bytes; }
    double balance() const { return peak / read; } // operations that the units do while a byte is read
    double limit() const { return std::max(flops / (peak * 1e9), bytes / (read * 1e9)); }
    bool reads() const { return intensity() < balance(); }
};

void print_roofline(const Roofline &r, const Case &c, size_t copies) {
    const double rate = r.flops / r.seconds * 1e-9;
    line(
        "work",
        fmt::format("{:.4g} GFLOP of use: 2 (d_k + d_v) for {:.4g} visible pairs; {:.4g} MB to read and write at least",
                    r.flops * 1e-9, double(visible_pairs(c)) * double(c.Hq), r.bytes * 1e-6));
    line("machine", fmt::format("{:.0f} GFLOP/s, reading {:.1f} GB/s{}: {:.1f} operations a byte are in balance",
                                r.peak, r.read, reads_memory(c) ? " on the same arrays" : "", r.balance()));
    line("roofline", fmt::format("{:.3g} operations a byte: the limit is {}, {}", r.intensity(),
                                 r.reads() ? "reading" : "the multiply-add units", format_seconds(r.limit())));
    line("measured", fmt::format("{}: {:.1f} GFLOP/s, {:.1f} GB/s{}; {:.1f} % of the limit", format_seconds(r.seconds),
                                 rate, r.bytes / r.seconds * 1e-9,
                                 copies > 1 ? fmt::format(" ({} copies of K and V in turn)", copies) : "",
                                 100 * r.limit() / r.seconds));
}

void print_phases(const std::string &title, const std::vector<std::pair<std::string, double>> &phases) {
    double total = 0;
    for (const auto &[name, seconds] : phases) total += seconds;
    std::string text;
    for (const auto &[name, seconds] : phases)
        text += fmt::format("{}{} {} ({:.0f} %)", text.empty() ? "" : ", ", name, format_seconds(seconds),
                            total > 0 ? 100 * seconds / total : 0);
    line(title, text);
}

void print_profile(const Profile &profile) {
    if (!profile.missing.empty()) {
        line("inside", profile.missing);
        return;
    }
    const std::pair<const char *, const char *> meanings[] = {
        {"matmul", "loops of multiply-adds: both products"},
        {"softmax", "loops that take maxima and exponentials"},
        {"moving", "other innermost loops: packing, copying, merging"},
        {"between", "the kernel outside its innermost loops"},
        {"around", "adapters, the run, the C library"}};
    for (size_t i = 0; i < profile.parts.size(); ++i)
        line(i ? "" : "inside", fmt::format("{:5.1f} %  {:<8} {}", 100 * profile.parts[i].share, profile.parts[i].name,
                                            meanings[i].second));
    line("", fmt::format("({} samples on one thread)", profile.samples));
    Table table({{"", Table::Align::right},
                 {"loop", Table::Align::left},
                 {"instructions", Table::Align::right},
                 {"FMAs", Table::Align::right},
                 {"loads", Table::Align::right},
                 {"at", Table::Align::left}});
    for (const auto &hot : profile.loops) {
        if (hot.share < 0.01 || table.size() == 10) break;
        table.add({fmt::format("{:.1f} %", 100 * hot.share), loop_kind_name(hot.loop.kind),
                   std::to_string(hot.loop.instructions), std::to_string(hot.loop.fma), std::to_string(hot.loop.loads),
                   fmt::format("{:x} in {}", hot.loop.begin, hot.function)});
    }
    if (table.size()) fmt::print("\n{}\n", table.text());
}

json phases_json(const std::vector<std::pair<std::string, double>> &phases) {
    json list = json::array();
    for (const auto &[name, seconds] : phases) list.push_back({{"name", name}, {"median_s", seconds}});
    return list;
}

void run_explain(const Options &options, Status &status) {
    options.common.check_json();
    if (!options.common.case_texts.empty()) fail("--case: expected the case as attune explain's argument");
    if (parse_device(options.common.device) != ATTUNE_CPU)
        fail("--device={}: expected cpu, whose limits are known here", options.common.device);
    if (options.common.strategies.size() > 1)
        fail("--strategy: {} names; expected at most one", options.common.strategies.size());
    if (!(options.seconds > 0)) fail("--seconds={}: expected seconds above 0", options.seconds);
    options.common.filter();
    const Case c = parse_case(options.case_text);
    for (int t : options.common.thread_counts()) load_tuned_for(c, t);
    const Machine machine = detect_machine();
    const std::string strategy = options.common.strategies.empty() ? "" : options.common.strategies[0];
    Arrays arrays(c, options.common.seed, copies_needed(c, machine));
    const Reference reference = make_reference(arrays.copies[0]->problem(), arrays.copies[0]->tensors());
    json list = json::array();
    for (int threads : options.common.thread_counts()) {
        Subject subject(arrays, options.kernel, strategy, threads);
        if (!subject) fail("{}", subject.why());
        fmt::print("{}\n{} thread{}\n\n", to_string(c), threads, threads == 1 ? "" : "s");
        print_choice(subject, options.all);

        subject.run();
        const Verdict verdict = check_outputs(reference, arrays.copies[0]->tensors());
        if (!verdict.ok) {
            status.code = 1;
            line("WRONG", verdict.why);
        }
        const auto phases = subject.phases(5);
        const double before = measure_peak_gflops(machine, c.dtype, threads);
        const double read = reads_memory(c) ? measure_read_gbps(machine, threads, arrays.keys_and_values())
                                            : measure_read_gbps(machine, threads);
        Contestant contestant{subject.kernel()->name, [&] {
                                  subject.run();
                                  return true;
                              }};
        BenchOptions bench;
        bench.time_limit = options.seconds;
        bench.calls_multiple = int(arrays.copies.size());
        const auto measured = measure_interleaved({contestant}, bench);
        const double peak = std::max(before, measure_peak_gflops(machine, c.dtype, threads));
        const Roofline roofline{useful_flops(c), least_bytes(c), peak, read, statistics(measured[0].samples).median};
        print_roofline(roofline, c, arrays.copies.size());
        print_phases("phases", phases);

        Profile profile;
        Subject alone(arrays, subject.kernel()->name, "", 1); // the calling thread is the one that is sampled
        if (alone) {
            std::vector<std::string> prefixes;
            try {
                for (const auto &phase : manifest_phases(manifest_path(), subject.kernel()->name))
                    prefixes.push_back(phase.function);
            } catch (const Error &e) {
                profile.missing = e.what();
            }
            if (profile.missing.empty()) profile = profile_calls([&] { alone.run(); }, prefixes, options.seconds);
        }
        print_profile(profile);

        std::vector<std::pair<std::string, double>> stages;
        std::string stagewise;
        if (Subject plain(arrays, "", "stagewise", threads);
            plain && subject.kernel()->strategy != std::string("stagewise")) {
            plain.run();
            stages = plain.phases(3);
            stagewise = plain.kernel()->name;
            print_phases("stages", stages);
            line("", fmt::format("of {}, where each stage is a pass of its own", stagewise));
        }
        fmt::print("\n");

        json parts = json::object(), loops = json::array();
        for (const auto &part : profile.parts) parts[part.name] = part.share;
        for (const auto &hot : profile.loops)
            loops.push_back({{"function", hot.function},
                             {"kind", loop_kind_name(hot.loop.kind)},
                             {"share", hot.share},
                             {"instructions", hot.loop.instructions},
                             {"fma", hot.loop.fma},
                             {"loads", hot.loop.loads}});
        list.push_back({{"case", to_string(c)},
                        {"threads", threads},
                        {"kernel", subject.kernel()->name},
                        {"choice", attune_plan_explain(subject.plan())},
                        {"median_s", roofline.seconds},
                        {"flops", roofline.flops},
                        {"bytes", roofline.bytes},
                        {"peak_gflops", roofline.peak},
                        {"read_gbps", roofline.read},
                        {"limit_s", roofline.limit()},
                        {"limit", roofline.reads() ? "reading" : "multiply-adds"},
                        {"phases", phases_json(phases)},
                        {"profile", {{"samples", profile.samples}, {"parts", parts}, {"loops", loops}}},
                        {"stagewise", {{"kernel", stagewise}, {"phases", phases_json(stages)}}}});
    }
    if (!options.common.json.empty()) {
        json file = to_json(machine, attune_isa(), {}, {});
        file.erase("rows");
        file["explained"] = std::move(list);
        write_json(options.common.json, file);
    }
}

} // namespace

void add_explain(CLI::App &app, Status &status) {
    auto options = std::make_shared<Options>();
    CLI::App *command = app.add_subcommand("explain", "Which kernel a case gets, why, and where its time goes");
    command->add_option("CASE", options->case_text, "A problem, e.g. f32:b1:h8:n1024:d64:causal")
        ->required()
        ->type_name("");
    options->common.add_to(*command);
    command->add_option("--kernel", options->kernel, "This kernel in place of the planner's choice")->type_name("NAME");
    command->add_flag("--all", options->all, "What the planner says about every kernel");
    command->add_option("--seconds", options->seconds, "Of measuring, and of sampling (default 1)")
        ->type_name("SECONDS");
    command->footer(
        "roofline: the larger of useful operations / peak and least bytes / read bandwidth, both measured here and "
        "now.\n"
        "phases: the kernel's own, one after the other. inside: samples of the kernel as it runs, put to the "
        "innermost\n"
        "loops of its machine code (needs nm and objdump). stages: of the stagewise kernel on the same case.\n\n"
        "  attune explain f32:b1:h8:n1024:d64:causal\n"
        "  attune explain f32:b1:h32/8:n1:m4096:d128 --threads 1,2\n\n" +
        case_syntax());
    command->callback([options, &status] { run_explain(*options, status); });
}

} // namespace attune::tools
