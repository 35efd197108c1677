/* Attention over sends and receives, backward: sums of keys travel with their block. */
#include "schedule/write_two_sided.h"

static void grad_block(struct cp_two_sided *t, int b, int32_t dq)
{
    struct cp_writer *w = &t->w;
    const struct cp_row_buffers rows = {
        .q = cp_two_sided_gathered(t, CP_TENSOR_Q),
        .dout = cp_two_sided_gathered(t, CP_TENSOR_DOUT),
        .lse = cp_two_sided_gathered(t, CP_TENSOR_LSE),
        .delta = cp_two_sided_gathered(t, CP_TENSOR_DELTA),
        .dq = dq,
    };
    struct cp_block block = cp_two_sided_block_of(t, b);
    struct cp_key_block *of_block = &t->blocks[b];
    if (cp_writer_is_live(w, w->rank, &block)) {
        struct cp_key_boxes keys = {
            .k = cp_writer_box(w, of_block->k),
            .v = cp_writer_box(w, of_block->v),
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
    cp_two_sided_move_buffer(t, t->blocks[b].dk, peer, is_send);
    cp_two_sided_move_buffer(t, t->blocks[b].dv, peer, is_send);
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
    cp_two_sided_group_after_compute(t, first, t->blocks[left].done);
}

/* What goes into the first exchange; delta is made here. */
static void share_rows(struct cp_two_sided *t)
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
}

/* Into the dtype that the sum travels in. */
static void round_sum(struct cp_two_sided *t, struct cp_shared *sum)
{
    struct cp_writer *w = &t->w;
    struct cp_box whole = cp_writer_box(w, sum->gathered);
    cp_two_sided_declare_gathered(t, sum);
    cp_build_after(&w->builder,
                   cp_build_move(&w->builder, CP_STEP_COPY, CP_LANE_COMPUTE,
                                 cp_writer_box(w, sum->gathered), whole),
                   CP_LANE_IN);
}

/* The sums of the group's rows go home. A sum that is whole is rounded before it is sent;
 * parts of one are sent as they are and added up in the order of the members. */
static void return_sums(struct cp_two_sided *t, int32_t dq)
{
    struct cp_writer *w = &t->w;
    const struct cp_key_block *own = &t->blocks[w->r];
    bool meets = cp_two_sided_heads_meet(t);
    int64_t keys = w->plan->kv_rows[w->rank].count;
    struct cp_shared sums[] = {{.role = CP_TENSOR_DQ, .gathered = dq},
                               {.role = CP_TENSOR_DK, .gathered = own->dk},
                               {.role = CP_TENSOR_DV, .gathered = own->dv}};
    cp_two_sided_reuse(t);
    for (int i = 0; i < 3; i++) {
        struct cp_shared *sum = &sums[i];
        bool is_part = meets && i > 0;
        sum->dtype = is_part ? w->sum : w->dtype;
        sum->own =
            is_part ? cp_writer_sums(w, &w->scratch, sum->role, keys, w->call->kv_heads)
                    : cp_writer_tensor(w, CP_BUFFER_OUTPUT, sum->role);
        if (is_part) {
            cp_build_after(&w->builder,
                           cp_build_zero(&w->builder, CP_LANE_IN, sum->own),
                           CP_LANE_COMPUTE);
        }
        if (t->ulysses > 1 && sum->dtype != w->sum) {
            round_sum(t, sum);
        }
    }
    cp_two_sided_exchange_out(t, sums, 3);
    if (meets) {
        cp_writer_return_keys(w, CP_LANE_IN, sums[1].own, sums[2].own);
    }
}

enum cp_code cp_write_two_sided_backward(const struct cp_plan *plan, int rank,
                                         struct cp_schedule **out)
{
    struct cp_two_sided t;
    CP_TRY(cp_two_sided_init(&t, plan, rank));
    struct cp_writer *w = &t.w;
    int32_t dq = cp_writer_runs(w, &w->scratch, CP_TENSOR_DQ, w->sum, w->rows.count,
                                w->heads.count);
    cp_two_sided_declare_sums(&t, w->r);
    cp_build_zero(&w->builder, CP_LANE_COMPUTE, dq);
    cp_build_zero(&w->builder, CP_LANE_COMPUTE, t.blocks[w->r].dk);
    cp_build_zero(&w->builder, CP_LANE_COMPUTE, t.blocks[w->r].dv);
    share_rows(&t);
    cp_two_sided_exchange_in(&t);
    cp_two_sided_make_block(&t);
    cp_two_sided_declare_blocks(&t);
    bool passes = !cp_two_sided_is_allgather(&t);
    if (t.ring > 1 && passes) {
        cp_two_sided_pass_block(&t, 1);
    } else if (t.ring > 1) {
        cp_two_sided_gather_blocks(&t);
    }
    grad_block(&t, w->r, dq);
    for (int j = 1; j < t.ring; j++) {
        pass_sums(&t, j);
        if (passes && j + 1 < t.ring) {
            cp_two_sided_pass_block(&t, j + 1);
        }
        grad_block(&t, cp_two_sided_block_at(&t, j), dq);
    }
    if (t.ring > 1) {
        pass_sums(&t, t.ring);
    }
    return_sums(&t, dq);
    return cp_two_sided_take(&t, out);
}
