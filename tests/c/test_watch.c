/* The waiting mechanism: order of looks, sentences, and that no wake-up is lost. Ranks
 * are threads. */
#define CP_TEST_POINTS
#include <sys/mman.h>

#include "base/watch.c"
#include "ranks.h"
#include "test.h"

/* What a point does, or NULL; one test at a time. */
static void (*_Atomic at_point)(const char *name);

void cp_test_point(const char *name)
{
    void (*action)(const char *) = atomic_load(&at_point);
    if (action != NULL) {
        action(name);
    }
}

struct shared {
    struct cp_bell bell;
    struct cp_poison poison;
    _Atomic int came[RANKS_MOST];
    _Atomic int is_dead[RANKS_MOST];
    _Atomic int asked; /* for an interruption */
    int wanted_rank;   /* whom everybody waits for; -1: all */
    int world;
    int publish_when_dead; /* the dead rank stores at the moment of death */
};

static bool has_died(void *peers, int rank)
{
    struct shared *shared = peers;
    bool is_dead = atomic_load(&shared->is_dead[rank]) != 0;
    if (is_dead && shared->publish_when_dead) {
        atomic_store(&shared->came[rank], 1);
    }
    return is_dead;
}

static bool wants(const void *arg, int rank)
{
    const struct shared *shared = arg;
    return (shared->wanted_rank < 0 || shared->wanted_rank == rank) &&
           atomic_load(&shared->came[rank]) == 0;
}

static bool is_all_there(const void *arg)
{
    const struct shared *shared = arg;
    for (int rank = 0; rank < shared->world; rank++) {
        if (rank != 0 && wants(arg, rank)) {
            return false;
        }
    }
    return true;
}

static struct cp_watch watch_of(struct shared *shared, int rank)
{
    return (struct cp_watch){.bell = &shared->bell,
                             .poison = &shared->poison,
                             .rank = rank,
                             .world = shared->world,
                             .may_spin = true,
                             .is_dead = has_died,
                             .peers = shared};
}

static struct cp_wait wait_of(struct shared *shared)
{
    return (struct cp_wait){.is_ready = is_all_there,
                            .needs = wants,
                            .arg = shared,
                            .operation = "attention (call 7)"};
}

static struct cp_status reason_of(enum cp_code code, const char *text)
{
    struct cp_status status = {.code = (int32_t)code, .rank = 1};
    (void)snprintf(status.text, sizeof status.text, "%s", text);
    return status;
}

TEST(what_is_there_wins_over_poison_death_and_deadline)
{
    struct shared shared = {
        .world = 3, .wanted_rank = -1, .came = {1, 1, 1}, .is_dead = {0, 1, 0}};
    struct cp_watch watch = watch_of(&shared, 0);
    struct cp_wait wait = wait_of(&shared);
    struct cp_status reason = reason_of(CP_ERR_COMM, "broken");
    cp_watch_poison(&watch, &reason);
    CHECK_EQ_I64(cp_watch_wait(&watch, &wait, cp_deadline_in(-1.0)), CP_OK);
}

TEST(timeout_names_one_rank)
{
    struct shared shared = {.world = 3, .wanted_rank = -1, .came = {0, 1, 0}};
    struct cp_watch watch = watch_of(&shared, 0);
    struct cp_wait wait = wait_of(&shared);
    int64_t start = cp_now_ns();
    CHECK_EQ_I64(cp_watch_wait(&watch, &wait, cp_deadline_in(0.05)), CP_ERR_TIMEOUT);
    CHECK(cp_now_ns() - start >= 50000000);
    CHECK(cp_now_ns() - start < 1000000000);
    CHECK_EQ_STR(cp_last_error()->text,
                 "rank 2 did not come to attention (call 7) within 0.1 s");
    CHECK_EQ_I64(cp_watch_check(&watch), CP_ERR_TIMEOUT);
    CHECK_STR_HAS(shared.poison.status.text, "rank 2 did not come");
}

