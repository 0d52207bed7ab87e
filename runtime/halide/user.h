// User functions at run time: what a kernel with some is given for a tile, besides what every kernel gets. That is the
// numbers of its rows, a list of the panels of keys that some row sees (the others are never read), and the parameters.
#pragma once

#include "arguments.h"
#include "buffer.h"
#include "phases.h"

#include "../strict.h"
#include "../tiles.h"

#include <array>

namespace attune::rt::halide {

constexpr int64_t kSplitPanel = 32; // keys that kernels without packed panels mask together (split_kv.cpp)
// The most keys of a block of panels; the list is padded by as many places, of which blocks read whole ones.
constexpr int64_t kListPadding = 1024;

// The parameters of a run as Halide's buffers.
class UserParams {
  public:
    UserParams(const UserMeta &user, const attune_tensors &tensors);
    UserParams(const UserParams &) = delete;
    void add_to(Arguments &arguments);

  private:
    const UserMeta &user_;
    std::array<const void *, ATTUNE_MAX_PARAMS> scalars_{};
    std::array<Buffer<4>, ATTUNE_MAX_PARAMS> buffers_;
};

// Pieces of the scratch memory; none for kernels without user functions.
struct UserScratch {
    int32_t *row_query = nullptr, *row_head = nullptr, *slots = nullptr;
    uint8_t *kinds = nullptr;

    UserScratch() = default;
    UserScratch(const KernelMeta &meta, const attune_problem &p, Pieces &pieces) {
        const int64_t panels = meta.user ? ceil_div(p.M, panel_of(meta)) : 0;
        row_query = pieces.take<int32_t>(meta.user ? meta.q : 0);
        row_head = pieces.take<int32_t>(meta.user ? meta.q : 0);
        slots = pieces.take<int32_t>(meta.user ? panels + kListPadding : 0);
        kinds = pieces.take<uint8_t>(meta.user ? panels + 64 : 0);
    }
    static int64_t panel_of(const KernelMeta &meta) { return meta.panel ? meta.panel : kSplitPanel; }
};

class UserTile {
  public:
    UserTile(const attune_args &args, const KernelMeta &meta, const UserScratch &scratch)
        : args_(args), meta_(meta), scratch_(scratch), params_(*meta.user, *args.tensors),
          row_query_(scratch.row_query, {meta.q}, {1}), row_head_(scratch.row_head, {meta.q}, {1}),
          slots_(scratch.slots, {ceil_div(args.problem->M, UserScratch::panel_of(meta)) + kListPadding}, {1}) {}

    // Prepares for `tile`, whose rows see what `seen` says by structure. Returns an error of the generated code.
    int move_to(const Tile &tile, const Seen &seen);
    // The list in place of an interval of keys, see MaskedPhase in generators/halide/phases.h.
    Seen listed() const { return {0, total_ * panel(), 0, whole_ * panel()}; }
    void add_to(Arguments &arguments);

  private:
    const attune_args &args_;
    const KernelMeta &meta_;
    const UserScratch &scratch_;
    UserParams params_;
    Buffer<1> row_query_, row_head_, slots_;
    int64_t total_ = 0, whole_ = 0; // of the list
    int32_t batch_ = 0, full_slots_ = 0;
    uint32_t zero_ = 0;

    int64_t panel() const { return UserScratch::panel_of(meta_); }
    int find_kinds(const Tile &tile, int64_t first, int64_t last);
};

// For the strict code.
class UserRowOf : public UserRow {
  public:
    UserRowOf(const attune_args &args, const UserMeta *user) : args_(args), user_(user) {}
    // Null where there are no user functions.
    const UserRow *get() const { return user_ ? this : nullptr; }
    void apply(int64_t b, int64_t h, int64_t i, int64_t first, int64_t count, float *scores,
               uint8_t *visible) const override;

  private:
    const attune_args &args_;
    const UserMeta *user_;
};

} // namespace attune::rt::halide
