/* Does the stand-in for NCCL move what it should, and does it find what would hang or
 * break on a real device? Ranks are threads. */
#include "ranks.h"
#include "sim_nccl.h"
#include "simgpu.h"

enum { WORLD_MOST = 4, ROUNDS = 6, LARGEST = 3000 };

#define OK(call) CHECK_EQ_I64(call, 0)

struct world {
    int size;
    ncclUniqueId id;
    pthread_barrier_t meeting;
    bool is_blocking;
};

static void world_begin(struct world *world, int size)
{
    simgpu_reset();
    simgpu_seed(test_seed);
    simgpu_set_device_count(size);
    memset(world, 0, sizeof *world);
    world->size = size;
    OK(ncclGetUniqueId(&world->id));
    (void)pthread_barrier_init(&world->meeting, NULL, (unsigned)size);
}

static void world_end(struct world *world)
{
    struct simgpu_live live = simgpu_live();
    CHECK_EQ_I64(live.comms, 0);
    CHECK_EQ_I64(live.blocks + live.streams + live.events, 0);
    (void)pthread_barrier_destroy(&world->meeting);
    simgpu_reset();
}

struct rank {
    struct world *world;
    int self;
    ncclComm_t comm;
    cudaStream_t a, b;
    unsigned char *data; /* of the device: a part to send and one to receive a peer */
};

static unsigned char *send_part(const struct rank *rank, int peer)
{
    return rank->data + (size_t)peer * LARGEST;
}

static unsigned char *recv_part(const struct rank *rank, int peer)
{
    return rank->data + (size_t)(WORLD_MOST + peer) * LARGEST;
}

/* Until nothing is in progress: the communicator's error. */
static ncclResult_t settle(ncclComm_t comm)
{
    ncclResult_t result = ncclInProgress;
    while (ncclCommGetAsyncError(comm, &result) == ncclSuccess &&
           result == ncclInProgress) {
        ranks_sleep_us(50);
    }
    return result;
}

static ncclResult_t group_end(ncclComm_t comm)
{
    ncclResult_t result = ncclGroupEnd();
    return result == ncclInProgress ? settle(comm) : result;
}

static ncclResult_t rank_begin(struct rank *rank, int self, struct world *world)
{
    ncclConfig_t config = cp_nccl_config();
    *rank = (struct rank){.world = world, .self = self};
    OK(cudaSetDevice(self));
    OK(cudaStreamCreateWithFlags(&rank->a, cudaStreamNonBlocking));
    OK(cudaStreamCreateWithFlags(&rank->b, cudaStreamNonBlocking));
    OK(cudaMalloc((void **)&rank->data, (size_t)2 * WORLD_MOST * LARGEST));
    OK(cudaMemsetAsync(rank->data, self + 1, (size_t)WORLD_MOST * LARGEST, rank->a));
    OK(cudaStreamSynchronize(rank->a));
    if (world->is_blocking) {
        return ncclCommInitRank(&rank->comm, world->size, world->id, self);
    }
    CHECK_EQ_I64(
        ncclCommInitRankConfig(&rank->comm, world->size, world->id, self, &config),
        ncclInProgress);
    return settle(rank->comm);
}

static void rank_end(struct rank *rank)
{
    if (rank->comm) {
        OK(ncclCommDestroy(rank->comm));
    }
    OK(cudaFree(rank->data));
    OK(cudaStreamDestroy(rank->a));
    OK(cudaStreamDestroy(rank->b));
}

static ncclResult_t send(struct rank *rank, int peer, size_t bytes, cudaStream_t stream)
{
    return ncclSend(send_part(rank, peer), bytes, ncclUint8, peer, rank->comm, stream);
}

static ncclResult_t receive(struct rank *rank, int peer, size_t bytes,
                            cudaStream_t stream)
{
    return ncclRecv(recv_part(rank, peer), bytes, ncclUint8, peer, rank->comm, stream);
}

static void expect_violation(const char *part)
{
    char text[SIMGPU_TEXT];
    simgpu_violation(text);
    CHECK_STR_HAS(text, part);
}

/* From a to b in round n: uneven, some of them nothing. */
static size_t bytes_of(int from, int to, int round)
{
    return (size_t)((from * 31 + to * 17 + round * 101) % 7 * 400);
}

