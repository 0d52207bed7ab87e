// The keywords that attention and multi-head attention share.
#pragma once

#include "arrays.h"

namespace attune::python {

// What the keywords say, before the shapes are known …
struct Options {
    Problem problem; // what it has of them; sizes and types are left to the caller
    PlanOptions plan;
    nb::object mask, bias, lse; // invalid: not given
    Vector<std::int64_t> kv_len, offsets;
    Vector<float> alibi_slopes, sinks;

    // Takes causal, offset, window, mask, bias, scale, softcap, alibi_slopes, sinks, kv_len, lse, deterministic,
    // kernel, strategy and threads. None means: not given.
    explicit Options(const nb::kwargs &keywords);
};

// … and after: the tensors that they name. Throws where a shape or a length does not fit.
struct BoundExtras {
    std::optional<Operand> mask, bias, lse;
    Extras extras;

    BoundExtras(const Options &options, std::int64_t B, std::int64_t Hq, std::int64_t N, std::int64_t M);
};

} // namespace attune::python
