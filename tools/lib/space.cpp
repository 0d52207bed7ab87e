#include "space.h"

#include "error.h"
#include "manifest.h"

#include <algorithm>
#include <cstdlib>

namespace attune::tools {
namespace {

using nlohmann::json;
using nlohmann::ordered_json;

int64_t up(int64_t n, int64_t to) {
    return (n + to - 1) / to * to;
}

std::vector<ordered_json> spaces_of(const std::vector<std::string> &program, const Setting &s) {
    std::vector<std::string> command = program;
    command.push_back("--space");
    for (const auto &[name, value] : {std::pair{"dk", s.dk},
                                      {"dv", s.dv},
                                      {"rows", s.rows},
                                      {"keys", s.keys},
                                      {"lanes", s.lanes},
                                      {"registers", s.registers},
                                      {"l1", s.l1},
                                      {"l2", s.l2}})
        command.push_back(fmt::format("{}={}", name, value));
    std::string output;
    if (const int status = run_program(command, output); status != 0)
        fail("{}: ended with status {}; expected the tuning spaces\n{}", fmt::join(command, " "), status, output);
    return ordered_json::parse(output).get<std::vector<ordered_json>>();
}

TuningSpace space_from(const ordered_json &ordered) {
    const json j = ordered;
    TuningSpace space;
    space.strategy = j.at("strategy");
    space.backend = j.at("backend");
    space.phases = ordered.at("phases");
    space.same = j.at("same");
    space.fixed = j.at("fixed");
    space.exact = j.at("exact");
    space.quadratic = j.at("quadratic");
    space.total = j.at("total");
    for (const json &k : j.at("knobs"))
        space.knobs.push_back({k.at("name"), k.at("letter"), k.at("values").get<std::vector<json>>(), k.at("usual")});
    for (const json &r : j.at("removed")) space.removed.emplace_back(r.at(0), r.at(1));
    space.points = j.at("points").get<std::vector<TuningSpace::Point>>();
    return space;
}

std::string plain(const json &value) {
    return value.is_string() ? value.get<std::string>() : value.dump();
}

} // namespace

Toolchain find_toolchain() {
    const char *given = std::getenv("ATTUNE_TOOLCHAIN");
    Toolchain t;
    t.path = given && *given ? given : ATTUNE_KERNEL_DIR "/toolchain.json";
    try {
        const json j = json::parse(read_file(t.path));
        t.python = j.at("python");
        t.kernel_set = j.at("kernel_set");
        t.generator = j.at("generator");
        t.mlir_generator = j.at("mlir_generator");
        t.catalogues = j.at("catalogues").get<std::vector<std::string>>();
    } catch (const json::exception &e) {
        fail("{}: {}; expected what the build writes", t.path, e.what());
    }
    return t;
}

Setting setting_of(const Case &c, const Machine &machine) {
    if (c.dtype != ATTUNE_F32 || c.kv_dtype != ATTUNE_F32)
        fail("{}: its type is {}{}; expected f32, which is what can be tuned so far", to_string(c), dtype_name(c.dtype),
             c.kv_dtype != c.dtype ? fmt::format(" with kv {}", dtype_name(c.kv_dtype)) : "");
    Setting s;
    s.isa = attune_isa();
    if (s.isa == "avx512_bf16") s.isa = "avx512"; // f32 gains nothing from it
    s.lanes = s.isa == "avx512" ? 16 : s.isa == "avx2" ? 8 : 4;
    s.registers = s.isa == "avx512" ? 32 : 16;
    // K is padded to whole groups of 8 features, V to whole vectors.
    s.dk = up(c.dk, 8);
    s.dv = up(std::max<int64_t>(c.dv, 1), s.lanes);
    s.rows = std::max<int64_t>(c.N * (c.Hq / c.Hkv), 1);
    s.keys = std::max<int64_t>(c.M, 1);
    s.l1 = machine.l1d > 0 ? machine.l1d : 32 << 10;
    s.l2 = machine.l2 > 0 ? machine.l2 : 256 << 10;
    return s;
}

std::string TuningSpace::text(const Point &point) const {
    std::string all;
    for (size_t i = 0; i < knobs.size(); ++i)
        all += fmt::format("{}{}={}", i ? " " : "", knobs[i].name, plain(knobs[i].values[size_t(point[i])]));
    return all;
}

std::vector<TuningSpace> tuning_spaces(const Toolchain &toolchain, const Case &c, const Setting &setting,
                                       const std::vector<std::string> &strategies) {
    std::vector<ordered_json> printed = spaces_of({toolchain.generator}, setting);
    if (!toolchain.mlir_generator.empty() && setting.isa != "sse41")
        for (ordered_json &j : spaces_of({toolchain.python, toolchain.mlir_generator}, setting))
            printed.push_back(std::move(j));
    std::vector<TuningSpace> spaces;
    std::vector<std::string> known;
    for (const ordered_json &j : printed) {
        TuningSpace space = space_from(j);
        known.push_back(space.strategy);
        if (!strategies.empty() && std::find(strategies.begin(), strategies.end(), space.strategy) == strategies.end())
            continue;
        if (space.exact && (setting.dk != c.dk || setting.dv != c.dv)) {
            space.removed.emplace_back(fmt::format("d_k a multiple of 8, d_v of {}: nothing is padded", setting.lanes),
                                       int64_t(space.points.size()));
            space.points.clear();
        }
        spaces.push_back(std::move(space));
    }
    for (const std::string &s : strategies)
        if (std::find(known.begin(), known.end(), s) == known.end())
            fail("--strategy={}: has no tuning space; expected one of: {}", s, fmt::join(known, ", "));
    return spaces;
}

ordered_json catalogue_entry(const TuningSpace &space, const TuningSpace::Point &point, const Setting &s,
                             const Case &c) {
    json params = space.fixed;
    std::string tiles;
    for (size_t i = 0; i < space.knobs.size(); ++i) {
        const json &value = space.knobs[i].values[size_t(point[i])];
        params[space.knobs[i].name] = value;
        std::string shown = plain(value);
        std::replace(shown.begin(), shown.end(), '+', 'x');
        tiles += space.knobs[i].letter + shown;
    }
    for (const auto &[param, knob] : space.same.items()) params[param] = params.at(knob.get<std::string>());
    const int64_t dk = space.exact ? c.dk : up(c.dk, 8), dv = space.exact ? c.dv : up(c.dv, 8);
    const int64_t padding = space.exact ? 0 : 7;
    json flags = {"causal", "mask", "bias", "kv_len", "offsets", "sink", "softcap", "alibi"};
    json constraints = {{"dk", {dk - padding, dk}}, {"dv", {dv - padding, dv}}};
    if (space.quadratic) {
        flags.push_back("scores");
        constraints["traits"] = {"quadratic"};
    }
    constraints["flags"] = std::move(flags);
    return {{"schema", 1},
            {"name", fmt::format("attn_{}_f32_d{}{}_{}_{}", space.strategy, dk, dv == dk ? "" : fmt::format("x{}", dv),
                                 s.isa, tiles)},
            {"strategy", space.strategy},
            {"backend", space.backend},
            {"device", "cpu"},
            {"isa", s.isa},
            {"dtypes", {{"q", "f32"}, {"kv", "f32"}, {"o", "f32"}}},
            {"dk", s.dk},
            {"dv", s.dv},
            {"variant", "plain"},
            {"mods", json::array()},
            {"phases", space.phases},
            {"params", std::move(params)},
            {"constraints", std::move(constraints)},
            {"why", fmt::format("found by attune tune for {}", to_string(c))}};
}

} // namespace attune::tools
