/* Making schedules: the picture of small ones, failed allocations, sizes that overflow.
 * (Whether they are right: test_verify.c, test_run.c.) */
#include "base/mem.h"
#include "schedule/schedule.h"
#include "test.h"

enum { MOST = 6 };

static const struct cp_format format = {
    .id = 1, .k = {1, 32}, .v = {1, 32}, .state = {1, 40}};

static void attention(struct cp_record *records, int ring, int ulysses, enum cp_op op,
                      int64_t rows)
{
    memset(records, 0, MOST * sizeof *records);
    for (int rank = 0; rank < ring * ulysses; rank++) {
        struct cp_call *call = &records[rank].call;
        call->op = (int32_t)op;
        call->dtype = CP_DTYPE_FLOAT32;
        call->batch = 1;
        call->heads = 4;
        call->kv_heads = 2;
        call->head_dim = 8;
        call->value_dim = 8;
        call->variant = CP_ANYTHING;
        call->ring_degree = ring;
        call->ulysses_degree = ulysses;
        call->want_lse = 1;
        records[rank].sizes[CP_SIZE_Q_ROWS] = rows;
        records[rank].sizes[CP_SIZE_KV_ROWS] = rows;
    }
}

static int count_steps(const struct cp_schedule *schedule, enum cp_step_op op)
{
    int count = 0;
    for (int32_t step = 0; step < schedule->step_count; step++) {
        count += schedule->steps[step].op == op;
    }
    return count;
}

TEST(a_ring_attends_every_block_once_and_copies_no_queries)
{
    struct cp_record records[MOST];
    struct cp_plan *plan = NULL;
    struct cp_schedule *schedule = NULL;
    attention(records, 3, 1, CP_OP_ATTENTION, 4);
    CHECK_EQ_I64(cp_plan_create(records, 3, &format, &plan), CP_OK);
    CHECK_EQ_I64(cp_schedule_create(plan, 1, CP_PULL, &schedule), CP_OK);
    CHECK_EQ_I64(count_steps(schedule, CP_STEP_ATTEND), 3);
    CHECK_EQ_I64(count_steps(schedule, CP_STEP_PACK), 2);
    CHECK_EQ_I64(count_steps(schedule, CP_STEP_COPY), 0);
    CHECK_EQ_I64(count_steps(schedule, CP_STEP_AWAIT), 2);
    cp_schedule_destroy(&schedule);
    cp_plan_destroy(&plan);
}

/* Two blocks of three members' keys. Each tensor is copied once for each member on the way
 * there, and once from each on the way back: parts are received into their places. */
TEST(a_group_is_one_block_over_sends_and_receives)
{
    struct cp_record records[MOST];
    struct cp_plan *plan = NULL;
    struct cp_schedule *schedule = NULL;
    int64_t bytes = 0;
    attention(records, 2, 3, CP_OP_ATTENTION, 4);
    CHECK_EQ_I64(cp_plan_create(records, 6, &format, &plan), CP_OK);
    CHECK_EQ_I64(cp_schedule_create(plan, 1, CP_TWO_SIDED, &schedule), CP_OK);
    CHECK_EQ_I64(count_steps(schedule, CP_STEP_ATTEND), 2);
    CHECK_EQ_I64(count_steps(schedule, CP_STEP_PACK), 2);
    CHECK_EQ_I64(count_steps(schedule, CP_STEP_COPY), (3 + 2) * 3);
    for (int32_t i = 0; i < schedule->buffer_count; i++) {
        bytes += schedule->buffers[i].bytes;
    }
    CHECK(schedule->scratch_bytes < bytes);
    cp_schedule_destroy(&schedule);
    cp_plan_destroy(&plan);
}

