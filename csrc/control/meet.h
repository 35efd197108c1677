/* The meeting place of the ranks of one host: abstract Unix sockets, found by a name
 * that all ranks compute alike.
 *
 * Every rank listens under the name and its number, connects to all lower ranks and
 * accepts all higher ones. A connection carries one hello each way, with the sender's
 * window (a memfd) and, from rank 0, the shared page; after that nothing is sent: a
 * closed connection says that its rank is gone. Only processes of the same user are let
 * in (SO_PEERCRED); whoever says anything but a hello of this meeting is dropped, and
 * disturbs nobody. Nothing is ever in the file system. */
#ifndef CP_CONTROL_MEET_H
#define CP_CONTROL_MEET_H

#include <stdbool.h>
#include <stddef.h>

#include "base/clock.h"
#include "base/status.h"

enum { CP_HELLO_BYTES = 1152 };

/* What a rank tells at the meeting, beside its number: bytes that only the callers
 * read. */
struct cp_hello {
    unsigned char bytes[CP_HELLO_BYTES];
};

struct cp_meet_args {
    const char *key; /* names the job and the members; equal on all ranks, any length */
    int rank, world;
    struct cp_hello hello;
    int window_fd; /* own window; borrowed */
    struct cp_deadline deadline;
    enum cp_code (*interrupt)(void *arg); /* (optional) as in base/watch.h */
    void *interrupt_arg;
};

/* The outcome. Descriptors, the borrowed window's included, are closed in a forked
 * child (pthread_atfork), so that a death shows at once. */
struct cp_meeting;

/* CP_ERR_TIMEOUT names the ranks that did not appear. */
CP_NODISCARD enum cp_code cp_meet(const struct cp_meet_args *args,
                                  struct cp_meeting **out);
/* Accepts NULL in it, leaves NULL; waits for nobody. */
void cp_meeting_close(struct cp_meeting **meeting);

const struct cp_hello *cp_meeting_hello(const struct cp_meeting *meeting, int rank);
int cp_meeting_window_fd(const struct cp_meeting *meeting,
                         int rank); /* owned by the meeting; -1 for the own rank */
struct cp_mapping *cp_meeting_page(
    const struct cp_meeting *meeting); /* the shared page; see control/gate.h */
/* For cp_watch.is_dead: `peers` is the meeting. */
bool cp_meeting_is_dead(void *peers, int rank);

#endif
