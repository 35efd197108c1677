/* Messages over TCP: equal bytes at no, one, odd and large sizes, both ways at once and
 * in order; deadlines, deaths, poison; ranks as threads. Whole calls over it are in
 * test_context. */
#include "all_to_all.h"
#include "base/mem.h"
#include "comm/comm_tcp.c"
#include "loopback.h"

struct rig {
    struct loopback net;
    struct cp_bell bell;
    struct cp_poison poison;
    struct cp_watch watch[RANKS_MOST];
    struct cp_comm *comm[RANKS_MOST];
    _Atomic bool is_gone[RANKS_MOST]; /* what the callers' watch says */
    int world, rounds;
    size_t bytes;
};

static bool is_gone(void *peers, int rank)
{
    struct rig *rig = peers;
    return atomic_load(&rig->is_gone[rank]);
}

static bool rig_init(struct rig *rig, int world)
{
    memset(rig, 0, sizeof *rig);
    rig->world = world;
    bool is_good = loopback_open(&rig->net, world);
    for (int rank = 0; rank < world && is_good; rank++) {
        rig->watch[rank] = (struct cp_watch){.bell = &rig->bell,
                                             .poison = &rig->poison,
                                             .rank = rank,
                                             .world = world,
                                             .is_dead = is_gone,
                                             .peers = rig};
        is_good = CHECK_EQ_I64(
            cp_comm_tcp_create(rig->net.fd[rank], &rig->watch[rank], &rig->comm[rank]),
            CP_OK);
    }
    return is_good;
}

static void leave(struct rig *rig, int rank)
{
    if (rig->comm[rank] != NULL) {
        rig->comm[rank]->ops->close(&rig->comm[rank]);
    }
    loopback_leave(&rig->net, rank);
    atomic_store(&rig->is_gone[rank], true);
    cp_bell_ring(&rig->bell);
}

static void rig_fini(struct rig *rig)
{
    for (int rank = 0; rank < rig->world; rank++) {
        leave(rig, rank);
    }
    CHECK_EQ_I64(cp_mem_stats().live_blocks, 0);
}

static enum cp_code post_one(struct rig *rig, int rank, int peer, bool is_send,
                             void *data, size_t bytes, uint64_t *ticket)
{
    struct cp_xfer xfer = {
        .data = data, .bytes = bytes, .peer = peer, .is_send = is_send};
    return rig->comm[rank]->ops->post(rig->comm[rank], &xfer, 1, NULL, ticket);
}

static enum cp_code wait_for(struct rig *rig, int rank, uint64_t ticket, double seconds)
{
    struct cp_comm_wait wait = {.is_ticket = true, .value = ticket};
    return rig->comm[rank]->ops->wait(rig->comm[rank], &wait, 1, "step 2",
                                      cp_deadline_in(seconds));
}

static void body_all_to_all(int rank, void *arg)
{
    struct rig *rig = arg;
    all_to_all(rig->comm[rank], rig->rounds);
}

TEST(all_to_all_between_threads)
{
    static const int worlds[] = {1, 2, 3, 4, 6};
    for (size_t i = 0; i < sizeof worlds / sizeof worlds[0]; i++) {
        struct rig rig;
        REQUIRE(rig_init(&rig, worlds[i]));
        CHECK(!cp_comm_has_windows(rig.comm[0]));
        rig.rounds = 150;
        ranks_as_threads(worlds[i], body_all_to_all, &rig);
        rig_fini(&rig);
    }
}

/* More than any socket holds, in all directions at once: neither side can wait for the
 * other to read first. Sends are posted before receives. */
static void body_large(int rank, void *arg)
{
    struct rig *rig = arg;
    uint64_t ticket = 0;
    struct cp_xfer xfers[2 * RANKS_MOST];
    int count = 0;
    unsigned char *memory = malloc(rig->bytes * (size_t)(1 + rig->world));
    if (!CHECK(memory != NULL)) {
        return;
    }
    memset(memory, rank + 1, rig->bytes);
    for (int is_receive = 0; is_receive < 2; is_receive++) {
        for (int peer = 0; peer < rig->world; peer++) {
            unsigned char *in = memory + rig->bytes * (size_t)(1 + peer);
            xfers[count++] = (struct cp_xfer){.data = is_receive ? in : memory,
                                              .bytes = rig->bytes,
                                              .peer = peer,
                                              .is_send = !is_receive};
        }
    }
    CHECK_EQ_I64(
        rig->comm[rank]->ops->post(rig->comm[rank], xfers, count, NULL, &ticket),
        CP_OK);
    CHECK_EQ_I64(wait_for(rig, rank, ticket, 30.0), CP_OK);
    for (int peer = 0; peer < rig->world; peer++) {
        const unsigned char *in = memory + rig->bytes * (size_t)(1 + peer);
        CHECK_EQ_I64(in[0], peer + 1);
        CHECK_EQ_BYTES(in, in + 1, rig->bytes - 1);
    }
    free(memory);
}

