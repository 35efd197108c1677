/* Lanes, conditions and what they wait for. */
#include "schedule/verify_run.h"

#include <stdio.h>
#include <string.h>

static struct cp_verify_at place_of(const struct cp_verify_run *run, int rank,
                                    int32_t step)
{
    struct cp_verify_at at = {
        .call = run->call,
        .rank = rank,
        .step = step,
        .op = (enum cp_step_op)run->ranks[rank].schedule->steps[step].op,
    };
    return at;
}

static enum cp_code copy_clock(struct cp_verify_run *run, const uint32_t *clock,
                               const uint32_t **out)
{
    void *block = NULL;
    CP_TRY(cp_pool_take(run->pool, run->processes, sizeof *clock, &block));
    memcpy(block, clock, (size_t)run->processes * sizeof *clock);
    *out = block;
    return CP_OK;
}

/* ---- conditions ---- */

/* The first publication of that counter that reaches `value`, or NULL. */
static const struct cp_publication *reached(const struct cp_verify_run *run,
                                            const struct cp_step *step)
{
    const struct cp_publication *it = run->ranks[step->peer].signals[step->signal];
    while (it != NULL && it->value < step->value) {
        it = it->next;
    }
    return it;
}

/* The lane whose steps must still be done before `step`, or -1. */
static int missing_lane(const struct cp_run_rank *rank, const struct cp_step *step)
{
    for (int lane = 0; lane < CP_LANES; lane++) {
        if (lane != step->lane && rank->lanes[lane].cursor < step->after[lane]) {
            return lane;
        }
    }
    return -1;
}

/* Index behind the last step of the group that starts at `first`. */
static int32_t group_end(const struct cp_run_rank *rank, const struct cp_run_lane *lane,
                         int32_t first)
{
    const struct cp_step *steps = rank->schedule->steps;
    int32_t end = first + 1;
    while (end < lane->count &&
           cp_verify_is_message((enum cp_step_op)steps[lane->steps[end]].op) &&
           steps[lane->steps[end]].group == steps[lane->steps[first]].group) {
        end += 1;
    }
    return end;
}

static bool may_start(const struct cp_verify_run *run, const struct cp_run_rank *rank,
                      const struct cp_run_lane *lane)
{
    const struct cp_step *step = &rank->schedule->steps[lane->steps[lane->cursor]];
    return missing_lane(rank, step) < 0 &&
           (step->op != CP_STEP_AWAIT || reached(run, step) != NULL);
}

static bool may_end(const struct cp_run_lane *lane)
{
    const struct cp_message *it = lane->group;
    while (it != NULL && it->mate != NULL) {
        it = it->next_in_group;
    }
    return it == NULL;
}

/* ---- doing ---- */

static struct cp_arg arg_of(const struct cp_run_rank *rank, const struct cp_step *step,
                            int arg)
{
    struct cp_op_args takes = cp_verify_op_args((enum cp_step_op)step->op);
    const struct cp_box *box = &step->arg[arg];
    struct cp_arg none = {NULL, NULL};
    if (((takes.needs | takes.may) >> arg & 1) == 0 || box->buffer == CP_NO_BUFFER) {
        return none;
    }
    return (struct cp_arg){rank->contents[box->buffer], box};
}

/* Notes what a step touches, reads first. `start` is what its lane knows then, `done` the tick
 * of its lane when it is over. */
static enum cp_code note_accesses(struct cp_verify_run *run,
                                  const struct cp_verify_at *at,
                                  const struct cp_arg args[CP_STEP_ARGS],
                                  const struct cp_run_lane *lane, int process,
                                  uint32_t done)
{
    unsigned writes = cp_verify_op_args(at->op).writes;
    for (int pass = 0; pass < 2; pass++) {
        for (int arg = 0; arg < CP_STEP_ARGS; arg++) {
            bool is_write = (writes >> arg & 1) != 0;
            if (args[arg].content == NULL || is_write != (pass == 1) ||
                cp_verify_box_is_empty(args[arg].box)) {
                continue;
            }
            const struct cp_shape *shape = &args[arg].content->shape;
            struct cp_access access = {
                .at = *at,
                .shape = args[arg].content,
                .box = args[arg].box,
                .extent = cp_verify_extent(shape, args[arg].box),
                .process = process,
                .done = done,
            };
            int arena = cp_run_arena(run->world, at->rank, &shape->buffer);
            CP_TRY(cp_access_add(run->pool, &run->logs[arena], &access, is_write,
                                 lane->now));
        }
    }
    return CP_OK;
}

