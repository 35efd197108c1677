/* Does the simulated capture keep CUDA's rules, and does it find those who do not? */
#include "ranks.h"
#include "sim_nccl.h"
#include "simgpu.h"
#include "toy_kernels.h"

enum { NUMBERS = 1024, BYTES = NUMBERS * (int)sizeof(int) };

#define OK(call) CHECK_EQ_I64(call, cudaSuccess)

struct fixture {
    cudaStream_t a, b, c;
    cudaEvent_t event, other_event;
    int *data, *other; /* of the device */
    int host[NUMBERS];
    cudaGraph_t graph;
    cudaGraphExec_t exec;
};

static void begin(struct fixture *f)
{
    memset(f, 0, sizeof *f);
    simgpu_reset();
    simgpu_seed(test_seed);
    OK(cudaStreamCreateWithFlags(&f->a, cudaStreamNonBlocking));
    OK(cudaStreamCreateWithFlags(&f->b, cudaStreamNonBlocking));
    OK(cudaStreamCreateWithFlags(&f->c, cudaStreamNonBlocking));
    OK(cudaEventCreateWithFlags(&f->event, cudaEventDisableTiming));
    OK(cudaEventCreateWithFlags(&f->other_event, cudaEventDisableTiming));
    OK(cudaMalloc((void **)&f->data, BYTES));
    OK(cudaMalloc((void **)&f->other, BYTES));
    OK(cudaMemset(f->data, 0, BYTES));
    OK(cudaMemset(f->other, 0, BYTES));
    OK(cudaDeviceSynchronize());
}

static void end(struct fixture *f)
{
    if (f->exec) {
        OK(cudaGraphExecDestroy(f->exec));
    }
    if (f->graph) {
        OK(cudaGraphDestroy(f->graph));
    }
    OK(cudaDeviceSynchronize());
    OK(cudaFree(f->data));
    OK(cudaFree(f->other));
    OK(cudaEventDestroy(f->event));
    OK(cudaEventDestroy(f->other_event));
    OK(cudaStreamDestroy(f->a));
    OK(cudaStreamDestroy(f->b));
    OK(cudaStreamDestroy(f->c));
    struct simgpu_live live = simgpu_live();
    CHECK_EQ_I64(live.blocks + live.streams + live.events + live.graphs, 0);
    simgpu_reset();
}

static void begin_capture(struct fixture *f)
{
    OK(cudaStreamBeginCapture(f->a, cudaStreamCaptureModeGlobal));
}

static void end_capture(struct fixture *f)
{
    OK(cudaStreamEndCapture(f->a, &f->graph));
    OK(cudaGraphInstantiate(&f->exec, f->graph, 0));
}

/* The first and the last number. */
static void expect(struct fixture *f, const int *data, cudaStream_t stream, int want)
{
    OK(cudaMemcpyAsync(f->host, data, BYTES, cudaMemcpyDeviceToHost, stream));
    OK(cudaStreamSynchronize(stream));
    CHECK_EQ_I64(f->host[0], want);
    CHECK_EQ_I64(f->host[NUMBERS - 1], want);
}

static void follow(cudaStream_t stream, cudaStream_t before, cudaEvent_t event)
{
    OK(cudaEventRecord(event, before));
    OK(cudaStreamWaitEvent(stream, event, 0));
}

/* b forks from a, and is joined. */
static void capture_fork(struct fixture *f)
{
    begin_capture(f);
    OK(toy_scale(f->data, NUMBERS, 1, 1, f->a));
    follow(f->b, f->a, f->event);
    OK(toy_scale(f->data, NUMBERS, 2, 0, f->b));
    OK(cudaMemcpyAsync(f->other, f->data, BYTES, cudaMemcpyDeviceToDevice, f->b));
    follow(f->a, f->b, f->event);
    OK(toy_scale(f->other, NUMBERS, 1, 3, f->a));
    end_capture(f);
}

