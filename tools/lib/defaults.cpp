#include "defaults.h"

#include "bench.h"
#include "candidate_runner.h"
#include "error.h"
#include "runner.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>

namespace attune::tools {

using nlohmann::ordered_json;

ordered_json ranked(ordered_json ranking, const std::vector<Observation> &observations) {
    std::map<std::string, double> best; // of a case
    for (const Observation &o : observations) {
        const auto it = best.emplace(o.case_text, o.seconds).first;
        it->second = std::min(it->second, o.seconds);
    }
    std::vector<bool> ruled(observations.size(), false); // the first rule that fits is the one
    for (ordered_json &rule : ranking.at("rules")) {
        const int64_t least = rule.value("rows_min", int64_t(0));
        const int64_t most = rule.value("rows_max", std::numeric_limits<int64_t>::max());
        std::map<std::string, std::pair<double, int>> losses;
        for (size_t i = 0; i < observations.size(); ++i) {
            const Observation &o = observations[i];
            if (ruled[i] || o.rows < least || o.rows > most) continue;
            ruled[i] = true;
            auto &[sum, count] = losses[o.strategy];
            sum += std::log(o.seconds / best.at(o.case_text));
            ++count;
        }
        auto strategies = rule.at("strategies").get<std::vector<std::string>>();
        std::vector<std::string> observed;
        std::vector<size_t> places;
        for (size_t i = 0; i < strategies.size(); ++i)
            if (losses.count(strategies[i])) {
                observed.push_back(strategies[i]);
                places.push_back(i);
            }
        std::stable_sort(observed.begin(), observed.end(), [&](const std::string &a, const std::string &b) {
            return losses[a].first / losses[a].second < losses[b].first / losses[b].second;
        });
        for (size_t i = 0; i < places.size(); ++i) strategies[places[i]] = observed[i];
        // A strategy that the rule did not know yet comes behind those that it did.
        for (const auto &[strategy, loss] : losses)
            if (std::find(strategies.begin(), strategies.end(), strategy) == strategies.end())
                strategies.push_back(strategy);
        rule["strategies"] = strategies;
    }
    return ranking;
}

std::vector<Observation> observe(const Case &c, int threads, uint64_t seed) {
    CandidateRunner runner(c, c, threads, seed, 60);
    const attune_problem problem = to_problem(c);
    std::vector<Trial> trials;
    const std::string chosen = runner.default_kernel();
    for (const std::string &strategy : all_strategies()) {
        if (is_ladder(strategy)) continue;
        std::string why;
        const Plan plan = make_plan(problem, "", strategy, threads, why);
        if (!plan) continue;
        Trial t;
        t.name = attune_plan_kernel(plan.get());
        t.strategy = strategy;
        t.status = "right";
        trials.push_back(std::move(t));
    }
    // The default comes first: the others are compared with it.
    std::stable_partition(trials.begin(), trials.end(), [&](const Trial &t) { return t.name == chosen; });
    std::vector<Trial *> pointers;
    for (Trial &t : trials) pointers.push_back(&t);
    if (pointers.empty()) fail("{}: no kernel can do it", to_string(c));
    const auto samples = runner.time(c, pointers, 9, 300);
    std::vector<Observation> list;
    for (size_t i = 0; i < trials.size(); ++i) {
        if (samples[i].empty() && trials[i].status != "slow") continue;
        // What was cut off counts with the three times that it was cut off at.
        const double seconds = samples[i].empty() ? 3 * median(samples[0]) : median(samples[i]);
        list.push_back({to_string(c), trials[i].strategy, c.Hq / c.Hkv * c.N, seconds});
    }
    return list;
}

} // namespace attune::tools
