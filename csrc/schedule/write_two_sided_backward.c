/* Attention over sends and receives, backward: sums of keys travel with their block. */
#include "schedule/write_two_sided.h"

/* The query side for the own heads, and the sum over all keys. */
enum { ROW_Q, ROW_DOUT, ROW_LSE, ROW_DELTA };

static void grad_block(struct cp_two_sided *t, int b, int32_t dq)
{
    struct cp_writer *w = &t->w;
    const struct cp_row_buffers rows = {
        .q = t->rows[ROW_Q].gathered,
        .dout = t->rows[ROW_DOUT].gathered,
        .lse = t->rows[ROW_LSE].gathered,
        .delta = t->rows[ROW_DELTA].gathered,
        .dq = dq,
    };
    for (int m = 0; m < t->ulysses; m++) {
        struct cp_block block = cp_two_sided_block_of(t, b, m);
        const struct cp_segment *segment = cp_two_sided_segment_of(t, b, m);
        if (!cp_writer_is_live(w, w->rank, &block)) {
            continue;
        }
        struct cp_key_boxes keys = {
            .k = cp_writer_box(w, segment->k),
            .v = cp_writer_box(w, segment->v),
            .mask = cp_writer_mask_box(w, segment->mask, w->heads.first, &block),
            .dk = cp_writer_box(w, segment->dk),
            .dv = cp_writer_box(w, segment->dv),
        };
        cp_writer_grad(w, &rows, &keys, &block);
    }
    t->block_done[b] = w->builder.lane_steps[CP_LANE_COMPUTE];
}

static void move_sums(struct cp_two_sided *t, int b, int peer, bool is_send)
{
    for (int m = 0; m < t->ulysses; m++) {
        cp_two_sided_move_buffer(t, cp_two_sided_segment_of(t, b, m)->dk, peer,
                                 is_send);
        cp_two_sided_move_buffer(t, cp_two_sided_segment_of(t, b, m)->dv, peer,
                                 is_send);
    }
}

/* Hop j of the sums: those of the block met in step j - 1 leave, those of step j
 * arrive; the last hop brings the own ones home into the buffers that they left from.
 */
static void pass_sums(struct cp_two_sided *t, int j)
{
    t->group += 1;
    int32_t first = cp_two_sided_step_count(t);
    move_sums(t, cp_two_sided_block_at(t, j - 1), cp_two_sided_ring_peer(t, -1), true);
    move_sums(t, cp_two_sided_block_at(t, j), cp_two_sided_ring_peer(t, 1), false);
    cp_two_sided_group_after_compute(t, first,
                                     t->block_done[cp_two_sided_block_at(t, j - 1)]);
}

/* Sums of the own keys for the heads of every member: added up in the members' order.
 */
static void collect_sums(struct cp_two_sided *t, int32_t dk, int32_t dv)
{
    struct cp_writer *w = &t->w;
    struct cp_builder *b = &w->builder;
    t->group += 1;
    int32_t first = cp_two_sided_step_count(t);
    for (int index = 1; index < t->ulysses; index++) {
        int m = cp_two_sided_member_at(t, index);
        int peer = cp_two_sided_rank_of(t, w->r, m);
        struct cp_segment *sums = &t->exchange[m].sums;
        int64_t keys = w->plan->kv_rows[w->rank].count;
        sums->dk = cp_writer_sums(w, &w->scratch, CP_TENSOR_DK, keys,
                                  w->plan->kv_heads[m].count);
        sums->dv = cp_writer_sums(w, &w->scratch, CP_TENSOR_DV, keys,
                                  w->plan->kv_heads[m].count);
        cp_two_sided_move_buffer(t, cp_two_sided_segment_of(t, w->r, m)->dk, peer,
                                 true);
        cp_two_sided_move_buffer(t, cp_two_sided_segment_of(t, w->r, m)->dv, peer,
                                 true);
        cp_two_sided_move_buffer(t, sums->dk, peer, false);
        cp_two_sided_move_buffer(t, sums->dv, peer, false);
    }
    cp_two_sided_group_after_compute(t, first, w->builder.lane_steps[CP_LANE_COMPUTE]);
    cp_build_zero(b, CP_LANE_IN, dk);
    cp_build_zero(b, CP_LANE_IN, dv);
    for (int m = 0; m < t->ulysses; m++) {
        const struct cp_segment *sums =
            m == w->u ? cp_two_sided_segment_of(t, w->r, m) : &t->exchange[m].sums;
        struct cp_box to_k =
            cp_writer_heads(cp_writer_box(w, dk), w->plan->kv_heads[m]);
        struct cp_box to_v =
            cp_writer_heads(cp_writer_box(w, dv), w->plan->kv_heads[m]);
        cp_build_after(b,
                       cp_build_move(b, CP_STEP_REDUCE, CP_LANE_IN, to_k,
                                     cp_writer_box(w, sums->dk)),
                       CP_LANE_COMPUTE);
        cp_build_after(b,
                       cp_build_move(b, CP_STEP_REDUCE, CP_LANE_IN, to_v,
                                     cp_writer_box(w, sums->dv)),
                       CP_LANE_COMPUTE);
    }
}

