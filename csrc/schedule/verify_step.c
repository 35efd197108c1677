/* Boxes of single steps. */
#include "schedule/verify_step.h"

#include <string.h>

#define BIT(arg) (1u << (arg))

struct cp_op_args cp_verify_op_args(enum cp_step_op op)
{
    struct cp_op_args none = {0, 0, 0};
    switch (op) {
    case CP_STEP_COPY:
    case CP_STEP_REDUCE:
    case CP_STEP_PACK:
        return (struct cp_op_args){BIT(CP_ARG_DST) | BIT(CP_ARG_SRC), 0,
                                   BIT(CP_ARG_DST)};
    case CP_STEP_ZERO:
    case CP_STEP_RECV:
        return (struct cp_op_args){BIT(CP_ARG_DST), 0, BIT(CP_ARG_DST)};
    case CP_STEP_SEND:
        return (struct cp_op_args){BIT(CP_ARG_SRC), 0, 0};
    case CP_STEP_ATTEND:
        return (struct cp_op_args){
            BIT(CP_ATTEND_STATE) | BIT(CP_ATTEND_Q) | BIT(CP_ATTEND_K) |
                BIT(CP_ATTEND_V),
            BIT(CP_ATTEND_MASK) | BIT(CP_ATTEND_OUT) | BIT(CP_ATTEND_LSE),
            BIT(CP_ATTEND_STATE) | BIT(CP_ATTEND_OUT) | BIT(CP_ATTEND_LSE)};
    case CP_STEP_FINISH:
        return (struct cp_op_args){BIT(CP_FINISH_OUT) | BIT(CP_FINISH_STATE),
                                   BIT(CP_FINISH_LSE),
                                   BIT(CP_FINISH_OUT) | BIT(CP_FINISH_LSE)};
    case CP_STEP_DELTA:
        return (struct cp_op_args){BIT(CP_DELTA_DELTA) | BIT(CP_DELTA_OUT) |
                                       BIT(CP_DELTA_DOUT),
                                   BIT(CP_DELTA_DLSE), BIT(CP_DELTA_DELTA)};
    case CP_STEP_GRAD:
        return (struct cp_op_args){BIT(CP_GRAD_MASK) - 1, BIT(CP_GRAD_MASK),
                                   BIT(CP_GRAD_DQ) | BIT(CP_GRAD_DK) | BIT(CP_GRAD_DV)};
    case CP_STEP_PUBLISH:
    case CP_STEP_AWAIT:
    case CP_STEP_OPS:
        break;
    }
    return none;
}

/* A step's args as boxes of shapes, for the checks below. */
struct args {
    const struct cp_verify_at *at;
    const struct cp_plan *plan;
    const struct cp_box *box[CP_STEP_ARGS]; /* NULL: not given */
    struct cp_shape shape[CP_STEP_ARGS];
};

/* What an arg of a kernel step must be. */
struct need {
    const char *name;
    int arg;
    enum cp_layout layout;
    enum cp_dtype dtype;
    int64_t rows, heads, dim;
};

static bool same_n(const int64_t a[CP_AXES], const int64_t b[CP_AXES])
{
    return memcmp(a, b, CP_AXES * sizeof *a) == 0;
}

static enum cp_code check_box(const struct cp_verify_at *at, int arg,
                              const struct cp_buffer *buffer, const struct cp_box *box)
{
    for (int axis = 0; axis < CP_AXES; axis++) {
        int64_t n = buffer->n[axis];
        if (box->first[axis] < 0 || box->n[axis] < 0 || box->n[axis] > n ||
            box->first[axis] > n - box->n[axis]) {
            return cp_verify_fail(
                at, "arg %d takes %lld from %lld of %lld on axis %d of buffer %d", arg,
                (long long)box->n[axis], (long long)box->first[axis], (long long)n,
                axis, (int)box->buffer);
        }
        bool is_whole = (axis == 3 && buffer->role != CP_TENSOR_MASK) ||
                        (buffer->layout != CP_LAYOUT_PLAIN && (axis == 1 || axis == 3));
        if (is_whole && box->n[axis] != n && !cp_verify_box_is_empty(box)) {
            return cp_verify_fail(at,
                                  "arg %d takes %lld of %lld on axis %d of buffer %d, "
                                  "which cannot be cut there",
                                  arg, (long long)box->n[axis], (long long)n, axis,
                                  (int)box->buffer);
        }
    }
    return CP_OK;
}

