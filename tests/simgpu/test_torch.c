/* torch's ops behind the kernel table, on a simulated torch: which block goes to which op
 * and why, the choice by name, and what happens where torch is not as it should be. What
 * they compute is in test_kernel.c. */
#include <cuda_runtime.h>
#include <stdlib.h>

#include "kernel_cuda.h"
#include "kernel_torch.h"
#include "sim_torch.h"
#include "simgpu.h"
#include "test.h"
#include "torch_op.h"

/* ---- the table ---- */

/* One that every op takes forward, on a GPU where flash comes first. */
static struct cp_torch_block good_block(void)
{
    return (struct cp_torch_block){
        .dtype = CP_DTYPE_BFLOAT16,
        .head_dim = 64,
        .value_dim = 64,
        .rows = 10,
        .keys = 10,
        .group = 1,
        .generation = 80,
        .cudnn_version = 91501,
        .is_aligned = true,
    };
}

static struct cp_torch_block good_gradient(void)
{
    struct cp_torch_block block = good_block();
    block.is_gradient = true;
    return block;
}

/* "flash", "efficient", "cudnn", or "" and then the reason of all. */
static const char *chosen(const struct cp_torch_block *block, char why[CP_STATUS_TEXT])
{
    why[0] = '\0';
    const struct cp_torch_op *op = cp_torch_op_choose(block, why, CP_STATUS_TEXT);
    return op == NULL                          ? ""
           : strstr(op->name, "flash") != NULL ? "flash"
           : strstr(op->name, "cudnn") != NULL ? "cudnn"
                                               : "efficient";
}

static void goes_to(struct cp_torch_block block, const char *op)
{
    char why[CP_STATUS_TEXT];
    CHECK_EQ_STR(chosen(&block, why), op);
}

TEST(the_table_chooses)
{
    struct cp_torch_block block = good_block();
    goes_to(block, "flash");
    block.group = 4;
    goes_to(block, "flash");
    block.value_dim = 128; /* the only one that takes both */
    goes_to(block, "cudnn");
    block = good_block();
    block.dtype = CP_DTYPE_FLOAT32;
    goes_to(block, "efficient");
    block = good_block();
    block.value_dim = 128;
    goes_to(block, "efficient");
    block = good_block();
    block.head_dim = block.value_dim = 264;
    goes_to(block, "efficient");
}

/* As in torch, where it serves. */
TEST(cudnn_comes_first_on_some_gpus)
{
    static const int generations[] = {80, 86, 89, 90, 100, 103, 110, 120, 121};
    static const char *const ops[] = {"flash", "flash", "flash", "cudnn", "cudnn",
                                      "cudnn", "flash", "flash", "flash"};
    for (size_t i = 0; i < sizeof ops / sizeof ops[0]; i++) {
        struct cp_torch_block block = good_block();
        TEST_CONTEXT("sm_%d", generations[i]);
        block.generation = generations[i];
        goes_to(block, ops[i]);
        block.is_gradient = true;
        goes_to(block, "flash");
    }
    struct cp_torch_block block = good_block();
    block.generation = 90;
    block.keys = 1;
    goes_to(block, "flash");
    block = good_block();
    block.generation = 90;
    block.rows = 1;
    goes_to(block, "flash");
    block = good_block();
    block.generation = 90;
    block.head_dim = block.value_dim = 136;
    goes_to(block, "flash");
    block = good_block();
    block.generation = 90;
    block.cudnn_version = 91500;
    goes_to(block, "flash");
}

