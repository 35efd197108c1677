/* Attention by exchange: the chunks of heads, one after the other, that both
 * directions share. */
#include "schedule/write_exchange.h"

#include <string.h>

#include "base/mem.h"

static void fini(struct cp_exchange *x)
{
    cp_mem_destroy(&x->chunks);
    cp_mem_destroy(&x->blocks);
    cp_mem_destroy(&x->windows);
}

static enum cp_code open_windows(struct cp_exchange *x)
{
    int world = x->w.plan->world;
    CP_TRY(cp_mem_create_array(world, sizeof *x->windows, "a schedule", &x->windows));
    for (int rank = 0; rank < world; rank++) {
        x->windows[rank].arena =
            (struct cp_arena){.kind = CP_BUFFER_WINDOW, .owner = rank};
    }
    x->home = CP_LANE_OUT;
    return CP_OK;
}

/* After an error nothing is left. */
static enum cp_code init(struct cp_exchange *x, const struct cp_plan *plan, int rank,
                         enum cp_transport transport)
{
    *x = (struct cp_exchange){
        .ring = plan->ring, .ulysses = plan->ulysses, .home = CP_LANE_IN};
    cp_writer_init(&x->w, plan, rank);
    enum cp_code code =
        cp_mem_create_array(plan->chunks, sizeof *x->chunks, "a schedule", &x->chunks);
    if (code == CP_OK) {
        code = cp_mem_create_array((int64_t)plan->chunks * plan->ring,
                                   sizeof *x->blocks, "a schedule", &x->blocks);
    }
    if (code == CP_OK && transport == CP_PUSH) {
        code = open_windows(x);
    }
    if (code != CP_OK) {
        cp_schedule_destroy(&x->w.builder.schedule);
        fini(x);
    }
    return code;
}

int cp_exchange_rank_of(const struct cp_exchange *x, int r, int u)
{
    return r * x->ulysses + u;
}

int32_t cp_exchange_step_count(const struct cp_exchange *x)
{
    return x->w.builder.code == CP_OK ? x->w.builder.schedule->step_count : 0;
}

void cp_exchange_group_after_compute(struct cp_exchange *x, int32_t first_step,
                                     int32_t compute_steps)
{
    if (x->w.builder.code != CP_OK) {
        return;
    }
    struct cp_schedule *schedule = x->w.builder.schedule;
    for (int32_t step = first_step; step < schedule->step_count; step++) {
        int32_t *after = &schedule->steps[step].after[CP_LANE_COMPUTE];
        *after = compute_steps > *after ? compute_steps : *after;
    }
}

/* ---- chunks ---- */

static void set_chunk(struct cp_exchange *x, int chunk)
{
    cp_writer_set_chunk(&x->w, chunk);
    x->at = &x->chunks[chunk];
    if (cp_writer_mask_travels(&x->w, CP_MASK_OF_ROWS)) {
        x->w.group_mask = cp_exchange_gathered(x, CP_TENSOR_MASK).buffer;
    }
}

/* Backward: results lie where the first exchange brought what they are made of, since they are
 * rounded when all is met; but not where another ring rank may still fetch it. Those of a
 * forward are written while the last block is met. */
static void reuse_places(struct cp_exchange *x, int64_t start)
{
    if (!x->w.is_backward) {
        return;
    }
    x->w.scratch.bytes = start;
    for (int rank = 0; x->windows != NULL && rank < x->w.plan->world; rank++) {
        struct cp_exchange_window *window = &x->windows[rank];
        window->arena.bytes = x->ring == 1 ? window->chunk_first : window->arena.bytes;
    }
}

/* The next chunk begins behind all of them. */
static void end_places(struct cp_exchange *x)
{
    for (int rank = 0; x->windows != NULL && rank < x->w.plan->world; rank++) {
        struct cp_exchange_window *window = &x->windows[rank];
        window->arena.bytes = window->chunk_first = window->arena.most;
    }
}

/* The buffers of a chunk, from where the arenas end. */
static void declare_chunk(struct cp_exchange *x, int chunk,
                          const struct cp_exchange_direction *is)
{
    struct cp_arena *arena = &x->w.scratch;
    set_chunk(x, chunk);
    x->at->blocks = x->blocks + (ptrdiff_t)chunk * x->ring;
    memcpy(x->at->shared, x->shared, sizeof x->shared);
    memcpy(x->at->results, x->results, sizeof x->results);
    is->declare(x);
    int64_t start = arena->bytes;
    cp_exchange_declare_there(x);
    cp_exchange_declare_blocks(x);
    reuse_places(x, start);
    cp_exchange_declare_back(x);
    end_places(x);
}

/* Two places in turn, each as large as the largest chunk that uses it. */
static void declare_chunks(struct cp_exchange *x,
                           const struct cp_exchange_direction *is)
{
    struct cp_arena *arena = &x->w.scratch;
    int64_t start = arena->bytes;
    for (int parity = 0; parity < 2; parity++) {
        arena->most = start;
        for (int chunk = parity; chunk < x->w.plan->chunks; chunk += 2) {
            arena->bytes = start;
            declare_chunk(x, chunk, is);
        }
        start = arena->most;
    }
}

/* What is written from now on uses the memory of the chunk but one before. */
static void follow(struct cp_exchange *x, int chunk)
{
    struct cp_builder *b = &x->w.builder;
    if (chunk >= 2) {
        const struct cp_head_chunk *before = &x->chunks[chunk - 2];
        b->floor[CP_LANE_IN][CP_LANE_COMPUTE] = before->compute_end;
        b->floor[CP_LANE_COMPUTE][CP_LANE_IN] = before->in_end;
    }
}

static void bring(struct cp_exchange *x, int chunk)
{
    set_chunk(x, chunk);
    follow(x, chunk);
    cp_exchange_there(x);
    cp_exchange_make_own_block(x);
    cp_writer_arrive(&x->w);
}

static void give_back(struct cp_exchange *x, int chunk,
                      const struct cp_exchange_direction *is)
{
    set_chunk(x, chunk);
    is->finish(x);
    cp_exchange_back(x);
    x->at->in_end = x->w.builder.lane_steps[CP_LANE_IN];
    x->at->compute_end = x->w.builder.lane_steps[CP_LANE_COMPUTE];
}

enum cp_code cp_exchange_write(const struct cp_plan *plan, int rank,
                               enum cp_transport transport,
                               const struct cp_exchange_direction *is,
                               struct cp_schedule **out)
{
    struct cp_exchange x;
    CP_TRY(init(&x, plan, rank, transport));
    is->begin(&x);
    if (x.w.has_mask && x.w.mask_source != CP_MASK_LOCAL) {
        cp_exchange_share(&x, CP_TENSOR_MASK, x.w.mask);
    }
    declare_chunks(&x, is);
    for (int chunk = 0; chunk < plan->chunks; chunk++) {
        bring(&x, chunk);
        if (chunk > 0) {
            give_back(&x, chunk - 1, is);
            set_chunk(&x, chunk);
        }
        is->meet(&x);
    }
    give_back(&x, plan->chunks - 1, is);
    is->end(&x);
    if (x.windows != NULL) {
        x.w.window = x.windows[rank].arena;
    }
    fini(&x);
    return cp_writer_take(&x.w, out);
}
