/* Writing and reading the flight recorder. */
#include "base/flight.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "base/clock.h"
#include "base/point.h"
#include "base/trace.h"

enum { OP_BITS = 8, WORDS = CP_FLIGHT_NAME / sizeof(uint64_t) };

const char cp_wait_name[] = "wait";

static uint64_t call_of(enum cp_op op, uint64_t number)
{
    return (number << OP_BITS) | (uint64_t)op;
}

static void set_call(struct cp_span *span, uint64_t call)
{
    span->call = call >> OP_BITS;
    span->op = (int32_t)(call & ((1U << OP_BITS) - 1));
}

/* ---- the writer ---- */

/* Whoever reads (acquire) anything of what is stored here into a place that is written
 * over also sees `claimed`, and so knows that what it reads may be mixed. */
static void write_event(struct cp_flight *flight, const char *name,
                        const struct cp_span *span)
{
    /* relaxed: only this rank writes. */
    uint64_t index = atomic_load_explicit(&flight->count, memory_order_relaxed);
    uint64_t call = atomic_load_explicit(&flight->call, memory_order_relaxed);
    struct cp_event *event = &flight->event[index % CP_FLIGHT_EVENTS];
    uint64_t words[WORDS] = {0};
    /* The last byte stays 0. */
    memcpy(words, name, strnlen(name, CP_FLIGHT_NAME - 1));
    /* relaxed: the releases below carry it. */
    atomic_store_explicit(&flight->claimed, index + 1, memory_order_relaxed);
    CP_POINT("flight: writing");
    /* release, all: each pairs with the acquire of the same word in cp_flight_read. */
    for (int word = 0; word < WORDS; word++) {
        atomic_store_explicit(&event->name[word], words[word], memory_order_release);
    }
    CP_POINT("flight: half written");
    atomic_store_explicit(&event->begin_ns, span->begin_ns, memory_order_release);
    atomic_store_explicit(&event->end_ns, span->end_ns, memory_order_release);
    atomic_store_explicit(&event->call, call, memory_order_release);
    atomic_store_explicit(&event->step, span->step, memory_order_release);
    atomic_store_explicit(&event->peer, span->peer, memory_order_release);
    atomic_store_explicit(&flight->count, index + 1, memory_order_release);
}

void cp_recorder_enter(struct cp_recorder *recorder, enum cp_op op, uint64_t call)
{
    if (recorder == NULL) {
        return;
    }
    struct cp_flight *flight = recorder->flight;
    /* relaxed: a reader in between gets the old time with the new call, no more. */
    atomic_store_explicit(&flight->since_ns, cp_now_ns(), memory_order_relaxed);
    atomic_store_explicit(&flight->call, call_of(op, call), memory_order_relaxed);
    atomic_store_explicit(&flight->is_inside, 1, memory_order_relaxed);
}

void cp_recorder_leave(struct cp_recorder *recorder, enum cp_code code)
{
    if (recorder == NULL) {
        return;
    }
    struct cp_flight *flight = recorder->flight;
    uint64_t call = atomic_load_explicit(&flight->call, memory_order_relaxed);
    struct cp_span span = {
        .begin_ns = atomic_load_explicit(&flight->since_ns, memory_order_relaxed),
        .end_ns = cp_now_ns(),
        .step = -1,
        .peer = -1,
    };
    set_call(&span, call);
    const char *name = cp_op_name((enum cp_op)span.op);
    write_event(flight, name, &span);
    /* relaxed: as in cp_recorder_enter. */
    atomic_store_explicit(&flight->since_ns, span.end_ns, memory_order_relaxed);
    atomic_store_explicit(&flight->is_inside, 0, memory_order_relaxed);
    if (recorder->trace != NULL) {
        (void)snprintf(span.name, sizeof span.name, "%s", name);
        cp_trace_add(recorder->trace, &span, code);
    }
}

uint64_t cp_recorder_call(const struct cp_recorder *recorder)
{
    /* relaxed: the thread's own store. */
    return recorder != NULL
               ? atomic_load_explicit(&recorder->flight->call, memory_order_relaxed)
               : 0;
}

void cp_flight_name_call(uint64_t call, char *text, size_t size)
{
    struct cp_span span;
    set_call(&span, call);
    if (call == 0) {
        (void)snprintf(text, size, "an exchange");
    } else {
        (void)snprintf(text, size, "%s, call %" PRIu64, cp_op_name((enum cp_op)span.op),
                       span.call);
    }
}

/* The writer's last event; there is one. */
static struct cp_event *newest(struct cp_flight *flight)
{
    /* relaxed: only this rank writes. */
    uint64_t count = atomic_load_explicit(&flight->count, memory_order_relaxed);
    return &flight->event[(count - 1) % CP_FLIGHT_EVENTS];
}

void cp_recorder_begin(struct cp_recorder *recorder, const char *name, int step,
                       int peer)
{
    if (recorder == NULL) {
        return;
    }
    struct cp_span span = {.begin_ns = cp_now_ns(), .step = step, .peer = peer};
    write_event(recorder->flight, name, &span);
}

void cp_recorder_end(struct cp_recorder *recorder)
{
    if (recorder == NULL) {
        return;
    }
    struct cp_flight *flight = recorder->flight;
    struct cp_span span;
    /* release: a reader of the event finds it as begun or as ended, whole both times. */
    atomic_store_explicit(&newest(flight)->end_ns, cp_now_ns(), memory_order_release);
    if (recorder->trace != NULL &&
        cp_flight_read(flight, cp_flight_count(flight) - 1, &span)) {
        cp_trace_add(recorder->trace, &span, CP_OK);
    }
}

