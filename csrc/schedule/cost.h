/* How long a call takes by given speeds: a walk over the schedules of all ranks with clocks
 * of seconds in the place of proofs.
 *
 * Lanes run beside each other. A kernel fills the processors of its device in whole waves
 * of tiles. Messages, and what a step reads or writes in windows of other ranks, take links: each
 * rank has one out and one in, and all may share a bridge; what is there first goes first.
 * The host enqueues steps one after the other.
 *
 * Left out: that kernels of two lanes slow each other down, and what a communicator's own
 * kernels take of the processors. */
#ifndef CP_SCHEDULE_COST_H
#define CP_SCHEDULE_COST_H

#include "schedule/schedule.h"

/* What a rank's device and links do in a second, or how long they take. */
struct cp_speeds {
    double attend_ops, grad_ops; /* operations of a kernel whose waves are full */
    double processors;           /* tiles of a wave */
    double tile_rows;            /* rows of queries (attend) or keys (grad) of a tile */
    bool is_merged;      /* the kernel answers block by block, and is followed by a
                              merge into the state */
    bool is_uncached;    /* attention reads keys in another rank's window anew for every
                              tile of queries, since no cache of its own device holds them */
    double memory_bytes; /* read and written */
    double launch_s;     /* of a kernel, beside its work */
    double enqueue_s;    /* of the host, for a launch, a group of messages, a signal */
    double link_bytes;   /* of a link, each way */
    double link_s;       /* until a message or a signal is there, beside its bytes */
    double bridge_bytes; /* of what all ranks' links share; 0: nothing */
};

/* On what a rank's time goes, on the way through its steps that decides when it ends. */
enum cp_cost_kind {
    CP_COST_COMPUTE,  /* attention */
    CP_COST_COPIES,   /* inside the rank's memory */
    CP_COST_TRANSFER, /* bytes on links that nothing hides */
    CP_COST_WAIT,     /* for a rank that is later */
    CP_COST_HOST,     /* for the host, which has not enqueued yet */
    CP_COST_KINDS
};

struct cp_cost {
    double total_s; /* the sum of the others */
    double of_s[CP_COST_KINDS];
};

/* "compute", ... */
const char *cp_cost_name(enum cp_cost_kind kind);

/* schedules: (world), of one call. `costs`: (world). CP_ERR_INTERNAL where the ranks wait for each other;
 * CP_ERR_NO_MEMORY. */
CP_NODISCARD enum cp_code cp_cost_walk(const struct cp_schedule *const *schedules,
                                       int world, const struct cp_speeds *speeds,
                                       struct cp_cost *costs);

#endif
