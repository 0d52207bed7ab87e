#include "phases.h"

#include "../strict.h"
#include "../tiles.h"

#include <limits>

namespace attune::rt::mlir {

namespace {

constexpr int64_t kMax64 = std::numeric_limits<int64_t>::max();

template <typename T, int N> Memref<T, N> memref(T *data, const int64_t (&sizes)[N], const int64_t (&strides)[N]) {
    Memref<T, N> m{data, data, 0, {}, {}};
    std::copy_n(sizes, N, m.sizes);
    std::copy_n(strides, N, m.strides);
    return m;
}
template <typename T> Memref<T, 1> dense(T *data, int64_t n) {
    return memref(data, {n}, {1});
}

// The shared part of the workspace: packed K, and V where it has to be copied.
Packed packed_of(const KernelMeta &meta, const attune_problem &p, void *memory, size_t *bytes = nullptr) {
    const int64_t panels = ceil_div(p.M, meta.panel), chunks = ceil_div(panels, kPackChunk);
    const bool packs_values = meta.dv != p.dv || p.flags & ATTUNE_STRIDED_V || p.kv_dtype != ATTUNE_F32;
    Packed s{meta.dk, meta.dv, meta.panel, panels, chunks, packs_values, false, nullptr, nullptr, nullptr};
    Pieces pieces(memory);
    s.keys = pieces.take<float>(panels * meta.panel * meta.dk);
    s.bits = pieces.take<int32_t>(chunks);
    s.values = pieces.take<float>(s.packs_values ? p.M * meta.dv : 0);
    if (bytes) *bytes = pieces.used();
    return s;
}

struct Scratch {
    float *query, *out, *row_max, *row_sum, *slope, *strip, *widened;
    int32_t *lo, *hi, *position;
    int64_t *mask_rows, *bias_rows;
    int64_t strip_floats;
    size_t used;

