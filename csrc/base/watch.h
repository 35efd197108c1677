/* One way to wait for other ranks, used by the gate and by every host communicator.
 *
 * A waiter looks, in this order and over and over: is what I wait for there? is the
 * context poisoned? is a rank that I wait for dead (then once more: is it there, since
 * a rank may publish and die)? was I interrupted? is the deadline over? Whatever ends
 * the wait badly poisons the context first, so that the first reason reaches every rank
 * in the same words. Between looks it spins for a short time (not at all where ranks
 * outnumber the cores allowed), then sleeps on the bell, a futex that everyone rings
 * who stores something others wait for. */
#ifndef CP_BASE_WATCH_H
#define CP_BASE_WATCH_H

#include <stdatomic.h>
#include <stdbool.h>

#include "base/clock.h"
#include "base/flight.h"
#include "base/status.h"

/* Shared by all ranks; all-zero is the initial state. */
struct cp_bell {
    _Atomic uint32_t
        count; /* rings that somebody may have slept through, the futex word */
    _Atomic uint32_t
        sleepers; /* waiters that may be asleep: no system call where there is none */
};

enum cp_poison_state { CP_POISON_NONE, CP_POISON_WRITING, CP_POISON_SET };

/* Shared by all ranks; all-zero is the initial state. The first writer wins. */
struct cp_poison {
    _Atomic uint32_t
        state; /* enum cp_poison_state; SET is stored with release, read with acquire */
    struct cp_status status;
};

/* One rank's view of the others. Nothing in it is owned. */
struct cp_watch {
    struct cp_bell *bell;
    struct cp_poison *poison;
    int rank, world;
    bool may_spin;
    /* True when that rank's process is gone or has closed its context. May be called
     * often; must be cheap. */
    bool (*is_dead)(void *peers, int rank);
    void *peers;
    /* (optional) Called at least ten times a second during a wait; anything but CP_OK
     * ends the wait. */
    enum cp_code (*interrupt)(void *arg);
    void *interrupt_arg;
    /* (optional) Where this rank notes its waits. */
    struct cp_recorder *recorder;
    /* (optional, world) All ranks' flight recorders: a wait that fails says what each
     * rank was doing. */
    const struct cp_flight *flights;
    /* With `flights`: a wait says so on stderr whenever this many seconds have passed;
     * 0: never. */
    double debug_s;
};

/* What is waited for. */
struct cp_wait {
    bool (*is_ready)(const void *arg);
    bool (*needs)(const void *arg, int rank); /* does it still wait for this rank? */
    const void *arg;
    const char *operation; /* for the message: "attention, call 7" */
};

/* CP_OK once ready. Otherwise the code of the poison, CP_ERR_COMM for a death,
 * CP_ERR_TIMEOUT naming every rank still missing and what all were doing, or what
 * `interrupt` returned; the context is then poisoned. */
CP_NODISCARD enum cp_code cp_watch_wait(struct cp_watch *watch,
                                        const struct cp_wait *wait,
                                        struct cp_deadline deadline);

/* Rings: to be called after every store that another rank may wait for. */
void cp_bell_ring(struct cp_bell *bell);

/* Sleeps until somebody rings, `ns` at most; not at all where `has_news` finds
 * something. What is stored before a ring is not slept through. */
void cp_bell_sleep(struct cp_bell *bell, bool (*has_news)(const void *arg),
                   const void *arg, int64_t ns);

/* The first reason wins; a later one is dropped. Rings the bell. */
void cp_watch_poison(struct cp_watch *watch, const struct cp_status *status);

/* Has it been? The calling thread's error stays what it is. */
bool cp_watch_is_poisoned(const struct cp_watch *watch);

/* CP_OK, or the poison as the calling thread's error. */
CP_NODISCARD enum cp_code cp_watch_check(const struct cp_watch *watch);

#endif
