/* Looks after enqueued calls; ends waits; lets go of memory. */
#include "ipc_watcher.h"

#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "base/mem.h"
#include "base/watch_report.h"
#include "cuda_check.h"

static const char on_gpu[] = "on its GPU";
static const int look_ms = 50;
/* While nothing is under way: how long somebody who closes may wait for his memory. */
static const int idle_look_ms = 100;
/* For what a dead peer has given its GPU, or its GPU us. */
static const int64_t dead_ns = 500000000;
/* For outstanding work to end when the communicator closes, by itself and once its waits
 * have been ended. */
static const int64_t drain_ns = 1000000000;
/* For others to let go: they may be at that very thing. */
static const int64_t let_go_ns = 2500000000;

static void lock(struct cp_ipc_watcher *watcher)
{
    (void)pthread_mutex_lock(&watcher->mutex);
}

static void unlock(struct cp_ipc_watcher *watcher)
{
    (void)pthread_mutex_unlock(&watcher->mutex);
}

/* The GPU's side of these words is cuda/system_word.cuh. */
static uint64_t load(const uint64_t *word)
{
    return __atomic_load_n(word, __ATOMIC_ACQUIRE);
}

void cp_ipc_watcher_break(struct cp_ipc_watcher *watcher)
{
    __atomic_store_n(&watcher->desk->is_over, 1, __ATOMIC_RELEASE);
}

/* ---- the calls under way; the mutex is held ---- */

/* CP_AGAIN: the GPU is not through with all that has been enqueued, or more is being. */
static enum cp_code ask_for_end(struct cp_ipc_watcher *watcher)
{
    if (watcher->begun != watcher->ended) {
        return CP_AGAIN;
    }
    for (int i = 0; i < CP_IPC_STREAMS; i++) {
        cudaError_t error = cudaEventQuery(watcher->last[i]);
        if (error == cudaErrorNotReady) {
            (void)
                cudaGetLastError(); /* an answer, not an error; the runtime keeps it */
            return CP_AGAIN;
        }
        CP_TRY(cp_cuda_check(error, "a call on the windows of GPUs"));
    }
    return CP_OK;
}

/* What a wait has noted; true where it is the one that was seen before. */
static bool is_seen_again(struct cp_ipc_watcher *watcher, int rank, int signal,
                          int64_t now_ns)
{
    struct cp_ipc_seen *seen = &watcher->seen[rank][signal];
    uint64_t value = load(&watcher->desk->note[rank][signal].value);
    if (value != seen->value) {
        *seen = (struct cp_ipc_seen){.value = value, .since_ns = now_ns};
        return false;
    }
    return value != 0;
}

static double waited(const struct cp_ipc_seen *seen, int64_t now_ns)
{
    return (double)(now_ns - seen->since_ns) * 1e-9;
}

/* All who are waited for by now are named. */
static enum cp_code fail_late(const struct cp_ipc_watcher *watcher, uint64_t call)
{
    const struct cp_watch *watch = watcher->watch;
    bool is_missing[CP_IPC_RANKS] = {false};
    char whom[256];
    for (int rank = 0; rank < watch->world; rank++) {
        for (int signal = 0; signal < CP_IPC_SIGNALS; signal++) {
            is_missing[rank] =
                is_missing[rank] || watcher->seen[rank][signal].value != 0;
        }
    }
    cp_watch_name_others(watch, is_missing, whom, sizeof whom);
    return cp_watch_fail_device_late(watch, watcher->timeout, whom, call, on_gpu);
}

static enum cp_code look_for_death(struct cp_ipc_watcher *watcher, int rank,
                                   struct cp_ipc_seen *seen, uint64_t call,
                                   int64_t now_ns)
{
    struct cp_watch *watch = watcher->watch;
    if (rank == watch->rank || !watch->is_dead(watch->peers, rank)) {
        return CP_OK;
    }
    if (seen->dead_ns == 0) {
        seen->dead_ns = now_ns;
    }
    return now_ns - seen->dead_ns < dead_ns
               ? CP_OK
               : cp_watch_fail_device_gone(watch, rank, call, on_gpu);
}

