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

/* Has the event happened? CP_AGAIN: not yet. `what` it stands for: "a batch of NCCL". */
static inline enum cp_code cp_cuda_query(cudaEvent_t event, const char *what)
{
    cudaError_t error = cudaEventQuery(event);
    if (error == cudaErrorNotReady) {
        (void)cudaGetLastError(); /* an answer, not an error; the runtime keeps it */
        return CP_AGAIN;
    }
    return cp_cuda_check(error, what);
}

#endif
