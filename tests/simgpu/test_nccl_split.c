/* A communicator made from one of the caller's: it moves what it should, and neither one
 * has anything to do with the other's errors, aborts and end. */
#include "nccl_rig.h"

enum { BYTES = 64 };

static const int32_t undefined[3] = {CP_NCCL_UNDEFINED, CP_NCCL_UNDEFINED,
                                     CP_NCCL_UNDEFINED};

/* What the caller has: a communicator, its stream, memory of each rank. */
struct caller {
    struct rig rig; /* first, so that a rig's body may have it */
    ncclUniqueId id;
    bool is_blocking;
    ncclComm_t comm[RANKS_MOST];
    struct cp_group group[RANKS_MOST];
    unsigned char *data[RANKS_MOST];
};

/* Until nothing is in progress: its error. */
static ncclResult_t settle(ncclComm_t comm)
{
    ncclResult_t result = ncclInProgress;
    while (ncclCommGetAsyncError(comm, &result) == ncclSuccess &&
           result == ncclInProgress) {
        ranks_sleep_us(50);
    }
    return result;
}

static void body_begin(int rank, void *arg)
{
    struct caller *caller = arg;
    ncclConfig_t config = cp_nccl_config();
    config.blocking = caller->is_blocking;
    CHECK_EQ_I64(cudaSetDevice(rank), cudaSuccess);
    caller->data[rank] = device_memory((size_t)2 * BYTES);
    (void)ncclCommInitRankConfig(&caller->comm[rank], caller->rig.world, caller->id,
                                 rank, &config);
    CHECK_EQ_I64(settle(caller->comm[rank]), ncclSuccess);
}

static void begin(struct caller *caller, int world, bool is_blocking, double timeout)
{
    ncclResult_t (*split)(ncclComm_t, int, int, ncclComm_t *, ncclConfig_t *) =
        ncclCommSplit;
    CHECK(rig_prepare(&caller->rig, world, timeout));
    caller->is_blocking = is_blocking;
    CHECK_EQ_I64(ncclGetUniqueId(&caller->id), ncclSuccess);
    ranks_as_threads(world, body_begin, caller);
    for (int rank = 0; rank < world; rank++) {
        caller->group[rank] =
            (struct cp_group){.communicator = caller->comm[rank], .name = "ring"};
        memcpy(&caller->group[rank].library, &split, sizeof split);
        memcpy(caller->group[rank].settings, undefined, sizeof undefined);
        caller->rig.args[rank].group = &caller->group[rank];
    }
}

/* To the next rank by the caller's communicator, on lane 1; nobody waits. */
static void pass_on(struct caller *caller, int rank)
{
    int world = caller->rig.world;
    cudaStream_t stream = caller->rig.stream[rank][1];
    unsigned char *data = caller->data[rank];
    CHECK_EQ_I64(cudaMemsetAsync(data, rank + 1, BYTES, stream), cudaSuccess);
    CHECK_EQ_I64(ncclGroupStart(), ncclSuccess);
    (void)ncclSend(data, BYTES, ncclUint8, (rank + 1) % world, caller->comm[rank],
                   stream);
    (void)ncclRecv(data + BYTES, BYTES, ncclUint8, (rank + world - 1) % world,
                   caller->comm[rank], stream);
    (void)ncclGroupEnd();
    CHECK_EQ_I64(settle(caller->comm[rank]), ncclSuccess);
}

static void has_passed(struct caller *caller, int rank)
{
    unsigned char host[BYTES];
    int world = caller->rig.world;
    to_host(host, caller->data[rank] + BYTES, BYTES, caller->rig.stream[rank][1]);
    CHECK_EQ_I64(host[0], (rank + world - 1) % world + 1);
    CHECK_EQ_I64(host[BYTES - 1], (rank + world - 1) % world + 1);
}

static void body_end(int rank, void *arg)
{
    struct caller *caller = arg;
    CHECK_EQ_I64(cudaSetDevice(rank), cudaSuccess);
    CHECK_EQ_I64(cudaFree(caller->data[rank]), cudaSuccess);
    if (caller->comm[rank] != NULL) {
        CHECK_EQ_I64(ncclCommDestroy(caller->comm[rank]), ncclSuccess);
    }
}

