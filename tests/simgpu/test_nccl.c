/* The NCCL communicator over the stand-ins of CUDA and NCCL: exact integers, order,
 * creation and close; ranks as threads, one device each. */
#include "nccl_batches.h"
#include "nccl_rig.h"

/* ---- what has to arrive ---- */

TEST(only_sends_and_receives)
{
    struct rig rig;
    REQUIRE(rig_init(&rig, 1, 5.0));
    struct cp_comm *comm = rig.comm[0];
    struct cp_comm_wait wait = {.is_ticket = true, .value = 1};
    CHECK(!cp_comm_has_windows(comm));
    CHECK(comm->ops->publish == NULL && comm->ops->reached == NULL &&
          comm->ops->reserve == NULL);
    CHECK_EQ_I64(comm->ops->wait(comm, &wait, 1, "step 1", cp_deadline_in(0.0)),
                 CP_ERR_INTERNAL);
    CHECK_STR_HAS(cp_last_error()->text, "step 1 waits on the host");
    rig_fini(&rig);
}

enum { ROUNDS = 12, WORDS = 40 };

static uint32_t word(int from, int to, int round, size_t index)
{
    return (uint32_t)from << 28 | (uint32_t)to << 24 | (uint32_t)(round & 0xff) << 16 |
           (uint32_t)index;
}

static size_t count_of(int from, int to, int round)
{
    return (size_t)((from * 5 + to * 3 + round * 7) % WORDS); /* 0 too */
}

typedef uint32_t pages[ROUNDS][RANKS_MOST][WORDS];

/* All to all, the own rank included, uneven; the lanes' streams in turns, and the host
 * far ahead of them. */
static void body_all_to_all(int rank, void *arg)
{
    struct rig *rig = arg;
    static _Thread_local pages host;
    CHECK_EQ_I64(cudaSetDevice(rank), cudaSuccess);
    uint32_t (*out)[RANKS_MOST][WORDS] = device_memory(sizeof host);
    uint32_t (*in)[RANKS_MOST][WORDS] = device_memory(sizeof host);
    for (int round = 0; round < ROUNDS; round++) {
        int lane = round % LANES, count = 0;
        struct cp_xfer xfers[2 * RANKS_MOST];
        for (int peer = 0; peer < rig->world; peer++) {
            for (size_t i = 0; i < WORDS; i++) {
                host[round][peer][i] = word(rank, peer, round, i);
            }
            xfers[count++] = (struct cp_xfer){.data = out[round][peer],
                                              .bytes = 4 * count_of(rank, peer, round),
                                              .peer = peer,
                                              .is_send = true};
            xfers[count++] = (struct cp_xfer){.data = in[round][peer],
                                              .bytes = 4 * count_of(peer, rank, round),
                                              .peer = peer};
        }
        to_device(out[round], host[round], sizeof host[round], rig->stream[rank][lane]);
        CHECK_EQ_I64(post(rig, rank, lane, xfers, count), CP_OK);
        CHECK_EQ_I64(ask(rig, rank), CP_OK);
    }
    CHECK_EQ_I64(cudaStreamSynchronize(rig->stream[rank][1]), cudaSuccess);
    CHECK_EQ_I64(cudaStreamSynchronize(rig->stream[rank][0]), cudaSuccess);
    to_host(host, in, sizeof host, rig->stream[rank][0]);
    for (int round = 0; round < ROUNDS; round++) {
        for (int peer = 0; peer < rig->world; peer++) {
            size_t count = count_of(peer, rank, round);
            for (size_t i = 0; i < WORDS; i++) {
                CHECK_EQ_U64(host[round][peer][i],
                             i < count ? word(peer, rank, round, i) : 0xffffffffu);
            }
        }
    }
    CHECK_EQ_I64(cudaFree(out), cudaSuccess);
    CHECK_EQ_I64(cudaFree(in), cudaSuccess);
}

