/* The flight recorder: what comes back, what is old, what a reader beside a running,
 * stopped or dead writer gets. */
#define CP_TEST_POINTS
#include "base/clock.h"
#include "base/flight.c"
#include "ranks.h"
#include "test.h"

static void (*_Atomic at_point)(const char *name);

void cp_test_point(const char *name)
{
    void (*action)(const char *) = atomic_load(&at_point);
    if (action != NULL) {
        action(name);
    }
}

/* Too large for the stack of a thread of some sanitizers. */
static struct cp_flight *flight_new(void)
{
    struct cp_flight *flight = aligned_alloc(64, sizeof *flight);
    if (flight == NULL) {
        abort();
    }
    memset(flight, 0, sizeof *flight);
    return flight;
}

static const char *phrase_of(const struct cp_flight *flight, double *seconds)
{
    static char phrase[CP_FLIGHT_PHRASE];
    cp_flight_phrase(flight, cp_now_ns(), phrase, seconds);
    return phrase;
}

TEST(a_phrase_follows_the_rank_through_a_call)
{
    struct cp_flight *flight = flight_new();
    struct cp_recorder pen = {.flight = flight};
    double seconds = -1.0;
    CHECK_EQ_STR(phrase_of(flight, &seconds), "outside, before its first call");
    CHECK_EQ_I64((int64_t)seconds, 0);
    cp_recorder_enter(&pen, CP_OP_ATTENTION, 7);
    CHECK_EQ_STR(phrase_of(flight, &seconds), "in attention, call 7");
    cp_recorder_begin(&pen, "plan", -1, -1);
    CHECK_EQ_STR(phrase_of(flight, &seconds), "in plan of attention, call 7");
    cp_recorder_end(&pen);
    CHECK_EQ_STR(phrase_of(flight, &seconds), "in attention, call 7");
    cp_recorder_begin(&pen, cp_wait_name, -1, 1);
    CHECK_EQ_STR(phrase_of(flight, &seconds),
                 "waiting for rank 1 in attention, call 7");
    cp_recorder_still(&pen, 2);
    CHECK_EQ_STR(phrase_of(flight, &seconds),
                 "waiting for rank 2 in attention, call 7");
    cp_recorder_end(&pen);
    cp_recorder_begin(&pen, "ATTEND", 5, -1);
    ranks_sleep_us(20000);
    CHECK_EQ_STR(phrase_of(flight, &seconds),
                 "in step 5 (ATTEND) of attention, call 7");
    CHECK(seconds >= 0.02 && seconds < 10.0);
    cp_recorder_end(&pen);
    cp_recorder_leave(&pen, CP_OK);
    CHECK_EQ_STR(phrase_of(flight, &seconds), "outside, after attention, call 7");
    cp_recorder_enter(&pen, CP_OP_GATHER, 8);
    CHECK_EQ_STR(phrase_of(flight, &seconds), "in gather, call 8");
    free(flight);
}

TEST(a_call_is_told_and_named_later)
{
    struct cp_flight *flight = flight_new();
    struct cp_recorder pen = {.flight = flight};
    char name[64];
    cp_flight_name_call(cp_recorder_call(&pen), name, sizeof name);
    CHECK_EQ_STR(name, "an exchange");
    cp_recorder_enter(&pen, CP_OP_ATTENTION_BACKWARD, 70000);
    uint64_t call = cp_recorder_call(&pen);
    cp_recorder_leave(&pen, CP_OK);
    cp_recorder_enter(&pen, CP_OP_GATHER, 70001);
    cp_flight_name_call(call, name, sizeof name);
    CHECK_EQ_STR(name, "attention backward, call 70000");
    free(flight);
}

TEST(a_rank_without_a_recorder_notes_nothing)
{
    CHECK_EQ_U64(cp_recorder_call(NULL), 0);
    cp_recorder_enter(NULL, CP_OP_ATTENTION, 1);
    cp_recorder_begin(NULL, "plan", -1, -1);
    cp_recorder_still(NULL, 1);
    cp_recorder_end(NULL);
    cp_recorder_leave(NULL, CP_OK);
}

