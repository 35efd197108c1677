/* The vector operations of tile_simd.h in AVX-512: 32 registers hold 8 x 3 vectors of sums, three of queries and the
 * broadcasts. WORD 2 takes AVX-512 BF16. */
#ifndef CP_KERNEL_CPU_VEC_AVX512_H
#define CP_KERNEL_CPU_VEC_AVX512_H

#include "kernel/cpu/lanes8.h"

enum { LANES = 16, VECS = 3, ROWS = 8 };

typedef __m512 vec;

CP_INLINE vec vec_load(const float *from)
{
    return _mm512_loadu_ps(from);
}

CP_INLINE void vec_store(float *to, vec a)
{
    _mm512_storeu_ps(to, a);
}

CP_INLINE vec vec_set(float a)
{
    return _mm512_set1_ps(a);
}

CP_INLINE vec vec_broadcast(const float *from)
{
    return _mm512_set1_ps(*from);
}

CP_INLINE vec vec_add(vec a, vec b)
{
    return _mm512_add_ps(a, b);
}

CP_INLINE vec vec_sub(vec a, vec b)
{
    return _mm512_sub_ps(a, b);
}

CP_INLINE vec vec_mul(vec a, vec b)
{
    return _mm512_mul_ps(a, b);
}

CP_INLINE vec vec_fma(vec a, vec b, vec c)
{
    return _mm512_fmadd_ps(a, b, c);
}

CP_INLINE vec vec_fms(vec a, vec b, vec c)
{
    return _mm512_fmsub_ps(a, b, c);
}

CP_INLINE vec vec_max(vec a, vec b)
{
    return _mm512_max_ps(a, b);
}

CP_INLINE vec vec_scale_exp(vec n, vec p, vec a, vec b)
{
    __m512i shift = _mm512_slli_epi32(_mm512_castps_si512(n), 23);
    __mmask16 is_kept = _mm512_cmp_ps_mask(a, b, _CMP_NLT_UQ);
    return _mm512_castsi512_ps(
        _mm512_maskz_add_epi32(is_kept, shift, _mm512_castps_si512(p)));
}

CP_INLINE vec vec_keep(vec a, vec b, vec c, vec d)
{
    return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_GE_OQ), d, c);
}

CP_INLINE vec vec_see(const char *bools, vec a, vec b)
{
    __m128i bytes = _mm_loadu_si128((const __m128i *)(const void *)bools);
    return _mm512_mask_blend_ps(_mm_test_epi8_mask(bytes, bytes), b, a);
}

#if WORD == 1
CP_INLINE vec vec_dot(vec sum, vec a, vec b)
{
    return _mm512_fmadd_ps(a, b, sum);
}
#else
CP_INLINE vec vec_dot(vec sum, vec a, vec b)
{
    return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b);
}

/* Word i: the rounded lane i of `even` below that of `odd`. */
CP_INLINE vec vec_pair(vec even, vec odd)
{
    const __m512i order =
        _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8,
                         23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    __m512i halves = (__m512i)_mm512_cvtne2ps_pbh(odd, even);
    return _mm512_castsi512_ps(_mm512_permutexvar_epi16(order, halves));
}

CP_INLINE void vec_store_words(float *to, vec a)
{
    _mm256_storeu_si256((__m256i *)(void *)to, (__m256i)_mm512_cvtneps_pbh(a));
}
#endif

#endif