static void all_to_all(int world)
{
    struct rig rig;
    uint64_t sends = 0, groups = 0;
    for (int round = 0; round < ROUNDS; round++) {
        for (int rank = 0; rank < world; rank++) {
            bool has_any = false;
            for (int peer = 0; peer < world; peer++) {
                bool is_sent = peer != rank && count_of(rank, peer, round) > 0;
                bool is_received = peer != rank && count_of(peer, rank, round) > 0;
                sends += is_sent;
                has_any = has_any || is_sent || is_received;
            }
            groups += has_any;
        }
    }
    TEST_CONTEXT("%d ranks", world);
    REQUIRE(rig_init(&rig, world, 20.0));
    ranks_as_threads(world, body_all_to_all, &rig);
    CHECK_EQ_U64(simgpu_stats().sends, sends); /* none of zero bytes, none to oneself */
    CHECK_EQ_U64(simgpu_stats().groups, groups);
    rig_fini(&rig);
    CHECK_EQ_I64(atomic_load(&aborts), 0);
}

TEST(integers_1_rank)
{
    all_to_all(1);
}

TEST(integers_2_ranks)
{
    all_to_all(2);
}

TEST(integers_3_ranks)
{
    all_to_all(3);
}

TEST(integers_4_ranks)
{
    all_to_all(4);
}

TEST(integers_6_ranks)
{
    all_to_all(6);
}

TEST(integers_while_the_host_part_of_a_group_takes_long)
{
    atomic_store(&lag_ns, 5000000);
    all_to_all(3);
    atomic_store(&lag_ns, 0);
    atomic_store(&lag_until_ns, 0);
}

/* A block goes round the ring, each step from one lane to the other: what a step sends is
 * what the one before has received. */
static void body_relay(int rank, void *arg)
{
    struct rig *rig = arg;
    int world = rig->world;
    enum { BYTES = 4096 };
    static _Thread_local unsigned char host[BYTES];
    cudaEvent_t event = NULL;
    CHECK_EQ_I64(cudaSetDevice(rank), cudaSuccess);
    CHECK_EQ_I64(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), cudaSuccess);
    char *data = device_memory(2 * BYTES);
    memset(host, rank + 1, sizeof host);
    to_device(data, host, BYTES, rig->stream[rank][0]);
    for (int step = 0; step < 3 * world + 1; step++) {
        int lane = step % LANES;
        struct cp_xfer xfers[2] = {
            {.data = data + step % 2 * BYTES,
             .bytes = BYTES,
             .peer = (rank + 1) % world,
             .is_send = true},
            {.data = data + (step + 1) % 2 * BYTES,
             .bytes = BYTES,
             .peer = (rank + world - 1) % world},
        };
        CHECK_EQ_I64(cudaStreamWaitEvent(rig->stream[rank][lane], event, 0),
                     cudaSuccess);
        CHECK_EQ_I64(post(rig, rank, lane, xfers, 2), CP_OK);
        CHECK_EQ_I64(cudaEventRecord(event, rig->stream[rank][lane]), cudaSuccess);
    }
    CHECK_EQ_I64(cudaEventSynchronize(event), cudaSuccess);
    to_host(host, data + (3 * world + 1) % 2 * BYTES, BYTES, rig->stream[rank][0]);
    for (int i = 0; i < BYTES; i++) {
        CHECK_EQ_I64(host[i], (rank + world - 1) % world + 1);
    }
    CHECK_EQ_I64(cudaEventDestroy(event), cudaSuccess);
    CHECK_EQ_I64(cudaFree(data), cudaSuccess);
}

TEST(batches_follow_their_streams)
{
    struct rig rig;
    REQUIRE(rig_init(&rig, 3, 20.0));
    ranks_as_threads(3, body_relay, &rig);
    rig_fini(&rig);
}

TEST(zero_bytes_are_no_call)
{
    struct rig rig;
    char data[8];
    REQUIRE(rig_init(&rig, 2, 5.0));
    struct cp_xfer xfers[2] = {{.data = data, .peer = 1, .is_send = true},
                               {.data = data, .peer = 1}};
    struct simgpu_stats before = simgpu_stats();
    CHECK_EQ_I64(post(&rig, 0, 0, xfers, 2), CP_OK);
    CHECK_EQ_I64(post(&rig, 0, 0, NULL, 0), CP_OK);
    CHECK_EQ_I64(ask(&rig, 0), CP_OK);
    CHECK_EQ_U64(simgpu_stats().groups, before.groups);
    CHECK_EQ_U64(simgpu_stats().records, before.records);
    CHECK_EQ_I64(cudaStreamSynchronize(rig.stream[0][0]), cudaSuccess);
    rig_fini(&rig);
}

