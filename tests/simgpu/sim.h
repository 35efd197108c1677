/* What the files of the stand-in share. "Locked": with sim_lock held. */
#ifndef SIM_H
#define SIM_H

#include <pthread.h>

#include "sim_lock.h"
#include "simgpu.h"

/* An operation of a stream, or of a graph, whose launches give copies of it to streams. */
struct sim_op {
    struct sim_op *next;
    const char *name; /* "copy"; static */
    size_t bytes;     /* of the struct that it is the head of */
    bool is_copy;     /* what `drop` frees is the original's */
    /* Does it, unlocked, on the stream's thread. */
    void (*run)(struct sim_op *op, cudaStream_t stream);
    /* (optional) What it waits for at the moment, for reports; locked. */
    void (*describe)(const struct sim_op *op, char *text, size_t bytes);
    /* (optional) Gives it to a stream that is not being captured, locked; else it is pushed. */
    void (*give)(struct sim_op *op, cudaStream_t stream);
    /* (optional) Frees what it owns, locked, when it will not run any more. */
    void (*drop)(struct sim_op *op);
    uint64_t number; /* in its stream, from 1 */
};

/* What a stream had been given at some time: reached when it has done that. */
struct sim_mark {
    struct sim_cond reached;
    bool is_reached;
    int references;
};

/* Nodes of a graph that another comes behind. */
struct sim_nodes {
    struct sim_node **node;
    int count, room;
};

enum sim_magic {
    SIM_STREAM = 0x73747265,
    SIM_EVENT = 0x6576656e,
    SIM_GRAPH = 0x67726170,
    SIM_EXEC = 0x65786563,
    SIM_GONE = 0x676f6e65
};

struct CUstream_st {
    uint32_t magic;
    int device, number; /* of the device; in the order of creation, 0: default */
    bool is_blocking, is_closing;
    bool is_internal;            /* of an executable graph */
    struct sim_capture *capture; /* NULL: none is under way here */
    struct sim_nodes after; /* that the next one comes behind, while there is one */
    pthread_t thread;
    uint64_t random;
    int slow_us; /* locked */
    struct sim_op *first, **last, *running;
    uint64_t given, done; /* operations */
    struct sim_cond work, progress;
    char clock; /* its address carries what the stream has done to ThreadSanitizer */
    struct CUstream_st *next;
};

struct CUevent_st {
    uint32_t magic;
    int device;
    struct sim_mark *mark; /* NULL: never recorded, or in a capture */
    uint64_t capture;      /* that it was recorded in; 0: in none */
    struct sim_nodes after;
    struct CUevent_st *next;
};

/* sim_device.c */
struct sim_settings {
    uint64_t seed;
    int most_delay_us, devices;
    double patience;
    bool is_dry;
};
extern struct sim_settings sim_settings;
extern struct simgpu_stats sim_stats[SIMGPU_DEVICES]; /* locked */
extern _Thread_local bool sim_in_host_function;

/* Notes the calling thread's last error, and returns it. */
cudaError_t sim_error(cudaError_t error);
/* Every call begins with it: the error that the call is to fail with, if any. */
cudaError_t sim_enter(const char *function);
/* The same for calls that some captures forbid (sim_capture.c). */
#define SIM_ENTER_UNSAFE()                                                             \
    do {                                                                               \
        SIM_ENTER();                                                                   \
        cudaError_t sim_forbidden = sim_capture_forbids();                             \
        if (sim_forbidden != cudaSuccess) {                                            \
            return sim_error(sim_forbidden);                                           \
        }                                                                              \
    } while (0)
/* Calls that waited or gave something back end with it: the device's own error, if any. */
cudaError_t sim_leave(void);
#define SIM_ENTER()                                                                    \
    do {                                                                               \
        cudaError_t sim_injected = sim_enter(__func__);                                \
        if (sim_injected != cudaSuccess) {                                             \
            return sim_error(sim_injected);                                            \
        }                                                                              \
    } while (0)
/* A rule is broken; not locked. Returns where violations are kept. */
void sim_violate(const char *format, ...) __attribute__((format(printf, 1, 2)));
/* The device's memory cannot be trusted any more. */
void sim_break(int ordinal, cudaError_t error);
int sim_current_device(void);
void sim_delay(uint64_t *random);

