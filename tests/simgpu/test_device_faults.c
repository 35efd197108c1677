/* The CUDA device while the runtime fails: every error arrives as one of ours, once,
 * with nothing left over. Only the stand-in can be made to fail. */
#include "base/mem.h"
#include "device_cuda.h"
#include "simgpu.h"
#include "test.h"

/* The k-th call of the runtime fails, for every k until none does. */
TEST(a_device_is_made_whole_or_not_at_all)
{
    simgpu_reset();
    struct simgpu_live before = simgpu_live();
    int64_t k = 0;
    for (bool is_made = false; !is_made; k++) {
        struct cp_device *device = NULL;
        TEST_CONTEXT("call %lld fails", (long long)k);
        simgpu_fail_after(k, cudaErrorUnknown);
        enum cp_code code = cp_device_cuda_create(1, &device);
        simgpu_fail_after(-1, cudaErrorUnknown);
        is_made = code == CP_OK;
        CHECK(is_made || code == CP_ERR_DEVICE);
        CHECK(is_made == (device != NULL));
        cp_device_cuda_destroy(&device);
        CHECK(cudaGetLastError() == cudaSuccess);
        CHECK_EQ_I64(simgpu_live().streams, before.streams);
        CHECK_EQ_I64(simgpu_live().events, before.events);
        CHECK_EQ_I64(cp_mem_stats().live_blocks, 0);
        int current = -1;
        CHECK(cudaSetDevice(0) == cudaSuccess && cudaGetDevice(&current) == 0);
        if (k > 1000) {
            REQUIRE(is_made);
        }
    }
    CHECK(k > CP_DEVICE_EVENTS + CP_DEVICE_LANES);
}

/* Each entry with its first call failing, and on a device that is broken for good. */
TEST(entries_say_what_failed)
{
    simgpu_reset();
    struct cp_device *device = NULL;
    void *data = NULL;
    REQUIRE(cp_device_cuda_create(0, &device) == CP_OK);
    REQUIRE(device->ops->alloc(device, 4096, "a block", &data) == CP_OK);
    struct cp_stream *lane = device->ops->lane(device, 0);
    struct cp_view a = cp_view_compact(data, CP_DTYPE_FLOAT32, 1, 1, 8, 8), b = a;
    b.data += 2048;
    for (int is_broken = 0; is_broken < 2; is_broken++) {
        for (int entry = 0; entry < 7; entry++) {
            TEST_CONTEXT("entry %d, broken %d", entry, is_broken);
            void *more = NULL;
            if (is_broken) {
                simgpu_break_device(0, cudaErrorIllegalAddress);
            } else {
                simgpu_fail_after(0, cudaErrorUnknown);
            }
            enum cp_code code =
                entry == 0   ? device->ops->alloc(device, 64, "more", &more)
                : entry == 1 ? cp_device_copy(device, &b, &a, lane)
                : entry == 2 ? device->ops->add(device, &b, &a, lane)
                : entry == 3 ? device->ops->zero(device, data, 64, lane)
                : entry == 4 ? device->ops->record(device, lane, 0)
                : entry == 5 ? device->ops->await(device, lane, 0)
                             : device->ops->wait(device, 0, cp_deadline_in(1.0));
            simgpu_fail_after(-1, cudaErrorUnknown);
            CHECK_EQ_I64(code, CP_ERR_DEVICE);
            CHECK_STR_HAS(cp_last_error()->text, "failed");
            CHECK(more == NULL);
            if (!is_broken) {
                CHECK(cudaGetLastError() == cudaSuccess);
            }
        }
    }
    simgpu_reset();
    device->ops->free(device, &data);
    cp_device_cuda_destroy(&device);
}

/* Copies that one kernel does are one launch, up to 24 of them: moves of any width are,
 * conversions between two dtypes in units of one width. */
TEST(copies_share_launches)
{
    enum { MOST = 50, BYTES = 1 << 12 };
    static const struct {
        int count;
        bool changes_width, converts; /* of every other copy */
        uint64_t launches;
    } cases[] = {{2, false, false, 1},  {24, true, false, 1}, {25, true, false, 2},
                 {50, false, false, 3}, {2, false, true, 2},  {6, true, true, 6}};
    simgpu_reset();
    struct cp_device *device = NULL;
    void *data = NULL;
    REQUIRE(cp_device_cuda_create(0, &device) == CP_OK);
    REQUIRE(device->ops->alloc(device, MOST * BYTES, "a block", &data) == CP_OK);
    struct cp_stream *lane = device->ops->lane(device, 0);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct cp_copy copies[MOST];
        TEST_CONTEXT("case %zu", i);
        for (int k = 0; k < cases[i].count; k++) {
            bool is_odd = k % 2 == 1;
            int64_t n = cases[i].changes_width && is_odd ? 7 : 8;
            struct cp_view view =
                cp_view_compact((char *)data + k * BYTES, CP_DTYPE_FLOAT32, 1, 1, 4, n);
            copies[k] = (struct cp_copy){.dst = view, .src = view};
            copies[k].dst.data += BYTES / 2;
            if (cases[i].converts && is_odd) {
                copies[k].dst.dtype = CP_DTYPE_BFLOAT16;
            }
        }
        simgpu_reset();
        CHECK_EQ_I64(device->ops->copy(device, copies, cases[i].count, lane), CP_OK);
        struct simgpu_stats stats = simgpu_stats();
        CHECK_EQ_U64(stats.launches + stats.copies, cases[i].launches);
    }
    CHECK(cudaStreamSynchronize((cudaStream_t)lane) == cudaSuccess);
    device->ops->free(device, &data);
    cp_device_cuda_destroy(&device);
}