static enum cp_code look_at_waits(struct cp_ipc_watcher *watcher)
{
    int64_t now_ns = cp_now_ns();
    for (int rank = 0; rank < watcher->watch->world; rank++) {
        for (int signal = 0; signal < CP_IPC_SIGNALS; signal++) {
            struct cp_ipc_seen *seen = &watcher->seen[rank][signal];
            if (!is_seen_again(watcher, rank, signal, now_ns)) {
                continue;
            }
            uint64_t call = load(&watcher->desk->note[rank][signal].call);
            CP_TRY(look_for_death(watcher, rank, seen, call, now_ns));
            if (waited(seen, now_ns) > watcher->timeout) {
                return fail_late(watcher, call);
            }
        }
    }
    return CP_OK;
}

/* What is there wins: a call that has ended has ended well. */
static enum cp_code look(struct cp_ipc_watcher *watcher)
{
    enum cp_code code = ask_for_end(watcher);
    if (code != CP_AGAIN) {
        watcher->is_idle = true;
        return code;
    }
    CP_TRY(cp_watch_check(watcher->watch));
    return look_at_waits(watcher);
}

static void look_and_judge(struct cp_ipc_watcher *watcher)
{
    if (look(watcher) != CP_OK) {
        struct cp_status reason = *cp_last_error();
        reason.rank = reason.rank < 0 ? watcher->watch->rank : reason.rank;
        cp_watch_poison(watcher->watch, &reason);
        cp_ipc_watcher_break(watcher);
    }
}

/* Nothing is under way. */
static void let_go_of_the_closing(struct cp_ipc_watcher *watcher)
{
    for (int rank = 0; rank < watcher->watch->world; rank++) {
        if (cp_ipc_memory_uses(&watcher->memory, rank) &&
            cp_ipc_memory_is_wanted(&watcher->memory, rank)) {
            cp_ipc_memory_let_go(&watcher->memory, rank);
        }
    }
}

/* ---- the thread ---- */

static void *run(void *arg)
{
    struct cp_ipc_watcher *watcher = arg;
    struct pollfd wake = {.fd = watcher->worker.wake_fd, .events = POLLIN};
    /* Otherwise the first call of the runtime would set up device 0 for this thread. */
    (void)cudaSetDevice(watcher->device);
    lock(watcher);
    while (!watcher->is_closing) {
        int ms = watcher->is_idle ? idle_look_ms : look_ms;
        unlock(watcher);
        if (poll(&wake, 1, ms) > 0) {
            cp_worker_heed(&watcher->worker);
        }
        lock(watcher);
        if (!watcher->is_idle) {
            look_and_judge(watcher);
        }
        if (watcher->is_idle) {
            let_go_of_the_closing(watcher);
        }
    }
    unlock(watcher);
    return NULL;
}

/* ---- the caller's side ---- */

static enum cp_code make_desk(struct cp_ipc_watcher *watcher)
{
    void *desk = NULL, *seen = NULL;
    CP_TRY(cp_cuda_check(cudaHostAlloc(&desk, sizeof *watcher->desk,
                                       cudaHostAllocMapped | cudaHostAllocPortable),
                         "cudaHostAlloc"));
    memset(desk, 0, sizeof *watcher->desk);
    watcher->desk = desk;
    CP_TRY(cp_cuda_check(cudaHostGetDevicePointer(&seen, desk, 0),
                         "cudaHostGetDevicePointer"));
    watcher->desk_of_device = seen;
    return CP_OK;
}

static enum cp_code make_events(struct cp_ipc_watcher *watcher)
{
    for (int i = 0; i < CP_IPC_STREAMS; i++) {
        CP_TRY(cp_cuda_check(
            cudaEventCreateWithFlags(&watcher->last[i], cudaEventDisableTiming),
            "cudaEventCreateWithFlags"));
    }
    return CP_OK;
}

/* What was not made is NULL. */
static void free_desk(struct cp_ipc_watcher *watcher)
{
    for (int i = 0; i < CP_IPC_STREAMS; i++) {
        if (watcher->last[i] != NULL) {
            (void)cudaEventDestroy(watcher->last[i]);
        }
    }
    if (watcher->desk != NULL) {
        (void)cudaFreeHost(watcher->desk);
    }
    (void)cudaGetLastError();
}