TEST(timeout_names_all_ranks_missing)
{
    struct shared shared = {.world = 5, .wanted_rank = -1, .came = {0, 0, 1, 0, 1}};
    struct cp_watch watch = watch_of(&shared, 0);
    struct cp_wait wait = wait_of(&shared);
    CHECK_EQ_I64(cp_watch_wait(&watch, &wait, cp_deadline_in(0.0)), CP_ERR_TIMEOUT);
    CHECK_STR_HAS(cp_last_error()->text,
                  "ranks 1, 3 did not come to attention (call 7) within 0.0 s");
}

TEST(death_is_named)
{
    struct shared shared = {.world = 3, .wanted_rank = -1, .is_dead = {0, 0, 1}};
    struct cp_watch watch = watch_of(&shared, 0);
    struct cp_wait wait = wait_of(&shared);
    CHECK_EQ_I64(cp_watch_wait(&watch, &wait, cp_deadline_in(5.0)), CP_ERR_COMM);
    CHECK_EQ_STR(
        cp_last_error()->text,
        "rank 2 is gone (its process ended or it closed its context) while rank 0 "
        "waited for it in attention (call 7)");
    CHECK_EQ_I64(cp_last_error()->rank, 2);
}

TEST(death_of_a_rank_not_waited_for_is_none_of_our_business)
{
    struct shared shared = {.world = 3, .wanted_rank = 1, .is_dead = {0, 0, 1}};
    struct cp_watch watch = watch_of(&shared, 0);
    struct cp_wait wait = wait_of(&shared);
    CHECK_EQ_I64(cp_watch_wait(&watch, &wait, cp_deadline_in(0.03)), CP_ERR_TIMEOUT);
    CHECK_STR_HAS(cp_last_error()->text, "rank 1 did not come");
}

TEST(a_rank_may_publish_and_die)
{
    struct shared shared = {
        .world = 2, .wanted_rank = -1, .is_dead = {0, 1}, .publish_when_dead = 1};
    struct cp_watch watch = watch_of(&shared, 0);
    struct cp_wait wait = wait_of(&shared);
    CHECK_EQ_I64(cp_watch_wait(&watch, &wait, cp_deadline_in(5.0)), CP_OK);
}

TEST(one_that_published_and_died_does_not_hide_one_that_only_died)
{
    struct shared shared = {
        .world = 4, .wanted_rank = -1, .is_dead = {0, 1, 1}, .publish_when_dead = 1};
    struct cp_watch watch = watch_of(&shared, 0);
    struct cp_wait wait = wait_of(&shared);
    CHECK_EQ_I64(cp_watch_wait(&watch, &wait, cp_deadline_in(0.05)), CP_ERR_TIMEOUT);
    CHECK_STR_HAS(cp_last_error()->text, "rank 3 did not come");
}

static struct shared *finished_between;

static void come_and_poison(const char *name)
{
    if (strcmp(name, "watch: not ready") == 0) {
        struct cp_watch watch = watch_of(finished_between, 1);
        struct cp_status reason = reason_of(CP_ERR_COMM, "a later call went wrong");
        atomic_store(&at_point, NULL);
        atomic_store(&finished_between->came[1], 1);
        cp_watch_poison(&watch, &reason);
    }
}

/* The other rank comes, goes on and breaks the context, all between this one's look for
 * it and for poison. */
TEST(poison_of_what_came_after_does_not_hide_what_came_before)
{
    struct shared shared = {.world = 2, .wanted_rank = -1};
    struct cp_watch watch = watch_of(&shared, 0);
    struct cp_wait wait = wait_of(&shared);
    finished_between = &shared;
    atomic_store(&at_point, come_and_poison);
    CHECK_EQ_I64(cp_watch_wait(&watch, &wait, cp_deadline_in(5.0)), CP_OK);
    atomic_store(&at_point, NULL);
    CHECK_EQ_I64(cp_watch_check(&watch), CP_ERR_COMM);
}

