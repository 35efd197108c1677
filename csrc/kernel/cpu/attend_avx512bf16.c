/* The forward kernel for bfloat16 with AVX-512 BF16: one instruction adds two products of halves to each float32 sum.
 *
 * Scores are exact products summed in float32. Weights are rounded to bfloat16 where they multiply values; the sum by
 * which the output is divided, and so the LSE, takes them unrounded. The instruction reads subnormals as 0.
 *
 * AMD's Zen 4 and 5 do it at the rate of a float32 multiply-add, so this kernel is near twice as fast as "avx512".
 * Intel's Sapphire Rapids does it at a quarter of that rate (measured), so there it loses; attend_avx512.c decides. */
#define WORD 2
#include "kernel/cpu/attend_simd.h"

static enum cp_code describe(enum cp_dtype dtype, int64_t head_dim, int64_t value_dim,
                             struct cp_format *out)
{
    if (dtype != CP_DTYPE_BFLOAT16) {
        return cp_fail(CP_ERR_UNSUPPORTED,
                       "kernel \"avx512bf16\" takes bfloat16, not %s",
                       cp_dtype_name(dtype));
    }
    return describe_format(CP_FORMAT_AVX512BF16, dtype, head_dim, value_dim,
                           cp_kernel_avx512bf16_grad_bytes, out);
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
    .delta = cp_kernel_avx512bf16_delta,
    .grad = cp_kernel_avx512bf16_grad,
};
