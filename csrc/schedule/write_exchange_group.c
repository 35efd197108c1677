/* Attention by exchange: what the members of a Ulysses group exchange. Rows of q, keys and
 * masks, forward and backward, there and back: all are cut and moved here. */
#include "schedule/write_exchange.h"

/* ---- how a tensor is cut ---- */

static int row_axis(const struct cp_exchange *x, enum cp_tensor_role role)
{
    bool is_mask = role == CP_TENSOR_MASK;
    return !is_mask ? 1 : cp_writer_is_of_keys(&x->w, role) ? 3 : 2;
}

/* Rank of member m. */
static int rank_of(const struct cp_exchange *x, int m)
{
    return cp_exchange_rank_of(x, x->w.r, m);
}

/* The rows of member m. */
static struct cp_range rows_of(const struct cp_exchange *x, enum cp_tensor_role role,
                               int m)
{
    const struct cp_plan *plan = x->w.plan;
    return cp_writer_is_of_keys(&x->w, role) ? plan->kv_rows[rank_of(x, m)]
                                             : plan->q_rows[rank_of(x, m)];
}

/* Those of the group of `rank`. */
static struct cp_range group_rows(const struct cp_exchange *x, enum cp_tensor_role role,
                                  int rank)
{
    return cp_writer_is_of_keys(&x->w, role) ? cp_plan_group_keys(x->w.plan, rank)
                                             : cp_plan_group_rows(x->w.plan, rank);
}

/* The heads of the chunk that member m answers for. */
static struct cp_range heads_of(const struct cp_exchange *x, enum cp_tensor_role role,
                                int m)
{
    const struct cp_plan *plan = x->w.plan;
    struct cp_range all = {.first = 0, .count = 1};
    if (role == CP_TENSOR_MASK) {
        return x->w.call->mask_heads == 1 ? all
                                          : cp_plan_chunk_heads(plan, m, x->w.chunk);
    }
    return cp_writer_is_of_keys(&x->w, role)
               ? cp_plan_chunk_kv_heads(plan, m, x->w.chunk)
               : cp_plan_chunk_heads(plan, m, x->w.chunk);
}

/* A buffer for so many rows and the heads that `rank` answers for. */
static int32_t declare(struct cp_exchange *x, struct cp_arena *arena,
                       const struct cp_shared *shared, int64_t rows, int rank)
{
    struct cp_writer *w = &x->w;
    int64_t heads =
        heads_of(x, shared->role, cp_plan_ulysses_rank(w->plan, rank)).count;
    if (shared->role != CP_TENSOR_MASK) {
        return cp_writer_runs(w, arena, shared->role, shared->dtype, rows, heads);
    }
    int axis = row_axis(x, shared->role);
    return cp_writer_mask(
        w, arena, axis, heads,
        axis == 2 ? rows : cp_plan_size(w->plan, rank, CP_SIZE_MASK_ROWS),
        axis == 3 ? rows : cp_plan_size(w->plan, rank, CP_SIZE_MASK_KEYS));
}

/* The same for the rows of a whole group. */
static int32_t declare_gathered(struct cp_exchange *x, struct cp_arena *arena,
                                const struct cp_shared *shared, int rank)
{
    return declare(x, arena, shared, group_rows(x, shared->role, rank).count, rank);
}

/* What the heads of member m have of the own rows. */
static struct cp_box own_part(const struct cp_exchange *x,
                              const struct cp_shared *shared, int m)
{
    struct cp_range heads = heads_of(x, shared->role, m);
    return cp_box_part(cp_writer_box(&x->w, shared->own),
                       shared->role == CP_TENSOR_MASK ? 1 : 2, heads.first,
                       heads.count);
}

/* What member m has of the group's rows, where `gathered` holds these. */
static struct cp_box group_part(const struct cp_exchange *x, enum cp_tensor_role role,
                                int32_t gathered, int m)
{
    struct cp_range rows = rows_of(x, role, m);
    return cp_box_part(cp_writer_box(&x->w, gathered), row_axis(x, role),
                       rows.first - group_rows(x, role, x->w.rank).first, rows.count);
}

bool cp_exchange_heads_meet(const struct cp_exchange *x)
{
    const struct cp_range *heads = x->w.plan->kv_heads;
    for (int m = 1; m < x->ulysses; m++) {
        if (heads[m].count > 0 &&
            heads[m].first < heads[m - 1].first + heads[m - 1].count) {
            return true;
        }
    }
    return false;
}

/* ---- parcels: own rows for the heads of another member ----
 *
 * By messages a parcel is memory of this rank, which is sent, or received on the way home.
 * By windows it is the place of these rows in the member's window. */

/* In the workspace, one for each other member and tensor; returns the first. */
static int32_t declare_own_parcels(struct cp_exchange *x,
                                   const struct cp_shared *shared, int count)
{
    int32_t first = CP_NO_BUFFER;
    for (int index = 1; index < x->ulysses; index++) {
        int m = (x->w.u + index) % x->ulysses;
        for (int i = 0; i < count; i++) {
            int64_t rows = rows_of(x, shared[i].role, x->w.u).count;
            int32_t parcel = declare(x, &x->w.scratch, &shared[i], rows, rank_of(x, m));
            first = first == CP_NO_BUFFER ? parcel : first;
        }
    }
    return first;
}

