// Where a kernel's time goes, by sampling the kernel itself: no other build of it, no counters in it. A timer
// interrupts the thread that runs it some thousand times a second; the addresses are put to the innermost loops of its
// machine code, and the loops told apart by their instructions.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace attune::tools {

// What a loop does, by its instructions: 40 % multiply-adds and more are a matmul; rounding, converting or taking
// maxima of floats is softmax; the rest moves data.
enum class LoopKind { matmul, softmax, moving };
std::string loop_kind_name(LoopKind kind);

struct Loop {
    uint64_t begin = 0, end = 0; // addresses of its first and last instruction
    int instructions = 0, fma = 0, loads = 0;
    LoopKind kind = LoopKind::moving;
};

// The innermost loops in `objdump -d --no-show-raw-insn` of a function.
std::vector<Loop> find_loops(const std::string &disassembly);

struct Profile {
    struct Part {
        std::string
            name; // "matmul", "softmax", "moving", "between" (the kernel, outside its innermost loops), "around"
        double share = 0; // of all samples
    };
    struct HotLoop {
        std::string function;
        Loop loop;
        double share = 0;
    };
    int64_t samples = 0;
    std::vector<Part> parts;     // all five
    std::vector<HotLoop> loops;  // largest share first
    std::vector<Part> functions; // that are not the kernel's, largest share first
    std::string missing;         // why there is no profile
};

// Calls `run` for about so many seconds on this thread. `prefixes`: the names of the kernel's own functions begin with
// one of them (ManifestPhase::function).
Profile profile_calls(const std::function<void()> &run, const std::vector<std::string> &prefixes, double seconds);

} // namespace attune::tools
