/* The gate under random delays at every store and load, deaths at every step, and all
 * its errors. Ranks are threads over one page, so that ThreadSanitizer sees every
 * access. */
#define CP_TEST_POINTS
#include "base/mem.h"
#include "base/watch.c"
#include "control/gate.c"
#include "ranks.h"
#include "records.h"
#include "test.h"

struct rig {
    struct cp_page *page;
    int world, rounds;
    _Atomic int is_gone[RANKS_MOST];
    char text[RANKS_MOST][CP_STATUS_TEXT]; /* what each rank raised in the end */
    enum cp_code code[RANKS_MOST];
    uint64_t last[RANKS_MOST]; /* the last exchange that each rank completed */
};

/* What the running thread does at points. */
static _Thread_local struct test_rng delays;
static _Thread_local bool has_delays;
static _Thread_local const char *die_at;
static _Thread_local int die_after; /* that many passes of the point */
static _Thread_local struct rig *die_in;
static _Thread_local int die_as;

void cp_test_point(const char *name)
{
    if (die_at != NULL && strcmp(name, die_at) == 0 && die_after-- == 0) {
        die_at = NULL;
        atomic_store(&die_in->is_gone[die_as], 1);
        pthread_exit(NULL);
    }
    if (!has_delays) {
        return;
    }
    uint64_t dice = test_rng_next(&delays);
    if (dice % 64 == 0) {
        (void)sched_yield();
    } else if (dice % 512 == 1) {
        ranks_sleep_us(20);
    } else if (dice % 4 == 2) {
        for (volatile uint64_t i = 0; i < (dice >> 32) % 300; i++) {
        }
    }
}

static bool is_gone(void *peers, int rank)
{
    struct rig *rig = peers;
    return atomic_load(&rig->is_gone[rank]) != 0;
}

static bool rig_init(struct rig *rig, int world, int rounds)
{
    void *page = NULL;
    *rig = (struct rig){.world = world, .rounds = rounds};
    if (cp_mem_create(cp_page_bytes(world), "a page", &page) != CP_OK) {
        return false;
    }
    rig->page = page;
    return true;
}

static struct cp_watch watch_of(struct rig *rig, int rank)
{
    return (struct cp_watch){.bell = cp_page_bell(rig->page),
                             .poison = cp_page_poison(rig->page),
                             .rank = rank,
                             .world = rig->world,
                             .may_spin = rank % 2 == 0,
                             .is_dead = is_gone,
                             .peers = rig};
}

static enum cp_code play(struct rig *rig, int rank, double seconds)
{
    struct cp_watch watch = watch_of(rig, rank);
    struct cp_gate gate = {.page = rig->page, .watch = &watch};
    enum cp_code code = CP_OK;
    for (uint64_t round = 1; round <= (uint64_t)rig->rounds; round++) {
        struct cp_record mine = record_of(rank, round), all[RANKS_MOST];
        char operation[40];
        (void)snprintf(operation, sizeof operation, "attention (call %llu)",
                       (unsigned long long)round);
        code = cp_gate_exchange(&gate, &mine, all, operation, cp_deadline_in(seconds));
        if (code != CP_OK) {
            (void)snprintf(rig->text[rank], sizeof rig->text[rank], "%s",
                           cp_last_error()->text);
            break;
        }
        rig->last[rank] = round;
        for (int peer = 0; peer < rig->world; peer++) {
            TEST_CONTEXT("rank %d, round %llu, record of rank %d", rank,
                         (unsigned long long)round, peer);
            if (!is_record_of(&all[peer], peer, round)) {
                return CP_ERR_INTERNAL;
            }
        }
    }
    rig->code[rank] = code;
    return code;
}

static void body_rounds(int rank, void *arg)
{
    delays = test_rng_init((uint64_t)rank + 1);
    has_delays = true;
    CHECK_EQ_I64(play(arg, rank, 20.0), CP_OK);
    has_delays = false;
}

