/* The rules, step by step. */
#include "schedule/verify_meaning.h"

#include <string.h>

static int64_t row_end(const struct cp_range *rows, int world)
{
    int64_t end = 0;
    for (int rank = 0; rank < world; rank++) {
        int64_t own = rows[rank].first + rows[rank].count;
        end = own > end ? own : end;
    }
    return end;
}

static bool has_attention(const struct cp_plan *plan)
{
    int32_t op = plan->signature.call.op;
    return op == CP_OP_ATTENTION || op == CP_OP_ATTENTION_BACKWARD;
}

static int64_t q_count(const struct cp_plan *plan)
{
    return row_end(plan->q_rows, plan->world);
}

static int64_t key_count(const struct cp_plan *plan)
{
    return row_end(plan->kv_rows, plan->world);
}

int64_t cp_meaning_set_words(const struct cp_plan *plan)
{
    if (!has_attention(plan)) {
        return plan->world / 64 + 1;
    }
    int64_t keys = key_count(plan);
    int64_t pairs = q_count(plan) * plan->heads_per_kv;
    return (keys > pairs ? keys : pairs) / 64 + 1;
}

enum cp_code cp_meaning_check_size(const struct cp_plan *plan, int call)
{
    const struct cp_call *of = &plan->signature.call;
    bool is_attention = has_attention(plan);
    int64_t rows = is_attention ? q_count(plan) : row_end(plan->cut, plan->world);
    int64_t keys = is_attention ? key_count(plan) : 0;
    int64_t batches = is_attention ? of->batch : plan->outer;
    if (call >= CP_TOKEN_CALLS || batches > CP_TOKEN_BATCHES || rows > CP_TOKEN_ROWS ||
        keys > CP_TOKEN_ROWS || of->heads > CP_TOKEN_ROWS) {
        return cp_fail(
            CP_ERR_INTERNAL,
            "call %d: %lld rows, %lld keys, %lld batches are more than a proof "
            "can name",
            call, (long long)rows, (long long)keys, (long long)batches);
    }
    return CP_OK;
}

/* ---- tokens ---- */

static cp_token role_token(const struct cp_meaning *meaning, enum cp_tensor_role role,
                           int64_t batch, int64_t row, int64_t head)
{
    return cp_token_of(CP_MARK_ROLE + (int)role, meaning->call, batch, row, head, 0);
}

static cp_token no_row_token(const struct cp_meaning *meaning, enum cp_tensor_role role)
{
    return role_token(meaning, role, 0, CP_TOKEN_NO_ROW, 0);
}

static cp_token mask_token(const struct cp_meaning *meaning, int64_t batch,
                           int64_t head, int64_t row, int64_t key)
{
    return cp_token_of(CP_MARK_ROLE + CP_TENSOR_MASK, meaning->call, batch, head, row,
                       key);
}

/* The name of row 0 of a tensor of `rank`. */
static int64_t first_row(const struct cp_plan *plan, int rank, enum cp_tensor_role role)
{
    switch (role) {
    case CP_TENSOR_K:
    case CP_TENSOR_V:
    case CP_TENSOR_DK:
    case CP_TENSOR_DV:
        return plan->kv_rows[rank].first;
    case CP_TENSOR_SHARE:
        return plan->cut[rank].first;
    case CP_TENSOR_WHOLE:
    case CP_TENSOR_MASK:
        return 0;
    case CP_TENSOR_Q:
    case CP_TENSOR_OUT:
    case CP_TENSOR_LSE:
    case CP_TENSOR_DOUT:
    case CP_TENSOR_DLSE:
    case CP_TENSOR_DQ:
    case CP_TENSOR_DELTA:
    case CP_TENSORS:
        break;
    }
    return plan->q_rows[rank].first;
}

/* What the rows of a tensor that is cut are called: where ranks add theirs, sums. */
static enum cp_tensor_role cut_role(const struct cp_plan *plan)
{
    return plan->signature.call.op == CP_OP_REDUCE_SCATTER ? CP_TENSOR_WHOLE
                                                           : CP_TENSOR_SHARE;
}

