// The bed that the contract's tests lie on: which kernels are under test, arrays that lie in memory in any way, and one
// checked run of a kernel on them.
//
// No test names a kernel. A test states a case, every kernel of the run-time registry that does not refuse it runs it
// (sizes that a kernel is specialised for are put in first, see adapt()), and at least one of them must be a fused one.
#pragma once

#include "lib/case.h"
#include "lib/device_memory.h"
#include "lib/inputs.h"
#include "lib/numbers.h"
#include "lib/reference.h"
#include "lib/runner.h"
#include "lib/running.h"
#include "lib/verifier.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <gtest/gtest.h>
#include <string>
#include <vector>

namespace attune::contract {

using tools::Buffer;
using tools::Case;
using tools::Causal;
using tools::Guard;
using tools::Layout;
using tools::Random;
using tools::Reference;
using tools::Workspace;

// The device under test: ATTUNE_TEST_DEVICE (opencl, vulkan or cuda), or the CPU.
attune_device device_under_test();
// Empty, or why it cannot be tested here.
std::string device_missing();
// The ISA under test: ATTUNE_ISA, or the best one of the registry that this CPU has. On a device, what its kernels
// have.
const std::string &isa_under_test();
// The type of Q, K, V and O under test: ATTUNE_TEST_DTYPE (f32, bf16 or f16), or f32. Cases are stated in f32.
attune_dtype type_under_test();
// How much coarser its numbers are than those of f32: what a test allows for f32 times this is what it allows.
inline double type_coarseness() {
    return tools::dtype_epsilon(type_under_test()) / tools::dtype_epsilon(ATTUNE_F32);
}
// What a 16-bit result may be off by, being rounded; 0 for f32, whose tests state it all.
inline double rounding_of(double x) {
    return type_under_test() == ATTUNE_F32 ? 0 : tools::dtype_epsilon(type_under_test()) * std::abs(x);
}
// The registry's kernels of exactly that ISA on that device which take that type.
const std::vector<const attune_kernel *> &kernels_under_test();
const std::vector<const attune_kernel *> &kernels_of_all_types();
// Keeps no N*M scores, and the planner may take it by itself: flash, rowstrip, split_kv, and what comes after them.
bool is_fused(const attune_kernel &kernel);

// Skips the test, with a message, on a CPU that lacks the ISA under test, and where the device is missing.
class ContractTest : public ::testing::Test {
  protected:
    void SetUp() override;
};

// A case that is stated in f32 throughout, in the type under test; any other keeps its types.
Case typed(Case c);
// The same with the features and least sizes that the kernel takes, as near as they are.
Case adapt(Case c, const attune_kernel &kernel);
// How far a case may be changed to suit a kernel. Kernels for long problems only are dear, so that by default the first
// two cases of a test are stretched to their sizes, and the others are left to the rest.
enum class Fit { stated, features, sizes, sizes_twice };
// Kernels by the case that they get; those that refuse theirs are left out.
struct Group {
    Case c;
    std::vector<const attune_kernel *> kernels;
};
std::vector<Group> groups(const Case &c, Fit fit = Fit::sizes_twice);

// Where the elements of an array [4] lie in memory.
struct Spec {
    std::array<int, 4> order{0, 1, 2, 3};       // dimensions, outermost first
    std::array<int64_t, 4> pad{};               // elements left free behind each walk along a dimension
    std::array<int64_t, 4> step{1, 1, 1, 1};    // every step-th place is used
    std::array<int64_t, 4> at_least{};          // smallest stride
    std::array<bool, 4> reverse{}, broadcast{}; // negative stride, stride 0
    std::array<int64_t, 4> lone{};              // stride of a dimension of extent 1, where not 0: it must not matter
    int64_t lead = 0;                           // elements before the first: moves the base off any alignment
};
Spec spec_of(Layout layout);

// An array that lies as a Spec says, against an unreadable page. What lies between its elements is a pattern: NaN (and
// true) in inputs, so that a read of it is seen in the result; 0x5A.. in outputs, where a write is seen.
class Array {
  public:
    Array() = default;
    Array(attune_dtype dtype, std::array<int64_t, 4> shape, const Spec &spec, Guard guard, bool output);
    Array(Array &&) noexcept;
    Array &operator=(Array &&) noexcept;
    ~Array();

    attune_tensor t{};

