/* A test double: ranks of one process that can only send and receive, with random delays.
 *
 * It is harsh where a real transport may be: a receiver's memory is filled with garbage when the receive is posted;
 * data is read from the sender's memory as late as possible, after both sides have posted and a random number of
 * ticks has passed; batches complete in any order that the table allows. A tick is one call of `test`, or one turn
 * in `wait`, by any rank, so ranks that are polled in one thread see the same run for the same seed. Each rank's
 * communicator belongs to one thread. */
#ifndef CP_TESTS_COMM_DOUBLE_H
#define CP_TESTS_COMM_DOUBLE_H

#include <stdint.h>

#include "base/watch.h"
#include "comm/comm.h"

/* What the ranks share. */
struct double_hub;

/* NULL where memory is short. `most_ticks`: the longest delay of a message. */
struct double_hub *double_hub_create(int world, uint64_t seed, int most_ticks);
/* After all communicators are closed. Accepts NULL in it, leaves NULL. */
void double_hub_destroy(struct double_hub **hub);
/* For cp_watch.is_dead, with the hub as `peers`: has that rank closed its communicator? */
bool double_hub_is_dead(void *hub, int rank);
/* Transfers that some rank has posted and that are not complete. */
int double_hub_pending(struct double_hub *hub);

/* The rank is the watch's. `hub` and `watch` are borrowed; must outlive the communicator. */
CP_NODISCARD enum cp_code cp_comm_double_create(struct double_hub *hub,
                                                struct cp_watch *watch,
                                                struct cp_comm **out);

#endif
