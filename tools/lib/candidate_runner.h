// Runs candidates of attune tune in two processes (tune_worker.h): one for a candidate's first run, where it can do no
// harm, and one that times those that were right. Whatever a candidate does to either, it is restarted.
#pragma once

#include "child.h"
#include "trial.h"

#include <memory>
#include <set>
#include <string>
#include <vector>

namespace attune::tools {

class CandidateRunner {
  public:
    CandidateRunner(const Case &whole, const Case &shorter, int threads, uint64_t seed, double run_limit)
        : whole_(whole), shorter_(shorter), threads_(threads), seed_(seed), run_limit_(run_limit) {}

    // The planner's choice where no store has a say. Throws Error where there is none.
    std::string default_kernel();
    // Against float64; sets status and why.
    void check(Trial &trial);
    // On `count` small random problems with everything that the kernel claims; sets status and why where it fails.
    bool check_random(Trial &trial, int count);
    // Seconds of each in the same rounds, for one of the two cases; the first is the default, with which the others are
    // compared. Empty for those that failed, crashed or are cut off as too slow: their status says so.
    std::vector<std::vector<double>> time(const Case &c, const std::vector<Trial *> &trials, int rounds,
                                          double seconds);

  private:
    ChildProcess &checker();
    ChildProcess &timer();
    std::unique_ptr<ChildProcess> start(const std::vector<Case> &cases, bool guarded);
    bool load(ChildProcess &child, Trial &trial);

    const Case whole_, shorter_;
    const int threads_;
    const uint64_t seed_;
    const double run_limit_;
    std::unique_ptr<ChildProcess> checker_, timer_;
    std::set<std::string> loaded_; // by the timer
};

} // namespace attune::tools
