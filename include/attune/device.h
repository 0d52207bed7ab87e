/* Devices (OpenCL, Vulkan, CUDA): which there are, their memory, and a caller's own contexts and queues.
 *
 * A device address is what attune_tensor.data holds for a tensor on a device. With CUDA it is a CUdeviceptr, whoever
 * allocated it. OpenCL and Vulkan have handles in place of addresses: there it is an address out of a range that
 * attune_device_malloc or attune_device_import reserves (touching it from the host is a fault), so that views into the
 * middle of a buffer are made by adding bytes, as everywhere.
 *
 * All functions work on the calling thread's current queue of the device. That is attune's own (the first suitable
 * device, see attune_device_info.is_default) unless the thread has said otherwise with attune_device_use_queue.
 */
#ifndef ATTUNE_DEVICE_H
#define ATTUNE_DEVICE_H

#include "attune/attune.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct attune_device_info {
    size_t struct_size; /* set by attune_device_info_init */
    attune_device device;
    int is_default;   /* attune's own queue is on this one */
    int is_software;  /* a CPU that stands in for a GPU */
    char name[128];   /* as the driver calls it */
    char driver[128]; /* its version, and that of its interface */
    int64_t memory_bytes, max_buffer_bytes;
    int64_t shared_bytes; /* that a workgroup can have */
    int64_t max_threads;  /* of a workgroup */
    int64_t compute_units;
    int64_t clock_khz;  /* 0: unknown */
    int64_t capability; /* CUDA: 80, 86, 90 …; otherwise 0 */
} attune_device_info;

ATTUNE_API void attune_device_info_init(attune_device_info *info);
/* The devices of a kind. ATTUNE_DEVICE_ERROR, with the reason as the message, where there is no driver. */
ATTUNE_API attune_status attune_device_count(attune_device device, int64_t *count);
ATTUNE_API attune_status attune_device_describe(attune_device device, int64_t index, attune_device_info *info);

/* Memory of 256-byte alignment. ATTUNE_OUT_OF_MEMORY where there is no room: what was allocated before is unharmed. */
ATTUNE_API attune_status attune_device_malloc(attune_device device, size_t bytes, void **address);
ATTUNE_API attune_status attune_device_free(attune_device device, void *address); /* NULL: nothing */
/* Gives a caller's own buffer (cl_mem) a device address; attune_device_free ends that and leaves the buffer alone. A
 * CUdeviceptr needs no import: it is returned as it is. */
ATTUNE_API attune_status attune_device_import(attune_device device, void *handle, size_t bytes, void **address);
/* Copies. They come after all work of the queue, and are done when they return. */
ATTUNE_API attune_status attune_device_copy_in(attune_device device, void *to, const void *from_host, size_t bytes);
ATTUNE_API attune_status attune_device_copy_out(attune_device device, void *to_host, const void *from, size_t bytes);
/* Waits for all work of the queue. Errors of work that was queued before are reported here. */
ATTUNE_API attune_status attune_device_synchronize(attune_device device);
/* Frees what attune keeps between runs and no run uses now: memory for tensors that are on the host and, in a caller's
 * own context that the calling thread uses, the kernels' loaded code. To be called there before the context is
 * destroyed. */
ATTUNE_API attune_status attune_device_trim(attune_device device);

/* A caller's own context and queue: CUcontext and CUstream, or cl_context and cl_command_queue (in order). Not for
 * Vulkan. */
typedef struct attune_device_queue {
    size_t struct_size; /* sizeof(attune_device_queue) */
    attune_device device;
    void *context, *queue;
} attune_device_queue;
/* From now on calls of this thread for that device use this queue. It must outlive them. Addresses belong to a context:
 * those from one context are not valid in another. */
ATTUNE_API attune_status attune_device_use_queue(const attune_device_queue *queue);
ATTUNE_API attune_status attune_device_use_default(attune_device device);

#ifdef __cplusplus
}
#endif
#endif
