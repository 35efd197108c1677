/* Which copies the executor gives to an asynchronous device together, and what it does
 * around all that it gives it. The schedules are made by hand, and the device notes what it
 * is given; of copies that come together it does the last one first. */
#include "base/mem.h"
#include "exec/run.h"
#include "test.h"

enum { ROOM = 64, MOST_STEPS = 12, MOST_NOTES = 400 };

/* ---- the device ---- */

static char
    notes[MOST_NOTES]; /* "copy 3; record 12; ", for a lane's events and copies */
static bool notes_events, notes_calls; /* of lanes; of the caller's stream */
static bool adds_fail, joins_fail;     /* joins: records behind an add */

static void note(const char *what, int number)
{
    size_t used = strlen(notes);
    (void)snprintf(notes + used, sizeof notes - used, "%s %d; ", what, number);
}

static int peers_copies; /* copies from peers, or to them */

static enum cp_code noting_copy(struct cp_device *device, const struct cp_copy *copies,
                                int count, struct cp_stream *stream)
{
    (void)device;
    note("copy", count);
    for (int i = count - 1; i >= 0; i--) {
        peers_copies += copies[i].is_with_peer;
        CP_TRY(cp_device_cpu()->ops->copy(cp_device_cpu(), &copies[i], 1, stream));
    }
    return CP_OK;
}

static enum cp_code noting_add(struct cp_device *device, const struct cp_view *dst,
                               const struct cp_view *src, struct cp_stream *stream)
{
    (void)device;
    note("add", 1);
    if (adds_fail) {
        return cp_fail(CP_ERR_DEVICE, "no add");
    }
    return cp_device_cpu()->ops->add(cp_device_cpu(), dst, src, stream);
}

static struct cp_stream *noting_lane(struct cp_device *device, int lane)
{
    (void)device;
    (void)lane;
    return NULL;
}

static enum cp_code noting_record(struct cp_device *device, struct cp_stream *stream,
                                  int event)
{
    (void)device;
    (void)stream;
    if (event != CP_DEVICE_EVENT_CALL ? notes_events : notes_calls) {
        note("record", event);
    }
    return joins_fail && strstr(notes, "add") != NULL
               ? cp_fail(CP_ERR_DEVICE, "no record")
               : CP_OK;
}

static enum cp_code noting_await(struct cp_device *device, struct cp_stream *stream,
                                 int event)
{
    (void)device;
    (void)stream;
    if (notes_events && event != CP_DEVICE_EVENT_CALL) {
        note("await", event);
    }
    return CP_OK;
}

static const struct cp_device_ops noting_ops = {
    .name = "noting",
    .abi = CP_DEVICE_ABI,
    .copy = noting_copy,
    .add = noting_add,
    .lane = noting_lane,
    .record = noting_record,
    .await = noting_await,
};
static struct cp_device noting_device = {.ops = &noting_ops};

/* ---- the communicator ---- */

static enum cp_code noting_begin(struct cp_comm *comm, const struct cp_comm_call *call)
{
    (void)call;
    note("begin", comm->rank);
    return CP_OK;
}

static enum cp_code noting_end(struct cp_comm *comm, struct cp_stream *stream)
{
    (void)stream;
    note("end", comm->rank);
    return CP_OK;
}

static enum cp_code noting_publish(struct cp_comm *comm, int signal, uint64_t value,
                                   struct cp_stream *stream)
{
    (void)comm;
    (void)value;
    (void)stream;
    note("publish", signal);
    return CP_OK;
}

static enum cp_code noting_reached(struct cp_comm *comm,
                                   const struct cp_comm_wait *waits, int count,
                                   struct cp_stream *stream)
{
    (void)comm;
    (void)waits;
    (void)stream;
    note("reached", count);
    return CP_OK;
}

static const struct cp_comm_ops signal_ops = {.name = "signals",
                                              .abi = CP_COMM_ABI,
                                              .publish = noting_publish,
                                              .reached = noting_reached};
static float numbers[ROOM / 4];

/* All ranks' windows in the workspace. */
static void *noting_window(struct cp_comm *comm, int rank)
{
    (void)comm;
    (void)rank;
    return numbers;
}

static const struct cp_comm_ops window_ops = {
    .name = "windows", .abi = CP_COMM_ABI, .window = noting_window};
static const struct cp_comm_ops plain_ops = {.name = "plain", .abi = CP_COMM_ABI};
static const struct cp_comm_ops around_ops = {
    .name = "around", .abi = CP_COMM_ABI, .begin = noting_begin, .end = noting_end};
