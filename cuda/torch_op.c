/* The table of torch's ops, and their calls. What they take is what torch asks of them
 * before it uses them itself (ATen/native/transformers/cuda/sdp_utils.cpp), and what
 * their code demands of a gradient's tensors (attention_backward.cu there). */
#include "torch_op.h"

#include "base/text.h"

/* ---- the calls ---- */

static AOTITorchError run_flash(const struct cp_torch *torch,
                                const AtenTensorHandle qkv[3], bool is_causal,
                                double scale, AtenTensorHandle held[CP_TORCH_RESULTS])
{
    int64_t most_rows = 0, most_keys = 0;
    return torch->flash(qkv[0], qkv[1], qkv[2], 0, is_causal, false, &scale, &held[0],
                        &held[1], &held[2], &held[3], &most_rows, &most_keys, &held[4],
                        &held[5], &held[6]);
}

static AOTITorchError run_efficient(const struct cp_torch *torch,
                                    const AtenTensorHandle qkv[3], bool is_causal,
                                    double scale,
                                    AtenTensorHandle held[CP_TORCH_RESULTS])
{
    return torch->efficient(qkv[0], qkv[1], qkv[2], NULL, true, 0, is_causal, &scale,
                            &held[0], &held[1], &held[2], &held[3]);
}

static AOTITorchError run_cudnn(const struct cp_torch *torch,
                                const AtenTensorHandle qkv[3], bool is_causal,
                                double scale, AtenTensorHandle held[CP_TORCH_RESULTS])
{
    int64_t most_rows = 0, most_keys = 0;
    return torch->cudnn(qkv[0], qkv[1], qkv[2], NULL, true, 0, is_causal, false, &scale,
                        &held[0], &held[1], &held[2], &held[3], &most_rows, &most_keys,
                        &held[4], &held[5], &held[6]);
}

/* The forward pass hands its state to the backward through these: without dropout nobody
 * reads seed and offset, and only sequences of several lengths in one have ends. */

static AOTITorchError gradient_flash(const struct cp_torch *torch,
                                     const AtenTensorHandle *given,
                                     const struct cp_grad_args *args, bool is_causal,
                                     AtenTensorHandle held[CP_TORCH_GRADS])
{
    AtenTensorHandle nothing = given[CP_TORCH_NOTHING];
    double scale = args->scale;
    return torch->flash_gradient(
        given[CP_TORCH_DOUT], given[CP_TORCH_Q], given[CP_TORCH_K], given[CP_TORCH_V],
        given[CP_TORCH_OUT], given[CP_TORCH_LSE], nothing, nothing, args->q.n[1],
        args->k.n[1], 0, is_causal, nothing, nothing, &scale, &held[0], &held[1],
        &held[2]);
}

static AOTITorchError gradient_efficient(const struct cp_torch *torch,
                                         const AtenTensorHandle *given,
                                         const struct cp_grad_args *args,
                                         bool is_causal,
                                         AtenTensorHandle held[CP_TORCH_GRADS])
{
    static const int32_t wanted[] = {true, true, true, false}; /* not the mask's */
    AtenTensorHandle nothing = given[CP_TORCH_NOTHING];
    double scale = args->scale;
    return torch->efficient_gradient(
        given[CP_TORCH_DOUT], given[CP_TORCH_Q], given[CP_TORCH_K], given[CP_TORCH_V],
        nothing, given[CP_TORCH_OUT], given[CP_TORCH_LSE], nothing, nothing, 0, wanted,
        4, is_causal, &scale, &held[0], &held[1], &held[2], &held[3]);
}

/* ---- the table ---- */

#define BIT(dtype) (1U << (unsigned)(dtype))

/* cuDNN's is used forward only. torch keeps its backward plans by the strides of q, k and
 * v and, in versions that are in use, not by those of out and dout: a plan made for others
 * would give wrong gradients. Before 9.15.1 it is wrong for some lengths (torch's issue
 * 169849). */