/* Whose op it is, wherever that takes the block; where not, as without a name. */
TEST(a_named_op_goes_first)
{
    static const struct {
        enum cp_backend backend;
        const char *op, *gradient;
    } rows[] = {
        {CP_BACKEND_NATIVE, "cudnn", "flash"},
        {CP_BACKEND_NATIVE_FLASH, "flash", "flash"},
        {CP_BACKEND_NATIVE_EFFICIENT, "efficient", "efficient"},
        {CP_BACKEND_NATIVE_CUDNN, "cudnn", "flash"},
    };
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        struct cp_torch_block block = good_block();
        TEST_CONTEXT("%s", cp_backend_name(rows[i].backend));
        block.generation = 90;
        block.backend = rows[i].backend;
        goes_to(block, rows[i].op);
        block.is_gradient = true;
        goes_to(block, rows[i].gradient);
        block.is_gradient = false;
        block.dtype = CP_DTYPE_FLOAT32;
        goes_to(block, "efficient");
    }
    struct cp_torch_block block = good_block();
    block.backend = CP_BACKEND_NATIVE_CUDNN; /* third on this GPU */
    goes_to(block, "cudnn");
}

TEST(the_table_chooses_for_gradients)
{
    static const struct {
        int generation;
        int64_t dim;
        const char *op;
    } gap[] = {{80, 200, "flash"},      {90, 224, "flash"},      {100, 208, "flash"},
               {86, 192, "flash"},      {86, 200, "efficient"},  {89, 224, "efficient"},
               {120, 216, "efficient"}, {121, 200, "efficient"}, {89, 232, "flash"},
               {120, 256, "flash"}};
    struct cp_torch_block block = good_gradient();
    block.group = 3;
    goes_to(block, "flash");
    block = good_gradient();
    block.dtype = CP_DTYPE_FLOAT32;
    goes_to(block, "efficient");
    block = good_gradient();
    block.value_dim = 8;
    goes_to(block, "efficient");
    block.group = 2;
    goes_to(block, "");
    for (size_t i = 0; i < sizeof gap / sizeof gap[0]; i++) {
        TEST_CONTEXT("sm_%d, heads of %d", gap[i].generation, (int)gap[i].dim);
        block = good_gradient();
        block.generation = gap[i].generation;
        block.head_dim = block.value_dim = gap[i].dim;
        goes_to(block, gap[i].op);
        block.is_gradient = false; /* it can attend */
        goes_to(block, "flash");
    }
}

/* None takes such a block, and this is what `op` says. */
static void refused(struct cp_torch_block block, const char *op, const char *reason)
{
    char why[CP_STATUS_TEXT], want[CP_STATUS_TEXT];
    CHECK_EQ_STR(chosen(&block, why), "");
    (void)snprintf(want, sizeof want, "_scaled_dot_product_%s_attention: %s", op,
                   reason);
    CHECK_STR_HAS(why, want);
}

TEST(the_table_says_why_not)
{
    struct cp_torch_block block = good_block();
    block.generation = 75;
    refused(block, "efficient", "the GPU is too old for it");
    block = good_block();
    block.dtype = CP_DTYPE_FLOAT64;
    refused(block, "flash", "it does not take this dtype");
    block = good_block();
    block.is_aligned = false;
    refused(block, "cudnn",
            "it needs rows of whole 16-byte words, none backwards or repeated");
    block = good_block();
    block.has_mask = true;
    refused(block, "efficient", "it is given no mask");
    block = good_block();
    block.group = 0;
    refused(block, "flash", "it needs equally many query heads for each key head");
    block = good_block();
    block.dtype = CP_DTYPE_FLOAT32;
    block.group = 2;
    refused(block, "efficient", "it does not share key heads");
    block = good_block();
    block.group = 2;
    block.value_dim = 8;
    block.cudnn_version = 0;
    refused(block, "cudnn", "it needs cuDNN 9.15.1");
    block.cudnn_version = 91501;
    block.keys = 1;
    refused(block, "cudnn", "it needs two rows and two keys");
    block.is_gradient = true;
    block.keys = 10;
    refused(block, "cudnn", "it is not used for gradients");
    refused(block, "flash", "it needs values of the head dim");
    block = good_gradient();
    block.has_dlse = true;
    refused(block, "flash", "it takes no gradient of the lse");
    refused(block, "efficient", "it takes no gradient of the lse");
    block = good_gradient();
    block.generation = 89;
    block.head_dim = block.value_dim = 200;
    block.group = 2;
    refused(block, "flash", "it has no gradient for heads of 193 to 224 on this GPU");
}

