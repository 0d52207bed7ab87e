#include "running.h"

#include <algorithm>
#include <csignal>
#include <cstring>
#include <mutex>
#include <unistd.h>

namespace attune::tools {
namespace {

// Fixed buffers: a signal handler may not allocate.
constexpr size_t kMost = 2048;
thread_local char mine[kMost];
char anyone[kMost];
std::mutex mutex; // of `anyone`

void keep(char *to, const std::string &text) {
    const size_t n = std::min(text.size(), kMost - 1);
    std::memcpy(to, text.data(), n);
    to[n] = '\0';
}

void print(const char *text) {
    if (write(STDERR_FILENO, text, std::strlen(text)) < 0) _exit(3);
}

extern "C" void on_memory_fault(int) {
    print("\nMemory outside the arrays was touched, or something crashed, during: ");
    print(*mine ? mine : *anyone ? anyone : "no run of a kernel");
    print("\n");
    _exit(1);
}

} // namespace

Running::Running(const std::string &text) {
    keep(mine, text);
    const std::lock_guard lock(mutex);
    keep(anyone, text);
}

Running::~Running() {
    keep(mine, "");
    const std::lock_guard lock(mutex);
    keep(anyone, "");
}

void install_fault_handler() {
    static char stack[64 * 1024]; // of its own, so that an overflow of the kernel's stack is reported too
    stack_t alternative{};
    alternative.ss_sp = stack;
    alternative.ss_size = sizeof stack;
    sigaltstack(&alternative, nullptr);
    struct sigaction action {};
    action.sa_handler = on_memory_fault;
    action.sa_flags = SA_ONSTACK;
    sigemptyset(&action.sa_mask);
    for (int signal : {SIGSEGV, SIGBUS, SIGILL, SIGFPE}) sigaction(signal, &action, nullptr);
}

} // namespace attune::tools
