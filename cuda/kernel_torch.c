/* torch's attention ops behind the kernel table: a block, or a piece of a causal one, that
 * one of them takes is answered by it and merged, or its gradients are added; any other
 * goes to our own kernels. States are the plain kernel's, so neither ranks nor blocks need
 * agree who computes. What torch makes is in memory of its own allocator until it is merged
 * or added. */
#include "kernel_torch.h"

#include <limits.h>

#include "causal_cut.h"
#include "cuda_check.h"
#include "device_cuda.h"
#include "group_run.h"
#include "kernel_cuda.h"
#include "kernel_own.h"
#include "torch_run.h"

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
        .rows = INT64_MAX,
        .keys = INT64_MAX,
        .group = 1,
        .generation = INT_MAX,
        .cudnn_version = INT64_MAX,
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

/* Query heads a key/value head as torch counts them, if that is how they belong. */
static int64_t group_of(const struct cp_place *place, int64_t heads, int64_t kv_heads)
{
    const struct cp_group_run run = cp_group_run_at(place, heads, 0);
    return run.heads == heads && run.kv_heads == kv_heads ? heads / kv_heads : 0;
}

/* Strides of axes with one place are of no account, and may be anything. Places that lie on each
 * other no op is asked to read. */
static bool is_aligned(const struct cp_view *view)
{
    bool is = is_whole_words((int64_t)(intptr_t)view->data) &&
              view->stride[3] == cp_dtype_bytes(view->dtype);
    for (int axis = 0; axis < 3; axis++) {
        is = is && (view->n[axis] == 1 ||
                    (view->stride[axis] > 0 && is_whole_words(view->stride[axis])));
    }
    return is;
}

/* Where and how a call's ops run. */
struct site {
    const struct cp_torch *torch;
    struct cp_torch_device device;
    struct cp_stream *stream;
};

/* The ops enqueue on torch's current stream, which is the caller's, and that is the
 * compute lane's. Where it is not, order would be lost: `is_current` is false. */
static enum cp_code site_of(struct cp_stream *stream, struct site *out,
                            bool *is_current)
{
    int ordinal = 0;
    void *current = NULL;
    const struct cp_torch *torch = cp_torch_loaded();
    CP_TRY(cp_cuda_check(cudaGetDevice(&ordinal), "cudaGetDevice"));
    *out = (struct site){.torch = torch,
                         .device = {.type = torch->cuda(), .ordinal = ordinal},
                         .stream = stream};
    *is_current = torch->current_stream(ordinal, &current) == 0 &&
                  current == (const void *)stream;
    return CP_OK;
}

static enum cp_code block_of(const struct site *site, const struct cp_view *q,
                             const struct cp_view *k, const struct cp_view *v,
                             const struct cp_place *place, struct cp_torch_block *out)
{
    int generation = 0;
    CP_TRY(cp_cuda_generation(site->device.ordinal, &generation));
    *out = (struct cp_torch_block){
        .dtype = q->dtype,
        .head_dim = q->n[3],
        .value_dim = v->n[3],
        .rows = q->n[1],
        .keys = k->n[1],
        .group = group_of(place, q->n[2], k->n[2]),
        .generation = generation,
        .cudnn_version = site->torch->cudnn_version,
        .is_aligned = is_aligned(q) && is_aligned(k) && is_aligned(v),
    };
    return CP_OK;
}

static bool is_empty(const struct cp_view *q, const struct cp_view *k)
{
    return cp_view_count(q) == 0 || k->n[1] == 0 || k->n[2] == 0;
}

/* What takes a piece of a block that some op takes; NULL: our own kernel. */
static const struct cp_torch_op *choose_for(const struct cp_torch_block *block,
                                            const struct cp_piece *piece)
{
    struct cp_torch_block part = *block;
    part.rows = piece->rows;
    part.keys = piece->keys;
    return piece->keys == 0 ? NULL : cp_torch_op_choose(&part, NULL, 0);
}

static struct cp_view rows_of(const struct cp_view *view, int64_t first, int64_t count)
{
    const int64_t from[CP_AXES] = {0, first, 0, 0};
    const int64_t n[CP_AXES] = {view->n[0], count, view->n[2], view->n[3]};
    return cp_view_box(view, from, n);
}

static struct cp_place place_of(const struct cp_place *place,
                                const struct cp_piece *piece)
{
    struct cp_place part = *place;
    part.q_first += piece->row;
    part.k_first += piece->key;
    return part;
}

/* ---- attend ---- */

/* Without a mask. */
static struct cp_attend_args attend_piece(const struct cp_attend_args *args,
                                          const struct cp_piece *piece)
{
    struct cp_attend_args part = *args;
    part.q = rows_of(&args->q, piece->row, piece->rows);
    part.k = rows_of(&args->k, piece->key, piece->keys);
    part.v = rows_of(&args->v, piece->key, piece->keys);
    part.state = cp_kernel_cuda_state(&args->state, piece->row, 0);
    part.state.n[1] = piece->rows;
    part.out = rows_of(&args->out, piece->row, piece->rows);
    part.lse = rows_of(&args->lse, piece->row, piece->rows);
    part.place = place_of(&args->place, piece);
    cp_piece_ends(&part, piece);
    return part;
}

