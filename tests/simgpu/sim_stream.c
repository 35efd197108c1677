/* Streams, their order, and events. */
#include <stdio.h>
#include <stdlib.h>

#include "sim.h"

struct mark_op {
    struct sim_op op;
    struct sim_mark *mark;
};

struct host_op {
    struct sim_op op;
    cudaHostFn_t function;
    void *data;
};

/* All locked. A stream that was destroyed stays in the list until simgpu_reset, so that
 * its late use is seen. */
static struct CUstream_st *streams;
static struct CUevent_st *events;
static struct CUstream_st *default_streams[SIMGPU_DEVICES];
static int stream_count;

struct sim_mark *sim_mark_create(void)
{
    struct sim_mark *mark = SIM_ROOM(struct sim_mark);
    mark->references = 1;
    return mark;
}

static struct sim_mark *mark_ref(struct sim_mark *mark)
{
    mark->references += 1;
    return mark;
}

void sim_mark_unref(struct sim_mark *mark)
{
    mark->references -= 1;
    if (mark->references == 0) {
        free(mark);
    }
}

static void run_mark(struct sim_op *op, cudaStream_t stream)
{
    struct sim_mark *mark = ((struct mark_op *)op)->mark;
    (void)stream;
    sim_release(mark);
    sim_lock();
    mark->is_reached = true;
    sim_wake(&mark->reached);
    sim_unlock();
}

static void run_await(struct sim_op *op, cudaStream_t stream)
{
    struct sim_mark *mark = ((struct mark_op *)op)->mark;
    (void)stream;
    sim_lock();
    while (!mark->is_reached) {
        sim_wait(&mark->reached);
    }
    sim_acquire(mark);
    sim_unlock();
}

static void drop_mark(struct sim_op *op)
{
    sim_mark_unref(((struct mark_op *)op)->mark);
}

static void run_host(struct sim_op *op, cudaStream_t stream)
{
    struct host_op *self = (struct host_op *)op;
    (void)stream;
    sim_in_host_function = true;
    self->function(self->data);
    sim_in_host_function = false;
}

static void *work(void *arg)
{
    struct CUstream_st *stream = arg;
    sim_lock();
    for (;;) {
        while (!stream->first && !stream->is_closing) {
            sim_wait(&stream->work);
        }
        struct sim_op *op = stream->first;
        if (!op) {
            break;
        }
        stream->first = op->next;
        if (!stream->first) {
            stream->last = &stream->first;
        }
        stream->running = op;
        int slow_us = stream->slow_us;
        sim_unlock();

        sim_acquire(op);
        sim_sleep_us(slow_us);
        sim_delay(&stream->random);
        op->run(op, stream);
        sim_release(&stream->clock);

        sim_lock();
        stream->running = NULL;
        stream->done += 1;
        sim_wake(&stream->progress);
        if (op->drop && !op->is_copy) {
            op->drop(op);
        }
        free(op);
    }
    stream->device = -1; /* nobody is in it any more */
    sim_wake(&stream->progress);
    sim_unlock();
    return NULL;
}

/* Locked. */
static cudaStream_t stream_create(int device, bool is_blocking, int number)
{
    struct CUstream_st *stream = SIM_ROOM(struct CUstream_st);
    stream->magic = SIM_STREAM;
    stream->device = device;
    stream->number = number;
    stream->is_blocking = is_blocking;
    stream->random = sim_settings.seed ^ ((uint64_t)(device * 1000 + number) << 20);
    stream->last = &stream->first;
    stream->next = streams;
    streams = stream;
    pthread_attr_t attributes;
    (void)pthread_attr_init(&attributes);
    (void)pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    if (pthread_create(&stream->thread, &attributes, work, stream) != 0) {
        (void)fprintf(stderr, "simgpu: no thread for a stream\n");
        abort();
    }
    (void)pthread_attr_destroy(&attributes);
    return stream;
}

static cudaStream_t default_stream(int device)
{
    sim_lock();
    if (!default_streams[device]) {
        default_streams[device] = stream_create(device, false, 0);
    }
    cudaStream_t stream = default_streams[device];
    sim_unlock();
    return stream;
}

cudaStream_t sim_stream(cudaStream_t stream)
{
    if (!stream || stream == cudaStreamLegacy) {
        return default_stream(sim_current_device());
    }
    if (stream->magic != SIM_STREAM) {
        sim_violate("a stream is used after it was destroyed");
        return NULL;
    }
    return stream;
}

void simgpu_slow_stream(cudaStream_t stream, int us)
{
    sim_lock();
    stream->slow_us = us;
    sim_unlock();
}

