/* Nodes are steps; an edge says that one is over before the other starts. */
#include "order.h"

#include <stdlib.h>
#include <string.h>

#include "schedule/verify_step.h"

struct graph {
    const struct cp_schedule *const *of_call;
    int world, count;
    int *rank;               /* by node */
    int32_t *step;           /* by node */
    int first[CP_MAX_WORLD]; /* node of a rank's step 0 */
    bool *edge;              /* (count, count): directly, then at all */
};

static const struct cp_step *step_of(const struct graph *graph, int node)
{
    return &graph->of_call[graph->rank[node]]->steps[graph->step[node]];
}

static void add_edge(struct graph *graph, int from, int to)
{
    graph->edge[(size_t)from * (size_t)graph->count + (size_t)to] = true;
}

static bool is_ordered(const struct graph *graph, int from, int to)
{
    return graph->edge[(size_t)from * (size_t)graph->count + (size_t)to];
}

/* Where a step stands on its lane: how many steps are before it, and the first step of its unit: the
 * messages of one group in a row, or the step alone. A unit starts when its first step may. */
struct place {
    int32_t before, head;
};

static void find_places(const struct cp_schedule *schedule, struct place *places)
{
    int32_t count[CP_LANES] = {0};
    int32_t last[CP_LANES] = {0};
    for (int32_t i = 0; i < schedule->step_count; i++) {
        const struct cp_step *step = &schedule->steps[i];
        const struct cp_step *before = &schedule->steps[last[step->lane]];
        bool is_joined = count[step->lane] > 0 && cp_step_is_message(before) &&
                         cp_step_is_message(step) && before->group == step->group;
        places[i].before = count[step->lane];
        places[i].head = is_joined ? places[last[step->lane]].head : i;
        last[step->lane] = i;
        count[step->lane] += 1;
    }
}

/* Lane order and `after`, inside one rank. */
static bool add_own_edges(struct graph *graph, int rank)
{
    const struct cp_schedule *schedule = graph->of_call[rank];
    int base = graph->first[rank];
    struct place *places = calloc((size_t)schedule->step_count + 1, sizeof *places);
    if (places == NULL) {
        return false;
    }
    find_places(schedule, places);
    for (int32_t a = 0; a < schedule->step_count; a++) {
        int lane = schedule->steps[a].lane;
        for (int32_t b = 0; b < schedule->step_count; b++) {
            const struct cp_step *head = &schedule->steps[places[b].head];
            if (head->lane == lane ? places[a].head < places[b].head
                                   : places[a].before < head->after[lane]) {
                add_edge(graph, base + a, base + b);
            }
        }
    }
    free(places);
    return true;
}

/* From the publication that an AWAIT needs. False where there is none. */
static bool add_await_edge(struct graph *graph, int node)
{
    const struct cp_step *await = step_of(graph, node);
    const struct cp_schedule *peer = graph->of_call[await->peer];
    for (int32_t i = 0; i < peer->step_count; i++) {
        if (peer->steps[i].op == CP_STEP_PUBLISH &&
            peer->steps[i].signal == await->signal &&
            peer->steps[i].value >= await->value) {
            add_edge(graph, graph->first[await->peer] + i, node);
            return true;
        }
    }
    return false;
}

/* From the k-th send to the k-th receive between two ranks. */
static void add_message_edges(struct graph *graph, int from, int to)
{
    const struct cp_schedule *sender = graph->of_call[from];
    const struct cp_schedule *receiver = graph->of_call[to];
    int32_t s = 0;
    int32_t r = 0;
    for (;; s++, r++) {
        while (s < sender->step_count &&
               (sender->steps[s].op != CP_STEP_SEND || sender->steps[s].peer != to)) {
            s++;
        }
        while (r < receiver->step_count && (receiver->steps[r].op != CP_STEP_RECV ||
                                            receiver->steps[r].peer != from)) {
            r++;
        }
        if (s >= sender->step_count || r >= receiver->step_count) {
            return;
        }
        add_edge(graph, graph->first[from] + s, graph->first[to] + r);
    }
}

/* Is `to` reached from `from` whenever a path leads there (Warshall). */
static void close_graph(struct graph *graph)
{
    size_t n = (size_t)graph->count;
    for (size_t via = 0; via < n; via++) {
        for (size_t from = 0; from < n; from++) {
            if (graph->edge[from * n + via]) {
                for (size_t to = 0; to < n; to++) {
                    graph->edge[from * n + to] |= graph->edge[via * n + to];
                }
            }
        }
    }
}