/* What a device does with a large copy: by an engine (copies) or a kernel (launches). */
static void check_engine(bool is_with_peer, int64_t rows, int64_t row, uint64_t engine)
{
    struct cp_device *device = NULL;
    void *data = NULL;
    TEST_CONTEXT("from a peer %d, %lld rows of %lld bytes", is_with_peer,
                 (long long)rows, (long long)row);
    REQUIRE(cp_device_cuda_create(0, &device) == CP_OK);
    REQUIRE(device->ops->alloc(device, (size_t)(4 * rows * row), "a block", &data) ==
            CP_OK);
    struct cp_stream *lane = device->ops->lane(device, 0);
    struct cp_copy copy = {.is_with_peer = is_with_peer};
    copy.src = cp_view_compact(data, CP_DTYPE_UINT8, 1, rows, 2, row);
    copy.dst = copy.src;
    copy.dst.data += 2 * rows * row;
    copy.src.n[2] = copy.dst.n[2] = 1;
    simgpu_reset();
    CHECK_EQ_I64(device->ops->copy(device, &copy, 1, lane), CP_OK);
    CHECK_EQ_U64(simgpu_stats().copies, engine);
    CHECK_EQ_U64(simgpu_stats().launches, 1 - engine);
    device->ops->free(device, &data);
    cp_device_cuda_destroy(&device);
}

TEST(large_copies_from_peers_are_the_copy_engines)
{
    enum { MB = 1 << 20 };
    simgpu_reset();
    simgpu_set_device_count(3);
    check_engine(true, 30 * 512, 2048, 1);
    check_engine(true, 30 * 1024, 1024, 1);
    check_engine(true, 30 * 1024 - 1, 1024, 0); /* begins sooner */
    check_engine(true, 60 * 1024, 512, 0);      /* short rows */
    check_engine(false, 30 * 512, 2048, 0);
    simgpu_set_device_count(3);
    simgpu_set_pcie(0, 2, true);
    check_engine(true, 30 * 512, 2048, 0);
    simgpu_reset();
    simgpu_set_device_count(3);
    simgpu_set_pcie(0, 2, true);
    simgpu_set_peer_access(0, 2, false); /* no peer of its */
    check_engine(true, 30 * 512, 2048, 1);
    simgpu_reset();
    simgpu_set_pcie(0, 1, true);
    check_engine(true, 1, MB, 1); /* one piece */
    simgpu_fail_call("cudaDeviceGetP2PAttribute", 0, cudaErrorInvalidDevice);
    check_engine(true, 30 * 512, 2048, 0); /* that is no reason to be without a GPU */
}

/* What the entries cost: one thing asked of the device each. */
TEST(entries_ask_the_device_once)
{
    simgpu_reset();
    struct cp_device *device = NULL;
    void *data = NULL;
    REQUIRE(cp_device_cuda_create(0, &device) == CP_OK);
    REQUIRE(device->ops->alloc(device, 4096, "a block", &data) == CP_OK);
    struct cp_stream *lane = device->ops->lane(device, 0);
    struct cp_view a = cp_view_compact(data, CP_DTYPE_FLOAT32, 1, 1, 8, 8), b = a;
    b.data += 2048;
    simgpu_reset();
    CHECK_EQ_I64(device->ops->zero(device, data, 256, lane), CP_OK);
    CHECK_EQ_I64(cp_device_copy(device, &b, &a, lane), CP_OK);
    CHECK_EQ_U64(simgpu_stats().copies, 1);
    CHECK_EQ_U64(simgpu_stats().launches, 0);
    a.n[2] = b.n[2] = 4; /* one run */
    a.stride[2] *= 2;    /* no more */
    CHECK_EQ_I64(cp_device_copy(device, &b, &a, lane), CP_OK);
    CHECK_EQ_U64(simgpu_stats().launches, 1);
    CHECK_EQ_I64(device->ops->add(device, &b, &b, lane), CP_OK);
    CHECK_EQ_U64(simgpu_stats().launches, 2);
    CHECK_EQ_I64(device->ops->record(device, lane, 5), CP_OK);
    CHECK_EQ_I64(device->ops->await(device, lane, 5), CP_OK);
    struct simgpu_stats stats = simgpu_stats();
    CHECK_EQ_U64(stats.copies + stats.memsets + stats.launches, 4);
    CHECK_EQ_U64(stats.records + stats.awaits, 2);
    CHECK_EQ_U64(stats.host_waits, 0);
    CHECK(cudaStreamSynchronize((cudaStream_t)lane) == cudaSuccess);
    device->ops->free(device, &data);
    cp_device_cuda_destroy(&device);
}
