/* Attention by exchange, backward: sums of keys travel with their block. */
#include "schedule/write_exchange.h"

/* A sum that is whole is rounded before it is sent home; parts of one are sent as they are
 * and added up in the order of the members. */
static void give_sum(struct cp_exchange *x, enum cp_tensor_role role)
{
    struct cp_writer *w = &x->w;
    if (!cp_writer_is_of_keys(w, role) || !cp_exchange_heads_meet(x)) {
        cp_exchange_give(x, role, w->dtype,
                         cp_writer_tensor(w, CP_BUFFER_OUTPUT, role));
        return;
    }
    int32_t whole = cp_writer_sums(w, &w->scratch, role,
                                   w->plan->kv_rows[w->rank].count, w->call->kv_heads);
    cp_build_zero(&w->builder, x->home, whole);
    cp_exchange_give(x, role, w->sum, whole);
}

static void begin(struct cp_exchange *x)
{
    struct cp_writer *w = &x->w;
    static const enum cp_tensor_role roles[] = {CP_TENSOR_Q, CP_TENSOR_K, CP_TENSOR_V,
                                                CP_TENSOR_LSE};
    cp_exchange_share_inputs(x, roles, sizeof roles / sizeof *roles);
    int32_t dout = cp_writer_tensor(w, CP_BUFFER_INPUT, CP_TENSOR_DOUT);
    int32_t delta = cp_writer_rows(w, &w->scratch, CP_LAYOUT_PLAIN, CP_TENSOR_DELTA,
                                   w->plan->q_rows[w->rank].count, w->call->heads);
    cp_writer_delta(w, CP_LANE_IN, delta, dout);
    cp_exchange_share(x, CP_TENSOR_DOUT, dout);
    cp_exchange_share(x, CP_TENSOR_DELTA, delta);
    give_sum(x, CP_TENSOR_DQ);
    give_sum(x, CP_TENSOR_DK);
    give_sum(x, CP_TENSOR_DV);
}

static void declare(struct cp_exchange *x)
{
    struct cp_writer *w = &x->w;
    struct cp_shared *results = x->at->results;
    x->at->sum = cp_writer_runs(w, &w->scratch, CP_TENSOR_DQ, w->sum, w->rows.count,
                                w->heads.count);
    cp_exchange_declare_sums(x, w->r);
    results[0].sum = x->at->sum;
    results[1].sum = x->at->blocks[w->r].dk;
    results[2].sum = x->at->blocks[w->r].dv;
}

static void grad_block(struct cp_exchange *x, int b)
{
    struct cp_writer *w = &x->w;
    const struct cp_row_boxes rows = {
        .q = cp_exchange_gathered(x, CP_TENSOR_Q),
        .dout = cp_exchange_gathered(x, CP_TENSOR_DOUT),
        .lse = cp_exchange_gathered(x, CP_TENSOR_LSE),
        .delta = cp_exchange_gathered(x, CP_TENSOR_DELTA),
        .dq = cp_writer_box(w, x->at->sum),
    };
    struct cp_block block = cp_exchange_block_of(x, b);
    struct cp_key_block *of_block = &x->at->blocks[b];
    if (cp_writer_is_live(w, w->rank, w->chunk, &block)) {
        struct cp_key_boxes keys = {
            .k = cp_exchange_keys(x, b, CP_TENSOR_K),
            .v = cp_exchange_keys(x, b, CP_TENSOR_V),
            .mask = cp_writer_mask_box(w, of_block->mask, w->heads.first, &block),
            .dk = cp_writer_box(w, of_block->dk),
            .dv = cp_writer_box(w, of_block->dv),
        };
        cp_writer_grad(w, &rows, &keys, &block);
    }
    of_block->done = w->builder.lane_steps[CP_LANE_COMPUTE];
}

static void move_sums(struct cp_exchange *x, int b, int peer, bool is_send)
{
    cp_exchange_move_buffer(x, x->at->blocks[b].dk, peer, is_send);
    cp_exchange_move_buffer(x, x->at->blocks[b].dv, peer, is_send);
}

/* Hop j of the sums: those of the block met in step j - 1 leave, those of step j
 * arrive; the last hop brings the own ones home into the buffers that they left from.
 */
static void pass_sums(struct cp_exchange *x, int j)
{
    int left = cp_exchange_block_at(x, j - 1);
    x->group += 1;
    int32_t first = cp_exchange_step_count(x);
    move_sums(x, left, cp_exchange_ring_peer(x, -1), true);
    move_sums(x, cp_exchange_block_at(x, j), cp_exchange_ring_peer(x, 1), false);
    cp_exchange_group_after_compute(x, first, x->at->blocks[left].done);
}

static void meet(struct cp_exchange *x)
{
    struct cp_writer *w = &x->w;
    bool passes = !cp_exchange_is_allgather(x);
    cp_build_zero(&w->builder, CP_LANE_COMPUTE, x->at->sum);
    cp_build_zero(&w->builder, CP_LANE_COMPUTE, x->at->blocks[w->r].dk);
    cp_build_zero(&w->builder, CP_LANE_COMPUTE, x->at->blocks[w->r].dv);
    if (x->ring > 1 && passes) {
        cp_exchange_pass_block(x, 1);
    } else if (x->ring > 1) {
        cp_exchange_gather_blocks(x);
    }
    grad_block(x, w->r);
    for (int j = 1; j < x->ring; j++) {
        pass_sums(x, j);
        cp_writer_arrive(w);
        if (passes && j + 1 < x->ring) {
            cp_exchange_pass_block(x, j + 1);
        }
        grad_block(x, cp_exchange_block_at(x, j));
    }
}

static void finish(struct cp_exchange *x)
{
    struct cp_writer *w = &x->w;
    if (x->ring > 1) {
        pass_sums(x, x->ring);
    }
    for (int i = 0; i < x->result_count; i++) {
        const struct cp_shared *result = &x->at->results[i];
        if (result->gathered != result->sum) {
            cp_build_after(&w->builder,
                           cp_build_move(&w->builder, CP_STEP_COPY, CP_LANE_COMPUTE,
                                         cp_writer_box(w, result->gathered),
                                         cp_writer_box(w, result->sum)),
                           CP_LANE_IN);
        }
    }
}

static void end(struct cp_exchange *x)
{
    if (cp_exchange_heads_meet(x)) {
        cp_writer_return_keys(&x->w, x->home, x->results[1].own, x->results[2].own);
    }
}

enum cp_code cp_write_exchange_backward(const struct cp_plan *plan, int rank,
                                        enum cp_transport transport,
                                        struct cp_schedule **out)
{
    static const struct cp_exchange_direction backward = {
        .begin = begin,
        .declare = declare,
        .meet = meet,
        .finish = finish,
        .end = end,
    };
    return cp_exchange_write(plan, rank, transport, &backward, out);
}
