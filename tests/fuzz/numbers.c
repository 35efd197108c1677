/* The caller's tensors, what to expect of them, and the comparison. */
#include "numbers.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "fuzz.h"
#include "numbers_hash.h"
#include "numbers_world.h"

/* ---- the caller's tensors ---- */

static bool is_of_keys(enum cp_tensor_role role)
{
    return role == CP_TENSOR_K || role == CP_TENSOR_V || role == CP_TENSOR_DK ||
           role == CP_TENSOR_DV;
}

/* Global row of a tensor's first one. */
static int64_t first_row(const struct world *world, int rank, enum cp_tensor_role role)
{
    if (role == CP_TENSOR_WHOLE) {
        return 0;
    }
    return role == CP_TENSOR_SHARE ? world->cut_first[rank]
           : is_of_keys(role)      ? world->kv_first[rank]
                                   : world->q_first[rank];
}

/* What a rank's mask says of a global pair. */
static uint64_t mask_number(const struct world *world, int64_t b, int64_t h,
                            int64_t row, int64_t key)
{
    const struct cp_plan *plan = world->plan;
    const struct cp_call *call = &plan->signature.call;
    if (call->mask_kind == CP_MASK_NONE) {
        return 0;
    }
    return number_of(CP_TENSOR_MASK, call->mask_batch == 1 ? 0 : b,
                     call->mask_heads == 1 ? 0 : h,
                     plan->mask_rows == CP_AXIS_ONE ? 0 : row,
                     plan->mask_keys == CP_AXIS_ONE ? 0 : key);
}

/* A tensor that ranks add up is another one on each of them. */
static uint64_t input_number(const struct world *world, int rank,
                             enum cp_tensor_role role, const int64_t at[CP_AXES])
{
    if (role == CP_TENSOR_MASK) {
        bool has_own_rows = world->plan->mask_rows == CP_AXIS_OWN;
        bool has_own_keys = world->plan->mask_keys == CP_AXIS_OWN;
        return mask_number(world, at[0], at[1],
                           at[2] + (has_own_rows ? world->q_first[rank] : 0),
                           at[3] + (has_own_keys ? world->kv_first[rank] : 0));
    }
    return number_of(role, at[0], first_row(world, rank, role) + at[1], at[2],
                     role == CP_TENSOR_WHOLE ? rank : 0);
}

static struct memory create_memory(int64_t bytes)
{
    struct memory memory = {numbers_allocate((size_t)bytes, sizeof *memory.at), bytes};
    for (int64_t i = 0; i < bytes; i++) {
        memory.at[i] = numbers_nothing;
    }
    return memory;
}

/* Memory for every tensor of the caller that the schedule names; inputs have their numbers. */
static void create_tensors(struct world *world, int rank)
{
    struct rank *self = &world->ranks[rank];
    for (int32_t i = 0; i < self->schedule->buffer_count; i++) {
        const struct cp_buffer *buffer = &self->schedule->buffers[i];
        if (!is_tensor(buffer)) {
            continue;
        }
        bool is_output = buffer->kind == CP_BUFFER_OUTPUT;
        bool is_mask = buffer->role == CP_TENSOR_MASK;
        struct memory *memory = &self->tensors[is_output][buffer->role];
        if (memory->at != NULL) {
            continue;
        }
        *memory = create_memory(count_of(buffer->n) *
                                cp_dtype_bytes((enum cp_dtype)buffer->dtype));
        struct place place = numbers_place(world, rank, i);
        place.may_be_written = true;
        struct cp_box all = {
            .n = {buffer->n[0], buffer->n[1], buffer->n[2], buffer->n[3]}};
        for (int64_t j = 0; !is_output && j < count_of(all.n); j++) {
            int64_t at[CP_AXES];
            spread(all.n, j, at);
            uint64_t number =
                input_number(world, rank, (enum cp_tensor_role)buffer->role, at);
            numbers_write(&place, &all, at,
                          is_mask ? number : element_of(number, at[3]));
        }
    }
}

/* ---- what to expect ---- */

/* May a row of the sequence see a key? */
static bool is_visible(const struct world *world, int64_t row, int64_t key)
{
    return world->plan->signature.call.is_causal == 0 || key <= row;
}

