/* Attention over windows, forward: pack, publish, attend block by block, finish. */
#include "schedule/write_pull.h"

static void publish_forward(struct cp_pull *pull, int32_t q)
{
    struct cp_writer *w = &pull->w;
    const struct cp_pull_window *own = &pull->window[w->rank];
    int32_t k = cp_writer_tensor(w, CP_BUFFER_INPUT, CP_TENSOR_K);
    int32_t v = cp_writer_tensor(w, CP_BUFFER_INPUT, CP_TENSOR_V);
    cp_build_move(&w->builder, CP_STEP_PACK, CP_LANE_IN, cp_writer_box(w, own->k),
                  cp_writer_box(w, k));
    cp_build_move(&w->builder, CP_STEP_PACK, CP_LANE_IN, cp_writer_box(w, own->v),
                  cp_writer_box(w, v));
    cp_pull_publish_mask(pull);
    if (pull->is_shared) {
        cp_pull_publish_copy(pull, own->q, q);
    }
    cp_build_publish(&w->builder, CP_LANE_IN, CP_PULL_READY, 1);
}

/* The query rows of the group for the own heads, in one piece. */
static int32_t gather_queries(struct cp_pull *pull, int32_t q)
{
    struct cp_writer *w = &pull->w;
    if (!pull->is_shared) {
        return q;
    }
    int32_t all = pull->window[w->rank].gathered;
    cp_pull_declare_group_mask(pull);
    for (int index = 0; index < w->plan->ulysses; index++) {
        int member = cp_pull_group_member(pull, index);
        if (!cp_pull_needs_rows_of(pull, member)) {
            continue;
        }
        if (member != w->rank) {
            cp_build_await(&w->builder, CP_LANE_IN, member, CP_PULL_READY, 1);
        }
        cp_pull_gather_rows(pull, member, all,
                            member == w->rank ? q : pull->window[member].q);
        cp_pull_gather_mask(pull, member);
    }
    return all;
}

static void attend_blocks(struct cp_pull *pull, int32_t q, int32_t state)
{
    struct cp_writer *w = &pull->w;
    cp_build_zero(&w->builder, CP_LANE_COMPUTE, state);
    for (int j = 0; j < w->plan->world; j++) {
        struct cp_block block = cp_pull_block_of(pull, (w->rank + j) % w->plan->world);
        const struct cp_pull_window *window = &pull->window[block.owner];
        if (!cp_writer_is_live(w, w->rank, &block)) {
            continue;
        }
        if (block.owner != w->rank) {
            cp_build_await(&w->builder, CP_LANE_IN, block.owner, CP_PULL_READY, 1);
        }
        cp_writer_attend(w, state, q,
                         cp_writer_heads(cp_writer_box(w, window->k), w->kv_heads),
                         cp_writer_heads(cp_writer_box(w, window->v), w->kv_heads),
                         cp_writer_mask_box(w, window->mask, 0, &block), &block);
    }
}

static void finish_rows(struct cp_pull *pull, int32_t state, int32_t out, int32_t lse)
{
    struct cp_writer *w = &pull->w;
    const struct cp_pull_window *own = &pull->window[w->rank];
    bool wants_lse = lse != CP_NO_BUFFER;
    cp_writer_finish(w, state, pull->is_shared ? own->out : out,
                     pull->is_shared ? own->out_lse : lse);
    if (!pull->is_shared) {
        return;
    }
    cp_build_publish(&w->builder, CP_LANE_COMPUTE, CP_PULL_RESULT, 1);
    for (int index = 0; index < w->plan->ulysses; index++) {
        int member = cp_pull_group_member(pull, index);
        if (!cp_pull_await_result(pull, member)) {
            continue;
        }
        cp_pull_fetch_result(pull, member, out, pull->window[member].out);
        if (wants_lse) {
            cp_pull_fetch_result(pull, member, lse, pull->window[member].out_lse);
        }
    }
}

enum cp_code cp_write_pull_forward(const struct cp_plan *plan, int rank,
                                   struct cp_schedule **out)
{
    struct cp_pull pull;
    CP_TRY(cp_pull_init(&pull, plan, rank));
    struct cp_writer *w = &pull.w;
    int32_t q = cp_writer_tensor(w, CP_BUFFER_INPUT, CP_TENSOR_Q);
    int32_t result = cp_writer_tensor(w, CP_BUFFER_OUTPUT, CP_TENSOR_OUT);
    int32_t lse = cp_writer_tensor(w, CP_BUFFER_OUTPUT, CP_TENSOR_LSE);
    publish_forward(&pull, q);
    int32_t queries = gather_queries(&pull, q);
    int32_t state = cp_writer_rows(w, &w->scratch, CP_LAYOUT_STATE, CP_TENSOR_OUT,
                                   w->rows.count, w->heads.count);
    attend_blocks(&pull, queries, state);
    finish_rows(&pull, state, result, lse);
    return cp_pull_take(&pull, out);
}
