/* The whole path of a call on windows between simulated GPUs, as test_scenes.c does it
 * over NCCL: the pull schedules of the host, unchanged, against float64. */
#include "ipcs.h"
#include "sim_torch.h"

static void play(const struct world_transport *transport, int ring, int ulysses)
{
    world_play(ring, ulysses, transport, CP_ANYTHING, 0, NULL);
    /* The same order of the same steps, so ThreadSanitizer, which takes minutes, would see
     * nothing new in it. */
    if (!TEST_UNDER_TSAN) {
        world_play(ring, ulysses, transport, CP_EVEN, 0, NULL);
    }
}

TEST(rings)
{
    play(&ipcs, 2, 1);
    play(&ipcs_apart, 3, 1);
    play(&ipcs_shared, 4, 1);
}

TEST(ulysses)
{
    play(&ipcs_apart, 1, 2);
    play(&ipcs_shared, 1, 3);
    play(&ipcs, 1, 4);
}

TEST(unified)
{
    play(&ipcs_shared, 2, 2);
    play(&ipcs, 3, 2);
    play(&ipcs_apart, 2, 3);
}

TEST(one_rank)
{
    play(&ipcs, 1, 1);
}

/* ---- blocks that the copy engine brings ---- */

static enum cp_code join_engines(struct world *w, int rank,
                                 struct cp_context_parts *parts)
{
    static const struct cp_copy_engine any = {1, 1, 1};
    CP_TRY(ipcs_join_apart(w, rank, parts));
    cp_device_cuda_set_engine(parts->device, &any);
    return CP_OK;
}

/* How many copies a world's engines do. */
static uint64_t copies_of(const struct world_transport *transport, int ring,
                          int ulysses)
{
    play(transport, ring, ulysses);
    return simgpu_stats().copies;
}

TEST(blocks_that_the_copy_engine_brings)
{
    static const int shapes[][2] = {{3, 1}, {1, 3}, {2, 2}};
    struct world_transport transport = ipcs_apart;
    transport.join = join_engines;
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        uint64_t few = copies_of(&ipcs_apart, shapes[i][0], shapes[i][1]);
        CHECK(copies_of(&transport, shapes[i][0], shapes[i][1]) > few + 10);
    }
}

/* All forwards, then all backwards; nobody waits in between, so that ranks are whole calls
 * apart. */
static void play_ahead(int rank, void *arg)
{
    static const enum cp_op ops[] = {CP_OP_ATTENTION, CP_OP_ATTENTION_BACKWARD};
    struct world *w = arg;
    struct cp_view tensors[WORLD_SCENES][CP_TENSORS];
    for (size_t pass = 0; pass < sizeof ops / sizeof ops[0]; pass++) {
        for (int i = 0; i < WORLD_SCENES; i++) {
            CHECK_EQ_I64(world_start(w, rank, &w->scenes[i], ops[pass], tensors[i]),
                         CP_OK);
        }
        for (int i = 0; i < WORLD_SCENES; i++) {
            gpus_give(w, rank, w->scenes[i].tensors[rank], tensors[i]);
        }
    }
}

TEST(hosts_that_are_calls_ahead)
{
    world_play_by(play_ahead, 2, 1, &ipcs, CP_ANYTHING, 0, NULL);
    world_play_by(play_ahead, 1, 3, &ipcs_apart, CP_ANYTHING, 0, NULL);
    world_play_by(play_ahead, 2, 2, &ipcs_shared, CP_EVEN, 0, NULL);
}

/* ---- hosts that wait for their device after every step that waits ---- */

/* By rank. */
static const struct cp_comm_ops *sound[SCENE_MOST_RANKS];
static struct cp_comm_ops slow[SCENE_MOST_RANKS];

static enum cp_code reached_and_wait(struct cp_comm *comm,
                                     const struct cp_comm_wait *waits, int count,
                                     struct cp_stream *stream)
{
    CP_TRY(sound[comm->rank]->reached(comm, waits, count, stream));
    CHECK_EQ_I64(cudaDeviceSynchronize(), cudaSuccess);
    return CP_OK;
}

static enum cp_code begin_and_wait(struct cp_comm *comm,
                                   const struct cp_comm_call *call)
{
    CP_TRY(sound[comm->rank]->begin(comm, call));
    CHECK_EQ_I64(cudaDeviceSynchronize(), cudaSuccess);
    return CP_OK;
}

static enum cp_code join_slow(struct world *w, int rank, struct cp_context_parts *parts)
{
    enum cp_code code = ipcs_join(w, rank, parts);
    sound[rank] = parts->comm->ops;
    slow[rank] = *sound[rank];
    slow[rank].reached = reached_and_wait;
    slow[rank].begin = begin_and_wait;
    parts->comm->ops = &slow[rank];
    return code;
}

/* The runtime makes hosts do that where it frees memory, or loads a kernel for the first
 * time: what comes later in a rank's schedule is enqueued only after what came before has
 * been done. Nobody may need anything that a peer enqueues behind its own wait. */
TEST(hosts_that_wait_for_every_wait)
{
    struct world_transport transport = ipcs;
    transport.join = join_slow;
    play(&transport, 3, 1);
    play(&transport, 1, 3);
    play(&transport, 2, 2);
    play(&transport, 4, 1);
}

/* ---- torch's ops, which want all their tensors on one device ---- */

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

static void play_with_torch(const struct world_transport *transport, int ring,
                            int ulysses)
{
    struct world_transport with_torch = *transport;
    with_torch.take = take_as_torch;
    world_play(ring, ulysses, &with_torch, CP_ANYTHING, 0, suits_torch);
}

TEST(with_torch)
{
    simtorch_load(true);
    simtorch_set_cudnn(91501);
    play_with_torch(&ipcs, 3, 1);
    play_with_torch(&ipcs_apart, 1, 3);
    play_with_torch(&ipcs_shared, 2, 2);
    struct simtorch_counts counts = simtorch_counts();
    CHECK(counts.flash + counts.efficient + counts.cudnn > 0);
    CHECK(counts.flash_gradient + counts.efficient_gradient > 0);
    CHECK_EQ_I64(counts.alive, 0);
    simtorch_load(false);
}
