/* Graphs: nodes, what a graph keeps, and launches.
 *
 * A launch gives copies of the nodes to streams of the executable graph, a chain to one
 * stream as far as that goes and marks between streams where a node comes behind others.
 * CUDA promises the order of the edges and no stream for each branch, so it draws how many
 * streams there are and in which order, of those that the edges allow, they get the nodes:
 * a node that waits for another rank may be in front of any that it is not behind. It begins
 * behind what its stream was given and behind the launch before, and its stream goes on
 * behind all of it. */
#include <stdlib.h>
#include <string.h>

#include "sim.h"

enum { LANES = 4 };

struct sim_node {
    struct sim_op *op; /* owned; NULL: nothing to do */
    struct sim_nodes after;
    int device;
    bool is_before; /* while somebody asks */
    /* Of the launch that is being made. */
    int lane;
    struct sim_mark *mark; /* behind it; NULL: no lane has been given it */
    struct sim_node *next;
};

struct CUuserObject_st {
    void *data;
    cudaHostFn_t destroy;
    int references;
};

/* Something that a graph holds: `object` or `data`. */
struct held {
    struct CUuserObject_st *object;
    int references;
    void *data; /* memory */
    bool is_freed;
    struct held *next;
};

/* Executable graphs and launches that are under way keep it too. */
struct CUgraph_st {
    uint32_t magic; /* SIM_GONE: it has been destroyed, and lives for others */
    int references;
    struct sim_node *first, **last;
    struct held *held;
};

struct CUgraphExec_st {
    uint32_t magic;
    cudaGraph_t graph;
    cudaStream_t lane[LANES];
    struct sim_mark *end; /* of the last launch; NULL: none */
    uint64_t random;
};

static int graph_count, destructors; /* locked */
static struct sim_cond no_destructor;

/* ---- nodes ---- */

void sim_nodes_add(struct sim_nodes *to, struct sim_node *node)
{
    for (int i = 0; i < to->count; i++) {
        if (to->node[i] == node) {
            return;
        }
    }
    if (to->count == to->room) {
        int room = to->room * 2 + 4;
        struct sim_node **more = sim_room((size_t)room * sizeof *more);
        if (to->count > 0) {
            memcpy(more, to->node, (size_t)to->count * sizeof *more);
        }
        free(to->node);
        to->node = more;
        to->room = room;
    }
    to->node[to->count++] = node;
}

void sim_nodes_copy(struct sim_nodes *to, const struct sim_nodes *from)
{
    for (int i = 0; i < from->count; i++) {
        sim_nodes_add(to, from->node[i]);
    }
}

void sim_nodes_free(struct sim_nodes *nodes)
{
    free(nodes->node);
    *nodes = (struct sim_nodes){NULL, 0, 0};
}

cudaGraph_t sim_graph_create(void)
{
    cudaGraph_t graph = SIM_ROOM(struct CUgraph_st);
    graph->magic = SIM_GRAPH;
    graph->references = 1;
    graph_count += 1;
    graph->last = &graph->first;
    return graph;
}

struct sim_node *sim_graph_add(cudaGraph_t graph, int device, struct sim_op *op,
                               const struct sim_nodes *after)
{
    struct sim_node *node = SIM_ROOM(struct sim_node);
    node->op = op;
    node->device = device;
    sim_nodes_copy(&node->after, after);
    *graph->last = node;
    graph->last = &node->next;
    return node;
}

static void mark_before(struct sim_node *node)
{
    if (!node->is_before) {
        node->is_before = true;
        for (int i = 0; i < node->after.count; i++) {
            mark_before(node->after.node[i]);
        }
    }
}

bool sim_graph_ends_in(cudaGraph_t graph, const struct sim_nodes *nodes)
{
    bool is_whole = true;
    for (int i = 0; i < nodes->count; i++) {
        mark_before(nodes->node[i]);
    }
    for (struct sim_node *node = graph->first; node; node = node->next) {
        is_whole = is_whole && node->is_before;
        node->is_before = false;
    }
    return is_whole;
}

/* ---- what a graph holds ---- */

static struct held *hold(cudaGraph_t graph)
{
    struct held *held = SIM_ROOM(struct held);
    held->next = graph->held;
    graph->held = held;
    return held;
}

void sim_graph_own(cudaGraph_t graph, void *data)
{
    hold(graph)->data = data;
}

bool sim_graph_disown(cudaGraph_t graph, void *data)
{
    for (struct held *held = graph->held; held; held = held->next) {
        if (held->data == data && !held->is_freed) {
            held->is_freed = true;
            return true;
        }
    }
    return false;
}

bool sim_graph_owns_nothing(const struct CUgraph_st *graph)
{
    bool is_nothing = true;
    for (const struct held *held = graph->held; held; held = held->next) {
        is_nothing = is_nothing && (!held->data || held->is_freed);
    }
    return is_nothing;
}

