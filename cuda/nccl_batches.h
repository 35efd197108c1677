/* The batches that a NCCL communicator has been given and that have not ended yet.
 *
 * Batches have numbers, from 1, and count as ended in that order, which is that in which
 * NCCL runs them, on whatever streams they are. Each has an event in front of it and one
 * behind it, so that a batch that waits for the device's own work is told from one that
 * waits for a peer. The events are made once and used in turns. Not for several threads
 * at once. */
#ifndef CP_CUDA_NCCL_BATCHES_H
#define CP_CUDA_NCCL_BATCHES_H

#include <cuda_runtime.h>
#include <stdbool.h>
#include <stdint.h>

#include "base/status.h"
#include "comm/comm.h"

/* As far as the host may be ahead of the device: more than a call has, and more calls
 * than it pays to be ahead by. */
enum { CP_NCCL_BATCHES = 256 };

/* What a batch is for. */
struct cp_nccl_purpose {
    uint64_t call;  /* that it belongs to, as in struct cp_flight; 0: not known */
    bool *has_peer; /* (world): does it send to that rank or receive from it? */
};

void cp_nccl_purpose_set(struct cp_nccl_purpose *purpose, int world,
                         const struct cp_xfer *xfers, int count, uint64_t call);

struct cp_nccl_batch {
    cudaEvent_t begin, end;
    struct cp_nccl_purpose purpose;
};

struct cp_nccl_batches {
    uint64_t posted, ended; /* numbers of the last batches that are */
    int world;
    struct cp_nccl_batch batch[CP_NCCL_BATCHES];
};

/* The events are the current device's. */
CP_NODISCARD enum cp_code cp_nccl_batches_create(int world,
                                                 struct cp_nccl_batches **out);
/* Accepts NULL, leaves NULL; waits for nothing. */
void cp_nccl_batches_destroy(struct cp_nccl_batches **batches);
/* The same in a forked child, which has no business with the device. */
void cp_nccl_batches_forget(struct cp_nccl_batches **batches);

/* Is there room for one more? */
bool cp_nccl_batches_has_room(const struct cp_nccl_batches *batches);
/* Around what is enqueued for the next batch, on the same stream. It counts as posted
 * after the second. */
CP_NODISCARD enum cp_code cp_nccl_batches_begin(struct cp_nccl_batches *batches,
                                                const struct cp_xfer *xfers, int count,
                                                uint64_t call, cudaStream_t stream);
CP_NODISCARD enum cp_code cp_nccl_batches_end(struct cp_nccl_batches *batches,
                                              cudaStream_t stream);

/* Counts the batches that have ended by now. */
CP_NODISCARD enum cp_code cp_nccl_batches_reap(struct cp_nccl_batches *batches);
/* The one posted first that has not ended; NULL: there is none. */
const struct cp_nccl_batch *
cp_nccl_batches_oldest(const struct cp_nccl_batches *batches);

/* CP_OK: the event is over. CP_AGAIN: not yet. */
CP_NODISCARD enum cp_code cp_nccl_event_query(cudaEvent_t event);

#endif
