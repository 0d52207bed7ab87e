// The tuning space of a strategy: its knobs with their values, and what must hold between them. Declared at the end of
// the strategy's file, beside the schedule that the knobs are of; printed by `attune-halide-gen --space`, searched by
// `attune tune`. Knobs are GeneratorParams of the same names.
//
// Constraints are C++ and see the problem and the machine, so that a point that spills registers or misses the cache is
// never compiled.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

namespace attune_gen {

// The problem's sizes, and what the ISA and the machine have.
struct Setting {
    int64_t dk, dv;     // that the kernel is specialised for
    int64_t rows, keys; // query rows that share a kv head; keys
    int64_t lanes, registers;
    int64_t l1, l2; // bytes
};

// One value for each knob.
class Point {
  public:
    Point(const std::vector<std::string> &names, const std::vector<int64_t> &values) : names(names), values(values) {}
    int64_t operator[](const char *name) const;

  private:
    const std::vector<std::string> &names;
    const std::vector<int64_t> &values;
};

struct Space {
    struct Knob {
        std::string name, letter; // the letter stands in the kernel's name
        std::vector<int64_t> values;
        int64_t usual;
    };
    struct Constraint {
        std::string text;
        std::function<bool(const Point &, const Setting &)> holds;
    };

    explicit Space(std::string strategy) : strategy(std::move(strategy)) {}
    Space &phase(std::string name, std::string generator);
    Space &knob(std::string name, std::string letter, std::vector<int64_t> values, int64_t usual);
    // A parameter that is the same as a knob, or a number.
    Space &same(std::string param, std::string knob);
    Space &fixed(std::string param, int64_t value);
    Space &require(std::string text, std::function<bool(const Point &, const Setting &)> holds);
    // Sizes must be met exactly: nothing is zero padded.
    Space &exact_sizes();
    Space &quadratic(); // keeps all scores; can return them
    Space &add();       // to the list of all: ends the declaration

    // The register tiles of both matmuls, as flash, rowstrip and stagewise have them: rows times vectors of a panel for
    // the scores, rows times vectors for P V.
    Space &register_tiles(const char *qk_rows, const char *pv_rows, const char *pv_vectors);

    std::string strategy;
    std::vector<std::pair<std::string, std::string>> phases, equal;
    std::vector<std::pair<std::string, int64_t>> numbers;
    std::vector<Knob> knobs;
    std::vector<Constraint> constraints;
    bool exact = false, keeps_scores = false;

    // As JSON: knobs, how many points each constraint removes (the first that does not hold), and the points left, as
    // indices into the knobs' values.
    std::string json(const Setting &setting) const;
};

const std::vector<Space> &all_spaces();

} // namespace attune_gen

// Registers what the expression declares.
#define ATTUNE_SPACE(name, ...)                                                                                        \
    namespace {                                                                                                        \
    [[maybe_unused]] const bool space_of_##name = [] {                                                                 \
        (__VA_ARGS__).add();                                                                                           \
        return true;                                                                                                   \
    }();                                                                                                               \
    }
