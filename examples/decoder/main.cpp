// A causal decoder's loop: a prompt at once, then token after token against the keys and values of all before. The
// cache has room for the longest text; plans are made once, for that room, and each run says by kv_len how much of it
// is there.
//
// The result is checked against one causal attention over the whole text.
#include <attune/attune.hpp>

#include "../example.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <random>
#include <vector>

namespace {

constexpr std::int64_t kHeads = 8, kKvHeads = 2, kFeatures = 64, kRoom = 96, kPrompt = 40;

// Token t's query, keys and values: what a model's projections would give.
struct Text {
    std::vector<float> q = std::vector<float>(kRoom * kHeads * kFeatures); // [token, head, feature]
    std::vector<float> k = std::vector<float>(kRoom * kKvHeads * kFeatures), v = k;
    Text() {
        std::mt19937 random(1);
        std::normal_distribution<float> normal;
        for (auto *x : {&q, &k, &v})
            for (float &value : *x) value = normal(random);
    }
};

void decode_a_text() {
    const Text text;
    // The cache is [head, token, feature]: a head's keys lie together, as decoding reads them.
    std::vector<float> keys(kKvHeads * kRoom * kFeatures, NAN), values = keys; // what is not there yet has no influence
    std::vector<float> out(kRoom * kHeads * kFeatures);
    auto append = [&](std::int64_t token) {
        for (std::int64_t h = 0; h < kKvHeads; h++)
            for (std::int64_t d = 0; d < kFeatures; d++) {
                const auto to = std::size_t((h * kRoom + token) * kFeatures + d);
                const auto from = std::size_t((token * kKvHeads + h) * kFeatures + d);
                keys[to] = text.k[from];
                values[to] = text.v[from];
            }
    };
    const auto cache = [](std::vector<float> &x) { return attune::bhsd(x, 1, kKvHeads, kRoom, kFeatures); };

    attune::Problem problem{
        .Hq = kHeads, .Hkv = kKvHeads, .N = kPrompt, .M = kRoom, .dk = kFeatures, .causal = true, .kv_len = true};
    const attune::Plan prefill(problem);
    problem.N = 1;
    problem.causal = false; // one row, the last: it sees all that is there
    const attune::Plan decode(problem);
    attune::Workspace workspace;

    for (std::int64_t token = 0; token < kPrompt; token++) append(token);
    std::int64_t length = kPrompt;
    attune::run(prefill,
                {.q = attune::bshd(text.q.data(), 1, kPrompt, kHeads, kFeatures),
                 .k = cache(keys),
                 .v = cache(values),
                 .o = attune::bshd(out.data(), 1, kPrompt, kHeads, kFeatures),
                 .extras = {.kv_len = std::span(&length, 1)}},
                workspace);
    for (std::int64_t token = kPrompt; token < kRoom; token++) {
        append(token);
        length = token + 1;
        const std::int64_t at = token * kHeads * kFeatures;
        attune::run(decode,
                    {.q = attune::bshd(text.q.data() + at, 1, 1, kHeads, kFeatures),
                     .k = cache(keys),
                     .v = cache(values),
                     .o = attune::bshd(out.data() + at, 1, 1, kHeads, kFeatures),
                     .extras = {.kv_len = std::span(&length, 1)}},
                    workspace);
    }

    std::vector<float> whole(out.size());
    attune::run(attune::plan({.Hq = kHeads, .Hkv = kKvHeads, .N = kRoom, .dk = kFeatures, .causal = true}),
                {.q = attune::bshd(text.q, 1, kRoom, kHeads, kFeatures),
                 .k = attune::bshd(text.k, 1, kRoom, kKvHeads, kFeatures),
                 .v = attune::bshd(text.v, 1, kRoom, kKvHeads, kFeatures),
                 .o = attune::bshd(whole, 1, kRoom, kHeads, kFeatures)},
                workspace);
    float difference = 0;
    for (std::size_t i = 0; i < out.size(); i++)
        difference = std::max(difference, std::isnan(out[i]) ? INFINITY : std::fabs(out[i] - whole[i]));
    std::printf("prompt of %d tokens by %s, %d more one by one by %s\n", int(kPrompt), prefill.kernel().c_str(),
                int(kRoom - kPrompt), decode.kernel().c_str());
    std::printf("largest difference to one causal attention: %.1e\n", double(difference));
    example::expect(difference < 1e-5f, "step by step is as all at once, within 1e-5");
}

} // namespace

int main() {
    return example::run(decode_a_text);
}
