/* How a kernel gets to the simulated device: C's side of simgpu_kernel.h. */
#ifndef SIMGPU_LAUNCH_H
#define SIMGPU_LAUNCH_H

#include <stdint.h>

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

/* What a whole warp does on a tensor core, as PTX's mma.m16n8k16 with float sums, and
 * ldmatrix.x4, whose lanes come with the 16 bytes at their address. */
enum simgpu_mma_type { SIMGPU_MMA_BF16, SIMGPU_MMA_F16 };
void simgpu_mma(enum simgpu_mma_type type, float sum[4], const uint32_t a[4],
                const uint32_t b[2]);
void simgpu_load_matrices(uint32_t to[4], const uint32_t row[4], int is_transposed);
int simgpu_is_matrix_row(const void *at); /* may it lie there? */

/* PTX's cp.async: lands when the thread waits for it at the latest, and what is there until
 * then counts for nothing. `read_bytes` of `bytes` are read, zeros follow. */
void simgpu_copy_async(void *to, const void *from, int bytes, int read_bytes);
void simgpu_commit_copies(void);
void simgpu_wait_for_copies(int newest); /* for all but the newest groups */

#ifdef __cplusplus
}
#endif

#endif
