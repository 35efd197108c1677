/* Small kernels for the tests of the stand-in itself. Each is one launch on `stream`. */
#ifndef TOY_KERNELS_H
#define TOY_KERNELS_H

#include <cuda_runtime.h>

#ifdef __cplusplus
extern "C" {
#endif

/* data[i] = data[i] * factor + term for i < count; no barriers. */
cudaError_t toy_scale(int *data, int count, int factor, int term, cudaStream_t stream);
/* out[block] = the sum of its 128 numbers, through shared memory, shuffles, a vote. */
cudaError_t toy_sum(int *out, const int *data, int blocks, cudaStream_t stream);
/* The same without shuffles: dynamic shared memory, a tree with a barrier a level; with
 * `skip_barrier` one is missing. */
cudaError_t toy_tree(int *out, const int *data, int blocks, int skip_barrier,
                     cudaStream_t stream);
/* *out += 1 by every thread of 4 blocks of 64, atomically. */
cudaError_t toy_count(int *out, cudaStream_t stream);
/* out[lane] = what up, down, xor and idx by 1 read in a warp of four groups of 8. */
cudaError_t toy_shuffle(int *up, int *down, int *by_xor, int *idx, cudaStream_t stream);
/* Half of the threads come to a barrier, the others wait for a shuffle. */
cudaError_t toy_diverge(cudaStream_t stream);
/* A barrier where none may be. */
cudaError_t toy_plain_barrier(cudaStream_t stream);
/* A launch with this block size and dynamic shared memory that does nothing. */
cudaError_t toy_nothing(unsigned block, size_t shared_bytes, cudaStream_t stream);
cudaError_t toy_allow_shared(int bytes);
/* data[at] = 1, wherever that is. */
cudaError_t toy_store(char *data, long at, cudaStream_t stream);

#ifdef __cplusplus
}
#endif

#endif
