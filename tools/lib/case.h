// A case: one attention problem as a word that can be typed, printed and typed again, e.g.
//
//     f32:b1:h8/2:n1024:m4096:d64/64:causal-br:window=256,0:mask=bool
//
// Parts are separated by colons. The type comes first, the others in any order; what is left out takes its default
// (b1, h1, m=n, d_v=d_k, Hkv=Hq). to_string() writes the shortest form, and parse(to_string(c)) == c.
#pragma once

#include "attune/attune.h"

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace attune::tools {

enum class Layout {
    bhsd, // [B, H, S, D], as the formula is written
    bshd, // [B, S, H, D], as a projection leaves it
    col   // [B, H, D, S]: columns are queries, the convention of the literature
};

enum class Causal { none, top_left, bottom_right };

struct Case {
    attune_dtype dtype = ATTUNE_F32;    // of Q and O
    attune_dtype kv_dtype = ATTUNE_F32; // of K and V
    int64_t B = 1, Hq = 1, Hkv = 1, N = 1, M = 1, dk = 1, dv = 1;
    Causal causal = Causal::none; // bottom_right: the offset is M - N (of each sequence, where they are packed)
    int64_t offset = 0;           // of every batch, unless `offsets` is given
    std::vector<int64_t> offsets; // one per batch; "offset=3," is a list of one
    int64_t window_left = -1, window_right = -1;
    bool mask = false;           // [B,1,1,M], P(True) = 0.8
    bool bias = false;           // [1,Hq,N,M], N(0,1)
    std::vector<int64_t> kv_len; // one per batch; empty: all of M
    // Packed sequences: rows and keys of each, B of them; empty: none. N and M are then the longest that the plan is
    // for.
    std::vector<int64_t> q_lens, k_lens;
    std::optional<float> scale, softcap;
    bool alibi = false, sink = false;
    Layout layout = Layout::bhsd;

    bool operator==(const Case &) const = default;
};

// Throws Error; the message names the part, its value and what was expected.
Case parse_case(std::string_view text);
std::string to_string(const Case &c);

// The problem that the case stands for. A `col` layout sets ATTUNE_STRIDED_V.
attune_problem to_problem(const Case &c);

std::string_view dtype_name(attune_dtype dtype);
std::string_view layout_name(Layout layout);

// Rows and keys of batch element b, and those of all.
int64_t rows_of(const Case &c, int64_t batch);
int64_t keys_of(const Case &c, int64_t batch);
int64_t total_rows(const Case &c);
int64_t total_keys(const Case &c);

// Where row 0 of batch b stands among the keys.
int64_t offset_of(const Case &c, int64_t batch);

// The number of (query, key) pairs of one head, summed over the batch, that causal, window and kv_len leave visible.
// Masks and biases do not count: that is how useful work is defined.
int64_t visible_pairs(const Case &c);
// Useful floating-point operations: 2 (d_k + d_v) Hq * visible_pairs.
double useful_flops(const Case &c);
// Bytes that any kernel has to move: Q, O, and the keys and values that exist.
double least_bytes(const Case &c);

// A short text that lists every part of a case; for --help and error messages.
std::string case_syntax();

} // namespace attune::tools
