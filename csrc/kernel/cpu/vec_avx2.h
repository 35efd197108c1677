/* The vector operations of tile_simd.h in AVX2: 16 registers hold 4 x 3 vectors of sums, three of queries and one
 * broadcast. */
#ifndef CP_KERNEL_CPU_VEC_AVX2_H
#define CP_KERNEL_CPU_VEC_AVX2_H

#include "kernel/cpu/lanes8.h"

enum { LANES = 8, VECS = 3, ROWS = 4 };

typedef __m256 vec;

CP_INLINE vec vec_load(const float *from)
{
    return _mm256_loadu_ps(from);
}

CP_INLINE void vec_store(float *to, vec a)
{
    _mm256_storeu_ps(to, a);
}

CP_INLINE vec vec_set(float a)
{
    return _mm256_set1_ps(a);
}

CP_INLINE vec vec_broadcast(const float *from)
{
    return _mm256_broadcast_ss(from);
}

CP_INLINE vec vec_add(vec a, vec b)
{
    return _mm256_add_ps(a, b);
}

CP_INLINE vec vec_sub(vec a, vec b)
{
    return _mm256_sub_ps(a, b);
}

CP_INLINE vec vec_mul(vec a, vec b)
{
    return _mm256_mul_ps(a, b);
}

CP_INLINE vec vec_fma(vec a, vec b, vec c)
{
    return _mm256_fmadd_ps(a, b, c);
}

CP_INLINE vec vec_fms(vec a, vec b, vec c)
{
    return _mm256_fmsub_ps(a, b, c);
}

CP_INLINE vec vec_dot(vec sum, vec a, vec b)
{
    return _mm256_fmadd_ps(a, b, sum);
}

CP_INLINE vec vec_max(vec a, vec b)
{
    return _mm256_max_ps(a, b);
}

CP_INLINE vec vec_scale_exp(vec n, vec p, vec a, vec b)
{
    __m256i shift = _mm256_slli_epi32(_mm256_castps_si256(n), 23);
    __m256i sum = _mm256_add_epi32(shift, _mm256_castps_si256(p));
    return _mm256_andnot_ps(_mm256_cmp_ps(a, b, _CMP_LT_OQ), _mm256_castsi256_ps(sum));
}

CP_INLINE vec vec_keep(vec a, vec b, vec c, vec d)
{
    return _mm256_blendv_ps(d, c, _mm256_cmp_ps(a, b, _CMP_GE_OQ));
}

CP_INLINE vec vec_see(const char *bools, vec a, vec b)
{
    __m128i bytes = _mm_loadl_epi64((const __m128i *)(const void *)bools);
    __m128i is_false = _mm_cmpeq_epi8(bytes, _mm_setzero_si128());
    return _mm256_blendv_ps(a, b, _mm256_castsi256_ps(_mm256_cvtepi8_epi32(is_false)));
}

#endif
