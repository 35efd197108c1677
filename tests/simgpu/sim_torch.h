/* A simulated torch: the part of its C ABI that cuda/ uses, on simulated GPUs.
 *
 * It answers cp_torch_loaded in the place of cuda/torch_dl.c. Its ops work as torch's do:
 * on the current stream of the calling thread, with results that are freed in the order of
 * that stream, an lse that the efficient op pads to 32 rows with NaN and reads in as many,
 * and a refusal of every argument that is not in torch's rules. Gradients come of out and
 * lse as they are given. */
#ifndef SIM_TORCH_H
#define SIM_TORCH_H

#include <cuda_runtime.h>
#include <stdbool.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Whether this process has torch; no at first. Counts begin anew, without cuDNN. */
void simtorch_load(bool is_loaded);
/* As in struct cp_torch. */
void simtorch_set_cudnn(int64_t version);
/* The calling thread's current stream, of any device; the default one at first. */
void simtorch_set_stream(cudaStream_t stream);
/* The next op answers with one head too few, a gradient with one key head. */
void simtorch_spoil_next(void);
/* The next gradient fails. */
void simtorch_refuse_next(void);

struct simtorch_counts {
    int flash, efficient, cudnn; /* calls that were answered */
    int causal, grouped;         /* of those */
    int flash_gradient, efficient_gradient;
    int refused;
    int alive; /* tensors */
};
struct simtorch_counts simtorch_counts(void);

#ifdef __cplusplus
}
#endif

#endif