static void exchange_all(int self, void *arg)
{
    struct rank rank;
    unsigned char host[LARGEST];
    OK(rank_begin(&rank, self, arg));
    int world = rank.world->size;
    for (int round = 0; round < ROUNDS; round++) {
        OK(cudaMemsetAsync(rank.data, self * 16 + round, (size_t)WORLD_MOST * LARGEST,
                           rank.a));
        OK(ncclGroupStart());
        for (int peer = 0; peer < world; peer++) {
            OK(receive(&rank, peer, bytes_of(peer, self, round), rank.a));
            OK(send(&rank, peer, bytes_of(self, peer, round), rank.a));
        }
        OK(group_end(rank.comm));
        for (int peer = 0; peer < world; peer++) {
            size_t bytes = bytes_of(peer, self, round);
            OK(cudaMemcpyAsync(host, recv_part(&rank, peer), bytes,
                               cudaMemcpyDeviceToHost, rank.a));
            OK(cudaStreamSynchronize(rank.a));
            for (size_t i = 0; i < bytes; i++) {
                if (!CHECK_EQ_I64(host[i], peer * 16 + round)) {
                    break;
                }
            }
        }
    }
    rank_end(&rank);
}

TEST(what_is_sent_arrives)
{
    for (int size = 1; size <= WORLD_MOST; size++) {
        for (int is_blocking = 0; is_blocking < 2; is_blocking++) {
            struct world world;
            TEST_CONTEXT("%d ranks, %d", size, is_blocking);
            world_begin(&world, size);
            world.is_blocking = is_blocking;
            ranks_as_threads(size, exchange_all, &world);
            CHECK_EQ_U64(simgpu_stats().groups, size * ROUNDS);
            CHECK_EQ_U64(simgpu_stats().sends, size * size * ROUNDS);
            world_end(&world);
        }
    }
}

/* Groups on two streams, no event between: the communicator alone orders them. */
static void use_two_streams(int self, void *arg)
{
    struct rank rank;
    unsigned char host[2] = {0};
    OK(rank_begin(&rank, self, arg));
    int peer = 1 - self;
    for (int round = 0; round < 10; round++) {
        cudaStream_t stream = (round + self) % 2 ? rank.a : rank.b;
        OK(ncclGroupStart());
        OK(ncclSend(rank.data + round, 1, ncclUint8, peer, rank.comm, stream));
        OK(ncclRecv(recv_part(&rank, peer) + round, 1, ncclUint8, peer, rank.comm,
                    stream));
        OK(group_end(rank.comm));
    }
    OK(cudaStreamSynchronize(rank.a));
    OK(cudaStreamSynchronize(rank.b));
    OK(cudaMemcpy(host, recv_part(&rank, peer) + 8, 2, cudaMemcpyDeviceToHost));
    CHECK_EQ_I64(host[0], peer + 1);
    CHECK_EQ_I64(host[1], peer + 1);
    rank_end(&rank);
}

TEST(groups_of_a_communicator_run_in_order_on_any_stream)
{
    struct world world;
    world_begin(&world, 2);
    ranks_as_threads(2, use_two_streams, &world);
    world_end(&world);
}

static void send_different_sizes(int self, void *arg)
{
    struct rank rank;
    OK(rank_begin(&rank, self, arg));
    ncclResult_t result =
        self == 0 ? send(&rank, 1, 64, rank.a) : receive(&rank, 0, 65, rank.a);
    CHECK(result == ncclSuccess || result == ncclInProgress);
    while (settle(rank.comm) == ncclSuccess) {
        ranks_sleep_us(50);
    }
    CHECK_EQ_I64(settle(rank.comm), ncclInternalError);
    CHECK_STR_HAS(ncclGetLastError(rank.comm), "rank 0 sends 64 bytes");
    OK(cudaStreamSynchronize(rank.a)); /* nobody hangs after a violation */
    OK(ncclCommAbort(rank.comm));
    rank.comm = NULL;
    rank_end(&rank);
}

