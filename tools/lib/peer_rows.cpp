// Peers as rows of a table of kernels.
#include "peer_rows.h"

#include "peers.h"

namespace attune::tools {

PeerRows::PeerRows(bool wanted) {
    if (!wanted) return;
    for (RemoteSpec &spec : peer_specs()) remotes_.push_back(std::make_unique<Remote>(std::move(spec), RemoteLimits{}));
}

std::vector<size_t> PeerRows::enter(const Workload &workload, int threads, uint64_t seed,
                                    const std::vector<ResultRow *> &rows, std::vector<Contestant> &contestants) {
    std::vector<size_t> entered;
    if (remotes_.empty()) return entered;
    const bool one = workload.parts.size() == 1;
    shared_ = one ? std::make_unique<SharedCase>(*workload.parts[0], seed, 1) : nullptr;
    for (size_t i = 0; i < remotes_.size(); ++i) {
        Remote &remote = *remotes_[i];
        ResultRow &row = *rows[i];
        if (!one) {
            row.impl = remote.spec().impl;
            row.case_text = to_string(workload.problem);
            row.threads = threads;
            row.why_not = "takes one problem at a time, not a model's layers; expected --case";
            continue;
        }
        if (!enter_case(remote, *shared_, *workload.parts[0], workload.references[0], threads, seed, row)) continue;
        Contestant c;
        c.name = row.impl;
        c.timed = [&remote, &row](int calls) { return remote.timed(calls, row); };
        contestants.push_back(std::move(c));
        entered.push_back(i);
    }
    return entered;
}

void PeerRows::finish(const Workload &workload, size_t peer, const std::vector<double> &samples, double peak,
                      ResultRow &row) {
    finish_case(*remotes_[peer], *shared_, *workload.parts[0], workload.references[0], samples, peak, row);
}

} // namespace attune::tools
