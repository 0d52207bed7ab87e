// The strict code: attention for one tile of rows that keeps what the fast kernels may lose. They are compiled under
// rules that allow no NaN and no infinity; where one took part (seen on the bits of Q, K, O or the row state), the tile
// is done again here:
//   - a key that is invisible to a row has no influence on it, whatever its K and V hold (every product is guarded);
//   - a NaN or +inf in a visible score makes its row NaN, and no other row.
// It also serves tensors whose strides no kernel takes. Plain C++, sums in double, any strides; slow, and rarely run.
#pragma once

#include "rows.h"

namespace attune::rt {

// User functions of a kernel, on the scaled and capped scores of keys first, first + 1, … of a row: what becomes of
// them, and which are seen (nonzero).
class UserRow {
  public:
    virtual void apply(int64_t b, int64_t h, int64_t i, int64_t first, int64_t count, float *scores,
                       uint8_t *visible) const = 0;

  protected:
    ~UserRow() = default;
};

// Rows of `tile`, keys [keys.begin, keys.end). out: [rows][dv] divided by the sum; row_max in natural units, row_sum
// relative to it.
void strict_attend(const attune_args &args, const Tile &tile, Interval keys, float *out, int64_t out_stride,
                   float *row_max, float *row_sum, const UserRow *user = nullptr);

// Writes the scores output (the problem's scores_stage) for the rows of `tile`.
void strict_scores(const attune_args &args, const Tile &tile, const UserRow *user = nullptr);

} // namespace attune::rt
