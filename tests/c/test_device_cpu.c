/* The host's copies and sums against the obvious four loops, over random shapes,
 * strides and dtypes. */
#include "base/mem.h"
#include "device/device.h"
#include "layout.h"
#include "tensor/convert.h"
#include "test.h"

static const enum cp_dtype floats[] = {CP_DTYPE_FLOAT32, CP_DTYPE_FLOAT64,
                                       CP_DTYPE_BFLOAT16, CP_DTYPE_FLOAT16};

enum { ROOM = 1 << 16 };

static double load(const char *at, enum cp_dtype dtype)
{
    float f32;
    double f64;
    uint16_t half;
    memcpy(&half, at, sizeof half);
    memcpy(&f32, at, sizeof f32);
    memcpy(&f64, at, sizeof f64);
    return dtype == CP_DTYPE_FLOAT32    ? (double)f32
           : dtype == CP_DTYPE_FLOAT64  ? f64
           : dtype == CP_DTYPE_BFLOAT16 ? (double)cp_bf16_to_f32(half)
                                        : (double)cp_f16_to_f32(half);
}

static void store(char *at, enum cp_dtype dtype, double value)
{
    float f32 = (float)value;
    uint16_t bf16 = cp_f64_to_bf16(value), f16 = cp_f64_to_f16(value);
    const void *from = dtype == CP_DTYPE_FLOAT32    ? (const void *)&f32
                       : dtype == CP_DTYPE_FLOAT64  ? (const void *)&value
                       : dtype == CP_DTYPE_BFLOAT16 ? (const void *)&bf16
                                                    : (const void *)&f16;
    memcpy(at, from, (size_t)cp_dtype_bytes(dtype));
}

static char *element(const struct cp_view *view, const int64_t at[CP_AXES])
{
    char *data = view->data;
    for (int i = 0; i < CP_AXES; i++) {
        data += at[i] * view->stride[i];
    }
    return data;
}

static void random_shape(struct test_rng *rng, int64_t n[CP_AXES])
{
    for (int i = 0; i < CP_AXES; i++) {
        n[i] =
            test_rng_range(rng, test_rng_range(rng, 0, 9) == 0 ? 0 : 1, i == 3 ? 9 : 4);
    }
}

static char source[ROOM], got[ROOM], want[ROOM];

/* Fills what `view` shows with values that all four types can hold roughly, some of
 * them special. */
static void fill(struct test_rng *rng, const struct cp_view *view)
{
    static const double special[] = {
        (double)INFINITY, (double)-INFINITY, 0.0, -0.0, 1e-7, 65520.0, 1e300, 1e-300};
    for (int64_t i = 0; i < cp_view_count(view); i++) {
        int64_t at[CP_AXES] = {i / (view->n[1] * view->n[2] * view->n[3]),
                               i / (view->n[2] * view->n[3]) % view->n[1],
                               i / view->n[3] % view->n[2], i % view->n[3]};
        double value = test_rng_range(rng, 0, 15) == 0
                           ? special[test_rng_range(rng, 0, 7)]
                           : (double)test_rng_float(rng) * 8.0;
        store(element(view, at), view->dtype, value);
    }
}

/* dst = src or dst += src by the obvious loops. */
static void do_slowly(const struct cp_view *dst, const struct cp_view *src, bool adds)
{
    for (int64_t i = 0; i < cp_view_count(dst); i++) {
        int64_t at[CP_AXES] = {i / (dst->n[1] * dst->n[2] * dst->n[3]),
                               i / (dst->n[2] * dst->n[3]) % dst->n[1],
                               i / dst->n[3] % dst->n[2], i % dst->n[3]};
        double value = load(element(src, at), src->dtype);
        if (adds && dst->dtype == CP_DTYPE_FLOAT32) {
            value = (double)((float)load(element(dst, at), dst->dtype) + (float)value);
        } else if (adds) {
            value += load(element(dst, at), dst->dtype);
        }
        store(element(dst, at), dst->dtype, value);
    }
}

