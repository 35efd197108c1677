/* The table "nccl": creation, posting, and handing over to the watcher. */
#include "comm_nccl.h"

#include <sched.h>
#include <stdio.h>

#include "base/mem.h"
#include "capture.h"
#include "cuda_api.h"
#include "cuda_check.h"
#include "device_cuda.h"
#include "nccl_post.h"
#include "nccl_watcher.h"

struct comm_nccl {
    struct cp_comm head;
    const struct cp_nccl *nccl;      /* borrowed */
    struct cp_watch *watch;          /* borrowed; must outlive this */
    struct cp_nccl_watcher *watcher; /* owned */
    int device;
    double timeout;
};

/* A host thread of NCCL enqueues each group; between connected ranks that is a matter of
 * a thread's start. Nobody rings a bell for it, so at first it is looked for without
 * sleeping. */
static const int64_t poll_ns = 2000000;

static const char connecting[] = "connecting the ranks by NCCL";
static const char enqueuing[] = "enqueuing a batch of NCCL";

static struct comm_nccl *nccl_of(struct cp_comm *comm)
{
    return (struct comm_nccl *)comm;
}

static void lock(struct comm_nccl *self)
{
    (void)pthread_mutex_lock(&self->watcher->mutex);
}

static void unlock(struct comm_nccl *self)
{
    (void)pthread_mutex_unlock(&self->watcher->mutex);
}

/* Breaks the context with the thread's own sentence and aborts. Returns the first
 * reason, which may be another's, as the thread's own. */
static enum cp_code give_up(struct comm_nccl *self, enum cp_code code)
{
    struct cp_status mine = *cp_last_error();
    mine.rank = mine.rank < 0 ? self->head.rank : mine.rank;
    bool is_interrupted = code == CP_ERR_INTERRUPTED;
    if (!is_interrupted) { /* else cp_watch_wait has told the others in its words */
        cp_watch_poison(self->watch, &mine);
    }
    cp_nccl_watcher_break(self->watcher);
    return is_interrupted ? cp_fail_as(&mine) : cp_watch_check(self->watch);
}

/* ---- waiting for NCCL's host threads ---- */

struct host_work {
    struct comm_nccl *self;
    const struct cp_xfer *xfers; /* NULL: a creation, which needs everybody */
    int count;
    struct cp_deadline deadline;
    int64_t needed_at_ns; /* from when on a peer's death counts */
    ncclResult_t *state;
};

static bool is_over(const void *arg)
{
    const struct host_work *work = arg;
    struct comm_nccl *self = work->self;
    ncclResult_t state = ncclInternalError; /* the watcher has aborted */
    lock(self);
    if (self->watcher->handle != NULL) {
        ncclResult_t result =
            self->nccl->comm_get_async_error(self->watcher->handle, &state);
        state = result == ncclSuccess ? state : result;
    } else if (self->watcher->parent != NULL) {
        state = ncclInProgress;
    } else if (self->watcher->split != ncclSuccess) {
        state = self->watcher->split;
    }
    unlock(self);
    *work->state = state;
    return state != ncclInProgress;
}

/* A peer that is done and gone may have left all that a batch needs; then NCCL's part
 * ends soon. NCCL does not say for whom it waits: at the deadline nobody is named as
 * missing, and the message tells what every rank is doing. */
static bool needs(const void *arg, int rank)
{
    const struct host_work *work = arg;
    bool is_needed = work->xfers == NULL;
    for (int i = 0; i < work->count && !is_needed; i++) {
        is_needed = work->xfers[i].peer == rank && work->xfers[i].bytes > 0;
    }
    return is_needed && cp_now_ns() >= work->needed_at_ns &&
           !cp_deadline_passed(work->deadline);
}