TEST(the_last_events_can_be_read_and_no_older_ones)
{
    struct cp_flight *flight = flight_new();
    struct cp_recorder pen = {.flight = flight};
    const int total = 3 * CP_FLIGHT_EVENTS / 2;
    struct cp_span span;
    CHECK(!cp_flight_read(flight, 0, &span));
    cp_recorder_enter(&pen, CP_OP_GATHER, 300);
    for (int i = 0; i < total; i++) {
        char name[24];
        (void)snprintf(name, sizeof name, "step %d", i);
        cp_recorder_begin(&pen, name, i, i % 5);
        if (i + 1 < total) {
            cp_recorder_end(&pen);
        }
    }
    CHECK_EQ_U64(cp_flight_count(flight), total);
    for (int i = 0; i < total; i++) {
        char name[24];
        (void)snprintf(name, sizeof name, "step %d", i);
        bool is_kept = i >= total - CP_FLIGHT_EVENTS;
        if (!CHECK_EQ_I64(cp_flight_read(flight, (uint64_t)i, &span), is_kept) ||
            !is_kept) {
            continue;
        }
        CHECK_EQ_STR(span.name, name);
        CHECK_EQ_I64(span.step, i);
        CHECK_EQ_I64(span.peer, i % 5);
        CHECK_EQ_U64(span.call, 300);
        CHECK_EQ_I64(span.op, CP_OP_GATHER);
        CHECK(span.begin_ns > 0);
        CHECK(i + 1 < total ? span.end_ns >= span.begin_ns : span.end_ns == 0);
    }
    CHECK(!cp_flight_read(flight, (uint64_t)total, &span));
    free(flight);
}

TEST(a_long_name_is_cut)
{
    struct cp_flight *flight = flight_new();
    struct cp_recorder pen = {.flight = flight};
    struct cp_span span;
    cp_recorder_begin(&pen, "a name of more than twenty-three bytes", -1, -1);
    REQUIRE(cp_flight_read(flight, 0, &span));
    CHECK_EQ_STR(span.name, "a name of more than twe");
    free(flight);
}

/* ---- beside a writer ---- */

struct pair {
    struct cp_flight *flight;
    _Atomic int is_over;
    _Atomic uint64_t whole, refused;
};

/* What a whole event number i looks like. */
static bool is_event(const struct cp_span *span, uint64_t i)
{
    char name[24];
    (void)snprintf(name, sizeof name, "%llu", (unsigned long long)i);
    return strcmp(span->name, name) == 0 && span->step == (int32_t)(i % 1000) &&
           span->peer == (int32_t)(i % 7) &&
           (span->end_ns == 0 || span->end_ns >= span->begin_ns);
}

static void write_or_read(int rank, void *arg)
{
    enum { EVENTS = 60000 };
    struct pair *pair = arg;
    if (rank == 0) {
        struct cp_recorder pen = {.flight = pair->flight};
        for (uint64_t i = 0; i < EVENTS; i++) {
            char name[24];
            (void)snprintf(name, sizeof name, "%llu", (unsigned long long)i);
            cp_recorder_begin(&pen, name, (int)(i % 1000), (int)(i % 7));
            cp_recorder_end(&pen);
        }
        atomic_store(&pair->is_over, 1);
        return;
    }
    while (atomic_load(&pair->is_over) == 0) {
        uint64_t count = cp_flight_count(pair->flight);
        uint64_t back = count < CP_FLIGHT_EVENTS ? count : CP_FLIGHT_EVENTS;
        /* The newest, and the oldest, which is about to be written over. */
        uint64_t wanted[2] = {count - 1, count - back};
        for (int i = 0; i < 2 && count > 0; i++) {
            struct cp_span span;
            if (cp_flight_read(pair->flight, wanted[i], &span)) {
                CHECK(is_event(&span, wanted[i]));
                atomic_fetch_add(&pair->whole, 1);
            } else {
                atomic_fetch_add(&pair->refused, 1);
            }
        }
    }
}

TEST(readers_beside_a_writer_never_get_a_mixed_event)
{
    struct pair pair = {.flight = flight_new()};
    ranks_as_threads(3, write_or_read, &pair);
    CHECK(atomic_load(&pair.whole) > 0);
    free(pair.flight);
}

/* The writer is stopped where the point is, and a reader looks. */
static struct cp_flight *stopped;
static int looks;

