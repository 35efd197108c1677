/* Counted memory and its switch. */
#include "base/mem.h"
#include "ranks.h"
#include "test.h"

TEST(memory_is_zero_and_aligned)
{
    for (size_t bytes = 0; bytes < 300; bytes += 7) {
        unsigned char *block = NULL;
        void *out = NULL;
        REQUIRE(cp_mem_create(bytes, "a test", &out) == CP_OK);
        block = out;
        CHECK_EQ_U64((uintptr_t)block % CP_ALIGNMENT, 0);
        for (size_t i = 0; i < bytes; i++) {
            CHECK_EQ_I64(block[i], 0);
            block[i] = 0xff;
        }
        cp_mem_destroy(&block);
        CHECK(block == NULL);
        cp_mem_destroy(&block);
    }
}

TEST(blocks_are_counted)
{
    struct cp_mem_stats before = cp_mem_stats();
    void *a = NULL, *b = NULL;
    REQUIRE(cp_mem_create(1, "a test", &a) == CP_OK);
    REQUIRE(cp_mem_create(0, "a test", &b) == CP_OK);
    CHECK(a != b);
    CHECK_EQ_I64(cp_mem_stats().live_blocks, before.live_blocks + 2);
    CHECK_EQ_I64(cp_mem_stats().allocations, before.allocations + 2);
    cp_mem_destroy(&a);
    cp_mem_destroy(&b);
    CHECK_EQ_I64(cp_mem_stats().live_blocks, before.live_blocks);
    CHECK_EQ_I64(cp_mem_stats().allocations, before.allocations + 2);
}

TEST(impossible_sizes)
{
    void *block = &block;
    CHECK_EQ_I64(cp_mem_create(SIZE_MAX, "the moon", &block), CP_ERR_NO_MEMORY);
    CHECK_STR_HAS(cp_last_error()->text, "18446744073709551615 bytes for the moon");
    CHECK(block == &block); /* written on success only */
}

TEST(arrays)
{
    int64_t *numbers = NULL;
    CHECK_EQ_I64(cp_mem_create_array(3, sizeof *numbers, "a test", &numbers), CP_OK);
    CHECK(numbers != NULL && numbers[2] == 0);
    cp_mem_destroy(&numbers);
    CHECK_EQ_I64(cp_mem_create_array(0, sizeof *numbers, "a test", &numbers), CP_OK);
    cp_mem_destroy(&numbers);
    CHECK_EQ_I64(cp_mem_create_array(INT64_MAX / 2, sizeof *numbers, "it", &numbers),
                 CP_ERR_NO_MEMORY);
    CHECK_STR_HAS(cp_last_error()->text, " times 8 bytes for it");
    CHECK_EQ_I64(cp_mem_create_array(-1, sizeof *numbers, "it", &numbers),
                 CP_ERR_NO_MEMORY);
    CHECK(numbers == NULL);
}

TEST(the_kth_allocation_fails_once)
{
    for (int k = 0; k < 4; k++) {
        cp_mem_fail_after(k);
        for (int i = 0; i < 6; i++) {
            void *block = NULL;
            CHECK_EQ_I64(cp_mem_create(8, "a test", &block),
                         i == k ? CP_ERR_NO_MEMORY : CP_OK);
            cp_mem_destroy(&block);
        }
        cp_mem_fail_after(-1);
    }
    CHECK_EQ_I64(cp_mem_stats().live_blocks, 0);
}

static void body(int rank, void *arg)
{
    (void)rank;
    (void)arg;
    for (int i = 0; i < 2000; i++) {
        void *block = NULL;
        CHECK_EQ_I64(cp_mem_create((size_t)i, "a thread", &block), CP_OK);
        cp_mem_destroy(&block);
    }
}

TEST(threads)
{
    int64_t before = cp_mem_stats().allocations;
    ranks_as_threads(3, body, NULL);
    CHECK_EQ_I64(cp_mem_stats().live_blocks, 0);
    CHECK_EQ_I64(cp_mem_stats().allocations, before + 6000);
}
