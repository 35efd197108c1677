/* torch's attention ops behind the kernel table: a block that one of them takes is
 * answered by it and merged; any other goes to the plain kernel. Panels and states are
 * the plain kernel's, so neither ranks nor blocks need agree who computes. An answer is in
 * memory of torch's own allocator until it is merged. */
#include "kernel_torch.h"

#include <limits.h>

#include "cuda_api.h"
#include "cuda_check.h"
#include "kernel_cuda.h"
#include "torch_op.h"

static bool is_available(void)
{
    return cp_torch_loaded() != NULL && cp_kernel_cuda_plain_ops.is_available();
}

static bool is_whole_words(int64_t bytes)
{
    return bytes % 16 == 0;
}

/* A call of which dtype and dims are known, and all else suits every op. */
static enum cp_code describe(enum cp_dtype dtype, int64_t head_dim, int64_t value_dim,
                             struct cp_format *out)
{
    char why[CP_STATUS_TEXT] = "";
    int64_t bytes = cp_dtype_bytes(dtype);
    const struct cp_torch_block block = {
        .dtype = dtype,
        .head_dim = head_dim,
        .value_dim = value_dim,
        .group = 1,
        .generation = INT_MAX,
        .sight = CP_TORCH_SEES_ALL,
        .is_aligned =
            is_whole_words(head_dim * bytes) && is_whole_words(value_dim * bytes),
    };
    if (cp_torch_op_choose(&block, why, sizeof why) == NULL) {
        return cp_fail(CP_ERR_UNSUPPORTED,
                       "no op of torch attends in %s with head dims %lld (q, k) and "
                       "%lld (v): %.700s",
                       cp_dtype_name(dtype), (long long)head_dim, (long long)value_dim,
                       why);
    }
    return cp_kernel_cuda_plain_ops.describe(dtype, head_dim, value_dim, out);
}

/* ---- what a block is ---- */

static enum cp_torch_sight sight_of(const struct cp_place *place, int64_t rows,
                                    int64_t keys)
{
    if (!place->is_causal || place->k_first + keys - 1 <= place->q_first) {
        return CP_TORCH_SEES_ALL;
    }
    return place->q_first == place->k_first && rows == keys ? CP_TORCH_SEES_DIAGONAL
                                                            : CP_TORCH_SEES_PART;
}

/* Query heads a key/value head as torch counts them, if that is how they belong. */
static int64_t group_of(const struct cp_attend_args *args)
{
    const struct cp_place *place = &args->place;
    int64_t heads = args->q.n[2], group = heads / args->k.n[2];
    for (int64_t head = 0; head < heads; head++) {
        int64_t kv_head =
            (place->head_first + head) / place->heads_per_kv - place->kv_head_first;
        if (group * args->k.n[2] != heads || head / group != kv_head) {
            return 0;
        }
    }
    return group;
}

/* Strides of axes with one place are of no account, and may be anything. */
static bool is_aligned(const struct cp_view *view)
{
    bool is = is_whole_words((int64_t)(intptr_t)view->data) &&
              view->stride[3] == cp_dtype_bytes(view->dtype);
    for (int axis = 0; axis < 3; axis++) {
        is = is && (view->n[axis] == 1 ||
                    (view->stride[axis] >= 0 && is_whole_words(view->stride[axis])));
    }
    return is;
}

static enum cp_code block_of(const struct cp_attend_args *args, int ordinal,
                             struct cp_torch_block *out)
{
    int major = 0, minor = 0;
    struct cp_view k = cp_kernel_cuda_rows(&args->k, args->q.dtype);
    struct cp_view v = cp_kernel_cuda_rows(&args->v, args->q.dtype);
    CP_TRY(cp_cuda_check(
        cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, ordinal),
        "cudaDeviceGetAttribute"));
    CP_TRY(cp_cuda_check(
        cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, ordinal),
        "cudaDeviceGetAttribute"));
    *out = (struct cp_torch_block){
        .dtype = args->q.dtype,
        .head_dim = args->q.n[3],
        .value_dim = args->v.n[3],
        .group = group_of(args),
        .generation = 10 * major + minor,
        .sight = sight_of(&args->place, args->q.n[1], args->k.n[1]),
        .is_aligned = is_aligned(&args->q) && is_aligned(&k) && is_aligned(&v),
        .has_mask = args->mask.data != NULL,
    };
    return CP_OK;
}

/* ---- attend ---- */

/* The ops enqueue on torch's current stream, which is the caller's, and that is the
 * compute lane's. Where it is not, order would be lost. */
static bool is_current(const struct cp_torch *torch, int ordinal,
                       const struct cp_stream *stream)
{
    void *current = NULL;
    return torch->current_stream(ordinal, &current) == 0 &&
           current == (const void *)stream;
}

static enum cp_code answer_and_merge(const struct cp_torch *torch,
                                     const struct cp_torch_op *op, int ordinal,
                                     const struct cp_attend_args *args, bool is_causal,
                                     struct cp_stream *stream)
{
    struct cp_torch_device device = {.type = torch->cuda(), .ordinal = ordinal};
    struct cp_torch_answer answer;
    CP_TRY(cp_torch_op_run(torch, op, device, args, is_causal, &answer));
    struct cp_merge_args merge = {
        .out = answer.out, .lse = answer.lse, .state = args->state};
    enum cp_code code = cp_cuda_merge(&merge, stream);
    cp_torch_answer_free(torch, &answer); /* torch's allocator follows the stream */
    return code;
}

static enum cp_code attend(const struct cp_attend_args *args, struct cp_stream *stream)
{
    const struct cp_torch *torch = cp_torch_loaded();
    const struct cp_torch_op *op = NULL;
    struct cp_torch_block block;
    int ordinal = 0;
    CP_TRY(cp_cuda_check(cudaGetDevice(&ordinal), "cudaGetDevice"));
    bool is_empty =
        cp_view_count(&args->q) == 0 || args->k.n[1] == 0 || args->k.n[2] == 0;
    if (!is_empty && is_current(torch, ordinal, stream)) {
        CP_TRY(block_of(args, ordinal, &block));
        op = cp_torch_op_choose(&block, NULL, 0);
    }
    return op == NULL ? cp_cuda_attend(args, stream)
                      : answer_and_merge(torch, op, ordinal, args,
                                         block.sight == CP_TORCH_SEES_DIAGONAL, stream);
}

/* torch's backward passes need `out`, which the table's grad does not carry: gradients are
 * the plain kernel's. */
const struct cp_kernel_ops cp_kernel_torch_ops = {
    .name = "cuda_torch",
    .abi = CP_KERNEL_ABI,
    .is_available = is_available,
    .describe = describe,
    .pack_k = cp_kernel_cuda_pack,
    .pack_v = cp_kernel_cuda_pack,
    .attend = attend,
    .finish = cp_cuda_finish,
    .delta = cp_cuda_delta,
    .grad = cp_cuda_grad,
};
