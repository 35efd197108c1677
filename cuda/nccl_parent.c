/* Looks at the caller's communicator, and splits it. */
#include "nccl_parent.h"

#include <string.h>
#include <time.h>

bool cp_nccl_parent_fits(const struct cp_nccl *nccl, const struct cp_group *group,
                         int rank, int world, int device)
{
    ncclComm_t parent = group->communicator;
    int count = -1, own = -1, on = -1;
    /* Another copy of NCCL would take the handle for something else. */
    const void *library = NULL;
    memcpy(&library, &nccl->comm_split, sizeof library);
    return parent != NULL && group->library == library && group->name[0] != '\0' &&
           nccl->comm_count(parent, &count) == ncclSuccess && count == world &&
           nccl->comm_user_rank(parent, &own) == ncclSuccess && own == rank &&
           nccl->comm_cu_device(parent, &on) == ncclSuccess && on == device;
}

ncclConfig_t cp_nccl_child_config(const struct cp_group *group)
{
    ncclConfig_t config = cp_nccl_config();
    config.cgaClusterSize = group->settings[CP_NCCL_CLUSTER];
    config.minCTAs = group->settings[CP_NCCL_LEAST];
    config.maxCTAs = group->settings[CP_NCCL_MOST];
    return config;
}

ncclResult_t cp_nccl_split(const struct cp_nccl *nccl, ncclComm_t parent, int rank,
                           ncclConfig_t *config, ncclComm_t *child)
{
    const struct timespec moment = {.tv_nsec = 200000};
    if (cudaDeviceSynchronize() != cudaSuccess) {
        return ncclUnhandledCudaError;
    }
    ncclResult_t state = nccl->comm_split(parent, 0, rank, child, config);
    /* It is the parent that tells, where that is non-blocking. */
    while (state == ncclInProgress) {
        (void)nanosleep(&moment, NULL);
        ncclResult_t result = nccl->comm_get_async_error(parent, &state);
        state = result == ncclSuccess ? state : result;
    }
    return state;
}
