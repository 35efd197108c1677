/* Attention over sends and receives: the exchanges and the ring that both directions
 * share. */
#include "schedule/write_two_sided.h"

#include "base/mem.h"

int cp_two_sided_rank_of(const struct cp_two_sided *t, int r, int u)
{
    return r * t->ulysses + u;
}

struct cp_segment *cp_two_sided_segment_of(struct cp_two_sided *t, int b, int m)
{
    return &t->segments[b * t->ulysses + m];
}

struct cp_block cp_two_sided_block_of(const struct cp_two_sided *t, int b, int m)
{
    int owner = cp_two_sided_rank_of(t, b, m);
    struct cp_block block = {.owner = owner, .keys = t->w.plan->kv_rows[owner]};
    return block;
}

/* Buffers for the keys of rank `owner`, kv heads of ulysses rank u. */
static void declare_segment(struct cp_two_sided *t, struct cp_segment *segment,
                            struct cp_arena *arena, int owner, int u)
{
    struct cp_writer *w = &t->w;
    int64_t keys = w->plan->kv_rows[owner].count;
    int64_t heads = w->plan->kv_heads[u].count;
    enum cp_layout k_layout = t->is_backward ? CP_LAYOUT_PLAIN : CP_LAYOUT_K;
    enum cp_layout v_layout = t->is_backward ? CP_LAYOUT_PLAIN : CP_LAYOUT_V;
    segment->k = cp_writer_rows(w, arena, k_layout, CP_TENSOR_K, keys, heads);
    segment->v = cp_writer_rows(w, arena, v_layout, CP_TENSOR_V, keys, heads);
    if (cp_writer_mask_travels(w, CP_MASK_OF_KEYS)) {
        segment->mask = cp_writer_mask(w, arena, w->plan->heads[u].count,
                                       cp_plan_size(w->plan, owner, CP_SIZE_MASK_ROWS),
                                       cp_plan_size(w->plan, owner, CP_SIZE_MASK_KEYS));
    }
}

void cp_two_sided_declare_sums(struct cp_two_sided *t, struct cp_segment *segment,
                               struct cp_arena *arena, int owner)
{
    struct cp_writer *w = &t->w;
    int64_t keys = w->plan->kv_rows[owner].count;
    segment->dk = cp_writer_sums(w, arena, CP_TENSOR_DK, keys, w->kv_heads.count);
    segment->dv = cp_writer_sums(w, arena, CP_TENSOR_DV, keys, w->kv_heads.count);
}

/* Fills a segment from the caller's tensors, for the heads of ulysses rank u. */
static void fill_segment(struct cp_two_sided *t, const struct cp_segment *segment,
                         int32_t k, int32_t v, int u)
{
    struct cp_writer *w = &t->w;
    enum cp_step_op op = t->is_backward ? CP_STEP_COPY : CP_STEP_PACK;
    struct cp_range heads = w->plan->heads[u];
    struct cp_range kv_heads = w->plan->kv_heads[u];
    cp_build_move(&w->builder, op, CP_LANE_IN, cp_writer_box(&t->w, segment->k),
                  cp_writer_heads(cp_writer_box(&t->w, k), kv_heads));
    cp_build_move(&w->builder, op, CP_LANE_IN, cp_writer_box(&t->w, segment->v),
                  cp_writer_heads(cp_writer_box(&t->w, v), kv_heads));
    if (cp_writer_mask_travels(w, CP_MASK_OF_KEYS)) {
        struct cp_box mask = cp_writer_box(&t->w, t->w.mask);
        if (w->call->mask_heads != 1) {
            mask = cp_box_part(mask, 1, heads.first, heads.count);
        }
        cp_build_move(&w->builder, CP_STEP_COPY, CP_LANE_IN,
                      cp_writer_box(&t->w, segment->mask), mask);
    }
}

/* Sends or receives the parts of a segment. */
static void move_segment(struct cp_two_sided *t, const struct cp_segment *segment,
                         int peer, bool is_send)
{
    cp_two_sided_move_buffer(t, segment->k, peer, is_send);
    cp_two_sided_move_buffer(t, segment->v, peer, is_send);
    if (cp_writer_mask_travels(&t->w, CP_MASK_OF_KEYS)) {
        cp_two_sided_move_buffer(t, segment->mask, peer, is_send);
    }
}

