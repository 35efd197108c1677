/* Closing while the device is not through with the last call, and may never be: nobody
 * waits for ever, and nobody gets memory that the device still works on. */
#include "exec/context.c"
#include "exec/side.h"
#include "gpus.h"
#include "nccl_rig.h"

enum { BYTES = 4096 };

/* Work that ends when a test says so. */
static void CUDART_CB wait_for_gate(void *arg)
{
    while (!atomic_load((atomic_bool *)arg)) {
        ranks_sleep_us(1000);
    }
}

/* ---- a side with a workspace ---- */

/* A framework whose memory a workspace is. */
static struct {
    void *loans[4];
    int lent, given_back;
} store;

static enum cp_code lend(const struct cp_lender *lender, int ordinal, size_t bytes,
                         const char *what, void **out, void **loan)
{
    (void)lender;
    CP_TRY(cp_cuda_alloc(ordinal, bytes, what, out));
    *loan = *out;
    store.loans[store.lent] = *out;
    store.lent += 1;
    return CP_OK;
}

/* It has another use for it at once. */
static void give_back(void *loan)
{
    memset(loan, 0, BYTES);
    store.given_back += 1;
}

struct bench {
    struct cp_side side;
    cudaStream_t stream;
    atomic_bool is_open; /* the gate of what was given to the stream */
};

static void bench_open(struct bench *bench, bool is_lent)
{
    simgpu_reset();
    simgpu_seed(test_seed);
    simgpu_set_patience(10.0); /* for who waits without a deadline */
    memset(bench, 0, sizeof *bench);
    memset(&store, 0, sizeof store);
    CHECK_EQ_I64(cudaSetDevice(0), cudaSuccess);
    CHECK_EQ_I64(cudaStreamCreateWithFlags(&bench->stream, cudaStreamNonBlocking),
                 cudaSuccess);
    CHECK_EQ_I64(cp_device_cuda_create(0, &bench->side.device), CP_OK);
    if (is_lent) {
        bench->side.lender = (struct cp_lender){
            .lend = lend, .give_back = give_back, .serves_contexts = true};
    }
}

/* A call that works on the workspace behind the gate. */
static void bench_call(struct bench *bench)
{
    struct cp_device *device = bench->side.device;
    struct cp_stream *stream = (struct cp_stream *)bench->stream;
    CHECK_EQ_I64(cp_side_reserve(&bench->side, BYTES, 0, 1.0), CP_OK);
    CHECK_EQ_I64(cudaLaunchHostFunc(bench->stream, wait_for_gate, &bench->is_open),
                 cudaSuccess);
    CHECK_EQ_I64(device->ops->zero(device, bench->side.workspace.data, BYTES, stream),
                 CP_OK);
    CHECK_EQ_I64(device->ops->record(device, stream, CP_DEVICE_EVENT_CALL), CP_OK);
}

static double bench_close_side(struct bench *bench, double timeout)
{
    int64_t start_ns = cp_now_ns();
    cp_side_close(&bench->side, timeout);
    CHECK(bench->side.workspace.data == NULL);
    return (double)(cp_now_ns() - start_ns) * 1e-9;
}

/* `left`: what the side has left behind, or NULL. */
static void bench_fini(struct bench *bench, void *left)
{
    cp_device_cuda_destroy(&bench->side.device);
    atomic_store(&bench->is_open, true);
    CHECK_EQ_I64(cudaStreamSynchronize(bench->stream), cudaSuccess);
    CHECK_EQ_I64(cudaStreamDestroy(bench->stream), cudaSuccess);
    CHECK_EQ_I64(simgpu_live().blocks, left != NULL || store.lent > 0 ? 1 : 0);
    for (int i = 0; i < store.lent; i++) {
        CHECK_EQ_I64(cudaFree(store.loans[i]), cudaSuccess);
    }
    CHECK_EQ_I64(store.lent > 0 ? cudaSuccess : cudaFree(left), cudaSuccess);
    CHECK_EQ_I64(simgpu_live().blocks, 0);
    CHECK_EQ_I64(simgpu_live().events, 0);
    simgpu_reset(); /* finds what was written to after it had been freed */
}

