/* Runs one schedule, a step at a time: resumable, so that one thread can run the ranks
 * of a whole world.
 *
 * A lane advances while its next step's conditions hold. When no lane can, the run says
 * CP_AGAIN and `cp_run_finish` blocks on whatever the lanes wait for. The executor knows
 * no variant: it resolves boxes to memory and calls the tables of communicator, device
 * and kernel.
 *
 * On an asynchronous device a step is done once it is enqueued. Each lane has a stream,
 * CP_LANE_COMPUTE the caller's own; what a step says of other lanes becomes events, and
 * steps are enqueued in the order of the schedule, which is that of all ranks; copies of
 * a lane in a row that are free of each other are given to the device together, up to
 * one that another lane waits for. The streams of lanes that have steps follow the caller's
 * at the start and are joined to it at the end, so the caller may treat inputs and outputs
 * as if all had happened on his stream; and where that is being captured in a graph, all of
 * it is. Where a call fails, his stream goes on behind what was enqueued of it. */
#ifndef CP_EXEC_RUN_H
#define CP_EXEC_RUN_H

#include "base/flight.h"
#include "comm/comm.h"
#include "exec/spread.h"
#include "schedule/schedule.h"

/* What a run works with; nothing in it is owned. */
struct cp_run_env {
    struct cp_comm *comm;
    struct cp_device *device;
    const struct cp_kernel_ops *kernel; /* NULL for shard and gather */
    const struct cp_package *package;   /* for the kernel, or NULL */
    struct cp_pool *pool;     /* of the host; NULL: the caller's thread alone */
    struct cp_stream *stream; /* the caller's; NULL on the host */
    char *scratch; /* the workspace: schedule->scratch_bytes, then the kernel's scratch
                    of each thread */
    uint64_t
        capture; /* that the call is part of (device/device.h), and then `scratch` is
                         this call's alone; 0: of none */
    struct cp_recorder *recorder; /* (optional) notes the steps */
    uint64_t seq;                 /* of the call */
    const char *operation;        /* for messages */
};

struct cp_run {
    struct cp_run_env env;
    struct cp_spread spread;
    const struct cp_schedule *schedule; /* borrowed */
    struct cp_view tensors[CP_TENSORS]; /* the caller's, by role */
    int32_t cursor[CP_LANES]; /* index of the lane's next step; step_count: none left */
    int32_t done[CP_LANES];   /* steps of the lane that are done */
    struct cp_stream *stream[CP_LANES];
    int32_t awaited[CP_LANES][CP_LANES]; /* steps of another lane that this one's stream
                                        waits for by now; asynchronous devices */
    int32_t published[CP_LANES]; /* steps of the lane up to its last publication */
    bool is_begun;               /* the communicator has been told of the call */
    bool is_posted[CP_LANES];    /* the group at the cursor has been given to the
                                 communicator */
    uint64_t ticket[CP_LANES];
    void *
        gathered; /* borrowed room for the largest group of messages and the most copies
                       or waits of a lane in a row; what is in it counts within one step */
    bool *is_awaited; /* [lane][steps done]: another lane waits for that, or the
                              caller does; borrowed */
};

/* Bytes of workspace that a run of this schedule needs, the kernel's scratch for each of
 * `threads` included. */
int64_t cp_run_workspace_bytes(const struct cp_schedule *schedule, int threads);

/* Bytes of the host's memory that it needs: no more for a shorter schedule. */
size_t cp_run_room_bytes(const struct cp_schedule *schedule);

/* `tensors`: by role, data NULL where the call has none. `room`: cp_run_room_bytes,
 * aligned to CP_ALIGNMENT, borrowed. */
void cp_run_init(struct cp_run *run, const struct cp_run_env *env,
                 const struct cp_schedule *schedule,
                 const struct cp_view tensors[CP_TENSORS], void *room);

/* Advances as far as possible without blocking. CP_OK: finished. CP_AGAIN: waits for a
 * peer. */
CP_NODISCARD enum cp_code cp_run_poll(struct cp_run *run);

/* Runs to the end. Every wait has `timeout` seconds. */
CP_NODISCARD enum cp_code cp_run_finish(struct cp_run *run, double timeout);

#endif