TEST(messages_to_oneself_meet_in_order)
{
    struct rig rig;
    uint32_t host[4] = {1, 2, 0, 0};
    REQUIRE(rig_init(&rig, 1, 5.0));
    CHECK_EQ_I64(cudaSetDevice(0), cudaSuccess);
    uint32_t *data = device_memory(sizeof host);
    to_device(data, host, sizeof host, rig.stream[0][0]);
    struct cp_xfer xfers[4] = {
        {.data = data + 3, .bytes = 4, .peer = 0},
        {.data = data, .bytes = 4, .peer = 0, .is_send = true},
        {.data = data + 1, .bytes = 4, .peer = 0, .is_send = true},
        {.data = data + 2, .bytes = 4, .peer = 0},
    };
    struct simgpu_stats before = simgpu_stats();
    CHECK_EQ_I64(post(&rig, 0, 0, xfers, 4), CP_OK);
    to_host(host, data, sizeof host, rig.stream[0][0]);
    CHECK_EQ_U64(host[3], 1);
    CHECK_EQ_U64(host[2], 2);
    CHECK_EQ_U64(simgpu_stats().groups, before.groups);
    CHECK_EQ_I64(cudaFree(data), cudaSuccess);
    rig_fini(&rig);
}

TEST(a_host_that_is_far_ahead_waits_for_its_device)
{
    struct rig rig;
    int us = 200000;
    REQUIRE(rig_init(&rig, 1, 5.0));
    CHECK_EQ_I64(cudaSetDevice(0), cudaSuccess);
    simgpu_set_delay(0);
    uint32_t *data = device_memory(8);
    struct cp_xfer xfers[2] = {{.data = data, .bytes = 4, .is_send = true},
                               {.data = data + 1, .bytes = 4}};
    int64_t start_ns = cp_now_ns();
    CHECK_EQ_I64(cudaLaunchHostFunc(rig.stream[0][0], sleep_long, &us), cudaSuccess);
    for (int i = 0; i < CP_NCCL_BATCHES + 1; i++) {
        CHECK_EQ_I64(post(&rig, 0, 0, xfers, 2), CP_OK);
    }
    CHECK(cp_now_ns() - start_ns >= 200000000); /* the last one had to wait */
    CHECK_EQ_I64(cudaStreamSynchronize(rig.stream[0][0]), cudaSuccess);
    CHECK_EQ_I64(cudaFree(data), cudaSuccess);
    simgpu_set_delay(300);
    rig_fini(&rig);
}

/* ---- creation ---- */

TEST(a_rank_that_does_not_come_to_the_creation_is_a_timeout)
{
    struct rig rig;
    REQUIRE(rig_prepare(&rig, 3, 0.3));
    atomic_store(&rig.is_absent[1], true);
    int64_t start_ns = cp_now_ns();
    ranks_as_threads(3, body_create, &rig);
    CHECK(cp_now_ns() - start_ns < 3000000000);
    for (int rank = 0; rank < 3; rank += 2) {
        CHECK_EQ_I64(rig.code[rank], CP_ERR_TIMEOUT);
        CHECK_STR_HAS(rig.status[rank].text,
                      "did not finish connecting the ranks by NCCL within 0.3 s");
        CHECK(rig.comm[rank] == NULL);
    }
    CHECK_EQ_STR(rig.status[0].text, rig.status[2].text);
    rig_fini(&rig);
}

TEST(a_rank_that_dies_before_the_creation_is_named)
{
    struct rig rig;
    REQUIRE(rig_prepare(&rig, 2, 30.0));
    atomic_store(&rig.is_absent[1], true);
    atomic_store(&rig.is_dead[1], true);
    ranks_as_threads(2, body_create, &rig);
    CHECK_EQ_I64(rig.code[0], CP_ERR_COMM);
    CHECK_STR_HAS(rig.status[0].text, "rank 1 is gone");
    rig_fini(&rig);
}

