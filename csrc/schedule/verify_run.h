/* Symbolic execution of one call: a walk (walk.h) whose steps have a meaning and vector clocks.
 *
 * One walk decides for all timings whether anybody is blocked. What depends on timing is
 * found by the clocks instead. */
#ifndef CP_SCHEDULE_VERIFY_RUN_H
#define CP_SCHEDULE_VERIFY_RUN_H

#include "schedule/verify_access.h"
#include "schedule/verify_meaning.h"
#include "schedule/verify_message.h"
#include "schedule/verify_step.h"
#include "schedule/walk.h"

struct cp_run_lane {
    struct cp_message *group; /* what is on its way of the group at the cursor */
    uint32_t *now;            /* clock */
};

struct cp_run_rank {
    struct cp_content **contents; /* by buffer */
    struct cp_run_lane lanes[CP_LANES];
    const uint32_t **done; /* clocks after each step */
};

/* One call. The logs of windows and workspaces and the clocks go on from call to call. */
struct cp_verify_run {
    struct cp_pool *pool;
    struct cp_access_log *logs; /* by arena */
    struct cp_memory memory;
    struct cp_meaning meaning;
    struct cp_walk walk;
    struct cp_run_rank *ranks;
    struct cp_channel *channels; /* (from, to) */
    int call, world, processes;
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

/* Runs all ranks to their end; `walk` knows the ranks, and gets its meaning here. */
CP_NODISCARD enum cp_code cp_verify_run_all(struct cp_verify_run *run);

#endif