/* ---- the choice ---- */

/* The name of the kernel for such a call, or the code of the refusal. */
static const char *selected(const char *word, enum cp_dtype dtype, int64_t dim)
{
    const struct cp_kernel_ops *ops = NULL;
    struct cp_format format = {0};
    CHECK(word == NULL ? unsetenv("CP_ATTN_CUDA_KERNEL") == 0
                       : setenv("CP_ATTN_CUDA_KERNEL", word, 1) == 0);
    enum cp_code code =
        cp_kernel_cuda_select(0, CP_BACKEND_NATIVE, dtype, dim, dim, &ops, &format);
    CHECK(unsetenv("CP_ATTN_CUDA_KERNEL") == 0);
    if (code == CP_OK) { /* ranks need not agree */
        CHECK_EQ_I64(format.id, CP_FORMAT_CUDA_PLAIN + dtype);
    }
    return code == CP_OK ? ops->name : cp_code_name(code);
}

TEST(selection)
{
    CHECK_EQ_STR(selected(NULL, CP_DTYPE_FLOAT16, 64), "cuda_own");
    CHECK_EQ_STR(selected("torch", CP_DTYPE_FLOAT16, 64), "NotSupported");
    CHECK_STR_HAS(cp_last_error()->text, "no torch with CUDA");
    simtorch_load(true);
    CHECK_EQ_STR(selected(NULL, CP_DTYPE_FLOAT16, 64), "cuda_torch");
    CHECK_EQ_STR(selected("", CP_DTYPE_FLOAT32, 4), "cuda_torch");
    CHECK_EQ_STR(selected("torch", CP_DTYPE_BFLOAT16, 256), "cuda_torch");
    CHECK_EQ_STR(selected("plain", CP_DTYPE_FLOAT16, 64), "cuda_plain");
    CHECK_EQ_STR(selected("own", CP_DTYPE_FLOAT16, 64), "cuda_own");
    CHECK_EQ_STR(selected("own", CP_DTYPE_FLOAT32, 64), "cuda_own");
    CHECK_EQ_STR(selected("own", CP_DTYPE_FLOAT64, 64), "NotSupported");
    CHECK_STR_HAS(cp_last_error()->text, "not in float64 with 64 (q, k) and 64 (v)");
    CHECK_EQ_STR(selected("own", CP_DTYPE_BFLOAT16, 257), "NotSupported");
    CHECK_EQ_STR(selected(NULL, CP_DTYPE_FLOAT64, 64), "cuda_plain");
    CHECK_EQ_STR(selected(NULL, CP_DTYPE_FLOAT16, 65), "cuda_own");
    CHECK_EQ_STR(selected(NULL, CP_DTYPE_FLOAT16, 257), "cuda_plain");
    CHECK_EQ_STR(selected("torch", CP_DTYPE_FLOAT64, 64), "NotSupported");
    CHECK_STR_HAS(cp_last_error()->text, "does not take this dtype");
    CHECK_EQ_STR(selected("flash", CP_DTYPE_FLOAT16, 64), "ValueError");
    CHECK(strstr(cp_last_error()->text, "\"flash\"; allowed: plain, own, torch") !=
          NULL);
    simtorch_load(false);
}

static const char *selected_for(enum cp_backend backend)
{
    const struct cp_kernel_ops *ops = NULL;
    struct cp_format format;
    enum cp_code code =
        cp_kernel_cuda_select(0, backend, CP_DTYPE_FLOAT16, 64, 64, &ops, &format);
    if (code == CP_OK) {
        CHECK_EQ_I64(format.id, CP_FORMAT_CUDA_PLAIN + CP_DTYPE_FLOAT16);
    }
    return code == CP_OK ? ops->name : cp_code_name(code);
}