TEST(sizes_that_differ_are_found)
{
    struct world world;
    world_begin(&world, 2);
    simgpu_keep_violations(true);
    ranks_as_threads(2, send_different_sizes, &world);
    expect_violation("rank 0 sends 64 bytes to rank 1, which receives 65");
    CHECK_EQ_I64(simgpu_violations(), 1);
    world_end(&world);
}

/* Each rank sends first and receives in its next group: nobody's first group can end. */
static void post_in_a_circle(int self, void *arg)
{
    struct rank rank;
    OK(rank_begin(&rank, self, arg));
    int world = rank.world->size;
    OK(ncclGroupStart());
    OK(send(&rank, (self + 1) % world, 32, rank.a));
    OK(group_end(rank.comm));
    OK(ncclGroupStart());
    ncclResult_t result = receive(&rank, (self + world - 1) % world, 32, rank.b);
    CHECK(result == ncclSuccess || result == ncclInternalError);
    result = group_end(rank.comm);
    CHECK(result == ncclSuccess || result == ncclInternalError);
    OK(cudaStreamSynchronize(rank.a));
    OK(cudaStreamSynchronize(rank.b));
    CHECK_EQ_I64(settle(rank.comm), ncclInternalError);
    OK(ncclCommAbort(rank.comm));
    rank.comm = NULL;
    rank_end(&rank);
}

TEST(a_deadlock_is_found_and_says_who_waits_for_what)
{
    for (int size = 2; size <= 3; size++) {
        struct world world;
        world_begin(&world, size);
        simgpu_keep_violations(true);
        ranks_as_threads(size, post_in_a_circle, &world);
        CHECK_EQ_I64(simgpu_violations(), 1);
        expect_violation(": rank 0, group 1 waits to send 32 bytes to rank 1");
        expect_violation("rank 1, group 1 waits to send 32 bytes to rank");
        world_end(&world);
    }
}

/* ---- several communicators on a device ---- */

/* Communicator i joins rank i, as its 0, and the next rank, as its 1. */
struct links {
    struct world world; /* first, so that a rank begins with this */
    ncclUniqueId id[WORLD_MOST];
    enum simnccl_order order;
    bool is_own_first; /* on every rank; else the one with the lower number */
    bool has_one_stream;
    bool is_late; /* rank 0 comes to its first group late, the others to the second */
    bool is_ordered; /* an event lets the second one follow the first */
    bool is_stuck;   /* what is expected */
};

static int number_of(const ncclUniqueId *id)
{
    return atoi(id->internal + strlen("simnccl "));
}

/* A byte each way on the rank's communicator i; `peer` of the world. */
static void swap_byte(struct rank *rank, ncclComm_t comm, int i, int peer,
                      cudaStream_t stream)
{
    const struct links *links = (const struct links *)rank->world;
    int other = rank->self == i ? 1 : 0;
    OK(ncclGroupStart());
    ncclResult_t sent =
        ncclSend(send_part(rank, peer), 1, ncclUint8, other, comm, stream);
    ncclResult_t received =
        ncclRecv(recv_part(rank, i), 1, ncclUint8, other, comm, stream);
    ncclResult_t result = group_end(comm);
    CHECK(sent == ncclSuccess || (links->is_stuck && sent == ncclInternalError));
    CHECK(received == ncclSuccess ||
          (links->is_stuck && received == ncclInternalError));
    CHECK(result == ncclSuccess || (links->is_stuck && result == ncclInternalError));
}

/* Until the others have met, where they are to. */
static void CUDART_CB be_late(void *arg)
{
    const struct links *links = arg;
    int most_ms = links->is_stuck ? 20000 : 20;
    for (int ms = 0; ms < most_ms && simgpu_violations() == 0; ms++) {
        ranks_sleep_us(1000);
    }
}

