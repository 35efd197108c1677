/* Boxes to memory, steps to table entries. */
#include "exec/run.h"

#include <string.h>

#include "base/checked.h"
#include "exec/run_order.h"
#include "schedule/box_meet.h"

static int64_t kernel_scratch_bytes(const struct cp_schedule *schedule)
{
    switch ((enum cp_op)schedule->plan->signature.call.op) {
    case CP_OP_ATTENTION:
        return cp_round_up(schedule->plan->format.scratch_bytes, CP_PANEL_ALIGN);
    case CP_OP_ATTENTION_BACKWARD:
        return cp_round_up(schedule->plan->format.grad_scratch_bytes, CP_PANEL_ALIGN);
    case CP_OP_NONE:
    case CP_OP_SHARD:
    case CP_OP_GATHER:
    case CP_OP_REDUCE_SCATTER:
    case CP_OP_AGREE:
        break;
    }
    return 0;
}

int64_t cp_run_workspace_bytes(const struct cp_schedule *schedule, int threads)
{
    return cp_round_up(schedule->scratch_bytes, CP_PANEL_ALIGN) +
           kernel_scratch_bytes(schedule) * threads;
}

/* The first step of the lane at or behind `from`. */
static int32_t next_on_lane(const struct cp_schedule *schedule, int lane, int32_t from)
{
    while (from < schedule->step_count && schedule->steps[from].lane != lane) {
        from += 1;
    }
    return from;
}

static int largest_group(const struct cp_schedule *schedule)
{
    int largest = 0;
    for (int lane = 0; lane < CP_LANES; lane++) {
        int in_group = 0;
        int group = -1;
        for (int32_t at = next_on_lane(schedule, lane, 0); at < schedule->step_count;
             at = next_on_lane(schedule, lane, at + 1)) {
            const struct cp_step *step = &schedule->steps[at];
            if (cp_step_is_message(step)) {
                in_group = step->group == group ? in_group + 1 : 1;
                group = step->group;
                largest = in_group > largest ? in_group : largest;
            }
        }
    }
    return largest;
}

static int most_in_a_row(const struct cp_schedule *schedule, enum cp_step_op op)
{
    int most = 0;
    for (int lane = 0; lane < CP_LANES; lane++) {
        int in_a_row = 0;
        for (int32_t at = next_on_lane(schedule, lane, 0); at < schedule->step_count;
             at = next_on_lane(schedule, lane, at + 1)) {
            in_a_row = schedule->steps[at].op == op ? in_a_row + 1 : 0;
            most = in_a_row > most ? in_a_row : most;
        }
    }
    return most;
}

static size_t larger(size_t a, size_t b)
{
    return a > b ? a : b;
}

size_t cp_run_room_bytes(const struct cp_schedule *schedule)
{
    size_t group = (size_t)largest_group(schedule) * sizeof(struct cp_xfer);
    size_t copies =
        (size_t)most_in_a_row(schedule, CP_STEP_COPY) * sizeof(struct cp_copy);
    size_t waits =
        (size_t)most_in_a_row(schedule, CP_STEP_AWAIT) * sizeof(struct cp_comm_wait);
    return cp_run_order_bytes(schedule) + larger(group, larger(copies, waits));
}

static void *kernel_scratch(const struct cp_run *run)
{
    return run->env.scratch + cp_round_up(run->schedule->scratch_bytes, CP_PANEL_ALIGN);
}

void cp_run_init(struct cp_run *run, const struct cp_run_env *env,
                 const struct cp_schedule *schedule,
                 const struct cp_view tensors[CP_TENSORS], void *room)
{
    memset(run, 0, sizeof *run);
    run->env = *env;
    run->schedule = schedule;
    run->is_awaited = room;
    run->gathered = (char *)room + cp_run_order_bytes(schedule);
    memcpy(run->tensors, tensors, sizeof run->tensors);
    run->spread = (struct cp_spread){
        .pool = env->pool,
        .device = env->device,
        .kernel = env->kernel,
        .format = &schedule->plan->format,
        .scratch_bytes = kernel_scratch_bytes(schedule),
    };
    for (int lane = 0; lane < CP_LANES; lane++) {
        bool is_own = lane != CP_LANE_COMPUTE && cp_device_is_async(env->device);
        run->stream[lane] =
            is_own ? env->device->ops->lane(env->device, lane) : env->stream;
        run->cursor[lane] = next_on_lane(schedule, lane, 0);
    }
}

