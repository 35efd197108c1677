/* Names, and the sentences where a cell has another one. */
#include "schedule/verify_name.h"

static int64_t row_end(const struct cp_range *rows, int world)
{
    int64_t end = 0;
    for (int rank = 0; rank < world; rank++) {
        int64_t own = rows[rank].first + rows[rank].count;
        end = own > end ? own : end;
    }
    return end;
}

int64_t cp_name_queries(const struct cp_plan *plan)
{
    return row_end(plan->q_rows, plan->world);
}

int64_t cp_name_keys(const struct cp_plan *plan)
{
    return row_end(plan->kv_rows, plan->world);
}

int64_t cp_name_set_words(const struct cp_plan *plan)
{
    if (!cp_call_is_attention(&plan->signature.call)) {
        return plan->world / 64 + 1;
    }
    int64_t keys = cp_name_keys(plan);
    int64_t pairs = cp_name_queries(plan) * plan->heads_per_kv;
    return (keys > pairs ? keys : pairs) / 64 + 1;
}

enum cp_code cp_name_check_size(const struct cp_plan *plan, int call)
{
    const struct cp_call *of = &plan->signature.call;
    bool is_attention = cp_call_is_attention(of);
    int64_t rows =
        is_attention ? cp_name_queries(plan) : row_end(plan->cut, plan->world);
    int64_t keys = is_attention ? cp_name_keys(plan) : 0;
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

cp_token cp_name_row(const struct cp_meaning *meaning, enum cp_tensor_role role,
                     int64_t batch, int64_t row, int64_t head)
{
    return cp_token_of(CP_MARK_ROLE + (int)role, meaning->call, batch, row, head, 0);
}

cp_token cp_name_no_row(const struct cp_meaning *meaning, enum cp_tensor_role role)
{
    return cp_name_row(meaning, role, 0, CP_TOKEN_NO_ROW, 0);
}

cp_token cp_name_mask(const struct cp_meaning *meaning, int64_t batch, int64_t head,
                      int64_t row, int64_t key)
{
    return cp_token_of(CP_MARK_ROLE + CP_TENSOR_MASK, meaning->call, batch, head, row,
                       key);
}

int64_t cp_name_first_row(const struct cp_plan *plan, int rank,
                          enum cp_tensor_role role)
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

enum cp_tensor_role cp_name_cut(const struct cp_plan *plan)
{
    return plan->signature.call.op == CP_OP_REDUCE_SCATTER ? CP_TENSOR_WHOLE
                                                           : CP_TENSOR_SHARE;
}

bool cp_name_is_cut(enum cp_tensor_role role)
{
    return role == CP_TENSOR_WHOLE || role == CP_TENSOR_SHARE;
}

int64_t cp_name_keys_of_row(const struct cp_plan *plan, int64_t row)
{
    int64_t keys = cp_name_keys(plan);
    return plan->signature.call.is_causal != 0 && row + 1 < keys ? row + 1 : keys;
}

bool cp_name_is_sum(int mark)
{
    return mark == CP_MARK_ROLE + CP_TENSOR_DQ || mark == CP_MARK_ROLE + CP_TENSOR_DK ||
           mark == CP_MARK_ROLE + CP_TENSOR_DV ||
           mark == CP_MARK_ROLE + CP_TENSOR_WHOLE;
}

enum cp_code cp_expect(const struct cp_verify_at *at, const char *name,
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

enum cp_code cp_expect_free(const struct cp_verify_at *at, const struct cp_arg *dst,
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

enum cp_code cp_expect_sum(const struct cp_verify_at *at, const char *name,
                           const struct cp_arg *arg, int64_t cell, cp_token wanted)
{
    if (cp_token_mark(arg->content->tokens[cell]) == CP_MARK_ZERO) {
        arg->content->tokens[cell] = wanted;
    }
    return cp_expect(at, name, arg, cell, wanted);
}

enum cp_code cp_take_up(const struct cp_meaning *meaning, const struct cp_verify_at *at,
                        const char *name, const struct cp_arg *arg, int64_t cell,
                        int64_t first, int64_t last, const char *element)
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
