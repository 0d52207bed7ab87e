/* The ABI between attune's runtime and a kernel, whichever compiler made it. Only authors of kernel sets need this
 * header.
 *
 * A kernel is a descriptor: what it can do, how much memory it wants, and a short list of phases. It works on one group
 * at a time: a (batch, kv head) with the query heads that share it, or, if it brings its own threads, a batch element.
 * Groups have nothing to do with each other. The runtime decides how many are in flight, each in memory of its own. A
 * phase is serial over a range of a group's tasks; the runtime's parallel-for is the only place with threads. A phase
 * of a group begins when the one before is done. All int64.
 *
 * A kernel for a device is the same, but for the whole problem at once (group is 0): its phases have one task, which
 * queues work on the calling thread's queue of that device (attune/device.h). It sees all tensors on the device, and
 * device memory as its shared workspace; kv_len, offsets, alibi_slopes and sinks stay arrays of the host, and scratch
 * is NULL.
 */
#ifndef ATTUNE_KERNEL_H
#define ATTUNE_KERNEL_H

#include "attune/attune.h"

#ifdef __cplusplus
extern "C" {
#endif

#define ATTUNE_KERNEL_ABI 3

/* What a phase gets to see. Everything is validated: shapes agree, optional tensors are there if their flag is set. */
typedef struct attune_args {
    size_t struct_size;
    const attune_problem *problem;
    const attune_tensors *tensors;
    float scale;   /* resolved: the problem's, or 1/sqrt(dk) */
    int64_t group; /* b * Hkv + kv head; b for kernels with threads of their own */
    void *shared;  /* memory that the group's phases share, 64-byte aligned (device: 256); what an earlier group left is
                      in it */
    int64_t sequence; /* packed sequences are problems of their own: which one this is; otherwise 0 */
} attune_args;

/* Runs tasks [begin, end) of the group. scratch: the calling thread's own, 64-byte aligned. Returns 0, or an error of
 * the kernel's own. */
typedef int (*attune_phase_fn)(const attune_args *args, int64_t begin, int64_t end, void *scratch);

typedef struct attune_phase {
    const char *name; /* pack, main, merge; for stagewise score, mask, softmax, matmul */
    attune_phase_fn run;
    int64_t (*tasks)(const attune_args *args); /* of any one group: all have as many */
} attune_phase;

/* Bits of attune_kernel.traits. */
enum {
    ATTUNE_TRAIT_OWN_THREADS = 1u << 0, /* the kernel brings its own parallel loops: called with all tasks at once */
    ATTUNE_TRAIT_QUADRATIC = 1u << 1,   /* O(N*M) memory */
    ATTUNE_TRAIT_STRICT = 1u << 2,      /* the strict variant: keeps NaN and guards every product */
    ATTUNE_TRAIT_ON_REQUEST = 1u << 3, /* the planner takes it only when asked for by name (steps of a demonstration) */
    /* What it takes of f32, bf16 and f16, whichever q_dtype, kv_dtype and o_dtype say that it computes in. */
    ATTUNE_TRAIT_ANY_Q = 1u << 4,
    ATTUNE_TRAIT_ANY_KV = 1u << 5,
    ATTUNE_TRAIT_ANY_O = 1u << 6
};

/* What an assembler says of one function of a device kernel, for one architecture. */
typedef struct attune_device_code {
    const char *function, *arch;    /* arch: sm_80 …; "" where it is the same for all */
    int64_t threads;                /* of a workgroup */
    int64_t registers, spill_bytes; /* of a thread; -1: unknown */
    int64_t shared_bytes;           /* of a workgroup */
} attune_device_code;

/* A parameter of a kernel's user functions: each run brings one of that name. */
enum { ATTUNE_BY_BATCH = 1, ATTUNE_BY_HEAD = 2, ATTUNE_BY_ROW = 4, ATTUNE_BY_KEY = 8 };
typedef struct attune_mod_param {
    const char *name;
    attune_dtype dtype;
    int rank;            /* 0: a scalar */
    unsigned char by[4]; /* what each dimension is indexed by: its extent must be B, Hq, N or M at least */
} attune_mod_param;

typedef struct attune_kernel {
    size_t struct_size;
    uint32_t abi; /* ATTUNE_KERNEL_ABI */
    const char *name, *strategy, *backend;
    const char *isa; /* of a device: sm_80 …, opencl, vulkan */
    attune_device device;
    attune_dtype q_dtype, kv_dtype, o_dtype;
    int64_t dk, dv;                         /* the sizes it is specialised for; 0: any, at run time */
    int64_t dk_min, dk_max, dv_min, dv_max; /* what it accepts */
    int64_t n_min, m_min, h_min;            /* the fewest rows, keys and query heads it works for */
    uint32_t flags;                         /* which of a problem's flags it can do */
    int window, gqa;                        /* can do a window, Hq != Hkv */
    uint32_t traits;
    const char *params; /* the knobs, as JSON */
    const char *why;    /* one sentence: why this kernel is here, with its figure */
    const attune_phase *phases;
    int64_t num_phases;
    size_t (*shared_bytes)(const attune_problem *problem);  /* for each group in flight */
    size_t (*scratch_bytes)(const attune_problem *problem); /* for each thread, from the workspace */
    size_t (*stack_bytes)(const attune_problem *problem);   /* for each thread, from its stack */
    const attune_device_code *code;                         /* of a device kernel, where it is known */
    int64_t num_code;
    const char *(*refuses)(const attune_problem *problem); /* what the fields above do not say: NULL, or why not */
    const char *mods; /* names of its user functions, with commas: it runs problems that ask for these. NULL: none */
    const attune_mod_param *mod_params;
    int64_t num_mod_params;
} attune_kernel;

/* What a plug-in exports: a function attune_plugin() that returns its kernels (`attune build`, `attune tune`). */
typedef struct attune_kernel_set {
    size_t struct_size;
    uint32_t abi;        /* ATTUNE_KERNEL_ABI */
    const char *version; /* of attune, that it was made by */
    const attune_kernel *const *kernels;
    int64_t num_kernels;
} attune_kernel_set;

/* The run-time registry: built-in kernels, then those registered later. */
ATTUNE_API int64_t attune_num_kernels(void);
ATTUNE_API const attune_kernel *attune_kernel_at(int64_t index); /* NULL if out of range */
ATTUNE_API const attune_kernel *attune_find_kernel(const char *name);
ATTUNE_API attune_status attune_register_kernel(const attune_kernel *kernel);
/* Loads a plug-in and registers its kernels: all of them, or none. Refused, with the reason, if it was made for another
 * ABI, has a kernel for an ISA that this CPU lacks, or a name that is taken. It stays loaded. Loading one again does
 * nothing. */
ATTUNE_API attune_status attune_load_kernels(const char *path);
/* NULL if `kernel` can run `problem` on this CPU or device, otherwise the reason (valid until the thread's next call).
 */
ATTUNE_API const char *attune_kernel_refuses(const attune_kernel *kernel, const attune_problem *problem);

/* Whether the runs of this thread measure their phases (on a device, a run then waits for each of them). Off by
 * default: where groups are small, reading the clock for each phase of each costs more than a tenth. */
ATTUNE_API void attune_time_phases(int on);
/* The time of each phase in the last attune_run of this thread that measured them, in seconds: of all workers
 * together, divided by their number. Returns the number of phases. */
ATTUNE_API int64_t attune_last_phase_seconds(double *seconds, int64_t capacity);

/* How many tiles of rows the strict code has done since the process began: those in which a NaN or an infinity took
 * part, and those whose strides no kernel takes. Those of kernels from plug-ins are not counted. */
ATTUNE_API uint64_t attune_strict_tiles(void);

#ifdef __cplusplus
}
#endif
#endif
