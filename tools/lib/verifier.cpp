#include "verifier.h"

#include "error.h"
#include "running.h"

#include <algorithm>
#include <set>

namespace attune::tools {
namespace {

// Sizes below `size`, the most promising first.
std::vector<int64_t> below(int64_t size, int64_t least) {
    std::vector<int64_t> all;
    for (int64_t s : {least, size / 2, size - size / 4, size - 1})
        if (s >= least && s < size && std::find(all.begin(), all.end(), s) == all.end()) all.push_back(s);
    return all;
}

// All cases that are one step smaller.
std::vector<Case> smaller_cases(const Case &c) {
    std::vector<Case> all;
    const auto add = [&](auto &&change) {
        Case s = c;
        change(s);
        for (int64_t b = 0; b < int64_t(s.kv_len.size()); b++)
            s.kv_len[size_t(b)] = std::min(s.kv_len[size_t(b)], keys_of(s, b));
        if (!(s == c)) all.push_back(std::move(s));
    };
    add([](Case &s) { // not packed
        if (s.q_lens.empty()) return;
        s.q_lens.clear();
        s.k_lens.clear();
    });
    add([](Case &s) { s.dtype = s.kv_dtype = ATTUNE_F32; });
    add([](Case &s) { s.kv_dtype = s.dtype; });
    add([](Case &s) { s.layout = Layout::bhsd; });
    add([](Case &s) { s.scale.reset(); });
    add([](Case &s) { s.softcap.reset(); });
    add([](Case &s) { s.alibi = false; });
    add([](Case &s) { s.sink = false; });
    add([](Case &s) { s.bias = false; });
    add([](Case &s) { s.mask = false; });
    add([](Case &s) { s.kv_len.clear(); });
    add([](Case &s) { s.window_left = -1; });
    add([](Case &s) { s.window_right = -1; });
    add([](Case &s) {
        s.offset = 0;
        s.offsets.clear();
    });
    add([](Case &s) { s.causal = Causal::none; });
    const bool alike = c.kv_len.empty() && c.offsets.empty() && c.q_lens.empty();
    for (int64_t gone = c.B - 1; c.B > 1 && gone >= (alike ? c.B - 1 : 0); gone--) // one batch element less
        add([gone](Case &s) {
            s.B--;
            for (std::vector<int64_t> *list : {&s.kv_len, &s.offsets, &s.q_lens, &s.k_lens})
                if (!list->empty()) list->erase(list->begin() + gone);
        });
    add([](Case &s) { s.Hq = s.Hkv = 1; });
    add([](Case &s) { s.Hq = s.Hkv; });
    for (int64_t heads = 1; heads < c.Hkv; heads++) add([=](Case &s) { s.Hq = s.Hq / s.Hkv * heads, s.Hkv = heads; });
    add([](Case &s) { s.dv = s.dk; });
    for (int64_t Case::*size : {&Case::N, &Case::M, &Case::dk, &Case::dv})
        for (int64_t n : below(c.*size, size == &Case::M ? 0 : 1))
            add([&](Case &s) {
                s.*size = n;
                std::vector<int64_t> *lens = size == &Case::N ? &s.q_lens : size == &Case::M ? &s.k_lens : nullptr;
                if (lens)
                    for (int64_t &length : *lens) length = std::min(length, n);
            });
    for (std::vector<int64_t> Case::*list : {&Case::q_lens, &Case::k_lens, &Case::kv_len})
        for (size_t b = 0; b < (c.*list).size(); b++)
            for (int64_t n : below((c.*list)[b], 0)) add([&](Case &s) { (s.*list)[b] = n; });
    return all;
}

} // namespace

InputOptions verify_options(uint64_t seed) {
    InputOptions options;
    options.seed = seed;
    options.guard = seed % 2 == 0 ? Guard::end : Guard::start;
    options.poison_invisible = seed % 3 == 0;
    return options;
}

bool CaseOutcome::all_ok() const {
    return std::all_of(outcomes.begin(), outcomes.end(), [](const Outcome &o) { return o.check.verdict.ok; });
}

CaseOutcome verify_case(const Case &c, uint64_t seed, const KernelFilter &filter, const std::vector<int> &threads) {
    CaseOutcome result;
    attune_problem problem = to_problem(c);
    problem.device = filter.device;
    std::vector<const attune_kernel *> eligible;
    for (const attune_kernel *k : all_kernels()) {
        if (!filter.accepts(*k)) continue;
        if (const char *reason = attune_kernel_refuses(k, &problem))
            result.refusals[reason].push_back(k->name);
        else
            eligible.push_back(k);
    }
    if (eligible.empty()) return result;
    const InputOptions options = verify_options(seed);
    Inputs inputs(c, options);
    const Reference reference = make_reference(inputs.problem(), inputs.tensors());
    const std::string text = to_string(c);
    for (const attune_kernel *k : eligible) {
        uint64_t hash = 0;
        for (size_t t = 0; t < threads.size(); ++t) {
            const Running now(
                fmt::format("{0}\nAgain: attune verify --case '{1}' --seed {2} --kernel {0}", k->name, text, seed));
            Outcome outcome{k, threads[t], check_kernel(*k, inputs, reference, threads[t], options.guard)};
            Verdict &verdict = outcome.check.verdict;
            if (t == 0)
                hash = outcome.check.hash;
            else if (verdict.ok && hash != outcome.check.hash) {
                verdict.ok = false;
                verdict.why = fmt::format("its bits differ between {} and {} threads", threads[0], threads[t]);
            }
            result.outcomes.push_back(std::move(outcome));
        }
    }
    return result;
}

CaseSpace claimed_space(const KernelFilter &filter, std::string &unclaimed) {
    CaseSpace space;
    space.flags = 0;
    space.window = space.gqa = false;
    std::set<std::pair<attune_dtype, attune_dtype>> dtypes;
    constexpr attune_dtype kTypes[] = {ATTUNE_F32, ATTUNE_BF16, ATTUNE_F16};
    std::set<std::array<int64_t, 4>> sizes;
    for (const attune_kernel *k : all_kernels()) {
        if (!filter.accepts(*k)) continue;
        space.flags |= k->flags;
        if (k->device == ATTUNE_CPU && !(k->traits & ATTUNE_TRAIT_OWN_THREADS)) space.flags |= ATTUNE_VARLEN;
        space.window = space.window || k->window;
        space.gqa = space.gqa || k->gqa;
        for (attune_dtype q : kTypes)
            for (attune_dtype kv : kTypes)
                if (takes_types(*k, q, kv)) dtypes.insert({q, kv});
        if (k->dk) sizes.insert({k->dk_min, k->dk_max, k->dv_min, k->dv_max});
        const int64_t n = std::max<int64_t>(k->n_min, 1), m = std::max<int64_t>(k->m_min, 1),
                      heads = std::max<int64_t>(k->h_min, 1);
        // A random case rarely lies near the bound: what needs half of it is as good as out of reach.
        if (n * m * heads * k->dk_min > space.most / 2)
            space.least.push_back(
                {n, m, heads, k->dk_min, k->dv_min, k->flags, k->window != 0, k->gqa != 0, k->q_dtype, k->kv_dtype});
    }
    // Cases are drawn from this list: f32 and one type for all are what most problems have.
    for (const auto &types : dtypes) {
        const int weight = types.first != types.second ? 1 : types.first == ATTUNE_F32 ? 6 : 3;
        space.dtypes.insert(space.dtypes.end(), size_t(weight), types);
    }
    space.sizes.assign(sizes.begin(), sizes.end());
    const auto feature = [&](bool claimed, const char *name) {
        if (!claimed) unclaimed += fmt::format("{}{}", unclaimed.empty() ? "" : ", ", name);
    };
    feature(space.flags & ATTUNE_CAUSAL, "causal");
    feature(space.window, "window");
    feature(space.flags & ATTUNE_OFFSETS, "offset per batch");
    feature(space.flags & ATTUNE_KV_LEN, "kvlen");
    feature(space.flags & ATTUNE_VARLEN, "varlen");
    feature(space.flags & ATTUNE_MASK, "mask=bool");
    feature(space.flags & ATTUNE_BIAS, "mask=bias");
    feature(space.flags & ATTUNE_SOFTCAP, "softcap");
    feature(space.flags & ATTUNE_ALIBI, "alibi");
    feature(space.flags & ATTUNE_SINK, "sink");
    feature(space.gqa, "grouped heads");
    return space;
}

Case shrink(Case c, const std::function<bool(const Case &)> &fails, int budget) {
    for (bool progress = true; progress;) {
        progress = false;
        for (Case &s : smaller_cases(c)) {
            if (--budget < 0) return c;
            if (!fails(s)) continue;
            c = std::move(s);
            progress = true;
            break;
        }
    }
    return c;
}

} // namespace attune::tools
