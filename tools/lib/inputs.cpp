// Arrays for a case, and random cases.
#include "inputs.h"

#include "error.h"
#include "numbers.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <new>
#include <sys/mman.h>
#include <unistd.h>

namespace attune::tools {
namespace {

constexpr std::byte kPattern{0xa5};
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

size_t page_size() {
    static const size_t size = size_t(sysconf(_SC_PAGESIZE));
    return size;
}

// Streams of the generator: one for each array.
enum Stream : uint64_t {
    kStreamQ = 1,
    kStreamK,
    kStreamV,
    kStreamMask,
    kStreamBias,
    kStreamSink,
    kStreamPoison,
    kStreamCase,
    kStreamLeast
};

// Element (b, h, s, d) always gets the same number, whatever the layout.
void fill_normal(const attune_tensor &t, Random random) {
    for (int64_t b = 0; b < t.shape[0]; ++b)
        for (int64_t h = 0; h < t.shape[1]; ++h)
            for (int64_t s = 0; s < t.shape[2]; ++s)
                for (int64_t d = 0; d < t.shape[3]; ++d)
                    store_element(t.data, t.dtype,
                                  b * t.stride[0] + h * t.stride[1] + s * t.stride[2] + d * t.stride[3],
                                  float(random.normal()));
}

void fill_nan(const attune_tensor &t, size_t bytes) {
    const int64_t count = int64_t(bytes / dtype_size(t.dtype));
    for (int64_t i = 0; i < count; ++i) store_element(t.data, t.dtype, i, kNaN);
}

attune_tensor dense(void *data, attune_dtype dtype, std::array<int64_t, 4> shape, std::array<int64_t, 4> stride) {
    attune_tensor t{};
    t.data = data;
    t.dtype = dtype;
    t.device = ATTUNE_CPU;
    std::copy(shape.begin(), shape.end(), t.shape);
    std::copy(stride.begin(), stride.end(), t.stride);
    return t;
}

} // namespace

Buffer::Buffer(size_t bytes, Guard guard, bool huge_pages) : size_(bytes), guard_(guard) {
    const size_t page = page_size();
    if (huge_pages && guard == Guard::none) {
        constexpr size_t kHuge = size_t(2) << 20;
        mapping_size_ = (bytes + 64 + 2 * kHuge - 1) / kHuge * kHuge;
        void *mapping = mmap(nullptr, mapping_size_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (mapping == MAP_FAILED) throw std::bad_alloc();
        mapping_ = static_cast<std::byte *>(mapping);
        madvise(mapping_, mapping_size_, MADV_HUGEPAGE);
        data_ = mapping_ + (kHuge - reinterpret_cast<uintptr_t>(mapping_) % kHuge) % kHuge + 64;
        return;
    }
    if (guard == Guard::none) {
        // 64 bytes: a cache line, which is what an ordinary caller's allocator gives for large arrays at best.
        data_ = std::aligned_alloc(64, (std::max<size_t>(bytes, 1) + 63) / 64 * 64);
        if (!data_) throw std::bad_alloc();
        return;
    }
    const size_t body = (std::max<size_t>(bytes, 1) + page - 1) / page * page;
    mapping_size_ = body + 2 * page;
    void *mapping = mmap(nullptr, mapping_size_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapping == MAP_FAILED) throw std::bad_alloc();
    mapping_ = static_cast<std::byte *>(mapping);
    std::byte *first = mapping_ + page, *last = first + body;
    data_ = guard == Guard::end ? last - bytes : first;
    std::memset(first, int(kPattern), body);
    std::memset(data_, 0, bytes);
    mprotect(mapping_, page, PROT_NONE);
    mprotect(last, page, PROT_NONE);
}

Buffer::~Buffer() {
    if (mapping_)
        munmap(mapping_, mapping_size_);
    else
        std::free(data_);
}

void Buffer::swap(Buffer &other) noexcept {
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
    std::swap(guard_, other.guard_);
    std::swap(mapping_, other.mapping_);
    std::swap(mapping_size_, other.mapping_size_);
}

bool Buffer::slack_intact() const {
    if (guard_ == Guard::none) return true;
    const std::byte *first = mapping_ + page_size(), *last = mapping_ + mapping_size_ - page_size();
    const std::byte *begin = static_cast<const std::byte *>(data_), *end = begin + size_;
    const auto untouched = [](std::byte b) { return b == kPattern; };
    return std::all_of(first, begin, untouched) && std::all_of(end, last, untouched);
}

void Buffer::drop_pages() {
    // Whole pages only; what lies before the first and behind the last may be somebody else's.
    const size_t page = page_size(), before = (page - reinterpret_cast<uintptr_t>(data_) % page) % page;
    if (size_ < before + page) return;
    madvise(static_cast<std::byte *>(data_) + before, (size_ - before) / page * page, MADV_DONTNEED);
}

attune_tensor view(void *data, attune_dtype dtype, Layout layout, int64_t B, int64_t H, int64_t S, int64_t D) {
    switch (layout) {
    case Layout::bhsd:
        return dense(data, dtype, {B, H, S, D}, {H * S * D, S * D, D, 1});
    case Layout::bshd:
        return dense(data, dtype, {B, H, S, D}, {S * H * D, D, H * D, 1});
    case Layout::col:
        return dense(data, dtype, {B, H, S, D}, {H * D * S, D * S, 1, S});
    }
    return {};
}

std::vector<int64_t> cumulative(const std::vector<int64_t> &lengths) {
    std::vector<int64_t> sums{0};
    for (int64_t length : lengths) sums.push_back(sums.back() + length);
    return sums;
}

std::vector<int64_t> offsets_of(const Case &c) {
    std::vector<int64_t> offsets;
    for (int64_t b = 0; b < c.B; ++b) offsets.push_back(offset_of(c, b));
    return offsets;
}

std::vector<float> random_sinks(int64_t heads, uint64_t seed) {
    std::vector<float> sinks;
    Random random(seed, kStreamSink);
    for (int64_t h = 0; h < heads; ++h) sinks.push_back(float(random.normal()));
    return sinks;
}

std::vector<float> alibi_slopes(int64_t heads) {
    const auto geometric = [](int64_t power, int64_t index) {
        return float(std::exp2(-8.0 * double(index + 1) / double(power)));
    };
    int64_t power = 1;
    while (power * 2 <= heads) power *= 2;
    std::vector<float> slopes;
    for (int64_t h = 0; h < std::min(power, heads); ++h) slopes.push_back(geometric(power, h));
    for (int64_t h = power; h < heads; ++h) slopes.push_back(geometric(2 * power, 2 * (h - power)));
    return slopes;
}

void Inputs::allocate(const InputOptions &options) {
    const Case &c = case_;
    const double available = double(sysconf(_SC_PHYS_PAGES)) * double(page_size());
    const bool packed = !c.q_lens.empty();
    const double q_count = double(total_rows(c)) * double(c.Hq), k_count = double(total_keys(c)) * double(c.Hkv);
    const double needed = q_count * double(c.dk + c.dv) * double(dtype_size(c.dtype)) +
                          k_count * double(c.dk + c.dv) * double(dtype_size(c.kv_dtype)) + q_count * 4 +
                          (c.mask ? double(c.B) * double(c.M) : 0) +
                          (c.bias ? 4.0 * double(c.Hq) * double(c.N) * double(c.M) : 0);
    if (needed > 0.8 * available)
        fail("case '{}': its arrays take {:.1f} GB; expected at most {:.1f} GB (80 % of this machine's memory)",
             to_string(c), needed * 1e-9, 0.8 * available * 1e-9);

    const Guard guard = options.guard;
    const bool huge = options.huge_pages;
    const auto array = [guard, huge](int64_t count, attune_dtype dtype) {
        return Buffer(size_t(count) * dtype_size(dtype), guard, huge);
    };
    const int64_t B = packed ? 1 : c.B, N = packed ? total_rows(c) : c.N, M = packed ? total_keys(c) : c.M;
    q_ = array(B * c.Hq * N * c.dk, c.dtype);
    k_ = array(B * c.Hkv * M * c.dk, c.kv_dtype);
    v_ = array(B * c.Hkv * M * c.dv, c.kv_dtype);
    o_ = array(B * c.Hq * N * c.dv, c.dtype);
    lse_ = array(B * c.Hq * N, ATTUNE_F32);

    problem_ = to_problem(c);
    attune_tensors_init(&tensors_);
    tensors_.q = view(q_.data(), c.dtype, c.layout, B, c.Hq, N, c.dk);
    tensors_.k = view(k_.data(), c.kv_dtype, c.layout, B, c.Hkv, M, c.dk);
    tensors_.v = view(v_.data(), c.kv_dtype, c.layout, B, c.Hkv, M, c.dv);
    tensors_.o = view(o_.data(), c.dtype, c.layout, B, c.Hq, N, c.dv);
    lse_view_ = dense(lse_.data(), ATTUNE_F32, {B, c.Hq, N, 1}, {c.Hq * N, N, 1, 1});
    tensors_.lse = &lse_view_;
    if (c.mask) {
        mask_ = array(c.B * c.M, ATTUNE_U8);
        Random random(options.seed, kStreamMask);
        for (int64_t i = 0; i < c.B * c.M; ++i) mask_.as<uint8_t>()[i] = random.chance(0.8) ? uint8_t(1) : uint8_t(0);
        mask_view_ = dense(mask_.data(), ATTUNE_U8, {c.B, c.Hq, c.N, c.M}, {c.M, 0, 0, 1});
        tensors_.mask = &mask_view_;
    }
    if (c.bias) {
        bias_ = array(c.Hq * c.N * c.M, ATTUNE_F32);
        Random random(options.seed, kStreamBias);
        for (int64_t i = 0; i < c.Hq * c.N * c.M; ++i)
            store_element(bias_.data(), ATTUNE_F32, i, float(random.normal()));
        bias_view_ = dense(bias_.data(), ATTUNE_F32, {c.B, c.Hq, c.N, c.M}, {0, c.N * c.M, c.M, 1});
        tensors_.bias = &bias_view_;
    }
    const auto copy = [guard](Buffer &buffer, const auto &values) {
        const size_t bytes = values.size() * sizeof(values[0]);
        buffer = Buffer(bytes, guard);
        if (bytes != 0) std::memcpy(buffer.data(), values.data(), bytes);
    };
    if (!c.kv_len.empty()) {
        copy(kv_len_, c.kv_len);
        tensors_.kv_len = kv_len_.as<int64_t>();
    }
    if (problem_.flags & ATTUNE_OFFSETS) {
        copy(offsets_, offsets_of(c));
        tensors_.offsets = offsets_.as<int64_t>();
    }
    if (packed) {
        copy(cu_q_, cumulative(c.q_lens));
        copy(cu_k_, cumulative(c.k_lens));
        tensors_.cu_seqlens_q = cu_q_.as<int64_t>();
        tensors_.cu_seqlens_k = cu_k_.as<int64_t>();
    }
    if (c.alibi) {
        copy(slopes_, alibi_slopes(c.Hq));
        tensors_.alibi_slopes = slopes_.as<float>();
    }
    if (c.sink) {
        copy(sinks_, random_sinks(c.Hq, options.seed));
        tensors_.sinks = sinks_.as<float>();
    }
    reset_outputs();
}

Inputs::Inputs(const Case &c, const InputOptions &options) : case_(c) {
    allocate(options);
    fill_normal(tensors_.q, Random(options.seed, kStreamQ));
    fill_normal(tensors_.k, Random(options.seed, kStreamK));
    fill_normal(tensors_.v, Random(options.seed, kStreamV));
    if (options.poison_invisible) poison(options.seed);
}

Inputs::Inputs(const Case &c, const InputOptions &options, const float *q, const float *k, const float *v) : case_(c) {
    if (c.layout != Layout::bhsd || c.dtype != ATTUNE_F32 || c.kv_dtype != ATTUNE_F32)
        fail("case '{}': layout or type; expected f32 in layout bhsd for arrays from a file", to_string(c));
    allocate(options);
    std::memcpy(q_.data(), q, q_.size());
    std::memcpy(k_.data(), k, k_.size());
    std::memcpy(v_.data(), v, v_.size());
    if (options.poison_invisible) poison(options.seed);
}

void Inputs::poison(uint64_t seed) {
    __extension__ typedef __int128 wide;
    Random random(seed, kStreamPoison);
    const Case &c = case_;
    const bool packed = !c.q_lens.empty();
    for (int64_t b = 0, key0 = 0; b < c.B; key0 += keys_of(c, b), ++b) {
        const wide first = offset_of(c, b), last = first + rows_of(c, b) - 1; // positions of the first and last row
        for (int64_t j = 0; j < keys_of(c, b); ++j) {
            // Each structural condition is an interval of rows, so a key is invisible to all if the intervals do not
            // meet.
            wide low = first, high = last;
            if (c.causal != Causal::none) low = std::max<wide>(low, j);
            if (c.window_left >= 0) high = std::min<wide>(high, wide(j) + c.window_left);
            if (c.window_right >= 0) low = std::max<wide>(low, wide(j) - c.window_right);
            const bool exists = c.kv_len.empty() || j < c.kv_len[b];
            const bool unmasked = !c.mask || mask_.as<uint8_t>()[b * c.M + j];
            if (exists && unmasked && low <= high) continue;
            for (int64_t h = 0; h < c.Hkv; ++h)
                for (const attune_tensor *t : {&tensors_.k, &tensors_.v}) {
                    const float bad = random.chance(1.0 / 3) ? std::numeric_limits<float>::infinity() : kNaN;
                    for (int64_t d = 0; d < t->shape[3]; ++d)
                        store_element(t->data, t->dtype,
                                      (packed ? 0 : b) * t->stride[0] + h * t->stride[1] +
                                          (packed ? key0 + j : j) * t->stride[2] + d * t->stride[3],
                                      bad);
                }
        }
    }
}

void Inputs::reset_outputs() {
    fill_nan(tensors_.o, o_.size());
    fill_nan(lse_view_, lse_.size());
}

uint64_t Inputs::output_hash() const {
    uint64_t hash = 0xcbf29ce484222325u;
    for (const Buffer *buffer : {&o_, &lse_}) {
        const auto *bytes = buffer->as<unsigned char>();
        size_t i = 0;
        for (; i + 8 <= buffer->size(); i += 8) {
            uint64_t word;
            std::memcpy(&word, bytes + i, 8);
            hash = (hash ^ word) * 0x9e3779b97f4a7c15u;
            hash ^= hash >> 29;
        }
        for (; i < buffer->size(); ++i) hash = (hash ^ bytes[i]) * 0x100000001b3u;
    }
    return hash;
}

size_t Inputs::bytes() const {
    size_t total = 0;
    for (const Buffer *b :
         {&q_, &k_, &v_, &o_, &mask_, &bias_, &lse_, &kv_len_, &offsets_, &slopes_, &sinks_, &cu_q_, &cu_k_})
        total += b->size();
    return total;
}

namespace {

// A case for kernels that take long problems only: what else it has they choose themselves by CaseSpace::Least.
Case long_case(Random &r, const CaseSpace::Least &least) {
    const auto allows = [&](uint32_t flag, double probability) { return r.chance(probability) && least.flags & flag; };
    Case c;
    c.dtype = least.dtype;
    c.kv_dtype = least.kv_dtype;
    c.N = least.n + r.between(0, 24);
    c.M = r.chance(0.3) ? least.m : least.m + r.between(0, 70);
    const int64_t group = least.gqa && r.chance(0.5) ? r.between(2, 4) : 1;
    c.Hkv = (least.heads + group - 1) / group;
    c.Hq = c.Hkv * group;
    c.dk = least.dk;
    c.dv = least.dv;
    if (allows(ATTUNE_CAUSAL, 0.5)) c.causal = r.chance(0.5) ? Causal::bottom_right : Causal::top_left;
    if (least.window && r.chance(0.3)) c.window_left = r.between(0, c.M);
    if (c.causal == Causal::top_left && r.chance(0.5)) c.offset = r.between(-c.N - 2, c.M + 2);
    if (allows(ATTUNE_KV_LEN, 0.3)) c.kv_len = {r.between(0, c.M)};
    if (allows(ATTUNE_SINK, 0.2)) c.sink = true;
    if (allows(ATTUNE_SCALE, 0.2)) c.scale = float(r.between(-40, 40)) / 64;
    if (r.chance(0.4)) c.layout = r.chance(0.5) ? Layout::bshd : Layout::col;
    return c;
}

} // namespace

Case random_case(uint64_t seed, const CaseSpace &space) {
    if (!space.least.empty()) {
        Random r(seed, kStreamLeast); // of its own: the other cases stay as they are
        if (r.chance(1.0 / 64)) return long_case(r, space.least[size_t(r.between(0, int64_t(space.least.size()) - 1))]);
    }
    Random r(seed, kStreamCase);
    // Logarithmically even, so that small sizes, where the edges are, come as often as large ones.
    const auto log_size = [&r](int64_t most) {
        return std::clamp<int64_t>(int64_t(std::exp2(r.uniform() * std::log2(double(most) + 1))), 1,
                                   std::max<int64_t>(most, 1));
    };
    const auto allows = [&space, &r](uint32_t flag, double probability) {
        return r.chance(probability) && (space.flags & flag) != 0;
    };
    Case c;
    const auto &types = space.dtypes[size_t(r.between(0, int64_t(space.dtypes.size()) - 1))];
    c.dtype = types.first;
    c.kv_dtype = types.second;

    constexpr int64_t kBuckets[] = {16, 32, 64, 80, 96, 128, 192, 256};
    const auto features = [&] {
        if (r.chance(0.5)) return r.pick(kBuckets);
        return r.chance(0.2) ? log_size(16) : r.between(1, 300);
    };
    if (!space.sizes.empty() && r.chance(0.5)) {
        const auto &[dk_from, dk_to, dv_from, dv_to] =
            space.sizes[size_t(r.between(0, int64_t(space.sizes.size()) - 1))];
        c.dk = r.chance(0.6) ? dk_to : r.between(dk_from, dk_to);
        c.dv = r.chance(0.6) ? dv_to : r.between(dv_from, dv_to);
    } else {
        c.dk = features();
        c.dv = r.chance(0.6) ? c.dk : features();
    }
    const bool packed = allows(ATTUNE_VARLEN, 0.12);
    c.B = r.between(1, packed ? 6 : 3);
    c.Hkv = r.between(1, 3);
    c.Hq = c.Hkv * (space.gqa && r.chance(0.4) ? r.between(2, 8) : 1);

    // d_v counts too, so that no case is much dearer than its scores.
    int64_t pairs = std::max<int64_t>(1, space.most / (std::max(c.dk, c.dv) * c.B * c.Hq));
    const int64_t shape = r.between(0, 9);
    // Sizes one beside a multiple of a tile's edge find more than any others.
    const auto beside_edge = [&r](int64_t n, int64_t most) {
        constexpr int64_t kEdges[] = {4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256};
        if (!r.chance(0.4)) return n;
        const int64_t edge = r.pick(kEdges);
        return std::clamp<int64_t>((n + edge - 1) / edge * edge + r.between(-1, 1), 1, std::max<int64_t>(most, 1));
    };
    if (shape <= 1) { // decode: few rows, many keys
        c.N = r.between(1, 4);
        c.M = beside_edge(log_size(std::min<int64_t>(pairs / c.N, 5000)), pairs / c.N);
    } else if (shape <= 4) { // square
        const int64_t most = int64_t(std::sqrt(double(pairs)));
        c.N = c.M = beside_edge(log_size(most), most);
    } else {
        c.N = beside_edge(log_size(std::min<int64_t>(pairs, 1000)), pairs);
        c.M = beside_edge(log_size(std::min<int64_t>(pairs / c.N, 3000)), pairs / c.N);
    }
    if (r.chance(0.02)) c.M = 0; // no key at all
    if (packed) {
        // Lengths of all kinds, with empty sequences among them.
        const auto length = [&](int64_t most) {
            return r.chance(0.15) ? 0 : r.chance(0.15) ? std::min<int64_t>(1, most) : r.between(0, most);
        };
        for (int64_t b = 0; b < c.B; ++b) {
            c.q_lens.push_back(length(c.N));
            c.k_lens.push_back(length(c.M));
        }
    }

    if (allows(ATTUNE_CAUSAL, 0.4)) c.causal = r.chance(0.4) ? Causal::bottom_right : Causal::top_left;
    if (space.window && r.chance(0.25)) {
        const auto side = [&] { return r.chance(0.3) ? -1 : r.chance(0.2) ? 0 : log_size(c.M + 2) - 1; };
        c.window_left = side();
        c.window_right = side();
    }
    const bool positions = c.causal != Causal::none || c.window_left >= 0 || c.window_right >= 0;
    if (allows(ATTUNE_ALIBI, 0.15)) c.alibi = true;
    if ((positions || c.alibi) && c.causal != Causal::bottom_right && r.chance(0.5)) {
        const auto offset = [&] { return r.between(-c.N - 2, c.M + 2); };
        if (allows(ATTUNE_OFFSETS, 0.5))
            for (int64_t b = 0; b < c.B; ++b) c.offsets.push_back(offset());
        else
            c.offset = offset();
    }
    if (allows(ATTUNE_KV_LEN, 0.25))
        for (int64_t b = 0; b < c.B; ++b) c.kv_len.push_back(r.between(0, keys_of(c, b)));
    if (allows(ATTUNE_MASK, 0.25)) c.mask = true;
    if (allows(ATTUNE_BIAS, 0.2)) c.bias = true;
    if (allows(ATTUNE_SOFTCAP, 0.15)) c.softcap = float(r.between(1, 200)) / 4;
    if (allows(ATTUNE_SINK, 0.15)) c.sink = true;
    if (allows(ATTUNE_SCALE, 0.2)) c.scale = r.chance(0.2) ? 0.0f : float(r.between(-40, 40)) / 64;
    if (r.chance(0.4)) c.layout = r.chance(0.5) ? Layout::bshd : Layout::col;
    return c;
}

} // namespace attune::tools
