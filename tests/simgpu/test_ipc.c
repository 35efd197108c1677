/* The communicator of windows between GPUs by itself: equal bytes while windows grow, and
 * what becomes of a wait for what never comes, of memory that somebody still uses, and of
 * calls of the runtime that fail. */
#include <sys/mman.h>

#include "base/mem.h"
#include "comm_ipc.h"
#include "device_cuda.h"
#include "ranks.h"
#include "simgpu.h"
#include "test.h"

enum { WORLD = 3, SIGNAL = 1 };

struct rig {
    struct cp_bell bell;
    struct cp_poison poison;
    struct cp_watch watch[WORLD];
    struct cp_boards boards;
    struct cp_ipc_peer peers[WORLD][WORLD]; /* as each rank sees them */
    struct cp_comm *comm[WORLD];
    cudaStream_t stream[WORLD];
    _Atomic bool is_dead[WORLD];
    int64_t blocks; /* before */
    pthread_barrier_t gate;
    uint32_t rounds;
};

static bool is_dead(void *peers, int rank)
{
    struct rig *rig = peers;
    return atomic_load(&rig->is_dead[rank]);
}

static enum cp_code create(struct rig *rig, int rank, double timeout)
{
    struct cp_comm_ipc_args args = {.watch = &rig->watch[rank],
                                    .boards = rig->boards,
                                    .peers = rig->peers[rank],
                                    .device = rank,
                                    .timeout = timeout};
    return cp_comm_ipc_create(&args, &rig->comm[rank]);
}

/* All but the communicators. */
static void rig_prepare(struct rig *rig, bool are_apart)
{
    const size_t bytes = WORLD * sizeof *rig->boards.of;
    simgpu_reset();
    simgpu_seed(test_seed);
    simgpu_set_device_count(WORLD);
    memset(rig, 0, sizeof *rig);
    rig->blocks = cp_mem_stats().live_blocks;
    void *page =
        mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    REQUIRE(page != MAP_FAILED);
    rig->boards.of = page;
    REQUIRE(cp_mapping_create(page, bytes, &rig->boards.in) == CP_OK);
    for (int rank = 0; rank < WORLD; rank++) {
        rig->watch[rank] = (struct cp_watch){.bell = &rig->bell,
                                             .poison = &rig->poison,
                                             .rank = rank,
                                             .world = WORLD,
                                             .is_dead = is_dead,
                                             .peers = rig};
        for (int other = 0; other < WORLD; other++) {
            rig->peers[rank][other] = (struct cp_ipc_peer){
                .device = other, .is_local = !are_apart || other == rank};
        }
        if (are_apart) {
            simgpu_set_process(rank, rank);
        }
        CHECK_EQ_I64(cudaSetDevice(rank), cudaSuccess);
        CHECK_EQ_I64(
            cudaStreamCreateWithFlags(&rig->stream[rank], cudaStreamNonBlocking),
            cudaSuccess);
    }
    (void)pthread_barrier_init(&rig->gate, NULL, WORLD);
}

static enum cp_code reserve_and_attach(struct rig *rig, size_t bytes)
{
    for (int rank = 0; rank < WORLD; rank++) {
        CP_TRY(rig->comm[rank]->ops->reserve(rig->comm[rank], bytes));
    }
    for (int rank = 0; rank < WORLD; rank++) {
        CP_TRY(rig->comm[rank]->ops->attach(rig->comm[rank]));
    }
    return CP_OK;
}

static void rig_init(struct rig *rig, bool are_apart, double timeout)
{
    rig_prepare(rig, are_apart);
    for (int rank = 0; rank < WORLD; rank++) {
        CHECK_EQ_I64(create(rig, rank, timeout), CP_OK);
    }
    CHECK_EQ_I64(reserve_and_attach(rig, 1000), CP_OK);
}

static void close_rank(int rank, void *arg)
{
    struct rig *rig = arg;
    if (rig->comm[rank] != NULL) {
        rig->comm[rank]->ops->close(&rig->comm[rank]);
    }
    CHECK(rig->comm[rank] == NULL);
}

/* What others used when it was closed goes behind them, by a thread, which frees itself last.
 * `blocks`: of the host's memory that are to be left. */
