// Which instruction sets this CPU and its operating system offer, and which of them dispatch may use.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace attune::rt {

// ISA tokens, weakest first. A kernel's `isa` is one of them.
inline constexpr std::string_view kIsas[] = {"sse41", "avx2", "avx512", "avx512_bf16"};

// Rank of a token in kIsas, or -1.
int isa_rank(std::string_view isa);

// The best ISA that the CPU has.
std::string_view detected_isa();

// The ceiling for dispatch: detected_isa(), or ATTUNE_ISA where that is lower. An ATTUNE_ISA that is unknown or that
// the CPU lacks leaves `error` non-empty; planning then fails with that text.
std::string_view dispatch_isa(std::string *error = nullptr);

bool cpu_has(std::string_view isa);

} // namespace attune::rt