static struct pair pair_of(const struct world *world, int64_t b, int64_t row, int64_t h,
                           int64_t key)
{
    const struct cp_call *call = &world->plan->signature.call;
    int64_t g = h / (call->heads / call->kv_heads);
    uint64_t dlse = call->want_lse != 0 ? number_of(CP_TENSOR_DLSE, b, row, h, 0) : 0;
    struct pair pair = {
        .q = number_of(CP_TENSOR_Q, b, row, h, 0),
        .k = number_of(CP_TENSOR_K, b, key, g, 0),
        .v = number_of(CP_TENSOR_V, b, key, g, 0),
        .mask = mask_number(world, b, h, row, key),
        .dout = number_of(CP_TENSOR_DOUT, b, row, h, 0),
        .lse = number_of(CP_TENSOR_LSE, b, row, h, 0),
    };
    pair.delta = delta_of(number_of(CP_TENSOR_OUT, b, row, h, 0), pair.dout, dlse);
    return pair;
}

/* OUT, LSE, DQ of a row. */
static uint64_t expect_row(const struct world *world, enum cp_tensor_role role,
                           int64_t b, int64_t row, int64_t h)
{
    uint64_t sum = 0;
    for (int64_t key = 0; key < world->kv_all; key++) {
        if (is_visible(world, row, key)) {
            struct pair pair = pair_of(world, b, row, h, key);
            sum += role == CP_TENSOR_DQ ? grad_of(&pair, role) : state_of(&pair);
        }
    }
    return role == CP_TENSOR_DQ ? sum : result_of(sum, role);
}

/* DK, DV of a key: where k and v are replicated, of the rank's own rows. */
static uint64_t expect_key(const struct world *world, int rank,
                           enum cp_tensor_role role, int64_t b, int64_t key, int64_t g)
{
    const struct cp_call *call = &world->plan->signature.call;
    int64_t per_kv = call->heads / call->kv_heads;
    bool is_replicated = call->kv_replicated != 0;
    int64_t first = is_replicated ? world->q_first[rank] : 0;
    int64_t end = is_replicated && rank + 1 < world->size ? world->q_first[rank + 1]
                                                          : world->q_all;
    uint64_t sum = 0;
    for (int64_t row = first; row < end; row++) {
        for (int64_t h = g * per_kv; h < (g + 1) * per_kv; h++) {
            if (is_visible(world, row, key)) {
                struct pair pair = pair_of(world, b, row, h, key);
                sum += grad_of(&pair, role);
            }
        }
    }
    return sum;
}

static uint64_t expect_output(const struct world *world, int rank,
                              enum cp_tensor_role role, const int64_t at[CP_AXES])
{
    int64_t row = first_row(world, rank, role) + at[1];
    uint64_t sum = 0;
    if (role == CP_TENSOR_WHOLE) {
        return number_of(CP_TENSOR_SHARE, at[0], row, at[2], 0);
    }
    if (role == CP_TENSOR_SHARE) {
        for (int from = 0; from < world->size; from++) {
            sum += number_of(CP_TENSOR_WHOLE, at[0], row, at[2], from);
        }
        return sum;
    }
    return is_of_keys(role) ? expect_key(world, rank, role, at[0], row, at[2])
                            : expect_row(world, role, at[0], row, at[2]);
}

/* Does the call have this output, with elements? */
static bool has_output(const struct world *world, int rank, enum cp_tensor_role role)
{
    const struct cp_plan *plan = world->plan;
    const struct cp_call *call = &plan->signature.call;
    const int64_t *sizes = plan->signature.sizes + (ptrdiff_t)rank * CP_SIZE_COUNT;
    bool is_forward = call->op == CP_OP_ATTENTION;
    bool is_backward = call->op == CP_OP_ATTENTION_BACKWARD;
    switch (role) {
    case CP_TENSOR_OUT:
    case CP_TENSOR_LSE:
        return is_forward && (role == CP_TENSOR_OUT || call->want_lse != 0) &&
               call->batch * sizes[CP_SIZE_Q_ROWS] > 0;
    case CP_TENSOR_DQ:
        return is_backward && call->batch * sizes[CP_SIZE_Q_ROWS] > 0;
    case CP_TENSOR_DK:
    case CP_TENSOR_DV:
        return is_backward && call->batch * sizes[CP_SIZE_KV_ROWS] > 0;
    case CP_TENSOR_WHOLE:
        return call->op == CP_OP_GATHER &&
               plan->outer * world->cut_all * plan->inner > 0;
    case CP_TENSOR_SHARE:
        return call->op == CP_OP_REDUCE_SCATTER &&
               plan->outer * sizes[CP_SIZE_ROWS] * plan->inner > 0;
    case CP_TENSOR_Q:
    case CP_TENSOR_K:
    case CP_TENSOR_V:
    case CP_TENSOR_MASK:
    case CP_TENSOR_DOUT:
    case CP_TENSOR_DLSE:
    case CP_TENSOR_DELTA:
    case CP_TENSORS:
        break;
    }
    return false;
}

