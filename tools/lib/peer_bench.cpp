// The measurement of one case over processes.
#include "peer_bench.h"

#include "bench.h"
#include "error.h"
#include "inputs.h"

#include <algorithm>

namespace attune::tools {
namespace {

// A peer may be a little less exact than the contract asks of attune: then it is no worse a rival. Beyond this it
// computes something else.
constexpr double kPeerFactor = 16;

// Wrong, or only less exact than attune has to be?
void judge(ResultRow &row) {
    if (row.ok || row.impl == "attune" || row.impl == kAttuneAgain || !row.max_err || !row.err_bound) return;
    if (*row.max_err <= kPeerFactor * *row.err_bound) row.ok = true; // why_not keeps the text
}

} // namespace

BenchCase::BenchCase(const Case &c, const Machine &machine, uint64_t seed) : problem(c) {
    InputOptions options;
    options.seed = seed;
    inputs = std::make_unique<Inputs>(c, options);
    reference = make_reference(inputs->problem(), inputs->tensors());
    shared = std::make_unique<SharedCase>(*inputs, seed, copies_needed(c, machine));
}

bool enter_case(Remote &remote, const SharedCase &shared, const Inputs &inputs, const Reference &reference, int threads,
                uint64_t seed, ResultRow &row) {
    const Case &c = inputs.input_case();
    row.case_text = to_string(c);
    row.impl = remote.spec().impl;
    row.dtype = dtype_name(c.dtype);
    row.threads = threads;
    row.input = fmt::format("seed {}", seed);
    row.seed = seed;
    row.ok = true;
    if (!remote.prepare(shared, threads, row)) return false;
    if (!remote.check(shared, reference, inputs.tensors(), true, row)) return false;
    judge(row);
    return remote.count_allocations(row);
}

void finish_case(Remote &remote, const SharedCase &shared, const Inputs &inputs, const Reference &reference,
                 const std::vector<double> &samples, double peak, ResultRow &row) {
    const Case &c = inputs.input_case();
    const Statistics s = statistics(samples);
    row.median_s = s.median;
    row.min_s = s.min;
    row.p90_s = s.p90;
    row.gflops = useful_flops(c) / s.median * 1e-9;
    row.gbps = least_bytes(c) / s.median * 1e-9;
    row.peak_gflops = peak;
    if (peak > 0) row.pct_peak = 100 * *row.gflops / peak;
    remote.check(shared, reference, inputs.tensors(), false, row);
    judge(row);
}

BenchResult bench_case(const BenchCase &bench, const std::vector<std::unique_ptr<Remote>> &contestants,
                       const Machine &machine, int threads, const PeerBenchOptions &options) {
    const Case &c = bench.problem;
    BenchResult result;
    std::vector<size_t> index;
    std::vector<Contestant> running;
    const auto progress = [&](double share, const std::string &name) {
        if (options.progress) options.progress(share, name);
    };
    result.rows.resize(contestants.size());
    result.samples.resize(contestants.size());
    for (size_t i = 0; i < contestants.size(); ++i) {
        Remote &remote = *contestants[i];
        ResultRow &row = result.rows[i];
        row.impl = remote.spec().impl;
        progress(0.3 * double(i) / double(contestants.size()), "preparing " + row.impl);
        if (!enter_case(remote, *bench.shared, *bench.inputs, bench.reference, threads, options.seed, row)) continue;
        Contestant entry;
        entry.name = row.impl;
        entry.timed = [&remote, &row](int calls) { return remote.timed(calls, row); };
        running.push_back(std::move(entry));
        index.push_back(i);
    }
    const auto read = [&] {
        if (!reads_memory(c)) return;
        for (size_t k : index)
            if (result.rows[k].impl == "attune")
                result.read = std::max(result.read, contestants[k]->read_gbps(result.rows[k]).value_or(0));
    };
    // All processes stand while the peak is calibrated.
    result.peak_before = measure_peak_gflops(machine, c.dtype, threads);
    read();
    BenchOptions limits;
    limits.rounds = options.rounds;
    limits.time_limit = options.time_limit;
    limits.hard_limit = std::max(3 * options.time_limit, 0.5);
    limits.sample_seconds = 20e-3; // long against being woken
    limits.calls_multiple = bench.shared->copies();
    limits.progress = [&](double share, const std::string &name) { progress(0.3 + 0.7 * share, name); };
    const auto measured = measure_interleaved(running, limits);
    read();
    result.peak_after = measure_peak_gflops(machine, c.dtype, threads);
    result.peak = std::max(result.peak_before, result.peak_after);

    for (size_t k = 0; k < measured.size(); ++k) {
        ResultRow &row = result.rows[index[k]];
        if (measured[k].failed || measured[k].samples.empty()) {
            row.ok = false;
            continue;
        }
        result.samples[index[k]] = measured[k].samples;
        if (result.read > 0) row.read_gbps = result.read;
        finish_case(*contestants[index[k]], *bench.shared, *bench.inputs, bench.reference, measured[k].samples,
                    result.peak, row);
    }
    return result;
}

const ResultRow *row_of(const std::vector<ResultRow> &rows, const std::string &impl) {
    for (const ResultRow &row : rows)
        if (row.impl == impl && row.median_s) return &row;
    return nullptr;
}

const ResultRow *best_peer(const std::vector<ResultRow> &rows) {
    const ResultRow *best = nullptr;
    for (const ResultRow &row : rows)
        if (row.impl != "attune" && row.impl != kAttuneAgain && row.ok && row.median_s &&
            (!best || *row.median_s < *best->median_s))
            best = &row;
    return best;
}

} // namespace attune::tools
