/* Tensors: what is refused, which strides count, how axes become four. */
#include "tensor/tensor.h"
#include "test.h"

static float numbers[4096];

static struct cp_tensor make(int ndim, const int64_t *shape)
{
    struct cp_tensor tensor;
    memset(&tensor, 0, sizeof tensor);
    CHECK_EQ_I64(
        cp_tensor_init_compact(&tensor, numbers, CP_DTYPE_FLOAT32, ndim, shape), CP_OK);
    return tensor;
}

TEST(compact_strides)
{
    struct cp_tensor tensor = make(4, (const int64_t[]){2, 3, 4, 5});
    CHECK_EQ_I64(tensor.stride[3], 4);
    CHECK_EQ_I64(tensor.stride[2], 20);
    CHECK_EQ_I64(tensor.stride[1], 80);
    CHECK_EQ_I64(tensor.stride[0], 240);
    CHECK_EQ_I64(cp_tensor_count(&tensor), 120);
    CHECK(cp_tensor_is_compact(&tensor));
    tensor.stride[0] = 1000;
    CHECK(!cp_tensor_is_compact(&tensor));
    tensor.shape[0] = 1;
    CHECK(cp_tensor_is_compact(&tensor));
}

TEST(sizes_that_overflow)
{
    struct cp_tensor tensor;
    const int64_t shape[] = {INT64_C(1) << 40, INT64_C(1) << 40};
    CHECK_EQ_I64(cp_tensor_init_compact(&tensor, numbers, CP_DTYPE_FLOAT32, 2, shape),
                 CP_ERR_VALUE);
    CHECK_EQ_I64(cp_tensor_init_compact(&tensor, numbers, CP_DTYPE_FLOAT32, 9, shape),
                 CP_ERR_VALUE);
    CHECK_EQ_I64(cp_tensor_init_compact(&tensor, numbers, CP_DTYPE_FLOAT32, 1,
                                        (const int64_t[]){-1}),
                 CP_ERR_VALUE);
    tensor = make(2, (const int64_t[]){2, 2});
    tensor.stride[0] = INT64_MAX;
    CHECK_EQ_I64(cp_tensor_normalize("x", &tensor), CP_ERR_VALUE);
    tensor = make(2, (const int64_t[]){3, 2});
    tensor.stride[0] = INT64_MIN / 2;
    CHECK_EQ_I64(cp_tensor_normalize("x", &tensor), CP_ERR_VALUE);
    tensor = make(1, (const int64_t[]){2});
    tensor.shape[0] = -2;
    CHECK_EQ_I64(cp_tensor_normalize("x", &tensor), CP_ERR_VALUE);
    CHECK_STR_HAS(cp_last_error()->text, "(-2,)");
}

TEST(idle_strides_are_ignored)
{
    struct cp_tensor tensor = make(4, (const int64_t[]){1, 5, 1, 7});
    struct cp_tensor packed = tensor;
    tensor.stride[0] = INT64_MAX;
    tensor.stride[2] = 0;
    CHECK_EQ_I64(cp_tensor_normalize("x", &tensor), CP_OK);
    CHECK_EQ_BYTES(tensor.stride, packed.stride, 4 * sizeof(int64_t));
}

TEST(empty_tensors_need_no_memory)
{
    struct cp_tensor tensor = make(3, (const int64_t[]){2, 0, 3});
    tensor.data = NULL;
    tensor.stride[0] = INT64_MAX;
    CHECK_EQ_I64(cp_tensor_normalize("x", &tensor), CP_OK);
    CHECK(tensor.data != NULL);
    CHECK(cp_tensor_is_compact(&tensor));
    tensor = make(1, (const int64_t[]){1});
    tensor.data = NULL;
    CHECK_EQ_I64(cp_tensor_normalize("k", &tensor), CP_ERR_BUFFER);
    CHECK_STR_HAS(cp_last_error()->text, "k has shape (1,)");
}

TEST(misaligned_memory)
{
    struct cp_tensor tensor = make(1, (const int64_t[]){4});
    tensor.data += 1;
    CHECK_EQ_I64(cp_tensor_normalize("x", &tensor), CP_ERR_BUFFER);
    tensor = make(1, (const int64_t[]){4});
    tensor.stride[0] = 6;
    CHECK_EQ_I64(cp_tensor_normalize("x", &tensor), CP_ERR_BUFFER);
    tensor = make(1, (const int64_t[]){4});
    tensor.dtype = CP_DTYPE_BOOL;
    tensor.data += 1;
    tensor.stride[0] = 3;
    CHECK_EQ_I64(cp_tensor_normalize("x", &tensor), CP_OK);
}

