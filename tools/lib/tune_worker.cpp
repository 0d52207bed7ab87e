#include "tune_worker.h"

#include "bench.h"
#include "error.h"
#include "remote.h"
#include "verifier.h"
#include "worker.h"

#include <chrono>
#include <map>
#include <memory>

namespace attune::tools {
namespace {

using nlohmann::json;

struct Prepared {
    std::vector<std::unique_ptr<Inputs>> copies;
    Reference reference;
    int threads = 1;
    Buffer workspace;
    std::map<std::string, Plan> plans;
};

// One kernel on a prepared case; rotates over the copies.
class Call {
  public:
    Call(Prepared &prepared, const std::string &kernel) : prepared_(prepared) {
        Plan &plan = prepared.plans[kernel];
        std::string why;
        if (!plan) plan = make_plan(prepared.copies[0]->problem(), kernel, "", prepared.threads, why);
        if (!plan) fail("{}: no plan: {}", kernel, first_line(why));
        plan_ = plan.get();
        const size_t bytes = attune_plan_workspace(plan_);
        if (bytes > prepared.workspace.size()) prepared.workspace = Buffer(bytes, Guard::none);
    }
    bool operator()() {
        const attune_tensors &tensors = prepared_.copies[next_]->tensors();
        next_ = (next_ + 1) % prepared_.copies.size();
        return attune_run(plan_, &tensors, prepared_.workspace.data(), prepared_.workspace.size()) == ATTUNE_OK;
    }

  private:
    Prepared &prepared_;
    attune_plan *plan_;
    size_t next_ = 0;
};

class TuneWorker {
  public:
    json answer(const json &m) {
        const std::string op = m.at("op");
        if (op == "prepare") return prepare(m);
        if (op == "plan") {
            std::string why;
            const Plan plan =
                make_plan(to_problem(parse_case(m.at("case").get<std::string>())), "", "", m.at("threads"), why);
            return plan ? json{{"kernel", attune_plan_kernel(plan.get())}} : json{{"cannot", why}};
        }
        if (op == "load") {
            if (attune_load_kernels(m.at("library").get<std::string>().c_str()) == ATTUNE_OK) return {{"ok", true}};
            return {{"cannot", attune_last_error()}};
        }
        if (op == "check") return check(m);
        if (op == "check_random") return check_random(m);
        if (op == "time") return time(m);
        fail("op '{}': unknown", op);
    }

  private:
    json prepare(const json &m) {
        const std::string text = m.at("case");
        const Case c = parse_case(text);
        Prepared &p = cases_[text];
        InputOptions options;
        options.seed = m.at("seed");
        const bool guarded = m.at("guarded");
        options.guard = guarded ? Guard::end : Guard::none;
        options.huge_pages = !guarded;
        const int copies = guarded ? 1 : copies_needed(c, machine_);
        for (int i = 0; i < copies; ++i) {
            p.copies.push_back(std::make_unique<Inputs>(c, options));
            p.copies.back()->reset_outputs();
        }
        p.threads = m.at("threads");
        if (guarded) {
            ReferenceOptions budget;
            budget.budget = 16'000'000;
            p.reference = make_reference(p.copies[0]->problem(), p.copies[0]->tensors(), budget);
        }
        return {{"ok", true}};
    }

    const attune_kernel &kernel(const json &m) {
        const std::string name = m.at("kernel");
        const attune_kernel *k = attune_find_kernel(name.c_str());
        if (!k) fail("kernel {}: unknown; expected one that is linked or loaded", name);
        return *k;
    }

    json check(const json &m) {
        Prepared &p = cases_.at(m.at("case").get<std::string>());
        const KernelCheck done = check_kernel(kernel(m), *p.copies[0], p.reference, p.threads, Guard::end);
        return {{"ok", done.verdict.ok},
                {"why", done.verdict.why},
                {"error", done.verdict.o_error},
                {"bound", done.verdict.o_bound}};
    }

    json check_random(const json &m) {
        const attune_kernel &k = kernel(m);
        KernelFilter filter;
        filter.kernels = {k.name};
        std::string unclaimed;
        const CaseSpace space = claimed_space(filter, unclaimed);
        int count = 0;
        const int wanted = m.at("count");
        // Of random sizes, those that the kernel takes.
        for (uint64_t seed = m.at("seed"); count < wanted && seed < uint64_t(100) * uint64_t(wanted); ++seed) {
            const Case c = random_case(seed, space);
            const CaseOutcome outcome = verify_case(c, seed, filter, {1, 2});
            if (outcome.outcomes.empty()) continue;
            ++count;
            for (const Outcome &o : outcome.outcomes)
                if (!o.check.verdict.ok)
                    return {{"ok", false},
                            {"why", fmt::format("--case '{}' --seed {}: {}", to_string(c), seed, o.check.verdict.why)},
                            {"count", count}};
        }
        return {{"ok", true}, {"why", ""}, {"count", count}};
    }

    json time(const json &m) {
        Prepared &p = cases_.at(m.at("case").get<std::string>());
        const auto names = m.at("kernels").get<std::vector<std::string>>();
        double limit = m.at("limit"); // times the best of the first calls; 0: none
        json times = json::array();
        std::vector<double> first(names.size(), 0);
        std::vector<std::unique_ptr<Call>> calls;
        double best = 1e30;
        for (size_t i = 0; i < names.size(); ++i) {
            times.push_back(json::object());
            calls.push_back(std::make_unique<Call>(p, names[i]));
            for (int again = 0; again < 3; ++again) { // the first one touches its memory
                const auto start = std::chrono::steady_clock::now();
                if (!(*calls[i])()) {
                    times[i]["failed"] = attune_last_error();
                    break;
                }
                const double s = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
                first[i] = again < 2 ? s : std::min(first[i], s);
                if (i && again && limit > 0 && s > limit * best) break;
            }
            if (first[i] > 0) best = std::min(best, first[i]);
        }
        std::vector<Contestant> contestants;
        std::vector<size_t> index;
        for (size_t i = 0; i < names.size(); ++i) {
            if (times[i].contains("failed")) continue;
            if (i && limit > 0 && first[i] > limit * best) { // the first one is what the others are compared with
                times[i]["slow"] = first[i];
                continue;
            }
            contestants.push_back({names[i], [call = calls[i].get()] { return (*call)(); }});
            index.push_back(i);
        }
        BenchOptions options;
        options.rounds = m.at("rounds");
        options.time_limit = 1e9; // the rounds are what is paid for
        options.hard_limit = 1e9;
        options.sample_seconds = m.value("sample_seconds", 2e-3);
        const auto measured = measure_interleaved(contestants, options);
        for (size_t i = 0; i < measured.size(); ++i) {
            json &t = times[index[i]];
            if (measured[i].failed)
                t["failed"] = "a run failed";
            else
                t["samples"] = measured[i].samples;
        }
        return {{"times", times}};
    }

    Machine machine_ = detect_machine();
    std::map<std::string, Prepared> cases_;
};

} // namespace

int serve_tuning() {
    TuneWorker worker;
    return answer_questions([&worker](const json &m) { return worker.answer(m); });
}

} // namespace attune::tools
