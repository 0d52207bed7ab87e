// The peers of compare --peers: other processes, which stand still while a kernel of this one runs.
#pragma once

#include "bench.h"
#include "peer_bench.h"
#include "workload.h"

#include <memory>
#include <vector>

namespace attune::tools {

class PeerRows {
  public:
    explicit PeerRows(bool wanted); // otherwise there are none
    size_t size() const { return remotes_.size(); }

    // Prepares and checks each; rows[i] is peer i's and must stay where it is. Adds a contestant for each that can take
    // part; returns which.
    std::vector<size_t> enter(const Workload &workload, int threads, uint64_t seed,
                              const std::vector<ResultRow *> &rows, std::vector<Contestant> &contestants);
    void finish(const Workload &workload, size_t peer, const std::vector<double> &samples, double peak, ResultRow &row);

  private:
    std::vector<std::unique_ptr<Remote>> remotes_;
    std::unique_ptr<SharedCase> shared_;
};

} // namespace attune::tools