static bool is_cut(enum cp_tensor_role role)
{
    return role == CP_TENSOR_WHOLE || role == CP_TENSOR_SHARE;
}

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
    enum cp_tensor_role name = is_cut(role) ? cut_role(plan) : role;
    int64_t row = is_mask ? 0 : first_row(plan, rank, role);
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
                                 ? mask_token(meaning, b, i1, mask_row + i2, key + i3)
                                 : role_token(meaning, name, b, row + i1, i2);
                }
            }
        }
    }
    return name == CP_TENSOR_WHOLE ? fill_sets(meaning, rank, input) : CP_OK;
}

/* What an arg of a step should hold in a cell. */
static enum cp_code expect(const struct cp_verify_at *at, const char *name,
                           const struct cp_arg *arg, int64_t cell, cp_token wanted)
{
    cp_token token = arg->content->tokens[cell];
    char text[2][CP_TOKEN_TEXT];
    if (token == wanted) {
        return CP_OK;
    }
    if (cp_token_mark(token) == CP_MARK_NONE) {
        return cp_verify_fail(at,
                              "%s (buffer %d) is read before it is written: it should "
                              "hold %s",
                              name, (int)arg->box->buffer,
                              cp_token_print(wanted, text[0]));
    }
    return cp_verify_fail(at, "%s (buffer %d) holds %s, not %s", name,
                          (int)arg->box->buffer, cp_token_print(token, text[0]),
                          cp_token_print(wanted, text[1]));
}

/* ---- moving ---- */

/* An output is written once; sums grow in place. */
static enum cp_code check_free(const struct cp_verify_at *at, const struct cp_arg *dst,
                               int64_t cell)
{
    cp_token token = dst->content->tokens[cell];
    char text[CP_TOKEN_TEXT];
    if (dst->content->shape.buffer.kind == CP_BUFFER_OUTPUT &&
        cp_token_mark(token) != CP_MARK_NONE) {
        return cp_verify_fail(at, "writes an output again that holds %s",
                              cp_token_print(token, text));
    }
    return CP_OK;
}

/* Is a value of this meaning a sum, kept in more bits than what it is the sum of? */
static bool is_summed(int mark)
{
    return mark == CP_MARK_ROLE + CP_TENSOR_DQ || mark == CP_MARK_ROLE + CP_TENSOR_DK ||
           mark == CP_MARK_ROLE + CP_TENSOR_DV ||
           mark == CP_MARK_ROLE + CP_TENSOR_WHOLE;
}

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
    if (is_converted && mark != CP_MARK_ZERO && !is_summed(mark)) {
        return cp_verify_fail(at, "converts %s", cp_token_print(token, text));
    }
    CP_TRY(check_free(at, dst, to));
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
        CP_TRY(check_free(at, dst, cell));
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

/* The cell of a sum becomes one of `wanted`, if it is still zero. */
static enum cp_code claim(const struct cp_verify_at *at, const char *name,
                          const struct cp_arg *arg, int64_t cell, cp_token wanted)
{
    if (cp_token_mark(arg->content->tokens[cell]) == CP_MARK_ZERO) {
        arg->content->tokens[cell] = wanted;
    }
    return expect(at, name, arg, cell, wanted);
}

/* Adds the elements first .. last to the set of a cell. */
static enum cp_code take_up(const struct cp_meaning *meaning,
                            const struct cp_verify_at *at, const char *name,
                            const struct cp_arg *arg, int64_t cell, int64_t first,
                            int64_t last, const char *element)
{
    uint64_t *set = cp_content_set(meaning->memory, arg->content, cell);
    int64_t twice = cp_set_add(set, first, last);
    char text[CP_TOKEN_TEXT];
    if (twice >= 0) {
        return cp_verify_fail(at, "%s (buffer %d), %s, takes up %s %lld a second time",
                              name, (int)arg->box->buffer,
                              cp_token_print(arg->content->tokens[cell], text), element,
                              (long long)twice);
    }
    return CP_OK;
}

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
    if (!is_summed(cp_token_mark(token))) {
        return cp_verify_fail(at, "adds buffer %d, which holds %s",
                              (int)src->box->buffer, cp_token_print(token, text));
    }
    CP_TRY(claim(at, "the sum", dst, to, token));
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

