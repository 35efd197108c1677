/* The flight recorder: what a rank is doing and its last 256 events, in memory that the
 * others can read while the rank is stopped, and after it died.
 *
 * Only the rank itself writes, a few plain stores an event; nobody locks. An event is a
 * span of time inside a call: a step of the schedule, a wait, the making of a plan; at
 * its end the call itself is one. A reader never sees half of one: `claimed` says which
 * places may be in the middle of being written over, `count` which are whole. */
#ifndef CP_BASE_FLIGHT_H
#define CP_BASE_FLIGHT_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>

#include "base/record.h"

enum { CP_FLIGHT_EVENTS = 256, CP_FLIGHT_NAME = 24, CP_FLIGHT_PHRASE = 160 };

/* A span as its writer gives it and its reader gets it. */
struct cp_span {
    int64_t begin_ns, end_ns;  /* on the clock of cp_now_ns; end 0: not over */
    uint64_t call;             /* its number */
    int32_t op;                /* enum cp_op */
    int32_t step;              /* in the schedule; -1: none */
    int32_t peer;              /* the rank that it is about; -1: none */
    char name[CP_FLIGHT_NAME]; /* "ATTEND"; cut where it is longer */
};

/* One event as it lies in shared memory: a cache line. */
struct cp_event {
    _Alignas(64) _Atomic int64_t begin_ns;
    _Atomic int64_t end_ns;
    _Atomic uint64_t name[CP_FLIGHT_NAME / sizeof(uint64_t)];
    _Atomic uint64_t call; /* as in struct cp_flight */
    _Atomic int32_t step, peer;
};

/* Of one rank; all-zero is the initial state. */
struct cp_flight {
    _Alignas(64) _Atomic uint64_t claimed; /* events begun, the one being written
                                              included */
    _Atomic uint64_t count;                /* events begun and whole */
    _Atomic uint64_t call; /* the call it is in, or was in last: its number above 8 bits
                              of enum cp_op; 0: there was none */
    _Atomic uint64_t is_inside;
    _Atomic int64_t since_ns; /* when it went in or out */
    struct cp_event event[CP_FLIGHT_EVENTS];
};

/* The name of a span in which a rank waits for `peer`. */
extern const char cp_wait_name[];

struct cp_trace;

/* A rank's pen. Nothing in it is owned. All functions accept NULL for it, and then do
 * nothing. */
struct cp_recorder {
    struct cp_flight *flight;
    struct cp_trace *trace; /* (optional) every span that ends goes there too */
};

/* The rank goes into a call, and out of it; `code` is how it ended. Begun spans have
 * ended by then. */
void cp_recorder_enter(struct cp_recorder *recorder, enum cp_op op, uint64_t call);
void cp_recorder_leave(struct cp_recorder *recorder, enum cp_code code);

/* A span inside the call; they follow each other. `step`, `peer`: -1 for none. */
void cp_recorder_begin(struct cp_recorder *recorder, const char *name, int step,
                       int peer);
void cp_recorder_end(struct cp_recorder *recorder);

/* The rank still waits, for `peer` by now. Time to write down what the trace has kept
 * back. */
void cp_recorder_still(struct cp_recorder *recorder, int peer);

/* The call that the rank is in, or was in last, as in struct cp_flight; 0: nobody knows. For
 * the thread that enters and leaves. */
uint64_t cp_recorder_call(const struct cp_recorder *recorder);
/* "attention, call 7"; "an exchange" for 0. */
void cp_flight_name_call(uint64_t call, char *text, size_t size);

/* Any rank may ask these of any other's. */
/* How many events there have been; the last CP_FLIGHT_EVENTS of them can be read. */
uint64_t cp_flight_count(const struct cp_flight *flight);
/* False where event `index` (from 0) is not there yet, or not any more. */
bool cp_flight_read(const struct cp_flight *flight, uint64_t index,
                    struct cp_span *span);
/* "waiting for rank 1 in attention, call 7", and for how long. */
void cp_flight_phrase(const struct cp_flight *flight, int64_t now_ns,
                      char phrase[CP_FLIGHT_PHRASE], double *seconds);

/* What cp_flight_phrase says of a rank, to be told to another host: its call and its
 * last event. Plain numbers, times on the clock of the rank's own host. */
struct cp_flight_news {
    uint64_t count, call, is_inside; /* as in struct cp_flight */
    int64_t since_ns;
    struct cp_span last; /* all 0 where there is none, or it went by too fast */
};

void cp_flight_tell(const struct cp_flight *flight, struct cp_flight_news *news);
/* Writes them into a copy of the rank's recorder, whose older events are not those of
 * the original. `shift_ns`: this host's clock less that one's. */
void cp_flight_hear(struct cp_flight *copy, const struct cp_flight_news *news,
                    int64_t shift_ns);

#endif