/* The memory that a box names; data NULL for no box. */
static struct cp_view view_of(const struct cp_run *run, const struct cp_box *box)
{
    struct cp_view whole = {.data = NULL};
    if (box->buffer == CP_NO_BUFFER) {
        return whole;
    }
    const struct cp_buffer *buffer = &run->schedule->buffers[box->buffer];
    switch ((enum cp_buffer_kind)buffer->kind) {
    case CP_BUFFER_INPUT:
    case CP_BUFFER_OUTPUT:
        return cp_view_box(&run->tensors[buffer->role], box->first, box->n);
    case CP_BUFFER_WINDOW:
        whole.data = run->env.comm->ops->window(run->env.comm, buffer->owner);
        break;
    case CP_BUFFER_SCRATCH:
        whole.data = run->env.scratch;
        break;
    }
    whole.data += buffer->offset_bytes;
    whole.dtype = (enum cp_dtype)buffer->dtype;
    memcpy(whole.n, buffer->n, sizeof whole.n);
    memcpy(whole.stride, buffer->stride_bytes, sizeof whole.stride);
    return cp_view_box(&whole, box->first, box->n);
}

static struct cp_view arg_of(const struct cp_run *run, const struct cp_step *step,
                             int arg)
{
    return view_of(run, &step->arg[arg]);
}

static struct cp_place place_of(const struct cp_run *run, const struct cp_step *step)
{
    struct cp_place place = {
        .q_first = step->q_first,
        .k_first = step->k_first,
        .head_first = step->head_first,
        .kv_head_first = step->kv_head_first,
        .heads_per_kv = run->schedule->plan->heads_per_kv,
        .is_causal = step->is_causal,
    };
    return place;
}

static enum cp_code attend(const struct cp_run *run, const struct cp_step *step)
{
    struct cp_attend_args args = {
        .q = arg_of(run, step, CP_ATTEND_Q),
        .k = arg_of(run, step, CP_ATTEND_K),
        .v = arg_of(run, step, CP_ATTEND_V),
        .mask = arg_of(run, step, CP_ATTEND_MASK),
        .state = arg_of(run, step, CP_ATTEND_STATE),
        .is_first = step->is_first,
        .out = arg_of(run, step, CP_ATTEND_OUT),
        .lse = arg_of(run, step, CP_ATTEND_LSE),
        .place = place_of(run, step),
        .scale = run->schedule->plan->scale,
        .backend = (enum cp_backend)run->schedule->plan->signature.call.backend,
        .package = run->env.package,
        .scratch = kernel_scratch(run),
    };
    return cp_spread_attend(&run->spread, &args, run->stream[step->lane]);
}

static enum cp_code finish(const struct cp_run *run, const struct cp_step *step)
{
    struct cp_finish_args args = {
        .state = arg_of(run, step, CP_FINISH_STATE),
        .out = arg_of(run, step, CP_FINISH_OUT),
        .lse = arg_of(run, step, CP_FINISH_LSE),
    };
    return cp_spread_finish(&run->spread, &args, run->stream[step->lane]);
}

static enum cp_code delta(const struct cp_run *run, const struct cp_step *step)
{
    struct cp_delta_args args = {
        .out = arg_of(run, step, CP_DELTA_OUT),
        .dout = arg_of(run, step, CP_DELTA_DOUT),
        .dlse = arg_of(run, step, CP_DELTA_DLSE),
        .delta = arg_of(run, step, CP_DELTA_DELTA),
    };
    return cp_spread_delta(&run->spread, &args, run->stream[step->lane]);
}

static enum cp_code grad(const struct cp_run *run, const struct cp_step *step)
{
    struct cp_grad_args args = {
        .q = arg_of(run, step, CP_GRAD_Q),
        .k = arg_of(run, step, CP_GRAD_K),
        .v = arg_of(run, step, CP_GRAD_V),
        .dout = arg_of(run, step, CP_GRAD_DOUT),
        .lse = arg_of(run, step, CP_GRAD_LSE),
        .delta = arg_of(run, step, CP_GRAD_DELTA),
        .mask = arg_of(run, step, CP_GRAD_MASK),
        .dq = arg_of(run, step, CP_GRAD_DQ),
        .dk = arg_of(run, step, CP_GRAD_DK),
        .dv = arg_of(run, step, CP_GRAD_DV),
        .place = place_of(run, step),
        .scale = run->schedule->plan->scale,
        .has_dlse = run->schedule->plan->signature.call.want_lse != 0,
        .backend = (enum cp_backend)run->schedule->plan->signature.call.backend,
        .package = run->env.package,
        .scratch = kernel_scratch(run),
    };
    return cp_spread_grad(&run->spread, &args, run->stream[step->lane]);
}

