/* What the .cu files offer to C: each function enqueues its work on `stream`, a
 * cudaStream_t of the current device, and returns. Addresses are the device's. */
#ifndef CP_CUDA_CUDA_API_H
#define CP_CUDA_CUDA_API_H

#include "kernel/kernel.h"

#ifdef __cplusplus
extern "C" {
#endif

/* As the entries of struct cp_device_ops (device/device.h). Converting and adding need
 * elements aligned to their size; equal dtypes are moved as bytes from anywhere. */
enum cp_code cp_cuda_copy(const struct cp_view *dst, const struct cp_view *src,
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

/* What another kernel made of a block of keys, to be folded into the plain kernel's
 * state: an answer is a state whose maximum is lse and whose sum is 1. */
struct cp_merge_args {
    struct cp_view out;   /* (B, rows, heads, Dv), dtype of the call */
    struct cp_view lse;   /* (B, rows, heads, 1), natural log, dtype of sums; -inf: the
                             row saw no key */
    struct cp_view state; /* panels of (B, rows, heads, Dv) */
};
enum cp_code cp_cuda_merge(const struct cp_merge_args *args, struct cp_stream *stream);

#ifdef __cplusplus
}
#endif

#endif
