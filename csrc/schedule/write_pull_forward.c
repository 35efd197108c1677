/* Attention over windows, forward: pack, publish, attend block by block, finish. */
#include "schedule/write_pull.h"

static void publish_forward(struct cp_pull *pull, int32_t q)
{
    struct cp_writer *w = &pull->w;
    cp_pull_publish_keys(pull);
    cp_pull_publish_mask(pull);
    if (pull->is_shared) {
        cp_pull_publish_copy(pull, pull->window[w->rank].q, q);
    }
    cp_build_publish(&w->builder, CP_LANE_IN, CP_PULL_READY, 1);
}

/* The query rows of the group for the own heads of the chunk, in one piece. */
static struct cp_box gather_queries(struct cp_pull *pull, int32_t q)
{
    struct cp_writer *w = &pull->w;
    if (!pull->is_shared) {
        return cp_writer_heads(cp_writer_box(w, q), w->heads);
    }
    int32_t all = cp_pull_chunk_of(pull, w->rank)->gathered;
    cp_pull_declare_group_mask(pull);
    for (int index = 0; index < w->plan->ulysses; index++) {
        int member = cp_pull_group_member(pull, index);
        if (!cp_pull_needs_rows_of(pull, member)) {
            continue;
        }
        cp_pull_await_ready(pull, member);
        cp_pull_gather_rows(pull, member, all,
                            member == w->rank ? q : pull->window[member].q);
        cp_pull_gather_mask(pull, member);
    }
    return cp_writer_box(w, all);
}

/* They take turns in one place, since all that is done with them is on one lane. */
static void declare_states(struct cp_pull *pull)
{
    struct cp_writer *w = &pull->w;
    int64_t start = w->scratch.bytes;
    int64_t end = start;
    for (int chunk = 0; chunk < w->plan->chunks; chunk++) {
        cp_writer_set_chunk(w, chunk);
        w->scratch.bytes = start;
        cp_pull_chunk_of(pull, w->rank)->state =
            cp_writer_rows(w, &w->scratch, CP_LAYOUT_STATE, CP_TENSOR_OUT,
                           w->rows.count, w->heads.count);
        end = w->scratch.bytes > end ? w->scratch.bytes : end;
    }
    w->scratch.bytes = end;
}

static void attend_blocks(struct cp_pull *pull, struct cp_box q)
{
    struct cp_writer *w = &pull->w;
    int32_t state = cp_pull_chunk_of(pull, w->rank)->state;
    cp_build_zero(&w->builder, CP_LANE_COMPUTE, state);
    for (int j = 0; j < w->plan->world; j++) {
        struct cp_block block = cp_pull_block_of(pull, (w->rank + j) % w->plan->world);
        int step = w->chunk * w->plan->world + j;
        if (!cp_writer_is_live(w, w->rank, w->chunk, &block)) {
            continue;
        }
        struct cp_pull_keys keys = cp_pull_bring_keys(pull, block.owner, step);
        cp_writer_arrive(w);
        cp_writer_attend(
            w, state, q, keys.k, keys.v,
            cp_writer_mask_box(w, pull->window[block.owner].mask, 0, &block), &block);
        cp_pull_met_keys(pull, step);
    }
}

/* The rows of a result that FINISH writes: in the window, or the caller's. */
static struct cp_box finished(const struct cp_pull *pull, int32_t in_window,
                              int32_t of_caller)
{
    const struct cp_writer *w = &pull->w;
    if (of_caller == CP_NO_BUFFER) {
        return cp_box_none();
    }
    return pull->is_shared ? cp_writer_box(w, in_window)
                           : cp_writer_heads(cp_writer_box(w, of_caller), w->heads);
}

static void finish_rows(struct cp_pull *pull, int32_t out, int32_t lse)
{
    struct cp_writer *w = &pull->w;
    const struct cp_pull_chunk *own = cp_pull_chunk_of(pull, w->rank);
    cp_writer_arrive(w);
    cp_writer_finish(w, own->state, finished(pull, own->out, out),
                     finished(pull, own->out_lse, lse));
    if (!pull->is_shared) {
        return;
    }
    cp_build_publish(&w->builder, CP_LANE_COMPUTE, CP_PULL_RESULT,
                     (uint32_t)w->chunk + 1);
    for (int index = 0; index < w->plan->ulysses; index++) {
        int member = cp_pull_group_member(pull, index);
        const struct cp_pull_chunk *theirs = cp_pull_chunk_of(pull, member);
        if (!cp_pull_await_result(pull, member)) {
            continue;
        }
        cp_pull_fetch_result(pull, member, out, theirs->out);
        if (lse != CP_NO_BUFFER) {
            cp_pull_fetch_result(pull, member, lse, theirs->out_lse);
        }
    }
}

enum cp_code cp_write_pull_forward(const struct cp_plan *plan, int rank,
                                   enum cp_transport transport,
                                   struct cp_schedule **out)
{
    struct cp_pull pull;
    CP_TRY(cp_pull_init(&pull, plan, rank, transport));
    struct cp_writer *w = &pull.w;
    int32_t q = cp_writer_tensor(w, CP_BUFFER_INPUT, CP_TENSOR_Q);
    int32_t result = cp_writer_tensor(w, CP_BUFFER_OUTPUT, CP_TENSOR_OUT);
    int32_t lse = cp_writer_tensor(w, CP_BUFFER_OUTPUT, CP_TENSOR_LSE);
    declare_states(&pull);
    publish_forward(&pull, q);
    for (int chunk = 0; chunk < plan->chunks; chunk++) {
        cp_writer_set_chunk(w, chunk);
        attend_blocks(&pull, gather_queries(&pull, q));
        finish_rows(&pull, result, lse);
    }
    return cp_pull_take(&pull, out);
}