static bool boxes_meet(const struct cp_box *a, const struct cp_box *b)
{
    bool meet = true;
    for (int axis = 0; axis < CP_AXES; axis++) {
        meet = meet && a->first[axis] < b->first[axis] + b->n[axis] &&
               b->first[axis] < a->first[axis] + a->n[axis];
    }
    return meet;
}

static const struct cp_buffer *buffer_of(const struct graph *graph, int node, int arg)
{
    const struct cp_step *step = step_of(graph, node);
    struct cp_op_args takes = cp_verify_op_args((enum cp_step_op)step->op);
    if ((((takes.needs | takes.may) >> arg) & 1) == 0 ||
        step->arg[arg].buffer == CP_NO_BUFFER ||
        cp_verify_box_is_empty(&step->arg[arg])) {
        return NULL;
    }
    return &graph->of_call[graph->rank[node]]->buffers[step->arg[arg].buffer];
}

static bool args_meet(const struct graph *graph, int a, int arg_a, int b, int arg_b)
{
    const struct cp_buffer *x = buffer_of(graph, a, arg_a);
    const struct cp_buffer *y = buffer_of(graph, b, arg_b);
    if (x == NULL || y == NULL || x->kind != y->kind || x->owner != y->owner) {
        return false;
    }
    const struct cp_box *box_x = &step_of(graph, a)->arg[arg_a];
    const struct cp_box *box_y = &step_of(graph, b)->arg[arg_b];
    if (x->kind == CP_BUFFER_INPUT || x->kind == CP_BUFFER_OUTPUT) {
        return x->role == y->role && boxes_meet(box_x, box_y);
    }
    if (cp_verify_same_shape(x, y)) {
        return boxes_meet(box_x, box_y);
    }
    struct cp_shape shape_x = cp_verify_shape(graph->of_call[0]->plan, x);
    struct cp_shape shape_y = cp_verify_shape(graph->of_call[0]->plan, y);
    struct cp_extent p = cp_verify_extent(&shape_x, box_x);
    struct cp_extent q = cp_verify_extent(&shape_y, box_y);
    return p.lo < q.hi && q.lo < p.hi;
}

static bool collide(const struct graph *graph, int a, int b)
{
    unsigned writes_a =
        cp_verify_op_args((enum cp_step_op)step_of(graph, a)->op).writes;
    unsigned writes_b =
        cp_verify_op_args((enum cp_step_op)step_of(graph, b)->op).writes;
    for (int i = 0; i < CP_STEP_ARGS; i++) {
        for (int j = 0; j < CP_STEP_ARGS; j++) {
            if ((((writes_a >> i) | (writes_b >> j)) & 1) != 0 &&
                args_meet(graph, a, i, b, j)) {
                return true;
            }
        }
    }
    return false;
}

static bool fill(struct graph *graph)
{
    bool is_whole = true;
    for (int rank = 0; rank < graph->world; rank++) {
        is_whole = add_own_edges(graph, rank) && is_whole;
        for (int peer = 0; peer < graph->world; peer++) {
            add_message_edges(graph, rank, peer);
        }
    }
    for (int node = 0; node < graph->count; node++) {
        is_whole = is_whole && (step_of(graph, node)->op != CP_STEP_AWAIT ||
                                add_await_edge(graph, node));
    }
    return is_whole;
}

static bool is_safe(struct graph *graph)
{
    if (!fill(graph)) {
        return false;
    }
    close_graph(graph);
    for (int a = 0; a < graph->count; a++) {
        if (is_ordered(graph, a, a)) {
            return false;
        }
        for (int b = a + 1; b < graph->count; b++) {
            if (!is_ordered(graph, a, b) && !is_ordered(graph, b, a) &&
                collide(graph, a, b)) {
                return false;
            }
        }
    }
    return true;
}

bool order_is_safe(const struct cp_schedule *const *of_call, int world)
{
    struct graph graph = {.of_call = of_call, .world = world};
    int nodes = 0;
    for (int rank = 0; rank < world; rank++) {
        nodes += of_call[rank]->step_count;
    }
    size_t n = (size_t)nodes + 1;
    graph.count = nodes;
    graph.rank = calloc(n, sizeof *graph.rank);
    graph.step = calloc(n, sizeof *graph.step);
    graph.edge = calloc(n * n, sizeof *graph.edge);
    bool answer = false;
    if (graph.rank != NULL && graph.step != NULL && graph.edge != NULL) {
        int node = 0;
        for (int rank = 0; rank < world; rank++) {
            graph.first[rank] = node;
            for (int32_t i = 0; i < of_call[rank]->step_count; i++, node++) {
                graph.rank[node] = rank;
                graph.step[node] = i;
            }
        }
        answer = is_safe(&graph);
    }
    free(graph.rank);
    free(graph.step);
    free(graph.edge);
    return answer;
}
