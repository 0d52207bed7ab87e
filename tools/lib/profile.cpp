// Sampling by a timer's signal, symbols by nm, loops by objdump.
#include "profile.h"

#include "error.h"
#include "manifest.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstring>
#include <ctime>
#include <filesystem>
#include <link.h>
#include <map>
#include <sstream>
#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>

namespace attune::tools {
namespace {

using Clock = std::chrono::steady_clock;

constexpr size_t kMostSamples = 1 << 16;
constexpr long kInterval = 230'000; // ns; no divisor of anything that a kernel does

std::array<uintptr_t, kMostSamples> samples;
volatile sig_atomic_t taken = 0;

#if defined(__x86_64__) && defined(__linux__)
void on_sample(int, siginfo_t *, void *context) {
    if (size_t(taken) >= kMostSamples) return;
    samples[size_t(taken)] = uintptr_t(static_cast<ucontext_t *>(context)->uc_mcontext.gregs[REG_RIP]);
    taken = taken + 1;
}

// While an object of this class lives, this thread is sampled.
class Sampler {
  public:
    Sampler() {
        taken = 0;
        struct sigaction action {};
        action.sa_sigaction = on_sample;
        action.sa_flags = SA_SIGINFO | SA_RESTART;
        sigaction(SIGPROF, &action, &before_);
        sigevent event{};
        event.sigev_notify = SIGEV_THREAD_ID;
        event.sigev_signo = SIGPROF;
        event._sigev_un._tid = pid_t(syscall(SYS_gettid));
        if (timer_create(CLOCK_MONOTONIC, &event, &timer_) != 0)
            fail("no timer for sampling ({})", std::strerror(errno));
        const itimerspec times{{0, kInterval}, {0, kInterval}};
        timer_settime(timer_, 0, &times, nullptr);
    }
    ~Sampler() {
        timer_delete(timer_);
        sigaction(SIGPROF, &before_, nullptr);
    }
    Sampler(const Sampler &) = delete;
    Sampler &operator=(const Sampler &) = delete;

