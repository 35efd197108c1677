/* Attention over windows, backward: partial gradients of keys go through slots. */
#include "base/checked.h"
#include "schedule/write_pull.h"

static struct cp_row_buffers publish_backward(struct cp_pull *pull)
{
    struct cp_writer *w = &pull->w;
    const struct cp_pull_window *own = &pull->window[w->rank];
    int64_t rows = w->plan->q_rows[w->rank].count;
    struct cp_row_buffers in = {
        .q = cp_writer_tensor(w, CP_BUFFER_INPUT, CP_TENSOR_Q),
        .dout = cp_writer_tensor(w, CP_BUFFER_INPUT, CP_TENSOR_DOUT),
        .lse = cp_writer_tensor(w, CP_BUFFER_INPUT, CP_TENSOR_LSE),
    };
    in.delta = pull->is_shared ? own->delta
                               : cp_writer_rows(w, &w->scratch, CP_LAYOUT_PLAIN,
                                                CP_TENSOR_DELTA, rows, w->call->heads);
    cp_pull_publish_copy(pull, own->k,
                         cp_writer_tensor(w, CP_BUFFER_INPUT, CP_TENSOR_K));
    cp_pull_publish_copy(pull, own->v,
                         cp_writer_tensor(w, CP_BUFFER_INPUT, CP_TENSOR_V));
    cp_pull_publish_mask(pull);
    cp_writer_delta(w, CP_LANE_IN, in.delta, in.dout);
    if (pull->is_shared) {
        cp_pull_publish_copy(pull, own->q, in.q);
        cp_pull_publish_copy(pull, own->dout, in.dout);
        cp_pull_publish_copy(pull, own->lse, in.lse);
    }
    cp_build_publish(&w->builder, CP_LANE_IN, CP_PULL_READY, 1);
    return in;
}

static struct cp_row_buffers gather_backward(struct cp_pull *pull,
                                             struct cp_row_buffers own)
{
    struct cp_writer *w = &pull->w;
    struct cp_row_buffers all = own;
    if (!pull->is_shared) {
        return all;
    }
    int64_t rows = w->rows.count;
    int64_t heads = w->heads.count;
    all.q = cp_writer_rows(w, &w->scratch, CP_LAYOUT_PLAIN, CP_TENSOR_Q, rows, heads);
    all.dout =
        cp_writer_rows(w, &w->scratch, CP_LAYOUT_PLAIN, CP_TENSOR_DOUT, rows, heads);
    all.lse =
        cp_writer_rows(w, &w->scratch, CP_LAYOUT_PLAIN, CP_TENSOR_LSE, rows, heads);
    all.delta =
        cp_writer_rows(w, &w->scratch, CP_LAYOUT_PLAIN, CP_TENSOR_DELTA, rows, heads);
    cp_pull_declare_group_mask(pull);
    for (int index = 0; index < w->plan->ulysses; index++) {
        int member = cp_pull_group_member(pull, index);
        const struct cp_pull_window *theirs = &pull->window[member];
        bool is_own = member == w->rank;
        if (!cp_pull_needs_rows_of(pull, member)) {
            continue;
        }
        if (!is_own) {
            cp_build_await(&w->builder, CP_LANE_IN, member, CP_PULL_READY, 1);
        }
        cp_pull_gather_rows(pull, member, all.q, is_own ? own.q : theirs->q);
        cp_pull_gather_rows(pull, member, all.dout, is_own ? own.dout : theirs->dout);
        cp_pull_gather_rows(pull, member, all.lse, is_own ? own.lse : theirs->lse);
        cp_pull_gather_rows(pull, member, all.delta, theirs->delta);
        cp_pull_gather_mask(pull, member);
    }
    cp_build_publish(&w->builder, CP_LANE_IN, CP_PULL_READY, 2);
    return all;
}

/* Gradients of keys: those of the own block, or a partial one in a slot. */
struct sums {
    int32_t dk, dv;
};

/* The slot that step j > 0 of `rank` uses, in the shape of that step's block. Both slots
 * have room for the longest block. */