TEST(large_messages_all_ways_at_once)
{
    struct rig rig;
    REQUIRE(rig_init(&rig, 3));
    rig.bytes = ((size_t)12 << 20) + 5;
    ranks_as_threads(3, body_large, &rig);
    rig_fini(&rig);
}

/* Nobody calls into the communicator meanwhile: it moves on its own. */
TEST(moves_while_the_ranks_compute)
{
    struct rig rig;
    uint64_t send = 0, receive = 0;
    static unsigned char from[1 << 20], to[1 << 20];
    REQUIRE(rig_init(&rig, 2));
    memset(from, 7, sizeof from);
    CHECK_EQ_I64(post_one(&rig, 0, 1, true, from, sizeof from, &send), CP_OK);
    CHECK_EQ_I64(post_one(&rig, 1, 0, false, to, sizeof to, &receive), CP_OK);
    for (int i = 0; i < 5000 && !is_done(tcp_of(rig.comm[1]), receive); i++) {
        ranks_sleep_us(1000);
    }
    CHECK_EQ_I64(rig.comm[1]->ops->test(rig.comm[1], receive), CP_OK);
    CHECK_EQ_BYTES(to, from, sizeof to);
    CHECK_EQ_I64(wait_for(&rig, 0, send, 5.0), CP_OK);
    rig_fini(&rig);
}

TEST(nothing_is_complete_at_once)
{
    struct rig rig;
    uint64_t ticket = 0, later = 0;
    char data[4], words[4] = "abc";
    REQUIRE(rig_init(&rig, 2));
    CHECK_EQ_I64(post_one(&rig, 0, 1, false, NULL, 0, &ticket), CP_OK);
    CHECK_EQ_I64(rig.comm[0]->ops->test(rig.comm[0], ticket), CP_OK);
    /* A batch behind one that is not complete is not, either. */
    CHECK_EQ_I64(post_one(&rig, 0, 1, false, data, 4, &ticket), CP_OK);
    CHECK_EQ_I64(post_one(&rig, 0, 1, true, NULL, 0, &later), CP_OK);
    CHECK_EQ_I64(rig.comm[0]->ops->test(rig.comm[0], ticket), CP_AGAIN);
    CHECK_EQ_I64(rig.comm[0]->ops->test(rig.comm[0], later), CP_AGAIN);
    CHECK_EQ_I64(post_one(&rig, 1, 0, true, words, 4, &ticket), CP_OK);
    CHECK_EQ_I64(wait_for(&rig, 0, later, 5.0), CP_OK);
    CHECK_EQ_STR(data, "abc");
    rig_fini(&rig);
}

TEST(different_sizes_are_an_error_on_all_ranks)
{
    static const size_t sizes[][2] = {{12, 16}, {16, 12}, {100000, 8}};
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        struct rig rig;
        uint64_t ticket = 0, other = 0;
        static char data[100000], more[100001];
        char want[100];
        REQUIRE(rig_init(&rig, 2));
        more[sizes[i][1]] = 'x';
        CHECK_EQ_I64(post_one(&rig, 0, 1, true, data, sizes[i][0], &ticket), CP_OK);
        CHECK_EQ_I64(post_one(&rig, 1, 0, false, more, sizes[i][1], &other), CP_OK);
        CHECK_EQ_I64(wait_for(&rig, 1, other, 5.0), CP_ERR_INTERNAL);
        (void)snprintf(want, sizeof want,
                       "rank 0 sends %zu bytes to rank 1, which expects %zu",
                       sizes[i][0], sizes[i][1]);
        CHECK_STR_HAS(cp_last_error()->text, want);
        CHECK_EQ_I64(more[sizes[i][1]], 'x');
        CHECK_EQ_I64(post_one(&rig, 0, 1, true, data, 4, &ticket), CP_ERR_INTERNAL);
        more[sizes[i][1]] = 0;
        rig_fini(&rig);
    }
    struct rig rig;
    uint64_t ticket = 0;
    char data[8] = {0};
    REQUIRE(rig_init(&rig, 2));
    CHECK_EQ_I64(post_one(&rig, 0, 0, true, data, 8, &ticket), CP_OK);
    CHECK_EQ_I64(post_one(&rig, 0, 0, false, data, 7, &ticket), CP_ERR_INTERNAL);
    CHECK_STR_HAS(cp_last_error()->text, "rank 0 sends 8 bytes to rank 0");
    rig_fini(&rig);
}