/* A message to the next rank by ours. */
static void send_round(struct rig *rig, int rank)
{
    unsigned char host[BYTES];
    unsigned char *data = device_memory((size_t)2 * BYTES);
    int next = (rank + 1) % rig->world, before = (rank + rig->world - 1) % rig->world;
    struct cp_xfer xfers[2] = {
        {.data = data, .bytes = BYTES, .peer = next, .is_send = true},
        {.data = data + BYTES, .bytes = BYTES, .peer = before},
    };
    CHECK_EQ_I64(cudaMemsetAsync(data, 100 + rank, BYTES, rig->stream[rank][0]),
                 cudaSuccess);
    CHECK_EQ_I64(post(rig, rank, 0, xfers, 2), CP_OK);
    to_host(host, data + BYTES, BYTES, rig->stream[rank][0]);
    CHECK_EQ_I64(host[0], 100 + before);
    CHECK_EQ_I64(cudaFree(data), cudaSuccess);
}

/* ---- as it should be ---- */

/* The caller's own work is under way when the ranks connect, goes on beside ours, and
 * after it. */
static void body_beside(int rank, void *arg)
{
    struct caller *caller = arg;
    struct rig *rig = &caller->rig;
    CHECK_EQ_I64(cudaSetDevice(rank), cudaSuccess);
    pass_on(caller, rank);
    body_create(rank, rig);
    CHECK_EQ_I64(rig->code[rank], CP_OK);
    CHECK_EQ_I64(cudaSetDevice(rank), cudaSuccess);
    has_passed(caller, rank);
    for (int round = 0; round < 3; round++) {
        send_round(rig, rank);
        pass_on(caller, rank);
        has_passed(caller, rank);
    }
    body_close(rank, rig);
    CHECK_EQ_I64(cudaSetDevice(rank), cudaSuccess);
    pass_on(caller, rank);
    has_passed(caller, rank);
}

static void play_beside(int world, bool is_blocking)
{
    struct caller caller;
    begin(&caller, world, is_blocking, 20.0);
    ranks_as_threads(world, body_beside, &caller);
    CHECK_EQ_I64(simnccl_splits(), world);
    CHECK_EQ_I64(simgpu_live().comms, world);
    ranks_as_threads(world, body_end, &caller);
    rig_fini(&caller.rig);
    CHECK_EQ_I64(atomic_load(&aborts), 0);
}

TEST(beside_a_blocking_communicator_of_the_caller)
{
    play_beside(2, true);
    play_beside(4, true);
}

TEST(beside_a_communicator_that_does_not_block)
{
    play_beside(3, false);
}

static void body_orphan(int rank, void *arg)
{
    struct caller *caller = arg;
    body_create(rank, &caller->rig);
    CHECK_EQ_I64(caller->rig.code[rank], CP_OK);
    CHECK_EQ_I64(cudaSetDevice(rank), cudaSuccess);
    CHECK_EQ_I64(ncclCommDestroy(caller->comm[rank]), ncclSuccess);
    caller->comm[rank] = NULL;
    send_round(&caller->rig, rank);
}

TEST(it_outlives_the_callers)
{
    struct caller caller;
    begin(&caller, 3, true, 20.0);
    ranks_as_threads(3, body_orphan, &caller);
    ranks_as_threads(3, body_end, &caller);
    rig_fini(&caller.rig);
}

/* ---- when something goes wrong ---- */

/* Rank 1 never sends. Ours is aborted; the caller's works on. */
static void body_late(int rank, void *arg)
{
    struct caller *caller = arg;
    struct rig *rig = &caller->rig;
    body_create(rank, rig);
    CHECK_EQ_I64(cudaSetDevice(rank), cudaSuccess);
    if (rank == 0) {
        unsigned char *data = device_memory(BYTES);
        CHECK_EQ_I64(post_one(rig, 0, 1, false, data, BYTES), CP_OK);
        (void)cudaStreamSynchronize(rig->stream[0][0]);
        CHECK_EQ_I64(ask(rig, 0), CP_ERR_TIMEOUT);
        CHECK_EQ_I64(cudaFree(data), cudaSuccess);
    }
    pass_on(caller, rank);
    has_passed(caller, rank);
}

