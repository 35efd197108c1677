/* A communicator for one rank without peers, whose messages come back: what it would
 * receive from a peer is what it sends in the same place of the same batch, copied on the
 * device. So one GPU does all the work of one rank of many, with as many bytes as the
 * exchange has, and what it computes is known: a world whose ranks mirror each other. */
#ifndef CP_BENCHMARKS_COMM_MIRROR_H
#define CP_BENCHMARKS_COMM_MIRROR_H

#include "comm/comm.h"
#include "device/device.h"

struct comm_mirror {
    struct cp_comm head;
    struct cp_device *device; /* borrowed */
};

/* Rank 0 of `world`. */
void comm_mirror_init(struct comm_mirror *self, int world, struct cp_device *device);

#endif
