/* The CUDA device: copies and sums against the host's, byte for byte, over random
 * shapes, strides and dtypes; memory; streams and events. */
#include <cuda_runtime.h>

#include "base/mem.h"
#include "cuda_api.h"
#include "device_cuda.h"
#include "layout.h"
#include "simgpu.h"
#include "test.h"

enum { ROOM = 1 << 16, DEVICE = 0 };

static const enum cp_dtype floats[] = {CP_DTYPE_FLOAT32, CP_DTYPE_FLOAT64,
                                       CP_DTYPE_BFLOAT16, CP_DTYPE_FLOAT16};

static char source[ROOM], got[ROOM], want[ROOM];

/* The device under test with room for both sides of a copy. */
struct bench {
    struct cp_device *device;
    cudaStream_t stream;
    void *source, *got;
};

static bool bench_open(struct bench *bench)
{
    *bench = (struct bench){0};
    return CHECK(cp_device_cuda_create(DEVICE, &bench->device) == CP_OK) &&
           CHECK(cudaStreamCreateWithFlags(&bench->stream, cudaStreamNonBlocking) ==
                 cudaSuccess) &&
           CHECK(bench->device->ops->alloc(bench->device, ROOM, "source",
                                           &bench->source) == CP_OK) &&
           CHECK(bench->device->ops->alloc(bench->device, ROOM, "result",
                                           &bench->got) == CP_OK);
}

static void bench_close(struct bench *bench)
{
    (void)cudaStreamSynchronize(bench->stream);
    bench->device->ops->free(bench->device, &bench->source);
    bench->device->ops->free(bench->device, &bench->got);
    CHECK(bench->source == NULL && bench->got == NULL);
    CHECK(cudaStreamDestroy(bench->stream) == cudaSuccess);
    cp_device_cuda_destroy(&bench->device);
    CHECK(bench->device == NULL);
    CHECK_EQ_I64(cp_mem_stats().live_blocks, 0);
}

static void upload(const struct bench *bench, void *to, const void *from, size_t bytes)
{
    CHECK(cudaMemcpyAsync(to, from, bytes, cudaMemcpyHostToDevice, bench->stream) ==
          cudaSuccess);
}

static void download(const struct bench *bench, void *to, const void *from,
                     size_t bytes)
{
    CHECK(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToHost, bench->stream) ==
          cudaSuccess);
    CHECK(cudaStreamSynchronize(bench->stream) == cudaSuccess);
}

static struct cp_view moved(const struct cp_view *view, const char *from, void *to)
{
    struct cp_view there = *view;
    there.data = (char *)to + (view->data - from);
    return there;
}

static void random_shape(struct test_rng *rng, int64_t n[CP_AXES])
{
    static const int64_t wide[] = {8, 16, 24, 32};
    for (int i = 0; i < CP_AXES; i++) {
        int64_t least = test_rng_range(rng, 0, 9) == 0 ? 0 : 1;
        n[i] = test_rng_range(rng, least, i == 3 ? 9 : 4);
    }
    if (test_rng_range(rng, 0, 2) == 0) {
        n[3] = wide[test_rng_range(rng, 0, 3)];
    }
}

/* Bytes that are finite numbers of the dtype, or infinite: what a NaN becomes is the
 * device's affair. */
static void fill(struct test_rng *rng, char *room, enum cp_dtype dtype)
{
    struct cp_device *cpu = cp_device_cpu();
    static float numbers[ROOM / 2];
    int64_t count = ROOM / cp_dtype_bytes(dtype);
    for (int64_t i = 0; i < count; i++) {
        int64_t kind = test_rng_range(rng, 0, 31);
        numbers[i] = kind == 0 ? INFINITY : (kind == 1 ? 1e-7f : test_rng_float(rng));
        numbers[i] *= kind == 2 ? 0x1p17f : 8;
    }
    struct cp_view from = cp_view_compact(numbers, CP_DTYPE_FLOAT32, 1, 1, 1, count);
    struct cp_view to = cp_view_compact(room, dtype, 1, 1, 1, count);
    CHECK(cp_device_copy(cpu, &to, &from, NULL) == CP_OK);
}