static struct simgpu_live settled(int64_t blocks)
{
    struct simgpu_live live = simgpu_live();
    for (int ms = 0; ms < 20000 && (live.blocks + live.events + live.mappings > 0 ||
                                    cp_mem_stats().live_blocks > blocks);
         ms++) {
        ranks_sleep_us(1000);
        live = simgpu_live();
    }
    return live;
}

/* Nothing is left, and nobody has waited for long. */
static void rig_fini(struct rig *rig)
{
    int64_t start_ns = cp_now_ns();
    for (int rank = 0; rank < WORLD; rank++) {
        atomic_store(&rig->is_dead[rank], false); /* what it has open is open still */
    }
    ranks_as_threads(WORLD, close_rank, rig);
    CHECK(cp_now_ns() - start_ns < 4000000000);
    cp_mapping_drop(&rig->boards.in);
    for (int rank = 0; rank < WORLD; rank++) {
        CHECK_EQ_I64(cudaStreamDestroy(rig->stream[rank]), cudaSuccess);
    }
    struct simgpu_live live = settled(rig->blocks);
    CHECK_EQ_I64(live.blocks, 0);
    CHECK_EQ_I64(live.events, 0);
    CHECK_EQ_I64(live.mappings, 0);
    CHECK_EQ_I64(cp_mem_stats().live_blocks, rig->blocks);
    (void)pthread_barrier_destroy(&rig->gate);
}

static struct cp_stream *stream_of(const struct rig *rig, int rank)
{
    return (struct cp_stream *)rig->stream[rank];
}

static enum cp_code begin(struct rig *rig, int rank)
{
    const struct cp_comm_call call = {.seq = 7, .stream = stream_of(rig, rank)};
    return rig->comm[rank]->ops->begin(rig->comm[rank], &call);
}

static enum cp_code end(struct rig *rig, int rank)
{
    return rig->comm[rank]->ops->end(rig->comm[rank], stream_of(rig, rank));
}

static enum cp_code publish(struct rig *rig, int rank, uint64_t value)
{
    return rig->comm[rank]->ops->publish(rig->comm[rank], SIGNAL, value,
                                         stream_of(rig, rank));
}

static enum cp_code await(struct rig *rig, int rank, int peer, uint64_t value)
{
    const struct cp_comm_wait wait = {.peer = peer, .signal = SIGNAL, .value = value};
    return rig->comm[rank]->ops->reached(rig->comm[rank], &wait, 1,
                                         stream_of(rig, rank));
}

static void settle(struct rig *rig, int rank)
{
    CHECK_EQ_I64(cudaStreamSynchronize(rig->stream[rank]), cudaSuccess);
}

/* ---- equal bytes ---- */

static size_t bytes_in(uint32_t round)
{
    return (size_t)1 << (12 + round); /* over a piece, and twice as many */
}

/* Calls as a context makes them; no host waits for a device before all are enqueued. */
static void play(int rank, void *arg)
{
    struct rig *rig = arg;
    struct cp_comm *comm = rig->comm[rank];
    uint64_t *seen[RANKS_MOST] = {NULL};
    CHECK_EQ_I64(cudaSetDevice((rank + 1) % WORLD), cudaSuccess); /* not its own */
    for (uint32_t round = 1; round <= rig->rounds; round++) {
        size_t bytes = bytes_in(round);
        (void)pthread_barrier_wait(&rig->gate);
        CHECK_EQ_I64(comm->ops->reserve(comm, bytes), CP_OK);
        (void)pthread_barrier_wait(&rig->gate);
        CHECK_EQ_I64(comm->ops->attach(comm), CP_OK);
        CHECK_EQ_I64(begin(rig, rank), CP_OK);
        CHECK_EQ_I64(cudaSetDevice(rank), cudaSuccess);
        CHECK_EQ_I64(cudaMemsetAsync(comm->ops->window(comm, rank),
                                     (int)(16 * round) + rank, bytes,
                                     rig->stream[rank]),
                     cudaSuccess);
        CHECK_EQ_I64(publish(rig, rank, round), CP_OK);
        for (int peer = 0; peer < WORLD; peer++) {
            unsigned char *copy = NULL;
            CHECK_EQ_I64(await(rig, rank, peer, round), CP_OK);
            CHECK_EQ_I64(cudaMallocHost((void **)&copy, bytes), cudaSuccess);
            CHECK_EQ_I64(cudaMemcpyAsync(copy, comm->ops->window(comm, peer), bytes,
                                         cudaMemcpyDeviceToHost, rig->stream[rank]),
                         cudaSuccess);
            seen[(int)round % 4 * WORLD + peer] = (uint64_t *)(void *)copy;
        }
        CHECK_EQ_I64(end(rig, rank), CP_OK);
        if (round % 4 != 3 && round != rig->rounds) {
            continue;
        }
        settle(rig, rank);
        for (uint32_t past = round - round % 4; past <= round; past++) {
            for (int peer = 0; peer < WORLD && past > 0; peer++) {
                uint64_t **one = &seen[(int)past % 4 * WORLD + peer];
                const unsigned char *got = (const unsigned char *)*one;
                bool is_equal = true;
                for (size_t i = 0; i < bytes_in(past); i++) {
                    is_equal = is_equal && got[i] == 16 * past + (uint32_t)peer;
                }
                CHECK(is_equal);
                CHECK_EQ_I64(cudaFreeHost(*one), cudaSuccess);
                *one = NULL;
            }
        }
    }
}

