/* CUDA's errors as ours. An error is taken back from the runtime when it is converted,
 * so that the next call does not report it again. */
#ifndef CP_CUDA_CUDA_CHECK_H
#define CP_CUDA_CUDA_CHECK_H

#include <cuda_runtime.h>

#include "base/status.h"

/* `what` was asked of the runtime: "cudaEventRecord for lane 1". */
static inline enum cp_code cp_cuda_check(cudaError_t error, const char *what)
{
    if (error == cudaSuccess) {
        return CP_OK;
    }
    (void)cudaGetLastError();
    return cp_fail(
        error == cudaErrorMemoryAllocation ? CP_ERR_NO_MEMORY : CP_ERR_DEVICE,
        "%s failed: %s (%s)", what, cudaGetErrorString(error), cudaGetErrorName(error));
}

#endif
