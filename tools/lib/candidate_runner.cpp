#include "candidate_runner.h"

#include "error.h"
#include "results.h"

#include <algorithm>

namespace attune::tools {

using nlohmann::json;

namespace {

constexpr double kCutOff = 3;         // times the best: no further calls
constexpr double kPrepareLimit = 120; // seconds: arrays and reference of a large case

std::string error_of(const json &answer) {
    return answer.contains("error") && answer["error"].is_string() ? answer["error"].get<std::string>() : "";
}

} // namespace

std::unique_ptr<ChildProcess> CandidateRunner::start(const std::vector<Case> &cases, bool guarded) {
    // Its planner must not choose by what is being looked for.
    auto child =
        std::make_unique<ChildProcess>(std::vector<std::string>{"/proc/self/exe", "worker", "tune"},
                                       ChildProcess::Environment{{"ATTUNE_TUNING", "off"},
                                                                 // of plug-ins that bring their own loops
                                                                 {"HL_NUM_THREADS", std::to_string(threads_)}});
    for (const Case &c : cases) {
        const json answer = child->ask(
            {{"op", "prepare"}, {"case", to_string(c)}, {"seed", seed_}, {"threads", threads_}, {"guarded", guarded}},
            kPrepareLimit);
        if (const std::string why = error_of(answer); !why.empty()) fail("{}: {}", to_string(c), why);
    }
    return child;
}

ChildProcess &CandidateRunner::checker() {
    if (!checker_ || !checker_->alive()) checker_ = start({whole_}, true);
    return *checker_;
}

ChildProcess &CandidateRunner::timer() {
    if (timer_ && timer_->alive()) return *timer_;
    loaded_.clear();
    std::vector<Case> cases = {whole_};
    if (!(shorter_ == whole_)) cases.push_back(shorter_);
    timer_ = start(cases, false);
    return *timer_;
}

std::string CandidateRunner::default_kernel() {
    const json answer = timer().ask({{"op", "plan"}, {"case", to_string(whole_)}, {"threads", threads_}}, run_limit_);
    if (!answer.contains("kernel")) fail("{}: {}", to_string(whole_), answer.value("cannot", error_of(answer)));
    return answer["kernel"];
}

bool CandidateRunner::load(ChildProcess &child, Trial &trial) {
    if (trial.library.empty()) return true;
    const json answer = child.ask({{"op", "load"}, {"library", trial.library}}, run_limit_);
    if (answer.contains("ok")) return true;
    trial.status = "wrong";
    trial.why = answer.value("cannot", error_of(answer));
    return false;
}

void CandidateRunner::check(Trial &trial) {
    ChildProcess &child = checker(); // an error of the case itself is no candidate's
    try {
        if (!load(child, trial)) return;
        const json answer =
            child.ask({{"op", "check"}, {"case", to_string(whole_)}, {"kernel", trial.name}}, run_limit_);
        trial.status = answer.value("ok", false) ? "right" : "wrong";
        trial.why = answer.value("why", error_of(answer));
    } catch (const ChildError &e) {
        trial.status = "crashed";
        trial.why = e.what();
    }
}

bool CandidateRunner::check_random(Trial &trial, int count) {
    ChildProcess &child = checker();
    try {
        if (!load(child, trial)) return false;
        const json answer = child.ask(
            {{"op", "check_random"}, {"kernel", trial.name}, {"count", count}, {"seed", seed_}}, 4 * run_limit_);
        if (answer.value("ok", false)) return true;
        trial.status = "wrong";
        trial.why = answer.value("why", error_of(answer));
    } catch (const ChildError &e) {
        trial.status = "crashed";
        trial.why = e.what();
    }
    return false;
}

std::vector<std::vector<double>> CandidateRunner::time(const Case &c, const std::vector<Trial *> &trials, int rounds,
                                                       double seconds) {
    std::vector<std::vector<double>> samples(trials.size());
    std::vector<std::string> names;
    std::vector<size_t> index;
    ChildProcess &child = timer();
    json answer;
    try {
        for (size_t i = 0; i < trials.size(); ++i) {
            Trial &t = *trials[i];
            if (!loaded_.count(t.name) && !load(child, t)) continue;
            loaded_.insert(t.name);
            names.push_back(t.name);
            index.push_back(i);
        }
        answer = child.ask(
            {{"op", "time"}, {"case", to_string(c)}, {"kernels", names}, {"rounds", rounds}, {"limit", kCutOff}},
            run_limit_ + seconds);
    } catch (const ChildError &e) {
        // One of them crashed after all: each alone with the default tells which.
        if (trials.size() < 2) fail("{}: the default cannot be timed: {}", to_string(c), e.what());
        if (trials.size() == 2) {
            trials[1]->status = "crashed";
            trials[1]->why = e.what();
            samples[0] = time(c, {trials[0]}, rounds, seconds)[0];
            return samples;
        }
        for (size_t i = 1; i < trials.size(); ++i) {
            auto pair = time(c, {trials[0], trials[i]}, rounds, seconds);
            samples[i] = std::move(pair[1]);
            samples[0] = std::move(pair[0]); // of the last pair: good enough where something crashed
        }
        return samples;
    }
    if (const std::string why = error_of(answer); !why.empty()) fail("timing on {}: {}", to_string(c), why);
    for (size_t k = 0; k < index.size(); ++k) {
        Trial &t = *trials[index[k]];
        const json &a = answer.at("times").at(k);
        if (a.contains("samples")) {
            samples[index[k]] = a["samples"].get<std::vector<double>>();
        } else if (a.contains("slow")) {
            t.status = "slow";
            t.why = fmt::format("a call took {}, more than {:g} x the best", format_seconds(a["slow"]), kCutOff);
        } else {
            t.status = "wrong";
            t.why = a.value("failed", "a run failed");
        }
    }
    return samples;
}

} // namespace attune::tools
