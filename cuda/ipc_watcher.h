/* The thread behind an ipc communicator: it looks after calls that have only been
 * enqueued, and after memory that others want back.
 *
 * While a call is under way on the GPU, or may be since graphs are alive that calls were
 * captured in, it looks every 50 ms: poison, errors of the device, and what kernels that
 * wait have noted (cuda/ipc_signal.h): death of a peer that is waited for, a wait that
 * takes too long, a peer that is in another call. Any of these poisons the context and
 * then ends all waits of this rank, so that the user's synchronisation returns and his
 * next call raises. While none is under way it lets go of the memory of ranks that close.
 *
 * At the end it gives everything back, when the graphs have gone and nobody uses this
 * rank's memory any more. Where that takes longer than the caller waits, he leaves the
 * thread to itself, which then does not touch the watch, and has a share in the page.
 *
 * `memory` and all from `begun` on is guarded by `mutex`, but for `seen`, which is the
 * thread's own, and for what it lets go or frees, which is its own by then; everything else
 * is constant after creation. It never calls the watch's `interrupt` and writes nothing with
 * its recorder; both are the caller's. */
#ifndef CP_CUDA_IPC_WATCHER_H
#define CP_CUDA_IPC_WATCHER_H

#include <pthread.h>

#include "base/worker.h"
#include "device/device.h"
#include "held_graphs.h"
#include "ipc_memory.h"

/* On how many streams a call's work is at most: the device's lanes and the caller's. */
enum { CP_IPC_STREAMS = CP_DEVICE_LANES + 1 };

/* A wait as it was when it was first seen. */
struct cp_ipc_seen {
    uint64_t value; /* 0: none */
    int64_t since_ns;
    int64_t dead_ns; /* when the peer was first seen dead meanwhile; 0: it was not */
};

struct cp_ipc_watcher {
    struct cp_watch *watch;             /* borrowed; must outlive this */
    struct cp_ipc_desk *desk;           /* owned; of the host */
    struct cp_ipc_desk *desk_of_device; /* the same as the GPU sees it */
    int device;
    double timeout; /* seconds that a wait may take once it is noted */
    struct cp_worker worker;
    cudaEvent_t last[CP_IPC_STREAMS]; /* owned; behind the last call that has ended */

    pthread_mutex_t mutex;
    pthread_cond_t changed; /* from the thread: `has_let_go`, `has_ended` */
    struct cp_ipc_memory memory;
    uint64_t begun, ended; /* calls; one more begun than ended: one is being enqueued */
    struct cp_held_graph *graphs; /* alive, with calls in them */
    bool is_idle;       /* no call is under way on the GPU, as far as has been seen */
    int64_t broken_ns;  /* since when waits have been ended; 0: they have not */
    bool is_closing;    /* the thread is to end */
    int64_t drained_ns; /* until when outstanding work may take; 0: not asked yet */
    bool has_let_go;    /* of others' memory: only their use of this rank's is left */
    bool is_stuck;      /* the GPU gives nothing back */
    bool has_ended;     /* the thread touches nothing any more, unless parked */
    bool is_parked;     /* the caller has gone: the thread frees what is left */

    struct cp_ipc_seen seen[CP_IPC_RANKS][CP_IPC_SIGNALS]; /* the thread's */
};

struct cp_ipc_watcher_args {
    struct cp_watch *watch;
    struct cp_boards boards;
    const struct cp_ipc_peer *peers;
    int device;
    double timeout;
};

/* Starts the thread, on the current device. */
CP_NODISCARD enum cp_code cp_ipc_watcher_create(const struct cp_ipc_watcher_args *args,
                                                struct cp_ipc_watcher **out);

/* A call is going to be enqueued. Fails where the context is broken. */
CP_NODISCARD enum cp_code cp_ipc_watcher_begin(struct cp_ipc_watcher *watcher);
/* The same for one that is captured: a call of the graph of that number. The watcher
 * outlives the graph. */
CP_NODISCARD enum cp_code cp_ipc_watcher_capture(struct cp_ipc_watcher *watcher,
                                                 cudaStream_t stream, uint64_t capture);
/* All of it has been, or no more will be: it is over when these streams, at most
 * CP_IPC_STREAMS, have done what they were given. Nothing where no call is begun. */
CP_NODISCARD enum cp_code cp_ipc_watcher_end(struct cp_ipc_watcher *watcher,
                                             struct cp_stream *const *streams,
                                             int count);

/* After the context has been poisoned: ends all waits, but for peers that are in the call
 * before. */
void cp_ipc_watcher_break(struct cp_ipc_watcher *watcher);

/* Frees everything and leaves NULL; accepts NULL. Work that is outstanding gets a second
 * to end, then its waits are ended; in a broken context they are at once. Others that
 * still use this rank's memory get 0.3 s to let it go, and graphs none: after that the
 * thread is left to itself, and of launches it looks only whether they are late. What the device never gives back is left to the end of the
 * process. In a forked child it only frees the host's memory. */
void cp_ipc_watcher_destroy(struct cp_ipc_watcher **watcher);

#endif
