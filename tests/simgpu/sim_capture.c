/* Stream capture: which streams are in which, what that forbids, and what becomes of events.
 *
 * A stream enters a capture by an event of it, and leaves at the end of the whole. That a
 * fork is joined is asked of nodes: entering is one, though it does nothing. */
#include <stdlib.h>

#include "sim.h"

struct sim_capture {
    uint64_t id;
    cudaGraph_t graph; /* owned */
    cudaStream_t origin;
    pthread_t thread; /* that began it */
    enum cudaStreamCaptureMode mode;
    bool is_spoilt;
    struct sim_capture *next;
};

/* All locked. */
static struct sim_capture *captures; /* under way */
static uint64_t capture_count;

static _Thread_local enum cudaStreamCaptureMode thread_mode;

static bool forbids(const struct sim_capture *capture)
{
    bool is_own = pthread_equal(capture->thread, pthread_self());
    return is_own ? capture->mode != cudaStreamCaptureModeRelaxed
                  : capture->mode == cudaStreamCaptureModeGlobal &&
                        thread_mode == cudaStreamCaptureModeGlobal;
}

cudaError_t sim_capture_forbids(void)
{
    bool is_forbidden = false;
    sim_lock();
    for (struct sim_capture *c = captures; c; c = c->next) {
        if (thread_mode != cudaStreamCaptureModeRelaxed && forbids(c)) {
            c->is_spoilt = is_forbidden = true;
        }
    }
    sim_unlock();
    return is_forbidden ? cudaErrorStreamCaptureUnsupported : cudaSuccess;
}

cudaError_t sim_capture_spoil(cudaStream_t stream)
{
    sim_lock();
    bool is_captured = stream->capture;
    if (is_captured) {
        stream->capture->is_spoilt = true;
    }
    sim_unlock();
    return is_captured ? cudaErrorStreamCaptureUnsupported : cudaSuccess;
}

cudaGraph_t sim_capture_graph(cudaStream_t stream)
{
    return stream->capture ? stream->capture->graph : NULL;
}

/* `op` NULL: a node that does nothing. */
static void add(cudaStream_t stream, struct sim_op *op)
{
    struct sim_node *node =
        sim_graph_add(stream->capture->graph, stream->device, op, &stream->after);
    sim_nodes_free(&stream->after);
    sim_nodes_add(&stream->after, node);
}

void sim_capture_take(cudaStream_t stream, struct sim_op *op)
{
    add(stream, op);
}

void sim_capture_record(cudaEvent_t event, cudaStream_t stream)
{
    event->capture = stream->capture->id;
    sim_nodes_copy(&event->after, &stream->after);
}

static struct sim_capture *find(uint64_t id)
{
    struct sim_capture *capture = captures;
    while (capture && capture->id != id) {
        capture = capture->next;
    }
    return capture;
}

cudaError_t sim_capture_await(cudaStream_t stream, cudaEvent_t event)
{
    struct sim_capture *capture = find(event->capture);
    if (event->capture && !capture) {
        /* It has ended. */
        if (stream->capture) {
            stream->capture->is_spoilt = true;
        }
        return cudaErrorCapturedEvent;
    }
    if (!capture) {
        stream->capture->is_spoilt = true;
        return cudaErrorStreamCaptureIsolation;
    }
    if (stream->number == 0) {
        capture->is_spoilt = true;
        return cudaErrorStreamCaptureImplicit;
    }
    if (stream->capture && stream->capture != capture) {
        stream->capture->is_spoilt = capture->is_spoilt = true;
        return cudaErrorStreamCaptureMerge;
    }
    bool is_fork = !stream->capture;
    stream->capture = capture;
    for (int i = 0; i < event->after.count; i++) {
        sim_nodes_add(&stream->after, event->after.node[i]);
    }
    if (is_fork) {
        add(stream, NULL);
    }
    return cudaSuccess;
}

cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *mode)
{
    enum cudaStreamCaptureMode before = thread_mode;
    if (*mode > cudaStreamCaptureModeRelaxed) {
        return sim_error(cudaErrorInvalidValue);
    }
    thread_mode = *mode;
    *mode = before;
    return cudaSuccess;
}

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, enum cudaStreamCaptureMode mode)
{
    SIM_ENTER();
    stream = sim_stream(stream);
    if (!stream) {
        return sim_error(cudaErrorInvalidResourceHandle);
    }
    if (stream->number == 0) {
        return sim_error(cudaErrorStreamCaptureUnsupported);
    }
    sim_lock();
    bool is_captured = stream->capture;
    if (!is_captured) {
        struct sim_capture *capture = SIM_ROOM(struct sim_capture);
        capture->id = ++capture_count;
        capture->graph = sim_graph_create();
        capture->origin = stream;
        capture->thread = pthread_self();
        capture->mode = mode;
        capture->next = captures;
        captures = capture;
        stream->capture = capture;
    }
    sim_unlock();
    return sim_error(is_captured ? cudaErrorStreamCaptureUnsupported : cudaSuccess);
}

/* Locked. */
static cudaError_t judge(const struct sim_capture *capture, cudaStream_t stream)
{
    if (capture->is_spoilt) {
        return cudaErrorStreamCaptureInvalidated;
    }
    return sim_graph_ends_in(capture->graph, &stream->after)
               ? cudaSuccess
               : cudaErrorStreamCaptureUnjoined;
}

cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *out)
{
    SIM_ENTER();
    *out = NULL;
    stream = sim_stream(stream);
    if (!stream) {
        return sim_error(cudaErrorInvalidResourceHandle);
    }
    sim_lock();
    struct sim_capture *capture = stream->capture;
    cudaError_t error = !capture ? cudaErrorInvalidValue : cudaSuccess;
    if (capture && capture->origin != stream) {
        capture->is_spoilt = true;
        error = cudaErrorStreamCaptureUnmatched;
    } else if (capture && capture->mode != cudaStreamCaptureModeRelaxed &&
               !pthread_equal(capture->thread, pthread_self())) {
        error = cudaErrorStreamCaptureWrongThread;
    }
    if (error != cudaSuccess) {
        sim_unlock();
        return sim_error(error);
    }
    error = judge(capture, stream);
    cudaGraph_t graph = capture->graph;
    bool is_whole = error != cudaSuccess || sim_graph_owns_nothing(graph);
    struct sim_capture **at = &captures;
    while (*at != capture) {
        at = &(*at)->next;
    }
    *at = capture->next;
    sim_stream_end_capture(capture);
    free(capture);
    sim_unlock();
    if (error == cudaSuccess) {
        *out = graph;
    } else {
        sim_graph_destroy(graph);
    }
    if (!is_whole) {
        sim_violate("a graph does not free memory that it allocates");
    }
    return sim_error(error);
}

cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream,
                                     enum cudaStreamCaptureStatus *status,
                                     unsigned long long *id, cudaGraph_t *graph,
                                     const cudaGraphNode_t **dependencies,
                                     const cudaGraphEdgeData **edges, size_t *count)
{
    SIM_ENTER();
    stream = sim_stream(stream);
    if (!stream) {
        return sim_error(cudaErrorInvalidResourceHandle);
    }
    if (dependencies || edges || count) {
        return sim_error(cudaErrorNotSupported);
    }
    sim_lock();
    struct sim_capture *capture = stream->capture;
    bool is_implied =
        stream->number == 0 && sim_stream_is_blocking_captured(stream->device);
    *status = !capture             ? cudaStreamCaptureStatusNone
              : capture->is_spoilt ? cudaStreamCaptureStatusInvalidated
                                   : cudaStreamCaptureStatusActive;
    if (capture && id) {
        *id = capture->id;
    }
    if (capture && graph) {
        *graph = capture->graph;
    }
    sim_unlock();
    return sim_error(is_implied ? cudaErrorStreamCaptureImplicit : cudaSuccess);
}
