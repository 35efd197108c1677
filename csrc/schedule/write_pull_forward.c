/* Attention over windows, forward: pack, publish, attend block by block. */
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
    int32_t all = cp_writer_rows(w, &w->scratch, CP_LAYOUT_PLAIN, CP_TENSOR_Q,
                                 w->rows.count, w->heads.count);
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

static struct cp_row_boxes gather_rows(struct cp_pull *pull, const void *q)
{
    const struct cp_writer *w = &pull->w;
    int32_t own = *(const int32_t *)q;
    return (struct cp_row_boxes){
        .q = pull->is_shared ? gather_queries(pull, own)
                             : cp_writer_heads(cp_writer_box(w, own), w->heads)};
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

/* What step j of a chunk meets. */
static struct cp_block block_at(const struct cp_pull *pull, int j)
{
    const struct cp_writer *w = &pull->w;
    return cp_pull_block_of(pull, (w->rank + j) % w->plan->world);
}

static bool is_live(const struct cp_pull *pull, int j)
{
    const struct cp_writer *w = &pull->w;
    struct cp_block block = block_at(pull, j);
    return cp_writer_is_live(w, w->rank, w->chunk, &block);
}

static int count_blocks(const struct cp_pull *pull)
{
    int count = 0;
    for (int j = 0; j < pull->w.plan->world; j++) {
        count += is_live(pull, j) ? 1 : 0;
    }
    return count;
}

/* A result lies where the group has read queries. */
static void free_results(struct cp_pull *pull)
{
    cp_pull_await_fetched(pull);
    cp_writer_arrive(&pull->w);
}

static void attend_blocks(struct cp_pull *pull, struct cp_attended *rows)
{
    struct cp_writer *w = &pull->w;
    for (int j = 0; j < w->plan->world; j++) {
        struct cp_block block = block_at(pull, j);
        int step = w->chunk * w->plan->world + j;
        if (!is_live(pull, j)) {
            continue;
        }
        struct cp_pull_keys keys = cp_pull_bring_keys(pull, block.owner, step);
        cp_writer_arrive(w);
        if (rows->met + 1 == rows->blocks) {
            free_results(pull);
        }
        cp_writer_attend(
            w, rows, keys.k, keys.v,
            cp_writer_mask_box(w, pull->window[block.owner].mask, 0, &block), &block);
        cp_pull_met_keys(pull, step);
    }
}

/* The rows of a result: in the window, or the caller's. */
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

static void meet_keys(struct cp_pull *pull, int32_t out, int32_t lse)
{
    struct cp_writer *w = &pull->w;
    const struct cp_pull_chunk *own = cp_pull_begin_chunk(pull);
    struct cp_attended rows = {
        .state = own->state,
        .q = own->rows.q,
        .out = finished(pull, own->out, out),
        .lse = finished(pull, own->out_lse, lse),
        .blocks = count_blocks(pull),
    };
    attend_blocks(pull, &rows);
    free_results(pull);
    cp_writer_finish(w, &rows);
}

/* The group's results come home. */
static void return_rows(struct cp_pull *pull, int32_t out, int32_t lse)
{
    struct cp_writer *w = &pull->w;
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
    cp_pull_gather(&pull, gather_rows, &q);
    for (int chunk = 0; chunk < plan->chunks; chunk++) {
        cp_writer_set_chunk(w, chunk);
        meet_keys(&pull, result, lse);
        return_rows(&pull, result, lse);
    }
    return cp_pull_take(&pull, out);
}
