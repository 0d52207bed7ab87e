// The counter of malloc_counter.cpp as C functions, which a Python process that has the library preloaded finds by
// name.
#pragma once

#include <cstdint>

extern "C" {
__attribute__((visibility("default"))) void attune_count_begin(void);
__attribute__((visibility("default"))) int64_t attune_count_now(void);
__attribute__((visibility("default"))) int64_t attune_count_end(void);
__attribute__((visibility("default"))) int attune_count_available(void);
}
