/* The gate: every rank's record of this call, or everybody's error, before a byte of
 * data moves.
 *
 * All ranks share one page. It holds, for each rank, two records by parity of the
 * sequence number, the bell and the poison of base/watch.h,
 * every rank's flight recorder, and every rank's board:
 *
 *     page: bell | poison | rank 0: even, odd | rank 1: even, odd | ... | flights | boards
 *
 * A rank writes its record n into place n mod 2, then stores n as the record's seq
 * (release); it reads the others' once their seq is n (acquire). It may overwrite
 * record n with n + 2 only because it has read everyone's n + 1, and nobody writes
 * n + 1 before having read all of n. docs/architecture.md states the protocol line by
 * line. */
#ifndef CP_CONTROL_GATE_H
#define CP_CONTROL_GATE_H

#include <stddef.h>

#include "base/board.h"
#include "base/record.h"
#include "base/watch.h"

struct cp_page;

/* Zeroed memory of this size, aligned to 64, is a page. */
size_t cp_page_bytes(int world);
struct cp_bell *cp_page_bell(struct cp_page *page);
struct cp_poison *cp_page_poison(struct cp_page *page);
struct cp_flight *cp_page_flights(struct cp_page *page, int world); /* (world) */
/* (world) Not kept equal where each rank has a page of its own (control/replica.h). */
struct cp_board *cp_page_boards(struct cp_page *page, int world);

/* A rank's record of exchange `seq`. Written by the rank itself, in a replica of the
 * page (control/replica.h) by whoever keeps it; rings the bell. */
void cp_page_write(struct cp_page *page, int rank, uint64_t seq,
                   const struct cp_record *record);
/* Is it there? */
bool cp_page_has(struct cp_page *page, int rank, uint64_t seq);
/* For who knows that it is there and is not written over meanwhile. */
void cp_page_read(struct cp_page *page, int rank, uint64_t seq,
                  struct cp_record *record);

/* One rank's end. Nothing in it is owned. */
struct cp_gate {
    struct cp_page *page;
    struct cp_watch *watch;
    uint64_t seq; /* of the last exchange; the first is 1 */
};

/* Writes `mine`, waits for all, copies them in rank order to `all` (world records; a
 * status text only where the code is not CP_OK). All ranks get the same records. Errors
 * as cp_watch_wait. */
CP_NODISCARD enum cp_code cp_gate_exchange(struct cp_gate *gate,
                                           const struct cp_record *mine,
                                           struct cp_record *all, const char *operation,
                                           struct cp_deadline deadline);

#endif