static void check_bytes(bool are_apart)
{
    static struct rig rig;
    rig_init(&rig, are_apart, 30.0);
    rig.rounds = 10;
    ranks_as_threads(WORLD, play, &rig);
    for (int rank = 0; rank < WORLD; rank++) {
        for (int peer = 0; peer < WORLD; peer++) {
            CHECK_EQ_I64(simgpu_has_peer_access(rank, peer), rank != peer);
        }
    }
    rig_fini(&rig);
}

TEST(windows_that_grow_show_what_was_written)
{
    check_bytes(false);
}

TEST(so_do_those_of_other_processes)
{
    check_bytes(true);
}

/* ---- what never comes ---- */

TEST(a_peer_that_does_not_come_is_a_timeout)
{
    static struct rig rig;
    rig_init(&rig, true, 0.3);
    static struct cp_flight flights[WORLD];
    struct cp_recorder recorder = {.flight = &flights[0]};
    memset(flights, 0, sizeof flights);
    rig.watch[0].recorder = &recorder;
    rig.watch[0].flights = flights;
    cp_recorder_enter(&recorder, CP_OP_ATTENTION, 7);
    CHECK_EQ_I64(begin(&rig, 0), CP_OK);
    CHECK_EQ_I64(await(&rig, 0, 1, 1), CP_OK);
    CHECK_EQ_I64(end(&rig, 0), CP_OK);
    cp_recorder_leave(&recorder, CP_OK);
    settle(&rig, 0);
    CHECK_EQ_I64(begin(&rig, 0), CP_ERR_TIMEOUT);
    CHECK_STR_HAS(
        cp_last_error()->text,
        "rank 0 waited more than 0.3 s for rank 1 in attention, call 7 (on its "
        "GPU). Meanwhile rank 0: outside, after attention, call 7");
    CHECK_EQ_I64(begin(&rig, 2), CP_ERR_TIMEOUT);
    rig.watch[0].recorder = NULL;
    rig_fini(&rig);
}

/* Also those for whom only the next call waits. */
TEST(all_who_do_not_come_are_named)
{
    static struct rig rig;
    rig_init(&rig, false, 0.3);
    CHECK_EQ_I64(begin(&rig, 0), CP_OK);
    CHECK_EQ_I64(end(&rig, 0), CP_OK);
    CHECK_EQ_I64(begin(&rig, 0), CP_OK);
    CHECK_EQ_I64(end(&rig, 0), CP_OK);
    settle(&rig, 0);
    CHECK_EQ_I64(begin(&rig, 0), CP_ERR_TIMEOUT);
    CHECK_STR_HAS(cp_last_error()->text,
                  "rank 0 waited more than 0.3 s for rank"); /* threads of a simulated
                                                                kernel run one by one */
    rig_fini(&rig);
}

