/* Attention over windows: what both directions share. */
#include "schedule/write_pull.h"

#include <string.h>

#include "base/mem.h"

struct cp_block cp_pull_block_of(const struct cp_pull *pull, int owner)
{
    struct cp_block block = {.owner = owner, .keys = pull->w.plan->kv_rows[owner]};
    return block;
}

int cp_pull_group_member(const struct cp_pull *pull, int index)
{
    return pull->w.r * pull->w.plan->ulysses +
           (pull->w.u + index) % pull->w.plan->ulysses;
}

/* The chunks' results in the window of any rank, by the rows of its group and its heads. */
static void declare_dq(struct cp_pull *pull, int owner, struct cp_arena *arena)
{
    const struct cp_plan *plan = pull->w.plan;
    int64_t rows = cp_plan_group_rows(plan, owner).count;
    int u = cp_plan_ulysses_rank(plan, owner);
    for (int chunk = 0; chunk < plan->chunks; chunk++) {
        int64_t heads = cp_plan_chunk_heads(plan, u, chunk).count;
        pull->window[owner].chunks[chunk].dq =
            cp_writer_sums(&pull->w, arena, CP_TENSOR_DQ, rows, heads);
    }
}

static void declare_out(struct cp_pull *pull, int owner, struct cp_arena *arena)
{
    struct cp_writer *w = &pull->w;
    const struct cp_plan *plan = w->plan;
    int64_t rows = cp_plan_group_rows(plan, owner).count;
    int u = cp_plan_ulysses_rank(plan, owner);
    for (int index = 0; index < plan->chunks; index++) {
        struct cp_pull_chunk *chunk = &pull->window[owner].chunks[index];
        int64_t heads = cp_plan_chunk_heads(plan, u, index).count;
        chunk->out_lse =
            w->call->want_lse != 0
                ? cp_writer_rows(w, arena, CP_LAYOUT_PLAIN, CP_TENSOR_LSE, rows, heads)
                : CP_NO_BUFFER;
        chunk->out =
            cp_writer_rows(w, arena, CP_LAYOUT_PLAIN, CP_TENSOR_OUT, rows, heads);
    }
}

/* Keys as others want them: as they are met, or, where they are fetched before, plain. */
static int32_t declare_published(struct cp_pull *pull, struct cp_arena *arena,
                                 enum cp_tensor_role role, int64_t keys)
{
    struct cp_writer *w = &pull->w;
    int64_t heads = w->call->kv_heads;
    return pull->fetches ? cp_writer_rows(w, arena, CP_LAYOUT_PLAIN, role, keys, heads)
                         : cp_writer_keys(w, arena, role, keys, heads);
}

/* Declares the window of any rank: each computes everybody's layout alike. The rest of
 * the own window is slots. */
static void declare_window(struct cp_pull *pull, int owner, struct cp_arena *arena)
{
    struct cp_writer *w = &pull->w;
    const struct cp_plan *plan = w->plan;
    struct cp_pull_window *window = &pull->window[owner];
    int64_t rows = plan->q_rows[owner].count;
    int64_t keys = plan->kv_rows[owner].count;
    window->k = declare_published(pull, arena, CP_TENSOR_K, keys);
    window->v = declare_published(pull, arena, CP_TENSOR_V, keys);
    if (w->has_mask && w->mask_source != CP_MASK_LOCAL) {
        window->mask = cp_writer_mask(w, arena, 0, w->call->mask_heads,
                                      cp_plan_size(plan, owner, CP_SIZE_MASK_ROWS),
                                      cp_plan_size(plan, owner, CP_SIZE_MASK_KEYS));
    }
    if (!pull->is_shared) {
        window->slots_first = arena->bytes;
        return;
    }
    if (pull->w.is_backward) {
        declare_dq(pull, owner, arena);
        window->slots_first = arena->bytes;
    }
    int64_t start = arena->bytes;
    window->q =
        cp_writer_rows(w, arena, CP_LAYOUT_PLAIN, CP_TENSOR_Q, rows, w->call->heads);
    if (pull->w.is_backward) {
        window->dout = cp_writer_rows(w, arena, CP_LAYOUT_PLAIN, CP_TENSOR_DOUT, rows,
                                      w->call->heads);
        window->lse = cp_writer_rows(w, arena, CP_LAYOUT_PLAIN, CP_TENSOR_LSE, rows,
                                     w->call->heads);
        window->delta = cp_writer_rows(w, arena, CP_LAYOUT_PLAIN, CP_TENSOR_DELTA, rows,
                                       w->call->heads);
    } else {
        int64_t end = arena->bytes;
        arena->bytes = start;
        declare_out(pull, owner, arena);
        arena->bytes = arena->bytes > end ? arena->bytes : end;
    }
}