static enum cp_code pack(const struct cp_run *run, const struct cp_step *step)
{
    struct cp_view dst = arg_of(run, step, CP_ARG_DST);
    struct cp_view src = arg_of(run, step, CP_ARG_SRC);
    bool is_key =
        run->schedule->buffers[step->arg[CP_ARG_DST].buffer].layout == CP_LAYOUT_K;
    struct cp_stream *stream = run->stream[step->lane];
    return cp_spread_pack(&run->spread, is_key, &dst, &src, stream);
}

static enum cp_code add(const struct cp_run *run, const struct cp_step *step)
{
    struct cp_view dst = arg_of(run, step, CP_ARG_DST);
    struct cp_view src = arg_of(run, step, CP_ARG_SRC);
    return cp_spread_add(&run->spread, &dst, &src, run->stream[step->lane]);
}

static bool is_of_peer(const struct cp_run *run, const struct cp_box *box)
{
    const struct cp_buffer *buffer = &run->schedule->buffers[box->buffer];
    return buffer->kind == CP_BUFFER_WINDOW && buffer->owner != run->env.comm->rank;
}

static struct cp_copy copy_of(const struct cp_run *run, const struct cp_step *step)
{
    return (struct cp_copy){.dst = arg_of(run, step, CP_ARG_DST),
                            .src = arg_of(run, step, CP_ARG_SRC),
                            .is_with_peer = is_of_peer(run, &step->arg[CP_ARG_SRC]) ||
                                            is_of_peer(run, &step->arg[CP_ARG_DST])};
}

/* Copies that share no memory go together, with other lanes' between them in the list; waits
 * only where they follow each other there, since nobody may wait in front of what is published
 * in between (run_order.c). */
static bool suits_those_before(const struct cp_run *run, int32_t at, int count)
{
    const struct cp_schedule *schedule = run->schedule;
    const struct cp_step *step = &schedule->steps[at];
    int32_t first = run->cursor[step->lane];
    if (step->op == CP_STEP_AWAIT) {
        return at == first + count;
    }
    bool is_free = true;
    for (int32_t before = first; is_free && before < at;
         before = next_on_lane(schedule, step->lane, before + 1)) {
        is_free = cp_copies_are_free(schedule, &schedule->steps[before], step);
    }
    return is_free;
}

/* May the step at `at` be done with the `count` of its lane from the cursor up to it? A launch
 * is saved; but nobody may have to wait longer for those before. */
static bool joins(const struct cp_run *run, int32_t at, int count)
{
    const struct cp_step *step = &run->schedule->steps[at];
    int lane = step->lane;
    bool joins = step->op == run->schedule->steps[run->cursor[lane]].op &&
                 !cp_run_is_awaited(run, lane, run->done[lane] + count);
    for (int other = 0; other < CP_LANES; other++) {
        joins = joins && !cp_run_must_await(run, step, other);
    }
    return joins && suits_those_before(run, at, count);
}

/* How many copies, or waits, from the cursor on go together. On the host one, since messages are
 * looked after between two steps. */
static int count_joined(const struct cp_run *run, int lane)
{
    const struct cp_schedule *schedule = run->schedule;
    bool may_join = cp_device_is_async(run->env.device);
    int32_t at = run->cursor[lane];
    int count = 0;
    do {
        count += 1;
        at = next_on_lane(schedule, lane, at + 1);
    } while (may_join && at < schedule->step_count && joins(run, at, count));
    return count;
}

/* `done`: how many steps that were. */
static enum cp_code copy(struct cp_run *run, int lane, int *done)
{
    struct cp_copy *copies = run->gathered;
    int32_t at = run->cursor[lane];
    *done = count_joined(run, lane);
    for (int i = 0; i < *done; i++) {
        copies[i] = copy_of(run, &run->schedule->steps[at]);
        at = next_on_lane(run->schedule, lane, at + 1);
    }
    return cp_spread_copy(&run->spread, copies, *done, run->stream[lane]);
}

static enum cp_code zero(const struct cp_run *run, const struct cp_step *step)
{
    const struct cp_buffer *buffer =
        &run->schedule->buffers[step->arg[CP_ARG_DST].buffer];
    struct cp_view dst = arg_of(run, step, CP_ARG_DST);
    return cp_spread_zero(&run->spread, dst.data, buffer->bytes,
                          run->stream[step->lane]);
}

