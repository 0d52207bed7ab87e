// Child processes and the conversation with them.
#include "child.h"

#include "results.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstring>
#include <fmt/format.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

extern char **environ;

namespace attune::tools {
namespace {

using Clock = std::chrono::steady_clock;

// The process groups that are running, for the handler of Ctrl-C, which may not look at anything larger.
std::array<std::atomic<pid_t>, 64> groups{};

void remember(pid_t group) {
    static const bool hooked = [] {
        set_exit_hook([] {
            for (auto &g : groups)
                if (const pid_t pid = g.load(); pid > 0) kill(-pid, SIGKILL);
        });
        return true;
    }();
    (void)hooked;
    for (auto &g : groups) {
        pid_t empty = 0;
        if (g.compare_exchange_strong(empty, group)) return;
    }
}

void forget(pid_t group) {
    for (auto &g : groups) {
        pid_t expected = group;
        if (g.compare_exchange_strong(expected, 0)) return;
    }
}

std::vector<std::string> merged_environment(const ChildProcess::Environment &added) {
    std::vector<std::string> all;
    for (char **entry = environ; *entry; ++entry) {
        const std::string text = *entry;
        const auto replaced = [&text](const auto &e) { return text.starts_with(e.first + "="); };
        if (std::none_of(added.begin(), added.end(), replaced)) all.push_back(text);
    }
    for (const auto &[name, value] : added) all.push_back(name + "=" + value);
    return all;
}

std::vector<char *> pointers(std::vector<std::string> &strings) {
    std::vector<char *> list;
    for (std::string &s : strings) list.push_back(s.data());
    list.push_back(nullptr);
    return list;
}

} // namespace

ChildProcess::ChildProcess(const std::vector<std::string> &command, const Environment &environment)
    : name_(command.at(0)) {
    std::vector<std::string> arguments = command, variables = merged_environment(environment);
    const std::vector<char *> argv = pointers(arguments), envp = pointers(variables);
    int ends[2];
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0)
        throw ChildError(fmt::format("{}: no socket pair ({})", name_, std::strerror(errno)));
    log_ = memfd_create("attune-log", MFD_CLOEXEC);
    const pid_t parent = getpid();
    pid_ = fork();
    if (pid_ == 0) {
        // Between fork and exec only what is safe in a signal handler.
        setpgid(0, 0);
        prctl(PR_SET_PDEATHSIG, SIGKILL); // an orphan would measure on
        if (getppid() != parent) _exit(127);
        dup2(ends[1], 0);
        dup2(ends[1], 1);
        if (log_ >= 0) dup2(log_, 2);
        sigset_t none;
        sigemptyset(&none);
        sigprocmask(SIG_SETMASK, &none, nullptr);
        execvpe(argv[0], argv.data(), envp.data());
        dprintf(2, "%s: %s\n", argv[0], std::strerror(errno));
        _exit(127);
    }
    const int error = errno;
    close(ends[1]);
    socket_ = ends[0];
    if (pid_ < 0) {
        close(socket_);
        close(log_);
        throw ChildError(fmt::format("{}: cannot be started ({})", name_, std::strerror(error)));
    }
    setpgid(pid_, pid_); // whoever comes first
    remember(pid_);
}

ChildProcess::~ChildProcess() {
    if (alive()) end();
    if (socket_ >= 0) close(socket_);
    if (log_ >= 0) close(log_);
}

int ChildProcess::end() {
    // The group outlives its leader if a grandchild is still there, so it is killed in any case.
    kill(-pid_, SIGKILL);
    kill(pid_, SIGKILL);
    int status = 0;
    while (waitpid(pid_, &status, 0) < 0 && errno == EINTR) {
    }
    forget(pid_);
    pid_ = -1;
    return status;
}

std::string ChildProcess::last_words() const {
    std::array<char, 4096> text{};
    const off_t size = log_ >= 0 ? lseek(log_, 0, SEEK_END) : 0;
    const off_t from = std::max<off_t>(0, size - off_t(text.size()));
    const ssize_t count = size > 0 ? pread(log_, text.data(), text.size(), from) : 0;
    std::string words(text.data(), size_t(std::max<ssize_t>(count, 0)));
    words.erase(words.find_last_not_of(" \n\r\t") + 1);
    const size_t line = words.rfind('\n');
    return line == std::string::npos ? words : words.substr(line + 1);
}

void ChildProcess::fail_dead(const std::string &what) {
    const std::string words = last_words();
    throw ChildError(words.empty() ? what : fmt::format("{}; its last line: {}", what, words));
}

nlohmann::json ChildProcess::ask(const nlohmann::json &message, double seconds) {
    if (!alive()) throw ChildError("the process has ended");
    const auto ended = [this] {
        // It may have closed its end a moment before it dies: the status is worth waiting for, and then it is killed.
        int status = 0;
        for (int i = 0; i < 50; ++i) {
            const pid_t got = waitpid(pid_, &status, WNOHANG);
            if (got == pid_) {
                kill(-pid_, SIGKILL);
                forget(pid_);
                pid_ = -1;
                break;
            }
            usleep(10000);
        }
        if (alive()) {
            end();
            fail_dead("closed its pipe");
        }
        if (WIFSIGNALED(status))
            fail_dead(fmt::format("crashed: signal {} ({})", WTERMSIG(status), strsignal(WTERMSIG(status))));
        fail_dead(fmt::format("ended with status {}", WEXITSTATUS(status)));
    };
    const std::string text = message.dump() + "\n";
    for (size_t done = 0; done < text.size();) {
        const ssize_t n = send(socket_, text.data() + done, text.size() - done, MSG_NOSIGNAL);
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) ended();
        done += size_t(n);
    }
    const auto deadline = Clock::now() + std::chrono::duration<double>(seconds);
    while (true) {
        const size_t line = received_.find('\n');
        if (line != std::string::npos) {
            const std::string answer = received_.substr(0, line);
            received_.erase(0, line + 1);
            try {
                return nlohmann::json::parse(answer);
            } catch (const nlohmann::json::exception &) {
                end();
                fail_dead(fmt::format("answered '{}' (killed); expected a JSON object", answer.substr(0, 80)));
            }
        }
        const double left = std::chrono::duration<double>(deadline - Clock::now()).count();
        if (left <= 0) {
            end();
            fail_dead(fmt::format("did not answer '{}' within {:.3g} s (killed)", message.value("op", "?"), seconds));
        }
        std::array<pollfd, 2> fds{pollfd{socket_, POLLIN, 0}, pollfd{DeferredInterrupts::fd(), POLLIN, 0}};
        const int ready = poll(fds.data(), fds.size(), int(std::min(left * 1000 + 1, 1e9)));
        if (DeferredInterrupts::requested()) throw Interrupted();
        if (ready <= 0) continue;
        std::array<char, 65536> buffer;
        const ssize_t n = recv(socket_, buffer.data(), buffer.size(), 0);
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) ended();
        received_.append(buffer.data(), size_t(n));
    }
}

void ChildProcess::stop() {
    if (!alive() || stopped_) return;
    kill(-pid_, SIGSTOP);
    int status = 0;
    while (waitpid(pid_, &status, WUNTRACED) < 0 && errno == EINTR) {
    }
    if (WIFSTOPPED(status)) {
        stopped_ = true;
        return;
    }
    forget(pid_);
    pid_ = -1; // it ended by itself; the next question says so
}

void ChildProcess::resume() {
    if (!alive() || !stopped_) return;
    kill(-pid_, SIGCONT);
    stopped_ = false;
}

} // namespace attune::tools