TEST(a_deadline_names_the_rank_and_lets_go_of_memory)
{
    struct rig rig;
    uint64_t ticket = 0, other = 0;
    char data[8] = {0};
    REQUIRE(rig_init(&rig, 3));
    CHECK_EQ_I64(post_one(&rig, 0, 2, false, data, 8, &ticket), CP_OK);
    int64_t start_ns = cp_now_ns();
    CHECK_EQ_I64(wait_for(&rig, 0, ticket, 0.1), CP_ERR_TIMEOUT);
    CHECK(cp_now_ns() - start_ns < 1000000000);
    CHECK_STR_HAS(cp_last_error()->text, "rank 2 did not come to step 2 within 0.1 s");
    /* What comes now finds nobody. */
    CHECK_EQ_I64(send(rig.net.fd[2][0], "\x8\0\0\0\0\0\0\0abcdefgh", 16, 0), 16);
    ranks_sleep_us(20000);
    CHECK_EQ_I64(data[0], 0);
    /* Broken is broken, for all. */
    CHECK_EQ_I64(post_one(&rig, 1, 0, true, data, 8, &other), CP_ERR_TIMEOUT);
    CHECK_EQ_I64(rig.comm[0]->ops->test(rig.comm[0], ticket), CP_ERR_TIMEOUT);
    rig_fini(&rig);
}

TEST(death_is_noticed_while_receiving_and_sending)
{
    for (int is_send = 0; is_send < 2; is_send++) {
        struct rig rig;
        uint64_t ticket = 0;
        size_t bytes = (size_t)20 << 20; /* more than any socket holds */
        char *data = calloc(1, bytes);
        REQUIRE(data != NULL && rig_init(&rig, 3));
        CHECK_EQ_I64(post_one(&rig, 0, 2, is_send, data, bytes, &ticket), CP_OK);
        ranks_sleep_us(20000);
        leave(&rig, 2);
        int64_t start_ns = cp_now_ns();
        CHECK_EQ_I64(wait_for(&rig, 0, ticket, 10.0), CP_ERR_COMM);
        CHECK(cp_now_ns() - start_ns < 1000000000);
        CHECK_STR_HAS(cp_last_error()->text, "rank 2 is gone");
        CHECK_STR_HAS(cp_last_error()->text, "step 2");
        rig_fini(&rig);
        free(data);
    }
}

/* A rank that has sent all may close; what it sent comes all the same, though the
 * callers' watch says already that it is dead. */
TEST(what_a_rank_sent_comes_after_its_end)
{
    static char from[1000000], to[1000000];
    memset(from, 3, sizeof from);
    for (int run = 0; run < 20; run++) {
        struct rig rig;
        uint64_t send = 0, receive = 0;
        REQUIRE(rig_init(&rig, 2));
        memset(to, 0, sizeof to);
        CHECK_EQ_I64(post_one(&rig, 1, 0, true, from, sizeof from, &send), CP_OK);
        CHECK_EQ_I64(wait_for(&rig, 1, send, 5.0), CP_OK);
        leave(&rig, 1);
        CHECK_EQ_I64(post_one(&rig, 0, 1, false, to, sizeof to, &receive), CP_OK);
        CHECK_EQ_I64(wait_for(&rig, 0, receive, 5.0), CP_OK);
        CHECK_EQ_BYTES(to, from, sizeof to);
        rig_fini(&rig);
    }
}

