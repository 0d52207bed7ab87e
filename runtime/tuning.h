// The tuning store: which kernel `attune tune` found fastest for a bucket of problems on this machine. The planner asks
// it before its ranking; docs/tuning.md describes the file.
#pragma once

#include "attune/attune.h"

#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace attune::rt {

// CPU, ISA, cores and caches: results of one machine say nothing about another.
const std::string &machine_key();
// The state of generators, adapters and compilers that this library was built with.
const char *sources_hash();
// $XDG_CACHE_HOME/attune, else ~/.cache/attune; empty where there is neither.
std::string cache_folder();
// What ATTUNE_TUNING says, else the machine's file in the cache folder; empty: off.
std::string tuning_path();

// Problems for which one result stands: everything that changes which kernel is fastest (types, d, flags, threads …) as
// text, and the sizes in half octaves.
struct Bucket {
    std::string kind;
    int rows = 0, keys = 0, heads = 0;
    bool operator==(const Bucket &) const = default;
};
Bucket bucket_of(const attune_problem &problem, int threads);

struct TuningEntry {
    Bucket bucket;
    std::string sources, kernel;
    std::string library;   // the plug-in that has the kernel; empty: it is built in
    std::string case_text; // that it was found for
    double speedup = 1;    // over the planner's choice
};
// A line of the file, with its checksum, without the newline. Parsing gives false for anything damaged.
std::string to_line(const TuningEntry &entry);
bool parse_line(std::string_view line, TuningEntry &entry);
std::string tuning_header(); // the first line

class TuningStore {
  public:
    TuningStore() = default;
    explicit TuningStore(const std::string &path); // a file that is not there is an empty store
    // Of this bucket, or of the nearest one at most two steps away. nullptr: none.
    const TuningEntry *find(const Bucket &bucket) const;
    // All lines that are whole, of other states of the generators too.
    const std::vector<TuningEntry> &entries() const { return entries_; }
    const std::string &warning() const { return warning_; } // what is wrong with the file

  private:
    std::vector<TuningEntry> entries_;
    std::unordered_map<std::string, std::unordered_map<uint64_t, size_t>> places_; // kind -> sizes -> entry
    std::string warning_;
};

// The one that plans are made by: tuning_path(), read when the first plan is made.
const TuningStore &tuning_store();

} // namespace attune::rt
