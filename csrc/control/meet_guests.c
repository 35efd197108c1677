/* The list of those who have not said hello. */
#include "control/meet_guests.h"

#include <errno.h>
#include <string.h>
#include <sys/socket.h>

#include "base/clock.h"
#include "control/meet_wire.h"

static const int64_t late_ns = 2000000000;

void cp_guests_drop(struct cp_guests *guests, int index)
{
    cp_wire_close(&guests->guest[index].fd);
    guests->count--;
    memmove(&guests->guest[index], &guests->guest[index + 1],
            (size_t)(guests->count - index) * sizeof guests->guest[0]);
}

void cp_guests_drop_all(struct cp_guests *guests)
{
    while (guests->count > 0) {
        cp_guests_drop(guests, guests->count - 1);
    }
}

bool cp_guests_accept(struct cp_guests *guests, int listener, bool (*may_enter)(int fd))
{
    for (int i = 0; i < CP_GUESTS_MOST; i++) {
        int fd = accept4(listener, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
        if (fd < 0) {
            return errno == EAGAIN || errno == EINTR || errno == ECONNABORTED;
        }
        if (may_enter != NULL && !may_enter(fd)) {
            cp_wire_close(&fd);
            continue;
        }
        if (guests->count == CP_GUESTS_MOST) {
            cp_guests_drop(guests, 0);
        }
        guests->guest[guests->count++] =
            (struct cp_guest){.fd = fd, .since_ns = cp_now_ns()};
    }
    return true;
}

bool cp_guest_is_late(const struct cp_guest *guest)
{
    return cp_now_ns() - guest->since_ns >= late_ns;
}

nfds_t cp_guests_poll(const struct cp_guests *guests, struct pollfd *pollers)
{
    for (int i = 0; i < guests->count; i++) {
        pollers[i] = (struct pollfd){.fd = guests->guest[i].fd, .events = POLLIN};
    }
    return (nfds_t)guests->count;
}