TEST(shape_text)
{
    char text[160];
    struct cp_tensor tensor = make(0, NULL);
    CHECK_EQ_STR(cp_tensor_print_shape(&tensor, text, sizeof text), "()");
    tensor = make(1, (const int64_t[]){3});
    CHECK_EQ_STR(cp_tensor_print_shape(&tensor, text, sizeof text), "(3,)");
    tensor = make(3, (const int64_t[]){3, 0, 12});
    CHECK_EQ_STR(cp_tensor_print_shape(&tensor, text, sizeof text), "(3, 0, 12)");
    CHECK_EQ_STR(cp_tensor_print_shape(&tensor, text, 5), "(3, ");
}

TEST(attention_view)
{
    struct cp_view view;
    struct cp_tensor tensor = make(4, (const int64_t[]){2, 3, 4, 5});
    tensor.stride[1] = -tensor.stride[1];
    CHECK_EQ_I64(cp_tensor_view_attention("q", &tensor, &view), CP_OK);
    CHECK_EQ_BYTES(view.n, tensor.shape, sizeof view.n);
    CHECK_EQ_BYTES(view.stride, tensor.stride, sizeof view.stride);
    tensor = make(3, (const int64_t[]){3, 4, 5});
    CHECK_EQ_I64(cp_tensor_view_attention("q", &tensor, &view), CP_ERR_VALUE);
    CHECK_STR_HAS(cp_last_error()->text,
                  "q has 3 dimensions, shape (3, 4, 5); it must have 4");
    CHECK_EQ_I64(cp_tensor_view_lse("lse", &tensor, &view), CP_OK);
    CHECK_EQ_I64(view.n[2], 5);
    CHECK_EQ_I64(view.n[3], 1);
    CHECK_EQ_I64(view.stride[2], 4);
    tensor = make(4, (const int64_t[]){2, 3, 4, 5});
    CHECK_EQ_I64(cp_tensor_view_lse("lse", &tensor, &view), CP_ERR_VALUE);
}

static void check_mask(int ndim, const int64_t *shape, const int64_t *want)
{
    struct cp_view view;
    struct cp_tensor mask = make(ndim, shape);
    CHECK_EQ_I64(cp_tensor_view_mask(&mask, 2, 3, &view), CP_OK);
    CHECK_EQ_BYTES(view.n, want, sizeof view.n);
    CHECK_EQ_I64(view.stride[3], 4);
}

TEST(mask_views)
{
    struct cp_view view;
    check_mask(1, (const int64_t[]){7}, (const int64_t[]){1, 1, 1, 7});
    check_mask(2, (const int64_t[]){2, 7}, (const int64_t[]){2, 1, 1, 7});
    check_mask(2, (const int64_t[]){1, 7}, (const int64_t[]){1, 1, 1, 7});
    check_mask(3, (const int64_t[]){2, 5, 7}, (const int64_t[]){2, 1, 5, 7});
    check_mask(4, (const int64_t[]){1, 3, 1, 7}, (const int64_t[]){1, 3, 1, 7});
    struct cp_tensor mask = make(2, (const int64_t[]){5, 7});
    CHECK_EQ_I64(cp_tensor_view_mask(&mask, 2, 3, &view), CP_ERR_VALUE);
    CHECK_STR_HAS(cp_last_error()->text, "batch axis is 5, allowed: 2 or 1");
    mask = make(4, (const int64_t[]){2, 4, 5, 7});
    CHECK_EQ_I64(cp_tensor_view_mask(&mask, 2, 3, &view), CP_ERR_VALUE);
    CHECK_STR_HAS(cp_last_error()->text, "head axis is 4, allowed: 3 or 1");
    mask = make(0, NULL);
    CHECK_EQ_I64(cp_tensor_view_mask(&mask, 2, 3, &view), CP_ERR_VALUE);
    mask = make(5, (const int64_t[]){1, 1, 1, 1, 1});
    CHECK_EQ_I64(cp_tensor_view_mask(&mask, 2, 3, &view), CP_ERR_VALUE);
}

