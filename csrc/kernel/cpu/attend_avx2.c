/* The forward kernel with AVX2: 16 registers hold 4 x 3 vectors of sums, three of queries and one broadcast. */
#include <immintrin.h>

#include "kernel/kernel_cpu.h"

enum { LANES = 8, VECS = 3, ROWS = 4 };
#define WORD 1

#define VEC_INLINE static inline __attribute__((always_inline))

typedef __m256 vec;

VEC_INLINE vec vec_load(const float *from)
{
    return _mm256_loadu_ps(from);
}

VEC_INLINE void vec_store(float *to, vec a)
{
    _mm256_storeu_ps(to, a);
}

VEC_INLINE vec vec_set(float a)
{
    return _mm256_set1_ps(a);
}

VEC_INLINE vec vec_broadcast(const float *from)
{
    return _mm256_broadcast_ss(from);
}

VEC_INLINE vec vec_add(vec a, vec b)
{
    return _mm256_add_ps(a, b);
}

VEC_INLINE vec vec_sub(vec a, vec b)
{
    return _mm256_sub_ps(a, b);
}

VEC_INLINE vec vec_mul(vec a, vec b)
{
    return _mm256_mul_ps(a, b);
}

VEC_INLINE vec vec_fma(vec a, vec b, vec c)
{
    return _mm256_fmadd_ps(a, b, c);
}

VEC_INLINE vec vec_fms(vec a, vec b, vec c)
{
    return _mm256_fmsub_ps(a, b, c);
}

VEC_INLINE vec vec_dot(vec sum, vec a, vec b)
{
    return _mm256_fmadd_ps(a, b, sum);
}

VEC_INLINE vec vec_max(vec a, vec b)
{
    return _mm256_max_ps(a, b);
}

VEC_INLINE vec vec_scale_exp(vec n, vec p, vec a, vec b)
{
    __m256i shift = _mm256_slli_epi32(_mm256_castps_si256(n), 23);
    __m256i sum = _mm256_add_epi32(shift, _mm256_castps_si256(p));
    return _mm256_andnot_ps(_mm256_cmp_ps(a, b, _CMP_LT_OQ), _mm256_castsi256_ps(sum));
}

VEC_INLINE vec vec_keep(vec a, vec b, vec c, vec d)
{
    return _mm256_blendv_ps(d, c, _mm256_cmp_ps(a, b, _CMP_GE_OQ));
}

#include "kernel/cpu/attend_simd.h"

static enum cp_code describe(enum cp_dtype dtype, int64_t head_dim, int64_t value_dim,
                             struct cp_format *out)
{
    if (dtype != CP_DTYPE_FLOAT32 && dtype != CP_DTYPE_BFLOAT16 &&
        dtype != CP_DTYPE_FLOAT16) {
        return cp_fail(CP_ERR_UNSUPPORTED,
                       "kernel \"avx2\" takes float32, bfloat16 and float16, not %s",
                       cp_dtype_name(dtype));
    }
    return describe_format(CP_FORMAT_AVX2, dtype, head_dim, value_dim, out);
}

const struct cp_kernel_ops cp_kernel_avx2_ops = {
    .name = "avx2",
    .abi = CP_KERNEL_ABI,
    .is_available = cp_kernel_cpu_has_avx2,
    .describe = describe,
    .pack_k = pack_k,
    .pack_v = pack_v,
    .attend = attend,
    .finish = finish,
    .delta = cp_kernel_generic_delta,
    .grad = cp_kernel_generic_grad,
};
