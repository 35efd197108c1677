/* Steps, messages and lanes, done on numbers. */
#include <string.h>

#include "fuzz.h"
#include "numbers_hash.h"
#include "numbers_world.h"

/* ---- steps ---- */

/* An arg of a step; `box` NULL: not given. */
struct arg {
    const struct cp_box *box;
    struct place place;
};

static struct arg arg_of(struct world *world, int rank, const struct cp_step *step,
                         int arg)
{
    struct arg of = {.box = NULL};
    if (step->arg[arg].buffer != CP_NO_BUFFER) {
        of.box = &step->arg[arg];
        of.place = numbers_place(world, rank, of.box->buffer);
    }
    return of;
}

static uint64_t row_of(const struct arg *arg, int64_t b, int64_t i, int64_t h)
{
    return arg->box == NULL ? 0 : numbers_read_row(&arg->place, arg->box, b, i, h);
}

static void set_row(const struct arg *arg, int64_t b, int64_t i, int64_t h,
                    uint64_t row)
{
    if (arg->box != NULL) {
        numbers_write_row(&arg->place, arg->box, b, i, h, row);
    }
}

static void add_to_row(const struct arg *arg, int64_t b, int64_t i, int64_t h,
                       uint64_t addend)
{
    uint64_t row = row_of(arg, b, i, h);
    set_row(arg, b, i, h, row == numbers_nothing ? numbers_nothing : row + addend);
}

/* COPY and REDUCE. */
static void move(const struct arg *dst, const struct arg *src, bool is_sum)
{
    enum cp_dtype to = (enum cp_dtype)dst->place.buffer->dtype;
    enum cp_dtype from = (enum cp_dtype)src->place.buffer->dtype;
    bool is_rounded = to != from && cp_dtype_sum(to) == from;
    for (int64_t i = 0; i < count_of(dst->box->n); i++) {
        int64_t at[CP_AXES];
        spread(dst->box->n, i, at);
        uint64_t number = numbers_read(&src->place, src->box, at);
        number = is_rounded ? rounded(number) : number;
        number += is_sum ? numbers_read(&dst->place, dst->box, at) : 0;
        numbers_write(&dst->place, dst->box, at, number);
    }
}

static void pack(const struct arg *dst, const struct arg *src)
{
    for (int64_t i = 0; i < row_count(dst->box); i++) {
        int64_t at[CP_AXES];
        spread_rows(dst->box, i, at);
        set_row(dst, at[0], at[1], at[2], row_of(src, at[0], at[1], at[2]));
    }
}

static void zero(const struct arg *dst)
{
    for (int64_t i = 0; i < row_count(dst->box); i++) {
        int64_t at[CP_AXES];
        spread_rows(dst->box, i, at);
        set_row(dst, at[0], at[1], at[2], 0);
    }
}

static void finish(const struct arg *out, const struct arg *lse,
                   const struct arg *state)
{
    for (int64_t i = 0; i < row_count(state->box); i++) {
        int64_t at[CP_AXES];
        spread_rows(state->box, i, at);
        uint64_t sum = row_of(state, at[0], at[1], at[2]);
        set_row(out, at[0], at[1], at[2], result_of(sum, CP_TENSOR_OUT));
        set_row(lse, at[0], at[1], at[2], result_of(sum, CP_TENSOR_LSE));
    }
}

static void delta(struct world *world, int rank, const struct cp_step *step)
{
    struct arg to = arg_of(world, rank, step, CP_DELTA_DELTA);
    struct arg out = arg_of(world, rank, step, CP_DELTA_OUT);
    struct arg dout = arg_of(world, rank, step, CP_DELTA_DOUT);
    struct arg dlse = arg_of(world, rank, step, CP_DELTA_DLSE);
    for (int64_t i = 0; i < row_count(to.box); i++) {
        int64_t at[CP_AXES];
        spread_rows(to.box, i, at);
        set_row(&to, at[0], at[1], at[2],
                delta_of(row_of(&out, at[0], at[1], at[2]),
                         row_of(&dout, at[0], at[1], at[2]),
                         row_of(&dlse, at[0], at[1], at[2])));
    }
}

