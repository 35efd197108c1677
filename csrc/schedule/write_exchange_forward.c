/* Attention by exchange, forward. */
#include "schedule/write_exchange.h"

static void begin(struct cp_exchange *x)
{
    static const enum cp_tensor_role roles[] = {CP_TENSOR_Q, CP_TENSOR_K, CP_TENSOR_V};
    int32_t out = cp_writer_tensor(&x->w, CP_BUFFER_OUTPUT, CP_TENSOR_OUT);
    int32_t lse = cp_writer_tensor(&x->w, CP_BUFFER_OUTPUT, CP_TENSOR_LSE);
    cp_exchange_share_inputs(x, roles, sizeof roles / sizeof *roles);
    cp_exchange_give(x, CP_TENSOR_OUT, x->w.dtype, out);
    if (lse != CP_NO_BUFFER) {
        cp_exchange_give(x, CP_TENSOR_LSE, x->w.sum, lse);
    }
}

static void declare(struct cp_exchange *x)
{
    struct cp_writer *w = &x->w;
    x->at->sum = cp_writer_rows(w, &w->scratch, CP_LAYOUT_STATE, CP_TENSOR_OUT,
                                w->rows.count, w->heads.count);
}

static bool is_live(const struct cp_exchange *x, int b)
{
    struct cp_block block = cp_exchange_block_of(x, b);
    return cp_writer_is_live(&x->w, x->w.rank, x->w.chunk, &block);
}

static int count_blocks(const struct cp_exchange *x)
{
    int count = 0;
    for (int b = 0; b < x->ring; b++) {
        count += is_live(x, b) ? 1 : 0;
    }
    return count;
}

static void attend_block(struct cp_exchange *x, struct cp_attended *rows, int b)
{
    struct cp_writer *w = &x->w;
    struct cp_block block = cp_exchange_block_of(x, b);
    struct cp_key_block *keys = &x->at->blocks[b];
    if (is_live(x, b)) {
        cp_writer_attend(w, rows, cp_exchange_keys(x, b, CP_TENSOR_K),
                         cp_exchange_keys(x, b, CP_TENSOR_V),
                         cp_writer_mask_box(w, keys->mask, w->heads.first, &block),
                         &block);
    }
    keys->done = w->builder.lane_steps[CP_LANE_COMPUTE];
}

/* The rows of a result: the group's, or where they belong. */
static struct cp_box rows_of(const struct cp_exchange *x,
                             const struct cp_shared *result)
{
    return result->gathered == CP_NO_BUFFER ? cp_exchange_own(x, result)
                                            : cp_writer_box(&x->w, result->gathered);
}

static void meet(struct cp_exchange *x)
{
    struct cp_writer *w = &x->w;
    const struct cp_shared *results = x->at->results;
    struct cp_attended rows = {
        .state = x->at->sum,
        .q = cp_exchange_gathered(x, CP_TENSOR_Q),
        .out = rows_of(x, &results[0]),
        .lse = x->result_count > 1 ? rows_of(x, &results[1]) : cp_box_none(),
        .blocks = count_blocks(x),
    };
    attend_block(x, &rows, w->r);
    if (cp_exchange_is_allgather(x) && x->ring > 1) {
        cp_exchange_gather_blocks(x);
        cp_writer_arrive(w);
    }
    for (int j = 1; j < x->ring; j++) {
        if (!cp_exchange_is_allgather(x)) {
            cp_exchange_pass_block(x, j);
            cp_writer_arrive(w);
        }
        attend_block(x, &rows, cp_exchange_block_at(x, j));
    }
    cp_writer_finish(w, &rows);
}

static void nothing(struct cp_exchange *x)
{
    (void)x;
}

enum cp_code cp_write_exchange_forward(const struct cp_plan *plan, int rank,
                                       enum cp_transport transport,
                                       struct cp_schedule **out)
{
    static const struct cp_exchange_direction forward = {
        .begin = begin,
        .declare = declare,
        .meet = meet,
        .finish = nothing,
        .end = nothing,
    };
    return cp_exchange_write(plan, rank, transport, &forward, out);
}