/* Who may write what. */
static enum cp_code check_written(const struct cp_schedule *schedule,
                                  const struct cp_verify_at *at, int arg,
                                  const struct cp_buffer *buffer)
{
    bool may_put = schedule->transport == CP_PUSH && at->op == CP_STEP_COPY;
    if (buffer->kind == CP_BUFFER_INPUT) {
        return cp_verify_fail(at, "arg %d writes a tensor that the caller only lent",
                              arg);
    }
    if (buffer->owner != at->rank && !may_put) {
        return cp_verify_fail(at, "arg %d writes in the window of rank %d", arg,
                              (int)buffer->owner);
    }
    return CP_OK;
}

static enum cp_code gather_args(const struct cp_schedule *schedule, struct args *args)
{
    const struct cp_verify_at *at = args->at;
    const struct cp_step *step = &schedule->steps[at->step];
    struct cp_op_args takes = cp_verify_op_args(at->op);
    for (int arg = 0; arg < CP_STEP_ARGS; arg++) {
        const struct cp_box *box = &step->arg[arg];
        if (((takes.needs | takes.may) & BIT(arg)) == 0) {
            continue;
        }
        if (box->buffer == CP_NO_BUFFER) {
            if ((takes.needs & BIT(arg)) != 0) {
                return cp_verify_fail(at, "arg %d is not given", arg);
            }
            continue;
        }
        if (box->buffer < 0 || box->buffer >= schedule->buffer_count) {
            return cp_verify_fail(at, "arg %d is buffer %d of %d", arg,
                                  (int)box->buffer, (int)schedule->buffer_count);
        }
        const struct cp_buffer *buffer = &schedule->buffers[box->buffer];
        CP_TRY(check_box(at, arg, buffer, box));
        if ((takes.writes & BIT(arg)) != 0) {
            CP_TRY(check_written(schedule, at, arg, buffer));
        }
        args->box[arg] = box;
        args->shape[arg] = cp_verify_shape(schedule->plan, buffer);
    }
    return CP_OK;
}

static bool is_sum_of(enum cp_dtype sum, enum cp_dtype dtype)
{
    return sum == cp_dtype_sum(dtype);
}

/* COPY, REDUCE, PACK: the same n, layouts and types that the device can turn into each other.
 * What is converted is a sum into what it is the sum of, or what the caller gave into a sum: a
 * sum that was rounded never becomes one again. */
static enum cp_code check_move(const struct args *args)
{
    const struct cp_verify_at *at = args->at;
    const struct cp_buffer *dst = &args->shape[CP_ARG_DST].buffer;
    const struct cp_buffer *src = &args->shape[CP_ARG_SRC].buffer;
    enum cp_dtype to = (enum cp_dtype)dst->dtype;
    enum cp_dtype from = (enum cp_dtype)src->dtype;
    if (!same_n(args->box[CP_ARG_DST]->n, args->box[CP_ARG_SRC]->n)) {
        return cp_verify_fail(at, "the two boxes differ in shape");
    }
    if (at->op == CP_STEP_PACK) {
        if ((dst->layout != CP_LAYOUT_K && dst->layout != CP_LAYOUT_V) ||
            src->layout != CP_LAYOUT_PLAIN || to != from) {
            return cp_verify_fail(
                at, "cannot pack layout %d of %s into layout %d of %s", src->layout,
                cp_dtype_name(from), dst->layout, cp_dtype_name(to));
        }
        if (!same_n(args->box[CP_ARG_DST]->n, dst->n)) {
            return cp_verify_fail(at, "packs a part of buffer %d",
                                  (int)args->box[CP_ARG_DST]->buffer);
        }
        return CP_OK;
    }
    bool is_given = src->kind == CP_BUFFER_INPUT;
    bool is_fitting = at->op == CP_STEP_COPY ? to == from || is_sum_of(from, to) ||
                                                   (is_given && is_sum_of(to, from))
                                             : to == from && is_sum_of(from, to);
    if (dst->layout != CP_LAYOUT_PLAIN || src->layout != CP_LAYOUT_PLAIN ||
        !is_fitting) {
        return cp_verify_fail(at, "cannot take %s of layout %d into %s of layout %d",
                              cp_dtype_name(from), src->layout, cp_dtype_name(to),
                              dst->layout);
    }
    return CP_OK;
}

