/* Ranks that are threads with a simulated GPU, joined by windows between the GPUs: as
 * threads of one process, as processes, and several on one GPU. */
#ifndef CP_TESTS_IPCS_H
#define CP_TESTS_IPCS_H

#include "comm_ipc.h"
#include "gpus.h"

static inline void ipcs_open_on(struct world *w, int devices, bool are_apart)
{
    simgpu_reset();
    simgpu_seed(test_seed);
    simgpu_set_device_count(devices);
    for (int device = 0; device < devices && are_apart; device++) {
        simgpu_set_process(device, device);
    }
    w->shared = NULL;
}

static inline enum cp_code ipcs_join_by(struct world *w, int rank, int devices,
                                        bool are_apart, struct cp_context_parts *parts)
{
    struct cp_ipc_peer peers[CP_IPC_RANKS];
    for (int other = 0; other < w->size; other++) {
        peers[other] = (struct cp_ipc_peer){.device = other % devices,
                                            .is_local = !are_apart || other == rank};
    }
    CP_TRY(gpus_use(w, rank, rank % devices, parts));
    struct cp_comm_ipc_args args = {
        .watch = &w->watch[rank],
        .boards = {.of = cp_page_boards(w->page, w->size), .in = w->mapping},
        .peers = peers,
        .device = rank % devices,
        .timeout = gpus_timeout,
    };
    return cp_comm_ipc_create(&args, &parts->comm);
}

/* ---- threads ---- */

static inline void ipcs_open(struct world *w)
{
    ipcs_open_on(w, w->size, false);
}

static inline enum cp_code ipcs_join(struct world *w, int rank,
                                     struct cp_context_parts *parts)
{
    return ipcs_join_by(w, rank, w->size, false, parts);
}

/* ---- processes ---- */

static inline void ipcs_open_apart(struct world *w)
{
    ipcs_open_on(w, w->size, true);
}

static inline enum cp_code ipcs_join_apart(struct world *w, int rank,
                                           struct cp_context_parts *parts)
{
    return ipcs_join_by(w, rank, w->size, true, parts);
}

/* ---- fewer GPUs than ranks ---- */

static inline void ipcs_open_shared(struct world *w)
{
    ipcs_open_on(w, (w->size + 1) / 2, false);
}

static inline enum cp_code ipcs_join_shared(struct world *w, int rank,
                                            struct cp_context_parts *parts)
{
    return ipcs_join_by(w, rank, (w->size + 1) / 2, false, parts);
}

static const struct world_transport ipcs = {
    .name = "windows of GPUs, threads",
    .open = ipcs_open,
    .close = gpus_close,
    .join = ipcs_join,
    .leave = gpus_leave,
    .stream = gpus_stream,
    .take = gpus_take,
    .give = gpus_give,
};

static const struct world_transport ipcs_apart = {
    .name = "windows of GPUs, processes",
    .open = ipcs_open_apart,
    .close = gpus_close,
    .join = ipcs_join_apart,
    .leave = gpus_leave,
    .stream = gpus_stream,
    .take = gpus_take,
    .give = gpus_give,
};

static const struct world_transport ipcs_shared = {
    .name = "windows of GPUs that ranks share",
    .open = ipcs_open_shared,
    .close = gpus_close,
    .join = ipcs_join_shared,
    .leave = gpus_leave,
    .stream = gpus_stream,
    .take = gpus_take,
    .give = gpus_give,
};

#endif
