/* Looks after outstanding batches; aborts, finalizes, frees. */
#include "nccl_watcher.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "base/mem.h"
#include "base/thread.h"
#include "base/watch_report.h"
#include "capture.h"
#include "cuda_check.h"
#include "nccl_parent.h"

static const int64_t look_ns = 50000000;
/* For sound work to end when the communicator closes. */
static const int64_t drain_ns = 1000000000;
/* For NCCL to return from an abort. */
static const int64_t abort_ns = 1000000000;

static void lock(struct cp_nccl_watcher *watcher)
{
    (void)pthread_mutex_lock(&watcher->mutex);
}

static void unlock(struct cp_nccl_watcher *watcher)
{
    (void)pthread_mutex_unlock(&watcher->mutex);
}

static void pause_a_moment(void)
{
    const struct timespec moment = {.tv_nsec = 200000};
    (void)nanosleep(&moment, NULL);
}

/* ---- looking; the mutex is held ---- */

/* A batch that the device has come to. */
struct current {
    const struct cp_nccl_purpose *purpose;
    const char *name; /* "NCCL batch 7" */
    int64_t begun_ns, now_ns;
    int64_t *dead_ns; /* when one of its peers was first seen dead; 0: none was */
};

static enum cp_code fail_late(const struct cp_nccl_watcher *watcher,
                              const struct current *current)
{
    char peers[256];
    cp_watch_name_others(watcher->watch, current->purpose->has_peer, peers,
                         sizeof peers);
    return cp_watch_fail_device_late(watcher->watch, watcher->timeout,
                                     peers[0] != '\0' ? peers : "its own device",
                                     current->purpose->call, current->name);
}

static enum cp_code look_for_deaths(const struct cp_nccl_watcher *watcher,
                                    const struct current *current)
{
    struct cp_watch *watch = watcher->watch;
    int dead = -1;
    for (int rank = 0; rank < watch->world && dead < 0; rank++) {
        if (rank != watch->rank && current->purpose->has_peer[rank] &&
            watch->is_dead(watch->peers, rank)) {
            dead = rank;
        }
    }
    if (dead < 0) {
        return CP_OK;
    }
    if (*current->dead_ns == 0) {
        *current->dead_ns = current->now_ns;
    }
    return current->now_ns - *current->dead_ns < CP_NCCL_DEAD_NS
               ? CP_OK
               : cp_watch_fail_device_gone(watch, dead, current->purpose->call,
                                           current->name);
}

static enum cp_code judge(const struct cp_nccl_watcher *watcher,
                          const struct current *current)
{
    CP_TRY(look_for_deaths(watcher, current));
    return (double)(current->now_ns - current->begun_ns) * 1e-9 > watcher->timeout
               ? fail_late(watcher, current)
               : CP_OK;
}

/* Batches run in order, so only the oldest can be at fault. Its time begins where the
 * device comes to it: before that it waits for the device's own work. */
static enum cp_code look_at_oldest(struct cp_nccl_watcher *watcher)
{
    const struct cp_nccl_batch *batch = cp_nccl_batches_oldest(watcher->batches);
    char name[40];
    int64_t now_ns = cp_now_ns();
    if (watcher->watched != watcher->batches->ended + 1) {
        watcher->watched = watcher->batches->ended + 1;
        watcher->begun_ns = 0;
        watcher->dead_ns = 0;
    }
    if (watcher->begun_ns == 0) {
        enum cp_code code = cp_nccl_event_query(batch->begin);
        if (code != CP_OK) {
            return code == CP_AGAIN ? CP_OK : code;
        }
        watcher->begun_ns = now_ns;
    }
    (void)snprintf(name, sizeof name, "NCCL batch %llu",
                   (unsigned long long)watcher->watched);
    const struct current current = {.purpose = &batch->purpose,
                                    .name = name,
                                    .begun_ns = watcher->begun_ns,
                                    .now_ns = now_ns,
                                    .dead_ns = &watcher->dead_ns};
    return judge(watcher, &current);
}

