/* Attention over sends and receives, forward. */
#include "schedule/write_two_sided.h"

static void attend_block(struct cp_two_sided *t, int b, int32_t state)
{
    struct cp_writer *w = &t->w;
    struct cp_block block = cp_two_sided_block_of(t, b);
    struct cp_key_block *keys = &t->blocks[b];
    if (cp_writer_is_live(w, w->rank, &block)) {
        cp_writer_attend(w, state, cp_two_sided_gathered(t, CP_TENSOR_Q),
                         cp_writer_box(w, keys->k), cp_writer_box(w, keys->v),
                         cp_writer_mask_box(w, keys->mask, w->heads.first, &block),
                         &block);
    }
    keys->done = w->builder.lane_steps[CP_LANE_COMPUTE];
}

static void finish_rows(struct cp_two_sided *t, int32_t state, int32_t out, int32_t lse)
{
    struct cp_writer *w = &t->w;
    struct cp_shared results[] = {
        {.role = CP_TENSOR_OUT, .dtype = w->dtype, .own = out},
        {.role = CP_TENSOR_LSE, .dtype = w->sum, .own = lse, .gathered = CP_NO_BUFFER},
    };
    int count = lse != CP_NO_BUFFER ? 2 : 1;
    if (t->ulysses == 1) {
        cp_writer_finish(w, state, out, lse);
        return;
    }
    cp_two_sided_reuse(t);
    for (int i = 0; i < count; i++) {
        cp_two_sided_declare_gathered(t, &results[i]);
    }
    cp_writer_finish(w, state, results[0].gathered, results[1].gathered);
    cp_two_sided_exchange_out(t, results, count);
}

enum cp_code cp_write_two_sided_forward(const struct cp_plan *plan, int rank,
                                        struct cp_schedule **out)
{
    struct cp_two_sided t;
    CP_TRY(cp_two_sided_init(&t, plan, rank));
    struct cp_writer *w = &t.w;
    static const enum cp_tensor_role roles[] = {CP_TENSOR_Q, CP_TENSOR_K, CP_TENSOR_V};
    cp_two_sided_share_inputs(&t, roles, sizeof roles / sizeof *roles);
    int32_t result = cp_writer_tensor(w, CP_BUFFER_OUTPUT, CP_TENSOR_OUT);
    int32_t lse = cp_writer_tensor(w, CP_BUFFER_OUTPUT, CP_TENSOR_LSE);
    int32_t state = cp_writer_rows(w, &w->scratch, CP_LAYOUT_STATE, CP_TENSOR_OUT,
                                   w->rows.count, w->heads.count);
    cp_two_sided_exchange_in(&t);
    cp_two_sided_make_block(&t);
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