/* Sums are kept in more bits than the outputs have, or in as many. */
static bool check_output(struct world *world, int rank, int32_t number,
                         char text[NUMBERS_TEXT])
{
    struct place place = numbers_place(world, rank, number);
    const struct cp_buffer *buffer = place.buffer;
    enum cp_tensor_role role = (enum cp_tensor_role)buffer->role;
    enum cp_dtype dtype = (enum cp_dtype)buffer->dtype;
    bool is_sum = role == CP_TENSOR_DQ || role == CP_TENSOR_DK ||
                  role == CP_TENSOR_DV || role == CP_TENSOR_SHARE;
    bool is_rounded = is_sum && cp_dtype_sum(dtype) != dtype;
    struct cp_box all = {.n = {buffer->n[0], buffer->n[1], buffer->n[2], buffer->n[3]}};
    for (int64_t i = 0; count_of(all.n) > 0 && i < row_count(&all); i++) {
        int64_t at[CP_AXES];
        spread_rows(&all, i, at);
        uint64_t row = expect_output(world, rank, role, at);
        for (at[3] = 0; at[3] < all.n[3]; at[3]++) {
            uint64_t wanted = element_of(row, at[3]);
            if (numbers_read(&place, &all, at) !=
                (is_rounded ? rounded(wanted) : wanted)) {
                (void)snprintf(text, NUMBERS_TEXT,
                               "rank %d: role %d at %lld, %lld, %lld, %lld", rank,
                               (int)role, (long long)at[0], (long long)at[1],
                               (long long)at[2], (long long)at[3]);
                return false;
            }
        }
    }
    return true;
}

/* ---- all of it ---- */

/* Where the last buffer ends of those that lie in the window or workspace of a rank. */
static bool find_sizes(const struct cp_schedule *schedule, int64_t *window,
                       int64_t *scratch)
{
    for (int32_t i = 0; i < schedule->buffer_count; i++) {
        const struct cp_buffer *buffer = &schedule->buffers[i];
        int64_t *size = buffer->kind == CP_BUFFER_WINDOW ? window : scratch;
        if (is_tensor(buffer) ||
            (buffer->kind == CP_BUFFER_WINDOW && buffer->owner != schedule->rank)) {
            continue;
        }
        if (buffer->offset_bytes > MOST_BYTES || buffer->bytes > MOST_BYTES) {
            return false;
        }
        int64_t end = buffer->offset_bytes + buffer->bytes;
        *size = end > *size ? end : *size;
    }
    return true;
}

static void create_lanes(struct rank *rank)
{
    const struct cp_schedule *schedule = rank->schedule;
    size_t steps = (size_t)schedule->step_count;
    rank->halves = numbers_allocate(steps, sizeof *rank->halves);
    for (int lane = 0; lane < CP_LANES; lane++) {
        rank->lanes[lane] = numbers_allocate(steps, sizeof *rank->lanes[lane]);
    }
    for (int32_t i = 0; i < schedule->step_count; i++) {
        const struct cp_step *step = &schedule->steps[i];
        for (int lane = 0; lane < CP_LANES; lane++) {
            FUZZ_CHECK(step->after[lane] <= rank->counts[lane],
                       "step %d comes after what stands behind it", (int)i);
        }
        rank->lanes[step->lane][rank->counts[step->lane]++] = i;
    }
}

