/* Writes and walks the schedules of all ranks for each number of chunks. */
#include "schedule/head_chunks.h"

#include <math.h>

#include "schedule/machine.h"

enum {
    MOST_RANKS = 16, /* of one host, whose links the speeds are of */
    MOST_CHUNKS = 8,
};

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

static enum cp_code choose(struct cp_plan *plan, enum cp_transport transport,
                           const struct cp_speeds *speeds)
{
    int most = cp_plan_most_chunks(plan);
    int best = 1;
    double least = 0.0;
    most = most < MOST_CHUNKS ? most : MOST_CHUNKS;
    for (int chunks = 1; chunks <= most; chunks++) {
        double seconds = 0.0;
        plan->chunks = chunks;
        CP_TRY(time_call(plan, transport, speeds, &seconds));
        if (chunks == 1 || seconds < least * (best == 1 ? pays : 1.0)) {
            best = chunks;
            least = seconds;
        }
    }
    plan->chunks = best;
    return CP_OK;
}

enum cp_code cp_head_chunks_choose(struct cp_plan *plan, enum cp_transport transport)
{
    const struct cp_call *call = &plan->signature.call;
    if (!cp_call_is_attention(call) || call->kv_replicated != 0 || plan->world < 2 ||
        plan->world > MOST_RANKS || cp_plan_size(plan, 0, CP_SIZE_HEAD_CHUNKS) != 0 ||
        cp_plan_most_chunks(plan) == 1) {
        return CP_OK;
    }
    const struct cp_machine *machine = machine_of(plan);
    return machine == NULL
               ? CP_OK
               : choose(plan, transport, cp_machine_speeds(machine, transport));
}
