/* The time that a call would take by published speeds, from the schedules of all ranks (csrc/schedule/cost.h).
 *
 *   model_schedule < LINES
 *
 * Each line is "GENERATION TRANSPORT CHUNKS OP RING ULYSSES VARIANT HEADS DIM ROWS...": GENERATION names a machine of
 * csrc/schedule/machine.c (90 for sm_90), TRANSPORT is "nccl", "ipc" or
 * "in-place" (ipc whose blocks are met where they lie), CHUNKS 0 for as many as pay, OP "attention" or
 * "backward", VARIANT "even" or "anything", ROWS those of each rank; batch 1, bfloat16. Prints one JSON line for each:
 * the slowest rank's time by what it went on, and the speeds. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "schedule/choose.h"
#include "schedule/machine.h"

enum { MOST_WORLD = 64, LINE_BYTES = 1024 };

struct job {
    int generation, chunks, ring, ulysses, heads, dim;
    enum cp_transport transport;
    bool is_backward, is_anything;
    int64_t rows[MOST_WORLD];
};

/* The layouts of the kernels of cuda/: keys as they are, and a float32 state. */
static struct cp_format format_of(const struct job *job)
{
    return (struct cp_format){
        .id = 1,
        .has_plain_keys = true,
        .state = {.row_align = 1, .row_bytes = (job->dim + 2) * 4},
    };
}

static enum cp_code make_plan(const struct job *job, struct cp_plan **plan)
{
    static struct cp_record records[MOST_WORLD];
    const struct cp_format format = format_of(job);
    struct cp_call call = {
        .op = job->is_backward ? CP_OP_ATTENTION_BACKWARD : CP_OP_ATTENTION,
        .ring_degree = job->ring,
        .ulysses_degree = job->ulysses,
        .variant = job->is_anything ? CP_ANYTHING : CP_EVEN,
        .dtype = CP_DTYPE_BFLOAT16,
        .batch = 1,
        .heads = job->heads,
        .kv_heads = job->heads,
        .head_dim = job->dim,
        .value_dim = job->dim,
    };
    for (int rank = 0; rank < job->ring * job->ulysses; rank++) {
        records[rank].call = call;
        records[rank].sizes[CP_SIZE_Q_ROWS] = job->rows[rank];
        records[rank].sizes[CP_SIZE_KV_ROWS] = job->rows[rank];
        records[rank].sizes[CP_SIZE_HEAD_CHUNKS] = job->chunks;
        records[rank].sizes[CP_SIZE_GENERATION] = job->generation;
    }
    return cp_plan_create(records, job->ring * job->ulysses, &format, plan);
}

static void print(const struct job *job, const struct cp_plan *plan,
                  const struct cp_speeds *speeds, const struct cp_cost *costs)
{
    const struct cp_cost *slowest = &costs[0];
    for (int rank = 1; rank < job->ring * job->ulysses; rank++) {
        slowest = costs[rank].total_s > slowest->total_s ? &costs[rank] : slowest;
    }
    (void)printf("{\"chunks\": %d, \"total_us\": %.2f", plan->chunks,
                 slowest->total_s * 1e6);
    for (int kind = 0; kind < CP_COST_KINDS; kind++) {
        (void)printf(", \"%s_us\": %.2f", cp_cost_name((enum cp_cost_kind)kind),
                     slowest->of_s[kind] * 1e6);
    }
    (void)printf(", \"attend_ops\": %g, \"grad_ops\": %g, \"processors\": %g, "
                 "\"tile_rows\": %g, \"memory_bytes\": %g, \"launch_s\": %g, "
                 "\"link_bytes\": %g, \"link_s\": %g, \"enqueue_s\": %g}\n",
                 speeds->attend_ops, speeds->grad_ops, speeds->processors,
                 speeds->tile_rows, speeds->memory_bytes, speeds->launch_s,
                 speeds->link_bytes, speeds->link_s, speeds->enqueue_s);
}

static enum cp_code model(const struct job *job)
{
    const struct cp_machine *machine = cp_machine_of(job->generation);
    struct cp_schedule *schedules[MOST_WORLD] = {NULL};
    struct cp_cost costs[MOST_WORLD];
    struct cp_plan *plan = NULL;
    int world = job->ring * job->ulysses;
    if (machine == NULL) {
        return cp_fail(CP_ERR_VALUE, "no speeds for generation %d", job->generation);
    }
    CP_TRY(make_plan(job, &plan));
    enum cp_code code = cp_schedule_choose(plan, job->transport);
    for (int rank = 0; rank < world && code == CP_OK; rank++) {
        code = cp_schedule_create(plan, rank, job->transport, &schedules[rank]);
    }
    if (code == CP_OK) {
        code = cp_cost_walk((const struct cp_schedule *const *)schedules, world,
                            cp_machine_speeds(machine, job->transport), costs);
    }
    if (code == CP_OK) {
        print(job, plan, cp_machine_speeds(machine, job->transport), costs);
    }
    for (int rank = 0; rank < world; rank++) {
        cp_schedule_destroy(&schedules[rank]);
    }
    cp_plan_destroy(&plan);
    return code;
}

/* False where the line is none. */
static bool parse(char *line, struct job *job)
{
    char transport[16], op[16], variant[16];
    int used = 0;
    *job = (struct job){0};
    if (sscanf(line, "%d %15s %d %15s %d %d %15s %d %d%n", &job->generation, transport,
               &job->chunks, op, &job->ring, &job->ulysses, variant, &job->heads,
               &job->dim, &used) != 9 ||
        job->ring < 1 || job->ulysses < 1 || job->ring > MOST_WORLD ||
        job->ulysses > MOST_WORLD || job->ring * job->ulysses > MOST_WORLD) {
        return false;
    }
    job->transport = strcmp(transport, "ipc") == 0        ? CP_PUSH
                     : strcmp(transport, "in-place") == 0 ? CP_PULL
                                                          : CP_TWO_SIDED;
    job->is_backward = strcmp(op, "backward") == 0;
    job->is_anything = strcmp(variant, "anything") == 0;
    for (int rank = 0; rank < job->ring * job->ulysses; rank++) {
        char *end = NULL;
        job->rows[rank] = strtoll(line + used, &end, 10);
        if (end == line + used) {
            return false;
        }
        used = (int)(end - line);
    }
    return true;
}

int main(void)
{
    char line[LINE_BYTES];
    while (fgets(line, sizeof line, stdin) != NULL) {
        struct job job;
        if (!parse(line, &job)) {
            (void)fprintf(stderr, "model_schedule: not a line: %s", line);
            return 2;
        }
        if (model(&job) != CP_OK) {
            (void)fprintf(stderr, "model_schedule: %s\n", cp_last_error()->text);
            return 1;
        }
    }
    return 0;
}
