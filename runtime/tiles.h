// What the adapters of every compiler do around a kernel's function: cut the work into tiles, gather the rows of a
// tile, find out what they see, pack K, look for infinities and NaN, and put the results where they belong.
#pragma once

#include "rows.h"

#include <cstddef>
#include <cstdint>

// The passes over a tile's numbers are compiled for AVX2 too: as SSE2 they take 2 % of the time at n 1024, d 64.
// (Resolvers run before the sanitizers are ready.)
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__) &&                           \
    !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define ATTUNE_VECTOR_CLONES __attribute__((target_clones("avx2", "default")))
#else
#define ATTUNE_VECTOR_CLONES
#endif

namespace attune::rt {

constexpr float kLog2e = 1.44269504088896341f, kLn2 = 0.693147180559945309f;
constexpr int32_t kNonFinite = 0x7f800000; // smallest magnitude, as an integer, of an infinity or NaN in f32
// Panels that one packing task does: 64 KiB at d 64, read again from L2 by the bit test.
constexpr int64_t kPackChunk = 8;

constexpr int64_t ceil_div(int64_t a, int64_t b) {
    return (a + b - 1) / b;
}
constexpr int64_t round_up(int64_t a, int64_t b) {
    return ceil_div(a, b) * b;
}
constexpr size_t align64(size_t n) {
    return (n + 63) & ~size_t(63);
}

// Hands out pieces of a block of memory, 64-byte aligned. With a null base it only counts.
class Pieces {
  public:
    explicit Pieces(void *base) : base_(static_cast<char *>(base)) {}
    template <typename T> T *take(int64_t count) {
        T *p = base_ ? reinterpret_cast<T *>(base_ + used_) : nullptr;
        used_ += align64(size_t(count) * sizeof(T));
        return p;
    }
    size_t used() const { return used_; }

  private:
    char *base_;
    size_t used_ = 0;
};

// Copies the rows of a tile into [q][dk] of f32, times `scale`; the rest is zero. False if a NaN or an infinity is
// among them or among the slopes of their heads.
bool gather_query(const attune_args &args, const Tile &tile, int64_t q, int64_t dk, float scale, float *out);

// ALiBi's slopes go into the scores as well, where a maximum may drop a NaN: whether those of the tile's heads are
// finite.
bool finite_slopes(const attune_args &args, const Tile &tile);

bool all_finite(const float *x, int64_t rows, int64_t n, int64_t stride);

// Writes the finished rows of a tile to O and LSE, and adds the sink (to `out` too). `unit`: scores are in units of 1 /
// (unit * ln 2).
void scatter(const attune_args &args, const Tile &tile, float *out, int64_t out_stride, const float *row_max,
             const float *row_sum, float unit);

// Scores in units of log2 spare a product for each; whatever is added to a score keeps them in natural units, so that
// it is added exactly.
bool in_natural_units(const attune_problem &p);

// Who sees what of the keys `part`, by structure: an interval for each of the q rows (in lo and hi), their union, and
// what all rows see.
struct Seen {
    int64_t first, last, all_first, all_last;
};
Seen see(const attune_args &args, const Tile &tile, int64_t q, Interval part, int32_t *lo, int32_t *hi);

// Where the rows of a tile stand among the keys, and the ALiBi slopes of their heads.
void place_rows(const attune_args &args, const Tile &tile, int64_t q, int32_t *position, float *slope);

// K of one (batch, kv head) in panels [panel][feature][key in panel], zero-padded, with the largest magnitude of each
// chunk of kPackChunk panels as an integer; and V with dense, zero-padded rows if it has to be copied.
struct Packed {
    int64_t dk, dv, panel, panels, chunks;
    bool packs_values, packs_unseen; // V too; keys that no row sees too
    float *keys, *values;
    int32_t *bits;

    // False if a NaN or an infinity is among the keys of the chunks that `seen` touches.
    bool keys_finite(const Seen &seen) const;
};

// Packs `panels` whole panels of K by generated code; `largest` gets their largest magnitude.
using PackWhole = int (*)(const void *context, const float *key, int64_t row_stride, int64_t feature_stride,
                          float *packed, int64_t panels, int32_t *largest);

// Floats that pack_chunk needs to convert K and V of 16 bits: a panel of K. (Kernels read no such V in place.)
inline int64_t widened_floats(const attune_problem &p, int64_t panel) {
    return p.kv_dtype == ATTUNE_F32 ? 0 : panel * p.dk;
}

// One packing task of a group: kPackChunk panels of K, and the values of the same keys. Whole panels by
// `whole`; what is ragged, or strided beyond `max_extent` elements, by hand. `widened`: widened_floats().
int pack_chunk(const attune_args &args, const Packed &packed, int64_t task, int64_t max_extent, PackWhole whole,
               const void *context, float *widened);

} // namespace attune::rt