static void check_rounds(int world, int rounds)
{
    struct rig rig;
    REQUIRE(rig_init(&rig, world, rounds));
    ranks_as_threads(world, body_rounds, &rig);
    cp_mem_destroy(&rig.page);
}

TEST(rounds_with_delays_1_rank)
{
    check_rounds(1, 1000);
}

TEST(rounds_with_delays_2_ranks)
{
    check_rounds(2, 6000);
}

TEST(rounds_with_delays_3_ranks)
{
    check_rounds(3, 4000);
}

TEST(rounds_with_delays_6_ranks)
{
    check_rounds(6, TEST_UNDER_TSAN ? 600 : 1500);
}

/* One rank waits before it reads until the others are stuck: they may write one record
 * more, and no further. */
static void body_parity(int rank, void *arg)
{
    struct rig *rig = arg;
    struct cp_watch watch = watch_of(rig, rank);
    struct cp_gate gate = {.page = rig->page, .watch = &watch};
    struct cp_record mine = record_of(rank, 1), all[RANKS_MOST];
    if (rank != 0) {
        (void)play(rig, rank, 5.0);
        return;
    }
    /* Rank 0 by hand: writes 1, reads late. */
    gate.seq = 1;
    cp_page_write(rig->page, rank, 1, &mine);
    for (int waited = 0; waited < 3000; waited++) {
        bool ahead = true;
        for (int peer = 1; peer < rig->world; peer++) {
            ahead = ahead && atomic_load(&rig->page->rank[peer].record[0].seq) == 2;
        }
        if (ahead) {
            break;
        }
        ranks_sleep_us(1000);
    }
    ranks_sleep_us(30000); /* time for a wrong gate to go on to 3 */
    for (int peer = 0; peer < rig->world; peer++) {
        const struct cp_record *seen = &rig->page->rank[peer].record[1];
        TEST_CONTEXT("record of rank %d while rank 0 still reads", peer);
        copy_record(&all[peer], seen);
        atomic_store(&all[peer].seq, atomic_load(&seen->seq));
        (void)is_record_of(&all[peer], peer, 1);
        if (peer > 0) {
            CHECK_EQ_U64(atomic_load(&rig->page->rank[peer].record[0].seq), 2);
        }
    }
    for (uint64_t round = 2; round <= (uint64_t)rig->rounds; round++) {
        mine = record_of(0, round);
        CHECK_EQ_I64(cp_gate_exchange(&gate, &mine, all, "x", cp_deadline_in(5.0)),
                     CP_OK);
    }
}

TEST(a_slow_reader_finds_its_records_unchanged)
{
    struct rig rig;
    REQUIRE(rig_init(&rig, 3, 5));
    ranks_as_threads(3, body_parity, &rig);
    CHECK_EQ_I64(rig.code[1], CP_OK);
    CHECK_EQ_I64(rig.code[2], CP_OK);
    cp_mem_destroy(&rig.page);
}

TEST(an_agreed_error_leaves_the_gate_usable)
{
    /* record_of gives one rank in five an error in every round; what matters is that
     * rounds go on. */
    check_rounds(5, 50);
}

static void body_without_rank_1_and_3(int rank, void *arg)
{
    if (rank != 1 && rank != 3) {
        (void)play(arg, rank, rank == 0 ? 0.1 : 5.0);
    }
}

TEST(timeout_names_the_missing_to_all)
{
    struct rig rig;
    REQUIRE(rig_init(&rig, 5, 1));
    ranks_as_threads(5, body_without_rank_1_and_3, &rig);
    for (int rank = 0; rank < 5; rank += 2) {
        CHECK_EQ_I64(rig.code[rank], CP_ERR_TIMEOUT);
        CHECK_EQ_STR(rig.text[rank],
                     "ranks 1, 3 did not come to attention (call 1) within 0.1 s");
    }
    /* A late rank hears the same, though one more record would do. */
    CHECK_EQ_I64(play(&rig, 1, 5.0), CP_ERR_TIMEOUT);
    CHECK_EQ_STR(rig.text[1], rig.text[0]);
    CHECK_EQ_U64(atomic_load(&rig.page->rank[1].record[1].seq), 0);
    cp_mem_destroy(&rig.page);
}

