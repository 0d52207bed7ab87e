// The truth that kernels are compared with, computed here from the contract alone, with no code of the runtime.
//
//   O64   float64 attention from the same inputs
//   Oref  the plain stages (scaled score, mask, softmax, matmul), each stored in the input type, sums left to right in
//   f32 bound max|O - O64| <= 2 max|Oref - O64| + eps (8 + 4 max|s|) max|V|,   eps of O's type
//         LSE: twice the reference's error + 8 eps32 max(1, |LSE|)
//
// A large problem is checked on a sample of rows, evenly spaced with the first and the last among them.
#pragma once

#include "attune/attune.h"

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace attune::tools {

struct ReferenceOptions {
    // Multiply-adds that may be spent on O64 (Oref costs as much again). All rows are computed if they fit.
    int64_t budget = 64'000'000;
    int64_t least_rows = 32;
    // User functions: what becomes of a score behind the soft cap; false where they hide the key. Empty: there are
    // none.
    std::function<bool(int64_t b, int64_t h, int64_t q, int64_t k, double &score)> user = {};
};

struct Reference {
    attune_problem problem{};
    int64_t total_rows = 0;                   // B Hq N (packed sequences: Hq times the rows of all)
    std::vector<int64_t> rows;                // the rows computed, ascending: (b Hq + h) N + i (packed: h total + row)
    std::vector<double> o, o_plain;           // [rows, dv]: O64, Oref
    std::vector<double> lse, lse_plain;       // [rows]
    std::vector<double> scores, scores_plain; // [rows, M], if the problem asks for scores
    double max_score = 0, max_value = 0;      // of what is visible: |s|, |V|
    double o_bound = 0;                       // for max|O - O64|
    double lse_plain_error = 0;               // max|LSEref - LSE64|
    double scores_bound = 0;
    bool finite = true; // no computed row is NaN or infinite

    double lse_bound(size_t row) const; // for |LSE - LSE64| of one row
};

// `tensors` as for attune_run; reads Q, K, V and the optional inputs, writes nothing.
Reference make_reference(const attune_problem &problem, const attune_tensors &tensors,
                         const ReferenceOptions &options = {});

struct Verdict {
    bool ok = true;
    double o_error = 0, o_bound = 0;
    double lse_error = 0, lse_bound = 0; // of the row that is worst in relation to its bound
    double scores_error = 0, scores_bound = 0;
    int64_t rows_checked = 0, rows_total = 0;
    std::string why; // the first element that is wrong: which, what it is, what was expected
};

// Compares O (and LSE and scores where given) in `tensors` with the reference.
Verdict check_outputs(const Reference &reference, const attune_tensors &tensors);

} // namespace attune::tools
