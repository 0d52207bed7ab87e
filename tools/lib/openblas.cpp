// A peer: attention as it is written down, on OpenBLAS. Scores by sgemm, softmax over whole rows, output by sgemm. As
// fast as that gets without fusing anything: a head a task with one BLAS thread each, or BLAS with all threads,
// whichever is faster; where there are fewer heads than threads, a thread has a part of the rows. In a decode the query
// heads of a group are the rows of one product. The exponential is vectorised, and keys that no row of the task may see
// are left out.
#include "worker.h"

#include "error.h"
#include "machine.h"

#include <algorithm>
#include <bit>
#include <chrono>
#include <cmath>
#include <dlfcn.h>
#include <limits>
#include <omp.h>

namespace attune::tools {
namespace {

using nlohmann::json;
using Clock = std::chrono::steady_clock;

enum : int { kRowMajor = 101, kNoTrans = 111, kTrans = 112 };

struct OpenBlas {
    void (*sgemm)(int, int, int, int, int, int, float, const float *, int, const float *, int, float, float *, int);
    void (*sgemv)(int, int, int, int, float, const float *, int, const float *, int, float, float *, int);
    void (*set_num_threads)(int);
    const char *(*get_config)();

    explicit OpenBlas(const std::string &path) {
        void *library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
        if (!library) fail("{}: cannot be loaded ({}); expected OpenBLAS", path, dlerror());
        const auto find = [&](auto &function, const char *name) {
            void *address = dlsym(library, fmt::format("scipy_{}", name).c_str());
            if (!address) address = dlsym(library, name);
            if (!address) fail("{}: lacks {}; expected OpenBLAS", path, name);
            function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(address);
        };
        find(sgemm, "cblas_sgemm");
        find(sgemv, "cblas_sgemv");
        find(set_num_threads, "openblas_set_num_threads");
        find(get_config, "openblas_get_config");
    }
};

// 2^x for x <= 0, as accurate as expf is. GCC vectorises this, and not expf.
[[gnu::always_inline]] inline float exp2_below(float x) {
    x = std::max(x, -126.0f);
    const int whole = int(x - 0.5f); // the nearest: x is not above 0
    const float f = x - float(whole);
    float p = 1.5403530e-4f; // ln2^k / k!, up to k = 6: 1.2e-7 at |f| = 0.5
    p = p * f + 1.3333558e-3f;
    p = p * f + 9.6181291e-3f;
    p = p * f + 5.5504109e-2f;
    p = p * f + 2.4022651e-1f;
    p = p * f + 6.9314718e-1f;
    p = p * f + 1.0f;
    return std::bit_cast<float>(std::bit_cast<int>(p) + (whole << 23));
}

// A row of scores, in place: exp(s - max) / sum over keys [first, last), 0 elsewhere. `seen` and `added` may be null.
[[gnu::always_inline]] inline void softmax_row(float *s, int64_t keys, int64_t first, int64_t last, const uint8_t *seen,
                                               const float *added) {
    constexpr float kLog2e = 1.44269504f, kNone = -std::numeric_limits<float>::infinity();
    if (added)
        for (int64_t j = first; j < last; ++j) s[j] += added[j];
    if (seen)
        for (int64_t j = first; j < last; ++j) s[j] = seen[j] ? s[j] : -3e38f;
    float most = kNone;
    for (int64_t j = first; j < last; ++j) most = s[j] > most ? s[j] : most;
    float sum = 0;
    for (int64_t j = first; j < last; ++j) {
        s[j] = exp2_below((s[j] - most) * kLog2e);
        sum += s[j];
    }
    const float factor = last > first ? 1 / sum : 0;
    for (int64_t j = 0; j < first; ++j) s[j] = 0;
    for (int64_t j = first; j < last; ++j) s[j] *= factor;
    for (int64_t j = last; j < keys; ++j) s[j] = 0;
}

using SoftmaxRow = void (*)(float *, int64_t, int64_t, int64_t, const uint8_t *, const float *);

void softmax_plain(float *s, int64_t keys, int64_t first, int64_t last, const uint8_t *seen, const float *added) {
    softmax_row(s, keys, first, last, seen, added);
}
#if defined(__x86_64__)
[[gnu::target("avx2,fma")]] void softmax_avx2(float *s, int64_t keys, int64_t first, int64_t last, const uint8_t *seen,
                                              const float *added) {
    softmax_row(s, keys, first, last, seen, added);
}
[[gnu::target("avx512f,avx512bw,avx512dq,avx512vl,avx512cd,avx2,fma,prefer-vector-width=512")]] void softmax_avx512(
    float *s, int64_t keys, int64_t first, int64_t last, const uint8_t *seen, const float *added) {
    softmax_row(s, keys, first, last, seen, added);
}
#endif

SoftmaxRow best_softmax() {
#if defined(__x86_64__)
    const Machine machine = detect_machine();
    const auto has = [&](const char *isa) {
        return std::find(machine.isas.begin(), machine.isas.end(), isa) != machine.isas.end();
    };
    if (has("avx512")) return softmax_avx512;
    if (has("avx2")) return softmax_avx2;
#endif
    return softmax_plain;
}

class OpenBlasWorker : public WorkerContestant {
  public:
    explicit OpenBlasWorker(const std::string &path) : blas_(path), softmax_(best_softmax()) {}

