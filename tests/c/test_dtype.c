/* The rows of the list of element types. */
#include "tensor/dtype.h"
#include "test.h"

TEST(rows)
{
    CHECK_EQ_I64(cp_dtype_bytes(CP_DTYPE_FLOAT32), 4);
    CHECK_EQ_I64(cp_dtype_bytes(CP_DTYPE_BFLOAT16), 2);
    CHECK_EQ_I64(cp_dtype_bytes(CP_DTYPE_BOOL), 1);
    CHECK_EQ_I64(cp_dtype_bytes(CP_DTYPE_COMPLEX128), 16);
    CHECK_EQ_STR(cp_dtype_name(CP_DTYPE_FLOAT16), "float16");
    CHECK(cp_dtype_attends(CP_DTYPE_FLOAT64));
    CHECK(!cp_dtype_attends(CP_DTYPE_INT32));
    CHECK_EQ_I64(cp_dtype_sum(CP_DTYPE_FLOAT64), CP_DTYPE_FLOAT64);
    CHECK_EQ_I64(cp_dtype_sum(CP_DTYPE_BFLOAT16), CP_DTYPE_FLOAT32);
}

TEST(what_is_no_dtype)
{
    CHECK_EQ_I64(cp_dtype_bytes(CP_DTYPE_NONE), 0);
    CHECK_EQ_STR(cp_dtype_name((enum cp_dtype)1000), "none");
    CHECK(!cp_dtype_attends(CP_DTYPE_COUNT));
}

TEST(dlpack_codes_are_the_standards)
{
    /* dlpack.h: int 0, uint 1, float 2, bfloat 4, complex 5, bool 6. */
    CHECK_EQ_I64(cp_dtype_from_dlpack(2, 32), CP_DTYPE_FLOAT32);
    CHECK_EQ_I64(cp_dtype_from_dlpack(2, 64), CP_DTYPE_FLOAT64);
    CHECK_EQ_I64(cp_dtype_from_dlpack(2, 16), CP_DTYPE_FLOAT16);
    CHECK_EQ_I64(cp_dtype_from_dlpack(4, 16), CP_DTYPE_BFLOAT16);
    CHECK_EQ_I64(cp_dtype_from_dlpack(6, 8), CP_DTYPE_BOOL);
    CHECK_EQ_I64(cp_dtype_from_dlpack(1, 8), CP_DTYPE_UINT8);
    CHECK_EQ_I64(cp_dtype_from_dlpack(0, 64), CP_DTYPE_INT64);
    CHECK_EQ_I64(cp_dtype_from_dlpack(5, 64), CP_DTYPE_COMPLEX64);
    CHECK_EQ_I64(cp_dtype_from_dlpack(2, 8), CP_DTYPE_NONE);
    CHECK_EQ_I64(cp_dtype_from_dlpack(-1, 0), CP_DTYPE_NONE);
}

TEST(rows_differ_and_agree_with_their_widths)
{
    static const struct {
        enum cp_dtype dtype;
        int code, bits;
    } rows[] = {
#define ROW(dtype, name, bytes, code, bits, attends) {dtype, code, bits},
        CP_DTYPE_MAP(ROW)
#undef ROW
    };
    CHECK_EQ_U64(sizeof rows / sizeof rows[0], CP_DTYPE_COUNT - 1);
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        CHECK_EQ_I64(cp_dtype_bytes(rows[i].dtype) * 8, rows[i].bits);
        CHECK_EQ_I64(cp_dtype_from_dlpack(rows[i].code, rows[i].bits), rows[i].dtype);
        CHECK(strcmp(cp_dtype_name(rows[i].dtype), "none") != 0);
    }
}