static void check_random(struct test_rng *rng, enum cp_dtype to, enum cp_dtype from,
                         bool adds)
{
    struct cp_device *cpu = cp_device_cpu();
    int64_t n[CP_AXES];
    random_shape(rng, n);
    struct cp_view src = layout_in(rng, source + test_rng_range(rng, 0, 3), from, n),
                   dst = layout_in(rng, got + test_rng_range(rng, 0, 3), to, n),
                   slow = dst;
    TEST_CONTEXT("%s from %s, %lld %lld %lld %lld, dst strides %lld %lld %lld %lld, "
                 "src %lld %lld %lld %lld",
                 cp_dtype_name(to), cp_dtype_name(from), (long long)n[0],
                 (long long)n[1], (long long)n[2], (long long)n[3],
                 (long long)dst.stride[0], (long long)dst.stride[1],
                 (long long)dst.stride[2], (long long)dst.stride[3],
                 (long long)src.stride[0], (long long)src.stride[1],
                 (long long)src.stride[2], (long long)src.stride[3]);
    slow.data = want + (dst.data - got);
    if (test_rng_range(rng, 0, 7) == 0 && !adds) {
        src.stride[test_rng_range(rng, 0, 3)] = 0; /* one row for all */
    }
    fill(rng, &src);
    memset(got, 0x5a, sizeof got);
    fill(rng, &dst);
    memcpy(want, got, sizeof want);
    do_slowly(&slow, &src, adds);
    CHECK_EQ_I64(adds ? cpu->ops->add(cpu, &dst, &src, NULL)
                      : cp_device_copy(cpu, &dst, &src, NULL),
                 CP_OK);
    CHECK_EQ_BYTES(got, want, sizeof got);
}

TEST(copies_convert_between_all_floats)
{
    struct test_rng rng = test_rng_init(1);
    for (int i = 0; i < 3000; i++) {
        check_random(&rng, floats[test_rng_range(&rng, 0, 3)],
                     floats[test_rng_range(&rng, 0, 3)], false);
    }
}

TEST(sums)
{
    struct test_rng rng = test_rng_init(2);
    for (int i = 0; i < 1000; i++) {
        enum cp_dtype dtype = floats[i % 2];
        check_random(&rng, dtype, dtype, true);
    }
}

/* Equal dtypes: bytes, whatever they mean; signalling NaN included. */
TEST(equal_dtypes_are_copied_as_bytes)
{
    struct cp_device *cpu = cp_device_cpu();
    struct test_rng rng = test_rng_init(3);
    for (int dtype = CP_DTYPE_NONE + 1; dtype < CP_DTYPE_COUNT; dtype++) {
        for (int i = 0; i < 60; i++) {
            int64_t n[CP_AXES];
            size_t bytes = (size_t)cp_dtype_bytes((enum cp_dtype)dtype);
            random_shape(&rng, n);
            struct cp_view src = layout_in(&rng, source + test_rng_range(&rng, 0, 3),
                                           (enum cp_dtype)dtype, n);
            struct cp_view dst = layout_in(&rng, got + test_rng_range(&rng, 0, 3),
                                           (enum cp_dtype)dtype, n),
                           slow = dst;
            TEST_CONTEXT("%s, case %d", cp_dtype_name((enum cp_dtype)dtype), i);
            slow.data = want + (dst.data - got);
            for (int k = 0; k < ROOM; k++) {
                source[k] = (char)test_rng_next(&rng);
            }
            memset(got, 0x5a, sizeof got);
            memcpy(want, got, sizeof want);
            for (int64_t k = 0; k < cp_view_count(&dst); k++) {
                int64_t at[CP_AXES] = {k / (n[1] * n[2] * n[3]),
                                       k / (n[2] * n[3]) % n[1], k / n[3] % n[2],
                                       k % n[3]};
                memcpy(element(&slow, at), element(&src, at), bytes);
            }
            CHECK_EQ_I64(cp_device_copy(cpu, &dst, &src, NULL), CP_OK);
            CHECK_EQ_BYTES(got, want, sizeof got);
        }
    }
}