/* The element of a mask for a pair of the block, broadcast along axes of length 1. */
static uint64_t mask_of(const struct arg *mask, int64_t b, int64_t h, int64_t i,
                        int64_t j)
{
    if (mask->box == NULL) {
        return 0;
    }
    const int64_t *n = mask->box->n;
    const int64_t at[CP_AXES] = {n[0] == 1 ? 0 : b, n[1] == 1 ? 0 : h,
                                 n[2] == 1 ? 0 : i, n[3] == 1 ? 0 : j};
    return numbers_read(&mask->place, mask->box, at);
}

/* Kv head of the block's head `h`, counted from the block's first. */
static int64_t kv_head_of(const struct world *world, const struct cp_step *step,
                          int64_t h)
{
    const struct cp_call *call = &world->plan->signature.call;
    return (step->head_first + h) / (call->heads / call->kv_heads) -
           step->kv_head_first;
}

/* Where a pair stands in its block. */
struct spot {
    int64_t b, i, h, j, g;
};

/* Goes on to the next pair of the block that may meet; false behind the last. */
static bool next_spot(const struct world *world, const struct cp_step *step,
                      const struct cp_box *q, const struct cp_box *k, int64_t *index,
                      struct spot *out)
{
    const int64_t n[CP_AXES] = {q->n[0], q->n[1], q->n[2], k->n[1]};
    while (*index < count_of(n)) {
        int64_t at[CP_AXES];
        spread(n, *index, at);
        *index += 1;
        if (!step->is_causal || step->k_first + at[3] <= step->q_first + at[1]) {
            *out = (struct spot){at[0], at[1], at[2], at[3],
                                 kv_head_of(world, step, at[2])};
            return true;
        }
    }
    return false;
}

static void attend(struct world *world, int rank, const struct cp_step *step)
{
    struct arg state = arg_of(world, rank, step, CP_ATTEND_STATE);
    struct arg q = arg_of(world, rank, step, CP_ATTEND_Q);
    struct arg k = arg_of(world, rank, step, CP_ATTEND_K);
    struct arg v = arg_of(world, rank, step, CP_ATTEND_V);
    struct arg mask = arg_of(world, rank, step, CP_ATTEND_MASK);
    struct arg out = arg_of(world, rank, step, CP_ATTEND_OUT);
    struct arg lse = arg_of(world, rank, step, CP_ATTEND_LSE);
    struct spot at;
    int64_t index = 0;
    if (step->is_first) {
        zero(&state);
    }
    while (next_spot(world, step, q.box, k.box, &index, &at)) {
        struct pair pair = {
            .q = row_of(&q, at.b, at.i, at.h),
            .k = row_of(&k, at.b, at.j, at.g),
            .v = row_of(&v, at.b, at.j, at.g),
            .mask = mask_of(&mask, at.b, at.h, at.i, at.j),
        };
        add_to_row(&state, at.b, at.i, at.h, state_of(&pair));
    }
    if (step->arg[CP_ATTEND_OUT].buffer != CP_NO_BUFFER) {
        finish(&out, &lse, &state);
    }
}

static void grad(struct world *world, int rank, const struct cp_step *step)
{
    struct arg args[CP_STEP_ARGS];
    for (int arg = 0; arg < CP_STEP_ARGS; arg++) {
        args[arg] = arg_of(world, rank, step, arg);
    }
    struct spot at;
    int64_t index = 0;
    while (
        next_spot(world, step, args[CP_GRAD_Q].box, args[CP_GRAD_K].box, &index, &at)) {
        struct pair pair = {
            .q = row_of(&args[CP_GRAD_Q], at.b, at.i, at.h),
            .k = row_of(&args[CP_GRAD_K], at.b, at.j, at.g),
            .v = row_of(&args[CP_GRAD_V], at.b, at.j, at.g),
            .mask = mask_of(&args[CP_GRAD_MASK], at.b, at.h, at.i, at.j),
            .dout = row_of(&args[CP_GRAD_DOUT], at.b, at.i, at.h),
            .lse = row_of(&args[CP_GRAD_LSE], at.b, at.i, at.h),
            .delta = row_of(&args[CP_GRAD_DELTA], at.b, at.i, at.h),
        };
        add_to_row(&args[CP_GRAD_DQ], at.b, at.i, at.h, grad_of(&pair, CP_TENSOR_DQ));
        add_to_row(&args[CP_GRAD_DK], at.b, at.j, at.g, grad_of(&pair, CP_TENSOR_DK));
        add_to_row(&args[CP_GRAD_DV], at.b, at.j, at.g, grad_of(&pair, CP_TENSOR_DV));
    }
}

