/* The thread behind a NCCL communicator: it notices what goes wrong with work that the
 * caller has only enqueued, and does whatever NCCL may block in.
 *
 * While batches are outstanding it looks every 50 ms: poison, NCCL's asynchronous
 * errors, death of a peer, a batch that takes too long; and all the time while graphs are
 * alive that batches were captured in. Any of these poisons the context
 * first and then aborts NCCL's work, so that the user's synchronisation returns and his
 * next call raises. Aborts, the freeing at the end and the split of another communicator
 * run here and nowhere else: where NCCL does not return from them, the caller leaves the
 * thread to itself. So it does where graphs are alive, since NCCL frees a communicator after
 * all graphs that have its work, and waits for that.
 *
 * Who owns what. Constant after creation: `nccl`, `watch`, `rank`, `device`, `timeout`,
 * `owner_pid`. Everything else is guarded by `mutex`; a call of NCCL on `handle` is made
 * with the mutex held, except those that free it: who makes one has taken `handle` out,
 * so nobody else has it. What a split makes becomes `handle` when it is there. `watch` is the caller's and may be gone after close: the thread
 * does not touch it once `is_closing`. It never calls the watch's `interrupt` and
 * writes nothing with its recorder; both are the caller's. */
#ifndef CP_CUDA_NCCL_WATCHER_H
#define CP_CUDA_NCCL_WATCHER_H

#include <pthread.h>
#include <sys/types.h>

#include "base/watch.h"
#include "nccl_dl.h"
#include "nccl_graphs.h"

/* What a dead peer has sent arrives within this time once the device has come to the
 * batch; what has not arrived by then never will. */
enum { CP_NCCL_DEAD_NS = 500000000 };

struct cp_nccl_watcher {
    const struct cp_nccl *nccl; /* borrowed; outlives the thread */
    struct cp_watch *watch;     /* borrowed; must outlive close */
    int rank, device;
    double timeout; /* seconds that a batch may take once the device has come to it */
    pid_t owner_pid;

    pthread_mutex_t mutex;
    pthread_cond_t wake;    /* to the thread: there is work, or an end */
    pthread_cond_t changed; /* from it: aborted, or ended */
    pthread_t thread;
    ncclComm_t handle; /* NULL: not created, or taken out by who frees it */
    ncclComm_t parent; /* the thread is to split it, or is at it; NULL: neither */
    ncclConfig_t child_config;
    ncclResult_t split; /* how that ended */
    struct cp_nccl_batches *batches;
    struct cp_nccl_graphs graphs;
    uint64_t watched; /* number of the batch that the next two are about */
    int64_t begun_ns; /* when the device was seen to have come to it; 0: not yet */
    int64_t dead_ns;  /* when one of its peers was first seen dead; 0: none was */
    bool is_broken;   /* the context is poisoned: abort */
    bool is_aborting; /* the abort has not returned */
    bool is_closing;
    bool has_ended; /* the thread touches nothing any more, unless parked */
    bool is_parked; /* the caller has gone: the thread frees what is left */
};

/* Starts the thread. `nccl`, the table, has to outlive it even where it is parked. */
CP_NODISCARD enum cp_code cp_nccl_watcher_create(const struct cp_nccl *nccl,
                                                 struct cp_watch *watch, int device,
                                                 double timeout,
                                                 struct cp_nccl_watcher **out);

/* Has it make the handle from another communicator; `parent` is NULL again when that has
 * ended, by `split`. The mutex is held. */
void cp_nccl_watcher_split(struct cp_nccl_watcher *watcher, ncclComm_t parent,
                           const ncclConfig_t *config);

/* A batch of the graph that the stream is being captured in, by that number. The watcher
 * outlives the graph, and so does what it watches. */
CP_NODISCARD enum cp_code cp_nccl_watcher_capture(struct cp_nccl_watcher *watcher,
                                                  cudaStream_t stream, uint64_t capture,
                                                  const struct cp_xfer *xfers,
                                                  int count, uint64_t call,
                                                  struct cp_nccl_captured **out);

/* Tells it of a new batch. The mutex is held. */
void cp_nccl_watcher_wake(struct cp_nccl_watcher *watcher);

/* After the context has been poisoned: has the work aborted, and waits until it is, at
 * most a second. */
void cp_nccl_watcher_break(struct cp_nccl_watcher *watcher);

/* Frees everything and leaves NULL; accepts NULL. Work that is outstanding in a sound
 * context gets a second to end, then it is aborted; in a broken one it is aborted at
 * once. What NCCL does not free within a second more is left to the thread, and so is at
 * once what graphs still hold: it is freed after the last of them. In a forked
 * child it only frees memory. */
void cp_nccl_watcher_destroy(struct cp_nccl_watcher **watcher);

#endif
