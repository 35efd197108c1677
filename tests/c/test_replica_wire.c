/* Frames over a connection: whole, in pieces, through a full socket, and what is none. */
#include <poll.h>

#include "control/replica_wire.c"
#include "loopback.h"

static struct cp_frame frame_of(enum cp_frame_kind kind, bool has_error)
{
    struct cp_frame frame;
    memset(&frame, (int)kind + 1, sizeof frame);
    if (kind == CP_FRAME_RECORD) {
        frame.body.record.status.code = has_error ? CP_ERR_VALUE : CP_OK;
    }
    cp_frame_seal(&frame, kind);
    return frame;
}

static void check_passes(int from, int to, const struct cp_frame *frame)
{
    struct cp_frame_passing out = {.frame = *frame}, in = {.done = 0};
    CHECK_EQ_I64(cp_frame_send(from, &out), CP_PASSED);
    enum cp_passage passage = CP_PASSING;
    for (int i = 0; i < 5000 && passage == CP_PASSING; i++) {
        passage = cp_frame_receive(to, &in);
    }
    CHECK_EQ_I64(passage, CP_PASSED);
    CHECK_EQ_BYTES(&in.frame, frame, cp_frame_bytes(frame));
    CHECK_EQ_U64(in.done, 0);
    CHECK_EQ_I64(cp_frame_receive(to, &in), CP_PASSING);
}

TEST(every_kind_passes)
{
    int from = -1, to = -1;
    REQUIRE(loopback_pair(&from, &to));
    for (int kind = CP_FRAME_RECORD; kind <= CP_FRAME_FLIGHT; kind++) {
        for (int has_error = 0; has_error < 2; has_error++) {
            struct cp_frame frame = frame_of((enum cp_frame_kind)kind, has_error);
            check_passes(from, to, &frame);
        }
    }
    /* A text travels only with an error. */
    CHECK(frame_of(CP_FRAME_RECORD, false).head.bytes + CP_STATUS_TEXT <=
          frame_of(CP_FRAME_RECORD, true).head.bytes);
    (void)close(from);
    (void)close(to);
}

TEST(a_frame_in_single_bytes)
{
    int from = -1, to = -1;
    struct cp_frame frame = frame_of(CP_FRAME_RECORD, true);
    struct cp_frame_passing in = {.done = 0};
    REQUIRE(loopback_pair(&from, &to));
    for (size_t i = 0; i < cp_frame_bytes(&frame); i++) {
        CHECK_EQ_I64(cp_frame_receive(to, &in), CP_PASSING);
        CHECK_EQ_I64(send(from, (const char *)&frame + i, 1, 0), 1);
        struct pollfd poller = {.fd = to, .events = POLLIN};
        CHECK_EQ_I64(poll(&poller, 1, 5000), 1);
    }
    CHECK_EQ_I64(cp_frame_receive(to, &in), CP_PASSED);
    CHECK_EQ_BYTES(&in.frame, &frame, cp_frame_bytes(&frame));
    (void)close(from);
    (void)close(to);
}

TEST(a_full_socket_takes_the_rest_later)
{
    int from = -1, to = -1, sent = 0, heard = 0;
    struct cp_frame_passing out = {.frame = frame_of(CP_FRAME_POISON, false)};
    struct cp_frame_passing in = {.done = 0};
    REQUIRE(loopback_pair(&from, &to));
    while (cp_frame_send(from, &out) == CP_PASSED) {
        sent++;
    }
    CHECK(sent > 10);
    for (int i = 0; i < 100000 && heard <= sent; i++) {
        enum cp_passage passage = cp_frame_receive(to, &in);
        if (passage == CP_PASSED) {
            heard += CHECK_EQ_BYTES(&in.frame, &out.frame, cp_frame_bytes(&out.frame));
        } else if (heard < sent) {
            ranks_sleep_us(100);
        } else {
            CHECK_EQ_I64(cp_frame_send(from, &out), CP_PASSED);
        }
    }
    CHECK_EQ_I64(heard, sent + 1);
    (void)close(from);
    (void)close(to);
}

TEST(an_end_in_the_middle)
{
    int from = -1, to = -1;
    struct cp_frame frame = frame_of(CP_FRAME_FLIGHT, false);
    struct cp_frame_passing in = {.done = 0}, out = {.frame = frame};
    REQUIRE(loopback_pair(&from, &to));
    CHECK_EQ_I64(send(from, &frame, 20, 0), 20);
    (void)close(from);
    enum cp_passage passage = CP_PASSING;
    for (int i = 0; i < 5000 && passage == CP_PASSING; i++) {
        passage = cp_frame_receive(to, &in);
    }
    CHECK_EQ_I64(passage, CP_PASSED_AWAY);
    for (int i = 0; i < 5000 && passage != CP_PASSED; i++) {
        passage = cp_frame_send(to, &out) == CP_PASSED_AWAY ? CP_PASSED : CP_PASSING;
        ranks_sleep_us(100);
    }
    CHECK_EQ_I64(passage, CP_PASSED); /* to nobody: no signal, and it is said */
    (void)close(to);
}

TEST(what_is_no_frame)
{
    const struct cp_frame_head heads[] = {
        {.kind = CP_FRAME_FLIGHT + 1, .bytes = 8},
        {.kind = UINT32_MAX, .bytes = sizeof(struct cp_record)},
        {.kind = CP_FRAME_RECORD, .bytes = 0},
        {.kind = CP_FRAME_RECORD, .bytes = UINT32_MAX},
        {.kind = CP_FRAME_RECORD, .bytes = sizeof(struct cp_record) - 1},
        {.kind = CP_FRAME_POISON, .bytes = sizeof(struct cp_record)},
        {.kind = CP_FRAME_FLIGHT, .bytes = 4},
    };
    for (size_t i = 0; i < sizeof heads / sizeof heads[0]; i++) {
        int from = -1, to = -1;
        struct cp_frame_passing in = {.done = 0};
        REQUIRE(loopback_pair(&from, &to));
        CHECK_EQ_I64(send(from, &heads[i], sizeof heads[i], 0), sizeof heads[i]);
        enum cp_passage passage = CP_PASSING;
        for (int k = 0; k < 5000 && passage == CP_PASSING; k++) {
            passage = cp_frame_receive(to, &in);
        }
        TEST_CONTEXT("head %zu", i);
        CHECK_EQ_I64(passage, CP_PASSED_AWAY);
        (void)close(from);
        (void)close(to);
    }
}