/* Does it on the device and on the host, and compares all bytes of the room. */
static void check_same(const struct bench *bench, const struct cp_view *dst,
                       const struct cp_view *src, bool adds)
{
    struct cp_device *cpu = cp_device_cpu(), *device = bench->device;
    struct cp_view slow = moved(dst, got, want);
    struct cp_view dst_there = moved(dst, got, bench->got);
    struct cp_view src_there = moved(src, source, bench->source);
    struct cp_stream *stream = (struct cp_stream *)bench->stream;
    TEST_CONTEXT(
        "%s from %s, %lld %lld %lld %lld, dst strides %lld %lld %lld %lld, "
        "src %lld %lld %lld %lld",
        cp_dtype_name(dst->dtype), cp_dtype_name(src->dtype), (long long)dst->n[0],
        (long long)dst->n[1], (long long)dst->n[2], (long long)dst->n[3],
        (long long)dst->stride[0], (long long)dst->stride[1], (long long)dst->stride[2],
        (long long)dst->stride[3], (long long)src->stride[0], (long long)src->stride[1],
        (long long)src->stride[2], (long long)src->stride[3]);
    memcpy(want, got, sizeof want);
    upload(bench, bench->source, source, ROOM);
    upload(bench, bench->got, got, ROOM);
    CHECK((adds ? device->ops->add(device, &dst_there, &src_there, stream)
                : cp_device_copy(device, &dst_there, &src_there, stream)) == CP_OK);
    CHECK((adds ? cpu->ops->add(cpu, &slow, src, NULL)
                : cp_device_copy(cpu, &slow, src, NULL)) == CP_OK);
    download(bench, got, bench->got, ROOM);
    CHECK_EQ_BYTES(got, want, sizeof got);
}

static void check_random(const struct bench *bench, struct test_rng *rng,
                         enum cp_dtype to, enum cp_dtype from, bool adds)
{
    int64_t n[CP_AXES];
    random_shape(rng, n);
    struct cp_view src = layout_in(
        rng, source + test_rng_range(rng, 0, 3) * cp_dtype_bytes(from), from, n);
    struct cp_view dst =
        layout_in(rng, got + test_rng_range(rng, 0, 3) * cp_dtype_bytes(to), to, n);
    if (test_rng_range(rng, 0, 7) == 0) {
        src.stride[test_rng_range(rng, 0, 3)] = 0; /* one row for all */
    }
    fill(rng, source, from);
    fill(rng, got, to);
    check_same(bench, &dst, &src, adds);
}

TEST(copies_convert_between_all_floats)
{
    struct test_rng rng = test_rng_init(1);
    struct bench bench;
    REQUIRE(bench_open(&bench));
    for (int i = 0; i < 400; i++) {
        check_random(&bench, &rng, floats[test_rng_range(&rng, 0, 3)],
                     floats[test_rng_range(&rng, 0, 3)], false);
    }
    bench_close(&bench);
}

TEST(sums)
{
    struct test_rng rng = test_rng_init(2);
    struct bench bench;
    REQUIRE(bench_open(&bench));
    for (int i = 0; i < 200; i++) {
        check_random(&bench, &rng, floats[i % 2], floats[i % 2], true);
    }
    bench_close(&bench);
}