/* `state`: how it ended, well or badly. */
static enum cp_code wait_for_host(struct comm_nccl *self, const struct cp_xfer *xfers,
                                  int count, const char *operation, ncclResult_t *state)
{
    struct host_work work = {.self = self,
                             .xfers = xfers,
                             .count = count,
                             .deadline = cp_deadline_in(self->timeout),
                             .state = state};
    struct cp_wait wait = {
        .is_ready = is_over, .needs = needs, .arg = &work, .operation = operation};
    int64_t now_ns = cp_now_ns(), until_ns = now_ns + poll_ns;
    work.needed_at_ns = xfers != NULL ? now_ns + CP_NCCL_DEAD_NS : now_ns;
    while (!is_over(&work)) {
        if (cp_now_ns() >= until_ns) {
            return cp_watch_wait(self->watch, &wait, work.deadline);
        }
        (void)sched_yield();
    }
    return CP_OK;
}

static enum cp_code fail_nccl(struct comm_nccl *self, ncclResult_t result,
                              const char *what)
{
    /* Where the watcher has aborted, the reason is in the poison. */
    CP_TRY(cp_watch_check(self->watch));
    lock(self);
    enum cp_code code =
        cp_nccl_fail(self->nccl, self->watcher->handle, result, self->head.rank, what);
    unlock(self);
    return code;
}

/* ---- posting ---- */

static bool has_room(const void *arg)
{
    struct comm_nccl *self = ((const struct host_work *)arg)->self;
    /* Another thread's capture is no business of these batches. */
    enum cudaStreamCaptureMode before = cp_cuda_capture_leave();
    lock(self);
    struct cp_nccl_batches *batches = self->watcher->batches;
    /* An error of the device shows again in what is enqueued next. */
    bool is_ready =
        self->watcher->handle == NULL || cp_nccl_batches_has_room(batches) ||
        cp_nccl_batches_reap(batches) != CP_OK || cp_nccl_batches_has_room(batches);
    unlock(self);
    cp_cuda_capture_enter(before);
    return is_ready;
}

static bool needs_nobody(const void *arg, int rank)
{
    (void)arg;
    (void)rank;
    return false;
}

/* A host that is too far ahead waits for its own device; the watcher looks after the
 * peers meanwhile. */
static enum cp_code wait_for_room(struct comm_nccl *self)
{
    struct host_work work = {.self = self};
    struct cp_wait wait = {.is_ready = has_room,
                           .needs = needs_nobody,
                           .arg = &work,
                           .operation = "the oldest of many batches of NCCL"};
    return cp_watch_wait(self->watch, &wait, cp_deadline_in(self->timeout));
}

/* The mutex is held. `state`: how far NCCL has got with the group. */
static enum cp_code enqueue(struct comm_nccl *self, const struct cp_xfer *xfers,
                            int count, const struct cp_nccl_parts *parts,
                            cudaStream_t stream, ncclResult_t *state)
{
    ncclComm_t handle = self->watcher->handle;
    int rank = self->head.rank;
    if (handle == NULL) {
        return cp_fail(CP_ERR_COMM, "the work of NCCL has been aborted");
    }
    CP_TRY(cp_nccl_copy_own(xfers, count, rank, stream));
    *state = parts->has_others
                 ? cp_nccl_group(self->nccl, handle, xfers, count, rank, stream)
                 : ncclSuccess;
    return CP_OK;
}

/* What the stream is to do, without what is watched; when it returns NCCL has enqueued it. */
static enum cp_code give(struct comm_nccl *self, const struct cp_xfer *xfers, int count,
                         const struct cp_nccl_parts *parts, cudaStream_t stream)
{
    ncclResult_t state = ncclSuccess;
    lock(self);
    enum cp_code code = enqueue(self, xfers, count, parts, stream, &state);
    unlock(self);
    if (code == CP_OK && state == ncclInProgress) {
        code = wait_for_host(self, xfers, count, enqueuing, &state);
    }
    if (code == CP_OK && state != ncclSuccess) {
        code = fail_nccl(self, state, "enqueue a batch");
    }
    return code;
}

