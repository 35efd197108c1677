/* The order of a run's steps on an asynchronous device: each lane has a stream, and what a
 * step says of other lanes becomes events. */
#ifndef CP_EXEC_RUN_ORDER_H
#define CP_EXEC_RUN_ORDER_H

#include "exec/run.h"

/* What `is_awaited` takes of the room, at its start; behind it lies what a step gathers. */
size_t cp_run_order_bytes(const struct cp_schedule *schedule);

/* Around all steps: the lanes' streams follow the caller's, and are joined to it. */
CP_NODISCARD enum cp_code cp_run_fork(struct cp_run *run);
CP_NODISCARD enum cp_code cp_run_join(struct cp_run *run);
/* Joins them where a step has failed: those before it happen all the same. The thread's
 * error stays. */
void cp_run_join_failed(struct cp_run *run);

/* Around the steps at the lane's cursor: its stream waits for what they need of other
 * lanes; and notes that steps have been enqueued up to `run->done[lane]`. */
CP_NODISCARD enum cp_code cp_run_await_lanes(struct cp_run *run, int lane);
CP_NODISCARD enum cp_code cp_run_record_lane(struct cp_run *run, int lane,
                                             int newly_done);

/* Once forked: does anybody wait until the lane has done so many steps? */
bool cp_run_is_awaited(const struct cp_run *run, int lane, int32_t done);
/* Needs the step another lane's that its own stream does not wait for yet? */
bool cp_run_must_await(const struct cp_run *run, const struct cp_step *step, int other);

/* Is a step of the lane left? */
static inline bool cp_run_has_step(const struct cp_run *run, int lane)
{
    return run->cursor[lane] < run->schedule->step_count;
}

/* Tells the communicator of the call, before its first step. */
CP_NODISCARD enum cp_code cp_run_tell(const struct cp_run *run);

#endif
