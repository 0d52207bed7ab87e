// User functions (include/attune/mods.h) on the compiler's side: loaded from plug-ins, called once with names for what
// they get, and put into the stages with what stands for these names there.
#pragma once

#include "Halide.h"

#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace attune_gen {

using namespace Halide;

// Of a score: what it becomes, and whether the key is seen (undefined: it is).
struct UserScore {
    Expr score, visible;
};

// A parameter of all the functions together; those of one name are one.
struct UserParameter {
    std::string name;
    Type type;
    int rank;            // 0: a scalar
    unsigned by[4] = {}; // of each dimension, in the order of the shape: what it is indexed by as it is (kBy…)
};
constexpr unsigned kByBatch = 1, kByHead = 2, kByRow = 4, kByKey = 8;

class UserMods {
  public:
    // Loads a file's functions; `score`: of scores, otherwise of masks. The order of the calls is that of the
    // functions.
    void load(const std::string &plugin, bool score);
    bool any() const { return !functions_.empty(); }
    std::string files() const; // where they are written
    const std::vector<UserParameter> &parameters() const { return parameters_; }

    // Reads a parameter: the scalar, or the element at an index that lies within the extents or not.
    using Read = std::function<Expr(size_t parameter, const std::vector<Expr> &index)>;
    struct Place {
        Expr b, h, q, k;
    };
    // `zero`: a 0 that the compiler does not know.
    UserScore score(const Expr &score, const Place &at, const Expr &zero, const Read &read) const;
    // Of all rows and keys first to last: none is seen, all are.
    struct Block {
        Expr none, all;
    };
    struct Range {
        Expr first, last;
    };
    Block block(const Expr &b, const Range &h, const Range &q, const Range &k, const Read &read) const;

  private:
    struct Function;
    std::vector<std::shared_ptr<const Function>> functions_;
    std::vector<UserParameter> parameters_;

    std::vector<Expr> call(const Function &f, const std::vector<Expr> &arguments, const Read &read) const;
};

// Those of this run of the generator program.
UserMods &user_mods();

// FILE:LINE of the user function that is being called, "" outside of them: errors of Halide's are the function's then.
extern std::string user_place;

// What a generated function takes for the user functions, behind its other inputs; nothing where there are none.
class UserInputs {
  public:
    // Of `generator`, which is being configured.
    void add_to(Internal::GeneratorBase &generator);
    // Indices outside the extents are moved to the edge. Those that are one of `exact` or the `key` itself lie inside
    // (the runtime asks for so large an array): such reads of keys are whole vectors where `whole` holds, a condition
    // that a loop can be parted by.
    UserMods::Read reader(const std::vector<Expr> &exact, const Expr &key = Expr(), const Expr &whole = Expr()) const;
    // Promises of the layout; for generate().
    void promise() const;

  private:
    std::vector<std::function<Expr()>> scalars_;
    std::vector<GeneratorInput<Halide::Buffer<>> *> buffers_;
};

} // namespace attune_gen
