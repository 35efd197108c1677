/* Symbolic execution of one call: what may run, runs, until nothing is left or nobody can.
 *
 * One execution decides for all timings: counters only grow and messages of two ranks keep
 * their order, so what a lane waits for stays true once it is, and no order of running can
 * block what another does not. What depends on timing is found by the clocks instead. */
#ifndef CP_SCHEDULE_VERIFY_RUN_H
#define CP_SCHEDULE_VERIFY_RUN_H

#include "schedule/verify_access.h"
#include "schedule/verify_meaning.h"
#include "schedule/verify_message.h"
#include "schedule/verify_step.h"

/* A publication, in the order of its counter. */
struct cp_publication {
    struct cp_publication *next;
    uint32_t value;
    int lane;
    const uint32_t *clock;
};

struct cp_run_lane {
    int32_t *steps; /* indices in the schedule */
    int32_t count, cursor;
    int32_t group_end;        /* 0: the group at the cursor is not posted */
    struct cp_message *group; /* what of it is on its way */
    uint32_t *now;            /* clock */
    const uint32_t **done;    /* clocks after each step */
};

struct cp_run_rank {
    const struct cp_schedule *schedule;
    struct cp_content **contents; /* by buffer */
    struct cp_run_lane lanes[CP_LANES];
    struct cp_publication *signals[CP_VERIFY_SIGNALS];
};

/* One call. The logs of windows and workspaces and the clocks go on from call to call. */
struct cp_verify_run {
    struct cp_pool *pool;
    struct cp_access_log *logs; /* by arena */
    struct cp_memory memory;
    struct cp_meaning meaning;
    struct cp_run_rank *ranks;
    struct cp_channel *channels; /* (from, to) */
    int call, world, processes;
    int64_t steps; /* done so far */
};

/* Numbers of arenas. */
static inline int cp_run_arena(int world, int rank, const struct cp_buffer *buffer)
{
    switch ((enum cp_buffer_kind)buffer->kind) {
    case CP_BUFFER_WINDOW:
        return buffer->owner;
    case CP_BUFFER_SCRATCH:
        return world + rank;
    case CP_BUFFER_INPUT:
    case CP_BUFFER_OUTPUT:
        break;
    }
    return 2 * world + rank * CP_TENSORS + buffer->role;
}

static inline int cp_run_arena_count(int world)
{
    return 2 * world + world * CP_TENSORS;
}

/* Runs all ranks to their end. */
CP_NODISCARD enum cp_code cp_verify_run_all(struct cp_verify_run *run);

#endif
