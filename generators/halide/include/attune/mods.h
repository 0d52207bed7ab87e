// User functions of attention, over Halide's expressions: what becomes of a score, and who sees whom. A file with some
// is compiled into kernels ahead of time (docs/kernels.md); nothing of it is needed at run time.
//
//     #include <attune/mods.h>
//
//     ATTUNE_SCORE_MOD(Buffer<float, 1> slopes) {
//         return score - slopes(h) * cast<float>(abs(q - k));
//     }
//
// The arguments of the macros are the function's own parameters, Scalar<T> and Buffer<T, rank>, which each run brings
// by name (attune_tensors.params). What comes before them is always there:
//
//     ATTUNE_SCORE_MOD  score, b, h, q, k   returns the new score, f32. -infinity hides the key from the row
//     ATTUNE_MASK_MOD   b, h, q, k          returns whether row q sees key k
//     ATTUNE_BLOCK_MOD  b, h, q, k          of a mask: returns a Block, what all rows and keys in ranges have in common
//
// b: batch element, h: query head, q: row (without the problem's offset), k: key; int32. An index into a Buffer that
// lies outside of it is moved to its edge. A mask that depends on indices and scalars only needs no ATTUNE_BLOCK_MOD:
// what blocks have in common is worked out from the mask itself.
#ifndef ATTUNE_MODS_H
#define ATTUNE_MODS_H

#include "Halide.h"

#include <cstdint>
#include <functional>
#include <string>
#include <type_traits>
#include <vector>

namespace attune::mods {

using Halide::abs;
using Halide::cast;
using Halide::clamp;
using Halide::exp;
using Halide::Expr;
using Halide::log;
using Halide::max;
using Halide::min;
using Halide::select;
using Halide::sqrt;
using Halide::tanh;

// One value for the whole run: an Expr.
template <typename T> struct Scalar : Expr {
    explicit Scalar(const Expr &value) : Expr(value) {}
};

// An array that a run brings; its indices are in the order of its shape.
template <typename T, int rank> class Buffer {
  public:
    using Read = std::function<Expr(const std::vector<Expr> &index)>;
    explicit Buffer(Read read) : read_(std::move(read)) {}
    template <typename... Index> Expr operator()(const Index &...index) const {
        static_assert(sizeof...(Index) == rank, "a Buffer<T, rank> takes as many indices as its rank");
        return read_({Expr(index)...});
    }

  private:
    Read read_;
};

// Indices first to last, both included.
struct Span {
    Expr first, last;
};

// Of all rows and keys in the ranges: none of these rows sees one of these keys; all see all. Neither has to be said
// (false): then each pair is looked at.
struct Block {
    Expr none = Halide::Internal::const_false(), all = Halide::Internal::const_false();
};

// What lies between the file and the compiler of kernels.
namespace detail {

constexpr int kVersion = 1;

enum class Kind { score, mask, block };

struct Parameter {
    std::string name;
    Halide::Type type;
    int rank; // 0: a Scalar
};

using Read = std::function<Expr(size_t parameter, const std::vector<Expr> &index)>;

struct Function {
    Kind kind;
    std::vector<Parameter> parameters;
    const char *file;
    int line;
    // Arguments: score (of a score only), b, h, q, k; of a block each of h, q and k is two. Results: one, or none and
    // all of a block.
    std::function<std::vector<Expr>(const std::vector<Expr> &arguments, const Read &read)> call;
};

struct Table {
    int version = kVersion;
    std::vector<Function> functions;
};

inline Table &table() {
    static Table t;
    return t;
}

template <typename T> constexpr bool kKnownType =
    std::is_same_v<T, float> || std::is_same_v<T, int32_t> || std::is_same_v<T, int64_t> || std::is_same_v<T, uint8_t>;

template <typename P> struct Traits {
    static_assert(sizeof(P) == 0, "a parameter of a user function is a Scalar<T> or a Buffer<T, rank>");
};
template <typename T> struct Traits<Scalar<T>> {
    static_assert(kKnownType<T>, "Scalar<T>: T is float, int32_t, int64_t or uint8_t");
    static Parameter parameter() { return {"", Halide::type_of<T>(), 0}; }
    static Scalar<T> make(const Read &read, size_t i) { return Scalar<T>(read(i, {})); }
};
template <typename T, int rank> struct Traits<Buffer<T, rank>> {
    static_assert(kKnownType<T>, "Buffer<T, rank>: T is float, int32_t, int64_t or uint8_t");
    static_assert(rank >= 1 && rank <= 4, "Buffer<T, rank>: the rank is 1 to 4");
    static Parameter parameter() { return {"", Halide::type_of<T>(), rank}; }
    static Buffer<T, rank> make(const Read &read, size_t i) {
        return Buffer<T, rank>([read, i](const std::vector<Expr> &index) { return read(i, index); });
    }
};

// The names in "Buffer<float, 2> table, Scalar<int32_t> width": the last word before each comma between parameters.
inline std::vector<std::string> names_of(const std::string &declarations) {
    std::vector<std::string> names;
    std::string word;
    int depth = 0;
    bool ended = true;
    for (const char c : declarations) {
        const bool in_word = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_';
        depth += (c == '<') - (c == '>');
        if (c == ',' && depth == 0) {
            names.push_back(word);
            word.clear();
        } else if (in_word) {
            if (ended) word.clear();
            word += c;
        }
        ended = !in_word;
    }
    if (!word.empty()) names.push_back(word);
    return names;
}

template <typename... P> std::vector<Parameter> parameters(const char *declarations) {
    std::vector<Parameter> all = {Traits<std::remove_cv_t<std::remove_reference_t<P>>>::parameter()...};
    const std::vector<std::string> names = names_of(declarations);
    for (size_t i = 0; i < all.size() && i < names.size(); i++) all[i].name = names[i];
    return all;
}

template <typename... P, typename F, size_t... i>
auto call_with(F &&function, const Read &read, std::index_sequence<i...>) {
    return function(Traits<std::remove_cv_t<std::remove_reference_t<P>>>::make(read, i)...);
}

template <typename... P>
bool add(Expr (*f)(Expr, Expr, Expr, Expr, Expr, P...), const char *declarations, const char *file, int line) {
    table().functions.push_back({Kind::score, parameters<P...>(declarations), file, line,
                                 [f](const std::vector<Expr> &a, const Read &read) -> std::vector<Expr> {
                                     auto call = [&](auto &&...p) { return f(a[0], a[1], a[2], a[3], a[4], p...); };
                                     return {call_with<P...>(call, read, std::index_sequence_for<P...>())};
                                 }});
    return true;
}

template <typename... P>
bool add(Expr (*f)(Expr, Expr, Expr, Expr, P...), const char *declarations, const char *file, int line) {
    table().functions.push_back({Kind::mask, parameters<P...>(declarations), file, line,
                                 [f](const std::vector<Expr> &a, const Read &read) -> std::vector<Expr> {
                                     auto call = [&](auto &&...p) { return f(a[0], a[1], a[2], a[3], p...); };
                                     return {call_with<P...>(call, read, std::index_sequence_for<P...>())};
                                 }});
    return true;
}

template <typename... P>
bool add(Block (*f)(Expr, Span, Span, Span, P...), const char *declarations, const char *file, int line) {
    table().functions.push_back({Kind::block, parameters<P...>(declarations), file, line,
                                 [f](const std::vector<Expr> &a, const Read &read) -> std::vector<Expr> {
                                     auto call = [&](auto &&...p) {
                                         return f(a[0], {a[1], a[2]}, {a[3], a[4]}, {a[5], a[6]}, p...);
                                     };
                                     const Block b = call_with<P...>(call, read, std::index_sequence_for<P...>());
                                     return {b.none, b.all};
                                 }});
    return true;
}

} // namespace detail
} // namespace attune::mods

