/* Memory, steps, lanes, outputs. */
#include "numbers.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "fuzz.h"

enum {
    MOST_WORLD = 16,
    MOST_SIGNALS = 256, /* what a step's byte can say */
    MOST_BYTES = 1 << 18
};

/* What stands in memory where no number starts: bytes inside an element or a panel, and bytes that nobody
 * has written. */
static const uint64_t inside = UINT64_C(0x1d5a1d5a1d5a1d5a);
static const uint64_t nothing = UINT64_C(0xdeaddeaddeaddead);

struct memory {
    uint64_t *at; /* one number for each byte */
    int64_t bytes;
};

/* The bytes of a message, as they were when it was sent. */
struct copy {
    uint64_t *at;
    int64_t bytes;
};

/* From one rank to another: how many halves were posted, and what was sent. */
struct channel {
    int32_t sends, receives;
    struct copy *copies;
};

struct rank {
    const struct cp_schedule *schedule;
    struct memory window, scratch;
    struct memory tensors[2][CP_TENSORS]; /* inputs, outputs; compact */
    int32_t *lanes[CP_LANES];             /* indices of steps */
    int32_t counts[CP_LANES], cursors[CP_LANES];
    int32_t group_ends[CP_LANES]; /* behind the group that was posted, or 0 */
    int32_t *halves;              /* by step: its number in its channel; -1: no bytes */
    uint32_t signals[MOST_SIGNALS];
};

struct world {
    const struct cp_plan *plan;
    int size;
    uint64_t seed;
    struct rank ranks[MOST_WORLD];
    struct channel channels[MOST_WORLD][MOST_WORLD];
    int64_t q_first[MOST_WORLD], kv_first[MOST_WORLD], cut_first[MOST_WORLD];
    int64_t q_all, kv_all, cut_all;
    bool is_torn; /* a message whose halves differ, or one that goes nowhere */
};

static void *allocate(size_t count, size_t bytes)
{
    void *block = calloc(count + 1, bytes);
    FUZZ_CHECK(block != NULL, "no memory");
    return block;
}

/* ---- numbers ---- */

