/* Ranks as threads with a NCCL communicator each, over the stand-ins of CUDA and NCCL, and
 * the faults that tests ask for. */
#ifndef CP_TESTS_NCCL_RIG_H
#define CP_TESTS_NCCL_RIG_H

#include "base/mem.h"
#include "comm_nccl.h"
#include "ranks.h"
#include "sim_nccl.h"
#include "simgpu.h"
#include "test.h"

enum { LANES = 2 };

struct rig {
    struct cp_bell bell;
    struct cp_poison poison;
    struct cp_watch watch[RANKS_MOST];
    struct cp_comm *comm[RANKS_MOST];
    _Atomic bool is_dead[RANKS_MOST], is_absent[RANKS_MOST];
    cudaStream_t stream[RANKS_MOST][LANES];
    struct cp_comm_nccl_args args[RANKS_MOST];
    enum cp_code code[RANKS_MOST]; /* of the creation */
    struct cp_status status[RANKS_MOST];
    int world;
    int64_t blocks; /* before */
};

/* ---- NCCL, with faults ---- */

static _Atomic int fault_state; /* ncclResult_t that ncclCommGetAsyncError tells */
static _Atomic int64_t lag_ns;  /* a group's host part takes so long */
static _Atomic int64_t lag_until_ns;
static _Atomic bool abort_hangs;
static _Atomic int aborts;

static inline ncclResult_t faulty_get_async_error(ncclComm_t comm, ncclResult_t *state)
{
    ncclResult_t result = ncclCommGetAsyncError(comm, state);
    if (atomic_load(&fault_state) != ncclSuccess) {
        *state = (ncclResult_t)atomic_load(&fault_state);
    } else if (*state == ncclSuccess && cp_now_ns() < atomic_load(&lag_until_ns)) {
        *state = ncclInProgress;
    }
    return result;
}

static inline ncclResult_t faulty_group_end(void)
{
    ncclResult_t result = ncclGroupEnd();
    if (atomic_load(&lag_ns) > 0 &&
        (result == ncclSuccess || result == ncclInProgress)) {
        atomic_store(&lag_until_ns, cp_now_ns() + atomic_load(&lag_ns));
        result = ncclInProgress;
    }
    return result;
}

/* Work on a device is done with that device as the thread's current one. */
static inline ncclResult_t faulty_abort(ncclComm_t comm)
{
    int current = -1, own = -2;
    CHECK_EQ_I64(cudaGetDevice(&current), cudaSuccess);
    CHECK_EQ_I64(ncclCommCuDevice(comm, &own), ncclSuccess);
    CHECK_EQ_I64(current, own);
    atomic_fetch_add(&aborts, 1);
    while (atomic_load(&abort_hangs)) {
        ranks_sleep_us(1000);
    }
    return ncclCommAbort(comm);
}

static const struct cp_nccl nccl = {
    .get_version = ncclGetVersion,
    .get_unique_id = ncclGetUniqueId,
    .comm_init_rank_config = ncclCommInitRankConfig,
    .comm_split = ncclCommSplit,
    .comm_count = ncclCommCount,
    .comm_user_rank = ncclCommUserRank,
    .comm_cu_device = ncclCommCuDevice,
    .comm_finalize = ncclCommFinalize,
    .comm_destroy = ncclCommDestroy,
    .comm_abort = faulty_abort,
    .comm_get_async_error = faulty_get_async_error,
    .group_start = ncclGroupStart,
    .group_end = faulty_group_end,
    .send = ncclSend,
    .recv = ncclRecv,
    .get_error_string = ncclGetErrorString,
    .get_last_error = ncclGetLastError,
};

/* ---- the rig ---- */

static inline bool is_dead(void *peers, int rank)
{
    struct rig *rig = peers;
    return atomic_load(&rig->is_dead[rank]);
}

static inline void body_create(int rank, void *arg)
{
    struct rig *rig = arg;
    CHECK_EQ_I64(cudaSetDevice(rank % 2), cudaSuccess); /* not always the right one */
    if (atomic_load(&rig->is_absent[rank])) {
        return;
    }
    rig->code[rank] = cp_comm_nccl_create(&rig->args[rank], &rig->comm[rank]);
    rig->status[rank] = *cp_last_error();
    int device = -1;
    CHECK_EQ_I64(cudaGetDevice(&device), cudaSuccess);
    CHECK_EQ_I64(device, rank % 2);
}

