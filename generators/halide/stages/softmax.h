// Stage 3: M(r) = max_j S(j, r), P(j, r) = 2^((S - M) * unit), L(r) = sum_j P(j, r). O is divided by L only after the
// matmul: dv divisions for a row instead of one for each key.
//
// Keys come in panels: key = p * panel + j. Maximum and sum keep one partial result for each j and fold these once at
// the end: a horizontal reduction for every vector would cost more than the vector itself.
#pragma once

#include "mask.h"
#include "types.h"

#include <functional>

namespace attune_gen {

struct Softmax {
    Func lane_max, max, weight, lane_sum, sum;
    Var lane;
    RDom panels, fold; // the panels of a row, the lanes of a panel
    // Of bf16 weights: the sum before they were rounded, where it is asked for, and what is folded of the rounded.
    Func exact_weight, exact_lanes, exact;
    Var key;
    RDom exact_panels, fold_pairs; // exact_panels: as panels, or none
    bool pairs() const { return exact.defined(); }

    // The weights of keys 2 t and 2 t + 1 of a panel, as a pair.
    Expr pair_at(const Expr &t, const std::vector<Expr> &rest) const {
        const auto at = [&](const Expr &j) {
            std::vector<Expr> dims{j};
            dims.insert(dims.end(), rest.begin(), rest.end());
            return Expr(weight(dims));
        };
        return pair(at(2 * t), at(2 * t + 1));
    }
};

// score: a Func over `dims` = {j, p, rest…}; panels of `panel` keys, those in `panels`. `unit` scales the exponent
// (undefined: 1). weigh(score, weight) is the last word on a weight: 0 for the invisible. `exp2` is 2^x for x <= 0; the
// polynomial unless given.
//
// `unit_in_sum` takes s * unit - max * unit, one instruction; exponents above 0 by a rounding of max * unit do no harm.
//
// If `exact_panels` is given, weights are rounded to bf16 (and stored as its bits), and sum is that of the rounded
// ones: V is multiplied by these, so that the mean of equal values is that value. Log-sum-exp is another matter:
// `exact` is the sum of what was rounded, in a pass of its own over those panels.
inline Softmax softmax(const std::string &name, const Func &score, const std::vector<Var> &dims, int panel,
                       const RDom &panels, const Expr &unit, const std::function<Expr(Expr score, Expr weight)> &weigh,
                       const std::function<Expr(Expr)> &exp2 = exp2_nonpositive, const RDom &exact_panels = RDom(),
                       bool unit_in_sum = false) {
    Softmax x{Func(name + "_lane_max"),
              Func(name + "_max"),
              Func(name + "_weight"),
              Func(name + "_lane_sum"),
              Func(name + "_sum"),
              Var("lane"),
              panels,
              RDom(0, panel, name + "_fold"),
              Func(name + "_exact_weight"),
              Func(name + "_exact_lanes"),
              Func(name + "_exact"),
              dims[0],
              exact_panels,
              RDom(0, panel / 2, name + "_fold_pairs")};
    const std::vector<Var> rest(dims.begin() + 2, dims.end());
    auto join = [&](std::vector<Expr> front) {
        front.insert(front.end(), rest.begin(), rest.end());
        return front;
    };
    std::vector<Var> lane_dims{x.lane};
    lane_dims.insert(lane_dims.end(), rest.begin(), rest.end());

    x.lane_max(lane_dims) = kInvisible;
    x.lane_max(lane_dims) = max(x.lane_max(lane_dims), score(join({x.lane, panels.x})));
    x.max(rest) = kInvisible;
    x.max(rest) = max(x.max(rest), x.lane_max(join({x.fold.x})));

    const auto weight = [&](const std::vector<Expr> &front, const std::function<Expr(Expr)> &exp2) {
        const Expr s = score(join(front));
        Expr exponent = unit_in_sum ? s * unit - x.max(rest) * unit : s - x.max(rest);
        if (unit.defined() && !unit_in_sum) exponent = exponent * unit;
        return weigh(s, exp2(exponent));
    };
    x.lane_sum(lane_dims) = 0.0f;
    x.sum(rest) = 0.0f;
    if (exact_panels.defined()) {
        constexpr uint32_t kOnes = 0x3f803f80; // a pair of them
        x.weight(dims) = vcvtne2ps2bf16(weight({dims[0], dims[1]}, exp2_to_bf16));
        x.lane_sum(lane_dims) = multiply_add(x.lane_sum(lane_dims), x.pair_at(x.lane, join({panels.x})), Expr(kOnes));
        x.sum(rest) += x.lane_sum(join({x.fold_pairs.x}));
        x.exact_lanes(lane_dims) = 0.0f;
        // Inlined, it hides from the compiler which panels of the scores this takes.
        x.exact_weight(dims) = weight({dims[0], dims[1]}, exp2);
        x.exact_lanes(lane_dims) += x.exact_weight(join({x.lane, x.exact_panels.x}));
        x.exact(rest) = 0.0f;
        x.exact(rest) += x.exact_lanes(join({x.fold.x}));
        return x;
    }
    x.weight(dims) = weight({dims[0], dims[1]}, exp2);
    x.lane_sum(lane_dims) += x.weight(join({x.lane, panels.x}));
    x.sum(rest) += x.lane_sum(join({x.fold.x}));
    return x;
}

// The part of its schedule that all strategies share: lanes in registers, whole rows after one another.
inline void schedule_rows(Softmax &s, const Var &r, int v) {
    for (Func f : {s.lane_max, s.lane_sum}) {
        f.vectorize(s.lane, v).unroll(s.lane);
        f.update().reorder(s.lane, s.panels.x, r).vectorize(s.lane, v).unroll(s.lane);
    }
    s.max.update().atomic().vectorize(s.fold.x);
    s.sum.update().atomic().vectorize(s.pairs() ? s.fold_pairs.x : s.fold.x);
    if (!s.pairs()) return;
    s.exact_lanes.vectorize(s.lane, v).unroll(s.lane);
    s.exact_lanes.update().reorder(s.lane, s.exact_panels.x, r).vectorize(s.lane, v).unroll(s.lane);
    s.exact.update().atomic().vectorize(s.fold.x);
}

// A `weigh` for scores of any order: 0 for the invisible, whatever the maximum is.
inline Expr visible_weight(const Expr &score, const Expr &weight) {
    return select(is_visible(score), weight, 0.0f);
}

} // namespace attune_gen
