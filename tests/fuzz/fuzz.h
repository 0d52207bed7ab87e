// What the fuzz targets share. A target is one function of bytes: run by libFuzzer in the ci tier (target `fuzzers`,
// with clang), and over the corpus alone in the default tests (replay.cpp, with any compiler).
#pragma once

#include "lib/error.h"

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <sys/mman.h>
#include <unistd.h>

extern "C" int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

namespace attune::fuzz {

// What must hold, whatever the input.
inline void require(bool holds, const char *what) {
    if (holds) return;
    std::fprintf(stderr, "fuzz: %s\n", what);
    std::abort();
}

// Bytes as a file in memory, for parsers that take a path.
class MemoryFile {
  public:
    MemoryFile(const uint8_t *data, size_t size) : fd_(memfd_create("fuzz", MFD_CLOEXEC)) {
        require(fd_ >= 0 && write(fd_, data, size) == ssize_t(size), "the input could not be made a file");
    }
    ~MemoryFile() { close(fd_); }
    MemoryFile(const MemoryFile &) = delete;
    MemoryFile &operator=(const MemoryFile &) = delete;
    std::string path() const { return "/proc/self/fd/" + std::to_string(fd_); }

  private:
    int fd_;
};

} // namespace attune::fuzz