/* What is added may be of another dtype, as long as that is summed in dst's. */
TEST(sums_of_halves)
{
    static char wide[2 * ROOM];
    struct cp_device *cpu = cp_device_cpu();
    struct test_rng rng = test_rng_init(7);
    struct bench bench;
    REQUIRE(bench_open(&bench));
    for (int i = 0; i < 80; i++) {
        int64_t n[CP_AXES];
        random_shape(&rng, n);
        struct cp_view src = layout_in(&rng, source + 2 * test_rng_range(&rng, 0, 3),
                                       floats[2 + i % 2], n);
        struct cp_view dst =
            layout_in(&rng, got + 4 * test_rng_range(&rng, 0, 3), CP_DTYPE_FLOAT32, n);
        struct cp_view add =
            cp_view_compact(wide, CP_DTYPE_FLOAT32, n[0], n[1], n[2], n[3]);
        fill(&rng, source, src.dtype);
        fill(&rng, got, dst.dtype);
        memcpy(want, got, sizeof want);
        struct cp_view slow = moved(&dst, got, want);
        struct cp_view dst_there = moved(&dst, got, bench.got);
        struct cp_view src_there = moved(&src, source, bench.source);
        upload(&bench, bench.source, source, ROOM);
        upload(&bench, bench.got, got, ROOM);
        CHECK(cp_cuda_add(&dst_there, &src_there, (struct cp_stream *)bench.stream) ==
              CP_OK);
        CHECK(cp_device_copy(cpu, &add, &src, NULL) == CP_OK);
        CHECK(cpu->ops->add(cpu, &slow, &add, NULL) == CP_OK);
        download(&bench, got, bench.got, ROOM);
        CHECK_EQ_BYTES(got, want, sizeof got);
    }
    bench_close(&bench);
}

/* Equal dtypes: bytes, whatever they mean, at any address. */
TEST(equal_dtypes_are_copied_as_bytes)
{
    struct test_rng rng = test_rng_init(3);
    struct bench bench;
    REQUIRE(bench_open(&bench));
    for (int dtype = CP_DTYPE_NONE + 1; dtype < CP_DTYPE_COUNT; dtype++) {
        for (int i = 0; i < 40; i++) {
            int64_t n[CP_AXES];
            random_shape(&rng, n);
            bool is_odd = test_rng_range(&rng, 0, 3) == 0;
            int64_t unit = is_odd ? 1 : cp_dtype_bytes((enum cp_dtype)dtype);
            struct cp_view src =
                layout_in(&rng, source + test_rng_range(&rng, 0, 3) * unit,
                          (enum cp_dtype)dtype, n);
            struct cp_view dst = layout_in(
                &rng, got + test_rng_range(&rng, 0, 3) * unit, (enum cp_dtype)dtype, n);
            for (int k = 0; k < ROOM; k++) {
                source[k] = (char)test_rng_next(&rng);
            }
            memset(got, 0x5a, sizeof got);
            check_same(&bench, &dst, &src, false);
        }
    }
    bench_close(&bench);
}

/* ---- several copies at once ---- */

enum { MOST_COPIES = 70, SLOT = ROOM / 2 }; /* a copy's place; more than two launches */

static char slots[MOST_COPIES * SLOT], slots_want[MOST_COPIES * SLOT];
static char sources[4 * ROOM]; /* numbers of each of the floats */

/* Bytes of any dtype from anywhere, or numbers of one of the floats as another. */
static struct cp_copy random_copy(struct test_rng *rng, char *slot, bool converts)
{
    int64_t n[CP_AXES], from = test_rng_range(rng, 0, 3);
    int64_t dtype = test_rng_range(rng, CP_DTYPE_NONE + 1, CP_DTYPE_COUNT - 1);
    enum cp_dtype is = converts ? floats[from] : (enum cp_dtype)dtype;
    enum cp_dtype becomes = converts ? floats[test_rng_range(rng, 0, 3)] : is;
    bool is_odd = !converts && test_rng_range(rng, 0, 3) == 0;
    int64_t step = is_odd ? 1 : cp_dtype_bytes(is);
    do {
        random_shape(rng, n);
    } while (n[0] * n[1] * n[2] * n[3] * 16 > SLOT / 4);
    char *there =
        slot + test_rng_range(rng, 0, 3) * (is_odd ? 1 : cp_dtype_bytes(becomes));
    return (struct cp_copy){
        .dst = layout_in(rng, there, becomes, n),
        .src = layout_in(rng, sources + from * ROOM + test_rng_range(rng, 0, 3) * step,
                         is, n)};
}

/* All of them by kernels, or those that can be by the copy engine, where rows have so many
 * bytes. */