/* Zeroes are written byte by byte, over all that a buffer has: not where strides are unknown. */
static enum cp_code check_zero(const struct args *args)
{
    const struct cp_buffer *dst = &args->shape[CP_ARG_DST].buffer;
    if (dst->kind == CP_BUFFER_OUTPUT) {
        return cp_verify_fail(args->at,
                              "zeroes a tensor of the caller, whose strides are "
                              "unknown");
    }
    return same_n(args->box[CP_ARG_DST]->n, dst->n)
               ? CP_OK
               : cp_verify_fail(args->at, "zeroes a part of buffer %d",
                                (int)args->box[CP_ARG_DST]->buffer);
}

static enum cp_code check_message(const struct args *args, const struct cp_step *step)
{
    const struct cp_verify_at *at = args->at;
    int arg = at->op == CP_STEP_SEND ? CP_ARG_SRC : CP_ARG_DST;
    const struct cp_shape *shape = &args->shape[arg];
    const struct cp_box *box = args->box[arg];
    if (step->peer < 0 || step->peer >= args->plan->world) {
        return cp_verify_fail(at, "rank %d of %d", (int)step->peer, args->plan->world);
    }
    if (shape->buffer.kind == CP_BUFFER_INPUT ||
        shape->buffer.kind == CP_BUFFER_OUTPUT) {
        return cp_verify_fail(
            at, "moves a tensor of the caller, whose strides are unknown");
    }
    if (!cp_verify_box_is_empty(box)) {
        struct cp_extent extent = cp_verify_extent(shape, box);
        if (extent.hi - extent.lo != cp_verify_box_bytes(shape, box)) {
            return cp_verify_fail(at,
                                  "its box of buffer %d is no unbroken run of bytes",
                                  (int)box->buffer);
        }
    }
    return CP_OK;
}

static enum cp_code check_needs(const struct args *args, int64_t batch,
                                const struct need *needs, int count)
{
    const struct cp_verify_at *at = args->at;
    for (int i = 0; i < count; i++) {
        const struct need *need = &needs[i];
        const struct cp_box *box = args->box[need->arg];
        const struct cp_buffer *buffer = &args->shape[need->arg].buffer;
        if (box == NULL) {
            continue;
        }
        if (buffer->layout != need->layout) {
            return cp_verify_fail(at, "%s has layout %d, not %d", need->name,
                                  buffer->layout, (int)need->layout);
        }
        if (need->dtype != CP_DTYPE_NONE &&
            (enum cp_dtype)buffer->dtype != need->dtype) {
            return cp_verify_fail(at, "%s is of %s, not %s", need->name,
                                  cp_dtype_name((enum cp_dtype)buffer->dtype),
                                  cp_dtype_name(need->dtype));
        }
        if (!same_n(box->n,
                    (int64_t[CP_AXES]){batch, need->rows, need->heads, need->dim})) {
            return cp_verify_fail(
                at, "%s is %lldx%lldx%lldx%lld, not %lldx%lldx%lldx%lld", need->name,
                (long long)box->n[0], (long long)box->n[1], (long long)box->n[2],
                (long long)box->n[3], (long long)batch, (long long)need->rows,
                (long long)need->heads, (long long)need->dim);
        }
    }
    return CP_OK;
}

