/* Ranks of one host whose GPUs reach each other's memory: windows that peers read in
 * place, signals in GPU memory that streams set and wait for.
 *
 * Only the one-sided group of the table, and everything in it is enqueued: kernels
 * (cuda/ipc_signal.h), so no host waits for a peer, `wait` has nothing to wait for, and a
 * call may be captured in a graph. By the gate of a call all hosts have left the one
 * before, but a GPU may still be reading, so `begin` has the stream wait until all have
 * left. What goes wrong with what was enqueued is noticed by a thread
 * (cuda/ipc_watcher.h). Ranks may be processes or threads of one; processes may share a
 * GPU. */
#ifndef CP_CUDA_COMM_IPC_H
#define CP_CUDA_COMM_IPC_H

#include "ipc_memory.h"

struct cp_comm_ipc_args {
    struct cp_watch *watch;          /* borrowed; must outlive the communicator */
    struct cp_boards boards;         /* borrowed likewise, but for what is shared */
    const struct cp_ipc_peer *peers; /* (world), borrowed for the call; at most
                                        CP_IPC_RANKS, which the caller has compared */
    int device;                      /* ordinal */
    double timeout;                  /* seconds: of one wait on the GPU */
};

/* Waits for nobody. */
CP_NODISCARD enum cp_code cp_comm_ipc_create(const struct cp_comm_ipc_args *args,
                                             struct cp_comm **out);

#endif