static void check_several_copies(const struct cp_copy_engine *engine)
{
    static const int counts[] = {0, 1, 2, 23, 24, 25, 49, MOST_COPIES};
    struct test_rng rng = test_rng_init(8);
    struct cp_device *cpu = cp_device_cpu();
    struct bench bench;
    void *from = NULL, *to = NULL;
    REQUIRE(bench_open(&bench));
    struct cp_device *device = bench.device;
    cp_device_cuda_set_engine(device, engine);
    simgpu_reset();
    REQUIRE(device->ops->alloc(device, sizeof sources, "sources", &from) == CP_OK);
    REQUIRE(device->ops->alloc(device, sizeof slots, "slots", &to) == CP_OK);
    for (int i = 0; i < 3 * (int)(sizeof counts / sizeof *counts); i++) {
        struct cp_copy there[MOST_COPIES], here[MOST_COPIES];
        int count = counts[i / 3];
        TEST_CONTEXT("%d copies, %s", count,
                     (const char *[]){"bytes", "numbers", "both"}[i % 3]);
        for (int k = 0; k < 4; k++) {
            fill(&rng, sources + k * ROOM, floats[k]);
        }
        memset(slots, 0x5a, sizeof slots);
        memcpy(slots_want, slots, sizeof slots);
        for (int k = 0; k < count; k++) {
            bool converts = i % 3 == 1 || (i % 3 == 2 && test_rng_range(&rng, 0, 1));
            struct cp_copy copy = random_copy(&rng, slots + k * SLOT, converts);
            bool is_with_peer = test_rng_range(&rng, 0, 3) > 0;
            here[k] = (struct cp_copy){.dst = moved(&copy.dst, slots, slots_want),
                                       .src = copy.src};
            there[k] = (struct cp_copy){.dst = moved(&copy.dst, slots, to),
                                        .src = moved(&copy.src, sources, from),
                                        .is_with_peer = is_with_peer};
        }
        upload(&bench, from, sources, sizeof sources);
        upload(&bench, to, slots, sizeof slots);
        CHECK_EQ_I64(cpu->ops->copy(cpu, here, count, NULL), CP_OK);
        CHECK_EQ_I64(
            device->ops->copy(device, there, count, (struct cp_stream *)bench.stream),
            CP_OK);
        download(&bench, slots, to, sizeof slots);
        CHECK_EQ_BYTES(slots, slots_want, sizeof slots);
    }
    /* Two uploads and a download each time. */
    CHECK(simgpu_stats().launches > 0);
    CHECK((simgpu_stats().copies > 9 * sizeof counts / sizeof *counts + 100) ==
          (engine->least_piece == 1));
    device->ops->free(device, &from);
    device->ops->free(device, &to);
    bench_close(&bench);
}

TEST(several_copies_at_once)
{
    check_several_copies(&(struct cp_copy_engine){INT64_MAX, INT64_MAX, INT64_MAX});
    check_several_copies(&(struct cp_copy_engine){1, 1, 1});
}

TEST(one_of_several_that_is_refused)
{
    struct bench bench;
    REQUIRE(bench_open(&bench));
    struct cp_device *device = bench.device;
    struct cp_copy copies[2] = {0};
    for (int i = 0; i < 2; i++) {
        char *dst = (char *)bench.got + 64 * i;
        copies[i].dst = cp_view_compact(dst, CP_DTYPE_FLOAT32, 1, 1, 2, 4);
        copies[i].src = cp_view_compact(bench.source, CP_DTYPE_FLOAT32, 1, 1, 2, 4);
    }
    copies[1].src.dtype = CP_DTYPE_INT32;
    CHECK_EQ_I64(device->ops->copy(device, copies, 2, NULL), CP_ERR_INTERNAL);
    CHECK_STR_HAS(cp_last_error()->text, "no conversion from int32 to float32");
    bench_close(&bench);
}

