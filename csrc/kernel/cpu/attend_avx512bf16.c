/* The forward kernel for bfloat16 with AVX-512 BF16: one instruction adds two products of halves to each float32 sum.
 *
 * Scores are exact products summed in float32. Weights are rounded to bfloat16 where they multiply values; the sum by
 * which the output is divided, and so the LSE, takes them unrounded. The instruction reads subnormals as 0.
 *
 * AMD's Zen 4 and 5 do it at the rate of a float32 multiply-add, so this kernel is near twice as fast as "avx512".
 * Intel's Sapphire Rapids does it at a quarter of that rate (measured), so there it loses; attend_avx512.c decides. */
#include <immintrin.h>

#include "kernel/kernel_cpu.h"

enum { LANES = 16, VECS = 3, ROWS = 8 };
#define WORD 2

#define VEC_INLINE static inline __attribute__((always_inline))

typedef __m512 vec;

VEC_INLINE vec vec_load(const float *from)
{
    return _mm512_loadu_ps(from);
}

VEC_INLINE void vec_store(float *to, vec a)
{
    _mm512_storeu_ps(to, a);
}

VEC_INLINE vec vec_set(float a)
{
    return _mm512_set1_ps(a);
}

VEC_INLINE vec vec_broadcast(const float *from)
{
    return _mm512_set1_ps(*from);
}

VEC_INLINE vec vec_add(vec a, vec b)
{
    return _mm512_add_ps(a, b);
}

VEC_INLINE vec vec_sub(vec a, vec b)
{
    return _mm512_sub_ps(a, b);
}

VEC_INLINE vec vec_mul(vec a, vec b)
{
    return _mm512_mul_ps(a, b);
}

VEC_INLINE vec vec_fma(vec a, vec b, vec c)
{
    return _mm512_fmadd_ps(a, b, c);
}

VEC_INLINE vec vec_fms(vec a, vec b, vec c)
{
    return _mm512_fmsub_ps(a, b, c);
}

VEC_INLINE vec vec_dot(vec sum, vec a, vec b)
{
    return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b);
}

/* Word i: the rounded lane i of `even` below that of `odd`. */
VEC_INLINE vec vec_pair(vec even, vec odd)
{
    const __m512i order =
        _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8,
                         23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    __m512i halves = (__m512i)_mm512_cvtne2ps_pbh(odd, even);
    return _mm512_castsi512_ps(_mm512_permutexvar_epi16(order, halves));
}

VEC_INLINE vec vec_max(vec a, vec b)
{
    return _mm512_max_ps(a, b);
}

VEC_INLINE vec vec_scale_exp(vec n, vec p, vec a, vec b)
{
    __m512i shift = _mm512_slli_epi32(_mm512_castps_si512(n), 23);
    __mmask16 is_kept = _mm512_cmp_ps_mask(a, b, _CMP_NLT_UQ);
    return _mm512_castsi512_ps(
        _mm512_maskz_add_epi32(is_kept, shift, _mm512_castps_si512(p)));
}

VEC_INLINE vec vec_keep(vec a, vec b, vec c, vec d)
{
    return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_GE_OQ), d, c);
}

#include "kernel/cpu/attend_simd.h"

static enum cp_code describe(enum cp_dtype dtype, int64_t head_dim, int64_t value_dim,
                             struct cp_format *out)
{
    if (dtype != CP_DTYPE_BFLOAT16) {
        return cp_fail(CP_ERR_UNSUPPORTED,
                       "kernel \"avx512bf16\" takes bfloat16, not %s",
                       cp_dtype_name(dtype));
    }
    return describe_format(CP_FORMAT_AVX512BF16, dtype, head_dim, value_dim, out);
}

const struct cp_kernel_ops cp_kernel_avx512bf16_ops = {
    .name = "avx512bf16",
    .abi = CP_KERNEL_ABI,
    .is_available = cp_kernel_cpu_has_avx512bf16,
    .describe = describe,
    .pack_k = pack_k,
    .pack_v = pack_v,
    .attend = attend,
    .finish = finish,
    .delta = cp_kernel_generic_delta,
    .grad = cp_kernel_generic_grad,
};
