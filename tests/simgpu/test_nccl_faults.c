/* The NCCL communicator when enqueued batches go wrong: peers that never post, die, or
 * poison; errors of NCCL and of the device. The user's synchronisation returns, and then
 * every rank knows why. */
#include "nccl_rig.h"

TEST(a_batch_that_cannot_be_is_an_error)
{
    struct cp_xfer wrong[3][2] = {
        {{.bytes = 4, .peer = 0, .is_send = true}, {.bytes = 8, .peer = 0}},
        {{.bytes = 4, .peer = 0, .is_send = true}, {.bytes = 0, .peer = 0}},
        {{.bytes = 4, .peer = 2, .is_send = true}, {.bytes = 4, .peer = 1}},
    };
    static const char *const text[3] = {
        "rank 0 sends 4 bytes to itself and expects 8",
        "rank 0 posts half of a message to itself",
        "rank 0 posts to rank 2 of 2",
    };
    for (int i = 0; i < 3; i++) {
        struct rig rig;
        REQUIRE(rig_init(&rig, 2, 5.0));
        CHECK_EQ_I64(post(&rig, 0, 0, wrong[i], 2), CP_ERR_INTERNAL);
        CHECK_STR_HAS(cp_last_error()->text, text[i]);
        CHECK_EQ_I64(ask(&rig, 1), CP_ERR_INTERNAL); /* for all ranks */
        rig_fini(&rig);
    }
}

/* ---- what can go wrong with enqueued batches ---- */

struct absent {
    struct rig rig;
    enum cp_code want;
    const char *text;
    struct cp_status poison; /* (optional) rank 2 says it instead of posting */
    bool dies;               /* rank 2 */
};

/* Ranks 0 and 1 exchange with rank 2, which never posts. The synchronisation returns, and
 * then everybody knows why. */
static void body_absent(int rank, void *arg)
{
    struct absent *absent = arg;
    struct rig *rig = &absent->rig;
    enum { BYTES = 64 };
    CHECK_EQ_I64(cudaSetDevice(rank), cudaSuccess);
    char *data = device_memory(2 * BYTES);
    if (rank < 2) {
        struct cp_xfer xfers[2] = {
            {.data = data, .bytes = BYTES, .peer = 2, .is_send = true},
            {.data = data + BYTES, .bytes = BYTES, .peer = 2},
        };
        CHECK_EQ_I64(post(rig, rank, 0, xfers, 2), CP_OK);
        CHECK_EQ_I64(ask(rig, rank), CP_OK);
        (void)cudaStreamSynchronize(rig->stream[rank][0]);
        CHECK_EQ_I64(ask(rig, rank), absent->want);
        CHECK_STR_HAS(cp_last_error()->text, absent->text);
        CHECK_EQ_I64(post(rig, rank, 0, xfers, 2), absent->want);
        CHECK_STR_HAS(cp_last_error()->text, absent->text);
    } else {
        ranks_sleep_us(100000);
        atomic_store(&rig->is_dead[2], absent->dies);
        if (absent->poison.code != CP_OK) {
            rig->comm[2]->ops->poison(rig->comm[2], &absent->poison);
        }
    }
    CHECK_EQ_I64(cudaFree(data), cudaSuccess);
}

static void run_absent(struct absent *absent, double timeout, double most)
{
    REQUIRE(rig_init(&absent->rig, 3, timeout));
    int64_t start_ns = cp_now_ns();
    ranks_as_threads(3, body_absent, absent);
    CHECK((double)(cp_now_ns() - start_ns) * 1e-9 < most);
    struct cp_status all = absent->rig.poison.status;
    CHECK_STR_HAS(all.text, absent->text);
    CHECK(all.rank >= 0);
    rig_fini(&absent->rig);
    CHECK_EQ_I64(atomic_load(&aborts), 3);
}

TEST(a_peer_that_never_posts_is_a_timeout)
{
    struct absent absent = {
        .want = CP_ERR_TIMEOUT,
        .text = "waited more than 0.3 s for rank 2 in an exchange (NCCL batch 1)"};
    run_absent(&absent, 0.3, 3.0);
}

TEST(a_peer_that_dies_is_named)
{
    struct absent absent = {
        .want = CP_ERR_COMM, .text = "rank 2 is gone", .dies = true};
    run_absent(&absent, 30.0, 4.0);
    CHECK_EQ_I64(absent.rig.poison.status.rank, 2);
}