enum cp_code cp_two_sided_init(struct cp_two_sided *t, const struct cp_plan *plan,
                               int rank)
{
    void *block = NULL;
    *t = (struct cp_two_sided){.ring = plan->ring, .ulysses = plan->ulysses};
    cp_writer_init(&t->w, plan, rank);
    t->is_backward = plan->signature.call.op == CP_OP_ATTENTION_BACKWARD;
    enum cp_code code =
        cp_mem_create((size_t)plan->world * sizeof *t->segments, "a schedule", &block);
    if (code == CP_OK) {
        t->segments = block;
        code = cp_mem_create((size_t)plan->ulysses * sizeof *t->exchange, "a schedule",
                             &block);
    }
    if (code == CP_OK) {
        t->exchange = block;
        code = cp_mem_create((size_t)plan->ring * sizeof *t->block_done, "a schedule",
                             &block);
    }
    if (code != CP_OK) {
        cp_mem_destroy(&t->exchange);
        cp_mem_destroy(&t->segments);
        cp_schedule_destroy(&t->w.builder.schedule);
        return code;
    }
    t->block_done = block;
    return CP_OK;
}

enum cp_code cp_two_sided_take(struct cp_two_sided *t, struct cp_schedule **out)
{
    cp_mem_destroy(&t->block_done);
    cp_mem_destroy(&t->exchange);
    cp_mem_destroy(&t->segments);
    return cp_writer_take(&t->w, out);
}

/* ---- the exchange inside the group ---- */

static struct cp_box group_rows_box(const struct cp_two_sided *t, int32_t gathered,
                                    int member, int axis)
{
    struct cp_range rows = t->w.plan->q_rows[cp_two_sided_rank_of(t, t->w.r, member)];
    return cp_box_part(cp_writer_box(&t->w, gathered), axis,
                       rows.first - t->w.rows.first, rows.count);
}

/* Mask rows for the heads of ulysses rank u, from the caller's. */
static struct cp_box own_mask_rows(const struct cp_two_sided *t, int u)
{
    struct cp_box box = cp_writer_box(&t->w, t->w.mask);
    struct cp_range heads = t->w.plan->heads[u];
    return t->w.call->mask_heads != 1 ? cp_box_part(box, 1, heads.first, heads.count)
                                      : box;
}

