#include "mma.h"

#include "device/cuda.h"
#include "device/cuda_numbers.h"
#include "status.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <map>
#include <mutex>
#include <numeric>
#include <optional>
#include <vector>

namespace attune::rt::mlir {

namespace {

namespace cuda = device::cuda;
__extension__ typedef __int128 wide; // sums of any int64 offset and window

constexpr int64_t kAlign = 256;
constexpr int kMostSplits = 128;
// Stands for no bound. Rows and keys are at most half of it, so that sums of the kernels stay within 32 bits.
constexpr int64_t kUnbounded = int64_t(1) << 30;
constexpr int kMergeWarps = 4; // generators/mlir/mma/merge.py

int64_t ceil_div(int64_t a, int64_t b) {
    return (a + b - 1) / b;
}
size_t aligned(size_t n) {
    return (n + kAlign - 1) / kAlign * kAlign;
}

// The arguments of attend and recompute, as in generators/mlir/mma/common.py.
struct Arguments {
    uint64_t q, k, v, o, lse, ranges, flags;
    int32_t rows, keys, low, high, group, dk, dv, chunk, splits;
    float scale;
    int64_t q_stride[4], k_stride[4], v_stride[4]; // row, head, batch, feature
    int64_t o_stride[4], lse_stride[4];            // row, head, batch, split
    int64_t o_feature;
};
struct MergeArguments {
    uint64_t parts, part_lse, o, lse;
    int32_t rows, splits, dv;
    int64_t o_stride[3], lse_stride[3]; // row, head, batch
    int64_t o_feature;
};

// Addresses of all arguments, as cuLaunchKernel takes them.
class Parameters {
  public:
    explicit Parameters(Arguments &a) {
        add(a.q, a.k, a.v, a.o, a.lse, a.ranges, a.flags, a.rows, a.keys, a.low, a.high, a.group, a.dk, a.dv, a.chunk,
            a.splits, a.scale);
        for (int64_t *strides : {a.q_stride, a.k_stride, a.v_stride, a.o_stride, a.lse_stride})
            add(strides[0], strides[1], strides[2], strides[3]);
        add(a.o_feature);
    }
    explicit Parameters(MergeArguments &a) {
        add(a.parts, a.part_lse, a.o, a.lse, a.rows, a.splits, a.dv);
        for (int64_t *strides : {a.o_stride, a.lse_stride}) add(strides[0], strides[1], strides[2]);
        add(a.o_feature);
    }
    void **data() { return list_.data(); }

  private:
    std::array<void *, 40> list_{};
    size_t count_ = 0;
    template <typename... T> void add(T &...values) { ((list_[count_++] = &values), ...); }
};

const MmaTile &tile_for(const MmaMeta &meta, const attune_problem &p) {
    return *std::find_if(meta.tiles, meta.tiles + meta.num_tiles - 1,
                         [&](const MmaTile &t) { return p.dk <= t.dk && p.dv <= t.dv; });
}

// How a problem is cut up. It depends on its sizes alone.
struct Plan {
    int64_t rows, splits, chunk; // rows of a head, or of a group where keys are split
    int64_t grid_x, grid_y, grid_z;
    size_t ranges, flags, parts, part_lse, total; // offsets in the workspace

