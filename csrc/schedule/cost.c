/* Clocks that carry what the time was spent on. */
#include "schedule/cost.h"

#include <math.h>

#include "base/mem.h"
#include "schedule/walk.h"

static const char *const kind_names[CP_COST_KINDS] = {"compute", "copies", "transfer",
                                                      "wait", "host"};

/* What is known of a step. */
struct step_time {
    struct cp_cost done;   /* when it was */
    struct cp_cost posted; /* of a message: when this half was */
    double arrival_s;      /* of a message that has met its other half */
    int32_t mate;          /* number of the other half at the peer; -1: none */
    int32_t launches;      /* of the schedule's steps up to this one */
    bool is_joined;        /* goes with the one before it on its lane */
    bool is_posted;
};

struct rank_time {
    struct cp_cost now[CP_LANES];
    struct step_time *steps;
    double out_free_s, in_free_s; /* when its links are */
};

struct times {
    const struct cp_speeds *speeds;
    struct rank_time *ranks;
    double bridge_free_s;
};

const char *cp_cost_name(enum cp_cost_kind kind)
{
    return kind < CP_COST_KINDS ? kind_names[kind] : "?";
}

/* ---- clocks ---- */

static void spend(struct cp_cost *clock, enum cp_cost_kind kind, double seconds)
{
    clock->total_s += seconds;
    clock->of_s[kind] += seconds;
}

/* What came to pass by `time` otherwise was waited for, under that name. */
static void spend_until(struct cp_cost *clock, enum cp_cost_kind kind, double time_s)
{
    if (time_s > clock->total_s) {
        spend(clock, kind, time_s - clock->total_s);
    }
}

/* The later of two clocks of a rank: it decides. */
static void join(struct cp_cost *clock, const struct cp_cost *other)
{
    if (other->total_s > clock->total_s) {
        *clock = *other;
    }
}

/* ---- work ---- */

static int64_t arg_bytes(const struct cp_schedule *schedule, const struct cp_step *step,
                         int arg)
{
    return cp_box_bytes(schedule, &step->arg[arg]);
}

static bool is_peers(const struct cp_schedule *schedule, const struct cp_box *box)
{
    return box->buffer != CP_NO_BUFFER &&
           schedule->buffers[box->buffer].kind == CP_BUFFER_WINDOW &&
           schedule->buffers[box->buffer].owner != schedule->rank;
}

/* All that a step reads and writes. */
static double bytes_of(const struct cp_schedule *schedule, const struct cp_step *step)
{
    double bytes = 0.0;
    for (int arg = 0; arg < CP_STEP_ARGS; arg++) {
        bytes += (double)arg_bytes(schedule, step, arg);
    }
    return step->op == CP_STEP_REDUCE
               ? bytes + (double)arg_bytes(schedule, step, CP_ARG_DST)
               : bytes;
}

/* Pairs of a query row and a key that see each other, of one head. */
static double pairs_of(const struct cp_step *step, int64_t rows, int64_t keys)
{
    double pairs = (double)rows * (double)keys;
    if (!step->is_causal) {
        return pairs;
    }
    /* Row i sees first + i + 1 keys of the block, from 0 to all of them. */
    double first = (double)(step->q_first - step->k_first);
    double from = fmin(fmax(-first, 0.0), (double)rows);
    double to = fmin(fmax((double)keys - first, 0.0), (double)rows);
    double partly = to - from;
    return partly * (2.0 * first + from + to + 1.0) / 2.0 +
           ((double)rows - to) * (double)keys;
}

/* Seconds of so many operations in tiles of `rows`. */
static double waves_s(const struct cp_speeds *speeds, double ops, double ops_per_s,
                      double rows, double heads)
{
    double tiles = ceil(rows / speeds->tile_rows) * heads;
    double full = ceil(tiles / speeds->processors) * speeds->processors;
    return tiles > 0.0 ? ops / ops_per_s * (full / tiles) : 0.0;
}

/* The answer is written and read, the state read and written, but neither where the block is
 * the first nor where it is the last. */
static double merge_bytes(const struct cp_schedule *schedule,
                          const struct cp_step *step)
{
    bool is_last = step->arg[CP_ATTEND_OUT].buffer != CP_NO_BUFFER;
    double state = (double)arg_bytes(schedule, step, CP_ATTEND_STATE);
    double answer = (double)arg_bytes(schedule, step, CP_ATTEND_Q);
    double result = (double)arg_bytes(schedule, step, CP_ATTEND_OUT) +
                    (double)arg_bytes(schedule, step, CP_ATTEND_LSE);
    return 2.0 * answer + (step->is_first ? 0.0 : state) + (is_last ? result : state);
}

