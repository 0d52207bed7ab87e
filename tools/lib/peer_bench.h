// One case, all contestants, side by side: prepared, checked against float64, measured in rounds, checked again.
#pragma once

#include "case.h"
#include "remote.h"

#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace attune::tools {

struct PeerBenchOptions {
    int rounds = 11;
    double time_limit = 1.5; // seconds of samples for each contestant and case
    uint64_t seed = 0;
    std::function<void(double, const std::string &)> progress;
};

// A second process of attune takes part under this name: what its rows say beside attune's own is the measurement's
// error.
constexpr const char *kAttuneAgain = "attune_again";

// The arrays of a case and the truth about it, for any number of threads.
struct BenchCase {
    Case problem;
    std::unique_ptr<Inputs> inputs;
    Reference reference;
    std::unique_ptr<SharedCase> shared;

    BenchCase(const Case &c, const Machine &machine, uint64_t seed);
};

struct BenchResult {
    std::vector<ResultRow> rows;                      // in the contestants' order
    double peak = 0, peak_before = 0, peak_after = 0; // GFLOP/s; peak: the larger
    double read = 0;                          // GB/s of attune's own arrays, where reading is what takes the time
    std::vector<std::vector<double>> samples; // of each row
};

// Prepares a contestant for the case and checks its result. False: it cannot take part, and `row` says why.
bool enter_case(Remote &remote, const SharedCase &shared, const Inputs &inputs, const Reference &reference, int threads,
                uint64_t seed, ResultRow &row);
// Its figures, and the check of its last result.
void finish_case(Remote &remote, const SharedCase &shared, const Inputs &inputs, const Reference &reference,
                 const std::vector<double> &samples, double peak, ResultRow &row);

// Throws Interrupted.
BenchResult bench_case(const BenchCase &bench_case, const std::vector<std::unique_ptr<Remote>> &contestants,
                       const Machine &machine, int threads, const PeerBenchOptions &options);

// The fastest row that is neither attune's nor wrong; nullptr: none.
const ResultRow *best_peer(const std::vector<ResultRow> &rows);
const ResultRow *row_of(const std::vector<ResultRow> &rows, const std::string &impl); // measured, else nullptr

} // namespace attune::tools
