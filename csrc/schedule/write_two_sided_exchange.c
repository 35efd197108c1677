/* Attention over sends and receives: what the members of a Ulysses group exchange. Rows
 * of q, keys and masks, forward and backward, there and back: all are cut and moved
 * here. */
#include "schedule/write_two_sided.h"

/* ---- how a tensor is cut ---- */

static int row_axis(const struct cp_two_sided *t, enum cp_tensor_role role)
{
    bool is_mask = role == CP_TENSOR_MASK;
    return !is_mask ? 1 : cp_writer_is_of_keys(&t->w, role) ? 3 : 2;
}

/* The rows of member m. */
static struct cp_range rows_of(const struct cp_two_sided *t, enum cp_tensor_role role,
                               int m)
{
    const struct cp_plan *plan = t->w.plan;
    int rank = cp_two_sided_rank_of(t, t->w.r, m);
    return cp_writer_is_of_keys(&t->w, role) ? plan->kv_rows[rank] : plan->q_rows[rank];
}

static struct cp_range group_rows(const struct cp_two_sided *t,
                                  enum cp_tensor_role role)
{
    return cp_writer_is_of_keys(&t->w, role) ? cp_plan_group_keys(t->w.plan, t->w.rank)
                                             : t->w.rows;
}

/* The heads of the chunk that member m answers for. */
static struct cp_range heads_of(const struct cp_two_sided *t, enum cp_tensor_role role,
                                int m)
{
    const struct cp_plan *plan = t->w.plan;
    struct cp_range all = {.first = 0, .count = 1};
    if (role == CP_TENSOR_MASK) {
        return t->w.call->mask_heads == 1 ? all
                                          : cp_plan_chunk_heads(plan, m, t->w.chunk);
    }
    return cp_writer_is_of_keys(&t->w, role)
               ? cp_plan_chunk_kv_heads(plan, m, t->w.chunk)
               : cp_plan_chunk_heads(plan, m, t->w.chunk);
}

/* A buffer for `rows` rows and the heads of member m. */
static int32_t declare(struct cp_two_sided *t, const struct cp_shared *shared,
                       int64_t rows, int m)
{
    struct cp_writer *w = &t->w;
    int64_t heads = heads_of(t, shared->role, m).count;
    if (shared->role != CP_TENSOR_MASK) {
        return cp_writer_runs(w, &w->scratch, shared->role, shared->dtype, rows, heads);
    }
    int axis = row_axis(t, shared->role);
    return cp_writer_mask(
        w, &w->scratch, axis, heads,
        axis == 2 ? rows : cp_plan_size(w->plan, w->rank, CP_SIZE_MASK_ROWS),
        axis == 3 ? rows : cp_plan_size(w->plan, w->rank, CP_SIZE_MASK_KEYS));
}

void cp_two_sided_declare_gathered(struct cp_two_sided *t, struct cp_shared *shared)
{
    shared->gathered = declare(t, shared, group_rows(t, shared->role).count, t->w.u);
}

/* What the heads of member m have of the own rows. */
static struct cp_box own_part(const struct cp_two_sided *t,
                              const struct cp_shared *shared, int m)
{
    struct cp_range heads = heads_of(t, shared->role, m);
    return cp_box_part(cp_writer_box(&t->w, shared->own),
                       shared->role == CP_TENSOR_MASK ? 1 : 2, heads.first,
                       heads.count);
}

/* What member m has of the group's rows. */
static struct cp_box group_part(const struct cp_two_sided *t,
                                const struct cp_shared *shared, int m)
{
    struct cp_range rows = rows_of(t, shared->role, m);
    return cp_box_part(cp_writer_box(&t->w, shared->gathered),
                       row_axis(t, shared->role),
                       rows.first - group_rows(t, shared->role).first, rows.count);
}

bool cp_two_sided_heads_meet(const struct cp_two_sided *t)
{
    const struct cp_range *heads = t->w.plan->kv_heads;
    for (int m = 1; m < t->ulysses; m++) {
        if (heads[m].count > 0 &&
            heads[m].first < heads[m - 1].first + heads[m - 1].count) {
            return true;
        }
    }
    return false;
}

/* ---- parcels: own rows for the heads of another member ---- */

/* One for each other member and tensor; returns the first. */
static int32_t declare_parcels(struct cp_two_sided *t, const struct cp_shared *shared,
                               int count)
{
    int32_t first = CP_NO_BUFFER;
    for (int index = 1; index < t->ulysses; index++) {
        int m = (t->w.u + index) % t->ulysses;
        for (int i = 0; i < count; i++) {
            int64_t rows = rows_of(t, shared[i].role, t->w.u).count;
            int32_t parcel = declare(t, &shared[i], rows, m);
            first = first == CP_NO_BUFFER ? parcel : first;
        }
    }
    return first;
}

/* The parcel of member m and tensor i. */
static struct cp_box parcel_of(const struct cp_two_sided *t, int32_t first, int count,
                               int m, int i)
{
    int index = (m - t->w.u + t->ulysses) % t->ulysses;
    return cp_writer_box(&t->w, first + (index - 1) * count + i);
}

/* All parcels in one group of messages, each against the part that its rows have or will
 * have among the group's. */
