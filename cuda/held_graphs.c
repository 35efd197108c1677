/* A list, the newest first. */
#include "held_graphs.h"

#include "base/mem.h"

enum cp_code cp_held_graphs_find(struct cp_held_graph **alive, uint64_t capture,
                                 size_t bytes, struct cp_held_graph **out, bool *is_new)
{
    struct cp_held_graph *graph = *alive;
    void *block = NULL;
    while (graph != NULL && graph->capture != capture) {
        graph = graph->next;
    }
    bool is_missing = graph == NULL;
    if (is_missing) {
        CP_TRY(cp_mem_create(bytes, "a graph", &block));
        graph = block;
        graph->capture = capture;
        graph->next = *alive;
        *alive = graph;
    }
    *out = graph;
    *is_new = is_missing;
    return CP_OK;
}

void cp_held_graphs_remove(struct cp_held_graph **alive, struct cp_held_graph *graph)
{
    struct cp_held_graph **at = alive;
    while (*at != graph) {
        at = &(*at)->next;
    }
    *at = graph->next;
    cp_mem_destroy(&graph);
}