TEST(a_peers_poison_ends_a_running_transfer)
{
    struct absent absent = {
        .want = CP_ERR_DEVICE,
        .text = "rank 2 lost its device",
        .poison = {.code = CP_ERR_DEVICE, .rank = 2, .text = "rank 2 lost its device"}};
    run_absent(&absent, 30.0, 3.0);
}

/* The reason that a rank left wins over its death. */
TEST(the_reason_a_dead_rank_left_is_better_than_its_death)
{
    struct absent absent = {
        .want = CP_ERR_COMM,
        .text = "rank 2 gave up",
        .poison = {.code = CP_ERR_COMM, .rank = 2, .text = "rank 2 gave up"},
        .dies = true};
    run_absent(&absent, 30.0, 3.0);
}

struct late {
    struct rig rig;
    int rank, us; /* whose device comes to the batch late, and by how much */
};

/* Rank 1 posts and is gone at once. */
static void body_late(int rank, void *arg)
{
    struct late *late = arg;
    struct rig *rig = &late->rig;
    uint32_t value[1] = {77 + (uint32_t)rank};
    CHECK_EQ_I64(cudaSetDevice(rank), cudaSuccess);
    uint32_t *data = device_memory(8);
    to_device(data, value, 4, rig->stream[rank][0]);
    if (rank == late->rank) {
        CHECK_EQ_I64(cudaLaunchHostFunc(rig->stream[rank][0], sleep_long, &late->us),
                     cudaSuccess);
    }
    struct cp_xfer xfers[2] = {
        {.data = data, .bytes = 4, .peer = 1 - rank, .is_send = true},
        {.data = data + 1, .bytes = 4, .peer = 1 - rank}};
    CHECK_EQ_I64(post(rig, rank, 0, xfers, 2), CP_OK);
    if (rank == 1) {
        atomic_store(&rig->is_dead[1], true);
    }
    to_host(value, data + 1, 4, rig->stream[rank][0]);
    CHECK_EQ_U64(value[0], 77 + 1 - (uint32_t)rank);
    CHECK_EQ_I64(ask(rig, rank), CP_OK);
    CHECK_EQ_I64(cudaFree(data), cudaSuccess);
}

TEST(what_a_dead_rank_has_sent_arrives)
{
    struct late late = {.rank = 0, .us = 800000};
    REQUIRE(rig_init(&late.rig, 2, 30.0));
    ranks_as_threads(2, body_late, &late);
    rig_fini(&late.rig);
    late = (struct late){.rank = 1, .us = 250000};
    REQUIRE(rig_init(&late.rig, 2, 30.0));
    ranks_as_threads(2, body_late, &late);
    rig_fini(&late.rig);
}

/* Both devices are busy before each of two batches, for longer than a batch may take. */
static void body_busy(int rank, void *arg)
{
    struct rig *rig = arg;
    int us = 500000;
    CHECK_EQ_I64(cudaSetDevice(rank), cudaSuccess);
    char *data = device_memory(8);
    CHECK_EQ_I64(cudaMemsetAsync(data, rank + 1, 4, rig->stream[rank][0]), cudaSuccess);
    struct cp_xfer xfers[2] = {
        {.data = data, .bytes = 4, .peer = 1 - rank, .is_send = true},
        {.data = data + 4, .bytes = 4, .peer = 1 - rank}};
    for (int batch = 0; batch < 2; batch++) {
        CHECK_EQ_I64(cudaLaunchHostFunc(rig->stream[rank][0], sleep_long, &us),
                     cudaSuccess);
        CHECK_EQ_I64(post(rig, rank, 0, xfers, 2), CP_OK);
    }
    CHECK_EQ_I64(cudaStreamSynchronize(rig->stream[rank][0]), cudaSuccess);
    CHECK_EQ_I64(ask(rig, rank), CP_OK);
    CHECK_EQ_I64(cudaFree(data), cudaSuccess);
}

TEST(the_devices_own_work_is_not_the_batchs_time)
{
    struct rig rig;
    REQUIRE(rig_init(&rig, 2, 0.4));
    ranks_as_threads(2, body_busy, &rig);
    rig_fini(&rig);
}