TEST(a_peer_that_is_dead_is_named)
{
    static struct rig rig;
    rig_init(&rig, true, 30.0);
    int64_t start_ns = cp_now_ns();
    CHECK_EQ_I64(begin(&rig, 0), CP_OK);
    CHECK_EQ_I64(await(&rig, 0, 2, 1), CP_OK);
    CHECK_EQ_I64(end(&rig, 0), CP_OK);
    atomic_store(&rig.is_dead[2], true);
    settle(&rig, 0);
    CHECK(cp_now_ns() - start_ns < 5000000000);
    CHECK_EQ_I64(begin(&rig, 1), CP_ERR_COMM);
    CHECK_STR_HAS(cp_last_error()->text, "rank 2 is gone");
    CHECK_STR_HAS(cp_last_error()->text, "while rank 0 waited for it in an exchange");
    rig_fini(&rig);
}

/* What a dead rank had published counts. */
TEST(a_rank_may_publish_and_die)
{
    static struct rig rig;
    rig_init(&rig, true, 30.0);
    CHECK_EQ_I64(begin(&rig, 2), CP_OK);
    CHECK_EQ_I64(publish(&rig, 2, 1), CP_OK);
    CHECK_EQ_I64(end(&rig, 2), CP_OK);
    atomic_store(&rig.is_dead[2], true);
    CHECK_EQ_I64(begin(&rig, 0), CP_OK);
    CHECK_EQ_I64(await(&rig, 0, 2, 1), CP_OK);
    CHECK_EQ_I64(end(&rig, 0), CP_OK);
    settle(&rig, 0);
    CHECK_EQ_I64(cp_watch_check(&rig.watch[0]), CP_OK);
    rig.comm[2]->ops->close(&rig.comm[2]);
    rig_fini(&rig);
}

/* A context that is broken elsewhere: by a host, in its own words. */
TEST(poison_ends_waits)
{
    static struct rig rig;
    struct cp_status reason = {
        .code = CP_ERR_VALUE, .rank = 1, .text = "rank 1 gave up"};
    rig_init(&rig, false, 30.0);
    CHECK_EQ_I64(begin(&rig, 0), CP_OK);
    CHECK_EQ_I64(await(&rig, 0, 1, 1), CP_OK);
    CHECK_EQ_I64(end(&rig, 0), CP_OK);
    rig.comm[1]->ops->poison(rig.comm[1], &reason);
    settle(&rig, 0);
    CHECK_EQ_I64(begin(&rig, 0), CP_ERR_VALUE);
    CHECK_EQ_STR(cp_last_error()->text, "rank 1 gave up");
    rig_fini(&rig);
}

/* What it does in the windows of others, who may be in the call before. */
TEST(a_broken_call_still_waits_for_its_turn)
{
    static struct rig rig;
    struct cp_status reason = {
        .code = CP_ERR_VALUE, .rank = 2, .text = "rank 2 gave up"};
    uint64_t *word = NULL;
    rig_init(&rig, false, 30.0);
    CHECK_EQ_I64(cudaMallocHost((void **)&word, sizeof *word), cudaSuccess);
    *word = 0;
    for (int rank = 0; rank < WORLD; rank++) {
        CHECK_EQ_I64(begin(&rig, rank), CP_OK);
    }
    CHECK_EQ_I64(cudaSetDevice(1), cudaSuccess);
    CHECK_EQ_I64(cudaMemsetAsync(rig.comm[1]->ops->window(rig.comm[1], 1), 1,
                                 sizeof *word, rig.stream[1]),
                 cudaSuccess);
    settle(&rig, 1);
    simgpu_slow_stream(rig.stream[1], 300000); /* it reads that again, later */
    CHECK_EQ_I64(cudaMemcpyAsync(word, rig.comm[1]->ops->window(rig.comm[1], 1),
                                 sizeof *word, cudaMemcpyDeviceToHost, rig.stream[1]),
                 cudaSuccess);
    for (int rank = 0; rank < WORLD; rank++) {
        CHECK_EQ_I64(end(&rig, rank), CP_OK);
    }
    CHECK_EQ_I64(begin(&rig, 0), CP_OK);
    CHECK_EQ_I64(cudaSetDevice(0), cudaSuccess);
    CHECK_EQ_I64(cudaMemsetAsync(rig.comm[0]->ops->window(rig.comm[0], 1), 2,
                                 sizeof *word, rig.stream[0]),
                 cudaSuccess);
    CHECK_EQ_I64(end(&rig, 0), CP_OK);
    rig.comm[2]->ops->poison(rig.comm[2], &reason);
    rig.comm[0]->ops->poison(rig.comm[0], &reason);
    settle(&rig, 0);
    settle(&rig, 1);
    CHECK_EQ_U64(*word, 0x0101010101010101u);
    CHECK_EQ_I64(cudaFreeHost(word), cudaSuccess);
    rig_fini(&rig);
}

