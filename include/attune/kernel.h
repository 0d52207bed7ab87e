/* The ABI between attune's runtime and a kernel, whichever compiler made it. Only authors of kernel sets need this
 * header.
 *
 * A kernel is a descriptor: what it can do, how much memory it wants, and a short list of phases. A phase is serial
 * over a range of tasks; the runtime's parallel-for is the only place with threads, and it puts a barrier between
 * phases. All int64.
 */
#ifndef ATTUNE_KERNEL_H
#define ATTUNE_KERNEL_H

#include "attune/attune.h"

#ifdef __cplusplus
extern "C" {
#endif

#define ATTUNE_KERNEL_ABI 1

/* What a phase gets to see. Everything is validated: shapes agree, optional tensors are there if their flag is set. */
typedef struct attune_args {
    size_t struct_size;
    const attune_problem *problem;
    const attune_tensors *tensors;
    float scale;  /* resolved: the problem's, or 1/sqrt(dk) */
    void *shared; /* the kernel's shared part of the workspace, 64-byte aligned */
} attune_args;

/* Runs tasks [begin, end). scratch: the calling thread's own, 64-byte aligned. Returns 0, or an error of the kernel's
 * own. */
typedef int (*attune_phase_fn)(const attune_args *args, int64_t begin, int64_t end, void *scratch);

typedef struct attune_phase {
    const char *name; /* pack, main, merge; for stagewise score, mask, softmax, matmul */
    attune_phase_fn run;
    int64_t (*tasks)(const attune_args *args);
} attune_phase;

/* Bits of attune_kernel.traits. */
enum {
    ATTUNE_TRAIT_OWN_THREADS = 1u << 0, /* the kernel brings its own parallel loops: called with all tasks at once */
    ATTUNE_TRAIT_QUADRATIC = 1u << 1,   /* O(N*M) memory */
    ATTUNE_TRAIT_STRICT = 1u << 2,      /* the strict variant: keeps NaN and guards every product */
    ATTUNE_TRAIT_ON_REQUEST = 1u << 3 /* the planner takes it only when asked for by name (steps of a demonstration) */
};

typedef struct attune_kernel {
    size_t struct_size;
    uint32_t abi; /* ATTUNE_KERNEL_ABI */
    const char *name, *strategy, *backend, *isa;
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
    size_t (*shared_bytes)(const attune_problem *problem);
    size_t (*scratch_bytes)(const attune_problem *problem); /* for each thread, from the workspace */
    size_t (*stack_bytes)(const attune_problem *problem);   /* for each thread, from its stack */
} attune_kernel;

/* The run-time registry: built-in kernels, then those registered later. */
ATTUNE_API int64_t attune_num_kernels(void);
ATTUNE_API const attune_kernel *attune_kernel_at(int64_t index); /* NULL if out of range */
ATTUNE_API const attune_kernel *attune_find_kernel(const char *name);
ATTUNE_API attune_status attune_register_kernel(const attune_kernel *kernel);
/* NULL if `kernel` can run `problem` on this CPU, otherwise the reason (valid until the thread's next call). */
ATTUNE_API const char *attune_kernel_refuses(const attune_kernel *kernel, const attune_problem *problem);

/* Time of each phase of the last attune_run of this thread, in seconds; for attune compare. */
ATTUNE_API int64_t attune_last_phase_seconds(double *seconds, int64_t capacity);

/* How many tiles of rows the strict code has done since the process began: those in which a NaN or an infinity took
 * part, and those whose strides no kernel takes. */
ATTUNE_API uint64_t attune_strict_tiles(void);

#ifdef __cplusplus
}
#endif
#endif
