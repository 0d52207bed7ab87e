// What runs now, for whoever reads of a memory fault: kernels run against unreadable pages, and a fault is to say which
// kernel on which case it was.
#pragma once

#include <string>

namespace attune::tools {

// `text` is what the calling thread does while this lives; of several, the last one counts.
class Running {
  public:
    explicit Running(const std::string &text);
    ~Running();
    Running(const Running &) = delete;
    Running &operator=(const Running &) = delete;
};

// A fault prints what its thread did (of a thread that said nothing, a worker of the pool: what was said last) and ends
// the process with status 1.
void install_fault_handler();

} // namespace attune::tools