TEST(two_ranks_on_one_device_are_an_error)
{
    struct rig rig;
    REQUIRE(rig_prepare(&rig, 2, 5.0));
    simgpu_keep_violations(true);
    rig.args[1].device = 0;
    ranks_as_threads(2, body_create, &rig);
    for (int rank = 0; rank < 2; rank++) {
        CHECK_EQ_I64(rig.code[rank], CP_ERR_COMM);
        CHECK_STR_HAS(rig.status[rank].text,
                      "cannot use device 0 with NCCL (each rank needs a GPU of its "
                      "own): NCCL says");
    }
    simgpu_keep_violations(false);
    rig_fini(&rig);
}

static enum cp_code interrupted(void *arg)
{
    (void)arg;
    return CP_ERR_INTERRUPTED;
}

TEST(an_interruption_ends_a_creation)
{
    struct rig rig;
    REQUIRE(rig_prepare(&rig, 3, 30.0));
    atomic_store(&rig.is_absent[1], true);
    rig.watch[2].interrupt = interrupted;
    ranks_as_threads(3, body_create, &rig);
    CHECK_EQ_I64(rig.code[2], CP_ERR_INTERRUPTED);
    CHECK_EQ_I64(rig.code[0], CP_ERR_COMM);
    CHECK_STR_HAS(rig.status[0].text, "rank 2 was interrupted in connecting");
    rig_fini(&rig);
}

TEST(memory_that_runs_out_is_an_error_on_all_ranks)
{
    int64_t allocation = 0;
    for (enum cp_code code = CP_ERR_NO_MEMORY; code != CP_OK; allocation++) {
        struct rig rig;
        TEST_CONTEXT("allocation %lld", (long long)allocation);
        REQUIRE(rig_prepare(&rig, 2, 5.0));
        atomic_store(&rig.is_absent[1], true);
        rig.watch[0].world = 1;
        cp_mem_fail_after(allocation);
        ranks_as_threads(2, body_create, &rig);
        cp_mem_fail_after(-1);
        code = rig.code[0];
        if (code != CP_OK) {
            CHECK_EQ_I64(code, CP_ERR_NO_MEMORY);
            CHECK_EQ_I64(cp_watch_check(&rig.watch[1]), CP_ERR_NO_MEMORY);
            CHECK_EQ_I64(cp_last_error()->rank, 0);
        }
        rig_fini(&rig);
        REQUIRE(allocation < 20);
    }
    CHECK(allocation > 3);
}

TEST(every_failure_of_the_runtime_in_a_creation_leaves_nothing)
{
    int failed = 0;
    for (int64_t call = 0; call < 600; call += call < 12 ? 1 : 97) {
        struct rig rig;
        TEST_CONTEXT("call %lld", (long long)call);
        REQUIRE(rig_prepare(&rig, 1, 5.0));
        rig.args[0].device = 1;
        simgpu_fail_after(call, cudaErrorUnknown);
        rig.code[0] = cp_comm_nccl_create(&rig.args[0], &rig.comm[0]);
        simgpu_fail_after(-1, cudaSuccess);
        failed += rig.code[0] != CP_OK;
        CHECK(rig.code[0] == CP_OK || rig.code[0] == CP_ERR_DEVICE ||
              rig.code[0] == CP_ERR_COMM);
        rig_fini(&rig);
    }
    CHECK(failed > 3);
}

/* ---- close ---- */

TEST(close_waits_a_moment_for_what_is_outstanding_then_aborts)
{
    struct rig rig;
    REQUIRE(rig_init(&rig, 2, 30.0));
    CHECK_EQ_I64(cudaSetDevice(0), cudaSuccess);
    char *data = device_memory(8);
    CHECK_EQ_I64(post_one(&rig, 0, 1, false, data, 8), CP_OK);
    int64_t start_ns = cp_now_ns();
    rig.comm[0]->ops->close(&rig.comm[0]);
    CHECK(cp_now_ns() - start_ns < 2500000000);
    CHECK_EQ_I64(atomic_load(&aborts), 1);
    (void)cudaStreamSynchronize(rig.stream[0][0]);
    CHECK_EQ_I64(cudaFree(data), cudaSuccess);
    rig_fini(&rig);
}

