// The other side of remote.h for contestants written in C++: reads questions from standard input, answers on standard
// output (the protocol is described in bench/peers/peer.py).
#pragma once

#include "inputs.h"

#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <vector>

namespace attune::tools {

class WorkerContestant {
  public:
    virtual ~WorkerContestant() = default;
    virtual std::string version() const = 0;
    // For the problem in copies_[0]->input_case(). Returns the answer: {"ok": true, …} or {"cannot": …}.
    virtual nlohmann::json prepare(int threads) = 0;
    virtual void call(size_t copy) = 0; // throws Error

  protected:
    // One call on each copy, for the first time: adds "peak" and "growth" to the answer.
    void measure_memory(nlohmann::json &answer);

    friend int serve(WorkerContestant &contestant);
    int threads_ = 1;
    std::vector<std::unique_ptr<Inputs>> copies_; // each with its own output
};

// Answers one JSON object a line with another, until the other side closes or says quit; exceptions become {"error":
// …}. Returns the exit status.
int answer_questions(const std::function<nlohmann::json(const nlohmann::json &)> &answer);
int serve(WorkerContestant &contestant);

std::unique_ptr<WorkerContestant> make_attune_worker();
// An unfused attention on OpenBLAS, whose library is loaded from `path`. Throws Error.
std::unique_ptr<WorkerContestant> make_openblas_worker(const std::string &path);

} // namespace attune::tools
