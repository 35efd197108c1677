/* How a kernel is started: the one place that knows both what is nvcc's own and the
 * stand-in that runs kernels on the host (tests/simgpu/). */
#ifndef CP_CUDA_LAUNCH_H
#define CP_CUDA_LAUNCH_H

#include <cuda_runtime.h>

#include "cuda_check.h"
#include "tensor/view.h"

/* Before a loop: arrays that it indexes are to stay in registers. */
#ifdef __CUDACC__
#define CP_CUDA_UNROLL _Pragma("unroll")
#else
#define CP_CUDA_UNROLL
#endif

/* The host reads it at any time. */
__device__ inline void cp_cuda_tell_host(uint64_t *at, uint64_t value)
{
#ifdef __CUDACC__
    __threadfence_system();
    *(volatile uint64_t *)at = value;
#else
    __atomic_store_n(at, value, __ATOMIC_RELEASE);
#endif
}

/* With at most 2^31 - 1 blocks. No block: no launch. `waits`: threads of a block wait for
 * each other, which the stand-in has to know beforehand. */
template <bool waits, class... Params, class... Args>
enum cp_code cp_cuda_launch_as(void (*kernel)(Params...), int64_t grid, unsigned block,
                               struct cp_stream *stream, const Args &...args)
{
    if (grid == 0) {
        return CP_OK;
    }
    if (grid > INT32_MAX) {
        return cp_fail(CP_ERR_UNSUPPORTED,
                       "a CUDA kernel of %lld blocks; at most %d can be launched",
                       (long long)grid, INT32_MAX);
    }
    const dim3 blocks((unsigned)grid), threads(block);
    cudaStream_t on = (cudaStream_t)stream;
#ifdef __CUDACC__
    kernel<<<blocks, threads, 0, on>>>(Params(args)...);
    return cp_cuda_check(cudaGetLastError(), "launching a CUDA kernel");
#else
    return cp_cuda_check(
        waits ? simgpu_launch_block(kernel, blocks, threads, 0, on, Params(args)...)
              : simgpu_launch(kernel, blocks, threads, on, Params(args)...),
        "launching a CUDA kernel");
#endif
}

/* Kernels whose threads do not wait for each other. */
template <class... Params, class... Args>
enum cp_code cp_cuda_launch(void (*kernel)(Params...), int64_t grid, unsigned block,
                            struct cp_stream *stream, const Args &...args)
{
    return cp_cuda_launch_as<false>(kernel, grid, block, stream, args...);
}

/* Kernels whose threads do. */
template <class... Params, class... Args>
enum cp_code cp_cuda_launch_waiting(void (*kernel)(Params...), int64_t grid,
                                    unsigned block, struct cp_stream *stream,
                                    const Args &...args)
{
    return cp_cuda_launch_as<true>(kernel, grid, block, stream, args...);
}

#endif
