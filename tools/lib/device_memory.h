// Memory on the device of a problem, for the tools: workspaces, and tensors that stay there from run to run.
#pragma once

#include "attune/device.h"
#include "inputs.h"

#include <deque>
#include <vector>

namespace attune::tools {

// Throws Error with the library's message where there is no room.
class DeviceMemory {
  public:
    DeviceMemory() = default;
    DeviceMemory(attune_device device, size_t bytes);
    DeviceMemory(DeviceMemory &&other) noexcept { swap(other); }
    DeviceMemory &operator=(DeviceMemory &&other) noexcept {
        swap(other);
        return *this;
    }
    ~DeviceMemory();

    char *data() const { return static_cast<char *>(address_); }
    size_t size() const { return bytes_; }
    void fill(int byte) const;
    bool holds(size_t begin, size_t end, int byte) const; // bytes [begin, end) are all that

  private:
    void swap(DeviceMemory &other) noexcept;
    attune_device device_ = ATTUNE_CPU;
    void *address_ = nullptr;
    size_t bytes_ = 0;
};

// The workspace of a plan: guarded memory of the host for the CPU, else memory of the device with some of a pattern
// behind it.
class Workspace {
  public:
    Workspace() = default;
    Workspace(attune_device device, size_t bytes, Guard guard);
    void *data() const { return on_host_ ? host_.data() : device_.data(); }
    size_t size() const { return bytes_; }
    bool slack_intact() const;
    void drop_pages() {
        if (on_host_) host_.drop_pages();
    }

  private:
    bool on_host_ = true;
    size_t bytes_ = 0;
    Buffer host_;
    DeviceMemory device_;
};

// Copies of a problem's tensors on a device: of the inputs' values, and of whatever lies in the outputs' memory.
class DeviceTensors {
  public:
    DeviceTensors(attune_device device, const attune_tensors &host);
    const attune_tensors &tensors() const { return tensors_; }
    void fill_outputs(int byte);
    // Copies all that lies in the outputs' memory back to the host's tensors.
    void fetch_outputs();

  private:
    struct Copy {
        DeviceMemory memory;
        void *host;
        bool output;
    };
    attune_device device_;
    attune_tensors tensors_;
    std::deque<attune_tensor> views_;
    std::deque<Copy> copies_;

    void move(attune_tensor &t, bool output);
};

} // namespace attune::tools
