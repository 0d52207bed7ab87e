// What the examples share: a check that makes the process fail with the text of what was expected.
#pragma once

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <exception>

namespace example {

inline int failures = 0;

inline void expect(bool right, const char *what) {
    if (right) return;
    std::fprintf(stderr, "FAILED: %s\n", what);
    failures++;
}

inline void expect_near(double value, double expected, double tolerance, const char *what) {
    // Written so that NaN fails.
    if (std::abs(value - expected) <= tolerance) return;
    std::fprintf(stderr, "FAILED: %s is %.9g, expected %.9g within %.1g\n", what, value, expected, tolerance);
    failures++;
}

// Runs `body` and turns errors and failed checks into the exit status.
template <class F> int run(F &&body) {
    try {
        body();
    } catch (const std::exception &e) {
        std::fprintf(stderr, "error: %s\n", e.what());
        return EXIT_FAILURE;
    }
    return failures == 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}

} // namespace example