    Scratch(const KernelMeta &meta, const attune_problem &p, void *base) {
        Pieces pieces(base);
        query = pieces.take<float>(meta.q * meta.dk);
        out = pieces.take<float>(meta.q * meta.dv);
        row_max = pieces.take<float>(meta.q);
        row_sum = pieces.take<float>(meta.q);
        lo = pieces.take<int32_t>(meta.q);
        hi = pieces.take<int32_t>(meta.q);
        position = pieces.take<int32_t>(meta.q);
        slope = pieces.take<float>(meta.q);
        mask_rows = pieces.take<int64_t>(meta.q);
        bias_rows = pieces.take<int64_t>(meta.q);
        strip_floats = meta.strip ? meta.q * round_up(p.M, meta.panel) : 0;
        strip = pieces.take<float>(strip_floats);
        widened = pieces.take<float>(widened_floats(p, meta.panel));
        used = pieces.used();
    }
};

// Addresses in kernels count upwards from the pointer that they are given.
bool ascending(const attune_tensor &t, int dim) {
    return t.shape[dim] <= 1 || t.stride[dim] >= 0;
}

// A mask or bias for the rows of a tile: the lowest of the rows' addresses, and where each row starts relative to it.
// Rows of the tile that are not there read the first one's.
template <typename T> Memref<const T, 1> rows_of(const attune_args &args, const attune_tensor *t, const Tile &tile,
                                                 int64_t q, int64_t *starts) {
    if (!t) {
        std::fill_n(starts, q, 0);
        return memref<const T, 1>(nullptr, {0}, {1});
    }
    const attune_problem &p = *args.problem;
    const auto row = [&](int64_t r) {
        const int64_t n = tile.first + (r < tile.rows ? r : 0);
        return at<const T>(*t, tile.b, tile.hkv * (p.Hq / p.Hkv) + n / p.N, n % p.N);
    };
    const T *lowest = row(0);
    for (int64_t r = 1; r < tile.rows; r++) lowest = std::min(lowest, row(r));
    for (int64_t r = 0; r < q; r++) starts[r] = row(r) - lowest;
    return memref<const T, 1>(lowest, {p.M}, {p.M > 1 ? t->stride[3] : 1});
}

} // namespace

size_t shared_bytes(const KernelMeta &meta, const attune_problem &problem) {
    size_t bytes;
    packed_of(meta, problem, nullptr, &bytes);
    return bytes;
}

size_t scratch_bytes(const KernelMeta &meta, const attune_problem &problem) {
    return Scratch(meta, problem, nullptr).used;
}

int64_t pack_tasks(const KernelMeta &meta, const attune_args &args) {
    return ceil_div(ceil_div(args.problem->M, meta.panel), kPackChunk);
}

int pack(const KernelMeta &meta, PackFn fn, const attune_args &args, int64_t begin, int64_t end, void *scratch) {
    struct Context {
        PackFn fn;
        int64_t dk, panel;
    } const context{fn, meta.dk, meta.panel};
    const auto whole = [](const void *c, const float *k, int64_t row, int64_t feature, float *packed, int64_t panels,
                          int32_t *largest) {
        const auto &[fn, dk, panel] = *static_cast<const Context *>(c);
        const auto key = memref(k, {panels * panel, dk}, {row, feature});
        auto out = memref(packed, {panels, dk, panel}, {dk * panel, panel, 1});
        auto bits = dense(largest, 1);
        fn(&key, &out, &bits);
        return 0;
    };
    const attune_tensor &k = args.tensors->k;
    const Packed packed = packed_of(meta, *args.problem, args.shared);
    float *const widened = Scratch(meta, *args.problem, scratch).widened;
    const int64_t max_extent = ascending(k, 2) && ascending(k, 3) ? kMax64 : 0;
    for (int64_t task = begin; task < end; task++)
        if (int error = pack_chunk(args, packed, task, max_extent, whole, &context, widened)) return error;
    return 0;
}

int64_t attend_tasks(const KernelMeta &meta, const attune_args &args) {
    return Tiling(*args.problem, meta.q).tiles_per_kv_head();
}

int attend(const KernelMeta &meta, AttendFn fn, const attune_args &args, int64_t begin, int64_t end,
           void *scratch_memory) {
    const attune_problem &p = *args.problem;
    const attune_tensors &t = *args.tensors;
    const Packed s = packed_of(meta, p, args.shared);
    const Scratch scratch(meta, p, scratch_memory);
    const Tiling tiling(p, meta.q);
    const bool natural = in_natural_units(p);
    const float unit = natural ? kLog2e : 1.0f, scale = natural ? args.scale : args.scale * kLog2e;
    const attune_tensor *mask = p.flags & ATTUNE_MASK ? t.mask : nullptr,
                        *bias = p.flags & ATTUNE_BIAS ? t.bias : nullptr;
    const bool kernel_can = (s.packs_values || ((t.v.stride[3] == 1 || p.dv == 1) && ascending(t.v, 2))) &&
                            (!mask || ascending(*mask, 3)) && (!bias || ascending(*bias, 3));

    // Descriptors that stay the same; the address of K's and V's changes from head to head.
    const auto query = memref(scratch.query, {meta.q, meta.dk}, {meta.dk, 1});
    const auto lows = dense(scratch.lo, meta.q), highs = dense(scratch.hi, meta.q);
    const auto positions = dense(scratch.position, meta.q);
    const auto slopes = dense(scratch.slope, meta.q);
    const auto mask_rows = dense(scratch.mask_rows, meta.q), bias_rows = dense(scratch.bias_rows, meta.q);
    auto out = memref(scratch.out, {meta.q, meta.dv}, {meta.dv, 1});
    auto row_max = dense(scratch.row_max, meta.q), row_sum = dense(scratch.row_sum, meta.q);
    auto strip = dense(scratch.strip, scratch.strip_floats);
    float *const o = scratch.out, *const m = scratch.row_max, *const l = scratch.row_sum;

    for (int64_t task = begin; task < end; task++) {
        const Tile tile = tiling.tile(p, args.group, task);
        const Seen seen = see(args, tile, meta.q, {0, p.M}, scratch.lo, scratch.hi);
        bool ok = kernel_can && s.keys_finite(seen);
        ok = gather_query(args, tile, meta.q, meta.dk, scale, scratch.query) && ok;
        if (ok) {
            const auto keys = memref(s.keys, {s.panels, meta.dk, meta.panel}, {meta.dk * meta.panel, meta.panel, 1});
            const auto values = s.packs_values
                                    ? memref<const float, 2>(s.values, {p.M, meta.dv}, {meta.dv, 1})
                                    : memref<const float, 2>(at<float>(t.v, tile.b, tile.hkv, 0), {p.M, meta.dv},
                                                             {p.M > 1 ? t.v.stride[2] : meta.dv, 1});
            const auto mask_data = rows_of<uint8_t>(args, mask, tile, meta.q, scratch.mask_rows);
            const auto bias_data = rows_of<int32_t>(args, bias, tile, meta.q, scratch.bias_rows);
            if (p.flags & ATTUNE_ALIBI) place_rows(args, tile, meta.q, scratch.position, scratch.slope);
            fn(&query, &keys, &values, &lows, &highs, &positions, &slopes, &mask_data, &mask_rows, &bias_data,
               &bias_rows, &out, &row_max, &row_sum, &strip, seen.first, seen.last, seen.all_first, seen.all_last,
               (p.flags & ATTUNE_SOFTCAP) != 0, (p.flags & ATTUNE_ALIBI) != 0, bias != nullptr, mask != nullptr,
               p.softcap, unit, tile.rows);
            ok = all_finite(o, tile.rows, p.dv, meta.dv) && all_finite(m, 1, tile.rows, 0) &&
                 all_finite(l, 1, tile.rows, 0);
        }
        if (!ok) strict_attend(args, tile, {0, p.M}, o, meta.dv, m, l);
        scatter(args, tile, o, meta.dv, m, l, ok ? unit : kLog2e);
    }
    return 0;
}

} // namespace attune::rt::mlir