    std::string version() const override {
        // "OpenBLAS 0.3.34 NO_AFFINITY …"
        const std::string config = blas_.get_config();
        const size_t begin = config.find(' ') + 1;
        return config.substr(begin, config.find(' ', begin) - begin);
    }

    json prepare(int threads) override {
        const Case &c = copies_[0]->input_case();
        const auto cannot = [](const char *why) { return json{{"cannot", why}}; };
        if (c.dtype != ATTUNE_F32 || c.kv_dtype != ATTUNE_F32) return cannot("OpenBLAS has f32 only");
        if (c.layout != Layout::bhsd) return cannot("only layout bhsd is set up");
        if (c.softcap || c.sink || c.alibi) return cannot("no soft cap, sink or ALiBi is set up");
        json best;
        double least = std::numeric_limits<double>::infinity();
        const int64_t rows = c.N == 1 ? c.Hq / c.Hkv : c.N, heads = c.B * (c.N == 1 ? c.Hkv : c.Hq);
        const int64_t part = heads < threads ? (rows + threads - 1) / threads : rows;
        for (int64_t block : {rows, part})
            for (bool inside : {false, true}) { // who has the threads: the tasks, or BLAS
                if ((inside && threads == 1) || (inside && block != rows)) continue;
                set_up(c, block, threads, inside);
                json answer = {{"ok", true},
                               {"how", fmt::format("{}, threads in {}",
                                                   block == rows ? "whole heads" : fmt::format("{} rows", block),
                                                   inside ? "BLAS" : "tasks")}};
                measure_memory(answer);
                double fastest = std::numeric_limits<double>::infinity();
                const auto start = Clock::now();
                for (int i = 0; i < 3 || (i < 20 && Clock::now() - start < std::chrono::milliseconds(200)); ++i) {
                    const auto begin = Clock::now();
                    call(size_t(i) % copies_.size());
                    fastest = std::min(fastest, std::chrono::duration<double>(Clock::now() - begin).count());
                }
                if (fastest >= least) continue;
                least = fastest;
                best = {{"block", block}, {"inside", inside}, {"answer", answer}};
            }
        set_up(c, best["block"], threads, best["inside"]);
        return best["answer"];
    }

    void call(size_t copy) override {
        const Inputs &inputs = *copies_[copy];
        const Case &c = inputs.input_case();
        const int64_t blocks = (rows_ + block_ - 1) / block_, tasks = c.B * heads_ * blocks;
        const int workers = inside_ ? 1 : threads_;
#pragma omp parallel for schedule(dynamic) num_threads(workers) if (workers > 1)
        for (int64_t t = 0; t < tasks; ++t) {
            const int64_t block = blocks - 1 - t % blocks, head = t / blocks; // the long ones of a causal mask first
            one_task(inputs.tensors(), c, head / heads_, head % heads_, block * block_);
        }
    }