void cp_recorder_still(struct cp_recorder *recorder, int peer)
{
    if (recorder == NULL) {
        return;
    }
    /* release: as the end in cp_recorder_end. */
    atomic_store_explicit(&newest(recorder->flight)->peer, peer, memory_order_release);
    if (recorder->trace != NULL) {
        cp_trace_flush(recorder->trace);
    }
}

/* ---- readers ---- */

uint64_t cp_flight_count(const struct cp_flight *flight)
{
    /* acquire: pairs with the release in `write_event`. */
    return atomic_load_explicit(&flight->count, memory_order_acquire);
}

bool cp_flight_read(const struct cp_flight *flight, uint64_t index,
                    struct cp_span *span)
{
    const struct cp_event *event = &flight->event[index % CP_FLIGHT_EVENTS];
    uint64_t words[WORDS];
    if (index >= cp_flight_count(flight)) {
        return false;
    }
    /* acquire, all: see `write_event`. */
    for (int word = 0; word < WORDS; word++) {
        words[word] = atomic_load_explicit(&event->name[word], memory_order_acquire);
    }
    CP_POINT("flight: half read");
    span->begin_ns = atomic_load_explicit(&event->begin_ns, memory_order_acquire);
    span->end_ns = atomic_load_explicit(&event->end_ns, memory_order_acquire);
    set_call(span, atomic_load_explicit(&event->call, memory_order_acquire));
    span->step = atomic_load_explicit(&event->step, memory_order_acquire);
    span->peer = atomic_load_explicit(&event->peer, memory_order_acquire);
    memcpy(span->name, words, sizeof span->name);
    span->name[CP_FLIGHT_NAME - 1] = '\0';
    /* relaxed: the acquires above carry it. */
    return atomic_load_explicit(&flight->claimed, memory_order_relaxed) - index <=
           CP_FLIGHT_EVENTS;
}

/* The rank is in `call`: what does it do there? */
static void print_inside(const struct cp_span *last, bool has_last,
                         const struct cp_span *call, char phrase[CP_FLIGHT_PHRASE])
{
    const char *op = cp_op_name((enum cp_op)call->op);
    bool is_open = has_last && last->end_ns == 0 && last->call == call->call;
    if (is_open && last->peer >= 0 && strcmp(last->name, cp_wait_name) == 0) {
        (void)snprintf(phrase, CP_FLIGHT_PHRASE,
                       "waiting for rank %d in %s, call %" PRIu64, last->peer, op,
                       call->call);
    } else if (is_open && last->step >= 0) {
        (void)snprintf(phrase, CP_FLIGHT_PHRASE, "in step %d (%s) of %s, call %" PRIu64,
                       last->step, last->name, op, call->call);
    } else {
        (void)snprintf(phrase, CP_FLIGHT_PHRASE, "in %s%s%s, call %" PRIu64,
                       is_open ? last->name : "", is_open ? " of " : "", op,
                       call->call);
    }
}

void cp_flight_phrase(const struct cp_flight *flight, int64_t now_ns,
                      char phrase[CP_FLIGHT_PHRASE], double *seconds)
{
    /* relaxed, all: see cp_recorder_enter. */
    bool is_inside =
        atomic_load_explicit(&flight->is_inside, memory_order_relaxed) != 0;
    int64_t since_ns = atomic_load_explicit(&flight->since_ns, memory_order_relaxed);
    uint64_t count = cp_flight_count(flight);
    struct cp_span call, last;
    set_call(&call, atomic_load_explicit(&flight->call, memory_order_relaxed));
    if (call.op == CP_OP_NONE) {
        (void)snprintf(phrase, CP_FLIGHT_PHRASE, "outside, before its first call");
        *seconds = 0.0;
        return;
    }
    if (is_inside) {
        bool has_last = count > 0 && cp_flight_read(flight, count - 1, &last);
        print_inside(&last, has_last, &call, phrase);
        if (has_last && last.end_ns == 0 && last.call == call.call) {
            since_ns = last.begin_ns;
        }
    } else {
        (void)snprintf(phrase, CP_FLIGHT_PHRASE, "outside, after %s, call %" PRIu64,
                       cp_op_name((enum cp_op)call.op), call.call);
    }
    *seconds = now_ns > since_ns ? (double)(now_ns - since_ns) * 1e-9 : 0.0;
}

/* ---- for other hosts ---- */

void cp_flight_tell(const struct cp_flight *flight, struct cp_flight_news *news)
{
    memset(news, 0, sizeof *news);
    news->count = cp_flight_count(flight);
    /* relaxed, all: see cp_recorder_enter. */
    news->call = atomic_load_explicit(&flight->call, memory_order_relaxed);
    news->is_inside = atomic_load_explicit(&flight->is_inside, memory_order_relaxed);
    news->since_ns = atomic_load_explicit(&flight->since_ns, memory_order_relaxed);
    if (news->count > 0 && !cp_flight_read(flight, news->count - 1, &news->last)) {
        memset(&news->last, 0, sizeof news->last);
    }
}

void cp_flight_hear(struct cp_flight *copy, const struct cp_flight_news *news,
                    int64_t shift_ns)
{
    struct cp_span last = news->last;
    last.begin_ns += shift_ns;
    last.end_ns += last.end_ns != 0 ? shift_ns : 0;
    last.name[CP_FLIGHT_NAME - 1] = '\0';
    /* relaxed, all: see cp_recorder_enter. */
    atomic_store_explicit(&copy->since_ns, news->since_ns + shift_ns,
                          memory_order_relaxed);
    atomic_store_explicit(&copy->is_inside, news->is_inside, memory_order_relaxed);
    atomic_store_explicit(&copy->call, news->call, memory_order_relaxed);
    if (news->count > 0) {
        atomic_store_explicit(&copy->count, news->count - 1, memory_order_relaxed);
        write_event(copy, last.name, &last);
    }
}
