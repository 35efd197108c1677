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

static ncclUniqueId other_id;
static bool other_is_aside;

static void other_begin(struct other *other, const struct world *w, int rank)
{
    *other = (struct other){.rank = rank, .size = w->size, .is_aside = other_is_aside};
    CHECK_EQ_I64(cudaSetDevice(rank), cudaSuccess);
    CHECK_EQ_I64(cudaStreamCreateWithFlags(&other->stream, cudaStreamNonBlocking),
                 cudaSuccess);
    CHECK_EQ_I64(cudaEventCreateWithFlags(&other->event, cudaEventDisableTiming),
                 cudaSuccess);
    CHECK_EQ_I64(cudaMalloc((void **)&other->data, ROUNDS * sizeof *other->data),
                 cudaSuccess);
    CHECK_EQ_I64(ncclCommInitRank(&other->comm, w->size, other_id, rank), ncclSuccess);
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

static void play(int ring, int ulysses, int32_t variant, bool is_aside)
{
    CHECK_EQ_I64(ncclGetUniqueId(&other_id), ncclSuccess);
    other_is_aside = is_aside;
    world_play_by(play_beside, ring, ulysses, &gpus, variant, 0, NULL);
}

TEST(collectives_on_the_stream_of_the_calls)
{
    play(2, 1, CP_ANYTHING, false);
    play(2, 2, CP_ANYTHING, false);
    play(2, 2, CP_EVEN, false);
}

TEST(collectives_on_a_stream_of_their_own)
{
    play(2, 1, CP_ANYTHING, true);
    play(2, 2, CP_ANYTHING, true);
    play(2, 2, CP_EVEN, true);
}

/* ---- in another ---- */

static enum cp_op crossed_op;

/* Rank 0 has the collective before its call, the others behind it. */
static void cross(int rank, void *arg)
{
    struct world *w = arg;
    const struct gpu *gpu = w->own[rank];
    struct cp_view tensors[CP_TENSORS];
    struct other other;
    ncclResult_t state = ncclSuccess;
    other_begin(&other, w, rank);
    if (rank == 0) {
        CHECK_EQ_I64(collect(&other, gpu->stream), ncclSuccess);
    }
    /* What comes last may come when the others have been found already. */
    enum cp_code code = world_start(w, rank, &w->scenes[0], crossed_op, tensors);
    CHECK(code == CP_OK || code == CP_ERR_COMM);
    if (rank != 0) {
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

static void cross_orders(int ring, int ulysses, enum cp_op op, bool is_aside)
{
    struct world w;
    char text[SIMGPU_TEXT], part[64];
    uint64_t seed = test_seed;
    TEST_CONTEXT("%dx%d, op %d, aside %d", ring, ulysses, (int)op, is_aside);
    CHECK_EQ_I64(ncclGetUniqueId(&other_id), ncclSuccess);
    other_is_aside = is_aside;
    crossed_op = op;
    world_open(&w, ring, ulysses, &gpus, CP_EVEN, 0);
    do {
        scene_destroy(&w.scenes[0]);
        scene_create(&w.scenes[0], seed++, ring, ulysses);
    } while (w.scenes[0].variant != CP_EVEN || w.scenes[0].is_replicated ||
             w.scenes[0].all_rows == 0 || w.scenes[0].all_keys == 0);
    simgpu_keep_violations(true);
    ranks_as_threads(w.size, cross, &w);
    CHECK_EQ_I64(simgpu_violations(), 1);
    simgpu_violation(text);
    CHECK_STR_HAS(text, "deadlock; ");
    (void)snprintf(part, sizeof part, "communicator %d: rank 0, group 1 waits to send",
                   atoi(other_id.internal + strlen("simnccl ")));
    CHECK_STR_HAS(text, part);
    (void)snprintf(part, sizeof part,
                   "waits for group 1 of communicator %d on device 0",
                   atoi(other_id.internal + strlen("simnccl ")));
    CHECK_STR_HAS(text, part);
    scene_destroy(&w.scenes[0]);
    world_close(&w);
}

TEST(a_collective_on_the_wrong_side_of_a_call_is_found)
{
    for (int is_aside = 0; is_aside < 2; is_aside++) {
        cross_orders(2, 1, CP_OP_ATTENTION, is_aside);
        cross_orders(2, 1, CP_OP_ATTENTION_BACKWARD, is_aside);
        cross_orders(2, 2, CP_OP_ATTENTION, is_aside);
        cross_orders(2, 2, CP_OP_ATTENTION_BACKWARD, is_aside);
    }
}
