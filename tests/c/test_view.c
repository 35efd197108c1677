/* Boxes of memory. */
#include "tensor/view.h"
#include "test.h"

TEST(compact)
{
    float data[2 * 3 * 4 * 5];
    struct cp_view view = cp_view_compact(data, CP_DTYPE_FLOAT32, 2, 3, 4, 5);
    const int64_t strides[CP_AXES] = {240, 80, 20, 4};
    CHECK(view.data == (char *)data);
    CHECK_EQ_BYTES(view.stride, strides, sizeof strides);
    CHECK_EQ_I64(view.dtype, CP_DTYPE_FLOAT32);
    CHECK_EQ_I64(cp_view_count(&view), 120);
}

TEST(boxes_of_boxes)
{
    int16_t data[2][3][4][5];
    struct cp_view view = cp_view_compact(data, CP_DTYPE_INT16, 2, 3, 4, 5);
    struct cp_view box =
        cp_view_box(&view, (int64_t[]){1, 1, 2, 0}, (int64_t[]){1, 2, 2, 5});
    CHECK(box.data == (char *)&data[1][1][2][0]);
    CHECK_EQ_I64(cp_view_count(&box), 20);
    struct cp_view inner =
        cp_view_box(&box, (int64_t[]){0, 1, 1, 3}, (int64_t[]){1, 1, 1, 2});
    CHECK(inner.data == (char *)&data[1][2][3][3]);
    CHECK_EQ_BYTES(inner.stride, view.stride, sizeof view.stride);
}

TEST(empty_and_absent)
{
    int8_t data[1] = {0};
    struct cp_view view = cp_view_compact(data, CP_DTYPE_INT8, 2, 0, 4, 5);
    CHECK_EQ_I64(cp_view_count(&view), 0);
    struct cp_view none = cp_view_compact(NULL, CP_DTYPE_INT8, 2, 3, 4, 5);
    struct cp_view box =
        cp_view_box(&none, (int64_t[]){1, 1, 1, 1}, (int64_t[]){1, 1, 1, 1});
    CHECK(box.data == NULL);
    CHECK_EQ_I64(cp_view_count(&box), 1);
}
