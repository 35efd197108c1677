/* In how many chunks of heads calls are cut that nobody has told, and how blocks of a ring
 * come: by what all ranks know of each other. */
#include "base/mem.h"
#include "schedule/choose.h"
#include "schedule/machine.h"
#include "test.h"

enum { MOST = 32, H100 = 90, L20 = 89 };

/* Rows of FLUX at 1024 x 1024 on four ranks, 24 heads of 128. */
struct shape {
    enum cp_op op;
    int ring, ulysses;
    int64_t rows, heads, chunks, generation;
    enum cp_rotate rotate;
};

static const struct shape flux = {
    .op = CP_OP_ATTENTION, .ring = 1, .ulysses = 4, .rows = 1152, .heads = 24};

static void fill(const struct shape *shape, struct cp_record records[MOST])
{
    memset(records, 0, MOST * sizeof *records);
    for (int rank = 0; rank < shape->ring * shape->ulysses; rank++) {
        struct cp_call *call = &records[rank].call;
        call->op = (int32_t)shape->op;
        call->dtype = CP_DTYPE_BFLOAT16;
        call->batch = 1;
        call->heads = shape->heads;
        call->kv_heads = shape->heads;
        call->head_dim = 128;
        call->value_dim = 128;
        call->ring_degree = shape->ring;
        call->ulysses_degree = shape->ulysses;
        call->rotate = (int32_t)shape->rotate;
        records[rank].sizes[CP_SIZE_Q_ROWS] = shape->rows;
        records[rank].sizes[CP_SIZE_KV_ROWS] = shape->rows;
        records[rank].sizes[CP_SIZE_HEAD_CHUNKS] = shape->chunks;
        records[rank].sizes[CP_SIZE_GENERATION] = shape->generation;
    }
}

static enum cp_rotate rotate; /* that was chosen last */

static enum cp_code choose_of(const struct cp_record *records,
                              enum cp_transport transport, int *chunks)
{
    const struct cp_format format = {
        .id = 1, .k = {1, 256}, .v = {1, 256}, .state = {1, 520}};
    struct cp_plan *plan = NULL;
    CP_TRY(cp_plan_create(records,
                          records[0].call.ring_degree * records[0].call.ulysses_degree,
                          &format, &plan));
    enum cp_code code = cp_schedule_choose(plan, transport);
    *chunks = plan->chunks;
    rotate = plan->rotate;
    cp_plan_destroy(&plan);
    return code;
}

static int chosen(const struct shape *shape, enum cp_transport transport)
{
    struct cp_record records[MOST];
    int chunks = 0;
    fill(shape, records);
    CHECK_EQ_I64(choose_of(records, transport, &chunks), CP_OK);
    return chunks;
}

TEST(a_group_on_gpus_exchanges_chunks_of_heads)
{
    struct shape shape = flux;
    shape.generation = H100;
    CHECK(chosen(&shape, CP_TWO_SIDED) > 1);
    shape.generation = L20;
    CHECK(chosen(&shape, CP_TWO_SIDED) > 1);
    CHECK(chosen(&shape, CP_PUSH) > 1);
    shape.op = CP_OP_ATTENTION_BACKWARD;
    CHECK(chosen(&shape, CP_TWO_SIDED) > 1);
}

/* A ring hides its blocks already, and small calls are the launches that they have. */
TEST(one_chunk_where_more_do_not_pay)
{
    struct shape ring = flux;
    ring.generation = H100;
    ring.ring = 4;
    ring.ulysses = 1;
    CHECK_EQ_I64(chosen(&ring, CP_TWO_SIDED), 1);
    struct shape small = flux;
    small.generation = H100;
    small.rows = 16;
    CHECK_EQ_I64(chosen(&small, CP_TWO_SIDED), 1);
}

