/* The forward kernel with AVX-512: 32 registers hold 8 x 3 vectors of sums, three of queries and the broadcasts. */
#include <immintrin.h>

#include "kernel/kernel_cpu.h"

enum { LANES = 16, VECS = 3, ROWS = 8 };
#define WORD 1

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
    return _mm512_fmadd_ps(a, b, sum);
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

/* Is "avx512bf16", next below in the list, the faster kernel for bfloat16? Where its instruction is slow it is not. */
static bool leaves_bfloat16(void)
{
    return cp_kernel_cpu_has_avx512bf16() && __builtin_cpu_is("amd");
}

static enum cp_code describe(enum cp_dtype dtype, int64_t head_dim, int64_t value_dim,
                             struct cp_format *out)
{
    if (dtype != CP_DTYPE_FLOAT32 && dtype != CP_DTYPE_BFLOAT16 &&
        dtype != CP_DTYPE_FLOAT16) {
        return cp_fail(CP_ERR_UNSUPPORTED,
                       "kernel \"avx512\" takes float32, bfloat16 and float16, not %s",
                       cp_dtype_name(dtype));
    }
    if (dtype == CP_DTYPE_BFLOAT16 && leaves_bfloat16()) {
        return cp_fail(
            CP_ERR_UNSUPPORTED,
            "kernel \"avx512\" leaves bfloat16 to \"avx512bf16\" on this CPU");
    }
    return describe_format(CP_FORMAT_AVX512, dtype, head_dim, value_dim, out);
}

const struct cp_kernel_ops cp_kernel_avx512_ops = {
    .name = "avx512",
    .abi = CP_KERNEL_ABI,
    .is_available = cp_kernel_cpu_has_avx512,
    .describe = describe,
    .pack_k = pack_k,
    .pack_v = pack_v,
    .attend = attend,
    .finish = finish,
    .delta = cp_kernel_generic_delta,
    .grad = cp_kernel_generic_grad,
};