static enum cp_code publish(struct cp_run *run, const struct cp_step *step)
{
    run->published[step->lane] = run->done[step->lane] + 1;
    return run->env.comm->ops->publish(run->env.comm, step->signal, step->value,
                                       run->stream[step->lane]);
}

static struct cp_comm_wait wait_of(const struct cp_step *step)
{
    return (struct cp_comm_wait){
        .peer = step->peer, .signal = step->signal, .value = step->value};
}

static enum cp_code await(struct cp_run *run, int lane, int *done)
{
    struct cp_comm *comm = run->env.comm;
    struct cp_comm_wait *waits = run->gathered;
    *done = count_joined(run, lane);
    for (int i = 0; i < *done; i++) {
        waits[i] = wait_of(&run->schedule->steps[run->cursor[lane] + i]);
    }
    return comm->ops->reached(comm, waits, *done, run->stream[lane]);
}

/* The steps of the group at the cursor, all on this lane: their number, and their
 * transfers in run->gathered. */
static int gather_group(struct cp_run *run, int lane)
{
    const struct cp_schedule *schedule = run->schedule;
    struct cp_xfer *xfers = run->gathered;
    int32_t at = run->cursor[lane];
    int group = schedule->steps[at].group;
    int count = 0;
    while (at < schedule->step_count) {
        const struct cp_step *step = &schedule->steps[at];
        if (!cp_step_is_message(step) || step->group != group) {
            break;
        }
        bool is_send = step->op == CP_STEP_SEND;
        const struct cp_box *box = &step->arg[is_send ? CP_ARG_SRC : CP_ARG_DST];
        xfers[count] = (struct cp_xfer){.data = view_of(run, box).data,
                                        .bytes = (size_t)cp_box_bytes(schedule, box),
                                        .peer = step->peer,
                                        .is_send = is_send};
        count += 1;
        at = next_on_lane(schedule, lane, at + 1);
    }
    return count;
}

/* Posts the group at the cursor once, then asks whether it has moved. `done`: its
 * number of steps. */
static enum cp_code exchange(struct cp_run *run, int lane, int *done)
{
    struct cp_comm *comm = run->env.comm;
    *done = gather_group(run, lane);
    if (!run->is_posted[lane]) {
        CP_TRY(comm->ops->post(comm, run->gathered, *done, run->stream[lane],
                               &run->ticket[lane]));
        run->is_posted[lane] = true;
    }
    CP_TRY(comm->ops->test(comm, run->ticket[lane]));
    run->is_posted[lane] = false;
    return CP_OK;
}

/* Does what the step at the lane's cursor says. `done`: how many steps that were. */
static enum cp_code do_step(struct cp_run *run, int lane, int *done)
{
    const struct cp_step *step = &run->schedule->steps[run->cursor[lane]];
    *done = 1;
    switch ((enum cp_step_op)step->op) {
    case CP_STEP_COPY:
        return copy(run, lane, done);
    case CP_STEP_REDUCE:
        return add(run, step);
    case CP_STEP_ZERO:
        return zero(run, step);
    case CP_STEP_PACK:
        return pack(run, step);
    case CP_STEP_PUBLISH:
        return publish(run, step);
    case CP_STEP_AWAIT:
        return await(run, lane, done);
    case CP_STEP_SEND:
    case CP_STEP_RECV:
        return exchange(run, lane, done);
    case CP_STEP_ATTEND:
        return attend(run, step);
    case CP_STEP_FINISH:
        return finish(run, step);
    case CP_STEP_DELTA:
        return delta(run, step);
    case CP_STEP_GRAD:
        return grad(run, step);
    case CP_STEP_OPS:
        break;
    }
    return cp_fail(CP_ERR_INTERNAL, "step %d has the unknown operation %d",
                   run->cursor[lane], step->op);
}

/* Are the steps of the other lanes done that the lane's next one needs? */
static bool may_go(const struct cp_run *run, int lane)
{
    const struct cp_step *step = &run->schedule->steps[run->cursor[lane]];
    for (int other = 0; other < CP_LANES; other++) {
        if (other != lane && run->done[other] < step->after[other]) {
            return false;
        }
    }
    return true;
}