/* ---- attention ---- */

/* A block of queries and keys: the names of its first ones, and how many. */
struct block {
    int64_t batch, row, head, key, kv_head;
    int64_t batches, rows, heads, keys, kv_heads;
    bool is_causal;
};

static struct block block_of(const struct cp_step *step, const struct cp_arg *q,
                             const struct cp_arg *k)
{
    struct block block = {
        .row = step->q_first,
        .head = step->head_first,
        .key = step->k_first,
        .kv_head = step->kv_head_first,
        .batches = q->box->n[0],
        .rows = q->box->n[1],
        .heads = q->box->n[2],
        .keys = k->box->n[1],
        .kv_heads = k->box->n[2],
        .is_causal = step->is_causal,
    };
    if (!cp_verify_box_is_empty(q->box)) {
        block.batch =
            cp_token_batch(q->content->tokens[cp_content_cell(q, 0, 0, 0, 0)]);
    }
    return block;
}

/* Keys of the block that its row number `i` may see. */
static int64_t visible_keys(const struct block *block, int64_t i)
{
    int64_t seen = block->row + i + 1 - block->key;
    if (!block->is_causal || seen > block->keys) {
        return block->keys;
    }
    return seen > 0 ? seen : 0;
}

/* Does a tensor of query rows hold those of the block? */
static enum cp_code expect_rows(const struct cp_meaning *meaning,
                                const struct cp_verify_at *at, const char *name,
                                const struct cp_arg *arg, enum cp_tensor_role role,
                                const struct block *block)
{
    for (int64_t b = 0; b < block->batches; b++) {
        for (int64_t i = 0; i < block->rows; i++) {
            for (int64_t h = 0; h < block->heads; h++) {
                CP_TRY(expect(at, name, arg, cp_content_cell(arg, b, i, h, 0),
                              role_token(meaning, role, block->batch + b,
                                         block->row + i, block->head + h)));
            }
        }
    }
    return CP_OK;
}

static enum cp_code expect_keys(const struct cp_meaning *meaning,
                                const struct cp_verify_at *at, const char *name,
                                const struct cp_arg *arg, enum cp_tensor_role role,
                                const struct block *block)
{
    for (int64_t b = 0; b < block->batches; b++) {
        for (int64_t i = 0; i < block->keys; i++) {
            for (int64_t h = 0; h < block->kv_heads; h++) {
                CP_TRY(expect(at, name, arg, cp_content_cell(arg, b, i, h, 0),
                              role_token(meaning, role, block->batch + b,
                                         block->key + i, block->kv_head + h)));
            }
        }
    }
    return CP_OK;
}

static enum cp_code expect_mask(const struct cp_meaning *meaning,
                                const struct cp_verify_at *at, const struct cp_arg *arg,
                                const struct block *block)
{
    if (arg->content == NULL) {
        return CP_OK;
    }
    const struct cp_call *call = &meaning->plan->signature.call;
    const int64_t *n = arg->box->n;
    int64_t batch = call->mask_batch == 1 ? 0 : block->batch;
    int64_t head = call->mask_heads == 1 ? 0 : block->head;
    int64_t row = meaning->plan->mask_rows == CP_AXIS_ONE ? 0 : block->row;
    int64_t key = meaning->plan->mask_keys == CP_AXIS_ONE ? 0 : block->key;
    for (int64_t b = 0; b < n[0]; b++) {
        for (int64_t h = 0; h < n[1]; h++) {
            for (int64_t i = 0; i < n[2]; i++) {
                for (int64_t j = 0; j < n[3]; j++) {
                    CP_TRY(expect(
                        at, "mask", arg, cp_content_cell(arg, b, h, i, j),
                        mask_token(meaning, batch + b, head + h, row + i, key + j)));
                }
            }
        }
    }
    return CP_OK;
}

