/* Gather: a tensor seen as (outer, rows, 1, inner), cut along its rows. (A shard is
 * local: no schedule.) */
#include "schedule/write.h"

enum { SIGNAL_READY };

struct cutter {
    struct cp_builder builder;
    struct cp_arena window, scratch;
    const struct cp_plan *plan;
    int rank;
    int32_t whole, share; /* the caller's tensors */
};

static int32_t cut_tensor(struct cutter *c, enum cp_buffer_kind kind,
                          enum cp_tensor_role role, int64_t rows)
{
    const int64_t n[CP_AXES] = {c->plan->outer, rows, 1, c->plan->inner};
    return cp_build_tensor(&c->builder, kind, role,
                           (enum cp_dtype)c->plan->signature.call.dtype, n);
}

static int32_t cut_buffer(struct cutter *c, struct cp_arena *arena, int64_t rows)
{
    const int64_t n[CP_AXES] = {c->plan->outer, rows, 1, c->plan->inner};
    return cp_build_buffer(&c->builder, arena, CP_LAYOUT_PLAIN, CP_TENSOR_SHARE,
                           (enum cp_dtype)c->plan->signature.call.dtype, n);
}

static void cutter_init(struct cutter *c, const struct cp_plan *plan, int rank)
{
    const struct cp_range last = plan->cut[plan->world - 1];
    *c = (struct cutter){.plan = plan, .rank = rank};
    cp_builder_init(&c->builder, plan, rank);
    c->window.kind = CP_BUFFER_WINDOW;
    c->window.owner = rank;
    c->scratch.kind = CP_BUFFER_SCRATCH;
    c->scratch.owner = rank;
    c->whole =
        cut_tensor(c, CP_BUFFER_OUTPUT, CP_TENSOR_WHOLE, last.first + last.count);
    c->share = cut_tensor(c, CP_BUFFER_INPUT, CP_TENSOR_SHARE, plan->cut[rank].count);
}

static struct cp_box rows_of(struct cutter *c, int rank)
{
    struct cp_range rows = c->plan->cut[rank];
    return cp_box_part(cp_box_all(&c->builder, c->whole), 1, rows.first, rows.count);
}

static void copy(struct cutter *c, enum cp_lane lane, struct cp_box dst, int32_t src)
{
    cp_build_move(&c->builder, CP_STEP_COPY, lane, dst, cp_box_all(&c->builder, src));
}

enum cp_code cp_write_gather_pull(const struct cp_plan *plan, int rank,
                                  struct cp_schedule **out)
{
    struct cutter c;
    cutter_init(&c, plan, rank);
    int32_t own = cut_buffer(&c, &c.window, plan->cut[rank].count);
    copy(&c, CP_LANE_IN, cp_box_all(&c.builder, own), c.share);
    cp_build_publish(&c.builder, CP_LANE_IN, SIGNAL_READY, 1);
    copy(&c, CP_LANE_IN, rows_of(&c, rank), c.share);
    for (int j = 1; j < plan->world; j++) {
        int peer = (rank + j) % plan->world;
        struct cp_arena theirs = {.kind = CP_BUFFER_WINDOW, .owner = peer};
        struct cp_box dst = rows_of(&c, peer);
        if (!cp_box_is_empty(&dst)) {
            int32_t from = cut_buffer(&c, &theirs, plan->cut[peer].count);
            cp_build_await(&c.builder, CP_LANE_IN, peer, SIGNAL_READY, 1);
            copy(&c, CP_LANE_IN, dst, from);
        }
    }
    return cp_builder_take(&c.builder, &c.window, &c.scratch, out);
}

enum cp_code cp_write_gather_two_sided(const struct cp_plan *plan, int rank,
                                       struct cp_schedule **out)
{
    struct cutter c;
    cutter_init(&c, plan, rank);
    int32_t own = cut_buffer(&c, &c.scratch, plan->cut[rank].count);
    int32_t first = own;
    copy(&c, CP_LANE_IN, cp_box_all(&c.builder, own), c.share);
    copy(&c, CP_LANE_IN, rows_of(&c, rank), c.share);
    for (int j = 1; j < plan->world; j++) {
        int peer = (rank + j) % plan->world;
        int32_t theirs = cut_buffer(&c, &c.scratch, plan->cut[peer].count);
        cp_build_send(&c.builder, CP_LANE_IN, 1, peer, cp_box_all(&c.builder, own));
        cp_build_recv(&c.builder, CP_LANE_IN, 1, peer, cp_box_all(&c.builder, theirs));
    }
    for (int j = 1; j < plan->world; j++) {
        copy(&c, CP_LANE_IN, rows_of(&c, (rank + j) % plan->world), first + j);
    }
    return cp_builder_take(&c.builder, &c.window, &c.scratch, out);
}