static enum cp_code judge_captured(void *arg, struct cp_nccl_captured *captured,
                                   int64_t now_ns)
{
    const struct current current = {.purpose = &captured->purpose,
                                    .name = "launched in a graph",
                                    .begun_ns = captured->begun_ns,
                                    .now_ns = now_ns,
                                    .dead_ns = &captured->dead_ns};
    return judge(arg, &current);
}

static enum cp_code look_for_async_error(const struct cp_nccl_watcher *watcher)
{
    ncclResult_t state = ncclSuccess;
    ncclResult_t result = watcher->nccl->comm_get_async_error(watcher->handle, &state);
    result = result == ncclSuccess ? state : result;
    if (result == ncclSuccess || result == ncclInProgress) {
        return CP_OK;
    }
    return cp_nccl_fail(watcher->nccl, watcher->handle, result, watcher->rank,
                        "finish a batch");
}

/* What is there wins: batches that have ended have ended well. */
static enum cp_code look(struct cp_nccl_watcher *watcher)
{
    CP_TRY(cp_nccl_batches_reap(watcher->batches));
    bool has_batch = cp_nccl_batches_oldest(watcher->batches) != NULL;
    if (!has_batch && watcher->graphs.alive == NULL) {
        return CP_OK;
    }
    CP_TRY(cp_watch_check(watcher->watch));
    CP_TRY(look_for_async_error(watcher));
    if (has_batch) {
        CP_TRY(look_at_oldest(watcher));
    }
    return cp_nccl_graphs_look(&watcher->graphs, cp_now_ns(), judge_captured, watcher);
}

static void look_and_judge(struct cp_nccl_watcher *watcher)
{
    if (look(watcher) != CP_OK) {
        struct cp_status reason = *cp_last_error();
        reason.rank = reason.rank < 0 ? watcher->rank : reason.rank;
        cp_watch_poison(watcher->watch, &reason);
        watcher->is_broken = true;
    }
}

/* ---- what may block; the thread alone ---- */

/* The mutex is held, and given up meanwhile. The caller may have gone when it is over:
 * then the loop finds that there is something to free. */
static void split(struct cp_nccl_watcher *watcher)
{
    ncclComm_t parent = watcher->parent, child = NULL;
    unlock(watcher);
    ncclResult_t result = cp_nccl_split(watcher->nccl, parent, watcher->rank,
                                        &watcher->child_config, &child);
    lock(watcher);
    watcher->parent = NULL;
    watcher->handle = child;
    watcher->split = result;
}

/* The mutex is held, and given up meanwhile. */
static void abort_all(struct cp_nccl_watcher *watcher)
{
    ncclComm_t handle = watcher->handle;
    watcher->handle = NULL;
    watcher->is_aborting = true;
    unlock(watcher);
    (void)watcher->nccl->comm_abort(handle);
    lock(watcher);
    watcher->is_aborting = false;
    (void)pthread_cond_broadcast(&watcher->changed);
}

/* Have all batches ended, before `until_ns`? */
static bool drain(struct cp_nccl_watcher *watcher, int64_t until_ns)
{
    for (;;) {
        if (cp_nccl_batches_reap(watcher->batches) != CP_OK) {
            return false;
        }
        if (cp_nccl_batches_oldest(watcher->batches) == NULL) {
            return true;
        }
        if (cp_now_ns() >= until_ns) {
            return false;
        }
        pause_a_moment();
    }
}

/* Has NCCL flushed what it still holds for its peers, before `until_ns`? */
static bool finalize(const struct cp_nccl *nccl, ncclComm_t handle, int64_t until_ns)
{
    ncclResult_t state = nccl->comm_finalize(handle);
    while (state == ncclInProgress && cp_now_ns() < until_ns) {
        pause_a_moment();
        if (nccl->comm_get_async_error(handle, &state) != ncclSuccess) {
            return false;
        }
    }
    return state == ncclSuccess;
}

/* At the end, without the mutex: nobody else uses the communicator any more. */
static void free_handle(struct cp_nccl_watcher *watcher, ncclComm_t handle,
                        bool is_sound)
{
    int64_t until_ns = cp_now_ns() + drain_ns;
    if (is_sound && drain(watcher, until_ns) &&
        finalize(watcher->nccl, handle, until_ns)) {
        (void)watcher->nccl->comm_destroy(handle);
    } else {
        (void)watcher->nccl->comm_abort(handle);
    }
}