/* Between two events: from then on it is the watcher's business. */
static enum cp_code post_now(struct comm_nccl *self, const struct cp_xfer *xfers,
                             int count, const struct cp_nccl_parts *parts,
                             cudaStream_t stream, uint64_t *ticket)
{
    struct cp_nccl_batches *batches = self->watcher->batches;
    CP_TRY(wait_for_room(self));
    lock(self);
    enum cp_code code = cp_nccl_batches_begin(
        batches, xfers, count, cp_recorder_call(self->watch->recorder), stream);
    unlock(self);
    CP_TRY(code);
    CP_TRY(give(self, xfers, count, parts, stream));
    lock(self);
    code = cp_nccl_batches_end(batches, stream);
    *ticket = batches->posted;
    cp_nccl_watcher_wake(self->watcher);
    unlock(self);
    return code;
}

/* Between two numbers that each launch of the graph counts up. */
static enum cp_code post_captured(struct comm_nccl *self, uint64_t capture,
                                  const struct cp_xfer *xfers, int count,
                                  const struct cp_nccl_parts *parts,
                                  cudaStream_t stream)
{
    struct cp_nccl_captured *captured = NULL;
    CP_TRY(cp_nccl_watcher_capture(self->watcher, stream, capture, xfers, count,
                                   cp_recorder_call(self->watch->recorder), &captured));
    CP_TRY(cp_cuda_note(captured->begun, (struct cp_stream *)stream));
    CP_TRY(give(self, xfers, count, parts, stream));
    return cp_cuda_note(captured->ended, (struct cp_stream *)stream);
}

static enum cp_code post(struct comm_nccl *self, const struct cp_xfer *xfers, int count,
                         cudaStream_t stream, uint64_t *ticket)
{
    struct cp_nccl_parts parts;
    uint64_t capture = 0;
    *ticket = 0; /* nothing to wait for */
    CP_TRY(cp_watch_check(self->watch));
    CP_TRY(cp_nccl_parts_of(xfers, count, self->head.rank, self->head.world, &parts));
    if (!parts.has_own && !parts.has_others) {
        return CP_OK;
    }
    CP_TRY(cp_cuda_capture(stream, &capture));
    return capture != 0 ? post_captured(self, capture, xfers, count, &parts, stream)
                        : post_now(self, xfers, count, &parts, stream, ticket);
}

static enum cp_code nccl_post(struct cp_comm *comm, const struct cp_xfer *xfers,
                              int count, struct cp_stream *stream, uint64_t *ticket)
{
    struct comm_nccl *self = nccl_of(comm);
    uint64_t posted = 0;
    int before = 0;
    /* The default stream, events and a new communicator are those of the current device. */
    enum cp_code code = cp_cuda_enter(self->device, &before);
    if (code == CP_OK) {
        code = post(self, xfers, count, (cudaStream_t)stream, &posted);
        (void)cp_cuda_leave(self->device, before, code);
    }
    if (code != CP_OK) {
        return give_up(self, code);
    }
    *ticket = posted;
    return CP_OK;
}

/* ---- the other entries ---- */

/* What is enqueued is in the order of its stream. Asynchronous errors are the watcher's
 * business; it poisons the context. */
static enum cp_code nccl_test(struct cp_comm *comm, uint64_t ticket)
{
    (void)ticket;
    return cp_watch_check(nccl_of(comm)->watch);
}

static enum cp_code nccl_wait(struct cp_comm *comm, const struct cp_comm_wait *waits,
                              int count, const char *operation,
                              struct cp_deadline deadline)
{
    (void)waits;
    (void)count;
    (void)deadline;
    return cp_fail_rank(CP_ERR_INTERNAL, comm->rank,
                        "%s waits on the host for what NCCL does on a stream",
                        operation);
}

static void nccl_poison(struct cp_comm *comm, const struct cp_status *reason)
{
    struct comm_nccl *self = nccl_of(comm);
    cp_watch_poison(self->watch, reason);
    cp_nccl_watcher_break(self->watcher);
}

