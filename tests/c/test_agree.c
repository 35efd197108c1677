/* What ranks agree on, in which words they do not, and how the axes of a mask are read.
 */
#include "plan/agree.h"
#include "plan/mask_axis.h"
#include "plan/plan.h"
#include "test.h"

enum { WORLD = 4 };

static void attention(struct cp_record *records, int32_t variant)
{
    memset(records, 0, WORLD * sizeof *records);
    for (int rank = 0; rank < WORLD; rank++) {
        struct cp_call *call = &records[rank].call;
        call->op = CP_OP_ATTENTION;
        call->dtype = CP_DTYPE_FLOAT32;
        call->batch = 1;
        call->heads = 4;
        call->kv_heads = 4;
        call->head_dim = 8;
        call->value_dim = 8;
        call->variant = variant;
        call->ring_degree = WORLD;
        call->ulysses_degree = 1;
        records[rank].sizes[CP_SIZE_Q_ROWS] = 5;
        records[rank].sizes[CP_SIZE_KV_ROWS] = 5;
    }
}

TEST(equal_calls_agree)
{
    struct cp_record records[WORLD];
    attention(records, CP_EVEN);
    CHECK_EQ_I64(cp_agree(records, WORLD), CP_OK);
}

/* A difference on any rank, in any field, names that rank and both calls. */
TEST(the_lowest_rank_that_differs_is_named)
{
    for (int odd = 1; odd < WORLD; odd++) {
        struct cp_record records[WORLD];
        attention(records, CP_EVEN);
        for (int rank = odd; rank < WORLD; rank++) {
            records[rank].call.head_dim = 16;
        }
        CHECK_EQ_I64(cp_agree(records, WORLD), CP_ERR_VALUE);
        CHECK_EQ_I64(cp_last_error()->rank, odd);
        CHECK_STR_HAS(cp_last_error()->text, "head dim");
        CHECK_STR_HAS(cp_last_error()->text, "1x5x4x8");
        CHECK_STR_HAS(cp_last_error()->text, "1x5x4x16");
        attention(records, CP_EVEN);
        records[odd].call.dtype = CP_DTYPE_FLOAT16;
        CHECK_EQ_I64(cp_agree(records, WORLD), CP_ERR_TYPE);
        CHECK_STR_HAS(cp_last_error()->text, "float16");
        attention(records, CP_EVEN);
        records[odd].call.backend = CP_BACKEND_FLASH_HUB;
        CHECK_EQ_I64(cp_agree(records, WORLD), CP_ERR_VALUE);
        CHECK_STR_HAS(cp_last_error()->text, "differs from rank 0 in backend: ");
        CHECK_STR_HAS(cp_last_error()->text, ", backend flash_hub");
    }
}

/* No byte of a call is left out of the comparison. */
TEST(any_byte_that_differs_is_noticed)
{
    for (size_t at = 0; at < sizeof(struct cp_call); at++) {
        struct cp_record records[WORLD];
        attention(records, CP_EVEN);
        ((unsigned char *)&records[2].call)[at] ^= 1;
        CHECK(cp_agree(records, WORLD) != CP_OK);
        CHECK_EQ_I64(cp_last_error()->rank, 2);
    }
}

TEST(all_ranks_cut_the_heads_alike)
{
    struct cp_record records[WORLD];
    attention(records, CP_EVEN);
    records[2].sizes[CP_SIZE_HEAD_CHUNKS] = 3;
    CHECK_EQ_I64(cp_agree(records, WORLD), CP_ERR_VALUE);
    CHECK_EQ_I64(cp_last_error()->rank, 2);
    CHECK_STR_HAS(cp_last_error()->text, "3 chunks, rank 0 in 0");
    for (int rank = 0; rank < WORLD; rank++) {
        records[rank].sizes[CP_SIZE_HEAD_CHUNKS] = 3;
    }
    CHECK_EQ_I64(cp_agree(records, WORLD), CP_OK);
    records[1].sizes[CP_SIZE_HEAD_CHUNKS] = CP_MAX_HEAD_CHUNKS + 1;
    CHECK_EQ_I64(cp_agree(records, WORLD), CP_ERR_VALUE);
    CHECK_EQ_I64(cp_last_error()->rank, 1);
    records[1].sizes[CP_SIZE_HEAD_CHUNKS] = -1;
    CHECK_EQ_I64(cp_agree(records, WORLD), CP_ERR_VALUE);
    CHECK_STR_HAS(cp_last_error()->text, "from 1 to 64");
}

TEST(an_own_error_goes_before_a_difference)
{
    struct cp_record records[WORLD];
    attention(records, CP_EVEN);
    records[1].call.batch = 9;
    records[3].status.code = CP_ERR_BUFFER;
    (void)snprintf(records[3].status.text, sizeof records[3].status.text,
                   "k: no memory");
    CHECK_EQ_I64(cp_agree(records, WORLD), CP_ERR_BUFFER);
    CHECK_EQ_I64(cp_last_error()->rank, 3);
    CHECK_STR_HAS(cp_last_error()->text, "rank 3: k: no memory");
}

