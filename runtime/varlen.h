// Packed sequences (contract 3.7): a batch of sequences of different lengths, end to end in one tensor. Every sequence
// is run as a problem of its own, so that any kernel can, nothing is copied, and the bits are those of the sequence
// alone. Its groups are in flight like those of a batch element; memory is for the longest sequence.
#pragma once

#include "attune/kernel.h"

namespace attune::rt {

// One sequence, as a kernel sees it: a problem with a batch of one and views of its rows and keys.
class Sequence {
  public:
    // Makes `args`, those of group b * Hkv + h of the packed problem, the sequence's own; they point into this object.
    // Returns the number of its tasks in `phase`.
    int64_t enter(attune_args &args, const attune_phase &phase);

  private:
    attune_problem problem_;
    attune_tensors tensors_;
    attune_tensor mask_, bias_, lse_, scores_;

    const attune_tensor *element(const attune_tensor *t, attune_tensor &view, int64_t b) const;
};

// The most tasks that a group of any sequence has in `phase`.
int64_t most_tasks(const attune_args &args, const attune_phase &phase);

} // namespace attune::rt
