/* The whole path of a call on simulated GPUs: gate, agreement, plan, executor, the CUDA
 * device, its plain kernel and the NCCL communicator, against float64, as
 * tests/c/test_context.c does it for the host. */
#include "gpus.h"
#include "sim_torch.h"

static void play(int ring, int ulysses)
{
    world_play(ring, ulysses, &gpus, CP_ANYTHING, 0, NULL);
    world_play(ring, ulysses, &gpus, CP_EVEN, 0, NULL);
}

TEST(rings)
{
    play(2, 1);
    play(3, 1);
    play(4, 1);
}

TEST(ulysses)
{
    play(1, 2);
    play(1, 3);
    play(1, 4);
}

TEST(unified)
{
    play(2, 2);
    play(3, 2);
    play(2, 3);
    play(2, 4);
}

/* All forwards, then all backwards, on two streams in turns; nobody waits in between. */
static void alternate(int rank, void *arg)
{
    static const enum cp_op ops[] = {CP_OP_ATTENTION, CP_OP_ATTENTION_BACKWARD};
    struct world *w = arg;
    struct gpu *gpu = w->own[rank];
    cudaStream_t streams[2] = {gpu->stream, NULL};
    struct cp_view tensors[WORLD_SCENES][CP_TENSORS];
    CHECK_EQ_I64(cudaSetDevice(rank), cudaSuccess);
    CHECK_EQ_I64(cudaStreamCreateWithFlags(&streams[1], cudaStreamNonBlocking),
                 cudaSuccess);
    for (size_t pass = 0; pass < sizeof ops / sizeof ops[0]; pass++) {
        for (int i = 0; i < WORLD_SCENES; i++) {
            gpu->stream = streams[i % 2];
            CHECK_EQ_I64(world_start(w, rank, &w->scenes[i], ops[pass], tensors[i]),
                         CP_OK);
        }
        for (int i = 0; i < WORLD_SCENES; i++) {
            gpu->stream = streams[i % 2];
            gpus_give(w, rank, w->scenes[i].tensors[rank], tensors[i]);
        }
    }
    gpu->stream = streams[0];
    CHECK_EQ_I64(cudaStreamDestroy(streams[1]), cudaSuccess);
}

TEST(calls_on_two_streams)
{
    world_play_by(alternate, 2, 1, &gpus, CP_ANYTHING, 0, NULL);
    world_play_by(alternate, 1, 3, &gpus, CP_ANYTHING, 0, NULL);
    world_play_by(alternate, 2, 2, &gpus, CP_EVEN, 0, NULL);
}

/* Of which torch takes a block or another. */
static bool suits_torch(const struct scene *scene)
{
    return scene->mask_kind == CP_MASK_NONE && scene->dtype != CP_DTYPE_FLOAT64 &&
           scene->dim == 8 && scene->value_dim == 8;
}

/* torch's current stream is the caller's. */
static void take_as_torch(struct world *w, int rank, struct cp_view tensors[CP_TENSORS])
{
    simtorch_set_stream(((const struct gpu *)w->own[rank])->stream);
    gpus_take(w, rank, tensors);
}

static bool suits_torch_with_dlse(const struct scene *scene)
{
    return suits_torch(scene) && scene->want_lse;
}

static void play_with_torch(int ring, int ulysses,
                            bool (*suits)(const struct scene *scene))
{
    struct world_transport transport = gpus;
    transport.take = take_as_torch;
    world_play(ring, ulysses, &transport, CP_ANYTHING, 0, suits);
    world_play(ring, ulysses, &transport, CP_EVEN, 0, suits);
}

/* The same with torch's ops for the blocks that they take. */
TEST(with_torch)
{
    simtorch_load(true);
    play_with_torch(2, 1, suits_torch);
    play_with_torch(1, 3, suits_torch);
    play_with_torch(2, 2, suits_torch);
    struct simtorch_counts counts = simtorch_counts();
    CHECK(counts.flash > 0 && counts.efficient > 0);
    CHECK(counts.flash_gradient > 0 && counts.efficient_gradient > 0);
    CHECK_EQ_I64(counts.alive, 0);
    simtorch_load(false);
}

TEST(with_torch_and_cudnn)
{
    simtorch_load(true);
    simtorch_set_cudnn(91501);
    play_with_torch(3, 1, suits_torch);
    struct simtorch_counts counts = simtorch_counts();
    CHECK(counts.cudnn > 0 && counts.flash_gradient > 0);
    CHECK_EQ_I64(counts.alive, 0);
    simtorch_load(false);
}

/* Its gradients do not know a gradient of the lse. */
TEST(with_torch_gradients_of_an_lse_are_the_plain_kernels)
{
    simtorch_load(true);
    play_with_torch(2, 1, suits_torch_with_dlse);
    struct simtorch_counts counts = simtorch_counts();
    CHECK(counts.flash + counts.efficient > 0); /* which of them is a matter of luck */
    CHECK_EQ_I64(counts.flash_gradient, 0);
    CHECK_EQ_I64(counts.efficient_gradient, 0);
    simtorch_load(false);
}