/* A call that breaks in the middle has no end; its waits are ended by close at the latest. */
TEST(close_ends_the_waits_of_half_a_call)
{
    static struct rig rig;
    rig_init(&rig, true, 30.0);
    CHECK_EQ_I64(begin(&rig, 0), CP_OK);
    CHECK_EQ_I64(await(&rig, 0, 1, 1), CP_OK);
    rig_fini(&rig);
}

/* A context that says so lets go of the others' memory, before it is closed itself. */
TEST(half_a_call_holds_nobody_up)
{
    static struct rig rig;
    struct cp_status reason = {.code = CP_ERR_VALUE, .rank = 0, .text = "it broke"};
    rig_init(&rig, true, 30.0);
    CHECK_EQ_I64(begin(&rig, 0), CP_OK);
    CHECK_EQ_I64(await(&rig, 0, 1, 1), CP_OK);
    (void)cp_fail(CP_ERR_VALUE, "it broke");
    rig.comm[0]->ops->poison(rig.comm[0], &reason);
    CHECK_EQ_STR(cp_last_error()->text, "it broke");
    int64_t start_ns = cp_now_ns();
    rig.comm[1]->ops->close(&rig.comm[1]);
    CHECK(cp_now_ns() - start_ns < 1500000000);
    CHECK_EQ_I64(simgpu_live().mappings, 4); /* of ranks 0 and 2 */
    rig_fini(&rig);
}

/* In a sound context too: nobody else ends them. */
TEST(close_ends_the_waits_of_a_whole_call)
{
    static struct rig rig;
    rig_init(&rig, true, 30.0);
    CHECK_EQ_I64(begin(&rig, 0), CP_OK);
    CHECK_EQ_I64(await(&rig, 0, 1, 1), CP_OK);
    CHECK_EQ_I64(end(&rig, 0), CP_OK);
    rig_fini(&rig);
}

/* What follows on a wait that was ended works with garbage: nobody gets it for data. */
TEST(nothing_is_published_behind_a_wait_that_was_ended)
{
    static struct rig rig;
    uint64_t counters[WORLD][CP_IPC_LINE];
    rig_init(&rig, false, 0.2);
    CHECK_EQ_I64(begin(&rig, 0), CP_OK);
    CHECK_EQ_I64(publish(&rig, 0, 5), CP_OK);
    CHECK_EQ_I64(await(&rig, 0, 1, 1), CP_OK);
    CHECK_EQ_I64(publish(&rig, 0, 6), CP_OK);
    CHECK_EQ_I64(end(&rig, 0), CP_OK);
    settle(&rig, 0);
    const struct cp_ipc_notice *notice = (const void *)rig.boards.of[2].bytes;
    CHECK_EQ_I64(cudaMemcpyAsync(counters, notice->inbox, sizeof counters,
                                 cudaMemcpyDeviceToHost, rig.stream[0]),
                 cudaSuccess);
    settle(&rig, 0);
    CHECK_EQ_U64(counters[0][SIGNAL], CP_COMM_COUNTER(1, 5));
    CHECK_EQ_U64(counters[0][CP_IPC_LEFT], 1); /* its memory may be used again */
    rig_fini(&rig);
}

TEST(hosts_do_not_wait)
{
    static struct rig rig;
    rig_init(&rig, false, 30.0);
    CHECK_EQ_I64(
        rig.comm[0]->ops->wait(rig.comm[0], NULL, 0, "a test", cp_deadline_in(1.0)),
        CP_ERR_INTERNAL);
    rig_fini(&rig);
}

/* ---- memory that others use ---- */

/* Who idles lets go of it, and has no context any more. */
TEST(who_closes_gets_his_memory_back)
{
    static struct rig rig;
    rig_init(&rig, true, 30.0);
    int64_t start_ns = cp_now_ns();
    rig.comm[1]->ops->close(&rig.comm[1]);
    CHECK(cp_now_ns() - start_ns < 900000000);
    CHECK_EQ_I64(simgpu_live().mappings, 4); /* two each, of ranks 0 and 2 */
    CHECK_EQ_I64(begin(&rig, 0), CP_ERR_COMM);
    CHECK_STR_HAS(cp_last_error()->text, "rank 1 has closed its context");
    CHECK_EQ_I64(rig.comm[2]->ops->attach(rig.comm[2]), CP_ERR_COMM);
    CHECK_STR_HAS(cp_last_error()->text, "rank 1 has closed its context");
    rig_fini(&rig);
}

