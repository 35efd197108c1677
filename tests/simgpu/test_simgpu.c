/* Does the simulated device keep CUDA's rules, and does it find those who do not? Streams
 * are threads. */
#include "ranks.h"
#include "simgpu.h"
#include "toy_kernels.h"

enum { NUMBERS = 4096, BYTES = NUMBERS * (int)sizeof(int) };

#define OK(call) CHECK_EQ_I64(call, cudaSuccess)

struct fixture {
    cudaStream_t a, b;
    cudaEvent_t event;
    int *data, *other; /* of the device */
    int host[NUMBERS];
};

static void begin(struct fixture *f)
{
    simgpu_reset();
    simgpu_seed(test_seed);
    OK(cudaStreamCreateWithFlags(&f->a, cudaStreamNonBlocking));
    OK(cudaStreamCreateWithFlags(&f->b, cudaStreamNonBlocking));
    OK(cudaEventCreateWithFlags(&f->event, cudaEventDisableTiming));
    OK(cudaMalloc((void **)&f->data, BYTES));
    OK(cudaMalloc((void **)&f->other, BYTES));
}

static void end(struct fixture *f)
{
    OK(cudaFree(f->data));
    OK(cudaFree(f->other));
    OK(cudaEventDestroy(f->event));
    OK(cudaStreamDestroy(f->a));
    OK(cudaStreamDestroy(f->b));
    struct simgpu_live live = simgpu_live();
    CHECK_EQ_I64(live.blocks + live.streams + live.events, 0);
    simgpu_reset();
}

/* f->host on return; waits. */
static void read_back(struct fixture *f, const int *data, cudaStream_t stream)
{
    OK(cudaMemcpyAsync(f->host, data, BYTES, cudaMemcpyDeviceToHost, stream));
    OK(cudaStreamSynchronize(stream));
}

static void expect_violation(const char *part)
{
    char text[SIMGPU_TEXT];
    simgpu_violation(text);
    CHECK_STR_HAS(text, part);
}

TEST(a_stream_is_in_order)
{
    struct fixture f;
    begin(&f);
    OK(cudaMemsetAsync(f.data, 0, BYTES, f.a));
    int want = 0;
    for (int i = 0; i < 15; i++) {
        OK(toy_scale(f.data, NUMBERS, 3, i, f.a));
        want = want * 3 + i;
        OK(cudaMemcpyAsync(f.other, f.data, BYTES, cudaMemcpyDeviceToDevice, f.a));
        OK(cudaMemcpyAsync(f.data, f.other, BYTES, cudaMemcpyDefault, f.a));
    }
    read_back(&f, f.data, f.a);
    CHECK_EQ_I64(f.host[0], want);
    CHECK_EQ_I64(f.host[NUMBERS - 1], want);
    end(&f);
}

/* Runs one test of this program again with PLANT_RACE set: its exit status and words. */
static int run_again(const char *test, char *words, size_t bytes)
{
    char command[600], self[400];
    ssize_t length = readlink("/proc/self/exe", self, sizeof self - 1);
    self[length > 0 ? length : 0] = '\0';
    (void)snprintf(command, sizeof command, "PLANT_RACE=1 '%s' --only %s 2>&1", self,
                   test);
    FILE *pipe = popen(command, "r");
    if (!pipe) {
        return -1;
    }
    size_t got = fread(words, 1, bytes - 1, pipe);
    words[got] = '\0';
    while (fgetc(pipe) != EOF) {
    }
    return WEXITSTATUS(pclose(pipe));
}

static bool is_planted(void)
{
    return getenv("PLANT_RACE") != NULL;
}

/* With the event ThreadSanitizer is silent, without it the race is seen, whatever the
 * order was this time. */
TEST(a_missing_event_is_a_race)
{
    struct fixture f;
    char words[4000];
    if (!TEST_UNDER_TSAN) {
        TEST_SKIP("ThreadSanitizer's part of the stand-in");
    }
    begin(&f);
    OK(toy_scale(f.data, NUMBERS, 1, 1, f.a));
    OK(cudaEventRecord(f.event, f.a));
    if (!is_planted()) {
        OK(cudaStreamWaitEvent(f.b, f.event, 0));
    }
    OK(cudaMemcpyAsync(f.other, f.data, BYTES, cudaMemcpyDeviceToDevice, f.b));
    OK(cudaDeviceSynchronize());
    end(&f);
    if (!is_planted()) {
        CHECK(run_again("a_missing_event_is_a_race", words, sizeof words) != 0);
        CHECK_STR_HAS(words, "ThreadSanitizer: data race");
        CHECK_STR_HAS(words, "scale_kernel");
    }
}

