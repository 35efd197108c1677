/* Lists of batches, whose room is used again. */
#include "nccl_graphs.h"

#include "base/mem.h"
#include "capture.h"
#include "cuda_check.h"

enum { IN_LIST = 64 };

struct cp_nccl_captured_list {
    struct cp_nccl_captured_list *next;
    uint64_t *counts; /* (IN_LIST, 2), owned: pinned memory of the host */
    int used;
    struct cp_nccl_captured captured[IN_LIST];
};

static struct cp_nccl_graph *nccl_graph(struct cp_held_graph *graph)
{
    return (struct cp_nccl_graph *)graph;
}

static uint64_t load(const uint64_t *count)
{
    /* acquire: pairs with the device's store. */
    return __atomic_load_n(count, __ATOMIC_ACQUIRE);
}

static void free_list(struct cp_nccl_captured_list *list)
{
    if (list->counts != NULL) {
        (void)cudaFreeHost(list->counts);
    }
    cp_mem_destroy(&list);
}

static enum cp_code create_list(int world, struct cp_nccl_captured_list **out)
{
    void *block = NULL;
    size_t flags = IN_LIST * (size_t)world * sizeof(bool);
    CP_TRY(cp_mem_create(sizeof(struct cp_nccl_captured_list) + flags,
                         "the batches of a graph", &block));
    struct cp_nccl_captured_list *list = block;
    bool *has_peer = (bool *)(list + 1);
    enum cudaStreamCaptureMode before = cp_cuda_capture_leave();
    enum cp_code code = cp_cuda_check(cudaHostAlloc((void **)&list->counts,
                                                    IN_LIST * 2 * sizeof *list->counts,
                                                    cudaHostAllocDefault),
                                      "cudaHostAlloc for a graph");
    cp_cuda_capture_enter(before);
    if (code != CP_OK) {
        free_list(list);
        return code;
    }
    for (int i = 0; i < IN_LIST; i++) {
        struct cp_nccl_captured *captured = &list->captured[i];
        captured->purpose.has_peer = has_peer + (size_t)i * (size_t)world;
        captured->begun = &list->counts[2 * i];
        captured->ended = &list->counts[2 * i + 1];
    }
    *out = list;
    return CP_OK;
}

/* Room for one more batch of the graph. */
static enum cp_code make_room(struct cp_nccl_graphs *graphs,
                              struct cp_nccl_graph *graph)
{
    struct cp_nccl_captured_list *list = graph->all;
    if (list != NULL && list->used < IN_LIST) {
        return CP_OK;
    }
    list = graphs->spare;
    if (list != NULL) {
        graphs->spare = list->next;
    } else {
        CP_TRY(create_list(graphs->world, &list));
    }
    list->used = 0;
    list->next = graph->all;
    graph->all = list;
    return CP_OK;
}

enum cp_code cp_nccl_graphs_find(struct cp_nccl_graphs *graphs, uint64_t capture,
                                 struct cp_nccl_graph **out, bool *is_new)
{
    struct cp_held_graph *graph = NULL;
    CP_TRY(cp_held_graphs_find(&graphs->alive, capture, sizeof **out, &graph, is_new));
    *out = nccl_graph(graph);
    return CP_OK;
}

enum cp_code cp_nccl_graphs_add(struct cp_nccl_graphs *graphs,
                                struct cp_nccl_graph *graph,
                                const struct cp_xfer *xfers, int count, uint64_t call,
                                struct cp_nccl_captured **out)
{
    CP_TRY(make_room(graphs, graph));
    struct cp_nccl_captured *captured = &graph->all->captured[graph->all->used];
    cp_nccl_purpose_set(&captured->purpose, graphs->world, xfers, count, call);
    *captured->begun = *captured->ended = 0; /* no launch of this graph is under way */
    captured->begun_ns = captured->dead_ns = 0;
    graph->all->used += 1;
    *out = captured;
    return CP_OK;
}

void cp_nccl_graphs_remove(struct cp_nccl_graphs *graphs, struct cp_nccl_graph *graph)
{
    while (graph->all != NULL) {
        struct cp_nccl_captured_list *list = graph->all;
        graph->all = list->next;
        list->next = graphs->spare;
        graphs->spare = list;
    }
    cp_held_graphs_remove(&graphs->alive, &graph->head);
}

/* Is a launch at it? Notes since when. */
static bool is_under_way(struct cp_nccl_captured *captured, int64_t now_ns)
{
    uint64_t ended = load(captured->ended);
    uint64_t begun = load(captured->begun); /* after it, so that it is no less */
    if (begun == ended) {
        captured->begun_ns = 0;
        return false;
    }
    if (captured->begun_ns == 0 || captured->seen != begun) {
        captured->seen = begun;
        captured->begun_ns = now_ns;
        captured->dead_ns = 0;
    }
    return true;
}

enum cp_code cp_nccl_graphs_look(
    struct cp_nccl_graphs *graphs, int64_t now_ns,
    enum cp_code (*judge)(void *arg, struct cp_nccl_captured *captured, int64_t now_ns),
    void *arg)
{
    for (struct cp_held_graph *graph = graphs->alive; graph != NULL;
         graph = graph->next) {
        for (struct cp_nccl_captured_list *list = nccl_graph(graph)->all; list != NULL;
             list = list->next) {
            for (int i = 0; i < list->used; i++) {
                if (is_under_way(&list->captured[i], now_ns)) {
                    CP_TRY(judge(arg, &list->captured[i], now_ns));
                }
            }
        }
    }
    return CP_OK;
}

void cp_nccl_graphs_clear(struct cp_nccl_graphs *graphs)
{
    while (graphs->spare != NULL) {
        struct cp_nccl_captured_list *list = graphs->spare;
        graphs->spare = list->next;
        free_list(list);
    }
}
