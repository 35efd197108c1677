/* Proves the schedules of all ranks without a communicator, a device or a kernel.
 *
 * All ranks' schedules of one or more calls in a row are executed symbolically. The
 * proof holds for every timing, because the only order that it relies on is the one
 * that the steps themselves state (lanes, `after`, counters, messages, the gate between
 * two calls), kept in vector clocks. It shows that
 *  1. every send meets one receive of the same bytes in the same order, and nobody
 *     waits in a cycle, not even where each rank does one step at a time in the order of
 *     its list;
 *  2. nothing is read before it is written, nor written while another lane or rank may
 *     still use it, the windows and workspaces of the calls before included;
 *  3. every query row of every head meets exactly the keys that it may see, each once,
 *     with the K, V, mask and gradient rows that belong to it, and every output element
 *     is written once with its own value;
 *  4. all boxes lie inside their buffers, all buffers inside their window or workspace,
 *     and what a rank reads in a peer's window is what that peer put there, in the same
 *     layout.
 *
 * For tests: the extension does not carry it. */
#ifndef CP_SCHEDULE_VERIFY_H
#define CP_SCHEDULE_VERIFY_H

#include "schedule/schedule.h"

struct cp_verify_report {
    int64_t steps;         /* executed, over all ranks and calls */
    int64_t window_bytes;  /* largest window of any rank */
    int64_t scratch_bytes; /* largest workspace of any rank */
};

/* schedules: (calls, world), row by row. CP_ERR_INTERNAL with the sentence that names
 * call, rank and step; CP_ERR_NO_MEMORY. */
CP_NODISCARD enum cp_code cp_schedule_verify(const struct cp_schedule *const *schedules,
                                             int calls, int world,
                                             struct cp_verify_report *report);

#endif