TEST(a_captured_stream_runs_nothing_until_a_launch)
{
    struct fixture f;
    int want = 0;
    begin(&f);
    capture_fork(&f);
    expect(&f, f.data, f.c, 0);
    for (int launch = 0; launch < 20; launch++) {
        OK(cudaGraphLaunch(f.exec, f.a));
        want = (want + 1) * 2;
        if (launch % 3 == 0) { /* a change of what it reads, in the stream's order */
            OK(toy_scale(f.data, NUMBERS, 1, 5, f.a));
            want += 5;
        }
    }
    expect(&f, f.data, f.a, want);
    end(&f);
}

TEST(launches_of_one_graph_are_in_order_on_any_streams)
{
    struct fixture f;
    int want = 0;
    begin(&f);
    capture_fork(&f);
    for (int launch = 0; launch < 12; launch++) {
        OK(cudaGraphLaunch(f.exec, launch % 2 ? f.b : f.c));
        want = (want + 1) * 2;
    }
    expect(&f, f.other, f.b, want + 3);
    end(&f);
}

TEST(a_graph_outlives_its_handles_while_it_runs)
{
    struct fixture f;
    begin(&f);
    capture_fork(&f);
    OK(cudaGraphDestroy(f.graph));
    OK(cudaGraphLaunch(f.exec, f.a));
    OK(cudaGraphExecDestroy(f.exec));
    f.graph = NULL;
    f.exec = NULL;
    expect(&f, f.other, f.a, 5);
    end(&f);
}

/* Nodes without an order between them come in any, so a missing event shows. */
TEST(forks_without_an_event_have_no_order)
{
    struct fixture f;
    int late = 0, rounds = TEST_UNDER_TSAN ? 0 : 200;
    begin(&f);
    begin_capture(&f);
    OK(cudaMemsetAsync(f.data, 0, BYTES, f.a));
    follow(f.b, f.a, f.event);
    OK(toy_scale(f.data, NUMBERS, 1, 1, f.a));
    OK(cudaMemcpyAsync(f.other, f.data, BYTES, cudaMemcpyDeviceToDevice, f.b));
    follow(f.a, f.b, f.event);
    end_capture(&f);
    for (int round = 0; round < rounds; round++) {
        OK(cudaGraphLaunch(f.exec, f.a));
        OK(cudaMemcpyAsync(f.host, f.other, BYTES, cudaMemcpyDeviceToHost, f.a));
        OK(cudaStreamSynchronize(f.a));
        late += f.host[NUMBERS - 1] == 0;
    }
    CHECK(rounds == 0 || (late > 0 && late < rounds));
    end(&f);
}

/* ---- what is not allowed ---- */

/* The capture is spoilt, and cannot be anything else but ended. */
static void expect_spoilt(struct fixture *f)
{
    enum cudaStreamCaptureStatus status;
    OK(cudaStreamGetCaptureInfo(f->a, &status, NULL, NULL, NULL, NULL, NULL));
    CHECK_EQ_I64(status, cudaStreamCaptureStatusInvalidated);
    CHECK_EQ_I64(cudaStreamEndCapture(f->a, &f->graph),
                 cudaErrorStreamCaptureInvalidated);
    CHECK(f->graph == NULL);
    OK(cudaStreamGetCaptureInfo(f->a, &status, NULL, NULL, NULL, NULL, NULL));
    CHECK_EQ_I64(status, cudaStreamCaptureStatusNone);
    (void)cudaGetLastError();
}

TEST(an_event_of_outside_spoils_a_capture)
{
    struct fixture f;
    begin(&f);
    OK(cudaEventRecord(f.event, f.b));
    begin_capture(&f);
    CHECK_EQ_I64(cudaStreamWaitEvent(f.a, f.event, 0), cudaErrorStreamCaptureIsolation);
    expect_spoilt(&f);
    end(&f);
}

