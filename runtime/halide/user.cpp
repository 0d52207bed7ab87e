#include "user.h"

#include "../validate.h"

#include <algorithm>

namespace attune::rt::halide {

namespace {

enum Kind : uint8_t { kNone = 0, kSome = 1, kAll = 2 }; // see generators/halide/strategies/user.cpp

halide_type_t type_of(attune_dtype t) {
    switch (t) {
    case ATTUNE_I32:
        return {halide_type_int, 32};
    case ATTUNE_I64:
        return {halide_type_int, 64};
    case ATTUNE_U8:
        return {halide_type_uint, 8};
    default:
        return {halide_type_float, 32};
    }
}

} // namespace

UserParams::UserParams(const UserMeta &user, const attune_tensors &tensors) : user_(user) {
    for (int64_t i = 0; i < user.num_params; i++) {
        const attune_param &p = param_of(tensors, user.params[i]);
        scalars_[size_t(i)] = p.data;
        Buffer<4> &b = buffers_[size_t(i)];
        b.type = type_of(p.dtype);
        b.host = static_cast<uint8_t *>(const_cast<void *>(p.data));
        b.dimensions = p.rank;
        b.dim = b.dims;
        for (int d = 0; d < p.rank; d++) { // Halide's innermost dimension comes first
            const int from = p.rank - 1 - d;
            const int64_t stride = p.shape[from] > 1 ? p.stride[from] : d == 0 ? 1 : 0;
            b.dims[d] = halide_dimension_t(0, int32_t(p.shape[from]), int32_t(stride));
        }
    }
}

void UserParams::add_to(Arguments &arguments) {
    for (int64_t i = 0; i < user_.num_params; i++) {
        if (user_.params[i].rank)
            arguments.add(buffers_[size_t(i)]);
        else
            arguments.add(*static_cast<const char *>(scalars_[size_t(i)]));
    }
}

int UserTile::find_kinds(const Tile &tile, int64_t first, int64_t last) {
    if (!meta_.user->blocks) {
        std::fill(scratch_.kinds, scratch_.kinds + (last - first), kSome);
        return 0;
    }
    const attune_problem &p = *args_.problem;
    int32_t h_first = scratch_.row_head[0], h_last = scratch_.row_head[tile.rows - 1];
    int32_t q_first = h_first == h_last ? scratch_.row_query[0] : 0;
    int32_t q_last = h_first == h_last ? scratch_.row_query[tile.rows - 1] : int32_t(p.N - 1);
    int32_t first_block = int32_t(first), keys = int32_t(panel()), num_keys = int32_t(p.M);
    Buffer<1> kinds(scratch_.kinds, {last - first}, {1});
    void *context = nullptr;
    Arguments a;
    a.add(context);
    for (int32_t *x : {&batch_, &h_first, &h_last, &q_first, &q_last, &first_block, &keys, &num_keys}) a.add(*x);
    params_.add_to(a);
    a.add(kinds);
    return meta_.user->blocks(a.data());
}

int UserTile::move_to(const Tile &tile, const Seen &seen) {
    const attune_problem &p = *args_.problem;
    batch_ = int32_t(args_.sequence + tile.b);
    RowWalk row(p, tile);
    for (int64_t r = 0; r < meta_.q; r++) {
        scratch_.row_query[r] = int32_t(row.i);
        scratch_.row_head[r] = int32_t(row.h);
        if (r + 1 < tile.rows) row.next(); // rows that are not there repeat the last one
    }
    const int64_t w = panel(), first = seen.first / w, last = ceil_div(seen.last, w);
    if (meta_.keeps_scores) { // stagewise has no list: every panel is where it is
        full_slots_ = int32_t(p.M / w);
        return 0;
    }
    total_ = whole_ = full_slots_ = 0;
    if (first >= last) return 0;
    if (const int error = find_kinds(tile, first, last)) return error;
    // Whole panels need none of what is done to a score: every row sees every key of theirs, and nothing is added.
    const bool plain =
        meta_.panel && !meta_.user->scores && !(p.flags & (ATTUNE_MASK | ATTUNE_BIAS | ATTUNE_SOFTCAP | ATTUNE_ALIBI));
    const auto is_whole = [&](int64_t panel) {
        return plain && scratch_.kinds[panel - first] == kAll && panel * w >= seen.all_first &&
               (panel + 1) * w <= seen.all_last;
    };
    for (int64_t panel = first; panel < last; panel++) whole_ += is_whole(panel);
    const int64_t panels_of_block = std::max<int64_t>(1, meta_.k / w);
    whole_ = whole_ / panels_of_block * panels_of_block;
    int64_t wholes = 0, others = whole_;
    for (int64_t panel = first; panel < last; panel++) {
        if (scratch_.kinds[panel - first] == kNone) continue;
        int64_t &place = wholes < whole_ && is_whole(panel) ? wholes : others;
        scratch_.slots[place++] = int32_t(panel);
    }
    total_ = others;
    std::fill_n(scratch_.slots + total_, std::min(panels_of_block, kListPadding), 0);
    full_slots_ = int32_t(total_ > 0 && scratch_.slots[total_ - 1] >= p.M / w ? total_ - 1 : total_);
    return 0;
}

void UserTile::add_to(Arguments &arguments) {
    for (Buffer<1> *b : {&row_query_, &row_head_, &slots_}) arguments.add(*b);
    arguments.add(full_slots_);
    arguments.add(batch_);
    arguments.add(zero_);
    params_.add_to(arguments);
}

void UserRowOf::apply(int64_t b, int64_t h, int64_t i, int64_t first, int64_t count, float *scores,
                      uint8_t *visible) const {
    UserParams params(*user_, *args_.tensors);
    int32_t batch = int32_t(args_.sequence + b), head = int32_t(h), row = int32_t(i), key = int32_t(first);
    Buffer<1> score(scores, {count}, {1}), seen(visible, {count}, {1});
    void *context = nullptr;
    Arguments a;
    a.add(context);
    for (int32_t *x : {&batch, &head, &row, &key}) a.add(*x);
    a.add(score);
    params.add_to(a);
    for (Buffer<1> *x : {&score, &seen}) a.add(*x); // in place
    user_->row(a.data());
}

} // namespace attune::rt::halide
