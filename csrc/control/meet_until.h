/* The course of every meeting: do what can be done, and sleep until more can, until all
 * are there, or the rank is interrupted, or the deadline is over. */
#ifndef CP_CONTROL_MEET_UNTIL_H
#define CP_CONTROL_MEET_UNTIL_H

#include <poll.h>

#include "control/meet.h"

/* One kind of meeting; `meeting` is its own. */
struct cp_meet_kind {
    /* Everything that can be done without waiting, under the lock of meet_fork.h. */
    enum cp_code (*once)(void *meeting, const struct cp_meet_args *args);
    bool (*is_complete)(const void *meeting);
    /* What can bring news: places filled in `pollers`. `until_ns` becomes earlier where
     * something is to be tried again before. */
    nfds_t (*poll)(const void *meeting, struct pollfd *pollers, int64_t *until_ns);
    /* The sentence that names who is missing. */
    enum cp_code (*fail_late)(const void *meeting, const struct cp_meet_args *args);
};

/* `pollers` has room for all that `poll` fills. */
CP_NODISCARD enum cp_code cp_meet_until(const struct cp_meet_kind *kind, void *meeting,
                                        const struct cp_meet_args *args,
                                        struct pollfd *pollers);

/* When to try a connection again: pauses double up to a longest one. */
struct cp_meet_retry {
    int64_t at_ns, pause_ns; /* all-zero: at once */
};
void cp_meet_retry_later(struct cp_meet_retry *retry);

/* "rank 2 cannot open a socket to meet the other ranks: ..." from errno. */
enum cp_code cp_meet_fail_system(int rank, const char *what);

#endif
