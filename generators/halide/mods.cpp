#include "mods.h"

#include "include/attune/mods.h"
#include "stages/types.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <dlfcn.h>
#include <iostream>
#include <map>
#include <sstream>
#include <utility>

namespace attune_gen {

namespace detail = attune::mods::detail;

struct UserMods::Function {
    detail::Function function;
    std::vector<size_t> parameters; // of the function, as numbers among all
};

namespace {

[[noreturn]] void fail(const std::string &message) {
    std::cerr << "attune-halide-gen: " << message << "\n";
    std::exit(1);
}

std::string where(const detail::Function &f) {
    return std::string(f.file) + ":" + std::to_string(f.line) + ": error: ";
}

[[noreturn]] void fail_at(const detail::Function &f, const std::string &message) {
    std::cerr << where(f) << message << "\n";
    std::exit(1);
}

// What user functions may use and the fast rules of the kernels do not have: tanh, for which Halide would call the C
// library for each element, and infinities, which the compiler takes for impossible (a select between a number and one
// becomes the number) unless they come from memory that it cannot look through: `zero` is 0.
class ForKernels : public Internal::IRMutator {
  public:
    explicit ForKernels(Expr zero) : zero_(std::move(zero)) {}
    using Internal::IRMutator::mutate;

  private:
    using Internal::IRMutator::visit;
    Expr visit(const Internal::Call *op) override {
        if (op->name == "tanh_f32") return fast_tanh(mutate(op->args[0]));
        return IRMutator::visit(op);
    }
    Expr visit(const Internal::FloatImm *op) override {
        if (op->type != Float(32) || !std::isinf(op->value)) return op;
        return reinterpret<float>(Expr(op->value > 0 ? uint32_t(0x7f800000) : uint32_t(0xff800000)) + zero_);
    }
    Expr zero_;
};

Expr name_for(const std::string &name, const Type &type = Int(32)) {
    return Internal::Variable::make(type, "user." + name);
}

// Of ranges of h, q and k: whether `condition` must hold, and whether it can.
struct Possible {
    Expr must, can;
};
Possible possible(const Expr &condition, const Internal::Scope<Internal::Interval> &scope) {
    const Internal::Interval i = Internal::bounds_of_expr_in_scope(condition, scope);
    return {i.has_lower_bound() ? Internal::simplify(i.min) : Internal::const_false(),
            i.has_upper_bound() ? Internal::simplify(i.max) : Internal::const_true()};
}

} // namespace

std::string user_place;

UserMods &user_mods() {
    static UserMods mods;
    return mods;
}

void UserMods::load(const std::string &plugin, bool score) {
    void *library = dlopen(plugin.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (!library) fail(plugin + ": cannot be loaded: " + dlerror());
    const auto entry = reinterpret_cast<const void *(*)()>(dlsym(library, "attune_mods_table"));
    if (!entry) fail(plugin + ": has no user functions: expected a file that includes attune/mods.h");
    const auto &table = *static_cast<const detail::Table *>(entry());
    if (table.version != detail::kVersion)
        fail(plugin + ": made for version " + std::to_string(table.version) + " of attune/mods.h: expected " +
             std::to_string(detail::kVersion));
    const detail::Kind wanted = score ? detail::Kind::score : detail::Kind::mask;
    bool found = false;
    for (const detail::Function &f : table.functions) {
        found = found || f.kind == wanted;
        if ((f.kind == detail::Kind::score) != score) continue;
        auto mine = std::make_shared<Function>(Function{f, {}});
        for (const detail::Parameter &p : f.parameters) {
            size_t i = 0;
            while (i < parameters_.size() && parameters_[i].name != p.name) i++;
            if (i == parameters_.size()) parameters_.push_back({p.name, p.type, p.rank, {}});
            if (parameters_[i].type != p.type || parameters_[i].rank != p.rank)
                fail_at(f, "the parameter " + p.name +
                               " has another type in another user function: expected one type for a name");
            mine->parameters.push_back(i);
        }
        functions_.push_back(mine);
    }
    if (!found)
        fail(plugin + ": has no " + (score ? "ATTUNE_SCORE_MOD" : "ATTUNE_MASK_MOD") +
             ": expected one, since it is given as " + (score ? "SCORE_MOD" : "MASK_MOD"));
    // Wrong types are found at once, not by the first kernel.
    const std::vector<Expr> place = {name_for("b"), name_for("h"), name_for("q"), name_for("k")};
    const Read look = [&](size_t i, const std::vector<Expr> &index) {
        for (size_t d = 0; d < index.size(); d++)
            for (size_t n = 0; n < place.size(); n++)
                if (index[d].same_as(place[n])) parameters_[i].by[d] |= 1u << n;
        return Internal::make_zero(parameters_[i].type);
    };
    for (const auto &f : functions_) {
        std::vector<Expr> arguments = place;
        if (f->function.kind == detail::Kind::block) arguments.assign(7, Internal::make_zero(Int(32)));
        if (f->function.kind == detail::Kind::score) arguments.insert(arguments.begin(), name_for("score", Float(32)));
        call(*f, arguments, look);
    }
}

std::string UserMods::files() const {
    std::string text;
    for (const auto &f : functions_)
        if (text.find(f->function.file) == std::string::npos)
            text += (text.empty() ? "" : ", ") + std::string(f->function.file);
    return text;
}

std::vector<Expr> UserMods::call(const Function &f, const std::vector<Expr> &arguments, const Read &read) const {
    const detail::Read own = [&](size_t i, const std::vector<Expr> &index) { return read(f.parameters[i], index); };
    user_place = where(f.function);
    const std::vector<Expr> results = f.function.call(arguments, own);
    user_place.clear();
    const bool score = f.function.kind == detail::Kind::score;
    for (const Expr &x : results) {
        if (!x.defined()) fail_at(f.function, "the function returns an Expr without a value");
        if (score ? x.type() == Float(32) : x.type().is_bool()) continue;
        std::ostringstream type;
        type << x.type();
        fail_at(f.function, "the function returns " + type.str() + ": expected " +
                                (score ? "float32, perhaps by cast<float>" : "a condition (uint1)"));
    }
    return results;
}

UserScore UserMods::score(const Expr &score, const Place &at, const Expr &zero, const Read &read) const {
    UserScore x{score, Expr()};
    ForKernels for_kernels(zero);
    bool changed = false;
    for (const auto &f : functions_) {
        if (f->function.kind == detail::Kind::score) {
            x.score = for_kernels.mutate(call(*f, {x.score, at.b, at.h, at.q, at.k}, read)[0]);
            changed = true;
        } else if (f->function.kind == detail::Kind::mask) {
            const Expr seen = for_kernels.mutate(call(*f, {at.b, at.h, at.q, at.k}, read)[0]);
            x.visible = x.visible.defined() ? x.visible && seen : seen;
        }
    }
    if (!changed) return x;
    // As with a bias (stages/mask.h): -inf masks, and a NaN becomes +inf, which no maximum drops. On bits of which the
    // compiler knows nothing.
    const Expr bits = reinterpret<uint32_t>(x.score) + zero, infinity = Expr(uint32_t(0x7f800000));
    const Expr seen = bits != Expr(uint32_t(0xff800000));
    x.score = reinterpret<float>(select((bits & Expr(uint32_t(0x7fffffff))) > infinity, infinity, bits));
    x.visible = x.visible.defined() ? x.visible && seen : seen;
    return x;
}

UserMods::Block UserMods::block(const Expr &b, const Range &h, const Range &q, const Range &k, const Read &read) const {
    const Expr vh = name_for("h"), vq = name_for("q"), vk = name_for("k");
    Internal::Scope<Internal::Interval> scope;
    scope.push("user.h", {h.first, h.last});
    scope.push("user.q", {q.first, q.last});
    scope.push("user.k", {k.first, k.last});
    std::map<std::string, Block> of_file;
    for (const auto &f : functions_) {
        if (f->function.kind == detail::Kind::score) continue;
        Block &x = of_file.try_emplace(f->function.file, Block{Internal::const_false(), Internal::const_false()})
                       .first->second;
        if (f->function.kind == detail::Kind::block) {
            const auto said = call(*f, {b, h.first, h.last, q.first, q.last, k.first, k.last}, read);
            x = {x.none || said[0], x.all || said[1]};
        } else {
            const Possible p = possible(call(*f, {b, vh, vq, vk}, read)[0], scope);
            x = {x.none || !p.can, x.all || p.must};
        }
    }
    Block block{Internal::const_false(), Internal::const_true()};
    for (const auto &[file, x] : of_file) block = {block.none || x.none, block.all && x.all};
    return block;
}

void UserInputs::add_to(Internal::GeneratorBase &generator) {
    for (const UserParameter &p : user_mods().parameters()) {
        const std::string name = "user_" + p.name; // none of the others begins so
        std::function<Expr()> scalar;
        GeneratorInput<Halide::Buffer<>> *buffer = nullptr;
        auto add_scalar = [&](auto zero) {
            auto *input = generator.add_input<decltype(zero)>(name);
            scalar = [input] { return Expr(*input); };
        };
        if (p.rank)
            buffer = generator.add_input<Halide::Buffer<>>(name, p.type, p.rank);
        else if (p.type == Float(32))
            add_scalar(float());
        else if (p.type == Int(32))
            add_scalar(int32_t());
        else if (p.type == Int(64))
            add_scalar(int64_t());
        else
            add_scalar(uint8_t());
        scalars_.push_back(scalar);
        buffers_.push_back(buffer);
    }
}

UserMods::Read UserInputs::reader(const std::vector<Expr> &exact, const Expr &key, const Expr &whole) const {
    return [this, exact, key, whole](size_t parameter, const std::vector<Expr> &index) {
        if (!buffers_[parameter]) return scalars_[parameter]();
        auto &buffer = *buffers_[parameter];
        std::vector<Expr> at; // the last index innermost
        for (size_t d = 0; d < index.size(); d++) {
            const Expr i = index[index.size() - 1 - d], last = buffer.dim(int(d)).extent() - 1;
            if (!i.defined()) fail(user_place + "an index has no value");
            const auto is = [&](const Expr &e) { return e.same_as(i); };
            if (std::any_of(exact.begin(), exact.end(), is))
                at.push_back(unsafe_promise_clamped(i, 0, last));
            else if (key.defined() && is(key))
                at.push_back(unsafe_promise_clamped(select(likely(whole), i, min(i, last)), 0, last));
            else
                at.push_back(clamp(i.type() == Int(32) ? i : cast<int32_t>(i), 0, last));
        }
        return Expr(buffer(at));
    };
}

void UserInputs::promise() const {
    for (size_t i = 0; i < buffers_.size(); i++) {
        if (!buffers_[i]) continue;
        buffers_[i]->dim(0).set_stride(1);
        for (int d = 0; d < user_mods().parameters()[i].rank; d++) buffers_[i]->dim(d).set_min(0);
    }
}

} // namespace attune_gen
