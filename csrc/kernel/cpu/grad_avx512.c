/* The backward kernel with AVX-512. */
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
