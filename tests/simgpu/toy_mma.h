/* One launch for each wrapper of cuda/mma.cuh, whose registers come from memory and go
 * there: lane l's at l times their number. */
#ifndef TOY_MMA_H
#define TOY_MMA_H

#include <cuda_runtime.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* cp_mma of one warp: 4 registers of a, 2 of b, 4 of the sum a lane. */
cudaError_t toy_mma(int is_bf16, const uint32_t *a, const uint32_t *b, float *sum,
                    cudaStream_t stream);
/* cp_load_matrices: 4 matrices of 8 x 8 to 4 registers a lane. Row r of matrix m lies
 * `skew` bytes beside its place. */
cudaError_t toy_load_matrices(int is_transposed, const uint16_t *matrices,
                              uint32_t *out, int skew, cudaStream_t stream);
/* 32 lanes copy a word of 4, 8 or 16 bytes each to shared memory, odd lanes zeros, and in
 * a second group 4 bytes each; then they wait for all but `newest` groups, negative: for
 * none, and write down what is there. */
cudaError_t toy_copy_async(int bytes, const char *from, char *out, char *out_second,
                           int newest, cudaStream_t stream);
/* out[i] = cp_exp2(in[i]) for 32 numbers; pairs[i] = cp_pack(in[i], out[i]). */
cudaError_t toy_exp2(const float *in, float *out, uint32_t *bf16, uint32_t *f16,
                     cudaStream_t stream);

#ifdef __cplusplus
}
#endif

#endif
