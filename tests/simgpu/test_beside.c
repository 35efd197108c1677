/* Calls beside another communicator on the same GPUs, as those of DDP and FSDP are: what
 * order keeps the two apart, and that another is found. */
#include "gpus.h"

enum { BYTES = 64, ROUNDS = 4 * WORLD_SCENES };

/* What a rank has of the other communicator. */
struct other {
    int rank, size, round;
    bool is_aside; /* on a stream of its own */
    ncclComm_t comm;
    cudaStream_t stream;
    cudaEvent_t event;
    unsigned char (*data)[2][RANKS_MOST][BYTES]; /* of the device: to send, received */
};

/* What a test plays. */
static struct {
    ncclUniqueId id; /* of the other communicator */
    enum simnccl_order order;
    bool is_aside;
    enum cp_op op; /* in another order: the call's */
    bool is_late;
} play;

static void beside_open(struct world *w)
{
    gpus_open(w);
    simnccl_set_order(play.order);
    CHECK_EQ_I64(ncclGetUniqueId(&play.id), ncclSuccess);
}

static const struct world_transport beside = {
    .name = "GPUs beside another",
    .open = beside_open,
    .close = gpus_close,
    .join = gpus_join,
    .leave = gpus_leave,
    .stream = gpus_stream,
    .take = gpus_take,
    .give = gpus_give,
};

static void other_begin(struct other *other, const struct world *w, int rank)
{
    *other = (struct other){.rank = rank, .size = w->size, .is_aside = play.is_aside};
    CHECK_EQ_I64(cudaSetDevice(rank), cudaSuccess);
    CHECK_EQ_I64(cudaStreamCreateWithFlags(&other->stream, cudaStreamNonBlocking),
                 cudaSuccess);
    CHECK_EQ_I64(cudaEventCreateWithFlags(&other->event, cudaEventDisableTiming),
                 cudaSuccess);
    CHECK_EQ_I64(cudaMalloc((void **)&other->data, ROUNDS * sizeof *other->data),
                 cudaSuccess);
    CHECK_EQ_I64(ncclCommInitRank(&other->comm, w->size, play.id, rank), ncclSuccess);
}

static void other_end(struct other *other)
{
    CHECK_EQ_I64(cudaFree(other->data), cudaSuccess);
    CHECK_EQ_I64(cudaEventDestroy(other->event), cudaSuccess);
    CHECK_EQ_I64(cudaStreamDestroy(other->stream), cudaSuccess);
}

static int byte_of(int rank, int round)
{
    return (rank * 16 + round) & 0xff;
}

static void follow(cudaStream_t stream, cudaStream_t first, cudaEvent_t event)
{
    CHECK_EQ_I64(cudaEventRecord(event, first), cudaSuccess);
    CHECK_EQ_I64(cudaStreamWaitEvent(stream, event, 0), cudaSuccess);
}

/* From every rank to every rank, behind what the stream of the calls has been given. */
static ncclResult_t collect(struct other *other, cudaStream_t calls)
{
    cudaStream_t stream = other->is_aside ? other->stream : calls;
    int round = other->round++;
    unsigned char (*out)[BYTES] = other->data[round][0];
    unsigned char (*in)[BYTES] = other->data[round][1];
    CHECK_EQ_I64(
        cudaMemsetAsync(out, byte_of(other->rank, round), RANKS_MOST * BYTES, calls),
        cudaSuccess);
    if (other->is_aside) {
        follow(stream, calls, other->event);
    }
    (void)ncclGroupStart();
    for (int peer = 0; peer < other->size; peer++) {
        (void)ncclSend(out[peer], BYTES, ncclUint8, peer, other->comm, stream);
        (void)ncclRecv(in[peer], BYTES, ncclUint8, peer, other->comm, stream);
    }
    return ncclGroupEnd(); /* what went wrong in the group too */
}

/* All has arrived. The stream of the calls follows, as where an optimizer's step does. */
static void judge(struct other *other, cudaStream_t calls)
{
    follow(calls, other->stream, other->event);
    for (int round = 0; round < other->round; round++) {
        unsigned char host[RANKS_MOST][BYTES];
        CHECK_EQ_I64(cudaMemcpyAsync(host, other->data[round][1], sizeof host,
                                     cudaMemcpyDeviceToHost, calls),
                     cudaSuccess);
        CHECK_EQ_I64(cudaStreamSynchronize(calls), cudaSuccess);
        for (int peer = 0; peer < other->size; peer++) {
            CHECK_EQ_I64(host[peer][0], byte_of(peer, round));
            CHECK_EQ_I64(host[peer][BYTES - 1], byte_of(peer, round));
        }
    }
}