TEST(uneven_rows_and_heads_need_an_anything_flag)
{
    struct cp_record records[WORLD];
    attention(records, CP_EVEN);
    records[2].sizes[CP_SIZE_Q_ROWS] = 6;
    CHECK_EQ_I64(cp_agree(records, WORLD), CP_ERR_VALUE);
    CHECK_STR_HAS(cp_last_error()->text, "ring_anything");
    for (int rank = 0; rank < WORLD; rank++) {
        records[rank].call.variant = CP_ANYTHING;
    }
    CHECK_EQ_I64(cp_agree(records, WORLD), CP_OK);
    attention(records, CP_EVEN);
    for (int rank = 0; rank < WORLD; rank++) {
        records[rank].call.ring_degree = 1;
        records[rank].call.ulysses_degree = WORLD;
        records[rank].call.heads = 6;
    }
    CHECK_EQ_I64(cp_agree(records, WORLD), CP_ERR_VALUE);
    CHECK_STR_HAS(cp_last_error()->text, "ulysses_anything");
}

TEST(replicated_keys_are_as_long_everywhere)
{
    struct cp_record records[WORLD];
    attention(records, CP_EVEN);
    for (int rank = 0; rank < WORLD; rank++) {
        records[rank].call.kv_replicated = 1;
        records[rank].sizes[CP_SIZE_Q_ROWS] = rank; /* any */
    }
    CHECK_EQ_I64(cp_agree(records, WORLD), CP_OK);
    records[2].sizes[CP_SIZE_KV_ROWS] = 6;
    CHECK_EQ_I64(cp_agree(records, WORLD), CP_ERR_VALUE);
    CHECK_STR_HAS(cp_last_error()->text, "replicated");
}

TEST(promised_lengths_are_checked)
{
    struct cp_record records[WORLD];
    const int64_t rows[WORLD] = {5, 5, 5, 5};
    const int64_t other[WORLD] = {5, 5, 4, 6};
    attention(records, CP_EVEN);
    for (int rank = 0; rank < WORLD; rank++) {
        records[rank].call.check = cp_lengths_hash(rows, rows, WORLD);
    }
    CHECK_EQ_I64(cp_agree(records, WORLD), CP_OK);
    for (int rank = 0; rank < WORLD; rank++) {
        records[rank].call.check = cp_lengths_hash(other, rows, WORLD);
    }
    CHECK_EQ_I64(cp_agree(records, WORLD), CP_ERR_VALUE);
    CHECK_STR_HAS(cp_last_error()->text, "seq_lens");
}

static void parts(struct cp_record *records, enum cp_dtype dtype)
{
    memset(records, 0, WORLD * sizeof *records);
    for (int rank = 0; rank < WORLD; rank++) {
        records[rank].call = (struct cp_call){.op = CP_OP_REDUCE_SCATTER,
                                              .dtype = (int32_t)dtype,
                                              .ndim = 3,
                                              .dim = 1,
                                              .extent = {2, 6, 3},
                                              .ring_degree = WORLD,
                                              .ulysses_degree = 1};
        records[rank].sizes[CP_SIZE_ROWS] = rank; /* 0 + 1 + 2 + 3 */
    }
}

/* A graph keeps them, and who has others does not launch it. */
TEST(a_captured_call_of_uneven_lengths_promises_them)
{
    struct cp_record records[WORLD];
    const int64_t rows[WORLD] = {5, 5, 5, 5};
    attention(records, CP_ANYTHING);
    for (int rank = 0; rank < WORLD; rank++) {
        records[rank].call.place = CP_ON_ACCELERATOR;
        records[rank].call.is_captured = 1;
    }
    CHECK_EQ_I64(cp_agree(records, WORLD), CP_ERR_VALUE);
    CHECK_STR_HAS(cp_last_error()->text, "ring_anything=True");
    CHECK_STR_HAS(cp_last_error()->text, "pass seq_lens=");
    for (int rank = 0; rank < WORLD; rank++) {
        records[rank].call.check = cp_lengths_hash(rows, rows, WORLD);
    }
    CHECK_EQ_I64(cp_agree(records, WORLD), CP_OK);
    for (int rank = 0; rank < WORLD; rank++) {
        records[rank].call.check = 0;
        records[rank].call.op = CP_OP_ATTENTION_BACKWARD; /* its forward has */
    }
    CHECK_EQ_I64(cp_agree(records, WORLD), CP_OK);
    for (int rank = 0; rank < WORLD; rank++) {
        records[rank].call.op = CP_OP_ATTENTION;
        records[rank].call.kv_replicated = 1; /* each rank is its own business */
    }
    CHECK_EQ_I64(cp_agree(records, WORLD), CP_OK);
    records[3].call.is_captured = 0;
    CHECK_EQ_I64(cp_agree(records, WORLD), CP_ERR_VALUE);
    CHECK_STR_HAS(cp_last_error()->text, "in whether it is captured in a graph");
    CHECK_STR_HAS(cp_last_error()->text, ", on a GPU, captured in a graph)");
}