TEST(a_missing_barrier_is_a_race)
{
    struct fixture f;
    char words[4000];
    if (!TEST_UNDER_TSAN) {
        TEST_SKIP("ThreadSanitizer's part of the stand-in");
    }
    begin(&f);
    OK(toy_tree(f.other, f.data, 1, is_planted(), f.a));
    OK(cudaDeviceSynchronize());
    end(&f);
    if (!is_planted()) {
        CHECK(run_again("a_missing_barrier_is_a_race", words, sizeof words) != 0);
        CHECK_STR_HAS(words, "ThreadSanitizer: data race");
        CHECK_STR_HAS(words, "tree_kernel");
    }
}

/* Without an event one of many runs shows the other order. Under ThreadSanitizer this
 * would be a race, and it would say so. */
TEST(two_streams_have_no_order)
{
    struct fixture f;
    int late = 0, rounds = TEST_UNDER_TSAN ? 0 : 200;
    begin(&f);
    for (int round = 0; round < rounds; round++) {
        OK(cudaMemset(f.data, 0, BYTES));
        OK(cudaDeviceSynchronize());
        OK(toy_scale(f.data, NUMBERS, 1, 1, f.a));
        OK(cudaMemcpyAsync(f.other, f.data, BYTES, cudaMemcpyDeviceToDevice, f.b));
        read_back(&f, f.other, f.b);
        OK(cudaStreamSynchronize(f.a));
        late += f.host[NUMBERS - 1] == 0;
    }
    CHECK(rounds == 0 || (late > 0 && late < rounds));
    end(&f);
}

TEST(an_event_orders_two_streams)
{
    struct fixture f;
    begin(&f);
    OK(cudaMemset(f.data, 0, BYTES));
    OK(cudaDeviceSynchronize());
    for (int round = 1; round <= 50; round++) {
        OK(toy_scale(f.data, NUMBERS, 1, 1, f.a));
        OK(cudaEventRecord(f.event, f.a));
        OK(cudaStreamWaitEvent(f.b, f.event, 0));
        OK(cudaMemcpyAsync(f.other, f.data, BYTES, cudaMemcpyDeviceToDevice, f.b));
        OK(cudaEventRecord(f.event, f.b));
        OK(cudaStreamWaitEvent(f.a, f.event, 0));
        if (round % 10 == 0) {
            read_back(&f, f.other, f.b);
            CHECK_EQ_I64(f.host[0], round);
            CHECK_EQ_I64(f.host[NUMBERS - 1], round);
        }
    }
    end(&f);
}

struct gate {
    atomic_bool is_open;
};

static void wait_for_gate(void *arg)
{
    struct gate *gate = arg;
    while (!atomic_load(&gate->is_open)) {
        ranks_sleep_us(100);
    }
}

/* A wait stands for the record before it, though the event is recorded again. */
TEST(an_event_is_what_was_recorded_last_before_the_wait)
{
    struct fixture f;
    struct gate gate = {false};
    begin(&f);
    OK(cudaStreamWaitEvent(f.b, f.event, 0)); /* never recorded: no wait */
    OK(cudaStreamSynchronize(f.b));
    OK(cudaEventQuery(f.event));
    OK(cudaEventSynchronize(f.event));
    OK(cudaEventRecord(f.event, f.a));
    OK(cudaStreamWaitEvent(f.b, f.event, 0));
    OK(cudaLaunchHostFunc(f.a, wait_for_gate, &gate));
    OK(cudaEventRecord(f.event, f.a));
    OK(cudaStreamSynchronize(f.b));
    CHECK_EQ_I64(cudaEventQuery(f.event), cudaErrorNotReady);
    CHECK_EQ_I64(cudaStreamQuery(f.a), cudaErrorNotReady);
    CHECK_EQ_I64(cudaPeekAtLastError(), cudaErrorNotReady);
    CHECK_EQ_I64(cudaGetLastError(), cudaErrorNotReady);
    OK(cudaGetLastError());
    atomic_store(&gate.is_open, true);
    OK(cudaEventSynchronize(f.event));
    OK(cudaStreamSynchronize(f.a));
    OK(cudaStreamQuery(f.a));
    end(&f);
}