static double attend_s(const struct cp_speeds *speeds,
                       const struct cp_schedule *schedule, const struct cp_step *step)
{
    const struct cp_box *q = &step->arg[CP_ATTEND_Q];
    const struct cp_box *k = &step->arg[CP_ATTEND_K];
    const struct cp_box *v = &step->arg[CP_ATTEND_V];
    double heads = (double)(q->n[0] * q->n[2]);
    double ops =
        2.0 * pairs_of(step, q->n[1], k->n[1]) * heads * (double)(k->n[3] + v->n[3]);
    double seconds = speeds->launch_s +
                     waves_s(speeds, ops, speeds->attend_ops, (double)q->n[1], heads);
    if (speeds->is_merged) {
        seconds +=
            speeds->launch_s + merge_bytes(schedule, step) / speeds->memory_bytes;
    }
    return seconds;
}

static double grad_s(const struct cp_speeds *speeds, const struct cp_step *step)
{
    const struct cp_box *q = &step->arg[CP_GRAD_Q];
    const struct cp_box *k = &step->arg[CP_GRAD_K];
    const struct cp_box *v = &step->arg[CP_GRAD_V];
    double heads = (double)(q->n[0] * q->n[2]);
    double ops = 2.0 * pairs_of(step, q->n[1], k->n[1]) * heads *
                 (double)(3 * k->n[3] + 2 * v->n[3]);
    return speeds->launch_s +
           waves_s(speeds, ops, speeds->grad_ops, (double)k->n[1], heads);
}

/* What a step takes on its own device. */
static double work_s(const struct cp_speeds *speeds, const struct cp_schedule *schedule,
                     const struct cp_step *step, bool is_joined)
{
    switch ((enum cp_step_op)step->op) {
    case CP_STEP_ATTEND:
        return attend_s(speeds, schedule, step);
    case CP_STEP_GRAD:
        return grad_s(speeds, step);
    case CP_STEP_COPY:
    case CP_STEP_REDUCE:
    case CP_STEP_ZERO:
    case CP_STEP_PACK:
    case CP_STEP_FINISH:
    case CP_STEP_DELTA:
        return (is_joined ? 0.0 : speeds->launch_s) +
               bytes_of(schedule, step) / speeds->memory_bytes;
    case CP_STEP_PUBLISH:
        return speeds->launch_s;
    case CP_STEP_AWAIT:
    case CP_STEP_SEND:
    case CP_STEP_RECV:
    case CP_STEP_OPS:
        break;
    }
    return 0.0;
}

static enum cp_cost_kind kind_of(const struct cp_step *step)
{
    bool is_attention = step->op == CP_STEP_ATTEND || step->op == CP_STEP_GRAD ||
                        step->op == CP_STEP_FINISH || step->op == CP_STEP_DELTA;
    return is_attention ? CP_COST_COMPUTE : CP_COST_COPIES;
}

/* ---- links ---- */

/* When bytes have gone over something that is free at `*free_s`. */
static double pass(double *free_s, double start_s, double bytes, double bytes_per_s)
{
    *free_s = fmax(*free_s, start_s) + bytes / bytes_per_s;
    return *free_s;
}

/* When they have left `from` for `to`; the first of them is there link_s later. */
static double move(struct times *times, int from, int to, double bytes, double start_s)
{
    const struct cp_speeds *speeds = times->speeds;
    double out_s =
        pass(&times->ranks[from].out_free_s, start_s, bytes, speeds->link_bytes);
    double in_s = pass(&times->ranks[to].in_free_s, start_s, bytes, speeds->link_bytes);
    double end_s = fmax(out_s, in_s);
    if (speeds->bridge_bytes > 0.0) {
        end_s = fmax(end_s,
                     pass(&times->bridge_free_s, start_s, bytes, speeds->bridge_bytes));
    }
    return end_s;
}

