/* Tensor cores, and copies to shared memory that land later: sim_warp.c's side of what
 * sim_kernel.c lets the lanes of a warp do. */
#ifndef SIM_WARP_H
#define SIM_WARP_H

#include <stdbool.h>
#include <stdint.h>

#include "include/simgpu_launch.h"

/* A lane's part of simgpu_mma and simgpu_load_matrices. */
struct sim_mma {
    enum simgpu_mma_type type;
    float *sum;
    const uint32_t *a, *b;
};
struct sim_matrices {
    uint32_t *to;
    const uint32_t *row;
    bool is_transposed;
};
/* All 32 lanes have come: does it for each. */
void sim_mma(void *const lanes[]);
void sim_load_matrices(void *const lanes[]);

/* The copies of one thread that have not landed. */
struct sim_async {
    struct sim_copy *copies;
    int count, room;
    uint64_t groups; /* committed */
};
/* `is_early`: lands at once, which is as good as any other time before it is waited for. */
void sim_async_add(struct sim_async *async, void *to, const void *from, int bytes,
                   int read_bytes, bool is_early);
void sim_async_commit(struct sim_async *async);
/* All but the newest groups land. */
void sim_async_wait(struct sim_async *async, int newest);
/* The thread ends: all land. */
void sim_async_end(struct sim_async *async);
void sim_async_free(struct sim_async *async);

#endif
