/* Whole calls in the C core: WORLD processes join one context and make the same call again and again.
 *
 *   bench_call NAME=VALUE...
 *
 *   op       agree (one exchange at the gate and nothing else), attention or attention_backward; float32
 *   ring, ulysses, threads     degrees, whose product is the number of processes, and threads of each; 1
 *   tokens, heads, dim         of the whole; 4 x ranks, 2, 8
 *   uneven   1: rank r holds 4 + r parts of the tokens; 0
 *   batch, batches             calls in a row that are timed together, 50, and how often, 10, after two to warm up
 *
 * Rank 0 prints one JSON line: the wall time of each batch, in microseconds a call; the blocks that were allocated in
 * them; the bytes of workspace and window that the context holds. A call ends on no rank before it has begun on all. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/mem.h"
#include "exec/context.h"
#include "tensor/view.h"

enum { MOST_BATCHES = 20000, MOST_RANKS = 64 };

struct job {
    enum cp_op op;
    int64_t ring, ulysses, threads, tokens, heads, dim, uneven, batch, batches;
    char key[64];
};

static void end_with(const char *what)
{
    (void)fprintf(stderr, "bench_call: %s: %s\n", what, cp_last_error()->text);
    exit(1);
}

/* (1, rows, heads, dim) float32. */
static struct cp_view tensor_of(int64_t rows, int64_t heads, int64_t dim)
{
    size_t count = (size_t)(rows * heads * dim);
    float *data = calloc(count + 1, sizeof *data);
    if (data == NULL) {
        (void)fprintf(stderr, "bench_call: out of memory\n");
        exit(1);
    }
    for (size_t i = 0; i < count; i++) {
        data[i] = (float)(i % 7) - 3.0f;
    }
    return cp_view_compact(data, CP_DTYPE_FLOAT32, 1, rows, heads, dim);
}

static int world_of(const struct job *job)
{
    return (int)(job->ring * job->ulysses);
}

static int64_t rows_of(const struct job *job, int rank)
{
    int64_t parts = 0, before = 0;
    for (int r = 0; r < world_of(job); r++) {
        int64_t part = job->uneven != 0 ? 4 + r : 1;
        before += r < rank ? part : 0;
        parts += part;
    }
    int64_t own = job->uneven != 0 ? 4 + rank : 1;
    return job->tokens * (before + own) / parts - job->tokens * before / parts;
}

static struct cp_record record_of(const struct job *job, int rank)
{
    double scale = 1.0 / sqrt((double)job->dim);
    struct cp_record record = {.call = {.op = (int32_t)job->op}};
    if (job->op != CP_OP_AGREE) {
        record.call.batch = 1;
        record.call.heads = record.call.kv_heads = job->heads;
        record.call.head_dim = record.call.value_dim = job->dim;
        record.call.dtype = CP_DTYPE_FLOAT32;
        memcpy(&record.call.scale_bits, &scale, sizeof scale);
        record.sizes[CP_SIZE_Q_ROWS] = record.sizes[CP_SIZE_KV_ROWS] =
            rows_of(job, rank);
    }
    return record;
}

static void call(const struct job *job, int rank, struct cp_context *context,
                 const struct cp_view tensors[CP_TENSORS])
{
    struct cp_record record = record_of(job, rank);
    if (cp_context_describe(context, NULL, &record) != CP_OK ||
        cp_context_begin(context, &record, NULL) != CP_OK ||
        (job->op != CP_OP_AGREE && cp_context_execute(context, tensors) != CP_OK)) {
        end_with("a call failed");
    }
}

