/* Ranks that are threads with a simulated GPU each, joined by NCCL's stand-in: what a
 * world's transport (tests/c/world.h) does. */
#ifndef CP_TESTS_GPUS_H
#define CP_TESTS_GPUS_H

#include <cuda_runtime.h>

#include "comm_nccl.h"
#include "device_cuda.h"
#include "kernel_cuda.h"
#include "sim_nccl.h"
#include "simgpu.h"
#include "world.h"

/* What a rank has on its GPU. */
struct gpu {
    int ordinal;
    struct cp_device *device;
    cudaStream_t stream; /* the caller's */
};

static double gpus_timeout = 100.0; /* seconds; of communicators yet to be made */

static inline void gpus_open(struct world *w)
{
    ncclUniqueId *id = calloc(1, sizeof *id);
    simgpu_reset();
    simgpu_seed(test_seed);
    simgpu_set_device_count(w->size);
    if (id == NULL || cp_comm_nccl_id(simnccl_table(), id) != CP_OK) {
        abort();
    }
    w->shared = id;
}

/* What graphs, or peers, have held goes after them, by a thread. */
static inline struct simgpu_live gpus_settle(void)
{
    struct simgpu_live live = simgpu_live();
    for (int ms = 0; ms < 5000 && live.comms + live.events + live.blocks > 0; ms++) {
        ranks_sleep_us(1000);
        live = simgpu_live();
    }
    return live;
}

static inline void gpus_close(struct world *w)
{
    struct simgpu_live live = gpus_settle();
    CHECK_EQ_I64(live.blocks, 0);
    CHECK_EQ_I64(live.streams, 0);
    CHECK_EQ_I64(live.events, 0);
    CHECK_EQ_I64(live.comms, 0);
    CHECK_EQ_I64(live.mappings, 0);
    CHECK_EQ_I64(live.graphs, 0);
    free(w->shared);
}

/* All but the communicator. */
static inline enum cp_code gpus_use(struct world *w, int rank, int ordinal,
                                    struct cp_context_parts *parts)
{
    struct gpu *gpu = calloc(1, sizeof *gpu);
    if (gpu == NULL || cudaSetDevice(ordinal) != cudaSuccess ||
        cudaStreamCreateWithFlags(&gpu->stream, cudaStreamNonBlocking) != cudaSuccess) {
        abort();
    }
    w->own[rank] = gpu;
    gpu->ordinal = ordinal;
    CP_TRY(cp_device_cuda_create(ordinal, &gpu->device));
    parts->device = gpu->device;
    parts->kernels = (struct cp_kernel_list){.select = cp_kernel_cuda_select};
    return CP_OK;
}

static inline enum cp_code gpus_join_by(const struct cp_nccl *nccl, struct world *w,
                                        int rank, struct cp_context_parts *parts)
{
    CP_TRY(gpus_use(w, rank, rank, parts));
    struct cp_comm_nccl_args args = {
        .nccl = nccl,
        .watch = &w->watch[rank],
        .id = *(const ncclUniqueId *)w->shared,
        .device = rank,
        .timeout = gpus_timeout,
    };
    return cp_comm_nccl_create(&args, &parts->comm);
}

static inline enum cp_code gpus_join(struct world *w, int rank,
                                     struct cp_context_parts *parts)
{
    return gpus_join_by(simnccl_table(), w, rank, parts);
}

static inline void gpus_leave(struct world *w, int rank)
{
    struct gpu *gpu = w->own[rank];
    cp_device_cuda_destroy(&gpu->device);
    CHECK_EQ_I64(cudaStreamDestroy(gpu->stream), cudaSuccess);
    free(gpu);
}

/* The bytes that a view reaches, from the lowest. */
static inline char *gpus_extent(const struct cp_view *view, size_t *bytes)
{
    int64_t low = 0, high = cp_dtype_bytes(view->dtype);
    for (int axis = 0; axis < CP_AXES; axis++) {
        int64_t reach = (view->n[axis] - 1) * view->stride[axis];
        low += reach < 0 ? reach : 0;
        high += reach > 0 ? reach : 0;
    }
    *bytes = cp_view_count(view) > 0 ? (size_t)(high - low) : 0;
    return view->data + low;
}

static inline struct cp_stream *gpus_stream(struct world *w, int rank)
{
    return (struct cp_stream *)((const struct gpu *)w->own[rank])->stream;
}

/* Room for each tensor in its place. */
static inline void gpus_alloc(int ordinal, struct cp_view tensors[CP_TENSORS])
{
    CHECK_EQ_I64(cudaSetDevice(ordinal), cudaSuccess);
    for (int role = 0; role < CP_TENSORS; role++) {
        size_t bytes = 0;
        void *copy = NULL;
        if (tensors[role].data != NULL) {
            char *low = gpus_extent(&tensors[role], &bytes);
            CHECK_EQ_I64(cudaMalloc(&copy, bytes + 1), cudaSuccess);
            tensors[role].data = (char *)copy + (tensors[role].data - low);
        }
    }
}

/* Between the host's tensors and these. */
static inline void gpus_copy(cudaStream_t stream, const struct cp_view host[CP_TENSORS],
                             const struct cp_view tensors[CP_TENSORS], bool to_host)
{
    for (int role = 0; role < CP_TENSORS; role++) {
        size_t bytes = 0;
        if (tensors[role].data == NULL) {
            continue;
        }
        char *low = gpus_extent(&host[role], &bytes);
        char *device = tensors[role].data - (host[role].data - low);
        CHECK_EQ_I64(
            cudaMemcpyAsync(to_host ? low : device, to_host ? device : low, bytes,
                            to_host ? cudaMemcpyDeviceToHost : cudaMemcpyHostToDevice,
                            stream),
            cudaSuccess);
    }
}

static inline void gpus_free(const struct cp_view host[CP_TENSORS],
                             const struct cp_view tensors[CP_TENSORS])
{
    for (int role = 0; role < CP_TENSORS; role++) {
        size_t bytes = 0;
        if (tensors[role].data != NULL) {
            char *low = gpus_extent(&host[role], &bytes);
            CHECK_EQ_I64(cudaFree(tensors[role].data - (host[role].data - low)),
                         cudaSuccess);
        }
    }
}

static inline void gpus_take(struct world *w, int rank,
                             struct cp_view tensors[CP_TENSORS])
{
    const struct gpu *gpu = w->own[rank];
    struct cp_view host[CP_TENSORS];
    memcpy(host, tensors, sizeof host);
    gpus_alloc(gpu->ordinal, tensors);
    gpus_copy(gpu->stream, host, tensors, false);
}

static inline void gpus_give(struct world *w, int rank,
                             const struct cp_view host[CP_TENSORS],
                             const struct cp_view tensors[CP_TENSORS])
{
    const struct gpu *gpu = w->own[rank];
    gpus_copy(gpu->stream, host, tensors, true);
    CHECK_EQ_I64(cudaStreamSynchronize(gpu->stream), cudaSuccess);
    gpus_free(host, tensors);
}

static const struct world_transport gpus = {
    .name = "simulated GPUs",
    .open = gpus_open,
    .close = gpus_close,
    .join = gpus_join,
    .leave = gpus_leave,
    .stream = gpus_stream,
    .take = gpus_take,
    .give = gpus_give,
};

#endif
