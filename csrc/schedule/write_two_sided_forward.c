/* Attention over sends and receives, forward. */
#include "schedule/write_two_sided.h"

static void attend_block(struct cp_two_sided *t, int b, int32_t state)
{
    struct cp_writer *w = &t->w;
    for (int m = 0; m < t->ulysses; m++) {
        struct cp_block block = cp_two_sided_block_of(t, b, m);
        const struct cp_segment *segment = cp_two_sided_segment_of(t, b, m);
        if (!cp_writer_is_live(w, w->rank, &block)) {
            continue;
        }
        cp_writer_attend(w, state, t->rows[0].gathered, cp_writer_box(w, segment->k),
                         cp_writer_box(w, segment->v),
                         cp_writer_mask_box(w, segment->mask, w->heads.first, &block),
                         &block);
    }
    t->block_done[b] = w->builder.lane_steps[CP_LANE_COMPUTE];
}

static void finish_rows(struct cp_two_sided *t, int32_t state, int32_t out, int32_t lse)
{
    struct cp_writer *w = &t->w;
    bool wants_lse = lse != CP_NO_BUFFER;
    bool is_shared = t->ulysses > 1;
    int32_t results[2] = {out, lse};
    const int32_t outs[2] = {out, lse};
    const enum cp_tensor_role roles[2] = {CP_TENSOR_OUT, CP_TENSOR_LSE};
    for (int i = 0; i < (wants_lse ? 2 : 1) && is_shared; i++) {
        results[i] = cp_writer_rows(w, &w->scratch, CP_LAYOUT_PLAIN, roles[i],
                                    w->rows.count, w->heads.count);
    }
    cp_writer_finish(w, state, results[0], results[1]);
    if (is_shared) {
        cp_two_sided_exchange_out(t, roles, results, outs, wants_lse ? 2 : 1);
    }
}

enum cp_code cp_write_two_sided_forward(const struct cp_plan *plan, int rank,
                                        struct cp_schedule **out)
{
    struct cp_two_sided t;
    CP_TRY(cp_two_sided_init(&t, plan, rank));
    struct cp_writer *w = &t.w;
    t.rows[0].role = CP_TENSOR_Q;
    t.rows[0].own = cp_writer_tensor(w, CP_BUFFER_INPUT, CP_TENSOR_Q);
    t.row_count = 1;
    int32_t k = cp_writer_tensor(w, CP_BUFFER_INPUT, CP_TENSOR_K);
    int32_t v = cp_writer_tensor(w, CP_BUFFER_INPUT, CP_TENSOR_V);
    int32_t result = cp_writer_tensor(w, CP_BUFFER_OUTPUT, CP_TENSOR_OUT);
    int32_t lse = cp_writer_tensor(w, CP_BUFFER_OUTPUT, CP_TENSOR_LSE);
    cp_two_sided_exchange_in(&t, k, v);
    int32_t state = cp_writer_rows(w, &w->scratch, CP_LAYOUT_STATE, CP_TENSOR_OUT,
                                   w->rows.count, w->heads.count);
    cp_two_sided_declare_blocks(&t);
    cp_build_zero(&w->builder, CP_LANE_COMPUTE, state);
    attend_block(&t, w->r, state);
    if (cp_two_sided_is_allgather(&t) && t.ring > 1) {
        cp_two_sided_gather_blocks(&t);
    }
    for (int j = 1; j < t.ring; j++) {
        if (!cp_two_sided_is_allgather(&t)) {
            cp_two_sided_pass_block(&t, j);
        }
        attend_block(&t, cp_two_sided_block_at(&t, j), state);
    }
    finish_rows(&t, state, result, lse);
    return cp_two_sided_take(&t, out);
}