enum cp_code cp_ipc_watcher_create(const struct cp_ipc_watcher_args *args,
                                   struct cp_ipc_watcher **out)
{
    void *block = NULL;
    enum cp_code code = CP_OK;
    CP_TRY(cp_mem_create(sizeof(struct cp_ipc_watcher), "a communicator", &block));
    struct cp_ipc_watcher *watcher = block;
    watcher->watch = args->watch;
    watcher->device = args->device;
    watcher->timeout = args->timeout;
    watcher->is_idle = true;
    (void)pthread_mutex_init(&watcher->mutex, NULL);
    CP_TRY_GOTO(code, make_desk(watcher), done);
    CP_TRY_GOTO(code, make_events(watcher), done);
    CP_TRY_GOTO(
        code,
        cp_ipc_memory_init(&watcher->memory, args->watch, args->boards, args->peers),
        done);
    code = cp_worker_start(&watcher->worker, run, watcher);
    if (code != CP_OK) {
        cp_ipc_memory_fini(&watcher->memory, 0);
        goto done;
    }
    *out = watcher;
    return CP_OK;
done:
    free_desk(watcher);
    (void)pthread_mutex_destroy(&watcher->mutex);
    cp_mem_destroy(&watcher);
    return code;
}

enum cp_code cp_ipc_watcher_begin(struct cp_ipc_watcher *watcher)
{
    int gone = -1;
    CP_TRY(cp_watch_check(watcher->watch));
    lock(watcher);
    for (int rank = 0; rank < watcher->watch->world; rank++) {
        if (rank != watcher->watch->rank &&
            !cp_ipc_memory_uses(&watcher->memory, rank)) {
            gone = rank;
        }
    }
    bool was_idle = watcher->is_idle;
    if (gone < 0) {
        watcher->begun += 1;
        watcher->is_idle = false;
    }
    unlock(watcher);
    if (gone >= 0) {
        return cp_fail_rank(CP_ERR_COMM, gone,
                            "rank %d has closed its context, whose memory rank %d "
                            "works on",
                            gone, watcher->watch->rank);
    }
    if (was_idle) {
        cp_worker_wake(&watcher->worker);
    }
    return CP_OK;
}

enum cp_code cp_ipc_watcher_end(struct cp_ipc_watcher *watcher,
                                struct cp_stream *const *streams, int count)
{
    enum cp_code code = CP_OK;
    lock(watcher);
    for (int i = 0; i < count && watcher->begun != watcher->ended && code == CP_OK;
         i++) {
        code =
            cp_cuda_check(cudaEventRecord(watcher->last[i], (cudaStream_t)streams[i]),
                          "cudaEventRecord behind a call");
    }
    if (code == CP_OK) {
        watcher->ended = watcher->begun;
    }
    unlock(watcher);
    return code;
}

/* Has the GPU done all that it was given, before `until_ns`? */
static bool drain(struct cp_ipc_watcher *watcher, int64_t until_ns)
{
    const struct timespec moment = {.tv_nsec = 200000};
    enum cp_code code = ask_for_end(watcher);
    while (code == CP_AGAIN && watcher->begun == watcher->ended &&
           cp_now_ns() < until_ns) {
        (void)nanosleep(&moment, NULL);
        code = ask_for_end(watcher);
    }
    return code != CP_AGAIN;
}

/* The thread has ended. Is nothing of ours under way on the GPU any more? A device that
 * has failed does nothing. */
static bool end_work(struct cp_ipc_watcher *watcher)
{
    bool is_sound =
        watcher->begun == watcher->ended && !cp_watch_is_poisoned(watcher->watch);
    if (is_sound && drain(watcher, cp_now_ns() + drain_ns)) {
        return true;
    }
    cp_ipc_watcher_break(watcher);
    if (watcher->begun != watcher->ended) {
        /* No event stands for its work: the device did not take one. */
        (void)cudaDeviceSynchronize();
        (void)cudaGetLastError();
        return true;
    }
    return drain(watcher, cp_now_ns() + drain_ns);
}

/* On its device. */
static void release(struct cp_ipc_watcher *watcher)
{
    bool has_ended = end_work(watcher);
    for (int rank = 0; rank < watcher->watch->world && has_ended; rank++) {
        cp_ipc_memory_let_go(&watcher->memory, rank);
    }
    if (has_ended) {
        cp_ipc_memory_fini(&watcher->memory, cp_now_ns() + let_go_ns);
        free_desk(watcher);
    }
}

void cp_ipc_watcher_destroy(struct cp_ipc_watcher **watcher)
{
    struct cp_ipc_watcher *w = *watcher;
    *watcher = NULL;
    if (w == NULL) {
        return;
    }
    bool is_own = w->worker.owner_pid == getpid();
    if (is_own) {
        lock(w);
        w->is_closing = true;
        unlock(w);
    }
    cp_worker_end(&w->worker);
    if (is_own) {
        release(w);
        (void)pthread_mutex_destroy(&w->mutex);
    }
    cp_mem_destroy(&w);
}
