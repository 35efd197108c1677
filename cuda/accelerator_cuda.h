/* CUDA devices, connected by NCCL, as contexts know them. */
#ifndef CP_CUDA_ACCELERATOR_CUDA_H
#define CP_CUDA_ACCELERATOR_CUDA_H

#include "exec/accelerator.h"

extern const struct cp_accelerator cp_accelerator_cuda;

#endif
