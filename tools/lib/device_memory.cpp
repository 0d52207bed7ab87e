#include "device_memory.h"

#include "error.h"
#include "numbers.h"

#include <algorithm>

namespace attune::tools {

namespace {

void check(attune_status status) {
    if (status != ATTUNE_OK) fail("{}: {}", attune_status_string(status), attune_last_error());
}

constexpr size_t kSlack = 256;
constexpr int kPattern = 0x5a;

} // namespace

DeviceMemory::DeviceMemory(attune_device device, size_t bytes) : device_(device), bytes_(bytes) {
    check(attune_device_malloc(device, bytes, &address_));
}

DeviceMemory::~DeviceMemory() {
    if (address_) attune_device_free(device_, address_);
}

void DeviceMemory::swap(DeviceMemory &other) noexcept {
    std::swap(device_, other.device_);
    std::swap(address_, other.address_);
    std::swap(bytes_, other.bytes_);
}

void DeviceMemory::fill(int byte) const {
    const std::vector<char> bytes(bytes_, char(byte));
    check(attune_device_copy_in(device_, address_, bytes.data(), bytes_));
}

bool DeviceMemory::holds(size_t begin, size_t end, int byte) const {
    std::vector<char> bytes(end - begin);
    check(attune_device_copy_out(device_, bytes.data(), data() + begin, bytes.size()));
    return std::all_of(bytes.begin(), bytes.end(), [byte](char c) { return c == char(byte); });
}

Workspace::Workspace(attune_device device, size_t bytes, Guard guard) : on_host_(device == ATTUNE_CPU), bytes_(bytes) {
    if (on_host_) {
        host_ = Buffer(bytes, guard);
    } else {
        device_ = DeviceMemory(device, bytes + kSlack);
        const std::vector<char> pattern(kSlack, char(kPattern));
        check(attune_device_copy_in(device, device_.data() + bytes, pattern.data(), kSlack));
    }
}

bool Workspace::slack_intact() const {
    return on_host_ ? host_.slack_intact() : device_.holds(bytes_, bytes_ + kSlack, kPattern);
}

DeviceTensors::DeviceTensors(attune_device device, const attune_tensors &host) : device_(device), tensors_(host) {
    const auto optional = [this](const attune_tensor *&t, bool output) {
        if (!t) return;
        views_.push_back(*t);
        move(views_.back(), output);
        t = &views_.back();
    };
    move(tensors_.q, false);
    move(tensors_.k, false);
    move(tensors_.v, false);
    move(tensors_.o, true);
    optional(tensors_.mask, false);
    optional(tensors_.bias, false);
    optional(tensors_.lse, true);
    optional(tensors_.scores, true);
}

void DeviceTensors::move(attune_tensor &t, bool output) {
    int64_t low = 0, high = 0;
    bool empty = false;
    for (int i = 0; i < 4; i++) {
        empty = empty || t.shape[i] == 0;
        const int64_t reach = t.shape[i] > 1 ? t.stride[i] * (t.shape[i] - 1) : 0;
        (reach < 0 ? low : high) += reach;
    }
    const auto width = int64_t(dtype_size(t.dtype));
    const size_t bytes = empty ? 0 : size_t((high - low + 1) * width);
    char *first = static_cast<char *>(t.data) + low * width;
    copies_.push_back({DeviceMemory(device_, bytes), first, output});
    const DeviceMemory &memory = copies_.back().memory;
    check(attune_device_copy_in(device_, memory.data(), first, bytes));
    t.data = memory.data() - low * width;
    t.device = device_;
}

void DeviceTensors::fill_outputs(int byte) {
    for (const Copy &c : copies_)
        if (c.output) c.memory.fill(byte);
}

void DeviceTensors::fetch_outputs() {
    for (const Copy &c : copies_)
        if (c.output) check(attune_device_copy_out(device_, c.host, c.memory.data(), c.memory.size()));
}

} // namespace attune::tools