/* Memory that the device may still work on is neither given back nor freed, and the close
 * does not wait for what has no end. */
TEST(work_without_end_keeps_its_workspace)
{
    for (int is_lent = 0; is_lent < 2; is_lent++) {
        struct bench bench;
        TEST_CONTEXT("lent %d", is_lent);
        bench_open(&bench, is_lent != 0);
        bench_call(&bench);
        void *data = bench.side.workspace.data;
        double took = bench_close_side(&bench, 0.2);
        CHECK(took >= 0.2 && took < 2.0);
        CHECK_EQ_I64(store.given_back, 0);
        CHECK_EQ_I64(simgpu_stats().frees, 0);
        bench_fini(&bench, data);
    }
}

/* However long a wait may take in the context. */
TEST(a_close_has_a_deadline_of_its_own)
{
    struct bench bench;
    bench_open(&bench, true);
    bench_call(&bench);
    double took = bench_close_side(&bench, 20.0);
    CHECK(took >= 4.0 && took < 8.0);
    CHECK_EQ_I64(store.given_back, 0);
    bench_fini(&bench, store.loans[0]);
}

static void body_open(int rank, void *arg)
{
    struct bench *bench = arg;
    if (rank == 0) {
        ranks_sleep_us(100000);
        atomic_store(&bench->is_open, true);
        return;
    }
    double took = bench_close_side(bench, 30.0);
    CHECK(took < 2.0);
}

/* Work that has an end is waited for, and no longer than that. */
TEST(work_that_ends_gives_its_workspace_back)
{
    for (int is_lent = 0; is_lent < 2; is_lent++) {
        struct bench bench;
        TEST_CONTEXT("lent %d", is_lent);
        bench_open(&bench, is_lent != 0);
        bench_call(&bench);
        ranks_as_threads(2, body_open, &bench);
        CHECK(atomic_load(&bench.is_open));
        CHECK_EQ_I64(store.given_back, is_lent);
        CHECK_EQ_U64(simgpu_stats().frees, is_lent == 0);
        bench_fini(&bench, NULL);
    }
}

/* A device that has failed does nothing, and one that was never used has nothing to do. */
TEST(there_is_nothing_to_wait_for)
{
    struct bench bench;
    bench_open(&bench, true);
    bench_call(&bench);
    atomic_store(&bench.is_open, true);
    CHECK_EQ_I64(cudaStreamSynchronize(bench.stream), cudaSuccess);
    simgpu_fail_call("cudaEventQuery", 0, cudaErrorUnknown);
    CHECK(bench_close_side(&bench, 30.0) < 1.0);
    CHECK_EQ_I64(store.given_back, 1);
    bench_fini(&bench, NULL);
    bench_open(&bench, true);
    CHECK(bench_close_side(&bench, 30.0) < 1.0);
    bench_fini(&bench, NULL);
}

/* A larger call finds the device at the one before: the context goes on with what it has. */
TEST(a_workspace_does_not_grow_under_work_without_end)
{
    struct bench bench;
    bench_open(&bench, true);
    bench_call(&bench);
    void *data = bench.side.workspace.data;
    CHECK_EQ_I64(cp_side_reserve(&bench.side, 2 * BYTES, 0, 0.2), CP_ERR_DEVICE);
    CHECK_EQ_STR(
        cp_last_error()->text,
        "the workspace cannot grow to 8192 bytes: for 0.2 s the device has not "
        "come to the end of the call before");
    CHECK(bench.side.workspace.data == data);
    CHECK_EQ_I64(store.lent, 1);
    atomic_store(&bench.is_open, true);
    CHECK_EQ_I64(cp_side_reserve(&bench.side, 2 * BYTES, 0, 30.0), CP_OK);
    CHECK_EQ_I64(store.given_back, 1);
    CHECK_EQ_I64(cudaFree(data), cudaSuccess);
    store.loans[0] = NULL;
    CHECK_EQ_I64(bench_close_side(&bench, 30.0) < 1.0, true);
    CHECK_EQ_I64(store.given_back, 2);
    bench_fini(&bench, NULL);
}

