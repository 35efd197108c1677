#include "toy_kernels.h"

static __global__ void scale_kernel(int *data, int count, int factor, int term)
{
    int i = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    if (i < count) {
        data[i] = data[i] * factor + term;
    }
}

cudaError_t toy_scale(int *data, int count, int factor, int term, cudaStream_t stream)
{
    return simgpu_launch(scale_kernel, (unsigned)(count + 63) / 64, 64, stream, data,
                         count, factor, term);
}

static __global__ void sum_kernel(int *out, const int *data)
{
    __shared__ int partial[4];
    int thread = (int)threadIdx.x;
    int sum = data[blockIdx.x * blockDim.x + threadIdx.x];
    for (int step = warpSize / 2; step > 0; step /= 2) {
        sum += __shfl_xor_sync(0xffffffffu, sum, step);
    }
    if (thread % warpSize == 0) {
        partial[thread / warpSize] = sum;
    }
    __syncthreads();
    if (thread == 0) {
        out[blockIdx.x] = partial[0] + partial[1] + partial[2] + partial[3];
    }
    __syncthreads();
    if (__ballot_sync(0xffffffffu, thread % 2) != 0xaaaaaaaau) {
        out[blockIdx.x] = -1;
    }
}

cudaError_t toy_sum(int *out, const int *data, int blocks, cudaStream_t stream)
{
    return simgpu_launch_block(sum_kernel, (unsigned)blocks, 128, 0, stream, out, data);
}

static __global__ void tree_kernel(int *out, const int *data, int skip_barrier)
{
    int *sums = static_cast<int *>(simgpu_dynamic_shared());
    unsigned thread = threadIdx.x;
    sums[thread] = data[blockIdx.x * blockDim.x + thread];
    for (unsigned step = blockDim.x / 2; step > 0; step /= 2) {
        if (!skip_barrier || step != 16) {
            __syncthreads();
        }
        if (thread < step) {
            sums[thread] += sums[thread + step];
        }
    }
    if (thread == 0) {
        out[blockIdx.x] = sums[0];
    }
}

cudaError_t toy_tree(int *out, const int *data, int blocks, int skip_barrier,
                     cudaStream_t stream)
{
    return simgpu_launch_block(tree_kernel, (unsigned)blocks, 128, 128 * sizeof(int),
                               stream, out, data, skip_barrier);
}

static __global__ void count_kernel(int *out)
{
    atomicAdd(out, 1);
}

cudaError_t toy_count(int *out, cudaStream_t stream)
{
    return simgpu_launch(count_kernel, 4, 64, stream, out);
}

static __global__ void shuffle_kernel(int *up, int *down, int *by_xor, int *idx)
{
    int lane = (int)threadIdx.x;
    up[lane] = __shfl_up_sync(0xffffffffu, lane, 1, 8);
    down[lane] = __shfl_down_sync(0xffffffffu, lane, 1, 8);
    by_xor[lane] = __shfl_xor_sync(0xffffffffu, lane, 1, 8);
    idx[lane] = __shfl_sync(0xffffffffu, lane, 9, 8);
}

cudaError_t toy_shuffle(int *up, int *down, int *by_xor, int *idx, cudaStream_t stream)
{
    return simgpu_launch_block(shuffle_kernel, 1, 32, 0, stream, up, down, by_xor, idx);
}

static __global__ void diverge_kernel()
{
    if (threadIdx.x < 16) {
        __syncthreads();
    } else {
        (void)__shfl_sync(0xffffffffu, 1, 0);
    }
}

cudaError_t toy_diverge(cudaStream_t stream)
{
    return simgpu_launch_block(diverge_kernel, 1, 32, 0, stream);
}

static __global__ void plain_barrier_kernel()
{
    __syncthreads();
}

cudaError_t toy_plain_barrier(cudaStream_t stream)
{
    return simgpu_launch(plain_barrier_kernel, 1, 1, stream);
}

static __global__ void nothing_kernel()
{
}

cudaError_t toy_nothing(unsigned block, size_t shared_bytes, cudaStream_t stream)
{
    return simgpu_launch_block(nothing_kernel, 1, block, shared_bytes, stream);
}

cudaError_t toy_allow_shared(int bytes)
{
    return cudaFuncSetAttribute(nothing_kernel,
                                cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
}

static __global__ void store_kernel(char *data, long at)
{
    data[at] = 1;
}

cudaError_t toy_store(char *data, long at, cudaStream_t stream)
{
    return simgpu_launch(store_kernel, 1, 1, stream, data, at);
}
