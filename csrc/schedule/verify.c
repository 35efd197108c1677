/* The proof, call by call: check each step by itself, run all ranks, look at the outputs. */
#include "schedule/verify.h"

#include <string.h>

#include "schedule/verify_run.h"

/* What lasts from call to call. */
struct proof {
    struct cp_pool pool;
    const struct cp_schedule *const *schedules; /* (calls, world) */
    int world, processes;
    struct cp_access_log *logs; /* by arena */
    uint32_t *now;              /* (processes, processes) clock of every lane */
    uint32_t *end; /* (processes) what all ranks together know at the end of a call */
    struct cp_verify_report report;
};

static enum cp_code take(struct proof *proof, int64_t count, size_t bytes, void *out)
{
    void *block = NULL;
    CP_TRY(cp_pool_take(&proof->pool, count, bytes, &block));
    memcpy(out, &block, sizeof block);
    return CP_OK;
}

/* ---- before a call ---- */

/* Have all ranks a schedule of the same plan? */
static enum cp_code check_plans(const struct cp_schedule *const *of_call, int call,
                                int world)
{
    for (int rank = 0; rank < world; rank++) {
        struct cp_verify_at at = {.call = call, .rank = rank, .step = -1};
        const struct cp_schedule *schedule = of_call[rank];
        const struct cp_plan *plan = schedule->plan;
        const struct cp_plan *first = of_call[0]->plan;
        if (schedule->rank != rank || plan->world != world) {
            return cp_verify_fail(&at, "is the schedule of rank %d of %d",
                                  schedule->rank, plan->world);
        }
        if (plan != first &&
            (memcmp(&plan->signature.call, &first->signature.call,
                    sizeof plan->signature.call) != 0 ||
             memcmp(plan->signature.sizes, first->signature.sizes,
                    (size_t)world * CP_SIZE_COUNT * sizeof(int64_t)) != 0)) {
            return cp_verify_fail(&at, "its plan is not that of rank 0");
        }
    }
    return cp_name_check_size(of_call[0]->plan, call);
}

static enum cp_code fill_lanes(struct proof *proof, struct cp_verify_run *run,
                               const struct cp_schedule *schedule, int number)
{
    struct cp_run_rank *rank = &run->ranks[number];
    int32_t *room = NULL;
    CP_TRY(take(proof, cp_walk_room(schedule), sizeof *room, &room));
    CP_TRY(take(proof, schedule->step_count, sizeof *rank->done, &rank->done));
    cp_walk_rank_init(&run->walk.ranks[number], schedule, room);
    for (int i = 0; i < CP_LANES; i++) {
        rank->lanes[i].now =
            proof->now + (ptrdiff_t)(number * CP_LANES + i) * proof->processes;
    }
    return CP_OK;
}

static enum cp_code fill_contents(struct proof *proof, struct cp_verify_run *run,
                                  int number)
{
    struct cp_run_rank *rank = &run->ranks[number];
    const struct cp_schedule *schedule = run->walk.ranks[number].schedule;
    CP_TRY(
        take(proof, schedule->buffer_count, sizeof *rank->contents, &rank->contents));
    for (int32_t i = 0; i < schedule->buffer_count; i++) {
        struct cp_shape shape = cp_verify_shape(schedule->plan, &schedule->buffers[i]);
        int arena = cp_run_arena(proof->world, number, &shape.buffer);
        CP_TRY(cp_memory_content(&run->memory, arena, &shape, &rank->contents[i]));
        if (shape.buffer.kind == CP_BUFFER_INPUT) {
            CP_TRY(cp_meaning_fill(&run->meaning, number, rank->contents[i]));
        }
    }
    return CP_OK;
}

/* What a rank knows when a call starts: the last call of all ranks, since whoever comes to a
 * gate has left it. */
static void pass_gate(struct proof *proof, int rank)
{
    uint32_t *first = proof->now + (ptrdiff_t)(rank * CP_LANES) * proof->processes;
    size_t bytes = (size_t)proof->processes * sizeof *first;
    cp_clock_join(first, proof->end, proof->processes);
    for (int lane = 1; lane < CP_LANES; lane++) {
        cp_clock_join(first, first + (ptrdiff_t)lane * proof->processes,
                      proof->processes);
    }
    for (int lane = 1; lane < CP_LANES; lane++) {
        memcpy(first + (ptrdiff_t)lane * proof->processes, first, bytes);
    }
}