TEST(a_causal_ring_skips_blocks_that_no_row_sees)
{
    for (int rank = 0; rank < 3; rank++) {
        struct cp_record records[MOST];
        struct cp_plan *plan = NULL;
        struct cp_schedule *schedule = NULL;
        attention(records, 3, 1, CP_OP_ATTENTION, 4);
        for (int r = 0; r < 3; r++) {
            records[r].call.is_causal = 1;
        }
        CHECK_EQ_I64(cp_plan_create(records, 3, &format, &plan), CP_OK);
        CHECK_EQ_I64(cp_schedule_create(plan, rank, CP_PULL, &schedule), CP_OK);
        CHECK_EQ_I64(count_steps(schedule, CP_STEP_ATTEND), rank + 1);
        cp_schedule_destroy(&schedule);
        cp_plan_destroy(&plan);
    }
}

static void survive(int ring, int ulysses, enum cp_op op, enum cp_transport transport)
{
    struct cp_record records[MOST];
    struct cp_plan *plan = NULL;
    attention(records, ring, ulysses, op, 4);
    CHECK_EQ_I64(cp_plan_create(records, ring * ulysses, &format, &plan), CP_OK);
    int64_t live = cp_mem_stats().live_blocks;
    for (int64_t count = 0;; count++) {
        struct cp_schedule *schedule = NULL;
        cp_mem_fail_after(count);
        enum cp_code code = cp_schedule_create(plan, 0, transport, &schedule);
        cp_mem_fail_after(-1);
        cp_schedule_destroy(&schedule);
        CHECK_EQ_I64(cp_mem_stats().live_blocks, live);
        if (code == CP_OK) {
            CHECK(count > 2);
            break;
        }
        CHECK_EQ_I64(code, CP_ERR_NO_MEMORY);
    }
    cp_plan_destroy(&plan);
}

TEST(every_failed_allocation_leaves_nothing)
{
    const enum cp_op ops[] = {CP_OP_ATTENTION, CP_OP_ATTENTION_BACKWARD};
    for (int i = 0; i < 2; i++) {
        survive(3, 2, ops[i], CP_PULL);
        survive(3, 2, ops[i], CP_TWO_SIDED);
        survive(1, 3, ops[i], CP_PUSH);
    }
}

/* Bytes of workspace and window together, of 8 heads on each of two ranks. */
static int64_t bytes_of_chunks(enum cp_op op, enum cp_transport transport, int chunks)
{
    struct cp_record records[MOST];
    struct cp_plan *plan = NULL;
    struct cp_schedule *schedule = NULL;
    attention(records, 1, 2, op, 64);
    for (int rank = 0; rank < 2; rank++) {
        records[rank].call.heads = 16;
        records[rank].call.kv_heads = 16;
        records[rank].sizes[CP_SIZE_HEAD_CHUNKS] = chunks;
    }
    CHECK_EQ_I64(cp_plan_create(records, 2, &format, &plan), CP_OK);
    CHECK_EQ_I64(cp_schedule_create(plan, 0, transport, &schedule), CP_OK);
    int64_t bytes = schedule->scratch_bytes + schedule->window_bytes;
    cp_schedule_destroy(&schedule);
    cp_plan_destroy(&plan);
    return bytes;
}

/* Two chunks are there at a time, however many there are. */
TEST(more_chunks_of_heads_take_less_memory)
{
    const enum cp_op ops[] = {CP_OP_ATTENTION, CP_OP_ATTENTION_BACKWARD};
    for (int i = 0; i < 2; i++) {
        int64_t whole = bytes_of_chunks(ops[i], CP_TWO_SIDED, 1);
        CHECK(bytes_of_chunks(ops[i], CP_TWO_SIDED, 2) <= whole);
        CHECK(bytes_of_chunks(ops[i], CP_TWO_SIDED, 8) < whole / 2);
        CHECK(bytes_of_chunks(ops[i], CP_PUSH, 8) <
              bytes_of_chunks(ops[i], CP_PUSH, 1));
        CHECK(bytes_of_chunks(ops[i], CP_PULL, 2) <=
              bytes_of_chunks(ops[i], CP_PULL, 1));
    }
}