TEST(one_chunk_where_the_speeds_are_not_known)
{
    struct cp_record records[MOST];
    struct shape shape = flux;
    int chunks = 0;
    CHECK_EQ_I64(chosen(&shape, CP_TWO_SIDED), 1); /* the host */
    CHECK_EQ_I64(chosen(&shape, CP_PULL), 1);
    shape.generation = 75;
    CHECK(cp_machine_of(75) == NULL);
    CHECK_EQ_I64(chosen(&shape, CP_TWO_SIDED), 1);
    shape.generation = H100;
    fill(&shape, records);
    records[3].sizes[CP_SIZE_GENERATION] = L20; /* one rank is another */
    CHECK_EQ_I64(choose_of(records, CP_TWO_SIDED, &chunks), CP_OK);
    CHECK_EQ_I64(chunks, 1);
    shape.ulysses = 24; /* no host has as many */
    CHECK_EQ_I64(chosen(&shape, CP_TWO_SIDED), 1);
}

/* Where a hop takes longer than a block, hops one after the other are the call. */
TEST(blocks_come_at_once_where_hops_are_longer_than_blocks)
{
    struct shape ring = flux;
    ring.ring = 8;
    ring.ulysses = 1;
    ring.generation = H100;
    CHECK_EQ_I64(chosen(&ring, CP_TWO_SIDED), 1);
    CHECK_EQ_I64(rotate, CP_ROTATE_ALLTOALL);
    ring.rows = 64;
    CHECK_EQ_I64(chosen(&ring, CP_TWO_SIDED), 1);
    CHECK_EQ_I64(rotate, CP_ROTATE_ALLGATHER);
    ring.rotate = CP_ROTATE_ALLTOALL; /* somebody has said it */
    CHECK_EQ_I64(chosen(&ring, CP_TWO_SIDED), 1);
    CHECK_EQ_I64(rotate, CP_ROTATE_ALLTOALL);
    ring.rotate = CP_ROTATE_AUTO;
    ring.generation = 0; /* the host */
    CHECK_EQ_I64(chosen(&ring, CP_TWO_SIDED), 1);
    CHECK_EQ_I64(rotate, CP_ROTATE_ALLTOALL);
    ring.generation = H100;
    CHECK_EQ_I64(chosen(&ring, CP_FETCH), 1); /* all read what they need */
    CHECK_EQ_I64(rotate, CP_ROTATE_ALLTOALL);
    ring.ring = 2; /* one hop */
    CHECK_EQ_I64(chosen(&ring, CP_TWO_SIDED), 1);
    CHECK_EQ_I64(rotate, CP_ROTATE_ALLTOALL);
}

/* 8 * 2730 rows of 24 heads of 2 * 128 numbers of 2 bytes. */
TEST(blocks_that_take_too_much_memory_come_one_by_one)
{
    struct shape ring = flux;
    ring.ring = 8;
    ring.ulysses = 1;
    ring.op = CP_OP_ATTENTION_BACKWARD;
    ring.generation = L20;
    for (ring.rows = 64; ring.rows <= 4096; ring.rows += 64) {
        CHECK_EQ_I64(chosen(&ring, CP_TWO_SIDED), 1);
        CHECK(ring.rows * 8 * 24 * 2 * 128 * 2 < 256 << 20 ||
              rotate == CP_ROTATE_ALLTOALL);
    }
}

TEST(what_was_asked_for_stays)
{
    struct shape shape = flux;
    shape.generation = H100;
    shape.chunks = 1;
    CHECK_EQ_I64(chosen(&shape, CP_TWO_SIDED), 1);
    shape.chunks = 5;
    CHECK_EQ_I64(chosen(&shape, CP_TWO_SIDED), 5);
}

TEST(every_failed_allocation_leaves_nothing)
{
    struct cp_record records[MOST];
    struct shape shape = flux;
    int64_t live = cp_mem_stats().live_blocks;
    shape.generation = H100;
    shape.heads = 8; /* two chunks to try */
    fill(&shape, records);
    for (int64_t count = 0;; count++) {
        int chunks = 0;
        cp_mem_fail_after(count);
        enum cp_code code = choose_of(records, CP_TWO_SIDED, &chunks);
        cp_mem_fail_after(-1);
        CHECK_EQ_I64(cp_mem_stats().live_blocks, live);
        if (code == CP_OK) {
            CHECK(count > 20);
            break;
        }
        CHECK_EQ_I64(code, CP_ERR_NO_MEMORY);
    }
}