TEST(selection_by_backend)
{
    simtorch_load(true);
    for (int i = 0; i < CP_BACKEND_COUNT; i++) {
        enum cp_backend backend = (enum cp_backend)i;
        TEST_CONTEXT("%s", cp_backend_name(backend));
        CHECK_EQ_STR(selected_for(backend),
                     cp_backend_is_package(backend)      ? "cuda_package"
                     : backend == CP_BACKEND_NATIVE_MATH ? "cuda_plain"
                                                         : "cuda_torch");
    }
    simtorch_load(false);
}

/* ---- one block on a GPU ---- */

enum { ROWS = 8, HEADS = 2, DIM = 16, STATE = DIM + 2 };

struct rig {
    cudaStream_t stream;
    char *memory; /* q, k and v, one after the other, then the state; zeros */
    struct cp_attend_args args;
};

static bool rig_open(struct rig *rig)
{
    const int64_t rows = ROWS * HEADS, bytes = rows * DIM * 2;
    simgpu_reset();
    simtorch_load(true);
    if (!CHECK(cudaSetDevice(0) == cudaSuccess) ||
        !CHECK(cudaStreamCreateWithFlags(&rig->stream, cudaStreamNonBlocking) ==
               cudaSuccess) ||
        !CHECK(cudaMalloc((void **)&rig->memory,
                          (size_t)(3 * bytes + rows * STATE * 4)) == cudaSuccess) ||
        !CHECK(cudaMemsetAsync(rig->memory, 0, (size_t)(3 * bytes + rows * STATE * 4),
                               rig->stream) == cudaSuccess)) {
        return false;
    }
    simtorch_set_stream(rig->stream);
    const struct cp_view q =
        cp_view_compact(rig->memory, CP_DTYPE_FLOAT16, 1, ROWS, HEADS, DIM);
    rig->args = (struct cp_attend_args){
        .q = q,
        .k = q,
        .v = q,
        .state = {.data = rig->memory + 3 * bytes,
                  .n = {1, ROWS, HEADS, DIM},
                  .stride = {rows * STATE * 4, 0, ROWS * STATE * 4, 0},
                  .dtype = CP_DTYPE_FLOAT16},
        .place = {.heads_per_kv = 1},
        .scale = 1,
    };
    rig->args.k.data += bytes;
    rig->args.v.data += 2 * bytes;
    return true;
}

static enum cp_code rig_attend(struct rig *rig)
{
    return cp_kernel_torch_ops.attend(&rig->args, (struct cp_stream *)rig->stream);
}

/* The sum of the first row: how many keys it has seen, all of weight 1. */
static double rig_sum(struct rig *rig)
{
    float state[STATE];
    CHECK(cudaMemcpyAsync(state, rig->args.state.data, sizeof state,
                          cudaMemcpyDeviceToHost, rig->stream) == cudaSuccess);
    CHECK(cudaStreamSynchronize(rig->stream) == cudaSuccess);
    return (double)state[DIM + 1] * exp((double)state[DIM]);
}

/* Nothing of torch's is left. */
static void rig_close(struct rig *rig)
{
    CHECK(cudaStreamSynchronize(rig->stream) == cudaSuccess);
    CHECK(cudaFree(rig->memory) == cudaSuccess);
    CHECK(cudaStreamDestroy(rig->stream) == cudaSuccess);
    CHECK_EQ_I64(simtorch_counts().alive, 0);
    CHECK_EQ_I64(simgpu_live().blocks, 0);
    simtorch_load(false);
}