TEST(sizes_that_overflow_are_refused)
{
    const enum cp_transport transports[] = {CP_PULL, CP_TWO_SIDED};
    for (int i = 0; i < 2; i++) {
        struct cp_record records[MOST];
        struct cp_plan *plan = NULL;
        struct cp_schedule *schedule = NULL;
        int64_t live = cp_mem_stats().live_blocks;
        attention(records, 2, 1, CP_OP_ATTENTION, INT64_MAX / 64);
        CHECK_EQ_I64(cp_plan_create(records, 2, &format, &plan), CP_OK);
        CHECK_EQ_I64(cp_schedule_create(plan, 0, transports[i], &schedule),
                     CP_ERR_VALUE);
        cp_plan_destroy(&plan);
        CHECK_EQ_I64(cp_mem_stats().live_blocks, live);
    }
}

/* As long as a number of rows can be: rounding it up to whole panels overflows. */
TEST(rows_that_no_panel_holds_are_refused)
{
    const enum cp_transport transports[] = {CP_PULL, CP_TWO_SIDED};
    struct cp_format rounded = format;
    rounded.state.row_align = 16;
    for (int i = 0; i < 2; i++) {
        struct cp_record records[MOST];
        struct cp_plan *plan = NULL;
        struct cp_schedule *schedule = NULL;
        attention(records, 2, 1, CP_OP_ATTENTION, 1);
        records[0].sizes[CP_SIZE_Q_ROWS] = INT64_MAX - 3;
        CHECK_EQ_I64(cp_plan_create(records, 2, &rounded, &plan), CP_OK);
        CHECK_EQ_I64(cp_schedule_create(plan, 0, transports[i], &schedule),
                     CP_ERR_VALUE);
        CHECK_STR_HAS(cp_last_error()->text, "more bytes than can be counted");
        cp_plan_destroy(&plan);
    }
}

/* Replicated keys are packed in pieces; where nobody looks at them there are none, however many keys. */
TEST(keys_that_nobody_looks_at_take_no_time)
{
    struct cp_record records[MOST];
    struct cp_plan *plan = NULL;
    struct cp_schedule *schedule = NULL;
    attention(records, 2, 1, CP_OP_ATTENTION, INT64_MAX / 2);
    for (int rank = 0; rank < 2; rank++) {
        records[rank].call.kv_replicated = 1;
        records[rank].sizes[CP_SIZE_Q_ROWS] = 0;
    }
    CHECK_EQ_I64(cp_plan_create(records, 2, &format, &plan), CP_OK);
    CHECK_EQ_I64(cp_schedule_create(plan, 0, CP_PULL, &schedule), CP_OK);
    CHECK_EQ_I64(count_steps(schedule, CP_STEP_PACK), 0);
    cp_schedule_destroy(&schedule);
    cp_plan_destroy(&plan);
}

TEST(a_schedule_prints_a_line_for_every_buffer_and_step)
{
    struct cp_record records[MOST];
    struct cp_plan *plan = NULL;
    struct cp_schedule *schedule = NULL;
    char text[65536] = "";
    FILE *file = fmemopen(text, sizeof text - 1, "w");
    attention(records, 2, 2, CP_OP_ATTENTION_BACKWARD, 3);
    CHECK_EQ_I64(cp_plan_create(records, 4, &format, &plan), CP_OK);
    CHECK_EQ_I64(cp_schedule_create(plan, 3, CP_PULL, &schedule), CP_OK);
    cp_schedule_print(schedule, file);
    (void)fclose(file);
    int lines = 0;
    for (const char *c = text; *c != '\0'; c++) {
        lines += *c == '\n';
    }
    CHECK_EQ_I64(lines, 1 + schedule->buffer_count + schedule->step_count);
    CHECK_STR_HAS(text, "compute GRAD");
    CHECK_STR_HAS(text, "in AWAIT rank 2 signal 0 value 1");
    cp_schedule_destroy(&schedule);
    cp_plan_destroy(&plan);
}