/* The mask of ATTEND and GRAD: there iff the call has one, broadcast where the call's is. */
static enum cp_code check_mask(const struct args *args, int arg, int64_t rows,
                               int64_t heads, int64_t keys)
{
    const struct cp_plan *plan = args->plan;
    const struct cp_call *call = &plan->signature.call;
    const struct cp_box *box = args->box[arg];
    if (call->mask_kind == CP_MASK_NONE || box == NULL) {
        return (call->mask_kind == CP_MASK_NONE) == (box == NULL)
                   ? CP_OK
                   : cp_verify_fail(args->at, "%s",
                                    box == NULL ? "the call's mask is not given"
                                                : "the call has no mask");
    }
    const struct need need[] = {
        {"mask", arg, CP_LAYOUT_PLAIN, (enum cp_dtype)call->mask_dtype,
         call->mask_heads == 1 ? 1 : heads, plan->mask_rows == CP_AXIS_ONE ? 1 : rows,
         plan->mask_keys == CP_AXIS_ONE ? 1 : keys},
    };
    if (args->shape[arg].buffer.role != CP_TENSOR_MASK) {
        return cp_verify_fail(args->at, "its mask is a buffer of another role");
    }
    int64_t batch = args->box[1]->n[0];
    if (box->n[0] != (call->mask_batch == 1 ? 1 : batch)) {
        return cp_verify_fail(args->at, "mask has %lld batches", (long long)box->n[0]);
    }
    return check_needs(args, box->n[0], need, 1);
}

/* What rows and heads become. */
static enum cp_code check_result(const struct args *args, const struct cp_call *call,
                                 int out, int lse, const struct cp_box *rows)
{
    enum cp_dtype dtype = (enum cp_dtype)call->dtype;
    const struct need needs[] = {
        {"out", out, CP_LAYOUT_PLAIN, dtype, rows->n[1], rows->n[2], call->value_dim},
        {"lse", lse, CP_LAYOUT_PLAIN, cp_dtype_sum(dtype), rows->n[1], rows->n[2], 1},
    };
    return check_needs(args, rows->n[0], needs, (int)(sizeof needs / sizeof *needs));
}

static enum cp_code check_attend(const struct args *args, const struct cp_call *call)
{
    const struct cp_box *q = args->box[CP_ATTEND_Q];
    const struct cp_box *k = args->box[CP_ATTEND_K];
    enum cp_dtype dtype = (enum cp_dtype)call->dtype;
    bool is_plain = args->plan->format.has_plain_keys;
    enum cp_layout k_layout = is_plain ? CP_LAYOUT_PLAIN : CP_LAYOUT_K;
    enum cp_layout v_layout = is_plain ? CP_LAYOUT_PLAIN : CP_LAYOUT_V;
    const struct need needs[] = {
        {"q", CP_ATTEND_Q, CP_LAYOUT_PLAIN, dtype, q->n[1], q->n[2], call->head_dim},
        {"state", CP_ATTEND_STATE, CP_LAYOUT_STATE, CP_DTYPE_NONE, q->n[1], q->n[2],
         call->value_dim},
        {"k", CP_ATTEND_K, k_layout, dtype, k->n[1], k->n[2], call->head_dim},
        {"v", CP_ATTEND_V, v_layout, dtype, k->n[1], k->n[2], call->value_dim},
    };
    CP_TRY(check_needs(args, q->n[0], needs, (int)(sizeof needs / sizeof *needs)));
    CP_TRY(check_result(args, call, CP_ATTEND_OUT, CP_ATTEND_LSE, q));
    return check_mask(args, CP_ATTEND_MASK, q->n[1], q->n[2], k->n[1]);
}

static enum cp_code check_finish(const struct args *args, const struct cp_call *call)
{
    const struct cp_box *state = args->box[CP_FINISH_STATE];
    const struct need need = {"state",        CP_FINISH_STATE, CP_LAYOUT_STATE,
                              CP_DTYPE_NONE,  state->n[1],     state->n[2],
                              call->value_dim};
    CP_TRY(check_needs(args, state->n[0], &need, 1));
    return check_result(args, call, CP_FINISH_OUT, CP_FINISH_LSE, state);
}

