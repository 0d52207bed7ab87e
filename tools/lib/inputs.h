// The arrays of a case, made from a seed. The same case and seed give the same numbers everywhere.
// For tests, arrays can end (or begin) at an unreadable page, and keys that no row may see can be filled with NaN.
#pragma once

#include "case.h"

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>

namespace attune::tools {

// Where an unreadable page lies beside an array: a read or write past that side ends the process.
enum class Guard { none, end, start };

// Owned memory. With a guard, the bytes between the array and the other end of its pages hold a pattern, so that a
// write past the unguarded side is seen by slack_intact().
class Buffer {
  public:
    Buffer() = default;
    // huge_pages: in memory of its own that asks for pages of 2 MiB; a cache line off their start, since arrays that
    // all lie alike would fight for the same sets of the caches no more and no less than an ordinary caller's.
    Buffer(size_t bytes, Guard guard, bool huge_pages = false);
    Buffer(Buffer &&other) noexcept { swap(other); }
    Buffer &operator=(Buffer &&other) noexcept {
        swap(other);
        return *this;
    }
    ~Buffer();

    void *data() const { return data_; }
    size_t size() const { return size_; }
    template <typename T> T *as() const { return static_cast<T *>(data_); }
    bool slack_intact() const;
    // Gives the pages back to the system; the contents are lost. For measuring who touches how much.
    void drop_pages();

  private:
    void swap(Buffer &other) noexcept;

    void *data_ = nullptr;
    size_t size_ = 0;
    Guard guard_ = Guard::none;
    std::byte *mapping_ = nullptr; // guard page(s) included
    size_t mapping_size_ = 0;
};

struct InputOptions {
    uint64_t seed = 0;
    Guard guard = Guard::none;
    bool poison_invisible = false; // NaN (and every third time an infinity) in K and V at keys that no row may see
    bool huge_pages = false;       // no guard then
};

class Inputs {
  public:
    // Throws Error if the arrays do not fit this machine's memory.
    Inputs(const Case &c, const InputOptions &options);
    // Takes Q, K and V (dense f32 [B,H,S,D]) from elsewhere; the case must be a plain bhsd one.
    Inputs(const Case &c, const InputOptions &options, const float *q, const float *k, const float *v);
    Inputs(const Inputs &) = delete;
    Inputs &operator=(const Inputs &) = delete;

    const Case &input_case() const { return case_; }
    const attune_problem &problem() const { return problem_; }
    // Views of the arrays, valid as long as this object.
    const attune_tensors &tensors() const { return tensors_; }

    // Fills O and LSE with NaN, so that an element that is not written is seen.
    void reset_outputs();
    // False if something was written beside O or LSE.
    bool surroundings_intact() const { return o_.slack_intact() && lse_.slack_intact(); }
    // A hash of the bits of O and LSE.
    uint64_t output_hash() const;
    size_t bytes() const;

  private:
    void allocate(const InputOptions &options);
    void poison(uint64_t seed);

    Case case_;
    attune_problem problem_;
    attune_tensors tensors_;
    attune_tensor mask_view_{}, bias_view_{}, lse_view_{};
    Buffer q_, k_, v_, o_, mask_, bias_, lse_, kv_len_, offsets_, slopes_, sinks_, cu_q_, cu_k_;
};

// 0, and the sums of the first one, two, … lengths.
std::vector<int64_t> cumulative(const std::vector<int64_t> &lengths);

// Where the first row of each batch element stands among the keys.
std::vector<int64_t> offsets_of(const Case &c);

std::vector<float> random_sinks(int64_t heads, uint64_t seed);

// The usual slopes: 2^(-8 (h+1) / H) for a power of two; else those of the next lower power, then every other one of
// the next.
std::vector<float> alibi_slopes(int64_t heads);

// A view of an array of shape [B, H, S, D] that lies in `layout`.
attune_tensor view(void *data, attune_dtype dtype, Layout layout, int64_t B, int64_t H, int64_t S, int64_t D);

// A random case within `most` score multiply-adds (B Hq N M d_k): odd sizes, d from 1 to 300 (half of them sizes that
// some kernel is specialised for), grouped heads, windows, ragged lengths, packed sequences, masks, layouts, offsets.
// Only features whose flag is in `flags`.
struct CaseSpace {
    int64_t most = 4'000'000;
    uint32_t flags = ~0u; // of attune_problem.flags
    bool window = true, gqa = true;
    std::vector<std::pair<attune_dtype, attune_dtype>> dtypes = {{ATTUNE_F32, ATTUNE_F32}}; // (Q and O, K and V)
    std::vector<std::array<int64_t, 4>> sizes; // d_k from, to, d_v from, to of the specialised kernels; may be empty
    // Kernels that take no case within `most`, as what they are made for is longer: every 64th case is one of theirs,
    // of their least sizes and little more.
    struct Least {
        int64_t n, m, heads, dk, dv;
        uint32_t flags;
        bool window, gqa;
        attune_dtype dtype, kv_dtype;
    };
    std::vector<Least> least;
};
Case random_case(uint64_t seed, const CaseSpace &space);

} // namespace attune::tools
