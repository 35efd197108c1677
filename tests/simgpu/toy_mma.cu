#include "launch.h"
#include "mma.cuh"
#include "toy_mma.h"

template <class T>
static __global__ void mma_kernel(const uint32_t *a, const uint32_t *b, float *sum)
{
    unsigned lane = threadIdx.x;
    float c[4];
    uint32_t registers[4];
    for (int i = 0; i < 4; i++) {
        c[i] = sum[4 * lane + i];
        registers[i] = a[4 * lane + i];
    }
    cp_mma<T>(c, registers, b[2 * lane], b[2 * lane + 1]);
    for (int i = 0; i < 4; i++) {
        sum[4 * lane + i] = c[i];
    }
}

cudaError_t toy_mma(int is_bf16, const uint32_t *a, const uint32_t *b, float *sum,
                    cudaStream_t stream)
{
    return simgpu_launch_block(is_bf16 ? mma_kernel<cp_bf16> : mma_kernel<cp_f16>, 1,
                               32, 0, stream, a, b, sum);
}

template <bool IS_TRANSPOSED>
static __global__ void load_matrices_kernel(const uint16_t *matrices, uint32_t *out,
                                            int skew)
{
    char *shared = cp_cuda_shared();
    unsigned lane = threadIdx.x;
    std::memcpy(shared + 16 * lane + skew, matrices + 8 * lane, 16);
    __syncthreads();
    uint32_t to[4];
    cp_load_matrices<IS_TRANSPOSED>(to, shared + 16 * lane + skew);
    for (int i = 0; i < 4; i++) {
        out[4 * lane + i] = to[i];
    }
}

cudaError_t toy_load_matrices(int is_transposed, const uint16_t *matrices,
                              uint32_t *out, int skew, cudaStream_t stream)
{
    return simgpu_launch_block(is_transposed ? load_matrices_kernel<true>
                                             : load_matrices_kernel<false>,
                               1, 32, 33 * 16, stream, matrices, out, skew);
}

template <int BYTES>
static __global__ void copy_async_kernel(const char *from, char *out, char *out_second,
                                         int newest)
{
    char *shared = cp_cuda_shared(), *second = shared + 32 * BYTES;
    int lane = (int)threadIdx.x;
    cp_copy_async<BYTES>(shared + BYTES * lane, from + BYTES * lane, lane % 2 == 0);
    cp_commit_copies();
    cp_copy_async<4>(second + 4 * lane, from + 4 * lane, true);
    cp_commit_copies();
    if (newest == 0) {
        cp_wait_for_copies<0>();
    } else if (newest == 1) {
        cp_wait_for_copies<1>();
    }
    __syncthreads();
    std::memcpy(out + BYTES * lane, shared + BYTES * lane, BYTES);
    std::memcpy(out_second + 4 * lane, second + 4 * lane, 4);
}

cudaError_t toy_copy_async(int bytes, const char *from, char *out, char *out_second,
                           int newest, cudaStream_t stream)
{
    return simgpu_launch_block(bytes == 16  ? copy_async_kernel<16>
                               : bytes == 8 ? copy_async_kernel<8>
                                            : copy_async_kernel<4>,
                               1, 32, 32u * 20, stream, from, out, out_second, newest);
}

static __global__ void exp2_kernel(const float *in, float *out, uint32_t *bf16,
                                   uint32_t *f16)
{
    unsigned lane = threadIdx.x;
    out[lane] = cp_exp2(in[lane]);
    bf16[lane] = cp_pack<cp_bf16>(in[lane], out[lane]);
    f16[lane] = cp_pack<cp_f16>(in[lane], out[lane]);
}

cudaError_t toy_exp2(const float *in, float *out, uint32_t *bf16, uint32_t *f16,
                     cudaStream_t stream)
{
    return simgpu_launch_block(exp2_kernel, 1, 32, 0, stream, in, out, bf16, f16);
}