TEST(a_deadline_leaves_the_callers_alone)
{
    struct caller caller;
    begin(&caller, 2, true, 0.3);
    ranks_as_threads(2, body_late, &caller);
    ranks_as_threads(2, body_close, &caller);
    CHECK_EQ_I64(atomic_load(&aborts), 2);
    CHECK_EQ_I64(simgpu_live().comms, 2);
    ranks_as_threads(2, body_end, &caller);
    rig_fini(&caller.rig);
}

/* A rank does not come: the others do not wait longer than they may, although NCCL does.
 * It lets go when the caller aborts his own. */
static void play_absent(bool is_dead, const char *text)
{
    struct caller caller;
    begin(&caller, 3, true, is_dead ? 30.0 : 0.3);
    struct rig *rig = &caller.rig;
    int64_t start_ns = cp_now_ns();
    atomic_store(&rig->is_absent[1], true);
    atomic_store(&rig->is_dead[1], is_dead);
    ranks_as_threads(3, body_create, rig);
    CHECK(cp_now_ns() - start_ns < 8000000000); /* the parting of the thread included */
    for (int rank = 0; rank < 3; rank += 2) {
        CHECK(rig->code[rank] != CP_OK);
        CHECK(rig->comm[rank] == NULL);
    }
    CHECK_STR_HAS(rig->poison.status.text, text);
    for (int rank = 0; rank < 3; rank++) {
        CHECK_EQ_I64(ncclCommAbort(caller.comm[rank]), ncclSuccess);
        caller.comm[rank] = NULL;
    }
    while (cp_mem_stats().live_blocks > rig->blocks) {
        ranks_sleep_us(1000); /* the threads that were left to themselves */
    }
    ranks_as_threads(3, body_end, &caller);
    rig_fini(rig);
}

TEST(a_rank_that_does_not_come_is_a_timeout)
{
    play_absent(false, "connecting the ranks by NCCL");
}

TEST(a_rank_that_is_gone_is_named)
{
    play_absent(true, "rank 1 is gone");
}

TEST(a_refusal_of_nccl_is_an_error)
{
    struct caller caller;
    begin(&caller, 2, true, 20.0);
    simnccl_fail_call_after(0, ncclSystemError);
    ranks_as_threads(2, body_create, &caller);
    CHECK_EQ_I64(caller.rig.poison.status.code, CP_ERR_COMM);
    CHECK_STR_HAS(caller.rig.poison.status.text, "unhandled system error");
    for (int rank = 0; rank < 2; rank++) {
        CHECK_EQ_I64(ncclCommAbort(caller.comm[rank]), ncclSuccess);
        caller.comm[rank] = NULL;
    }
    while (cp_mem_stats().live_blocks > caller.rig.blocks) {
        ranks_sleep_us(1000);
    }
    ranks_as_threads(2, body_end, &caller);
    rig_fini(&caller.rig);
}

/* ---- which one fits ---- */

TEST(another_communicator_does_not_fit)
{
    struct caller caller;
    begin(&caller, 3, true, 20.0);
    struct cp_group group = caller.group[1];
    CHECK(cp_nccl_parent_fits(&nccl, &group, 1, 3, 1));
    CHECK(!cp_nccl_parent_fits(&nccl, &group, 2, 3, 1));
    CHECK(!cp_nccl_parent_fits(&nccl, &group, 1, 2, 1));
    CHECK(!cp_nccl_parent_fits(&nccl, &group, 1, 3, 0));
    group.library = &group;
    CHECK(!cp_nccl_parent_fits(&nccl, &group, 1, 3, 1));
    group = caller.group[1];
    group.name[0] = '\0';
    CHECK(!cp_nccl_parent_fits(&nccl, &group, 1, 3, 1));
    group = (struct cp_group){.communicator = NULL};
    CHECK(!cp_nccl_parent_fits(&nccl, &group, 1, 3, 1));
    ranks_as_threads(3, body_end, &caller);
    rig_fini(&caller.rig);
}

TEST(the_child_has_the_settings_of_the_group)
{
    struct cp_group group = {.settings = {2, 4, 8}};
    ncclConfig_t config = cp_nccl_child_config(&group);
    CHECK_EQ_I64(config.cgaClusterSize, 2);
    CHECK_EQ_I64(config.minCTAs, 4);
    CHECK_EQ_I64(config.maxCTAs, 8);
    CHECK_EQ_I64(config.blocking, 0);
    CHECK_EQ_I64(config.magic, CP_NCCL_MAGIC);
}
