/* Looks after enqueued calls; ends waits; lets go of memory. */
#include "ipc_watcher.h"

#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "base/mem.h"
#include "base/thread.h"
#include "base/watch_report.h"
#include "capture.h"
#include "cuda_check.h"

static const char on_gpu[] = "on its GPU";
static const char in_graph[] = "launched in a graph";
static const int look_ms = 50;
/* While nothing is under way: how long somebody who closes may wait for his memory. */
static const int idle_look_ms = 100;
/* For what a dead peer has given its GPU, or its GPU us. */
static const int64_t dead_ns = 500000000;
/* For outstanding work to end when the communicator closes, by itself and once its waits
 * have been ended. */
static const int64_t drain_ns = 1000000000;
static const int closing_look_ms = 1;
/* How long who closes waits for others to let go: they may be at that very thing. */
static const int64_t let_go_ns = 300000000;

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

static void end_waits(struct cp_ipc_watcher *watcher, uint64_t which)
{
    (void)__atomic_fetch_or(&watcher->desk->is_over, which, __ATOMIC_RELEASE);
}

void cp_ipc_watcher_break(struct cp_ipc_watcher *watcher)
{
    end_waits(watcher, CP_IPC_OVER_INSIDE);
}

static void end_all_waits(struct cp_ipc_watcher *watcher)
{
    end_waits(watcher, CP_IPC_OVER_INSIDE | CP_IPC_OVER_TURNS);
}

/* ---- the calls under way; the mutex is held ---- */