/* Streams and arguments; the creation is the caller's. */
static inline bool rig_prepare(struct rig *rig, int world, double timeout)
{
    ncclUniqueId id;
    atomic_store(&aborts, 0);
    simgpu_reset();
    simgpu_seed(test_seed);
    simgpu_set_device_count(world < 2 ? 2 : world);
    memset(rig, 0, sizeof *rig);
    rig->world = world;
    rig->blocks = cp_mem_stats().live_blocks;
    bool is_good = CHECK_EQ_I64(cp_comm_nccl_id(&nccl, &id), CP_OK);
    for (int rank = 0; rank < world && is_good; rank++) {
        rig->watch[rank] = (struct cp_watch){.bell = &rig->bell,
                                             .poison = &rig->poison,
                                             .rank = rank,
                                             .world = world,
                                             .is_dead = is_dead,
                                             .peers = rig};
        rig->args[rank] = (struct cp_comm_nccl_args){.nccl = &nccl,
                                                     .watch = &rig->watch[rank],
                                                     .id = id,
                                                     .device = rank,
                                                     .timeout = timeout};
        is_good = CHECK_EQ_I64(cudaSetDevice(rank), cudaSuccess);
        for (int lane = 0; lane < LANES; lane++) {
            is_good = is_good &&
                      CHECK_EQ_I64(cudaStreamCreateWithFlags(&rig->stream[rank][lane],
                                                             cudaStreamNonBlocking),
                                   cudaSuccess);
        }
    }
    return is_good;
}

static inline bool rig_init(struct rig *rig, int world, double timeout)
{
    bool is_good = rig_prepare(rig, world, timeout);
    if (is_good) {
        ranks_as_threads(world, body_create, rig);
    }
    for (int rank = 0; rank < world && is_good; rank++) {
        is_good = CHECK_EQ_I64(rig->code[rank], CP_OK) ||
                  CHECK_EQ_STR(rig->status[rank].text, "");
    }
    return is_good;
}

static inline void body_close(int rank, void *arg)
{
    struct rig *rig = arg;
    if (rig->comm[rank] != NULL) {
        rig->comm[rank]->ops->close(&rig->comm[rank]);
        CHECK(rig->comm[rank] == NULL);
    }
}

/* Everything is given back, and close has not waited for long. */
static inline void rig_fini(struct rig *rig)
{
    int64_t start_ns = cp_now_ns();
    ranks_as_threads(rig->world, body_close, rig);
    CHECK(cp_now_ns() - start_ns < 4000000000);
    for (int rank = 0; rank < rig->world; rank++) {
        for (int lane = 0; lane < LANES; lane++) {
            CHECK_EQ_I64(cudaStreamDestroy(rig->stream[rank][lane]), cudaSuccess);
        }
    }
    struct simgpu_live live = simgpu_live();
    CHECK_EQ_I64(live.blocks, 0);
    CHECK_EQ_I64(live.events, 0);
    CHECK_EQ_I64(live.comms, 0);
    CHECK_EQ_I64(cp_mem_stats().live_blocks, rig->blocks);
}

static inline enum cp_code post(struct rig *rig, int rank, int lane,
                                const struct cp_xfer *xfers, int count)
{
    uint64_t ticket = 0;
    struct cp_comm *comm = rig->comm[rank];
    return comm->ops->post(comm, xfers, count,
                           (struct cp_stream *)rig->stream[rank][lane], &ticket);
}

static inline enum cp_code post_one(struct rig *rig, int rank, int peer, bool is_send,
                                    void *data, size_t bytes)
{
    struct cp_xfer xfer = {
        .data = data, .bytes = bytes, .peer = peer, .is_send = is_send};
    return post(rig, rank, 0, &xfer, 1);
}

static inline enum cp_code ask(struct rig *rig, int rank)
{
    return rig->comm[rank]->ops->test(rig->comm[rank], 1);
}

static inline void *device_memory(size_t bytes)
{
    void *data = NULL;
    CHECK_EQ_I64(cudaMalloc(&data, bytes), cudaSuccess);
    return data;
}

static inline void to_device(void *device, const void *host, size_t bytes,
                             cudaStream_t stream)
{
    CHECK_EQ_I64(cudaMemcpyAsync(device, host, bytes, cudaMemcpyHostToDevice, stream),
                 cudaSuccess);
}

static inline void to_host(void *host, const void *device, size_t bytes,
                           cudaStream_t stream)
{
    CHECK_EQ_I64(cudaMemcpyAsync(host, device, bytes, cudaMemcpyDeviceToHost, stream),
                 cudaSuccess);
    CHECK_EQ_I64(cudaStreamSynchronize(stream), cudaSuccess);
}

/* On a stream: the device is busy for so many microseconds. */
static inline void CUDART_CB sleep_long(void *arg)
{
    ranks_sleep_us(*(const int *)arg);
}

#endif
