// Tensors on the host for a run on a device: memory on the device that is kept from run to run.
#pragma once

#include "attune/kernel.h"

#include <array>
#include <cstddef>
#include <vector>

namespace attune::rt::device {

class Staging {
  public:
    // With aligned_batches, the batch elements of outputs start at multiples of kAlign.
    Staging(attune_device device, bool aligned_batches) : device_(device), aligned_batches_(aligned_batches) {}
    ~Staging();
    Staging(const Staging &) = delete;
    Staging &operator=(const Staging &) = delete;

    // `t` becomes a view of a copy on the device, if it is on the host: of its values for an input, of nothing yet for
    // an output. Broadcast dimensions stay broadcast.
    attune_status input(attune_tensor &t);
    attune_status output(attune_tensor &t);
    // The same for an array of user functions; scalars stay on the host.
    attune_status input(attune_param &p);
    // An output on the device that kernels cannot address as it lies is done elsewhere, and copied by finish().
    attune_status detour(attune_tensor &t);
    // kAlign bytes of zeros: what kernels read and do not use, where the caller has no such tensor. Made once for each
    // context, and kept.
    attune_status zeros();
    // Some bytes of the host, for the length of the run.
    attune_status bytes(const void *from, size_t n, void **address);

    bool used() const { return copied_; }
    // Waits for the run, and copies outputs to where they belong.
    attune_status finish();

  private:
    struct Output {
        attune_tensor theirs, ours;
    };
    attune_device device_;
    bool aligned_batches_;
    std::vector<void *> taken_;
    bool copied_ = false; // memory that a run uses is in taken_
    std::vector<Output> outputs_;

    attune_status take(size_t n, void **address);
};

// What Staging::zeros made for the calling thread's context.
void *zeros_of(attune_device device);

// Frees what no run uses now.
attune_status trim(attune_device device);

} // namespace attune::rt::device