/* What somebody uses who does not let go stays, rather than being freed under him; its
 * owner does not wait for that, and nor does his page. */
TEST(memory_that_is_used_goes_when_it_is_not)
{
    static struct rig rig;
    rig_init(&rig, false, 30.0);
    struct cp_mapping *kept = cp_mapping_share(rig.boards.in);
    struct cp_ipc_notice *other = (void *)rig.boards.of[0].bytes;
    rig.comm[0]->ops->close(&rig.comm[0]); /* it looks no more */
    atomic_store(&other->uses[1], 1);
    int64_t start_ns = cp_now_ns();
    rig.comm[1]->ops->close(&rig.comm[1]);
    CHECK(cp_now_ns() - start_ns < 900000000);
    rig.comm[2]->ops->close(&rig.comm[2]);
    cp_mapping_drop(&rig.boards.in);
    ranks_sleep_us(300000);
    CHECK_EQ_I64(simgpu_live().blocks, 3); /* inbox, window and desk */
    atomic_store(&other->uses[1], 0);
    CHECK_EQ_I64(settled(rig.blocks + 1).blocks, 0); /* beside `kept` */
    cp_mapping_drop(&kept);
    rig_fini(&rig);
}

static void CUDART_CB wait_for_gate(void *arg)
{
    while (!atomic_load((atomic_bool *)arg)) {
        ranks_sleep_us(1000);
    }
}

/* A device gives nothing back while it works at anything, whosever that is. The first to
 * close has that device, or one that idles and has its memory open. */
static void check_close_beside_work_without_end(int first)
{
    static struct rig rig;
    atomic_bool is_open = false;
    cudaStream_t aside = NULL;
    TEST_CONTEXT("rank %d closes first", first);
    rig_init(&rig, true, 30.0);
    simgpu_set_patience(10.0);
    CHECK_EQ_I64(cudaSetDevice(0), cudaSuccess);
    CHECK_EQ_I64(cudaStreamCreateWithFlags(&aside, cudaStreamNonBlocking), cudaSuccess);
    CHECK_EQ_I64(cudaLaunchHostFunc(aside, wait_for_gate, &is_open), cudaSuccess);
    for (int rank = first; rank >= 0; rank--) {
        int64_t start_ns = cp_now_ns();
        rig.comm[rank]->ops->close(&rig.comm[rank]);
        CHECK(cp_now_ns() - start_ns < 3000000000);
    }
    CHECK_EQ_I64(simgpu_live().blocks, 9); /* each rank's inbox, window and desk */
    atomic_store(&is_open, true);
    CHECK_EQ_I64(cudaStreamSynchronize(aside), cudaSuccess);
    CHECK_EQ_I64(cudaStreamDestroy(aside), cudaSuccess);
    rig_fini(&rig);
}

TEST(a_device_that_gives_nothing_back_holds_nobody_up)
{
    check_close_beside_work_without_end(0);
    check_close_beside_work_without_end(1);
}

/* A dead rank uses nothing. */
TEST(who_is_dead_keeps_nothing)
{
    static struct rig rig;
    rig_init(&rig, false, 30.0);
    struct cp_ipc_notice *other = (void *)rig.boards.of[0].bytes;
    rig.comm[0]->ops->close(&rig.comm[0]);
    atomic_store(&other->uses[1], 1);
    atomic_store(&rig.is_dead[0], true);
    int64_t start_ns = cp_now_ns();
    rig.comm[1]->ops->close(&rig.comm[1]);
    CHECK(cp_now_ns() - start_ns < 900000000);
    rig_fini(&rig);
}

static void body_forked(int rank, void *arg)
{
    struct rig *rig = arg;
    (void)rank;
    rig->comm[1]->ops->close(&rig->comm[1]);
    CHECK(rig->comm[1] == NULL);
}