TEST(blocks_add_up)
{
    struct rig rig;
    REQUIRE(rig_open(&rig));
    CHECK(rig_attend(&rig) == CP_OK);
    CHECK_NEAR(rig_sum(&rig), ROWS, 1e-4);
    rig.args.place.is_causal = true; /* the diagonal: the first row sees one key */
    CHECK(rig_attend(&rig) == CP_OK);
    CHECK_NEAR(rig_sum(&rig), ROWS + 1, 1e-4);
    CHECK_EQ_I64(simtorch_counts().causal, 1);
    rig.args.place.k_first = 3; /* the first row sees none, later ones a part */
    CHECK(rig_attend(&rig) == CP_OK);
    CHECK_NEAR(rig_sum(&rig), ROWS + 1, 1e-4);
    CHECK_EQ_I64(simtorch_counts().flash, 3);
    CHECK_EQ_I64(simtorch_counts().causal, 2);
    rig.args.place.q_first = 9; /* the first row sees all but the last */
    CHECK(rig_attend(&rig) == CP_OK);
    CHECK_NEAR(rig_sum(&rig), 2 * ROWS, 1e-4);
    CHECK_EQ_I64(simtorch_counts().flash,
                 6); /* two rows with six keys, their stair, all other rows */
    CHECK_EQ_I64(simtorch_counts().causal, 3);
    rig.args.place.q_first = 10; /* what comes before */
    CHECK(rig_attend(&rig) == CP_OK);
    CHECK_NEAR(rig_sum(&rig), 3 * ROWS, 1e-4);
    CHECK_EQ_I64(simtorch_counts().flash, 7);
    CHECK_EQ_I64(simtorch_counts().causal, 3);
    rig_close(&rig);
}

TEST(the_backend_names_the_op)
{
    struct rig rig;
    REQUIRE(rig_open(&rig));
    rig.args.backend = CP_BACKEND_NATIVE_EFFICIENT;
    CHECK(rig_attend(&rig) == CP_OK);
    CHECK_NEAR(rig_sum(&rig), ROWS, 1e-4);
    CHECK_EQ_I64(simtorch_counts().efficient, 1);
    rig.args.backend = CP_BACKEND_NATIVE_FLASH;
    CHECK(rig_attend(&rig) == CP_OK);
    CHECK_NEAR(rig_sum(&rig), 2 * ROWS, 1e-4);
    CHECK_EQ_I64(simtorch_counts().flash, 1);
    CHECK_EQ_I64(simtorch_counts().efficient, 1);
    rig_close(&rig);
}

/* torch's ops would run there, behind nothing that the block waits for. */
TEST(on_another_stream_than_torchs_the_plain_kernel_answers)
{
    struct rig rig;
    REQUIRE(rig_open(&rig));
    simtorch_set_stream(NULL);
    CHECK(rig_attend(&rig) == CP_OK);
    CHECK_NEAR(rig_sum(&rig), ROWS, 1e-4);
    CHECK_EQ_I64(simtorch_counts().flash, 0);
    rig_close(&rig);
}

/* An axis with one place may have any stride: torch tells 1 for it. */
TEST(strides_of_one_place_do_not_count)
{
    struct rig rig;
    REQUIRE(rig_open(&rig));
    rig.args.q.stride[0] = 2;
    CHECK(rig_attend(&rig) == CP_OK);
    rig.args.q.stride[0] = -2;
    CHECK(rig_attend(&rig) == CP_OK);
    CHECK_EQ_I64(simtorch_counts().flash, 2);
    rig_close(&rig);
}

/* Keys are the caller's own where they are met as they are. */
TEST(keys_that_an_op_cannot_read_are_the_own_kernels)
{
    struct rig rig;
    REQUIRE(rig_open(&rig));
    int64_t row = rig.args.v.stride[1];
    rig.args.k.data += 2;
    rig.args.k.n[1] -= 1;
    rig.args.v.n[1] -= 1;
    CHECK(rig_attend(&rig) == CP_OK);
    CHECK_NEAR(rig_sum(&rig), ROWS - 1, 1e-4);
    rig.args.k.data -= 2;
    rig.args.v.stride[1] = 0;
    CHECK(rig_attend(&rig) == CP_OK);
    CHECK_NEAR(rig_sum(&rig), 2 * (ROWS - 1), 1e-4);
    CHECK_EQ_I64(simtorch_counts().flash, 0);
    rig.args.v.stride[1] = row;
    CHECK(rig_attend(&rig) == CP_OK);
    CHECK_EQ_I64(simtorch_counts().flash, 1);
    rig_close(&rig);
}