static void use_two_communicators(int self, void *arg)
{
    struct rank rank;
    struct links *links = arg;
    ncclConfig_t config = cp_nccl_config();
    ncclComm_t comms[2];
    cudaEvent_t event;
    int size = links->world.size, before = (self + size - 1) % size;
    int links_of[2] = {self, before};           /* by their numbers */
    int peers[2] = {(self + 1) % size, before}; /* by their ranks */
    OK(rank_begin(&rank, self, &links->world));
    for (int i = 0; i < 2; i++) {
        CHECK_EQ_I64(
            ncclCommInitRankConfig(&comms[i], 2, links->id[links_of[i]], i, &config),
            ncclInProgress);
    }
    OK(settle(comms[0]));
    OK(settle(comms[1]));
    int first = links->is_own_first || self < before ? 0 : 1;
    cudaStream_t second = links->has_one_stream ? rank.a : rank.b;
    if (links->is_late) {
        OK(cudaLaunchHostFunc(self == 0 ? rank.a : rank.b, be_late, links));
    }
    swap_byte(&rank, comms[first], links_of[first], peers[first], rank.a);
    if (links->is_ordered) {
        OK(cudaEventCreate(&event));
        OK(cudaEventRecord(event, rank.a));
        OK(cudaStreamWaitEvent(rank.b, event, cudaEventWaitDefault));
        OK(cudaEventDestroy(event));
    }
    swap_byte(&rank, comms[!first], links_of[!first], peers[!first], second);
    OK(cudaStreamSynchronize(rank.a)); /* nobody hangs after a violation */
    OK(cudaStreamSynchronize(rank.b));
    for (int i = 0; i < 2; i++) {
        unsigned char got = 0;
        OK(cudaMemcpy(&got, recv_part(&rank, links_of[i]), 1, cudaMemcpyDeviceToHost));
        CHECK(links->is_stuck || got == peers[i] + 1);
        CHECK_EQ_I64(settle(comms[i]),
                     links->is_stuck ? ncclInternalError : ncclSuccess);
        OK(ncclCommAbort(comms[i]));
    }
    rank_end(&rank);
}

static void links_play(struct links links, int size)
{
    TEST_CONTEXT("%d ranks, order %d, own first %d, one stream %d, late %d", size,
                 links.order, links.is_own_first, links.has_one_stream, links.is_late);
    world_begin(&links.world, size);
    for (int i = 0; i < size; i++) {
        OK(ncclGetUniqueId(&links.id[i]));
    }
    simnccl_set_order(links.order);
    simgpu_keep_violations(true);
    ranks_as_threads(size, use_two_communicators, &links);
    CHECK_EQ_I64(simgpu_violations(), links.is_stuck ? 1 : 0);
    for (int i = 0; i < size && links.is_stuck; i++) {
        char part[200];
        int number = number_of(&links.id[i]);
        int next = (i + 1) % size;
        int keeper = links.is_late ? next : i; /* whose device is at communicator i */
        (void)snprintf(part, sizeof part,
                       "communicator %d: rank %d, group 1 waits to send 1 bytes to "
                       "rank %d, to receive 1 bytes from rank %d",
                       number, keeper != i, keeper == i, keeper == i);
        expect_violation(part);
        (void)snprintf(part, sizeof part,
                       "communicator %d: rank %d, group 1 waits for group 1 of "
                       "communicator %d on device %d",
                       number, keeper == i, number_of(&links.id[next]),
                       keeper == i ? next : i);
        expect_violation(part);
    }
    world_end(&links.world);
}

TEST(communicators_in_opposite_orders_are_found)
{
    struct links links = {.is_own_first = true, .is_stuck = true};
    for (int size = 2; size <= 4; size++) {
        links.has_one_stream = false;
        links_play(links, size);
        links.has_one_stream = true;
        links_play(links, size);
    }
    links.order = SIMNCCL_AS_READY;
    links_play(links, 2);
    links_play(links, 3);
}

TEST(communicators_in_the_same_order_do_not_meet)
{
    struct links links = {.is_own_first = false};
    for (int round = 0; round < 5; round++) {
        links.has_one_stream = round % 2;
        links_play(links, 2);
        links_play(links, 4);
    }
    links = (struct links){.is_late = true};
    links_play(links, 2);
}

/* A device that starts what is ready first needs an event as well. */
TEST(communicators_whose_streams_have_no_order_are_found)
{
    struct links links = {.order = SIMNCCL_AS_READY, .is_late = true, .is_stuck = true};
    links_play(links, 2);
    links.is_ordered = true;
    links.is_stuck = false;
    links_play(links, 2);
}

