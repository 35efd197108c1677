/* How a kernel gets to the simulated device: C's side of simgpu_kernel.h. */
#ifndef SIMGPU_LAUNCH_H
#define SIMGPU_LAUNCH_H

#include "cuda_runtime.h"

#ifdef __cplusplus
extern "C" {
#endif

struct simgpu_size {
    unsigned x, y, z;
};

struct simgpu_kernel {
    const void *function;       /* for what cudaFuncSetAttribute said of it */
    void (*run)(void *closure); /* one thread of one block */
    void (*drop)(void *closure);
    void *closure; /* taken, also on failure */
    struct simgpu_size grid, block;
    size_t shared_bytes; /* dynamic */
    int has_barriers;    /* 0: the threads of a block run one after the other */
};

cudaError_t simgpu_enqueue_kernel(const struct simgpu_kernel *kernel,
                                  cudaStream_t stream);

/* What the threads of a running block call. */
void *simgpu_dynamic_shared(void);
void simgpu_barrier(int barrier, int threads); /* 0 threads: all that have not ended */
void simgpu_fence(void);
void simgpu_nanosleep(unsigned ns);

/* What the lanes of a warp do together; every lane of `mask` comes with the same
 * operation. `source`: the lane to read, -1: the own. */
enum simgpu_warp_op { SIMGPU_WARP_SYNC, SIMGPU_WARP_SHUFFLE, SIMGPU_WARP_BALLOT };
unsigned long long simgpu_warp(enum simgpu_warp_op op, unsigned mask,
                               unsigned long long value, int source);
int simgpu_lane(void);

#ifdef __cplusplus
}
#endif

#endif