static void body_close_at_once(int rank, void *arg)
{
    struct rig *rig = arg;
    uint32_t value[1] = {5 + (uint32_t)rank};
    CHECK_EQ_I64(cudaSetDevice(rank), cudaSuccess);
    uint32_t *data = device_memory(8);
    to_device(data, value, 4, rig->stream[rank][0]);
    struct cp_xfer xfers[2] = {
        {.data = data, .bytes = 4, .peer = 1 - rank, .is_send = true},
        {.data = data + 1, .bytes = 4, .peer = 1 - rank}};
    ranks_sleep_us(rank * 50000);
    CHECK_EQ_I64(post(rig, rank, 0, xfers, 2), CP_OK);
    body_close(rank, arg);
    to_host(value, data + 1, 4, rig->stream[rank][0]);
    CHECK_EQ_U64(value[0], 5 + 1 - (uint32_t)rank);
    CHECK_EQ_I64(cudaFree(data), cudaSuccess);
}

TEST(a_batch_that_can_end_ends_before_close_does)
{
    struct rig rig;
    REQUIRE(rig_init(&rig, 2, 30.0));
    ranks_as_threads(2, body_close_at_once, &rig);
    CHECK_EQ_I64(atomic_load(&aborts), 0);
    rig_fini(&rig);
}

TEST(a_communicator_that_cannot_be_freed_is_parked)
{
    struct rig rig;
    struct cp_status reason = {.code = CP_ERR_COMM, .text = "rank 0 gave up"};
    REQUIRE(rig_init(&rig, 1, 30.0));
    atomic_store(&abort_hangs, true);
    int64_t start_ns = cp_now_ns();
    rig.comm[0]->ops->poison(rig.comm[0], &reason);
    CHECK(cp_now_ns() - start_ns < 2000000000);
    CHECK_EQ_I64(ask(&rig, 0), CP_ERR_COMM);
    start_ns = cp_now_ns();
    rig.comm[0]->ops->close(&rig.comm[0]);
    CHECK(cp_now_ns() - start_ns < 3000000000);
    CHECK_EQ_I64(simgpu_live().comms, 1);
    memset(&rig.watch[0], 0xff, sizeof rig.watch[0]); /* not looked at any more */
    atomic_store(&abort_hangs, false);
    for (int i = 0; i < 2000 && cp_mem_stats().live_blocks > rig.blocks; i++) {
        ranks_sleep_us(1000);
    }
    rig_fini(&rig);
}

static void body_forked(int rank, void *arg)
{
    struct rig *rig = arg;
    (void)rank;
    rig->comm[0]->ops->close(&rig->comm[0]);
    CHECK(rig->comm[0] == NULL);
    CHECK_EQ_I64(cp_mem_stats().live_blocks, rig->blocks);
}

TEST(a_forked_child_only_frees_memory)
{
    struct rig rig;
    if (TEST_UNDER_TSAN) {
        TEST_SKIP("ThreadSanitizer cannot follow a fork after threads");
    }
    REQUIRE(rig_init(&rig, 1, 30.0));
    CHECK_EQ_I64(ranks_end_of_process(ranks_start_process(0, body_forked, &rig)), 0);
    CHECK_EQ_I64(simgpu_live().comms, 1);
    rig_fini(&rig);
}

/* ---- the library ---- */

TEST(nccl_is_opened_or_the_error_says_what_to_install)
{
    const struct cp_nccl *found = NULL;
    int64_t blocks = cp_mem_stats().live_blocks;
    enum cp_code code = cp_nccl_open(&found);
    if (code == CP_OK) {
        int version = 0;
        CHECK_EQ_I64(found->get_version(&version), ncclSuccess);
        CHECK(version >= CP_NCCL_OLDEST);
    } else {
        CHECK_EQ_I64(code, CP_ERR_UNSUPPORTED);
        CHECK_STR_HAS(cp_last_error()->text, "install");
    }
    cp_nccl_close(&found);
    CHECK(found == NULL);
    CHECK_EQ_I64(cp_mem_stats().live_blocks, blocks);
}