    Plan(const MmaMeta &meta, const MmaTile &tile, const attune_problem &p) {
        const bool split = meta.split_keys > 0;
        rows = split ? p.N * (p.Hq / p.Hkv) : p.N;
        splits = split ? std::clamp<int64_t>(ceil_div(p.M, meta.split_keys), 1, kMostSplits) : 1;
        chunk = std::max<int64_t>(ceil_div(ceil_div(p.M, splits), tile.k), 1) * tile.k;
        splits = std::max<int64_t>(ceil_div(p.M, chunk), 1);
        grid_x = ceil_div(rows, tile.q) * splits;
        grid_y = split ? p.Hkv : p.Hq;
        grid_z = p.B;
        size_t at = 0;
        const auto take = [&](int64_t bytes) {
            const size_t here = at;
            at += aligned(size_t(bytes));
            return here;
        };
        ranges = take(p.flags & (ATTUNE_KV_LEN | ATTUNE_OFFSETS) ? p.B * 3 * 4 : 0);
        flags = take(grid_x * grid_y * grid_z * tile.warps * 4);
        parts = take(split ? p.B * p.Hq * splits * p.N * p.dv * 4 : 0);
        part_lse = take(split ? p.B * p.Hq * splits * p.N * 4 : 0);
        total = at;
    }
};

struct Functions {
    void *module, *attend, *recompute, *merge;
};

std::mutex mutex; // of what is loaded
auto &loaded = *new std::map<std::pair<void *, const MmaTile *>, Functions>;

void unload(void *context) {
    std::lock_guard lock(mutex);
    std::erase_if(loaded, [context](const auto &entry) {
        if (entry.first.first != context) return false;
        cuda::driver().module_unload(entry.second.module);
        return true;
    });
}

// Loads the PTX into the current context, once for each. Empty, with a message, if that fails.
std::optional<Functions> functions_of(const MmaMeta &meta, const MmaTile &tile, void *context, attune_status &status) {
    cuda::when_forgotten(unload);
    std::lock_guard lock(mutex);
    if (const auto found = loaded.find({context, &tile}); found != loaded.end()) return found->second;
    const cuda::Driver &driver = cuda::driver();
    void *module = nullptr;
    const std::string what = std::string("loading ") + meta.name;
    if (const cuda::Result r = driver.module_load(&module, tile.ptx, 0, nullptr, nullptr)) {
        status = cuda::failed(r, what.c_str());
        return std::nullopt;
    }
    Functions f{module, nullptr, nullptr, nullptr};
    cuda::Result r = driver.module_get_function(&f.attend, module, "attend");
    if (!r) r = driver.module_get_function(&f.recompute, module, "recompute");
    if (!r && meta.split_keys) r = driver.module_get_function(&f.merge, module, "merge");
    if (!r && tile.dynamic_bytes)
        r = driver.function_set_attribute(f.attend, attune::cuda::kFunctionMaxDynamicShared, int(tile.dynamic_bytes));
    if (r) {
        status = cuda::failed(r, what.c_str());
        driver.module_unload(module);
        return std::nullopt;
    }
    loaded[{context, &tile}] = f;
    return f;
}

uint64_t address(const attune_tensor &t) {
    return reinterpret_cast<uint64_t>(t.data);
}

// Row, head, batch, feature; 0 for a dimension of extent 1, whose stride means nothing.
void copy_strides(const attune_tensor &t, int64_t (&to)[4]) {
    constexpr int order[4] = {2, 1, 0, 3};
    for (int i = 0; i < 4; i++) to[i] = t.shape[order[i]] > 1 ? t.stride[order[i]] : 0;
    if (t.shape[3] == 1) to[3] = 1;
}

bool multiples(uint64_t address, const int64_t (&stride)[4], int64_t elements) {
    return address % uint64_t(2 * elements) == 0 && stride[3] == 1 &&
           std::all_of(stride, stride + 3, [&](int64_t s) { return s % elements == 0; });
}

class Launch {
  public:
    Launch(const MmaMeta &meta, const attune_args &args)
        : meta_(meta), tile_(tile_for(meta, *args.problem)), args_(args), p_(*args.problem), t_(*args.tensors),
          plan_(meta, tile_, p_) {}

    attune_status main() {
        fill();
        if (!can_attend()) return ATTUNE_OK; // strict does all rows
        if (attune_status s = put_ranges()) return s;
        return launch(&Functions::attend, tile_.dynamic_bytes, arguments_);
    }
    attune_status strict() {
        fill();
        if (!can_attend()) {
            if (attune_status s = put_ranges()) return s;
            arguments_.flags = 0;
        }
        return launch(&Functions::recompute, 0, arguments_);
    }
    attune_status merge() {
        const attune_tensor *lse = t_.lse;
        MergeArguments m{};
        m.parts = workspace(plan_.parts), m.part_lse = workspace(plan_.part_lse);
        m.o = address(t_.o), m.lse = lse ? address(*lse) : 0;
        m.rows = int32_t(p_.N), m.splits = int32_t(plan_.splits), m.dv = int32_t(p_.dv);
        int64_t stride[4];
        copy_strides(t_.o, stride);
        std::copy_n(stride, 3, m.o_stride);
        m.o_feature = stride[3];
        if (lse) copy_strides(*lse, stride);
        std::copy_n(stride, 3, m.lse_stride);
        plan_.grid_x = ceil_div(p_.N, kMergeWarps), plan_.grid_y = p_.Hq;
        return launch(&Functions::merge, 0, m, 32 * kMergeWarps);
    }

  private:
    const MmaMeta &meta_;
    const MmaTile &tile_;
    const attune_args &args_;
    const attune_problem &p_;
    const attune_tensors &t_;
    Plan plan_;
    Arguments arguments_{};

    uint64_t workspace(size_t offset) const { return reinterpret_cast<uint64_t>(args_.shared) + offset; }

    // What attend reads and writes in vectors has to lie at multiples of them.
    bool can_attend() const {
        const Arguments &a = arguments_;
        const bool out = meta_.split_keys || multiples(a.o, with_feature(a.o_stride, a.o_feature).s, 2);
        return out && multiples(a.q, a.q_stride, tile_.wide_query ? 8 : 2) && multiples(a.k, a.k_stride, 8) &&
               multiples(a.v, a.v_stride, 8);
    }
    struct Strides {
        int64_t s[4];
    };
    static Strides with_feature(const int64_t (&stride)[4], int64_t feature) {
        return {{stride[0], stride[1], stride[2], feature}};
    }

