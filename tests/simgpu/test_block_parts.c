/* Blocks cut for libraries' kernels: every pair of row and key that is seen is in one part, with its own key head, and no
 * other is in any. */
#include "block_parts.h"
#include "test.h"

enum { MOST = 7, HEADS = 12 };

struct block {
    struct cp_place place;
    int64_t rows, keys, heads, kv_heads;
};

static struct block random_block(struct test_rng *rng)
{
    static const int64_t groups[] = {1, 2, 3, 4};
    int64_t group = groups[test_rng_range(rng, 0, 3)];
    int64_t first = test_rng_range(rng, 0, HEADS - 1);
    int64_t heads = test_rng_range(rng, 1, HEADS - first);
    int64_t kv_first = first / group;
    return (struct block){
        .place = {.q_first = test_rng_range(rng, 0, MOST),
                  .k_first = test_rng_range(rng, 0, MOST),
                  .head_first = first,
                  .kv_head_first = kv_first,
                  .heads_per_kv = group,
                  .is_causal = test_rng_range(rng, 0, 3) > 0},
        .rows = test_rng_range(rng, 0, MOST),
        .keys = test_rng_range(rng, 0, MOST),
        .heads = heads,
        .kv_heads = (first + heads - 1) / group - kv_first + 1,
    };
}

/* How often each row and head meets each key, and with which key head. */
struct seen {
    int count[MOST][MOST][HEADS];
    int64_t kv_head[HEADS];
};

static void see_part(const struct cp_block_part *part, struct seen *seen)
{
    int64_t group = part->heads / part->kv_heads;
    CHECK(part->rows > 0 && part->keys > 0 && part->heads > 0);
    CHECK_EQ_I64(group * part->kv_heads, part->heads);
    CHECK(!part->is_diagonal || part->rows == part->keys);
    for (int64_t h = 0; h < part->heads; h++) {
        seen->kv_head[part->head + h] = part->kv_head + h / group;
        for (int64_t i = 0; i < part->rows; i++) {
            for (int64_t j = 0; j < (part->is_diagonal ? i + 1 : part->keys); j++) {
                seen->count[part->row + i][part->key + j][part->head + h]++;
            }
        }
    }
}

static void check_block(const struct block *b)
{
    struct seen seen;
    struct cp_block_part part;
    struct cp_block_parts parts =
        cp_block_parts_of(&b->place, b->rows, b->keys, b->heads, b->kv_heads);
    memset(&seen, 0, sizeof seen);
    for (int most = 0; cp_block_parts_next(&parts, &part); most++) {
        REQUIRE(most < CP_SIGHTS * HEADS);
        see_part(&part, &seen);
    }
    for (int64_t i = 0; i < b->rows; i++) {
        for (int64_t j = 0; j < b->keys; j++) {
            bool is_seen =
                !b->place.is_causal || b->place.k_first + j <= b->place.q_first + i;
            for (int64_t h = 0; h < b->heads; h++) {
                CHECK_EQ_I64(seen.count[i][j][h], is_seen);
                CHECK(!is_seen || seen.kv_head[h] == (b->place.head_first + h) /
                                                             b->place.heads_per_kv -
                                                         b->place.kv_head_first);
            }
        }
    }
}

TEST(every_pair_once)
{
    struct test_rng rng = test_rng_init(0);
    for (int i = 0; i < 3000; i++) {
        struct block block = random_block(&rng);
        check_block(&block);
    }
}

/* What all rows see whole, in even groups, stays whole. */
TEST(no_part_too_many)
{
    struct cp_block_part part;
    const struct cp_place place = {.q_first = 9, .heads_per_kv = 4, .is_causal = true};
    struct cp_block_parts parts = cp_block_parts_of(&place, 5, 10, 8, 2);
    CHECK(cp_block_parts_next(&parts, &part));
    CHECK(part.rows == 5 && part.keys == 10 && part.heads == 8 && part.kv_heads == 2);
    CHECK(!part.is_diagonal);
    CHECK(!cp_block_parts_next(&parts, &part));
    const struct cp_place diagonal = {.heads_per_kv = 4, .is_causal = true};
    parts = cp_block_parts_of(&diagonal, 5, 5, 8, 2);
    CHECK(cp_block_parts_next(&parts, &part) && part.is_diagonal && part.rows == 5);
    CHECK(!cp_block_parts_next(&parts, &part));
}