TEST(communicators_that_a_device_has_room_for_need_no_order)
{
    struct links links = {.order = SIMNCCL_TOGETHER, .is_own_first = true};
    links_play(links, 2);
    links_play(links, 3);
    links = (struct links){.order = SIMNCCL_TOGETHER, .is_late = true};
    links_play(links, 2);
}

/* Rank 1 never posts. Rank 0 waits, and its abort from another thread ends the wait. */
static void *abort_soon(void *arg)
{
    ranks_sleep_us(20000);
    OK(ncclCommAbort(arg));
    return NULL;
}

static void wait_for_nobody(int self, void *arg)
{
    struct rank rank;
    OK(rank_begin(&rank, self, arg));
    if (self == 0) {
        pthread_t thread;
        ncclResult_t result = receive(&rank, 1, 128, rank.a);
        OK(result == ncclInProgress ? settle(rank.comm) : result);
        ranks_sleep_us(5000);
        CHECK_EQ_I64(cudaStreamQuery(rank.a), cudaErrorNotReady);
        OK(settle(rank.comm));
        (void)pthread_create(&thread, NULL, abort_soon, rank.comm);
        OK(cudaStreamSynchronize(rank.a));
        (void)pthread_join(thread, NULL);
        CHECK_EQ_I64(receive(&rank, 1, 128, rank.a), ncclInvalidUsage);
        rank.comm = NULL;
    }
    (void)pthread_barrier_wait(&rank.world->meeting);
    rank_end(&rank);
}

TEST(a_rank_that_never_posts_is_waited_for_until_abort)
{
    struct world world;
    world_begin(&world, 2);
    simgpu_keep_violations(true);
    ranks_as_threads(2, wait_for_nobody, &world);
    CHECK_EQ_I64(simgpu_violations(), 1); /* the call after the abort */
    expect_violation("ncclRecv on a communicator that was destroyed or aborted");
    world_end(&world);
}

static void meet_on_one_device(int self, void *arg)
{
    struct world *world = arg;
    ncclConfig_t config = cp_nccl_config();
    ncclComm_t comm;
    (void)ncclCommInitRankConfig(&comm, world->size, world->id, self, &config);
    CHECK_EQ_I64(settle(comm), ncclInvalidUsage);
    CHECK_STR_HAS(ncclGetLastError(comm), "Duplicate GPU detected : rank 0 and rank 1");
    OK(ncclCommAbort(comm));
}

TEST(two_ranks_on_one_device_are_refused)
{
    struct world world;
    world_begin(&world, 2);
    ranks_as_threads(2, meet_on_one_device, &world);
    world_end(&world);
}

static void fail_a_group(int self, void *arg)
{
    struct rank rank;
    ncclResult_t result = ncclSuccess;
    OK(rank_begin(&rank, self, arg));
    (void)pthread_barrier_wait(&rank.world->meeting);
    for (int round = 0; round < 3 && result == ncclSuccess; round++) {
        OK(ncclGroupStart());
        (void)send(&rank, 1 - self, 16, rank.a);
        (void)receive(&rank, 1 - self, 16, rank.a);
        result = group_end(rank.comm);
    }
    /* One rank fails, the other hangs until it aborts. */
    for (int i = 0; i < 2000 && settle(rank.comm) == ncclSuccess; i++) {
        ranks_sleep_us(50);
    }
    result = settle(rank.comm);
    CHECK(result == ncclSuccess || result == ncclRemoteError);
    CHECK_EQ_I64(cudaStreamQuery(rank.a), cudaErrorNotReady);
    OK(ncclCommAbort(rank.comm));
    OK(cudaStreamSynchronize(rank.a));
    rank.comm = NULL;
    rank_end(&rank);
}

TEST(a_group_can_be_made_to_fail)
{
    struct world world;
    world_begin(&world, 2);
    simnccl_fail_after(3);
    ranks_as_threads(2, fail_a_group, &world);
    CHECK_EQ_I64(simgpu_violations(), 0);
    world_end(&world);
}

