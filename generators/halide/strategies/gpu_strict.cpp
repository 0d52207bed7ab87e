// gpu_strict: the last phase of every device kernel. Elements of O that came out as NaN or infinity are computed again,
// one thread each, in the order and with the guards of the contract: a NaN or +inf in a visible score makes its row
// NaN, and an invisible key has no influence, whatever its K and V hold. All others are left alone: a finite element
// had finite scores, weights and values. It reads O once, and is slow only where something is not finite.
//
//   M = max s, L = sum e^(s - M), O = sum (e^(s - M) / L) V      over the visible keys, sums left to right
#include "gpu_phases.h"

namespace attune_gen {

class GpuStrict : public GpuPhase<GpuStrict> {
  public:
    GeneratorParam<int> tx{"tx", 32}, ty{"ty", 4};
    In<Buffer<>> written{"written"}; // (c, i, h, b): O, as it is
    Out<Func> out{"out", 4};         // (c, i, h, b): O, bits of LSE

    void configure() {
        GpuPhase::configure();
        written.set_type(storage());
        written.set_dimensions(4);
    }

    void generate() {
        // The score is computed anew for the maximum, the sum and the product: a thread has no room for a row of them.
        const Expr first = clamp(first_key(i, b), 0, num_keys), last = clamp(end_key(i, b), first, num_keys);
        Accumulation s1 = scaled("s1"), s2 = scaled("s2"), s3 = scaled("s3");
        const auto shaped = [&](const Accumulation &s, const Expr &j) { return exact_score(s.acc(j, c, i, h, b), j); };
        const Expr none = Expr(uint32_t(0xff800000));

        // The maximum, whether there is a visible score, and whether one is NaN or +inf.
        const auto seen = [&](const char *name) {
            RDom r(0, num_keys, name);
            r.where(r.x >= first && r.x < last);
            return r;
        };
        const RDom r = seen("r"), t = seen("t"), u = seen("u");
        maximum(c, i, h, b) = Tuple(kInvisible, cast<uint8_t>(0), cast<uint8_t>(0));
        const Score x = shaped(s1, r.x);
        maximum(c, i, h, b) = Tuple(max(maximum(c, i, h, b)[0], select(x.counts, x.value, kInvisible)),
                                    select(x.counts, cast<uint8_t>(1), maximum(c, i, h, b)[1]),
                                    select(x.spoils, cast<uint8_t>(1), maximum(c, i, h, b)[2]));
        const Expr m = maximum(c, i, h, b)[0];
        const Score y = shaped(s2, t.x);
        sum(c, i, h, b) = 0.0f;
        sum(c, i, h, b) += select(y.counts, exp(y.value - m), 0.0f);
        // Weights are divided by their sum before they meet V: a sum of values near the largest would overflow.
        const Score z = shaped(s3, u.x);
        product(c, i, h, b) = 0.0f;
        product(c, i, h, b) += select(z.counts, exp(z.value - m) / sum(c, i, h, b) * value_at(c, u.x, h, b), 0.0f);

        const Expr any = maximum(c, i, h, b)[1] != cast<uint8_t>(0),
                   spoilt = maximum(c, i, h, b)[2] != cast<uint8_t>(0);
        const Expr l = sum(c, i, h, b), o = product(c, i, h, b), nan = Expr(uint32_t(0x7fc00000));
        const Expr sink = head(int(kSink), h), sink_bits = reinterpret<uint32_t>(sink);
        const Expr has_sink = uses(kUseSink, b) && sink_bits != none;
        // With a sink of +inf the row is 0; one that is NaN makes the row NaN.
        const Expr top = select(any, max(m, sink), sink);
        const Expr total = select(has_sink, select(any, l * exp(m - top), 0.0f) + exp(sink - top), l);
        const Expr endless = has_sink && sink_bits == Expr(uint32_t(0x7f800000));
        Expr lse = select(has_sink, reinterpret<uint32_t>(top + log(total)),
                          select(any, reinterpret<uint32_t>(m + log(l)), none));
        lse = select(endless, sink_bits, lse);
        Expr value = reinterpret<uint32_t>(select(any, select(has_sink, o * (l * exp(m - top) / total), o), 0.0f));
        value = select(endless, Expr(uint32_t(0)), value);
        const Expr bad_sink = has_sink && is_nan(sink);
        result(c, i, h, b) = Tuple(undef(storage()), undef<uint32_t>());
        RDom once(0, 1, "once");
        once.where(!is_finite(load(written(clamp(c, 0, columns - 1), clamp(i, 0, rows - 1), h, b))));
        const Expr nowhere = cast<uint32_t>(once.x); // 0
        result(c, i, h, b) = Tuple(store(reinterpret<float>(select(spoilt || bad_sink, nan, value) + nowhere)),
                                   select(spoilt || bad_sink, nan, lse) + nowhere);
        out = result;

        promise_inputs();
        promise_outputs(result);
        written.dim(0).set_stride(Expr());
        for (int n = 0; n < 4; n++) written.dim(n).set_min(0);
        Var co("co"), ci("ci"), io("io"), ii("ii");
        // The first stage is empty; on the device too, or Halide wants the memory on the host.
        result.gpu_tile(c, i, co, io, ci, ii, int(tx), int(ty), TailStrategy::GuardWithIf);
        result.update().split(c, co, ci, int(tx), TailStrategy::GuardWithIf);
        result.update().split(i, io, ii, int(ty), TailStrategy::GuardWithIf);
        result.update().fuse(h, b, h).reorder(once.x, ci, ii, io, co, h).gpu_blocks(io, co, h).gpu_threads(ci, ii);
        for (Func f : {maximum, sum, product}) f.compute_at(result, once.x);
        const auto each = [](Accumulation &s, Func f, const RVar &key) {
            s.acc.compute_at(f, key).update().unroll(s.dom.x, kUnroll);
        };
        each(s1, maximum, r.x);
        each(s2, sum, t.x);
        each(s3, product, u.x);
    }

