/* The instructions of tensor cores and of copies that do not wait: all PTX of attention. On
 * the host the simulated GPU does what PTX says of each (tests/simgpu/sim_warp.c).
 *
 * A warp has its numbers in fragments. With g = lane / 4 and t = lane % 4 a lane holds
 *   of a (16 x 16): rows g, g + 8, g, g + 8 at columns 2 t and 2 t + 1, then 8 further;
 *   of b (16 x 8):  column g at rows 2 t and 2 t + 1, then 8 further;
 *   of a sum (16 x 8): row g at columns 2 t and 2 t + 1, then row g + 8.
 * Two numbers of T are one register, the first in its lower half. */
#ifndef CP_CUDA_MMA_CUH
#define CP_CUDA_MMA_CUH

#include <type_traits>

#include "number.cuh"

/* sum += a b */
template <class T>
__device__ inline void cp_mma(float (&sum)[4], const uint32_t (&a)[4], uint32_t b0,
                              uint32_t b1)
{
    constexpr bool IS_BF16 = std::is_same_v<T, cp_bf16>;
#ifdef __CUDACC__
    if constexpr (IS_BF16) {
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
                     "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                     : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    } else {
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
                     "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                     : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    }
#else
    const uint32_t b[2] = {b0, b1};
    simgpu_mma(IS_BF16 ? SIMGPU_MMA_BF16 : SIMGPU_MMA_F16, sum, a, b);
#endif
}

/* Four matrices of 8 x 8 from shared memory. Lane 8 m + r says where row r of matrix m is:
 * 16 bytes, aligned. Each lane gets of each matrix row g at columns 2 t and 2 t + 1, or,
 * transposed, column g at these rows. */
template <bool IS_TRANSPOSED>
__device__ inline void cp_load_matrices(uint32_t (&to)[4], const char *row)
{
#ifdef __CUDACC__
    uint32_t at = (uint32_t)__cvta_generic_to_shared(row);
    if constexpr (IS_TRANSPOSED) {
        asm volatile(
            "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
            : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
            : "r"(at));
    } else {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                     : "r"(at));
    }
#else
    uint4 words{};
    if (simgpu_is_matrix_row(row)) {
        words = *(const uint4 *)row;
    }
    const uint32_t bytes[4] = {words.x, words.y, words.z, words.w};
    simgpu_load_matrices(to, bytes, IS_TRANSPOSED);
#endif
}

/* BYTES, 4, 8 or 16, to shared memory, both sides aligned to them; zeros, and nothing is
 * read, where `is_there` is false. It is there when the thread has waited for it. */
template <int BYTES>
__device__ inline void cp_copy_async(char *to, const char *from, bool is_there)
{
#ifdef __CUDACC__
    uint32_t at = (uint32_t)__cvta_generic_to_shared(to);
    if constexpr (BYTES == 16) { /* past the first cache */
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                     :
                     : "r"(at), "l"(from), "r"(is_there ? BYTES : 0)
                     : "memory");
    } else {
        asm volatile("cp.async.ca.shared.global [%0], [%1], %3, %2;"
                     :
                     : "r"(at), "l"(from), "r"(is_there ? BYTES : 0), "n"(BYTES)
                     : "memory");
    }
#else
    simgpu_copy_async(to, from, BYTES, is_there ? BYTES : 0);
#endif
}

/* What a thread has copied since the last time becomes a group. */
__device__ inline void cp_commit_copies()
{
#ifdef __CUDACC__
    asm volatile("cp.async.commit_group;" ::: "memory");
#else
    simgpu_commit_copies();
#endif
}

/* All groups of the thread but the NEWEST are there. Other threads see them behind a
 * barrier. */
template <int NEWEST> __device__ inline void cp_wait_for_copies()
{
#ifdef __CUDACC__
    asm volatile("cp.async.wait_group %0;" ::"n"(NEWEST) : "memory");
#else
    simgpu_wait_for_copies(NEWEST);
#endif
}

/* 2^x to about two units in the last place; 0 where x is -inf. */
__device__ inline float cp_exp2(float x)
{
#ifdef __CUDACC__
    float power;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x));
    return power;
#else
    return exp2f(x);
#endif
}

/* Both rounded to T, `low` in the lower half. */
template <class T> __device__ inline uint32_t cp_pack(float low, float high)
{
#ifdef __CUDACC__
    uint32_t pair;
    if constexpr (std::is_same_v<T, cp_bf16>) {
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    } else {
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    }
    return pair;
#else
    T a, b;
    cp_narrow(low, &a);
    cp_narrow(high, &b);
    return (uint32_t)a.bits | (uint32_t)b.bits << 16;
#endif
}

#endif