static void body_poisoned(int rank, void *arg)
{
    struct rig *rig = arg;
    if (rank == 2) {
        struct cp_watch watch = watch_of(rig, rank);
        struct cp_status reason = {
            .code = CP_ERR_DEVICE, .rank = 2, .text = "rank 2 lost its device"};
        ranks_sleep_us(5000);
        cp_watch_poison(&watch, &reason);
    } else {
        (void)play(rig, rank, 5.0);
    }
}

TEST(poison_ends_the_wait_of_all)
{
    struct rig rig;
    REQUIRE(rig_init(&rig, 4, 1));
    int64_t start = cp_now_ns();
    ranks_as_threads(4, body_poisoned, &rig);
    CHECK(cp_now_ns() - start < 2000000000);
    for (int rank = 0; rank < 4; rank++) {
        if (rank != 2) {
            CHECK_EQ_I64(rig.code[rank], CP_ERR_DEVICE);
            CHECK_EQ_STR(rig.text[rank], "rank 2 lost its device");
        }
    }
    cp_mem_destroy(&rig.page);
}

/* Every rank has written n: poisoned or not, with dead ranks or not, all can read it.
 */
TEST(what_was_written_stays_readable_after_poison_and_death)
{
    struct rig rig;
    REQUIRE(rig_init(&rig, 2, 1));
    struct cp_watch watch[2] = {watch_of(&rig, 0), watch_of(&rig, 1)};
    struct cp_gate gate[2] = {{.page = rig.page, .watch = &watch[0]},
                              {.page = rig.page, .watch = &watch[1]}};
    struct cp_record mine = record_of(1, 1), all[2];
    gate[1].seq = 1;
    cp_page_write(rig.page, 1, 1, &mine);
    atomic_store(&rig.is_gone[1], 1);
    mine = record_of(0, 1);
    CHECK_EQ_I64(cp_gate_exchange(&gate[0], &mine, all, "attention (call 1)",
                                  cp_deadline_in(1.0)),
                 CP_OK);
    (void)is_record_of(&all[1], 1, 1);
    CHECK_EQ_I64(cp_gate_exchange(&gate[0], &mine, all, "attention (call 2)",
                                  cp_deadline_in(1.0)),
                 CP_ERR_COMM);
    CHECK_STR_HAS(cp_last_error()->text, "rank 1 is gone");
    CHECK_STR_HAS(cp_last_error()->text, "attention (call 2)");
    /* Rank 1's wait for call 1, begun before the poison, still succeeds: it looks for
     * the records first. */
    struct cp_wait wait = {.is_ready = all_have_come,
                           .needs = is_missing,
                           .arg = &gate[1],
                           .operation = "attention (call 1)"};
    CHECK_EQ_I64(cp_watch_wait(&watch[1], &wait, cp_deadline_in(1.0)), CP_OK);
    /* The next call says why. */
    CHECK_EQ_I64(cp_gate_exchange(&gate[0], &mine, all, "attention (call 3)",
                                  cp_deadline_in(1.0)),
                 CP_ERR_COMM);
    CHECK_STR_HAS(cp_last_error()->text, "attention (call 2)");
    cp_mem_destroy(&rig.page);
}

struct death {
    struct rig rig;
    const char *point;
    int after;
};

static void body_dies(int rank, void *arg)
{
    struct death *death = arg;
    if (rank == 1) {
        die_at = death->point;
        die_after = death->after;
        die_in = &death->rig;
        die_as = rank;
    }
    delays = test_rng_init((uint64_t)rank + 77);
    has_delays = true;
    (void)play(&death->rig, rank, 5.0);
    die_at = NULL;
    has_delays = false;
}

