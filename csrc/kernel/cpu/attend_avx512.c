/* The forward kernel with AVX-512: 32 registers hold 8 x 3 vectors of sums, three of queries and the broadcasts. */
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
    return describe_format(CP_FORMAT_AVX512, dtype, head_dim, value_dim,
                           cp_kernel_avx512_grad_bytes, out);
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
    .delta = cp_kernel_avx512_delta,
    .grad = cp_kernel_avx512_grad,
};
