/* A tensor seen as (outer, rows, 1, inner), cut along its rows: gather, and
 * reduce_scatter, which is its gradient. (A shard is local: no schedule.) */
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

static bool is_sum(const struct cutter *c)
{
    return c->plan->signature.call.op == CP_OP_REDUCE_SCATTER;
}

static int32_t cut_buffer(struct cutter *c, struct cp_arena *arena,
                          enum cp_tensor_role role, int64_t rows)
{
    const int64_t n[CP_AXES] = {c->plan->outer, rows, 1, c->plan->inner};
    enum cp_dtype dtype = (enum cp_dtype)c->plan->signature.call.dtype;
    return cp_build_buffer(&c->builder, arena, CP_LAYOUT_PLAIN, role,
                           is_sum(c) ? cp_dtype_sum(dtype) : dtype, n);
}

/* A buffer for the rows of one rank. */
static int32_t part_buffer(struct cutter *c, struct cp_arena *arena, int rank)
{
    return cut_buffer(c, arena, CP_TENSOR_SHARE, c->plan->cut[rank].count);
}

static int64_t rows_of_all(const struct cp_plan *plan)
{
    const struct cp_range *last = &plan->cut[plan->world - 1];
    return last->first + last->count;
}

static void cutter_init(struct cutter *c, const struct cp_plan *plan, int rank)
{
    *c = (struct cutter){.plan = plan, .rank = rank};
    cp_builder_init(&c->builder, plan, rank);
    c->window.kind = CP_BUFFER_WINDOW;
    c->window.owner = rank;
    c->scratch.kind = CP_BUFFER_SCRATCH;
    c->scratch.owner = rank;
    c->whole = cut_tensor(c, is_sum(c) ? CP_BUFFER_INPUT : CP_BUFFER_OUTPUT,
                          CP_TENSOR_WHOLE, rows_of_all(plan));
    c->share = cut_tensor(c, is_sum(c) ? CP_BUFFER_OUTPUT : CP_BUFFER_INPUT,
                          CP_TENSOR_SHARE, plan->cut[rank].count);
}

/* The rows of a rank in a buffer that has all. */
static struct cp_box rows_in(struct cutter *c, int32_t whole, int rank)
{
    struct cp_range rows = c->plan->cut[rank];
    return cp_box_part(cp_box_all(&c->builder, whole), 1, rows.first, rows.count);
}

static struct cp_box rows_of(struct cutter *c, int rank)
{
    return rows_in(c, c->whole, rank);
}

static struct cp_box all_of(struct cutter *c, int32_t buffer)
{
    return cp_box_all(&c->builder, buffer);
}

static void copy(struct cutter *c, struct cp_box dst, struct cp_box src)
{
    cp_build_move(&c->builder, CP_STEP_COPY, CP_LANE_IN, dst, src);
}

/* Takes up what rank `from` gives. In the order of the ranks, so that a sum is the same
 * in every run. */
static void add_part(struct cutter *c, int32_t sum, int from, struct cp_box part)
{
    cp_build_move(&c->builder, from == 0 ? CP_STEP_COPY : CP_STEP_REDUCE, CP_LANE_IN,
                  all_of(c, sum), part);
}

enum cp_code cp_write_gather_pull(const struct cp_plan *plan, int rank,
                                  struct cp_schedule **out)
{
    struct cutter c;
    cutter_init(&c, plan, rank);
    int32_t own = part_buffer(&c, &c.window, rank);
    copy(&c, all_of(&c, own), all_of(&c, c.share));
    cp_build_publish(&c.builder, CP_LANE_IN, SIGNAL_READY, 1);
    copy(&c, rows_of(&c, rank), all_of(&c, c.share));
    for (int j = 1; j < plan->world; j++) {
        int peer = (rank + j) % plan->world;
        struct cp_arena theirs = {.kind = CP_BUFFER_WINDOW, .owner = peer};
        struct cp_box dst = rows_of(&c, peer);
        if (!cp_box_is_empty(&dst)) {
            int32_t from = part_buffer(&c, &theirs, peer);
            cp_build_await(&c.builder, CP_LANE_IN, peer, SIGNAL_READY, 1);
            copy(&c, dst, all_of(&c, from));
        }
    }
    return cp_builder_take(&c.builder, &c.window, &c.scratch, out);
}