static enum cp_code prepare(struct proof *proof, struct cp_verify_run *run)
{
    const struct cp_schedule *const *of_call =
        proof->schedules + (ptrdiff_t)run->call * proof->world;
    CP_TRY(check_plans(of_call, run->call, proof->world));
    run->meaning.plan = of_call[0]->plan;
    run->memory.set_words = cp_name_set_words(run->meaning.plan);
    CP_TRY(take(proof, proof->world, sizeof *run->ranks, &run->ranks));
    CP_TRY(take(proof, proof->world, sizeof *run->walk.ranks, &run->walk.ranks));
    CP_TRY(take(proof, (int64_t)proof->world * proof->world, sizeof *run->channels,
                &run->channels));
    CP_TRY(take(proof, cp_run_arena_count(proof->world), sizeof(struct cp_content *),
                &run->memory.arenas));
    for (int rank = 0; rank < proof->world; rank++) {
        CP_TRY(cp_verify_buffers(of_call, run->call, rank));
        CP_TRY(cp_verify_steps(of_call[rank], run->call));
    }
    for (int rank = 0; rank < proof->world; rank++) {
        CP_TRY(fill_lanes(proof, run, of_call[rank], rank));
        CP_TRY(fill_contents(proof, run, rank));
        pass_gate(proof, rank);
    }
    return CP_OK;
}

/* ---- after a call ---- */

static enum cp_code check_output(struct proof *proof, struct cp_verify_run *run,
                                 int rank, enum cp_tensor_role role)
{
    struct cp_verify_at at = {.call = run->call, .rank = rank, .step = -1};
    struct cp_buffer buffer = {
        .kind = CP_BUFFER_OUTPUT, .role = (uint8_t)role, .owner = rank};
    enum cp_dtype dtype = CP_DTYPE_NONE;
    if (!cp_verify_tensor(run->meaning.plan, rank, CP_BUFFER_OUTPUT, role, buffer.n,
                          &dtype)) {
        return CP_OK;
    }
    struct cp_box all = {.n = {buffer.n[0], buffer.n[1], buffer.n[2], buffer.n[3]}};
    int arena = cp_run_arena(proof->world, rank, &buffer);
    if (cp_verify_box_is_empty(&all)) {
        return CP_OK;
    }
    if (run->memory.arenas[arena] == NULL) {
        return cp_verify_fail(&at, "never names its output %d", (int)role);
    }
    return cp_meaning_check_output(&run->meaning, &at, run->memory.arenas[arena]);
}

static void note_end(struct proof *proof, const struct cp_verify_run *run)
{
    for (int process = 0; process < proof->processes; process++) {
        cp_clock_join(proof->end, proof->now + (ptrdiff_t)process * proof->processes,
                      proof->processes);
    }
    proof->report.steps += run->walk.steps;
    for (int rank = 0; rank < proof->world; rank++) {
        const struct cp_schedule *schedule = run->walk.ranks[rank].schedule;
        if (schedule->window_bytes > proof->report.window_bytes) {
            proof->report.window_bytes = schedule->window_bytes;
        }
        if (schedule->scratch_bytes > proof->report.scratch_bytes) {
            proof->report.scratch_bytes = schedule->scratch_bytes;
        }
    }
}

static enum cp_code prove_call(struct proof *proof, int call)
{
    struct cp_verify_run run = {
        .pool = &proof->pool,
        .logs = proof->logs,
        .memory = {.pool = &proof->pool},
        .call = call,
        .world = proof->world,
        .processes = proof->processes,
        .walk = {.world = proof->world},
    };
    run.meaning.memory = &run.memory;
    run.meaning.call = call;
    CP_TRY(prepare(proof, &run));
    CP_TRY(cp_verify_run_all(&run));
    for (int rank = 0; rank < proof->world; rank++) {
        for (int role = 0; role < CP_TENSORS; role++) {
            CP_TRY(check_output(proof, &run, rank, (enum cp_tensor_role)role));
        }
    }
    /* The next call has other tensors. */
    memset(proof->logs + 2 * proof->world, 0,
           (size_t)(proof->world * CP_TENSORS) * sizeof *proof->logs);
    note_end(proof, &run);
    return CP_OK;
}

static enum cp_code prove(struct proof *proof, int calls)
{
    int64_t processes = proof->processes;
    CP_TRY(take(proof, cp_run_arena_count(proof->world), sizeof *proof->logs,
                &proof->logs));
    CP_TRY(take(proof, processes * processes, sizeof *proof->now, &proof->now));
    CP_TRY(take(proof, processes, sizeof *proof->end, &proof->end));
    for (int call = 0; call < calls; call++) {
        CP_TRY(prove_call(proof, call));
    }
    return CP_OK;
}

enum cp_code cp_schedule_verify(const struct cp_schedule *const *schedules, int calls,
                                int world, struct cp_verify_report *report)
{
    struct proof proof = {
        .schedules = schedules, .world = world, .processes = world * CP_LANES};
    enum cp_code code = prove(&proof, calls);
    cp_pool_fini(&proof.pool);
    if (code == CP_OK) {
        *report = proof.report;
    }
    return code;
}
