// Builds candidates: each a plug-in of one kernel, made by cmake/kernel_set.py in processes of its own, several at
// once, each with a time limit.
#pragma once

#include "child.h"
#include "space.h"

#include <memory>
#include <string>
#include <vector>

namespace attune::tools {

struct BuildJob {
    std::string entry;   // of a catalogue, as JSON
    std::string library; // the plug-in to be made; what is there already stays
    std::string why_not; // empty: it is made
};

class BuildPool {
  public:
    BuildPool(const Toolchain &toolchain, int processes, double seconds_each);
    // Returns when all are built or have failed. Throws Interrupted.
    void build(std::vector<BuildJob *> jobs);

  private:
    Toolchain toolchain_;
    double seconds_each_;
    std::vector<std::unique_ptr<ChildProcess>> servers_;
};

} // namespace attune::tools
