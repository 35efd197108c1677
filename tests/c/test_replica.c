/* Ranks with a page each, over TCP: the gate's rounds, its errors, deaths, poison and
 * flight recorders. Ranks are threads; each has its speaker and its listener beside it. */
#include "base/mem.h"
#include "control/replica.c"
#include "loopback.h"
#include "records.h"

struct rig {
    struct loopback net;
    struct cp_replica *replica[RANKS_MOST];
    struct cp_watch watch[RANKS_MOST];
    struct cp_gate gate[RANKS_MOST];
    struct cp_recorder recorder[RANKS_MOST];
    int world, rounds;
    enum cp_code code[RANKS_MOST];
    uint64_t last[RANKS_MOST];
    int64_t at_ns[RANKS_MOST]; /* when it ended */
    char text[RANKS_MOST][CP_STATUS_TEXT];
};

static bool rig_init(struct rig *rig, int world)
{
    memset(rig, 0, sizeof *rig);
    rig->world = world;
    if (!loopback_open(&rig->net, world)) {
        return false;
    }
    for (int rank = 0; rank < world; rank++) {
        if (!CHECK_EQ_I64(
                cp_replica_open(rig->net.fd[rank], rank, world, &rig->replica[rank]),
                CP_OK)) {
            return false;
        }
        struct cp_page *page = cp_replica_page(rig->replica[rank]);
        struct cp_flight *flights = cp_page_flights(page, world);
        rig->recorder[rank] = (struct cp_recorder){.flight = &flights[rank]};
        rig->watch[rank] = (struct cp_watch){.bell = cp_page_bell(page),
                                             .poison = cp_page_poison(page),
                                             .rank = rank,
                                             .world = world,
                                             .is_dead = cp_replica_is_dead,
                                             .peers = rig->replica[rank],
                                             .recorder = &rig->recorder[rank],
                                             .flights = flights};
        rig->gate[rank] = (struct cp_gate){.page = page, .watch = &rig->watch[rank]};
    }
    return true;
}

/* As closing a context does, or as death, to the others. */
static void leave(struct rig *rig, int rank)
{
    cp_replica_close(&rig->replica[rank]);
    loopback_leave(&rig->net, rank);
}

static void rig_fini(struct rig *rig)
{
    for (int rank = 0; rank < rig->world; rank++) {
        leave(rig, rank);
    }
    CHECK_EQ_I64(cp_mem_stats().live_blocks, 0);
}

static void play(struct rig *rig, int rank, int rounds, double seconds)
{
    struct cp_gate *gate = &rig->gate[rank];
    struct test_rng rng = test_rng_init((uint64_t)rank);
    enum cp_code code = CP_OK;
    for (int i = 0; i < rounds && code == CP_OK; i++) {
        struct cp_record all[RANKS_MOST];
        uint64_t round = gate->seq + 1;
        struct cp_record mine = record_of(rank, round);
        char operation[40];
        (void)snprintf(operation, sizeof operation, "attention, call %llu",
                       (unsigned long long)round);
        cp_recorder_enter(&rig->recorder[rank], CP_OP_ATTENTION, round);
        if (test_rng_range(&rng, 0, 15) == 0) {
            ranks_sleep_us(test_rng_range(&rng, 1, 300));
        }
        code = cp_gate_exchange(gate, &mine, all, operation, cp_deadline_in(seconds));
        for (int peer = 0; peer < rig->world && code == CP_OK; peer++) {
            TEST_CONTEXT("rank %d, round %d, record of rank %d", rank, (int)round,
                         peer);
            (void)is_record_of(&all[peer], peer, round);
            rig->last[rank] = round;
        }
        cp_recorder_leave(&rig->recorder[rank], code);
    }
    rig->code[rank] = code;
    rig->at_ns[rank] = cp_now_ns();
    if (code != CP_OK) {
        memcpy(rig->text[rank], cp_last_error()->text, sizeof rig->text[rank]);
    }
}

static void body_rounds(int rank, void *arg)
{
    struct rig *rig = arg;
    play(rig, rank, rig->rounds, 20.0);
    if (!CHECK_EQ_I64(rig->code[rank], CP_OK)) {
        printf("rank %d: %s\n", rank, rig->text[rank]);
    }
}