/* The same, noted; not where it only asks how far somebody is. */
static enum cp_code do_and_note(struct cp_run *run, int lane, int *done)
{
    const struct cp_step *step = &run->schedule->steps[run->cursor[lane]];
    enum cp_step_op op = (enum cp_step_op)step->op;
    if (op == CP_STEP_AWAIT || run->is_posted[lane]) {
        return do_step(run, lane, done);
    }
    cp_recorder_begin(run->env.recorder, cp_step_name(op), run->cursor[lane],
                      cp_step_is_message(step) ? step->peer : -1);
    enum cp_code code = do_step(run, lane, done);
    cp_recorder_end(run->env.recorder);
    return code;
}

/* One step of the lane, or a group of messages or of copies. CP_AGAIN where it must wait. */
static enum cp_code advance(struct cp_run *run, int lane)
{
    bool is_async = cp_device_is_async(run->env.device);
    int done = 0;
    if (!cp_run_has_step(run, lane) || !may_go(run, lane)) {
        return CP_AGAIN;
    }
    if (is_async && !run->is_posted[lane]) {
        CP_TRY(cp_run_await_lanes(run, lane));
    }
    CP_TRY(do_and_note(run, lane, &done));
    for (int step = 0; step < done; step++) {
        run->cursor[lane] = next_on_lane(run->schedule, lane, run->cursor[lane] + 1);
    }
    run->done[lane] += done;
    return is_async ? cp_run_record_lane(run, lane, done) : CP_OK;
}

/* All steps, in the order of the schedule: nothing here waits for a peer. */
static enum cp_code enqueue_steps(struct cp_run *run)
{
    for (int32_t at = 0; at < run->schedule->step_count; at++) {
        int lane = run->schedule->steps[at].lane;
        /* A step of a group has been enqueued with the group's first. */
        while (run->cursor[lane] <= at) {
            enum cp_code code = advance(run, lane);
            if (code == CP_AGAIN) {
                return cp_fail(CP_ERR_INTERNAL,
                               "%s: step %d cannot be enqueued before others end",
                               run->env.operation, (int)at);
            }
            CP_TRY(code);
        }
    }
    return CP_OK;
}

static enum cp_code enqueue_all(struct cp_run *run)
{
    enum cp_code code = CP_OK;
    CP_TRY_GOTO(code, cp_run_fork(run), out);
    CP_TRY_GOTO(code, enqueue_steps(run), out);
    CP_TRY_GOTO(code, cp_run_join(run), out);
out:
    if (code != CP_OK) {
        cp_run_join_failed(run);
    }
    return code;
}

enum cp_code cp_run_poll(struct cp_run *run)
{
    bool moved = true;
    bool is_done = false;
    if (cp_device_is_async(run->env.device)) {
        return enqueue_all(run);
    }
    if (!run->is_begun) {
        CP_TRY(cp_run_tell(run));
        run->is_begun = true;
    }
    while (moved) {
        moved = false;
        is_done = true;
        /* One step a lane and round: messages are looked after between two blocks of
         * compute. */
        for (int lane = 0; lane < CP_LANES; lane++) {
            enum cp_code code = advance(run, lane);
            if (code != CP_OK && code != CP_AGAIN) {
                return code;
            }
            moved = moved || code == CP_OK;
            is_done = is_done && !cp_run_has_step(run, lane);
        }
    }
    return is_done ? CP_OK : CP_AGAIN;
}

/* What the lanes wait for: their number, in `waits`. */
static int list_waits(const struct cp_run *run, struct cp_comm_wait waits[CP_LANES])
{
    int count = 0;
    for (int lane = 0; lane < CP_LANES; lane++) {
        if (!cp_run_has_step(run, lane) || !may_go(run, lane)) {
            continue;
        }
        const struct cp_step *step = &run->schedule->steps[run->cursor[lane]];
        if (run->is_posted[lane]) {
            waits[count] =
                (struct cp_comm_wait){.is_ticket = true, .value = run->ticket[lane]};
        } else {
            waits[count] = wait_of(step);
        }
        count += 1;
    }
    return count;
}

enum cp_code cp_run_finish(struct cp_run *run, double timeout)
{
    struct cp_comm *comm = run->env.comm;
    for (;;) {
        struct cp_comm_wait waits[CP_LANES];
        enum cp_code code = cp_run_poll(run);
        if (code != CP_AGAIN) {
            return code;
        }
        int count = list_waits(run, waits);
        if (count == 0) {
            return cp_fail(CP_ERR_INTERNAL,
                           "%s: the steps of the schedule wait for each other",
                           run->env.operation);
        }
        CP_TRY(comm->ops->wait(comm, waits, count, run->env.operation,
                               cp_deadline_in(timeout)));
    }
}