TEST(an_answer_of_another_shape_is_an_error)
{
    struct rig rig;
    REQUIRE(rig_open(&rig));
    simtorch_spoil_next();
    CHECK(rig_attend(&rig) == CP_ERR_INTERNAL);
    CHECK_STR_HAS(cp_last_error()->text,
                  "_scaled_dot_product_flash_attention gave an answer of another");
    CHECK_STR_HAS(cp_last_error()->text, "CP_ATTN_CUDA_KERNEL=plain");
    CHECK(rig_attend(&rig) == CP_OK);
    CHECK_NEAR(rig_sum(&rig), ROWS, 1e-4);
    rig_close(&rig);
}

/* ---- its gradients ---- */

/* The same block of zeros as plain tensors, with a gradient of ones: dv of each key is the
 * number of rows by that of keys, which is 1. */
static struct cp_grad_args rig_grad_args(const struct rig *rig, char *room)
{
    const int64_t numbers = ROWS * HEADS * DIM;
    char *const sums = room + 2 * numbers, *const rows = sums + 3 * 4 * numbers;
    struct cp_grad_args args = {
        .q = rig->args.q,
        .dout = cp_view_compact(room, CP_DTYPE_FLOAT16, 1, ROWS, HEADS, DIM),
        .lse = cp_view_compact(rows, CP_DTYPE_FLOAT32, 1, ROWS, HEADS, 1),
        .delta = cp_view_compact(rows + 4 * ROWS * HEADS, CP_DTYPE_FLOAT32, 1, ROWS,
                                 HEADS, 1),
        .dq = cp_view_compact(sums, CP_DTYPE_FLOAT32, 1, ROWS, HEADS, DIM),
        .place = rig->args.place,
        .scale = 1,
    };
    args.k = args.v = args.q;
    args.k.data = rig->args.k.data;
    args.v.data = rig->args.v.data;
    args.dk = args.dv = args.dq;
    args.dk.data = sums + 4 * numbers;
    args.dv.data = sums + 8 * numbers;
    return args;
}

enum { GRAD_ROOM = ROWS * HEADS * DIM * (2 + 3 * 4) + 2 * 4 * ROWS * HEADS };

/* Every row sees all keys, of equal weight: lse is log(ROWS), delta 0. */
static struct cp_grad_args rig_open_grad(struct rig *rig, char **room)
{
    static char host[GRAD_ROOM];
    CHECK(cudaMalloc((void **)room, GRAD_ROOM) == cudaSuccess);
    for (int i = 0; i < ROWS * HEADS * DIM; i++) {
        const uint16_t one = 0x3c00;
        memcpy(host + 2 * i, &one, sizeof one);
    }
    memset(host + 2 * ROWS * HEADS * DIM, 0, GRAD_ROOM - 2 * ROWS * HEADS * DIM);
    for (int i = 0; i < ROWS * HEADS; i++) {
        const float lse = logf(ROWS);
        memcpy(host + ROWS * HEADS * DIM * (2 + 3 * 4) + 4 * i, &lse, sizeof lse);
    }
    CHECK(cudaMemcpyAsync(*room, host, GRAD_ROOM, cudaMemcpyHostToDevice,
                          rig->stream) == cudaSuccess);
    CHECK(cudaStreamSynchronize(rig->stream) == cudaSuccess);
    return rig_grad_args(rig, *room);
}

static enum cp_code rig_grad(struct rig *rig, const struct cp_grad_args *args)
{
    return cp_kernel_torch_ops.grad(args, (struct cp_stream *)rig->stream);
}

/* The last number of dv. */
static double rig_dv(struct rig *rig, const struct cp_grad_args *args)
{
    float dv[ROWS * HEADS * DIM];
    CHECK(cudaMemcpyAsync(dv, args->dv.data, sizeof dv, cudaMemcpyDeviceToHost,
                          rig->stream) == cudaSuccess);
    CHECK(cudaStreamSynchronize(rig->stream) == cudaSuccess);
    return (double)dv[ROWS * HEADS * DIM - 1];
}

