// The same three keys by the C++ interface, then what an error looks like.
#include <attune/attune.hpp>

#include <cmath>
#include <cstdio>
#include <vector>

int main() {
    std::vector<float> q{1, 0}, k{1, 0, 0, 1, 1, 1}, v{10, 20, 40}, o(1);
    const attune::Plan plan = attune::plan({.N = 1, .M = 3, .dk = 2, .dv = 1});
    attune::Workspace workspace;
    attune::run(plan,
                {.q = attune::bhsd(q, 1, 1, 1, 2),
                 .k = attune::bhsd(k, 1, 1, 3, 2),
                 .v = attune::bhsd(v, 1, 1, 3, 1),
                 .o = attune::bhsd(o, 1, 1, 1, 1)},
                workspace);
    std::printf("%s: %.2f\n", plan.kernel().c_str(), double(o[0]));
    const double w = std::exp(1 / std::sqrt(2.0));
    if (!(std::abs(o[0] - (10 * w + 20 + 40 * w) / (2 * w + 1)) < 1e-4)) return 1;
    try {
        attune::plan({.Hq = 3, .Hkv = 2, .N = 1, .dk = 2});
    } catch (const attune::Error &error) { // thrown here, caught here: types are not shared with the library
        return error.status() == ATTUNE_INVALID_ARGUMENT ? 0 : 2;
    }
    return 3;
}