static enum cp_code check_delta(const struct args *args, const struct cp_call *call)
{
    const struct cp_box *out = args->box[CP_DELTA_OUT];
    enum cp_dtype dtype = (enum cp_dtype)call->dtype;
    enum cp_dtype sum = cp_dtype_sum(dtype);
    const struct need needs[] = {
        {"out", CP_DELTA_OUT, CP_LAYOUT_PLAIN, dtype, out->n[1], out->n[2],
         call->value_dim},
        {"dout", CP_DELTA_DOUT, CP_LAYOUT_PLAIN, dtype, out->n[1], out->n[2],
         call->value_dim},
        {"dlse", CP_DELTA_DLSE, CP_LAYOUT_PLAIN, sum, out->n[1], out->n[2], 1},
        {"delta", CP_DELTA_DELTA, CP_LAYOUT_PLAIN, sum, out->n[1], out->n[2], 1},
    };
    if ((call->want_lse != 0) != (args->box[CP_DELTA_DLSE] != NULL)) {
        return cp_verify_fail(args->at, "the gradient of the lse is %s",
                              call->want_lse != 0 ? "not given" : "not the call's");
    }
    return check_needs(args, args->box[CP_DELTA_OUT]->n[0], needs,
                       (int)(sizeof needs / sizeof *needs));
}

static enum cp_code check_grad(const struct args *args, const struct cp_call *call)
{
    const struct cp_box *q = args->box[CP_GRAD_Q];
    const struct cp_box *k = args->box[CP_GRAD_K];
    int64_t rows = q->n[1];
    int64_t heads = q->n[2];
    int64_t keys = k->n[1];
    int64_t kv_heads = k->n[2];
    enum cp_dtype dtype = (enum cp_dtype)call->dtype;
    enum cp_dtype sum = cp_dtype_sum(dtype);
    const struct need needs[] = {
        {"q", CP_GRAD_Q, CP_LAYOUT_PLAIN, dtype, rows, heads, call->head_dim},
        {"k", CP_GRAD_K, CP_LAYOUT_PLAIN, dtype, keys, kv_heads, call->head_dim},
        {"v", CP_GRAD_V, CP_LAYOUT_PLAIN, dtype, keys, kv_heads, call->value_dim},
        {"dout", CP_GRAD_DOUT, CP_LAYOUT_PLAIN, dtype, rows, heads, call->value_dim},
        {"lse", CP_GRAD_LSE, CP_LAYOUT_PLAIN, sum, rows, heads, 1},
        {"delta", CP_GRAD_DELTA, CP_LAYOUT_PLAIN, sum, rows, heads, 1},
        {"dq", CP_GRAD_DQ, CP_LAYOUT_PLAIN, sum, rows, heads, call->head_dim},
        {"dk", CP_GRAD_DK, CP_LAYOUT_PLAIN, sum, keys, kv_heads, call->head_dim},
        {"dv", CP_GRAD_DV, CP_LAYOUT_PLAIN, sum, keys, kv_heads, call->value_dim},
    };
    CP_TRY(check_needs(args, q->n[0], needs, (int)(sizeof needs / sizeof *needs)));
    return check_mask(args, CP_GRAD_MASK, rows, heads, keys);
}

/* Are the places first .. first + count - 1 among those of `all`? */
static bool is_among(int64_t first, int64_t count, int64_t all)
{
    return first >= 0 && count <= all && first <= all - count;
}

/* ATTEND and GRAD: positions that exist, the kv heads that these heads use, and no pair that
 * causal order forbids. */
static enum cp_code check_block(const struct cp_verify_at *at,
                                const struct cp_plan *plan, const struct cp_step *step,
                                const struct cp_box *q, const struct cp_box *k)
{
    struct cp_range heads = {step->head_first, q->n[2]};
    const struct cp_call *call = &plan->signature.call;
    const struct cp_range *last_rows = &plan->q_rows[plan->world - 1];
    const struct cp_range *last_keys = &plan->kv_rows[plan->world - 1];
    bool is_causal = call->is_causal != 0;
    if (!is_among(step->q_first, q->n[1], last_rows->first + last_rows->count) ||
        !is_among(step->k_first, k->n[1], last_keys->first + last_keys->count) ||
        !is_among(step->head_first, q->n[2], call->heads) ||
        !is_among(step->kv_head_first, k->n[2], call->kv_heads)) {
        return cp_verify_fail(at, "a position that the call does not have");
    }
    if (cp_verify_box_is_empty(q) || cp_verify_box_is_empty(k)) {
        return CP_OK;
    }
    struct cp_range kv = cp_kv_heads_of(heads, plan->heads_per_kv);
    if (kv.first < step->kv_head_first ||
        kv.first + kv.count > step->kv_head_first + k->n[2]) {
        return cp_verify_fail(
            at,
            "heads %lld to %lld use kv heads %lld to %lld, but it has "
            "%lld from %lld",
            (long long)heads.first, (long long)(heads.first + heads.count - 1),
            (long long)kv.first, (long long)(kv.first + kv.count - 1),
            (long long)k->n[2], (long long)step->kv_head_first);
    }
    if (step->is_causal && !is_causal) {
        return cp_verify_fail(at, "a causal edge in a call that is not causal");
    }
    if (is_causal && !step->is_causal && step->k_first + k->n[1] - 1 > step->q_first) {
        return cp_verify_fail(at, "row %lld would see keys up to %lld: no causal edge",
                              (long long)step->q_first,
                              (long long)(step->k_first + k->n[1] - 1));
    }
    return CP_OK;
}