static void rig_close_grad(struct rig *rig, char *room)
{
    CHECK(cudaStreamSynchronize(rig->stream) == cudaSuccess);
    CHECK(cudaFree(room) == cudaSuccess);
    rig_close(rig);
}

TEST(gradients_add_up)
{
    struct rig rig;
    char *room = NULL;
    REQUIRE(rig_open(&rig));
    struct cp_grad_args args = rig_open_grad(&rig, &room);
    CHECK(rig_grad(&rig, &args) == CP_OK);
    CHECK_NEAR(rig_dv(&rig, &args), 1, 1e-3);
    CHECK(rig_grad(&rig, &args) == CP_OK);
    CHECK_NEAR(rig_dv(&rig, &args), 2, 2e-3);
    CHECK_EQ_I64(simtorch_counts().flash_gradient, 2);
    args.place.is_causal = true; /* the last key is seen by the last row */
    CHECK(rig_grad(&rig, &args) == CP_OK);
    CHECK_NEAR(rig_dv(&rig, &args), 2 + 1.0 / ROWS, 2e-3);
    CHECK_EQ_I64(simtorch_counts().flash_gradient, 3);
    args.place.k_first = ROWS; /* nobody sees any */
    CHECK(rig_grad(&rig, &args) == CP_OK);
    CHECK_NEAR(rig_dv(&rig, &args), 2 + 1.0 / ROWS, 2e-3);
    CHECK_EQ_I64(simtorch_counts().flash_gradient, 3);
    rig_close_grad(&rig, room);
}

TEST(the_backend_names_the_op_of_gradients)
{
    struct rig rig;
    char *room = NULL;
    REQUIRE(rig_open(&rig));
    struct cp_grad_args args = rig_open_grad(&rig, &room);
    args.backend = CP_BACKEND_NATIVE_EFFICIENT;
    CHECK(rig_grad(&rig, &args) == CP_OK);
    CHECK_NEAR(rig_dv(&rig, &args), 1, 1e-3);
    CHECK_EQ_I64(simtorch_counts().flash_gradient, 0);
    rig_close_grad(&rig, room);
}

TEST(gradients_that_are_the_plain_kernels)
{
    struct rig rig;
    char *room = NULL;
    REQUIRE(rig_open(&rig));
    struct cp_grad_args args = rig_open_grad(&rig, &room);
    args.has_dlse = true;
    CHECK(rig_grad(&rig, &args) == CP_OK);
    args.has_dlse = false;
    args.dout.stride[3] = -2; /* backwards; all numbers are the same */
    args.dout.data += 2 * (DIM - 1);
    CHECK(rig_grad(&rig, &args) == CP_OK);
    args.dout = rig_grad_args(&rig, room).dout;
    simtorch_set_stream(NULL);
    CHECK(rig_grad(&rig, &args) == CP_OK);
    CHECK_NEAR(rig_dv(&rig, &args), 3, 3e-3);
    CHECK_EQ_I64(simtorch_counts().flash_gradient, 0);
    rig_close_grad(&rig, room);
}

TEST(gradients_of_another_shape_are_an_error)
{
    struct rig rig;
    char *room = NULL;
    REQUIRE(rig_open(&rig));
    struct cp_grad_args args = rig_open_grad(&rig, &room);
    simtorch_spoil_next();
    CHECK(rig_grad(&rig, &args) == CP_ERR_INTERNAL);
    CHECK_STR_HAS(cp_last_error()->text, "gave an answer of another");
    simtorch_refuse_next();
    CHECK(rig_grad(&rig, &args) == CP_ERR_DEVICE);
    CHECK_STR_HAS(cp_last_error()->text,
                  "torch cannot _scaled_dot_product_flash_attention_backward: ");
    CHECK_EQ_I64(simtorch_counts().alive, 0);
    CHECK_NEAR(rig_dv(&rig, &args), 0, 0);
    CHECK(rig_grad(&rig, &args) == CP_OK);
    CHECK_NEAR(rig_dv(&rig, &args), 1, 1e-3);
    rig_close_grad(&rig, room);
}