static void create_channels(struct world *world, int rank)
{
    size_t steps = (size_t)world->ranks[rank].schedule->step_count;
    for (int peer = 0; peer < world->size; peer++) {
        struct channel *channel = &world->channels[rank][peer];
        channel->copies = numbers_allocate(steps, sizeof *channel->copies);
    }
}

/* What is in use of a window or workspace, as far as there is room. */
static int64_t least(int64_t used, int64_t room)
{
    int64_t bytes = used < room ? used : room;
    return bytes > 0 ? bytes : 0;
}

static bool create_world(struct world *world, const struct cp_schedule *const *of_call,
                         int size, uint64_t seed)
{
    world->plan = of_call[0]->plan;
    world->size = size;
    world->seed = seed;
    for (int rank = 0; rank < size; rank++) {
        const int64_t *sizes =
            world->plan->signature.sizes + (ptrdiff_t)rank * CP_SIZE_COUNT;
        bool is_replicated = world->plan->signature.call.kv_replicated != 0;
        world->q_first[rank] = world->q_all;
        world->kv_first[rank] = is_replicated ? 0 : world->kv_all;
        world->cut_first[rank] = world->cut_all;
        world->q_all += sizes[CP_SIZE_Q_ROWS];
        world->kv_all = world->kv_first[rank] + sizes[CP_SIZE_KV_ROWS];
        world->cut_all += sizes[CP_SIZE_ROWS];
        world->ranks[rank].schedule = of_call[rank];
    }
    for (int rank = 0; rank < size; rank++) {
        struct rank *self = &world->ranks[rank];
        int64_t window = 0;
        int64_t scratch = 0;
        if (!find_sizes(self->schedule, &window, &scratch)) {
            return false;
        }
        const struct cp_schedule *schedule = self->schedule;
        self->window = create_memory(least(window, schedule->window_bytes));
        self->scratch = create_memory(least(scratch, schedule->scratch_bytes));
        create_tensors(world, rank);
        create_lanes(self);
        create_channels(world, rank);
    }
    return true;
}

static void destroy_world(struct world *world)
{
    for (int rank = 0; rank < world->size; rank++) {
        struct rank *self = &world->ranks[rank];
        free(self->window.at);
        free(self->scratch.at);
        free(self->halves);
        for (int role = 0; role < CP_TENSORS; role++) {
            free(self->tensors[0][role].at);
            free(self->tensors[1][role].at);
        }
        for (int lane = 0; lane < CP_LANES; lane++) {
            free(self->lanes[lane]);
        }
        for (int peer = 0; peer < world->size; peer++) {
            struct channel *channel = &world->channels[rank][peer];
            for (int32_t i = 0; i < channel->sends; i++) {
                free(channel->copies[i].at);
            }
            free(channel->copies);
        }
    }
}

static bool check_outputs(struct world *world, int rank, char text[NUMBERS_TEXT])
{
    const struct cp_schedule *schedule = world->ranks[rank].schedule;
    for (int role = 0; role < CP_TENSORS; role++) {
        bool is_named = !has_output(world, rank, (enum cp_tensor_role)role);
        for (int32_t i = 0; i < schedule->buffer_count; i++) {
            const struct cp_buffer *buffer = &schedule->buffers[i];
            if (buffer->kind == CP_BUFFER_OUTPUT && buffer->role == role) {
                is_named = true;
                if (!check_output(world, rank, i, text)) {
                    return false;
                }
            }
        }
        if (!is_named) {
            (void)snprintf(text, NUMBERS_TEXT, "rank %d: no role %d", rank, role);
            return false;
        }
    }
    return true;
}

bool numbers_are_right(const struct cp_schedule *const *of_call, int world,
                       uint64_t seed, char text[NUMBERS_TEXT])
{
    struct world *of = numbers_allocate(1, sizeof *of);
    bool is_right = true;
    if (create_world(of, of_call, world, seed)) {
        is_right = numbers_run(of) && !of->is_torn;
        (void)snprintf(text, NUMBERS_TEXT, "%s",
                       of->is_torn ? "a message is cut short" : "nobody can go on");
        for (int rank = 0; is_right && rank < world; rank++) {
            is_right = check_outputs(of, rank, text);
        }
    }
    destroy_world(of);
    free(of);
    return is_right;
}