static struct shared *poisoned_at_death;

static void poison_at_death(const char *name)
{
    if (strcmp(name, "watch: somebody is dead") == 0) {
        struct cp_watch watch = watch_of(poisoned_at_death, 1);
        struct cp_status reason = reason_of(CP_ERR_DEVICE, "rank 1 lost its device");
        atomic_store(&at_point, NULL);
        cp_watch_poison(&watch, &reason);
    }
}

TEST(the_reason_a_dead_rank_left_is_better_than_its_death)
{
    struct shared shared = {.world = 2, .wanted_rank = -1, .is_dead = {0, 1}};
    struct cp_watch watch = watch_of(&shared, 0);
    struct cp_wait wait = wait_of(&shared);
    poisoned_at_death = &shared;
    atomic_store(&at_point, poison_at_death);
    CHECK_EQ_I64(cp_watch_wait(&watch, &wait, cp_deadline_in(5.0)), CP_ERR_DEVICE);
    atomic_store(&at_point, NULL);
    CHECK_EQ_STR(cp_last_error()->text, "rank 1 lost its device");
}

TEST(first_poison_wins)
{
    struct shared shared = {.world = 2, .wanted_rank = -1};
    struct cp_watch watch = watch_of(&shared, 0);
    struct cp_wait wait = wait_of(&shared);
    struct cp_status first = reason_of(CP_ERR_DEVICE, "first"),
                     second = reason_of(CP_ERR_COMM, "second");
    CHECK_EQ_I64(cp_watch_check(&watch), CP_OK);
    cp_watch_poison(&watch, &first);
    cp_watch_poison(&watch, &second);
    CHECK_EQ_I64(cp_watch_check(&watch), CP_ERR_DEVICE);
    CHECK_EQ_I64(cp_watch_wait(&watch, &wait, cp_deadline_in(5.0)), CP_ERR_DEVICE);
    CHECK_EQ_STR(cp_last_error()->text, "first");
    CHECK_EQ_I64(cp_last_error()->rank, 1);
}

static void body_times_out(int rank, void *arg)
{
    struct shared *shared = arg;
    struct cp_watch watch = watch_of(shared, rank);
    struct cp_wait wait = wait_of(shared);
    /* All give up at about the same time; one sentence is the first. */
    CHECK(cp_watch_wait(&watch, &wait, cp_deadline_in(0.05)) != CP_OK);
    CHECK_EQ_STR(cp_last_error()->text, shared->poison.status.text);
}

TEST(all_ranks_say_the_same)
{
    for (int round = 0; round < 4; round++) {
        struct shared shared = {
            .world = 5, .wanted_rank = -1, .is_dead = {0, 0, 0, 0, round % 2}};
        ranks_as_threads(4, body_times_out, &shared);
    }
}

TEST(poison_whose_writer_died_is_still_a_poison)
{
    struct shared shared = {.world = 2, .wanted_rank = -1};
    struct cp_watch watch = watch_of(&shared, 0);
    struct cp_wait wait = wait_of(&shared);
    int64_t start = cp_now_ns();
    atomic_store(&shared.poison.state, CP_POISON_WRITING);
    CHECK_EQ_I64(cp_watch_wait(&watch, &wait, cp_deadline_in(5.0)), CP_ERR_COMM);
    CHECK_STR_HAS(cp_last_error()->text, "the context is broken");
    CHECK(cp_now_ns() - start < 2000000000);
}

static void write_slowly(const char *name)
{
    if (strcmp(name, "poison: writing") == 0) {
        ranks_sleep_us(20000);
    }
}

