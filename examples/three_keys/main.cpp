// Three keys: attention small enough to check by hand.
//
// One query q = (1, 0) meets the keys (1, 0), (0, 1), (1, 1) with the values 10, 20, 40. The products q.k are 1, 0, 1;
// divided by sqrt(2) and put through the softmax they become the weights 0.401, 0.198, 0.401, and the output is
// 10 * 0.401 + 20 * 0.198 + 40 * 0.401 = 24.0. With a scale of 8 instead, the second key has all but vanished.
#include "../example.h"
#include "attune/attune.hpp"

#include <array>
#include <cstdio>

namespace {

struct Answer {
    std::array<float, 3> weights;
    float output;
};

Answer attend(std::optional<float> scale) {
    const std::array<float, 2> query = {1, 0};
    const std::array<float, 6> keys = {1, 0, 0, 1, 1, 1};
    const std::array<float, 3> values = {10, 20, 40};

    // One query row, three keys, two features, values of one feature; and please keep the attention weights.
    const attune::Plan plan =
        attune::plan({.N = 1, .M = 3, .dk = 2, .dv = 1, .scale = scale, .scores = attune::Scores::probabilities});

    Answer answer{};
    std::array<float, 1> output{};
    attune::Workspace workspace;
    attune::run(plan,
                {.q = attune::bhsd(query, 1, 1, 1, 2),
                 .k = attune::bhsd(keys, 1, 1, 3, 2),
                 .v = attune::bhsd(values, 1, 1, 3, 1),
                 .o = attune::bhsd(output, 1, 1, 1, 1),
                 .extras = {.scores = attune::bhsd(answer.weights, 1, 1, 1, 3)}},
                workspace);
    answer.output = output[0];
    return answer;
}

void show(const char *title, const Answer &answer) {
    std::printf("%-24s weights %.5f  %.5f  %.5f   output %.4f\n", title, answer.weights[0], answer.weights[1],
                answer.weights[2], answer.output);
}

} // namespace

int main() {
    return example::run([] {
        const Answer usual = attend(std::nullopt), sharp = attend(8.0f);
        show("scale 1/sqrt(2)", usual);
        show("scale 8", sharp);

        const std::array<double, 3> by_hand = {0.401112, 0.197776, 0.401112},
                                    by_hand_sharp = {0.499916, 0.000168, 0.499916};
        for (int j = 0; j < 3; j++) {
            example::expect_near(usual.weights[j], by_hand[j], 1e-5, "a weight at scale 1/sqrt(2)");
            example::expect_near(sharp.weights[j], by_hand_sharp[j], 1e-5, "a weight at scale 8");
        }
        example::expect_near(usual.output, 24.0111, 1e-3, "the output at scale 1/sqrt(2)");
        example::expect_near(sharp.output, 24.9992, 1e-3, "the output at scale 8");
    });
}