static void note_written(struct cp_verify_run *run, const struct cp_verify_at *at,
                         const struct cp_arg args[CP_STEP_ARGS])
{
    unsigned writes = cp_verify_op_args(at->op).writes;
    for (int arg = 0; arg < CP_STEP_ARGS; arg++) {
        if (args[arg].content != NULL && (writes >> arg & 1) != 0 &&
            !cp_verify_box_is_empty(args[arg].box)) {
            int arena =
                cp_run_arena(run->world, at->rank, &args[arg].content->shape.buffer);
            cp_memory_wrote(&run->memory, arena, &args[arg]);
        }
    }
}

/* The lane's clock learns what the step at its cursor waited for. */
static void learn(struct cp_verify_run *run, const struct cp_run_rank *rank,
                  struct cp_run_lane *lane)
{
    const struct cp_step *step = &rank->schedule->steps[lane->steps[lane->cursor]];
    for (int other = 0; other < CP_LANES; other++) {
        if (other != step->lane && step->after[other] > 0) {
            cp_clock_join(lane->now, rank->lanes[other].done[step->after[other] - 1],
                          run->processes);
        }
    }
    if (step->op == CP_STEP_AWAIT) {
        cp_clock_join(lane->now, reached(run, step)->clock, run->processes);
    }
}

/* The steps before `end` are done. */
static enum cp_code advance(struct cp_verify_run *run, struct cp_run_lane *lane,
                            int process, int32_t end)
{
    const uint32_t *clock = NULL;
    lane->now[process] += 1;
    CP_TRY(copy_clock(run, lane->now, &clock));
    while (lane->cursor < end) {
        lane->done[lane->cursor] = clock;
        lane->cursor += 1;
        run->steps += 1;
    }
    return CP_OK;
}

static enum cp_code publish(struct cp_verify_run *run, const struct cp_verify_at *at,
                            const struct cp_step *step, const uint32_t *clock)
{
    void *block = NULL;
    struct cp_publication **end = &run->ranks[at->rank].signals[step->signal];
    while (*end != NULL) {
        if ((*end)->lane != step->lane) {
            return cp_verify_fail(at, "signal %d is published on two lanes",
                                  step->signal);
        }
        if ((*end)->value >= step->value) {
            return cp_verify_fail(at, "signal %d goes from %u to %u", step->signal,
                                  (unsigned)(*end)->value, (unsigned)step->value);
        }
        end = &(*end)->next;
    }
    CP_TRY(cp_pool_take(run->pool, 1, sizeof **end, &block));
    *end = block;
    (*end)->value = step->value;
    (*end)->lane = step->lane;
    (*end)->clock = clock;
    return CP_OK;
}

static enum cp_code do_step(struct cp_verify_run *run, int rank, int lane_number)
{
    struct cp_run_rank *self = &run->ranks[rank];
    struct cp_run_lane *lane = &self->lanes[lane_number];
    struct cp_verify_at at = place_of(run, rank, lane->steps[lane->cursor]);
    const struct cp_step *step = &self->schedule->steps[at.step];
    int process = rank * CP_LANES + lane_number;
    struct cp_arg args[CP_STEP_ARGS];
    for (int arg = 0; arg < CP_STEP_ARGS; arg++) {
        args[arg] = arg_of(self, step, arg);
    }
    learn(run, self, lane);
    CP_TRY(note_accesses(run, &at, args, lane, process, lane->now[process] + 1));
    CP_TRY(cp_meaning_step(&run->meaning, &at, step, args));
    note_written(run, &at, args);
    CP_TRY(advance(run, lane, process, lane->cursor + 1));
    return step->op == CP_STEP_PUBLISH
               ? publish(run, &at, step, lane->done[lane->cursor - 1])
               : CP_OK;
}

/* ---- messages ---- */

