/* How a kernel is started: the one place that knows both what is nvcc's own and the
 * stand-in that runs kernels on the host (tests/simgpu/). */
#ifndef CP_CUDA_LAUNCH_H
#define CP_CUDA_LAUNCH_H

#include <cuda_runtime.h>

#include "cuda_check.h"
#include "tensor/view.h"

/* Before a loop: arrays that it indexes are to stay in registers; or unrolled so far. */
#ifdef __CUDACC__
#define CP_CUDA_PRAGMA(text) _Pragma(#text)
#define CP_CUDA_UNROLL _Pragma("unroll")
#define CP_CUDA_UNROLL_BY(times) CP_CUDA_PRAGMA(unroll(times))
#else
#define CP_CUDA_UNROLL
#define CP_CUDA_UNROLL_BY(times)
#endif

/* The shared memory that a launch asks for, aligned to 128 bytes. */
__device__ inline char *cp_cuda_shared()
{
#ifdef __CUDACC__
    extern __shared__ __align__(128) char cp_cuda_shared_bytes[];
    return cp_cuda_shared_bytes;
#else
    return (char *)simgpu_dynamic_shared();
#endif
}

/* What a launch is made of besides the kernel and its arguments. */
struct cp_cuda_shape {
    int64_t grid;          /* at most 2^31 - 1 blocks; none: no launch */
    unsigned block;        /* threads */
    unsigned shared_bytes; /* what cp_cuda_shared() has */
};

/* `waits`: threads of a block wait for each other, which the stand-in has to know
 * beforehand. */
template <bool waits, class... Params, class... Args>
enum cp_code cp_cuda_launch_as(void (*kernel)(Params...), const cp_cuda_shape &shape,
                               struct cp_stream *stream, const Args &...args)
{
    constexpr unsigned WITHOUT_ASKING = 48 << 10;
    if (shape.grid == 0) {
        return CP_OK;
    }
    if (shape.grid > INT32_MAX) {
        return cp_fail(CP_ERR_UNSUPPORTED,
                       "a CUDA kernel of %lld blocks; at most %d can be launched",
                       (long long)shape.grid, INT32_MAX);
    }
    if (shape.shared_bytes > WITHOUT_ASKING) {
        CP_TRY(cp_cuda_check(
            cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                 (int)shape.shared_bytes),
            "asking for a CUDA kernel's shared memory"));
    }
    const dim3 blocks((unsigned)shape.grid), threads(shape.block);
    cudaStream_t on = (cudaStream_t)stream;
#ifdef __CUDACC__
    kernel<<<blocks, threads, shape.shared_bytes, on>>>(Params(args)...);
    return cp_cuda_check(cudaGetLastError(), "launching a CUDA kernel");
#else
    return cp_cuda_check(
        waits ? simgpu_launch_block(kernel, blocks, threads, shape.shared_bytes, on,
                                    Params(args)...)
              : simgpu_launch(kernel, blocks, threads, on, Params(args)...),
        "launching a CUDA kernel");
#endif
}

/* Kernels whose threads do not wait for each other. */
template <class... Params, class... Args>
enum cp_code cp_cuda_launch(void (*kernel)(Params...), int64_t grid, unsigned block,
                            struct cp_stream *stream, const Args &...args)
{
    return cp_cuda_launch_as<false>(kernel, {grid, block, 0}, stream, args...);
}

/* Kernels whose threads do. */
template <class... Params, class... Args>
enum cp_code cp_cuda_launch_waiting(void (*kernel)(Params...), int64_t grid,
                                    unsigned block, struct cp_stream *stream,
                                    const Args &...args)
{
    return cp_cuda_launch_as<true>(kernel, {grid, block, 0}, stream, args...);
}

/* The same with shared memory of their own. */
template <class... Params, class... Args>
enum cp_code cp_cuda_launch_shared(void (*kernel)(Params...),
                                   const cp_cuda_shape &shape, struct cp_stream *stream,
                                   const Args &...args)
{
    return cp_cuda_launch_as<true>(kernel, shape, stream, args...);
}

#endif
