/* How a batch becomes one NCCL group on a stream. */
#ifndef CP_CUDA_NCCL_POST_H
#define CP_CUDA_NCCL_POST_H

#include <cuda_runtime.h>
#include <stdbool.h>

#include "comm/comm.h"
#include "nccl_dl.h"

/* What is in a batch. */
struct cp_nccl_parts {
    bool has_own;    /* messages to the own rank */
    bool has_others; /* messages to or from other ranks */
};

/* CP_ERR_INTERNAL where a peer does not exist, or a message to the own rank has only one
 * half or two different sizes. */
CP_NODISCARD enum cp_code cp_nccl_parts_of(const struct cp_xfer *xfers, int count,
                                           int rank, int world,
                                           struct cp_nccl_parts *out);

/* The messages to the own rank, as copies. The batch has passed cp_nccl_parts_of. */
CP_NODISCARD enum cp_code cp_nccl_copy_own(const struct cp_xfer *xfers, int count,
                                           int rank, cudaStream_t stream);

/* All others, as one group. ncclInProgress: NCCL's host thread is at it, and
 * ncclCommGetAsyncError tells when it is done. */
ncclResult_t cp_nccl_group(const struct cp_nccl *nccl, ncclComm_t comm,
                           const struct cp_xfer *xfers, int count, int rank,
                           cudaStream_t stream);

#endif
