/* What a call costs in the C core, before and beside the arithmetic.
 *
 *   bench_gate OP WORLD ROUNDS ROWS HEADS DIM
 *
 * OP is "agree", one exchange at the gate and nothing else, or "attention", a whole float32 call. WORLD processes join one
 * context and call ROUNDS times, after a tenth as many to warm up. Rank 0 prints one JSON line: medians over batches of 50
 * calls, in microseconds of wall time a call. benchmarks/gate.py alternates it with the same call from Python. */
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/clock.h"
#include "exec/context.h"
#include "tensor/dtype.h"

enum { BATCH = 50, MOST_BATCHES = 20000 };

struct job {
    enum cp_op op;
    int world, rounds;
    int64_t rows, heads, dim;
    char key[64];
};

static void end_with(const char *what)
{
    (void)fprintf(stderr, "bench_gate: %s: %s\n", what, cp_last_error()->text);
    exit(1);
}

/* (1, rows, heads, dim) float32. */
static struct cp_view tensor_of(const struct job *job, int64_t dim)
{
    size_t count = (size_t)(job->rows * job->heads * dim);
    float *data = calloc(count, sizeof *data);
    if (data == NULL) {
        (void)fprintf(stderr, "bench_gate: out of memory\n");
        exit(1);
    }
    for (size_t i = 0; i < count; i++) {
        data[i] = (float)(i % 7) - 3.0f;
    }
    struct cp_view view = {.data = (char *)data, .dtype = CP_DTYPE_FLOAT32};
    int64_t n[CP_AXES] = {1, job->rows, job->heads, dim};
    int64_t stride = (int64_t)sizeof *data;
    for (int axis = CP_AXES - 1; axis >= 0; axis--) {
        view.n[axis] = n[axis];
        view.stride[axis] = stride;
        stride *= n[axis];
    }
    return view;
}

static struct cp_record record_of(const struct job *job)
{
    double scale = 1.0 / sqrt((double)job->dim);
    struct cp_record record = {.call = {.op = (int32_t)job->op}};
    if (job->op == CP_OP_ATTENTION) {
        record.call.batch = 1;
        record.call.heads = record.call.kv_heads = job->heads;
        record.call.head_dim = record.call.value_dim = job->dim;
        record.call.dtype = CP_DTYPE_FLOAT32;
        memcpy(&record.call.scale_bits, &scale, sizeof scale);
        record.sizes[CP_SIZE_Q_ROWS] = record.sizes[CP_SIZE_KV_ROWS] = job->rows;
    }
    return record;
}

static void call(const struct job *job, struct cp_context *context,
                 const struct cp_view tensors[CP_TENSORS])
{
    struct cp_record record = record_of(job);
    if (cp_context_describe(context, &record) != CP_OK ||
        cp_context_begin(context, &record, NULL) != CP_OK ||
        (job->op == CP_OP_ATTENTION &&
         cp_context_execute(context, tensors, NULL) != CP_OK)) {
        end_with("a call failed");
    }
}

static int compare(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static void run_rank(const struct job *job, int rank)
{
    static double us[MOST_BATCHES];
    struct cp_view tensors[CP_TENSORS] = {{.data = NULL}};
    struct cp_context *context = NULL;
    struct cp_join_args args = {
        .config = {.ring_degree = job->world, .ulysses_degree = 1, .timeout = 60.0},
        .key = job->key,
        .rank = rank,
        .world = job->world,
    };
    if (cp_context_join(&args, &context) != CP_OK) {
        end_with("no context");
    }
    for (int role = CP_TENSOR_Q; role <= CP_TENSOR_V; role++) {
        tensors[role] = tensor_of(job, job->dim);
    }
    tensors[CP_TENSOR_OUT] = tensor_of(job, job->dim);
    for (int round = 0; round < job->rounds / 10 + 2; round++) {
        call(job, context, tensors);
    }
    int batches = job->rounds / BATCH;
    for (int batch = 0; batch < batches; batch++) {
        int64_t start_ns = cp_now_ns();
        for (int round = 0; round < BATCH; round++) {
            call(job, context, tensors);
        }
        us[batch] = (double)(cp_now_ns() - start_ns) * 1e-3 / BATCH;
    }
    if (rank == 0) {
        qsort(us, (size_t)batches, sizeof us[0], compare);
        (void)printf("{\"op\": \"%s\", \"world\": %d, \"us\": %.3f, \"tenth\": %.3f}\n",
                     cp_op_name(job->op), job->world, us[batches / 2],
                     us[batches / 10]);
    }
    cp_context_destroy(&context);
}

int main(int argc, char **argv)
{
    struct job job;
    int failed = 0;
    if (argc != 7) {
        (void)fprintf(stderr, "usage: bench_gate OP WORLD ROUNDS ROWS HEADS DIM\n");
        return 2;
    }
    job.op = strcmp(argv[1], "agree") == 0 ? CP_OP_AGREE : CP_OP_ATTENTION;
    job.world = atoi(argv[2]);
    job.rounds = atoi(argv[3]);
    job.rows = atoi(argv[4]);
    job.heads = atoi(argv[5]);
    job.dim = atoi(argv[6]);
    (void)snprintf(job.key, sizeof job.key, "bench_gate %ld", (long)getpid());
    if (job.rounds < BATCH || job.rounds > BATCH * MOST_BATCHES) {
        (void)fprintf(stderr, "bench_gate: ROUNDS must be %d to %d\n", BATCH,
                      BATCH * MOST_BATCHES);
        return 2;
    }
    for (int rank = 1; rank < job.world; rank++) {
        if (fork() == 0) {
            run_rank(&job, rank);
            return 0;
        }
    }
    run_rank(&job, 0);
    for (int rank = 1; rank < job.world; rank++) {
        int status = 0;
        failed += wait(&status) < 0 || status != 0;
    }
    return failed != 0;
}
