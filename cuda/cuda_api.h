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

#ifdef __cplusplus
}
#endif

#endif