static void do_step(struct world *world, int rank, const struct cp_step *step)
{
    struct arg dst = {.box = NULL};
    struct arg src = {.box = NULL};
    switch ((enum cp_step_op)step->op) {
    case CP_STEP_COPY:
    case CP_STEP_REDUCE:
        dst = arg_of(world, rank, step, CP_ARG_DST);
        src = arg_of(world, rank, step, CP_ARG_SRC);
        move(&dst, &src, step->op == CP_STEP_REDUCE);
        break;
    case CP_STEP_PACK:
        dst = arg_of(world, rank, step, CP_ARG_DST);
        src = arg_of(world, rank, step, CP_ARG_SRC);
        pack(&dst, &src);
        break;
    case CP_STEP_ZERO:
        dst = arg_of(world, rank, step, CP_ARG_DST);
        zero(&dst);
        break;
    case CP_STEP_PUBLISH:
        world->ranks[rank].signals[step->signal] = step->value;
        break;
    case CP_STEP_ATTEND:
        attend(world, rank, step);
        break;
    case CP_STEP_FINISH: {
        struct arg lse = arg_of(world, rank, step, CP_FINISH_LSE);
        dst = arg_of(world, rank, step, CP_FINISH_OUT);
        src = arg_of(world, rank, step, CP_FINISH_STATE);
        finish(&dst, &lse, &src);
        break;
    }
    case CP_STEP_DELTA:
        delta(world, rank, step);
        break;
    case CP_STEP_GRAD:
        grad(world, rank, step);
        break;
    case CP_STEP_AWAIT:
    case CP_STEP_SEND:
    case CP_STEP_RECV:
    case CP_STEP_OPS:
        break;
    }
}

/* ---- messages ---- */

/* The channel of a message, and the box that it moves. */
static struct channel *channel_of(struct world *world, int rank,
                                  const struct cp_step *step)
{
    return step->op == CP_STEP_SEND ? &world->channels[rank][step->peer]
                                    : &world->channels[step->peer][rank];
}

/* The bytes of a box that is one run. */
static void run_of(const struct arg *arg, int64_t *first, int64_t *bytes)
{
    const int64_t start[CP_AXES] = {0};
    const int64_t *n = arg->box->n;
    const int64_t last[CP_AXES] = {n[0] - 1, n[1] - 1, n[2] - 1, n[3] - 1};
    *first = numbers_byte(&arg->place, arg->box, start);
    *bytes = numbers_byte(&arg->place, arg->box, last) + arg->place.item - *first;
}

static void post(struct world *world, int rank, int32_t index)
{
    struct rank *self = &world->ranks[rank];
    const struct cp_step *step = &self->schedule->steps[index];
    bool is_send = step->op == CP_STEP_SEND;
    struct channel *channel = channel_of(world, rank, step);
    struct arg arg = arg_of(world, rank, step, is_send ? CP_ARG_SRC : CP_ARG_DST);
    int64_t first = 0;
    int64_t bytes = 0;
    self->halves[index] = -1;
    if (count_of(arg.box->n) == 0) {
        return;
    }
    if (!is_send) {
        self->halves[index] = channel->receives++;
        return;
    }
    self->halves[index] = channel->sends;
    run_of(&arg, &first, &bytes);
    struct copy *copy = &channel->copies[channel->sends++];
    copy->at = numbers_allocate((size_t)bytes, sizeof *copy->at);
    copy->bytes = bytes;
    for (int64_t i = 0; i < bytes; i++) {
        copy->at[i] = *numbers_at(&arg.place, first + i);
    }
}