/* In the windows of all ranks, the group's rows of each tensor, those of the own heads too;
 * returns the first. */
static int32_t declare_places(struct cp_exchange *x, struct cp_shared *shared,
                              int count)
{
    int32_t first = CP_NO_BUFFER;
    for (int rank = 0; rank < x->w.plan->world; rank++) {
        for (int i = 0; i < count; i++) {
            int32_t place =
                declare_gathered(x, &x->windows[rank].arena, &shared[i], rank);
            first = first == CP_NO_BUFFER ? place : first;
            shared[i].gathered = rank == x->w.rank ? place : shared[i].gathered;
        }
    }
    return first;
}

/* The place that `rank` has for tensor i. */
static int32_t place_of(int32_t first, int count, int rank, int i)
{
    return first + rank * count + i;
}

/* The parcel of member m and tensor i. */
static struct cp_box parcel_of(const struct cp_exchange *x,
                               const struct cp_shared *shared, int count, int32_t first,
                               int m, int i)
{
    int index = (m - x->w.u + x->ulysses) % x->ulysses;
    return x->windows != NULL
               ? group_part(x, shared[i].role, place_of(first, count, rank_of(x, m), i),
                            x->w.u)
               : cp_writer_box(&x->w, first + (index - 1) * count + i);
}

/* All parcels in one group of messages, each against the part that its rows have or will
 * have among the group's. */
static void move_parcels(struct cp_exchange *x, const struct cp_shared *shared,
                         int count, int32_t first, bool is_home)
{
    struct cp_builder *b = &x->w.builder;
    x->group += 1;
    for (int index = 1; index < x->ulysses; index++) {
        int m = (x->w.u + index) % x->ulysses;
        for (int i = 0; i < count; i++) {
            struct cp_box parcel = parcel_of(x, shared, count, first, m, i);
            struct cp_box part = group_part(x, shared[i].role, shared[i].gathered, m);
            cp_build_send(b, CP_LANE_IN, x->group, rank_of(x, m),
                          is_home ? part : parcel);
            cp_build_recv(b, CP_LANE_IN, x->group, rank_of(x, m),
                          is_home ? parcel : part);
        }
    }
}

/* Lane `lane` goes on once all other members have published the same of this chunk. */
static void await_members(struct cp_exchange *x, enum cp_lane lane, int signal)
{
    for (int index = 1; index < x->ulysses; index++) {
        int m = (x->w.u + index) % x->ulysses;
        cp_build_await(&x->w.builder, lane, rank_of(x, m), signal,
                       (uint32_t)x->w.chunk + 1);
    }
}

/* ---- there ---- */

void cp_exchange_share(struct cp_exchange *x, enum cp_tensor_role role, int32_t own)
{
    x->shared[x->shared_count] =
        (struct cp_shared){.role = role,
                           .dtype = cp_writer_dtype(&x->w, role),
                           .own = own,
                           .gathered = CP_NO_BUFFER};
    x->shared_count += 1;
}

void cp_exchange_share_inputs(struct cp_exchange *x, const enum cp_tensor_role *roles,
                              int count)
{
    for (int i = 0; i < count; i++) {
        cp_exchange_share(x, roles[i],
                          cp_writer_tensor(&x->w, CP_BUFFER_INPUT, roles[i]));
    }
}

/* Without other members the caller's tensor is all there is, but what the ring sends as
 * it lies must not be the caller's. */
static bool is_gathered(const struct cp_exchange *x, enum cp_tensor_role role)
{
    bool is_sent = !x->w.packs && x->ring > 1 && role != CP_TENSOR_MASK &&
                   cp_writer_is_of_keys(&x->w, role);
    return x->ulysses > 1 || is_sent;
}

void cp_exchange_declare_there(struct cp_exchange *x)
{
    struct cp_shared *shared = x->at->shared;
    if (x->windows != NULL) {
        x->at->parcels = declare_places(x, shared, x->shared_count);
        return;
    }
    for (int i = 0; i < x->shared_count; i++) {
        if (is_gathered(x, shared[i].role)) {
            shared[i].gathered =
                declare_gathered(x, &x->w.scratch, &shared[i], x->w.rank);
        }
    }
    int64_t end = x->w.scratch.bytes;
    x->at->parcels = declare_own_parcels(x, shared, x->shared_count);
    x->w.scratch.bytes = end; /* what lane `in` writes next may lie there */
}

struct cp_box cp_exchange_own(const struct cp_exchange *x,
                              const struct cp_shared *shared)
{
    return own_part(x, shared, x->w.u);
}

static int index_of(const struct cp_exchange *x, enum cp_tensor_role role)
{
    int i = 0;
    while (i < x->shared_count && x->at->shared[i].role != role) {
        i += 1;
    }
    return i;
}

