/* What the schedule of a call asks of each rank's core: steps by operation, and bytes.
 *
 *   bench_schedule OP RING ULYSSES VARIANT DTYPE HEADS DIM ROWS...
 *
 * OP is "attention" or "backward", VARIANT "even" or "anything", ROWS those of each rank. Prints one JSON line a rank, for
 * the kernel that this CPU would use and ranks of one host, which read each other's windows in place: `peer_bytes` is what
 * a rank's steps read there, each read counted. Nothing is computed. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernel/kernel_cpu.h"
#include "schedule/schedule.h"
#include "tensor/dtype.h"

static int fail(const char *what)
{
    (void)fprintf(stderr, "bench_schedule: %s: %s\n", what, cp_last_error()->text);
    return 1;
}

static enum cp_dtype dtype_of(const char *name)
{
    for (int dtype = 0; dtype < CP_DTYPE_COUNT; dtype++) {
        if (strcmp(cp_dtype_name((enum cp_dtype)dtype), name) == 0) {
            return (enum cp_dtype)dtype;
        }
    }
    return CP_DTYPE_NONE;
}

static int64_t peer_bytes(const struct cp_schedule *schedule,
                          const struct cp_step *step)
{
    int64_t bytes = 0;
    for (int arg = 0; arg < CP_STEP_ARGS; arg++) {
        const struct cp_box *box = &step->arg[arg];
        if (box->buffer == CP_NO_BUFFER) {
            continue;
        }
        const struct cp_buffer *buffer = &schedule->buffers[box->buffer];
        bool is_peers =
            buffer->kind == CP_BUFFER_WINDOW && buffer->owner != schedule->rank;
        bytes += is_peers ? cp_box_bytes(schedule, box) : 0;
    }
    return bytes;
}

static void print(const struct cp_schedule *schedule)
{
    int counts[CP_STEP_OPS] = {0};
    int64_t bytes = 0;
    for (int32_t at = 0; at < schedule->step_count; at++) {
        counts[schedule->steps[at].op] += 1;
        bytes += peer_bytes(schedule, &schedule->steps[at]);
    }
    (void)printf("{\"rank\": %d, \"steps\": {", schedule->rank);
    const char *comma = "";
    for (int op = 0; op < CP_STEP_OPS; op++) {
        if (counts[op] > 0) {
            (void)printf("%s\"%s\": %d", comma, cp_step_name((enum cp_step_op)op),
                         counts[op]);
            comma = ", ";
        }
    }
    (void)printf("}, \"peer_bytes\": %lld, \"window_bytes\": %lld, "
                 "\"scratch_bytes\": %lld}\n",
                 (long long)bytes, (long long)schedule->window_bytes,
                 (long long)schedule->scratch_bytes);
}

int main(int argc, char **argv)
{
    enum { FIRST_ROWS = 8 };
    static struct cp_record records[CP_MAX_WORLD];
    const struct cp_kernel_ops *kernel = NULL;
    struct cp_format format;
    struct cp_plan *plan = NULL;
    int isa = 0;
    int world = argc - FIRST_ROWS;
    if (world < 1 || world > CP_MAX_WORLD) {
        (void)fprintf(stderr, "usage: bench_schedule OP RING ULYSSES VARIANT DTYPE "
                              "HEADS DIM ROWS...\n");
        return 2;
    }
    bool is_backward = strcmp(argv[1], "backward") == 0;
    struct cp_call call = {
        .op = is_backward ? CP_OP_ATTENTION_BACKWARD : CP_OP_ATTENTION,
        .ring_degree = atoi(argv[2]),
        .ulysses_degree = atoi(argv[3]),
        .variant = strcmp(argv[4], "anything") == 0 ? CP_ANYTHING : CP_EVEN,
        .dtype = (int32_t)dtype_of(argv[5]),
        .batch = 1,
        .heads = atoll(argv[6]),
        .kv_heads = atoll(argv[6]),
        .head_dim = atoll(argv[7]),
        .value_dim = atoll(argv[7]),
    };
    double scale = 1.0 / sqrt((double)call.head_dim);
    memcpy(&call.scale_bits, &scale, sizeof scale);
    if (call.ring_degree * call.ulysses_degree != world) {
        (void)fprintf(stderr, "bench_schedule: %d x %d ranks, but rows of %d\n",
                      call.ring_degree, call.ulysses_degree, world);
        return 2;
    }
    if (cp_kernel_cpu_parse(getenv("CP_ATTN_ISA"), &isa) != CP_OK ||
        cp_kernel_cpu_select(isa, (enum cp_backend)call.backend, dtype_of(argv[5]),
                             call.head_dim, call.value_dim, &kernel,
                             &format) != CP_OK) {
        return fail("no kernel");
    }
    call.format = format.id;
    for (int rank = 0; rank < world; rank++) {
        records[rank].call = call;
        records[rank].sizes[CP_SIZE_Q_ROWS] = atoll(argv[FIRST_ROWS + rank]);
        records[rank].sizes[CP_SIZE_KV_ROWS] = atoll(argv[FIRST_ROWS + rank]);
    }
    if (cp_plan_create(records, world, &format, &plan) != CP_OK) {
        return fail("no plan");
    }
    for (int rank = 0; rank < world; rank++) {
        struct cp_schedule *schedule = NULL;
        if (cp_schedule_create(plan, rank, CP_PULL, &schedule) != CP_OK) {
            return fail("no schedule");
        }
        print(schedule);
        cp_schedule_destroy(&schedule);
    }
    cp_plan_destroy(&plan);
    return 0;
}