/* How often a step reads what it reads in windows of other ranks. */
static double reads_of(const struct cp_speeds *speeds, const struct cp_step *step)
{
    const struct cp_box *q =
        &step->arg[step->op == CP_STEP_GRAD ? CP_GRAD_Q : CP_ATTEND_Q];
    bool is_attention = step->op == CP_STEP_ATTEND || step->op == CP_STEP_GRAD;
    return is_attention && speeds->is_uncached
               ? ceil((double)q->n[1] / speeds->tile_rows)
               : 1.0;
}

/* When all that the step reads in windows of other ranks is here, and all that it writes
 * there is there; 0: nothing. */
static double reach(struct times *times, const struct cp_schedule *schedule,
                    const struct cp_step *step, bool is_joined, double start_s)
{
    double latency_s = is_joined ? 0.0 : times->speeds->link_s;
    double end_s = 0.0;
    for (int arg = 0; arg < CP_STEP_ARGS; arg++) {
        const struct cp_box *box = &step->arg[arg];
        if (is_peers(schedule, box)) {
            double bytes =
                (double)cp_box_bytes(schedule, box) * reads_of(times->speeds, step);
            int owner = schedule->buffers[box->buffer].owner;
            bool is_written = step->op == CP_STEP_COPY && arg == CP_ARG_DST;
            end_s =
                fmax(end_s, latency_s + move(times, is_written ? schedule->rank : owner,
                                             is_written ? owner : schedule->rank, bytes,
                                             start_s));
        }
    }
    return end_s;
}

/* ---- the walk ---- */

static struct step_time *time_of(const struct cp_walk *walk, int rank, int lane,
                                 int32_t place)
{
    const struct times *times = walk->meaning;
    return &times->ranks[rank].steps[walk->ranks[rank].lanes[lane].steps[place]];
}

/* The clock with which the step, or the group, at the lane's cursor starts. */
static struct cp_cost start_of(const struct cp_walk *walk, int rank, int lane)
{
    const struct times *times = walk->meaning;
    const struct cp_step *step = cp_walk_step(walk, rank, lane);
    struct cp_cost clock = times->ranks[rank].now[lane];
    for (int other = 0; other < CP_LANES; other++) {
        if (other != lane && step->after[other] > 0) {
            join(&clock, &time_of(walk, rank, other, step->after[other] - 1)->done);
        }
    }
    const struct step_time *at =
        time_of(walk, rank, lane, walk->ranks[rank].lanes[lane].cursor);
    spend_until(&clock, CP_COST_HOST, at->launches * times->speeds->enqueue_s);
    if (step->op == CP_STEP_AWAIT) {
        spend(&clock, CP_COST_COPIES, at->is_joined ? 0.0 : times->speeds->launch_s);
        int32_t publication = cp_walk_publication(walk, step);
        const struct cp_cost *published =
            &times->ranks[step->peer].steps[publication].done;
        if (step->peer == rank) {
            join(&clock, published);
        } else {
            spend_until(&clock, CP_COST_WAIT,
                        published->total_s + times->speeds->link_s);
        }
    }
    return clock;
}

static void note_done(struct cp_walk *walk, int rank, int lane, int32_t end,
                      const struct cp_cost *clock)
{
    struct times *times = walk->meaning;
    times->ranks[rank].now[lane] = *clock;
    for (int32_t at = walk->ranks[rank].lanes[lane].cursor; at < end; at++) {
        time_of(walk, rank, lane, at)->done = *clock;
    }
}

static enum cp_code do_step(struct cp_walk *walk, int rank, int lane)
{
    struct times *times = walk->meaning;
    const struct cp_schedule *schedule = walk->ranks[rank].schedule;
    const struct cp_step *step = cp_walk_step(walk, rank, lane);
    int32_t place = walk->ranks[rank].lanes[lane].cursor;
    bool is_joined = time_of(walk, rank, lane, place)->is_joined;
    struct cp_cost clock = start_of(walk, rank, lane);
    double reached_s = reach(times, schedule, step, is_joined, clock.total_s);
    bool is_copy = kind_of(step) == CP_COST_COPIES && reached_s > 0.0;
    /* A kernel reads what it needs as it comes; a copy does nothing else. */
    spend(&clock, is_copy ? CP_COST_TRANSFER : kind_of(step),
          work_s(times->speeds, schedule, step, is_joined));
    spend_until(&clock, CP_COST_TRANSFER, reached_s);
    note_done(walk, rank, lane, place + 1, &clock);
    return CP_OK;
}

