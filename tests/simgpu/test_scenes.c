/* The whole path of a call on simulated GPUs: gate, agreement, plan, executor, the CUDA
 * device, its plain kernel and the NCCL communicator, against float64, as
 * tests/c/test_context.c does it for the host. */
#include "gpus.h"
#include "scene.h"
#include "sim_torch.h"

/* The bytes that a view reaches, from the lowest. */
static char *extent_of(const struct cp_view *view, size_t *bytes)
{
    int64_t low = 0, high = cp_dtype_bytes(view->dtype);
    for (int axis = 0; axis < CP_AXES; axis++) {
        int64_t reach = (view->n[axis] - 1) * view->stride[axis];
        low += reach < 0 ? reach : 0;
        high += reach > 0 ? reach : 0;
    }
    *bytes = cp_view_count(view) > 0 ? (size_t)(high - low) : 0;
    return view->data + low;
}

static struct cp_stream *gpus_take(struct world *w, int rank,
                                   struct cp_view tensors[CP_TENSORS])
{
    const struct gpu *gpu = w->own[rank];
    CHECK_EQ_I64(cudaSetDevice(rank), cudaSuccess);
    simtorch_set_stream(gpu->stream);
    for (int role = 0; role < CP_TENSORS; role++) {
        size_t bytes = 0;
        void *copy = NULL;
        if (tensors[role].data == NULL) {
            continue;
        }
        char *low = extent_of(&tensors[role], &bytes);
        CHECK_EQ_I64(cudaMalloc(&copy, bytes + 1), cudaSuccess);
        CHECK_EQ_I64(
            cudaMemcpyAsync(copy, low, bytes, cudaMemcpyHostToDevice, gpu->stream),
            cudaSuccess);
        tensors[role].data = (char *)copy + (tensors[role].data - low);
    }
    return (struct cp_stream *)gpu->stream;
}

static void gpus_give(struct world *w, int rank, const struct cp_view host[CP_TENSORS],
                      const struct cp_view tensors[CP_TENSORS])
{
    const struct gpu *gpu = w->own[rank];
    for (int role = 0; role < CP_TENSORS; role++) {
        size_t bytes = 0;
        if (tensors[role].data != NULL) {
            char *low = extent_of(&host[role], &bytes);
            CHECK_EQ_I64(cudaMemcpyAsync(low,
                                         tensors[role].data - (host[role].data - low),
                                         bytes, cudaMemcpyDeviceToHost, gpu->stream),
                         cudaSuccess);
        }
    }
    CHECK_EQ_I64(cudaStreamSynchronize(gpu->stream), cudaSuccess);
    for (int role = 0; role < CP_TENSORS; role++) {
        size_t bytes = 0;
        if (tensors[role].data != NULL) {
            char *low = extent_of(&host[role], &bytes);
            CHECK_EQ_I64(cudaFree(tensors[role].data - (host[role].data - low)),
                         cudaSuccess);
        }
    }
}

static const struct world_transport gpus = {
    .name = "simulated GPUs",
    .open = gpus_open,
    .close = gpus_close,
    .join = gpus_join,
    .leave = gpus_leave,
    .take = gpus_take,
    .give = gpus_give,
};

static void play_those(int ring, int ulysses, bool (*takes)(const struct scene *scene))
{
    world_play(ring, ulysses, &gpus, CP_ANYTHING, 0, takes);
    world_play(ring, ulysses, &gpus, CP_EVEN, 0, takes);
}

static void play(int ring, int ulysses)
{
    play_those(ring, ulysses, NULL);
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

/* Of which torch takes a block or another. */
static bool suits_torch(const struct scene *scene)
{
    return scene->mask_kind == CP_MASK_NONE && scene->dtype != CP_DTYPE_FLOAT64 &&
           scene->dim == 8 && scene->value_dim == 8;
}

/* The same with torch's ops for the blocks that they take. */
TEST(with_torch)
{
    simtorch_load(true);
    play_those(2, 1, suits_torch);
    play_those(1, 3, suits_torch);
    play_those(2, 2, suits_torch);
    struct simtorch_counts counts = simtorch_counts();
    printf("flash %d, efficient %d, causal %d, grouped %d\n", counts.flash,
           counts.efficient, counts.causal, counts.grouped);
    CHECK(counts.flash > 0 && counts.efficient > 0);
    CHECK_EQ_I64(counts.alive, 0);
    simtorch_load(false);
}
