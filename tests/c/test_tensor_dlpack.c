/* DLPack descriptions, good and bad. */
#include "tensor/tensor_dlpack.h"
#include "test.h"

static float numbers[64];

struct source {
    DLTensor tensor;
    int64_t shape[8], strides[8];
};

static void make(struct source *source, int ndim, const int64_t *shape)
{
    memset(source, 0, sizeof *source);
    source->tensor.data = numbers;
    source->tensor.device.device_type = kDLCPU;
    source->tensor.ndim = ndim;
    source->tensor.dtype = cp_tensor_dlpack_dtype(CP_DTYPE_FLOAT32);
    source->tensor.shape = source->shape;
    int64_t step = 1;
    for (int axis = ndim - 1; axis >= 0; axis--) {
        source->shape[axis] = shape[axis];
        source->strides[axis] = step;
        step *= shape[axis];
    }
    source->tensor.strides = source->strides;
}

static enum cp_code take(const struct source *source, struct cp_tensor *out)
{
    return cp_tensor_from_dlpack("q", &source->tensor, false, out);
}

TEST(strides_in_bytes)
{
    struct source source;
    struct cp_tensor tensor;
    make(&source, 2, (const int64_t[]){2, 3});
    source.strides[0] = -6;
    source.tensor.byte_offset = 24;
    REQUIRE(take(&source, &tensor) == CP_OK);
    CHECK(tensor.data == (char *)numbers + 24);
    CHECK_EQ_I64(tensor.stride[0], -24);
    CHECK_EQ_I64(tensor.stride[1], 4);
    CHECK_EQ_I64(tensor.dtype, CP_DTYPE_FLOAT32);
    CHECK(!tensor.is_read_only);
    REQUIRE(cp_tensor_from_dlpack("q", &source.tensor, true, &tensor) == CP_OK);
    CHECK(tensor.is_read_only);
}

TEST(no_strides_mean_packed)
{
    struct source source;
    struct cp_tensor tensor;
    make(&source, 3, (const int64_t[]){2, 3, 4});
    source.tensor.strides = NULL;
    REQUIRE(take(&source, &tensor) == CP_OK);
    CHECK_EQ_I64(tensor.stride[0], 48);
    CHECK_EQ_I64(tensor.stride[1], 16);
    CHECK_EQ_I64(tensor.stride[2], 4);
    make(&source, 0, NULL);
    source.tensor.shape = NULL;
    source.tensor.strides = NULL;
    CHECK_EQ_I64(take(&source, &tensor), CP_OK);
}

TEST(idle_strides)
{
    struct source source;
    struct cp_tensor tensor;
    make(&source, 3, (const int64_t[]){1, 4, 1});
    source.strides[0] = INT64_MAX;
    source.strides[2] = INT64_MIN;
    REQUIRE(take(&source, &tensor) == CP_OK);
    CHECK(cp_tensor_is_compact(&tensor));
    make(&source, 2, (const int64_t[]){0, 4});
    source.strides[1] = INT64_MAX;
    source.tensor.data = NULL;
    source.tensor.byte_offset = 8;
    REQUIRE(take(&source, &tensor) == CP_OK);
    CHECK(tensor.data != NULL);
}

TEST(sizes_that_overflow)
{
    struct source source;
    struct cp_tensor tensor;
    make(&source, 2, (const int64_t[]){2, 2});
    source.strides[0] = INT64_MAX / 2;
    CHECK_EQ_I64(take(&source, &tensor), CP_ERR_VALUE);
    make(&source, 1, (const int64_t[]){2});
    source.shape[0] = INT64_MAX / 2;
    CHECK_EQ_I64(take(&source, &tensor), CP_ERR_VALUE);
    source.tensor.strides = NULL;
    CHECK_EQ_I64(take(&source, &tensor), CP_ERR_VALUE);
    make(&source, 1, (const int64_t[]){2});
    source.tensor.byte_offset = UINT64_MAX;
    CHECK_EQ_I64(take(&source, &tensor), CP_ERR_VALUE);
    source.tensor.byte_offset = 64; /* past the last address */
    source.tensor.data = (void *)(UINTPTR_MAX - 15);
    CHECK_EQ_I64(take(&source, &tensor), CP_ERR_VALUE);
    CHECK_STR_HAS(cp_last_error()->text, "q has byte_offset 64");
    make(&source, 1, (const int64_t[]){2});
    source.tensor.ndim = 9;
    CHECK_EQ_I64(take(&source, &tensor), CP_ERR_VALUE);
    source.tensor.ndim = -1;
    CHECK_EQ_I64(take(&source, &tensor), CP_ERR_VALUE);
    source.tensor.ndim = 1;
    source.tensor.shape = NULL;
    CHECK_EQ_I64(take(&source, &tensor), CP_ERR_BUFFER);
}

