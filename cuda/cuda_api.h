/* What the .cu files offer to C: each function enqueues its work on `stream`, a
 * cudaStream_t of the current device, and returns. Addresses are the device's. */
#ifndef CP_CUDA_CUDA_API_H
#define CP_CUDA_CUDA_API_H

#include "kernel/kernel.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Which copies from a peer's memory, or into it, the GPU's copy engine does, beside kernels
 * that go on computing: those in one piece of so many bytes, and planes of so many, of rows of
 * so many. Others are done by a kernel, which begins sooner. INT64_MAX: none. */
struct cp_copy_engine {
    int64_t least_piece, least_plane, least_row;
};

/* As the entries of struct cp_device_ops (device/device.h). Converting and adding need
 * elements aligned to their size; equal dtypes are moved as bytes from anywhere. What is
 * added may be in any dtype that is summed in dst's (cp_dtype_sum). `engine`: NULL for
 * none. */
enum cp_code cp_cuda_copy(const struct cp_copy *copies, int count,
                          const struct cp_copy_engine *engine,
                          struct cp_stream *stream);
enum cp_code cp_cuda_add(const struct cp_view *dst, const struct cp_view *src,
                         struct cp_stream *stream);

/* The plain kernel, as the entries of struct cp_kernel_ops (kernel/kernel.h). Panels
 * hold plain rows: k of D and v of Dv numbers in the call's dtype, the state of Dv
 * outputs, maximum and sum in the dtype of sums. No scratch. */
enum cp_code cp_cuda_attend(const struct cp_attend_args *args,
                            struct cp_stream *stream);
enum cp_code cp_cuda_finish(const struct cp_finish_args *args,
                            struct cp_stream *stream);
enum cp_code cp_cuda_delta(const struct cp_delta_args *args, struct cp_stream *stream);
enum cp_code cp_cuda_grad(const struct cp_grad_args *args, struct cp_stream *stream);

/* The own kernel: the same for calls in float32, bfloat16 and float16 with dims up to
 * CP_OWN_MOST_DIM, on the plain kernel's panels and state. */
enum { CP_OWN_MOST_DIM = 256 };
enum cp_code cp_cuda_own_attend(const struct cp_attend_args *args,
                                struct cp_stream *stream);
enum cp_code cp_cuda_own_grad(const struct cp_grad_args *args,
                              struct cp_stream *stream);

/* What another kernel made of a block of keys, to be folded into the plain kernel's
 * state: an answer is a state whose maximum is lse and whose sum is 1. */
struct cp_merge_args {
    struct cp_view out;   /* (B, rows, heads, Dv), dtype of the call */
    struct cp_view lse;   /* (B, rows, heads, 1), natural log, dtype of sums; -inf: the
                             row saw no key */
    struct cp_view state; /* panels of (B, rows, heads, Dv) */
    /* As is_first, out and lse of struct cp_attend_args. */
    bool is_first;
    struct cp_view result, result_lse;
};
enum cp_code cp_cuda_merge(const struct cp_merge_args *args, struct cp_stream *stream);

/* `out` and lse for a backward pass that asks for out and makes of it only delta =
 * sum(out * dout): as there is no out to give, the shortest one that has this delta. Rows
 * whose dout is 0 have none (out is 0): a delta that is not 0 there, which the gradient of
 * an lse makes, is lost. In float16 it may overflow where the length of the out that was
 * does, above 65504. */
struct cp_stand_in_args {
    struct cp_view dout;       /* (B, rows, heads, Dv), dtype of the call */
    struct cp_view lse, delta; /* (B, rows, heads, 1), dtype of sums */
    struct cp_view out;        /* as dout; written */
    struct cp_view lse_out; /* as lse, or with more rows; written: lse, and inf, which
                                  makes every weight 0, where that is -inf and in the rows
                                  that are more */
};
enum cp_code cp_cuda_stand_in(const struct cp_stand_in_args *args,
                              struct cp_stream *stream);

/* *count, in memory of the host that the device can write to, becomes one more when the
 * stream comes to it. The host may read it at any time; nothing else may write it. */
enum cp_code cp_cuda_note(uint64_t *count, struct cp_stream *stream);

#ifdef __cplusplus
}
#endif

#endif
