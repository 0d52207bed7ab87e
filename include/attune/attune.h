/* attune: scaled dot-product and multi-head attention from generated kernels. The C interface.
 *
 *   O[b,h,i,:] = sum_j softmax_j(s[b,h,i,j]) V[b,h/(Hq/Hkv),j,:]      s = scale * Q[b,h,i,:] . K[b,h/(Hq/Hkv),j,:]
 *
 * Shapes: Q [B, Hq, N, dk], K [B, Hkv, M, dk], V [B, Hkv, M, dv], O [B, Hq, N, dv]; rows are queries. Strides are
 * int64, in elements, one for each of the four dimensions; 0 is allowed on inputs (broadcast).
 *
 * Packed sequences of different lengths (ATTUNE_VARLEN): Q and O are [1, Hq, rows, d], K and V [1, Hkv, keys, d];
 * sequence b is rows cu_seqlens_q[b] to cu_seqlens_q[b + 1] and keys cu_seqlens_k[b] to cu_seqlens_k[b + 1]. Each is an
 * attention of its own, with the bits that it has when it is run alone by the same kernel.
 *
 * Order of what happens to a score: scale * q.k -> soft cap -> user functions -> ALiBi -> bias -> mask -> softmax ->
 * times V.
 *
 * Use: fill an attune_problem (attune_problem_init first), make a plan, ask for its workspace, run it as often as
 * wanted. A plan is immutable and may be shared by threads; a run allocates nothing. Every function returns a status;
 * the text of the last failure of the calling thread is attune_last_error(). Nothing aborts.
 */
#ifndef ATTUNE_ATTUNE_H
#define ATTUNE_ATTUNE_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define ATTUNE_VERSION_MAJOR 0
#define ATTUNE_VERSION_MINOR 1
#define ATTUNE_VERSION_PATCH 0
#define ATTUNE_VERSION "0.1.0"

#if defined(_WIN32)
#define ATTUNE_API
#else
#define ATTUNE_API __attribute__((visibility("default")))
#endif

/* Any int is a value of an enumeration: in C it is anyway, and what is none of the names is refused, not undefined. */
#ifdef __cplusplus
#define ATTUNE_ANY_INT : int
#else
#define ATTUNE_ANY_INT
#endif

typedef enum attune_status ATTUNE_ANY_INT {
    ATTUNE_OK = 0,
    ATTUNE_INVALID_ARGUMENT =
        1,                    /* an argument is wrong; attune_last_error() names it, its value and what was expected */
    ATTUNE_UNSUPPORTED = 2,   /* legal, but no linked kernel does it; the message says why each kernel cannot */
    ATTUNE_OUT_OF_MEMORY = 3, /* a plan or a module could not be allocated */
    ATTUNE_KERNEL_FAILED = 4, /* a kernel reported an error; outputs are undefined */
    ATTUNE_IO_ERROR = 5,      /* a file could not be read, or is not what it should be */
    ATTUNE_DEVICE_ERROR = 6   /* no driver, no such device, or the driver reported an error */
} attune_status;

typedef enum attune_dtype ATTUNE_ANY_INT {
    ATTUNE_F32 = 0,
    ATTUNE_BF16 = 1,
    ATTUNE_F16 = 2,
    ATTUNE_U8 = 3,  /* bool masks: one byte, nonzero = attend */
    ATTUNE_I64 = 4, /* this and i32: parameters of user functions */
    ATTUNE_I32 = 5
} attune_dtype;

typedef enum attune_device ATTUNE_ANY_INT {
    ATTUNE_CPU = 0,
    ATTUNE_OPENCL = 1,
    ATTUNE_VULKAN = 2,
    ATTUNE_CUDA = 3
} attune_device;

/* A view of memory that the caller owns. stride is in elements. Strides of dimensions of extent 1 are ignored.
 * data of a tensor on a device is a device address (attune/device.h). In a problem for a device, tensors on the host
 * (ATTUNE_CPU) are copied in and out by each run; those on the device stay there. */
typedef struct attune_tensor {
    void *data;
    attune_dtype dtype;
    attune_device device;
    int64_t shape[4];
    int64_t stride[4];
} attune_tensor;

