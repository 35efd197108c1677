/* What a call costs on each rank: counted on simulated GPUs in a warm call, one whose
 * plan is known. */
#ifndef CP_TESTS_COSTS_H
#define CP_TESTS_COSTS_H

#include "gpus.h"
#include "ipcs.h"
#include "tally.h"

struct costs_case {
    enum cp_op op; /* CP_OP_ATTENTION or its backward */
    int ring, ulysses;
    int32_t variant;
    enum cp_dtype dtype;
    int64_t batch, heads, dim;
    int64_t rows[SCENE_MOST_RANKS]; /* of queries and keys */
    bool is_executed;               /* else the GPUs run dry (simgpu.h) */
    bool by_windows;                /* else by NCCL */
};

/* Of one rank. */
struct costs {
    struct tally tally;
    struct simgpu_stats stats; /* until the call returned; not what is alive */
    uint64_t exchanges;        /* of records at the gate */
    int64_t host_allocations;  /* of the library, all ranks together */
    size_t workspace_bytes, window_bytes;
};

struct costs_world {
    struct world world; /* first, so that a transport's argument is this */
    const struct costs_case *what;
    struct cp_view tensors[SCENE_MOST_RANKS][CP_TENSORS];
    uint64_t number[SCENE_MOST_RANKS]; /* of the rank's last call at the gate */
    struct costs *costs;               /* of each rank */
};

static inline void costs_open(struct world *w)
{
    const struct costs_case *what = ((struct costs_world *)w)->what;
    if (what->by_windows) {
        ipcs_open(w);
    } else {
        gpus_open(w);
    }
    if (!what->is_executed) {
        simgpu_run_dry();
    }
}

static inline enum cp_code costs_join(struct world *w, int rank,
                                      struct cp_context_parts *parts)
{
    CP_TRY(((struct costs_world *)w)->what->by_windows ? ipcs_join(w, rank, parts)
                                                       : gpus_join(w, rank, parts));
    parts->kernels.select = tally_select;
    return CP_OK;
}

/* The rank's tensors that the call has, in one block each. */
static inline void costs_make_tensors(struct costs_world *self, int rank)
{
    const struct costs_case *c = self->what;
    int64_t rows = c->rows[rank];
    enum cp_dtype sum = cp_dtype_sum(c->dtype);
    struct cp_view whole =
        cp_view_compact(NULL, c->dtype, c->batch, rows, c->heads, c->dim);
    struct cp_view numbers = cp_view_compact(NULL, sum, c->batch, rows, c->heads, 1);
    struct cp_view *t = self->tensors[rank];
    t[CP_TENSOR_Q] = t[CP_TENSOR_K] = t[CP_TENSOR_V] = t[CP_TENSOR_OUT] = whole;
    if (c->op == CP_OP_ATTENTION_BACKWARD) {
        t[CP_TENSOR_DOUT] = t[CP_TENSOR_DQ] = t[CP_TENSOR_DK] = t[CP_TENSOR_DV] = whole;
        t[CP_TENSOR_LSE] = numbers;
    }
    for (int role = 0; role < CP_TENSORS; role++) {
        size_t bytes =
            (size_t)cp_view_count(&t[role]) * (size_t)cp_dtype_bytes(t[role].dtype);
        CHECK_EQ_I64(cudaMalloc((void **)&t[role].data, bytes), cudaSuccess);
    }
}

static inline void costs_start_rank(int rank, void *arg)
{
    CHECK_EQ_I64(cudaSetDevice(rank), cudaSuccess);
    costs_make_tensors(arg, rank);
}

static inline void costs_end_rank(int rank, void *arg)
{
    struct costs_world *self = arg;
    CHECK_EQ_I64(cudaSetDevice(rank), cudaSuccess);
    for (int role = 0; role < CP_TENSORS; role++) {
        CHECK_EQ_I64(cudaFree(self->tensors[rank][role].data), cudaSuccess);
    }
}