/* A thread of CUDA's own, some time later. */
static void *destroy_object(void *arg)
{
    struct CUuserObject_st *object = arg;
    uint64_t random = sim_settings.seed ^ (uint64_t)(uintptr_t)object;
    sim_in_host_function = true;
    sim_delay(&random);
    object->destroy(object->data);
    free(object);
    sim_lock();
    destructors -= 1;
    sim_wake(&no_destructor);
    sim_unlock();
    return NULL;
}

/* Unlocked. */
static void object_unref(struct CUuserObject_st *object, int references)
{
    pthread_t thread;
    sim_lock();
    object->references -= references;
    bool is_last = object->references == 0;
    destructors += is_last;
    sim_unlock();
    if (is_last && pthread_create(&thread, NULL, destroy_object, object) == 0) {
        (void)pthread_detach(thread);
    }
}

void sim_graph_reset(void)
{
    sim_lock();
    while (destructors > 0) {
        sim_wait(&no_destructor);
    }
    sim_unlock();
}

static void free_nodes(cudaGraph_t graph)
{
    sim_lock();
    while (graph->first) {
        struct sim_node *node = graph->first;
        graph->first = node->next;
        if (node->op && node->op->drop) {
            node->op->drop(node->op);
        }
        free(node->op);
        sim_nodes_free(&node->after);
        free(node);
    }
    sim_unlock();
}

static void free_held(cudaGraph_t graph)
{
    while (graph->held) {
        struct held *held = graph->held;
        graph->held = held->next;
        if (held->object) {
            object_unref(held->object, held->references);
        } else {
            sim_memory_free(held->data);
        }
        free(held);
    }
}

static void graph_unref(cudaGraph_t graph)
{
    sim_lock();
    graph->references -= 1;
    bool is_last = graph->references == 0;
    sim_unlock();
    if (is_last) {
        free_nodes(graph);
        free_held(graph);
        free(graph);
    }
}

void sim_graph_destroy(cudaGraph_t graph)
{
    sim_lock();
    graph->magic = SIM_GONE;
    graph_count -= 1;
    sim_unlock();
    graph_unref(graph);
}

int sim_graph_count(void)
{
    sim_lock();
    int count = graph_count;
    sim_unlock();
    return count;
}

static bool is_graph(cudaGraph_t graph)
{
    return graph && graph->magic == SIM_GRAPH;
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph)
{
    SIM_ENTER();
    if (!is_graph(graph)) {
        return sim_error(cudaErrorInvalidValue);
    }
    sim_graph_destroy(graph);
    return cudaSuccess;
}

/* ---- objects of the user's ---- */

cudaError_t cudaUserObjectCreate(cudaUserObject_t *out, void *data,
                                 cudaHostFn_t destroy, unsigned references,
                                 unsigned flags)
{
    SIM_ENTER();
    if (!destroy || references == 0 || flags != cudaUserObjectNoDestructorSync) {
        return sim_error(cudaErrorInvalidValue);
    }
    struct CUuserObject_st *object = SIM_ROOM(struct CUuserObject_st);
    object->data = data;
    object->destroy = destroy;
    object->references = (int)references;
    *out = object;
    return cudaSuccess;
}

cudaError_t cudaUserObjectRelease(cudaUserObject_t object, unsigned references)
{
    SIM_ENTER();
    if (references == 0) {
        return sim_error(cudaErrorInvalidValue);
    }
    object_unref(object, (int)references);
    return cudaSuccess;
}

cudaError_t cudaGraphRetainUserObject(cudaGraph_t graph, cudaUserObject_t object,
                                      unsigned references, unsigned flags)
{
    SIM_ENTER();
    if (!is_graph(graph) || references == 0 || flags > cudaGraphUserObjectMove) {
        return sim_error(cudaErrorInvalidValue);
    }
    sim_lock();
    struct held *held = hold(graph);
    held->object = object;
    held->references = (int)references;
    if (flags != cudaGraphUserObjectMove) {
        object->references += (int)references;
    }
    sim_unlock();
    return cudaSuccess;
}

/* ---- executable graphs ---- */

static int device_of(const struct CUgraph_st *graph)
{
    return graph->first ? graph->first->device : sim_current_device();
}

static bool is_of_one_device(const struct CUgraph_st *graph)
{
    bool is = true;
    for (const struct sim_node *node = graph->first; node; node = node->next) {
        is = is && node->device == graph->first->device;
    }
    return is;
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t *out, cudaGraph_t graph,
                                 unsigned long long flags)
{
    static int number = 1 << 20; /* locked; no stream of the caller's has it */
    SIM_ENTER();
    if (!is_graph(graph) || flags != 0) {
        return sim_error(cudaErrorInvalidValue);
    }
    if (!is_of_one_device(graph)) {
        return sim_error(cudaErrorNotSupported);
    }
    struct CUgraphExec_st *exec = SIM_ROOM(struct CUgraphExec_st);
    sim_lock();
    exec->magic = SIM_EXEC;
    exec->graph = graph;
    exec->random = sim_settings.seed ^ (uint64_t)number;
    for (int lane = 0; lane < LANES; lane++) {
        exec->lane[lane] = sim_stream_create_internal(device_of(graph), number++);
    }
    graph->references += 1;
    graph_count += 1;
    sim_unlock();
    *out = exec;
    return cudaSuccess;
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec)
{
    SIM_ENTER();
    if (!exec || exec->magic != SIM_EXEC) {
        return sim_error(cudaErrorInvalidValue);
    }
    sim_lock();
    graph_count -= 1;
    for (int lane = 0; lane < LANES; lane++) {
        sim_stream_close(exec->lane[lane]); /* what it has been given it still does */
    }
    if (exec->end) {
        sim_mark_unref(exec->end);
    }
    sim_unlock();
    graph_unref(exec->graph);
    free(exec);
    return cudaSuccess;
}

