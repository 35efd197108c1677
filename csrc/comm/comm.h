/* The table that a communicator fills: it moves bytes, or shows memory, between the
 * ranks 0 .. world - 1.
 *
 * Two groups of entries, each optional as a whole; at least one is there. One-sided:
 * every rank has a window that the others read in place, and a few counters that only
 * grow within a call; none of an earlier call counts in a later one. Every call uses the
 * window from its start: on the host the gate before it says that all ranks have left the
 * call before, on a device `begin` and `end` do. Two-sided: batches of sends and receives.
 * Whatever fails once stays failed: the watch is poisoned, and every later wait says why.
 * `stream` is a device's lane, NULL on the host. One thread at a time. */
#ifndef CP_COMM_COMM_H
#define CP_COMM_COMM_H

#include <stdbool.h>
#include <stddef.h>

#include "base/clock.h"
#include "base/status.h"

enum { CP_COMM_ABI = 4, CP_SIGNALS = 4 };

struct cp_stream;
struct cp_comm;

/* One half of one message. Both halves name the same byte count. */
struct cp_xfer {
    void *data;   /* borrowed until the ticket completes */
    size_t bytes; /* 0 moves nothing, on either side */
    int peer;     /* may be the own rank */
    bool is_send;
};

/* What a communicator is told of a call before its first step. */
struct cp_comm_call {
    uint64_t seq;             /* its number: the same on all ranks, and it only grows */
    uint64_t capture;         /* that it is part of (device/device.h); 0: of none */
    struct cp_stream *stream; /* the caller's; NULL on the host */
};

/* A counter that grows over calls: the call's number above, the value within it below. */
enum { CP_COMM_VALUE_BITS = 24 };
#define CP_COMM_COUNTER(call, value) ((uint64_t)(call) << CP_COMM_VALUE_BITS | (value))

/* Something to wait for: a peer's counter, or a ticket of one's own. */
struct cp_comm_wait {
    bool is_ticket;
    int peer, signal; /* counter */
    uint64_t value;   /* counter: at least this, in this call; or the ticket */
};

struct cp_comm_ops {
    const char *name; /* "shm"; appears in messages */
    uint32_t abi;     /* CP_COMM_ABI */

    /* One-sided group. */
    /* Makes at least `bytes` of the own window usable. CP_ERR_NO_MEMORY. Never blocks
     * on a peer. */
    enum cp_code (*reserve)(struct cp_comm *comm, size_t bytes);
    /* (optional) What ranks have reserved comes into use: called after each has and knows
     * that all have. A failure is for this rank alone to tell. Never blocks on a peer. */
    enum cp_code (*attach)(struct cp_comm *comm);
    /* Where that rank's window lies here; asked anew in every call. Valid until close,
     * though the window grows. On the host only the own window may be written. */
    void *(*window)(struct cp_comm *comm, int rank);
    /* The own counter becomes `value`, after all that was written before (release). */
    enum cp_code (*publish)(struct cp_comm *comm, int signal, uint64_t value,
                            struct cp_stream *stream);
    /* CP_OK: those counters have all reached their values in this call (acquire). CP_AGAIN:
     * not yet. Devices enqueue one wait for all on `stream` and say CP_OK. */
    enum cp_code (*reached)(struct cp_comm *comm, const struct cp_comm_wait *waits,
                            int count, struct cp_stream *stream);
    /* Before the first step of a call. On devices `call->stream` goes on once the windows
     * are free of the call before. */
    enum cp_code (*begin)(struct cp_comm *comm, const struct cp_comm_call *call);
    /* (optional, on devices) After the last step has been enqueued: once `stream` has done
     * all that it was given, this rank counts as having left the call. */
    enum cp_code (*end)(struct cp_comm *comm, struct cp_stream *stream);

    /* Two-sided group. */
    /* Posts a batch: all of it may move at the same time, batches between two ranks in
     * the order posted. Returns before they finish. Never blocks on a peer. */
    enum cp_code (*post)(struct cp_comm *comm, const struct cp_xfer *xfers, int count,
                         struct cp_stream *stream, uint64_t *ticket);
    /* CP_OK: the batch and all before it are complete. CP_AGAIN: not yet. */
    enum cp_code (*test)(struct cp_comm *comm, uint64_t ticket);

    /* Always there. */
    /* Blocks until one of `waits` is fulfilled; `operation` is for messages. Errors as
     * cp_watch_wait. */
    enum cp_code (*wait)(struct cp_comm *comm, const struct cp_comm_wait *waits,
                         int count, const char *operation, struct cp_deadline deadline);
    /* Breaks the communicator for all ranks with this reason, unless it has one
     * already. */
    void (*poison)(struct cp_comm *comm, const struct cp_status *reason);
    /* Releases everything and leaves NULL; accepts NULL; waits for nobody. */
    void (*close)(struct cp_comm **comm);
};

/* The head of every communicator's own struct. */
struct cp_comm {
    const struct cp_comm_ops *ops;
    int rank, world;
};

static inline bool cp_comm_has_windows(const struct cp_comm *comm)
{
    return comm->ops->window != NULL;
}

#endif