static struct sums declare_slot(struct cp_pull *pull, int rank, int j)
{
    struct cp_writer *w = &pull->w;
    const struct cp_plan *plan = w->plan;
    const struct cp_range heads = plan->kv_heads[cp_plan_ulysses_rank(plan, rank)];
    struct sums slot = {0, 0};
    struct cp_arena arena = {.kind = CP_BUFFER_WINDOW,
                             .owner = rank,
                             .bytes = pull->window[rank].slots_first};
    int64_t longest = 0;
    for (int owner = 0; owner < plan->world; owner++) {
        longest =
            plan->kv_rows[owner].count > longest ? plan->kv_rows[owner].count : longest;
    }
    int64_t keys = plan->kv_rows[(rank + j) % plan->world].count;
    for (int index = 0; index <= j % 2; index++) {
        int64_t rows = index == j % 2 ? keys : longest;
        slot.dk = cp_writer_sums(w, &arena, CP_TENSOR_DK, rows, heads.count);
        slot.dv = cp_writer_sums(w, &arena, CP_TENSOR_DV, rows, heads.count);
    }
    if (rank == w->rank && arena.most > w->window.most) {
        w->window.most = arena.most;
    }
    return slot;
}

/* Is the block that `rank` meets in its step j worth a step? All ranks ask, and get the
 * same answer. */
static bool is_live_step(const struct cp_pull *pull, int rank, int j)
{
    struct cp_block block = cp_pull_block_of(pull, (rank + j) % pull->w.plan->world);
    return cp_writer_is_live(&pull->w, rank, &block);
}

/* Before slot j mod 2 is used again, the owner of its last content must have added
 * that; before the first is used at all, the group must have fetched the rows there. */
static void await_slot(struct cp_pull *pull, int j)
{
    struct cp_writer *w = &pull->w;
    for (int index = 1; index < w->plan->ulysses && !pull->has_slots; index++) {
        cp_build_await(&w->builder, CP_LANE_IN, cp_pull_group_member(pull, index),
                       CP_PULL_READY, 2);
    }
    pull->has_slots = true;
    for (int before = j - 2; before > 0; before -= 2) {
        if (is_live_step(pull, w->rank, before)) {
            cp_build_await(&w->builder, CP_LANE_COMPUTE,
                           (w->rank + before) % w->plan->world, CP_PULL_ADDED,
                           (uint32_t)before);
            return;
        }
    }
}

/* A partial sum begins at 0, once the slot is free. */
static void clear_slot(struct cp_builder *builder, int32_t slot)
{
    struct cp_step *step = cp_build_zero(builder, CP_LANE_COMPUTE, slot);
    cp_build_after(builder, step, CP_LANE_IN);
}

/* Step j: the block's gradient. That of the own block goes straight into the own sums.
 */
static void grad_block(struct cp_pull *pull, const struct cp_row_buffers *rows,
                       const struct sums *own, int j)
{
    struct cp_writer *w = &pull->w;
    struct cp_block block = cp_pull_block_of(pull, (w->rank + j) % w->plan->world);
    const struct cp_pull_window *window = &pull->window[block.owner];
    if (!cp_writer_is_live(w, w->rank, &block)) {
        return;
    }
    struct cp_key_boxes keys = {
        .k = cp_writer_heads(cp_writer_box(w, window->k), w->kv_heads),
        .v = cp_writer_heads(cp_writer_box(w, window->v), w->kv_heads),
        .mask = cp_writer_mask_box(w, window->mask, 0, &block),
        .dk = cp_writer_heads(cp_writer_box(w, own->dk), w->kv_heads),
        .dv = cp_writer_heads(cp_writer_box(w, own->dv), w->kv_heads),
    };
    if (j > 0) {
        struct sums slot = declare_slot(pull, w->rank, j);
        cp_build_await(&w->builder, CP_LANE_IN, block.owner, CP_PULL_READY, 1);
        await_slot(pull, j);
        clear_slot(&w->builder, slot.dk);
        clear_slot(&w->builder, slot.dv);
        keys.dk = cp_writer_box(w, slot.dk);
        keys.dv = cp_writer_box(w, slot.dv);
    }
    cp_writer_grad(w, rows, &keys, &block);
    if (j > 0) {
        cp_build_publish(&w->builder, CP_LANE_COMPUTE, CP_PULL_PARTIAL, (uint32_t)j);
    }
}

