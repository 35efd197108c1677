/* Counters between GPUs of one host, which streams set and wait for.
 *
 * Every rank has an inbox in the memory of its GPU: a line for each rank, with a counter
 * for each signal. A publication is a kernel that stores the value into its line of all
 * ranks' inboxes; a wait is a kernel that looks at the own inbox until the value is there.
 * Neither involves a host.
 *
 * A counter counts within a call, and what it says is of which call: its epoch. The GPU
 * itself counts epochs, one for each call that it comes to, so that a call in a graph
 * has a new one whenever it is launched. All ranks come to the same calls in the same
 * order, so their epochs are equal; that the calls are is looked at as well, since nothing
 * else would tell those who launch different graphs. Calls of a rank that are launched on
 * several streams have their turns: the next begins when all ranks have left the last.
 *
 * A waiting kernel also looks at a word of the host's memory, by which a host ends it when
 * what it waits for will never come, and says there for whom it waits once that takes
 * long (nothing here knows a deadline; cuda/ipc_watcher.h does). What follows on the
 * stream then works with what is not there: so from then on this rank publishes nothing
 * more but that it has left its calls, and no garbage is taken for data. */
#ifndef CP_CUDA_IPC_SIGNAL_H
#define CP_CUDA_IPC_SIGNAL_H

#include <stdint.h>

#include "base/status.h"
#include "comm/comm.h"

/* Signals are those of the table, as CP_COMM_COUNTER of epoch and value, and three more: in
 * which call a rank is, of which epoch that is, and the last epoch that it has left. */
enum {
    CP_IPC_RANKS = 32,
    CP_IPC_CALL = CP_SIGNALS, /* as in struct cp_flight; written before the epoch */
    CP_IPC_EPOCH,
    CP_IPC_LEFT,
    CP_IPC_SIGNALS,
    CP_IPC_LINE = 8
};

/* In the GPU's memory. All-zero is the initial state. */
struct cp_ipc_inbox {
    uint64_t from[CP_IPC_RANKS][CP_IPC_LINE]; /* by rank, then signal; only that rank
                                                 writes, and values only grow, but for
                                                 CP_IPC_CALL */
    uint64_t come;      /* calls that this rank's GPU has come to */
    uint64_t is_broken; /* a wait ended without what it waited for */
};

/* What a kernel waits for, once it has waited for a while. */
struct cp_ipc_note {
    uint64_t call;  /* as in struct cp_flight; written before `value` */
    uint64_t value; /* 0: nothing. Written with release, read with acquire */
};

/* Waits that nobody waits for any more: for what a call brings, and for turns too, which is
 * for peers to leave the call before. */
enum cp_ipc_over { CP_IPC_OVER_INSIDE = 1, CP_IPC_OVER_TURNS = 2 };

/* In the host's memory, seen by the GPU. All-zero is the initial state. */
struct cp_ipc_desk {
    uint64_t is_over; /* which waits are, enum cp_ipc_over. Written by the host */
    struct cp_ipc_note note[CP_IPC_RANKS][CP_IPC_SIGNALS]; /* by the peer that is waited
                                                              for; written by the GPU */
    struct cp_ipc_note
        odd[CP_IPC_RANKS]; /* by the peer that was in the call `value` while
                                             this rank was in `call` */
};

/* Counters of peers that one kernel waits for, a thread each. */
struct cp_ipc_wait {
    int32_t peer, signal;
    uint64_t value;
};

struct cp_ipc_waits {
    int32_t count;
    struct cp_ipc_wait of[CP_IPC_RANKS];
};

#ifdef __cplusplus
extern "C" {
#endif

/* What the kernels work on: addresses of the current device. */
struct cp_ipc_ends {
    struct cp_ipc_inbox *inbox[CP_IPC_RANKS]; /* of each rank */
    struct cp_ipc_desk *desk;
    int rank, world;
};

/* `stream` goes on once the call has its turn. `call`: which it is, as in struct
 * cp_flight. */
CP_NODISCARD enum cp_code cp_ipc_begin(const struct cp_ipc_ends *ends, uint64_t call,
                                       struct cp_stream *stream);
/* This rank has left the call, after all that `stream` was given. */
CP_NODISCARD enum cp_code cp_ipc_end(const struct cp_ipc_ends *ends,
                                     struct cp_stream *stream);

/* The own counter becomes `value` in all inboxes, after all that `stream` was given. */
CP_NODISCARD enum cp_code cp_ipc_publish(const struct cp_ipc_ends *ends, int signal,
                                         uint64_t value, struct cp_stream *stream);
/* `stream` goes on once all those counters are at least their values. `call` as above. */
CP_NODISCARD enum cp_code cp_ipc_await(const struct cp_ipc_ends *ends,
                                       const struct cp_ipc_waits *waits, uint64_t call,
                                       struct cp_stream *stream);

#ifdef __cplusplus
}
#endif

#endif