    float get(int64_t b, int64_t h, int64_t i, int64_t d) const;
    void set(int64_t b, int64_t h, int64_t i, int64_t d, float x);
    // Calls f(b, h, i, d) for each element; of a broadcast dimension, for index 0 only.
    template <typename F> void each(F f) const {
        int64_t extent[4];
        for (int i = 0; i < 4; i++) extent[i] = t.stride[i] == 0 ? std::min<int64_t>(t.shape[i], 1) : t.shape[i];
        for (int64_t b = 0; b < extent[0]; b++)
            for (int64_t h = 0; h < extent[1]; h++)
                for (int64_t i = 0; i < extent[2]; i++)
                    for (int64_t d = 0; d < extent[3]; d++) f(b, h, i, d);
    }
    void fill(float x) {
        each([&](int64_t b, int64_t h, int64_t i, int64_t d) { set(b, h, i, d, x); });
    }
    void reset();             // an output: the pattern everywhere
    bool gaps_intact() const; // the pattern is still there between and around the elements
    bool all_pattern() const; // no element was written either

  private:
    void swap(Array &other) noexcept;
    int64_t offset(int64_t b, int64_t h, int64_t i, int64_t d) const {
        return b * t.stride[0] + h * t.stride[1] + i * t.stride[2] + d * t.stride[3];
    }

    Buffer buffer_;
    void *sparse_ = nullptr; // instead of the buffer, for strides of gigabytes
    size_t sparse_bytes_ = 0;
    unsigned char *memory_ = nullptr;
    size_t bytes_ = 0, elements_ = 0;
    int pattern_ = 0;
};

struct Places {
    Spec q, k, v, o, lse, mask, bias, scores;
};
Places all_in(Layout layout);

// One problem with all of its arrays (packed sequences lie in a batch of one, as for attune_run). Masks and biases are
// full [B, Hq, N, M] unless their Spec broadcasts. The numbers depend on the seed and their index only, never on the
// places.
class Bed {
  public:
    Bed(const Case &c, uint64_t seed, const Places &places = {}, Guard guard = Guard::end);
    Bed(const Bed &) = delete;
    Bed &operator=(const Bed &) = delete;

    Case c; // as stated
    attune_problem p;
    Array q, k, v, o, lse, mask, bias, scores;
    std::vector<int64_t> kv_len, offsets, cu_q, cu_k;
    std::vector<float> slopes, sinks;
    std::vector<attune_param> params; // of user functions
    bool with_lse = true;

    // Asks for the scores output of a stage.
    void ask_for_scores(attune_scores_stage stage);
    attune_tensors tensors() const;
    // The values of `other`, element by element; the sizes must be the same.
    void copy_inputs(const Bed &other);
    void reset_outputs();
    bool gaps_intact() const;
    Reference reference(int64_t budget = 8'000'000) const;
    // The bits of O, LSE and scores in the order of their indices.
    std::vector<uint32_t> bits() const;
    // "" if the bits are those of `other`, else how many differ, and the first.
    std::string bits_differ(const Bed &other) const;
    uint64_t input_hash() const;
    std::string text() const;

    bool position_sees(int64_t b, int64_t h, int64_t i,
                       int64_t j) const; // causal, window, kv_len, bool mask, -inf bias
    float o_at(int64_t b, int64_t h, int64_t i, int64_t d) const { return o.get(b, h, i, d); }

  private:
    Places places_;
    Guard guard_;
    uint64_t seed_;
};

struct RunOptions {
    int threads = 1;
    Guard guard = Guard::end;
    int fill = 0xff;   // of the workspace before the run
    size_t shift = 0;  // bytes off the workspace's alignment
    bool stay = false; // on a device: tensors of the device, not of the host
};

// Plans and runs; outputs are reset before. Anything but success is a test failure. False then.
bool run(const attune_kernel &kernel, Bed &bed, const RunOptions &options = {});
// The same, then the comparison with the reference.
bool run_and_check(const attune_kernel &kernel, Bed &bed, const Reference &reference, const RunOptions &options = {});

struct Expect {
    Places places = {};
    std::function<void(Bed &)> edit = {};                         // of the numbers, after they are made
    std::function<void(Bed &, const attune_kernel &)> after = {}; // more checks after each run
    Fit fit = Fit::sizes_twice;
    bool need_fused = true;
    // Multiply-adds of the reference: the rows that do not fit are left out, and must be finite.
    int64_t budget = 8'000'000;
    std::vector<int> threads = {1};
    std::vector<Guard> guards = {Guard::end, Guard::start};
    uint64_t seed = 1;
};
// Every kernel that takes the case gives what the contract says. Returns how many did it.
int expect_right(const Case &c, const Expect &expect = {});
int expect_right(const std::string &case_text, const Expect &expect = {});

// The same by tools' check_kernel, for a case that needs no special numbers; for every third seed with NaN at keys that
// no row may see. What fails prints as arguments of `attune verify`.
int expect_case(const Case &c, Fit fit = Fit::sizes_twice, uint64_t seed = 1);

} // namespace attune::contract
