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
};

// score: a Func over `dims` = {j, p, rest…}; panels of `panel` keys, those in `panels`. `unit` scales the exponent
// (undefined: 1). weigh(score, weight) is the last word on a weight: 0 for the invisible. `exp2` is 2^x for x <= 0; the
// polynomial unless given.
inline Softmax softmax(const std::string &name, const Func &score, const std::vector<Var> &dims, int panel,
                       const RDom &panels, const Expr &unit, const std::function<Expr(Expr score, Expr weight)> &weigh,
                       const std::function<Expr(Expr)> &exp2 = exp2_nonpositive) {
    Softmax x{Func(name + "_lane_max"),
              Func(name + "_max"),
              Func(name + "_weight"),
              Func(name + "_lane_sum"),
              Func(name + "_sum"),
              Var("lane"),
              panels,
              RDom(0, panel, name + "_fold")};
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

    const Expr s = score(join({dims[0], dims[1]}));
    Expr exponent = s - x.max(rest);
    if (unit.defined()) exponent = exponent * unit;
    x.weight(dims) = weigh(s, exp2(exponent));

    x.lane_sum(lane_dims) = 0.0f;
    x.lane_sum(lane_dims) += x.weight(join({x.lane, panels.x}));
    x.sum(rest) = 0.0f;
    x.sum(rest) += x.lane_sum(join({x.fold.x}));
    return x;
}

// The part of its schedule that all strategies share: lanes in registers, whole rows after one another.
inline void schedule_rows(Softmax &s, const Var &r, int v) {
    for (Func f : {s.lane_max, s.lane_sum}) {
        f.vectorize(s.lane, v).unroll(s.lane);
        f.update().reorder(s.lane, s.panels.x, r).vectorize(s.lane, v).unroll(s.lane);
    }
    for (Func f : {s.max, s.sum}) f.update().atomic().vectorize(s.fold.x);
}

// A `weigh` for scores of any order: 0 for the invisible, whatever the maximum is.
inline Expr visible_weight(const Expr &score, const Expr &weight) {
    return select(is_visible(score), weight, 0.0f);
}

} // namespace attune_gen
