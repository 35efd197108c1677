/* Writes and walks the schedules of all ranks for each way to run. */
#include "schedule/choose.h"

#include <math.h>

#include "schedule/machine.h"

enum {
    MOST_RANKS = 16, /* of one host, whose links the speeds are of */
    MOST_CHUNKS = 8,
};

/* Of the keys that a rank holds when all blocks come at once. */
static const double most_bytes = 256.0 * 1024 * 1024;

/* What is less of a gain is the model's to be wrong by. */
static const double pays = 0.95;

/* The machine that all ranks are; NULL: none that is known. */
static const struct cp_machine *machine_of(const struct cp_plan *plan)
{
    int64_t generation = cp_plan_size(plan, 0, CP_SIZE_GENERATION);
    for (int rank = 1; rank < plan->world; rank++) {
        if (cp_plan_size(plan, rank, CP_SIZE_GENERATION) != generation) {
            return NULL;
        }
    }
    return cp_machine_of(generation);
}

/* Seconds of the slowest rank. */
static enum cp_code time_call(const struct cp_plan *plan, enum cp_transport transport,
                              const struct cp_speeds *speeds, double *seconds)
{
    struct cp_schedule *schedules[MOST_RANKS] = {NULL};
    const struct cp_schedule *all[MOST_RANKS];
    struct cp_cost costs[MOST_RANKS];
    enum cp_code code = CP_OK;
    for (int rank = 0; rank < plan->world && code == CP_OK; rank++) {
        code = cp_schedule_create(plan, rank, transport, &schedules[rank]);
        all[rank] = schedules[rank];
    }
    if (code == CP_OK) {
        code = cp_cost_walk(all, plan->world, speeds, costs);
    }
    *seconds = 0.0;
    for (int rank = 0; rank < plan->world; rank++) {
        *seconds = code == CP_OK ? fmax(*seconds, costs[rank].total_s) : 0.0;
        cp_schedule_destroy(&schedules[rank]);
    }
    return code;
}

/* ---- what there is to choose ---- */

/* Ways of a ring, the first as it is without a choice; their number. */
static int list_ways(const struct cp_plan *plan, enum cp_rotate ways[2])
{
    const struct cp_call *call = &plan->signature.call;
    double rows = 0.0;
    for (int rank = 0; rank < plan->world; rank++) {
        rows += (double)plan->kv_rows[rank].count;
    }
    double bytes = rows * (double)call->batch * (double)plan->kv_heads[0].count *
                   (double)(call->head_dim + call->value_dim) *
                   (double)cp_dtype_bytes((enum cp_dtype)call->dtype);
    ways[0] = plan->rotate;
    ways[1] = CP_ROTATE_ALLGATHER;
    bool is_free = call->rotate == CP_ROTATE_AUTO;
    return is_free && plan->ring > 2 && bytes < most_bytes ? 2 : 1;
}

static int most_chunks(const struct cp_plan *plan)
{
    int most = cp_plan_most_chunks(plan);
    return cp_plan_size(plan, 0, CP_SIZE_HEAD_CHUNKS) != 0 ? plan->chunks
           : most < MOST_CHUNKS                            ? most
                                                           : MOST_CHUNKS;
}

static enum cp_code choose(struct cp_plan *plan, enum cp_transport transport,
                           const struct cp_speeds *speeds)
{
    const int given = plan->chunks, most = most_chunks(plan);
    enum cp_rotate ways[2];
    int count = list_ways(plan, ways), best = given, best_way = 0;
    double least = 0.0;
    for (int way = 0; way < count; way++) {
        for (int chunks = given; chunks <= most; chunks++) {
            double seconds = 0.0;
            bool is_as_given = best == given && best_way == 0;
            plan->chunks = chunks;
            plan->rotate = ways[way];
            CP_TRY(time_call(plan, transport, speeds, &seconds));
            if (least == 0.0 || seconds < least * (is_as_given ? pays : 1.0)) {
                best = chunks;
                best_way = way;
                least = seconds;
            }
        }
    }
    plan->chunks = best;
    plan->rotate = ways[best_way];
    return CP_OK;
}

enum cp_code cp_schedule_choose(struct cp_plan *plan, enum cp_transport transport)
{
    enum cp_rotate ways[2];
    if (!cp_call_is_attention(&plan->signature.call) ||
        plan->signature.call.kv_replicated != 0 || plan->world < 2 ||
        plan->world > MOST_RANKS ||
        (list_ways(plan, ways) == 1 && most_chunks(plan) == plan->chunks)) {
        return CP_OK;
    }
    const struct cp_machine *machine = machine_of(plan);
    return machine == NULL
               ? CP_OK
               : choose(plan, transport, cp_machine_speeds(machine, transport));
}