/* The rows' own sums (a state, dq) take up the keys that each may see. */
static enum cp_code take_keys(const struct cp_meaning *meaning,
                              const struct cp_verify_at *at, const char *name,
                              const struct cp_arg *arg, int mark,
                              const struct block *block)
{
    CP_TRY(cp_content_need_sets(meaning->memory, arg->content));
    for (int64_t b = 0; b < block->batches; b++) {
        for (int64_t i = 0; i < block->rows; i++) {
            int64_t keys = visible_keys(block, i);
            for (int64_t h = 0; h < block->heads; h++) {
                int64_t cell = cp_content_cell(arg, b, i, h, 0);
                cp_token wanted = cp_token_of(mark, meaning->call, block->batch + b,
                                              block->row + i, block->head + h, 0);
                if (cp_token_mark(arg->content->tokens[cell]) == CP_MARK_NONE) {
                    CP_TRY(expect(at, name, arg, cell, wanted));
                }
                if (keys > 0) {
                    CP_TRY(claim(at, name, arg, cell, wanted));
                    CP_TRY(take_up(meaning, at, name, arg, cell, block->key,
                                   block->key + keys - 1, "key"));
                }
            }
        }
    }
    return CP_OK;
}

/* One key's sum (dk, dv) takes up the rows that see it, for the heads that use its kv head:
 * the pair of head h of the kv head's and row i is number h * rows of the sequence + i. */
static enum cp_code take_pairs_of_key(const struct cp_meaning *meaning,
                                      const struct cp_verify_at *at, const char *name,
                                      const struct cp_arg *arg, int64_t cell,
                                      int64_t kv_head, int64_t key,
                                      const struct block *block)
{
    int64_t per_kv = meaning->plan->heads_per_kv;
    int64_t all_rows = q_count(meaning->plan);
    int64_t first = block->row;
    int64_t last = block->row + block->rows - 1;
    if (block->is_causal && key > first) {
        first = key;
    }
    for (int64_t h = 0; h < block->heads && first <= last; h++) {
        int64_t head = block->head + h;
        if (head / per_kv == kv_head) {
            int64_t base = (head - kv_head * per_kv) * all_rows;
            CP_TRY(take_up(meaning, at, name, arg, cell, base + first, base + last,
                           "pair"));
        }
    }
    return CP_OK;
}

static enum cp_code take_pairs(const struct cp_meaning *meaning,
                               const struct cp_verify_at *at, const char *name,
                               const struct cp_arg *arg, enum cp_tensor_role role,
                               const struct block *block)
{
    CP_TRY(cp_content_need_sets(meaning->memory, arg->content));
    for (int64_t b = 0; b < block->batches; b++) {
        for (int64_t j = 0; j < block->keys; j++) {
            for (int64_t g = 0; g < block->kv_heads; g++) {
                int64_t key = block->key + j;
                int64_t kv_head = block->kv_head + g;
                int64_t cell = cp_content_cell(arg, b, j, g, 0);
                CP_TRY(
                    claim(at, name, arg, cell,
                          role_token(meaning, role, block->batch + b, key, kv_head)));
                CP_TRY(take_pairs_of_key(meaning, at, name, arg, cell, kv_head, key,
                                         block));
            }
        }
    }
    return CP_OK;
}

static enum cp_code attend(const struct cp_meaning *meaning,
                           const struct cp_verify_at *at, const struct cp_step *step,
                           const struct cp_arg args[CP_STEP_ARGS])
{
    struct block block = block_of(step, &args[CP_ATTEND_Q], &args[CP_ATTEND_K]);
    CP_TRY(expect_rows(meaning, at, "q", &args[CP_ATTEND_Q], CP_TENSOR_Q, &block));
    CP_TRY(expect_keys(meaning, at, "k", &args[CP_ATTEND_K], CP_TENSOR_K, &block));
    CP_TRY(expect_keys(meaning, at, "v", &args[CP_ATTEND_V], CP_TENSOR_V, &block));
    CP_TRY(expect_mask(meaning, at, &args[CP_ATTEND_MASK], &block));
    return take_keys(meaning, at, "state", &args[CP_ATTEND_STATE], CP_MARK_STATE,
                     &block);
}

