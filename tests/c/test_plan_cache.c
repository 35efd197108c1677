/* What was not used for longest goes first, and nothing leaks. */
#include "base/mem.h"
#include "exec/plan_cache.h"
#include "test.h"

static struct cp_record gather_of(int64_t rows)
{
    struct cp_record record = {.call = {.op = CP_OP_GATHER,
                                        .dtype = CP_DTYPE_FLOAT32,
                                        .ndim = 1,
                                        .ring_degree = 1,
                                        .ulysses_degree = 1}};
    record.sizes[CP_SIZE_ROWS] = rows;
    return record;
}

static void add(struct cp_plan_cache *cache, int64_t rows)
{
    struct cp_record record = gather_of(rows);
    struct cp_plan_entry entry = {.plan = NULL};
    CHECK_EQ_I64(cp_plan_create(&record, 1, NULL, &entry.plan), CP_OK);
    CHECK_EQ_I64(cp_schedule_create(entry.plan, 0, CP_PULL, &entry.schedule), CP_OK);
    CHECK(cp_plan_cache_add(cache, &entry)->plan == entry.plan);
}

static bool has(struct cp_plan_cache *cache, int64_t rows)
{
    struct cp_record record = gather_of(rows);
    return cp_plan_cache_find(cache, &record, 1) != NULL;
}

TEST(the_least_recently_used_plan_goes_first)
{
    static struct cp_plan_cache cache;
    int64_t live = cp_mem_stats().live_blocks;
    for (int64_t rows = 0; rows < CP_PLAN_CACHE_SIZE; rows++) {
        CHECK(!has(&cache, rows));
        add(&cache, rows);
    }
    CHECK(has(&cache, 0)); /* now the most recent */
    add(&cache, 1000);
    CHECK(has(&cache, 0));
    CHECK(!has(&cache, 1));
    CHECK(has(&cache, 1000));
    cp_plan_cache_clear(&cache);
    CHECK(!has(&cache, 0));
    CHECK_EQ_I64(cp_mem_stats().live_blocks, live);
}
