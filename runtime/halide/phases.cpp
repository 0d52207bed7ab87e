// Adapters of the fused kernels: pack, attend, merge.
#include "task.h"

#include "../arena.h"
#include "../strict.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace attune::rt::halide {

namespace {

// The merge of one row's parts when a NaN or an infinity is among them: a NaN sum is a NaN score and makes the row NaN;
// a NaN in a part's output is one of V, and stays in its feature. `unit` makes log2 units of a part's maximum; that of
// a part with a negative sum is in natural units. row_max is in natural units.
void merge_strictly(const float *o, const float *m, const float *l, int64_t splits, int64_t dv, int64_t stride,
                    float unit, float *out, float &row_max, float &row_sum) {
    const auto maximum = [&](int64_t i) { return double(m[i]) * (l[i] < 0 ? kLog2e : unit); };
    double top = -std::numeric_limits<double>::max();
    for (int64_t i = 0; i < splits; i++)
        if (std::fabs(l[i]) > 0) top = std::max(top, maximum(i));
    auto share = [&](int64_t i) { return l[i] == 0 ? 0.0 : std::exp2(maximum(i) - top) * std::fabs(l[i]); };
    double sum = 0;
    for (int64_t i = 0; i < splits; i++) sum += share(i);
    std::fill_n(out, dv, 0.0f);
    for (int64_t i = 0; i < splits; i++) {
        if (l[i] == 0) continue;
        const double w = share(i) / sum;
        for (int64_t c = 0; c < dv; c++) out[c] += float(w * o[i * stride + c]);
    }
    row_max = std::isnan(sum) ? std::numeric_limits<float>::quiet_NaN() : float(top * kLn2);
    row_sum = float(sum);
}

} // namespace

size_t shared_bytes(const KernelMeta &meta, const attune_problem &problem) {
    return Shared(meta, problem, nullptr).bytes;
}

size_t scratch_bytes(const KernelMeta &meta, const Memory &memory, const attune_problem &problem) {
    const int64_t heap = heap_bytes(meta, memory, problem);
    return Scratch(meta, problem, nullptr).used + (heap ? align64(size_t(heap)) + 128 : 0);
}

// pack: a task is kPackChunk panels of one (batch, kv head), and the values of the same keys.
int64_t pack_tasks(const KernelMeta &meta, const attune_args &args) {
    return Sizes(meta, *args.problem).chunks;
}

int pack(const KernelMeta &meta, const Memory &, PackFn fn, const attune_args &args, int64_t begin, int64_t end,
         void *scratch_memory) {
    struct Context {
        PackFn fn;
        int64_t dk, w; // dk in words
    } const context{fn, Sizes(meta, *args.problem).words, meta.panel};
    const auto whole = [](const void *c, const float *k, int64_t row, int64_t feature, float *packed, int64_t panels,
                          int32_t *largest) {
        const auto &[fn, dk, w] = *static_cast<const Context *>(c);
        int32_t bits[kPackChunk] = {};
        Buffer<2> key(k, {dk, panels * w}, {feature, row});
        Buffer<3> out(packed, {w, dk, panels}, {1, w, w * dk});
        Buffer<1> each(bits, {panels}, {1});
        const int error = fn(nullptr, &key, &out, &each);
        *largest = *std::max_element(bits, bits + kPackChunk);
        return error;
    };
    const Packed packed = packed_of(meta, *args.problem, args.shared);
    float *const widened = Scratch(meta, *args.problem, scratch_memory).widened;
    for (int64_t task = begin; task < end; task++)
        if (int error = meta.pairs ? pack_pairs_chunk(args, packed, task, kMaxIndex, whole, &context)
                                   : pack_chunk(args, packed, task, kMaxIndex, whole, &context, widened))
            return error;
    return 0;
}

// attend: a task is one tile of rows, and one split of the keys where the key axis is split.
int64_t attend_tasks(const KernelMeta &meta, const attune_args &args) {
    const attune_problem &p = *args.problem;
    return Tiling(p, meta.q).tiles_per_kv_head() * Sizes(meta, p).splits;
}