static void declare_parcel(struct cp_two_sided *t, struct cp_parcel *parcel, int from,
                           int to)
{
    struct cp_writer *w = &t->w;
    int rank = cp_two_sided_rank_of(t, w->r, from);
    int64_t heads = w->plan->heads[to].count;
    for (int i = 0; i < t->row_count; i++) {
        parcel->rows[i] =
            cp_writer_rows(w, &w->scratch, CP_LAYOUT_PLAIN, t->rows[i].role,
                           w->plan->q_rows[rank].count, heads);
    }
    if (cp_writer_mask_travels(&t->w, CP_MASK_OF_ROWS)) {
        parcel->mask = cp_writer_mask(w, &w->scratch, heads,
                                      cp_plan_size(w->plan, rank, CP_SIZE_MASK_ROWS),
                                      cp_plan_size(w->plan, rank, CP_SIZE_MASK_KEYS));
    }
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

static void move_parcel(struct cp_two_sided *t, const struct cp_parcel *parcel,
                        int peer, bool is_send)
{
    for (int i = 0; i < t->row_count; i++) {
        cp_two_sided_move_buffer(t, parcel->rows[i], peer, is_send);
    }
    if (cp_writer_mask_travels(&t->w, CP_MASK_OF_ROWS)) {
        cp_two_sided_move_buffer(t, parcel->mask, peer, is_send);
    }
}

/* Own rows into a parcel for member m. */
static void fill_parcel(struct cp_two_sided *t, const struct cp_parcel *parcel, int m)
{
    struct cp_builder *b = &t->w.builder;
    for (int i = 0; i < t->row_count; i++) {
        cp_build_move(
            b, CP_STEP_COPY, CP_LANE_IN, cp_writer_box(&t->w, parcel->rows[i]),
            cp_writer_heads(cp_writer_box(&t->w, t->rows[i].own), t->w.plan->heads[m]));
    }
    if (cp_writer_mask_travels(&t->w, CP_MASK_OF_ROWS)) {
        cp_build_move(b, CP_STEP_COPY, CP_LANE_IN, cp_writer_box(&t->w, parcel->mask),
                      own_mask_rows(t, m));
    }
}

/* Rows of member m into their place among the group's; the own ones need no parcel. */
static void place_rows(struct cp_two_sided *t, const struct cp_parcel *parcel, int m)
{
    struct cp_builder *b = &t->w.builder;
    bool is_own = m == t->w.u;
    for (int i = 0; i < t->row_count; i++) {
        struct cp_box own =
            cp_writer_heads(cp_writer_box(&t->w, t->rows[i].own), t->w.heads);
        cp_build_move(b, CP_STEP_COPY, CP_LANE_IN,
                      group_rows_box(t, t->rows[i].gathered, m, 1),
                      is_own ? own : cp_writer_box(&t->w, parcel->rows[i]));
    }
    if (cp_writer_mask_travels(&t->w, CP_MASK_OF_ROWS)) {
        cp_build_move(
            b, CP_STEP_COPY, CP_LANE_IN, group_rows_box(t, t->w.group_mask, m, 2),
            is_own ? own_mask_rows(t, m) : cp_writer_box(&t->w, parcel->mask));
    }
}

int cp_two_sided_member_at(const struct cp_two_sided *t, int index)
{
    return (t->w.u + index) % t->ulysses;
}

void cp_two_sided_exchange_in(struct cp_two_sided *t, int32_t k, int32_t v)
{
    struct cp_writer *w = &t->w;
    for (int m = 0; m < t->ulysses; m++) {
        declare_segment(t, cp_two_sided_segment_of(t, w->r, m), &w->scratch,
                        cp_two_sided_rank_of(t, w->r, m), w->u);
    }
    fill_segment(t, cp_two_sided_segment_of(t, w->r, w->u), k, v, w->u);
    for (int i = 0; i < t->row_count; i++) {
        t->rows[i].gathered =
            t->ulysses == 1
                ? t->rows[i].own
                : cp_writer_rows(w, &w->scratch, CP_LAYOUT_PLAIN, t->rows[i].role,
                                 w->rows.count, w->heads.count);
    }
    if (t->ulysses == 1) {
        return;
    }
    cp_writer_declare_group_mask(w);
    for (int index = 1; index < t->ulysses; index++) {
        int m = cp_two_sided_member_at(t, index);
        struct cp_exchange *exchange = &t->exchange[m];
        declare_segment(t, &exchange->keys, &w->scratch, w->rank, m);
        declare_parcel(t, &exchange->to, w->u, m);
        declare_parcel(t, &exchange->from, m, w->u);
        fill_segment(t, &exchange->keys, k, v, m);
        fill_parcel(t, &exchange->to, m);
    }
    t->group += 1;
    for (int index = 1; index < t->ulysses; index++) {
        int m = cp_two_sided_member_at(t, index);
        int peer = cp_two_sided_rank_of(t, w->r, m);
        move_segment(t, &t->exchange[m].keys, peer, true);
        move_parcel(t, &t->exchange[m].to, peer, true);
        move_segment(t, cp_two_sided_segment_of(t, w->r, m), peer, false);
        move_parcel(t, &t->exchange[m].from, peer, false);
    }
    for (int m = 0; m < t->ulysses; m++) {
        place_rows(t, &t->exchange[m].from, m);
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

void cp_two_sided_declare_blocks(struct cp_two_sided *t)
{
    struct cp_writer *w = &t->w;
    for (int parity = 0; parity < 2; parity++) {
        int64_t start = w->scratch.bytes;
        for (int j = parity == 0 ? 2 : 1; j < t->ring; j += 2) {
            if (!cp_two_sided_is_allgather(t)) {
                w->scratch.bytes = start;
            }
            int b = cp_two_sided_block_at(t, j);
            for (int m = 0; m < t->ulysses; m++) {
                declare_segment(t, cp_two_sided_segment_of(t, b, m), &w->scratch,
                                cp_two_sided_rank_of(t, b, m), w->u);
                if (t->is_backward) {
                    cp_two_sided_declare_sums(t, cp_two_sided_segment_of(t, b, m),
                                              &w->scratch,
                                              cp_two_sided_rank_of(t, b, m));
                }
            }
        }
        w->scratch.bytes = w->scratch.most;
    }
}

int cp_two_sided_ring_peer(const struct cp_two_sided *t, int distance)
{
    int r = (t->w.r + distance + t->ring) % t->ring;
    return cp_two_sided_rank_of(t, r, t->w.u);
}

static void move_block(struct cp_two_sided *t, int b, int peer, bool is_send)
{
    for (int m = 0; m < t->ulysses; m++) {
        move_segment(t, cp_two_sided_segment_of(t, b, m), peer, is_send);
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

void cp_two_sided_group_after_compute(struct cp_two_sided *t, int32_t first_step,
                                      int32_t compute_steps)
{
    if (t->w.builder.code != CP_OK) {
        return;
    }
    struct cp_schedule *schedule = t->w.builder.schedule;
    for (int32_t step = first_step; step < schedule->step_count; step++) {
        schedule->steps[step].after[CP_LANE_COMPUTE] = compute_steps;
    }
}

int32_t cp_two_sided_step_count(const struct cp_two_sided *t)
{
    return t->w.builder.code == CP_OK ? t->w.builder.schedule->step_count : 0;
}

void cp_two_sided_pass_block(struct cp_two_sided *t, int j)
{
    t->group += 1;
    int32_t first = cp_two_sided_step_count(t);
    move_block(t, cp_two_sided_block_at(t, j - 1), cp_two_sided_ring_peer(t, -1), true);
    move_block(t, cp_two_sided_block_at(t, j), cp_two_sided_ring_peer(t, 1), false);
    if (j >= 3) {
        cp_two_sided_group_after_compute(
            t, first, t->block_done[cp_two_sided_block_at(t, j - 2)]);
    }
}

void cp_two_sided_exchange_out(struct cp_two_sided *t, const enum cp_tensor_role *roles,
                               const int32_t *results, const int32_t *outs, int count)
{
    struct cp_writer *w = &t->w;
    struct cp_builder *b = &w->builder;
    struct cp_range own = w->plan->q_rows[w->rank];
    for (int index = 1; index < t->ulysses; index++) {
        int m = cp_two_sided_member_at(t, index);
        int64_t rows = w->plan->q_rows[cp_two_sided_rank_of(t, w->r, m)].count;
        for (int i = 0; i < count; i++) {
            int32_t *to = &t->exchange[m].result[i];
            *to = cp_writer_rows(w, &w->scratch, CP_LAYOUT_PLAIN, roles[i], rows,
                                 w->heads.count);
            t->exchange[m].home[i] =
                cp_writer_rows(w, &w->scratch, CP_LAYOUT_PLAIN, roles[i], own.count,
                               w->plan->heads[m].count);
            cp_build_move(b, CP_STEP_COPY, CP_LANE_COMPUTE, cp_writer_box(&t->w, *to),
                          group_rows_box(t, results[i], m, 1));
        }
    }
    t->group += 1;
    int32_t first = cp_two_sided_step_count(t);
    for (int index = 1; index < t->ulysses; index++) {
        int m = cp_two_sided_member_at(t, index);
        for (int i = 0; i < count; i++) {
            cp_two_sided_move_buffer(t, t->exchange[m].result[i],
                                     cp_two_sided_rank_of(t, w->r, m), true);
            cp_two_sided_move_buffer(t, t->exchange[m].home[i],
                                     cp_two_sided_rank_of(t, w->r, m), false);
        }
    }
    cp_two_sided_group_after_compute(t, first, w->builder.lane_steps[CP_LANE_COMPUTE]);
    for (int m = 0; m < t->ulysses; m++) {
        for (int i = 0; i < count; i++) {
            struct cp_box to =
                cp_writer_heads(cp_writer_box(&t->w, outs[i]), w->plan->heads[m]);
            struct cp_box from = m == w->u
                                     ? group_rows_box(t, results[i], m, 1)
                                     : cp_writer_box(&t->w, t->exchange[m].home[i]);
            cp_build_after(b, cp_build_move(b, CP_STEP_COPY, CP_LANE_IN, to, from),
                           CP_LANE_COMPUTE);
        }
    }
}