static struct cp_comm noting_comm = {.rank = 7, .world = 8};

/* ---- schedules ---- */

/* The workspace is numbers; a buffer is one of them, but for the last, which is two. */
enum { BOTH = ROOM / 4, BUFFERS };

static struct cp_buffer buffers[BUFFERS];
static struct cp_step steps[MOST_STEPS];
static struct cp_schedule schedule;

static void begin(void)
{
    static struct cp_plan plan;
    memset(steps, 0, sizeof steps);
    memset(notes, 0, sizeof notes);
    notes_events = notes_calls = adds_fail = joins_fail = false;
    noting_comm.ops = &plain_ops;
    for (int i = 0; i < BUFFERS; i++) {
        bool is_both = i == BOTH; /* numbers 0 and 1 */
        buffers[i] = (struct cp_buffer){.kind = CP_BUFFER_SCRATCH,
                                        .dtype = CP_DTYPE_FLOAT32,
                                        .offset_bytes = is_both ? 0 : 4 * i,
                                        .bytes = is_both ? 8 : 4,
                                        .n = {1, 1, 1, is_both ? 2 : 1},
                                        .stride_bytes = {8, 8, 8, 4}};
    }
    for (int i = 0; i < ROOM / 4; i++) {
        numbers[i] = (float)i;
    }
    schedule = (struct cp_schedule){.plan = &plan,
                                    .buffers = buffers,
                                    .buffer_count = BUFFERS,
                                    .steps = steps,
                                    .scratch_bytes = ROOM};
}

static struct cp_step *add_step(enum cp_step_op op, enum cp_lane lane, int dst, int src)
{
    struct cp_step *step = &steps[schedule.step_count];
    step->op = (uint8_t)op;
    step->lane = (uint8_t)lane;
    step->arg[CP_ARG_DST] = (struct cp_box){.buffer = dst, .n = {1, 1, 1, 1}};
    step->arg[CP_ARG_SRC] = (struct cp_box){.buffer = src, .n = {1, 1, 1, 1}};
    schedule.step_count += 1;
    return step;
}

static void play_until(struct cp_device *device, uint64_t capture, enum cp_code code)
{
    static const struct cp_view tensors[CP_TENSORS];
    struct cp_run run;
    void *room = NULL;
    struct cp_run_env env = {.comm = &noting_comm,
                             .device = device,
                             .scratch = (char *)numbers,
                             .capture = capture,
                             .operation = "a test"};
    REQUIRE(cp_mem_create(cp_run_room_bytes(&schedule), "a test", &room) == CP_OK);
    cp_run_init(&run, &env, &schedule, tensors, room);
    CHECK_EQ_I64(cp_run_poll(&run), code);
    cp_mem_destroy(&room);
}

static void play(struct cp_device *device)
{
    play_until(device, 0, CP_OK);
}

TEST(free_copies_in_a_row_go_together)
{
    begin();
    add_step(CP_STEP_COPY, CP_LANE_IN, 8, 2);
    add_step(CP_STEP_COPY, CP_LANE_COMPUTE, 4, 3); /* another lane is not in between */
    add_step(CP_STEP_COPY, CP_LANE_IN, 9, 2);
    add_step(CP_STEP_COPY, CP_LANE_IN, 10, 3);
    add_step(CP_STEP_REDUCE, CP_LANE_IN, 10, 8);
    add_step(CP_STEP_COPY, CP_LANE_IN, 11, 10);
    add_step(CP_STEP_COPY, CP_LANE_IN, 12, 10);
    play(&noting_device);
    CHECK_EQ_STR(notes, "copy 3; copy 1; add 1; copy 2; ");
    CHECK_NEAR(numbers[8], 2, 0);
    CHECK_NEAR(numbers[9], 2, 0);
    CHECK_NEAR(numbers[11], 5, 0);
    CHECK_NEAR(numbers[12], 5, 0);
}

TEST(a_device_is_told_which_copies_are_with_a_peer)
{
    begin();
    peers_copies = 0;
    buffers[8].kind = CP_BUFFER_WINDOW;
    buffers[8].owner = 6;
    buffers[9].kind = CP_BUFFER_WINDOW;
    buffers[9].owner = noting_comm.rank;
    noting_comm.ops = &window_ops;
    add_step(CP_STEP_COPY, CP_LANE_IN, 8, 2);
    add_step(CP_STEP_COPY, CP_LANE_IN, 9, 3);
    play(&noting_device);
    CHECK_EQ_STR(notes, "copy 2; ");
    CHECK_EQ_I64(peers_copies, 1);
}