TEST(an_event_of_a_capture_means_nothing_outside)
{
    struct fixture f;
    begin(&f);
    begin_capture(&f);
    OK(cudaEventRecord(f.event, f.a));
    end_capture(&f);
    CHECK_EQ_I64(cudaEventQuery(f.event), cudaErrorCapturedEvent);
    CHECK_EQ_I64(cudaEventSynchronize(f.event), cudaErrorCapturedEvent);
    CHECK_EQ_I64(cudaStreamWaitEvent(f.b, f.event, 0), cudaErrorCapturedEvent);
    OK(cudaEventRecord(f.event, f.b)); /* that is the last record */
    OK(cudaStreamWaitEvent(f.c, f.event, 0));
    OK(cudaEventSynchronize(f.event));
    (void)cudaGetLastError();
    end(&f);
}

TEST(captures_do_not_merge)
{
    struct fixture f;
    cudaGraph_t graph;
    begin(&f);
    begin_capture(&f);
    OK(cudaStreamBeginCapture(f.b, cudaStreamCaptureModeGlobal));
    OK(cudaEventRecord(f.event, f.b));
    CHECK_EQ_I64(cudaStreamWaitEvent(f.a, f.event, 0), cudaErrorStreamCaptureMerge);
    CHECK_EQ_I64(cudaStreamEndCapture(f.b, &graph), cudaErrorStreamCaptureInvalidated);
    expect_spoilt(&f);
    end(&f);
}

/* b forks from a, and is not joined. */
static void capture_loose_end(struct fixture *f, bool with_work)
{
    begin_capture(f);
    follow(f->b, f->a, f->event);
    if (with_work) {
        OK(toy_scale(f->data, NUMBERS, 2, 0, f->b));
    }
}

TEST(a_fork_has_to_be_joined)
{
    struct fixture f;
    begin(&f);
    for (int with_work = 0; with_work < 2; with_work++) {
        capture_loose_end(&f, with_work);
        CHECK_EQ_I64(cudaStreamEndCapture(f.b, &f.graph),
                     cudaErrorStreamCaptureUnmatched);
        expect_spoilt(&f);
        capture_loose_end(&f, with_work);
        CHECK_EQ_I64(cudaStreamEndCapture(f.a, &f.graph),
                     cudaErrorStreamCaptureUnjoined);
        CHECK(f.graph == NULL);
        OK(cudaStreamSynchronize(f.b));
    }
    (void)cudaGetLastError();
    end(&f);
}

static cudaError_t try_malloc(struct fixture *f)
{
    void *data = NULL;
    (void)f;
    cudaError_t error = cudaMalloc(&data, 64);
    return error == cudaSuccess ? cudaFree(data) : error;
}

static cudaError_t try_query(struct fixture *f)
{
    cudaError_t error = cudaEventQuery(f->event);
    return error == cudaErrorNotReady ? cudaSuccess : error;
}

static cudaError_t try_wait(struct fixture *f)
{
    return cudaStreamSynchronize(f->c);
}

static cudaError_t (*const unsafe[])(struct fixture *f) = {try_malloc, try_query,
                                                           try_wait};
enum { UNSAFE = sizeof unsafe / sizeof unsafe[0] };

struct elsewhere {
    struct fixture *f;
    enum cudaStreamCaptureMode mode; /* of the other thread */
    cudaError_t want;
};

static void try_elsewhere(int rank, void *arg)
{
    struct elsewhere *elsewhere = arg;
    enum cudaStreamCaptureMode mode = elsewhere->mode;
    (void)rank;
    OK(cudaThreadExchangeStreamCaptureMode(&mode));
    CHECK_EQ_I64(mode, cudaStreamCaptureModeGlobal);
    for (int i = 0; i < UNSAFE; i++) {
        CHECK_EQ_I64(unsafe[i](elsewhere->f), elsewhere->want);
    }
}