static void move_parcels(struct cp_two_sided *t, const struct cp_shared *shared,
                         int count, int32_t first, bool is_home)
{
    struct cp_builder *b = &t->w.builder;
    t->group += 1;
    for (int index = 1; index < t->ulysses; index++) {
        int m = (t->w.u + index) % t->ulysses;
        int peer = cp_two_sided_rank_of(t, t->w.r, m);
        for (int i = 0; i < count; i++) {
            struct cp_box parcel = parcel_of(t, first, count, m, i);
            struct cp_box part = group_part(t, &shared[i], m);
            cp_build_send(b, CP_LANE_IN, t->group, peer, is_home ? part : parcel);
            cp_build_recv(b, CP_LANE_IN, t->group, peer, is_home ? parcel : part);
        }
    }
}

/* ---- there ---- */

void cp_two_sided_share(struct cp_two_sided *t, enum cp_tensor_role role, int32_t own)
{
    t->shared[t->shared_count] =
        (struct cp_shared){.role = role,
                           .dtype = cp_writer_dtype(&t->w, role),
                           .own = own,
                           .gathered = CP_NO_BUFFER};
    t->shared_count += 1;
}

void cp_two_sided_share_inputs(struct cp_two_sided *t, const enum cp_tensor_role *roles,
                               int count)
{
    for (int i = 0; i < count; i++) {
        cp_two_sided_share(t, roles[i],
                           cp_writer_tensor(&t->w, CP_BUFFER_INPUT, roles[i]));
    }
}

/* Without other members the caller's tensor is all there is, but what the ring sends as
 * it lies must not be the caller's. */
static bool is_gathered(const struct cp_two_sided *t, enum cp_tensor_role role)
{
    bool is_sent = t->is_backward && t->ring > 1 && role != CP_TENSOR_MASK &&
                   cp_writer_is_of_keys(&t->w, role);
    return t->ulysses > 1 || is_sent;
}

void cp_two_sided_declare_exchange(struct cp_two_sided *t)
{
    struct cp_shared *shared = t->at->shared;
    for (int i = 0; i < t->shared_count; i++) {
        if (is_gathered(t, shared[i].role)) {
            cp_two_sided_declare_gathered(t, &shared[i]);
        }
    }
    int64_t end = t->w.scratch.bytes;
    t->at->parcels = declare_parcels(t, shared, t->shared_count);
    t->w.scratch.bytes = end; /* what lane `in` writes next may lie there */
}

struct cp_box cp_two_sided_own(const struct cp_two_sided *t,
                               const struct cp_shared *shared)
{
    return own_part(t, shared, t->w.u);
}

struct cp_box cp_two_sided_gathered(const struct cp_two_sided *t,
                                    enum cp_tensor_role role)
{
    for (int i = 0; i < t->shared_count; i++) {
        const struct cp_shared *shared = &t->at->shared[i];
        if (shared->role == role) {
            return shared->gathered == CP_NO_BUFFER
                       ? cp_two_sided_own(t, shared)
                       : cp_writer_box(&t->w, shared->gathered);
        }
    }
    return cp_box_none();
}

void cp_two_sided_exchange_in(struct cp_two_sided *t)
{
    struct cp_builder *b = &t->w.builder;
    const struct cp_head_chunk *at = t->at;
    for (int i = 0; i < t->shared_count; i++) {
        if (at->shared[i].gathered != CP_NO_BUFFER) {
            cp_build_move(b, CP_STEP_COPY, CP_LANE_IN,
                          group_part(t, &at->shared[i], t->w.u),
                          own_part(t, &at->shared[i], t->w.u));
        }
    }
    for (int index = 1; index < t->ulysses; index++) {
        int m = (t->w.u + index) % t->ulysses;
        for (int i = 0; i < t->shared_count; i++) {
            cp_build_move(b, CP_STEP_COPY, CP_LANE_IN,
                          parcel_of(t, at->parcels, t->shared_count, m, i),
                          own_part(t, &at->shared[i], m));
        }
    }
    move_parcels(t, at->shared, t->shared_count, at->parcels, false);
}

/* ---- and back ---- */

void cp_two_sided_give(struct cp_two_sided *t, enum cp_tensor_role role,
                       enum cp_dtype dtype, int32_t own)
{
    t->results[t->result_count] = (struct cp_shared){
        .role = role, .dtype = dtype, .own = own, .gathered = CP_NO_BUFFER};
    t->result_count += 1;
}

void cp_two_sided_declare_parcels_home(struct cp_two_sided *t)
{
    t->at->result_parcels = declare_parcels(t, t->at->results, t->result_count);
}

void cp_two_sided_exchange_out(struct cp_two_sided *t)
{
    struct cp_builder *b = &t->w.builder;
    const struct cp_head_chunk *at = t->at;
    int32_t first_step = cp_two_sided_step_count(t);
    move_parcels(t, at->results, t->result_count, at->result_parcels, true);
    cp_two_sided_group_after_compute(t, first_step, b->lane_steps[CP_LANE_COMPUTE]);
    bool meets = cp_two_sided_heads_meet(t);
    for (int m = 0; m < t->ulysses; m++) {
        for (int i = 0; i < t->result_count; i++) {
            const struct cp_shared *result = &at->results[i];
            if (result->gathered == CP_NO_BUFFER) {
                continue; /* it is where it belongs */
            }
            bool is_sum = meets && cp_writer_is_of_keys(&t->w, result->role);
            struct cp_box from =
                m == t->w.u ? group_part(t, result, m)
                            : parcel_of(t, at->result_parcels, t->result_count, m, i);
            cp_build_after(b,
                           cp_build_move(b, is_sum ? CP_STEP_REDUCE : CP_STEP_COPY,
                                         CP_LANE_IN, own_part(t, result, m), from),
                           CP_LANE_COMPUTE);
        }
    }
}