TEST(what_is_refused)
{
    struct bench bench;
    REQUIRE(bench_open(&bench));
    struct cp_device *device = bench.device;
    struct cp_view a = cp_view_compact(bench.source, CP_DTYPE_FLOAT32, 1, 2, 3, 4);
    struct cp_view b = cp_view_compact(bench.got, CP_DTYPE_FLOAT32, 1, 2, 4, 3);
    CHECK_EQ_I64(cp_device_copy(device, &b, &a, NULL), CP_ERR_INTERNAL);
    CHECK_STR_HAS(cp_last_error()->text, "axis 2: 4 and 3");
    b = cp_view_compact(bench.got, CP_DTYPE_INT32, 1, 2, 3, 4);
    CHECK_EQ_I64(cp_device_copy(device, &b, &a, NULL), CP_ERR_INTERNAL);
    CHECK_STR_HAS(cp_last_error()->text, "no conversion from float32 to int32");
    CHECK_EQ_I64(device->ops->add(device, &b, &b, NULL), CP_ERR_INTERNAL);
    b = cp_view_compact(bench.got, CP_DTYPE_FLOAT64, 1, 2, 3, 4);
    CHECK_EQ_I64(device->ops->add(device, &b, &a, NULL), CP_ERR_INTERNAL);
    b.data += 4;
    CHECK_EQ_I64(cp_device_copy(device, &b, &a, NULL), CP_ERR_INTERNAL);
    CHECK_STR_HAS(cp_last_error()->text, "not aligned");
    a.dtype = b.dtype = CP_DTYPE_NONE;
    CHECK_EQ_I64(cp_device_copy(device, &b, &a, NULL), CP_ERR_INTERNAL);
    bench_close(&bench);
    struct cp_device *none = NULL;
    CHECK_EQ_I64(cp_device_cuda_create(-1, &none), CP_ERR_VALUE);
    CHECK_EQ_I64(cp_device_cuda_create(1000, &none), CP_ERR_VALUE);
    CHECK_STR_HAS(cp_last_error()->text, "CUDA device 1000 does not exist");
    CHECK(none == NULL);
    cp_device_cuda_destroy(&none);
}

TEST(nothing_may_be_nowhere)
{
    struct bench bench;
    REQUIRE(bench_open(&bench));
    struct cp_device *device = bench.device;
    struct cp_view none = cp_view_compact(NULL, CP_DTYPE_FLOAT32, 1, 0, 3, 4);
    CHECK_EQ_I64(cp_device_copy(device, &none, &none, NULL), CP_OK);
    CHECK_EQ_I64(device->ops->add(device, &none, &none, NULL), CP_OK);
    CHECK_EQ_I64(device->ops->zero(device, NULL, 0, NULL), CP_OK);
    bench_close(&bench);
}

TEST(memory)
{
    struct bench bench;
    REQUIRE(bench_open(&bench));
    struct cp_device *device = bench.device;
    CHECK_EQ_U64((uintptr_t)bench.got % CP_ALIGNMENT, 0);
    memset(got, 1, sizeof got);
    upload(&bench, bench.got, got, ROOM);
    CHECK_EQ_I64(device->ops->zero(device, (char *)bench.got + 1, ROOM - 2,
                                   (struct cp_stream *)bench.stream),
                 CP_OK);
    download(&bench, got, bench.got, ROOM);
    CHECK_EQ_I64(got[0] + got[1] + got[ROOM - 2] + got[ROOM - 1], 2);
    void *data = NULL;
    CHECK_EQ_I64(device->ops->alloc(device, 0, "nothing", &data), CP_OK);
    CHECK(data != NULL);
    device->ops->free(device, &data);
    CHECK(data == NULL);
    device->ops->free(device, &data);
    CHECK_EQ_I64(device->ops->alloc(device, (size_t)1 << 60, "a workspace", &data),
                 CP_ERR_NO_MEMORY);
    CHECK_STR_HAS(cp_last_error()->text, "a workspace");
    CHECK(data == NULL);
    CHECK(cudaGetLastError() == cudaSuccess);
    bench_close(&bench);
}