TEST(the_default_stream_follows_blocking_streams_only)
{
    struct fixture f;
    struct gate gate = {false};
    cudaStream_t blocking;
    begin(&f);
    OK(cudaStreamCreate(&blocking));
    OK(cudaLaunchHostFunc(f.a, wait_for_gate, &gate));
    OK(cudaMemsetAsync(f.data, 0, BYTES, blocking));
    OK(toy_scale(f.data, NUMBERS, 1, 7, NULL));
    OK(toy_scale(f.data, NUMBERS, 2, 0, blocking));
    read_back(&f, f.data, NULL);
    CHECK_EQ_I64(f.host[5], 14);
    atomic_store(&gate.is_open, true);
    OK(cudaStreamDestroy(blocking));
    end(&f);
}

TEST(memory_means_nothing_until_written)
{
    struct fixture f;
    int *more;
    float value;
    begin(&f);
    read_back(&f, f.data, f.a);
    memcpy(&value, &f.host[17], sizeof value);
    CHECK(isnan(value));
    OK(cudaMallocAsync((void **)&more, BYTES, f.a));
    OK(cudaMemsetAsync(more, 0, BYTES, f.a));
    read_back(&f, more, f.a);
    CHECK_EQ_I64(f.host[17], 0);
    OK(cudaFreeAsync(more, f.a));
    OK(cudaStreamSynchronize(f.a));
    end(&f);
}

TEST(rows_of_a_copy)
{
    struct fixture f;
    begin(&f);
    for (int i = 0; i < NUMBERS; i++) {
        f.host[i] = i;
    }
    OK(cudaMemcpy(f.data, f.host, BYTES, cudaMemcpyHostToDevice));
    OK(cudaMemsetAsync(f.other, 0, BYTES, f.a));
    OK(cudaMemcpy2DAsync(f.other, 16, f.data, 32, 12, 10, cudaMemcpyDeviceToDevice,
                         f.a));
    read_back(&f, f.other, f.a);
    for (int row = 0; row < 10; row++) {
        for (int i = 0; i < 4; i++) {
            CHECK_EQ_I64(f.host[row * 4 + i], i < 3 ? row * 8 + i : 0);
        }
    }
    end(&f);
}

TEST(kernels_have_barriers_shuffles_and_votes)
{
    struct fixture f;
    enum { BLOCKS = NUMBERS / 128 };
    begin(&f);
    for (int i = 0; i < NUMBERS; i++) {
        f.host[i] = i * i % 1000;
    }
    int want[BLOCKS] = {0};
    for (int i = 0; i < NUMBERS; i++) {
        want[i / 128] += f.host[i];
    }
    OK(cudaMemcpy(f.data, f.host, BYTES, cudaMemcpyHostToDevice));
    for (int round = 0; round < 4; round++) {
        OK(toy_sum(f.other, f.data, BLOCKS, f.a));
        read_back(&f, f.other, f.a);
        CHECK_EQ_BYTES(f.host, want, sizeof want);
        OK(toy_tree(f.other, f.data, BLOCKS, 0, f.a));
        read_back(&f, f.other, f.a);
        CHECK_EQ_BYTES(f.host, want, sizeof want);
    }
    OK(cudaMemsetAsync(f.other, 0, BYTES, f.a));
    OK(toy_count(f.other, f.a));
    OK(toy_shuffle(f.other + 32, f.other + 64, f.other + 96, f.other + 128, f.a));
    read_back(&f, f.other, f.a);
    CHECK_EQ_I64(f.host[0], 256);
    for (int lane = 0; lane < 32; lane++) {
        int in_group = lane % 8;
        CHECK_EQ_I64(f.host[32 + lane], in_group == 0 ? lane : lane - 1);
        CHECK_EQ_I64(f.host[64 + lane], in_group == 7 ? lane : lane + 1);
        CHECK_EQ_I64(f.host[96 + lane], lane ^ 1);
        CHECK_EQ_I64(f.host[128 + lane], lane - in_group + 1);
    }
    CHECK(simgpu_stats().launches == 10);
    end(&f);
}

