/* What torch's attention ops can do, as a table, and how each is called. */
#ifndef CP_CUDA_TORCH_OP_H
#define CP_CUDA_TORCH_OP_H

#include <stddef.h>

#include "kernel/kernel.h"
#include "torch_abi.h"

/* Which keys of a block its rows see. */
enum cp_torch_sight {
    CP_TORCH_SEES_ALL,
    CP_TORCH_SEES_DIAGONAL, /* as many rows as keys, row i sees keys 0 to i */
    CP_TORCH_SEES_PART,
};

/* What decides whether an op can answer a block. */
struct cp_torch_block {
    enum cp_dtype dtype;
    int64_t head_dim, value_dim;
    int64_t group;  /* query heads of each key/value head; 0: not equally many */
    int generation; /* of the GPU: 80 for sm_80 */
    enum cp_torch_sight sight;
    bool is_aligned; /* rows are 16-byte words, numbers side by side, none backwards */
    bool has_mask;
};

enum { CP_TORCH_RESULTS = 7 };

/* What an op gave, until cp_torch_answer_free. Its memory is torch's, and may be used by
 * what the stream of the call has been given before the free. */
struct cp_torch_answer {
    AtenTensorHandle held[CP_TORCH_RESULTS]; /* out, lse, and what is of no use */
    struct cp_view out; /* (B, rows, heads, Dv), dtype of the call */
    struct cp_view lse; /* (B, rows or more, heads, 1), natural log, dtype of sums */
};

struct cp_torch_op {
    const char *name;
    unsigned dtypes;  /* bits 1 << enum cp_dtype */
    int64_t most_dim; /* of heads and of values */
    int oldest;       /* generation */
    bool takes_groups, takes_other_value_dim;
    /* Fills `held`. The three tensors are borrowed. 0, or torch's error. */
    AOTITorchError (*run)(const struct cp_torch *torch, const AtenTensorHandle qkv[3],
                          bool is_causal, double scale,
                          AtenTensorHandle held[CP_TORCH_RESULTS]);
};

/* NULL where the op takes the block; otherwise why not: "it takes no mask". */
const char *cp_torch_op_refuses(const struct cp_torch_op *op,
                                const struct cp_torch_block *block);

/* The best op that takes the block, or NULL, and then each one's reason in `why`, which
 * may be NULL. */
const struct cp_torch_op *cp_torch_op_choose(const struct cp_torch_block *block,
                                             char *why, size_t why_bytes);

/* Answers a block that the op takes, on torch's current stream of the device. */
CP_NODISCARD enum cp_code
cp_torch_op_run(const struct cp_torch *torch, const struct cp_torch_op *op,
                struct cp_torch_device device, const struct cp_attend_args *args,
                bool is_causal, struct cp_torch_answer *answer);
void cp_torch_answer_free(const struct cp_torch *torch, struct cp_torch_answer *answer);

#endif
