/* Connections that a listener has accepted and that have not said hello: some are ranks
 * of the meeting, some are anybody's. Whoever says nothing costs a place for a while and
 * no time. */
#ifndef CP_CONTROL_MEET_GUESTS_H
#define CP_CONTROL_MEET_GUESTS_H

#include <poll.h>
#include <stdbool.h>
#include <stdint.h>

enum { CP_GUESTS_MOST = 64 }; /* the oldest goes when one more comes */

struct cp_guest {
    int fd;
    int64_t since_ns;
};

/* All-zero is the initial state. */
struct cp_guests {
    int count;
    struct cp_guest guest[CP_GUESTS_MOST];
};

/* Takes in all that knock, but whom `may_enter` (optional) refuses. Does not block.
 * False and errno where the listener fails. */
bool cp_guests_accept(struct cp_guests *guests, int listener,
                      bool (*may_enter)(int fd));

/* Closes it, unless its `fd` has been taken out (-1). Guests behind it move up. */
void cp_guests_drop(struct cp_guests *guests, int index);
void cp_guests_drop_all(struct cp_guests *guests);

/* A rank says hello at once; whoever has not by now may come again. */
bool cp_guest_is_late(const struct cp_guest *guest);

/* Places in `pollers` that were filled. */
nfds_t cp_guests_poll(const struct cp_guests *guests, struct pollfd *pollers);

#endif