TEST(a_launch_is_checked)
{
    struct fixture f;
    begin(&f);
    CHECK_EQ_I64(toy_nothing(1025, 0, f.a), cudaErrorInvalidConfiguration);
    CHECK_EQ_I64(cudaGetLastError(), cudaErrorInvalidConfiguration);
    OK(cudaGetLastError());
    CHECK_EQ_I64(toy_nothing(0, 0, f.a), cudaErrorInvalidConfiguration);
    CHECK_EQ_I64(toy_nothing(32, 50 << 10, f.a), cudaErrorInvalidValue);
    CHECK_EQ_I64(toy_allow_shared(228 << 10), cudaErrorInvalidValue);
    OK(toy_allow_shared(64 << 10));
    OK(toy_nothing(32, 50 << 10, f.a));
    OK(cudaSetDevice(1));
    CHECK_EQ_I64(toy_nothing(32, 0, f.a), cudaErrorInvalidResourceHandle);
    CHECK_EQ_I64(cudaMemsetAsync(f.data, 0, 4, f.a), cudaErrorInvalidResourceHandle);
    CHECK_EQ_I64(cudaEventRecord(f.event, NULL), cudaErrorInvalidResourceHandle);
    CHECK_EQ_I64(cudaSetDevice(2), cudaErrorInvalidDevice);
    OK(cudaSetDevice(0));
    end(&f);
}

TEST(broken_barriers_are_found)
{
    struct fixture f;
    begin(&f);
    simgpu_keep_violations(true);
    OK(toy_diverge(f.a));
    OK(cudaStreamSynchronize(f.a));
    expect_violation("32 threads wait for others");
    OK(toy_plain_barrier(f.a));
    OK(cudaStreamSynchronize(f.a));
    expect_violation("a barrier in a kernel that was launched without barriers");
    CHECK_EQ_I64(simgpu_violations(), 2);
    OK(toy_sum(f.other, f.data, 1, f.a)); /* the stream is usable again */
    OK(cudaStreamSynchronize(f.a));
    end(&f);
}

TEST(copies_beyond_a_block_are_found)
{
    struct fixture f;
    begin(&f);
    simgpu_keep_violations(true);
    OK(cudaMemcpyAsync(f.data + 1, f.other, BYTES, cudaMemcpyDeviceToDevice, f.a));
    CHECK_EQ_I64(cudaStreamSynchronize(f.a), cudaErrorIllegalAddress);
    expect_violation(
        "the target of a copy of 16384 bytes touches memory beyond its block");
    CHECK_EQ_I64(cudaMemsetAsync(f.data, 0, 1, f.a),
                 cudaErrorIllegalAddress); /* sticky */
    simgpu_break_device(0, cudaSuccess);
    OK(cudaMemcpyAsync(f.data, f.host, 16, cudaMemcpyDeviceToDevice, f.a));
    CHECK_EQ_I64(cudaStreamSynchronize(f.a), cudaErrorIllegalAddress);
    expect_violation("that is not of a device");
    simgpu_break_device(0, cudaSuccess);
    OK(cudaMemcpyAsync(f.data, f.data + 2, 16, cudaMemcpyDeviceToDevice, f.a));
    OK(cudaStreamSynchronize(f.a));
    expect_violation("overlapping");
    CHECK_EQ_I64(simgpu_violations(), 3);
    end(&f);
}

TEST(memory_used_after_free_is_found)
{
    struct fixture f;
    int *gone;
    begin(&f);
    simgpu_keep_violations(true);
    OK(cudaMalloc((void **)&gone, 256));
    OK(cudaFree(gone));
    OK(cudaMemsetAsync(gone, 0, 4, f.a));
    CHECK_EQ_I64(cudaStreamSynchronize(f.a), cudaErrorIllegalAddress);
    expect_violation("a memset of 4 bytes touches memory after it was freed");
    simgpu_break_device(0, cudaSuccess);
    CHECK_EQ_I64(cudaFree(gone), cudaErrorInvalidValue);
    expect_violation("no living block");
    CHECK_EQ_I64(cudaFree(f.host), cudaErrorInvalidValue);
    end(&f);
}