TEST(element_types)
{
    static const DLDataType bad[] = {{kDLFloat, 32, 2},        {kDLFloat, 8, 1},
                                     {kDLFloat8_e4m3fn, 8, 1}, {kDLUInt, 16, 1},
                                     {kDLBool, 1, 1},          {kDLOpaqueHandle, 64, 1},
                                     {kDLFloat, 32, 0},        {200, 7, 1}};
    struct source source;
    struct cp_tensor tensor;
    char want[64];
    make(&source, 1, (const int64_t[]){2});
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        source.tensor.dtype = bad[i];
        CHECK_EQ_I64(take(&source, &tensor), CP_ERR_TYPE);
        (void)snprintf(want, sizeof want, "code %d, bits %d, lanes %d", bad[i].code,
                       bad[i].bits, bad[i].lanes);
        CHECK_STR_HAS(cp_last_error()->text, want);
    }
    for (int dtype = CP_DTYPE_NONE + 1; dtype < CP_DTYPE_COUNT; dtype++) {
        source.tensor.dtype = cp_tensor_dlpack_dtype((enum cp_dtype)dtype);
        CHECK_EQ_I64(take(&source, &tensor), CP_OK);
        CHECK_EQ_I64(tensor.dtype, dtype);
    }
    CHECK_EQ_I64(cp_tensor_dlpack_dtype(CP_DTYPE_NONE).lanes, 0);
}

TEST(devices)
{
    struct source source;
    struct cp_tensor tensor;
    char text[48];
    make(&source, 1, (const int64_t[]){2});
    REQUIRE(take(&source, &tensor) == CP_OK);
    CHECK_EQ_STR(cp_tensor_print_device(&tensor, text, sizeof text), "cpu");
    CHECK_EQ_I64(cp_tensor_check_device("q", &tensor), CP_OK);
    struct cp_tensor host = tensor;
    source.tensor.device = (DLDevice){kDLCUDA, 3};
    REQUIRE(take(&source, &tensor) == CP_OK);
    CHECK_EQ_I64(cp_tensor_check_device("q", &tensor), CP_OK);
    CHECK(!cp_tensor_is_on_host(&tensor));
    CHECK(!cp_tensor_are_together(&tensor, &host));
    struct cp_tensor other = tensor;
    CHECK(cp_tensor_are_together(&tensor, &other));
    other.device_id = 2;
    CHECK(!cp_tensor_are_together(&tensor, &other));
    tensor.device_type = kDLCUDAHost;
    CHECK_EQ_I64(cp_tensor_check_device("q", &tensor), CP_OK);
    CHECK(cp_tensor_are_together(&tensor, &host));
    tensor.device_type = kDLCUDAManaged;
    CHECK_EQ_I64(cp_tensor_check_device("q", &tensor), CP_ERR_VALUE);
    CHECK_EQ_STR(cp_last_error()->text, "q is on cuda_managed:3; allowed: cpu, cuda");
    tensor.device_type = 99;
    CHECK_EQ_STR(cp_tensor_print_device(&tensor, text, sizeof text),
                 "device type 99:3");
}

TEST(prototypes)
{
    int64_t shape[] = {2, 3};
    DLTensor prototype =
        cp_tensor_prototype(CP_DTYPE_BFLOAT16, (DLDevice){kDLCUDA, 1}, 2, shape);
    CHECK_EQ_I64(prototype.dtype.code, kDLBfloat);
    CHECK_EQ_I64(prototype.dtype.bits, 16);
    CHECK_EQ_I64(prototype.dtype.lanes, 1);
    CHECK_EQ_I64(prototype.device.device_type, kDLCUDA);
    CHECK_EQ_I64(prototype.device.device_id, 1);
    CHECK(prototype.shape == shape);
}