/* Without the default stream's order. */
void sim_push(cudaStream_t stream, struct sim_op *op)
{
    op->next = NULL;
    op->number = stream->given += 1;
    *stream->last = op;
    stream->last = &op->next;
    sim_release(op);
    sim_wake(&stream->work);
}

static struct sim_op *mark_op_create(const char *name, struct sim_mark *mark,
                                     void (*run)(struct sim_op *, cudaStream_t))
{
    struct mark_op *self = SIM_OP(struct mark_op);
    self->op.name = name;
    self->op.run = run;
    self->op.drop = drop_mark;
    self->mark = mark_ref(mark);
    return &self->op;
}

void sim_push_mark(cudaStream_t stream, struct sim_mark *mark)
{
    sim_push(stream, mark_op_create("mark", mark, run_mark));
}

void sim_push_await(cudaStream_t stream, struct sim_mark *mark)
{
    sim_push(stream, mark_op_create("wait for a mark", mark, run_await));
}

/* `stream` waits for what `other` has been given. */
static void follow(cudaStream_t stream, cudaStream_t other)
{
    if (other->given == 0) {
        return;
    }
    struct sim_mark *mark = sim_mark_create();
    sim_push_mark(other, mark);
    sim_push(stream, mark_op_create("wait for the default stream", mark, run_await));
    sim_mark_unref(mark);
}

cudaStream_t sim_stream_create_internal(int device, int number)
{
    cudaStream_t stream = stream_create(device, false, number);
    stream->is_internal = true;
    return stream;
}

void sim_stream_close(cudaStream_t stream)
{
    stream->magic = SIM_GONE;
    stream->is_closing = true;
    sim_wake(&stream->work);
}

bool sim_stream_is_blocking_captured(int device)
{
    bool is_captured = false;
    for (cudaStream_t s = streams; s; s = s->next) {
        is_captured =
            is_captured || (s->is_blocking && s->device == device && s->capture);
    }
    return is_captured;
}

void sim_stream_end_capture(struct sim_capture *capture)
{
    for (cudaStream_t s = streams; s; s = s->next) {
        if (s->capture == capture) {
            s->capture = NULL;
            sim_nodes_free(&s->after);
        }
    }
}

void sim_enqueue_locked(cudaStream_t stream, struct sim_op *op)
{
    cudaStream_t first = default_streams[stream->device];
    if (stream->capture) {
        sim_capture_take(stream, op);
        return;
    }
    if (stream->number == 0) {
        for (cudaStream_t s = streams; s; s = s->next) {
            if (s->is_blocking && s->device == stream->device && !s->is_closing) {
                follow(stream, s);
            }
        }
    } else if (stream->is_blocking && first) {
        follow(stream, first);
    }
    if (op->give) {
        op->give(op, stream);
    } else {
        sim_push(stream, op);
    }
}

void sim_enqueue(cudaStream_t stream, struct sim_op *op)
{
    sim_lock();
    sim_enqueue_locked(stream, op);
    sim_unlock();
}

static int64_t patience_end(void)
{
    return sim_now_ns() + (int64_t)(sim_settings.patience * 1e9);
}

/* Locked; unlocks. */
static cudaError_t impatient(const char *what)
{
    char text[SIMGPU_TEXT - 200];
    sim_report_locked(text, sizeof text);
    sim_unlock();
    sim_violate("%s waited %.1f s. %s", what, sim_settings.patience, text);
    return sim_error(cudaErrorUnknown);
}

cudaError_t sim_wait_for_stream(cudaStream_t stream)
{
    int64_t end = patience_end();
    sim_lock();
    uint64_t given = stream->given;
    while (stream->done < given) {
        if (!sim_wait_until(&stream->progress, end) && stream->done < given) {
            return impatient("the host");
        }
    }
    sim_unlock();
    sim_acquire(&stream->clock);
    return cudaSuccess;
}

cudaError_t sim_wait_for_device(int device)
{
    cudaStream_t list[1024];
    int count = 0;
    sim_lock();
    for (cudaStream_t s = streams; s && count < 1024; s = s->next) {
        if (s->device == device) {
            list[count++] = s;
        }
    }
    sim_unlock();
    for (int i = 0; i < count; i++) {
        cudaError_t error = sim_wait_for_stream(list[i]);
        if (error != cudaSuccess) {
            return error;
        }
    }
    return cudaSuccess;
}

