// What the runtime asks user functions outside of the kernels that have them, in small functions of their own.
//
// user_blocks: of blocks of keys, for the rows of a tile: 0 where no row sees a key, 2 where all rows see all, else 1.
//   Of masks by interval arithmetic (Halide's bounds of the mask over the ranges of h, q and k), and by what
//   ATTUNE_BLOCK_MOD says.
// user_row: the scores of some keys of a row, and whether they are seen, for the strict code: compiled under rules that
//   know NaN and infinities.
#include "mods.h"

#include <utility>

namespace attune_gen {

template <typename Self> class UserPhase : public Generator<Self> {
  public:
    template <typename T> using In = GeneratorInput<T>;
    template <typename T> using Out = GeneratorOutput<T>;

    void configure() { user.add_to(*this); }

  protected:
    UserInputs user;
    Var i{"i"};
    int lanes() const { return this->natural_vector_size(Float(32)); }
};

class UserBlocks : public UserPhase<UserBlocks> {
  public:
    In<int32_t> b{"b"}, h_first{"h_first"}, h_last{"h_last"}, q_first{"q_first"}, q_last{"q_last"};
    In<int32_t> first_block{"first_block"}, block_keys{"block_keys"}, num_keys{"num_keys"};
    Out<Buffer<uint8_t, 1>> kinds{"kinds"}; // (block), with room for whole vectors

    void generate() {
        const Expr first = (first_block + i) * block_keys, last = min(first + block_keys, num_keys) - 1;
        const UserMods::Block x = user_mods().block(b, {h_first, h_last}, {q_first, q_last}, {first, last},
                                                    user.reader({b, h_first, h_last, q_first, q_last}));
        kinds(i) = select(x.none, cast<uint8_t>(0), select(x.all, cast<uint8_t>(2), cast<uint8_t>(1)));

        user.promise();
        kinds.dim(0).set_min(0).set_stride(1);
        Func(kinds).vectorize(i, lanes(), TailStrategy::RoundUp);
    }
};

class UserRow : public UserPhase<UserRow> {
  public:
    In<int32_t> b{"b"}, h{"h"}, q{"q"}, first_key{"first_key"};
    In<Buffer<float, 1>> raw{"raw"};            // (key - first_key)
    Out<Buffer<float, 1>> score{"score"};       // the same
    Out<Buffer<uint8_t, 1>> visible{"visible"}; // the same; nonzero: seen

    void generate() {
        const UserScore x =
            user_mods().score(raw(i), {b, h, q, first_key + i}, Expr(uint32_t(0)), user.reader({b, h, q}));
        score(i) = x.score;
        visible(i) = x.visible.defined() ? cast<uint8_t>(x.visible) : cast<uint8_t>(1);

        user.promise();
        raw.dim(0).set_min(0).set_stride(1);
        score.dim(0).set_min(0).set_stride(1);
        visible.dim(0).set_min(0).set_stride(1);
    }
};

} // namespace attune_gen

HALIDE_REGISTER_GENERATOR(attune_gen::UserBlocks, user_blocks)
HALIDE_REGISTER_GENERATOR(attune_gen::UserRow, user_row)
