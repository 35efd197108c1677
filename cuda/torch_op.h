/* What torch's attention ops can do, as a table, and how each is called. */
#ifndef CP_CUDA_TORCH_OP_H
#define CP_CUDA_TORCH_OP_H

#include <stddef.h>

#include "kernel/kernel.h"
#include "torch_abi.h"

/* What decides whether an op can answer a block, of which each row sees all keys or which
 * is the diagonal of equal lengths (causal_cut.h). */
struct cp_torch_block {
    enum cp_dtype dtype;
    int64_t head_dim, value_dim, rows, keys;
    int64_t group;         /* query heads of each key/value head; 0: not equally many */
    int generation;        /* of the GPU: 80 for sm_80 */
    int64_t cudnn_version; /* as in struct cp_torch */
    enum cp_backend backend; /* of the call: its own op goes before the others */
    bool is_aligned; /* rows are 16-byte words, numbers side by side, none backwards or
                        repeated */
    bool has_mask;
    bool is_gradient; /* its gradients are asked for */
    bool has_dlse;    /* as in struct cp_grad_args */
};

/* What a gradient is given. NOTHING is a tensor without anything: torch's way to leave
 * one out. */
enum {
    CP_TORCH_Q = 0,
    CP_TORCH_K,
    CP_TORCH_V,
    CP_TORCH_DOUT,
    CP_TORCH_OUT,
    CP_TORCH_LSE,
    CP_TORCH_NOTHING,
    CP_TORCH_GIVEN
};

enum { CP_TORCH_RESULTS = 7, CP_TORCH_GRADS = 4 };

struct cp_torch_op {
    const char *name;
    enum cp_backend backend;   /* that is named after it */
    unsigned dtypes;           /* bits 1 << enum cp_dtype */
    int64_t most_dim;          /* of heads and of values */
    int64_t least_length;      /* rows, and keys */
    int oldest;                /* generation */
    int64_t oldest_cudnn;      /* 0: needs none */
    int64_t grad_lse_multiple; /* a gradient's lse has a multiple of so many rows */
    bool takes_groups, takes_other_value_dim;
    bool
        has_gradient_gap; /* none for heads of 193 to 224 where shared memory is short */
    /* Fills `held` with out, lse and what is of no use. The three tensors are borrowed. 0,
     * or torch's error. */
    AOTITorchError (*run)(const struct cp_torch *torch, const AtenTensorHandle qkv[3],
                          bool is_causal, double scale,
                          AtenTensorHandle held[CP_TORCH_RESULTS]);
    /* (optional) Fills `held` with dq, dk, dv and what is of no use, from
     * given[CP_TORCH_GIVEN], borrowed. */
    AOTITorchError (*gradient)(const struct cp_torch *torch,
                               const AtenTensorHandle *given,
                               const struct cp_grad_args *args, bool is_causal,
                               AtenTensorHandle held[CP_TORCH_GRADS]);
};

/* NULL where the op takes the block; otherwise why not: "it takes no mask". */
const char *cp_torch_op_refuses(const struct cp_torch_op *op,
                                const struct cp_torch_block *block);

/* The op of the block's backend where that takes it, or the best that does, or NULL, and then each one's reason in `why`, which
 * may be NULL. */
const struct cp_torch_op *cp_torch_op_choose(const struct cp_torch_block *block,
                                             char *why, size_t why_bytes);

#endif
