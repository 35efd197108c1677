/* Runs of groups: every query head is in one, with its own key head. */
#include "group_run.h"
#include "test.h"

enum { HEADS = 13 };

static void check_share(int64_t group, int64_t first, int64_t heads)
{
    const struct cp_place place = {
        .head_first = first, .kv_head_first = first / group, .heads_per_kv = group};
    int runs = 0;
    TEST_CONTEXT("heads %d to %d, %d a key head", (int)first, (int)(first + heads - 1),
                 (int)group);
    for (int64_t head = 0; head < heads; runs++) {
        const struct cp_group_run run = cp_group_run_at(&place, heads, head);
        REQUIRE(run.head == head && run.heads > 0 && run.kv_heads > 0);
        CHECK_EQ_I64(run.heads % run.kv_heads, 0);
        for (int64_t i = 0; i < run.heads; i++) {
            CHECK_EQ_I64(run.kv_head + i / (run.heads / run.kv_heads),
                         (first + head + i) / group - first / group);
        }
        head += run.heads;
        CHECK(head <= heads);
    }
    CHECK(runs <= CP_MOST_RUNS);
    CHECK(runs == 1 || first % group != 0 || heads % group != 0);
}

TEST(every_head_once)
{
    for (int64_t group = 1; group <= HEADS; group++) {
        for (int64_t first = 0; first < HEADS; first++) {
            for (int64_t heads = 1; first + heads <= HEADS; heads++) {
                check_share(group, first, heads);
            }
        }
    }
}
