/* From records to ranges; overflow and failed allocations leave nothing behind. */
#include "base/mem.h"
#include "plan/plan.h"
#include "test.h"

enum { WORLD = 6 };

static const struct cp_format format = {
    .id = 1, .k = {1, 8}, .v = {1, 8}, .state = {1, 8}};

static void attention(struct cp_record *records)
{
    memset(records, 0, WORLD * sizeof *records);
    for (int rank = 0; rank < WORLD; rank++) {
        struct cp_call *call = &records[rank].call;
        call->op = CP_OP_ATTENTION;
        call->dtype = CP_DTYPE_FLOAT32;
        call->batch = 1;
        call->heads = 6;
        call->kv_heads = 3;
        call->variant = CP_ANYTHING;
        call->ring_degree = 3;
        call->ulysses_degree = 2;
        records[rank].sizes[CP_SIZE_Q_ROWS] = rank;
        records[rank].sizes[CP_SIZE_KV_ROWS] = 2 * rank;
    }
}

TEST(rows_lie_in_rank_order_and_groups_hold_a_contiguous_stretch)
{
    struct cp_record records[WORLD];
    struct cp_plan *plan = NULL;
    attention(records);
    CHECK_EQ_I64(cp_plan_create(records, WORLD, &format, &plan), CP_OK);
    CHECK_EQ_I64(plan->q_rows[4].first, 0 + 1 + 2 + 3);
    CHECK_EQ_I64(plan->kv_rows[5].first, 2 * (0 + 1 + 2 + 3 + 4));
    for (int rank = 0; rank < WORLD; rank++) {
        struct cp_range group = cp_plan_group_rows(plan, rank);
        struct cp_range keys = cp_plan_group_keys(plan, rank);
        int first = rank / 2 * 2;
        CHECK_EQ_I64(group.first, plan->q_rows[first].first);
        CHECK_EQ_I64(group.count, 2 * first + 1);
        CHECK_EQ_I64(keys.first, plan->kv_rows[first].first);
        CHECK_EQ_I64(keys.count, 2 * (2 * first + 1));
    }
    CHECK_EQ_I64(plan->heads[1].first, 3);
    CHECK_EQ_I64(plan->kv_heads[0].count, 2); /* query heads 0..2 of 2 per kv head */
    CHECK_EQ_I64(plan->kv_heads[1].first, 1);
    CHECK(cp_plan_matches(plan, records, WORLD));
    records[5].sizes[CP_SIZE_Q_ROWS] += 1; /* a difference on the last rank only */
    CHECK(!cp_plan_matches(plan, records, WORLD));
    cp_plan_destroy(&plan);
    CHECK(plan == NULL);
}

/* Every head is in one chunk, and a key/value head with all query heads that use it. */
TEST(chunks_are_whole_groups_of_heads)
{
    uint64_t state = test_seed;
    for (int round = 0; round < 500; round++) {
        struct cp_record records[WORLD];
        struct cp_plan *plan = NULL;
        attention(records);
        state = state * 6364136223846793005u + 1442695040888963407u;
        int64_t kv_heads = 1 + (int64_t)(state >> 33) % 9;
        int64_t asked = (int64_t)(state >> 40) % 7;
        for (int rank = 0; rank < WORLD; rank++) {
            records[rank].call.kv_heads = kv_heads;
            records[rank].call.heads = kv_heads * (1 + (int64_t)(state >> 50) % 4);
            records[rank].sizes[CP_SIZE_HEAD_CHUNKS] = asked;
        }
        CHECK_EQ_I64(cp_plan_create(records, WORLD, &format, &plan), CP_OK);
        CHECK(plan->chunks >= 1 && plan->chunks <= (asked > 1 ? asked : 1));
        for (int u = 0; u < plan->ulysses; u++) {
            int64_t next = plan->heads[u].first;
            int64_t next_kv = plan->kv_heads[u].first;
            for (int chunk = 0; chunk < plan->chunks; chunk++) {
                struct cp_range heads = cp_plan_chunk_heads(plan, u, chunk);
                struct cp_range kv = cp_plan_chunk_kv_heads(plan, u, chunk);
                struct cp_range used = cp_kv_heads_of(heads, plan->heads_per_kv);
                CHECK_EQ_I64(kv.first, next_kv);
                CHECK_EQ_I64(used.count, kv.count);
                CHECK(kv.count == 0 || used.first == kv.first);
                CHECK(heads.count == 0 || heads.first == next);
                next += heads.count;
                next_kv += kv.count;
            }
            CHECK_EQ_I64(next, plan->heads[u].first + plan->heads[u].count);
            CHECK_EQ_I64(next_kv, plan->kv_heads[u].first + plan->kv_heads[u].count);
        }
        cp_plan_destroy(&plan);
    }
}

TEST(lengths_that_do_not_add_up_are_refused)
{
    struct cp_record records[WORLD];
    struct cp_plan *plan = NULL;
    int64_t live = cp_mem_stats().live_blocks;
    attention(records);
    records[2].sizes[CP_SIZE_KV_ROWS] = INT64_MAX;
    CHECK_EQ_I64(cp_plan_create(records, WORLD, &format, &plan), CP_ERR_VALUE);
    records[2].sizes[CP_SIZE_KV_ROWS] = -1;
    CHECK_EQ_I64(cp_plan_create(records, WORLD, &format, &plan), CP_ERR_VALUE);
    CHECK_EQ_I64(cp_mem_stats().live_blocks, live);
}

TEST(every_failed_allocation_leaves_nothing)
{
    int64_t live = cp_mem_stats().live_blocks;
    for (int64_t count = 0;; count++) {
        struct cp_record records[WORLD];
        struct cp_plan *plan = NULL;
        attention(records);
        cp_mem_fail_after(count);
        enum cp_code code = cp_plan_create(records, WORLD, &format, &plan);
        cp_mem_fail_after(-1);
        cp_plan_destroy(&plan);
        CHECK_EQ_I64(cp_mem_stats().live_blocks, live);
        if (code == CP_OK) {
            CHECK(count > 3);
            break;
        }
        CHECK_EQ_I64(code, CP_ERR_NO_MEMORY);
    }
}

static void check_cut(enum cp_op op)
{
    struct cp_record records[WORLD];
    struct cp_plan *plan = NULL;
    memset(records, 0, sizeof records);
    for (int rank = 0; rank < WORLD; rank++) {
        records[rank].call = (struct cp_call){.op = (int32_t)op,
                                              .dtype = CP_DTYPE_INT64,
                                              .ndim = 4,
                                              .dim = 2,
                                              .extent = {2, 3, 27, 5},
                                              .ring_degree = 3,
                                              .ulysses_degree = 2};
        records[rank].sizes[CP_SIZE_ROWS] = 7 - rank;
    }
    CHECK_EQ_I64(cp_plan_create(records, WORLD, &format, &plan), CP_OK);
    CHECK_EQ_I64(plan->outer, 6);
    CHECK_EQ_I64(plan->inner, 5);
    CHECK_EQ_I64(plan->cut[2].first, 13);
    cp_plan_destroy(&plan);
}

TEST(what_is_cut_has_outer_rows_and_inner)
{
    check_cut(CP_OP_GATHER);
    check_cut(CP_OP_REDUCE_SCATTER);
}