/* Takes in what the rank j places back made of the own keys in its step j. */
static void add_partial(struct cp_pull *pull, const struct sums *own, int j)
{
    struct cp_writer *w = &pull->w;
    int world = w->plan->world;
    int peer = (w->rank - j + world) % world;
    if (!is_live_step(pull, peer, j)) {
        return;
    }
    struct sums slot = declare_slot(pull, peer, j);
    struct cp_range heads = w->plan->kv_heads[cp_plan_ulysses_rank(w->plan, peer)];
    cp_build_await(&w->builder, CP_LANE_COMPUTE, peer, CP_PULL_PARTIAL, (uint32_t)j);
    cp_build_move(&w->builder, CP_STEP_REDUCE, CP_LANE_COMPUTE,
                  cp_writer_heads(cp_writer_box(w, own->dk), heads),
                  cp_writer_box(w, slot.dk));
    cp_build_move(&w->builder, CP_STEP_REDUCE, CP_LANE_COMPUTE,
                  cp_writer_heads(cp_writer_box(w, own->dv), heads),
                  cp_writer_box(w, slot.dv));
    cp_build_publish(&w->builder, CP_LANE_COMPUTE, CP_PULL_ADDED, (uint32_t)j);
}

static void return_queries(struct cp_pull *pull, const struct cp_row_buffers *rows)
{
    struct cp_writer *w = &pull->w;
    int32_t dq = cp_writer_tensor(w, CP_BUFFER_OUTPUT, CP_TENSOR_DQ);
    if (!pull->is_shared) {
        cp_build_move(&w->builder, CP_STEP_COPY, CP_LANE_COMPUTE, cp_writer_box(w, dq),
                      cp_writer_box(w, rows->dq));
        return;
    }
    cp_build_publish(&w->builder, CP_LANE_COMPUTE, CP_PULL_RESULT, 1);
    for (int index = 0; index < w->plan->ulysses; index++) {
        int member = cp_pull_group_member(pull, index);
        if (cp_pull_await_result(pull, member)) {
            cp_pull_fetch_result(pull, member, dq, pull->window[member].dq);
        }
    }
}

enum cp_code cp_write_pull_backward(const struct cp_plan *plan, int rank,
                                    struct cp_schedule **out)
{
    struct cp_pull pull;
    CP_TRY(cp_pull_init(&pull, plan, rank));
    struct cp_writer *w = &pull.w;
    struct cp_row_buffers rows = gather_backward(&pull, publish_backward(&pull));
    int64_t keys = plan->kv_rows[rank].count;
    rows.dq = pull.is_shared ? pull.window[rank].dq
                             : cp_writer_sums(w, &w->scratch, CP_TENSOR_DQ,
                                              w->rows.count, w->heads.count);
    struct sums own = {
        .dk = cp_writer_sums(w, &w->scratch, CP_TENSOR_DK, keys, w->call->kv_heads),
        .dv = cp_writer_sums(w, &w->scratch, CP_TENSOR_DV, keys, w->call->kv_heads),
    };
    cp_build_zero(&w->builder, CP_LANE_COMPUTE, rows.dq);
    cp_build_zero(&w->builder, CP_LANE_COMPUTE, own.dk);
    cp_build_zero(&w->builder, CP_LANE_COMPUTE, own.dv);
    grad_block(&pull, &rows, &own, 0);
    for (int j = 1; j < plan->world; j++) {
        grad_block(&pull, &rows, &own, j);
        if (j > 1) {
            add_partial(&pull, &own, j - 1);
        }
    }
    return_queries(&pull, &rows);
    if (plan->world > 1) {
        add_partial(&pull, &own, plan->world - 1);
    }
    cp_writer_return_keys(w, CP_LANE_COMPUTE, own.dk, own.dv);
    return cp_pull_take(&pull, out);
}
