/* Attention by exchange: the blocks of keys and the ring that passes them. */
#include "schedule/write_exchange.h"

/* ---- blocks ---- */

struct cp_block cp_exchange_block_of(const struct cp_exchange *x, int b)
{
    int owner = cp_exchange_rank_of(x, b, x->w.u);
    struct cp_block block = {.owner = owner,
                             .keys = cp_plan_group_keys(x->w.plan, owner)};
    return block;
}

/* As the kernel wants them: packed, or with rows outermost, as they are sent. */
static int32_t declare_tensor(struct cp_exchange *x, enum cp_tensor_role role,
                              int64_t keys)
{
    struct cp_writer *w = &x->w;
    int64_t heads = w->kv_heads.count;
    return w->packs ? cp_writer_keys(w, &w->scratch, role, keys, heads)
                    : cp_writer_runs(w, &w->scratch, role, w->dtype, keys, heads);
}

static void declare_keys(struct cp_exchange *x, int b)
{
    int64_t keys = cp_exchange_block_of(x, b).keys.count;
    x->at->blocks[b].k = declare_tensor(x, CP_TENSOR_K, keys);
    x->at->blocks[b].v = declare_tensor(x, CP_TENSOR_V, keys);
}

struct cp_box cp_exchange_keys(const struct cp_exchange *x, int b,
                               enum cp_tensor_role role)
{
    const struct cp_key_block *block = &x->at->blocks[b];
    return !x->w.packs && b == x->w.r
               ? cp_exchange_gathered(x, role)
               : cp_writer_box(&x->w, role == CP_TENSOR_K ? block->k : block->v);
}

static void declare_mask(struct cp_exchange *x, int b)
{
    struct cp_writer *w = &x->w;
    x->at->blocks[b].mask =
        cp_writer_mask(w, &w->scratch, 0, w->heads.count,
                       cp_plan_size(w->plan, w->rank, CP_SIZE_MASK_ROWS),
                       cp_exchange_block_of(x, b).keys.count);
}

void cp_exchange_declare_sums(struct cp_exchange *x, int b)
{
    struct cp_writer *w = &x->w;
    int64_t keys = cp_exchange_block_of(x, b).keys.count;
    int64_t heads = w->kv_heads.count;
    x->at->blocks[b].dk =
        cp_writer_runs(w, &w->scratch, CP_TENSOR_DK, w->sum, keys, heads);
    x->at->blocks[b].dv =
        cp_writer_runs(w, &w->scratch, CP_TENSOR_DV, w->sum, keys, heads);
}

/* Makes a block of what was gathered at `rank`, the own one or by windows another. */
static void make_block(struct cp_exchange *x, const struct cp_key_block *block,
                       int rank)
{
    struct cp_writer *w = &x->w;
    struct cp_builder *b = &w->builder;
    if (w->packs || rank != w->rank) {
        enum cp_step_op bring = cp_writer_bring(w);
        cp_build_move(b, bring, CP_LANE_IN, cp_writer_box(w, block->k),
                      cp_exchange_gathered_at(x, rank, CP_TENSOR_K));
        cp_build_move(b, bring, CP_LANE_IN, cp_writer_box(w, block->v),
                      cp_exchange_gathered_at(x, rank, CP_TENSOR_V));
    }
    if (cp_writer_mask_travels(w, CP_MASK_OF_KEYS)) {
        cp_build_move(b, CP_STEP_COPY, CP_LANE_IN, cp_writer_box(w, block->mask),
                      cp_exchange_gathered_at(x, rank, CP_TENSOR_MASK));
    }
}

void cp_exchange_make_own_block(struct cp_exchange *x)
{
    make_block(x, &x->at->blocks[x->w.r], x->w.rank);
}

static void declare_own_block(struct cp_exchange *x)
{
    struct cp_writer *w = &x->w;
    struct cp_key_block *block = &x->at->blocks[w->r];
    if (!w->packs) {
        block->k = cp_exchange_gathered(x, CP_TENSOR_K).buffer;
        block->v = cp_exchange_gathered(x, CP_TENSOR_V).buffer;
    } else {
        declare_keys(x, w->r);
    }
    if (cp_writer_mask_travels(w, CP_MASK_OF_KEYS)) {
        declare_mask(x, w->r);
    }
}

