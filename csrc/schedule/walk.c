/* Lanes, conditions and what they wait for. */
#include "schedule/walk.h"

void cp_walk_rank_init(struct cp_walk_rank *rank, const struct cp_schedule *schedule,
                       int32_t *room)
{
    *rank = (struct cp_walk_rank){.schedule = schedule,
                                  .before = room + schedule->step_count};
    for (int signal = 0; signal < CP_WALK_SIGNALS; signal++) {
        rank->last[signal] = -1;
    }
    for (int number = 0; number < CP_LANES; number++) {
        struct cp_walk_lane *lane = &rank->lanes[number];
        lane->steps = room;
        for (int32_t step = 0; step < schedule->step_count; step++) {
            if (schedule->steps[step].lane == number) {
                lane->steps[lane->count] = step;
                lane->count += 1;
            }
        }
        room += lane->count;
    }
}

const struct cp_step *cp_walk_step(const struct cp_walk *walk, int rank, int lane)
{
    const struct cp_walk_lane *at = &walk->ranks[rank].lanes[lane];
    return &walk->ranks[rank].schedule->steps[at->steps[at->cursor]];
}

int32_t cp_walk_publication(const struct cp_walk *walk, const struct cp_step *await)
{
    const struct cp_walk_rank *peer = &walk->ranks[await->peer];
    int32_t found = -1;
    for (int32_t step = peer->last[await->signal];
         step >= 0 && peer->schedule->steps[step].value >= await->value;
         step = peer->before[step]) {
        found = step;
    }
    return found;
}

int cp_walk_missing_lane(const struct cp_walk *walk, int rank, int lane)
{
    const struct cp_step *step = cp_walk_step(walk, rank, lane);
    for (int other = 0; other < CP_LANES; other++) {
        if (other != lane &&
            walk->ranks[rank].lanes[other].cursor < step->after[other]) {
            return other;
        }
    }
    return -1;
}

int32_t cp_walk_first(const struct cp_walk *walk, int rank)
{
    const struct cp_walk_rank *self = &walk->ranks[rank];
    int32_t first = self->schedule->step_count;
    for (int lane = 0; lane < CP_LANES; lane++) {
        const struct cp_walk_lane *at = &self->lanes[lane];
        if (at->cursor < at->count && at->steps[at->cursor] < first) {
            first = at->steps[at->cursor];
        }
    }
    return first;
}

static bool may_go(const struct cp_walk *walk, int rank, int lane)
{
    const struct cp_walk_lane *at = &walk->ranks[rank].lanes[lane];
    if (at->cursor == at->count ||
        (walk->is_in_order && at->steps[at->cursor] != cp_walk_first(walk, rank))) {
        return false;
    }
    if (at->group_end > 0) {
        return walk->ops->is_met(walk, rank, lane);
    }
    const struct cp_step *step = cp_walk_step(walk, rank, lane);
    return cp_walk_missing_lane(walk, rank, lane) < 0 &&
           (step->op != CP_STEP_AWAIT || cp_walk_publication(walk, step) >= 0);
}

/* Place behind the last message of the group at the cursor. */
static int32_t group_end(const struct cp_walk *walk, int rank, int lane)
{
    const struct cp_walk_lane *at = &walk->ranks[rank].lanes[lane];
    const struct cp_step *steps = walk->ranks[rank].schedule->steps;
    const struct cp_step *first = cp_walk_step(walk, rank, lane);
    int32_t end = at->cursor + 1;
    while (end < at->count && cp_step_is_message(&steps[at->steps[end]]) &&
           steps[at->steps[end]].group == first->group) {
        end += 1;
    }
    return end;
}

static void advance(struct cp_walk *walk, int rank, int lane, int32_t end)
{
    struct cp_walk_lane *at = &walk->ranks[rank].lanes[lane];
    walk->steps += end - at->cursor;
    at->cursor = end;
    at->group_end = 0;
}

static enum cp_code do_step(struct cp_walk *walk, int rank, int lane)
{
    struct cp_walk_rank *self = &walk->ranks[rank];
    const struct cp_step *step = cp_walk_step(walk, rank, lane);
    int32_t number = self->lanes[lane].steps[self->lanes[lane].cursor];
    CP_TRY(walk->ops->step(walk, rank, lane));
    if (step->op == CP_STEP_PUBLISH) {
        self->before[number] = self->last[step->signal];
        self->last[step->signal] = number;
    }
    advance(walk, rank, lane, self->lanes[lane].cursor + 1);
    return CP_OK;
}

static enum cp_code go(struct cp_walk *walk, int rank, int lane)
{
    struct cp_walk_lane *at = &walk->ranks[rank].lanes[lane];
    if (at->group_end > 0) {
        CP_TRY(walk->ops->arrive(walk, rank, lane));
        advance(walk, rank, lane, at->group_end);
        return CP_OK;
    }
    if (cp_step_is_message(cp_walk_step(walk, rank, lane))) {
        at->group_end = group_end(walk, rank, lane);
        return walk->ops->post(walk, rank, lane);
    }
    return do_step(walk, rank, lane);
}

/* The lane that goes next, counted over all ranks, or -1. `last`: the one that went last,
 * which goes on as long as it can where the order is free. */
static int next_lane(const struct cp_walk *walk, int last)
{
    int lanes = walk->world * CP_LANES;
    int found = -1;
    double earliest = 0.0;
    for (int i = 0; i < lanes; i++) {
        int at = (last + i) % lanes;
        if (!may_go(walk, at / CP_LANES, at % CP_LANES)) {
            continue;
        }
        if (walk->ops->when == NULL) {
            return at;
        }
        double when = walk->ops->when(walk, at / CP_LANES, at % CP_LANES);
        if (found < 0 || when < earliest) {
            found = at;
            earliest = when;
        }
    }
    return found;
}

enum cp_code cp_walk_run(struct cp_walk *walk)
{
    for (int at = next_lane(walk, 0); at >= 0; at = next_lane(walk, at)) {
        CP_TRY(go(walk, at / CP_LANES, at % CP_LANES));
    }
    return CP_OK;
}

bool cp_walk_is_over(const struct cp_walk *walk)
{
    bool is_over = true;
    for (int rank = 0; rank < walk->world; rank++) {
        for (int lane = 0; lane < CP_LANES; lane++) {
            const struct cp_walk_lane *at = &walk->ranks[rank].lanes[lane];
            is_over = is_over && at->cursor == at->count;
        }
    }
    return is_over;
}
