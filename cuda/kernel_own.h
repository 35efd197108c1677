/* The own kernel: bfloat16 and float16 on tensor cores, float32 exact, any mask, no torch. */
#ifndef CP_CUDA_KERNEL_OWN_H
#define CP_CUDA_KERNEL_OWN_H

#include "kernel/kernel.h"

/* Takes head dims up to 256. Panels and states are the plain kernel's (kernel_cuda.h), so
 * that blocks of one call may go to either. */
extern const struct cp_kernel_ops cp_kernel_own_ops;

/* attend and grad of the better of our two kernels that takes the call: for those who pass
 * on what they do not take themselves. */
enum cp_code cp_kernel_own_attend(const struct cp_attend_args *args,
                                  struct cp_stream *stream);
enum cp_code cp_kernel_own_grad(const struct cp_grad_args *args,
                                struct cp_stream *stream);

#endif