static void receive(struct world *world, int rank, int32_t index)
{
    const struct rank *self = &world->ranks[rank];
    const struct cp_step *step = &self->schedule->steps[index];
    if (step->op == CP_STEP_SEND || self->halves[index] < 0) {
        return;
    }
    const struct copy *copy =
        &channel_of(world, rank, step)->copies[self->halves[index]];
    struct arg arg = arg_of(world, rank, step, CP_ARG_DST);
    int64_t first = 0;
    int64_t bytes = 0;
    run_of(&arg, &first, &bytes);
    world->is_torn = world->is_torn || bytes != copy->bytes;
    for (int64_t i = 0; i < bytes && i < copy->bytes; i++) {
        numbers_write_byte(&arg.place, first + i, copy->at[i]);
    }
}

/* Has the other half of a message been posted? */
static bool is_met(struct world *world, int rank, int32_t index)
{
    const struct rank *self = &world->ranks[rank];
    const struct cp_step *step = &self->schedule->steps[index];
    const struct channel *channel = channel_of(world, rank, step);
    return self->halves[index] <
           (step->op == CP_STEP_SEND ? channel->receives : channel->sends);
}

/* ---- lanes ---- */

static const struct cp_step *step_at(const struct rank *rank, int lane, int32_t place)
{
    return &rank->schedule->steps[rank->lanes[lane][place]];
}

static bool may_start(const struct world *world, const struct rank *rank, int lane)
{
    const struct cp_step *step = step_at(rank, lane, rank->cursors[lane]);
    bool may = step->op != CP_STEP_AWAIT ||
               world->ranks[step->peer].signals[step->signal] >= step->value;
    for (int other = 0; other < CP_LANES; other++) {
        may = may && (other == lane || rank->cursors[other] >= step->after[other]);
    }
    return may;
}

static void post_group(struct world *world, int rank, int lane)
{
    struct rank *self = &world->ranks[rank];
    int32_t end = self->cursors[lane];
    int32_t group = step_at(self, lane, end)->group;
    while (end < self->counts[lane] && cp_step_is_message(step_at(self, lane, end)) &&
           step_at(self, lane, end)->group == group) {
        post(world, rank, self->lanes[lane][end]);
        end += 1;
    }
    self->group_ends[lane] = end;
}

static bool end_group(struct world *world, int rank, int lane)
{
    struct rank *self = &world->ranks[rank];
    int32_t end = self->group_ends[lane];
    for (int32_t i = self->cursors[lane]; i < end; i++) {
        if (!is_met(world, rank, self->lanes[lane][i])) {
            return false;
        }
    }
    for (int32_t i = self->cursors[lane]; i < end; i++) {
        receive(world, rank, self->lanes[lane][i]);
    }
    self->group_ends[lane] = 0;
    self->cursors[lane] = end;
    return true;
}

/* One step, or half of a group. False where the lane has to wait or is done. */
static bool advance(struct world *world, int rank, int lane)
{
    struct rank *self = &world->ranks[rank];
    if (self->cursors[lane] == self->counts[lane]) {
        return false;
    }
    if (self->group_ends[lane] > 0) {
        return end_group(world, rank, lane);
    }
    if (!may_start(world, self, lane)) {
        return false;
    }
    const struct cp_step *step = step_at(self, lane, self->cursors[lane]);
    if (cp_step_is_message(step)) {
        post_group(world, rank, lane);
    } else {
        do_step(world, rank, step);
        self->cursors[lane] += 1;
    }
    return true;
}

/* Lanes in an order that is drawn anew for every turn, some of them further than others. */
bool numbers_run(struct world *world)
{
    uint64_t state = world->seed;
    int lanes = world->size * CP_LANES;
    bool is_done = true;
    for (int idle = 0; idle < 1;) {
        bool moved = false;
        int first = (int)(state % (uint64_t)lanes);
        for (int i = 0; i < lanes; i++) {
            int number = (first + i) % lanes;
            int rank = number / CP_LANES;
            state = mix(state, 6);
            int steps = state % 4 == 0 ? 1000 : (int)(state % 4);
            while (steps-- > 0 && advance(world, rank, number % CP_LANES)) {
                moved = true;
            }
        }
        idle = moved ? 0 : 1;
    }
    for (int i = 0; i < lanes; i++) {
        const struct rank *rank = &world->ranks[i / CP_LANES];
        is_done = is_done && rank->cursors[i % CP_LANES] == rank->counts[i % CP_LANES];
    }
    return is_done;
}
