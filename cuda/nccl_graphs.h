/* The batches of a NCCL communicator that were captured in CUDA graphs, and how far the
 * launches of those are.
 *
 * Nobody tells when a graph is launched, and an event of a capture cannot be asked. So each
 * batch has a number in front of it and one behind it, which the device counts up in memory
 * of the host: where they differ, a launch is at the batch. Not for several threads at once,
 * but for the numbers. */
#ifndef CP_CUDA_NCCL_GRAPHS_H
#define CP_CUDA_NCCL_GRAPHS_H

#include "held_graphs.h"
#include "nccl_batches.h"

struct cp_nccl_captured {
    struct cp_nccl_purpose purpose;
    uint64_t *begun, *ended; /* launches; the device's */
    /* For who watches: the launch that was seen at it, when first, and when one of its
     * peers was first seen dead in it; 0: not yet. */
    uint64_t seen;
    int64_t begun_ns, dead_ns;
};

struct cp_nccl_graph {
    struct cp_held_graph head;
    struct cp_nccl_captured_list *all; /* the newest first */
};

/* Graphs that are alive, and room for the batches of more. All zero: none. */
struct cp_nccl_graphs {
    int world;
    struct cp_held_graph *alive;         /* each the head of a struct cp_nccl_graph */
    struct cp_nccl_captured_list *spare; /* of graphs that have gone */
};

/* The graph that has this capture, made where it is new: `is_new`. */
CP_NODISCARD enum cp_code cp_nccl_graphs_find(struct cp_nccl_graphs *graphs,
                                              uint64_t capture,
                                              struct cp_nccl_graph **out, bool *is_new);
/* A batch of it; lives as long as the graph. The calling thread may be in a capture. */
CP_NODISCARD enum cp_code cp_nccl_graphs_add(struct cp_nccl_graphs *graphs,
                                             struct cp_nccl_graph *graph,
                                             const struct cp_xfer *xfers, int count,
                                             uint64_t call,
                                             struct cp_nccl_captured **out);
/* The graph has gone: its room is for others. */
void cp_nccl_graphs_remove(struct cp_nccl_graphs *graphs, struct cp_nccl_graph *graph);

/* What `judge` says of the batches that launches are at by now, the first that is not
 * CP_OK. */
CP_NODISCARD enum cp_code cp_nccl_graphs_look(
    struct cp_nccl_graphs *graphs, int64_t now_ns,
    enum cp_code (*judge)(void *arg, struct cp_nccl_captured *captured, int64_t now_ns),
    void *arg);

/* When no graph is alive; may wait for the device. */
void cp_nccl_graphs_clear(struct cp_nccl_graphs *graphs);

#endif
