// Plans that were made before, and each thread's workspace. Making a plan asks every kernel of the registry; a call
// from Python mostly repeats one of a few problems.
#pragma once

#include <attune/attune.hpp>

#include <memory>

namespace attune::python {

// A plan of the cache, or a new one. Safe from several threads.
std::shared_ptr<const Plan> cached_plan(const Problem &problem, const PlanOptions &options);

// The calling thread's. It grows and stays, since memory that is mapped anew at each call costs a tenth of a short one.
Workspace &thread_workspace();

} // namespace attune::python