  private:
    // Features of a turn of the inner loop; those beyond the last are 0. Mesa's software Vulkan ends loops after 65535
    // turns in all (run.cpp).
    static constexpr int kUnroll = 32;
    Func maximum{"maximum"}, sum{"sum"}, product{"product"}, result{"result"};

    struct Score {
        Expr value, counts, spoils; // counts: visible and not -inf; spoils: NaN or +inf
    };

    Accumulation scaled(const std::string &name) {
        Accumulation s{Func(name), RDom(0, (features + kUnroll - 1) / kUnroll * kUnroll, name + "_d")};
        s.acc(j, c, i, h, b) = 0.0f;
        s.acc(j, c, i, h, b) += query_at(s.dom.x, i, h, b) * key_at(s.dom.x, j, h, b);
        return s;
    }

    // In natural units, with the tanh of the device and nothing clamped.
    Score exact_score(const Expr &raw, const Expr &j) {
        const ScoreTerms t = terms(j, i, h, b);
        const Expr minus_infinity = Expr(uint32_t(0xff800000)), infinity = Expr(uint32_t(0x7f800000));
        Expr s = raw * ln_unit;
        s = select(t.use_softcap, capped(s), s);
        Expr seen = t.visible;
        if (t.user) {
            const UserScore u = t.user(s);
            s = u.score;
            if (u.visible.defined()) seen = seen && u.visible;
        }
        s = select(t.use_alibi, s - t.slope * t.distance, s);
        s = select(t.use_bias, s + reinterpret<float>(t.bias_bits), s);
        const Expr bits = reinterpret<uint32_t>(s);
        const Expr visible = seen && (!t.use_mask || t.mask != cast<uint8_t>(0)) &&
                             (!t.use_bias || t.bias_bits != minus_infinity) && bits != minus_infinity;
        return {s, visible, visible && (is_nan(s) || bits == infinity)};
    }
    Expr capped(const Expr &s) {
        const Expr finite = soft_cap(s, softcap), end = select(s < 0.0f, -softcap, softcap);
        return select(is_nan(s), s, is_finite(s), finite, end);
    }
};

} // namespace attune_gen

HALIDE_REGISTER_GENERATOR(attune_gen::GpuStrict, gpu_strict)