static void look_in_between(const char *name)
{
    struct cp_span span;
    if (strcmp(name, "flight: half written") != 0) {
        return;
    }
    atomic_store(&at_point, NULL);
    uint64_t count = cp_flight_count(stopped);
    looks++;
    CHECK(!cp_flight_read(stopped, count, &span));
    if (count >= CP_FLIGHT_EVENTS) {
        CHECK(!cp_flight_read(stopped, count - CP_FLIGHT_EVENTS, &span));
    }
    if (count > 0) {
        CHECK(cp_flight_read(stopped, count - 1, &span));
        CHECK(is_event(&span, count - 1));
    }
    atomic_store(&at_point, look_in_between);
}

TEST(a_writer_stopped_in_the_middle_hides_the_oldest_event_and_no_other)
{
    stopped = flight_new();
    looks = 0;
    struct cp_recorder pen = {.flight = stopped};
    atomic_store(&at_point, look_in_between);
    for (uint64_t i = 0; i < CP_FLIGHT_EVENTS + 40; i++) {
        char name[24];
        (void)snprintf(name, sizeof name, "%llu", (unsigned long long)i);
        cp_recorder_begin(&pen, name, (int)(i % 1000), (int)(i % 7));
        cp_recorder_end(&pen);
    }
    atomic_store(&at_point, NULL);
    CHECK_EQ_I64(looks, CP_FLIGHT_EVENTS + 40);
    free(stopped);
}

/* The reader is stopped in the middle, and the writer goes once round. */
static void overtake(const char *name)
{
    struct cp_recorder pen = {.flight = stopped};
    if (strcmp(name, "flight: half read") != 0) {
        return;
    }
    atomic_store(&at_point, NULL);
    for (int i = 0; i < CP_FLIGHT_EVENTS; i++) {
        cp_recorder_begin(&pen, "new", 1, 1);
    }
}

TEST(a_reader_that_is_overtaken_notices)
{
    struct cp_span span;
    stopped = flight_new();
    struct cp_recorder pen = {.flight = stopped};
    cp_recorder_begin(&pen, "old", 0, 0);
    atomic_store(&at_point, overtake);
    CHECK(!cp_flight_read(stopped, 0, &span));
    free(stopped);
}

/* As an other host gets it: the same phrase, on this host's clock. */
static void check_heard(const struct cp_flight *flight, struct cp_flight *copy,
                        const char *want)
{
    const int64_t shift_ns = 5000000000;
    struct cp_flight_news news;
    char phrase[CP_FLIGHT_PHRASE], original[CP_FLIGHT_PHRASE];
    double seconds = -1.0, original_seconds = -2.0;
    int64_t now_ns = cp_now_ns();
    cp_flight_tell(flight, &news);
    cp_flight_hear(copy, &news, shift_ns);
    cp_flight_phrase(flight, now_ns, original, &original_seconds);
    cp_flight_phrase(copy, now_ns + shift_ns, phrase, &seconds);
    CHECK_EQ_STR(phrase, want);
    CHECK_EQ_STR(phrase, original);
    CHECK_NEAR(seconds, original_seconds, 1e-9);
}

TEST(news_say_the_same_elsewhere)
{
    static struct cp_flight flight, copy;
    struct cp_recorder recorder = {.flight = &flight};
    check_heard(&flight, &copy, "outside, before its first call");
    cp_recorder_enter(&recorder, CP_OP_ATTENTION, 1);
    check_heard(&flight, &copy, "in attention, call 1");
    for (uint64_t call = 2; call < 2 + CP_FLIGHT_EVENTS; call++) {
        cp_recorder_begin(&recorder, cp_wait_name, -1, 2);
        check_heard(&flight, &copy, "waiting for rank 2 in attention, call 1");
        cp_recorder_end(&recorder);
        check_heard(&flight, &copy, "in attention, call 1");
    }
    cp_recorder_leave(&recorder, CP_OK);
    check_heard(&flight, &copy, "outside, after attention, call 1");
    /* In a call without an event: the last one is of the call before. */
    cp_recorder_enter(&recorder, CP_OP_GATHER, 2);
    check_heard(&flight, &copy, "in gather, call 2");
    cp_recorder_begin(&recorder, "SEND", 3, 1);
    check_heard(&flight, &copy, "in step 3 (SEND) of gather, call 2");
}
