/* The forward kernel with AVX2: 16 registers hold 4 x 3 vectors of sums, three of queries and one broadcast. */
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
    return describe_format(CP_FORMAT_AVX2, dtype, head_dim, value_dim,
                           cp_kernel_avx2_grad_bytes, out);
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
    .delta = cp_kernel_avx2_delta,
    .grad = cp_kernel_avx2_grad,
};
