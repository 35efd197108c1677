/* Sends and receives over one TCP connection for each pair of ranks, for ranks on
 * several hosts.
 *
 * A message is its size in eight bytes, then itself; none at all where the size is 0.
 * A thread of the communicator moves them, both ways at once and while the rank
 * computes, from and into the callers' memory. A receiver that is not ready holds its
 * sender up: nothing is buffered but by the kernel. */
#ifndef CP_COMM_COMM_TCP_H
#define CP_COMM_COMM_TCP_H

#include "base/watch.h"
#include "comm/comm.h"

/* `connections` (world): a stream to each peer, non-blocking and with nothing unread;
 * the own rank's place counts for nothing. Both arguments are borrowed and must outlive
 * the communicator. */
CP_NODISCARD enum cp_code cp_comm_tcp_create(const int *connections,
                                             struct cp_watch *watch,
                                             struct cp_comm **out);

#endif
