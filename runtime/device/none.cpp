// In place of this folder's other files where attune is built with ATTUNE_GPU=OFF: every device is missing.
#include "attune/device.h"

#include "run.h"
#include "status.h"

namespace attune::rt {

static constexpr const char *kWhy = "attune was built without devices (ATTUNE_GPU=OFF)";

static attune_status missing() {
    return fail(ATTUNE_DEVICE_ERROR, "{}", kWhy);
}

std::string device::refusal(const attune_kernel &, const attune_problem &) {
    return kWhy;
}

attune_status device::run(const attune_kernel &, const attune_args &, double *) {
    return missing();
}

} // namespace attune::rt

using attune::rt::missing;

extern "C" {
void attune_device_info_init(attune_device_info *info) {
    if (!info) return;
    *info = attune_device_info{};
    info->struct_size = sizeof(attune_device_info);
}
attune_status attune_device_count(attune_device, int64_t *count) {
    if (count) *count = 0;
    return missing();
}
attune_status attune_device_describe(attune_device, int64_t, attune_device_info *) {
    return missing();
}
attune_status attune_device_malloc(attune_device, size_t, void **address) {
    if (address) *address = nullptr;
    return missing();
}
attune_status attune_device_free(attune_device, void *) {
    return missing();
}
attune_status attune_device_import(attune_device, void *, size_t, void **address) {
    if (address) *address = nullptr;
    return missing();
}
attune_status attune_device_copy_in(attune_device, void *, const void *, size_t) {
    return missing();
}
attune_status attune_device_copy_out(attune_device, void *, const void *, size_t) {
    return missing();
}
attune_status attune_device_synchronize(attune_device) {
    return missing();
}
attune_status attune_device_trim(attune_device) {
    return missing();
}
attune_status attune_device_use_queue(const attune_device_queue *) {
    return missing();
}
attune_status attune_device_use_default(attune_device) {
    return missing();
}
}