/* Bits of attune_problem.flags. */
enum {
    ATTUNE_SCALE =
        1u << 0, /* .scale is given; otherwise 1/sqrt(dk). Any finite value is legal, 0 and negative included */
    ATTUNE_CAUSAL = 1u << 1, /* key j is visible to row i iff j <= i + offset */
    ATTUNE_MASK = 1u << 2,   /* tensors.mask: bool, [B, Hq, N, M] by strides */
    ATTUNE_BIAS = 1u << 3,   /* tensors.bias: f32, [B, Hq, N, M] by strides; -inf masks, any finite value is a number */
    ATTUNE_KV_LEN = 1u << 4, /* tensors.kv_len: int64 [B]; keys >= kv_len[b] do not exist */
    ATTUNE_OFFSETS = 1u << 5, /* tensors.offsets: int64 [B], in place of .offset */
    ATTUNE_SOFTCAP = 1u << 6, /* .softcap > 0: s = softcap * tanh(s / softcap) */
    ATTUNE_ALIBI = 1u << 7,   /* tensors.alibi_slopes: f32 [Hq]; adds -slope * |i + offset - j| */
    ATTUNE_SINK = 1u << 8,   /* tensors.sinks: f32 [Hq]; one more logit in the denominator, neither scaled nor capped */
    ATTUNE_SCORES = 1u << 9, /* tensors.scores: f32 [B, Hq, N, M], see .scores_stage. Only `stagewise` can */
    ATTUNE_STRIDED_V = 1u << 10, /* V may have a feature stride other than 1: room for a packed copy. Without this flag
                                    such a V is still right, but slow */
    ATTUNE_DETERMINISTIC = 1u << 11, /* the planner's choice depends neither on the number of threads nor on B */
    ATTUNE_VARLEN = 1u << 12 /* B packed sequences: tensors.cu_seqlens_q, .cu_seqlens_k. N and M are the longest that a
                                run may have; offsets, positions, masks and biases count within each sequence */
};

/* What the scores output holds. */
typedef enum attune_scores_stage ATTUNE_ANY_INT {
    ATTUNE_SCORES_RAW = 0,          /* scale * q.k */
    ATTUNE_SCORES_CAPPED = 1,       /* after the soft cap */
    ATTUNE_SCORES_BIASED = 2,       /* after ALiBi, bias and mask: -inf where a key is invisible */
    ATTUNE_SCORES_PROBABILITIES = 3 /* the attention weights */
} attune_scores_stage;

/* One attention problem: everything but the pointers. Names are those of the formula above. */
typedef struct attune_problem {
    size_t struct_size; /* set by attune_problem_init */
    attune_dtype q_dtype, kv_dtype, o_dtype;
    attune_device device;
    int64_t B, Hq, Hkv, N, M, dk, dv; /* M is the capacity: kv_len may make it shorter at a run */
    uint32_t flags;
    float scale;
    float softcap;
    int64_t offset;                    /* row i stands at position i + offset among the keys */
    int64_t window_left, window_right; /* keys i+offset-left .. i+offset+right, inclusive; -1: unbounded */
    attune_scores_stage scores_stage;
    const char *mods; /* user functions: the names of a kernel's (attune_kernel.mods), e.g. "alibi" or "cap,document".
                         NULL or "": none. A plan keeps a copy */
} attune_problem;

/* The value of a parameter of user functions. */
#define ATTUNE_MAX_PARAMS 16
typedef struct attune_param {
    const char *name;
    attune_dtype dtype;          /* f32, i32, i64 or u8 */
    int rank;                    /* 0: a scalar, which lies at data */
    const void *data;            /* on the host, for devices too */
    int64_t shape[4], stride[4]; /* the first `rank` of them; strides in elements, the last one is 1 */
} attune_param;

/* The tensors of one run. Optional ones are NULL unless the problem's flags ask for them; lse may always be given. */
typedef struct attune_tensors {
    size_t struct_size;        /* set by attune_tensors_init */
    attune_tensor q, k, v, o;  /* with ATTUNE_VARLEN [1, H, cu_seqlens[B], d], and lse likewise */
    const attune_tensor *mask; /* u8  [B, Hq, N, M] */
    const attune_tensor *bias; /* f32 [B, Hq, N, M] */
    const attune_tensor
        *lse; /* f32 [B, Hq, N, 1], written: natural log of sum exp(s) over the visible keys (and the sink) */
    const attune_tensor *scores; /* f32 [B, Hq, N, M], written */
    const int64_t *kv_len;       /* [B] */
    const int64_t *offsets;      /* [B] */
    const float *alibi_slopes;   /* [Hq] */
    const float *sinks;          /* [Hq] */
    const int64_t *cu_seqlens_q; /* [B + 1], from 0, never falling; the last is the number of packed rows */
    const int64_t *cu_seqlens_k; /* [B + 1], the same for keys */
    const attune_param *params;  /* those of the plan's user functions, in any order */
    int64_t num_params;
} attune_tensors;