TEST(cut_views)
{
    struct cp_view view;
    struct cp_tensor tensor = make(5, (const int64_t[]){2, 3, 4, 5, 6});
    REQUIRE(cp_tensor_view_cut(&tensor, 2, &view));
    CHECK_EQ_BYTES(view.n, ((const int64_t[]){6, 4, 1, 30}), sizeof view.n);
    CHECK_EQ_I64(view.stride[0], 4 * 30 * 4);
    CHECK_EQ_I64(view.stride[1], 30 * 4);
    CHECK_EQ_I64(view.stride[3], 4);
    REQUIRE(cp_tensor_view_cut(&tensor, 0, &view));
    CHECK_EQ_BYTES(view.n, ((const int64_t[]){1, 2, 1, 360}), sizeof view.n);
    REQUIRE(cp_tensor_view_cut(&tensor, 4, &view));
    CHECK_EQ_BYTES(view.n, ((const int64_t[]){120, 6, 1, 1}), sizeof view.n);

    /* Every other row of the last axis but one: behind dimension 2 there are two axes that do not continue. */
    tensor.stride[3] *= 2;
    tensor.shape[3] = 2;
    CHECK(!cp_tensor_view_cut(&tensor, 2, &view));
    CHECK(cp_tensor_view_cut(&tensor, 3, &view));
    /* A single element in its place continues anything. */
    tensor.shape[3] = 1;
    CHECK(cp_tensor_view_cut(&tensor, 2, &view));

    /* Broadcast axes merge with each other and with nothing else. */
    tensor = make(3, (const int64_t[]){4, 3, 2});
    tensor.stride[0] = 0;
    tensor.stride[1] = 0;
    REQUIRE(cp_tensor_view_cut(&tensor, 2, &view));
    CHECK_EQ_I64(view.n[0], 12);
    CHECK_EQ_I64(view.stride[0], 0);
    tensor.stride[0] = 24;
    CHECK(!cp_tensor_view_cut(&tensor, 2, &view));

    tensor = make(3, (const int64_t[]){4, 0, 2});
    REQUIRE(cp_tensor_view_cut(&tensor, 1, &view));
    CHECK_EQ_BYTES(view.n, ((const int64_t[]){4, 0, 1, 2}), sizeof view.n);
    REQUIRE(cp_tensor_view_cut(&tensor, 0, &view));
    CHECK_EQ_BYTES(view.n, ((const int64_t[]){1, 4, 1, 0}), sizeof view.n);
}

/* Copies random boxes with random strides, and compares element by element. */
TEST(copies)
{
    struct test_rng rng = test_rng_init(1);
    for (size_t i = 0; i < 4096; i++) {
        numbers[i] = (float)i;
    }
    for (int round = 0; round < 200; round++) {
        static float copied[4096];
        struct cp_tensor src = make(3, (const int64_t[]){4, 5, 6});
        struct cp_tensor dst;
        for (int axis = 0; axis < 3; axis++) {
            src.shape[axis] = test_rng_range(&rng, 0, 4);
            src.stride[axis] = 4 * test_rng_range(&rng, -3, 60);
        }
        src.data = (char *)&numbers[200];
        TEST_CONTEXT("shape %lld %lld %lld", (long long)src.shape[0],
                     (long long)src.shape[1], (long long)src.shape[2]);
        REQUIRE(cp_tensor_init_compact(&dst, copied, CP_DTYPE_FLOAT32, 3, src.shape) ==
                CP_OK);
        cp_tensor_copy(&dst, &src);
        const float *got = copied;
        for (int64_t i = 0; i < src.shape[0]; i++) {
            for (int64_t j = 0; j < src.shape[1]; j++) {
                for (int64_t k = 0; k < src.shape[2]; k++) {
                    const char *from = src.data + i * src.stride[0] +
                                       j * src.stride[1] + k * src.stride[2];
                    CHECK_EQ_BYTES(got++, from, sizeof *got);
                }
            }
        }
    }
}

TEST(narrow)
{
    struct cp_tensor tensor = make(2, (const int64_t[]){5, 3});
    struct cp_tensor part = cp_tensor_narrow(&tensor, 0, 2, 2);
    CHECK(part.data == tensor.data + 24);
    CHECK_EQ_I64(part.shape[0], 2);
    part = cp_tensor_narrow(&tensor, 0, 5, 0);
    CHECK_EQ_I64(part.shape[0], 0);
}
