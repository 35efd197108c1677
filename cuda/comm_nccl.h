/* Ranks with a GPU each: batches of sends and receives through NCCL, in the order of a
 * stream.
 *
 * Only the two-sided group of the table. `post` enqueues a batch as one NCCL group and
 * returns once NCCL's host thread has done so, since operations of other communicators
 * that the caller starts next have to come behind it (docs/gpu.md). A batch is done when
 * the stream says so, so `test` says yes at once unless the context is broken, and `wait`
 * has nothing to wait for. What goes wrong with enqueued batches is noticed by a thread of
 * the communicator (nccl_watcher.h). On a stream that is being captured `post` adds the
 * batch to the graph, which the communicator then outlives: closed before, it is parked.
 * Messages to the own rank are copies on the stream; both halves are in one batch. */
#ifndef CP_CUDA_COMM_NCCL_H
#define CP_CUDA_COMM_NCCL_H

#include "base/watch.h"
#include "comm/comm.h"
#include "nccl_parent.h"

struct cp_comm_nccl_args {
    const struct cp_nccl *nccl;   /* borrowed; must outlive the process's communicators,
                                   parked ones included */
    struct cp_watch *watch;       /* borrowed; must outlive the communicator */
    ncclUniqueId id;              /* the same on all ranks */
    const struct cp_group *group; /* (optional) all ranks have it, and it fits
                                     (nccl_parent.h): used in the place of the id */
    int device;     /* ordinal; all ranks have different GPUs, which the caller has
                       compared */
    double timeout; /* seconds: for the creation, for the host's part of a batch, and
                       for a batch once the device has come to it */
};

/* For rank 0, which hands it to the others. */
CP_NODISCARD enum cp_code cp_comm_nccl_id(const struct cp_nccl *nccl,
                                          ncclUniqueId *out);

/* All ranks call it; each waits for all, as cp_watch_wait does. Whatever goes wrong
 * poisons the context, since the others wait. */
CP_NODISCARD enum cp_code cp_comm_nccl_create(const struct cp_comm_nccl_args *args,
                                              struct cp_comm **out);

#endif