static void refuse_early_calls(int self, void *arg)
{
    struct world *world = arg;
    struct rank rank = {.world = world, .self = self};
    ncclConfig_t config = cp_nccl_config();
    OK(cudaSetDevice(self));
    CHECK_EQ_I64(
        ncclCommInitRankConfig(&rank.comm, world->size, world->id, self, &config),
        ncclInProgress);
    CHECK_EQ_I64(send(&rank, 0, 0, NULL), ncclInvalidArgument);
    CHECK_STR_HAS(ncclGetLastError(NULL), "before the previous operation");
    config.magic = 0;
    CHECK_EQ_I64(
        ncclCommInitRankConfig(&rank.comm, world->size, world->id, self, &config),
        ncclInvalidArgument);
    CHECK_EQ_I64(ncclGroupEnd(), ncclInvalidUsage);
    OK(settle(rank.comm));
    CHECK_EQ_I64(send(&rank, world->size, 0, NULL), ncclInvalidArgument);
    simnccl_fail_call_after(0, ncclSystemError);
    CHECK_EQ_I64(ncclGroupStart(), ncclSystemError);
    OK(ncclGroupStart());
    CHECK_EQ_I64(send(&rank, 7, 0, NULL), ncclInvalidArgument);
    CHECK_EQ_I64(ncclGroupEnd(), ncclInvalidArgument); /* the group's error */
    CHECK_EQ_I64(ncclCommFinalize(rank.comm), ncclInProgress);
    OK(settle(rank.comm));
    CHECK_EQ_I64(send(&rank, 0, 0, NULL), ncclInvalidUsage);
    OK(ncclCommDestroy(rank.comm));
}

TEST(calls_at_the_wrong_time_are_refused)
{
    struct world world;
    world_begin(&world, 1);
    refuse_early_calls(0, &world);
    world_end(&world);
}

/* ncclInProgress: the stream has not been given the group, and its order is decided by
 * when ncclCommGetAsyncError gives it. */
TEST(a_group_in_progress_is_not_in_its_stream)
{
    struct world world;
    struct rank rank;
    unsigned char got = 0;
    world_begin(&world, 1);
    OK(rank_begin(&rank, 0, &world));
    ncclResult_t result = ncclSuccess;
    while (result != ncclInProgress) {
        OK(cudaMemsetAsync(recv_part(&rank, 0), 9, 1, rank.a));
        OK(ncclGroupStart());
        OK(send(&rank, 0, 1, rank.a));
        OK(receive(&rank, 0, 1, rank.a));
        result = ncclGroupEnd();
    }
    CHECK_EQ_I64(send(&rank, 0, 1, rank.a), ncclInvalidArgument);
    for (int round = 0; round < 2; round++) {
        OK(cudaMemcpyAsync(&got, recv_part(&rank, 0), 1, cudaMemcpyDeviceToHost,
                           rank.a));
        OK(cudaStreamSynchronize(rank.a));
        CHECK_EQ_I64(got, round == 0 ? 9 : 1);
        OK(settle(rank.comm));
    }
    rank_end(&rank);
    world_end(&world);
}

/* The default stream follows the blocking ones, for groups that came in progress too. */
TEST(a_group_on_the_default_stream_follows_the_blocking_ones)
{
    struct world world;
    struct rank rank;
    cudaStream_t blocking;
    unsigned char got = 0;
    world_begin(&world, 1);
    OK(rank_begin(&rank, 0, &world));
    OK(cudaStreamCreate(&blocking));
    for (int round = 0; round < 20; round++) {
        OK(cudaMemsetAsync(send_part(&rank, 0), round, 1, blocking));
        OK(ncclGroupStart());
        OK(send(&rank, 0, 1, NULL));
        OK(receive(&rank, 0, 1, NULL));
        OK(group_end(rank.comm));
        OK(cudaMemcpyAsync(&got, recv_part(&rank, 0), 1, cudaMemcpyDeviceToHost,
                           blocking));
        OK(cudaStreamSynchronize(blocking));
        CHECK_EQ_I64(got, round);
    }
    OK(cudaStreamDestroy(blocking));
    rank_end(&rank);
    world_end(&world);
}

static void leave_a_group_open(int self, void *arg)
{
    (void)arg;
    OK(cudaSetDevice(self));
    OK(ncclGroupStart());
    if (self == 0) {
        OK(cudaDeviceSynchronize());
        OK(ncclGroupEnd());
    }
}