static void body_slow_poison(int rank, void *arg)
{
    struct shared *shared = arg;
    struct cp_watch watch = watch_of(shared, rank);
    struct cp_wait wait = wait_of(shared);
    if (rank == 1) {
        struct cp_status reason = reason_of(CP_ERR_DEVICE, "written slowly");
        cp_watch_poison(&watch, &reason);
    } else {
        CHECK_EQ_I64(cp_watch_wait(&watch, &wait, cp_deadline_in(5.0)), CP_ERR_DEVICE);
        CHECK_EQ_STR(cp_last_error()->text, "written slowly");
    }
}

TEST(poison_that_is_being_written_is_waited_for)
{
    struct shared shared = {.world = 2, .wanted_rank = -1};
    atomic_store(&at_point, write_slowly);
    ranks_as_threads(2, body_slow_poison, &shared);
    atomic_store(&at_point, NULL);
}

static enum cp_code count_and_interrupt(void *arg)
{
    struct shared *shared = arg;
    return atomic_fetch_add(&shared->asked, 1) < 5
               ? CP_OK
               : cp_fail(CP_ERR_INTERRUPTED, "Ctrl-C");
}

TEST(interruption_ends_the_wait_and_tells_the_others)
{
    struct shared shared = {.world = 2, .wanted_rank = -1};
    struct cp_watch watch = watch_of(&shared, 0);
    struct cp_wait wait = wait_of(&shared);
    int64_t start = cp_now_ns();
    watch.interrupt = count_and_interrupt;
    watch.interrupt_arg = &shared;
    CHECK_EQ_I64(cp_watch_wait(&watch, &wait, cp_deadline_in(20.0)),
                 CP_ERR_INTERRUPTED);
    CHECK(cp_now_ns() - start < 600000000); /* six times at ten a second */
    CHECK_STR_HAS(cp_last_error()->text,
                  "rank 0 was interrupted in attention (call 7)");
    CHECK_EQ_I64(cp_watch_check(&watch), CP_ERR_COMM);
    CHECK_STR_HAS(cp_last_error()->text, "rank 0 was interrupted");
}

static _Atomic int looks;

static void count_looks(const char *name)
{
    atomic_fetch_add(&looks, strcmp(name, "watch: not ready") == 0);
}

TEST(waiting_without_spinning_is_sleeping)
{
    struct shared shared = {.world = 2, .wanted_rank = -1};
    struct cp_watch watch = watch_of(&shared, 0);
    struct cp_wait wait = wait_of(&shared);
    watch.may_spin = false;
    atomic_store(&looks, 0);
    atomic_store(&at_point, count_looks);
    CHECK_EQ_I64(cp_watch_wait(&watch, &wait, cp_deadline_in(0.2)), CP_ERR_TIMEOUT);
    CHECK(atomic_load(&looks) <= 14); /* a slice is 20 ms */
    /* And with spinning it is sleeping after a short time. */
    shared.poison.state = CP_POISON_NONE;
    watch.may_spin = true;
    atomic_store(&looks, 0);
    CHECK_EQ_I64(cp_watch_wait(&watch, &wait, cp_deadline_in(0.2)), CP_ERR_TIMEOUT);
    atomic_store(&at_point, NULL);
    CHECK(atomic_load(&looks) > 14);
    CHECK(atomic_load(&looks) < 20000);
}

/* A lost wake-up does not hang, since sleeps are short slices; it shows as a wait that
 * takes a whole slice. The waiter stops at a point until the other has stored and rung
 * (or the other way round); then it must come at once. */
static const char *_Atomic stop_at;
static _Atomic int has_stopped, may_go_on;

static void stop_there(const char *name)
{
    if (strcmp(name, atomic_load(&stop_at)) == 0) {
        atomic_store(&has_stopped, 1);
        while (!atomic_load(&may_go_on)) {
            (void)sched_yield();
        }
    }
}

struct meeting_of_two {
    struct shared *shared;
    int64_t late_ns; /* from the moment both could go on to the end of the wait */
    int64_t go_ns;
};