static void run_rank(const struct job *job, int rank)
{
    static double us[MOST_BATCHES];
    struct cp_view tensors[CP_TENSORS] = {{.data = NULL}};
    struct cp_context *context = NULL;
    struct cp_join_args args = {
        .config = {.ring_degree = (int)job->ring,
                   .ulysses_degree = (int)job->ulysses,
                   .variant = job->uneven != 0 ? CP_ANYTHING : CP_EVEN,
                   .timeout = 600.0},
        .key = job->key,
        .rank = rank,
        .world = world_of(job),
        .threads = (int)job->threads,
        .isa = getenv("CP_ATTN_ISA"),
    };
    if (cp_context_join(&args, &context) != CP_OK) {
        end_with("no context");
    }
    int64_t rows = rows_of(job, rank);
    const int with_head_dim[] = {CP_TENSOR_Q,   CP_TENSOR_K,    CP_TENSOR_V,
                                 CP_TENSOR_OUT, CP_TENSOR_DOUT, CP_TENSOR_DQ,
                                 CP_TENSOR_DK,  CP_TENSOR_DV};
    bool is_backward = job->op == CP_OP_ATTENTION_BACKWARD;
    for (size_t i = 0; i < (is_backward ? 8 : 4); i++) {
        tensors[with_head_dim[i]] = tensor_of(rows, job->heads, job->dim);
    }
    if (is_backward) {
        tensors[CP_TENSOR_LSE] = tensor_of(rows, job->heads, 1);
    }
    int64_t allocations = 0;
    for (int64_t batch = -2; batch < job->batches; batch++) {
        if (batch == 0) {
            allocations = cp_mem_stats().allocations;
        }
        int64_t start_ns = cp_now_ns();
        for (int64_t i = 0; i < job->batch; i++) {
            call(job, rank, context, tensors);
        }
        us[batch < 0 ? 0 : batch] =
            (double)(cp_now_ns() - start_ns) * 1e-3 / (double)job->batch;
    }
    if (rank == 0) {
        (void)printf("{\"us\": [");
        for (int64_t batch = 0; batch < job->batches; batch++) {
            (void)printf("%s%.3f", batch > 0 ? ", " : "", us[batch]);
        }
        struct cp_context_memory memory = cp_context_memory(context);
        (void)printf("], \"allocations\": %lld, \"workspace_bytes\": %zu, "
                     "\"window_bytes\": %zu}\n",
                     (long long)(cp_mem_stats().allocations - allocations),
                     memory.workspace_bytes, memory.window_bytes);
    }
    cp_context_destroy(&context);
}

/* ---- the command line ---- */

static enum cp_op op_of(const char *name)
{
    const enum cp_op ops[] = {CP_OP_AGREE, CP_OP_ATTENTION, CP_OP_ATTENTION_BACKWARD};
    const char *const names[] = {"agree", "attention", "attention_backward"};
    for (int i = 0; i < 3; i++) {
        if (strcmp(name, names[i]) == 0) {
            return ops[i];
        }
    }
    (void)fprintf(
        stderr, "bench_call: op is %s; allowed: agree, attention, attention_backward\n",
        name);
    exit(2);
}

static void read_word(struct job *job, const char *word)
{
    const struct {
        const char *name;
        int64_t *value, most;
    } numbers[] = {
        {"ring", &job->ring, MOST_RANKS},
        {"ulysses", &job->ulysses, MOST_RANKS},
        {"threads", &job->threads, 1024},
        {"tokens", &job->tokens, 1 << 24},
        {"heads", &job->heads, 1 << 16},
        {"dim", &job->dim, 1 << 16},
        {"uneven", &job->uneven, 1},
        {"batch", &job->batch, 1000000},
        {"batches", &job->batches, MOST_BATCHES},
    };
    size_t length = strcspn(word, "=");
    if (strncmp(word, "op=", 3) == 0) {
        job->op = op_of(word + 3);
        return;
    }
    for (size_t i = 0; i < sizeof numbers / sizeof numbers[0]; i++) {
        if (strlen(numbers[i].name) == length &&
            strncmp(word, numbers[i].name, length) == 0 && word[length] == '=') {
            *numbers[i].value = strtoll(word + length + 1, NULL, 10);
            if (*numbers[i].value >= 0 && *numbers[i].value <= numbers[i].most) {
                return;
            }
        }
    }
    (void)fprintf(
        stderr, "bench_call: %s is no NAME=VALUE of those at the top of bench_call.c\n",
        word);
    exit(2);
}

int main(int argc, char **argv)
{
    struct job job = {.op = CP_OP_ATTENTION,
                      .ring = 1,
                      .ulysses = 1,
                      .threads = 1,
                      .heads = 2,
                      .dim = 8,
                      .batch = 50,
                      .batches = 10};
    int failed = 0;
    for (int i = 1; i < argc; i++) {
        read_word(&job, argv[i]);
    }
    job.tokens = job.tokens > 0 ? job.tokens : (int64_t)4 * world_of(&job);
    (void)snprintf(job.key, sizeof job.key, "bench_call %ld", (long)getpid());
    for (int rank = 1; rank < world_of(&job); rank++) {
        if (fork() == 0) {
            run_rank(&job, rank);
            return 0;
        }
    }
    run_rank(&job, 0);
    for (int rank = 1; rank < world_of(&job); rank++) {
        int status = 0;
        failed += wait(&status) < 0 || status != 0;
    }
    return failed != 0;
}
