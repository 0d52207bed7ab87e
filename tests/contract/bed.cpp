#include "bed.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <fmt/format.h>
#include <limits>
#include <map>
#include <set>
#include <sys/mman.h>
#include <unistd.h>

namespace attune::contract {

using namespace tools;

namespace {

constexpr size_t kSparse = size_t(64) << 20; // from here on, memory is mapped but not filled

const char *guard_name(Guard guard) {
    return guard == Guard::end ? "guard at the end" : guard == Guard::start ? "guard at the start" : "no guard";
}

int stretched = 0; // cases of this test so far that were made longer to suit a kernel

} // namespace

attune_device device_under_test() {
    static const attune_device device = [] {
        const char *name = std::getenv("ATTUNE_TEST_DEVICE");
        return name && *name ? parse_device(name) : ATTUNE_CPU;
    }();
    return device;
}

std::string device_missing() {
    int64_t count = 0;
    if (device_under_test() == ATTUNE_CPU || attune_device_count(device_under_test(), &count) == ATTUNE_OK) return "";
    return attune_last_error();
}

const std::string &isa_under_test() {
    static const std::string isa = [] {
        for (const attune_kernel *k : all_kernels())
            if (k->device != ATTUNE_CPU && k->device == device_under_test()) return std::string(k->isa);
        if (const char *forced = std::getenv("ATTUNE_ISA"); forced && *forced) return std::string(forced);
        // The planner puts the best ISA first.
        attune_problem p;
        attune_problem_init(&p);
        p.Hq = p.Hkv = p.N = p.M = p.dk = p.dv = 1;
        std::string why;
        const Plan plan = make_plan(p, "", "", 1, why);
        return plan ? std::string(attune_find_kernel(attune_plan_kernel(plan.get()))->isa) : std::string("none");
    }();
    return isa;
}

const std::vector<const attune_kernel *> &kernels_of_all_types() {
    static const std::vector<const attune_kernel *> kernels = [] {
        auto some = all_kernels();
        std::erase_if(some, [](const attune_kernel *k) {
            return k->device != device_under_test() || k->isa != isa_under_test();
        });
        return some;
    }();
    return kernels;
}

attune_dtype type_under_test() {
    static const attune_dtype dtype = [] {
        const char *name = std::getenv("ATTUNE_TEST_DTYPE");
        return name && *name ? parse_case(std::string(name) + ":n1:d1").dtype : ATTUNE_F32;
    }();
    return dtype;
}

const std::vector<const attune_kernel *> &kernels_under_test() {
    static const std::vector<const attune_kernel *> kernels = [] {
        auto some = kernels_of_all_types();
        const attune_dtype type = type_under_test();
        std::erase_if(some, [type](const attune_kernel *k) { return !takes_types(*k, type, type); });
        return some;
    }();
    return kernels;
}

bool is_fused(const attune_kernel &k) {
    return !(k.traits & (ATTUNE_TRAIT_QUADRATIC | ATTUNE_TRAIT_ON_REQUEST));
}

void ContractTest::SetUp() {
    stretched = 0;
    if (const std::string why = device_missing(); !why.empty()) GTEST_SKIP() << why;
    if (device_under_test() == ATTUNE_CPU && attune_isa() != isa_under_test() && std::getenv("ATTUNE_ISA"))
        GTEST_SKIP() << "this CPU lacks " << isa_under_test() << "; it offers " << attune_isa() << " at most";
    ASSERT_FALSE(kernels_under_test().empty())
        << "no kernel of the registry is built for " << isa_under_test() << " and " << dtype_name(type_under_test());
}

Case typed(Case c) {
    if (c.dtype == ATTUNE_F32 && c.kv_dtype == ATTUNE_F32) c.dtype = c.kv_dtype = type_under_test();
    return c;
}

Case adapt(Case c, const attune_kernel &k) {
    c = typed(std::move(c));
    c.dk = std::clamp(c.dk, std::max<int64_t>(k.dk_min, 1), k.dk_max);
    if (c.dv > 0) c.dv = std::clamp(c.dv, std::max<int64_t>(k.dv_min, 1), k.dv_max);
    if (c.N > 0) c.N = std::max(c.N, k.n_min);
    if (c.M > 0) c.M = std::max(c.M, k.m_min);
    if (c.Hq > 0 && c.Hq < k.h_min) {
        const int64_t times = (k.h_min + c.Hq - 1) / c.Hq;
        c.Hq *= times;
        c.Hkv *= times;
    }
    return c;
}

std::vector<Group> groups(const Case &c, Fit fit) {
    std::vector<Group> all;
    const bool stretch = fit == Fit::sizes || (fit == Fit::sizes_twice && stretched < 2);
    bool stretched_now = false;
    for (const attune_kernel *k : kernels_under_test()) {
        const Case mine = fit == Fit::stated ? typed(c) : adapt(c, *k);
        const bool longer = mine.N != c.N || mine.M != c.M || mine.Hq != c.Hq;
        if (longer && !stretch) continue;
        attune_problem p = to_problem(mine);
        p.device = device_under_test();
        if (attune_kernel_refuses(k, &p)) continue;
        stretched_now = stretched_now || longer;
        const auto found = std::find_if(all.begin(), all.end(), [&](const Group &g) { return g.c == mine; });
        if (found != all.end())
            found->kernels.push_back(k);
        else
            all.push_back({mine, {k}});
    }
    stretched += stretched_now;
    return all;
}

Spec spec_of(Layout layout) {
    Spec s;
    if (layout == Layout::bshd) s.order = {0, 2, 1, 3};
    if (layout == Layout::col) s.order = {0, 1, 3, 2};
    return s;
}

Places all_in(Layout layout) {
    Places p;
    p.q = p.k = p.v = p.o = spec_of(layout);
    return p;
}

Array::Array(attune_dtype dtype, std::array<int64_t, 4> shape, const Spec &spec, Guard guard, bool output) {
    t.dtype = dtype;
    t.device = ATTUNE_CPU;
    std::copy(shape.begin(), shape.end(), t.shape);
    int64_t walked = 1, base = spec.lead, reach = 0;
    bool empty = false;
    for (int i = 3; i >= 0; i--) {
        const int dim = spec.order[size_t(i)];
        const auto d = size_t(dim);
        const int64_t extent = shape[d];
        empty = empty || extent == 0;
        if (spec.broadcast[d]) continue;
        const int64_t stride = std::max(walked, spec.at_least[d]) * spec.step[d];
        walked = stride * std::max<int64_t>(extent, 1) + spec.pad[d];
        const int64_t span = stride * std::max<int64_t>(extent - 1, 0);
        reach += span;
        t.stride[dim] = spec.reverse[d] ? -stride : stride;
        if (spec.reverse[d]) base += span;
        if (extent == 1 && spec.lone[d]) t.stride[dim] = spec.lone[d];
    }
    const size_t width = dtype_size(dtype);
    elements_ = size_t(empty ? 0 : shape[0] * shape[1] * shape[2] * shape[3]);
    bytes_ = empty ? 0 : size_t(spec.lead + reach + 1) * width;
    pattern_ = output ? 0x5a : 0xff;
    if (bytes_ < kSparse) {
        buffer_ = Buffer(bytes_, guard);
        memory_ = buffer_.as<unsigned char>();
        std::memset(memory_, pattern_, bytes_);
    } else {
        const size_t page = size_t(sysconf(_SC_PAGESIZE)), body = (bytes_ + page - 1) / page * page;
        sparse_bytes_ = body + 2 * page;
        sparse_ =
            mmap(nullptr, sparse_bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (sparse_ == MAP_FAILED) {
            sparse_ = nullptr;
            throw std::bad_alloc();
        }
        unsigned char *first = static_cast<unsigned char *>(sparse_) + page;
        mprotect(sparse_, page, PROT_NONE);
        mprotect(first + body, page, PROT_NONE);
        memory_ = guard == Guard::end ? first + body - bytes_ : first;
    }
    t.data = memory_ + (empty ? 0 : size_t(base) * width);
}

Array::Array(Array &&other) noexcept {
    swap(other);
}

Array &Array::operator=(Array &&other) noexcept {
    swap(other);
    return *this;
}

Array::~Array() {
    if (sparse_) munmap(sparse_, sparse_bytes_);
}

void Array::swap(Array &other) noexcept {
    std::swap(t, other.t);
    std::swap(buffer_, other.buffer_);
    std::swap(sparse_, other.sparse_);
    std::swap(sparse_bytes_, other.sparse_bytes_);
    std::swap(memory_, other.memory_);
    std::swap(bytes_, other.bytes_);
    std::swap(elements_, other.elements_);
    std::swap(pattern_, other.pattern_);
}

float Array::get(int64_t b, int64_t h, int64_t i, int64_t d) const {
    const int64_t at = offset(b, h, i, d);
    if (t.dtype == ATTUNE_U8) return static_cast<const uint8_t *>(t.data)[at];
    return load_element(t.data, t.dtype, at);
}

void Array::set(int64_t b, int64_t h, int64_t i, int64_t d, float x) {
    const int64_t at = offset(b, h, i, d);
    if (t.dtype == ATTUNE_U8)
        static_cast<uint8_t *>(t.data)[at] = uint8_t(x);
    else
        store_element(t.data, t.dtype, at, x);
}

void Array::reset() {
    if (bytes_ < kSparse)
        std::memset(memory_, pattern_, bytes_);
    else
        each([this](int64_t b, int64_t h, int64_t i, int64_t d) {
            std::memset(static_cast<unsigned char *>(t.data) + offset(b, h, i, d) * int64_t(dtype_size(t.dtype)),
                        pattern_, dtype_size(t.dtype));
        });
}

bool Array::gaps_intact() const {
    if (bytes_ >= kSparse) return true;
    if (!buffer_.slack_intact()) return false;
    if (elements_ * dtype_size(t.dtype) == bytes_) return true; // no gaps
    const size_t width = dtype_size(t.dtype);
    std::vector<bool> used(bytes_ / width);
    const int64_t first = (static_cast<const unsigned char *>(t.data) - memory_) / int64_t(width);
    each([&](int64_t b, int64_t h, int64_t i, int64_t d) { used[size_t(first + offset(b, h, i, d))] = true; });
    for (size_t n = 0; n < used.size(); n++)
        for (size_t byte = 0; !used[n] && byte < width; byte++)
            if (memory_[n * width + byte] != pattern_) return false;
    return true;
}

bool Array::all_pattern() const {
    if (bytes_ >= kSparse) return false;
    return std::all_of(memory_, memory_ + bytes_, [this](unsigned char c) { return c == pattern_; });
}

Bed::Bed(const Case &stated, uint64_t seed, const Places &places, Guard guard)
    : c(stated), p(to_problem(stated)), places_(places), guard_(guard), seed_(seed) {
    p.device = device_under_test();
    enum Stream : uint64_t { kQ = 1, kK, kV, kMask, kBias };
    const bool packed = !c.q_lens.empty();
    const int64_t B = packed ? 1 : c.B, N = packed ? total_rows(c) : c.N, M = packed ? total_keys(c) : c.M;
    q = Array(c.dtype, {B, c.Hq, N, c.dk}, places.q, guard, false);
    k = Array(c.kv_dtype, {B, c.Hkv, M, c.dk}, places.k, guard, false);
    v = Array(c.kv_dtype, {B, c.Hkv, M, c.dv}, places.v, guard, false);
    o = Array(c.dtype, {B, c.Hq, N, c.dv}, places.o, guard, true);
    lse = Array(ATTUNE_F32, {B, c.Hq, N, 1}, places.lse, guard, true);
    const auto normal = [seed](Array &a, Stream stream) {
        Random random(seed, stream);
        a.each([&](int64_t b, int64_t h, int64_t i, int64_t d) { a.set(b, h, i, d, float(random.normal())); });
    };
    normal(q, kQ);
    normal(k, kK);
    normal(v, kV);
    if (c.mask) {
        mask = Array(ATTUNE_U8, {c.B, c.Hq, c.N, c.M}, places.mask, guard, false);
        Random random(seed, kMask);
        // Any nonzero byte is "attend".
        mask.each([&](int64_t b, int64_t h, int64_t i, int64_t j) {
            const bool attend = random.chance(0.8);
            mask.set(b, h, i, j, attend ? float(random.between(1, 255)) : 0.0f);
        });
    }
    if (c.bias) {
        bias = Array(ATTUNE_F32, {c.B, c.Hq, c.N, c.M}, places.bias, guard, false);
        normal(bias, kBias);
    }
    kv_len = c.kv_len;
    offsets = c.offsets;
    if (offsets.empty() && p.flags & ATTUNE_OFFSETS) offsets = offsets_of(c);
    if (packed) {
        cu_q = cumulative(c.q_lens);
        cu_k = cumulative(c.k_lens);
    }
    if (c.alibi) slopes = alibi_slopes(c.Hq);
    if (c.sink) sinks = random_sinks(c.Hq, seed);
}

void Bed::ask_for_scores(attune_scores_stage stage) {
    p.flags |= ATTUNE_SCORES;
    p.scores_stage = stage;
    scores = Array(ATTUNE_F32, {p.B, p.Hq, p.N, p.M}, places_.scores, guard_, true);
}

attune_tensors Bed::tensors() const {
    attune_tensors t;
    attune_tensors_init(&t);
    t.q = q.t;
    t.k = k.t;
    t.v = v.t;
    t.o = o.t;
    if (with_lse) t.lse = &lse.t;
    if (p.flags & ATTUNE_MASK) t.mask = &mask.t;
    if (p.flags & ATTUNE_BIAS) t.bias = &bias.t;
    if (p.flags & ATTUNE_SCORES) t.scores = &scores.t;
    if (p.flags & ATTUNE_KV_LEN) t.kv_len = kv_len.data();
    if (p.flags & ATTUNE_OFFSETS) t.offsets = offsets.data();
    if (p.flags & ATTUNE_ALIBI) t.alibi_slopes = slopes.data();
    if (p.flags & ATTUNE_SINK) t.sinks = sinks.data();
    if (p.flags & ATTUNE_VARLEN) {
        t.cu_seqlens_q = cu_q.data();
        t.cu_seqlens_k = cu_k.data();
    }
    t.params = params.data();
    t.num_params = int64_t(params.size());
    return t;
}

void Bed::copy_inputs(const Bed &other) {
    const auto copy = [](Array &to, const Array &from) {
        to.each([&](int64_t b, int64_t h, int64_t i, int64_t d) { to.set(b, h, i, d, from.get(b, h, i, d)); });
    };
    copy(q, other.q);
    copy(k, other.k);
    copy(v, other.v);
    if (p.flags & ATTUNE_MASK) copy(mask, other.mask);
    if (p.flags & ATTUNE_BIAS) copy(bias, other.bias);
    kv_len = other.kv_len;
    offsets = other.offsets;
    slopes = other.slopes;
    sinks = other.sinks;
}

void Bed::reset_outputs() {
    o.reset();
    lse.reset();
    if (p.flags & ATTUNE_SCORES) scores.reset();
}

bool Bed::gaps_intact() const {
    return o.gaps_intact() && lse.gaps_intact() && (!(p.flags & ATTUNE_SCORES) || scores.gaps_intact()) &&
           (with_lse || lse.all_pattern());
}

Reference Bed::reference(int64_t budget) const {
    ReferenceOptions options;
    options.budget = budget;
    return make_reference(p, tensors(), options);
}

std::vector<uint32_t> Bed::bits() const {
    std::vector<uint32_t> all;
    const auto add = [&all](const Array &a) {
        a.each([&](int64_t b, int64_t h, int64_t i, int64_t d) {
            all.push_back(std::bit_cast<uint32_t>(a.get(b, h, i, d)));
        });
    };
    add(o);
    if (with_lse) add(lse);
    if (p.flags & ATTUNE_SCORES) add(scores);
    return all;
}

std::string Bed::bits_differ(const Bed &other) const {
    const auto mine = bits(), theirs = other.bits();
    if (mine.size() != theirs.size()) return fmt::format("{} values instead of {}", mine.size(), theirs.size());
    size_t first = 0, count = 0;
    for (size_t n = 0; n < mine.size(); n++)
        if (mine[n] != theirs[n] && count++ == 0) first = n;
    if (count == 0) return "";
    return fmt::format("{} of {} values differ in their bits, first number {}: {} and {}", count, mine.size(), first,
                       std::bit_cast<float>(mine[first]), std::bit_cast<float>(theirs[first]));
}

uint64_t Bed::input_hash() const {
    uint64_t hash = 1;
    const auto add = [&hash](uint64_t x) {
        hash = (hash ^ x) * 0x9e3779b97f4a7c15u;
        hash ^= hash >> 29;
    };
    for (const Array *a : {&q, &k, &v, &mask, &bias})
        a->each([&](int64_t b, int64_t h, int64_t i, int64_t d) { add(std::bit_cast<uint32_t>(a->get(b, h, i, d))); });
    for (int64_t x : kv_len) add(uint64_t(x));
    for (int64_t x : offsets) add(uint64_t(x));
    for (float x : sinks) add(std::bit_cast<uint32_t>(x));
    return hash;
}

std::string Bed::text() const {
    std::string s = fmt::format("{} (seed {}, {})", to_string(c), seed_, guard_name(guard_));
    const auto strides = [&s](const char *name, const attune_tensor &t) {
        s += fmt::format(" {}{{{},{},{},{}}}", name, t.stride[0], t.stride[1], t.stride[2], t.stride[3]);
    };
    strides("q", q.t);
    strides("k", k.t);
    strides("v", v.t);
    strides("o", o.t);
    if (p.flags & ATTUNE_MASK) strides("mask", mask.t);
    if (p.flags & ATTUNE_BIAS) strides("bias", bias.t);
    if (p.flags & ATTUNE_SCORES) {
        strides("scores", scores.t);
        s += fmt::format(" scores_stage {}", int(p.scores_stage));
    }
    return s;
}

bool Bed::position_sees(int64_t b, int64_t h, int64_t i, int64_t j) const {
    __extension__ typedef __int128 wide;
    const wide at = wide(i) + (p.flags & ATTUNE_OFFSETS ? offsets[size_t(b)] : p.offset);
    if (p.flags & ATTUNE_KV_LEN && j >= kv_len[size_t(b)]) return false;
    if (p.flags & ATTUNE_CAUSAL && j > at) return false;
    if (p.window_left >= 0 && j < at - p.window_left) return false;
    if (p.window_right >= 0 && j > at + p.window_right) return false;
    if (p.flags & ATTUNE_MASK && mask.get(b, h, i, j) == 0) return false;
    return !(p.flags & ATTUNE_BIAS && bias.get(b, h, i, j) == -std::numeric_limits<float>::infinity());
}

namespace {

// For every legal case there is a fused kernel on the CPU. A device's may refuse: docs/devices.md has their limits.
void nobody_took(const Case &c) {
    if (device_under_test() == ATTUNE_CPU)
        ADD_FAILURE() << to_string(c) << ": no fused kernel of " << isa_under_test() << " took it";
}

} // namespace

bool run(const attune_kernel &kernel, Bed &bed, const RunOptions &options) {
    const std::string what = fmt::format("{}, {} thread(s), on {}", kernel.name, options.threads, bed.text());
    const Running now(what);
    std::string why;
    const Plan plan = make_plan(bed.p, kernel.name, "", options.threads, why);
    if (!plan) {
        ADD_FAILURE() << what << ": no plan, though the kernel does not refuse the problem: " << why;
        return false;
    }
    if (std::string(kernel.name) != attune_plan_kernel(plan.get())) {
        ADD_FAILURE() << what << ": the plan took " << attune_plan_kernel(plan.get()) << " instead";
        return false;
    }
    bed.reset_outputs();
    bool ok = true;
    const auto expect = [&](bool good, const std::string &fault) {
        if (!good) ADD_FAILURE() << what << ": " << fault;
        ok = ok && good;
    };
    const size_t size = attune_plan_workspace(plan.get());
    const attune_tensors tensors = bed.tensors();
    const auto succeeded = [&](attune_status status) {
        expect(status == ATTUNE_OK, fmt::format("{}: {}", attune_status_string(status), attune_last_error()));
        return ok;
    };
    if (device_under_test() != ATTUNE_CPU) {
        const DeviceMemory workspace(device_under_test(), size + options.shift + 256);
        workspace.fill(options.fill);
        char *begin = workspace.data() + options.shift;
        if (options.stay) {
            DeviceTensors on_device(device_under_test(), tensors);
            if (!succeeded(attune_run(plan.get(), &on_device.tensors(), begin, size))) return false;
            if (!succeeded(attune_device_synchronize(device_under_test()))) return false;
            on_device.fetch_outputs();
        } else if (!succeeded(attune_run(plan.get(), &tensors, begin, size))) {
            return false;
        }
        expect(bed.gaps_intact(), "it wrote between or beside the elements of an output");
        expect(workspace.holds(0, options.shift, options.fill) &&
                   workspace.holds(options.shift + size, workspace.size(), options.fill),
               "it wrote beside its workspace");
        return ok;
    }
    const Buffer workspace(size + options.shift, options.guard);
    std::memset(workspace.data(), options.fill, size + options.shift);
    // With the guard at the end, the shift is left free behind the workspace, otherwise before it.
    char *begin = workspace.as<char>() + (options.guard == Guard::end ? 0 : options.shift);
    if (!succeeded(attune_run(plan.get(), &tensors, begin, size))) return false;
    expect(bed.gaps_intact(), "it wrote between or beside the elements of an output");
    expect(workspace.slack_intact(), "it wrote beside its workspace");
    const char *slack = workspace.as<char>() + (options.guard == Guard::end ? size : 0);
    expect(std::all_of(slack, slack + options.shift, [&](char x) { return x == char(options.fill); }),
           "it wrote beside its workspace");
    return ok;
}

bool run_and_check(const attune_kernel &kernel, Bed &bed, const Reference &reference, const RunOptions &options) {
    if (!run(kernel, bed, options)) return false;
    const Verdict verdict = check_outputs(reference, bed.tensors());
    if (!verdict.ok)
        ADD_FAILURE() << kernel.name << ", " << options.threads << " thread(s), on " << bed.text() << ": "
                      << verdict.why;
    return verdict.ok;
}

int expect_right(const Case &c, const Expect &expect) {
    int done = 0;
    bool fused = false;
    for (const Group &group : groups(c, expect.fit)) {
        Reference reference;
        bool have_reference = false;
        for (Guard guard : expect.guards) {
            Bed bed(group.c, expect.seed, expect.places, guard);
            if (expect.edit) expect.edit(bed);
            for (const attune_kernel *k : group.kernels) {
                if (attune_kernel_refuses(k, &bed.p)) continue;
                if (!have_reference) reference = bed.reference(expect.budget);
                have_reference = true;
                done++;
                fused = fused || is_fused(*k);
                for (int threads : expect.threads) {
                    RunOptions options;
                    options.threads = threads;
                    options.guard = guard;
                    const bool ok = run_and_check(*k, bed, reference, options);
                    if (ok && expect.after) expect.after(bed, *k);
                }
            }
        }
    }
    if (expect.need_fused && !fused) nobody_took(c);
    return done;
}

int expect_right(const std::string &case_text, const Expect &expect) {
    return expect_right(parse_case(case_text), expect);
}

int expect_case(const Case &c, Fit fit, uint64_t seed) {
    int done = 0;
    bool fused = false;
    for (const Group &group : groups(c, fit)) {
        Reference reference;
        bool have_reference = false;
        const InputOptions options = verify_options(seed); // as attune verify chooses them
        Inputs inputs(group.c, options);
        for (const attune_kernel *k : group.kernels) {
            if (!have_reference) {
                ReferenceOptions budget;
                budget.budget = 8'000'000;
                reference = make_reference(inputs.problem(), inputs.tensors(), budget);
                have_reference = true;
            }
            const std::string again = fmt::format("attune verify --case '{}' --seed {} --kernel {} --threads 1",
                                                  to_string(group.c), seed, k->name);
            const Running now(again);
            const KernelCheck check = check_kernel(*k, inputs, reference, 1, options.guard);
            if (!check.verdict.ok) ADD_FAILURE() << check.verdict.why << "\n  again: " << again;
            done++;
            fused = fused || is_fused(*k);
        }
    }
    if (!fused) nobody_took(c);
    return done;
}

} // namespace attune::contract