/* By the mode of the capture, on this thread and on another. */
TEST(what_is_unsafe_is_forbidden)
{
    struct fixture f;
    begin(&f);
    for (int mode = 0; mode <= cudaStreamCaptureModeRelaxed; mode++) {
        bool is_relaxed = mode == cudaStreamCaptureModeRelaxed;
        for (int i = 0; i < UNSAFE; i++) {
            OK(cudaStreamBeginCapture(f.a, (enum cudaStreamCaptureMode)mode));
            CHECK_EQ_I64(unsafe[i](&f),
                         is_relaxed ? cudaSuccess : cudaErrorStreamCaptureUnsupported);
            if (is_relaxed) {
                OK(cudaStreamEndCapture(f.a, &f.graph));
                OK(cudaGraphDestroy(f.graph));
                f.graph = NULL;
            } else {
                expect_spoilt(&f);
            }
        }
        for (int other = 0; other <= cudaStreamCaptureModeRelaxed; other++) {
            bool is_free = mode != cudaStreamCaptureModeGlobal ||
                           other != cudaStreamCaptureModeGlobal;
            struct elsewhere elsewhere = {&f, (enum cudaStreamCaptureMode)other,
                                          is_free ? cudaSuccess
                                                  : cudaErrorStreamCaptureUnsupported};
            OK(cudaStreamBeginCapture(f.a, (enum cudaStreamCaptureMode)mode));
            ranks_as_threads(1, try_elsewhere, &elsewhere);
            if (is_free) {
                OK(cudaStreamEndCapture(f.a, &f.graph));
                OK(cudaGraphDestroy(f.graph));
                f.graph = NULL;
            } else {
                expect_spoilt(&f);
            }
        }
    }
    end(&f);
}

/* A thread that is relaxed may do it in its own capture too, but not wait for what is captured. */
TEST(a_relaxed_thread_is_forbidden_little)
{
    struct fixture f;
    enum cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    begin(&f);
    begin_capture(&f);
    OK(cudaThreadExchangeStreamCaptureMode(&mode));
    for (int i = 0; i < UNSAFE; i++) {
        OK(unsafe[i](&f));
    }
    CHECK_EQ_I64(cudaStreamSynchronize(f.a), cudaErrorStreamCaptureUnsupported);
    OK(cudaThreadExchangeStreamCaptureMode(&mode));
    expect_spoilt(&f);
    end(&f);
}

TEST(the_default_stream_is_not_captured)
{
    struct fixture f;
    enum cudaStreamCaptureStatus status;
    cudaStream_t blocking;
    begin(&f);
    CHECK_EQ_I64(cudaStreamBeginCapture(NULL, cudaStreamCaptureModeGlobal),
                 cudaErrorStreamCaptureUnsupported);
    OK(cudaStreamGetCaptureInfo(NULL, &status, NULL, NULL, NULL, NULL, NULL));
    OK(cudaStreamCreate(&blocking));
    OK(cudaStreamBeginCapture(blocking, cudaStreamCaptureModeGlobal));
    CHECK_EQ_I64(cudaStreamGetCaptureInfo(NULL, &status, NULL, NULL, NULL, NULL, NULL),
                 cudaErrorStreamCaptureImplicit);
    OK(cudaStreamEndCapture(blocking, &f.graph));
    OK(cudaStreamDestroy(blocking));
    (void)cudaGetLastError();
    end(&f);
}

/* ---- what a graph keeps ---- */

TEST(a_graph_has_memory_of_its_own)
{
    struct fixture f;
    int *own = NULL;
    begin(&f);
    begin_capture(&f);
    OK(cudaMallocAsync((void **)&own, BYTES, f.a));
    OK(cudaMemcpyAsync(own, f.data, BYTES, cudaMemcpyDeviceToDevice, f.a));
    OK(toy_scale(own, NUMBERS, 1, 1, f.a));
    OK(cudaMemcpyAsync(f.other, own, BYTES, cudaMemcpyDeviceToDevice, f.a));
    OK(cudaFreeAsync(own, f.a));
    end_capture(&f);
    CHECK_EQ_I64(simgpu_live().blocks, 3);
    for (int launch = 0; launch < 3; launch++) {
        OK(toy_scale(f.data, NUMBERS, 1, 10, f.a));
        OK(cudaGraphLaunch(f.exec, f.a));
    }
    expect(&f, f.other, f.a, 31);
    end(&f);
}

