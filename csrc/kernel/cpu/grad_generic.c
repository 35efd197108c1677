/* The reference kernel's backward pass, which kernels with panels of their own may use
 * as it is. */
#include "kernel/kernel_cpu.h"

#define CP_REAL_IS_DOUBLE 0
#include "kernel/cpu/generic_grad.h"
#undef CP_REAL_IS_DOUBLE
#define CP_REAL_IS_DOUBLE 1
#include "kernel/cpu/generic_grad.h"

enum cp_code cp_kernel_generic_delta(const struct cp_delta_args *args,
                                     struct cp_stream *stream)
{
    (void)stream;
    if (args->out.dtype == CP_DTYPE_FLOAT64) {
        delta_f64(args);
    } else {
        delta_f32(args);
    }
    return CP_OK;
}

enum cp_code cp_kernel_generic_grad(const struct cp_grad_args *args,
                                    struct cp_stream *stream)
{
    (void)stream;
    if (args->q.dtype == CP_DTYPE_FLOAT64) {
        grad_f64(args);
    } else {
        grad_f32(args);
    }
    return CP_OK;
}

int64_t cp_kernel_generic_grad_bytes(enum cp_dtype dtype, int64_t head_dim,
                                     int64_t value_dim)
{
    return dtype == CP_DTYPE_FLOAT64 ? grad_bytes_f64(head_dim, value_dim)
                                     : grad_bytes_f32(head_dim, value_dim);
}
