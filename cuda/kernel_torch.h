/* torch's attention ops as a kernel. */
#ifndef CP_CUDA_KERNEL_TORCH_H
#define CP_CUDA_KERNEL_TORCH_H

#include "kernel/kernel.h"

/* Available where the process has loaded torch with CUDA. Its layouts are those of the
 * plain kernel; what torch's ops do not take goes to the best of our own kernels. */
extern const struct cp_kernel_ops cp_kernel_torch_ops;

#endif
