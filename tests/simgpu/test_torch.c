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

/* One that every op takes. */
static struct cp_torch_block good_block(void)
{
    return (struct cp_torch_block){
        .dtype = CP_DTYPE_BFLOAT16,
        .head_dim = 64,
        .value_dim = 64,
        .group = 1,
        .generation = 80,
        .sight = CP_TORCH_SEES_ALL,
        .is_aligned = true,
    };
}

/* "flash", "efficient", or "" and then the reason of both. */
static const char *chosen(const struct cp_torch_block *block, char why[CP_STATUS_TEXT])
{
    why[0] = '\0';
    const struct cp_torch_op *op = cp_torch_op_choose(block, why, CP_STATUS_TEXT);
    return op == NULL ? "" : strstr(op->name, "flash") != NULL ? "flash" : "efficient";
}

TEST(the_table_chooses)
{
    char why[CP_STATUS_TEXT];
    struct cp_torch_block block = good_block();
    CHECK_EQ_STR(chosen(&block, why), "flash");
    block.sight = CP_TORCH_SEES_DIAGONAL;
    CHECK_EQ_STR(chosen(&block, why), "flash");
    block.group = 4;
    CHECK_EQ_STR(chosen(&block, why), "flash");
    block = good_block();
    block.dtype = CP_DTYPE_FLOAT32;
    CHECK_EQ_STR(chosen(&block, why), "efficient");
    block = good_block();
    block.value_dim = 128;
    CHECK_EQ_STR(chosen(&block, why), "efficient");
    block = good_block();
    block.head_dim = block.value_dim = 264;
    CHECK_EQ_STR(chosen(&block, why), "efficient");
}

/* Neither takes such a block, and the efficient op's reason is the last. */
static void refused(struct cp_torch_block block, const char *reason)
{
    char why[CP_STATUS_TEXT];
    CHECK_EQ_STR(chosen(&block, why), "");
    CHECK(strstr(why, "_scaled_dot_product_flash_attention: it") != NULL ||
          strstr(why, "the GPU is too old") != NULL);
    const char *last = strstr(why, "efficient_attention: ");
    if (CHECK(last != NULL)) {
        CHECK_EQ_STR(last + strlen("efficient_attention: "), reason);
    }
}

TEST(the_table_says_why_not)
{
    struct cp_torch_block block = good_block();
    block.generation = 75;
    refused(block, "the GPU is too old for it");
    block = good_block();
    block.dtype = CP_DTYPE_FLOAT64;
    refused(block, "it does not take this dtype");
    block = good_block();
    block.is_aligned = false;
    refused(block, "it needs rows of whole 16-byte words, none backwards");
    block = good_block();
    block.has_mask = true;
    refused(block, "it is given no mask");
    block = good_block();
    block.sight = CP_TORCH_SEES_PART;
    refused(block, "it is causal along the diagonal of equal lengths alone");
    block = good_block();
    block.group = 0;
    refused(block, "it needs equally many query heads for each key head");
    block = good_block();
    block.dtype = CP_DTYPE_FLOAT32;
    block.group = 2;
    refused(block, "it does not share key heads");
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
    CHECK_EQ_STR(selected(NULL, CP_DTYPE_FLOAT16, 64), "cuda_plain");
    CHECK_EQ_STR(selected("torch", CP_DTYPE_FLOAT16, 64), "NotSupported");
    CHECK_STR_HAS(cp_last_error()->text, "no torch with CUDA");
    simtorch_load(true);
    CHECK_EQ_STR(selected(NULL, CP_DTYPE_FLOAT16, 64), "cuda_torch");
    CHECK_EQ_STR(selected("", CP_DTYPE_FLOAT32, 4), "cuda_torch");
    CHECK_EQ_STR(selected("torch", CP_DTYPE_BFLOAT16, 256), "cuda_torch");
    CHECK_EQ_STR(selected("plain", CP_DTYPE_FLOAT16, 64), "cuda_plain");
    CHECK_EQ_STR(selected(NULL, CP_DTYPE_FLOAT64, 64), "cuda_plain");
    CHECK_EQ_STR(selected(NULL, CP_DTYPE_FLOAT16, 65), "cuda_plain");
    CHECK_EQ_STR(selected("torch", CP_DTYPE_FLOAT64, 64), "NotSupported");
    CHECK_STR_HAS(cp_last_error()->text, "does not take this dtype");
    CHECK_EQ_STR(selected("flash", CP_DTYPE_FLOAT16, 64), "ValueError");
    CHECK(strstr(cp_last_error()->text, "\"flash\"; allowed: plain, torch") != NULL);
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
    const struct cp_view panels = {.n = {1, ROWS, HEADS, DIM},
                                   .stride = {bytes, 0, ROWS * DIM * 2, 0},
                                   .dtype = CP_DTYPE_FLOAT16};
    rig->args = (struct cp_attend_args){
        .q = cp_view_compact(rig->memory, CP_DTYPE_FLOAT16, 1, ROWS, HEADS, DIM),
        .k = panels,
        .v = panels,
        .state = panels,
        .place = {.heads_per_kv = 1},
        .scale = 1,
    };
    rig->args.k.data = rig->memory + bytes;
    rig->args.v.data = rig->memory + 2 * bytes;
    rig->args.state.data = rig->memory + 3 * bytes;
    rig->args.state.stride[0] = rows * STATE * 4;
    rig->args.state.stride[2] = ROWS * STATE * 4;
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
    rig.args.place.q_first = 9; /* the first row sees all but the last */
    CHECK(rig_attend(&rig) == CP_OK);
    CHECK_NEAR(rig_sum(&rig), 2 * ROWS, 1e-4);
    CHECK_EQ_I64(simtorch_counts().flash, 2);
    rig.args.place.q_first = 10; /* what comes before */
    CHECK(rig_attend(&rig) == CP_OK);
    CHECK_NEAR(rig_sum(&rig), 3 * ROWS, 1e-4);
    CHECK_EQ_I64(simtorch_counts().flash, 3);
    CHECK_EQ_I64(simtorch_counts().causal, 1);
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
