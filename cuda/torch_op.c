/* The table of torch's ops, and their calls. */
#include "torch_op.h"

#include <string.h>

#include "base/text.h"
#include "kernel_cuda.h"

/* ---- the calls ---- */

static AOTITorchError run_flash(const struct cp_torch *torch,
                                const AtenTensorHandle qkv[3], bool is_causal,
                                double scale, AtenTensorHandle held[CP_TORCH_RESULTS])
{
    int64_t most_rows = 0, most_keys = 0;
    return torch->flash(qkv[0], qkv[1], qkv[2], 0, is_causal, false, &scale, &held[0],
                        &held[1], &held[2], &held[3], &most_rows, &most_keys, &held[4],
                        &held[5], &held[6]);
}

static AOTITorchError run_efficient(const struct cp_torch *torch,
                                    const AtenTensorHandle qkv[3], bool is_causal,
                                    double scale,
                                    AtenTensorHandle held[CP_TORCH_RESULTS])
{
    return torch->efficient(qkv[0], qkv[1], qkv[2], NULL, true, 0, is_causal, &scale,
                            &held[0], &held[1], &held[2], &held[3]);
}

/* ---- the table ---- */

#define BIT(dtype) (1U << (unsigned)(dtype))

/* The best first. */
static const struct cp_torch_op ops[] = {
    {
        .name = "_scaled_dot_product_flash_attention",
        .dtypes = BIT(CP_DTYPE_BFLOAT16) | BIT(CP_DTYPE_FLOAT16),
        .most_dim = 256,
        .oldest = 80,
        .takes_groups = true,
        .run = run_flash,
    },
    {
        .name = "_scaled_dot_product_efficient_attention",
        .dtypes =
            BIT(CP_DTYPE_BFLOAT16) | BIT(CP_DTYPE_FLOAT16) | BIT(CP_DTYPE_FLOAT32),
        .most_dim = 65536,
        .oldest = 80,
        .takes_other_value_dim = true,
        .run = run_efficient,
    },
};

enum { OPS = sizeof ops / sizeof ops[0] };

const char *cp_torch_op_refuses(const struct cp_torch_op *op,
                                const struct cp_torch_block *block)
{
    int64_t larger =
        block->head_dim > block->value_dim ? block->head_dim : block->value_dim;
    const struct {
        bool holds;
        const char *reason;
    } rules[] = {
        {block->generation < op->oldest, "the GPU is too old for it"},
        {(op->dtypes & BIT(block->dtype)) == 0, "it does not take this dtype"},
        {larger > op->most_dim, "its heads are not that large"},
        {block->head_dim != block->value_dim && !op->takes_other_value_dim,
         "it needs values of the head dim"},
        {!block->is_aligned, "it needs rows of whole 16-byte words, none backwards"},
        {block->has_mask, "it is given no mask"},
        {block->sight == CP_TORCH_SEES_PART,
         "it is causal along the diagonal of equal lengths alone"},
        {block->group == 0, "it needs equally many query heads for each key head"},
        {block->group > 1 && !op->takes_groups, "it does not share key heads"},
    };
    for (size_t i = 0; i < sizeof rules / sizeof rules[0]; i++) {
        if (rules[i].holds) {
            return rules[i].reason;
        }
    }
    return NULL;
}

const struct cp_torch_op *cp_torch_op_choose(const struct cp_torch_block *block,
                                             char *why, size_t why_bytes)
{
    for (int i = 0; i < OPS; i++) {
        const char *reason = cp_torch_op_refuses(&ops[i], block);
        if (reason == NULL) {
            return &ops[i];
        }
        if (why != NULL) {
            cp_text_append(why, why_bytes, "%s%s: %s", i > 0 ? "; " : "", ops[i].name,
                           reason);
        }
    }
    return NULL;
}

/* ---- one block ---- */

/* Results as this library reads them. */
static enum cp_code read_answer(const struct cp_torch *torch,
                                const struct cp_torch_op *op,
                                const struct cp_attend_args *args,
                                struct cp_torch_answer *answer)
{
    const struct cp_view *q = &args->q;
    struct cp_view *out = &answer->out, *lse = &answer->lse;
    CP_TRY(cp_torch_view(torch, answer->held[0], out));
    CP_TRY(cp_torch_view(torch, answer->held[1], lse));
    bool is_right = out->dtype == q->dtype && lse->dtype == cp_dtype_sum(q->dtype) &&
                    out->n[0] == q->n[0] && out->n[1] == q->n[1] &&
                    out->n[2] == q->n[2] && out->n[3] == args->v.n[3] &&
                    lse->n[0] == q->n[0] && lse->n[1] >= q->n[1] &&
                    lse->n[2] == q->n[2] && lse->n[3] == 1;
    return is_right ? CP_OK
                    : cp_fail(CP_ERR_INTERNAL,
                              "torch's %s gave an answer of another shape or dtype; "
                              "CP_ATTN_CUDA_KERNEL=plain does without it",
                              op->name);
}

enum cp_code cp_torch_op_run(const struct cp_torch *torch, const struct cp_torch_op *op,
                             struct cp_torch_device device,
                             const struct cp_attend_args *args, bool is_causal,
                             struct cp_torch_answer *answer)
{
    const struct cp_view views[3] = {args->q,
                                     cp_kernel_cuda_rows(&args->k, args->q.dtype),
                                     cp_kernel_cuda_rows(&args->v, args->q.dtype)};
    AtenTensorHandle qkv[3] = {NULL, NULL, NULL};
    enum cp_code code = CP_OK;
    memset(answer, 0, sizeof *answer);
    for (int i = 0; i < 3 && code == CP_OK; i++) {
        code = cp_torch_tensor(torch, device, &views[i], &qkv[i]);
    }
    if (code == CP_OK &&
        op->run(torch, qkv, is_causal, args->scale, answer->held) != 0) {
        code = cp_torch_fail(torch, op->name);
    }
    if (code == CP_OK) {
        code = read_answer(torch, op, args, answer);
    }
    for (int i = 0; i < 3; i++) {
        cp_torch_free(torch, &qkv[i]);
    }
    if (code != CP_OK) {
        cp_torch_answer_free(torch, answer);
    }
    return code;
}

void cp_torch_answer_free(const struct cp_torch *torch, struct cp_torch_answer *answer)
{
    for (int i = 0; i < CP_TORCH_RESULTS; i++) {
        cp_torch_free(torch, &answer->held[i]);
    }
}