struct cp_box cp_exchange_gathered(const struct cp_exchange *x,
                                   enum cp_tensor_role role)
{
    int i = index_of(x, role);
    if (i == x->shared_count) {
        return cp_box_none();
    }
    const struct cp_shared *shared = &x->at->shared[i];
    return shared->gathered == CP_NO_BUFFER ? cp_exchange_own(x, shared)
                                            : cp_writer_box(&x->w, shared->gathered);
}

struct cp_box cp_exchange_gathered_at(const struct cp_exchange *x, int rank,
                                      enum cp_tensor_role role)
{
    return rank == x->w.rank
               ? cp_exchange_gathered(x, role)
               : cp_writer_box(&x->w, place_of(x->at->parcels, x->shared_count, rank,
                                               index_of(x, role)));
}

void cp_exchange_there(struct cp_exchange *x)
{
    struct cp_builder *b = &x->w.builder;
    const struct cp_head_chunk *at = x->at;
    for (int i = 0; i < x->shared_count; i++) {
        const struct cp_shared *shared = &at->shared[i];
        if (shared->gathered != CP_NO_BUFFER) {
            cp_build_move(b, CP_STEP_COPY, CP_LANE_IN,
                          group_part(x, shared->role, shared->gathered, x->w.u),
                          own_part(x, shared, x->w.u));
        }
    }
    for (int index = 1; index < x->ulysses; index++) {
        int m = (x->w.u + index) % x->ulysses;
        for (int i = 0; i < x->shared_count; i++) {
            cp_build_move(b, CP_STEP_COPY, CP_LANE_IN,
                          parcel_of(x, at->shared, x->shared_count, at->parcels, m, i),
                          own_part(x, &at->shared[i], m));
        }
    }
    if (x->windows == NULL) {
        move_parcels(x, at->shared, x->shared_count, at->parcels, false);
        return;
    }
    cp_build_publish(b, CP_LANE_IN, CP_EXCHANGE_BROUGHT, (uint32_t)x->w.chunk + 1);
    await_members(x, CP_LANE_IN, CP_EXCHANGE_BROUGHT);
    if (x->ring > 1) {
        cp_build_publish(b, CP_LANE_IN, CP_EXCHANGE_WHOLE, (uint32_t)x->w.chunk + 1);
    }
}

/* ---- and back ---- */

void cp_exchange_give(struct cp_exchange *x, enum cp_tensor_role role,
                      enum cp_dtype dtype, int32_t own)
{
    x->results[x->result_count] = (struct cp_shared){.role = role,
                                                     .dtype = dtype,
                                                     .own = own,
                                                     .gathered = CP_NO_BUFFER,
                                                     .sum = CP_NO_BUFFER};
    x->result_count += 1;
}

/* A sum in the dtype that travels is sent from where it is made. */
static bool is_sent_as_made(const struct cp_exchange *x, const struct cp_shared *result)
{
    return x->ulysses == 1 ||
           (result->sum != CP_NO_BUFFER && result->dtype == x->w.sum);
}

void cp_exchange_declare_back(struct cp_exchange *x)
{
    struct cp_shared *results = x->at->results;
    if (x->windows != NULL) {
        x->at->result_parcels = declare_places(x, results, x->result_count);
        return;
    }
    for (int i = 0; i < x->result_count; i++) {
        results[i].gathered =
            is_sent_as_made(x, &results[i])
                ? results[i].sum
                : declare_gathered(x, &x->w.scratch, &results[i], x->w.rank);
    }
    x->at->result_parcels = declare_own_parcels(x, results, x->result_count);
}

/* What others have made for the own rows is here, or may be fetched, on the lane home. */
static void come_back(struct cp_exchange *x)
{
    struct cp_builder *b = &x->w.builder;
    if (x->windows != NULL) {
        cp_build_publish(b, CP_LANE_COMPUTE, CP_EXCHANGE_MADE,
                         (uint32_t)x->w.chunk + 1);
        await_members(x, x->home, CP_EXCHANGE_MADE);
        return;
    }
    int32_t first_step = cp_exchange_step_count(x);
    move_parcels(x, x->at->results, x->result_count, x->at->result_parcels, true);
    cp_exchange_group_after_compute(x, first_step, b->lane_steps[CP_LANE_COMPUTE]);
}

void cp_exchange_back(struct cp_exchange *x)
{
    struct cp_builder *b = &x->w.builder;
    const struct cp_head_chunk *at = x->at;
    bool meets = cp_exchange_heads_meet(x);
    come_back(x);
    for (int m = 0; m < x->ulysses; m++) {
        for (int i = 0; i < x->result_count; i++) {
            const struct cp_shared *result = &at->results[i];
            if (result->gathered == CP_NO_BUFFER) {
                continue; /* it is where it belongs */
            }
            bool is_sum = meets && cp_writer_is_of_keys(&x->w, result->role);
            struct cp_box from = m == x->w.u
                                     ? group_part(x, result->role, result->gathered, m)
                                     : parcel_of(x, at->results, x->result_count,
                                                 at->result_parcels, m, i);
            cp_build_after(b,
                           cp_build_move(b, is_sum ? CP_STEP_REDUCE : CP_STEP_COPY,
                                         x->home, own_part(x, result, m), from),
                           CP_LANE_COMPUTE);
        }
    }
}
