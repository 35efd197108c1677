/* The table "ipc". */
#include "comm_ipc.h"

#include "base/mem.h"
#include "capture.h"
#include "cuda_check.h"
#include "device_cuda.h"
#include "ipc_watcher.h"

struct comm_ipc {
    struct cp_comm head;
    struct cp_watch *watch;         /* borrowed; must outlive this */
    struct cp_ipc_watcher *watcher; /* owned */
    struct cp_ipc_ends ends;
    int device;
    bool is_captured; /* the call that is begun */
    struct cp_stream
        *streams[CP_IPC_STREAMS]; /* of the call that is begun: the caller's
                                                  first */
    int stream_count;
};

static struct comm_ipc *ipc_of(struct cp_comm *comm)
{
    return (struct comm_ipc *)comm;
}

/* Whatever reads a window is on a stream on which something was waited for, or on the
 * caller's. */
static void note_stream(struct comm_ipc *self, struct cp_stream *stream)
{
    int at = 0;
    while (at < self->stream_count && self->streams[at] != stream) {
        at += 1;
    }
    if (at == self->stream_count && at < CP_IPC_STREAMS) {
        self->streams[at] = stream;
        self->stream_count += 1;
    }
}

/* ---- on the own device ---- */

/* Windows are no part of a capture that the call may be part of. */
static enum cp_code reserve(struct comm_ipc *self, size_t bytes)
{
    struct cp_ipc_watcher *watcher = self->watcher;
    enum cudaStreamCaptureMode before = cp_cuda_capture_leave();
    (void)pthread_mutex_lock(&watcher->mutex);
    enum cp_code code = cp_ipc_memory_reserve(&watcher->memory, bytes);
    (void)pthread_mutex_unlock(&watcher->mutex);
    cp_cuda_capture_enter(before);
    return code;
}

static enum cp_code attach(struct comm_ipc *self)
{
    struct cp_ipc_watcher *watcher = self->watcher;
    enum cudaStreamCaptureMode before = cp_cuda_capture_leave();
    (void)pthread_mutex_lock(&watcher->mutex);
    enum cp_code code = cp_ipc_memory_attach(&watcher->memory);
    for (int rank = 0; rank < self->head.world; rank++) {
        self->ends.inbox[rank] = watcher->memory.inbox[rank];
    }
    (void)pthread_mutex_unlock(&watcher->mutex);
    cp_cuda_capture_enter(before);
    return code;
}

static enum cp_code begin(struct comm_ipc *self, const struct cp_comm_call *call)
{
    self->is_captured = call->capture != 0;
    self->stream_count = 0;
    if (self->is_captured) {
        CP_TRY(cp_ipc_watcher_capture(self->watcher, (cudaStream_t)call->stream,
                                      call->capture));
    } else {
        CP_TRY(cp_ipc_watcher_begin(self->watcher));
        note_stream(self, call->stream);
    }
    return cp_ipc_begin(&self->ends, cp_recorder_call(self->watch->recorder),
                        call->stream);
}

static enum cp_code end(struct comm_ipc *self, struct cp_stream *stream)
{
    CP_TRY(cp_ipc_end(&self->ends, stream));
    return self->is_captured ? CP_OK : cp_ipc_watcher_end(self->watcher, &stream, 1);
}

/* ---- the table ---- */

static enum cp_code ipc_reserve(struct cp_comm *comm, size_t bytes)
{
    int device = ipc_of(comm)->device, before = device;
    CP_TRY(cp_cuda_enter(device, &before));
    return cp_cuda_leave(device, before, reserve(ipc_of(comm), bytes));
}

static enum cp_code ipc_attach(struct cp_comm *comm)
{
    int device = ipc_of(comm)->device, before = device;
    CP_TRY(cp_cuda_enter(device, &before));
    return cp_cuda_leave(device, before, attach(ipc_of(comm)));
}

static void *ipc_window(struct cp_comm *comm, int rank)
{
    /* Written by attach alone, on this thread. */
    return ipc_of(comm)->watcher->memory.window[rank];
}

static enum cp_code ipc_publish(struct cp_comm *comm, int signal, uint64_t value,
                                struct cp_stream *stream)
{
    int device = ipc_of(comm)->device, before = device;
    CP_TRY(cp_cuda_enter(device, &before));
    return cp_cuda_leave(device, before,
                         cp_ipc_publish(&ipc_of(comm)->ends, signal, value, stream));
}

/* So many at a time as a kernel is told of. */
static enum cp_code await_all(const struct comm_ipc *self,
                              const struct cp_comm_wait *waits, int count,
                              struct cp_stream *stream)
{
    uint64_t call = cp_recorder_call(self->watch->recorder);
    for (int first = 0; first < count; first += CP_IPC_RANKS) {
        struct cp_ipc_waits some = {.count = 0};
        for (int i = first; i < count && some.count < CP_IPC_RANKS; i++) {
            some.of[some.count] = (struct cp_ipc_wait){.peer = waits[i].peer,
                                                       .signal = waits[i].signal,
                                                       .value = waits[i].value};
            some.count += 1;
        }
        CP_TRY(cp_ipc_await(&self->ends, &some, call, stream));
    }
    return CP_OK;
}