static const struct cp_torch_op ops[] = {
    {
        .name = "_scaled_dot_product_cudnn_attention",
        .backend = CP_BACKEND_NATIVE_CUDNN,
        .dtypes = BIT(CP_DTYPE_BFLOAT16) | BIT(CP_DTYPE_FLOAT16),
        .most_dim = 128,
        .least_length = 2,
        .oldest = 80,
        .oldest_cudnn = 91501,
        .takes_groups = true,
        .takes_other_value_dim = true,
        .run = run_cudnn,
    },
    {
        .name = "_scaled_dot_product_flash_attention",
        .backend = CP_BACKEND_NATIVE_FLASH,
        .dtypes = BIT(CP_DTYPE_BFLOAT16) | BIT(CP_DTYPE_FLOAT16),
        .most_dim = 256,
        .least_length = 1,
        .oldest = 80,
        .grad_lse_multiple = 1,
        .takes_groups = true,
        .has_gradient_gap = true,
        .run = run_flash,
        .gradient = gradient_flash,
    },
    {
        .name = "_scaled_dot_product_efficient_attention",
        .backend = CP_BACKEND_NATIVE_EFFICIENT,
        .dtypes =
            BIT(CP_DTYPE_BFLOAT16) | BIT(CP_DTYPE_FLOAT16) | BIT(CP_DTYPE_FLOAT32),
        .most_dim = 65536,
        .least_length = 1,
        .oldest = 80,
        .grad_lse_multiple = 32,
        .takes_other_value_dim = true,
        .run = run_efficient,
        .gradient = gradient_efficient,
    },
};

enum { OPS = sizeof ops / sizeof ops[0] };

/* As torch orders them (priority_order in sdp_utils.cpp): cuDNN's first on Hopper and
 * data-centre Blackwell, and last elsewhere. */
static const struct cp_torch_op *op_at(int place, const struct cp_torch_block *block)
{
    bool is_cudnn_first =
        block->generation == 90 || block->generation == 100 || block->generation == 103;
    return &ops[is_cudnn_first ? place : (place + 1) % OPS];
}

static bool is_short_of_shared_memory(int generation)
{
    return (generation >= 86 && generation <= 89) || generation / 10 == 12;
}

const char *cp_torch_op_refuses(const struct cp_torch_op *op,
                                const struct cp_torch_block *block)
{
    int64_t larger =
        block->head_dim > block->value_dim ? block->head_dim : block->value_dim;
    bool is_in_gap = block->head_dim > 192 && block->head_dim <= 224 &&
                     is_short_of_shared_memory(block->generation);
    const struct {
        bool holds;
        const char *reason;
    } rules[] = {
        {block->generation < op->oldest, "the GPU is too old for it"},
        {block->cudnn_version < op->oldest_cudnn, "it needs cuDNN 9.15.1"},
        {(op->dtypes & BIT(block->dtype)) == 0, "it does not take this dtype"},
        {larger > op->most_dim, "its heads are not that large"},
        {block->head_dim != block->value_dim && !op->takes_other_value_dim,
         "it needs values of the head dim"},
        {!block->is_aligned,
         "it needs rows of whole 16-byte words, none backwards or repeated"},
        {block->has_mask, "it is given no mask"},
        {block->group == 0, "it needs equally many query heads for each key head"},
        {block->group > 1 && !op->takes_groups, "it does not share key heads"},
        {block->rows < op->least_length || block->keys < op->least_length,
         "it needs two rows and two keys"},
        {block->is_gradient && op->gradient == NULL, "it is not used for gradients"},
        {block->is_gradient && op->has_gradient_gap && is_in_gap,
         "it has no gradient for heads of 193 to 224 on this GPU"},
        {block->is_gradient && block->has_dlse, "it takes no gradient of the lse"},
    };
    for (size_t i = 0; i < sizeof rules / sizeof rules[0]; i++) {
        if (rules[i].holds) {
            return rules[i].reason;
        }
    }
    return NULL;
}

const struct cp_torch_op *cp_torch_op_choose(const struct cp_torch_block *block,
                                             char *why, size_t why_bytes)
{
    for (int i = 0; i < OPS; i++) {
        if (ops[i].backend == block->backend &&
            cp_torch_op_refuses(&ops[i], block) == NULL) {
            return &ops[i];
        }
    }
    for (int i = 0; i < OPS; i++) {
        const struct cp_torch_op *op = op_at(i, block);
        const char *reason = cp_torch_op_refuses(op, block);
        if (reason == NULL) {
            return op;
        }
        if (why != NULL) {
            cp_text_append(why, why_bytes, "%s%s: %s", i > 0 ? "; " : "", op->name,
                           reason);
        }
    }
    return NULL;
}