namespace {

template <typename Fn> int attend_by(const KernelMeta &meta, const Memory &memory, Fn fn, const attune_args &args,
                                     int64_t task_begin, int64_t task_end, void *scratch_memory) {
    const attune_problem &p = *args.problem;
    const attune_tensors &t = *args.tensors;
    const Sizes s(meta, p);
    const Shared shared(meta, p, args.shared);
    const Scratch scratch(meta, p, scratch_memory);
    Arena arena(static_cast<char *>(scratch_memory) + scratch.used + 64, size_t(heap_bytes(meta, memory, p)));
    const Tiling tiling(p, meta.q);
    const int64_t w = meta.panel;
    const bool natural = natural_units(meta, p);
    const float unit = natural ? kLog2e : 1.0f, scale = natural ? args.scale : args.scale * kLog2e;
    TileMask tile_mask(args, meta, scratch);
    const UserRowOf user_row(args, meta.user);
    const bool kernel_can = (s.packs_values || readable(t.v)) && tile_mask.readable() &&
                            (meta.panel || readable(t.k)) && (!meta.pairs || std::fabs(scale) < kLargestPairScale);
    // The sum of the exact weights is for log-sum-exp, which a sink needs too. Parts are merged by it.
    const bool exact_sum = t.lse || p.flags & ATTUNE_SINK || meta.split_keys;

    // Buffers that stay the same, and those whose address changes from tile to tile. (Their element types are not
    // looked at: K and V are of the kernel's type, pairs of bf16 lie in the place of floats.)
    Buffer<2> query(scratch.query, {s.words, meta.q}, {1, s.words});
    Buffer<3> packed(shared.keys, {w, s.words, s.panels}, {1, w, w * s.words});
    Buffer<2> raw(static_cast<const float *>(t.k.data), {p.dk, p.M}, {1, p.M > 1 ? t.k.stride[2] : p.dk});
    // A V that is read in place may have fewer features than the kernel's vectors cover: it clamps them.
    const int64_t value_rows = meta.pairs && s.packs_values ? s.panels * w / 2 : p.M;
    Buffer<2> value(static_cast<const float *>(t.v.data), {s.packs_values ? s.dv : p.dv, value_rows},
                    {1, s.packs_values ? s.dv
                        : p.M > 1      ? t.v.stride[2]
                                       : p.dv});
    Buffer<1> row_max(scratch.row_max, {meta.q}, {1}), row_sum(scratch.row_sum, {meta.q}, {1});
    Buffer<2> any_max(scratch.row_max, {s.dv, meta.q}, {1, s.dv}), any_sum(scratch.row_sum, {s.dv, meta.q}, {1, s.dv});
    halide_buffer_t *max_out = meta.dv ? static_cast<halide_buffer_t *>(&row_max) : &any_max;
    halide_buffer_t *sum_out = meta.dv ? static_cast<halide_buffer_t *>(&row_sum) : &any_sum;
    Buffer<2> out(scratch.out, {s.dv, meta.q}, {1, s.dv});

    for (int64_t task = task_begin; task < task_end; task++) {
        Tile tile = tiling.tile(p, args.group, task / s.splits);
        tile.split = task % s.splits;
        Interval part{0, p.M};
        if (meta.split_keys) part = {tile.split * meta.split_keys, std::min(p.M, (tile.split + 1) * meta.split_keys)};

        const Seen seen = tile_mask.move_to(tile, part);

        float *o = scratch.out, *m = scratch.row_max, *l = scratch.row_sum;
        bool ok = kernel_can;
        if (meta.panel) ok = ok && packed_of(meta, p, args.shared).keys_finite(seen);
        if (meta.pairs) {
            uint16_t *halves = reinterpret_cast<uint16_t *>(scratch.query);
            ok = gather_pairs(args, tile, meta.q, s.dk, scale < 0, halves) && ok;
        } else {
            ok = gather_query(args, tile, meta.q, s.dk, scale, scratch.query) && ok;
        }
        if (ok) {
            if (!meta.panel) raw.move_to(address(t.k, tile.b, tile.hkv, 0));
            value.move_to(s.packs_values ? reinterpret_cast<char *>(shared.values) : address(t.v, tile.b, tile.hkv, 0));
            halide_buffer_t *key = meta.panel ? static_cast<halide_buffer_t *>(&packed) : &raw;
            arena.reset();
            const Seen call = tile_mask.as_called(seen);
            if (int error =
                    tile_mask.template call<3>(fn, &arena, base(query), key, base(value), int32_t(call.first),
                                               int32_t(call.last), int32_t(call.all_first), int32_t(call.all_last),
                                               unit, std::fabs(scale), exact_sum, base(out), max_out, sum_out))
                return error;
            if (!meta.dv)
                for (int64_t r = 0; r < tile.rows; r++) {
                    m[r] = m[r * s.dv];
                    l[r] = l[r * s.dv];
                    const float inverse = meta.pairs ? 1.0f : l[r] > 0 ? 1.0f / l[r] : 0.0f;
                    for (int64_t c = 0; c < p.dv; c++) o[r * s.dv + c] *= inverse;
                }
            ok = all_finite(o, tile.rows, p.dv, s.dv) && all_finite(m, 1, tile.rows, 0) &&
                 all_finite(l, 1, tile.rows, 0);
            if (meta.pairs) ok = ok && !lost_values(args, tile, seen, o, s.dv);
        }
        if (!ok) strict_attend(args, tile, part, o, s.dv, m, l, user_row.get());
        if (!meta.split_keys) {
            scatter(args, tile, o, s.dv, m, l, ok ? unit : kLog2e);
            continue;
        }
        // Parts are kept as [row][split]. The strict code's are in natural units, in which a maximum may be finite that
        // is not in others: a negative sum tells.
        if (!ok && !natural)
            for (int64_t r = 0; r < tile.rows; r++) l[r] = -l[r];
        for (int64_t r = 0; r < tile.rows; r++) {
            const int64_t at = (tile.first + r) * s.splits + tile.split;
            std::memcpy(shared.part_out + at * s.dv, o + r * s.dv, size_t(s.dv) * sizeof(float));
            shared.part_max[at] = m[r];
            shared.part_sum[at] = l[r];
        }
    }
    return 0;
}

} // namespace

