/* Attention over sends and receives: the blocks of keys and the ring that passes them. */
#include "schedule/write_two_sided.h"

/* ---- blocks ---- */

struct cp_block cp_two_sided_block_of(const struct cp_two_sided *t, int b)
{
    int owner = cp_two_sided_rank_of(t, b, t->w.u);
    struct cp_block block = {.owner = owner,
                             .keys = cp_plan_group_keys(t->w.plan, owner)};
    return block;
}

/* As the kernel wants them: forward packed, backward plain. */
static void declare_keys(struct cp_two_sided *t, int b)
{
    struct cp_writer *w = &t->w;
    struct cp_key_block *block = &t->at->blocks[b];
    int64_t keys = cp_two_sided_block_of(t, b).keys.count;
    int64_t heads = w->kv_heads.count;
    if (t->is_backward) {
        block->k = cp_writer_runs(w, &w->scratch, CP_TENSOR_K, w->dtype, keys, heads);
        block->v = cp_writer_runs(w, &w->scratch, CP_TENSOR_V, w->dtype, keys, heads);
    } else {
        block->k =
            cp_writer_rows(w, &w->scratch, CP_LAYOUT_K, CP_TENSOR_K, keys, heads);
        block->v =
            cp_writer_rows(w, &w->scratch, CP_LAYOUT_V, CP_TENSOR_V, keys, heads);
    }
}

static void declare_mask(struct cp_two_sided *t, int b)
{
    struct cp_writer *w = &t->w;
    t->at->blocks[b].mask =
        cp_writer_mask(w, &w->scratch, 0, w->heads.count,
                       cp_plan_size(w->plan, w->rank, CP_SIZE_MASK_ROWS),
                       cp_two_sided_block_of(t, b).keys.count);
}

void cp_two_sided_declare_sums(struct cp_two_sided *t, int b)
{
    struct cp_writer *w = &t->w;
    int64_t keys = cp_two_sided_block_of(t, b).keys.count;
    int64_t heads = w->kv_heads.count;
    t->at->blocks[b].dk =
        cp_writer_runs(w, &w->scratch, CP_TENSOR_DK, w->sum, keys, heads);
    t->at->blocks[b].dv =
        cp_writer_runs(w, &w->scratch, CP_TENSOR_DV, w->sum, keys, heads);
}

void cp_two_sided_make_block(struct cp_two_sided *t)
{
    struct cp_writer *w = &t->w;
    struct cp_builder *b = &w->builder;
    struct cp_key_block *block = &t->at->blocks[w->r];
    if (!t->is_backward) {
        cp_build_move(b, CP_STEP_PACK, CP_LANE_IN, cp_writer_box(w, block->k),
                      cp_two_sided_gathered(t, CP_TENSOR_K));
        cp_build_move(b, CP_STEP_PACK, CP_LANE_IN, cp_writer_box(w, block->v),
                      cp_two_sided_gathered(t, CP_TENSOR_V));
    }
    if (cp_writer_mask_travels(w, CP_MASK_OF_KEYS)) {
        cp_build_move(b, CP_STEP_COPY, CP_LANE_IN, cp_writer_box(w, block->mask),
                      cp_two_sided_gathered(t, CP_TENSOR_MASK));
    }
}

static void declare_own_block(struct cp_two_sided *t)
{
    struct cp_writer *w = &t->w;
    struct cp_key_block *block = &t->at->blocks[w->r];
    if (t->is_backward) {
        block->k = cp_two_sided_gathered(t, CP_TENSOR_K).buffer;
        block->v = cp_two_sided_gathered(t, CP_TENSOR_V).buffer;
    } else {
        declare_keys(t, w->r);
    }
    if (cp_writer_mask_travels(w, CP_MASK_OF_KEYS)) {
        declare_mask(t, w->r);
    }
}

void cp_two_sided_declare_blocks(struct cp_two_sided *t)
{
    struct cp_writer *w = &t->w;
    declare_own_block(t);
    for (int parity = 0; parity < 2; parity++) {
        int64_t start = w->scratch.bytes;
        int64_t end = start;
        for (int j = parity == 0 ? 2 : 1; j < t->ring; j += 2) {
            int b = cp_two_sided_block_at(t, j);
            if (!cp_two_sided_is_allgather(t)) {
                w->scratch.bytes = start;
            }
            declare_keys(t, b);
            if (cp_writer_mask_travels(w, CP_MASK_OF_KEYS)) {
                declare_mask(t, b);
            }
            if (t->is_backward) {
                cp_two_sided_declare_sums(t, b);
            }
            end = w->scratch.bytes > end ? w->scratch.bytes : end;
        }
        w->scratch.bytes = end;
    }
}

/* ---- the ring ---- */

bool cp_two_sided_is_allgather(const struct cp_two_sided *t)
{
    return t->w.call->rotate == CP_ROTATE_ALLGATHER;
}

int cp_two_sided_block_at(const struct cp_two_sided *t, int j)
{
    return (t->w.r + j) % t->ring;
}

int cp_two_sided_ring_peer(const struct cp_two_sided *t, int distance)
{
    int r = (t->w.r + distance + t->ring) % t->ring;
    return cp_two_sided_rank_of(t, r, t->w.u);
}

void cp_two_sided_move_buffer(struct cp_two_sided *t, int32_t buffer, int peer,
                              bool is_send)
{
    if (is_send) {
        cp_build_send(&t->w.builder, CP_LANE_IN, t->group, peer,
                      cp_writer_box(&t->w, buffer));
    } else {
        cp_build_recv(&t->w.builder, CP_LANE_IN, t->group, peer,
                      cp_writer_box(&t->w, buffer));
    }
}

static void move_block(struct cp_two_sided *t, int b, int peer, bool is_send)
{
    cp_two_sided_move_buffer(t, t->at->blocks[b].k, peer, is_send);
    cp_two_sided_move_buffer(t, t->at->blocks[b].v, peer, is_send);
    if (cp_writer_mask_travels(&t->w, CP_MASK_OF_KEYS)) {
        cp_two_sided_move_buffer(t, t->at->blocks[b].mask, peer, is_send);
    }
}

void cp_two_sided_gather_blocks(struct cp_two_sided *t)
{
    t->group += 1;
    for (int j = 1; j < t->ring; j++) {
        move_block(t, t->w.r, cp_two_sided_ring_peer(t, -j), true);
        move_block(t, cp_two_sided_block_at(t, j), cp_two_sided_ring_peer(t, j), false);
    }
}

void cp_two_sided_pass_block(struct cp_two_sided *t, int j)
{
    t->group += 1;
    int32_t first = cp_two_sided_step_count(t);
    move_block(t, cp_two_sided_block_at(t, j - 1), cp_two_sided_ring_peer(t, -1), true);
    move_block(t, cp_two_sided_block_at(t, j), cp_two_sided_ring_peer(t, 1), false);
    if (j >= 3) {
        cp_two_sided_group_after_compute(
            t, first, t->at->blocks[cp_two_sided_block_at(t, j - 2)].done);
    }
}
