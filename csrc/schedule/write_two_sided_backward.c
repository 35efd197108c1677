/* Attention over sends and receives, backward: sums of keys travel with their block. */
#include "schedule/write_two_sided.h"

/* A sum that is whole is rounded before it is sent home; parts of one are sent as they are
 * and added up in the order of the members. */
static void give_sum(struct cp_two_sided *t, enum cp_tensor_role role)
{
    struct cp_writer *w = &t->w;
    if (!cp_writer_is_of_keys(w, role) || !cp_two_sided_heads_meet(t)) {
        cp_two_sided_give(t, role, w->dtype,
                          cp_writer_tensor(w, CP_BUFFER_OUTPUT, role));
        return;
    }
    int32_t whole = cp_writer_sums(w, &w->scratch, role,
                                   w->plan->kv_rows[w->rank].count, w->call->kv_heads);
    cp_build_zero(&w->builder, CP_LANE_IN, whole);
    cp_two_sided_give(t, role, w->sum, whole);
}

static void begin(struct cp_two_sided *t)
{
    struct cp_writer *w = &t->w;
    static const enum cp_tensor_role roles[] = {CP_TENSOR_Q, CP_TENSOR_K, CP_TENSOR_V,
                                                CP_TENSOR_LSE};
    cp_two_sided_share_inputs(t, roles, sizeof roles / sizeof *roles);
    int32_t dout = cp_writer_tensor(w, CP_BUFFER_INPUT, CP_TENSOR_DOUT);
    int32_t delta = cp_writer_rows(w, &w->scratch, CP_LAYOUT_PLAIN, CP_TENSOR_DELTA,
                                   w->plan->q_rows[w->rank].count, w->call->heads);
    cp_writer_delta(w, CP_LANE_IN, delta, dout);
    cp_two_sided_share(t, CP_TENSOR_DOUT, dout);
    cp_two_sided_share(t, CP_TENSOR_DELTA, delta);
    give_sum(t, CP_TENSOR_DQ);
    give_sum(t, CP_TENSOR_DK);
    give_sum(t, CP_TENSOR_DV);
}

static void declare(struct cp_two_sided *t)
{
    struct cp_writer *w = &t->w;
    t->at->sum = cp_writer_runs(w, &w->scratch, CP_TENSOR_DQ, w->sum, w->rows.count,
                                w->heads.count);
    cp_two_sided_declare_sums(t, w->r);
}

static void declare_results(struct cp_two_sided *t)
{
    const struct cp_key_block *own = &t->at->blocks[t->w.r];
    const int32_t sums[] = {t->at->sum, own->dk, own->dv};
    for (int i = 0; i < t->result_count; i++) {
        struct cp_shared *result = &t->at->results[i];
        result->sum = sums[i];
        if (t->ulysses > 1 && result->dtype != t->w.sum) {
            cp_two_sided_declare_gathered(t, result);
        } else {
            result->gathered = result->sum;
        }
    }
}

static void grad_block(struct cp_two_sided *t, int b)
{
    struct cp_writer *w = &t->w;
    const struct cp_row_boxes rows = {
        .q = cp_two_sided_gathered(t, CP_TENSOR_Q),
        .dout = cp_two_sided_gathered(t, CP_TENSOR_DOUT),
        .lse = cp_two_sided_gathered(t, CP_TENSOR_LSE),
        .delta = cp_two_sided_gathered(t, CP_TENSOR_DELTA),
        .dq = cp_writer_box(w, t->at->sum),
    };
    struct cp_block block = cp_two_sided_block_of(t, b);
    struct cp_key_block *of_block = &t->at->blocks[b];
    bool is_own = b == w->r;
    if (cp_writer_is_live(w, w->rank, w->chunk, &block)) {
        struct cp_key_boxes keys = {
            .k = is_own ? cp_two_sided_gathered(t, CP_TENSOR_K)
                        : cp_writer_box(w, of_block->k),
            .v = is_own ? cp_two_sided_gathered(t, CP_TENSOR_V)
                        : cp_writer_box(w, of_block->v),
            .mask = cp_writer_mask_box(w, of_block->mask, w->heads.first, &block),
            .dk = cp_writer_box(w, of_block->dk),
            .dv = cp_writer_box(w, of_block->dv),
        };
        cp_writer_grad(w, &rows, &keys, &block);
    }
    of_block->done = w->builder.lane_steps[CP_LANE_COMPUTE];
}

static void move_sums(struct cp_two_sided *t, int b, int peer, bool is_send)
{
    cp_two_sided_move_buffer(t, t->at->blocks[b].dk, peer, is_send);
    cp_two_sided_move_buffer(t, t->at->blocks[b].dv, peer, is_send);
}

/* Hop j of the sums: those of the block met in step j - 1 leave, those of step j
 * arrive; the last hop brings the own ones home into the buffers that they left from.
 */
static void pass_sums(struct cp_two_sided *t, int j)
{
    int left = cp_two_sided_block_at(t, j - 1);
    t->group += 1;
    int32_t first = cp_two_sided_step_count(t);
    move_sums(t, left, cp_two_sided_ring_peer(t, -1), true);
    move_sums(t, cp_two_sided_block_at(t, j), cp_two_sided_ring_peer(t, 1), false);
    cp_two_sided_group_after_compute(t, first, t->at->blocks[left].done);
}

static void meet(struct cp_two_sided *t)
{
    struct cp_writer *w = &t->w;
    bool passes = !cp_two_sided_is_allgather(t);
    cp_build_zero(&w->builder, CP_LANE_COMPUTE, t->at->sum);
    cp_build_zero(&w->builder, CP_LANE_COMPUTE, t->at->blocks[w->r].dk);
    cp_build_zero(&w->builder, CP_LANE_COMPUTE, t->at->blocks[w->r].dv);
    if (t->ring > 1 && passes) {
        cp_two_sided_pass_block(t, 1);
    } else if (t->ring > 1) {
        cp_two_sided_gather_blocks(t);
    }
    grad_block(t, w->r);
    for (int j = 1; j < t->ring; j++) {
        pass_sums(t, j);
        cp_writer_arrive(w);
        if (passes && j + 1 < t->ring) {
            cp_two_sided_pass_block(t, j + 1);
        }
        grad_block(t, cp_two_sided_block_at(t, j));
    }
}

static void finish(struct cp_two_sided *t)
{
    struct cp_writer *w = &t->w;
    if (t->ring > 1) {
        pass_sums(t, t->ring);
    }
    for (int i = 0; i < t->result_count; i++) {
        const struct cp_shared *result = &t->at->results[i];
        if (result->gathered != result->sum) {
            cp_build_after(&w->builder,
                           cp_build_move(&w->builder, CP_STEP_COPY, CP_LANE_COMPUTE,
                                         cp_writer_box(w, result->gathered),
                                         cp_writer_box(w, result->sum)),
                           CP_LANE_IN);
        }
    }
}

static void end(struct cp_two_sided *t)
{
    if (cp_two_sided_heads_meet(t)) {
        cp_writer_return_keys(&t->w, CP_LANE_IN, t->results[1].own, t->results[2].own);
    }
}

enum cp_code cp_write_two_sided_backward(const struct cp_plan *plan, int rank,
                                         struct cp_schedule **out)
{
    static const struct cp_two_sided_direction backward = {
        .begin = begin,
        .declare = declare,
        .declare_results = declare_results,
        .meet = meet,
        .finish = finish,
        .end = end,
    };
    return cp_two_sided_write(plan, rank, &backward, out);
}