static void free_memory(struct cp_nccl_watcher *watcher)
{
    (void)pthread_cond_destroy(&watcher->changed);
    (void)pthread_cond_destroy(&watcher->wake);
    (void)pthread_mutex_destroy(&watcher->mutex);
    cp_nccl_batches_destroy(&watcher->batches);
    cp_mem_destroy(&watcher);
}

static void wait_for_work(struct cp_nccl_watcher *watcher)
{
    bool has_work =
        watcher->handle != NULL && (cp_nccl_batches_oldest(watcher->batches) != NULL ||
                                    watcher->graphs.alive != NULL);
    if (has_work) {
        (void)cp_thread_cond_wait(&watcher->wake, &watcher->mutex,
                                  cp_now_ns() + look_ns);
    } else {
        (void)pthread_cond_wait(&watcher->wake, &watcher->mutex);
    }
}

static void *run(void *arg)
{
    struct cp_nccl_watcher *watcher = arg;
    /* Otherwise the first call of the runtime would set up device 0 for this thread. */
    (void)cudaSetDevice(watcher->device);
    (void)cp_cuda_capture_leave();
    lock(watcher);
    while (!watcher->is_closing) {
        if (watcher->is_broken && watcher->handle != NULL) {
            abort_all(watcher);
            continue;
        }
        if (watcher->parent != NULL) {
            split(watcher);
            continue;
        }
        wait_for_work(watcher);
        if (!watcher->is_closing && !watcher->is_broken && watcher->handle != NULL) {
            look_and_judge(watcher);
        }
    }
    if (watcher->is_broken && watcher->handle != NULL) {
        abort_all(watcher); /* launches of graphs too */
    }
    while (watcher->graphs.alive != NULL) {
        (void)pthread_cond_wait(&watcher->wake, &watcher->mutex);
    }
    ncclComm_t handle = watcher->handle;
    bool is_sound = !watcher->is_broken;
    watcher->handle = NULL;
    unlock(watcher);
    if (handle != NULL) {
        free_handle(watcher, handle, is_sound);
    }
    cp_nccl_graphs_clear(&watcher->graphs);
    lock(watcher);
    watcher->has_ended = true;
    bool is_parked = watcher->is_parked;
    (void)pthread_cond_broadcast(&watcher->changed);
    unlock(watcher);
    if (is_parked) {
        free_memory(watcher);
    }
    return NULL;
}

/* ---- the caller's side ---- */

static enum cp_code fail_thread(const struct cp_watch *watch, int error)
{
    char reason[64];
    return cp_fail_rank(CP_ERR_RUNTIME, watch->rank,
                        "rank %d cannot start a thread for NCCL: %s", watch->rank,
                        strerror_r(error, reason, sizeof reason));
}

static int start(struct cp_nccl_watcher *watcher)
{
    sigset_t all, before;
    (void)pthread_mutex_init(&watcher->mutex, NULL);
    cp_thread_cond_init(&watcher->wake);
    cp_thread_cond_init(&watcher->changed);
    /* Signals are for the program's own threads. */
    (void)sigfillset(&all);
    (void)pthread_sigmask(SIG_SETMASK, &all, &before);
    int error = pthread_create(&watcher->thread, NULL, run, watcher);
    (void)pthread_sigmask(SIG_SETMASK, &before, NULL);
    return error;
}

enum cp_code cp_nccl_watcher_create(const struct cp_nccl *nccl, struct cp_watch *watch,
                                    int device, double timeout,
                                    struct cp_nccl_watcher **out)
{
    void *block = NULL;
    CP_TRY(cp_mem_create(sizeof(struct cp_nccl_watcher), "a communicator", &block));
    struct cp_nccl_watcher *watcher = block;
    watcher->nccl = nccl;
    watcher->watch = watch;
    watcher->rank = watch->rank;
    watcher->device = device;
    watcher->timeout = timeout;
    watcher->owner_pid = getpid();
    watcher->graphs.world = watch->world;
    enum cp_code code = cp_nccl_batches_create(watch->world, &watcher->batches);
    if (code != CP_OK) {
        cp_mem_destroy(&watcher);
        return code;
    }
    int error = start(watcher);
    if (error != 0) {
        free_memory(watcher);
        return fail_thread(watch, error);
    }
    *out = watcher;
    return CP_OK;
}