static enum cp_code answer_and_merge(const struct site *site,
                                     const struct cp_torch_op *op,
                                     const struct cp_attend_args *args, bool is_causal)
{
    struct cp_torch_answer answer;
    CP_TRY(cp_torch_op_run(site->torch, op, site->device, args, is_causal, &answer));
    struct cp_merge_args merge = {
        .out = answer.out,
        .lse = answer.lse,
        .state = args->state,
        .is_first = args->is_first,
        .result = args->out,
        .result_lse = args->lse,
    };
    enum cp_code code = cp_cuda_merge(&merge, site->stream);
    cp_torch_answer_free(site->torch, &answer);
    return code;
}

static enum cp_code attend_by_pieces(const struct site *site,
                                     const struct cp_torch_block *block,
                                     const struct cp_attend_args *args)
{
    struct cp_piece pieces[CP_MOST_PIECES];
    int count = cp_causal_cut(&args->place, block->rows, block->keys,
                              cp_piece_wants_blind(args), pieces);
    for (int i = 0; i < count; i++) {
        const struct cp_torch_op *op = choose_for(block, &pieces[i]);
        struct cp_attend_args part = attend_piece(args, &pieces[i]);
        CP_TRY(op == NULL ? cp_kernel_own_attend(&part, site->stream)
                          : answer_and_merge(site, op, &part, pieces[i].is_diagonal));
    }
    return CP_OK;
}

static enum cp_code attend(const struct cp_attend_args *args, struct cp_stream *stream)
{
    struct site site;
    struct cp_torch_block block;
    bool is_current = false;
    CP_TRY(site_of(stream, &site, &is_current));
    if (!is_current || is_empty(&args->q, &args->k)) {
        return cp_kernel_own_attend(args, stream);
    }
    CP_TRY(block_of(&site, &args->q, &args->k, &args->v, &args->place, &block));
    block.has_mask = args->mask.data != NULL;
    block.backend = args->backend;
    return cp_torch_op_choose(&block, NULL, 0) == NULL
               ? cp_kernel_own_attend(args, stream)
               : attend_by_pieces(&site, &block, args);
}

/* ---- grad ---- */

static struct cp_grad_args grad_piece(const struct cp_grad_args *args,
                                      const struct cp_piece *piece)
{
    struct cp_grad_args part = *args;
    struct cp_view *const rows[] = {&part.q, &part.dout, &part.lse, &part.delta,
                                    &part.dq};
    struct cp_view *const keys[] = {&part.k, &part.v, &part.dk, &part.dv};
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        *rows[i] = rows_of(rows[i], piece->row, piece->rows);
    }
    for (size_t i = 0; i < sizeof keys / sizeof keys[0]; i++) {
        *keys[i] = rows_of(keys[i], piece->key, piece->keys);
    }
    part.place = place_of(&args->place, piece);
    return part;
}

static enum cp_code differentiate(const struct site *site, const struct cp_torch_op *op,
                                  const struct cp_grad_args *args, bool is_causal,
                                  struct cp_torch_gradient *gradient)
{
    CP_TRY(cp_torch_gradient_begin(site->torch, op, site->device, args, gradient));
    CP_TRY(cp_cuda_stand_in(&gradient->stand_in, site->stream));
    CP_TRY(cp_torch_gradient_run(site->torch, op, args, is_causal, gradient));
    CP_TRY(cp_cuda_add(&args->dq, &gradient->dq, site->stream));
    CP_TRY(cp_cuda_add(&args->dk, &gradient->dk, site->stream));
    return cp_cuda_add(&args->dv, &gradient->dv, site->stream);
}

static enum cp_code grad_by_pieces(const struct site *site,
                                   const struct cp_torch_block *block,
                                   const struct cp_grad_args *args)
{
    struct cp_piece pieces[CP_MOST_PIECES];
    int count = cp_causal_cut(&args->place, block->rows, block->keys, false, pieces);
    for (int i = 0; i < count; i++) {
        const struct cp_torch_op *op = choose_for(block, &pieces[i]);
        struct cp_grad_args part = grad_piece(args, &pieces[i]);
        struct cp_torch_gradient gradient;
        if (op == NULL) {
            CP_TRY(cp_kernel_own_grad(&part, site->stream));
            continue;
        }
        enum cp_code code =
            differentiate(site, op, &part, pieces[i].is_diagonal, &gradient);
        cp_torch_gradient_free(site->torch, &gradient);
        CP_TRY(code);
    }
    return CP_OK;
}

static enum cp_code grad(const struct cp_grad_args *args, struct cp_stream *stream)
{
    struct site site;
    struct cp_torch_block block;
    bool is_current = false;
    CP_TRY(site_of(stream, &site, &is_current));
    if (!is_current || is_empty(&args->q, &args->k)) {
        return cp_kernel_own_grad(args, stream);
    }
    CP_TRY(block_of(&site, &args->q, &args->k, &args->v, &args->place, &block));
    block.is_aligned = block.is_aligned && is_aligned(&args->dout);
    block.has_mask = args->mask.data != NULL;
    block.backend = args->backend;
    block.has_dlse = args->has_dlse;
    block.is_gradient = true;
    return cp_torch_op_choose(&block, NULL, 0) == NULL
               ? cp_kernel_own_grad(args, stream)
               : grad_by_pieces(&site, &block, args);
}

const struct cp_kernel_ops cp_kernel_torch_ops = {
    .name = "cuda_torch",
    .abi = CP_KERNEL_ABI,
    .is_available = is_available,
    .describe = describe,
    .attend = attend,
    .finish = cp_cuda_finish,
    .delta = cp_cuda_delta,
    .grad = grad,
};
