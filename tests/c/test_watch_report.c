/* The sentence that says what every rank is doing, and where it appears. */
#include "base/watch_report.h"
#include "ranks.h"
#include "test.h"

enum { WORLD = 5 };

struct rig {
    struct cp_bell bell;
    struct cp_poison poison;
    struct cp_flight *flights;
    int dead;
};

static bool is_dead(void *peers, int rank)
{
    const struct rig *rig = peers;
    return rank == rig->dead;
}

static bool is_never_ready(const void *arg)
{
    (void)arg;
    return false;
}

static bool needs_two(const void *arg, int rank)
{
    (void)arg;
    return rank == 2;
}

static struct rig rig_new(int world)
{
    struct rig rig = {.dead = -1};
    size_t bytes = (size_t)world * sizeof *rig.flights;
    rig.flights = aligned_alloc(64, bytes);
    if (rig.flights == NULL) {
        abort();
    }
    memset(rig.flights, 0, bytes);
    return rig;
}

static struct cp_watch watch_of(struct rig *rig, int rank, int world)
{
    return (struct cp_watch){.bell = &rig->bell,
                             .poison = &rig->poison,
                             .rank = rank,
                             .world = world,
                             .is_dead = is_dead,
                             .peers = rig,
                             .flights = rig->flights};
}

static struct cp_recorder pen_of(struct rig *rig, int rank)
{
    return (struct cp_recorder){.flight = &rig->flights[rank]};
}

/* Ranks 0, 1, 3 wait for rank 2, which has left its last call; rank 4 computes. */
static void set_the_scene(struct rig *rig)
{
    for (int rank = 0; rank < WORLD; rank++) {
        struct cp_recorder pen = pen_of(rig, rank);
        cp_recorder_enter(&pen, CP_OP_GATHER, 6);
        cp_recorder_leave(&pen, CP_OK);
        if (rank != 2) {
            cp_recorder_enter(&pen, CP_OP_ATTENTION, 7);
            cp_recorder_begin(&pen, rank == 4 ? "ATTEND" : cp_wait_name,
                              rank == 4 ? 3 : -1, rank == 4 ? -1 : 2);
        }
    }
}

TEST(ranks_that_do_the_same_are_named_once)
{
    struct rig rig = rig_new(WORLD);
    struct cp_watch watch = watch_of(&rig, 0, WORLD);
    char text[CP_STATUS_TEXT];
    set_the_scene(&rig);
    cp_watch_report(&watch, text, sizeof text);
    CHECK_EQ_STR(text,
                 ". Meanwhile ranks 0, 1, 3: waiting for rank 2 in attention, call 7 "
                 "(0.0 s); rank 2: outside, after gather, call 6 (0.0 s); rank 4: in "
                 "step 3 (ATTEND) of attention, call 7 (0.0 s)");
    free(rig.flights);
}

TEST(a_dead_rank_is_gone_whatever_it_was_doing)
{
    struct rig rig = rig_new(WORLD);
    struct cp_watch watch = watch_of(&rig, 0, WORLD);
    char text[CP_STATUS_TEXT];
    set_the_scene(&rig);
    rig.dead = 3;
    cp_watch_report(&watch, text, sizeof text);
    CHECK_STR_HAS(text, "ranks 0, 1: waiting for rank 2");
    CHECK_STR_HAS(text, "; rank 3: gone (0.0 s)");
    free(rig.flights);
}

TEST(what_does_not_fit_is_cut_and_many_ranks_are_no_harm)
{
    enum { MANY = 100 };
    struct rig rig = rig_new(MANY);
    struct cp_watch watch = watch_of(&rig, 0, MANY);
    char text[200];
    for (int rank = 0; rank < MANY; rank++) {
        struct cp_recorder pen = pen_of(&rig, rank);
        cp_recorder_enter(&pen, CP_OP_ATTENTION, (uint64_t)rank); /* all differ */
    }
    memset(text, 'x', sizeof text);
    cp_watch_report(&watch, text, sizeof text - 1);
    CHECK_EQ_U64(strlen(text), sizeof text - 2);
    CHECK_EQ_I64(text[sizeof text - 1], 'x');
    free(rig.flights);
}

TEST(without_recorders_nothing_is_said)
{
    struct rig rig = rig_new(WORLD);
    struct cp_watch watch = watch_of(&rig, 0, WORLD);
    char text[CP_STATUS_TEXT] = "something";
    watch.flights = NULL;
    cp_watch_report(&watch, text, sizeof text);
    CHECK_EQ_STR(text, "");
    free(rig.flights);
}

static struct cp_wait wait_for_two(void)
{
    return (struct cp_wait){.is_ready = is_never_ready,
                            .needs = needs_two,
                            .operation = "attention, call 7"};
}

