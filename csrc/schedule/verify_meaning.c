/* The rules of what moves and adds, and of what is there in the end. */
#include "schedule/verify_meaning.h"

#include <string.h>

#include "schedule/verify_attention.h"

/* ---- inputs ---- */

/* What a rank gives to reduce_scatter is a sum that has its own part alone. */
static enum cp_code fill_sets(const struct cp_meaning *meaning, int rank,
                              struct cp_content *input)
{
    const int64_t *n = input->cells;
    int64_t count = n[0] * n[1] * n[2] * n[3];
    CP_TRY(cp_content_need_sets(meaning->memory, input));
    for (int64_t cell = 0; cell < count; cell++) {
        (void)cp_set_add(cp_content_set(meaning->memory, input, cell), rank, rank);
    }
    return CP_OK;
}

enum cp_code cp_meaning_fill(const struct cp_meaning *meaning, int rank,
                             struct cp_content *input)
{
    const struct cp_plan *plan = meaning->plan;
    const int64_t *n = input->cells;
    enum cp_tensor_role role = (enum cp_tensor_role)input->shape.buffer.role;
    bool is_mask = role == CP_TENSOR_MASK;
    enum cp_tensor_role name = cp_name_is_cut(role) ? cp_name_cut(plan) : role;
    int64_t row = is_mask ? 0 : cp_name_first_row(plan, rank, role);
    int64_t mask_row =
        is_mask && plan->mask_rows == CP_AXIS_OWN ? plan->q_rows[rank].first : 0;
    int64_t key =
        is_mask && plan->mask_keys == CP_AXIS_OWN ? plan->kv_rows[rank].first : 0;
    cp_token *token = input->tokens;
    for (int64_t b = 0; b < n[0]; b++) {
        for (int64_t i1 = 0; i1 < n[1]; i1++) {
            for (int64_t i2 = 0; i2 < n[2]; i2++) {
                for (int64_t i3 = 0; i3 < n[3]; i3++, token++) {
                    *token = is_mask
                                 ? cp_name_mask(meaning, b, i1, mask_row + i2, key + i3)
                                 : cp_name_row(meaning, name, b, row + i1, i2);
                }
            }
        }
    }
    return name == CP_TENSOR_WHOLE ? fill_sets(meaning, rank, input) : CP_OK;
}

/* ---- moving ---- */

static void move_set(const struct cp_memory *memory, const struct cp_arg *dst,
                     int64_t to, const struct cp_arg *src, int64_t from)
{
    size_t bytes = (size_t)memory->set_words * sizeof(uint64_t);
    if (dst->content->sets == NULL) {
        return;
    }
    if (src->content->sets == NULL) {
        memset(cp_content_set(memory, dst->content, to), 0, bytes);
    } else {
        memcpy(cp_content_set(memory, dst->content, to),
               cp_content_set(memory, src->content, from), bytes);
    }
}

static enum cp_code copy_cell(const struct cp_meaning *meaning,
                              const struct cp_verify_at *at, const struct cp_arg *dst,
                              int64_t to, const struct cp_arg *src, int64_t from)
{
    cp_token token = src->content->tokens[from];
    int mark = cp_token_mark(token);
    char text[CP_TOKEN_TEXT];
    bool is_converted =
        dst->content->shape.buffer.dtype != src->content->shape.buffer.dtype;
    if (mark == CP_MARK_NONE) {
        return cp_verify_fail(at, "buffer %d is read before it is written",
                              (int)src->box->buffer);
    }
    if (is_converted && mark != CP_MARK_ZERO && !cp_name_is_sum(mark)) {
        return cp_verify_fail(at, "converts %s", cp_token_print(token, text));
    }
    CP_TRY(cp_expect_free(at, dst, to));
    dst->content->tokens[to] = token;
    move_set(meaning->memory, dst, to, src, from);
    return CP_OK;
}

enum cp_code cp_meaning_copy(const struct cp_meaning *meaning,
                             const struct cp_verify_at *at, const struct cp_arg *dst,
                             const struct cp_arg *src)
{
    const int64_t *n = dst->box->n;
    int64_t last = dst->content->shape.buffer.role == CP_TENSOR_MASK ? n[3] : 1;
    if ((dst->content->shape.buffer.role == CP_TENSOR_MASK) !=
        (src->content->shape.buffer.role == CP_TENSOR_MASK)) {
        return cp_verify_fail(at, "takes a mask for something else");
    }
    if (src->content->sets != NULL) {
        CP_TRY(cp_content_need_sets(meaning->memory, dst->content));
    }
    for (int64_t b = 0; b < n[0]; b++) {
        for (int64_t i1 = 0; i1 < n[1]; i1++) {
            for (int64_t i2 = 0; i2 < n[2]; i2++) {
                for (int64_t i3 = 0; i3 < last; i3++) {
                    CP_TRY(copy_cell(meaning, at, dst,
                                     cp_content_cell(dst, b, i1, i2, i3), src,
                                     cp_content_cell(src, b, i1, i2, i3)));
                }
            }
        }
    }
    return CP_OK;
}