static enum cp_code ipc_reached(struct cp_comm *comm, const struct cp_comm_wait *waits,
                                int count, struct cp_stream *stream)
{
    struct comm_ipc *self = ipc_of(comm);
    int device = self->device, before = device;
    note_stream(self, stream);
    CP_TRY(cp_cuda_enter(device, &before));
    return cp_cuda_leave(device, before, await_all(self, waits, count, stream));
}

static enum cp_code ipc_begin(struct cp_comm *comm, const struct cp_comm_call *call)
{
    int device = ipc_of(comm)->device, before = device;
    CP_TRY(cp_cuda_enter(device, &before));
    return cp_cuda_leave(device, before, begin(ipc_of(comm), call));
}

static enum cp_code ipc_end(struct cp_comm *comm, struct cp_stream *stream)
{
    int device = ipc_of(comm)->device, before = device;
    CP_TRY(cp_cuda_enter(device, &before));
    return cp_cuda_leave(device, before, end(ipc_of(comm), stream));
}

static enum cp_code ipc_wait(struct cp_comm *comm, const struct cp_comm_wait *waits,
                             int count, const char *operation,
                             struct cp_deadline deadline)
{
    (void)waits;
    (void)count;
    (void)deadline;
    return cp_fail_rank(CP_ERR_INTERNAL, comm->rank,
                        "%s waits on the host for what GPUs do on their streams",
                        operation);
}

/* A call that is begun goes no further. The thread's sentence stays what it is. */
static void ipc_poison(struct cp_comm *comm, const struct cp_status *reason)
{
    struct comm_ipc *self = ipc_of(comm);
    struct cp_status own = *cp_last_error();
    int before = self->device;
    cp_watch_poison(self->watch, reason);
    cp_ipc_watcher_break(self->watcher);
    enum cp_code code = cp_cuda_enter(self->device, &before);
    if (code == CP_OK) {
        code = cp_cuda_leave(
            self->device, before,
            cp_ipc_watcher_end(self->watcher, self->streams, self->stream_count));
    }
    if (code != CP_OK) {
        (void)cp_fail_as(&own);
    }
}

static void ipc_close(struct cp_comm **comm)
{
    if (*comm == NULL) {
        return;
    }
    struct comm_ipc *self = ipc_of(*comm);
    int before = self->device;
    enum cp_code code = cp_cuda_enter(self->device, &before);
    cp_ipc_watcher_destroy(&self->watcher);
    if (code == CP_OK) {
        (void)cp_cuda_leave(self->device, before, CP_OK);
    }
    cp_mem_destroy(comm);
}

static const struct cp_comm_ops ipc_ops = {
    .name = "ipc",
    .abi = CP_COMM_ABI,
    .reserve = ipc_reserve,
    .attach = ipc_attach,
    .window = ipc_window,
    .publish = ipc_publish,
    .reached = ipc_reached,
    .begin = ipc_begin,
    .end = ipc_end,
    .wait = ipc_wait,
    .poison = ipc_poison,
    .close = ipc_close,
};

/* ---- creation ---- */

static enum cp_code create(const struct cp_comm_ipc_args *args, struct cp_comm **out)
{
    void *block = NULL;
    CP_TRY(cp_mem_create(sizeof(struct comm_ipc), "a communicator", &block));
    struct comm_ipc *self = block;
    struct cp_ipc_watcher_args with = {
        .watch = args->watch,
        .boards = args->boards,
        .peers = args->peers,
        .device = args->device,
        .timeout = args->timeout,
    };
    enum cp_code code = cp_ipc_watcher_create(&with, &self->watcher);
    if (code != CP_OK) {
        cp_mem_destroy(&self);
        return code;
    }
    self->head = (struct cp_comm){
        .ops = &ipc_ops, .rank = args->watch->rank, .world = args->watch->world};
    self->watch = args->watch;
    self->device = args->device;
    self->ends = (struct cp_ipc_ends){.desk = self->watcher->desk_of_device,
                                      .rank = args->watch->rank,
                                      .world = args->watch->world};
    *out = &self->head;
    return CP_OK;
}

enum cp_code cp_comm_ipc_create(const struct cp_comm_ipc_args *args,
                                struct cp_comm **out)
{
    int before = args->device;
    CP_TRY(cp_cuda_enter(args->device, &before));
    enum cp_code code = create(args, out);
    (void)cp_cuda_leave(args->device, before, code);
    return code;
}