/* Rank 0 alone posts; then NCCL reports an error. */
static void run_fault(ncclResult_t fault, enum cp_code want)
{
    struct rig rig;
    static const char text[] = "rank 0: cannot finish a batch: NCCL says";
    REQUIRE(rig_init(&rig, 2, 30.0));
    CHECK_EQ_I64(cudaSetDevice(0), cudaSuccess);
    char *data = device_memory(8);
    CHECK_EQ_I64(post_one(&rig, 0, 1, false, data, 8), CP_OK);
    CHECK_EQ_I64(ask(&rig, 0), CP_OK);
    atomic_store(&fault_state, fault);
    CHECK_EQ_I64(cudaStreamSynchronize(rig.stream[0][0]), cudaSuccess);
    for (int rank = 0; rank < 2; rank++) {
        CHECK_EQ_I64(ask(&rig, rank), want);
        CHECK_STR_HAS(cp_last_error()->text, text);
        CHECK_EQ_I64(cp_last_error()->rank, 0);
    }
    atomic_store(&fault_state, ncclSuccess);
    CHECK_EQ_I64(cudaFree(data), cudaSuccess);
    rig_fini(&rig);
}

TEST(asynchronous_errors_are_seen)
{
    run_fault(ncclRemoteError, CP_ERR_COMM);
    run_fault(ncclUnhandledCudaError, CP_ERR_DEVICE);
}

/* The stand-in's own: the group moves nothing and hangs. */
TEST(a_transfer_that_breaks_is_seen)
{
    struct rig rig;
    REQUIRE(rig_init(&rig, 2, 30.0));
    CHECK_EQ_I64(cudaSetDevice(0), cudaSuccess);
    char *data = device_memory(8);
    simnccl_fail_after(0);
    CHECK_EQ_I64(post_one(&rig, 0, 1, false, data, 8), CP_OK);
    CHECK_EQ_I64(cudaStreamSynchronize(rig.stream[0][0]), cudaSuccess);
    CHECK_EQ_I64(ask(&rig, 0), CP_ERR_COMM);
    CHECK_STR_HAS(cp_last_error()->text, "rank 0: cannot finish a batch");
    CHECK_EQ_I64(cudaFree(data), cudaSuccess);
    rig_fini(&rig);
}

/* Each call that NCCL may refuse, one after the other. */
TEST(every_refusal_of_nccl_in_a_batch_is_an_error)
{
    int refused = 0;
    for (int call = 0; call < 6; call++) {
        struct rig rig;
        TEST_CONTEXT("call %d", call);
        REQUIRE(rig_init(&rig, 2, 5.0));
        CHECK_EQ_I64(cudaSetDevice(0), cudaSuccess);
        char *data = device_memory(16);
        struct cp_xfer xfers[2] = {
            {.data = data, .bytes = 8, .peer = 1},
            {.data = data + 8, .bytes = 8, .peer = 1, .is_send = true}};
        simnccl_fail_call_after(call, ncclSystemError);
        enum cp_code code = post(&rig, 0, 0, xfers, 2);
        simnccl_fail_call_after(-1, ncclSuccess);
        refused += code != CP_OK;
        if (code != CP_OK) {
            CHECK_EQ_I64(code, CP_ERR_COMM);
            CHECK_STR_HAS(cp_last_error()->text,
                          "rank 0: cannot enqueue a batch: NCCL says \"unhandled "
                          "system error\"");
            CHECK_EQ_I64(ask(&rig, 1), CP_ERR_COMM);
            CHECK_EQ_I64(atomic_load(&aborts), 1);
        }
        rig.comm[0]->ops->close(&rig.comm[0]);
        CHECK_EQ_I64(cudaStreamSynchronize(rig.stream[0][0]), cudaSuccess);
        CHECK_EQ_I64(cudaFree(data), cudaSuccess);
        rig_fini(&rig);
    }
    CHECK_EQ_I64(refused, 4); /* start, receive, send, end */
}

