// A contestant in a process of its own: attune's worker (cmd_worker.cpp) or a peer (bench/peers/). This side writes the
// inputs once, where every contestant reads them, starts the processes, keeps all but one stopped, and asks.
#pragma once

#include "child.h"
#include "machine.h"
#include "reference.h"
#include "results.h"

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace attune::tools {

class Inputs;
struct Case;

// An unnamed file in memory; others open it by its path. Nothing is left behind, however this process ends.
class SharedFile {
  public:
    explicit SharedFile(size_t bytes);
    ~SharedFile();
    SharedFile(const SharedFile &) = delete;
    SharedFile &operator=(const SharedFile &) = delete;
    void *data() const { return data_; }
    size_t size() const { return size_; }
    std::string path() const;

  private:
    int file_ = -1;
    void *data_ = nullptr;
    size_t size_ = 0;
};

// Reading K and V is what takes the time: few operations a byte, and many more keys than queries. Such a case is
// measured outside the caches (design §9).
bool reads_memory(const Case &c);
// So many copies of K and V that they are 4 x L3 together; 1 where reads_memory() is false.
int copies_needed(const Case &c, const Machine &machine);

// One problem's arrays, dense [B, H, S, D], for all contestants.
class SharedCase {
  public:
    SharedCase(const Inputs &inputs, uint64_t seed, int copies);
    nlohmann::json prepare_message(int threads) const;
    const SharedFile &output() const { return *output_; }
    int copies() const { return copies_; }

  private:
    nlohmann::json message_;
    std::vector<std::unique_ptr<SharedFile>> files_;
    std::unique_ptr<SharedFile> output_;
    int copies_;
};

struct RemoteSpec {
    std::string impl; // "attune", or the peer's name
    std::vector<std::string> command;
    ChildProcess::Environment environment;
    std::string missing; // why it cannot run at all; empty: it can
};

struct RemoteLimits {
    double start = 180;   // seconds until the process answers: imports
    double prepare = 300; // compiling included
    double call = 60;     // of warm calls and calls together, over what they should take
};

class Remote {
  public:
    Remote(RemoteSpec spec, RemoteLimits limits) : spec_(std::move(spec)), limits_(limits) {}

    const RemoteSpec &spec() const { return spec_; }
    const std::string &version() const { return version_; }

    // Each leaves the process stopped. False: `row` says why (the process may have ended; the next prepare starts a new
    // one).
    bool prepare(const SharedCase &shared, int threads, ResultRow &row);
    bool check(const SharedCase &shared, const Reference &reference, attune_tensors outputs, bool first,
               ResultRow &row);
    bool count_allocations(ResultRow &row);
    std::optional<double> timed(int calls, ResultRow &row);
    // GB/s of the read loop on the contestant's own K and V, with its threads; only attune's worker can.
    std::optional<double> read_gbps(ResultRow &row);
    void quit() { process_.reset(); }

  private:
    std::optional<nlohmann::json> ask(const nlohmann::json &message, double limit, ResultRow &row);
    bool start(ResultRow &row);

    RemoteSpec spec_;
    RemoteLimits limits_;
    std::unique_ptr<ChildProcess> process_;
    std::string version_;
    double estimate_ = 0; // seconds a call
};

} // namespace attune::tools