TEST(a_forked_child_only_frees_memory)
{
    static struct rig rig;
    if (TEST_UNDER_TSAN) {
        TEST_SKIP("ThreadSanitizer cannot follow a fork after threads");
    }
    rig_init(&rig, false, 30.0);
    CHECK_EQ_I64(ranks_end_of_process(ranks_start_process(0, body_forked, &rig)), 0);
    CHECK_EQ_I64(begin(&rig, 1), CP_OK);
    CHECK_EQ_I64(end(&rig, 1), CP_OK);
    rig_fini(&rig);
}

/* ---- calls that fail ---- */

TEST(every_failure_of_a_creation_leaves_nothing)
{
    static struct rig rig;
    int count = 0;
    for (bool is_made = false; !is_made && count < 100; count++) {
        TEST_CONTEXT("call %d", count);
        rig_prepare(&rig, false);
        CHECK_EQ_I64(cudaSetDevice(1),
                     cudaSuccess); /* as the caller of the table does */
        simgpu_fail_after(count, cudaErrorUnknown);
        is_made = create(&rig, 0, 30.0) == CP_OK;
        simgpu_fail_after(-1, cudaSuccess);
        if (!is_made) {
            CHECK_EQ_I64(cp_last_error()->code, CP_ERR_DEVICE);
            CHECK_STR_HAS(cp_last_error()->text, "unknown error");
        }
        rig_fini(&rig);
    }
    CHECK(count > 6 && count < 100);
}

TEST(memory_of_the_host_that_runs_out)
{
    static struct rig rig;
    int count = 0;
    for (bool is_made = false; !is_made && count < 100; count++) {
        rig_prepare(&rig, false);
        cp_mem_fail_after(count);
        is_made = create(&rig, 0, 30.0) == CP_OK;
        cp_mem_fail_after(-1);
        CHECK(is_made || cp_last_error()->code == CP_ERR_NO_MEMORY);
        rig_fini(&rig);
    }
    CHECK_EQ_I64(count, 3);
}

/* What fails where a call that is captured begins: nothing is left of it, and the next one
 * goes on. */
TEST(what_fails_in_a_capture)
{
    static const char *const failing[] = {"cudaUserObjectCreate",
                                          "cudaGraphRetainUserObject"};
    static struct rig rig;
    rig_init(&rig, false, 30.0);
    for (int i = -1; i < 2; i++) {
        cudaGraph_t graph = NULL;
        CHECK_EQ_I64(cudaSetDevice(0), cudaSuccess);
        CHECK_EQ_I64(cudaStreamBeginCapture(rig.stream[0], cudaStreamCaptureModeGlobal),
                     cudaSuccess);
        if (i < 0) {
            cp_mem_fail_after(0);
        } else {
            simgpu_fail_call(failing[i], 0, cudaErrorMemoryAllocation);
        }
        const struct cp_comm_call call = {.capture = (uint64_t)i + 100,
                                          .stream = stream_of(&rig, 0)};
        CHECK_EQ_I64(rig.comm[0]->ops->begin(rig.comm[0], &call), CP_ERR_NO_MEMORY);
        cp_mem_fail_after(-1);
        simgpu_fail_call("", -1, cudaSuccess);
        CHECK_EQ_I64(cudaStreamEndCapture(rig.stream[0], &graph), cudaSuccess);
        CHECK_EQ_I64(cudaGraphDestroy(graph), cudaSuccess);
    }
    rig.rounds = 4;
    ranks_as_threads(WORLD, play, &rig);
    rig_fini(&rig);
}