/* sim_stream.c */
/* The stream meant, or NULL: it has been destroyed, which is a violation. */
cudaStream_t sim_stream(cudaStream_t stream);
/* Takes the operation. What CUDA says of the default stream is added; what is captured becomes a node. */
void sim_enqueue(cudaStream_t stream, struct sim_op *op);
/* The same, locked. */
void sim_enqueue_locked(cudaStream_t stream, struct sim_op *op);
/* Locked, as all of these. The operations that set a mark, and that wait for one. */
void sim_push(cudaStream_t stream, struct sim_op *op);
struct sim_mark *sim_mark_create(void);
void sim_mark_unref(struct sim_mark *mark);
void sim_push_mark(cudaStream_t stream, struct sim_mark *mark);
void sim_push_await(cudaStream_t stream, struct sim_mark *mark);
cudaStream_t sim_stream_create_internal(int device, int number);
void sim_stream_close(cudaStream_t stream);
/* Is a blocking stream of the device being captured? */
bool sim_stream_is_blocking_captured(int device);
/* They are not being captured any more. */
void sim_stream_end_capture(struct sim_capture *capture);
cudaError_t sim_wait_for_stream(cudaStream_t stream);
cudaError_t sim_wait_for_device(int device);
/* What every stream is doing. */
void sim_report_locked(char *text, size_t bytes);
void sim_stream_reset(void);
void sim_stream_count(struct simgpu_live *live);

/* sim_capture.c */
/* What is under way forbids what is unsafe on this thread: its error. */
cudaError_t sim_capture_forbids(void);
/* The stream is being captured, and its status is asked or waited for: the error of that. */
cudaError_t sim_capture_spoil(cudaStream_t stream);
/* Locked: what the stream is captured into, or NULL. */
cudaGraph_t sim_capture_graph(cudaStream_t stream);
/* Locked. The operation becomes a node. */
void sim_capture_take(cudaStream_t stream, struct sim_op *op);
/* Locked. */
void sim_capture_record(cudaEvent_t event, cudaStream_t stream);
cudaError_t sim_capture_await(cudaStream_t stream, cudaEvent_t event);

/* sim_graph.c; locked. */
cudaGraph_t sim_graph_create(void);
struct sim_node *sim_graph_add(cudaGraph_t graph, int device, struct sim_op *op,
                               const struct sim_nodes *after);
/* Does every node come before these, or is one of them? */
bool sim_graph_ends_in(cudaGraph_t graph, const struct sim_nodes *nodes);
/* The graph's own memory, and whether it has been freed in it. */
void sim_graph_own(cudaGraph_t graph, void *data);
bool sim_graph_disown(cudaGraph_t graph, void *data);
bool sim_graph_owns_nothing(const struct CUgraph_st *graph);
void sim_nodes_copy(struct sim_nodes *to, const struct sim_nodes *from);
void sim_nodes_add(struct sim_nodes *to, struct sim_node *node);
void sim_nodes_free(struct sim_nodes *nodes);
/* Unlocked. */
void sim_graph_destroy(cudaGraph_t graph);
int sim_graph_count(void);
/* Until no destructor of a user's object is under way. */
void sim_graph_reset(void);

/* sim_memory.c */
/* Are these bytes of one living block, of device memory where `must_be_device`? Says a
 * violation and breaks `device` where not. */
bool sim_memory_check(const void *data, size_t bytes, bool must_be_device, int device,
                      const char *what);
/* -1: not the stand-in's memory, or of the host. */
int sim_memory_device(const void *data);
/* Where the living block of device memory begins that holds it; NULL: there is none. */
void *sim_memory_base(const void *data);
/* What a graph owned. */
void sim_memory_free(void *data);
void sim_memory_reset(void);
int sim_memory_count(void);

/* sim_ipc.c */
/* Locked: has another process this block open? */
bool sim_ipc_is_open(const void *base);
/* Locked: may that device touch this block of that one? */
bool sim_ipc_may_touch(const void *base, int owner, int device);
int sim_ipc_count(void);
void sim_ipc_reset(void);

/* sim_copy.c */
/* In stream order, uncounted. */
void sim_fill(void *data, int value, size_t bytes, cudaStream_t stream);

/* sim_nccl.c */
/* The calling thread waits for the device: is a group open? */
void sim_nccl_check_waiting(const char *what);
int sim_nccl_count(void);
void sim_nccl_reset(void);

/* Room for an operation, the head of `type`. */
#define SIM_OP(type) ((type *)sim_op_room(sizeof(type)))
#define SIM_ROOM(type) ((type *)sim_room(sizeof(type)))
/* Zeroed; ends the process where there is none. */
void *sim_room(size_t bytes);
void *sim_op_room(size_t bytes);

#endif