static enum cp_code post_group(struct cp_walk *walk, int rank, int lane)
{
    struct times *times = walk->meaning;
    const struct cp_schedule *schedule = walk->ranks[rank].schedule;
    const struct cp_walk_lane *at = &walk->ranks[rank].lanes[lane];
    struct cp_cost clock = start_of(walk, rank, lane);
    for (int32_t place = at->cursor; place < at->group_end; place++) {
        const struct cp_step *step = &schedule->steps[at->steps[place]];
        struct step_time *own = time_of(walk, rank, lane, place);
        own->posted = clock;
        own->is_posted = true;
        if (own->mate < 0 || !times->ranks[step->peer].steps[own->mate].is_posted) {
            continue;
        }
        struct step_time *other = &times->ranks[step->peer].steps[own->mate];
        bool is_send = step->op == CP_STEP_SEND;
        double bytes =
            (double)arg_bytes(schedule, step, is_send ? CP_ARG_SRC : CP_ARG_DST);
        /* The later half is this one, since the earliest goes first. */
        own->arrival_s = times->speeds->link_s +
                         move(times, is_send ? rank : step->peer,
                              is_send ? step->peer : rank, bytes, clock.total_s);
        other->arrival_s = own->arrival_s;
    }
    return CP_OK;
}

static bool is_group_met(const struct cp_walk *walk, int rank, int lane)
{
    const struct times *times = walk->meaning;
    const struct cp_walk_rank *self = &walk->ranks[rank];
    const struct cp_walk_lane *at = &self->lanes[lane];
    bool is_met = true;
    for (int32_t place = at->cursor; place < at->group_end; place++) {
        const struct step_time *own = time_of(walk, rank, lane, place);
        int peer = self->schedule->steps[at->steps[place]].peer;
        is_met =
            is_met && own->mate >= 0 && times->ranks[peer].steps[own->mate].is_posted;
    }
    return is_met;
}

/* The clock with which a group that has met ends: first it waited for the latest of its
 * peers, then for the bytes. */
static struct cp_cost end_of_group(const struct cp_walk *walk, int rank, int lane)
{
    const struct times *times = walk->meaning;
    const struct cp_walk_rank *self = &walk->ranks[rank];
    const struct cp_walk_lane *at = &self->lanes[lane];
    struct cp_cost clock = time_of(walk, rank, lane, at->cursor)->posted;
    double met_s = 0.0, arrival_s = 0.0;
    for (int32_t place = at->cursor; place < at->group_end; place++) {
        const struct step_time *own = time_of(walk, rank, lane, place);
        int peer = self->schedule->steps[at->steps[place]].peer;
        met_s = fmax(met_s, times->ranks[peer].steps[own->mate].posted.total_s);
        arrival_s = fmax(arrival_s, own->arrival_s);
    }
    spend_until(&clock, CP_COST_WAIT, met_s);
    spend_until(&clock, CP_COST_TRANSFER, arrival_s);
    return clock;
}

static enum cp_code end_group(struct cp_walk *walk, int rank, int lane)
{
    struct cp_cost clock = end_of_group(walk, rank, lane);
    note_done(walk, rank, lane, walk->ranks[rank].lanes[lane].group_end, &clock);
    return CP_OK;
}

static double when(const struct cp_walk *walk, int rank, int lane)
{
    return walk->ranks[rank].lanes[lane].group_end > 0
               ? end_of_group(walk, rank, lane).total_s
               : start_of(walk, rank, lane).total_s;
}

static const struct cp_walk_ops time_ops = {
    .step = do_step,
    .post = post_group,
    .is_met = is_group_met,
    .arrive = end_group,
    .when = when,
};

/* ---- before the walk ---- */

/* The step of `schedule` from `from` on that is the other half of a send to it, or -1. */
static int32_t find_receive(const struct cp_schedule *schedule, int from_rank,
                            int32_t from)
{
    for (int32_t at = from; at < schedule->step_count; at++) {
        const struct cp_step *step = &schedule->steps[at];
        if (step->op == CP_STEP_RECV && step->peer == from_rank) {
            return at;
        }
    }
    return -1;
}