TEST(rounds)
{
    static const int worlds[] = {1, 2, 3, 4, 6};
    for (size_t i = 0; i < sizeof worlds / sizeof worlds[0]; i++) {
        struct rig rig;
        REQUIRE(rig_init(&rig, worlds[i]));
        rig.rounds = 600 / worlds[i];
        ranks_as_threads(worlds[i], body_rounds, &rig);
        rig_fini(&rig);
    }
}

/* All leave as soon as they have their last records: what they stored must have gone
 * out. */
static void body_leave_at_once(int rank, void *arg)
{
    struct rig *rig = arg;
    play(rig, rank, rig->rounds, 20.0);
    leave(rig, rank);
}

TEST(who_leaves_after_a_round_does_not_spoil_it)
{
    for (int run = 0; run < 40; run++) {
        struct rig rig;
        REQUIRE(rig_init(&rig, 3));
        rig.rounds = 3;
        ranks_as_threads(3, body_leave_at_once, &rig);
        for (int rank = 0; rank < 3; rank++) {
            TEST_CONTEXT("run %d, rank %d: %.180s", run, rank, rig.text[rank]);
            CHECK_EQ_I64(rig.code[rank], CP_OK);
        }
        rig_fini(&rig);
    }
}

/* Rank 0 has not read its records yet: the others may send one more, and no further. */
static void body_parity(int rank, void *arg)
{
    struct rig *rig = arg;
    struct cp_page *page = rig->gate[rank].page;
    if (rank != 0) {
        play(rig, rank, 5, 10.0);
        return;
    }
    struct cp_record mine = record_of(0, 1);
    cp_page_write(page, 0, 1, &mine);
    rig->gate[0].seq = 1;
    for (int i = 0; i < 5000 && !(cp_page_has(page, 1, 2) && cp_page_has(page, 2, 2));
         i++) {
        ranks_sleep_us(1000);
    }
    ranks_sleep_us(50000); /* time for a wrong one to go on to 3 */
    for (int peer = 1; peer < 3; peer++) {
        struct cp_record seen;
        TEST_CONTEXT("record of rank %d", peer);
        CHECK(cp_page_has(page, peer, 1) && cp_page_has(page, peer, 2));
        cp_page_read(page, peer, 1, &seen);
        (void)is_record_of(&seen, peer, 1);
    }
    play(rig, 0, 4, 10.0);
}

TEST(a_slow_reader_finds_its_records_unchanged)
{
    struct rig rig;
    REQUIRE(rig_init(&rig, 3));
    ranks_as_threads(3, body_parity, &rig);
    for (int rank = 0; rank < 3; rank++) {
        CHECK_EQ_I64(rig.code[rank], CP_OK);
        CHECK_EQ_U64(rig.last[rank], 5);
    }
    rig_fini(&rig);
}

static void body_without_1_and_3(int rank, void *arg)
{
    if (rank != 1 && rank != 3) {
        play(arg, rank, 1, rank == 0 ? 0.3 : 10.0);
    }
}

TEST(timeout_names_the_missing_to_all)
{
    struct rig rig;
    REQUIRE(rig_init(&rig, 5));
    ranks_as_threads(5, body_without_1_and_3, &rig);
    for (int rank = 0; rank < 5; rank += 2) {
        CHECK_EQ_I64(rig.code[rank], CP_ERR_TIMEOUT);
        CHECK_EQ_STR(rig.text[rank], rig.text[0]);
        CHECK_STR_HAS(rig.text[rank],
                      "ranks 1, 3 did not come to attention, call 1 within 0.3 s");
        /* What ranks of other hosts were doing had been told before. */
        CHECK_STR_HAS(rig.text[rank], "Meanwhile ranks 0, 2, 4: waiting for rank 1 in "
                                      "attention, call 1");
        CHECK_STR_HAS(rig.text[rank], "ranks 1, 3: outside, before its first call");
    }
    /* A late rank hears the same. */
    play(&rig, 1, 1, 5.0);
    CHECK_EQ_I64(rig.code[1], CP_ERR_TIMEOUT);
    CHECK_EQ_STR(rig.text[1], rig.text[0]);
    rig_fini(&rig);
}

