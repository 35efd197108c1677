/* The page of control/gate.h for ranks that cannot share one: every rank has its own in
 * ordinary memory, and connections keep them equal.
 *
 *     rank 0's host                               rank 1's host
 *     page: | rank 0: written by the gate  --->  page: | rank 0: written by the listener
 *           | rank 1: by the listener      <---        | rank 1: by the gate
 *
 * Two threads a rank. The speaker sleeps on the page's bell, as every waiter does, and
 * sends to each peer what it has not had yet: this rank's records in their order, the
 * poison, and ten times a second what is new in the flight recorder. The listener
 * stores what comes, by the same stores and the same ring as a rank of this host would,
 * and notes which connections have ended. So the gate, the waiting and the poison know
 * nothing of hosts. docs/architecture.md says which lines of the protocol become weaker. */
#ifndef CP_CONTROL_REPLICA_H
#define CP_CONTROL_REPLICA_H

#include "control/gate.h"

struct cp_replica;

/* `connections` (world): a stream to each peer, non-blocking and with nothing unread;
 * borrowed; the own rank's place counts for nothing. */
CP_NODISCARD enum cp_code cp_replica_open(const int *connections, int rank, int world,
                                          struct cp_replica **out);
/* Accepts NULL in it, leaves NULL. What this rank has stored goes out first, as far as
 * the connections take it; waits for nobody. */
void cp_replica_close(struct cp_replica **replica);

struct cp_page *cp_replica_page(struct cp_replica *replica);
/* For cp_watch.is_dead: `peers` is the replica. True once all is stored that came before
 * the end. */
bool cp_replica_is_dead(void *peers, int rank);

#endif
