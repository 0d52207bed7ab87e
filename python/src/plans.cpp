#include "plans.h"

#include <attune/kernel.h>

#include <bit>
#include <list>
#include <map>
#include <mutex>
#include <string>
#include <vector>

namespace attune::python {

namespace {

constexpr std::size_t kMostPlans = 256;

// Everything that a plan depends on.
std::string key_of(const Problem &problem, const PlanOptions &options) {
    const attune_problem p = problem.to_c();
    const int threads = options.threads ? options.threads : attune_get_num_threads();
    std::string key = options.kernel + "|" + options.strategy;
    for (const std::int64_t x : {std::int64_t(p.q_dtype),
                                 std::int64_t(p.kv_dtype),
                                 std::int64_t(p.o_dtype),
                                 std::int64_t(p.device),
                                 p.B,
                                 p.Hq,
                                 p.Hkv,
                                 p.N,
                                 p.M,
                                 p.dk,
                                 p.dv,
                                 std::int64_t(p.flags),
                                 std::int64_t(std::bit_cast<std::uint32_t>(p.scale)),
                                 std::int64_t(std::bit_cast<std::uint32_t>(p.softcap)),
                                 p.offset,
                                 p.window_left,
                                 p.window_right,
                                 std::int64_t(p.scores_stage),
                                 std::int64_t(threads),
                                 attune_num_kernels()})
        key += "|" + std::to_string(x);
    return key;
}

struct Cache {
    using Entry = std::pair<std::string, std::shared_ptr<const Plan>>;
    std::mutex mutex;
    std::list<Entry> recent; // the last used in front
    std::map<std::string, std::list<Entry>::iterator> by_key;
};

Cache &cache() {
    static Cache c;
    return c;
}

} // namespace

std::shared_ptr<const Plan> cached_plan(const Problem &problem, const PlanOptions &options) {
    const std::string key = key_of(problem, options);
    Cache &c = cache();
    {
        std::lock_guard lock(c.mutex);
        if (const auto found = c.by_key.find(key); found != c.by_key.end()) {
            c.recent.splice(c.recent.begin(), c.recent, found->second);
            return found->second->second;
        }
    }
    auto made = std::make_shared<const Plan>(problem, options);
    std::lock_guard lock(c.mutex);
    if (c.by_key.contains(key)) return made; // another thread was faster
    c.recent.emplace_front(key, made);
    c.by_key[key] = c.recent.begin();
    if (c.recent.size() > kMostPlans) {
        c.by_key.erase(c.recent.back().first);
        c.recent.pop_back();
    }
    return made;
}

Workspace &thread_workspace() {
    thread_local Workspace workspace;
    return workspace;
}

} // namespace attune::python
