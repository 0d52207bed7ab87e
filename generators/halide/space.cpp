// Tuning spaces: declaring, pruning, printing.
#include "space.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <sstream>

namespace attune_gen {

namespace {

std::vector<Space> &spaces() {
    static std::vector<Space> all;
    return all;
}

// Texts here are words and plain sentences: nothing has to be escaped.
std::string quoted(const std::string &text) {
    return '"' + text + '"';
}

template <typename T, typename F> std::string list(const T &items, F text) {
    std::string all;
    for (const auto &item : items) all += (all.empty() ? "" : ", ") + text(item);
    return all;
}

} // namespace

int64_t Point::operator[](const char *name) const {
    for (size_t i = 0; i < names.size(); i++)
        if (std::strcmp(names[i].c_str(), name) == 0) return values[i];
    std::cerr << "attune-halide-gen: a constraint asks for the knob '" << name << "', which is not declared\n";
    std::exit(1);
}

Space &Space::phase(std::string name, std::string generator) {
    phases.emplace_back(std::move(name), std::move(generator));
    return *this;
}
Space &Space::knob(std::string name, std::string letter, std::vector<int64_t> values, int64_t usual) {
    knobs.push_back({std::move(name), std::move(letter), std::move(values), usual});
    return *this;
}
Space &Space::same(std::string param, std::string knob) {
    equal.emplace_back(std::move(param), std::move(knob));
    return *this;
}
Space &Space::fixed(std::string param, int64_t value) {
    numbers.emplace_back(std::move(param), value);
    return *this;
}
Space &Space::require(std::string text, std::function<bool(const Point &, const Setting &)> holds) {
    constraints.push_back({std::move(text), std::move(holds)});
    return *this;
}
Space &Space::exact_sizes() {
    exact = true;
    return *this;
}
Space &Space::quadratic() {
    keeps_scores = true;
    return *this;
}
Space &Space::add() {
    spaces().push_back(*this);
    return *this;
}

Space &Space::register_tiles(const char *qk_rows, const char *pv_rows, const char *pv_vectors) {
    using S = const Setting &;
    using P = const Point &;
    // Three quarters of the registers: 14 x 2 and 7 x 4 of AVX-512's 32 spill. Eight at least, since two multiply-adds
    // begin in each of the four cycles that one takes.
    const auto accumulators_fit = [](int64_t n, S s) { return n >= 8 && n <= s.registers * 3 / 4; };
    require("rows of a query tile are whole register tiles",
            [=](P x, S) { return x["q"] % x[qk_rows] == 0 && x["q"] % x[pv_rows] == 0; });
    require("no more rows than the problem has", [](P x, S s) { return x["q"] <= std::max<int64_t>(8, s.rows); });
    require("a panel is whole vectors", [](P x, S s) { return x["panel"] % s.lanes == 0; });
    require("features of V are whole register tiles", [=](P x, S s) { return s.dv % (s.lanes * x[pv_vectors]) == 0; });
    require("accumulators of Q K^T: 8 to 3/4 of the registers",
            [=](P x, S s) { return accumulators_fit(x[qk_rows] * (x["panel"] / s.lanes), s); });
    require("accumulators of P V: 8 to 3/4 of the registers",
            [=](P x, S s) { return accumulators_fit(x[pv_rows] * x[pv_vectors], s); });
    return require("a panel of K fits into L1", [](P x, S s) { return 4 * s.dk * x["panel"] <= s.l1; });
}

std::string Space::json(const Setting &setting) const {
    std::vector<std::string> names;
    for (const Knob &k : knobs) names.push_back(k.name);
    std::vector<int64_t> removed(constraints.size(), 0), values(knobs.size());
    std::vector<size_t> index(knobs.size(), 0);
    int64_t total = 1;
    for (const Knob &k : knobs) total *= int64_t(k.values.size());
    std::string points;
    for (int64_t n = 0; n < total; n++) {
        int64_t rest = n;
        for (size_t i = knobs.size(); i-- > 0;) {
            index[i] = size_t(rest % int64_t(knobs[i].values.size()));
            values[i] = knobs[i].values[index[i]];
            rest /= int64_t(knobs[i].values.size());
        }
        size_t broken = 0;
        while (broken < constraints.size() && constraints[broken].holds(Point(names, values), setting)) broken++;
        if (broken < constraints.size()) {
            removed[broken]++;
            continue;
        }
        points += (points.empty() ? "[" : ", [") + list(index, [](size_t i) { return std::to_string(i); }) + "]";
    }
    std::ostringstream out;
    const auto pair = [](const auto &p) { return quoted(p.first) + ": " + quoted(p.second); };
    out << "{\"strategy\": " << quoted(strategy) << ", \"backend\": \"halide\", \"phases\": {" << list(phases, pair)
        << "},\n \"knobs\": ["
        << list(knobs,
                [](const Knob &k) {
                    return "{\"name\": " + quoted(k.name) + ", \"letter\": " + quoted(k.letter) + ", \"values\": [" +
                           list(k.values, [](int64_t v) { return std::to_string(v); }) +
                           "], \"usual\": " + std::to_string(k.usual) + "}";
                })
        << "],\n \"same\": {" << list(equal, pair) << "}, \"fixed\": {"
        << list(numbers, [](const auto &p) { return quoted(p.first) + ": " + std::to_string(p.second); })
        << "}, \"exact\": " << (exact ? "true" : "false") << ", \"quadratic\": " << (keeps_scores ? "true" : "false")
        << ",\n \"total\": " << total << ", \"removed\": [";
    for (size_t i = 0; i < constraints.size(); i++)
        out << (i ? ", " : "") << "[" << quoted(constraints[i].text) << ", " << removed[i] << "]";
    out << "],\n \"points\": [" << points << "]}";
    return out.str();
}

const std::vector<Space> &all_spaces() {
    return spaces();
}

} // namespace attune_gen