/* ---- launches ---- */

struct end_op {
    struct sim_op op;
    cudaGraph_t graph;
};

static void run_end(struct sim_op *op, cudaStream_t stream)
{
    (void)stream;
    graph_unref(((struct end_op *)op)->graph);
}

static struct sim_op *copy_of(const struct sim_op *op)
{
    struct sim_op *copy = sim_op_room(op->bytes);
    memcpy(copy, op, op->bytes);
    copy->next = NULL;
    copy->is_copy = true;
    return copy;
}

/* One launch. `last`: the node that a lane was given last; NULL: none in this launch. */
struct launch {
    struct CUgraphExec_st *exec;
    struct sim_mark *start;
    struct sim_node *last[LANES];
    int lanes; /* that it uses */
};

/* Where one of those before it was the last, or anywhere. */
static int choose_lane(struct launch *launch, const struct sim_node *node)
{
    uint64_t draw = sim_random(&launch->exec->random);
    for (int i = 0; i < node->after.count; i++) {
        const struct sim_node *before = node->after.node[i];
        if (launch->last[before->lane] == before) {
            return before->lane;
        }
    }
    return (int)(draw % (unsigned)launch->lanes);
}

static void give_node(struct launch *launch, struct sim_node *node)
{
    node->lane = choose_lane(launch, node);
    node->mark = sim_mark_create();
    cudaStream_t stream = launch->exec->lane[node->lane];
    if (!launch->last[node->lane]) {
        sim_push_await(stream, launch->start);
    }
    for (int i = 0; i < node->after.count; i++) {
        if (node->after.node[i]->lane != node->lane) {
            sim_push_await(stream, node->after.node[i]->mark);
        }
    }
    if (node->op) {
        sim_enqueue_locked(stream, copy_of(node->op));
    }
    sim_push_mark(stream, node->mark);
    launch->last[node->lane] = node;
}

static bool may_be_given(const struct sim_node *node)
{
    bool may = !node->mark;
    for (int i = 0; i < node->after.count; i++) {
        may = may && node->after.node[i]->mark;
    }
    return may;
}

/* Any of those that may be next; NULL: all have been given. */
static struct sim_node *draw_node(const struct launch *launch)
{
    struct sim_node *drawn = NULL;
    uint64_t seen = 0;
    for (struct sim_node *node = launch->exec->graph->first; node; node = node->next) {
        if (may_be_given(node)) {
            seen += 1;
            drawn = sim_random(&launch->exec->random) % seen == 0 ? node : drawn;
        }
    }
    return drawn;
}

/* Locked. */
static void launch_graph(struct CUgraphExec_st *exec, cudaStream_t stream)
{
    struct launch launch = {.exec = exec, .start = sim_mark_create()};
    launch.lanes = 1 + (int)(sim_random(&exec->random) % LANES);
    if (exec->end) {
        sim_push_await(stream, exec->end);
        sim_mark_unref(exec->end);
    }
    sim_push_mark(stream, launch.start);
    for (struct sim_node *node = draw_node(&launch); node; node = draw_node(&launch)) {
        give_node(&launch, node);
    }
    for (int lane = 0; lane < LANES; lane++) {
        if (launch.last[lane]) {
            sim_push_await(stream, launch.last[lane]->mark);
        }
    }
    exec->end = sim_mark_create();
    sim_push_mark(stream, exec->end);
    for (struct sim_node *node = exec->graph->first; node; node = node->next) {
        sim_mark_unref(node->mark);
        node->mark = NULL;
    }
    sim_mark_unref(launch.start);
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream)
{
    SIM_ENTER();
    stream = sim_stream(stream);
    if (!stream || !exec || exec->magic != SIM_EXEC) {
        return sim_error(cudaErrorInvalidValue);
    }
    struct end_op *end = SIM_OP(struct end_op);
    end->op.name = "end of a graph";
    end->op.run = run_end;
    end->graph = exec->graph;
    sim_lock();
    bool is_wrong = stream->device != device_of(exec->graph) || stream->capture;
    if (!is_wrong) {
        exec->graph->references += 1;
        launch_graph(exec, stream);
        sim_enqueue_locked(stream, &end->op);
    }
    sim_unlock();
    if (is_wrong) {
        free(end);
    }
    return sim_error(is_wrong ? cudaErrorNotSupported : cudaSuccess);
}