static enum cp_code zero(const struct cp_meaning *meaning,
                         const struct cp_verify_at *at, const struct cp_arg *dst)
{
    struct cp_content *content = dst->content;
    int64_t count =
        content->cells[0] * content->cells[1] * content->cells[2] * content->cells[3];
    for (int64_t cell = 0; cell < count; cell++) {
        CP_TRY(cp_expect_free(at, dst, cell));
        content->tokens[cell] = CP_MARK_ZERO;
    }
    if (content->sets != NULL) {
        memset(content->sets, 0,
               (size_t)(count * meaning->memory->set_words) * sizeof *content->sets);
    }
    return CP_OK;
}

static enum cp_code pack(const struct cp_meaning *meaning,
                         const struct cp_verify_at *at,
                         const struct cp_arg args[CP_STEP_ARGS])
{
    const struct cp_buffer *dst = &args[CP_ARG_DST].content->shape.buffer;
    if ((dst->layout == CP_LAYOUT_K) != (dst->role == CP_TENSOR_K)) {
        return cp_verify_fail(at, "packs k as v, or v as k");
    }
    return cp_meaning_copy(meaning, at, &args[CP_ARG_DST], &args[CP_ARG_SRC]);
}

/* ---- sums ---- */

static enum cp_code reduce_cell(const struct cp_meaning *meaning,
                                const struct cp_verify_at *at, const struct cp_arg *dst,
                                int64_t to, const struct cp_arg *src, int64_t from)
{
    cp_token token = src->content->tokens[from];
    char text[CP_TOKEN_TEXT];
    if (cp_token_mark(token) == CP_MARK_ZERO &&
        cp_token_mark(dst->content->tokens[to]) != CP_MARK_NONE) {
        return CP_OK;
    }
    if (!cp_name_is_sum(cp_token_mark(token))) {
        return cp_verify_fail(at, "adds buffer %d, which holds %s",
                              (int)src->box->buffer, cp_token_print(token, text));
    }
    CP_TRY(cp_expect_sum(at, "the sum", dst, to, token));
    uint64_t *sum = cp_content_set(meaning->memory, dst->content, to);
    const uint64_t *set = cp_content_set(meaning->memory, src->content, from);
    for (int64_t word = 0; word < meaning->memory->set_words; word++) {
        if ((sum[word] & set[word]) != 0) {
            return cp_verify_fail(at, "adds to %s what the sum has already",
                                  cp_token_print(token, text));
        }
        sum[word] |= set[word];
    }
    return CP_OK;
}

static enum cp_code reduce(const struct cp_meaning *meaning,
                           const struct cp_verify_at *at, const struct cp_arg *dst,
                           const struct cp_arg *src)
{
    const int64_t *n = dst->box->n;
    CP_TRY(cp_content_need_sets(meaning->memory, dst->content));
    CP_TRY(cp_content_need_sets(meaning->memory, src->content));
    for (int64_t b = 0; b < n[0]; b++) {
        for (int64_t row = 0; row < n[1]; row++) {
            for (int64_t head = 0; head < n[2]; head++) {
                CP_TRY(reduce_cell(meaning, at, dst,
                                   cp_content_cell(dst, b, row, head, 0), src,
                                   cp_content_cell(src, b, row, head, 0)));
            }
        }
    }
    return CP_OK;
}

enum cp_code cp_meaning_step(const struct cp_meaning *meaning,
                             const struct cp_verify_at *at, const struct cp_step *step,
                             const struct cp_arg args[CP_STEP_ARGS])
{
    switch (at->op) {
    case CP_STEP_COPY:
        return cp_meaning_copy(meaning, at, &args[CP_ARG_DST], &args[CP_ARG_SRC]);
    case CP_STEP_REDUCE:
        return reduce(meaning, at, &args[CP_ARG_DST], &args[CP_ARG_SRC]);
    case CP_STEP_ZERO:
        return zero(meaning, at, &args[CP_ARG_DST]);
    case CP_STEP_PACK:
        return pack(meaning, at, args);
    case CP_STEP_ATTEND:
        return cp_meaning_attend(meaning, at, step, args);
    case CP_STEP_FINISH:
        return cp_meaning_finish(meaning, at, args);
    case CP_STEP_DELTA:
        return cp_meaning_delta(meaning, at, args);
    case CP_STEP_GRAD:
        return cp_meaning_grad(meaning, at, step, args);
    case CP_STEP_PUBLISH:
    case CP_STEP_AWAIT:
    case CP_STEP_SEND:
    case CP_STEP_RECV:
    case CP_STEP_OPS:
        break;
    }
    return CP_OK;
}