enum cp_code cp_write_gather_two_sided(const struct cp_plan *plan, int rank,
                                       struct cp_schedule **out)
{
    struct cutter c;
    cutter_init(&c, plan, rank);
    int32_t own = part_buffer(&c, &c.scratch, rank);
    copy(&c, all_of(&c, own), all_of(&c, c.share));
    copy(&c, rows_of(&c, rank), all_of(&c, c.share));
    for (int j = 1; j < plan->world; j++) {
        int peer = (rank + j) % plan->world;
        int32_t theirs = part_buffer(&c, &c.scratch, peer);
        cp_build_send(&c.builder, CP_LANE_IN, 1, peer, all_of(&c, own));
        cp_build_recv(&c.builder, CP_LANE_IN, 1, peer, all_of(&c, theirs));
    }
    for (int j = 1; j < plan->world; j++) {
        copy(&c, rows_of(&c, (rank + j) % plan->world), all_of(&c, own + j));
    }
    return cp_builder_take(&c.builder, &c.window, &c.scratch, out);
}

enum cp_code cp_write_reduce_scatter_pull(const struct cp_plan *plan, int rank,
                                          struct cp_schedule **out)
{
    struct cutter c;
    cutter_init(&c, plan, rank);
    int32_t own = cut_buffer(&c, &c.window, CP_TENSOR_WHOLE, rows_of_all(plan));
    int32_t sum = part_buffer(&c, &c.scratch, rank);
    struct cp_box to = all_of(&c, sum);
    copy(&c, all_of(&c, own), all_of(&c, c.whole));
    cp_build_publish(&c.builder, CP_LANE_IN, SIGNAL_READY, 1);
    for (int from = 0; from < plan->world && !cp_box_is_empty(&to); from++) {
        struct cp_arena theirs = {.kind = CP_BUFFER_WINDOW, .owner = from};
        int32_t whole = own;
        if (from != rank) {
            whole = cut_buffer(&c, &theirs, CP_TENSOR_WHOLE, rows_of_all(plan));
            cp_build_await(&c.builder, CP_LANE_IN, from, SIGNAL_READY, 1);
        }
        add_part(&c, sum, from, rows_in(&c, whole, rank));
    }
    copy(&c, all_of(&c, c.share), to);
    return cp_builder_take(&c.builder, &c.window, &c.scratch, out);
}

enum cp_code cp_write_reduce_scatter_two_sided(const struct cp_plan *plan, int rank,
                                               struct cp_schedule **out)
{
    struct cutter c;
    int32_t given[CP_MAX_WORLD]; /* what each rank gives to this one */
    int32_t parts[CP_MAX_WORLD]; /* and this one to each */
    cutter_init(&c, plan, rank);
    for (int peer = 0; peer < plan->world; peer++) {
        given[peer] = part_buffer(&c, &c.scratch, rank);
        parts[peer] = peer == rank ? given[rank] : part_buffer(&c, &c.scratch, peer);
        copy(&c, all_of(&c, parts[peer]), rows_of(&c, peer));
    }
    for (int j = 1; j < plan->world; j++) {
        int peer = (rank + j) % plan->world;
        cp_build_send(&c.builder, CP_LANE_IN, 1, peer, all_of(&c, parts[peer]));
        cp_build_recv(&c.builder, CP_LANE_IN, 1, peer, all_of(&c, given[peer]));
    }
    int32_t sum = part_buffer(&c, &c.scratch, rank);
    for (int from = 0; from < plan->world; from++) {
        add_part(&c, sum, from, all_of(&c, given[from]));
    }
    copy(&c, all_of(&c, c.share), all_of(&c, sum));
    return cp_builder_take(&c.builder, &c.window, &c.scratch, out);
}
