// Tuning spaces as the generator programs print them (generators/halide/space.h, generators/mlir/spaces.py), pruned for
// a case on this machine, and the way from a point of one to an entry of a catalogue.
#pragma once

#include "case.h"
#include "machine.h"

#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

namespace attune::tools {

// What the build left of its programs: ATTUNE_TOOLCHAIN in the environment, else toolchain.json in the kernel folder.
struct Toolchain {
    std::string path, python, kernel_set, generator, mlir_generator; // the last is empty where MLIR is not there
    std::vector<std::string> catalogues;
};
Toolchain find_toolchain();

// The sizes that constraints know.
struct Setting {
    std::string isa; // that kernels are made for
    int64_t dk = 0, dv = 0, rows = 0, keys = 0, lanes = 0, registers = 0, l1 = 0, l2 = 0;
};
// Throws Error for a case that nothing can be tuned for (its type).
Setting setting_of(const Case &c, const Machine &machine);

struct TuningSpace {
    struct Knob {
        std::string name, letter;
        std::vector<nlohmann::json> values;
        nlohmann::json usual;
    };
    using Point = std::vector<int>; // indices into the knobs' values

    std::string strategy, backend;
    nlohmann::ordered_json phases;
    nlohmann::json same, fixed;
    std::vector<Knob> knobs;
    bool exact = false, quadratic = false;
    int64_t total = 0;
    std::vector<std::pair<std::string, int64_t>> removed; // by which constraint, how many
    std::vector<Point> points;

    std::string text(const Point &point) const; // "q=24 k=192"
};
// Of all strategies, or of those named; an unknown name throws Error.
std::vector<TuningSpace> tuning_spaces(const Toolchain &toolchain, const Case &c, const Setting &setting,
                                       const std::vector<std::string> &strategies);

// The kernel that a point stands for. Ordered: phases run in the order in which they stand.
nlohmann::ordered_json catalogue_entry(const TuningSpace &space, const TuningSpace::Point &point,
                                       const Setting &setting, const Case &c);

} // namespace attune::tools