static void body_lost(int rank, void *arg)
{
    struct meeting_of_two *two = arg;
    struct cp_watch watch = watch_of(two->shared, rank);
    struct cp_wait wait = wait_of(two->shared);
    watch.may_spin = false;
    if (rank == 0) {
        CHECK_EQ_I64(cp_watch_wait(&watch, &wait, cp_deadline_in(10.0)), CP_OK);
        two->late_ns = cp_now_ns();
        return;
    }
    while (!atomic_load(&has_stopped)) {
        (void)sched_yield();
    }
    atomic_store(&two->shared->came[1], 1);
    cp_bell_ring(&two->shared->bell);
    two->go_ns = cp_now_ns();
    atomic_store(&may_go_on, 1);
}

static void check_no_loss(const char *point)
{
    int64_t best = INT64_MAX;
    TEST_CONTEXT("%s", point);
    for (int attempt = 0; attempt < 5; attempt++) {
        struct shared shared = {.world = 2, .wanted_rank = -1};
        struct meeting_of_two two = {.shared = &shared};
        atomic_store(&stop_at, point);
        atomic_store(&has_stopped, 0);
        atomic_store(&may_go_on, 0);
        atomic_store(&at_point, stop_there);
        ranks_as_threads(2, body_lost, &two);
        atomic_store(&at_point, NULL);
        best = two.late_ns - two.go_ns < best ? two.late_ns - two.go_ns : best;
    }
    CHECK(best < sleep_ns / 2);
}

TEST(no_wake_up_is_lost_wherever_the_waiter_is)
{
    check_no_loss("watch: not ready");
    check_no_loss("watch: before count");
    check_no_loss("watch: before last look");
    check_no_loss("watch: before sleep");
}

static void body_asleep(int rank, void *arg)
{
    struct meeting_of_two *two = arg;
    struct cp_watch watch = watch_of(two->shared, rank);
    struct cp_wait wait = wait_of(two->shared);
    watch.may_spin = false;
    if (rank == 0) {
        CHECK_EQ_I64(cp_watch_wait(&watch, &wait, cp_deadline_in(10.0)), CP_OK);
        two->late_ns = cp_now_ns();
    } else {
        while (atomic_load(&two->shared->bell.sleepers) == 0) {
            (void)sched_yield();
        }
        ranks_sleep_us(500); /* it is asleep by now */
        atomic_store(&two->shared->came[1], 1);
        cp_bell_ring(&two->shared->bell);
        two->go_ns = cp_now_ns();
    }
}

TEST(a_ring_wakes_who_sleeps)
{
    int64_t best = INT64_MAX;
    for (int attempt = 0; attempt < 5; attempt++) {
        struct shared shared = {.world = 2, .wanted_rank = -1};
        struct meeting_of_two two = {.shared = &shared};
        ranks_as_threads(2, body_asleep, &two);
        best = two.late_ns - two.go_ns < best ? two.late_ns - two.go_ns : best;
    }
    CHECK(best < sleep_ns / 2);
}

TEST(a_ring_wakes_another_process)
{
    struct meeting_of_two *two =
        mmap(NULL, 2 * 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    REQUIRE(two != MAP_FAILED);
    int64_t best = INT64_MAX;
    for (int attempt = 0; attempt < 5; attempt++) {
        two->shared = (struct shared *)(void *)((char *)two + 4096);
        *two->shared = (struct shared){.world = 2, .wanted_rank = -1};
        ranks_as_processes(2, body_asleep, two);
        best = two->late_ns - two->go_ns < best ? two->late_ns - two->go_ns : best;
    }
    CHECK(best < sleep_ns / 2);
    (void)munmap(two, 2 * 4096);
}

TEST(a_ring_without_sleepers_is_no_system_call)
{
    struct cp_bell bell = {0};
    cp_bell_ring(&bell);
    CHECK_EQ_U64(atomic_load(&bell.count), 0);
}
