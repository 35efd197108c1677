/* Attention over windows, backward: partial gradients of keys go through slots. */
#include "base/checked.h"
#include "schedule/write_pull.h"

/* The rows that this rank brings, as a group's member reads them or as they are the caller's. */
struct own_rows {
    int32_t q, dout, lse, delta;
};

static struct own_rows publish_backward(struct cp_pull *pull)
{
    struct cp_writer *w = &pull->w;
    const struct cp_pull_window *own = &pull->window[w->rank];
    int64_t rows = w->plan->q_rows[w->rank].count;
    struct own_rows in = {
        .q = cp_writer_tensor(w, CP_BUFFER_INPUT, CP_TENSOR_Q),
        .dout = cp_writer_tensor(w, CP_BUFFER_INPUT, CP_TENSOR_DOUT),
        .lse = cp_writer_tensor(w, CP_BUFFER_INPUT, CP_TENSOR_LSE),
    };
    in.delta = pull->is_shared ? own->delta
                               : cp_writer_rows(w, &w->scratch, CP_LAYOUT_PLAIN,
                                                CP_TENSOR_DELTA, rows, w->call->heads);
    cp_pull_publish_keys(pull);
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

/* A place for the group's rows of the chunk. */
static int32_t declare_rows(struct cp_pull *pull, enum cp_tensor_role role)
{
    struct cp_writer *w = &pull->w;
    return cp_writer_rows(w, &w->scratch, CP_LAYOUT_PLAIN, role, w->rows.count,
                          w->heads.count);
}

/* The group's rows for the own heads of the chunk. */
static struct cp_row_boxes gather_group(struct cp_pull *pull,
                                        const struct own_rows *own)
{
    struct cp_writer *w = &pull->w;
    int32_t q = declare_rows(pull, CP_TENSOR_Q);
    int32_t dout = declare_rows(pull, CP_TENSOR_DOUT);
    int32_t lse = declare_rows(pull, CP_TENSOR_LSE);
    int32_t delta = declare_rows(pull, CP_TENSOR_DELTA);
    cp_pull_declare_group_mask(pull);
    for (int index = 0; index < w->plan->ulysses; index++) {
        int member = cp_pull_group_member(pull, index);
        const struct cp_pull_window *theirs = &pull->window[member];
        bool is_own = member == w->rank;
        if (!cp_pull_needs_rows_of(pull, member)) {
            continue;
        }
        cp_pull_await_ready(pull, member);
        cp_pull_gather_rows(pull, member, q, is_own ? own->q : theirs->q);
        cp_pull_gather_rows(pull, member, dout, is_own ? own->dout : theirs->dout);
        cp_pull_gather_rows(pull, member, lse, is_own ? own->lse : theirs->lse);
        cp_pull_gather_rows(pull, member, delta, theirs->delta);
        cp_pull_gather_mask(pull, member);
    }
    return (struct cp_row_boxes){.q = cp_writer_box(w, q),
                                 .dout = cp_writer_box(w, dout),
                                 .lse = cp_writer_box(w, lse),
                                 .delta = cp_writer_box(w, delta)};
}

/* The own rows, where no group has others: the chunk's heads of them. */
static struct cp_row_boxes cut_rows(struct cp_pull *pull, const struct own_rows *own)
{
    struct cp_writer *w = &pull->w;
    return (struct cp_row_boxes){
        .q = cp_writer_heads(cp_writer_box(w, own->q), w->heads),
        .dout = cp_writer_heads(cp_writer_box(w, own->dout), w->heads),
        .lse = cp_writer_heads(cp_writer_box(w, own->lse), w->heads),
        .delta = cp_writer_heads(cp_writer_box(w, own->delta), w->heads)};
}

static struct cp_row_boxes gather_rows(struct cp_pull *pull, const void *own)
{
    return pull->is_shared ? gather_group(pull, own) : cut_rows(pull, own);
}

/* Where the sum of dq of each chunk is: in the window, or where they take turns. */
static void declare_dq(struct cp_pull *pull)
{
    struct cp_writer *w = &pull->w;
    int64_t start = w->scratch.bytes;
    int64_t end = start;
    for (int index = 0; index < w->plan->chunks; index++) {
        cp_writer_set_chunk(w, index);
        struct cp_pull_chunk *chunk = cp_pull_chunk_of(pull, w->rank);
        w->scratch.bytes = start;
        if (!pull->is_shared) {
            chunk->dq = cp_writer_sums(w, &w->scratch, CP_TENSOR_DQ, w->rows.count,
                                       w->heads.count);
        }
        chunk->rows.dq = cp_writer_box(w, chunk->dq);
        end = w->scratch.bytes > end ? w->scratch.bytes : end;
    }
    w->scratch.bytes = end;
}

/* Gradients of keys: those of the own block, or a partial one in a slot. */
struct sums {
    int32_t dk, dv;
};

static int block_of_step(const struct cp_pull *pull, int step)
{
    return step % pull->w.plan->world;
}

static int chunk_of_step(const struct cp_pull *pull, int step)
{
    return step / pull->w.plan->world;
}

/* The rank whose keys `rank` meets in that step. */
static int owner_of_step(const struct cp_pull *pull, int rank, int step)
{
    return (rank + block_of_step(pull, step)) % pull->w.plan->world;
}

/* The slot that a step of `rank` uses, in the shape of that step's block. Both slots have
 * room for the longest block of the first chunk, which has the most keys' heads. */
static struct sums declare_slot(struct cp_pull *pull, int rank, int step)
{
    struct cp_writer *w = &pull->w;
    const struct cp_plan *plan = w->plan;
    int u = cp_plan_ulysses_rank(plan, rank);
    struct sums slot = {0, 0};
    struct cp_arena arena = {.kind = CP_BUFFER_WINDOW,
                             .owner = rank,
                             .bytes = pull->window[rank].slots_first};
    int64_t keys = plan->kv_rows[owner_of_step(pull, rank, step)].count;
    int chunk = chunk_of_step(pull, step);
    for (int index = 0; index <= step % 2; index++) {
        bool is_last = index == step % 2;
        int64_t rows = is_last ? keys : pull->longest_block;
        int64_t heads = cp_plan_chunk_kv_heads(plan, u, is_last ? chunk : 0).count;
        slot.dk = cp_writer_sums(w, &arena, CP_TENSOR_DK, rows, heads);
        slot.dv = cp_writer_sums(w, &arena, CP_TENSOR_DV, rows, heads);
    }
    if (rank == w->rank && arena.most > w->window.most) {
        w->window.most = arena.most;
    }
    return slot;
}

/* Is the block that `rank` meets in that step worth a step? All ranks ask, and get the same
 * answer. */
static bool is_live_step(const struct cp_pull *pull, int rank, int step)
{
    struct cp_block block = cp_pull_block_of(pull, owner_of_step(pull, rank, step));
    return cp_writer_is_live(&pull->w, rank, chunk_of_step(pull, step), &block);
}

/* Before a slot is used again, the owner of its last content must have added that; before
 * the first is used at all, the group must have fetched the rows there. */
static void await_slot(struct cp_pull *pull, int step)
{
    struct cp_writer *w = &pull->w;
    cp_pull_await_fetched(pull);
    for (int before = step - 2; before > 0; before -= 2) {
        if (block_of_step(pull, before) > 0 && is_live_step(pull, w->rank, before)) {
            cp_build_await(&w->builder, CP_LANE_COMPUTE,
                           owner_of_step(pull, w->rank, before), CP_PULL_ADDED,
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

/* The keys of the step, if it is one of the chunk's and live. */
static struct cp_pull_keys bring(struct cp_pull *pull, int step)
{
    struct cp_writer *w = &pull->w;
    if (step == (w->chunk + 1) * w->plan->world || !is_live_step(pull, w->rank, step)) {
        return (struct cp_pull_keys){cp_box_none(), cp_box_none()};
    }
    return cp_pull_bring_keys(pull, owner_of_step(pull, w->rank, step), step);
}

/* The block's gradient, with the keys that `brought` has; then that has the next step's. They
 * come while this one is computed, also where the order of the list is kept. The gradient of the
 * own block goes straight into the own sums. */
static void grad_step(struct cp_pull *pull, const struct sums *own, int step,
                      struct cp_pull_keys *brought)
{
    struct cp_writer *w = &pull->w;
    bool is_own = block_of_step(pull, step) == 0;
    struct cp_block block = cp_pull_block_of(pull, owner_of_step(pull, w->rank, step));
    if (!is_live_step(pull, w->rank, step)) {
        *brought = bring(pull, step + 1);
        return;
    }
    struct cp_key_boxes keys = {
        .k = brought->k,
        .v = brought->v,
        .mask = cp_writer_mask_box(w, pull->window[block.owner].mask, 0, &block),
        .dk = cp_writer_heads(cp_writer_box(w, own->dk), w->kv_heads),
        .dv = cp_writer_heads(cp_writer_box(w, own->dv), w->kv_heads),
    };
    if (!is_own) {
        struct sums slot = declare_slot(pull, w->rank, step);
        await_slot(pull, step);
        clear_slot(&w->builder, slot.dk);
        clear_slot(&w->builder, slot.dv);
        keys.dk = cp_writer_box(w, slot.dk);
        keys.dv = cp_writer_box(w, slot.dv);
        cp_writer_arrive(w);
    }
    *brought = bring(pull, step + 1);
    cp_writer_grad(w, &cp_pull_chunk_of(pull, w->rank)->rows, &keys, &block);
    cp_pull_met_keys(pull, step);
    if (!is_own) {
        cp_build_publish(&w->builder, CP_LANE_COMPUTE, CP_PULL_PARTIAL, (uint32_t)step);
    }
}

/* Takes in what the rank that meets the own keys in that step made of them. */
static void add_partial(struct cp_pull *pull, const struct sums *own, int step)
{
    struct cp_writer *w = &pull->w;
    int world = w->plan->world;
    int peer = (w->rank - block_of_step(pull, step) + world) % world;
    if (peer == w->rank || !is_live_step(pull, peer, step)) {
        return;
    }
    struct sums slot = declare_slot(pull, peer, step);
    struct cp_range heads = cp_plan_chunk_kv_heads(
        w->plan, cp_plan_ulysses_rank(w->plan, peer), chunk_of_step(pull, step));
    cp_build_await(&w->builder, CP_LANE_COMPUTE, peer, CP_PULL_PARTIAL, (uint32_t)step);
    cp_build_move(&w->builder, CP_STEP_REDUCE, CP_LANE_COMPUTE,
                  cp_writer_heads(cp_writer_box(w, own->dk), heads),
                  cp_writer_box(w, slot.dk));
    cp_build_move(&w->builder, CP_STEP_REDUCE, CP_LANE_COMPUTE,
                  cp_writer_heads(cp_writer_box(w, own->dv), heads),
                  cp_writer_box(w, slot.dv));
    cp_build_publish(&w->builder, CP_LANE_COMPUTE, CP_PULL_ADDED, (uint32_t)step);
}

/* The chunk's dq is whole. */
static void return_queries(struct cp_pull *pull, int32_t dq)
{
    struct cp_writer *w = &pull->w;
    if (!pull->is_shared) {
        cp_build_move(&w->builder, CP_STEP_COPY, CP_LANE_COMPUTE,
                      cp_writer_heads(cp_writer_box(w, dq), w->heads),
                      cp_pull_chunk_of(pull, w->rank)->rows.dq);
        return;
    }
    cp_build_publish(&w->builder, CP_LANE_COMPUTE, CP_PULL_RESULT,
                     (uint32_t)w->chunk + 1);
    for (int index = 0; index < w->plan->ulysses; index++) {
        int member = cp_pull_group_member(pull, index);
        if (cp_pull_await_result(pull, member)) {
            cp_pull_fetch_result(pull, member, dq, cp_pull_chunk_of(pull, member)->dq);
        }
    }
}

/* All steps of a chunk. What others made of the own keys is added one step later, when it
 * may well be there. */
static void meet_chunk(struct cp_pull *pull, const struct sums *own, int32_t dq)
{
    struct cp_writer *w = &pull->w;
    int first = w->chunk * w->plan->world;
    const struct cp_pull_chunk *chunk = cp_pull_begin_chunk(pull);
    cp_build_zero(&w->builder, CP_LANE_COMPUTE, chunk->dq);
    struct cp_pull_keys brought = bring(pull, first);
    for (int step = first; step < first + w->plan->world; step++) {
        grad_step(pull, own, step, &brought);
        if (step > 0) {
            add_partial(pull, own, step - 1);
        }
    }
    return_queries(pull, dq);
}

enum cp_code cp_write_pull_backward(const struct cp_plan *plan, int rank,
                                    enum cp_transport transport,
                                    struct cp_schedule **out)
{
    struct cp_pull pull;
    CP_TRY(cp_pull_init(&pull, plan, rank, transport));
    struct cp_writer *w = &pull.w;
    struct own_rows rows = publish_backward(&pull);
    cp_pull_gather(&pull, gather_rows, &rows);
    declare_dq(&pull);
    int64_t keys = plan->kv_rows[rank].count;
    int32_t dq = cp_writer_tensor(w, CP_BUFFER_OUTPUT, CP_TENSOR_DQ);
    struct sums own = {
        .dk = cp_writer_sums(w, &w->scratch, CP_TENSOR_DK, keys, w->call->kv_heads),
        .dv = cp_writer_sums(w, &w->scratch, CP_TENSOR_DV, keys, w->call->kv_heads),
    };
    cp_build_zero(&w->builder, CP_LANE_COMPUTE, own.dk);
    cp_build_zero(&w->builder, CP_LANE_COMPUTE, own.dv);
    for (int chunk = 0; chunk < plan->chunks; chunk++) {
        cp_writer_set_chunk(w, chunk);
        meet_chunk(&pull, &own, dq);
    }
    add_partial(&pull, &own, plan->chunks * plan->world - 1);
    cp_writer_return_keys(w, CP_LANE_COMPUTE, own.dk, own.dv);
    return cp_pull_take(&pull, out);
}