TEST(no_memory_for_the_device_itself)
{
    struct cp_device *device = NULL;
    cp_mem_fail_after(0);
    CHECK_EQ_I64(cp_device_cuda_create(DEVICE, &device), CP_ERR_NO_MEMORY);
    cp_mem_fail_after(-1);
    CHECK(device == NULL);
    CHECK_EQ_I64(cp_mem_stats().live_blocks, 0);
}

/* A number goes round the lanes, each of which adds to it once the one before has. Only
 * events order them. */
TEST(events_order_streams)
{
    enum { ROUNDS = 40 };
    struct bench bench;
    REQUIRE(bench_open(&bench));
    struct cp_device *device = bench.device;
    struct cp_stream *mine = (struct cp_stream *)bench.stream;
    CHECK(cp_device_is_async(device));
    struct cp_view sum = cp_view_compact(bench.got, CP_DTYPE_FLOAT64, 1, 1, 1, 2);
    struct cp_view one = cp_view_compact(bench.source, CP_DTYPE_FLOAT64, 1, 1, 1, 2);
    const double start[2] = {1, -1};
    double end[2] = {0};
    upload(&bench, bench.source, start, sizeof start);
    CHECK_EQ_I64(device->ops->zero(device, bench.got, sizeof start, mine), CP_OK);
    CHECK_EQ_I64(device->ops->record(device, mine, 0), CP_OK);
    int last = 0;
    for (int i = 0; i < ROUNDS; i++) {
        struct cp_stream *lane = device->ops->lane(device, i % CP_DEVICE_LANES);
        int event = (i * 7 + 1) % CP_DEVICE_EVENTS;
        CHECK(lane != NULL && lane != mine);
        CHECK_EQ_I64(device->ops->await(device, lane, last), CP_OK);
        CHECK_EQ_I64(device->ops->add(device, &sum, &one, lane), CP_OK);
        CHECK_EQ_I64(device->ops->record(device, lane, event), CP_OK);
        last = event;
    }
    CHECK_EQ_I64(device->ops->await(device, mine, last), CP_OK);
    download(&bench, end, bench.got, sizeof end);
    CHECK_NEAR(end[0], ROUNDS, 0);
    CHECK_NEAR(end[1], -ROUNDS, 0);
    bench_close(&bench);
}

TEST(an_event_never_recorded_is_no_wait)
{
    struct bench bench;
    REQUIRE(bench_open(&bench));
    struct cp_stream *mine = (struct cp_stream *)bench.stream;
    CHECK_EQ_I64(bench.device->ops->await(bench.device, mine, CP_DEVICE_EVENTS - 1),
                 CP_OK);
    CHECK(cudaStreamSynchronize(bench.stream) == cudaSuccess);
    bench_close(&bench);
}

TEST(the_current_device_stays)
{
    int count = 0;
    CHECK(cudaGetDeviceCount(&count) == cudaSuccess);
    if (count < 2) {
        TEST_SKIP("needs two devices");
    }
    struct cp_device *other = NULL;
    void *data = NULL;
    int current = -1;
    REQUIRE(cudaSetDevice(0) == cudaSuccess);
    REQUIRE(cp_device_cuda_create(1, &other) == CP_OK);
    struct cp_stream *lane = other->ops->lane(other, 0);
    CHECK_EQ_I64(other->ops->alloc(other, 64, "a block", &data), CP_OK);
    CHECK_EQ_I64(other->ops->zero(other, data, 64, lane), CP_OK);
    struct cp_view view = cp_view_compact(data, CP_DTYPE_FLOAT32, 1, 1, 1, 16);
    CHECK_EQ_I64(other->ops->add(other, &view, &view, lane), CP_OK);
    CHECK_EQ_I64(other->ops->record(other, lane, 3), CP_OK);
    CHECK_EQ_I64(other->ops->await(other, lane, 3), CP_OK);
    CHECK(cudaStreamSynchronize((cudaStream_t)lane) == cudaSuccess);
    other->ops->free(other, &data);
    cp_device_cuda_destroy(&other);
    CHECK(cudaGetDevice(&current) == cudaSuccess);
    CHECK_EQ_I64(current, 0);
}
