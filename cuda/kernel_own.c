#include "kernel_own.h"

#include "cuda_api.h"
#include "kernel_cuda.h"

static bool takes(enum cp_dtype dtype, int64_t head_dim, int64_t value_dim)
{
    return (dtype == CP_DTYPE_FLOAT32 || dtype == CP_DTYPE_BFLOAT16 ||
            dtype == CP_DTYPE_FLOAT16) &&
           head_dim <= CP_OWN_MOST_DIM && value_dim <= CP_OWN_MOST_DIM;
}

static bool is_available(void)
{
    return cp_kernel_cuda_plain_ops.is_available();
}

static enum cp_code describe(enum cp_dtype dtype, int64_t head_dim, int64_t value_dim,
                             struct cp_format *out)
{
    if (!takes(dtype, head_dim, value_dim)) {
        return cp_fail(
            CP_ERR_UNSUPPORTED,
            "the own CUDA kernel attends in float32, bfloat16 and float16 "
            "with head dims up to %d, not in %s with %lld (q, k) and %lld (v)",
            CP_OWN_MOST_DIM, cp_dtype_name(dtype), (long long)head_dim,
            (long long)value_dim);
    }
    return cp_kernel_cuda_plain_ops.describe(dtype, head_dim, value_dim, out);
}

enum cp_code cp_kernel_own_attend(const struct cp_attend_args *args,
                                  struct cp_stream *stream)
{
    return takes(args->q.dtype, args->q.n[3], args->v.n[3])
               ? cp_cuda_own_attend(args, stream)
               : cp_cuda_attend(args, stream);
}

enum cp_code cp_kernel_own_grad(const struct cp_grad_args *args,
                                struct cp_stream *stream)
{
    return takes(args->q.dtype, args->q.n[3], args->v.n[3])
               ? cp_cuda_own_grad(args, stream)
               : cp_cuda_grad(args, stream);
}

const struct cp_kernel_ops cp_kernel_own_ops = {
    .name = "cuda_own",
    .abi = CP_KERNEL_ABI,
    .is_available = is_available,
    .describe = describe,
    .attend = cp_kernel_own_attend,
    .finish = cp_cuda_finish,
    .delta = cp_cuda_delta,
    .grad = cp_kernel_own_grad,
};