/* A capture of another thread, in the mode that forbids questions of all threads. */
TEST(a_close_beside_a_capture)
{
    struct bench bench;
    cudaStream_t other = NULL;
    cudaGraph_t graph = NULL;
    bench_open(&bench, true);
    bench_call(&bench);
    CHECK_EQ_I64(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking), cudaSuccess);
    CHECK_EQ_I64(cudaStreamBeginCapture(other, cudaStreamCaptureModeGlobal),
                 cudaSuccess);
    CHECK(bench_close_side(&bench, 0.2) >= 0.2);
    CHECK_EQ_I64(store.given_back, 0);
    CHECK_EQ_I64(cudaStreamEndCapture(other, &graph), cudaSuccess);
    CHECK_EQ_I64(cudaGraphDestroy(graph), cudaSuccess);
    CHECK_EQ_I64(cudaStreamDestroy(other), cudaSuccess);
    bench_fini(&bench, store.loans[0]);
}

/* ---- a whole context ---- */

struct hang {
    struct world w;
    pthread_barrier_t closed;
    atomic_bool is_open;
};

/* Its time for a wait; the gates of the call have the world's. */
static const double short_s = 0.5;

static void call_and_close(int rank, void *arg)
{
    struct hang *hang = arg;
    struct world *w = &hang->w;
    struct cp_view tensors[CP_TENSORS];
    cudaStream_t stream = (cudaStream_t)gpus_stream(w, rank);
    CHECK_EQ_I64(cudaSetDevice(rank), cudaSuccess);
    CHECK_EQ_I64(cudaLaunchHostFunc(stream, wait_for_gate, &hang->is_open),
                 cudaSuccess);
    CHECK_EQ_I64(world_start(w, rank, &w->scenes[0], CP_OP_ATTENTION, tensors), CP_OK);
    void *data = w->context[rank]->sides[CP_ON_HOST].workspace.data;
    CHECK(data != NULL);
    w->context[rank]->config.timeout = short_s;
    int64_t start_ns = cp_now_ns();
    cp_context_destroy(&w->context[rank]);
    CHECK((double)(cp_now_ns() - start_ns) * 1e-9 < 2.0 + short_s + 1.0);
    (void)pthread_barrier_wait(&hang->closed);
    atomic_store(&hang->is_open, true);
    atomic_store(&abort_hangs, false);
    CHECK_EQ_I64(cudaStreamSynchronize(stream), cudaSuccess);
    CHECK_EQ_I64(cudaFree(data), cudaSuccess); /* it is alive */
    gpus_free(w->scenes[0].tensors[rank], tensors);
}

static enum cp_code join_faulty(struct world *w, int rank,
                                struct cp_context_parts *parts)
{
    return gpus_join_by(&nccl, w, rank, parts);
}

static const struct world_transport faulty = {
    .name = "NCCL whose abort hangs",
    .open = gpus_open,
    .close = gpus_close,
    .join = join_faulty,
    .leave = gpus_leave,
    .stream = gpus_stream,
    .take = gpus_take,
    .give = gpus_give,
};

/* The device does not come to the call, and NCCL does not come back from its abort. */
TEST(a_context_closes_where_nothing_ends)
{
    static struct hang hang;
    memset(&hang, 0, sizeof hang);
    world_open(&hang.w, 2, 1, &faulty, CP_EVEN, 0);
    uint64_t seed = test_seed;
    do { /* the context has one variant, and the ranks are to send something */
        scene_destroy(&hang.w.scenes[0]);
        scene_create(&hang.w.scenes[0], seed++, 2, 1);
    } while (hang.w.scenes[0].variant != CP_EVEN || hang.w.scenes[0].is_replicated);
    (void)pthread_barrier_init(&hang.closed, NULL, 2);
    atomic_store(&abort_hangs, true);
    ranks_as_threads(2, call_and_close, &hang);
    (void)pthread_barrier_destroy(&hang.closed);
    CHECK_EQ_I64(atomic_load(&aborts), 2);
    scene_destroy(&hang.w.scenes[0]);
    world_close(&hang.w);
}