/* A block of that many keys at that place. */
static struct cp_pull_keys declare_keys(struct cp_pull *pull, int place, int64_t keys,
                                        int64_t heads)
{
    struct cp_writer *w = &pull->w;
    w->scratch.bytes = pull->place_bytes[place];
    int32_t k = cp_writer_keys(w, &w->scratch, CP_TENSOR_K, keys, heads);
    int32_t v = cp_writer_keys(w, &w->scratch, CP_TENSOR_V, keys, heads);
    return (struct cp_pull_keys){cp_writer_box(w, k), cp_writer_box(w, v)};
}

/* Two of them, for the longest block and the heads of the first chunk, which has most. */
static void declare_places(struct cp_pull *pull)
{
    struct cp_writer *w = &pull->w;
    for (int place = 0; place < 2; place++) {
        pull->place_bytes[place] = w->scratch.bytes;
        (void)declare_keys(pull, place, pull->longest_block, w->kv_heads.count);
    }
}

enum cp_code cp_pull_init(struct cp_pull *pull, const struct cp_plan *plan, int rank,
                          enum cp_transport transport)
{
    cp_writer_init(&pull->w, plan, rank);
    pull->window = NULL;
    pull->is_fetched = false;
    pull->fetches = transport != CP_PULL;
    memset(pull->met, 0, sizeof pull->met);
    pull->longest_block = 0;
    for (int owner = 0; owner < plan->world; owner++) {
        int64_t keys = plan->kv_rows[owner].count;
        pull->longest_block = keys > pull->longest_block ? keys : pull->longest_block;
    }
    pull->is_shared = plan->ulysses > 1;
    pull->chunks = NULL;
    enum cp_code code = cp_mem_create_array(plan->world, sizeof *pull->window,
                                            "a schedule", &pull->window);
    if (code == CP_OK) {
        code = cp_mem_create_array((int64_t)plan->world * plan->chunks,
                                   sizeof *pull->chunks, "a schedule", &pull->chunks);
    }
    if (code != CP_OK) {
        cp_mem_destroy(&pull->window);
        cp_schedule_destroy(&pull->w.builder.schedule);
        return code;
    }
    for (int owner = 0; owner < plan->world; owner++) {
        pull->window[owner].chunks = pull->chunks + (ptrdiff_t)owner * plan->chunks;
        struct cp_arena arena = {.kind = CP_BUFFER_WINDOW, .owner = owner};
        declare_window(pull, owner, &arena);
        if (owner == rank) {
            pull->w.window = arena;
        }
    }
    pull->own_k = cp_writer_tensor(&pull->w, CP_BUFFER_INPUT, CP_TENSOR_K);
    pull->own_v = cp_writer_tensor(&pull->w, CP_BUFFER_INPUT, CP_TENSOR_V);
    if (pull->fetches) {
        declare_places(pull);
    }
    return CP_OK;
}

enum cp_code cp_pull_take(struct cp_pull *pull, struct cp_schedule **out)
{
    cp_mem_destroy(&pull->chunks);
    cp_mem_destroy(&pull->window);
    return cp_writer_take(&pull->w, out);
}

/* Does this rank, or any other, read the own keys in the window? */
static bool has_readers(const struct cp_pull *pull)
{
    struct cp_block own = cp_pull_block_of(pull, pull->w.rank);
    bool is_read = !pull->fetches;
    for (int rank = 0; rank < pull->w.plan->world; rank++) {
        is_read = is_read ||
                  (rank != pull->w.rank && cp_writer_is_live(&pull->w, rank, 0, &own));
    }
    return is_read;
}

