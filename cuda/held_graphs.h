/* The CUDA graphs that are alive and have work of a communicator, each known by the number
 * of its capture. Not for several threads at once. */
#ifndef CP_CUDA_HELD_GRAPHS_H
#define CP_CUDA_HELD_GRAPHS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/status.h"

/* The head of what a communicator keeps for each. */
struct cp_held_graph {
    uint64_t capture;
    void *owner; /* the caller's */
    struct cp_held_graph *next;
};

/* The one that has this capture; where it is new, `is_new`, a zeroed struct of `bytes`
 * that begins with the head. */
CP_NODISCARD enum cp_code cp_held_graphs_find(struct cp_held_graph **alive,
                                              uint64_t capture, size_t bytes,
                                              struct cp_held_graph **out, bool *is_new);
/* It has gone. */
void cp_held_graphs_remove(struct cp_held_graph **alive, struct cp_held_graph *graph);

#endif