static void nccl_close(struct cp_comm **comm)
{
    if (*comm != NULL) {
        cp_nccl_watcher_destroy(&nccl_of(*comm)->watcher);
        cp_mem_destroy(comm);
    }
}

static const struct cp_comm_ops nccl_ops = {
    .name = "nccl",
    .abi = CP_COMM_ABI,
    .post = nccl_post,
    .test = nccl_test,
    .wait = nccl_wait,
    .poison = nccl_poison,
    .close = nccl_close,
};

/* ---- creation ---- */

enum cp_code cp_comm_nccl_id(const struct cp_nccl *nccl, ncclUniqueId *out)
{
    ncclResult_t result = nccl->get_unique_id(out);
    return result == ncclSuccess
               ? CP_OK
               : cp_nccl_fail(nccl, NULL, result, 0, "make an id for NCCL");
}

/* By the id. */
static ncclResult_t begin_by_id(struct comm_nccl *self, ncclUniqueId id)
{
    ncclConfig_t config = cp_nccl_config();
    ncclComm_t handle = NULL;
    lock(self);
    ncclResult_t state = self->nccl->comm_init_rank_config(
        &handle, self->head.world, id, self->head.rank, &config);
    self->watcher->handle = handle;
    unlock(self);
    return state;
}

static ncclResult_t begin_by_group(struct comm_nccl *self, const struct cp_group *group)
{
    ncclConfig_t config = cp_nccl_child_config(group);
    lock(self);
    cp_nccl_watcher_split(self->watcher, group->communicator, &config);
    unlock(self);
    return ncclInProgress;
}

static enum cp_code connect_ranks(struct comm_nccl *self,
                                  const struct cp_comm_nccl_args *args)
{
    char what[96];
    ncclResult_t state = args->group != NULL ? begin_by_group(self, args->group)
                                             : begin_by_id(self, args->id);
    if (state == ncclInProgress || state == ncclSuccess) {
        CP_TRY(wait_for_host(self, NULL, 0, connecting, &state));
    }
    if (state == ncclSuccess) {
        return CP_OK;
    }
    (void)snprintf(what, sizeof what, "use device %d with NCCL%s", args->device,
                   state == ncclInvalidUsage ? " (each rank needs a GPU of its own)"
                                             : "");
    return fail_nccl(self, state, what);
}

static enum cp_code create(const struct cp_comm_nccl_args *args, struct cp_comm **out)
{
    void *block = NULL;
    CP_TRY(cp_mem_create(sizeof(struct comm_nccl), "a communicator", &block));
    struct comm_nccl *self = block;
    struct cp_comm *comm = &self->head;
    self->head = (struct cp_comm){
        .ops = &nccl_ops, .rank = args->watch->rank, .world = args->watch->world};
    self->nccl = args->nccl;
    self->watch = args->watch;
    self->device = args->device;
    self->timeout = args->timeout;
    enum cp_code code = cp_nccl_watcher_create(args->nccl, args->watch, args->device,
                                               args->timeout, &self->watcher);
    if (code == CP_OK) {
        code = connect_ranks(self, args);
        code = code == CP_OK ? CP_OK : give_up(self, code);
    }
    if (code != CP_OK) {
        nccl_close(&comm);
        return code;
    }
    *out = comm;
    return CP_OK;
}

enum cp_code cp_comm_nccl_create(const struct cp_comm_nccl_args *args,
                                 struct cp_comm **out)
{
    int before = 0;
    enum cp_code code = cp_cuda_enter(args->device, &before);
    if (code == CP_OK) {
        code = create(args, out);
        (void)cp_cuda_leave(args->device, before, code);
    }
    if (code != CP_OK) {
        struct cp_status reason = *cp_last_error();
        reason.rank = reason.rank < 0 ? args->watch->rank : reason.rank;
        cp_watch_poison(args->watch, &reason);
    }
    return code;
}
