// The signatures of the phases of device kernels: what the adapter in runtime/device/phases.h calls. They do the whole
// problem at once; the caller's tensors are read and written in place, whatever their strides.
//
// Dimensions: d feature of Q and K, c feature of V and O, j key, i row, h head, b batch element. Tensors have one more,
// z, of which only 0 is used: its minimum says how far behind the start of the buffer the tensor begins (a view into
// the middle of a buffer; drivers other than CUDA's cannot add to a handle).
#pragma once

#include "mods.h"
#include "stages/mask.h"
#include "stages/merge.h"
#include "stages/types.h"

namespace attune_gen {

// What a row of `batch` and of `head` holds.
enum BatchEntry { kLow, kHigh, kKeys, kPosition, kBatchEntries };
enum HeadEntry { kSlope, kSink, kHeadEntries };
enum Use { kUseBatch = 1, kUseMask = 2, kUseBias = 4, kUseSoftcap = 8, kUseAlibi = 16, kUseSink = 32 };

template <typename Self> class GpuPhase : public Generator<Self> {
  public:
    template <typename T> using Param = GeneratorParam<T>;
    template <typename T> using In = GeneratorInput<T>;
    template <typename T> using Out = GeneratorOutput<T>;

    Param<Type> type{"type", Float(32)}; // of Q, K, V and O
    Param<int> dk{"dk", 64};             // features of Q and K that the code is unrolled for; 0: a run-time size
    Param<int> dv{"dv", 64};

    In<Buffer<>> query{"query"}, key{"key"}, value{"value"}; // (d, i, h, b, z), (d, j, kv head, b, z), (c, j, …)
    In<Buffer<uint8_t, 5>> mask{"mask"};                     // (j, i, h, b, z)
    In<Buffer<uint32_t, 5>> bias{"bias"};                    // (j, i, h, b, z): the bits of its floats
    In<Buffer<int32_t, 2>> batch{"batch"};                   // (BatchEntry, b)
    In<Buffer<float, 2>> head{"head"};                       // (HeadEntry, h)
    // Row i sees the keys i + low <= j < min(i + high, keys), and stands at i + position among them. These are per
    // batch element (in `batch`) where kUseBatch is set.
    In<int32_t> low{"low"}, high{"high"}, keys{"keys"}, position{"position"};
    In<int32_t> flags{"flags"}; // of enum Use
    In<float> softcap{"softcap"};
    In<int32_t> rows{"rows"}, num_keys{"num_keys"}, features{"features"}, columns{"columns"}, group{"group"};
    In<float> scale{"scale"};     // times log2 e where scores are in units of log2
    In<float> unit{"unit"};       // 2^(unit * s): 1 or log2 e
    In<float> ln_unit{"ln_unit"}; // s * ln_unit is a natural logarithm

    void configure() {
        for (auto *b : {&query, &key, &value}) b->set_type(storage()), b->set_dimensions(5);
        if (!user_mods().any()) return;
        first_batch = this->template add_input<int32_t>("first_batch"); // batch element 0 of a launch is this one
        zero = this->template add_input<uint32_t>("zero");              // 0
        user.add_to(*this);
    }

  protected:
    Var c{"c"}, i{"i"}, h{"h"}, b{"b"}, j{"j"}, d{"d"};

    // f16 without cl_khr_fp16, which few drivers have, is 16 bits that are converted by hand.
    Type storage() {
        const bool by_hand = Type(type) == Float(16) && this->get_target().has_feature(Target::OpenCL);
        return by_hand ? UInt(16) : Type(type);
    }
    Expr load(const Expr &x) {
        if (x.type() != UInt(16)) return cast<float>(x);
        const Expr u = cast<uint32_t>(x), magnitude = u & 0x7fff;
        // The exponent is 112 too low; 31 is that of infinities and NaN. Subnormals are multiples of 2^-24.
        const Expr normal = (magnitude << 13) + Expr(uint32_t(112) << 23);
        const Expr finite = select(magnitude < 0x400, reinterpret<uint32_t>(cast<float>(magnitude) * 0x1p-24f), normal);
        return reinterpret<float>(select(magnitude >= 0x7c00, 0x7f800000 | (magnitude << 13), finite) |
                                  ((u & 0x8000) << 16));
    }
    Expr store(const Expr &x) {
        if (storage() != UInt(16)) return cast(storage(), x);
        const Expr bits = reinterpret<uint32_t>(x), magnitude = bits & Expr(uint32_t(0x7fffffff));
        // 65520 and above round to infinity. Below 2^-14 the sum with 2^-1 rounds to multiples of 2^-24.
        const Expr normal = (magnitude + 0xfff + ((magnitude >> 13) & 1) - Expr(uint32_t(112) << 23)) >> 13;
        const Expr small = reinterpret<uint32_t>(reinterpret<float>(magnitude) + 0.5f) - Expr(uint32_t(0x3f000000));
        Expr half = select(magnitude < Expr(uint32_t(113) << 23), small, normal);
        half = select(magnitude >= Expr(uint32_t(0x477ff000)), Expr(uint32_t(0x7c00)), half);
        half = select(magnitude > Expr(uint32_t(0x7f800000)), Expr(uint32_t(0x7e00)), half);
        return cast<uint16_t>(half | ((bits >> 16) & 0x8000));
    }

    // 2^x for x <= 0: one instruction with CUDA; elsewhere the device's exponential, which keeps a NaN. (The polynomial
    // of the CPU's kernels would not.)
    Expr exp2_device(const Expr &x) {
        if (this->get_target().has_feature(Target::CUDA))
            return Internal::Call::make(Float(32), "llvm.nvvm.ex2.approx.ftz.f", {x}, Internal::Call::PureExtern);
        return exp(x * 0.693147180559945309f);
    }
    Merged merge(const Expr &old_max, const Expr &new_max) {
        return merge_maxima(old_max, new_max, unit, [this](const Expr &x) { return exp2_device(x); });
    }

    // Elements, at any index: what lies outside is 0 or the nearest one.
    Expr query_at(const Expr &d, const Expr &i, const Expr &h, const Expr &b) {
        return select(d < features, load(query(clamp(d, 0, features - 1), clamp(i, 0, rows - 1), h, b, 0)) * scale,
                      0.0f);
    }
    Expr key_at(const Expr &d, const Expr &j, const Expr &h, const Expr &b) {
        return select(d < features, load(key(clamp(d, 0, features - 1), safe(j), h / group, b, 0)), 0.0f);
    }
    Expr value_at(const Expr &c, const Expr &j, const Expr &h, const Expr &b) {
        return select(c < columns, load(value(clamp(c, 0, columns - 1), safe(j), h / group, b, 0)), 0.0f);
    }
    Expr safe(const Expr &j) { return clamp(j, 0, max(num_keys, 1) - 1); }

    // Loop bounds must not come from memory: Halide would guard each part of the loop's body instead of the loop, and
    // everything private would be kept alive in between. Then a batch element is a launch, and these are scalars.
    bool launched_by_batch = false;
    Expr of_batch(BatchEntry what, const Expr &b, const Expr &same) {
        return launched_by_batch ? same : select(uses(kUseBatch, b), batch(int(what), b), same);
    }
    // The keys that row i sees, by structure: [first, end).
    Expr first_key(const Expr &i, const Expr &b) { return max(i + of_batch(kLow, b, low), 0); }
    Expr end_key(const Expr &i, const Expr &b) { return min(i + of_batch(kHigh, b, high), of_batch(kKeys, b, keys)); }

    // Halide 21 lays out bools wrongly among Vulkan's arguments, and makes one of whatever is the same for all
    // workgroups. b >> 30 is 0, which Halide cannot know.
    Expr uses(int some, const Expr &b) {
        const bool vulkan = this->get_target().has_feature(Target::Vulkan);
        return ((vulkan ? flags + (b >> 30) : Expr(flags)) & some) != 0;
    }
    Expr use_extras(const Expr &b) {
        if (zero) return Internal::const_true();
        return uses(kUseMask | kUseBias | kUseSoftcap | kUseAlibi, b);
    }
    ScoreTerms terms(const Expr &j, const Expr &i, const Expr &h, const Expr &b) {
        const Expr row = clamp(i, 0, rows - 1);
        ScoreTerms t;
        t.visible = j >= first_key(i, b) && j < end_key(i, b);
        t.use_mask = uses(kUseMask, b), t.mask = mask(safe(j), row, h, b, 0);
        t.use_bias = uses(kUseBias, b), t.bias_bits = bias(safe(j), row, h, b, 0);
        t.use_softcap = uses(kUseSoftcap, b), t.softcap = softcap;
        t.use_alibi = uses(kUseAlibi, b), t.slope = head(int(kSlope), h);
        t.distance = cast<float>(abs(i + of_batch(kPosition, b, position) - j));
        if (zero)
            t.user = [this, j, row, h, b](const Expr &score) {
                const UserMods::Place at{b + *first_batch, h, row, j};
                return user_mods().score(score, at, *zero, user.reader({at.b, at.h, at.q}));
            };
        return t;
    }

    // Tests of a float's bits: under the rules for floats there is no NaN.
    static Expr magnitude(const Expr &x) { return reinterpret<uint32_t>(x) & Expr(uint32_t(0x7fffffff)); }
    static Expr is_nan(const Expr &x) { return magnitude(x) > Expr(uint32_t(0x7f800000)); }
    static Expr is_finite(const Expr &x) { return magnitude(x) < Expr(uint32_t(0x7f800000)); }
    // What is not finite in a visible score becomes +inf, which the maximum keeps, and 2^(inf - inf) makes the row NaN:
    // the strict phase finds it. -inf as well: the lowest visible score would take its place.
    static Expr marked(const Expr &finite, const Expr &shaped) {
        const Expr infinity = Expr(uint32_t(0x7f800000)), bits = reinterpret<uint32_t>(shaped);
        const Expr bad = bits != reinterpret<uint32_t>(Expr(kInvisible)) && (!finite || bits == infinity);
        return reinterpret<float>(select(bad, infinity, bits));
    }
    // Of a score with all that there is; of one in a block at the edge of what rows see, where there is nothing else.
    Expr full_score(const Expr &s, const Expr &j, const Expr &i, const Expr &h, const Expr &b) {
        const ScoreTerms t = terms(j, i, h, b);
        return marked(is_finite(s) && (!t.use_alibi || is_finite(t.slope * t.distance)), shaped_score(t, s));
    }
    Expr edge_score(const Expr &s, const Expr &j, const Expr &i, const Expr &b) {
        const Expr visible = j >= first_key(i, b) && j < end_key(i, b);
        return marked(is_finite(s), select(visible, max(s, kLowestVisible), kInvisible));
    }

    // The end of a row: what O is multiplied by, and the bits of LSE. Its maximum is kInvisible where it sees no key.
    struct RowEnd {
        Expr factor, lse;
    };
    RowEnd finish_row(const Expr &m, const Expr &l, const Expr &h) {
        const Expr none = m == kInvisible && is_finite(l), minus_infinity = Expr(uint32_t(0xff800000));
        const Expr natural = m * ln_unit, sink = head(int(kSink), h);
        const Expr has_sink = uses(kUseSink, b) && reinterpret<uint32_t>(sink) != minus_infinity;
        const Expr top = select(none, sink, max(natural, sink)), keep = select(none, 0.0f, exp(natural - top));
        const Expr total = l * keep + exp(sink - top);
        RowEnd r;
        r.factor = select(has_sink, keep / total, none, 0.0f, 1.0f / l);
        r.lse = select(has_sink, reinterpret<uint32_t>(top + log(total)),
                       select(none, minus_infinity, reinterpret<uint32_t>(natural + log(l))));
        return r;
    }

    void promise_inputs() {
        for (auto *b : {&query, &key, &value}) any_strides(*b);
        any_strides(mask);
        any_strides(bias);
        // A stride of 0 in their second dimension stands for arrays that are not there.
        batch.dim(0).set_bounds(0, kBatchEntries), batch.dim(1).set_min(0);
        head.dim(0).set_bounds(0, kHeadEntries), head.dim(1).set_min(0);
        if (zero) user.promise();
    }
    template <typename B> static void any_strides(B &b) {
        for (int x = 0; x < 4; x++) b.dim(x).set_min(0);
        b.dim(0).set_stride(Expr());
        b.dim(4).set_stride(1);
    }
    // O and LSE: a Tuple, so that one kernel writes both. LSE has a first dimension of stride 0.
    static void promise_outputs(Func out) {
        for (OutputImageParam o : out.output_buffers()) o.dim(0).set_stride(Expr());
        for (int x = 0; x < 4; x++) out.output_buffers()[0].dim(x).set_min(0);
    }

  private:
    In<int32_t> *first_batch = nullptr;
    In<uint32_t> *zero = nullptr; // there are user functions
    UserInputs user;
};

} // namespace attune_gen
