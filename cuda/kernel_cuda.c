/* The table of the plain CUDA kernel, and the choice among kernels. */
#include "kernel_cuda.h"

#include <stdlib.h>
#include <string.h>

#include "cuda_api.h"
#include "cuda_check.h"
#include "kernel_own.h"
#include "kernel_package.h"
#include "kernel_torch.h"

enum {
    MAX_DIM = 65536
}; /* as the generic kernel of the CPU; every size stays within int64_t */

static bool is_available(void)
{
    int count = 0;
    bool has_device = cudaGetDeviceCount(&count) == cudaSuccess && count > 0;
    (void)cudaGetLastError();
    return has_device;
}

static enum cp_code describe(enum cp_dtype dtype, int64_t head_dim, int64_t value_dim,
                             struct cp_format *out)
{
    if (!cp_dtype_attends(dtype)) {
        return cp_fail(CP_ERR_UNSUPPORTED, "the plain CUDA kernel cannot attend in %s",
                       cp_dtype_name(dtype));
    }
    if (head_dim < 1 || head_dim > MAX_DIM || value_dim < 1 || value_dim > MAX_DIM) {
        return cp_fail(CP_ERR_UNSUPPORTED,
                       "the plain CUDA kernel takes head dims from 1 to %d, not %lld "
                       "(q, k) and %lld (v)",
                       MAX_DIM, (long long)head_dim, (long long)value_dim);
    }
    int64_t sum_bytes = cp_dtype_bytes(cp_dtype_sum(dtype));
    *out = (struct cp_format){
        .id = CP_FORMAT_CUDA_PLAIN + (uint64_t)dtype,
        .has_plain_keys = true,
        .state = {.row_align = 1, .row_bytes = (value_dim + 2) * sum_bytes},
    };
    return CP_OK;
}

struct cp_view cp_kernel_cuda_state(const struct cp_view *state, int64_t row,
                                    int64_t head)
{
    struct cp_view rest = *state;
    int64_t row_bytes = (state->n[3] + 2) * cp_dtype_bytes(cp_dtype_sum(state->dtype));
    rest.data += head * state->stride[2] + row * row_bytes;
    rest.n[1] -= row;
    rest.n[2] -= head;
    return rest;
}

const struct cp_kernel_ops cp_kernel_cuda_plain_ops = {
    .name = "cuda_plain",
    .abi = CP_KERNEL_ABI,
    .is_available = is_available,
    .describe = describe,
    .attend = cp_cuda_attend,
    .finish = cp_cuda_finish,
    .delta = cp_cuda_delta,
    .grad = cp_cuda_grad,
};

/* ---- the choice ---- */

/* Ascending; the first takes every call. */
enum { PLAIN, OWN, TORCH, KERNELS };
static const struct {
    const char *word; /* of CP_ATTN_CUDA_KERNEL */
    const struct cp_kernel_ops *ops;
} kernels[KERNELS] = {
    [PLAIN] = {"plain", &cp_kernel_cuda_plain_ops},
    [OWN] = {"own", &cp_kernel_own_ops},
    [TORCH] = {"torch", &cp_kernel_torch_ops},
};

/* The kernel that the user asked for, or -1. */
static enum cp_code wanted_kernel(int *out)
{
    const char *text = getenv("CP_ATTN_CUDA_KERNEL");
    *out = -1;
    if (text == NULL || text[0] == '\0') {
        return CP_OK;
    }
    for (int i = 0; i < KERNELS; i++) {
        if (strcmp(text, kernels[i].word) == 0) {
            *out = i;
            return CP_OK;
        }
    }
    return cp_fail(
        CP_ERR_VALUE,
        "CP_ATTN_CUDA_KERNEL is \"%.40s\"; allowed: plain, own, torch, or not set",
        text);
}

static bool suits(const struct cp_kernel_ops *ops, enum cp_dtype dtype,
                  int64_t head_dim, int64_t value_dim)
{
    struct cp_format format;
    return ops->is_available() &&
           ops->describe(dtype, head_dim, value_dim, &format) == CP_OK;
}

enum cp_code cp_kernel_cuda_select(int limit, enum cp_backend backend,
                                   enum cp_dtype dtype, int64_t head_dim,
                                   int64_t value_dim, const struct cp_kernel_ops **out,
                                   struct cp_format *format)
{
    int chosen = -1;
    (void)limit; /* all have the same layouts: ranks need not agree */
    if (cp_backend_is_package(backend) || backend == CP_BACKEND_NATIVE_MATH) {
        *out = backend == CP_BACKEND_NATIVE_MATH ? &cp_kernel_cuda_plain_ops
                                                 : &cp_kernel_package_ops;
        return (*out)->describe(dtype, head_dim, value_dim, format);
    }
    CP_TRY(wanted_kernel(&chosen));
    if (chosen == TORCH && !kernels[chosen].ops->is_available()) {
        return cp_fail(CP_ERR_UNSUPPORTED,
                       "CP_ATTN_CUDA_KERNEL is torch, but no torch with CUDA was "
                       "imported before the first call on a GPU");
    }
    if (chosen < 0) {
        chosen = TORCH;
        while (chosen > PLAIN &&
               !suits(kernels[chosen].ops, dtype, head_dim, value_dim)) {
            chosen--;
        }
    }
    CP_TRY(kernels[chosen].ops->describe(dtype, head_dim, value_dim, format));
    *out = kernels[chosen].ops;
    return CP_OK;
}