void sim_report_locked(char *text, size_t bytes)
{
    size_t at = 0;
    text[0] = '\0';
    for (cudaStream_t s = streams; s && at + 1 < bytes; s = s->next) {
        if (s->done == s->given) {
            continue;
        }
        char what[400] = "";
        if (s->running && s->running->describe) {
            s->running->describe(s->running, what, sizeof what);
        }
        int length = snprintf(
            text + at, bytes - at,
            "Stream %d of device %d is in operation %llu of %llu, %s%s%s. ", s->number,
            s->device, (unsigned long long)s->done + 1, (unsigned long long)s->given,
            s->running ? s->running->name : "about to begin", what[0] ? ": " : "",
            what);
        at += (size_t)length;
    }
}

void sim_stream_count(struct simgpu_live *live)
{
    sim_lock();
    for (cudaStream_t s = streams; s; s = s->next) {
        live->streams += s->number > 0 && !s->is_closing && !s->is_internal;
    }
    for (cudaEvent_t e = events; e; e = e->next) {
        live->events += e->magic == SIM_EVENT;
    }
    sim_unlock();
}

void sim_stream_reset(void)
{
    for (int device = 0; device < SIMGPU_DEVICES; device++) {
        (void)sim_wait_for_device(device);
    }
    sim_lock();
    for (cudaStream_t *at = &streams; *at;) {
        cudaStream_t stream = *at;
        while (stream->is_closing && stream->device >= 0) {
            sim_wait(&stream->progress);
        }
        if (stream->is_closing) {
            *at = stream->next;
            free(stream);
        } else {
            at = &stream->next;
        }
    }
    for (cudaEvent_t *at = &events; *at;) {
        cudaEvent_t event = *at;
        if (event->magic == SIM_GONE) {
            *at = event->next;
            free(event);
        } else {
            at = &event->next;
        }
    }
    sim_unlock();
}

cudaError_t cudaDeviceSynchronize(void)
{
    SIM_ENTER_UNSAFE();
    sim_nccl_check_waiting("cudaDeviceSynchronize");
    sim_lock();
    sim_stats[sim_current_device()].host_waits += 1;
    sim_unlock();
    cudaError_t error = sim_wait_for_device(sim_current_device());
    return error == cudaSuccess ? sim_error(sim_leave()) : error;
}

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *out, unsigned flags,
                                         int priority)
{
    SIM_ENTER();
    (void)priority;
    if (flags > cudaStreamNonBlocking) {
        return sim_error(cudaErrorInvalidValue);
    }
    sim_lock();
    stream_count += 1;
    *out =
        stream_create(sim_current_device(), flags == cudaStreamDefault, stream_count);
    sim_unlock();
    return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *out, unsigned flags)
{
    return cudaStreamCreateWithPriority(out, flags, 0);
}

cudaError_t cudaStreamCreate(cudaStream_t *out)
{
    return cudaStreamCreateWithPriority(out, cudaStreamDefault, 0);
}

cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest)
{
    SIM_ENTER();
    *least = 0;
    *greatest = -5;
    return cudaSuccess;
}

cudaError_t cudaStreamDestroy(cudaStream_t stream)
{
    if (!stream || stream == cudaStreamLegacy) {
        return sim_error(cudaErrorInvalidResourceHandle);
    }
    stream = sim_stream(stream);
    if (!stream) {
        return sim_error(cudaErrorInvalidResourceHandle);
    }
    sim_lock();
    sim_stream_close(stream);
    sim_unlock();
    return sim_error(sim_leave());
}

cudaError_t cudaStreamQuery(cudaStream_t stream)
{
    SIM_ENTER_UNSAFE();
    stream = sim_stream(stream);
    if (!stream) {
        return sim_error(cudaErrorInvalidResourceHandle);
    }
    cudaError_t spoilt = sim_capture_spoil(stream);
    if (spoilt != cudaSuccess) {
        return sim_error(spoilt);
    }
    sim_lock();
    bool is_done = stream->done == stream->given;
    sim_unlock();
    if (is_done) {
        sim_acquire(&stream->clock);
    }
    return sim_error(is_done ? cudaSuccess : cudaErrorNotReady);
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream)
{
    SIM_ENTER_UNSAFE();
    sim_nccl_check_waiting("cudaStreamSynchronize");
    stream = sim_stream(stream);
    if (!stream) {
        return sim_error(cudaErrorInvalidResourceHandle);
    }
    cudaError_t spoilt = sim_capture_spoil(stream);
    if (spoilt != cudaSuccess) {
        return sim_error(spoilt);
    }
    sim_lock();
    sim_stats[stream->device].host_waits += 1;
    sim_unlock();
    cudaError_t error = sim_wait_for_stream(stream);
    return error == cudaSuccess ? sim_error(sim_leave()) : error;
}

cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void *data)
{
    SIM_ENTER();
    stream = sim_stream(stream);
    if (!stream) {
        return sim_error(cudaErrorInvalidResourceHandle);
    }
    struct host_op *self = SIM_OP(struct host_op);
    self->op.name = "host function";
    self->op.run = run_host;
    self->function = function;
    self->data = data;
    sim_enqueue(stream, &self->op);
    return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *out, unsigned flags)
{
    SIM_ENTER();
    (void)flags;
    struct CUevent_st *event = SIM_ROOM(struct CUevent_st);
    event->magic = SIM_EVENT;
    event->device = sim_current_device();
    sim_lock();
    event->next = events;
    events = event;
    sim_unlock();
    *out = event;
    return cudaSuccess;
}

cudaError_t cudaEventCreate(cudaEvent_t *out)
{
    return cudaEventCreateWithFlags(out, cudaEventDefault);
}

static bool is_event(cudaEvent_t event)
{
    if (!event) {
        return false;
    }
    if (event->magic != SIM_EVENT) {
        sim_violate("an event is used after it was destroyed");
        return false;
    }
    return true;
}

/* Locked: what was recorded last. */
static void event_clear(cudaEvent_t event)
{
    if (event->mark) {
        sim_mark_unref(event->mark);
    }
    event->mark = NULL;
    event->capture = 0;
    sim_nodes_free(&event->after);
}

/* Nobody can ask when a node has happened. */
static bool is_captured(cudaEvent_t event)
{
    sim_lock();
    bool is = event->capture != 0;
    sim_unlock();
    return is;
}

cudaError_t cudaEventDestroy(cudaEvent_t event)
{
    if (!is_event(event)) {
        return sim_error(cudaErrorInvalidResourceHandle);
    }
    sim_lock();
    event->magic = SIM_GONE;
    event_clear(event);
    sim_unlock();
    return sim_error(sim_leave());
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream)
{
    SIM_ENTER();
    stream = sim_stream(stream);
    if (!stream || !is_event(event) || stream->device != event->device) {
        return sim_error(cudaErrorInvalidResourceHandle);
    }
    sim_lock();
    sim_stats[stream->device].records += 1;
    event_clear(event);
    if (stream->capture) {
        sim_capture_record(event, stream);
    } else {
        event->mark = sim_mark_create();
        sim_enqueue_locked(stream,
                           mark_op_create("record of an event", event->mark, run_mark));
    }
    sim_unlock();
    return cudaSuccess;
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags)
{
    SIM_ENTER();
    stream = sim_stream(stream);
    if (!stream || !is_event(event) || flags != cudaEventWaitDefault) {
        return sim_error(cudaErrorInvalidResourceHandle);
    }
    cudaError_t error = cudaSuccess;
    sim_lock();
    sim_stats[stream->device].awaits += 1;
    if (stream->capture || event->capture) {
        error = sim_capture_await(stream, event);
    } else if (event->mark) {
        sim_enqueue_locked(stream,
                           mark_op_create("wait for an event", event->mark, run_await));
    }
    sim_unlock();
    return sim_error(error);
}

cudaError_t cudaEventQuery(cudaEvent_t event)
{
    SIM_ENTER_UNSAFE();
    if (!is_event(event)) {
        return sim_error(cudaErrorInvalidResourceHandle);
    }
    if (is_captured(event)) {
        return sim_error(cudaErrorCapturedEvent);
    }
    sim_lock();
    bool is_reached = !event->mark || event->mark->is_reached;
    if (is_reached && event->mark) {
        sim_acquire(event->mark);
    }
    sim_unlock();
    return sim_error(is_reached ? cudaSuccess : cudaErrorNotReady);
}

cudaError_t cudaEventSynchronize(cudaEvent_t event)
{
    SIM_ENTER_UNSAFE();
    sim_nccl_check_waiting("cudaEventSynchronize");
    if (!is_event(event)) {
        return sim_error(cudaErrorInvalidResourceHandle);
    }
    if (is_captured(event)) {
        return sim_error(cudaErrorCapturedEvent);
    }
    int64_t end = patience_end();
    sim_lock();
    sim_stats[event->device].host_waits += 1;
    struct sim_mark *mark = event->mark ? mark_ref(event->mark) : NULL;
    while (mark && !mark->is_reached) {
        if (!sim_wait_until(&mark->reached, end) && !mark->is_reached) {
            sim_mark_unref(mark);
            return impatient("cudaEventSynchronize");
        }
    }
    if (mark) {
        sim_acquire(mark);
        sim_mark_unref(mark);
    }
    sim_unlock();
    return sim_error(sim_leave());
}