TEST(a_timeout_says_what_all_were_doing)
{
    struct rig rig = rig_new(WORLD);
    struct cp_watch watch = watch_of(&rig, 0, WORLD);
    struct cp_recorder pen = pen_of(&rig, 0);
    struct cp_wait wait = wait_for_two();
    struct cp_span span;
    set_the_scene(&rig);
    watch.recorder = &pen;
    CHECK_EQ_I64(cp_watch_wait(&watch, &wait, cp_deadline_in(0.2)), CP_ERR_TIMEOUT);
    CHECK_STR_HAS(cp_last_error()->text,
                  "rank 2 did not come to attention, call 7 within 0.2 s. Meanwhile "
                  "ranks 0, 1, 3: waiting for rank 2 in attention, call 7 (0.2 s); "
                  "rank 2: outside, after gather, call 6 (0.2 s)");
    /* The wait is the recorder's last event, and it has ended. */
    REQUIRE(
        cp_flight_read(&rig.flights[0], cp_flight_count(&rig.flights[0]) - 1, &span));
    CHECK_EQ_STR(span.name, cp_wait_name);
    CHECK_EQ_I64(span.peer, 2);
    CHECK(span.end_ns - span.begin_ns >= 200000000);
    free(rig.flights);
}

TEST(a_death_says_where_the_rank_was_last_seen)
{
    struct rig rig = rig_new(WORLD);
    struct cp_watch watch = watch_of(&rig, 0, WORLD);
    struct cp_wait wait = wait_for_two();
    set_the_scene(&rig);
    rig.dead = 2;
    CHECK_EQ_I64(cp_watch_wait(&watch, &wait, cp_deadline_in(5.0)), CP_ERR_COMM);
    CHECK_STR_HAS(cp_last_error()->text,
                  "for it in attention, call 7; it was last seen outside, after "
                  "gather, call 6");
    free(rig.flights);
}

/* Two reports in 0.25 s of waiting where one is due every 0.1 s; none where none is. */
static int reports_in_a_wait(double debug_s)
{
    char said[4096] = "";
    int count = 0, pipe_fds[2], kept = dup(2);
    struct rig rig = rig_new(WORLD);
    struct cp_watch watch = watch_of(&rig, 0, WORLD);
    struct cp_wait wait = wait_for_two();
    set_the_scene(&rig);
    watch.debug_s = debug_s;
    if (kept < 0 || pipe(pipe_fds) != 0 || dup2(pipe_fds[1], 2) < 0) {
        abort();
    }
    CHECK_EQ_I64(cp_watch_wait(&watch, &wait, cp_deadline_in(0.25)), CP_ERR_TIMEOUT);
    (void)dup2(kept, 2);
    (void)close(kept);
    (void)close(pipe_fds[1]);
    CHECK(read(pipe_fds[0], said, sizeof said - 1) >= 0);
    (void)close(pipe_fds[0]);
    for (const char *at = strstr(said, "cp_attn: rank 0 has waited "); at != NULL;
         at = strstr(at + 1, "cp_attn: rank 0 has waited ")) {
        CHECK_STR_HAS(at, "in attention, call 7. Meanwhile ranks 0, 1, 3: waiting");
        count++;
    }
    free(rig.flights);
    return count;
}

TEST(a_long_wait_is_reported_where_somebody_asked_for_it)
{
    CHECK_EQ_I64(reports_in_a_wait(0.1), 2);
    CHECK_EQ_I64(reports_in_a_wait(0.0), 0);
    CHECK_EQ_I64(reports_in_a_wait(10.0), 0);
}

/* The own rank is never waited for. */
TEST(others_are_named)
{
    const bool is_named[WORLD] = {true, true, false, true, false};
    const bool nobody[WORLD] = {true};
    struct rig rig = rig_new(WORLD);
    struct cp_watch watch = watch_of(&rig, 0, WORLD);
    char text[64], cut[9];
    cp_watch_name_others(&watch, is_named, text, sizeof text);
    CHECK(strcmp(text, "ranks 1, 3") == 0);
    cp_watch_name_others(&watch, is_named, cut, sizeof cut);
    CHECK(strcmp(cut, "ranks 1,") == 0);
    watch.rank = 3;
    cp_watch_name_others(&watch, nobody, text, sizeof text);
    CHECK(strcmp(text, "rank 0") == 0);
    watch.rank = 0;
    cp_watch_name_others(&watch, nobody, text, sizeof text);
    CHECK(strcmp(text, "") == 0);
    free(rig.flights);
}

TEST(waits_of_a_device_fail)
{
    struct rig rig = rig_new(WORLD);
    struct cp_watch watch = watch_of(&rig, 1, WORLD);
    CHECK_EQ_I64(cp_watch_fail_device_late(&watch, 2.5, "ranks 0, 4", 0, "on its GPU"),
                 CP_ERR_TIMEOUT);
    CHECK_EQ_I64(cp_last_error()->rank, 1);
    CHECK_STR_HAS(cp_last_error()->text, "rank 1 waited more than 2.5 s for ranks 0, 4 "
                                         "in an exchange (on its GPU). Meanwhile ");
    CHECK_EQ_I64(
        cp_watch_fail_device_gone(&watch, 4, 7 << 8 | CP_OP_ATTENTION, "there"),
        CP_ERR_COMM);
    CHECK_EQ_I64(cp_last_error()->rank, 4);
    CHECK_STR_HAS(cp_last_error()->text, "rank 4 is gone");
    CHECK_STR_HAS(cp_last_error()->text,
                  "while rank 1 waited for it in attention, call 7 (there)");
    free(rig.flights);
}