static enum cp_code grad(const struct cp_meaning *meaning,
                         const struct cp_verify_at *at, const struct cp_step *step,
                         const struct cp_arg args[CP_STEP_ARGS])
{
    struct block block = block_of(step, &args[CP_GRAD_Q], &args[CP_GRAD_K]);
    CP_TRY(expect_rows(meaning, at, "q", &args[CP_GRAD_Q], CP_TENSOR_Q, &block));
    CP_TRY(
        expect_rows(meaning, at, "dout", &args[CP_GRAD_DOUT], CP_TENSOR_DOUT, &block));
    CP_TRY(expect_rows(meaning, at, "lse", &args[CP_GRAD_LSE], CP_TENSOR_LSE, &block));
    CP_TRY(expect_rows(meaning, at, "delta", &args[CP_GRAD_DELTA], CP_TENSOR_DELTA,
                       &block));
    CP_TRY(expect_keys(meaning, at, "k", &args[CP_GRAD_K], CP_TENSOR_K, &block));
    CP_TRY(expect_keys(meaning, at, "v", &args[CP_GRAD_V], CP_TENSOR_V, &block));
    CP_TRY(expect_mask(meaning, at, &args[CP_GRAD_MASK], &block));
    CP_TRY(take_keys(meaning, at, "dq", &args[CP_GRAD_DQ], CP_MARK_ROLE + CP_TENSOR_DQ,
                     &block));
    CP_TRY(take_pairs(meaning, at, "dk", &args[CP_GRAD_DK], CP_TENSOR_DK, &block));
    return take_pairs(meaning, at, "dv", &args[CP_GRAD_DV], CP_TENSOR_DV, &block);
}

/* Keys of the sequence that a row may see. */
static int64_t keys_of_row(const struct cp_plan *plan, int64_t row)
{
    int64_t keys = key_count(plan);
    return plan->signature.call.is_causal != 0 && row + 1 < keys ? row + 1 : keys;
}

static enum cp_code write_result(const struct cp_meaning *meaning,
                                 const struct cp_verify_at *at,
                                 const struct cp_arg *arg, enum cp_tensor_role role,
                                 int64_t cell, cp_token state)
{
    if (arg->content == NULL) {
        return CP_OK;
    }
    CP_TRY(check_free(at, arg, cell));
    arg->content->tokens[cell] = cp_token_mark(state) == CP_MARK_ZERO
                                     ? no_row_token(meaning, role)
                                     : role_token(meaning, role, cp_token_batch(state),
                                                  cp_token_a(state), cp_token_b(state));
    return CP_OK;
}

static enum cp_code finish_cell(const struct cp_meaning *meaning,
                                const struct cp_verify_at *at,
                                const struct cp_arg args[CP_STEP_ARGS], int64_t b,
                                int64_t row, int64_t head)
{
    const struct cp_arg *state = &args[CP_FINISH_STATE];
    const struct cp_arg *lse = &args[CP_FINISH_LSE];
    int64_t cell = cp_content_cell(state, b, row, head, 0);
    cp_token token = state->content->tokens[cell];
    int mark = cp_token_mark(token);
    char text[CP_TOKEN_TEXT];
    if (mark != CP_MARK_ZERO && mark != CP_MARK_STATE) {
        return cp_verify_fail(at, "the state (buffer %d) holds %s",
                              (int)state->box->buffer, cp_token_print(token, text));
    }
    if (mark == CP_MARK_STATE) {
        int64_t wanted = keys_of_row(meaning->plan, cp_token_a(token));
        const uint64_t *set = cp_content_set(meaning->memory, state->content, cell);
        int64_t count = cp_set_count(set, 0, meaning->memory->set_words * 64 - 1);
        if (count != wanted) {
            return cp_verify_fail(at, "%s has met %lld of %lld keys",
                                  cp_token_print(token, text), (long long)count,
                                  (long long)wanted);
        }
    }
    CP_TRY(write_result(meaning, at, &args[CP_FINISH_OUT], CP_TENSOR_OUT,
                        cp_content_cell(&args[CP_FINISH_OUT], b, row, head, 0), token));
    return write_result(
        meaning, at, lse, CP_TENSOR_LSE,
        lse->content == NULL ? 0 : cp_content_cell(lse, b, row, head, 0), token);
}

