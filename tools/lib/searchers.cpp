#include "searchers.h"

#include "error.h"
#include "machine.h"

#include <algorithm>

namespace attune::tools {

using nlohmann::ordered_json;

const std::vector<Searcher> &searchers() {
    static const std::vector<Searcher> all = {
        {"random", "points drawn from the pruned spaces"},
        {"attune", "linked kernels, drawn points, then neighbours of the best"},
        {"autoschedulers", "mullapudi2016, li2018, adams2019 with several seeds and beams"}};
    return all;
}

std::vector<ordered_json> autoscheduled_entries(const Case &c, const Setting &setting, int threads) {
    std::vector<ordered_json> entries;
    const auto add = [&](const std::string &scheduler, const std::string &name, const std::string &library,
                         const std::string &variant, ordered_json more) {
        ordered_json params = {{"q", 1}, {"k", 1}, {"autoscheduler", scheduler}, {"autoscheduler_plugin", library}};
        params["autoscheduler.parallelism"] = threads;
        for (const auto &[key, value] : more.items()) params["autoscheduler." + key] = value;
        params["rows"] = std::max<int64_t>(c.N, 1);
        params["heads"] = c.Hq;
        const std::string strategy = "auto_" + name;
        entries.push_back(
            {{"schema", 1},
             {"name", fmt::format("attn_{}_f32_d{}{}_{}_n{}h{}{}", strategy, c.dk,
                                  c.dv == c.dk ? "" : fmt::format("x{}", c.dv), setting.isa, c.N, c.Hq, variant)},
             {"strategy", strategy},
             {"backend", "halide"},
             {"device", "cpu"},
             {"isa", setting.isa},
             {"dtypes", {{"q", "f32"}, {"kv", "f32"}, {"o", "f32"}}},
             {"dk", c.dk},
             {"dv", c.dv},
             {"variant", "plain"},
             {"mods", ordered_json::array()},
             {"phases", {{"main", "automatic_whole"}}},
             {"params", params},
             {"constraints",
              {{"dk", {c.dk, c.dk}},
               {"dv", {c.dv, c.dv}},
               {"flags", {"causal", "kv_len", "offsets", "sink"}},
               {"traits", {"own_threads", "quadratic"}},
               // What its tiles need is not known; this is what it was made for.
               {"least", {{"n", c.N}, {"m", c.M}, {"h", c.Hq}}}}},
             {"why", fmt::format("{} for {}", scheduler, to_string(c))}});
    };
    add("Mullapudi2016", "mullapudi", "libautoschedule_mullapudi2016.so", "", ordered_json::object());
    add("Li2018", "li", "libautoschedule_li2018.so", "", ordered_json::object());
    for (int beam : {1, 8, 32})
        add("Adams2019", "adams", "libautoschedule_adams2019.so", fmt::format("b{}", beam), {{"beam_size", beam}});
    // With one beam, dropout makes a greedy search a random one.
    for (int seed = 1; seed <= 60; ++seed)
        add("Adams2019", "adams", "libautoschedule_adams2019.so", fmt::format("b1s{}", seed),
            {{"beam_size", 1}, {"random_dropout", 70}, {"random_dropout_seed", seed}});
    return entries;
}

TuneResult run_searcher(const std::string &name, const Case &c, TuneOptions options, const std::string &folder) {
    options.folder = folder;
    options.stored = false;
    options.linked = name == "attune";
    options.neighbours = name == "attune";
    if (name == "autoschedulers")
        options.entries = autoscheduled_entries(c, setting_of(c, detect_machine()), options.threads);
    return tune(c, options, nlohmann::json::object());
}

double best_until(const TuneResult &result, double seconds) {
    double best = 0;
    for (const Trial &t : result.trials)
        if (t.at <= seconds && t.status == "right") best = std::max(best, t.gain);
    return best;
}

} // namespace attune::tools
