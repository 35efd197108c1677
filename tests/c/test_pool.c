/* The threads of a rank: every piece once, errors, ends, and points of the protocol where a thread is late. */
#include <fenv.h>
#include <signal.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/resource.h>

#include "base/mem.h"
#define CP_TEST_POINTS
#include "base/point.h"
#include "ranks.h"

/* One of the threads that come by sleeps a moment. */
static _Atomic int late_every;
static _Atomic int visits;
static _Atomic int times_done;

void cp_test_point(const char *name)
{
    atomic_fetch_add(&times_done, strcmp(name, "pool: before done") == 0);
    int every = atomic_load(&late_every);
    if (every > 0 && atomic_fetch_add(&visits, 1) % every == 0) {
        ranks_sleep_us(50);
    }
}

#include "base/pool.c"

enum { PIECES_MOST = 5000, THREADS_MOST = 8 };

struct tally {
    int64_t pieces;
    int64_t done[PIECES_MOST]; /* plain: what one thread writes, the caller reads */
    int64_t by_worker[THREADS_MOST];
    int64_t failing; /* -1: none */
    bool has_signals;
    bool is_out_of_range;
};

static enum cp_code count_piece(void *arg, int64_t piece, int worker)
{
    struct tally *tally = arg;
    sigset_t blocked;
    if (piece < 0 || piece >= tally->pieces || worker < 0 || worker >= THREADS_MOST) {
        tally->is_out_of_range = true;
        return CP_OK;
    }
    tally->done[piece] += 1;
    tally->by_worker[worker] += 1;
    (void)pthread_sigmask(SIG_SETMASK, NULL, &blocked);
    if (worker > 0 && !sigismember(&blocked, SIGINT)) {
        tally->has_signals = true;
    }
    return piece == tally->failing
               ? cp_fail(CP_ERR_VALUE, "piece %lld fails", (long long)piece)
               : CP_OK;
}

static void run_and_check(struct cp_pool *pool, int64_t pieces, int64_t failing)
{
    struct tally tally = {.pieces = pieces, .failing = failing};
    int64_t sum = 0;
    enum cp_code code = cp_pool_run(pool, pieces, count_piece, &tally);
    CHECK_EQ_I64(code, failing >= 0 ? CP_ERR_VALUE : CP_OK);
    CHECK(!tally.is_out_of_range);
    CHECK(!tally.has_signals);
    bool is_alone = cp_pool_threads(pool) == 1 || pieces < 2;
    for (int64_t i = 0; i < pieces; i++) {
        CHECK_EQ_I64(tally.done[i], is_alone && failing >= 0 && i > failing ? 0 : 1);
    }
    for (int i = 0; i < THREADS_MOST; i++) {
        CHECK(i < cp_pool_threads(pool) || tally.by_worker[i] == 0);
        sum += tally.by_worker[i];
    }
    CHECK(sum == pieces || (is_alone && failing >= 0));
    if (failing >= 0) {
        char want[64];
        (void)snprintf(want, sizeof want, "piece %lld fails", (long long)failing);
        CHECK_EQ_STR(cp_last_error()->text, want);
    }
}

TEST(every_piece_once_with_threads)
{
    struct test_rng rng = test_rng_init(1);
    int64_t live = cp_mem_stats().live_blocks;
    for (int threads = 1; threads <= THREADS_MOST; threads++) {
        struct cp_pool *pool = NULL;
        REQUIRE(cp_pool_create(threads, &pool) == CP_OK);
        CHECK_EQ_I64(cp_pool_threads(pool), threads);
        for (int i = 0; i < 300; i++) {
            int64_t pieces = test_rng_range(&rng, 0, i % 10 == 0 ? PIECES_MOST : 64);
            bool fails = pieces > 0 && test_rng_range(&rng, 0, 9) == 0;
            TEST_CONTEXT("%d threads, %lld pieces", threads, (long long)pieces);
            run_and_check(pool, pieces,
                          fails ? test_rng_range(&rng, 0, pieces - 1) : -1);
        }
        cp_pool_destroy(&pool);
        CHECK(pool == NULL);
    }
    run_and_check(NULL, 7, -1);
    run_and_check(NULL, 7, 3);
    CHECK_EQ_I64(cp_mem_stats().live_blocks, live);
}

