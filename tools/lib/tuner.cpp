#include "tuner.h"

#include "bench.h"
#include "build_pool.h"
#include "candidate_runner.h"
#include "error.h"
#include "runner.h"
#include "tune_store.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <filesystem>
#include <map>
#include <set>

namespace attune::tools {
namespace {

using nlohmann::json;
using Clock = std::chrono::steady_clock;

constexpr double kCutOff = 3;       // times the best: no further calls
constexpr double kLeastGain = 0.01; // that a winner has over the default, and at least this many standard errors:
constexpr double kErrors = 3;
constexpr int kShortRounds = 5, kRounds = 7, kLastRounds = 25;
constexpr int kRandomChecks = 60;
constexpr int kSampledTurns = 2; // before neighbours are tried

// A knob's value in the parameters of a kernel. MLIR's lists have one for each block of rows: that of the tile counts.
json knob_value(const json &params, const TuningSpace::Knob &knob) {
    if (!params.contains(knob.name)) return {};
    const json &value = params.at(knob.name);
    if (!value.is_string() || knob.name == "blocks") return value;
    const std::string text = value;
    return std::atoll(text.c_str() + text.find_last_of('+') + 1);
}

// How far apart two points are: knobs that differ, then steps.
std::pair<int, int> apart(const TuningSpace::Point &a, const TuningSpace::Point &b) {
    std::pair<int, int> d{0, 0};
    for (size_t i = 0; i < a.size(); ++i) {
        d.first += a[i] != b[i];
        d.second += std::abs(a[i] - b[i]);
    }
    return d;
}

class Search {
  public:
    Search(const Case &c, const TuneOptions &options, const json &known)
        : case_(c), options_(options), known_(known), toolchain_(find_toolchain()), machine_(detect_machine()),
          setting_(setting_of(c, machine_)), short_(shorter(c, options.threads)),
          pool_(toolchain_, std::max(1, machine_.cores), options.build_limit),
          runner_(c, short_, options.threads, options.seed, options.run_limit) {}

    TuneResult run() {
        try {
            begin();
            for (int turn = 0; left() > reserve(); ++turn)
                if (!this->turn(turn)) break;
            finish();
        } catch (const Interrupted &) {
            result_.interrupted = true;
        }
        save();
        result_.seconds = elapsed();
        return std::move(result_);
    }

  private:
    double elapsed() const { return std::chrono::duration<double>(Clock::now() - start_).count(); }
    double left() const { return options_.budget - elapsed(); }
    // For the last comparison; where calls are long, that has fewer rounds.
    double reserve() const {
        return std::min(4 * kLastRounds * std::max(call_seconds_, 3e-3) + 2, 0.3 * options_.budget);
    }
    void show(const std::string &what) {
        if (!options_.progress) return;
        double best = 1;
        for (const Trial &t : result_.trials) best = std::max(best, t.gain);
        options_.progress(elapsed(), fmt::format("best {:.2f} x, {} tried, {:.0f} s left: {}", best,
                                                 result_.trials.size(), std::max(left(), 0.0), what));
    }
    void save() {
        if (!options_.save) return;
        json trials = json::array();
        for (const Trial &t : result_.trials) trials.push_back(t);
        options_.save({{"case", to_string(case_)},
                       {"threads", options_.threads},
                       {"default", result_.default_kernel},
                       {"trials", trials}});
    }

    // Times of the trials on a case, in the same rounds; the first of them is the default.
    void time(const Case &c, std::vector<Trial *> trials, int rounds, bool last) {
        const double each = c == case_ ? std::max(call_seconds_, 2e-3) : 2e-3;
        const double spend = last ? std::max(left(), 12 * each) : std::max(0.15 * options_.budget, 2.0);
        rounds = std::clamp(int(spend / (each * double(trials.size()))), 3, rounds);
        const std::vector<std::vector<double>> samples = runner_.time(c, trials, rounds, 60 + 4 * spend);
        if (samples.empty() || samples[0].empty()) fail("{}: the default cannot be timed", to_string(c));
        for (size_t i = 0; i < trials.size(); ++i) {
            if (samples[i].empty()) continue;
            Trial &t = *trials[i];
            const Ratio r = ratio_of(samples[0], samples[i]);
            (c == case_ ? t.gain : t.short_gain) = r.mean;
            if (c != case_) continue;
            ratios_[t.name] = r;
            medians_[t.name] = median(samples[i]);
        }
        if (c == case_) call_seconds_ = median(samples[0]);
    }

