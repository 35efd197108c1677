/* Blocks of queries and keys, row by row. */
#include "schedule/verify_attention.h"

#include <string.h>

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
                CP_TRY(cp_expect(at, name, arg, cp_content_cell(arg, b, i, h, 0),
                                 cp_name_row(meaning, role, block->batch + b,
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
                CP_TRY(cp_expect(at, name, arg, cp_content_cell(arg, b, i, h, 0),
                                 cp_name_row(meaning, role, block->batch + b,
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
                    CP_TRY(cp_expect(
                        at, "mask", arg, cp_content_cell(arg, b, h, i, j),
                        cp_name_mask(meaning, batch + b, head + h, row + i, key + j)));
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
                    CP_TRY(cp_expect(at, name, arg, cell, wanted));
                }
                if (keys > 0) {
                    CP_TRY(cp_expect_sum(at, name, arg, cell, wanted));
                    CP_TRY(cp_take_up(meaning, at, name, arg, cell, block->key,
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
    int64_t all_rows = cp_name_queries(meaning->plan);
    int64_t first = block->row;
    int64_t last = block->row + block->rows - 1;
    if (block->is_causal && key > first) {
        first = key;
    }
    for (int64_t h = 0; h < block->heads && first <= last; h++) {
        int64_t head = block->head + h;
        if (head / per_kv == kv_head) {
            int64_t base = (head - kv_head * per_kv) * all_rows;
            CP_TRY(cp_take_up(meaning, at, name, arg, cell, base + first, base + last,
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
                CP_TRY(cp_expect_sum(
                    at, name, arg, cell,
                    cp_name_row(meaning, role, block->batch + b, key, kv_head)));
                CP_TRY(take_pairs_of_key(meaning, at, name, arg, cell, kv_head, key,
                                         block));
            }
        }
    }
    return CP_OK;
}

enum cp_code cp_meaning_grad(const struct cp_meaning *meaning,
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

static enum cp_code write_result(const struct cp_meaning *meaning,
                                 const struct cp_verify_at *at,
                                 const struct cp_arg *arg, enum cp_tensor_role role,
                                 int64_t cell, cp_token state)
{
    if (arg->content == NULL) {
        return CP_OK;
    }
    CP_TRY(cp_expect_free(at, arg, cell));
    arg->content->tokens[cell] =
        cp_token_mark(state) == CP_MARK_ZERO
            ? cp_name_no_row(meaning, role)
            : cp_name_row(meaning, role, cp_token_batch(state), cp_token_a(state),
                          cp_token_b(state));
    return CP_OK;
}

/* A state and what becomes of it. */
struct ending {
    struct cp_arg state, out, lse;
};

static enum cp_code finish_cell(const struct cp_meaning *meaning,
                                const struct cp_verify_at *at,
                                const struct ending *ending, int64_t b, int64_t row,
                                int64_t head)
{
    const struct cp_arg *state = &ending->state;
    const struct cp_arg *lse = &ending->lse;
    int64_t cell = cp_content_cell(state, b, row, head, 0);
    cp_token token = state->content->tokens[cell];
    int mark = cp_token_mark(token);
    char text[CP_TOKEN_TEXT];
    if (mark != CP_MARK_ZERO && mark != CP_MARK_STATE) {
        return cp_verify_fail(at, "the state (buffer %d) holds %s",
                              (int)state->box->buffer, cp_token_print(token, text));
    }
    if (mark == CP_MARK_STATE) {
        int64_t wanted = cp_name_keys_of_row(meaning->plan, cp_token_a(token));
        const uint64_t *set = cp_content_set(meaning->memory, state->content, cell);
        int64_t count = cp_set_count(set, 0, meaning->memory->set_words * 64 - 1);
        if (count != wanted) {
            return cp_verify_fail(at, "%s has met %lld of %lld keys",
                                  cp_token_print(token, text), (long long)count,
                                  (long long)wanted);
        }
    }
    CP_TRY(write_result(meaning, at, &ending->out, CP_TENSOR_OUT,
                        cp_content_cell(&ending->out, b, row, head, 0), token));
    return write_result(
        meaning, at, lse, CP_TENSOR_LSE,
        lse->content == NULL ? 0 : cp_content_cell(lse, b, row, head, 0), token);
}

static enum cp_code finish(const struct cp_meaning *meaning,
                           const struct cp_verify_at *at, const struct ending *ending)
{
    const int64_t *n = ending->state.box->n;
    for (int64_t b = 0; b < n[0]; b++) {
        for (int64_t row = 0; row < n[1]; row++) {
            for (int64_t head = 0; head < n[2]; head++) {
                CP_TRY(finish_cell(meaning, at, ending, b, row, head));
            }
        }
    }
    return CP_OK;
}

enum cp_code cp_meaning_finish(const struct cp_meaning *meaning,
                               const struct cp_verify_at *at,
                               const struct cp_arg args[CP_STEP_ARGS])
{
    const struct ending ending = {
        args[CP_FINISH_STATE],
        args[CP_FINISH_OUT],
        args[CP_FINISH_LSE],
    };
    return finish(meaning, at, &ending);
}

/* The state holds that everywhere: zeroes, or nothing. */
static void fill_state(const struct cp_meaning *meaning, const struct cp_arg *state,
                       enum cp_mark mark)
{
    const int64_t *n = state->box->n;
    for (int64_t b = 0; b < n[0]; b++) {
        for (int64_t row = 0; row < n[1]; row++) {
            for (int64_t head = 0; head < n[2]; head++) {
                int64_t cell = cp_content_cell(state, b, row, head, 0);
                state->content->tokens[cell] = (cp_token)mark;
                if (state->content->sets != NULL) {
                    memset(cp_content_set(meaning->memory, state->content, cell), 0,
                           (size_t)meaning->memory->set_words * sizeof(uint64_t));
                }
            }
        }
    }
}

enum cp_code cp_meaning_attend(const struct cp_meaning *meaning,
                               const struct cp_verify_at *at,
                               const struct cp_step *step,
                               const struct cp_arg args[CP_STEP_ARGS])
{
    struct block block = block_of(step, &args[CP_ATTEND_Q], &args[CP_ATTEND_K]);
    const struct ending ending = {
        args[CP_ATTEND_STATE],
        args[CP_ATTEND_OUT],
        args[CP_ATTEND_LSE],
    };
    if (step->is_first) {
        fill_state(meaning, &ending.state, CP_MARK_ZERO);
    }
    CP_TRY(expect_rows(meaning, at, "q", &args[CP_ATTEND_Q], CP_TENSOR_Q, &block));
    CP_TRY(expect_keys(meaning, at, "k", &args[CP_ATTEND_K], CP_TENSOR_K, &block));
    CP_TRY(expect_keys(meaning, at, "v", &args[CP_ATTEND_V], CP_TENSOR_V, &block));
    CP_TRY(expect_mask(meaning, at, &args[CP_ATTEND_MASK], &block));
    CP_TRY(take_keys(meaning, at, "state", &ending.state, CP_MARK_STATE, &block));
    if (ending.out.content == NULL) {
        return ending.lse.content == NULL
                   ? CP_OK
                   : cp_verify_fail(at, "makes an lse without an out");
    }
    CP_TRY(finish(meaning, at, &ending));
    fill_state(meaning, &ending.state, CP_MARK_NONE);
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
    CP_TRY(cp_expect(at, "out", out, cell,
                     cp_name_row(meaning, CP_TENSOR_OUT, batch, row, head)));
    CP_TRY(cp_expect(at, "dout", dout, cp_content_cell(dout, b, i, h, 0),
                     cp_name_row(meaning, CP_TENSOR_DOUT, batch, row, head)));
    if (dlse->content != NULL) {
        CP_TRY(cp_expect(at, "dlse", dlse, cp_content_cell(dlse, b, i, h, 0),
                         cp_name_row(meaning, CP_TENSOR_DLSE, batch, row, head)));
    }
    delta->content->tokens[cp_content_cell(delta, b, i, h, 0)] =
        cp_name_row(meaning, CP_TENSOR_DELTA, batch, row, head);
    return CP_OK;
}

enum cp_code cp_meaning_delta(const struct cp_meaning *meaning,
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