static void return_queries(struct cp_two_sided *t, int32_t sum)
{
    struct cp_writer *w = &t->w;
    const enum cp_tensor_role role = CP_TENSOR_DQ;
    int32_t dq = cp_writer_tensor(w, CP_BUFFER_OUTPUT, CP_TENSOR_DQ);
    int32_t result = t->ulysses == 1
                         ? dq
                         : cp_writer_rows(w, &w->scratch, CP_LAYOUT_PLAIN, CP_TENSOR_DQ,
                                          w->rows.count, w->heads.count);
    cp_build_move(&w->builder, CP_STEP_COPY, CP_LANE_COMPUTE, cp_writer_box(w, result),
                  cp_writer_box(w, sum));
    if (t->ulysses > 1) {
        cp_two_sided_exchange_out(t, &role, &result, &dq, 1);
    }
}

/* The caller's tensors of query rows, and delta, which is made here. */
static void list_rows(struct cp_two_sided *t)
{
    struct cp_writer *w = &t->w;
    t->rows[ROW_Q].role = CP_TENSOR_Q;
    t->rows[ROW_Q].own = cp_writer_tensor(w, CP_BUFFER_INPUT, CP_TENSOR_Q);
    t->rows[ROW_DOUT].role = CP_TENSOR_DOUT;
    t->rows[ROW_DOUT].own = cp_writer_tensor(w, CP_BUFFER_INPUT, CP_TENSOR_DOUT);
    t->rows[ROW_LSE].role = CP_TENSOR_LSE;
    t->rows[ROW_LSE].own = cp_writer_tensor(w, CP_BUFFER_INPUT, CP_TENSOR_LSE);
    t->rows[ROW_DELTA].role = CP_TENSOR_DELTA;
    t->rows[ROW_DELTA].own =
        cp_writer_rows(w, &w->scratch, CP_LAYOUT_PLAIN, CP_TENSOR_DELTA,
                       w->plan->q_rows[w->rank].count, w->call->heads);
    t->row_count = CP_ROW_TENSORS;
    cp_writer_delta(w, CP_LANE_IN, t->rows[ROW_DELTA].own, t->rows[ROW_DOUT].own);
}

static void zero_sums(struct cp_two_sided *t)
{
    for (int m = 0; m < t->ulysses; m++) {
        struct cp_segment *own = cp_two_sided_segment_of(t, t->w.r, m);
        cp_two_sided_declare_sums(t, own, &t->w.scratch,
                                  cp_two_sided_rank_of(t, t->w.r, m));
        cp_build_zero(&t->w.builder, CP_LANE_COMPUTE, own->dk);
        cp_build_zero(&t->w.builder, CP_LANE_COMPUTE, own->dv);
    }
}

enum cp_code cp_write_two_sided_backward(const struct cp_plan *plan, int rank,
                                         struct cp_schedule **out)
{
    struct cp_two_sided t;
    CP_TRY(cp_two_sided_init(&t, plan, rank));
    struct cp_writer *w = &t.w;
    list_rows(&t);
    int32_t k = cp_writer_tensor(w, CP_BUFFER_INPUT, CP_TENSOR_K);
    int32_t v = cp_writer_tensor(w, CP_BUFFER_INPUT, CP_TENSOR_V);
    cp_two_sided_exchange_in(&t, k, v);
    int32_t dq =
        cp_writer_sums(w, &w->scratch, CP_TENSOR_DQ, w->rows.count, w->heads.count);
    cp_build_zero(&w->builder, CP_LANE_COMPUTE, dq);
    zero_sums(&t);
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
    return_queries(&t, dq);
    struct cp_segment own = *cp_two_sided_segment_of(&t, w->r, w->u);
    if (t.ulysses > 1) {
        own.dk = cp_writer_sums(w, &w->scratch, CP_TENSOR_DK, plan->kv_rows[rank].count,
                                w->call->kv_heads);
        own.dv = cp_writer_sums(w, &w->scratch, CP_TENSOR_DV, plan->kv_rows[rank].count,
                                w->call->kv_heads);
        collect_sums(&t, own.dk, own.dv);
    }
    cp_writer_return_keys(w, CP_LANE_IN, own.dk, own.dv);
    return cp_two_sided_take(&t, out);
}
