/* The whole path of a call on windows between simulated GPUs, as test_scenes.c does it
 * over NCCL: the pull schedules of the host, unchanged, against float64. */
#include "ipcs.h"

static void play(const struct world_transport *transport, int ring, int ulysses)
{
    world_play(ring, ulysses, transport, CP_ANYTHING, 0, NULL);
    world_play(ring, ulysses, transport, CP_EVEN, 0, NULL);
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