void cp_pull_publish_keys(struct cp_pull *pull)
{
    struct cp_writer *w = &pull->w;
    const struct cp_pull_window *own = &pull->window[w->rank];
    if (!has_readers(pull)) {
        return;
    }
    enum cp_step_op op = pull->fetches ? CP_STEP_COPY : cp_writer_bring(w);
    cp_build_move(&w->builder, op, CP_LANE_IN, cp_writer_box(w, own->k),
                  cp_writer_box(w, pull->own_k));
    cp_build_move(&w->builder, op, CP_LANE_IN, cp_writer_box(w, own->v),
                  cp_writer_box(w, pull->own_v));
}

/* A block's keys come to the place of the block before the last, once that is met. */
static struct cp_pull_keys fetch_keys(struct cp_pull *pull, int owner, int step)
{
    struct cp_writer *w = &pull->w;
    bool is_own = owner == w->rank;
    int32_t k = is_own ? pull->own_k : pull->window[owner].k;
    int32_t v = is_own ? pull->own_v : pull->window[owner].v;
    enum cp_step_op op = cp_writer_bring(w);
    int64_t end = w->scratch.bytes;
    struct cp_pull_keys keys =
        declare_keys(pull, step % 2, w->plan->kv_rows[owner].count, w->kv_heads.count);
    w->scratch.bytes = end;
    struct cp_step *steps =
        cp_build_move(&w->builder, op, CP_LANE_IN, keys.k,
                      cp_writer_heads(cp_writer_box(w, k), w->kv_heads));
    steps->after[CP_LANE_COMPUTE] = pull->met[step % 2];
    steps = cp_build_move(&w->builder, op, CP_LANE_IN, keys.v,
                          cp_writer_heads(cp_writer_box(w, v), w->kv_heads));
    steps->after[CP_LANE_COMPUTE] = pull->met[step % 2];
    return keys;
}

struct cp_pull_keys cp_pull_bring_keys(struct cp_pull *pull, int owner, int step)
{
    struct cp_writer *w = &pull->w;
    cp_pull_await_ready(pull, owner);
    bool is_callers = pull->fetches && !w->packs && owner == w->rank;
    if (pull->fetches && !is_callers) {
        return fetch_keys(pull, owner, step);
    }
    int32_t k = is_callers ? pull->own_k : pull->window[owner].k;
    int32_t v = is_callers ? pull->own_v : pull->window[owner].v;
    return (struct cp_pull_keys){cp_writer_heads(cp_writer_box(w, k), w->kv_heads),
                                 cp_writer_heads(cp_writer_box(w, v), w->kv_heads)};
}

void cp_pull_met_keys(struct cp_pull *pull, int step)
{
    pull->met[step % 2] = pull->w.builder.lane_steps[CP_LANE_COMPUTE];
}

void cp_pull_publish_copy(struct cp_pull *pull, int32_t to, int32_t from)
{
    cp_build_move(&pull->w.builder, CP_STEP_COPY, CP_LANE_IN,
                  cp_writer_box(&pull->w, to), cp_writer_box(&pull->w, from));
}

void cp_pull_publish_mask(struct cp_pull *pull)
{
    if (pull->w.has_mask && pull->w.mask_source != CP_MASK_LOCAL) {
        cp_pull_publish_copy(pull, pull->window[pull->w.rank].mask, pull->w.mask);
    }
}

struct cp_pull_chunk *cp_pull_chunk_of(const struct cp_pull *pull, int owner)
{
    return &pull->window[owner].chunks[pull->w.chunk];
}

/* Do the rows of a mask come with this chunk? One for all heads comes with the first. */
static bool gathers_mask(const struct cp_pull *pull)
{
    return cp_writer_mask_travels(&pull->w, CP_MASK_OF_ROWS) &&
           (pull->w.chunk == 0 || pull->w.call->mask_heads != 1);
}

void cp_pull_declare_group_mask(struct cp_pull *pull)
{
    struct cp_writer *w = &pull->w;
    if (gathers_mask(pull)) {
        w->group_mask =
            cp_writer_mask(w, &w->scratch, 0, w->heads.count, w->rows.count,
                           cp_plan_size(w->plan, w->rank, CP_SIZE_MASK_KEYS));
    }
}

void cp_pull_gather_rows(struct cp_pull *pull, int member, int32_t to, int32_t from)
{
    struct cp_writer *w = &pull->w;
    struct cp_range rows = w->plan->q_rows[member];
    struct cp_box dst = cp_writer_row_range(cp_writer_box(w, to),
                                            rows.first - w->rows.first, rows.count);
    struct cp_box src = cp_writer_heads(cp_writer_box(w, from), w->heads);
    cp_build_move(&w->builder, CP_STEP_COPY, CP_LANE_IN, dst, src);
}

