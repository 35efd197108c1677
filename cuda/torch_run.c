/* Views to tensors, an op's call, its results to views. */
#include "torch_run.h"

#include <stdio.h>
#include <string.h>

static void free_all(const struct cp_torch *torch, AtenTensorHandle *tensors, int count)
{
    for (int i = 0; i < count; i++) {
        cp_torch_free(torch, &tensors[i]);
    }
}

static enum cp_code fail_shape(const struct cp_torch_op *op)
{
    return cp_fail(CP_ERR_INTERNAL,
                   "torch's %s gave an answer of another shape or dtype; "
                   "CP_ATTN_CUDA_KERNEL=plain does without it",
                   op->name);
}

/* ---- the answer ---- */

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
    return is_right ? CP_OK : fail_shape(op);
}

enum cp_code cp_torch_op_run(const struct cp_torch *torch, const struct cp_torch_op *op,
                             struct cp_torch_device device,
                             const struct cp_attend_args *args, bool is_causal,
                             struct cp_torch_answer *answer)
{
    const struct cp_view views[3] = {args->q, args->k, args->v};
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
    free_all(torch, qkv, 3);
    if (code != CP_OK) {
        cp_torch_answer_free(torch, answer);
    }
    return code;
}

void cp_torch_answer_free(const struct cp_torch *torch, struct cp_torch_answer *answer)
{
    free_all(torch, answer->held, CP_TORCH_RESULTS);
}

/* ---- the gradients ---- */

/* (B, heads, rows) side by side, as all ops have it. */
static struct cp_view lse_like(const struct cp_grad_args *args, int64_t rows)
{
    const int64_t *n = args->q.n;
    enum cp_dtype dtype = cp_dtype_sum(args->q.dtype);
    int64_t bytes = cp_dtype_bytes(dtype);
    return (struct cp_view){
        .dtype = dtype,
        .n = {n[0], rows, n[2], 1},
        .stride = {n[2] * rows * bytes, bytes, rows * bytes, bytes},
    };
}

/* `out` lies packed in the order of a view's axes: the efficient op takes that for
 * granted. */
static enum cp_code make_stand_in(const struct cp_torch *torch,
                                  const struct cp_torch_op *op,
                                  struct cp_torch_device device,
                                  const struct cp_grad_args *args,
                                  struct cp_torch_gradient *gradient)
{
    const int64_t *n = args->dout.n, multiple = op->grad_lse_multiple;
    struct cp_view out =
        cp_view_compact(NULL, args->dout.dtype, n[0], n[1], n[2], n[3]);
    struct cp_view lse = lse_like(args, (n[1] + multiple - 1) / multiple * multiple);
    gradient->stand_in = (struct cp_stand_in_args){
        .dout = args->dout, .lse = args->lse, .delta = args->delta};
    CP_TRY(cp_torch_empty(torch, device, &out, 4, &gradient->given[CP_TORCH_OUT]));
    CP_TRY(cp_torch_empty(torch, device, &lse, 3, &gradient->given[CP_TORCH_LSE]));
    CP_TRY(
        cp_torch_view(torch, gradient->given[CP_TORCH_OUT], &gradient->stand_in.out));
    return cp_torch_view(torch, gradient->given[CP_TORCH_LSE],
                         &gradient->stand_in.lse_out);
}

enum cp_code cp_torch_gradient_begin(const struct cp_torch *torch,
                                     const struct cp_torch_op *op,
                                     struct cp_torch_device device,
                                     const struct cp_grad_args *args,
                                     struct cp_torch_gradient *gradient)
{
    const struct {
        int which;
        const struct cp_view *view;
    } inputs[] = {{CP_TORCH_Q, &args->q},
                  {CP_TORCH_K, &args->k},
                  {CP_TORCH_V, &args->v},
                  {CP_TORCH_DOUT, &args->dout}};
    memset(gradient, 0, sizeof *gradient);
    for (size_t i = 0; i < sizeof inputs / sizeof inputs[0]; i++) {
        CP_TRY(cp_torch_tensor(torch, device, inputs[i].view,
                               &gradient->given[inputs[i].which]));
    }
    if (torch->undefined(&gradient->given[CP_TORCH_NOTHING]) != 0) {
        return cp_torch_fail(torch, "make a tensor");
    }
    return make_stand_in(torch, op, device, args, gradient);
}

enum cp_code cp_torch_gradient_run(const struct cp_torch *torch,
                                   const struct cp_torch_op *op,
                                   const struct cp_grad_args *args, bool is_causal,
                                   struct cp_torch_gradient *gradient)
{
    const struct {
        struct cp_view *view;
        const struct cp_view *like;
    } results[] = {{&gradient->dq, &args->q},
                   {&gradient->dk, &args->k},
                   {&gradient->dv, &args->v}};
    if (op->gradient(torch, gradient->given, args, is_causal, gradient->held) != 0) {
        char name[128];
        (void)snprintf(name, sizeof name, "%s_backward", op->name);
        return cp_torch_fail(torch, name);
    }
    for (size_t i = 0; i < sizeof results / sizeof results[0]; i++) {
        struct cp_view *view = results[i].view;
        CP_TRY(cp_torch_view(torch, gradient->held[i], view));
        if (view->dtype != args->q.dtype ||
            memcmp(view->n, results[i].like->n, sizeof view->n) != 0) {
            return fail_shape(op);
        }
    }
    return CP_OK;
}

void cp_torch_gradient_free(const struct cp_torch *torch,
                            struct cp_torch_gradient *gradient)
{
    free_all(torch, gradient->given, CP_TORCH_GIVEN);
    free_all(torch, gradient->held, CP_TORCH_GRADS);
}