TEST(a_copy_of_what_another_writes_comes_after_it)
{
    begin();
    add_step(CP_STEP_COPY, CP_LANE_IN, 8, 2);
    add_step(CP_STEP_COPY, CP_LANE_IN, 9, 8); /* reads */
    add_step(CP_STEP_COPY, CP_LANE_IN, 8, 3); /* is read before */
    add_step(CP_STEP_COPY, CP_LANE_IN, 8, 4); /* is written before */
    add_step(CP_STEP_COPY, CP_LANE_IN, 0, 5);
    add_step(CP_STEP_COPY, CP_LANE_IN, BOTH, 6); /* lies there too */
    play(&noting_device);
    CHECK_EQ_STR(notes, "copy 1; copy 1; copy 1; copy 2; copy 1; ");
    CHECK_NEAR(numbers[9], 2, 0);
    CHECK_NEAR(numbers[8], 4, 0);
    CHECK_NEAR(numbers[0], 6, 0);
}

TEST(nobody_waits_longer_for_copies_that_go_together)
{
    begin();
    notes_events = true;
    add_step(CP_STEP_COPY, CP_LANE_IN, 8, 2);
    add_step(CP_STEP_COPY, CP_LANE_IN, 9, 3);
    add_step(CP_STEP_COPY, CP_LANE_OUT, 7, 9)->after[CP_LANE_IN] = 2;
    add_step(CP_STEP_COPY, CP_LANE_IN, 10, 4);
    add_step(CP_STEP_COPY, CP_LANE_IN, 11, 5);
    /* Waits for another lane itself, and so does the next, which need not. */
    add_step(CP_STEP_COPY, CP_LANE_IN, 12, 7)->after[CP_LANE_OUT] = 1;
    add_step(CP_STEP_COPY, CP_LANE_IN, 13, 7)->after[CP_LANE_OUT] = 1;
    play(&noting_device);
    char want[MOST_NOTES];
    int in = CP_DEVICE_EVENT_CAPTURED + 1; /* the first of the lanes' events */
    int out = in + 2 * ((CP_DEVICE_EVENTS - in) / CP_LANES);
    (void)snprintf(want, sizeof want,
                   "copy 2; record %d; await %d; copy 1; record %d; "
                   "copy 2; await %d; copy 2; record %d; await %d; await %d; ",
                   in + 2, in + 2, out + 1, out + 1, in + 6, in + 6, out + 1);
    CHECK_EQ_STR(notes, want);
    CHECK_NEAR(numbers[13], 3, 0);
}

/* The lanes follow a record that comes behind it; what it ends with comes behind the lanes. */
TEST(a_communicator_is_told_around_all_that_a_call_enqueues)
{
    begin();
    notes_events = notes_calls = true;
    noting_comm.ops = &around_ops;
    add_step(CP_STEP_COPY, CP_LANE_IN, 8, 2);
    play(&noting_device);
    int lane = 0;
    const char *at = strstr(notes, "await ");
    REQUIRE(at != NULL && sscanf(at, "await %d", &lane) == 1);
    char want[MOST_NOTES];
    (void)snprintf(
        want, sizeof want,
        "begin 7; record %d; copy 1; record %d; await %d; end 7; record %d; ",
        CP_DEVICE_EVENT_CALL, lane, lane, CP_DEVICE_EVENT_CALL);
    CHECK_EQ_STR(notes, want);
}

/* What was enqueued happens, and the memory is the caller's to free behind it. */
TEST(the_caller_goes_on_behind_the_lanes_of_a_call_that_fails)
{
    begin();
    notes_events = notes_calls = adds_fail = true;
    noting_comm.ops = &around_ops;
    add_step(CP_STEP_COPY, CP_LANE_IN, 8, 2);
    add_step(CP_STEP_COPY, CP_LANE_IN, 9, 3);
    add_step(CP_STEP_REDUCE, CP_LANE_OUT, 10, 8);
    add_step(CP_STEP_COPY, CP_LANE_IN, 11, 3)->after[CP_LANE_OUT] = 1;
    play_until(&noting_device, 0, CP_ERR_DEVICE);
    CHECK_EQ_STR(cp_last_error()->text, "no add");
    char want[MOST_NOTES];
    int in = CP_DEVICE_EVENT_CAPTURED + 1;
    int out = in + 2 * ((CP_DEVICE_EVENTS - in) / CP_LANES);
    (void)snprintf(want, sizeof want,
                   "begin 7; record %d; copy 2; add 1; "
                   "record %d; await %d; record %d; await %d; record %d; ",
                   CP_DEVICE_EVENT_CALL, in + 2, in + 2, out, out,
                   CP_DEVICE_EVENT_CALL);
    CHECK_EQ_STR(notes, want);
}