/* A forward as inference calls it, without lse. */
static inline enum cp_code costs_call(struct costs_world *self, int rank)
{
    const struct costs_case *c = self->what;
    const struct gpu *gpu = self->world.own[rank];
    struct cp_context *context = self->world.context[rank];
    struct cp_record record = {.call = {.op = (int32_t)c->op,
                                        .batch = c->batch,
                                        .heads = c->heads,
                                        .kv_heads = c->heads,
                                        .head_dim = c->dim,
                                        .value_dim = c->dim,
                                        .dtype = (int32_t)c->dtype}};
    double scale = 1.0 / sqrt((double)c->dim);
    memcpy(&record.call.scale_bits, &scale, sizeof scale);
    record.sizes[CP_SIZE_Q_ROWS] = record.sizes[CP_SIZE_KV_ROWS] = c->rows[rank];
    CP_TRY(cp_context_describe(context, (struct cp_stream *)gpu->stream, &record));
    CP_TRY(cp_context_begin(context, &record, NULL));
    return cp_context_execute(context, self->tensors[rank]);
}

/* Calls, and leaves the device idle; what the device was asked until the call returned. */
static inline struct simgpu_stats costs_play_rank(struct costs_world *self, int rank)
{
    CHECK_EQ_I64(cudaSetDevice(rank), cudaSuccess);
    struct simgpu_stats before = simgpu_device_stats(rank);
    enum cp_code code = costs_call(self, rank);
    struct simgpu_stats after = simgpu_device_stats(rank);
    if (!CHECK_EQ_I64(code, CP_OK)) {
        printf("rank %d: %s\n", rank, cp_last_error()->text);
    }
    CHECK_EQ_I64(cudaDeviceSynchronize(), cudaSuccess);
    self->number[rank] = atomic_load(&self->world.recorder[rank].flight->call) >> 8;
    uint64_t *to = (uint64_t *)&after;
    const uint64_t *from = (const uint64_t *)&before;
    for (size_t i = 0; i < sizeof after / sizeof *to; i++) {
        to[i] -= from[i];
    }
    return after;
}

static inline void costs_play_uncounted(int rank, void *arg)
{
    (void)costs_play_rank(arg, rank);
}

static inline void costs_play_counted(int rank, void *arg)
{
    struct costs_world *self = arg;
    struct costs *costs = &self->costs[rank];
    tally_here = &costs->tally;
    tally_here->device = rank;
    costs->stats = costs_play_rank(self, rank);
    tally_here = NULL;
    struct cp_context_memory memory = cp_context_memory(self->world.context[rank]);
    costs->workspace_bytes = memory.workspace_bytes;
    costs->window_bytes = memory.window_bytes;
}

/* The costs of each rank. */
static inline void costs_play(const struct costs_case *what, struct costs *costs)
{
    static const struct world_transport transport = {
        .name = "simulated GPUs",
        .open = costs_open,
        .close = gpus_close,
        .join = costs_join,
        .leave = gpus_leave,
    };
    struct costs_world self = {.what = what, .costs = costs};
    int world = what->ring * what->ulysses;
    memset(costs, 0, (size_t)world * sizeof *costs);
    world_open(&self.world, what->ring, what->ulysses, &transport, what->variant, 0);
    for (int rank = 0; rank < world; rank++) {
        struct gpu *gpu = self.world.own[rank];
        gpu->device->ops = rank == 0 ? tally_over(gpu->device->ops) : &tally_device;
    }
    ranks_as_threads(world, costs_start_rank, &self);
    ranks_as_threads(world, costs_play_uncounted, &self);
    int64_t allocations = cp_mem_stats().allocations;
    ranks_as_threads(world, costs_play_counted, &self);
    allocations = cp_mem_stats().allocations - allocations;
    for (int rank = 0; rank < world; rank++) {
        costs[rank].exchanges = -self.number[rank];
        costs[rank].host_allocations = allocations;
    }
    /* The number of a call is one more than the exchanges before it. */
    ranks_as_threads(world, costs_play_uncounted, &self);
    for (int rank = 0; rank < world; rank++) {
        costs[rank].exchanges += self.number[rank];
    }
    ranks_as_threads(world, costs_end_rank, &self);
    world_close(&self.world);
    simgpu_reset();
}

#endif