void cp_pull_gather_mask(struct cp_pull *pull, int member)
{
    struct cp_writer *w = &pull->w;
    struct cp_range rows = w->plan->q_rows[member];
    if (!gathers_mask(pull)) {
        return;
    }
    struct cp_box dst = cp_box_part(cp_writer_box(w, w->group_mask), 2,
                                    rows.first - w->rows.first, rows.count);
    struct cp_box src =
        cp_writer_box(w, member == w->rank ? w->mask : pull->window[member].mask);
    if (w->call->mask_heads != 1) {
        src = cp_box_part(src, 1, w->heads.first, w->heads.count);
    }
    cp_build_move(&w->builder, CP_STEP_COPY, CP_LANE_IN, dst, src);
}

void cp_pull_gather(struct cp_pull *pull,
                    struct cp_row_boxes (*rows_of)(struct cp_pull *pull,
                                                   const void *own),
                    const void *own)
{
    struct cp_writer *w = &pull->w;
    for (int index = 0; index < w->plan->chunks; index++) {
        cp_writer_set_chunk(w, index);
        struct cp_pull_chunk *chunk = cp_pull_chunk_of(pull, w->rank);
        chunk->rows = rows_of(pull, own);
        chunk->group_mask = w->group_mask;
        cp_writer_arrive(w);
        chunk->arrived = w->arrived;
    }
    if (pull->is_shared) {
        cp_build_publish(&w->builder, CP_LANE_IN, CP_PULL_READY, 2);
    }
}

void cp_pull_await_fetched(struct cp_pull *pull)
{
    struct cp_writer *w = &pull->w;
    for (int index = 1; index < w->plan->ulysses && !pull->is_fetched; index++) {
        cp_build_await(&w->builder, CP_LANE_IN, cp_pull_group_member(pull, index),
                       CP_PULL_READY, 2);
    }
    pull->is_fetched = true;
}

const struct cp_pull_chunk *cp_pull_begin_chunk(struct cp_pull *pull)
{
    const struct cp_pull_chunk *chunk = cp_pull_chunk_of(pull, pull->w.rank);
    pull->w.arrived = chunk->arrived;
    pull->w.group_mask = chunk->group_mask;
    return chunk;
}

bool cp_pull_needs_rows_of(const struct cp_pull *pull, int member)
{
    return pull->w.plan->q_rows[member].count > 0 && pull->w.heads.count > 0 &&
           pull->w.call->batch > 0;
}

void cp_pull_await_ready(struct cp_pull *pull, int owner)
{
    if (owner != pull->w.rank && pull->w.chunk == 0) {
        cp_build_await(&pull->w.builder, CP_LANE_IN, owner, CP_PULL_READY, 1);
    }
}

/* What a member answers for in the chunk. */
static struct cp_range heads_of(const struct cp_pull *pull, int member)
{
    const struct cp_plan *plan = pull->w.plan;
    return cp_plan_chunk_heads(plan, cp_plan_ulysses_rank(plan, member), pull->w.chunk);
}

void cp_pull_fetch_result(struct cp_pull *pull, int member, int32_t to, int32_t from)
{
    struct cp_writer *w = &pull->w;
    struct cp_range rows = w->plan->q_rows[w->rank];
    struct cp_range heads = heads_of(pull, member);
    struct cp_box src = cp_writer_row_range(cp_writer_box(w, from),
                                            rows.first - w->rows.first, rows.count);
    cp_build_move(&w->builder, CP_STEP_COPY, CP_LANE_OUT,
                  cp_writer_heads(cp_writer_box(w, to), heads), src);
}

bool cp_pull_await_result(struct cp_pull *pull, int member)
{
    struct cp_writer *w = &pull->w;
    struct cp_range heads = heads_of(pull, member);
    if (heads.count == 0 || w->plan->q_rows[w->rank].count == 0 ||
        w->call->batch == 0) {
        return false;
    }
    cp_build_await(&w->builder, CP_LANE_OUT, member, CP_PULL_RESULT,
                   (uint32_t)w->chunk + 1);
    return true;
}