/* ---- in program order ---- */

/* All forwards, then all backwards, a collective around each; nobody waits in between. */
static void play_beside(int rank, void *arg)
{
    static const enum cp_op ops[] = {CP_OP_ATTENTION, CP_OP_ATTENTION_BACKWARD};
    struct world *w = arg;
    const struct gpu *gpu = w->own[rank];
    struct cp_view tensors[WORLD_SCENES][CP_TENSORS];
    struct other other;
    other_begin(&other, w, rank);
    for (size_t pass = 0; pass < sizeof ops / sizeof ops[0]; pass++) {
        for (int i = 0; i < WORLD_SCENES; i++) {
            CHECK_EQ_I64(collect(&other, gpu->stream), ncclSuccess);
            CHECK_EQ_I64(world_start(w, rank, &w->scenes[i], ops[pass], tensors[i]),
                         CP_OK);
        }
        CHECK_EQ_I64(collect(&other, gpu->stream), ncclSuccess);
        for (int i = 0; i < WORLD_SCENES; i++) {
            gpus_give(w, rank, w->scenes[i].tensors[rank], tensors[i]);
        }
    }
    judge(&other, gpu->stream);
    CHECK_EQ_I64(ncclCommDestroy(other.comm), ncclSuccess);
    other_end(&other);
}

static void play_all(void)
{
    world_play_by(play_beside, 2, 1, &beside, CP_ANYTHING, 0, NULL);
    world_play_by(play_beside, 2, 2, &beside, CP_ANYTHING, 0, NULL);
    world_play_by(play_beside, 2, 2, &beside, CP_EVEN, 0, NULL);
}

/* The streams give the device the order. */
TEST(collectives_on_the_stream_of_the_calls)
{
    play.is_aside = false;
    play.order = SIMNCCL_AS_GIVEN;
    play_all();
    play.order = SIMNCCL_AS_READY;
    play_all();
}

/* The device has to keep the order in which it was given them. */
TEST(collectives_on_a_stream_of_their_own)
{
    play.is_aside = true;
    play.order = SIMNCCL_AS_GIVEN;
    play_all();
}

/* ---- in another ---- */

/* Until the others have met. */
static void CUDART_CB be_late(void *arg)
{
    (void)arg;
    for (int ms = 0; ms < 20000 && simgpu_violations() == 0; ms++) {
        ranks_sleep_us(1000);
    }
}

/* Rank 0 has the collective before its call, the others behind it. Or all have it before,
 * but rank 0 comes to it late, and the others to their call. */
static void cross(int rank, void *arg)
{
    struct world *w = arg;
    const struct gpu *gpu = w->own[rank];
    struct cp_view tensors[CP_TENSORS];
    struct other other;
    ncclResult_t state = ncclSuccess;
    simgpu_keep_violations(true);
    other_begin(&other, w, rank);
    if (play.is_late && rank == 0) {
        CHECK_EQ_I64(cudaLaunchHostFunc(other.stream, be_late, NULL), cudaSuccess);
    }
    if (play.is_late || rank == 0) {
        CHECK_EQ_I64(collect(&other, gpu->stream), ncclSuccess);
    }
    if (play.is_late && rank != 0) {
        CHECK_EQ_I64(cudaLaunchHostFunc(gpu->stream, be_late, NULL), cudaSuccess);
    }
    /* What comes last may come when the others have been found already. */
    enum cp_code code = world_start(w, rank, &w->scenes[0], play.op, tensors);
    CHECK(code == CP_OK || code == CP_ERR_COMM);
    if (!play.is_late && rank != 0) {
        state = collect(&other, gpu->stream);
        CHECK(state == ncclSuccess || state == ncclInternalError);
    }
    follow(gpu->stream, other.stream, other.event);
    gpus_give(w, rank, w->scenes[0].tensors[rank], tensors);
    CHECK_EQ_I64(ncclCommGetAsyncError(other.comm, &state), ncclSuccess);
    CHECK_EQ_I64(state, ncclInternalError);
    CHECK_EQ_I64(ncclCommAbort(other.comm), ncclSuccess);
    other_end(&other);
}