void cp_exchange_declare_blocks(struct cp_exchange *x)
{
    struct cp_writer *w = &x->w;
    declare_own_block(x);
    for (int parity = 0; parity < 2; parity++) {
        int64_t start = w->scratch.bytes;
        int64_t end = start;
        for (int j = parity == 0 ? 2 : 1; j < x->ring; j += 2) {
            int b = cp_exchange_block_at(x, j);
            if (!cp_exchange_is_allgather(x)) {
                w->scratch.bytes = start;
            }
            declare_keys(x, b);
            if (cp_writer_mask_travels(w, CP_MASK_OF_KEYS)) {
                declare_mask(x, b);
            }
            if (w->is_backward) {
                cp_exchange_declare_sums(x, b);
            }
            end = w->scratch.bytes > end ? w->scratch.bytes : end;
        }
        w->scratch.bytes = end;
    }
}

/* ---- the ring ---- */

bool cp_exchange_is_allgather(const struct cp_exchange *x)
{
    return x->w.plan->rotate == CP_ROTATE_ALLGATHER;
}

int cp_exchange_block_at(const struct cp_exchange *x, int j)
{
    return (x->w.r + j) % x->ring;
}

int cp_exchange_ring_peer(const struct cp_exchange *x, int distance)
{
    int r = (x->w.r + distance + x->ring) % x->ring;
    return cp_exchange_rank_of(x, r, x->w.u);
}

void cp_exchange_move_buffer(struct cp_exchange *x, int32_t buffer, int peer,
                             bool is_send)
{
    if (is_send) {
        cp_build_send(&x->w.builder, CP_LANE_IN, x->group, peer,
                      cp_writer_box(&x->w, buffer));
    } else {
        cp_build_recv(&x->w.builder, CP_LANE_IN, x->group, peer,
                      cp_writer_box(&x->w, buffer));
    }
}

static void move_block(struct cp_exchange *x, int b, int peer, bool is_send)
{
    cp_exchange_move_buffer(x, x->at->blocks[b].k, peer, is_send);
    cp_exchange_move_buffer(x, x->at->blocks[b].v, peer, is_send);
    if (cp_writer_mask_travels(&x->w, CP_MASK_OF_KEYS)) {
        cp_exchange_move_buffer(x, x->at->blocks[b].mask, peer, is_send);
    }
}

/* By windows: a block comes from where its group put it. */
static void fetch_block(struct cp_exchange *x, int j)
{
    struct cp_writer *w = &x->w;
    struct cp_builder *b = &w->builder;
    struct cp_block block = cp_exchange_block_of(x, cp_exchange_block_at(x, j));
    const struct cp_key_block *to = &x->at->blocks[cp_exchange_block_at(x, j)];
    if (!cp_writer_is_live(w, w->rank, w->chunk, &block)) {
        return;
    }
    cp_build_await(b, CP_LANE_IN, block.owner, CP_EXCHANGE_WHOLE,
                   (uint32_t)w->chunk + 1);
    int32_t first = cp_exchange_step_count(x);
    make_block(x, to, block.owner);
    if (!cp_exchange_is_allgather(x) && j >= 3) {
        cp_exchange_group_after_compute(
            x, first, x->at->blocks[cp_exchange_block_at(x, j - 2)].done);
    }
}

void cp_exchange_gather_blocks(struct cp_exchange *x)
{
    x->group += 1;
    for (int j = 1; j < x->ring; j++) {
        if (x->windows != NULL) {
            fetch_block(x, j);
            continue;
        }
        move_block(x, x->w.r, cp_exchange_ring_peer(x, -j), true);
        move_block(x, cp_exchange_block_at(x, j), cp_exchange_ring_peer(x, j), false);
    }
}

void cp_exchange_pass_block(struct cp_exchange *x, int j)
{
    if (x->windows != NULL) {
        fetch_block(x, j);
        return;
    }
    x->group += 1;
    int32_t first = cp_exchange_step_count(x);
    move_block(x, cp_exchange_block_at(x, j - 1), cp_exchange_ring_peer(x, -1), true);
    move_block(x, cp_exchange_block_at(x, j), cp_exchange_ring_peer(x, 1), false);
    if (j >= 3) {
        cp_exchange_group_after_compute(
            x, first, x->at->blocks[cp_exchange_block_at(x, j - 2)].done);
    }
}