static enum cp_code finish(const struct cp_meaning *meaning,
                           const struct cp_verify_at *at,
                           const struct cp_arg args[CP_STEP_ARGS])
{
    const int64_t *n = args[CP_FINISH_STATE].box->n;
    for (int64_t b = 0; b < n[0]; b++) {
        for (int64_t row = 0; row < n[1]; row++) {
            for (int64_t head = 0; head < n[2]; head++) {
                CP_TRY(finish_cell(meaning, at, args, b, row, head));
            }
        }
    }
    return CP_OK;
}

static enum cp_code delta_cell(const struct cp_meaning *meaning,
                               const struct cp_verify_at *at,
                               const struct cp_arg args[CP_STEP_ARGS], int64_t b,
                               int64_t i, int64_t h)
{
    const struct cp_arg *out = &args[CP_DELTA_OUT];
    const struct cp_arg *dout = &args[CP_DELTA_DOUT];
    const struct cp_arg *dlse = &args[CP_DELTA_DLSE];
    const struct cp_arg *delta = &args[CP_DELTA_DELTA];
    int64_t cell = cp_content_cell(out, b, i, h, 0);
    cp_token token = out->content->tokens[cell];
    int64_t batch = cp_token_batch(token);
    int64_t row = cp_token_a(token);
    int64_t head = cp_token_b(token);
    CP_TRY(expect(at, "out", out, cell,
                  role_token(meaning, CP_TENSOR_OUT, batch, row, head)));
    CP_TRY(expect(at, "dout", dout, cp_content_cell(dout, b, i, h, 0),
                  role_token(meaning, CP_TENSOR_DOUT, batch, row, head)));
    if (dlse->content != NULL) {
        CP_TRY(expect(at, "dlse", dlse, cp_content_cell(dlse, b, i, h, 0),
                      role_token(meaning, CP_TENSOR_DLSE, batch, row, head)));
    }
    delta->content->tokens[cp_content_cell(delta, b, i, h, 0)] =
        role_token(meaning, CP_TENSOR_DELTA, batch, row, head);
    return CP_OK;
}

static enum cp_code delta(const struct cp_meaning *meaning,
                          const struct cp_verify_at *at,
                          const struct cp_arg args[CP_STEP_ARGS])
{
    const int64_t *n = args[CP_DELTA_OUT].box->n;
    for (int64_t b = 0; b < n[0]; b++) {
        for (int64_t row = 0; row < n[1]; row++) {
            for (int64_t head = 0; head < n[2]; head++) {
                CP_TRY(delta_cell(meaning, at, args, b, row, head));
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
        return attend(meaning, at, step, args);
    case CP_STEP_FINISH:
        return finish(meaning, at, args);
    case CP_STEP_DELTA:
        return delta(meaning, at, args);
    case CP_STEP_GRAD:
        return grad(meaning, at, step, args);
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
        return keys_of_row(plan, row);
    }
    struct cp_range rows = {0, q_count(plan)};
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
        CP_TRY(expect(at, "the result", arg, cell, wanted));
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
    if (is_summed(cp_token_mark(wanted))) {
        return check_sum(meaning, at, arg, cell, wanted);
    }
    bool is_result = role == CP_TENSOR_OUT || role == CP_TENSOR_LSE;
    if (is_result && keys_of_row(meaning->plan, cp_token_a(wanted)) == 0 &&
        arg->content->tokens[cell] == no_row_token(meaning, role)) {
        return CP_OK;
    }
    return expect(at, "the result", arg, cell, wanted);
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
    enum cp_tensor_role name = is_cut(role) ? cut_role(meaning->plan) : role;
    int64_t first = first_row(meaning->plan, at->rank, role);
    for (int64_t b = 0; b < n[0]; b++) {
        for (int64_t row = 0; row < n[1]; row++) {
            for (int64_t head = 0; head < n[2]; head++) {
                CP_TRY(check_cell(meaning, at, &arg,
                                  cp_content_cell(&arg, b, row, head, 0),
                                  role_token(meaning, name, b, first + row, head)));
            }
        }
    }
    return CP_OK;
}
