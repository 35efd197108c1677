/* Streams, and events between them. */
#include "exec/run_order.h"

#include <string.h>

#include "base/checked.h"
#include "base/status.h"

size_t cp_run_order_bytes(const struct cp_schedule *schedule)
{
    int64_t places = (int64_t)CP_LANES * (schedule->step_count + 1);
    return (size_t)cp_round_up(places * (int64_t)sizeof(bool), CP_PANEL_ALIGN);
}

static bool *place_of(const struct cp_run *run, int lane, int32_t done)
{
    return &run->is_awaited[lane * (run->schedule->step_count + 1) + done];
}

bool cp_run_is_awaited(const struct cp_run *run, int lane, int32_t done)
{
    return *place_of(run, lane, done);
}

/* How many steps of another lane must be done before the step. A launched graph knows its
 * edges and no other order, and whether its branches run side by side is the device's to
 * say: a wait for a peer may be in front of what the peer waits for. So in a capture a wait
 * is behind all that was published before it in the order of the schedule, in which nobody
 * waits in a circle (schedule/verify.h). Streams are given their work in that order anyway. */
static int32_t needed(const struct cp_run *run, const struct cp_step *step, int other,
                      const int32_t published[CP_LANES])
{
    bool is_behind = run->env.capture != 0 && step->op == CP_STEP_AWAIT;
    int32_t after = step->after[other];
    return is_behind && published[other] > after ? published[other] : after;
}

/* An event costs the host as much as a launch does, so those that nobody waits for are
 * left out. */
static void find_awaited(struct cp_run *run)
{
    const struct cp_schedule *schedule = run->schedule;
    int32_t counts[CP_LANES] = {0}, published[CP_LANES] = {0};
    memset(run->is_awaited, 0, cp_run_order_bytes(schedule));
    for (int32_t at = 0; at < schedule->step_count; at++) {
        const struct cp_step *step = &schedule->steps[at];
        for (int lane = 0; lane < CP_LANES; lane++) {
            if (lane != step->lane) {
                *place_of(run, lane, needed(run, step, lane, published)) = true;
            }
        }
        counts[step->lane] += 1;
        if (step->op == CP_STEP_PUBLISH) {
            published[step->lane] = counts[step->lane];
        }
    }
    for (int lane = 0; lane < CP_LANES; lane++) {
        *place_of(run, lane, counts[lane]) = true; /* by the caller */
    }
}

/* Event numbers. A lane's are used in turns: whoever waits for one that has been used
 * again waits for a later step of that lane, which was enqueued before it all the same. */
enum {
    EVENT_LANE = CP_DEVICE_EVENT_CAPTURED + 1,
    LANE_EVENTS = (CP_DEVICE_EVENTS - EVENT_LANE) / CP_LANES
};
_Static_assert((int)CP_LANES == (int)CP_DEVICE_LANES, "a stream for each lane");

static int event_of(int lane, int32_t done)
{
    return EVENT_LANE + lane * LANE_EVENTS + done % LANE_EVENTS;
}

enum cp_code cp_run_tell(const struct cp_run *run)
{
    const struct cp_comm_call call = {
        .seq = run->env.seq, .capture = run->env.capture, .stream = run->env.stream};
    struct cp_comm *comm = run->env.comm;
    return comm->ops->begin != NULL ? comm->ops->begin(comm, &call) : CP_OK;
}

/* The caller's stream starts behind the call before this one, which may have come on
 * another stream and uses the same workspace, and behind all ranks' where windows are
 * used again; the lanes behind what the caller's has been given, which the event says at
 * first. A call that is captured is behind no other: its workspace is its own, and an
 * event of outside may not be awaited in a capture, nor one of a capture outside. */
enum cp_code cp_run_fork(struct cp_run *run)
{
    struct cp_device *device = run->env.device;
    bool is_captured = run->env.capture != 0;
    int event = is_captured ? CP_DEVICE_EVENT_CAPTURED : CP_DEVICE_EVENT_CALL;
    find_awaited(run);
    if (!is_captured) {
        CP_TRY(device->ops->await(device, run->env.stream, event));
    }
    CP_TRY(cp_run_tell(run));
    CP_TRY(device->ops->record(device, run->env.stream, event));
    for (int lane = 0; lane < CP_LANES; lane++) {
        if (lane != CP_LANE_COMPUTE && cp_run_has_step(run, lane)) {
            CP_TRY(device->ops->await(device, run->stream[lane], event));
        }
    }
    return CP_OK;
}

/* The caller's stream goes on behind all of them. */
enum cp_code cp_run_join(struct cp_run *run)
{
    struct cp_device *device = run->env.device;
    struct cp_comm *comm = run->env.comm;
    for (int lane = 0; lane < CP_LANES; lane++) {
        if (lane != CP_LANE_COMPUTE && run->done[lane] > 0) {
            CP_TRY(device->ops->await(device, run->env.stream,
                                      event_of(lane, run->done[lane])));
        }
    }
    if (comm->ops->end != NULL) {
        CP_TRY(comm->ops->end(comm, run->env.stream));
    }
    return run->env.capture != 0
               ? CP_OK
               : device->ops->record(device, run->env.stream, CP_DEVICE_EVENT_CALL);
}

/* Nobody looks at what that came to: the call has failed, and says why. In a capture lanes
 * stay as they are: CUDA refuses the graph of half a call where one has been forked. */
void cp_run_join_failed(struct cp_run *run)
{
    struct cp_device *device = run->env.device;
    struct cp_status error = *cp_last_error();
    if (run->env.capture != 0) {
        return;
    }
    for (int lane = 0; lane < CP_LANES; lane++) {
        int event = event_of(lane, run->done[lane]);
        if (lane != CP_LANE_COMPUTE &&
            device->ops->record(device, run->stream[lane], event) == CP_OK) {
            (void)device->ops->await(device, run->env.stream, event);
        }
    }
    (void)device->ops->record(device, run->env.stream, CP_DEVICE_EVENT_CALL);
    (void)cp_fail_as(&error);
}

bool cp_run_must_await(const struct cp_run *run, const struct cp_step *step, int other)
{
    return other != step->lane &&
           needed(run, step, other, run->published) > run->awaited[step->lane][other];
}

enum cp_code cp_run_await_lanes(struct cp_run *run, int lane)
{
    const struct cp_step *step = &run->schedule->steps[run->cursor[lane]];
    struct cp_device *device = run->env.device;
    for (int other = 0; other < CP_LANES; other++) {
        if (!cp_run_must_await(run, step, other)) {
            continue;
        }
        int32_t done = needed(run, step, other, run->published);
        CP_TRY(device->ops->await(device, run->stream[lane], event_of(other, done)));
        run->awaited[lane][other] = done;
    }
    return CP_OK;
}

enum cp_code cp_run_record_lane(struct cp_run *run, int lane, int newly_done)
{
    struct cp_device *device = run->env.device;
    for (int i = newly_done - 1; i >= 0; i--) {
        int32_t done = run->done[lane] - i;
        if (*place_of(run, lane, done)) {
            CP_TRY(
                device->ops->record(device, run->stream[lane], event_of(lane, done)));
        }
    }
    return CP_OK;
}