static enum cp_code make_message(struct cp_verify_run *run,
                                 const struct cp_verify_at *at,
                                 const struct cp_arg *arg, struct cp_message **out)
{
    void *block = NULL;
    CP_TRY(cp_pool_take(run->pool, 1, sizeof(struct cp_message), &block));
    struct cp_message *message = block;
    message->at = *at;
    message->arg = *arg;
    if (at->op == CP_STEP_SEND) {
        CP_TRY(cp_memory_parcel(&run->memory, &arg->content->shape, arg->box,
                                &message->parcel.content));
        memcpy(message->parcel_box.n, arg->box->n, sizeof arg->box->n);
        message->parcel.box = &message->parcel_box;
        CP_TRY(cp_meaning_copy(&run->meaning, at, &message->parcel, arg));
    }
    *out = message;
    return CP_OK;
}

static enum cp_code post(struct cp_verify_run *run, int rank, int lane_number,
                         int32_t index, const uint32_t *posted)
{
    struct cp_run_rank *self = &run->ranks[rank];
    struct cp_run_lane *lane = &self->lanes[lane_number];
    struct cp_verify_at at = place_of(run, rank, lane->steps[index]);
    const struct cp_step *step = &self->schedule->steps[at.step];
    const struct cp_step *first = &self->schedule->steps[lane->steps[lane->cursor]];
    int process = rank * CP_LANES + lane_number;
    int from = at.op == CP_STEP_SEND ? rank : step->peer;
    int to = at.op == CP_STEP_SEND ? step->peer : rank;
    struct cp_arg args[CP_STEP_ARGS] = {{NULL, NULL}};
    int place = at.op == CP_STEP_SEND ? CP_ARG_SRC : CP_ARG_DST;
    struct cp_message *message = NULL;
    args[place] = arg_of(self, step, place);
    for (int other = 0; other < CP_LANES; other++) {
        if (step->after[other] > first->after[other]) {
            return cp_verify_fail(
                &at,
                "comes after %d steps of lane %d, but its group starts "
                "after %d",
                (int)step->after[other], other, (int)first->after[other]);
        }
    }
    if (cp_verify_box_is_empty(args[place].box)) {
        return CP_OK; /* no bytes, no message, on either side */
    }
    CP_TRY(note_accesses(run, &at, args, lane, process, lane->now[process] + 1));
    CP_TRY(make_message(run, &at, &args[place], &message));
    message->process = process;
    message->tick = posted[process];
    message->posted = posted;
    message->next_in_group = lane->group;
    lane->group = message;
    return cp_channel_post(&run->channels[from * run->world + to], message, posted);
}

static enum cp_code start_group(struct cp_verify_run *run, int rank, int lane_number)
{
    struct cp_run_rank *self = &run->ranks[rank];
    struct cp_run_lane *lane = &self->lanes[lane_number];
    int32_t end = group_end(self, lane, lane->cursor);
    const uint32_t *posted = NULL;
    learn(run, self, lane);
    lane->now[rank * CP_LANES + lane_number] += 1;
    CP_TRY(copy_clock(run, lane->now, &posted));
    lane->group = NULL;
    lane->group_end = end;
    for (int32_t i = lane->cursor; i < end; i++) {
        CP_TRY(post(run, rank, lane_number, i, posted));
    }
    return CP_OK;
}

static enum cp_code end_group(struct cp_verify_run *run, int rank, int lane_number)
{
    struct cp_run_lane *lane = &run->ranks[rank].lanes[lane_number];
    for (struct cp_message *it = lane->group; it != NULL; it = it->next_in_group) {
        if (!cp_message_is_send(it)) {
            struct cp_arg args[CP_STEP_ARGS] = {[CP_ARG_DST] = it->arg};
            cp_clock_join(lane->now, it->mate->posted, run->processes);
            CP_TRY(
                cp_meaning_copy(&run->meaning, &it->at, &it->arg, &it->mate->parcel));
            note_written(run, &it->at, args);
        }
    }
    int32_t end = lane->group_end;
    lane->group_end = 0;
    return advance(run, lane, rank * CP_LANES + lane_number, end);
}

/* ---- all of it ---- */

