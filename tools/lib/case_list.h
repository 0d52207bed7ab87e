// Cases with weights, from files: what attune tune --cases and --model share their time by.
#pragma once

#include "case.h"

#include <string>
#include <vector>

namespace attune::tools {

struct WeightedCase {
    Case c;
    double count = 1; // how often it occurs
    // Of all the time that is spent in it: what its operations or its bytes take at least, roughly, times the count.
    double weight() const;
};

// A suite of bench (JSON: {"cases": […]}), or lines of text, "CASE [COUNT]", with # for comments. A case that stands
// there twice counts twice. Throws Error that names the file and the line.
std::vector<WeightedCase> read_cases(const std::string &path);

// The attention problems in a safetensors file with "NAME.q", "NAME.k", "NAME.v" ([B, H, N, d] …) for each layer, as
// the sentence encoder writes it (and "lengths", I64 [B], for kv_len). Throws Error that names the file and the tensor.
std::vector<WeightedCase> model_cases(const std::string &path);

} // namespace attune::tools