static uint64_t mix(uint64_t a, uint64_t b)
{
    uint64_t z = a * UINT64_C(0x9e3779b97f4a7c15) + b + UINT64_C(0x632be59bd9b4e019);
    z = (z ^ (z >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ (z >> 27)) * UINT64_C(0x94d049bb133111eb);
    return z ^ (z >> 31);
}

/* Of a row and head, or of an element of a mask. */
static uint64_t number_of(enum cp_tensor_role role, int64_t a, int64_t b, int64_t c,
                          int64_t d)
{
    uint64_t number = mix(0, (uint64_t)role);
    number = mix(number, (uint64_t)a);
    number = mix(number, (uint64_t)b);
    number = mix(number, (uint64_t)c);
    return mix(number, (uint64_t)d);
}

/* Element `d` of a row: a multiple, so that elements add up as rows do. */
static uint64_t element_of(uint64_t row, int64_t d)
{
    return row * (uint64_t)(2 * d + 1);
}

/* A sum in the bits of what it is the sum of: nothing to add to any more. */
static uint64_t rounded(uint64_t number)
{
    return number == 0 ? 0 : mix(number, 1);
}

static uint64_t result_of(uint64_t state, enum cp_tensor_role role)
{
    return mix(mix(state, 2), (uint64_t)role);
}

static uint64_t delta_of(uint64_t out, uint64_t dout, uint64_t dlse)
{
    return mix(mix(mix(3, out), dout), dlse);
}

/* A query row that meets a key. */
struct pair {
    uint64_t q, k, v, mask;
    uint64_t dout, lse, delta; /* backward */
};

static uint64_t state_of(const struct pair *pair)
{
    return mix(mix(mix(mix(4, pair->q), pair->k), pair->v), pair->mask);
}

static uint64_t grad_of(const struct pair *pair, enum cp_tensor_role role)
{
    uint64_t number = mix(mix(mix(5, state_of(pair)), pair->dout), pair->lse);
    return mix(mix(number, pair->delta), (uint64_t)role);
}

/* ---- memory ---- */

/* A buffer where it lies. */
struct place {
    const struct cp_buffer *buffer;
    struct memory memory;
    int64_t first, stride[CP_AXES];
    int64_t item;          /* bytes of an element, or of a panel */
    bool is_panel, is_own; /* own: the rank may write there */
};

static bool is_tensor(const struct cp_buffer *buffer)
{
    return buffer->kind == CP_BUFFER_INPUT || buffer->kind == CP_BUFFER_OUTPUT;
}

static struct place place_of(struct world *world, int rank, int32_t number)
{
    const struct cp_buffer *buffer = &world->ranks[rank].schedule->buffers[number];
    const struct cp_panel *panel =
        cp_schedule_panel(world->plan, (enum cp_layout)buffer->layout);
    struct rank *owner = &world->ranks[buffer->owner];
    struct place place = {
        .buffer = buffer,
        .first = buffer->offset_bytes,
        .item = panel != NULL ? cp_panel_bytes(panel, buffer->n[1])
                              : cp_dtype_bytes((enum cp_dtype)buffer->dtype),
        .is_panel = panel != NULL,
        .is_own = buffer->owner == rank && buffer->kind != CP_BUFFER_INPUT,
    };
    memcpy(place.stride, buffer->stride_bytes, sizeof place.stride);
    if (is_tensor(buffer)) {
        const int64_t *n = buffer->n;
        place.memory = owner->tensors[buffer->kind == CP_BUFFER_OUTPUT][buffer->role];
        place.first = 0;
        place.stride[3] = place.item;
        place.stride[2] = place.stride[3] * n[3];
        place.stride[1] = place.stride[2] * n[2];
        place.stride[0] = place.stride[1] * n[1];
    } else {
        place.memory =
            buffer->kind == CP_BUFFER_WINDOW ? owner->window : owner->scratch;
    }
    return place;
}

static uint64_t *at_byte(const struct place *place, int64_t byte)
{
    FUZZ_CHECK(byte >= 0 && byte < place->memory.bytes, "byte %lld of %lld",
               (long long)byte, (long long)place->memory.bytes);
    return &place->memory.at[byte];
}

static int64_t byte_of(const struct place *place, const struct cp_box *box,
                       const int64_t at[CP_AXES])
{
    int64_t byte = place->first;
    for (int axis = 0; axis < CP_AXES; axis++) {
        bool is_inner = place->is_panel && (axis == 1 || axis == 3);
        byte += is_inner ? 0 : (box->first[axis] + at[axis]) * place->stride[axis];
    }
    FUZZ_CHECK(byte % (place->is_panel ? CP_PANEL_ALIGN : place->item) == 0,
               "byte %lld is not aligned", (long long)byte);
    return byte;
}

static void write_byte(const struct place *place, int64_t byte, uint64_t number)
{
    FUZZ_CHECK(place->is_own, "writes what is not its own");
    *at_byte(place, byte) = number;
}

/* A panel has a number for each row at its start; the rest is inside. */
static int64_t panel_row(const struct place *place, const struct cp_box *box,
                         const int64_t at[CP_AXES])
{
    return byte_of(place, box, at) + box->first[1] + at[1];
}

static void fill_inside(const struct place *place, int64_t from, int64_t to)
{
    for (int64_t byte = from; byte < to; byte++) {
        write_byte(place, byte, inside);
    }
}

static bool is_inside(const struct place *place, int64_t from, int64_t to)
{
    bool is_whole = true;
    for (int64_t byte = from; byte < to; byte++) {
        is_whole = is_whole && *at_byte(place, byte) == inside;
    }
    return is_whole;
}

static uint64_t read_element(const struct place *place, const struct cp_box *box,
                             const int64_t at[CP_AXES])
{
    int64_t byte = byte_of(place, box, at);
    return is_inside(place, byte + 1, byte + place->item) ? *at_byte(place, byte)
                                                          : nothing;
}

static void write_element(const struct place *place, const struct cp_box *box,
                          const int64_t at[CP_AXES], uint64_t number)
{
    int64_t byte = byte_of(place, box, at);
    write_byte(place, byte, number);
    fill_inside(place, byte + 1, byte + place->item);
}

/* The number of a row, if all its elements are of one row. */
static uint64_t read_row(const struct place *place, const struct cp_box *box, int64_t b,
                         int64_t i, int64_t h)
{
    int64_t at[CP_AXES] = {b, i, h, 0};
    if (place->is_panel) {
        int64_t byte = byte_of(place, box, at);
        bool is_whole =
            is_inside(place, byte + place->buffer->n[1], byte + place->item);
        return is_whole ? *at_byte(place, panel_row(place, box, at)) : nothing;
    }
    uint64_t row = read_element(place, box, at);
    for (at[3] = 1; at[3] < box->n[3]; at[3]++) {
        if (read_element(place, box, at) != element_of(row, at[3])) {
            return nothing;
        }
    }
    return row;
}

static void write_row(const struct place *place, const struct cp_box *box, int64_t b,
                      int64_t i, int64_t h, uint64_t row)
{
    int64_t at[CP_AXES] = {b, i, h, 0};
    if (place->is_panel) {
        int64_t byte = byte_of(place, box, at);
        write_byte(place, panel_row(place, box, at), row);
        fill_inside(place, byte + place->buffer->n[1], byte + place->item);
        return;
    }
    for (at[3] = 0; at[3] < box->n[3]; at[3]++) {
        write_element(place, box, at, element_of(row, at[3]));
    }
}

static int64_t count_of(const int64_t n[CP_AXES])
{
    return n[0] * n[1] * n[2] * n[3];
}

/* The place of number `index` of a box, in row-major order. */
static void spread(const int64_t n[CP_AXES], int64_t index, int64_t at[CP_AXES])
{
    for (int axis = CP_AXES - 1; axis >= 0; axis--) {
        at[axis] = index % n[axis];
        index /= n[axis];
    }
}

/* The same, of the box's rows. */
static void spread_rows(const struct cp_box *box, int64_t index, int64_t at[CP_AXES])
{
    const int64_t n[CP_AXES] = {box->n[0], box->n[1], box->n[2], 1};
    spread(n, index, at);
}

static int64_t row_count(const struct cp_box *box)
{
    return box->n[0] * box->n[1] * box->n[2];
}

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
        of.place = place_of(world, rank, of.box->buffer);
    }
    return of;
}