/* The call is named, and what everybody was doing. */
TEST(a_timeout_says_in_which_call)
{
    struct rig rig;
    static struct cp_flight flights[2];
    struct cp_recorder recorder[2] = {{.flight = &flights[0]}, {.flight = &flights[1]}};
    memset(flights, 0, sizeof flights);
    REQUIRE(rig_init(&rig, 2, 0.2));
    for (int rank = 0; rank < 2; rank++) {
        rig.watch[rank].recorder = &recorder[rank];
        rig.watch[rank].flights = flights;
        cp_recorder_enter(&recorder[rank], CP_OP_ATTENTION, 7 - (uint64_t)rank);
    }
    cp_recorder_leave(&recorder[1], CP_OK);
    CHECK_EQ_I64(cudaSetDevice(0), cudaSuccess);
    char *data = device_memory(8);
    CHECK_EQ_I64(post_one(&rig, 0, 1, false, data, 8), CP_OK);
    cp_recorder_leave(&recorder[0], CP_OK);
    CHECK_EQ_I64(cudaStreamSynchronize(rig.stream[0][0]), cudaSuccess);
    CHECK_EQ_I64(ask(&rig, 0), CP_ERR_TIMEOUT);
    CHECK_STR_HAS(cp_last_error()->text,
                  "rank 0 waited more than 0.2 s for rank 1 in attention, call 7 (NCCL "
                  "batch 1). Meanwhile rank 0: outside, after attention, call 7");
    CHECK_STR_HAS(cp_last_error()->text, "rank 1: outside, after attention, call 6");
    CHECK_EQ_I64(cudaFree(data), cudaSuccess);
    rig_fini(&rig);
}

TEST(nothing_is_posted_after_poison)
{
    struct rig rig;
    struct cp_status reason = {
        .code = CP_ERR_VALUE, .rank = 1, .text = "rank 1 gave up"};
    REQUIRE(rig_init(&rig, 2, 30.0));
    CHECK_EQ_I64(cudaSetDevice(0), cudaSuccess);
    char *data = device_memory(8);
    rig.comm[1]->ops->poison(rig.comm[1], &reason);
    struct simgpu_stats before = simgpu_stats();
    for (int i = 0; i < 2; i++) {
        CHECK_EQ_I64(post_one(&rig, 0, 1, false, data, 8), CP_ERR_VALUE);
        CHECK_EQ_STR(cp_last_error()->text, "rank 1 gave up");
        CHECK_EQ_I64(ask(&rig, 0), CP_ERR_VALUE);
    }
    CHECK_EQ_U64(simgpu_stats().groups, before.groups);
    CHECK_EQ_I64(atomic_load(&aborts), 2);
    CHECK_EQ_I64(cudaFree(data), cudaSuccess);
    rig_fini(&rig);
}

/* The host part of the group never ends. */
TEST(a_group_that_is_never_enqueued_is_a_timeout)
{
    struct rig rig;
    REQUIRE(rig_init(&rig, 2, 0.2));
    CHECK_EQ_I64(cudaSetDevice(0), cudaSuccess);
    char *data = device_memory(8);
    atomic_store(&lag_ns, 20000000000);
    CHECK_EQ_I64(post_one(&rig, 0, 1, false, data, 8), CP_ERR_TIMEOUT);
    CHECK_STR_HAS(cp_last_error()->text,
                  "rank 0 did not finish enqueuing a batch of NCCL within 0.2 s");
    atomic_store(&lag_ns, 0);
    atomic_store(&lag_until_ns, 0);
    CHECK_EQ_I64(cudaFree(data), cudaSuccess);
    rig_fini(&rig);
}

TEST(an_error_of_the_device_is_seen)
{
    struct rig rig;
    REQUIRE(rig_init(&rig, 2, 30.0));
    CHECK_EQ_I64(cudaSetDevice(0), cudaSuccess);
    char *data = device_memory(8);
    simgpu_fail_call("cudaEventRecord", 0, cudaErrorIllegalAddress);
    enum cp_code code = post_one(&rig, 0, 1, false, data, 8);
    if (code == CP_OK) {
        (void)cudaStreamSynchronize(rig.stream[0][0]);
        code = ask(&rig, 0);
    }
    CHECK_EQ_I64(code, CP_ERR_DEVICE);
    CHECK_STR_HAS(cp_last_error()->text, "an illegal memory access was encountered");
    CHECK_EQ_I64(ask(&rig, 1), CP_ERR_DEVICE);
    CHECK_EQ_I64(cudaFree(data), cudaSuccess);
    rig_fini(&rig);
}