static bool is_of_attention(enum cp_step_op op)
{
    return op == CP_STEP_ATTEND || op == CP_STEP_FINISH || op == CP_STEP_DELTA ||
           op == CP_STEP_GRAD;
}

static enum cp_code check_op(const struct args *args, const struct cp_step *step)
{
    const struct cp_verify_at *at = args->at;
    const struct cp_plan *plan = args->plan;
    const struct cp_call *call = &plan->signature.call;
    if (is_of_attention(at->op) && !cp_call_is_attention(call)) {
        return cp_verify_fail(at, "the call is no attention");
    }
    switch (at->op) {
    case CP_STEP_COPY:
    case CP_STEP_REDUCE:
    case CP_STEP_PACK:
        return check_move(args);
    case CP_STEP_ZERO:
        return check_zero(args);
    case CP_STEP_SEND:
    case CP_STEP_RECV:
        return check_message(args, step);
    case CP_STEP_PUBLISH:
    case CP_STEP_AWAIT:
        if (step->signal >= CP_WALK_SIGNALS || step->value == 0) {
            return cp_verify_fail(at, "signal %d, value %u: nobody has such a counter",
                                  step->signal, (unsigned)step->value);
        }
        if (at->op == CP_STEP_AWAIT && (step->peer < 0 || step->peer >= plan->world)) {
            return cp_verify_fail(at, "rank %d of %d", (int)step->peer, plan->world);
        }
        return CP_OK;
    case CP_STEP_ATTEND:
        CP_TRY(check_attend(args, call));
        return check_block(at, plan, step, args->box[CP_ATTEND_Q],
                           args->box[CP_ATTEND_K]);
    case CP_STEP_GRAD:
        CP_TRY(check_grad(args, call));
        return check_block(at, plan, step, args->box[CP_GRAD_Q], args->box[CP_GRAD_K]);
    case CP_STEP_FINISH:
        return check_finish(args, call);
    case CP_STEP_DELTA:
        return check_delta(args, call);
    case CP_STEP_OPS:
        break;
    }
    return CP_OK;
}

enum cp_code cp_verify_steps(const struct cp_schedule *schedule, int call)
{
    struct cp_verify_at at = {.call = call, .rank = schedule->rank};
    int32_t before[CP_LANES] = {0};
    for (int32_t i = 0; i < schedule->step_count; i++) {
        const struct cp_step *step = &schedule->steps[i];
        struct args args = {.at = &at, .plan = schedule->plan};
        at.step = i;
        at.op = (enum cp_step_op)step->op;
        if (step->op >= CP_STEP_OPS || step->lane >= CP_LANES) {
            return cp_verify_fail(&at, "no such op or lane");
        }
        for (int lane = 0; lane < CP_LANES; lane++) {
            if (step->after[lane] < 0 || step->after[lane] > before[lane]) {
                return cp_verify_fail(&at,
                                      "comes after %d steps of lane %d, of which only "
                                      "%d stand before it",
                                      (int)step->after[lane], lane, (int)before[lane]);
            }
        }
        before[step->lane] += 1;
        CP_TRY(gather_args(schedule, &args));
        CP_TRY(check_op(&args, step));
    }
    return CP_OK;
}
