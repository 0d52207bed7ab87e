// pack_keys: K in the layout that Q K^T reads, made once for each (batch, kv head): panels of `panel` keys, transposed,
// so that the inner loop reads one dense vector of keys for each feature (a plain transpose would have a stride of 4 M
// bytes).
// In bf16 a panel holds, for each pair of features, the pair of each key.
//
// It also reports whether a NaN or an infinity took part, by an integer maximum over the bits: the fast kernels run
// under no-NaN rules, and the runtime gives such heads to the strict code. Ragged ends (keys past M, features past dk)
// are the adapter's.
#include "phases.h"

namespace attune_gen {

class PackKeys : public Generator<PackKeys> {
  public:
    GeneratorParam<Type> kv_type{"kv_type", Float(32)};
    GeneratorParam<int> panel{"panel", 32};

    Input<Buffer<>> key{"key"};              // (d, j), any strides; whole panels
    Output<Buffer<>> packed{"packed"};       // (j in panel, d, panel)
    Output<Buffer<int32_t, 1>> bits{"bits"}; // (panel): the largest value without its sign bit, as an integer

    void configure() {
        // Two bf16 are moved as one: d counts pairs of features then.
        const Type type = kv_type;
        key.set_type(type == BFloat(16) ? UInt(32) : type);
        key.set_dimensions(2);
        packed.set_type(type == BFloat(16) ? UInt(32) : type);
        packed.set_dimensions(3);
    }

    void generate() {
        const int w = panel, v = natural_vector_size(Float(32));
        const Expr dk = key.dim(0).extent();
        packed(j, d, p) = key(d, p * w + j);

        RDom r(0, dk);
        lanes(j, p) = 0;
        lanes(j, p) = max(lanes(j, p), magnitude(packed(j, r, p)));
        RDom fold(0, w);
        bits(p) = 0;
        bits(p) = max(bits(p), lanes(fold, p));

        for (int i : {0, 1}) key.dim(i).set_min(0);
        key.dim(0).set_stride(Expr()); // Halide takes 1 for granted otherwise
        packed.dim(0).set_bounds(0, w).set_stride(1);
        packed.dim(1).set_bounds(0, dk).set_stride(w);
        packed.dim(2).set_min(0).set_stride(w * dk);
        bits.dim(0).set_min(0);
        Func f = packed;
        f.bound(j, 0, w).vectorize(j, v).unroll(j);
        f.specialize(key.dim(1).stride() == 1); // the column convention: keys already lie side by side
        lanes.compute_at(bits, p).bound(j, 0, w).store_in(MemoryType::Stack).vectorize(j, v).unroll(j);
        lanes.update().reorder(j, r).vectorize(j, v).unroll(j);
        bits.update().atomic().vectorize(fold);
    }

  private:
    Var j{"j"}, d{"d"}, p{"p"};
    Func lanes{"lanes"};

    static Expr magnitude(const Expr &x) {
        if (x.type() == Float(32)) return reinterpret<int>(x) & 0x7fffffff;
        const Expr first = x & Expr(uint32_t(0x7fff)), second = x >> 16 & Expr(uint32_t(0x7fff)); // of a pair
        return cast<int>(max(first, second) << 16);
    }
};

} // namespace attune_gen

HALIDE_REGISTER_GENERATOR(attune_gen::PackKeys, pack_keys)
