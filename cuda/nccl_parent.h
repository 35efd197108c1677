/* A communicator of the caller, from which NCCL makes another among the same ranks.
 *
 * The child is this library's own: it has its own resources, errors and abort, and
 * outlives its parent. The parent is used while it is made, and otherwise left alone. */
#ifndef CP_CUDA_NCCL_PARENT_H
#define CP_CUDA_NCCL_PARENT_H

#include <stdbool.h>

#include "exec/accelerator.h"
#include "nccl_dl.h"

/* What struct cp_group's settings are; CP_NCCL_UNDEFINED: NCCL's default. */
enum {
    CP_NCCL_CLUSTER, /* cgaClusterSize */
    CP_NCCL_LEAST,   /* minCTAs */
    CP_NCCL_MOST     /* maxCTAs */
};

/* Is it a communicator of this very library, with these ranks on these devices, as far as
 * this rank can see? */
bool cp_nccl_parent_fits(const struct cp_nccl *nccl, const struct cp_group *group,
                         int rank, int world, int device);

/* The configuration of a child: that of cp_nccl_config, with the group's settings. */
ncclConfig_t cp_nccl_child_config(const struct cp_group *group);

/* Makes the child, or says why not. All ranks call it; it waits for all of them, as long
 * as it takes, and before that for all work of the current device: NCCL wants none
 * outstanding on the parent. */
ncclResult_t cp_nccl_split(const struct cp_nccl *nccl, ncclComm_t parent, int rank,
                           ncclConfig_t *config, ncclComm_t *child);

#endif
