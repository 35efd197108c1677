/* Attention over sends and receives: the chunks of heads, one after the other, that both
 * directions share. */
#include "schedule/write_two_sided.h"

#include <string.h>

#include "base/mem.h"

static void fini(struct cp_two_sided *t)
{
    cp_mem_destroy(&t->chunks);
    cp_mem_destroy(&t->blocks);
}

/* After an error nothing is left. */
static enum cp_code init(struct cp_two_sided *t, const struct cp_plan *plan, int rank)
{
    *t = (struct cp_two_sided){.ring = plan->ring, .ulysses = plan->ulysses};
    cp_writer_init(&t->w, plan, rank);
    t->is_backward = plan->signature.call.op == CP_OP_ATTENTION_BACKWARD;
    enum cp_code code =
        cp_mem_create_array(plan->chunks, sizeof *t->chunks, "a schedule", &t->chunks);
    if (code == CP_OK) {
        code = cp_mem_create_array((int64_t)plan->chunks * plan->ring,
                                   sizeof *t->blocks, "a schedule", &t->blocks);
    }
    if (code != CP_OK) {
        cp_schedule_destroy(&t->w.builder.schedule);
        fini(t);
    }
    return code;
}

int cp_two_sided_rank_of(const struct cp_two_sided *t, int r, int u)
{
    return r * t->ulysses + u;
}

int32_t cp_two_sided_step_count(const struct cp_two_sided *t)
{
    return t->w.builder.code == CP_OK ? t->w.builder.schedule->step_count : 0;
}

void cp_two_sided_group_after_compute(struct cp_two_sided *t, int32_t first_step,
                                      int32_t compute_steps)
{
    if (t->w.builder.code != CP_OK) {
        return;
    }
    struct cp_schedule *schedule = t->w.builder.schedule;
    for (int32_t step = first_step; step < schedule->step_count; step++) {
        int32_t *after = &schedule->steps[step].after[CP_LANE_COMPUTE];
        *after = compute_steps > *after ? compute_steps : *after;
    }
}

/* ---- chunks ---- */

static void set_chunk(struct cp_two_sided *t, int chunk)
{
    cp_writer_set_chunk(&t->w, chunk);
    t->at = &t->chunks[chunk];
    if (cp_writer_mask_travels(&t->w, CP_MASK_OF_ROWS)) {
        t->w.group_mask = cp_two_sided_gathered(t, CP_TENSOR_MASK).buffer;
    }
}

/* The buffers of a chunk, from where the arena ends. */
static void declare_chunk(struct cp_two_sided *t, int chunk,
                          const struct cp_two_sided_direction *is)
{
    struct cp_arena *arena = &t->w.scratch;
    set_chunk(t, chunk);
    t->at->blocks = t->blocks + (ptrdiff_t)chunk * t->ring;
    memcpy(t->at->shared, t->shared, sizeof t->shared);
    memcpy(t->at->results, t->results, sizeof t->results);
    is->declare(t);
    int64_t start = arena->bytes;
    cp_two_sided_declare_exchange(t);
    cp_two_sided_declare_blocks(t);
    arena->bytes = start;
    is->declare_results(t);
    cp_two_sided_declare_parcels_home(t);
}

/* Two places in turn, each as large as the largest chunk that uses it. */
static void declare_chunks(struct cp_two_sided *t,
                           const struct cp_two_sided_direction *is)
{
    struct cp_arena *arena = &t->w.scratch;
    int64_t start = arena->bytes;
    for (int parity = 0; parity < 2; parity++) {
        arena->most = start;
        for (int chunk = parity; chunk < t->w.plan->chunks; chunk += 2) {
            arena->bytes = start;
            declare_chunk(t, chunk, is);
        }
        start = arena->most;
    }
}

/* What is written from now on uses the memory of the chunk but one before. */
static void follow(struct cp_two_sided *t, int chunk)
{
    struct cp_builder *b = &t->w.builder;
    if (chunk >= 2) {
        const struct cp_head_chunk *before = &t->chunks[chunk - 2];
        b->floor[CP_LANE_IN][CP_LANE_COMPUTE] = before->compute_end;
        b->floor[CP_LANE_COMPUTE][CP_LANE_IN] = before->in_end;
    }
}

static void bring(struct cp_two_sided *t, int chunk)
{
    set_chunk(t, chunk);
    follow(t, chunk);
    cp_two_sided_exchange_in(t);
    cp_two_sided_make_block(t);
    cp_writer_arrive(&t->w);
}

static void give_back(struct cp_two_sided *t, int chunk,
                      const struct cp_two_sided_direction *is)
{
    set_chunk(t, chunk);
    is->finish(t);
    cp_two_sided_exchange_out(t);
    t->at->in_end = t->w.builder.lane_steps[CP_LANE_IN];
    t->at->compute_end = t->w.builder.lane_steps[CP_LANE_COMPUTE];
}

enum cp_code cp_two_sided_write(const struct cp_plan *plan, int rank,
                                const struct cp_two_sided_direction *is,
                                struct cp_schedule **out)
{
    struct cp_two_sided t;
    CP_TRY(init(&t, plan, rank));
    is->begin(&t);
    if (t.w.has_mask && t.w.mask_source != CP_MASK_LOCAL) {
        cp_two_sided_share(&t, CP_TENSOR_MASK, t.w.mask);
    }
    declare_chunks(&t, is);
    for (int chunk = 0; chunk < plan->chunks; chunk++) {
        bring(&t, chunk);
        if (chunk > 0) {
            give_back(&t, chunk - 1, is);
            set_chunk(&t, chunk);
        }
        is->meet(&t);
    }
    give_back(&t, plan->chunks - 1, is);
    is->end(&t);
    fini(&t);
    return cp_writer_take(&t.w, out);
}
