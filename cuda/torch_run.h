/* One block by an op of torch. Tensors that torch makes are in memory of its allocator,
 * which may be used by what the stream of the call has been given before the free. */
#ifndef CP_CUDA_TORCH_RUN_H
#define CP_CUDA_TORCH_RUN_H

#include "cuda_api.h"
#include "torch_op.h"

/* What an op gave, until cp_torch_answer_free. */
struct cp_torch_answer {
    AtenTensorHandle held[CP_TORCH_RESULTS];
    struct cp_view out; /* (B, rows, heads, Dv), dtype of the call */
    struct cp_view lse; /* (B, rows or more, heads, 1), natural log, dtype of sums */
};

/* Answers a block that the op takes, on torch's current stream of the device. */
CP_NODISCARD enum cp_code
cp_torch_op_run(const struct cp_torch *torch, const struct cp_torch_op *op,
                struct cp_torch_device device, const struct cp_attend_args *args,
                bool is_causal, struct cp_torch_answer *answer);
void cp_torch_answer_free(const struct cp_torch *torch, struct cp_torch_answer *answer);

/* The gradients of a block, in two steps, until cp_torch_gradient_free. */
struct cp_torch_gradient {
    AtenTensorHandle given[CP_TORCH_GIVEN], held[CP_TORCH_GRADS];
    struct cp_stand_in_args stand_in; /* what the op is to be given as out and lse */
    struct cp_view dq, dk, dv;        /* as q, k and v, for this block alone */
};

/* Makes `given`. cp_cuda_stand_in has to follow, on torch's current stream. */
CP_NODISCARD enum cp_code cp_torch_gradient_begin(const struct cp_torch *torch,
                                                  const struct cp_torch_op *op,
                                                  struct cp_torch_device device,
                                                  const struct cp_grad_args *args,
                                                  struct cp_torch_gradient *gradient);
/* Makes dq, dk and dv. */
CP_NODISCARD enum cp_code cp_torch_gradient_run(const struct cp_torch *torch,
                                                const struct cp_torch_op *op,
                                                const struct cp_grad_args *args,
                                                bool is_causal,
                                                struct cp_torch_gradient *gradient);
/* Also after either has failed. */
void cp_torch_gradient_free(const struct cp_torch *torch,
                            struct cp_torch_gradient *gradient);

#endif
