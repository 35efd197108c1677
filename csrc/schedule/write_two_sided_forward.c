/* Attention over sends and receives, forward. */
#include "schedule/write_two_sided.h"

static void begin(struct cp_two_sided *t)
{
    static const enum cp_tensor_role roles[] = {CP_TENSOR_Q, CP_TENSOR_K, CP_TENSOR_V};
    int32_t out = cp_writer_tensor(&t->w, CP_BUFFER_OUTPUT, CP_TENSOR_OUT);
    int32_t lse = cp_writer_tensor(&t->w, CP_BUFFER_OUTPUT, CP_TENSOR_LSE);
    cp_two_sided_share_inputs(t, roles, sizeof roles / sizeof *roles);
    cp_two_sided_give(t, CP_TENSOR_OUT, t->w.dtype, out);
    if (lse != CP_NO_BUFFER) {
        cp_two_sided_give(t, CP_TENSOR_LSE, t->w.sum, lse);
    }
}

static void declare(struct cp_two_sided *t)
{
    struct cp_writer *w = &t->w;
    t->at->sum = cp_writer_rows(w, &w->scratch, CP_LAYOUT_STATE, CP_TENSOR_OUT,
                                w->rows.count, w->heads.count);
}

static void declare_results(struct cp_two_sided *t)
{
    for (int i = 0; i < t->result_count && t->ulysses > 1; i++) {
        cp_two_sided_declare_gathered(t, &t->at->results[i]);
    }
}

static void attend_block(struct cp_two_sided *t, int b)
{
    struct cp_writer *w = &t->w;
    struct cp_block block = cp_two_sided_block_of(t, b);
    struct cp_key_block *keys = &t->at->blocks[b];
    if (cp_writer_is_live(w, w->rank, w->chunk, &block)) {
        cp_writer_attend(w, t->at->sum, cp_two_sided_gathered(t, CP_TENSOR_Q),
                         cp_writer_box(w, keys->k), cp_writer_box(w, keys->v),
                         cp_writer_mask_box(w, keys->mask, w->heads.first, &block),
                         &block);
    }
    keys->done = w->builder.lane_steps[CP_LANE_COMPUTE];
}

/* The rows of a result: the group's, or where they belong. */
static struct cp_box rows_of(const struct cp_two_sided *t,
                             const struct cp_shared *result)
{
    return result->gathered == CP_NO_BUFFER ? cp_two_sided_own(t, result)
                                            : cp_writer_box(&t->w, result->gathered);
}

static void meet(struct cp_two_sided *t)
{
    struct cp_writer *w = &t->w;
    const struct cp_shared *results = t->at->results;
    cp_build_zero(&w->builder, CP_LANE_COMPUTE, t->at->sum);
    attend_block(t, w->r);
    if (cp_two_sided_is_allgather(t) && t->ring > 1) {
        cp_two_sided_gather_blocks(t);
        cp_writer_arrive(w);
    }
    for (int j = 1; j < t->ring; j++) {
        if (!cp_two_sided_is_allgather(t)) {
            cp_two_sided_pass_block(t, j);
            cp_writer_arrive(w);
        }
        attend_block(t, cp_two_sided_block_at(t, j));
    }
    cp_writer_finish(w, t->at->sum, rows_of(t, &results[0]),
                     t->result_count > 1 ? rows_of(t, &results[1]) : cp_box_none());
}

static void nothing(struct cp_two_sided *t)
{
    (void)t;
}

enum cp_code cp_write_two_sided_forward(const struct cp_plan *plan, int rank,
                                        struct cp_schedule **out)
{
    static const struct cp_two_sided_direction forward = {
        .begin = begin,
        .declare = declare,
        .declare_results = declare_results,
        .meet = meet,
        .finish = nothing,
        .end = nothing,
    };
    return cp_two_sided_write(plan, rank, &forward, out);
}
