// The signatures of the phases: what a Halide function for `pack`, `attend`, `merge`, … takes and gives. The adapters
// in runtime/halide/phases.h call exactly these, so a strategy is free in everything but this list. Index order stands
// beside each buffer, innermost first. All buffers are for one task (one head, one tile of rows) with a minimum of 0.
#pragma once

#include "mods.h"
#include "stages/mask.h"
#include "stages/types.h"

namespace attune_gen {

// What decides who sees whom: the arguments of stages/mask.h, in this order, ahead of the phase's own.
template <typename Self> class MaskedPhase : public Generator<Self> {
  public:
    template <typename T> using Param = GeneratorParam<T>;
    template <typename T> using In = GeneratorInput<T>;
    template <typename T> using Out = GeneratorOutput<T>;

    Param<Type> kv_type{"kv_type", Float(32)};
    Param<int> dk{"dk", 64};       // features of Q and K; 0: a run-time size
    Param<int> dv{"dv", 64};       // features of V and O; 0: a run-time size
    Param<int> q{"q", 24};         // rows of the query tile
    Param<int> k{"k", 192};        // keys of a key block
    Param<int> panel{"panel", 32}; // keys of a packed K panel; 0: K as the caller holds it
    // Multiply-adds of two bf16 each. Q and packed K and V are then pairs (32 bits): of two features of Q and K, of two
    // keys of V; what is not packed is 16 bits each. Scores are scaled after the sum, and P is rounded to bf16.
    Param<bool> pairs{"pairs", false};

    In<Buffer<int32_t, 1>> lo{"lo"}, hi{"hi"};      // (r): row r sees the keys lo <= j < hi
    In<Buffer<int32_t, 1>> position{"position"};    // (r): where the row stands among the keys
    In<Buffer<float, 1>> slope{"slope"};            // (r): ALiBi's slope of the row's head
    In<Buffer<uint8_t, 3>> mask{"mask"};            // (j, i, g), see RowTensors
    In<Buffer<uint32_t, 3>> bias{"bias"};           // (j, i, g): the bits of its floats
    In<Buffer<uint8_t, 2>> mask_tail{"mask_tail"};  // (j in panel, r)
    In<Buffer<uint32_t, 2>> bias_tail{"bias_tail"}; // (j in panel, r)
    In<bool> use_mask{"use_mask"}, use_bias{"use_bias"}, use_softcap{"use_softcap"}, use_alibi{"use_alibi"};
    In<float> softcap{"softcap"};
    In<int32_t> first_row{"first_row"}, rows_per_head{"rows_per_head"}, num_rows{"num_rows"}, num_keys{"num_keys"};

  protected:
    int lanes() const { return this->natural_vector_size(Float(32)); }

    RowTensors row_tensors() {
        RowTensors t;
        t.lo = lo, t.hi = hi, t.position = position, t.slope = slope;
        t.mask = mask, t.bias = bias, t.mask_tail = mask_tail, t.bias_tail = bias_tail;
        t.use_mask = use_mask, t.use_bias = use_bias, t.use_softcap = use_softcap, t.use_alibi = use_alibi;
        t.softcap = softcap;
        t.first_row = first_row, t.rows_per_head = rows_per_head, t.num_rows = num_rows, t.num_keys = num_keys;
        t.panel = panel ? int(panel) : int(k);
        if (row_query)
            t.user = [this](const Expr &score, const Expr &key, const Expr &r, const Expr &slot) {
                const UserMods::Place at{*batch, (*row_head)(r), (*row_query)(r), key};
                return user_mods().score(score, at, *zero, user.reader({at.b, at.h, at.q}, key, slot < *whole_slots));
            };
        return t;
    }

    // For configure(): what user functions need, behind the declared inputs (runtime/halide/user.h brings it).
    void configure_user() {
        if (!user_mods().any()) return;
        row_query = this->template add_input<Buffer<int32_t, 1>>("row_query"); // (r): the row in its head
        row_head = this->template add_input<Buffer<int32_t, 1>>("row_head");   // (r): its query head
        // The panels that the tile sees, in place of the panels from begin to end: first those that every row sees
        // whole, then the others. begin, end, full_begin and full_end then count keys along this list.
        slots = this->template add_input<Buffer<int32_t, 1>>("slots");
        whole_slots =
            this->template add_input<int32_t>("whole_slots"); // those ahead of a panel that is not full of keys
        batch = this->template add_input<int32_t>("batch");
        zero = this->template add_input<uint32_t>("zero"); // 0
        user.add_to(*this);
    }
    bool in_slots() const { return slots != nullptr; }
    // The panel at a place of the list.
    Expr panel_at(const Expr &slot) {
        return slots ? unsafe_promise_clamped((*slots)(slot), 0, (num_keys - 1) / 8) : slot; // of 8 keys at least
    }

    void promise_mask_layout() {
        const int rows = q;
        for (auto *b : {&lo, &hi, &position}) b->dim(0).set_bounds(0, rows).set_stride(1);
        slope.dim(0).set_bounds(0, rows).set_stride(1);
        for (int i : {0, 1}) mask_tail.dim(i).set_min(0), bias_tail.dim(i).set_min(0);
        for (int i : {0, 1, 2}) mask.dim(i).set_min(0), bias.dim(i).set_min(0);
        if (!row_query) return;
        for (auto *b : {row_query, row_head}) b->dim(0).set_bounds(0, rows).set_stride(1);
        slots->dim(0).set_min(0).set_stride(1);
        user.promise();
    }

  private:
    In<Buffer<int32_t, 1>> *row_query = nullptr, *row_head = nullptr, *slots = nullptr;
    In<int32_t> *batch = nullptr, *whole_slots = nullptr;
    In<uint32_t> *zero = nullptr;
    UserInputs user;
};

// The reading side of a tile of query rows, shared by `attend` (flash, rowstrip) and `partial` (split_kv).
template <typename Self> class AttendPhase : public MaskedPhase<Self> {
  public:
    using Base = MaskedPhase<Self>;
    template <typename T> using In = GeneratorInput<T>;
    template <typename T> using Out = GeneratorOutput<T>;
    using Base::dk, Base::dv, Base::q, Base::k, Base::panel, Base::kv_type, Base::pairs;

    In<Buffer<>> query{"query"};                                // (d, r): scaled, zero padded to whole tiles
    In<Buffer<>> key{"key"};                                    // packed (j in panel, d, panel), or raw (d, j)
    In<Buffer<>> value{"value"};                                // (c, j)
    In<int32_t> begin{"begin"}, end{"end"};                     // keys that some row sees lie in [begin, end)
    In<int32_t> full_begin{"full_begin"}, full_end{"full_end"}; // keys in [full_begin, full_end) are seen by every row
    In<float> unit{"unit"};          // scores are in units of log2: 1; in natural units: log2 e
    In<float> scale{"scale"};        // with pairs: what a sum of products is multiplied by
    In<bool> exact_sum{"exact_sum"}; // with pairs: row_sum is that of the weights before they are rounded
    // With dv given: out (c, r), divided by the sum, 0 where no key is visible; row_max, row_sum (r). With dv at run
    // time: all of them (c, r), out not divided yet, so that they can be the state of a merge whose size the generated
    // code does not know.
    Out<Buffer<>> out{"out"}, row_max{"row_max"}, row_sum{"row_sum"};

    void configure() {
        const Type half = UInt(16), two = UInt(32), plain = kv_type;
        query.set_type(pairs ? two : Float(32));
        query.set_dimensions(2);
        key.set_type(!pairs ? plain : panel ? two : half);
        key.set_dimensions(panel ? 3 : 2);
        value.set_type(!pairs ? plain : panel ? two : half);
        value.set_dimensions(2);
        for (auto *b : {&out, &row_max, &row_sum})
            b->set_type(Float(32)), b->set_dimensions(b == &out || dv == 0 ? 2 : 1);
        this->configure_user();
    }

  protected:
    // Features of Q and K (or pairs of them), and of V and O, as the schedule may rely on them.
    Expr dk_extent() { return dk ? Expr(per_term(dk)) : Expr(query.dim(0).extent()); }
    // Of so many features or keys, the terms of a sum: each one, or pairs.
    int per_term(int n) const { return pairs ? n / 2 : n; }
    // What is multiplied: a number of K or V, or a pair of them.
    Expr factor(const Expr &x) const { return pairs ? x : cast<float>(x); }
    // A sum of products as a score.
    Expr scaled(const Expr &sum) const { return pairs ? sum * scale : sum; }
    Expr dv_extent() { return dv ? Expr(int(dv)) : Expr(out.dim(0).extent()); }

    // What the runtime promises of the buffers. Violations are undefined behaviour: the adapter asserts each in its own
    // code.
    void promise_layout() {
        const int d = per_term(dk), c = dv, rows = q;
        query.dim(0).set_min(0).set_stride(1);
        query.dim(1).set_bounds(0, rows);
        if (d) query.dim(0).set_extent(d), query.dim(1).set_stride(d);
        if (panel) {
            key.dim(0).set_bounds(0, panel).set_stride(1);
            key.dim(1).set_min(0).set_stride(panel);
            if (d) key.dim(1).set_extent(d);
            key.dim(2).set_min(0);
            if (d) key.dim(2).set_stride(panel * d);
        } else {
            key.dim(0).set_min(0).set_stride(1);
            key.dim(1).set_min(0);
        }
        value.dim(0).set_min(0).set_stride(1);
        value.dim(1).set_min(0);
        out.dim(0).set_min(0).set_stride(1);
        out.dim(1).set_bounds(0, rows);
        if (c) out.dim(0).set_extent(c), out.dim(1).set_stride(c);
        if (c && panel) value.dim(0).set_extent(c); // where K is packed, so is a V of fewer features
        const Expr columns = out.dim(0).extent();
        for (auto *b : {&row_max, &row_sum}) {
            if (c)
                b->dim(0).set_bounds(0, rows).set_stride(1);
            else
                b->dim(0).set_bounds(0, columns).set_stride(1), b->dim(1).set_bounds(0, rows).set_stride(columns);
        }
        if (!c) out.dim(1).set_stride(columns);
        if (!c && panel) value.dim(0).set_extent(columns);
        this->promise_mask_layout();
    }
};

} // namespace attune_gen