TEST(several_copies_in_one_call)
{
    struct cp_device *cpu = cp_device_cpu();
    float numbers[6] = {1, 2, 3, 4, 5, 6}, result[6] = {0};
    struct cp_copy copies[3];
    for (int i = 0; i < 3; i++) {
        copies[i] = (struct cp_copy){
            .dst = cp_view_compact(result + i, CP_DTYPE_FLOAT32, 1, 1, 1, 1),
            .src = cp_view_compact(numbers + 5 - i, CP_DTYPE_FLOAT32, 1, 1, 1, 1)};
    }
    CHECK_EQ_I64(cpu->ops->copy(cpu, copies, 0, NULL), CP_OK);
    CHECK_NEAR(result[0], 0, 0);
    CHECK_EQ_I64(cpu->ops->copy(cpu, copies, 3, NULL), CP_OK);
    for (int i = 0; i < 3; i++) {
        CHECK_NEAR(result[i], 6 - i, 0);
    }
    copies[2].dst.dtype = CP_DTYPE_INT32;
    CHECK_EQ_I64(cpu->ops->copy(cpu, copies, 3, NULL), CP_ERR_INTERNAL);
}

TEST(what_is_refused)
{
    struct cp_device *cpu = cp_device_cpu();
    struct cp_view a = cp_view_compact(source, CP_DTYPE_FLOAT32, 1, 2, 3, 4);
    struct cp_view b = cp_view_compact(got, CP_DTYPE_FLOAT32, 1, 2, 4, 3);
    CHECK_EQ_I64(cp_device_copy(cpu, &b, &a, NULL), CP_ERR_INTERNAL);
    CHECK_STR_HAS(cp_last_error()->text, "axis 2: 4 and 3");
    b = cp_view_compact(got, CP_DTYPE_INT32, 1, 2, 3, 4);
    CHECK_EQ_I64(cp_device_copy(cpu, &b, &a, NULL), CP_ERR_INTERNAL);
    CHECK_STR_HAS(cp_last_error()->text, "no conversion from float32 to int32");
    CHECK_EQ_I64(cpu->ops->add(cpu, &b, &b, NULL), CP_ERR_INTERNAL);
    b = cp_view_compact(got, CP_DTYPE_FLOAT64, 1, 2, 3, 4);
    CHECK_EQ_I64(cpu->ops->add(cpu, &b, &a, NULL), CP_ERR_INTERNAL);
    a.dtype = CP_DTYPE_NONE;
    b.dtype = CP_DTYPE_NONE;
    CHECK_EQ_I64(cp_device_copy(cpu, &b, &a, NULL), CP_ERR_INTERNAL);
}

TEST(nothing_may_be_nowhere)
{
    struct cp_device *cpu = cp_device_cpu();
    struct cp_view none = cp_view_compact(NULL, CP_DTYPE_FLOAT32, 1, 0, 3, 4);
    CHECK_EQ_I64(cp_device_copy(cpu, &none, &none, NULL), CP_OK);
    CHECK_EQ_I64(cpu->ops->add(cpu, &none, &none, NULL), CP_OK);
    CHECK_EQ_I64(cpu->ops->zero(cpu, NULL, 0, NULL), CP_OK);
}

TEST(memory)
{
    struct cp_device *cpu = cp_device_cpu();
    void *data = NULL;
    REQUIRE(cpu->ops->alloc(cpu, 1000, "a workspace", &data) == CP_OK);
    CHECK_EQ_U64((uintptr_t)data % CP_ALIGNMENT, 0);
    memset(data, 1, 1000);
    CHECK_EQ_I64(cpu->ops->zero(cpu, (char *)data + 1, 998, NULL), CP_OK);
    const char *bytes = data;
    CHECK_EQ_I64(bytes[0] + bytes[1] + bytes[998] + bytes[999], 2);
    cpu->ops->free(cpu, &data);
    CHECK(data == NULL);
    cp_mem_fail_after(0);
    CHECK_EQ_I64(cpu->ops->alloc(cpu, 8, "a workspace", &data), CP_ERR_NO_MEMORY);
    cp_mem_fail_after(-1);
    CHECK_EQ_I64(cp_mem_stats().live_blocks, 0);
    CHECK(cpu->ops->lane == NULL && cpu->ops->record == NULL &&
          cpu->ops->await == NULL);
    CHECK_EQ_I64(cpu->ops->wait(cpu, CP_DEVICE_EVENT_CALL, cp_deadline_in(0.0)), CP_OK);
    CHECK_EQ_U64(cpu->ops->abi, CP_DEVICE_ABI);
}