static void body_poisoned(int rank, void *arg)
{
    struct rig *rig = arg;
    if (rank == 2) {
        struct cp_status reason = {
            .code = CP_ERR_DEVICE, .rank = 2, .text = "rank 2 lost its device"};
        ranks_sleep_us(20000);
        rig->at_ns[2] = cp_now_ns();
        cp_watch_poison(&rig->watch[2], &reason);
        leave(rig, 2); /* at once: the reason goes before it */
    } else {
        play(rig, rank, 1, 10.0);
    }
}

TEST(poison_reaches_all_before_the_poisoner_is_gone)
{
    for (int run = 0; run < 10; run++) {
        struct rig rig;
        REQUIRE(rig_init(&rig, 4));
        ranks_as_threads(4, body_poisoned, &rig);
        for (int rank = 0; rank < 4; rank++) {
            if (rank != 2) {
                CHECK_EQ_I64(rig.code[rank], CP_ERR_DEVICE);
                CHECK_EQ_STR(rig.text[rank], "rank 2 lost its device");
                CHECK(rig.at_ns[rank] - rig.at_ns[2] < 1000000000);
            }
        }
        rig_fini(&rig);
    }
}

/* Nobody waits: the poison is there all the same when the rank looks. */
TEST(poison_comes_while_a_rank_computes)
{
    struct rig rig;
    struct cp_status reason = {.code = CP_ERR_COMM, .rank = 0, .text = "a reason"};
    REQUIRE(rig_init(&rig, 3));
    cp_watch_poison(&rig.watch[0], &reason);
    for (int rank = 1; rank < 3; rank++) {
        for (int i = 0; i < 2000 && cp_watch_check(&rig.watch[rank]) == CP_OK; i++) {
            ranks_sleep_us(1000);
        }
        CHECK_EQ_I64(cp_watch_check(&rig.watch[rank]), CP_ERR_COMM);
        CHECK_EQ_STR(cp_last_error()->text, "a reason");
    }
    rig_fini(&rig);
}

/* A poison that reached one rank reaches all, though its writer died in between. */
TEST(poison_is_passed_on)
{
    struct rig rig;
    REQUIRE(rig_init(&rig, 3));
    struct cp_frame_passing passing = {.done = 0};
    struct cp_status reason = {.code = CP_ERR_DEVICE, .rank = 0, .text = "told one"};
    cp_replica_close(&rig.replica[0]);
    passing.frame.body.poison = reason;
    cp_frame_seal(&passing.frame, CP_FRAME_POISON);
    CHECK_EQ_I64(cp_frame_send(rig.net.fd[0][1], &passing), CP_PASSED);
    play(&rig, 2, 1, 5.0);
    CHECK_EQ_I64(rig.code[2], CP_ERR_DEVICE);
    CHECK_EQ_STR(rig.text[2], "told one");
    rig_fini(&rig);
}

static void body_death(int rank, void *arg)
{
    struct rig *rig = arg;
    if (rank == 1) {
        play(rig, rank, 2, 10.0);
        ranks_sleep_us(150000); /* its news are out */
        rig->at_ns[1] = cp_now_ns();
        leave(rig, 1);
    } else {
        play(rig, rank, 3, 10.0);
    }
}

TEST(death_is_noticed_within_a_second)
{
    struct rig rig;
    REQUIRE(rig_init(&rig, 4));
    ranks_as_threads(4, body_death, &rig);
    for (int rank = 0; rank < 4; rank++) {
        if (rank == 1) {
            continue;
        }
        CHECK_EQ_I64(rig.code[rank], CP_ERR_COMM);
        CHECK_EQ_U64(rig.last[rank], 2);
        CHECK_STR_HAS(rig.text[rank], "rank 1 is gone");
        CHECK_STR_HAS(rig.text[rank], "attention, call 3");
        CHECK_STR_HAS(rig.text[rank],
                      "it was last seen outside, after attention, call 2");
        CHECK(rig.at_ns[rank] - rig.at_ns[1] < 1000000000);
    }
    rig_fini(&rig);
}