    // --- the turns -----------------------------------------------------------------------------------------------

    Trial &add(Trial t) {
        t.at = elapsed();
        seen_.insert(t.name);
        result_.trials.push_back(std::move(t));
        return result_.trials.back();
    }

    // The default, the other linked kernels, stored results of near cases, and what an earlier search knew.
    void begin() {
        result_.spaces = tuning_spaces(toolchain_, case_, setting_, options_.strategies);
        const attune_problem problem = to_problem(case_);
        show("starting");
        result_.default_kernel = runner_.default_kernel();
        std::vector<std::string> names = {result_.default_kernel};
        for (const attune_kernel *k : all_kernels())
            if (options_.linked && !(k->traits & (ATTUNE_TRAIT_ON_REQUEST | ATTUNE_TRAIT_OWN_THREADS)) &&
                !attune_kernel_refuses(k, &problem) && k->name != result_.default_kernel &&
                (options_.strategies.empty() || std::find(options_.strategies.begin(), options_.strategies.end(),
                                                          k->strategy) != options_.strategies.end()))
                names.push_back(k->name);
        std::vector<Trial *> linked;
        for (const std::string &name : names) {
            const attune_kernel *k = attune_find_kernel(name.c_str());
            Trial t;
            t.name = name;
            t.strategy = k->strategy;
            t.knobs = k->params;
            t.origin = "linked";
            t.status = "right"; // the build's tests have seen to it
            linked.push_back(&add(std::move(t)));
        }
        for (const rt::TuningEntry &e : near_results(case_, options_.threads, options_.stored ? 3 : 0)) {
            const attune_kernel *k = attune_find_kernel(e.kernel.c_str());
            if (k || seen_.count(e.kernel) || !std::filesystem::exists(e.library)) continue;
            Trial t;
            t.name = e.kernel;
            t.library = e.library;
            t.origin = "stored";
            Trial &added = add(std::move(t));
            runner_.check(added);
            if (added.status == "right") linked.push_back(&added);
        }
        compare(linked, 3);
        for (const json &j : known_.value("trials", json::array())) {
            Trial t = j;
            if (seen_.count(t.name) || t.origin == "linked" ||
                (!t.library.empty() && t.status == "right" && !std::filesystem::exists(t.library)))
                continue;
            seen_.insert(t.name);
            result_.trials.push_back(t);
        }
        drawn_ = drawn_points(result_.spaces, options_.seed, 100'000);
        if (options_.linked) seeds_from_linked();
    }

    // On the shorter problem first; the best `most` of them on the whole one.
    void compare(const std::vector<Trial *> &batch, size_t most) {
        std::vector<Trial *> list = {&result_.trials[0]};
        for (Trial *t : batch)
            if (t != list[0]) list.push_back(t);
        if (list.size() == 1 && list[0]->gain > 0) return;
        if (!(short_ == case_)) {
            time(short_, list, kShortRounds, false);
            std::erase_if(list, [](const Trial *t) { return t->status != "right"; });
            std::stable_sort(list.begin() + 1, list.end(),
                             [](const Trial *a, const Trial *b) { return a->short_gain > b->short_gain; });
            if (list.size() > 1 + most) list.resize(1 + most);
            double best = 0;
            for (const Trial &t : result_.trials) best = std::max(best, t.short_gain);
            // What is a tenth behind on the shorter problem is not the best on the whole one.
            std::erase_if(list, [&](const Trial *t) { return t != list[0] && t->short_gain < 0.9 * best; });
        }
        if (list.size() > 1 || list[0]->gain == 0) time(case_, list, kRounds, false);
    }

    // Knobs of linked kernels, at this d, are where the search starts from.
    void seeds_from_linked() {
        for (size_t i = 0; i < result_.spaces.size(); ++i) {
            const TuningSpace &space = result_.spaces[i];
            for (const attune_kernel *k : all_kernels()) {
                if (space.points.empty() || k->strategy != space.strategy || k->isa != setting_.isa ||
                    k->traits & ATTUNE_TRAIT_ON_REQUEST)
                    continue;
                const json params = json::parse(k->params);
                TuningSpace::Point wanted;
                for (const auto &knob : space.knobs) {
                    const auto it = std::find(knob.values.begin(), knob.values.end(), knob_value(params, knob));
                    wanted.push_back(it == knob.values.end() ? -1 : int(it - knob.values.begin()));
                }
                const auto best =
                    std::min_element(space.points.begin(), space.points.end(),
                                     [&](const auto &a, const auto &b) { return apart(a, wanted) < apart(b, wanted); });
                seeds_.push_back({i, *best});
            }
        }
    }

    std::string folder() const { return options_.folder.empty() ? kernels_folder() : options_.folder; }

    Trial candidate_of(const nlohmann::ordered_json &entry) const {
        Trial t;
        t.entry = entry.dump(1);
        t.name = entry.at("name");
        t.strategy = entry.at("strategy");
        t.library = fmt::format("{}/{}.so", folder(), t.name);
        return t;
    }

    std::optional<Trial> candidate(const DrawnPoint &p, const std::string &origin) {
        const TuningSpace &space = result_.spaces[p.space];
        Trial t = candidate_of(catalogue_entry(space, p.point, setting_, case_));
        if (seen_.count(t.name)) return {};
        t.knobs = space.text(p.point);
        t.origin = origin;
        points_[t.name] = p;
        return t;
    }

    std::vector<Trial> next_batch(int turn) {
        std::vector<Trial> batch;
        std::set<std::string> taken;
        // No more than can be built in the time that is left.
        const auto affordable = size_t(std::max((left() - reserve()) / build_seconds_, 1.0));
        const size_t size = std::min(options_.batch, affordable);
        const auto take = [&](const DrawnPoint &p, const char *origin) {
            auto t = candidate(p, origin);
            if (t && taken.insert(t->name).second) batch.push_back(std::move(*t));
        };
        while (!options_.entries.empty() && batch.size() < size && next_entry_ < options_.entries.size()) {
            Trial t = candidate_of(options_.entries[next_entry_++]);
            t.origin = "sampled";
            t.knobs = t.name;
            batch.push_back(std::move(t));
        }
        if (!options_.entries.empty()) return batch;
        while (batch.size() < size && next_seed_ < seeds_.size()) take(seeds_[next_seed_++], "sampled");
        if (options_.neighbours && turn >= kSampledTurns) {
            // Two thirds are neighbours, of the best first.
            const size_t wanted = batch.size() + (size - batch.size()) * 2 / 3;
            for (const Trial *t : best_trials(2))
                if (const auto at = point_of(*t))
                    for (const auto &p : neighbours(*at)) {
                        if (batch.size() >= wanted) break;
                        take(p, "neighbour");
                    }
        }
        while (batch.size() < size && next_drawn_ < drawn_.size()) take(drawn_[next_drawn_++], "sampled");
        return batch;
    }

    std::optional<DrawnPoint> point_of(const Trial &t) const {
        if (const auto it = points_.find(t.name); it != points_.end()) return it->second;
        // From an earlier search, or of a linked kernel whose point is in the space.
        if (t.entry.empty() && t.knobs.empty()) return {};
        for (size_t i = 0; i < result_.spaces.size(); ++i) {
            const TuningSpace &space = result_.spaces[i];
            if (space.strategy != t.strategy) continue;
            const json params =
                t.entry.empty() ? json::parse(t.knobs, nullptr, false) : json::parse(t.entry).at("params");
            TuningSpace::Point point;
            for (const auto &knob : space.knobs) {
                const auto it = std::find(knob.values.begin(), knob.values.end(), knob_value(params, knob));
                if (it == knob.values.end()) return {};
                point.push_back(int(it - knob.values.begin()));
            }
            return DrawnPoint{i, point};
        }
        return {};
    }

    std::vector<DrawnPoint> neighbours(const DrawnPoint &of) const {
        const TuningSpace &space = result_.spaces[of.space];
        std::vector<std::tuple<std::pair<int, int>, uint64_t, const TuningSpace::Point *>> order;
        for (const auto &p : space.points) {
            const auto d = apart(p, of.point);
            if (d.first > 0 && d.first <= 3)
                order.emplace_back(d, mixed(options_.seed, space.strategy + space.text(p)), &p);
        }
        const size_t most = std::min<size_t>(order.size(), 200);
        std::partial_sort(order.begin(), order.begin() + std::ptrdiff_t(most), order.end());
        std::vector<DrawnPoint> list;
        for (size_t i = 0; i < most; ++i) list.push_back({of.space, *std::get<2>(order[i])});
        return list;
    }

    std::vector<Trial *> best_trials(size_t most) {
        std::vector<Trial *> list;
        for (Trial &t : result_.trials)
            if (t.status == "right" && t.gain > 0) list.push_back(&t);
        std::stable_sort(list.begin(), list.end(), [](const Trial *a, const Trial *b) { return a->gain > b->gain; });
        if (list.size() > most) list.resize(most);
        return list;
    }

    bool turn(int number) {
        std::vector<Trial> batch = next_batch(number);
        if (batch.empty()) return false;
        show(fmt::format("building {} candidates", batch.size()));
        std::vector<BuildJob> jobs;
        std::vector<BuildJob *> pointers;
        for (const Trial &t : batch) jobs.push_back({t.entry, t.library, ""});
        for (BuildJob &job : jobs) pointers.push_back(&job);
        const double before = elapsed();
        pool_.build(pointers);
        build_seconds_ = std::max((elapsed() - before) / double(batch.size()), 0.1);
        std::vector<Trial *> right;
        for (size_t i = 0; i < batch.size(); ++i) {
            Trial &t = add(std::move(batch[i]));
            if (!jobs[i].why_not.empty()) {
                t.status = "not built";
                t.why = jobs[i].why_not;
                continue;
            }
            show("checking " + t.name);
            runner_.check(t);
            if (t.status == "right") right.push_back(&t);
        }
        show("timing");
        if (!right.empty()) compare(right, std::max<size_t>(1, right.size() / 3));
        save();
        return true;
    }

    void finish() {
        while (true) {
            std::vector<Trial *> list = {&result_.trials[0]};
            for (Trial *t : best_trials(4))
                if (t != list[0] && list.size() < 4) list.push_back(t);
            show("comparing the best with the default");
            time(case_, list, kLastRounds, true);
            result_.default_seconds = result_.best_seconds = call_seconds_;
            const Trial *best = nullptr;
            for (const Trial *t : list)
                if (t != list[0] && t->status == "right" && (!best || t->gain > best->gain)) best = t;
            if (!best) return;
            const Ratio gain = ratios_[best->name];
            if (std::log(gain.mean) < std::max(kLeastGain, kErrors * gain.error)) return;
            Trial &t =
                *std::find_if(result_.trials.begin(), result_.trials.end(), [&](const Trial &x) { return &x == best; });
            if (!t.library.empty() && !runner_.check_random(t, kRandomChecks)) continue; // the next best
            result_.best = t;
            result_.gain = gain;
            result_.best_seconds = medians_[t.name];
            return;
        }
    }

    const Case case_;
    const TuneOptions &options_;
    const json &known_;
    const Toolchain toolchain_;
    const Machine machine_;
    const Setting setting_;
    const Case short_;
    BuildPool pool_;
    CandidateRunner runner_;
    const Clock::time_point start_ = Clock::now();
    TuneResult result_;
    double call_seconds_ = 0;
    double build_seconds_ = 1.5; // of a candidate, several being built at once
    std::set<std::string> seen_;
    std::map<std::string, DrawnPoint> points_;
    std::map<std::string, Ratio> ratios_;
    std::map<std::string, double> medians_;
    std::vector<DrawnPoint> drawn_, seeds_;
    size_t next_drawn_ = 0, next_seed_ = 0, next_entry_ = 0;
};

} // namespace

TuneResult tune(const Case &c, const TuneOptions &options, const json &known) {
    return Search(c, options, known).run();
}

} // namespace attune::tools