/* The k-th send from one rank to another meets the k-th receive there. */
static void find_mates(const struct cp_walk *walk, int from, int to)
{
    const struct times *times = walk->meaning;
    const struct cp_schedule *sender = walk->ranks[from].schedule;
    int32_t receive = -1;
    for (int32_t at = 0; at < sender->step_count; at++) {
        if (sender->steps[at].op != CP_STEP_SEND || sender->steps[at].peer != to) {
            continue;
        }
        receive = find_receive(walk->ranks[to].schedule, from, receive + 1);
        if (receive < 0) {
            return;
        }
        times->ranks[from].steps[at].mate = receive;
        times->ranks[to].steps[receive].mate = at;
    }
}

/* Messages of a group are enqueued once, and so are copies of a lane in a row and waits that
 * follow each other. `before`: the step before it on its lane, or NULL. */
static bool joins(const struct cp_step *step, const struct cp_step *before)
{
    if (before == NULL || cp_step_is_message(step) != cp_step_is_message(before)) {
        return false;
    }
    if (cp_step_is_message(step)) {
        return step->group == before->group;
    }
    return step->op == before->op &&
           (step->op == CP_STEP_COPY ||
            (step->op == CP_STEP_AWAIT && before == step - 1));
}

static void count_launches(const struct cp_schedule *schedule, struct step_time *times)
{
    const struct cp_step *last[CP_LANES] = {NULL};
    int32_t launches = 0;
    for (int32_t at = 0; at < schedule->step_count; at++) {
        const struct cp_step *step = &schedule->steps[at];
        const struct cp_step *before = last[step->lane];
        bool is_joined = joins(step, before);
        launches += !is_joined;
        times[at].launches = launches;
        times[at].is_joined = is_joined;
        times[at].mate = -1;
        last[step->lane] = step;
    }
}

/* What a walk works with: owned by its caller. */
struct room {
    struct cp_walk_rank *walk_ranks;
    struct rank_time *ranks;
    struct step_time *steps;
    int32_t *numbers;
};

static enum cp_code make_room(const struct cp_schedule *const *schedules, int world,
                              struct room *room)
{
    int64_t steps = 0;
    for (int rank = 0; rank < world; rank++) {
        steps += schedules[rank]->step_count;
    }
    static const char what[] = "a cost walk";
    CP_TRY(
        cp_mem_create_array(world, sizeof *room->walk_ranks, what, &room->walk_ranks));
    CP_TRY(cp_mem_create_array(world, sizeof *room->ranks, what, &room->ranks));
    CP_TRY(cp_mem_create_array(steps, sizeof *room->steps, what, &room->steps));
    return cp_mem_create_array(2 * steps, sizeof *room->numbers, what, &room->numbers);
}

static enum cp_code walk_all(const struct cp_schedule *const *schedules, int world,
                             const struct cp_speeds *speeds, const struct room *room,
                             struct cp_cost *costs)
{
    struct times times = {.speeds = speeds, .ranks = room->ranks};
    struct cp_walk walk = {
        .ops = &time_ops, .meaning = &times, .ranks = room->walk_ranks, .world = world};
    int64_t before = 0;
    for (int rank = 0; rank < world; rank++) {
        times.ranks[rank].steps = room->steps + before;
        cp_walk_rank_init(&walk.ranks[rank], schedules[rank],
                          room->numbers + 2 * before);
        count_launches(schedules[rank], times.ranks[rank].steps);
        before += schedules[rank]->step_count;
    }
    for (int rank = 0; rank < world; rank++) {
        for (int peer = 0; peer < world; peer++) {
            find_mates(&walk, rank, peer);
        }
    }
    CP_TRY(cp_walk_run(&walk));
    if (!cp_walk_is_over(&walk)) {
        return cp_fail(CP_ERR_INTERNAL,
                       "the steps of the schedules wait for each other");
    }
    for (int rank = 0; rank < world; rank++) {
        costs[rank] = times.ranks[rank].now[0];
        for (int lane = 1; lane < CP_LANES; lane++) {
            join(&costs[rank], &times.ranks[rank].now[lane]);
        }
    }
    return CP_OK;
}

enum cp_code cp_cost_walk(const struct cp_schedule *const *schedules, int world,
                          const struct cp_speeds *speeds, struct cp_cost *costs)
{
    struct room room = {.steps = NULL};
    enum cp_code code = make_room(schedules, world, &room);
    if (code == CP_OK) {
        code = walk_all(schedules, world, speeds, &room, costs);
    }
    cp_mem_destroy(&room.walk_ranks);
    cp_mem_destroy(&room.ranks);
    cp_mem_destroy(&room.steps);
    cp_mem_destroy(&room.numbers);
    return code;
}
