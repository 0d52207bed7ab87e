// The commands of the attune tool. Each file cmd_*.cpp adds one to the parser; its callback sets the exit status.
#pragma once

#include "lib/case.h"
#include "lib/results.h"
#include "lib/runner.h"

#include <CLI/CLI.hpp>
#include <string>
#include <vector>

namespace attune::tools {

// Exit statuses: 0 all well, 1 something was checked and is not, 2 the question was wrong.
struct Status {
    int code = 0;
};

// The flags that commands share.
struct CommonOptions {
    std::vector<std::string> case_texts, strategies;
    std::string device = "cpu", json;
    std::vector<int> threads;
    uint64_t seed = 0;

    void add_to(CLI::App &command);
    std::vector<Case> cases() const;        // and loads what tune has found for them
    KernelFilter filter() const;            // names checked
    std::vector<int> thread_counts() const; // all cores if none were given
    void check_json() const;
};

// What tune has found for a case, so that the planner can take it; says on stderr what is wrong with it.
void load_tuned_for(const Case &c, int threads);

void add_bench(CLI::App &app, Status &status);
void add_build(CLI::App &app, Status &status);
void add_compare(CLI::App &app, Status &status);
void add_explain(CLI::App &app, Status &status);
void add_tune(CLI::App &app, Status &status);
void add_verify(CLI::App &app, Status &status);
void add_info(CLI::App &app, Status &status);
void add_onnx_attention(CLI::App &app, Status &status);
void add_worker(CLI::App &app, Status &status); // hidden: bench and tune start it

} // namespace attune::tools