/* Threads on many cores would stand in line for each of them. */
TEST(many_pieces_are_taken_at_a_time)
{
    struct cp_pool *pool = NULL;
    REQUIRE(cp_pool_create(4, &pool) == CP_OK);
    atomic_store(&times_done, 0);
    run_and_check(pool, PIECES_MOST, -1);
    CHECK(atomic_load(&times_done) < 300);
    atomic_store(&times_done, 0);
    run_and_check(pool, 32, -1);
    CHECK_EQ_I64(atomic_load(&times_done), 32); /* few ones by one: none waits long */
    cp_pool_destroy(&pool);
}

/* Threads that sleep at the points come to a job that is over, or that has begun anew. */
TEST(late_threads_take_no_piece_twice)
{
    struct test_rng rng = test_rng_init(2);
    for (int every = 1; every <= 7; every += 2) {
        struct cp_pool *pool = NULL;
        REQUIRE(cp_pool_create(4, &pool) == CP_OK);
        atomic_store(&late_every, every);
        for (int i = 0; i < 200; i++) {
            run_and_check(pool, test_rng_range(&rng, 0, i % 9 == 0 ? 150 : 6), -1);
            if (i % 40 == 0) {
                ranks_sleep_us(2000); /* all threads go to sleep */
            }
        }
        atomic_store(&late_every, 0);
        cp_pool_destroy(&pool);
    }
}

static enum cp_code check_rounding(void *arg, int64_t piece, int worker)
{
    const int *expected = arg;
    ranks_sleep_us(20); /* lets the other threads come */
    return fegetround() == *expected
               ? CP_OK
               : cp_fail(CP_ERR_INTERNAL,
                         "piece %lld on thread %d is rounded otherwise",
                         (long long)piece, worker);
}

/* torch.set_flush_denormal and the like are a thread's own, and may change between calls. */
TEST(threads_compute_as_the_caller_does)
{
    const int ways[] = {FE_UPWARD, FE_DOWNWARD, FE_TOWARDZERO, FE_TONEAREST};
    struct cp_pool *pool = NULL;
    CHECK_EQ_I64(cp_pool_create(4, &pool), CP_OK);
    for (size_t i = 0; i < sizeof ways / sizeof ways[0]; i++) {
        int way = ways[i];
        CHECK_EQ_I64(fesetround(way), 0);
        CHECK_EQ_I64(cp_pool_run(pool, 200, check_rounding, &way), CP_OK);
    }
    cp_pool_destroy(&pool);
}

TEST(threads_end_at_once_even_unused)
{
    for (int i = 0; i < 100; i++) {
        struct cp_pool *pool = NULL;
        REQUIRE(cp_pool_create(3, &pool) == CP_OK);
        cp_pool_destroy(&pool);
        cp_pool_destroy(&pool); /* none is there */
    }
}

TEST(wrong_numbers_of_threads)
{
    struct cp_pool *pool = NULL;
    CHECK_EQ_I64(cp_pool_create(0, &pool), CP_ERR_VALUE);
    CHECK_EQ_STR(cp_last_error()->text, "threads is 0; allowed: 1 to 1024");
    CHECK_EQ_I64(cp_pool_create(CP_POOL_MOST + 1, &pool), CP_ERR_VALUE);
    CHECK(pool == NULL);
}

TEST(no_memory_no_threads)
{
    struct cp_pool *pool = NULL;
    cp_mem_fail_after(0);
    CHECK_EQ_I64(cp_pool_create(3, &pool), CP_ERR_NO_MEMORY);
    cp_mem_fail_after(-1);
    CHECK(pool == NULL);
}

TEST(a_forked_child_waits_for_no_threads)
{
    if (TEST_UNDER_TSAN) {
        TEST_SKIP("forks after starting threads");
    }
    struct cp_pool *pool = NULL;
    REQUIRE(cp_pool_create(3, &pool) == CP_OK);
    run_and_check(pool, 9, -1);
    (void)fflush(stdout);
    pid_t pid = fork();
    if (pid == 0) {
        (void)alarm(5);
        cp_pool_destroy(&pool);
        _exit(pool == NULL ? 0 : 1);
    }
    CHECK_EQ_I64(ranks_end_of_process(pid), 0);
    run_and_check(pool, 9, -1);
    cp_pool_destroy(&pool);
}
