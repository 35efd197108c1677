/* Arithmetic that says when it overflows. */
#include "base/checked.h"
#include "test.h"

TEST(sums)
{
    int64_t out = 7;
    CHECK(cp_add_i64(INT64_MAX - 1, 1, &out));
    CHECK_EQ_I64(out, INT64_MAX);
    CHECK(!cp_add_i64(INT64_MAX, 1, &out));
    CHECK(!cp_add_i64(INT64_MIN, -1, &out));
    CHECK(cp_add_i64(INT64_MIN, INT64_MAX, &out));
    CHECK_EQ_I64(out, -1);
}

TEST(products)
{
    int64_t out = 7;
    CHECK(cp_mul_i64((int64_t)1 << 31, (int64_t)1 << 31, &out));
    CHECK_EQ_I64(out, (int64_t)1 << 62);
    CHECK(!cp_mul_i64((int64_t)1 << 32, (int64_t)1 << 31, &out));
    CHECK(!cp_mul_i64(INT64_MIN, -1, &out));
    CHECK(cp_mul_i64(INT64_MAX, 0, &out));
    CHECK_EQ_I64(out, 0);
}

TEST(rounding_up)
{
    size_t out = 7;
    CHECK(cp_size_round_up(0, 64, &out));
    CHECK_EQ_U64(out, 0);
    CHECK(cp_size_round_up(1, 64, &out));
    CHECK_EQ_U64(out, 64);
    CHECK(cp_size_round_up(64, 64, &out));
    CHECK_EQ_U64(out, 64);
    CHECK(cp_size_round_up(SIZE_MAX - 63, 64, &out));
    CHECK_EQ_U64(out, SIZE_MAX - 63);
    CHECK(!cp_size_round_up(SIZE_MAX - 62, 64, &out));
    CHECK_EQ_U64(out, SIZE_MAX - 63); /* written on success only */
    CHECK_EQ_I64(cp_round_up(0, 5), 0);
    CHECK_EQ_I64(cp_round_up(1, 5), 5);
    CHECK_EQ_I64(cp_round_up(10, 5), 10);
}
