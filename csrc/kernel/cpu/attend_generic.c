/* The reference kernel: attention in plain C for every dtype, mask and shape, and the
 * yardstick of the others.
 *
 * float64 is summed in float64, everything else in float32; two expansions of one
 * template. */
#include "kernel/kernel_cpu.h"

#define CP_REAL_IS_DOUBLE 0
#include "kernel/cpu/generic_attend.h"
#undef CP_REAL_IS_DOUBLE
#define CP_REAL_IS_DOUBLE 1
#include "kernel/cpu/generic_attend.h"

enum {
    MAX_DIM = 65536
}; /* keeps scratch within tens of megabytes and every size within int64_t */

static bool is_available(void)
{
    return true;
}

static enum cp_code describe(enum cp_dtype dtype, int64_t head_dim, int64_t value_dim,
                             struct cp_format *out)
{
    if (!cp_dtype_attends(dtype)) {
        return cp_fail(CP_ERR_UNSUPPORTED, "the generic kernel cannot attend in %s",
                       cp_dtype_name(dtype));
    }
    if (head_dim < 1 || head_dim > MAX_DIM || value_dim < 1 || value_dim > MAX_DIM) {
        return cp_fail(CP_ERR_UNSUPPORTED,
                       "the generic kernel takes head dims from 1 to %d, not %lld (q, "
                       "k) and %lld (v)",
                       MAX_DIM, (long long)head_dim, (long long)value_dim);
    }
    bool is_double = dtype == CP_DTYPE_FLOAT64;
    int64_t bytes = cp_dtype_bytes(cp_dtype_sum(dtype));
    *out = (struct cp_format){
        .id = CP_FORMAT_GENERIC + (is_double ? 1u : 0u),
        .k = {.row_align = 1, .row_bytes = head_dim * bytes},
        .v = {.row_align = 1, .row_bytes = value_dim * bytes},
        .state = {.row_align = 1, .row_bytes = (value_dim + 2) * bytes},
        .scratch_bytes = is_double ? tile_bytes_f64(head_dim, value_dim)
                                   : tile_bytes_f32(head_dim, value_dim),
        .grad_scratch_bytes = cp_kernel_generic_grad_bytes(dtype, head_dim, value_dim),
    };
    return CP_OK;
}

static enum cp_code pack(const struct cp_view *dst, const struct cp_view *src,
                         struct cp_stream *stream)
{
    (void)stream;
    if (src->dtype == CP_DTYPE_FLOAT64) {
        pack_f64(dst, src);
    } else {
        pack_f32(dst, src);
    }
    return CP_OK;
}

static enum cp_code attend(const struct cp_attend_args *args, struct cp_stream *stream)
{
    (void)stream;
    if (args->q.dtype == CP_DTYPE_FLOAT64) {
        attend_f64(args);
    } else {
        attend_f32(args);
    }
    return CP_OK;
}

static enum cp_code finish(const struct cp_finish_args *args, struct cp_stream *stream)
{
    (void)stream;
    if (args->out.dtype == CP_DTYPE_FLOAT64) {
        finish_f64(args);
    } else {
        finish_f32(args);
    }
    return CP_OK;
}

const struct cp_kernel_ops cp_kernel_generic_ops = {
    .name = "generic",
    .abi = CP_KERNEL_ABI,
    .is_available = is_available,
    .describe = describe,
    .pack_k = pack,
    .pack_v = pack,
    .attend = attend,
    .finish = finish,
    .delta = cp_kernel_generic_delta,
    .grad = cp_kernel_generic_grad,
};