/* AddressSanitizer ends the process at such a store, so only without it. */
TEST(stores_beside_a_block_are_found_when_it_is_freed)
{
#ifdef __SANITIZE_ADDRESS__
    TEST_SKIP("AddressSanitizer reports the store itself");
#else
    struct fixture f;
    char *block;
    begin(&f);
    simgpu_keep_violations(true);
    for (int side = 0; side < 2; side++) {
        OK(cudaMalloc((void **)&block, 100));
        OK(toy_store(block, side ? 100 : -1, f.a));
        OK(cudaFree(block));
        CHECK_EQ_I64(simgpu_violations(), side + 1);
        expect_violation("bytes before or behind it were written to");
    }
    OK(toy_store(block, 3,
                 f.a)); /* after its free: found when its room is given back */
    OK(cudaStreamSynchronize(f.a));
    OK(cudaMalloc((void **)&block, (size_t)65 << 20));
    OK(cudaFree(block));
    CHECK_EQ_I64(simgpu_violations(), 3);
    expect_violation("written to after it had been freed");
    end(&f);
#endif
}

TEST(destroyed_handles_are_found)
{
    struct fixture f;
    cudaStream_t stream;
    cudaEvent_t event;
    begin(&f);
    simgpu_keep_violations(true);
    OK(cudaStreamCreate(&stream));
    OK(cudaMemsetAsync(f.data, 1, BYTES, stream));
    OK(cudaEventCreate(&event));
    OK(cudaEventRecord(event, stream));
    OK(cudaStreamDestroy(stream)); /* what it was given still happens */
    OK(cudaEventSynchronize(event));
    OK(cudaEventDestroy(event));
    CHECK_EQ_I64(cudaStreamQuery(stream), cudaErrorInvalidResourceHandle);
    expect_violation("a stream is used after it was destroyed");
    CHECK_EQ_I64(cudaEventQuery(event), cudaErrorInvalidResourceHandle);
    expect_violation("an event is used after it was destroyed");
    read_back(&f, f.data, f.a);
    CHECK_EQ_I64(f.host[3], 0x01010101);
    end(&f);
}

static void call_the_runtime(void *arg)
{
    CHECK_EQ_I64(cudaMemset(arg, 0, 4), cudaErrorNotSupported);
}

TEST(a_host_function_that_calls_the_runtime_is_found)
{
    struct fixture f;
    begin(&f);
    simgpu_keep_violations(true);
    OK(cudaLaunchHostFunc(f.a, call_the_runtime, f.data));
    OK(cudaStreamSynchronize(f.a));
    expect_violation("a host function calls cudaMemsetAsync");
    end(&f);
}

TEST(a_host_wait_that_is_too_long_says_what_streams_do)
{
    struct fixture f;
    struct gate gate = {false};
    begin(&f);
    simgpu_keep_violations(true);
    simgpu_set_patience(0.05);
    OK(cudaLaunchHostFunc(f.a, wait_for_gate, &gate));
    OK(cudaEventRecord(f.event, f.a));
    OK(cudaStreamWaitEvent(f.b, f.event, 0));
    CHECK_EQ_I64(cudaStreamSynchronize(f.b), cudaErrorUnknown);
    expect_violation("is in operation 1 of 2, host function");
    expect_violation("is in operation 1 of 1, wait for an event");
    CHECK_EQ_I64(cudaEventSynchronize(f.event), cudaErrorUnknown);
    atomic_store(&gate.is_open, true);
    simgpu_set_patience(100);
    end(&f);
}

TEST(dry_work_is_counted_and_ordered_and_does_nothing)
{
    enum { HUGE_BYTES = 1 << 30 };
    struct fixture f;
    void *huge = NULL;
    begin(&f);
    simgpu_run_dry();
    OK(cudaMalloc(&huge, HUGE_BYTES));
    OK(cudaMemsetAsync(huge, 0, HUGE_BYTES, f.a));
    OK(toy_scale(f.data, NUMBERS, 1, 1, f.a));
    OK(cudaEventRecord(f.event, f.a));
    OK(cudaStreamWaitEvent(f.b, f.event, 0));
    OK(cudaMemcpyAsync(f.other, huge, BYTES, cudaMemcpyDeviceToDevice, f.b));
    OK(cudaStreamSynchronize(f.b));
    OK(cudaEventQuery(f.event));
    CHECK_EQ_I64(f.data[0], -1);
    CHECK_EQ_I64(f.other[0], -1);
    struct simgpu_stats stats = simgpu_stats();
    CHECK_EQ_U64(stats.launches, 1);
    CHECK_EQ_U64(stats.set_bytes, HUGE_BYTES);
    CHECK_EQ_U64(stats.copied_bytes, BYTES);
    CHECK_EQ_U64(stats.host_waits, 1);
    OK(cudaFree(huge));
    simgpu_keep_violations(true);
    OK(cudaMemsetAsync(f.data + 1, 0, BYTES, f.a));
    CHECK_EQ_I64(cudaStreamSynchronize(f.a), cudaErrorIllegalAddress);
    expect_violation("beyond its block");
    simgpu_reset();
    end(&f);
}