void cp_nccl_watcher_split(struct cp_nccl_watcher *watcher, ncclComm_t parent,
                           const ncclConfig_t *config)
{
    watcher->parent = parent;
    watcher->child_config = *config;
    (void)pthread_cond_signal(&watcher->wake);
}

/* A graph has gone; the thread may have waited for it at its end. */
static void CUDART_CB release(void *arg)
{
    struct cp_nccl_graph *graph = arg;
    struct cp_nccl_watcher *watcher = graph->head.owner;
    lock(watcher);
    cp_nccl_graphs_remove(&watcher->graphs, graph);
    (void)pthread_cond_signal(&watcher->wake);
    unlock(watcher);
}

enum cp_code cp_nccl_watcher_capture(struct cp_nccl_watcher *watcher,
                                     cudaStream_t stream, uint64_t capture,
                                     const struct cp_xfer *xfers, int count,
                                     uint64_t call, struct cp_nccl_captured **out)
{
    struct cp_nccl_graph *graph = NULL;
    bool is_new = false;
    lock(watcher);
    enum cp_code code = cp_nccl_graphs_find(&watcher->graphs, capture, &graph, &is_new);
    if (code == CP_OK && is_new) {
        graph->head.owner = watcher;
        (void)pthread_cond_signal(&watcher->wake);
    }
    unlock(watcher);
    CP_TRY(code);
    if (is_new) {
        CP_TRY(cp_cuda_capture_hold(stream, release, graph));
    }
    lock(watcher);
    code = cp_nccl_graphs_add(&watcher->graphs, graph, xfers, count, call, out);
    unlock(watcher);
    return code;
}

void cp_nccl_watcher_wake(struct cp_nccl_watcher *watcher)
{
    /* While there were others it looks now and then by itself. */
    if (watcher->batches->posted == watcher->batches->ended + 1) {
        (void)pthread_cond_signal(&watcher->wake);
    }
}

void cp_nccl_watcher_break(struct cp_nccl_watcher *watcher)
{
    int64_t until_ns = cp_now_ns() + abort_ns;
    int error = 0;
    lock(watcher);
    watcher->is_broken = true;
    (void)pthread_cond_signal(&watcher->wake);
    while ((watcher->handle != NULL || watcher->is_aborting) && error == 0) {
        error = cp_thread_cond_wait(&watcher->changed, &watcher->mutex, until_ns);
    }
    unlock(watcher);
}

void cp_nccl_watcher_destroy(struct cp_nccl_watcher **watcher)
{
    struct cp_nccl_watcher *w = *watcher;
    int error = 0;
    *watcher = NULL;
    if (w == NULL) {
        return;
    }
    if (w->owner_pid != getpid()) {
        /* The thread is not here, and whoever held the mutex never lets it go. */
        cp_nccl_batches_forget(&w->batches);
        cp_mem_destroy(&w);
        return;
    }
    int64_t until_ns = cp_now_ns() + drain_ns + abort_ns;
    lock(w);
    w->is_closing = true;
    w->is_broken = w->is_broken || cp_watch_is_poisoned(w->watch);
    (void)pthread_cond_signal(&w->wake);
    while (!w->has_ended && w->graphs.alive == NULL && error == 0) {
        error = cp_thread_cond_wait(&w->changed, &w->mutex, until_ns);
    }
    /* Parked, it may be freed as soon as the mutex is. */
    pthread_t thread = w->thread;
    bool is_parked = !w->has_ended;
    w->is_parked = is_parked;
    unlock(w);
    if (is_parked) {
        (void)pthread_detach(thread);
        return;
    }
    (void)pthread_join(thread, NULL);
    free_memory(w);
}