/* Runs a lane as far as it goes. */
static enum cp_code run_lane(struct cp_verify_run *run, int rank, int lane_number,
                             bool *moved)
{
    struct cp_run_rank *self = &run->ranks[rank];
    struct cp_run_lane *lane = &self->lanes[lane_number];
    while (lane->cursor < lane->count) {
        const struct cp_step *step = &self->schedule->steps[lane->steps[lane->cursor]];
        if (lane->group_end > 0) {
            if (!may_end(lane)) {
                return CP_OK;
            }
            CP_TRY(end_group(run, rank, lane_number));
        } else if (!may_start(run, self, lane)) {
            return CP_OK;
        } else if (cp_verify_is_message((enum cp_step_op)step->op)) {
            CP_TRY(start_group(run, rank, lane_number));
        } else {
            CP_TRY(do_step(run, rank, lane_number));
        }
        *moved = true;
    }
    return CP_OK;
}

/* What a lane that cannot go on waits for. */
static void say_waiting(const struct cp_verify_run *run, int rank,
                        const struct cp_run_lane *lane, char *text, size_t bytes)
{
    const struct cp_run_rank *self = &run->ranks[rank];
    const struct cp_step *step = &self->schedule->steps[lane->steps[lane->cursor]];
    const struct cp_message *it = lane->group;
    int missing = missing_lane(self, step);
    if (lane->group_end > 0) {
        while (it != NULL && it->mate != NULL) {
            it = it->next_in_group;
        }
        if (it != NULL) {
            const struct cp_step *half = &self->schedule->steps[it->at.step];
            (void)snprintf(
                text, bytes, "step %d %s rank %d, which does not %s", (int)it->at.step,
                cp_message_is_send(it) ? "sends to" : "awaits", (int)half->peer,
                cp_message_is_send(it) ? "receive" : "send");
        }
    } else if (missing >= 0) {
        (void)snprintf(text, bytes, "waits for step %d of lane %d",
                       (int)step->after[missing], missing);
    } else {
        unsigned value = 0;
        const struct cp_publication *last =
            run->ranks[step->peer].signals[step->signal];
        for (; last != NULL; last = last->next) {
            value = last->value;
        }
        (void)snprintf(text, bytes,
                       "waits for signal %d of rank %d to reach %u, and it is %u",
                       step->signal, (int)step->peer, (unsigned)step->value, value);
    }
}

/* Names everybody who waits, as far as a sentence holds them. */
static enum cp_code fail_stuck(const struct cp_verify_run *run)
{
    char all[CP_STATUS_TEXT] = "";
    struct cp_verify_at first = {.call = run->call, .step = -1};
    size_t used = 0;
    for (int rank = 0; rank < run->world; rank++) {
        for (int lane = 0; lane < CP_LANES; lane++) {
            const struct cp_run_lane *it = &run->ranks[rank].lanes[lane];
            char one[160] = "";
            char place[CP_VERIFY_PLACE_TEXT];
            if (it->cursor == it->count) {
                continue;
            }
            struct cp_verify_at at = place_of(run, rank, it->steps[it->cursor]);
            say_waiting(run, rank, it, one, sizeof one);
            bool is_first = first.step < 0;
            first = is_first ? at : first;
            int wrote = snprintf(
                all + used, sizeof all - used, "%s%s%s%s", is_first ? "" : "; ",
                is_first ? "" : cp_verify_place(&at, place), is_first ? "" : " ", one);
            used += wrote > 0 ? (size_t)wrote : 0;
            if (used >= sizeof all) {
                used = sizeof all - 1;
            }
        }
    }
    return cp_verify_fail(&first, "nobody can go on: %s", all);
}

enum cp_code cp_verify_run_all(struct cp_verify_run *run)
{
    bool moved = true;
    bool is_finished = true;
    while (moved) {
        moved = false;
        for (int rank = 0; rank < run->world; rank++) {
            for (int lane = 0; lane < CP_LANES; lane++) {
                CP_TRY(run_lane(run, rank, lane, &moved));
            }
        }
    }
    for (int rank = 0; rank < run->world; rank++) {
        for (int lane = 0; lane < CP_LANES; lane++) {
            const struct cp_run_lane *it = &run->ranks[rank].lanes[lane];
            is_finished = is_finished && it->cursor == it->count;
        }
    }
    return is_finished ? CP_OK : fail_stuck(run);
}