    // Keys, and where a row's visible keys begin and end relative to it, of one batch element.
    std::array<int32_t, 3> range(int64_t b) const {
        const int64_t offset = p_.flags & ATTUNE_OFFSETS ? t_.offsets[b] : p_.offset;
        const int64_t keys = p_.flags & ATTUNE_KV_LEN ? std::clamp<int64_t>(t_.kv_len[b], 0, p_.M) : p_.M;
        wide low = -kUnbounded, high = kUnbounded;
        if (p_.window_left >= 0) low = wide(offset) - p_.window_left;
        if (p_.window_right >= 0) high = wide(offset) + p_.window_right;
        if (p_.flags & ATTUNE_CAUSAL) high = std::min<wide>(high, offset);
        const auto clamped = [](wide x) { return int32_t(std::clamp<wide>(x, -kUnbounded, kUnbounded)); };
        return {int32_t(keys), clamped(low), clamped(high)};
    }

    attune_status put_ranges() {
        if (!arguments_.ranges) return ATTUNE_OK;
        std::vector<std::array<int32_t, 3>> table;
        table.reserve(size_t(p_.B));
        for (int64_t b = 0; b < p_.B; b++) table.push_back(range(b));
        const cuda::Current current;
        cuda::Result r = current.error;
        if (!r)
            r = cuda::driver().copy_in(arguments_.ranges, table.data(), table.size() * sizeof table[0],
                                       cuda::current().stream);
        return r ? cuda::failed(r, "copying kv_len and offsets") : ATTUNE_OK;
    }

    void fill() {
        Arguments &a = arguments_;
        a.q = address(t_.q), a.k = address(t_.k), a.v = address(t_.v);
        if (p_.flags & (ATTUNE_KV_LEN | ATTUNE_OFFSETS)) a.ranges = workspace(plan_.ranges);
        a.flags = workspace(plan_.flags);
        const std::array<int32_t, 3> all = a.ranges ? std::array<int32_t, 3>{} : range(0);
        a.rows = int32_t(p_.N), a.keys = all[0], a.low = all[1], a.high = all[2];
        a.group = int32_t(p_.Hq / p_.Hkv), a.dk = int32_t(p_.dk), a.dv = int32_t(p_.dv);
        a.chunk = int32_t(plan_.chunk), a.splits = int32_t(plan_.splits);
        a.scale = args_.scale;
        copy_strides(t_.q, a.q_stride);
        copy_strides(t_.k, a.k_stride);
        copy_strides(t_.v, a.v_stride);
        if (meta_.split_keys) {
            const int64_t part = p_.N * p_.dv;
            a.o = workspace(plan_.parts), a.lse = workspace(plan_.part_lse);
            const int64_t o[4] = {p_.dv, plan_.splits * part, p_.Hq * plan_.splits * part, part};
            const int64_t lse[4] = {1, plan_.splits * p_.N, p_.Hq * plan_.splits * p_.N, p_.N};
            std::copy_n(o, 4, a.o_stride);
            std::copy_n(lse, 4, a.lse_stride);
            a.o_feature = 1;
            return;
        }
        a.o = address(t_.o);
        copy_strides(t_.o, a.o_stride);
        a.o_feature = a.o_stride[3], a.o_stride[3] = 0;
        if (!t_.lse) return;
        a.lse = address(*t_.lse);
        copy_strides(*t_.lse, a.lse_stride);
        a.lse_stride[3] = 0;
    }

    template <typename A>
    attune_status launch(void *Functions::*which, int64_t dynamic_bytes, A &arguments, int64_t threads = 0) {
        const cuda::Current current;
        if (current.error) return cuda::failed(current.error, "making the context current");
        attune_status status = ATTUNE_OK;
        const cuda::Queue queue = cuda::current();
        const std::optional<Functions> functions = functions_of(meta_, tile_, queue.context, status);
        if (!functions) return status;
        Parameters parameters(arguments);
        const cuda::Result r =
            cuda::driver().launch((*functions).*which, unsigned(plan_.grid_x), unsigned(plan_.grid_y),
                                  unsigned(plan_.grid_z), unsigned(threads ? threads : 32 * tile_.warps), 1, 1,
                                  unsigned(dynamic_bytes), queue.stream, parameters.data(), nullptr);
        return r ? cuda::failed(r, meta_.name) : ATTUNE_OK;
    }
};

} // namespace

int mma_main(const MmaMeta &meta, const attune_args &args) {
    return Launch(meta, args).main();
}
int mma_strict(const MmaMeta &meta, const attune_args &args) {
    return Launch(meta, args).strict();
}
int mma_merge(const MmaMeta &meta, const attune_args &args) {
    return Launch(meta, args).merge();
}

size_t mma_shared_bytes(const MmaMeta &meta, const attune_problem &problem) {
    return Plan(meta, tile_for(meta, problem), problem).total;
}

const char *mma_refuses(const attune_problem *p) {
    if (p->dk % 8) return "it takes dk in multiples of 8";
    if (p->dv % 8) return "it takes dv in multiples of 8";
    if (p->N > kUnbounded / 2 || p->M > kUnbounded / 2) return "it counts rows and keys up to 2^29";
    return nullptr;
}

} // namespace attune::rt::mlir
