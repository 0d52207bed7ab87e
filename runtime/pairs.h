// What adapters do around kernels that multiply pairs of bf16 (vdpbf16ps), in place of tiles.h's passes over floats. A
// pair is 32 bits, the first number in the lower half: two features of Q and K, two keys of V.
//
// The instruction takes denormals for zero and gives zero where the result would be one. So the checks here also find
// the tiles in which that could be seen, and leave them to the strict code: no data that a model makes is among them.
#pragma once

#include "tiles.h"

namespace attune::rt {

// A sum of products is a score only after the scale: a larger one would lift what the instruction takes for zero.
constexpr float kLargestPairScale = 0x1p40f;

// Copies the rows of a tile into [q][dk], zero-padded, as bf16; negated if asked for. False if a NaN, an infinity, a
// denormal or a number from 2^60 on is among them (a denormal of K times such a one is seen in the score), or a
// non-finite ALiBi slope.
bool gather_pairs(const attune_args &args, const Tile &tile, int64_t q, int64_t dk, bool negate, uint16_t *out);

// One packing task of a group, as pack_chunk: keys as [panel][pair of features][key in panel], values as [pair of
// keys][feature], both zero-padded to whole panels. keys and values of `packed` are pairs.
int pack_pairs_chunk(const attune_args &args, const Packed &packed, int64_t task, int64_t max_extent, PackWhole whole,
                     const void *context);

// Whether O is so small that products with V may have been taken for zero, though V has more than zeros in the keys
// [first, last).
bool lost_values(const attune_args &args, const Tile &tile, const Seen &seen, const float *out, int64_t stride);

} // namespace attune::rt
