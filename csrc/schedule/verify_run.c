/* What steps mean and what their lanes know. */
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
        .op = (enum cp_step_op)run->walk.ranks[rank].schedule->steps[step].op,
    };
    return at;
}

/* Number of the step that stands at that place of the lane. */
static int32_t number_of(const struct cp_verify_run *run, int rank, int lane,
                         int32_t place)
{
    return run->walk.ranks[rank].lanes[lane].steps[place];
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
static void learn(struct cp_verify_run *run, int rank, int lane)
{
    const struct cp_step *step = cp_walk_step(&run->walk, rank, lane);
    uint32_t *now = run->ranks[rank].lanes[lane].now;
    for (int other = 0; other < CP_LANES; other++) {
        if (other != lane && step->after[other] > 0) {
            int32_t last = number_of(run, rank, other, step->after[other] - 1);
            cp_clock_join(now, run->ranks[rank].done[last], run->processes);
        }
    }
    if (step->op == CP_STEP_AWAIT) {
        int32_t publication = cp_walk_publication(&run->walk, step);
        cp_clock_join(now, run->ranks[step->peer].done[publication], run->processes);
    }
}

/* The lane's steps from its cursor up to `end` are over. */
static enum cp_code note_done(struct cp_verify_run *run, int rank, int lane,
                              int32_t end)
{
    const uint32_t *clock = NULL;
    struct cp_run_rank *self = &run->ranks[rank];
    self->lanes[lane].now[rank * CP_LANES + lane] += 1;
    CP_TRY(copy_clock(run, self->lanes[lane].now, &clock));
    for (int32_t at = run->walk.ranks[rank].lanes[lane].cursor; at < end; at++) {
        self->done[number_of(run, rank, lane, at)] = clock;
    }
    return CP_OK;
}

/* Counters are published on one lane, and only grow. */
static enum cp_code check_publish(const struct cp_verify_run *run,
                                  const struct cp_verify_at *at,
                                  const struct cp_step *step)
{
    const struct cp_walk_rank *self = &run->walk.ranks[at->rank];
    if (self->last[step->signal] < 0) {
        return CP_OK;
    }
    const struct cp_step *last = &self->schedule->steps[self->last[step->signal]];
    if (last->lane != step->lane) {
        return cp_verify_fail(at, "signal %d is published on two lanes", step->signal);
    }
    return last->value < step->value
               ? CP_OK
               : cp_verify_fail(at, "signal %d goes from %u to %u", step->signal,
                                (unsigned)last->value, (unsigned)step->value);
}

static enum cp_code do_step(struct cp_walk *walk, int rank, int lane_number)
{
    struct cp_verify_run *run = walk->meaning;
    struct cp_run_rank *self = &run->ranks[rank];
    struct cp_run_lane *lane = &self->lanes[lane_number];
    const struct cp_step *step = cp_walk_step(walk, rank, lane_number);
    int32_t cursor = walk->ranks[rank].lanes[lane_number].cursor;
    struct cp_verify_at at =
        place_of(run, rank, number_of(run, rank, lane_number, cursor));
    int process = rank * CP_LANES + lane_number;
    struct cp_arg args[CP_STEP_ARGS];
    for (int arg = 0; arg < CP_STEP_ARGS; arg++) {
        args[arg] = arg_of(self, step, arg);
    }
    learn(run, rank, lane_number);
    CP_TRY(note_accesses(run, &at, args, lane, process, lane->now[process] + 1));
    CP_TRY(cp_meaning_step(&run->meaning, &at, step, args));
    note_written(run, &at, args);
    CP_TRY(note_done(run, rank, lane_number, cursor + 1));
    return step->op == CP_STEP_PUBLISH ? check_publish(run, &at, step) : CP_OK;
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
    struct cp_verify_at at =
        place_of(run, rank, number_of(run, rank, lane_number, index));
    const struct cp_step *step = &run->walk.ranks[rank].schedule->steps[at.step];
    const struct cp_step *first = cp_walk_step(&run->walk, rank, lane_number);
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

static enum cp_code post_group(struct cp_walk *walk, int rank, int lane_number)
{
    struct cp_verify_run *run = walk->meaning;
    const struct cp_walk_lane *at = &walk->ranks[rank].lanes[lane_number];
    struct cp_run_lane *lane = &run->ranks[rank].lanes[lane_number];
    const uint32_t *posted = NULL;
    learn(run, rank, lane_number);
    lane->now[rank * CP_LANES + lane_number] += 1;
    CP_TRY(copy_clock(run, lane->now, &posted));
    lane->group = NULL;
    for (int32_t i = at->cursor; i < at->group_end; i++) {
        CP_TRY(post(run, rank, lane_number, i, posted));
    }
    return CP_OK;
}

/* The first message of the group that has not met its other half; NULL: all have. */
static const struct cp_message *first_unmet(const struct cp_run_lane *lane)
{
    const struct cp_message *it = lane->group;
    while (it != NULL && it->mate != NULL) {
        it = it->next_in_group;
    }
    return it;
}

static bool is_group_met(const struct cp_walk *walk, int rank, int lane)
{
    const struct cp_verify_run *run = walk->meaning;
    return first_unmet(&run->ranks[rank].lanes[lane]) == NULL;
}

static enum cp_code end_group(struct cp_walk *walk, int rank, int lane_number)
{
    struct cp_verify_run *run = walk->meaning;
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
    return note_done(run, rank, lane_number,
                     walk->ranks[rank].lanes[lane_number].group_end);
}

/* ---- all of it ---- */

/* What a lane that cannot go on waits for. */
static void say_waiting(const struct cp_verify_run *run, int rank, int lane, char *text,
                        size_t bytes)
{
    const struct cp_walk_rank *self = &run->walk.ranks[rank];
    const struct cp_step *step = cp_walk_step(&run->walk, rank, lane);
    const struct cp_message *unmet = first_unmet(&run->ranks[rank].lanes[lane]);
    int missing = cp_walk_missing_lane(&run->walk, rank, lane);
    int32_t first = cp_walk_first(&run->walk, rank);
    if (self->lanes[lane].group_end > 0) {
        if (unmet != NULL) {
            const struct cp_step *half = &self->schedule->steps[unmet->at.step];
            (void)snprintf(
                text, bytes, "step %d %s rank %d, which does not %s",
                (int)unmet->at.step, cp_message_is_send(unmet) ? "sends to" : "awaits",
                (int)half->peer, cp_message_is_send(unmet) ? "receive" : "send");
        }
    } else if (self->lanes[lane].steps[self->lanes[lane].cursor] != first) {
        (void)snprintf(text, bytes, "comes behind step %d in the list", (int)first);
    } else if (missing >= 0) {
        (void)snprintf(text, bytes, "waits for step %d of lane %d",
                       (int)step->after[missing], missing);
    } else {
        const struct cp_walk_rank *peer = &run->walk.ranks[step->peer];
        int32_t last = peer->last[step->signal];
        (void)snprintf(text, bytes,
                       "waits for signal %d of rank %d to reach %u, and it is %u",
                       step->signal, (int)step->peer, (unsigned)step->value,
                       last < 0 ? 0 : (unsigned)peer->schedule->steps[last].value);
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
            const struct cp_walk_lane *it = &run->walk.ranks[rank].lanes[lane];
            char one[160] = "";
            char place[CP_VERIFY_PLACE_TEXT];
            if (it->cursor == it->count) {
                continue;
            }
            struct cp_verify_at at = place_of(run, rank, it->steps[it->cursor]);
            say_waiting(run, rank, lane, one, sizeof one);
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

static const struct cp_walk_ops meaning_ops = {
    .step = do_step,
    .post = post_group,
    .is_met = is_group_met,
    .arrive = end_group,
};

enum cp_code cp_verify_run_all(struct cp_verify_run *run)
{
    run->walk.ops = &meaning_ops;
    run->walk.meaning = run;
    run->walk.is_in_order = true; /* and so nobody is blocked in any other order */
    CP_TRY(cp_walk_run(&run->walk));
    return cp_walk_is_over(&run->walk) ? CP_OK : fail_stuck(run);
}