/* What a rank does is known elsewhere though it makes no further exchange. */
TEST(news_of_a_rank_that_computes)
{
    struct rig rig;
    char phrase[CP_FLIGHT_PHRASE] = "";
    double seconds = 0.0;
    REQUIRE(rig_init(&rig, 2));
    cp_recorder_enter(&rig.recorder[0], CP_OP_ATTENTION, 7);
    cp_recorder_begin(&rig.recorder[0], "ATTEND", 4, -1);
    for (int i = 0; i < 2000 && strstr(phrase, "ATTEND") == NULL; i++) {
        ranks_sleep_us(1000);
        cp_flight_phrase(&rig.watch[1].flights[0], cp_now_ns(), phrase, &seconds);
    }
    CHECK_EQ_STR(phrase, "in step 4 (ATTEND) of attention, call 7");
    CHECK(seconds >= 0.0 && seconds < 2.0);
    rig_fini(&rig);
}

/* The next frame that is no news. */
static void expect_frame(int fd, struct cp_frame_passing *in, enum cp_frame_kind kind)
{
    for (int i = 0; i < 5000; i++) {
        enum cp_passage passage = cp_frame_receive(fd, in);
        if (passage == CP_PASSED && in->frame.head.kind != CP_FRAME_FLIGHT) {
            CHECK_EQ_U64(in->frame.head.kind, kind);
            return;
        }
        if (!CHECK(passage != CP_PASSED_AWAY)) {
            return;
        }
        ranks_sleep_us(passage == CP_PASSING ? 1000 : 0);
    }
    (void)CHECK(false);
}

/* A rank that reads nothing (it is stopped) holds up nobody; when it goes on, it gets
 * all in order. */
TEST(a_rank_that_reads_nothing_gets_it_later)
{
    struct loopback net;
    struct cp_replica *replica = NULL;
    struct cp_frame_passing in = {.done = 0};
    struct cp_record mine = record_of(0, 5); /* with a text: long */
    struct cp_status reason = {.code = CP_ERR_DEVICE, .rank = 0, .text = "a reason"};
    static char junk[1 << 16];
    size_t full = 0;
    REQUIRE(loopback_open(&net, 2));
    for (ssize_t sent = 0; sent >= 0;) {
        sent = send(net.fd[0][1], junk, 700, MSG_NOSIGNAL);
        full += sent > 0 ? (size_t)sent : 0;
    }
    REQUIRE(cp_replica_open(net.fd[0], 0, 2, &replica) == CP_OK);
    struct cp_page *page = cp_replica_page(replica);
    struct cp_watch watch = {.bell = cp_page_bell(page),
                             .poison = cp_page_poison(page)};
    cp_page_write(page, 0, 1, &mine);
    ranks_sleep_us(20000);
    cp_watch_poison(&watch, &reason);
    ranks_sleep_us(20000);
    while (full > 0) {
        ssize_t got =
            recv(net.fd[1][0], junk, full < sizeof junk ? full : sizeof junk, 0);
        full -= got > 0 ? (size_t)got : 0;
    }
    expect_frame(net.fd[1][0], &in, CP_FRAME_RECORD);
    CHECK_EQ_STR(in.frame.body.record.status.text, mine.status.text);
    expect_frame(net.fd[1][0], &in, CP_FRAME_POISON);
    CHECK_EQ_STR(in.frame.body.poison.text, "a reason");
    cp_replica_close(&replica);
    loopback_close(&net);
}

TEST(closing_waits_for_nobody)
{
    struct loopback net;
    struct cp_replica *replica = NULL;
    char junk[4096] = {0};
    REQUIRE(loopback_open(&net, 2));
    while (send(net.fd[0][1], junk, sizeof junk, MSG_NOSIGNAL) > 0) {
    }
    REQUIRE(cp_replica_open(net.fd[0], 0, 2, &replica) == CP_OK);
    struct cp_record mine = record_of(0, 1);
    cp_page_write(cp_replica_page(replica), 0, 1, &mine);
    int64_t start_ns = cp_now_ns();
    cp_replica_close(&replica);
    CHECK(cp_now_ns() - start_ns < 500000000);
    loopback_close(&net);
}

TEST(failed_allocations_leave_nothing)
{
    struct loopback net;
    REQUIRE(loopback_open(&net, 2));
    for (int k = 0; k < 3; k++) {
        struct cp_replica *replica = NULL;
        cp_mem_fail_after(k);
        CHECK_EQ_I64(cp_replica_open(net.fd[0], 0, 2, &replica), CP_ERR_NO_MEMORY);
        cp_mem_fail_after(-1);
        CHECK(replica == NULL);
        CHECK_EQ_I64(cp_mem_stats().live_blocks, 0);
    }
    loopback_close(&net);
}
