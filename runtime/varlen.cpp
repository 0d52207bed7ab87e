#include "varlen.h"

#include "convert.h"

#include <algorithm>

namespace attune::rt {

namespace {

attune_problem sizes(const attune_problem &p, const attune_tensors &t, int64_t b) {
    attune_problem one = p;
    one.B = 1;
    one.N = t.cu_seqlens_q[b + 1] - t.cu_seqlens_q[b];
    one.M = t.cu_seqlens_k[b + 1] - t.cu_seqlens_k[b];
    one.flags &= ~uint32_t(ATTUNE_VARLEN);
    return one;
}

void move(attune_tensor &t, int64_t elements) {
    if (t.data) t.data = static_cast<char *>(t.data) + elements * bytes_of(t.dtype);
}

// Rows `first` to `first + rows`. A tensor of one row in all has any stride: it has no second row to move to.
void cut(attune_tensor &t, int64_t first, int64_t rows) {
    if (rows > 0 && first > 0) move(t, first * t.stride[2]);
    t.shape[2] = rows;
}

} // namespace

// Masks, biases and scores are [B, Hq, N, M]; a sequence uses the beginning of its element.
const attune_tensor *Sequence::element(const attune_tensor *t, attune_tensor &view, int64_t b) const {
    if (!t) return nullptr;
    view = *t;
    if (t->shape[0] > 1) move(view, b * t->stride[0]);
    view.shape[0] = 1;
    view.shape[2] = problem_.N;
    view.shape[3] = problem_.M;
    return &view;
}

int64_t Sequence::enter(attune_args &args, const attune_phase &phase) {
    const attune_tensors &t = *args.tensors;
    const int64_t b = args.group / args.problem->Hkv;
    problem_ = sizes(*args.problem, t, b);
    if (problem_.N == 0) return 0;
    tensors_ = t;
    tensors_.cu_seqlens_q = tensors_.cu_seqlens_k = nullptr;
    cut(tensors_.q, t.cu_seqlens_q[b], problem_.N);
    cut(tensors_.k, t.cu_seqlens_k[b], problem_.M);
    cut(tensors_.v, t.cu_seqlens_k[b], problem_.M);
    cut(tensors_.o, t.cu_seqlens_q[b], problem_.N);
    if (t.lse) {
        lse_ = *t.lse;
        cut(lse_, t.cu_seqlens_q[b], problem_.N);
        tensors_.lse = &lse_;
    }
    tensors_.mask = element(t.mask, mask_, b);
    tensors_.bias = element(t.bias, bias_, b);
    tensors_.scores = element(t.scores, scores_, b);
    if (t.kv_len) tensors_.kv_len += b;
    if (t.offsets) tensors_.offsets += b;
    args.group -= b * problem_.Hkv;
    args.sequence = b;
    args.problem = &problem_;
    args.tensors = &tensors_;
    return phase.tasks(&args);
}

// Not simply the longest's: a phase may have work only where the keys do not fill their last panel.
int64_t most_tasks(const attune_args &args, const attune_phase &phase) {
    int64_t most = 0;
    for (int64_t b = 0; b < args.problem->B; b++) {
        const attune_problem one = sizes(*args.problem, *args.tensors, b);
        attune_args of_one = args;
        of_one.problem = &one;
        if (one.N > 0) most = std::max(most, phase.tasks(&of_one));
    }
    return most;
}

} // namespace attune::rt