TEST(memory_that_a_graph_does_not_free_is_found)
{
    struct fixture f;
    int *own = NULL;
    char text[SIMGPU_TEXT];
    begin(&f);
    simgpu_keep_violations(true);
    begin_capture(&f);
    OK(cudaMallocAsync((void **)&own, BYTES, f.a));
    end_capture(&f);
    simgpu_violation(text);
    CHECK_STR_HAS(text, "does not free memory that it allocates");
    end(&f);
}

static void CUDART_CB count(void *arg)
{
    atomic_fetch_add((atomic_int *)arg, 1);
}

static int wait_for(atomic_int *counter, int want)
{
    for (int ms = 0; ms < 5000 && atomic_load(counter) < want; ms++) {
        ranks_sleep_us(1000);
    }
    return atomic_load(counter);
}

/* The graph, what is made of it and a launch that is under way hold it. */
TEST(an_object_is_destroyed_when_the_last_has_gone)
{
    struct fixture f;
    atomic_int destroyed = 0;
    cudaUserObject_t object = NULL;
    enum cudaStreamCaptureStatus status;
    cudaGraph_t graph = NULL;
    unsigned long long id = 0;
    begin(&f);
    OK(cudaUserObjectCreate(&object, &destroyed, count, 1,
                            cudaUserObjectNoDestructorSync));
    begin_capture(&f);
    OK(cudaStreamGetCaptureInfo(f.a, &status, &id, &graph, NULL, NULL, NULL));
    CHECK_EQ_I64(status, cudaStreamCaptureStatusActive);
    CHECK(id > 0);
    OK(cudaGraphRetainUserObject(graph, object, 1, cudaGraphUserObjectMove));
    OK(toy_scale(f.data, NUMBERS, 1, 1, f.a));
    end_capture(&f);
    CHECK(f.graph == graph);
    OK(cudaGraphDestroy(f.graph));
    f.graph = NULL;
    OK(cudaGraphLaunch(f.exec, f.a));
    expect(&f, f.data, f.a, 1);
    CHECK_EQ_I64(atomic_load(&destroyed), 0);
    OK(cudaGraphExecDestroy(f.exec));
    f.exec = NULL;
    CHECK_EQ_I64(wait_for(&destroyed, 1), 1);
    end(&f);
}

/* ---- NCCL ---- */

enum { WORLD = 3, LAUNCHES = 6 };

struct ring {
    ncclUniqueId id;
    atomic_int has_ended[WORLD];
};

static void destroy_comm(int rank, void *arg)
{
    (void)rank;
    CHECK_EQ_I64(ncclCommDestroy(arg), ncclSuccess);
}

