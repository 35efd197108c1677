/* In which order the steps of all ranks can run: lanes in their order, `after`, counters
 * and groups of messages, until nothing is left or nobody can go on.
 *
 * What a step means is left to whoever walks: a proof (verify_run.h) or times (cost.h).
 * Counters only grow and messages of two ranks keep their order, so what a lane waits for
 * stays true once it is, and no order of walking can block what another does not; but where
 * a rank keeps to the order of its list, it may block what is not blocked otherwise. */
#ifndef CP_SCHEDULE_WALK_H
#define CP_SCHEDULE_WALK_H

#include "schedule/schedule.h"

struct cp_walk_lane {
    int32_t *steps; /* (count) numbers of its steps in the schedule */
    int32_t count, cursor;
    int32_t group_end; /* 0: the group at the cursor is not posted */
};

/* CP_SIGNALS of comm/comm.h, which a schedule may not include; a test compares the two. */
enum { CP_WALK_SIGNALS = 4 };

struct cp_walk_rank {
    const struct cp_schedule *schedule;
    struct cp_walk_lane lanes[CP_LANES];
    /* Publications that were done: the last of each counter, and behind each step the one
     * before it; -1: none. */
    int32_t last[CP_WALK_SIGNALS];
    int32_t *before; /* (step_count) */
};

struct cp_walk;

struct cp_walk_ops {
    /* The step at the lane's cursor, no message. */
    enum cp_code (*step)(struct cp_walk *walk, int rank, int lane);
    /* The messages from the cursor up to `group_end` are posted. */
    enum cp_code (*post)(struct cp_walk *walk, int rank, int lane);
    /* Are the other halves of all of them posted too? */
    bool (*is_met)(const struct cp_walk *walk, int rank, int lane);
    /* They have moved. */
    enum cp_code (*arrive)(struct cp_walk *walk, int rank, int lane);
    /* (optional) When the lane would go on, of those that can. The earliest goes first.
     * Default: in any order. */
    double (*when)(const struct cp_walk *walk, int rank, int lane);
};

struct cp_walk {
    const struct cp_walk_ops *ops;
    void *meaning; /* of whoever walks */
    struct cp_walk_rank *ranks;
    int world;
    bool is_in_order; /* ranks keep to their lists: one step or group at a time */
    int64_t steps;    /* done so far */
};

/* Numbers that a rank's part takes: room for cp_walk_rank_init. */
static inline int64_t cp_walk_room(const struct cp_schedule *schedule)
{
    return 2 * (int64_t)schedule->step_count;
}

/* `room`: cp_walk_room numbers, borrowed. */
void cp_walk_rank_init(struct cp_walk_rank *rank, const struct cp_schedule *schedule,
                       int32_t *room);

/* The step at the lane's cursor. */
const struct cp_step *cp_walk_step(const struct cp_walk *walk, int rank, int lane);

/* The first step of the rank's list that is not done. */
int32_t cp_walk_first(const struct cp_walk *walk, int rank);

/* The peer's first publication that an AWAIT may end with, or -1. */
int32_t cp_walk_publication(const struct cp_walk *walk, const struct cp_step *await);

/* The lane whose steps must still be done before the one at the cursor, or -1. */
int cp_walk_missing_lane(const struct cp_walk *walk, int rank, int lane);

/* Walks until nobody can go on. */
CP_NODISCARD enum cp_code cp_walk_run(struct cp_walk *walk);

/* Are all steps done? */
bool cp_walk_is_over(const struct cp_walk *walk);

#endif
