/* The backward kernel for bfloat16 with AVX-512 BF16. Weights and slopes are rounded to bfloat16 where they are
 * multiplied; what exp and the difference of slope and delta are taken of is summed in float32. */
#define WORD 2
#include "kernel/cpu/delta_simd.h"
#include "kernel/cpu/grad_simd.h"
#include "kernel/kernel_cpu.h"

enum cp_code cp_kernel_avx512bf16_delta(const struct cp_delta_args *args,
                                        struct cp_stream *stream)
{
    (void)stream;
    delta(args);
    return CP_OK;
}

enum cp_code cp_kernel_avx512bf16_grad(const struct cp_grad_args *args,
                                       struct cp_stream *stream)
{
    (void)stream;
    grad(args);
    return CP_OK;
}

int64_t cp_kernel_avx512bf16_grad_bytes(int64_t head_dim, int64_t value_dim)
{
    return grad_bytes(head_dim, value_dim);
}