int attend(const KernelMeta &meta, const Memory &memory, AttendFn fn, const attune_args &args, int64_t begin,
           int64_t end, void *scratch) {
    return attend_by(meta, memory, fn, args, begin, end, scratch);
}
int attend_user(const KernelMeta &meta, const Memory &memory, UserFn fn, const attune_args &args, int64_t begin,
                int64_t end, void *scratch) {
    return attend_by(meta, memory, fn, args, begin, end, scratch);
}
int64_t attend_user_tasks(const KernelMeta &meta, const attune_args &args) {
    return attend_tasks(meta, args);
}

// merge: a task is one tile of rows; the parts of a row lie side by side.
int64_t merge_tasks(const KernelMeta &meta, const attune_args &args) {
    return Tiling(*args.problem, meta.q).tiles_per_kv_head();
}

int merge(const KernelMeta &meta, const Memory &, MergeFn fn, const attune_args &args, int64_t begin, int64_t end,
          void *scratch_memory) {
    const attune_problem &p = *args.problem;
    const Sizes s(meta, p);
    const Shared shared(meta, p, args.shared);
    const Scratch scratch(meta, p, scratch_memory);
    const Tiling tiling(p, meta.q);
    const bool natural = natural_units(meta, p);
    const float unit = natural ? kLog2e : 1.0f, to_natural = natural ? 1.0f : kLn2;
    for (int64_t task = begin; task < end; task++) {
        const Tile tile = tiling.tile(p, args.group, task);
        const int64_t row0 = tile.first * s.splits;
        float *part_out = shared.part_out + row0 * s.dv, *part_max = shared.part_max + row0,
              *part_sum = shared.part_sum + row0;
        if (s.splits == 1) {
            for (int64_t r = 0; r < tile.rows; r++) {
                if (part_sum[r] > 0) part_max[r] *= to_natural;
                part_sum[r] = std::fabs(part_sum[r]);
            }
            scatter(args, tile, part_out, s.dv, part_max, part_sum, kLog2e);
            continue;
        }
        for (int64_t r = 0; r < tile.rows; r++) {
            const float *o = part_out + r * s.splits * s.dv, *m = part_max + r * s.splits, *l = part_sum + r * s.splits;
            if (all_finite(o, s.splits, p.dv, s.dv) && all_finite(l, 1, s.splits, 0) &&
                std::none_of(l, l + s.splits, [](float sum) { return sum < 0; })) {
                Buffer<2> outs(o, {s.dv, s.splits}, {1, s.dv});
                Buffer<1> maxima(m, {s.splits}, {1}), sums(l, {s.splits}, {1});
                Buffer<1> out(scratch.out + r * s.dv, {s.dv}, {1}), row_max(scratch.row_max + r, {1}, {1}),
                    row_sum(scratch.row_sum + r, {1}, {1});
                if (int error = fn(nullptr, &outs, &maxima, &sums, unit, &out, &row_max, &row_sum)) return error;
                scratch.row_max[r] *= to_natural;
                continue;
            }
            merge_strictly(o, m, l, s.splits, p.dv, s.dv, unit, scratch.out + r * s.dv, scratch.row_max[r],
                           scratch.row_sum[r]);
        }
        scatter(args, tile, scratch.out, s.dv, scratch.row_max, scratch.row_sum, kLog2e);
    }
    return 0;
}

} // namespace attune::rt::halide