/* The graph of half a call stays one that CUDA refuses; what the call failed by is what it
 * says, whatever fails behind it. */
TEST(a_failed_call_says_by_what_and_closes_no_capture)
{
    begin();
    notes_events = notes_calls = adds_fail = true;
    add_step(CP_STEP_REDUCE, CP_LANE_IN, 10, 8);
    play_until(&noting_device, 5, CP_ERR_DEVICE);
    char want[MOST_NOTES];
    (void)snprintf(want, sizeof want, "record %d; await %d; add 1; ",
                   CP_DEVICE_EVENT_CAPTURED, CP_DEVICE_EVENT_CAPTURED);
    CHECK_EQ_STR(notes, want);
    begin();
    adds_fail = joins_fail = true;
    add_step(CP_STEP_REDUCE, CP_LANE_IN, 10, 8);
    play_until(&noting_device, 0, CP_ERR_DEVICE);
    CHECK_EQ_STR(cp_last_error()->text, "no add");
}

/* In a graph a wait may be in front of all that it has no edge from, and peers wait for what
 * is published. */
TEST(in_a_capture_waits_are_behind_what_was_published)
{
    for (uint64_t capture = 0; capture < 2; capture++) {
        begin();
        notes_events = true;
        noting_comm.ops = &signal_ops;
        add_step(CP_STEP_PUBLISH, CP_LANE_IN, 0, 0);
        add_step(CP_STEP_COPY, CP_LANE_IN, 8, 2);
        add_step(CP_STEP_AWAIT, CP_LANE_OUT, 0, 0);
        add_step(CP_STEP_PUBLISH, CP_LANE_IN, 0, 0);
        play_until(&noting_device, capture, CP_OK);
        char want[MOST_NOTES];
        int in = CP_DEVICE_EVENT_CAPTURED + 1;
        int out = in + 2 * ((CP_DEVICE_EVENTS - in) / CP_LANES);
        if (capture == 0) {
            (void)snprintf(want, sizeof want,
                           "publish 0; copy 1; reached 1; record %d; publish 0; "
                           "record %d; await %d; await %d; ",
                           out + 1, in + 3, in + 3, out + 1);
        } else {
            (void)snprintf(want, sizeof want,
                           "record 1; await 1; await 1; publish 0; record %d; copy 1; "
                           "await %d; reached 1; record %d; publish 0; record %d; "
                           "await %d; await %d; ",
                           in + 1, in + 1, out + 1, in + 3, in + 3, out + 1);
        }
        CHECK_EQ_STR(notes, want);
    }
}

/* But not over what is published in between. */
TEST(waits_that_follow_each_other_go_together)
{
    begin();
    notes_events = true;
    noting_comm.ops = &signal_ops;
    add_step(CP_STEP_AWAIT, CP_LANE_IN, 0, 0);
    add_step(CP_STEP_AWAIT, CP_LANE_IN, 0, 0);
    add_step(CP_STEP_AWAIT, CP_LANE_IN, 0, 0);
    add_step(CP_STEP_PUBLISH, CP_LANE_COMPUTE, 0, 0);
    add_step(CP_STEP_AWAIT, CP_LANE_IN, 0, 0);
    add_step(CP_STEP_AWAIT, CP_LANE_IN, 0, 0)->after[CP_LANE_COMPUTE] = 1;
    play(&noting_device);
    char want[MOST_NOTES];
    int in = CP_DEVICE_EVENT_CAPTURED + 1;
    int compute = in + (CP_DEVICE_EVENTS - in) / CP_LANES;
    (void)snprintf(want, sizeof want,
                   "reached 3; publish 0; record %d; reached 1; await %d; reached 1; "
                   "record %d; await %d; ",
                   compute + 1, compute + 1, in + 5, in + 5);
    CHECK_EQ_STR(notes, want);
}

TEST(the_host_looks_after_messages_between_two_copies)
{
    begin();
    struct cp_device_ops host_ops = noting_ops;
    host_ops.lane = NULL;
    struct cp_device host = {.ops = &host_ops};
    add_step(CP_STEP_COPY, CP_LANE_IN, 8, 2);
    add_step(CP_STEP_COPY, CP_LANE_IN, 9, 3);
    play(&host);
    CHECK_EQ_STR(notes, "copy 1; copy 1; ");
}