  private:
    void set_up(const Case &c, int64_t block, int threads, bool inside) {
        // Decode: a task is a kv head with the query heads of its group as rows. Otherwise: a query head.
        grouped_ = c.N == 1;
        heads_ = grouped_ ? c.Hkv : c.Hq;
        rows_ = grouped_ ? c.Hq / c.Hkv : c.N;
        block_ = block;
        inside_ = inside;
        threads_ = threads;
        blas_.set_num_threads(inside ? threads : 1);
        scores_.clear();
        scores_.resize(size_t(threads));
    }

    // Keys [first, last) of one row.
    static std::pair<int64_t, int64_t> visible(const Case &c, int64_t b, int64_t i) {
        const int64_t position = i + offset_of(c, b);
        int64_t first = 0, last = c.kv_len.empty() ? c.M : c.kv_len[size_t(b)];
        if (c.causal != Causal::none) last = std::min(last, position + 1);
        if (c.window_left >= 0) first = std::max(first, position - c.window_left);
        if (c.window_right >= 0) last = std::min(last, position + c.window_right + 1);
        last = std::max<int64_t>(last, 0);
        return {std::min(first, last), last};
    }

    void one_task(const attune_tensors &t, const Case &c, int64_t b, int64_t head, int64_t row) {
        const int64_t rows = std::min(block_, rows_ - row), group = c.Hq / c.Hkv, kv = grouped_ ? head : head / group;
        const int64_t q_row = (b * heads_ + head) * rows_ + row; // dense: rows of a group lie one after the other
        // Keys that some row of the block sees; first and last row decide.
        auto [first, last] = visible(c, b, grouped_ ? 0 : row);
        last = std::max(last, visible(c, b, grouped_ ? 0 : row + rows - 1).second);
        const int64_t keys = last - first;
        const float *q = static_cast<const float *>(t.q.data) + q_row * c.dk;
        const float *k = static_cast<const float *>(t.k.data) + ((b * c.Hkv + kv) * c.M + first) * c.dk;
        const float *v = static_cast<const float *>(t.v.data) + ((b * c.Hkv + kv) * c.M + first) * c.dv;
        float *o = static_cast<float *>(t.o.data) + q_row * c.dv;
        const float scale = c.scale ? *c.scale : float(1 / std::sqrt(double(c.dk)));
        auto &scores = scores_[size_t(omp_get_thread_num())]; // grows in the first calls, then stays
        if (int64_t(scores.size()) < rows * keys) scores.resize(size_t(rows * keys));
        float *s = scores.data();
        if (keys == 0) {
            std::fill(o, o + rows * c.dv, 0.0f);
            return;
        }
        if (rows == 1)
            blas_.sgemv(kRowMajor, kNoTrans, int(keys), int(c.dk), scale, k, int(c.dk), q, 1, 0, s, 1);
        else
            blas_.sgemm(kRowMajor, kNoTrans, kTrans, int(rows), int(keys), int(c.dk), scale, q, int(c.dk), k, int(c.dk),
                        0, s, int(keys));
        const uint8_t *seen = t.mask ? static_cast<const uint8_t *>(t.mask->data) + b * c.M + first : nullptr;
        const float *bias = t.bias ? static_cast<const float *>(t.bias->data) : nullptr;
        for (int64_t r = 0; r < rows; ++r) {
            const int64_t i = grouped_ ? 0 : row + r, h = grouped_ ? head * group + r : head;
            const auto [from, to] = visible(c, b, i);
            const float *added = bias ? bias + (h * c.N + i) * c.M + first : nullptr;
            softmax_(s + r * keys, keys, std::min(from - first, keys), to - first, seen, added);
        }
        if (rows == 1)
            blas_.sgemv(kRowMajor, kTrans, int(keys), int(c.dv), 1, v, int(c.dv), s, 1, 0, o, 1);
        else
            blas_.sgemm(kRowMajor, kNoTrans, kNoTrans, int(rows), int(c.dv), int(keys), 1, s, int(keys), v, int(c.dv),
                        0, o, int(c.dv));
    }

    OpenBlas blas_;
    SoftmaxRow softmax_;
    bool grouped_ = false, inside_ = false;
    int64_t heads_ = 1, rows_ = 1, block_ = 1;
    std::vector<std::vector<float>> scores_; // of each thread
};

} // namespace

std::unique_ptr<WorkerContestant> make_openblas_worker(const std::string &path) {
    return std::make_unique<OpenBlasWorker>(path);
}

} // namespace attune::tools