/* How a plan is to be made. */
typedef struct attune_plan_options {
    size_t struct_size;   /* set by attune_plan_options_init */
    const char *kernel;   /* take this kernel (its full name), or fail. NULL: the planner's choice */
    const char *strategy; /* take a kernel of this strategy, or fail. NULL: any */
    int threads;          /* threads of a run; 0: attune_get_num_threads() at plan time */
} attune_plan_options;

typedef struct attune_plan attune_plan;

ATTUNE_API void attune_problem_init(attune_problem *problem); /* zero sizes, f32, no flags, B = 1, unbounded window */
ATTUNE_API void attune_tensors_init(attune_tensors *tensors);
ATTUNE_API void attune_plan_options_init(attune_plan_options *options);

/* Chooses a kernel. `options` may be NULL. On failure *plan is NULL. */
ATTUNE_API attune_status attune_plan_create(const attune_problem *problem, const attune_plan_options *options,
                                            attune_plan **plan);
ATTUNE_API void attune_plan_destroy(attune_plan *plan);
/* Bytes that a run needs; any alignment. For a device: memory on that device (attune_device_malloc). */
ATTUNE_API size_t attune_plan_workspace(const attune_plan *plan);
ATTUNE_API size_t attune_plan_scratch(const attune_plan *plan); /* of these (or of the stack), bytes for each thread */
ATTUNE_API const char *attune_plan_kernel(const attune_plan *plan);  /* name of the chosen kernel */
ATTUNE_API const char *attune_plan_explain(const attune_plan *plan); /* a line for each kernel: chosen, or why not */
ATTUNE_API const attune_problem *attune_plan_problem(const attune_plan *plan);

/* Checks everything, then runs. Nothing is written unless all checks pass. workspace may be NULL if its size is 0. On a
 * device the work is only queued where all tensors are there already; attune_device_synchronize waits for it. */
ATTUNE_API attune_status attune_run(const attune_plan *plan, const attune_tensors *tensors, void *workspace,
                                    size_t workspace_size);

/* Attention over a part of the keys: its output and its LSE, [B, Hq, N, dv] and f32 [B, Hq, N, 1]. */
typedef struct attune_partial {
    attune_tensor o, lse;
} attune_partial;

/* Merges `num_parts` attentions of the same queries over disjoint parts of the keys into the attention over all of
 * them: lse = log sum_p exp(lse_p)      o = sum_p exp(lse_p - lse) o_p `o` may be one of the parts' outputs (in place,
 * with the same strides), `lse` NULL or likewise; merges may be nested in any order. `sinks`: f32 [Hq], or NULL. Parts
 * carry their LSE without the sink; only the last merge gets it. A part whose LSE is -inf saw no key and has no
 * influence, whatever its O holds; a NaN or +inf in an LSE makes that row NaN. Types of O: f32, bf16, f16, each tensor
 * its own; sums are f32. Allocates nothing. */
ATTUNE_API attune_status attune_merge(const attune_partial *parts, int64_t num_parts, const float *sinks,
                                      const attune_tensor *o, const attune_tensor *lse);

/* Threads. The default pool is Halide's. A replacement is called as parallel_for(context, n, task, closure) and must
 * call task(closure, i) once for each i in [0, n), in any order and on any threads, and return when all are done. */
typedef void (*attune_task_fn)(void *closure, int64_t index);
typedef void (*attune_parallel_for_fn)(void *context, int64_t n, attune_task_fn task, void *closure);
ATTUNE_API attune_status attune_set_num_threads(int threads); /* 0: all cores, or ATTUNE_NUM_THREADS */
ATTUNE_API int attune_get_num_threads(void);
ATTUNE_API void attune_set_parallel_for(attune_parallel_for_fn parallel_for,
                                        void *context); /* NULL: the default again */

