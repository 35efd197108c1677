/* The stand-in for `out` (cuda/stand_in.cu): its delta is the one that was given, it is
 * as short as can be, and lse says of a row without a key what backward passes read as
 * no weight. */
#include <cuda_runtime.h>

#include "cuda_api.h"
#include "device/device.h"
#include "judge.h"
#include "layout.h"

enum { ROOM = 1 << 17, GUARD_BYTE = 0x5a };

enum { DOUT, LSE, DELTA, OUT, LSE_OUT, TENSORS };

static char room[TENSORS][ROOM];

/* One call, on the host as doubles and on the device in its dtype. */
struct call {
    cudaStream_t stream;
    char *there[TENSORS];
    struct cp_view view[TENSORS]; /* on the host, in room */
    double dout[ROOM / 8], lse[ROOM / 8], delta[ROOM / 8], out[ROOM / 8],
        lse_out[ROOM / 8];
};

static struct call call;

static bool call_open(void)
{
    bool is_open = CHECK(
        cudaStreamCreateWithFlags(&call.stream, cudaStreamNonBlocking) == cudaSuccess);
    for (int i = 0; i < TENSORS && is_open; i++) {
        is_open = CHECK(cudaMalloc((void **)&call.there[i], ROOM) == cudaSuccess);
    }
    return is_open;
}

static void call_close(void)
{
    for (int i = 0; i < TENSORS; i++) {
        CHECK(cudaFree(call.there[i]) == cudaSuccess);
    }
    CHECK(cudaStreamDestroy(call.stream) == cudaSuccess);
}

/* Numbers to or from a view on the host. */
static void exchange(const struct cp_view *view, double *numbers, bool is_write)
{
    struct cp_device *cpu = cp_device_cpu();
    struct cp_view dense = cp_view_compact(numbers, CP_DTYPE_FLOAT64, view->n[0],
                                           view->n[1], view->n[2], view->n[3]);
    CHECK((is_write ? cp_device_copy(cpu, view, &dense, NULL)
                    : cp_device_copy(cpu, &dense, view, NULL)) == CP_OK);
}

static void place(struct test_rng *rng, int role, enum cp_dtype dtype,
                  const int64_t n[CP_AXES], double *numbers)
{
    memset(room[role], GUARD_BYTE, ROOM);
    call.view[role] = layout_in(rng, room[role], dtype, n);
    if (numbers != NULL) {
        exchange(&call.view[role], numbers, true);
        exchange(&call.view[role], numbers, false); /* as the dtype holds them */
    }
}

static struct cp_view there(int role)
{
    struct cp_view view = call.view[role];
    view.data = call.there[role] + (view.data - room[role]);
    return view;
}

/* What is asked, of `rows` and some more of the lse. */
static void call_fill(struct test_rng *rng, enum cp_dtype dtype, const int64_t n[4],
                      int64_t more_rows, double size)
{
    int64_t rows = n[0] * n[1] * n[2];
    const int64_t one[CP_AXES] = {n[0], n[1], n[2], 1};
    const int64_t more[CP_AXES] = {n[0], n[1] + more_rows, n[2], 1};
    for (int64_t row = 0; row < rows; row++) {
        int64_t kind = test_rng_range(rng, 0, 9);
        double square = 0;
        for (int64_t i = row * n[3]; i < (row + 1) * n[3]; i++) {
            call.dout[i] = kind == 0 ? 0 : (double)test_rng_float(rng) * size;
            square += call.dout[i] * call.dout[i];
        }
        call.lse[row] = kind == 1 ? -HUGE_VAL : 3 * (double)test_rng_float(rng);
        /* That of an out whose length is about 1. */
        call.delta[row] = (double)test_rng_float(rng) * sqrt(square);
    }
    place(rng, DOUT, dtype, n, call.dout);
    place(rng, LSE, cp_dtype_sum(dtype), one, call.lse);
    place(rng, DELTA, cp_dtype_sum(dtype), one, call.delta);
    place(rng, OUT, dtype, n, NULL);
    place(rng, LSE_OUT, cp_dtype_sum(dtype), more, NULL);
}

static void call_run(void)
{
    for (int i = 0; i < TENSORS; i++) {
        CHECK(cudaMemcpyAsync(call.there[i], room[i], ROOM, cudaMemcpyHostToDevice,
                              call.stream) == cudaSuccess);
    }
    struct cp_stand_in_args args = {.dout = there(DOUT),
                                    .lse = there(LSE),
                                    .delta = there(DELTA),
                                    .out = there(OUT),
                                    .lse_out = there(LSE_OUT)};
    CHECK(cp_cuda_stand_in(&args, (struct cp_stream *)call.stream) == CP_OK);
    for (int i = OUT; i < TENSORS; i++) {
        CHECK(cudaMemcpyAsync(room[i], call.there[i], ROOM, cudaMemcpyDeviceToHost,
                              call.stream) == cudaSuccess);
    }
    CHECK(cudaStreamSynchronize(call.stream) == cudaSuccess);
    exchange(&call.view[OUT], call.out, false);
    exchange(&call.view[LSE_OUT], call.lse_out, false);
}

