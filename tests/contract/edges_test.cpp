// Sizes at the edges of every kernel's own tiles, and just beside them: rows around q, keys around k and around the
// sizes that panels and vectors have.
#include "bed.h"

#include <cmath>
#include <fmt/format.h>
#include <map>
#include <set>

namespace attune::contract {
namespace {

using namespace tools;

using Contract_edges = ContractTest;

std::set<int64_t> row_counts(const attune_kernel &k) {
    const int64_t q = knob(k, "q", 24);
    std::set<int64_t> all;
    for (int64_t n : {int64_t(1), int64_t(2), q - 1, q, q + 1, 2 * q + 3}) all.insert(std::max(n, k.n_min));
    all.erase(0);
    return all;
}

std::set<int64_t> key_counts(const attune_kernel &k) {
    const int64_t block = knob(k, "k", 64), split = knob(k, "split_keys", block), panel = knob(k, "panel", 16);
    std::set<int64_t> all;
    for (int64_t m :
         {int64_t(1),    int64_t(2),  int64_t(15), int64_t(16), int64_t(17),  int64_t(31),  int64_t(33), int64_t(63),
          int64_t(64),   int64_t(65), panel - 1,   panel,       panel + 1,    block - 1,    block,       block + 1,
          3 * block + 1, split - 1,   split,       split + 1,   int64_t(600), int64_t(1025)})
        if (m > 0) all.insert(std::max(m, k.m_min));
    return all;
}

// A reference for each case, as long as one test needs it.
class Cache {
  public:
    struct Entry {
        Inputs inputs;
        Reference reference;
        Entry(const Case &c, const InputOptions &options)
            : inputs(c, options), reference(make_reference(inputs.problem(), inputs.tensors(), {4'000'000, 32})) {}
    };
    Entry &get(const Case &c, uint64_t seed) {
        auto &entry = entries_[{to_string(c), seed}];
        if (!entry) entry = std::make_unique<Entry>(c, verify_options(seed));
        return *entry;
    }

  private:
    std::map<std::pair<std::string, uint64_t>, std::unique_ptr<Entry>> entries_;
};

enum class Which { plain, causal, lengths, masked };

Case edge_case(const attune_kernel &k, int64_t n, int64_t m, Which which) {
    Case c = adapt(parse_case("f32:b1:h2:n1:m1:d20"), k);
    c.N = n;
    c.M = m;
    if (which == Which::causal) c.causal = Causal::bottom_right;
    if (which == Which::lengths) {
        c.B = 2;
        c.kv_len = {m, std::max<int64_t>(m - 1, 0)};
    }
    if (which == Which::masked) c.mask = c.bias = true;
    return c;
}

// Rows and keys in every pairing (every second where masks or lengths make the reference dear); for the kernels that
// only take long problems, in every third.
void edges(Which which) {
    Cache cache;
    std::set<std::string> fused;
    int64_t number = 0;
    for (const attune_kernel *k : kernels_under_test()) {
        const auto rows = row_counts(*k), keys = key_counts(*k);
        for (int64_t n : rows)
            for (int64_t m : keys) {
                number++;
                if (k->h_min > 2 && number % 3) continue;
                if ((which == Which::lengths || which == Which::masked) && number % 2) continue;
                const Case c = edge_case(*k, n, m, which);
                const attune_problem p = to_problem(c);
                if (attune_kernel_refuses(k, &p)) continue;
                // A guard at either end; with NaN at invisible keys (seed 3) and without.
                const uint64_t seed = uint64_t(1 + number / 2 % 3);
                auto &entry = cache.get(c, seed);
                const std::string what = fmt::format("{} on {} (seed {})", k->name, to_string(c), seed);
                const Running running_now(what);
                const KernelCheck check =
                    check_kernel(*k, entry.inputs, entry.reference, 1, verify_options(seed).guard);
                EXPECT_TRUE(check.verdict.ok) << what << ": " << check.verdict.why;
                if (is_fused(*k)) fused.insert(k->strategy);
            }
    }
    EXPECT_FALSE(fused.empty());
}

TEST_F(Contract_edges, plain) {
    edges(Which::plain);
}
TEST_F(Contract_edges, causal) {
    edges(Which::causal);
}
TEST_F(Contract_edges, lengths) {
    edges(Which::lengths);
}
TEST_F(Contract_edges, masked) {
    edges(Which::masked);
}
// Nothing of the registry goes untested: each kernel takes a case made from its own limits, at each thread count.
TEST_F(Contract_edges, every_kernel_runs) {
    for (const attune_kernel *k : kernels_under_test()) {
        Case c = adapt(parse_case("f32:b2:h2:n30:m100:d40"), *k);
        const attune_problem p = to_problem(c);
        ASSERT_EQ(attune_kernel_refuses(k, &p), nullptr) << k->name << " refuses " << to_string(c);
        Bed bed(c, 1);
        const Reference reference = bed.reference();
        for (int threads : {1, 2}) run_and_check(*k, bed, reference, {.threads = threads});
    }
}

} // namespace
} // namespace attune::contract