/* The number goes once around, in a graph; eager groups go between the launches. */
static void ring_rank(int rank, void *arg)
{
    struct ring *ring = arg;
    struct fixture f;
    ncclComm_t comm = NULL;
    int next = (rank + 1) % WORLD, last = (rank + WORLD - 1) % WORLD;
    OK(cudaSetDevice(rank));
    memset(&f, 0, sizeof f);
    OK(cudaStreamCreateWithFlags(&f.a, cudaStreamNonBlocking));
    OK(cudaMallocAsync((void **)&f.data, BYTES, f.a));
    OK(cudaMallocAsync((void **)&f.other, BYTES, f.a));
    CHECK_EQ_I64(ncclCommInitRank(&comm, WORLD, ring->id, rank), ncclSuccess);
    OK(cudaStreamBeginCapture(f.a, cudaStreamCaptureModeThreadLocal));
    for (int step = 0; step < WORLD; step++) {
        CHECK_EQ_I64(ncclGroupStart(), ncclSuccess);
        CHECK_EQ_I64(ncclSend(f.data, BYTES, ncclUint8, next, comm, f.a), ncclSuccess);
        CHECK_EQ_I64(ncclRecv(f.other, BYTES, ncclUint8, last, comm, f.a), ncclSuccess);
        CHECK_EQ_I64(ncclGroupEnd(), ncclSuccess);
        OK(cudaMemcpyAsync(f.data, f.other, BYTES, cudaMemcpyDeviceToDevice, f.a));
    }
    end_capture(&f);
    for (int launch = 0; launch < LAUNCHES; launch++) {
        OK(cudaMemsetAsync(f.data, rank + launch, BYTES, f.a));
        OK(cudaGraphLaunch(f.exec, f.a));
        if (launch % 2 == 1) {
            CHECK_EQ_I64(ncclGroupStart(), ncclSuccess);
            CHECK_EQ_I64(ncclSend(f.data, BYTES, ncclUint8, next, comm, f.a),
                         ncclSuccess);
            CHECK_EQ_I64(ncclRecv(f.other, BYTES, ncclUint8, last, comm, f.a),
                         ncclSuccess);
            CHECK_EQ_I64(ncclGroupEnd(), ncclSuccess);
        }
        OK(cudaMemcpyAsync(f.host, launch % 2 ? f.other : f.data, BYTES,
                           cudaMemcpyDeviceToHost, f.a));
        OK(cudaStreamSynchronize(f.a));
        CHECK_EQ_I64(((unsigned char *)f.host)[BYTES - 1],
                     (launch % 2 ? last : rank) + launch);
    }
    OK(cudaGraphDestroy(f.graph));
    OK(cudaFreeAsync(f.data, f.a));
    OK(cudaFreeAsync(f.other, f.a));
    OK(cudaStreamSynchronize(f.a));
    OK(cudaGraphExecDestroy(f.exec));
    destroy_comm(rank, comm);
    OK(cudaStreamDestroy(f.a));
}

TEST(a_graph_with_groups_of_nccl)
{
    struct ring ring;
    simgpu_reset();
    simgpu_seed(test_seed);
    simgpu_set_device_count(WORLD);
    CHECK_EQ_I64(ncclGetUniqueId(&ring.id), ncclSuccess);
    ranks_as_threads(WORLD, ring_rank, &ring);
    struct simgpu_live live = simgpu_live();
    CHECK_EQ_I64(live.blocks + live.streams + live.graphs + live.comms, 0);
    simgpu_reset();
}

struct leaving {
    ncclComm_t comm;
    atomic_bool has_gone;
};

static void *leave(void *arg)
{
    struct leaving *leaving = arg;
    CHECK_EQ_I64(ncclCommAbort(leaving->comm), ncclSuccess);
    atomic_store(&leaving->has_gone, true);
    return NULL;
}

/* A rank alone, which sends to itself. */
TEST(a_communicator_goes_after_its_graphs)
{
    struct fixture f;
    ncclUniqueId id;
    struct leaving leaving = {NULL, false};
    pthread_t thread;
    begin(&f);
    CHECK_EQ_I64(ncclGetUniqueId(&id), ncclSuccess);
    CHECK_EQ_I64(ncclCommInitRank(&leaving.comm, 1, id, 0), ncclSuccess);
    begin_capture(&f);
    CHECK_EQ_I64(ncclGroupStart(), ncclSuccess);
    CHECK_EQ_I64(ncclSend(f.data, BYTES, ncclUint8, 0, leaving.comm, f.a), ncclSuccess);
    CHECK_EQ_I64(ncclRecv(f.other, BYTES, ncclUint8, 0, leaving.comm, f.a),
                 ncclSuccess);
    CHECK_EQ_I64(ncclGroupEnd(), ncclSuccess);
    end_capture(&f);
    CHECK_EQ_I64(pthread_create(&thread, NULL, leave, &leaving), 0);
    ranks_sleep_us(20000);
    CHECK(!atomic_load(&leaving.has_gone));
    OK(cudaGraphExecDestroy(f.exec));
    OK(cudaGraphDestroy(f.graph));
    f.exec = NULL;
    f.graph = NULL;
    (void)pthread_join(thread, NULL);
    CHECK(atomic_load(&leaving.has_gone));
    end(&f);
}