/* Names. */
ATTUNE_API const char *attune_last_error(void); /* of this thread; "" if none */
ATTUNE_API const char *attune_status_string(attune_status status);
ATTUNE_API const char *attune_dtype_string(attune_dtype dtype);
ATTUNE_API const char *attune_version(void);
ATTUNE_API const char *attune_isa(
    void); /* the ISA that dispatch uses: sse41, avx2, avx512 … (ATTUNE_ISA is a ceiling) */

/* Multi-head attention: Y = concat_h(attention(X_q W^Q_h, X_kv W^K_h, X_kv W^V_h)) W^O, each with an optional bias.
 * d_model_q/kv are the features of the inputs, d_out those of the output. */
typedef struct attune_mha attune_mha;

/* How a weight matrix is stored: [in, out] as in y = x W, or [out, in] as PyTorch's Linear keeps it. */
typedef enum attune_weight_layout ATTUNE_ANY_INT {
    ATTUNE_WEIGHT_IN_OUT = 0,
    ATTUNE_WEIGHT_OUT_IN = 1
} attune_weight_layout;

typedef struct attune_mha_config {
    size_t struct_size; /* set by attune_mha_config_init */
    int64_t d_model;    /* features of the queries' input */
    int64_t d_model_kv; /* features of the keys' and values' input; 0: d_model */
    int64_t d_out;      /* features of the output; 0: d_model */
    int64_t Hq, Hkv;    /* Hkv 0: Hq */
    int64_t dk, dv;     /* per head; 0: d_model / Hq */
    attune_weight_layout layout;
} attune_mha_config;

/* Pointers to the parameters; they are packed once by attune_mha_create and need not outlive it. Matrices are dense
 * f32. wq: d_model x Hq*dk, wk: d_model_kv x Hkv*dk, wv: d_model_kv x Hkv*dv, wo: Hq*dv x d_out (or their transposes,
 * by layout). Where a *_heads pointer is given instead, it lists one matrix per head: wq_heads[h] is d_model x dk,
 * wo_heads[h] is dv x d_out. Biases may be NULL. */
typedef struct attune_mha_weights {
    size_t struct_size; /* set by attune_mha_weights_init */
    const float *wq, *wk, *wv, *wo;
    const float *const *wq_heads, *const *wk_heads, *const *wv_heads, *const *wo_heads;
    const float *bq, *bk, *bv, *bo;
} attune_mha_weights;

/* One call of the module. Inputs x_q [B, N, d_model], x_kv [B, M, d_model_kv], output y [B, N, d_out]: as attune_tensor
 * with shape {B, 1, rows, features}; the feature stride must be 1. `problem` (optional) carries causal, offset, window,
 * scale, the flags for mask, bias, kv_len, …; its sizes are ignored. `extras` (optional) carries the tensors that these
 * flags ask for, lse and scores. */
typedef struct attune_mha_call {
    size_t struct_size; /* set by attune_mha_call_init */
    attune_tensor x_q, x_kv, y;
    const attune_problem *problem;
    const attune_tensors *extras;
} attune_mha_call;

ATTUNE_API void attune_mha_config_init(attune_mha_config *config);
ATTUNE_API void attune_mha_weights_init(attune_mha_weights *weights);
ATTUNE_API void attune_mha_call_init(attune_mha_call *call);
ATTUNE_API attune_status attune_mha_create(const attune_mha_config *config, const attune_mha_weights *weights,
                                           attune_mha **mha);
/* Reads the matrices from a .safetensors file; names as in attune_mha_weights ("wq" …) are looked up through `names`, a
 * list of 8 strings in the order wq wk wv wo bq bk bv bo; a NULL name means: no such parameter (biases only). */
ATTUNE_API attune_status attune_mha_load(const attune_mha_config *config, const char *safetensors_path,
                                         const char *const names[8], attune_mha **mha);
ATTUNE_API void attune_mha_destroy(attune_mha *mha);
ATTUNE_API attune_status attune_mha_workspace(const attune_mha *mha, const attune_mha_call *call, size_t *bytes);
ATTUNE_API attune_status attune_mha_run(const attune_mha *mha, const attune_mha_call *call, void *workspace,
                                        size_t workspace_size);

#ifdef __cplusplus
}
#endif
#endif