/* ---- outputs ---- */

/* Elements that the finished sum of a row (keys, ranks) or key (pairs) has. Where k and v are
 * replicated, a rank's dk and dv are the part of its own rows: the caller adds the ranks'. */
static int64_t sum_size(const struct cp_plan *plan, int rank, enum cp_tensor_role role,
                        int64_t row)
{
    if (role == CP_TENSOR_WHOLE) {
        return plan->world;
    }
    if (role == CP_TENSOR_DQ) {
        return cp_name_keys_of_row(plan, row);
    }
    struct cp_range rows = {0, cp_name_queries(plan)};
    if (plan->signature.call.kv_replicated != 0) {
        rows = plan->q_rows[rank];
    }
    int64_t first = rows.first;
    if (plan->signature.call.is_causal != 0 && row > first) {
        first = row;
    }
    int64_t count = rows.first + rows.count - first;
    return count > 0 ? count * plan->heads_per_kv : 0;
}

static enum cp_code check_sum(const struct cp_meaning *meaning,
                              const struct cp_verify_at *at, const struct cp_arg *arg,
                              int64_t cell, cp_token wanted)
{
    enum cp_tensor_role role =
        (enum cp_tensor_role)(cp_token_mark(wanted) - CP_MARK_ROLE);
    const char *element = role == CP_TENSOR_WHOLE ? "ranks"
                          : role == CP_TENSOR_DQ  ? "keys"
                                                  : "pairs";
    int64_t size = sum_size(meaning->plan, at->rank, role, cp_token_a(wanted));
    int64_t count = 0;
    char text[CP_TOKEN_TEXT];
    if (cp_token_mark(arg->content->tokens[cell]) != CP_MARK_ZERO) {
        CP_TRY(cp_expect(at, "the result", arg, cell, wanted));
        if (arg->content->sets != NULL) {
            count = cp_set_count(cp_content_set(meaning->memory, arg->content, cell), 0,
                                 meaning->memory->set_words * 64 - 1);
        }
    }
    if (count != size) {
        return cp_verify_fail(at, "%s has %lld of %lld %s",
                              cp_token_print(wanted, text), (long long)count,
                              (long long)size, element);
    }
    return CP_OK;
}

static enum cp_code check_cell(const struct cp_meaning *meaning,
                               const struct cp_verify_at *at, const struct cp_arg *arg,
                               int64_t cell, cp_token wanted)
{
    enum cp_tensor_role role = (enum cp_tensor_role)arg->content->shape.buffer.role;
    if (cp_name_is_sum(cp_token_mark(wanted))) {
        return check_sum(meaning, at, arg, cell, wanted);
    }
    bool is_result = role == CP_TENSOR_OUT || role == CP_TENSOR_LSE;
    if (is_result && cp_name_keys_of_row(meaning->plan, cp_token_a(wanted)) == 0 &&
        arg->content->tokens[cell] == cp_name_no_row(meaning, role)) {
        return CP_OK;
    }
    return cp_expect(at, "the result", arg, cell, wanted);
}

enum cp_code cp_meaning_check_output(const struct cp_meaning *meaning,
                                     const struct cp_verify_at *at,
                                     const struct cp_content *output)
{
    struct cp_content content = *output;
    const int64_t *n = output->cells;
    struct cp_box all = {.buffer = -1, .n = {n[0], n[1], n[2], n[3]}};
    struct cp_arg arg = {&content, &all};
    enum cp_tensor_role role = (enum cp_tensor_role)output->shape.buffer.role;
    enum cp_tensor_role name = cp_name_is_cut(role) ? cp_name_cut(meaning->plan) : role;
    int64_t first = cp_name_first_row(meaning->plan, at->rank, role);
    for (int64_t b = 0; b < n[0]; b++) {
        for (int64_t row = 0; row < n[1]; row++) {
            for (int64_t head = 0; head < n[2]; head++) {
                CP_TRY(check_cell(meaning, at, &arg,
                                  cp_content_cell(&arg, b, row, head, 0),
                                  cp_name_row(meaning, name, b, first + row, head)));
            }
        }
    }
    return CP_OK;
}