static uint64_t row_of(const struct arg *arg, int64_t b, int64_t i, int64_t h)
{
    return arg->box == NULL ? 0 : read_row(&arg->place, arg->box, b, i, h);
}

static void set_row(const struct arg *arg, int64_t b, int64_t i, int64_t h,
                    uint64_t row)
{
    if (arg->box != NULL) {
        write_row(&arg->place, arg->box, b, i, h, row);
    }
}

static void add_to_row(const struct arg *arg, int64_t b, int64_t i, int64_t h,
                       uint64_t addend)
{
    uint64_t row = row_of(arg, b, i, h);
    set_row(arg, b, i, h, row == nothing ? nothing : row + addend);
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
        uint64_t number = read_element(&src->place, src->box, at);
        number = is_rounded ? rounded(number) : number;
        number += is_sum ? read_element(&dst->place, dst->box, at) : 0;
        write_element(&dst->place, dst->box, at, number);
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
    return read_element(&mask->place, mask->box, at);
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
    struct spot at;
    int64_t index = 0;
    while (next_spot(world, step, q.box, k.box, &index, &at)) {
        struct pair pair = {
            .q = row_of(&q, at.b, at.i, at.h),
            .k = row_of(&k, at.b, at.j, at.g),
            .v = row_of(&v, at.b, at.j, at.g),
            .mask = mask_of(&mask, at.b, at.h, at.i, at.j),
        };
        add_to_row(&state, at.b, at.i, at.h, state_of(&pair));
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

static bool is_message(const struct cp_step *step)
{
    return step->op == CP_STEP_SEND || step->op == CP_STEP_RECV;
}

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
    *first = byte_of(&arg->place, arg->box, start);
    *bytes = byte_of(&arg->place, arg->box, last) + arg->place.item - *first;
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
    copy->at = allocate((size_t)bytes, sizeof *copy->at);
    copy->bytes = bytes;
    for (int64_t i = 0; i < bytes; i++) {
        copy->at[i] = *at_byte(&arg.place, first + i);
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
        write_byte(&arg.place, first + i, copy->at[i]);
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
    while (end < self->counts[lane] && is_message(step_at(self, lane, end)) &&
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
    if (is_message(step)) {
        post_group(world, rank, lane);
    } else {
        do_step(world, rank, step);
        self->cursors[lane] += 1;
    }
    return true;
}

/* Lanes in an order that is drawn anew for every turn, some of them further than others. */
static bool run_all(struct world *world)
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
    struct memory memory = {allocate((size_t)bytes, sizeof *memory.at), bytes};
    for (int64_t i = 0; i < bytes; i++) {
        memory.at[i] = nothing;
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
        struct place place = place_of(world, rank, i);
        place.is_own = true;
        struct cp_box all = {
            .n = {buffer->n[0], buffer->n[1], buffer->n[2], buffer->n[3]}};
        for (int64_t j = 0; !is_output && j < count_of(all.n); j++) {
            int64_t at[CP_AXES];
            spread(all.n, j, at);
            uint64_t number =
                input_number(world, rank, (enum cp_tensor_role)buffer->role, at);
            write_element(&place, &all, at,
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
    struct place place = place_of(world, rank, number);
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
            if (read_element(&place, &all, at) !=
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
    rank->halves = allocate(steps, sizeof *rank->halves);
    for (int lane = 0; lane < CP_LANES; lane++) {
        rank->lanes[lane] = allocate(steps, sizeof *rank->lanes[lane]);
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
        channel->copies = allocate(steps, sizeof *channel->copies);
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
    struct world *of = allocate(1, sizeof *of);
    bool is_right = true;
    if (create_world(of, of_call, world, seed)) {
        is_right = run_all(of) && !of->is_torn;
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
