// A child process that answers: one JSON object a line to it, one back. For contestants that live in processes of their
// own, are stopped while another one runs, and may crash, hang or print what they like.
#pragma once

#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>
#include <sys/types.h>
#include <utility>
#include <vector>

namespace attune::tools {

// The child ended, did not answer in time, or answered nonsense. The text says so, with the end of what it printed.
class ChildError : public std::runtime_error {
  public:
    using std::runtime_error::runtime_error;
};

// Ctrl-C while waiting for an answer (see DeferredInterrupts in results.h).
class Interrupted : public std::exception {
  public:
    const char *what() const noexcept override { return "interrupted"; }
};

class ChildProcess {
  public:
    using Environment = std::vector<std::pair<std::string, std::string>>; // added to this process's own

    // Its standard input and output are the two ends of the conversation; standard error goes to a file that is read
    // when it fails. Throws ChildError if the program cannot be started.
    ChildProcess(const std::vector<std::string> &command, const Environment &environment);
    ~ChildProcess(); // with all of its own children
    ChildProcess(const ChildProcess &) = delete;
    ChildProcess &operator=(const ChildProcess &) = delete;

    // Sends, and waits at most so many seconds. Where the answer is late or the process has ended, it is killed, and
    // alive() is false from then on.
    nlohmann::json ask(const nlohmann::json &message, double seconds);
    bool alive() const { return pid_ > 0; }
    pid_t pid() const { return pid_; }

    void stop();   // SIGSTOP to all of its processes, and waits until they stand
    void resume(); // SIGCONT

  private:
    [[noreturn]] void fail_dead(const std::string &what);
    int end(); // kills what is left; returns the wait status
    std::string last_words() const;

    pid_t pid_ = -1;
    int socket_ = -1, log_ = -1;
    std::string name_, received_;
    bool stopped_ = false;
};

} // namespace attune::tools