TEST(a_gpu_without_memory_for_a_window_goes_on)
{
    static struct rig rig;
    rig_init(&rig, true, 30.0);
    struct cp_comm *comm = rig.comm[0];
    CHECK_EQ_I64(comm->ops->reserve(comm, (size_t)4 << 20), CP_OK);
    CHECK_EQ_I64(comm->ops->attach(comm), CP_OK);
    void *before = comm->ops->window(comm, 0);
    simgpu_fail_call("cudaMalloc", 0, cudaErrorMemoryAllocation);
    /* As much as is needed, where twice as much as there was is too much. */
    CHECK_EQ_I64(comm->ops->reserve(comm, ((size_t)4 << 20) + 1), CP_OK);
    CHECK(comm->ops->window(comm, 0) == before); /* not before all have theirs */
    CHECK_EQ_I64(comm->ops->attach(comm), CP_OK);
    CHECK(comm->ops->window(comm, 0) != before);
    before = comm->ops->window(comm, 0);
    simgpu_fail_call("cudaMalloc", 0, cudaErrorMemoryAllocation);
    CHECK_EQ_I64(comm->ops->reserve(comm, (size_t)64 << 20), CP_ERR_NO_MEMORY);
    CHECK_STR_HAS(cp_last_error()->text,
                  "no memory for the window of rank 0: 67108864 bytes of its GPU");
    CHECK_EQ_I64(cp_last_error()->rank, 0);
    CHECK_EQ_I64(comm->ops->reserve(comm, SIZE_MAX), CP_ERR_NO_MEMORY);
    CHECK_EQ_I64(comm->ops->attach(comm), CP_OK);
    CHECK(comm->ops->window(comm, 0) == before);
    simgpu_fail_call("cudaIpcGetMemHandle", 0, cudaErrorUnknown);
    CHECK_EQ_I64(comm->ops->reserve(comm, (size_t)64 << 20), CP_ERR_DEVICE);
    rig_fini(&rig);
}

TEST(a_window_that_cannot_be_mapped_is_named)
{
    static struct rig rig;
    rig_prepare(&rig, true);
    for (int rank = 0; rank < WORLD; rank++) {
        CHECK_EQ_I64(create(&rig, rank, 30.0), CP_OK);
    }
    simgpu_fail_call("cudaIpcOpenMemHandle", 1, cudaErrorMapBufferObjectFailed);
    CHECK_EQ_I64(reserve_and_attach(&rig, 1000), CP_ERR_DEVICE);
    CHECK_STR_HAS(cp_last_error()->text, "rank 0 cannot map the window of rank 1: ");
    CHECK_STR_HAS(cp_last_error()->text, "cudaErrorMapBufferObjectFailed");
    rig_fini(&rig);
}

TEST(a_gpu_that_is_not_reached_is_an_error)
{
    static struct rig rig;
    rig_prepare(&rig, false);
    simgpu_set_peer_access(0, 2, false);
    CHECK_EQ_I64(create(&rig, 0, 30.0), CP_ERR_DEVICE);
    CHECK_STR_HAS(cp_last_error()->text, "cudaDeviceEnablePeerAccess");
    rig_fini(&rig);
}

/* Each call that an enqueued call makes, one after the other. */
TEST(every_failure_in_a_call_is_an_error)
{
    int failed = 0;
    for (int count = 0; count < 12; count++) {
        static struct rig rig;
        TEST_CONTEXT("call %d", count);
        rig_init(&rig, false, 30.0);
        simgpu_fail_after(count, cudaErrorUnknown);
        enum cp_code code = begin(&rig, 0);
        code = code != CP_OK ? code : publish(&rig, 0, 1);
        code = code != CP_OK ? code : await(&rig, 0, 0, 1);
        code = code != CP_OK ? code : end(&rig, 0);
        simgpu_fail_after(-1, cudaSuccess);
        if (code != CP_OK) {
            CHECK_EQ_I64(code, CP_ERR_DEVICE);
            failed += 1;
        }
        rig_fini(&rig);
    }
    CHECK(failed >= 4); /* two signals, a wait, the event behind them */
}

TEST(an_error_of_the_device_is_seen)
{
    static struct rig rig;
    rig_init(&rig, false, 30.0);
    CHECK_EQ_I64(begin(&rig, 0), CP_OK);
    CHECK_EQ_I64(await(&rig, 0, 1, 1), CP_OK);
    CHECK_EQ_I64(end(&rig, 0), CP_OK);
    simgpu_break_device(0, cudaErrorIllegalAddress);
    for (int i = 0; i < 2000 && cp_watch_check(&rig.watch[1]) == CP_OK; i++) {
        ranks_sleep_us(1000);
    }
    CHECK_EQ_I64(cp_watch_check(&rig.watch[1]), CP_ERR_DEVICE);
    CHECK_STR_HAS(cp_last_error()->text, "an illegal memory access was encountered");
    CHECK_EQ_I64(cp_last_error()->rank, 0);
    simgpu_break_device(0, cudaSuccess);
    rig_fini(&rig);
}