/* CP_AGAIN: the GPU is not through with all that has been enqueued, or more is being. */
static enum cp_code ask_for_end(struct cp_ipc_watcher *watcher)
{
    if (watcher->begun != watcher->ended) {
        return CP_AGAIN;
    }
    for (int i = 0; i < CP_IPC_STREAMS; i++) {
        CP_TRY(cp_cuda_query(watcher->last[i], "a call on the windows of GPUs"));
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
static enum cp_code fail_late(const struct cp_ipc_watcher *watcher, uint64_t call,
                              const char *where)
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
    return cp_watch_fail_device_late(watch, watcher->timeout, whom, call, where);
}

static enum cp_code look_for_death(struct cp_ipc_watcher *watcher, int rank,
                                   struct cp_ipc_seen *seen, uint64_t call,
                                   int64_t now_ns, const char *where)
{
    struct cp_watch *watch = watcher->watch;
    if (!watch->is_dead(watch->peers, rank) ||
        cp_ipc_memory_is_kept(&watcher->memory, rank)) {
        return CP_OK;
    }
    if (seen->dead_ns == 0) {
        seen->dead_ns = now_ns;
    }
    return now_ns - seen->dead_ns < dead_ns
               ? CP_OK
               : cp_watch_fail_device_gone(watch, rank, call, where);
}

/* For the own calls a call waits as long as they take. */
static enum cp_code look_at_waits(struct cp_ipc_watcher *watcher, const char *where)
{
    int64_t now_ns = cp_now_ns();
    for (int rank = 0; rank < watcher->watch->world; rank++) {
        for (int signal = 0; signal < CP_IPC_SIGNALS; signal++) {
            struct cp_ipc_seen *seen = &watcher->seen[rank][signal];
            if (rank == watcher->watch->rank ||
                !is_seen_again(watcher, rank, signal, now_ns)) {
                continue;
            }
            uint64_t call = load(&watcher->desk->note[rank][signal].call);
            CP_TRY(look_for_death(watcher, rank, seen, call, now_ns, where));
            if (waited(seen, now_ns) > watcher->timeout) {
                return fail_late(watcher, call, where);
            }
        }
    }
    return CP_OK;
}

/* Ranks that launch different graphs. */
static enum cp_code look_for_odd_calls(const struct cp_ipc_watcher *watcher)
{
    const struct cp_watch *watch = watcher->watch;
    for (int rank = 0; rank < watch->world; rank++) {
        const struct cp_ipc_note *odd = &watcher->desk->odd[rank];
        uint64_t value = load(&odd->value);
        if (value != 0) {
            char its[64], mine[64];
            cp_flight_name_call(value, its, sizeof its);
            cp_flight_name_call(load(&odd->call), mine, sizeof mine);
            return cp_fail_rank(CP_ERR_VALUE, watch->rank,
                                "rank %d was in %s while rank %d was in %s: all ranks "
                                "have to launch the same graphs in the same order",
                                rank, its, watch->rank, mine);
        }
    }
    return CP_OK;
}

/* What is there wins: a call that has ended has ended well, if it was the others' too. */
static enum cp_code look(struct cp_ipc_watcher *watcher)
{
    enum cp_code code = ask_for_end(watcher);
    bool is_awaited = code == CP_AGAIN;
    watcher->is_idle = !is_awaited && watcher->graphs == NULL;
    CP_TRY(look_for_odd_calls(watcher));
    if (watcher->is_idle || (code != CP_OK && !is_awaited)) {
        return code;
    }
    CP_TRY(cp_watch_check(watcher->watch));
    return look_at_waits(watcher, is_awaited ? on_gpu : in_graph);
}

/* In a broken context a call still waits for peers to leave the call before. They do so by
 * themselves, since their waits have been ended, as soon as their kernels have; but not the
 * dead, and nobody for longer than any wait may take. */
static void end_turns(struct cp_ipc_watcher *watcher)
{
    struct cp_watch *watch = watcher->watch;
    int64_t now_ns = cp_now_ns();
    if (load(&watcher->desk->is_over) == 0) {
        return;
    }
    if (watcher->broken_ns == 0) {
        watcher->broken_ns = now_ns;
    }
    int64_t broken_ns = now_ns - watcher->broken_ns;
    bool is_over = (double)broken_ns * 1e-9 > watcher->timeout;
    for (int rank = 0; rank < watch->world; rank++) {
        bool is_awaited = load(&watcher->desk->note[rank][CP_IPC_LEFT].value) != 0;
        is_over =
            is_over || (rank != watch->rank && is_awaited && broken_ns > dead_ns &&
                        watch->is_dead(watch->peers, rank));
    }
    if (is_over) {
        end_all_waits(watcher);
    }
}

static void look_and_judge(struct cp_ipc_watcher *watcher)
{
    if (look(watcher) != CP_OK) {
        struct cp_status reason = *cp_last_error();
        reason.rank = reason.rank < 0 ? watcher->watch->rank : reason.rank;
        cp_watch_poison(watcher->watch, &reason);
        cp_ipc_watcher_break(watcher);
    }
    end_turns(watcher);
}

/* Nothing is under way. The mutex is given up meanwhile, as wherever memory goes from here
 * on: the driver takes it away once the device has no work, whosever that is, and the
 * caller, who may close, does not wait for that. */
static void let_go_of_the_closing(struct cp_ipc_watcher *watcher)
{
    for (int rank = 0; rank < watcher->memory.world; rank++) {
        if (cp_ipc_memory_leave(&watcher->memory, rank)) {
            unlock(watcher);
            cp_ipc_memory_let_go(&watcher->memory, rank);
            lock(watcher);
        }
    }
}

/* ---- the end; the mutex is held ---- */

/* Is nothing of ours under way on the GPU any more? Sound work gets a while to end by
 * itself, then its waits are ended and it gets another, and then it is stuck. A device that
 * has failed does nothing. */
static bool have_calls_ended(struct cp_ipc_watcher *watcher)
{
    int64_t now_ns = cp_now_ns();
    bool is_whole = watcher->begun == watcher->ended;
    if (is_whole && ask_for_end(watcher) != CP_AGAIN) {
        return true;
    }
    if (watcher->drained_ns == 0) {
        watcher->drained_ns = now_ns + drain_ns;
    }
    bool is_late = now_ns >= watcher->drained_ns;
    bool is_over = (load(&watcher->desk->is_over) & CP_IPC_OVER_TURNS) != 0;
    if (!is_over && (is_late || !is_whole)) {
        end_all_waits(watcher);
        watcher->drained_ns = now_ns + drain_ns;
    }
    if (!is_whole) {
        /* No event stands for its work: the device did not take one. */
        unlock(watcher);
        (void)cudaDeviceSynchronize();
        (void)cudaGetLastError();
        lock(watcher);
        return true;
    }
    watcher->is_stuck = is_over && is_late;
    return watcher->is_stuck;
}

/* Who closes touches nothing that this does, nor that free_all does. */
static void let_go_of_all(struct cp_ipc_watcher *watcher)
{
    unlock(watcher);
    for (int rank = 0; rank < watcher->memory.world; rank++) {
        cp_ipc_memory_let_go(&watcher->memory, rank);
    }
    cp_ipc_memory_ask_back(&watcher->memory);
    lock(watcher);
}

/* The deadline of a launch: nobody else looks after it any more. */
static void end_late_launches(struct cp_ipc_watcher *watcher)
{
    int64_t now_ns = cp_now_ns();
    for (int rank = 0; rank < watcher->memory.world; rank++) {
        for (int signal = 0; signal < CP_IPC_SIGNALS; signal++) {
            if (is_seen_again(watcher, rank, signal, now_ns) &&
                waited(&watcher->seen[rank][signal], now_ns) > watcher->timeout) {
                end_all_waits(watcher);
            }
        }
    }
}

/* Does what can be done by now. Is there nothing more to wait for? */
static bool wind_up(struct cp_ipc_watcher *watcher)
{
    bool has_ended =
        watcher->has_let_go || watcher->is_stuck || have_calls_ended(watcher);
    if (watcher->graphs != NULL) {
        end_late_launches(watcher);
        return false;
    }
    if (!has_ended || watcher->is_stuck) {
        return has_ended;
    }
    if (!watcher->has_let_go) {
        let_go_of_all(watcher);
        watcher->has_let_go = true;
        (void)pthread_cond_broadcast(&watcher->changed);
    }
    return !cp_ipc_memory_is_used(&watcher->memory);
}

/* What was not made is NULL. */
static void free_desk(struct cp_ipc_watcher *watcher)
{
    if (watcher->desk != NULL) {
        (void)cudaFreeHost(watcher->desk);
    }
    for (int i = 0; i < CP_IPC_STREAMS; i++) {
        if (watcher->last[i] != NULL) {
            (void)cudaEventDestroy(watcher->last[i]);
        }
    }
    (void)cudaGetLastError();
}

/* Nobody uses it. */
static void free_all(struct cp_ipc_watcher *watcher)
{
    unlock(watcher);
    cp_ipc_memory_free(&watcher->memory);
    free_desk(watcher);
    lock(watcher);
    cp_ipc_memory_fini(&watcher->memory);
}

/* The struct and what it has of the host. */
static void free_watcher(struct cp_ipc_watcher *watcher)
{
    (void)pthread_cond_destroy(&watcher->changed);
    (void)pthread_mutex_destroy(&watcher->mutex);
    cp_mem_destroy(&watcher);
}

/* ---- the thread ---- */

/* The mutex is held, and given up meanwhile. */
static void wait_for_a_wake(struct cp_ipc_watcher *watcher, int ms)
{
    struct pollfd wake = {.fd = watcher->worker.wake_fd, .events = POLLIN};
    unlock(watcher);
    if (poll(&wake, 1, ms) > 0) {
        cp_worker_heed(&watcher->worker);
    }
    lock(watcher);
}

static void *run(void *arg)
{
    struct cp_ipc_watcher *watcher = arg;
    /* Otherwise the first call of the runtime would set up device 0 for this thread. */
    (void)cudaSetDevice(watcher->device);
    (void)cp_cuda_capture_leave();
    lock(watcher);
    while (!watcher->is_closing) {
        wait_for_a_wake(watcher, watcher->is_idle ? idle_look_ms : look_ms);
        if (!watcher->is_idle && !watcher->is_closing) {
            look_and_judge(watcher);
        }
        if (watcher->is_idle && !watcher->is_closing) {
            let_go_of_the_closing(watcher);
        }
    }
    while (!wind_up(watcher)) {
        wait_for_a_wake(watcher, watcher->is_parked ? idle_look_ms : closing_look_ms);
    }
    if (!watcher->is_stuck) {
        free_all(watcher);
    }
    watcher->has_ended = true;
    bool is_parked = watcher->is_parked;
    (void)pthread_cond_broadcast(&watcher->changed);
    unlock(watcher);
    if (is_parked) {
        cp_worker_leave(&watcher->worker);
        free_watcher(watcher);
    }
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
    cp_thread_cond_init(&watcher->changed);
    CP_TRY_GOTO(code, make_desk(watcher), done);
    CP_TRY_GOTO(code, make_events(watcher), done);
    CP_TRY_GOTO(
        code,
        cp_ipc_memory_init(&watcher->memory, args->watch, args->boards, args->peers),
        done);
    code = cp_worker_start(&watcher->worker, run, watcher);
    if (code != CP_OK) {
        cp_ipc_memory_fini(&watcher->memory);
        goto done;
    }
    *out = watcher;
    return CP_OK;
done:
    free_desk(watcher);
    free_watcher(watcher);
    return code;
}

/* Is the memory of all that a call works on still there? The mutex is held. */
static enum cp_code check_peers(const struct cp_ipc_watcher *watcher)
{
    int own = watcher->watch->rank;
    for (int rank = 0; rank < watcher->watch->world; rank++) {
        if (rank != own && !cp_ipc_memory_uses(&watcher->memory, rank)) {
            return cp_fail_rank(CP_ERR_COMM, rank,
                                "rank %d has closed its context, whose memory rank %d "
                                "works on",
                                rank, own);
        }
    }
    return CP_OK;
}

enum cp_code cp_ipc_watcher_begin(struct cp_ipc_watcher *watcher)
{
    CP_TRY(cp_watch_check(watcher->watch));
    lock(watcher);
    enum cp_code code = check_peers(watcher);
    bool was_idle = watcher->is_idle;
    if (code == CP_OK) {
        watcher->begun += 1;
        watcher->is_idle = false;
    }
    unlock(watcher);
    if (code == CP_OK && was_idle) {
        cp_worker_wake(&watcher->worker);
    }
    return code;
}

/* A graph has gone; the thread may have waited for that at its end, and be gone itself
 * once it has the mutex. */
static void CUDART_CB release(void *arg)
{
    struct cp_held_graph *graph = arg;
    struct cp_ipc_watcher *watcher = graph->owner;
    lock(watcher);
    cp_held_graphs_remove(&watcher->graphs, graph);
    cp_worker_wake(&watcher->worker);
    unlock(watcher);
}

enum cp_code cp_ipc_watcher_capture(struct cp_ipc_watcher *watcher, cudaStream_t stream,
                                    uint64_t capture)
{
    struct cp_held_graph *graph = NULL;
    bool is_new = false;
    CP_TRY(cp_watch_check(watcher->watch));
    lock(watcher);
    enum cp_code code = check_peers(watcher);
    if (code == CP_OK) {
        code = cp_held_graphs_find(&watcher->graphs, capture, sizeof *graph, &graph,
                                   &is_new);
    }
    if (is_new) {
        graph->owner = watcher;
        watcher->is_idle = false;
        cp_worker_wake(&watcher->worker);
    }
    unlock(watcher);
    CP_TRY(code);
    return is_new ? cp_cuda_capture_hold(stream, release, graph) : CP_OK;
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

/* The mutex is held, and given up meanwhile: until the thread has ended, or has only
 * graphs or others to wait for. */
static void wait_for_the_end(struct cp_ipc_watcher *watcher)
{
    int64_t until_ns = cp_now_ns() + 2 * drain_ns + let_go_ns;
    bool has_let_go = false;
    while (!watcher->has_ended && watcher->graphs == NULL && cp_now_ns() < until_ns) {
        (void)cp_thread_cond_wait(&watcher->changed, &watcher->mutex, until_ns);
        if (watcher->has_let_go && !has_let_go) {
            has_let_go = true;
            until_ns = cp_now_ns() + let_go_ns;
        }
    }
}

void cp_ipc_watcher_destroy(struct cp_ipc_watcher **watcher)
{
    struct cp_ipc_watcher *w = *watcher;
    *watcher = NULL;
    if (w == NULL) {
        return;
    }
    if (w->worker.owner_pid != getpid()) {
        /* The thread is not here, and whoever held the mutex never lets it go. */
        cp_worker_end(&w->worker);
        cp_mem_destroy(&w);
        return;
    }
    lock(w);
    w->is_closing = true;
    if (cp_watch_is_poisoned(w->watch)) {
        cp_ipc_watcher_break(w);
    }
    cp_worker_wake(&w->worker);
    wait_for_the_end(w);
    bool is_parked = !w->has_ended;
    w->is_parked = is_parked;
    if (is_parked) {
        cp_ipc_memory_keep(&w->memory);
    }
    /* Parked, it may be freed as soon as the mutex is. */
    const struct cp_worker worker = w->worker;
    unlock(w);
    if (is_parked) {
        cp_worker_detach(&worker);
        return;
    }
    cp_worker_end(&w->worker);
    free_watcher(w);
}