/* The others complete exactly the rounds whose record the dead rank had published, then
 * all say the same. */
static void check_death(const char *point, int after, int world)
{
    struct death death = {.point = point, .after = after};
    char call[40];
    REQUIRE(rig_init(&death.rig, world, 400));
    ranks_as_threads(world, body_dies, &death);
    const struct place *dead = &death.rig.page->rank[1];
    uint64_t even = atomic_load(&dead->record[0].seq),
             odd = atomic_load(&dead->record[1].seq);
    uint64_t published = even > odd ? even : odd;
    (void)snprintf(call, sizeof call, "(call %llu)", (unsigned long long)published + 1);
    REQUIRE(death.rig.is_gone[1]);
    for (int rank = 0; rank < world; rank++) {
        TEST_CONTEXT("death at \"%s\", pass %d, rank %d of %d", point, after, rank,
                     world);
        if (rank != 1) {
            CHECK_EQ_I64(death.rig.code[rank], CP_ERR_COMM);
            CHECK_EQ_U64(death.rig.last[rank], published);
            CHECK_STR_HAS(death.rig.text[rank], "rank 1 is gone");
            CHECK_STR_HAS(death.rig.text[rank], call);
            CHECK_EQ_STR(death.rig.text[rank], death.rig.text[0]);
        }
    }
    cp_mem_destroy(&death.rig.page);
}

TEST(death_at_every_step)
{
    static const char *const points[] = {
        "gate: before writing",    "gate: before seq",    "gate: before ringing",
        "bell: before sleepers",   "watch: not ready",    "watch: before count",
        "watch: before last look", "watch: before sleep", "gate: before reading",
        "gate: reading",
    };
    for (size_t i = 0; i < sizeof points / sizeof points[0]; i++) {
        for (int world = 2; world <= 3; world++) {
            check_death(points[i], 0, world);
            check_death(points[i], 7, world);
        }
    }
}

/* Killed in the middle of writing the reason: the others get a generic one. */
static void body_dies_poisoning(int rank, void *arg)
{
    struct death *death = arg;
    if (rank == 1) {
        struct cp_watch watch = watch_of(&death->rig, rank);
        struct cp_status reason = {
            .code = CP_ERR_DEVICE, .rank = 1, .text = "never read"};
        die_at = "poison: writing";
        die_after = 0;
        die_in = &death->rig;
        die_as = rank;
        cp_watch_poison(&watch, &reason);
    } else {
        (void)play(&death->rig, rank, 5.0);
    }
}

TEST(death_while_poisoning)
{
    struct death death = {.point = NULL};
    REQUIRE(rig_init(&death.rig, 3, 1));
    ranks_as_threads(3, body_dies_poisoning, &death);
    for (int rank = 0; rank < 3; rank += 2) {
        CHECK_EQ_I64(death.rig.code[rank], CP_ERR_COMM);
        CHECK_STR_HAS(death.rig.text[rank], "the context is broken");
    }
    cp_mem_destroy(&death.rig.page);
}

TEST(records_of_different_ranks_share_no_cache_line)
{
    CHECK_EQ_U64(sizeof(struct place) % LINE, 0);
    CHECK_EQ_U64(offsetof(struct cp_page, rank) % LINE, 0);
    CHECK_EQ_U64(cp_page_bytes(3) - cp_page_bytes(2), sizeof(struct place) +
                                                          sizeof(struct cp_flight) +
                                                          sizeof(struct cp_board));
    /* The last byte of the page is the last of the last board. */
    struct cp_page *page = NULL;
    REQUIRE(cp_mem_create(cp_page_bytes(3), "a page", (void **)&page) == CP_OK);
    CHECK_EQ_I64((char *)&cp_page_boards(page, 3)[3] - (char *)page,
                 (int64_t)cp_page_bytes(3));
    cp_mem_destroy(&page);
}
