/* Threads that take pieces. */
#include "base/pool.h"

#include <fenv.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <string.h>
#include <sys/types.h>
#include <unistd.h>

#include "base/mem.h"
#include "base/point.h"
#include "base/thread.h"
#include "base/watch.h"

/* Looks before a thread sleeps: some 40 us, as long as it takes to be woken. */
static const int looks = 1000;
/* A bell loses no ring; this only bounds what a fault there could cost. */
static const int64_t sleep_ns = 1000000000;
/* A thread takes one of so many parts of its even share of what is left. */
enum { PARTS = 8 };

struct worker {
    struct cp_pool *pool;
    pthread_t thread;
    int number;
};

struct cp_pool {
    /* Pieces that nobody has taken. Whoever takes one may read the job, which stays until
     * that piece is done; whoever does not, may not. */
    _Atomic int64_t left;
    _Atomic int64_t undone;  /* pieces of the job */
    _Atomic bool has_failed; /* decides whose error is the job's */
    _Atomic bool is_ending;
    struct cp_bell work_bell, done_bell;

    cp_pool_work *work;
    void *arg;
    int64_t pieces;
    fenv_t floats;          /* how the caller rounds, and whether it keeps denormals */
    struct cp_status error; /* valid where has_failed, once all is done */

    pid_t pid; /* of the process that has the threads */
    int threads;
    int started; /* of workers */
    struct worker workers[];
};

/* Takes pieces, several where many are left: small ones would cost less than the taking.
 * The number of the first, or -1; `count`: how many. */
static int64_t take(struct cp_pool *pool, int64_t *count)
{
    int64_t left = atomic_load_explicit(&pool->left, memory_order_relaxed);
    CP_POINT("pool: before taking");
    while (left > 0) {
        int64_t share = left / ((int64_t)PARTS * pool->threads);
        *count = share > 1 ? share : 1;
        /* acquire: pairs with the release in cp_pool_run, which has written the job. If `left` was
         * that of an earlier job, they are pieces of this one all the same. */
        if (atomic_compare_exchange_weak_explicit(&pool->left, &left, left - *count,
                                                  memory_order_acquire,
                                                  memory_order_relaxed)) {
            return pool->pieces - left;
        }
    }
    return -1;
}

static void note_error(struct cp_pool *pool)
{
    /* relaxed: only decides who writes; the caller reads behind `undone`. */
    if (!atomic_exchange_explicit(&pool->has_failed, true, memory_order_relaxed)) {
        pool->error = *cp_last_error();
    }
}

/* Pieces until none is left. */
static void do_pieces(struct cp_pool *pool, int worker)
{
    int64_t count = 0;
    for (int64_t first = take(pool, &count); first >= 0; first = take(pool, &count)) {
        if (worker > 0) {
            (void)fesetenv(&pool->floats);
        }
        for (int64_t piece = first; piece < first + count; piece++) {
            if (pool->work(pool->arg, piece, worker) != CP_OK) {
                note_error(pool);
            }
        }
        CP_POINT("pool: before done");
        /* release: what the pieces have written; pairs with the acquire in is_done. */
        if (atomic_fetch_sub_explicit(&pool->undone, count, memory_order_release) ==
            count) {
            cp_bell_ring(&pool->done_bell);
        }
    }
}

static bool has_work(const void *arg)
{
    const struct cp_pool *pool = arg;
    return atomic_load_explicit(&pool->left, memory_order_relaxed) > 0 ||
           atomic_load_explicit(&pool->is_ending, memory_order_acquire);
}

static bool is_done(const void *arg)
{
    const struct cp_pool *pool = arg;
    return atomic_load_explicit(&pool->undone, memory_order_acquire) == 0;
}

static void wait_for(struct cp_pool *pool, struct cp_bell *bell,
                     bool (*has_news)(const void *arg))
{
    for (int i = 0; i < looks && !has_news(pool); i++) {
        cp_thread_pause();
    }
    while (!has_news(pool)) {
        cp_bell_sleep(bell, has_news, pool, sleep_ns);
    }
}

static void *work_until_the_end(void *arg)
{
    const struct worker *self = arg;
    struct cp_pool *pool = self->pool;
    while (!atomic_load_explicit(&pool->is_ending, memory_order_acquire)) {
        do_pieces(pool, self->number);
        wait_for(pool, &pool->work_bell, has_work);
    }
    return NULL;
}

enum cp_code cp_pool_create(int threads, struct cp_pool **out)
{
    void *block = NULL;
    if (threads < 1 || threads > CP_POOL_MOST) {
        return cp_fail(CP_ERR_VALUE, "threads is %d; allowed: 1 to %d", threads,
                       CP_POOL_MOST);
    }
    size_t bytes =
        sizeof(struct cp_pool) + (size_t)(threads - 1) * sizeof(struct worker);
    CP_TRY(cp_mem_create(bytes, "threads", &block));
    struct cp_pool *pool = block;
    pool->pid = getpid();
    pool->threads = threads;
    for (int i = 0; i < threads - 1; i++) {
        struct worker *worker = &pool->workers[i];
        *worker = (struct worker){.pool = pool, .number = i + 1};
        enum cp_code code =
            cp_thread_start(&worker->thread, work_until_the_end, worker);
        if (code != CP_OK) {
            cp_pool_destroy(&pool);
            return code;
        }
        pool->started += 1;
    }
    *out = pool;
    return CP_OK;
}

void cp_pool_destroy(struct cp_pool **pool)
{
    struct cp_pool *p = *pool;
    if (p == NULL) {
        return;
    }
    if (p->pid == getpid()) {
        atomic_store_explicit(&p->is_ending, true, memory_order_release);
        cp_bell_ring(&p->work_bell);
        for (int i = 0; i < p->started; i++) {
            (void)pthread_join(p->workers[i].thread, NULL);
        }
    }
    cp_mem_destroy(pool);
}

int cp_pool_threads(const struct cp_pool *pool)
{
    return pool == NULL ? 1 : pool->threads;
}

static enum cp_code run_alone(int64_t pieces, cp_pool_work *work, void *arg)
{
    for (int64_t piece = 0; piece < pieces; piece++) {
        CP_TRY(work(arg, piece, 0));
    }
    return CP_OK;
}

enum cp_code cp_pool_run(struct cp_pool *pool, int64_t pieces, cp_pool_work *work,
                         void *arg)
{
    if (pool == NULL || pool->threads == 1 || pieces < 2) {
        return run_alone(pieces, work, arg);
    }
    pool->work = work;
    pool->arg = arg;
    pool->pieces = pieces;
    (void)fegetenv(&pool->floats);
    atomic_store_explicit(&pool->has_failed, false, memory_order_relaxed);
    atomic_store_explicit(&pool->undone, pieces, memory_order_relaxed);
    /* release: pairs with the acquire in take. */
    atomic_store_explicit(&pool->left, pieces, memory_order_release);
    cp_bell_ring(&pool->work_bell);
    do_pieces(pool, 0);
    wait_for(pool, &pool->done_bell, is_done);
    return atomic_load_explicit(&pool->has_failed, memory_order_relaxed)
               ? cp_fail_as(&pool->error)
               : CP_OK;
}