static void check_row(enum cp_dtype dtype, int64_t row, int64_t dim)
{
    const double *dout = &call.dout[row * dim], *out = &call.out[row * dim];
    double delta = 0, dout_square = 0, out_square = 0;
    for (int64_t i = 0; i < dim; i++) {
        delta += dout[i] * out[i];
        dout_square += dout[i] * dout[i];
        out_square += out[i] * out[i];
    }
    double want = isinf(call.lse[row]) || dout_square == 0 ? 0 : call.delta[row];
    /* The shortest out with this delta, and the roundings of its numbers. */
    double length = dout_square == 0 ? 0 : fabs(want) / sqrt(dout_square);
    double eps = judge_roundoff(dtype) * (cp_dtype_bytes(dtype) == 2 ? 1 : 16);
    CHECK(isfinite(delta));
    CHECK_NEAR(delta, want, eps * length * sqrt(dout_square));
    CHECK_NEAR(sqrt(out_square), length, eps * length);
}

static void check_call(enum cp_dtype dtype, const int64_t n[4], int64_t more_rows)
{
    int64_t rows = n[1], heads = n[2], all = rows + more_rows;
    for (int64_t row = 0; row < n[0] * rows * heads; row++) {
        check_row(dtype, row, n[3]);
    }
    for (int64_t i = 0; i < n[0] * all * heads; i++) {
        int64_t head = i % heads, row = i / heads % all, batch = i / heads / all;
        double lse =
            row < rows ? call.lse[(batch * rows + row) * heads + head] : -HUGE_VAL;
        CHECK(call.lse_out[i] == (isinf(lse) ? HUGE_VAL : lse));
    }
}

static const enum cp_dtype dtypes[] = {CP_DTYPE_FLOAT32, CP_DTYPE_FLOAT64,
                                       CP_DTYPE_BFLOAT16, CP_DTYPE_FLOAT16};

TEST(delta_is_what_it_was)
{
    struct test_rng rng = test_rng_init(1);
    REQUIRE(call_open());
    for (int i = 0; i < 80; i++) {
        int64_t dim = test_rng_range(&rng, 1, test_rng_range(&rng, 0, 1) ? 9 : 140);
        const int64_t n[CP_AXES] = {test_rng_range(&rng, 1, 2),
                                    test_rng_range(&rng, 0, 9),
                                    test_rng_range(&rng, 1, 3), dim};
        int64_t more_rows = test_rng_range(&rng, 0, 1) * test_rng_range(&rng, 0, 31);
        TEST_CONTEXT("%s %d %d %d %d, %d rows more", cp_dtype_name(dtypes[i % 4]),
                     (int)n[0], (int)n[1], (int)n[2], (int)n[3], (int)more_rows);
        call_fill(&rng, dtypes[i % 4], n, more_rows, 1);
        call_run();
        check_call(dtypes[i % 4], n, more_rows);
    }
    call_close();
}

/* The squares of such numbers are 0 or infinite in float32. */
TEST(tiny_and_huge_gradients)
{
    const int64_t n[CP_AXES] = {1, 8, 2, 64};
    struct test_rng rng = test_rng_init(2);
    REQUIRE(call_open());
    for (int i = 0; i < 8; i++) {
        enum cp_dtype dtype = i % 2 == 0 ? CP_DTYPE_FLOAT32 : CP_DTYPE_BFLOAT16;
        TEST_CONTEXT("%s, case %d", cp_dtype_name(dtype), i);
        call_fill(&rng, dtype, n, 0, i / 2 % 2 == 0 ? 1e-30 : 1e30);
        call_run();
        check_call(dtype, n, 0);
    }
    call_close();
}

TEST(a_delta_that_is_not_a_number_stays_one)
{
    const int64_t n[CP_AXES] = {1, 1, 1, 40};
    struct test_rng rng = test_rng_init(3);
    REQUIRE(call_open());
    call_fill(&rng, CP_DTYPE_FLOAT32, n, 0, 1);
    call.lse[0] = 0;
    call.dout[33] = (double)NAN;
    call.delta[0] = (double)NAN;
    exchange(&call.view[LSE], call.lse, true);
    exchange(&call.view[DOUT], call.dout, true);
    exchange(&call.view[DELTA], call.delta, true);
    call_run();
    for (int i = 0; i < 40; i++) {
        CHECK(isnan(call.out[i]));
    }
    call_close();
}
