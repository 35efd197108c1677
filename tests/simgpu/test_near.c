/* Keys and values of another GPU come to this one as they are; those that are here stay. */
#include <cuda_runtime.h>

#include "near.h"
#include "simgpu.h"
#include "test.h"

enum { BATCH = 2, ROWS = 3, HEADS = 2, DIM = 5, VALUE_DIM = 3, MOST = 256 };

/* Numbers on device 1, rows outermost but for the batch, with a gap behind each row. */
static struct cp_view place(float *data, int64_t dim)
{
    struct cp_view view =
        cp_view_compact(data, CP_DTYPE_FLOAT32, BATCH, ROWS, HEADS, dim);
    view.stride[2] += 4;
    view.stride[1] = HEADS * view.stride[2];
    view.stride[0] = ROWS * view.stride[1];
    return view;
}

static float at(const struct cp_view *view, const char *base, int64_t batch,
                int64_t row, int64_t head, int64_t dim)
{
    float number = 0;
    memcpy(&number,
           base + batch * view->stride[0] + row * view->stride[1] +
               head * view->stride[2] + dim * view->stride[3],
           sizeof number);
    return number;
}

static void check_same(const struct cp_view *got, const char *got_base,
                       const struct cp_view *want, const char *want_base)
{
    for (int64_t b = 0; b < BATCH; b++) {
        for (int64_t row = 0; row < ROWS; row++) {
            for (int64_t head = 0; head < HEADS; head++) {
                for (int64_t i = 0; i < want->n[3]; i++) {
                    CHECK(at(got, got_base, b, row, head, i) ==
                          at(want, want_base, b, row, head, i));
                }
            }
        }
    }
}

TEST(what_is_elsewhere_comes_and_what_is_here_stays)
{
    float numbers[MOST], brought[MOST];
    void *far = NULL, *room = NULL;
    cudaStream_t stream = NULL;
    int64_t bytes = -1;
    simgpu_reset();
    for (int i = 0; i < MOST; i++) {
        numbers[i] = (float)i;
    }
    CHECK_EQ_I64(cudaSetDevice(1), cudaSuccess);
    CHECK_EQ_I64(cudaMalloc(&far, sizeof numbers), cudaSuccess);
    CHECK_EQ_I64(cudaMemcpy(far, numbers, sizeof numbers, cudaMemcpyHostToDevice),
                 cudaSuccess);
    struct cp_view k = place(far, DIM), v = place((float *)far + MOST / 2, VALUE_DIM);
    CHECK_EQ_I64(cp_near_bytes(&k, &v, &bytes), CP_OK);
    CHECK_EQ_I64(bytes, 0);

    CHECK_EQ_I64(cudaSetDevice(0), cudaSuccess);
    CHECK_EQ_I64(cp_near_bytes(&k, &v, &bytes), CP_OK);
    CHECK_EQ_I64(bytes, 512); /* 240 and 144 bytes, each from a multiple of 256 on */
    REQUIRE(bytes <= (int64_t)sizeof brought);
    CHECK_EQ_I64(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking),
                 cudaSuccess);
    CHECK_EQ_I64(cudaMalloc(&room, (size_t)bytes), cudaSuccess);
    struct cp_view near_k = k, near_v = v;
    CHECK_EQ_I64(cp_near_bring(room, &near_k, &near_v, (struct cp_stream *)stream),
                 CP_OK);
    CHECK_EQ_I64(
        cudaMemcpyAsync(brought, room, (size_t)bytes, cudaMemcpyDeviceToHost, stream),
        cudaSuccess);
    CHECK_EQ_I64(cudaStreamSynchronize(stream), cudaSuccess);
    CHECK(near_k.data == room && near_v.data == (char *)room + 256);
    CHECK_EQ_I64(near_k.stride[1], DIM * 4); /* as panels of plain rows */
    CHECK_EQ_I64(near_k.stride[2], ROWS * DIM * 4);
    check_same(&near_k, (const char *)brought, &k, (const char *)numbers);
    check_same(&near_v, (const char *)brought + 256, &v,
               (const char *)(numbers + MOST / 2));
    CHECK_EQ_I64(cp_near_bytes(&near_k, &near_v, &bytes), CP_OK);
    CHECK_EQ_I64(bytes, 0);

    CHECK_EQ_I64(cudaFree(room), cudaSuccess);
    CHECK_EQ_I64(cudaStreamDestroy(stream), cudaSuccess);
    CHECK_EQ_I64(cudaFree(far), cudaSuccess);
    simgpu_reset();
}

TEST(memory_of_nobody_knows_whom_counts_as_here)
{
    float numbers[MOST] = {0};
    struct cp_view k = place(numbers, DIM), v = place(numbers + MOST / 2, VALUE_DIM);
    int64_t bytes = -1;
    CHECK_EQ_I64(cp_near_bytes(&k, &v, &bytes), CP_OK);
    CHECK_EQ_I64(bytes, 0);
}
