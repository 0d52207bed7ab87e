#include "matmul.h"

#include "cpu_features.h"
#include "halide/buffer.h"
#include "threads.h"

#include "attune/attune.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <string_view>

extern "C" {
#define ATTUNE_PROJECTION(name, isa, rows, panel)                                                                      \
    int name(halide_buffer_t *, halide_buffer_t *, halide_buffer_t *, halide_buffer_t *);
#include "projections.inc"
#undef ATTUNE_PROJECTION
}

namespace attune::rt {

namespace {

using halide::Buffer;

struct Projection {
    const char *name, *isa;
    int64_t rows, panel;
    int (*run)(halide_buffer_t *, halide_buffer_t *, halide_buffer_t *, halide_buffer_t *);
};

constexpr Projection kProjections[] = {
#define ATTUNE_PROJECTION(name, isa, rows, panel) {#name, isa, rows, panel, name},
#include "projections.inc"
#undef ATTUNE_PROJECTION
};

// The kernel of the best allowed ISA, for many rows or for one.
const Projection &choose(bool many_rows) {
    const Projection *best = nullptr;
    const int ceiling = isa_rank(dispatch_isa());
    for (const Projection &p : kProjections)
        if ((p.rows > 1) == many_rows && isa_rank(p.isa) <= ceiling && (!best || isa_rank(p.isa) > isa_rank(best->isa)))
            best = &p;
    return best ? *best : kProjections[0];
}

constexpr int64_t kMaxPanel = 32;
// The part of Y that one task does: 96 rows by 4 panels. The weights of 4 panels (256 KiB at 512 features) and the rows
// of a register tile stay in L2 together, and 384 x 512 outputs are 16 tasks: enough for a few threads to finish at the
// same time.
constexpr int64_t kTaskRows = 96, kTaskPanels = 4;

struct Run {
    const float *packed, *x, *bias;
    float *y;
    int64_t in, out, rows, x_stride, y_stride, row_tasks;
    std::atomic<int> error{0};
};

void do_task(Run &run, int64_t index) {
    const int64_t r0 = index % run.row_tasks * kTaskRows, rows = std::min(kTaskRows, run.rows - r0);
    const Projection &many = choose(true), &kernel = rows >= many.rows ? many : choose(false);
    const int64_t w = many.panel, p0 = index / run.row_tasks * kTaskPanels, panels = (run.out + w - 1) / w;
    const int64_t whole = std::min(p0 + kTaskPanels, run.out / w) - p0; // panels without ragged columns
    const float *x0 = run.x + r0 * run.x_stride;
    auto call = [&](int64_t panel, int64_t count, const float *bias, float *y, int64_t y_stride) {
        Buffer<2> x(x0, {run.in, rows}, {1, run.x_stride}), out(y, {count * w, rows}, {1, y_stride});
        Buffer<3> weight(run.packed + panel * run.in * w, {w, run.in, count}, {1, w, w * run.in});
        Buffer<1> b(bias, {count * w}, {1});
        if (int error = kernel.run(&x, &weight, &b, &out)) run.error = error;
    };
    if (whole > 0) call(p0, whole, run.bias + p0 * w, run.y + r0 * run.y_stride + p0 * w, run.y_stride);
    if (run.out % w && panels - 1 >= p0 && panels - 1 < p0 + kTaskPanels) {
        alignas(64) float tile[kTaskRows * kMaxPanel], bias[kMaxPanel] = {};
        std::memcpy(bias, run.bias + (panels - 1) * w, size_t(run.out % w) * sizeof(float));
        call(panels - 1, 1, bias, tile, w);
        for (int64_t r = 0; r < rows; r++)
            std::memcpy(run.y + (r0 + r) * run.y_stride + (panels - 1) * w, tile + r * w,
                        size_t(run.out % w) * sizeof(float));
    }
}

void run_part(void *context, const Part &part) {
    for (int64_t task = part.begin; task < part.end; task++) do_task(*static_cast<Run *>(context), task);
}

int64_t padded(int64_t out) {
    return (out + kMaxPanel - 1) / kMaxPanel * kMaxPanel;
}

} // namespace

// Behind the panels lies a row of zeros: the bias of those who have none.
size_t matmul_packed_bytes(int64_t in, int64_t out) {
    return size_t(padded(out)) * size_t(in + 1) * sizeof(float);
}

void matmul_pack(const float *w, int64_t in, int64_t out, int64_t in_stride, int64_t out_stride, void *packed) {
    const int64_t panel = choose(true).panel;
    float *p = static_cast<float *>(packed);
    std::fill_n(p, padded(out) * (in + 1), 0.0f);
    for (int64_t c = 0; c < out; c++) {
        float *column = p + c / panel * panel * in + c % panel;
        for (int64_t k = 0; k < in; k++) column[k * panel] = w[k * in_stride + c * out_stride];
    }
}

int matmul_run(const void *packed, int64_t in, int64_t out, const float *x, int64_t x_stride, int64_t rows,
               const float *bias, float *y, int64_t y_stride) {
    if (rows == 0 || out == 0) return 0;
    const float *panels = static_cast<const float *>(packed);
    const int64_t w = choose(true).panel, row_tasks = (rows + kTaskRows - 1) / kTaskRows;
    Run run{panels, x, bias ? bias : panels + padded(out) * in, y, in, out, rows, x_stride, y_stride, row_tasks};
    const int64_t panel_tasks = ((out + w - 1) / w + kTaskPanels - 1) / kTaskPanels;
    const int64_t tasks[] = {row_tasks * panel_tasks};
    parallel_groups(attune_get_num_threads(), 1, tasks, run_part, &run);
    return run.error;
}

} // namespace attune::rt
