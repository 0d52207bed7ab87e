// Counts the process's allocations, by standing in for malloc and its relatives.
#pragma once

#include <cstdint>

namespace attune::contract {

// False where another tool (a sanitizer) already stands in for malloc.
bool can_count_allocations();
// Calls of malloc, calloc, realloc, aligned_alloc, posix_memalign, memalign and (through them) operator new so far, by
// all threads.
int64_t allocations();
// Of the calling thread's allocations from now on, number `after` (from 0) and all later ones fail; a negative number
// ends that.
void fail_allocations(int64_t after);

} // namespace attune::contract
