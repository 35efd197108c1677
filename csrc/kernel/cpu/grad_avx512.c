/* The backward kernel with AVX-512. "avx512bf16" uses it too: halves are exact in float32, and the scores of its own
 * forward pass differ in their last bits alone, far below the roundings of bfloat16. */
#include "kernel/cpu/delta_simd.h"
#include "kernel/cpu/grad_simd.h"
#include "kernel/kernel_cpu.h"

enum cp_code cp_kernel_avx512_delta(const struct cp_delta_args *args,
                                    struct cp_stream *stream)
{
    (void)stream;
    delta(args);
    return CP_OK;
}

enum cp_code cp_kernel_avx512_grad(const struct cp_grad_args *args,
                                   struct cp_stream *stream)
{
    (void)stream;
    grad(args);
    return CP_OK;
}

int64_t cp_kernel_avx512_grad_bytes(int64_t head_dim, int64_t value_dim)
{
    return grad_bytes(head_dim, value_dim);
}
