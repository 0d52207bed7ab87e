// Writing side of the tuning store (runtime/tuning.h reads it), the plug-ins beside it, and what was tried so far.
#pragma once

#include "case.h"
#include "runtime/tuning.h"

#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

namespace attune::tools {

// Folders below the cache folder, made if they are not there. Throws Error where they cannot be.
std::string kernels_folder(); // of this state of the generators
std::string trials_folder();

// The result of this very case, if there is one of this state of the generators.
std::optional<rt::TuningEntry> stored_result(const Case &c, int threads);
// Results of other cases of the same kind, the nearest first.
std::vector<rt::TuningEntry> near_results(const Case &c, int threads, size_t most);

// Throws Error now rather than after a long search if the store cannot be written.
void check_store();
// Adds an entry, in place of that of the same bucket and case: the whole file or nothing, one process at a time.
void store_result(const rt::TuningEntry &entry);

// Loads the plug-ins that the planner would take for these cases. Failures are messages, never errors.
std::vector<std::string> load_tuned(const std::vector<Case> &cases, const std::vector<int> &threads);

// What a search knows: a JSON object a (case, threads). An unreadable or damaged file is an empty one.
nlohmann::json read_trials(const Case &c, int threads);
void write_trials(const Case &c, int threads, const nlohmann::json &trials);

// The catalogue entries of all stored kernels of this state of the generators, with what they gained.
nlohmann::ordered_json stored_catalogue(const std::vector<std::string> &catalogues);

} // namespace attune::tools