  private:
    struct sigaction before_ {};
    timer_t timer_{};
};
constexpr bool kCanSample = true;
#else
struct Sampler {};
constexpr bool kCanSample = false;
#endif

// Where this program was loaded.
uintptr_t load_address() {
    uintptr_t base = 0;
    dl_iterate_phdr(
        [](dl_phdr_info *info, size_t, void *out) {
            *static_cast<uintptr_t *>(out) = info->dlpi_addr;
            return 1; // the first is the program
        },
        &base);
    return base;
}

struct Symbol {
    uint64_t address;
    std::string name;
};

std::vector<Symbol> read_symbols(const std::string &program) {
    std::string output;
    if (run_program({"nm", "--defined-only", "-n", "-C", program}, output) != 0) return {};
    std::vector<Symbol> symbols;
    std::istringstream lines(output);
    for (std::string line; std::getline(lines, line);) {
        if (line.size() < 20 || (line[17] != 't' && line[17] != 'T' && line[17] != 'W' && line[17] != 'w')) continue;
        symbols.push_back({std::stoull(line.substr(0, 16), nullptr, 16), line.substr(19)});
    }
    return symbols;
}

bool starts_with_any(const std::string &text, const std::vector<std::string> &prefixes) {
    return std::any_of(prefixes.begin(), prefixes.end(), [&](const std::string &p) { return text.starts_with(p); });
}

// "attune::rt::mlir::attend_phase<…>(…)" without what only a compiler reads.
std::string short_name(const std::string &name) {
    return name.substr(0, name.find_first_of("<("));
}

struct Instruction {
    uint64_t address, target; // target of a jump, else 0
    std::string mnemonic, operands;
};

std::vector<Instruction> parse(const std::string &disassembly) {
    std::vector<Instruction> code;
    std::istringstream lines(disassembly);
    for (std::string line; std::getline(lines, line);) {
        const size_t colon = line.find(":\t");
        if (colon == std::string::npos || line[0] != ' ') continue;
        Instruction i{};
        i.address = std::strtoull(line.c_str(), nullptr, 16);
        std::istringstream words(line.substr(colon + 2));
        words >> i.mnemonic;
        std::getline(words >> std::ws, i.operands);
        if (i.mnemonic.starts_with("j")) i.target = std::strtoull(i.operands.c_str(), nullptr, 16);
        code.push_back(std::move(i));
    }
    return code;
}

bool is_multiply_add(const std::string &m) {
    return m.starts_with("vfmadd") || m.starts_with("vfnmadd") || m.starts_with("vfmsub") || m == "vdpbf16ps" ||
           m == "mulps";
}

bool is_of_softmax(const std::string &m) {
    for (const char *start :
         {"vcvttps", "cvttps", "vcvtps2dq", "vrndscale", "vround", "vmaxps", "maxps", "vscalef", "vexp"})
        if (m.starts_with(start)) return true;
    return false;
}

} // namespace

std::string loop_kind_name(LoopKind kind) {
    return kind == LoopKind::matmul ? "matmul" : kind == LoopKind::softmax ? "softmax" : "moving";
}

std::vector<Loop> find_loops(const std::string &disassembly) {
    const auto code = parse(disassembly);
    std::map<uint64_t, uint64_t> ends; // from a jump's target to the last jump back to it
    for (const Instruction &i : code)
        if (i.target && i.target <= i.address && i.target >= code.front().address)
            ends[i.target] = std::max(ends[i.target], i.address);
    std::vector<Loop> loops;
    for (const auto &[begin, end] : ends) {
        const auto inner = ends.upper_bound(begin);
        if (inner != ends.end() && inner->second <= end) continue; // the next to begin ends within: not innermost
        Loop loop{begin, end};
        bool softmax = false;
        for (const Instruction &i : code) {
            if (i.address < begin || i.address > end) continue;
            ++loop.instructions;
            loop.fma += is_multiply_add(i.mnemonic);
            softmax = softmax || is_of_softmax(i.mnemonic);
            // AT&T order: a memory operand that is not the last is read.
            const size_t bracket = i.operands.find('(');
            const bool vector = i.operands.find("mm") != std::string::npos;
            loop.loads += vector && bracket != std::string::npos &&
                          i.operands.find(',', i.operands.find(')', bracket)) != std::string::npos;
        }
        loop.kind = softmax                             ? LoopKind::softmax
                    : 5 * loop.fma >= loop.instructions ? LoopKind::matmul
                                                        : LoopKind::moving;
        loops.push_back(loop);
    }
    return loops;
}

Profile profile_calls(const std::function<void()> &run, const std::vector<std::string> &prefixes, double seconds) {
    Profile profile;
    if (!kCanSample) {
        profile.missing = "sampling is for x86-64 on Linux";
        return profile;
    }
    const std::string program = std::filesystem::read_symlink("/proc/self/exe");
    const auto symbols = read_symbols(program);
    if (symbols.empty()) {
        profile.missing =
            fmt::format("nm finds no symbols in {}; expected binutils, and a program that is not stripped", program);
        return profile;
    }
    {
        const Sampler sampler;
        const auto start = Clock::now();
        while (std::chrono::duration<double>(Clock::now() - start).count() < seconds) run();
    }
    const size_t count = size_t(taken);
    profile.samples = int64_t(count);
    if (count == 0) {
        profile.missing = "the timer never fired";
        return profile;
    }

    std::map<size_t, std::vector<uint64_t>> by_symbol; // addresses in the file
    const uintptr_t base = load_address();
    int64_t elsewhere = 0; // libraries
    for (size_t i = 0; i < count; ++i) {
        const uint64_t address = samples[i] - base;
        const auto next = std::upper_bound(symbols.begin(), symbols.end(), address,
                                           [](uint64_t a, const Symbol &s) { return a < s.address; });
        if (next == symbols.begin() || next == symbols.end())
            ++elsewhere;
        else
            by_symbol[size_t(next - symbols.begin()) - 1].push_back(address);
    }
    const auto share = [count](size_t n) { return double(n) / double(count); };
    std::map<std::string, double> parts, functions;
    if (elsewhere) functions["the C library and others"] = share(size_t(elsewhere));
    parts["around"] = share(size_t(elsewhere));
    for (const auto &[index, addresses] : by_symbol) {
        const std::string &name = symbols[index].name;
        if (!starts_with_any(name, prefixes)) {
            functions[short_name(name)] += share(addresses.size());
            parts["around"] += share(addresses.size());
            continue;
        }
        std::string text;
        run_program({"objdump", "-d", "--no-show-raw-insn",
                     fmt::format("--start-address={:#x}", symbols[index].address),
                     fmt::format("--stop-address={:#x}", symbols[index + 1].address), program},
                    text);
        const auto loops = find_loops(text);
        std::vector<size_t> hits(loops.size(), 0);
        size_t between = addresses.size();
        for (uint64_t address : addresses)
            for (size_t k = 0; k < loops.size(); ++k)
                if (address >= loops[k].begin && address <= loops[k].end) {
                    ++hits[k];
                    --between;
                    break;
                }
        for (size_t k = 0; k < loops.size(); ++k) {
            if (!hits[k]) continue;
            parts[loop_kind_name(loops[k].kind)] += share(hits[k]);
            profile.loops.push_back({name, loops[k], share(hits[k])});
        }
        parts["between"] += share(between);
    }
    for (const char *name : {"matmul", "softmax", "moving", "between", "around"})
        profile.parts.push_back({name, parts[name]});
    for (const auto &[name, value] : functions) profile.functions.push_back({name, value});
    const auto larger = [](const auto &a, const auto &b) { return a.share > b.share; };
    std::stable_sort(profile.loops.begin(), profile.loops.end(), larger);
    std::stable_sort(profile.functions.begin(), profile.functions.end(), larger);
    return profile;
}

} // namespace attune::tools