/* What has come for a rank that has not asked for it yet waits in the kernel. */
TEST(a_receiver_that_is_not_ready_costs_no_time)
{
    struct rig rig;
    struct timespec before, after;
    uint64_t ticket = 0;
    char data[8] = {0};
    REQUIRE(rig_init(&rig, 2));
    CHECK_EQ_I64(post_one(&rig, 0, 1, true, data, 8, &ticket), CP_OK);
    (void)clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &before);
    ranks_sleep_us(300000);
    (void)clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &after);
    CHECK((double)(after.tv_sec - before.tv_sec) +
              1e-9 * (double)(after.tv_nsec - before.tv_nsec) <
          0.1);
    rig_fini(&rig);
}

/* The data line has ended, the control line not yet: the reason is on its way. */
static void body_late_reason(int rank, void *arg)
{
    struct rig *rig = arg;
    uint64_t ticket = 0;
    char data[8];
    if (rank == 0) {
        CHECK_EQ_I64(post_one(rig, 0, 1, false, data, 8, &ticket), CP_OK);
        CHECK_EQ_I64(wait_for(rig, 0, ticket, 10.0), CP_ERR_DEVICE);
        CHECK_EQ_STR(cp_last_error()->text, "rank 1 lost its device");
        return;
    }
    struct cp_status reason = {
        .code = CP_ERR_DEVICE, .rank = 1, .text = "rank 1 lost its device"};
    ranks_sleep_us(20000);
    rig->comm[1]->ops->close(&rig->comm[1]);
    loopback_leave(&rig->net, 1);
    ranks_sleep_us(50000);
    cp_watch_poison(&rig->watch[1], &reason);
    atomic_store(&rig->is_gone[1], true);
}

TEST(a_reason_wins_over_a_death)
{
    struct rig rig;
    REQUIRE(rig_init(&rig, 2));
    ranks_as_threads(2, body_late_reason, &rig);
    rig_fini(&rig);
}

TEST(poison_and_what_it_does_not_know)
{
    struct rig rig;
    uint64_t ticket = 0;
    char data[8] = {0};
    REQUIRE(rig_init(&rig, 2));
    struct cp_status reason = {.code = CP_ERR_DEVICE, .text = "rank 1 lost its device"};
    CHECK_EQ_I64(post_one(&rig, 0, 1, false, data, 8, &ticket), CP_OK);
    rig.comm[1]->ops->poison(rig.comm[1], &reason);
    CHECK_EQ_I64(rig.comm[0]->ops->test(rig.comm[0], ticket), CP_ERR_DEVICE);
    CHECK_EQ_STR(cp_last_error()->text, "rank 1 lost its device");
    rig_fini(&rig);

    REQUIRE(rig_init(&rig, 2));
    struct cp_comm_wait counter = {.peer = 1, .value = 1};
    CHECK_EQ_I64(
        rig.comm[0]->ops->wait(rig.comm[0], &counter, 1, "x", cp_deadline_in(0.0)),
        CP_ERR_INTERNAL);
    rig_fini(&rig);

    REQUIRE(rig_init(&rig, 2));
    CHECK_EQ_I64(post_one(&rig, 0, 2, true, data, 8, &ticket), CP_ERR_INTERNAL);
    CHECK_STR_HAS(cp_last_error()->text, "rank 0 posts to rank 2 of 2");
    rig_fini(&rig);
}

TEST(failed_allocations_leave_nothing)
{
    struct rig rig;
    struct cp_comm *comm = NULL;
    uint64_t ticket = 0;
    char data[8];
    REQUIRE(rig_init(&rig, 2));
    int64_t live = cp_mem_stats().live_blocks;
    for (int k = 0; k < 2; k++) {
        cp_mem_fail_after(k);
        CHECK_EQ_I64(cp_comm_tcp_create(rig.net.fd[0], &rig.watch[0], &comm),
                     CP_ERR_NO_MEMORY);
        cp_mem_fail_after(-1);
        CHECK(comm == NULL);
        CHECK_EQ_I64(cp_mem_stats().live_blocks, live);
    }
    cp_mem_fail_after(0);
    CHECK_EQ_I64(post_one(&rig, 0, 1, false, data, 8, &ticket), CP_ERR_NO_MEMORY);
    cp_mem_fail_after(-1);
    CHECK_EQ_I64(post_one(&rig, 1, 0, true, data, 8, &ticket), CP_ERR_NO_MEMORY);
    rig_fini(&rig);
}