// For files of user functions only, which have nothing but these.
using namespace attune::mods;

extern "C" __attribute__((visibility("default"), used)) inline const void *attune_mods_table() {
    return &::attune::mods::detail::table();
}

#define ATTUNE_SCORE_MOD(...)                                                                                          \
    ATTUNE_USER_FUNCTION(attune_score_mod, ::attune::mods::Expr,                                                       \
                         ([[maybe_unused]] ::attune::mods::Expr score, [[maybe_unused]] ::attune::mods::Expr b,        \
                          [[maybe_unused]] ::attune::mods::Expr h, [[maybe_unused]] ::attune::mods::Expr q,            \
                          [[maybe_unused]] ::attune::mods::Expr k __VA_OPT__(, ) __VA_ARGS__),                         \
                         #__VA_ARGS__)
#define ATTUNE_MASK_MOD(...)                                                                                           \
    ATTUNE_USER_FUNCTION(attune_mask_mod, ::attune::mods::Expr,                                                        \
                         ([[maybe_unused]] ::attune::mods::Expr b, [[maybe_unused]] ::attune::mods::Expr h,            \
                          [[maybe_unused]] ::attune::mods::Expr q,                                                     \
                          [[maybe_unused]] ::attune::mods::Expr k __VA_OPT__(, ) __VA_ARGS__),                         \
                         #__VA_ARGS__)
#define ATTUNE_BLOCK_MOD(...)                                                                                          \
    ATTUNE_USER_FUNCTION(attune_block_mod, ::attune::mods::Block,                                                      \
                         ([[maybe_unused]] ::attune::mods::Expr b, [[maybe_unused]] ::attune::mods::Span h,            \
                          [[maybe_unused]] ::attune::mods::Span q,                                                     \
                          [[maybe_unused]] ::attune::mods::Span k __VA_OPT__(, ) __VA_ARGS__),                         \
                         #__VA_ARGS__)
#define ATTUNE_USER_FUNCTION(name, result, arguments, declarations)                                                    \
    static result name arguments;                                                                                      \
    [[maybe_unused]] static const bool name##_added =                                                                  \
        ::attune::mods::detail::add(&name, declarations, __FILE__, __LINE__);                                          \
    static result name arguments

#endif