/* `keeper`: the rank whose device is at the other communicator. */
static void expect_circle(int keeper)
{
    char text[SIMGPU_TEXT], part[100];
    int number = atoi(play.id.internal + strlen("simnccl "));
    simgpu_violation(text);
    CHECK_EQ_I64(simgpu_violations(), 1);
    CHECK_STR_HAS(text, "deadlock; ");
    (void)snprintf(part, sizeof part, "communicator %d: rank %d, group 1 waits to send",
                   number, keeper);
    CHECK_STR_HAS(text, part);
    (void)snprintf(part, sizeof part,
                   "waits for group 1 of communicator %d on device %d", number, keeper);
    CHECK_STR_HAS(text, part);
}

static void play_crossed_by(void (*body)(int rank, void *world), struct world *w,
                            int ring, int ulysses)
{
    uint64_t seed = test_seed;
    world_open(w, ring, ulysses, &beside, CP_EVEN, 0);
    do { /* one in which the ranks have something to tell each other */
        scene_destroy(&w->scenes[0]);
        scene_create(&w->scenes[0], seed++, ring, ulysses);
    } while (w->scenes[0].variant != CP_EVEN || w->scenes[0].is_replicated ||
             w->scenes[0].all_rows == 0 || w->scenes[0].all_keys == 0);
    ranks_as_threads(w->size, body, w);
    scene_destroy(&w->scenes[0]);
}

static void play_crossed(int ring, int ulysses)
{
    struct world w;
    TEST_CONTEXT("%dx%d, op %d, aside %d", ring, ulysses, (int)play.op, play.is_aside);
    play_crossed_by(cross, &w, ring, ulysses);
    expect_circle(play.is_late ? 1 : 0);
    world_close(&w);
}

TEST(a_collective_on_the_wrong_side_of_a_call_is_found)
{
    static const enum cp_op ops[] = {CP_OP_ATTENTION, CP_OP_ATTENTION_BACKWARD};
    play.is_late = false;
    play.order = SIMNCCL_AS_GIVEN;
    for (int i = 0; i < 4; i++) {
        play.op = ops[i / 2];
        play.is_aside = i % 2;
        play_crossed(2, 1);
        play_crossed(2, 2);
    }
}

/* Program order is not enough where the device starts what is ready first. */
TEST(a_stream_of_its_own_without_an_order_on_the_device_is_found)
{
    play.is_late = play.is_aside = true;
    play.order = SIMNCCL_AS_READY;
    play.op = CP_OP_ATTENTION;
    play_crossed(2, 1);
}

/* Where NCCL does not tell, the call's deadline does, and the collective goes on. */
static void cross_unseen(int rank, void *arg)
{
    struct world *w = arg;
    const struct gpu *gpu = w->own[rank];
    struct cp_view tensors[CP_TENSORS];
    struct other other;
    other_begin(&other, w, rank);
    if (rank == 0) {
        CHECK_EQ_I64(collect(&other, gpu->stream), ncclSuccess);
    }
    CHECK_EQ_I64(world_start(w, rank, &w->scenes[0], play.op, tensors), CP_OK);
    if (rank != 0) {
        CHECK_EQ_I64(collect(&other, gpu->stream), ncclSuccess);
    }
    gpus_give(w, rank, w->scenes[0].tensors[rank], tensors);
    judge(&other, gpu->stream);
    CHECK_EQ_I64(world_start(w, rank, &w->scenes[0], play.op, tensors), CP_ERR_COMM);
    CHECK_STR_HAS(cp_last_error()->text, "waited more than 1.0 s for rank");
    CHECK_EQ_I64(ncclCommDestroy(other.comm), ncclSuccess);
    other_end(&other);
}

TEST(a_circle_ends_at_the_deadline)
{
    struct world w;
    play.is_late = play.is_aside = false;
    play.order = SIMNCCL_TOGETHER;
    play.op = CP_OP_ATTENTION;
    gpus_timeout = 1.0;
    play_crossed_by(cross_unseen, &w, 2, 1);
    gpus_timeout = 100.0;
    CHECK_EQ_I64(simgpu_violations(), 0);
    world_close(&w);
}