TEST(own_rows_of_a_sum_are_all_its_rows)
{
    struct cp_record records[WORLD];
    parts(records, CP_DTYPE_BFLOAT16);
    CHECK_EQ_I64(cp_agree(records, WORLD), CP_OK);
    records[0].sizes[CP_SIZE_ROWS] = 1;
    CHECK_EQ_I64(cp_agree(records, WORLD), CP_ERR_VALUE);
    CHECK_STR_HAS(cp_last_error()->text, "6 rows along dim 1");
    CHECK_STR_HAS(cp_last_error()->text, "are 7 together");
    records[2].sizes[CP_SIZE_ROWS] = INT64_MAX;
    CHECK_EQ_I64(cp_agree(records, WORLD), CP_ERR_VALUE);
    CHECK_EQ_I64(cp_last_error()->rank, 2);
    records[2].sizes[CP_SIZE_ROWS] = -1;
    CHECK_EQ_I64(cp_agree(records, WORLD), CP_ERR_VALUE);
    CHECK_EQ_I64(cp_last_error()->rank, 2);
    parts(records, CP_DTYPE_FLOAT32);
    records[3].call.extent[1] = 7;
    CHECK_EQ_I64(cp_agree(records, WORLD), CP_ERR_VALUE);
    CHECK_EQ_I64(cp_last_error()->rank, 3);
    CHECK_STR_HAS(cp_last_error()->text,
                  "reduce_scatter(2x7x3 float32, dim 1, 3 own rows)");
    parts(records, CP_DTYPE_INT64);
    CHECK_EQ_I64(cp_agree(records, WORLD), CP_ERR_TYPE);
    CHECK_STR_HAS(cp_last_error()->text, "int64");
}

static enum cp_code read_mask(const int64_t *rows, const int64_t *keys,
                              const int64_t *mask_rows, const int64_t *mask_keys,
                              enum cp_axis_kind *row_kind, enum cp_axis_kind *key_kind)
{
    struct cp_record records[WORLD];
    attention(records, CP_ANYTHING);
    for (int rank = 0; rank < WORLD; rank++) {
        records[rank].call.mask_kind = CP_MASK_BOOL;
        records[rank].sizes[CP_SIZE_Q_ROWS] = rows[rank];
        records[rank].sizes[CP_SIZE_KV_ROWS] = keys[rank];
        records[rank].sizes[CP_SIZE_MASK_ROWS] = mask_rows[rank];
        records[rank].sizes[CP_SIZE_MASK_KEYS] = mask_keys[rank];
    }
    return cp_mask_read(records, WORLD, row_kind, key_kind);
}

TEST(mask_axes_are_read_from_what_all_ranks_gave)
{
    const int64_t uneven[WORLD] = {3, 3, 2, 2};
    const int64_t whole[WORLD] = {10, 10, 10, 10};
    const int64_t one[WORLD] = {1, 1, 1, 1};
    const int64_t wrong[WORLD] = {3, 3, 2, 4};
    enum cp_axis_kind rows = CP_AXIS_ONE;
    enum cp_axis_kind keys = CP_AXIS_ONE;
    CHECK_EQ_I64(read_mask(uneven, uneven, uneven, whole, &rows, &keys), CP_OK);
    CHECK(rows == CP_AXIS_OWN && keys == CP_AXIS_WHOLE);
    CHECK_EQ_I64(read_mask(uneven, uneven, one, uneven, &rows, &keys), CP_OK);
    CHECK(rows == CP_AXIS_ONE && keys == CP_AXIS_OWN);
    CHECK_EQ_I64(read_mask(uneven, uneven, whole, one, &rows, &keys), CP_OK);
    CHECK(rows == CP_AXIS_WHOLE && keys == CP_AXIS_ONE);
    CHECK_EQ_I64(read_mask(uneven, uneven, uneven, uneven, &rows, &keys), CP_ERR_VALUE);
    CHECK_EQ_I64(read_mask(uneven, uneven, one, wrong, &rows, &keys), CP_ERR_VALUE);
    CHECK_STR_HAS(cp_last_error()->text, "keys axis has length 4 on rank 3");
    /* Rows of length 1 everywhere and own keys: the one row is for all. */
    CHECK_EQ_I64(read_mask(one, uneven, one, uneven, &rows, &keys), CP_OK);
    CHECK(rows == CP_AXIS_ONE && keys == CP_AXIS_OWN);
}

TEST(lengths_that_a_mask_cannot_add_up)
{
    const int64_t few[WORLD] = {1, 1, 1, 1};
    const int64_t many[WORLD] = {1, INT64_MAX - 1, 1, 1};
    enum cp_axis_kind rows = CP_AXIS_ONE;
    enum cp_axis_kind keys = CP_AXIS_ONE;
    CHECK_EQ_I64(read_mask(many, few, few, few, &rows, &keys), CP_ERR_VALUE);
    CHECK_EQ_I64(cp_last_error()->rank, 2);
    CHECK_STR_HAS(cp_last_error()->text, "the rows of the ranks up to rank 2");
    CHECK_EQ_I64(read_mask(few, many, few, few, &rows, &keys), CP_ERR_VALUE);
    CHECK_STR_HAS(cp_last_error()->text, "the keys of the ranks up to rank 2");
}
