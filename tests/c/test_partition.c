/* Shares of a length and the key/value heads behind query heads. */
#include "plan/partition.h"
#include "test.h"

TEST(shares_are_those_of_tensor_split)
{
    for (int64_t size = 0; size < 40; size++) {
        for (int parts = 1; parts < 9; parts++) {
            int64_t next = 0;
            for (int index = 0; index < parts; index++) {
                struct cp_range share = cp_share(size, parts, index);
                CHECK_EQ_I64(share.first, next);
                CHECK_EQ_I64(share.count,
                             size / parts + (index < size % parts ? 1 : 0));
                next += share.count;
            }
            CHECK_EQ_I64(next, size);
        }
    }
}

/* Streams are cut one by one: text 5 and image 6 over 4 ranks give 4, 3, 2, 2 and not
 * the 3, 3, 3, 2 of 11. */
TEST(shares_of_two_streams_are_not_those_of_their_sum)
{
    const int64_t joint[] = {4, 3, 2, 2};
    for (int rank = 0; rank < 4; rank++) {
        CHECK_EQ_I64(cp_share(5, 4, rank).count + cp_share(6, 4, rank).count,
                     joint[rank]);
    }
}

TEST(kv_heads_are_those_that_the_query_heads_need)
{
    for (int64_t kv_heads = 1; kv_heads < 8; kv_heads++) {
        for (int64_t heads_per_kv = 1; heads_per_kv < 6; heads_per_kv++) {
            for (int parts = 1; parts < 9; parts++) {
                for (int index = 0; index < parts; index++) {
                    struct cp_range heads =
                        cp_share(kv_heads * heads_per_kv, parts, index);
                    struct cp_range needed = cp_kv_heads_of(heads, heads_per_kv);
                    for (int64_t kv = 0; kv < kv_heads; kv++) {
                        bool serves = false;
                        for (int64_t h = heads.first; h < heads.first + heads.count;
                             h++) {
                            serves = serves || h / heads_per_kv == kv;
                        }
                        CHECK(serves ==
                              (kv >= needed.first && kv < needed.first + needed.count));
                    }
                }
            }
        }
    }
}
