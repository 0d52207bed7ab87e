// What compare measures: a named set of arrays that one call runs through. A synthetic case is one attention problem;
// the sentence encoder's is the attention of all of its layers, one after the other.
#pragma once

#include "inputs.h"
#include "reference.h"

#include <memory>
#include <string>
#include <vector>

namespace attune::tools {

struct Workload {
    std::string title; // "" if the case says it all
    std::string input; // where Q, K and V are from
    Case problem;      // of each part
    std::vector<std::unique_ptr<Inputs>> parts;
    std::vector<Reference> references; // one for each part

    double flops() const { return useful_flops(problem) * double(parts.size()); }
    double bytes() const { return least_bytes(problem) * double(parts.size()); }
    int64_t rows_checked() const;
    int64_t rows_total() const;
};

Workload synthetic_workload(const Case &c, uint64_t seed);

// From a safetensors file with "layer{i}.q", ".k", ".v" (f32 [B,H,N,d], [B,H,M,d], [B,H,M,d_v]) and "lengths" (i64
// [B]), as the sentence encoder writes it. Throws Error that names the file, the tensor, what it is and what was
// expected.
Workload model_workload(const std::string &path, const std::string &title);

// Default place of that file: ATTUNE_QKV in the environment, else in the project's data folder.
std::string model_path();

} // namespace attune::tools