TEST(a_group_left_open_is_found)
{
    struct world world;
    world_begin(&world, 2);
    simgpu_keep_violations(true);
    leave_a_group_open(0, &world);
    expect_violation("cudaDeviceSynchronize while an NCCL group is open");
    ranks_as_threads(2, leave_a_group_open, &world);
    CHECK_EQ_I64(simgpu_violations(), 3);
    world_end(&world);
}

static void *send_too(void *arg)
{
    CHECK_EQ_I64(send(arg, 9, 8, NULL), ncclInvalidArgument); /* nothing is posted */
    return NULL;
}

TEST(two_threads_on_one_communicator_are_found)
{
    struct world world;
    struct rank rank;
    pthread_t thread;
    world_begin(&world, 1);
    simgpu_keep_violations(true);
    world.is_blocking = true;
    OK(rank_begin(&rank, 0, &world));
    OK(ncclGroupStart());
    OK(receive(&rank, 0, 8, rank.a));
    (void)pthread_create(&thread, NULL, send_too, &rank);
    (void)pthread_join(thread, NULL);
    OK(send(&rank, 0, 8, rank.a));
    OK(ncclGroupEnd());
    expect_violation("ncclSend on rank 0 while another thread uses its communicator");
    rank_end(&rank);
    world_end(&world);
}

TEST(memory_of_the_host_is_no_buffer)
{
    struct world world;
    struct rank rank;
    char host[16] = "";
    world_begin(&world, 1);
    simgpu_keep_violations(true);
    world.is_blocking = true;
    OK(rank_begin(&rank, 0, &world));
    OK(ncclSend(host, sizeof host, ncclInt8, 0, rank.comm, rank.a));
    while (simgpu_violations() == 0) {
        ranks_sleep_us(50);
    }
    expect_violation("ncclSend of 16 bytes touches memory that is not of a device");
    OK(ncclCommAbort(rank.comm));
    rank.comm = NULL;
    simgpu_break_device(0, cudaSuccess);
    rank_end(&rank);
    world_end(&world);
}

/* ---- splitting ---- */

static void split_early(int self, void *arg)
{
    struct rank rank;
    ncclComm_t child = NULL;
    OK(rank_begin(&rank, self, arg));
    if (self == 0) { /* nobody has met this message yet */
        OK(send(&rank, 1, 8, rank.a));
    }
    OK(ncclCommSplit(rank.comm, 0, self, &child, NULL));
    if (self == 1) {
        OK(receive(&rank, 0, 8, rank.a));
    }
    OK(cudaStreamSynchronize(rank.a));
    OK(ncclCommDestroy(child));
    rank_end(&rank);
}

TEST(a_split_with_groups_outstanding_is_found)
{
    struct world world;
    world_begin(&world, 2);
    simgpu_keep_violations(true);
    world.is_blocking = true;
    ranks_as_threads(2, split_early, &world);
    expect_violation("ncclCommSplit of rank 0 with groups outstanding");
    CHECK_EQ_I64(simgpu_violations(), 1);
    world_end(&world);
}

static void split_softly(int self, void *arg)
{
    struct rank rank;
    ncclComm_t child = NULL;
    int own = -1;
    OK(rank_begin(&rank, self, arg));
    CHECK_EQ_I64(ncclCommSplit(rank.comm, 0, self, &child, NULL), ncclInProgress);
    CHECK(child == NULL);
    CHECK_EQ_I64(send(&rank, 1 - self, 8, rank.a), ncclInvalidArgument); /* at it */
    OK(settle(rank.comm));
    OK(ncclCommUserRank(child, &own));
    CHECK_EQ_I64(own, self);
    OK(ncclCommDestroy(rank.comm));
    rank.comm = child; /* alive */
    OK(settle(rank.comm));
    OK(ncclGroupStart());
    OK(send(&rank, 1 - self, 8, rank.a));
    OK(receive(&rank, 1 - self, 8, rank.a));
    CHECK_EQ_I64(group_end(rank.comm), ncclSuccess);
    OK(cudaStreamSynchronize(rank.a));
    rank_end(&rank);
}

TEST(the_child_of_one_that_does_not_block_comes_later)
{
    struct world world;
    world_begin(&world, 2);
    ranks_as_threads(2, split_softly, &world);
    world_end(&world);
}