TEST(errors_can_be_asked_for)
{
    struct fixture f;
    void *data = NULL;
    begin(&f);
    simgpu_fail_after(1, cudaErrorMemoryAllocation);
    OK(cudaMemsetAsync(f.data, 0, 4, f.a));
    CHECK_EQ_I64(cudaMalloc(&data, 64), cudaErrorMemoryAllocation);
    CHECK_EQ_STR(cudaGetErrorName(cudaGetLastError()), "cudaErrorMemoryAllocation");
    OK(cudaMalloc(&data, 64));
    OK(cudaFree(data));
    simgpu_fail_call("kernel", 0, cudaErrorLaunchFailure);
    OK(cudaMemsetAsync(f.data, 0, BYTES, f.a));
    CHECK_EQ_I64(toy_scale(f.data, NUMBERS, 1, 1, f.a), cudaErrorLaunchFailure);
    OK(toy_scale(f.data, NUMBERS, 1, 1, f.a));
    simgpu_break_device(1, cudaErrorLaunchFailure);
    CHECK_EQ_I64(cudaSetDevice(1), cudaErrorLaunchFailure);
    CHECK_EQ_I64(cudaDeviceSynchronize(), cudaErrorLaunchFailure);
    CHECK_EQ_STR(cudaGetErrorString(cudaGetLastError()), "unspecified launch failure");
    OK(cudaSetDevice(0));
    end(&f);
}

static void use_own_device(int rank, void *arg)
{
    struct fixture f;
    int device = -1, *data;
    (void)arg;
    OK(cudaGetDevice(&device));
    CHECK_EQ_I64(device, 0); /* each thread's own */
    OK(cudaSetDevice(rank));
    OK(cudaStreamCreateWithFlags(&f.a, cudaStreamNonBlocking));
    OK(cudaMalloc((void **)&data, BYTES));
    OK(cudaMemsetAsync(data, 0, BYTES, f.a));
    for (int i = 0; i < 20; i++) {
        OK(toy_scale(data, NUMBERS, 1, rank, f.a));
    }
    read_back(&f, data, f.a);
    CHECK_EQ_I64(f.host[NUMBERS - 1], 20 * rank);
    struct cudaPointerAttributes attributes;
    OK(cudaPointerGetAttributes(&attributes, data + 1));
    CHECK_EQ_I64(attributes.type, cudaMemoryTypeDevice);
    CHECK_EQ_I64(attributes.device, rank);
    OK(cudaPointerGetAttributes(&attributes, f.host));
    CHECK_EQ_I64(attributes.type, cudaMemoryTypeUnregistered);
    OK(cudaFree(data));
    OK(cudaStreamDestroy(f.a));
}

TEST(ranks_are_threads_with_devices)
{
    simgpu_reset();
    simgpu_seed(test_seed);
    simgpu_set_device_count(4);
    ranks_as_threads(4, use_own_device, NULL);
    struct simgpu_stats stats = simgpu_stats();
    CHECK_EQ_U64(stats.launches, 80);
    CHECK_EQ_U64(stats.memsets, 4);
    CHECK_EQ_U64(stats.set_bytes, 4 * BYTES);
    CHECK_EQ_U64(stats.copies, 4);
    CHECK_EQ_U64(stats.host_waits, 8);
    CHECK_EQ_U64(stats.allocations, 4);
    for (int rank = 0; rank < 4; rank++) {
        stats = simgpu_device_stats(rank);
        CHECK_EQ_U64(stats.launches, 20);
        CHECK_EQ_U64(stats.memsets, 1);
        CHECK_EQ_U64(stats.host_waits, 2);
        CHECK_EQ_U64(stats.frees, 1);
    }
    simgpu_reset();
}
