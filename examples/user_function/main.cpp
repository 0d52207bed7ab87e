// Three documents packed into one sequence, with a penalty on the distance: alibi and document of examples/mods.
#include <attune/attune.hpp>

#include <cmath>
#include <cstdio>
#include <vector>

int main() {
    const int64_t H = 2, N = 90, d = 16;
    std::vector<float> q(H * N * d), k(q.size()), v(q.size()), o(q.size());
    for (size_t i = 0; i < q.size(); i++)
        q[i] = std::sin(float(i)), k[i] = std::cos(float(3 * i)), v[i] = std::sin(float(7 * i));
    const std::vector<float> slopes = {0.5f, 0.25f};
    std::vector<int32_t> document(N);
    for (int64_t i = 0; i < N; i++) document[i] = i < 20 ? 0 : i < 64 ? 1 : 2;

    const attune::Plan plan({.Hq = H, .N = N, .dk = d, .mods = "alibi,document"});
    attune::Workspace workspace;
    attune::Tensors tensors{.q = attune::bhsd(q, 1, H, N, d),
                            .k = attune::bhsd(k, 1, H, N, d),
                            .v = attune::bhsd(v, 1, H, N, d),
                            .o = attune::bhsd(o, 1, H, N, d)};
    tensors.extras.params = {attune::param("slopes", slopes, {H}), attune::param("document", document, {1, N})};
    attune::run(plan, tensors, workspace);

    // The same as it is written in books.
    double worst = 0;
    for (int64_t h = 0; h < H; h++)
        for (int64_t i = 0; i < N; i++) {
            double sum = 0;
            std::vector<double> row(d);
            for (int64_t j = 0; j < N; j++) {
                if (document[i] != document[j]) continue;
                double s = 0;
                for (int64_t c = 0; c < d; c++) s += double(q[(h * N + i) * d + c]) * double(k[(h * N + j) * d + c]);
                const double w = std::exp(s / std::sqrt(double(d)) - double(slopes[h]) * std::abs(double(i - j)));
                sum += w;
                for (int64_t c = 0; c < d; c++) row[c] += w * double(v[(h * N + j) * d + c]);
            }
            for (int64_t c = 0; c < d; c++)
                worst = std::max(worst, std::abs(row[c] / sum - double(o[(h * N + i) * d + c])));
        }
    std::printf("%s: largest difference %.1e\n", plan.kernel().c_str(), worst);

    // Parameters are checked by name, type and shape.
    tensors.extras.params[1] = attune::param("documents", document, {1, N});
    try {
        attune::run(plan, tensors, workspace);
        return 2;
    } catch (const attune::Error &error) {
        std::printf("%s\n", error.what());
    }
    return worst < 1e-5 ? 0 : 1;
}
