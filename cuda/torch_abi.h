/* The part of torch's C ABI that is used, declared here and found at run time.
 *
 * torch need not be there to build or to import. Names are torch's own; torch_check.cc
 * compares the declarations with torch's headers where they are. Ops are called by their
 * own entries: aoti_torch_call_dispatcher of 2.13 reads the types of an op's results from
 * the wrong end, so it cannot call one whose results are tensors and integers.
 *
 * A handle that a function returns is owned by its caller; one that is given is borrowed.
 */
#ifndef CP_CUDA_TORCH_ABI_H
#define CP_CUDA_TORCH_ABI_H

#include <stdint.h>

#include "base/status.h"
#include "tensor/view.h"

typedef struct AtenTensorOpaque *AtenTensorHandle;
typedef int32_t AOTITorchError; /* 0: success */

/* field of struct cp_torch, torch's name, arguments; all return AOTITorchError. */
#define CP_TORCH_CALLS(X)                                                              \
    X(create, aoti_torch_create_tensor_from_blob,                                      \
      (void *data, int64_t axes, const int64_t *sizes, const int64_t *strides,         \
       int64_t offset, int32_t dtype, int32_t device, int32_t ordinal,                 \
       AtenTensorHandle *tensor))                                                      \
    X(empty, aoti_torch_empty_strided,                                                 \
      (int64_t axes, const int64_t *sizes, const int64_t *strides, int32_t dtype,      \
       int32_t device, int32_t ordinal, AtenTensorHandle *tensor))                     \
    X(undefined, aoti_torch_new_uninitialized_tensor, (AtenTensorHandle * tensor))     \
    X(free, aoti_torch_delete_tensor_object, (AtenTensorHandle tensor))                \
    X(get_data, aoti_torch_get_data_ptr, (AtenTensorHandle tensor, void **data))       \
    X(get_axes, aoti_torch_get_dim, (AtenTensorHandle tensor, int64_t *axes))          \
    X(get_sizes, aoti_torch_get_sizes, (AtenTensorHandle tensor, int64_t **sizes))     \
    X(get_strides, aoti_torch_get_strides,                                             \
      (AtenTensorHandle tensor, int64_t **strides))                                    \
    X(get_dtype, aoti_torch_get_dtype, (AtenTensorHandle tensor, int32_t *dtype))

/* The same for those that return torch's number of a device or dtype. */
#define CP_TORCH_NUMBERS(X)                                                            \
    X(cuda, aoti_torch_device_type_cuda, (void))                                       \
    X(float32, aoti_torch_dtype_float32, (void))                                       \
    X(float64, aoti_torch_dtype_float64, (void))                                       \
    X(bfloat16, aoti_torch_dtype_bfloat16, (void))                                     \
    X(float16, aoti_torch_dtype_float16, (void))

/* In the library for CUDA. The results of the ops are in torch_op.c. */
#define CP_TORCH_CUDA_CALLS(X)                                                         \
    X(current_stream, aoti_torch_get_current_cuda_stream,                              \
      (int32_t ordinal, void **stream))                                                \
    X(flash, aoti_torch_cuda__scaled_dot_product_flash_attention,                      \
      (AtenTensorHandle q, AtenTensorHandle k, AtenTensorHandle v, double dropout,     \
       int32_t is_causal, int32_t wants_debug_mask, double *scale,                     \
       AtenTensorHandle *out, AtenTensorHandle *lse, AtenTensorHandle *rest2,          \
       AtenTensorHandle *rest3, int64_t *most_rows, int64_t *most_keys,                \
       AtenTensorHandle *rest6, AtenTensorHandle *rest7, AtenTensorHandle *rest8))     \
    X(efficient, aoti_torch_cuda__scaled_dot_product_efficient_attention,              \
      (AtenTensorHandle q, AtenTensorHandle k, AtenTensorHandle v,                     \
       AtenTensorHandle * mask, int32_t wants_lse, double dropout, int32_t is_causal,  \
       double *scale, AtenTensorHandle *out, AtenTensorHandle *lse,                    \
       AtenTensorHandle *rest2, AtenTensorHandle *rest3))                              \
    X(cudnn, aoti_torch_cuda__scaled_dot_product_cudnn_attention,                      \
      (AtenTensorHandle q, AtenTensorHandle k, AtenTensorHandle v,                     \
       AtenTensorHandle * mask, int32_t wants_lse, double dropout, int32_t is_causal,  \
       int32_t wants_debug_mask, double *scale, AtenTensorHandle *out,                 \
       AtenTensorHandle *lse, AtenTensorHandle *rest2, AtenTensorHandle *rest3,        \
       int64_t *most_rows, int64_t *most_keys, AtenTensorHandle *rest6,                \
       AtenTensorHandle *rest7, AtenTensorHandle *rest8))                              \
    X(flash_gradient, aoti_torch_cuda__scaled_dot_product_flash_attention_backward,    \
      (AtenTensorHandle dout, AtenTensorHandle q, AtenTensorHandle k,                  \
       AtenTensorHandle v, AtenTensorHandle out, AtenTensorHandle lse,                 \
       AtenTensorHandle row_ends, AtenTensorHandle key_ends, int64_t most_rows,        \
       int64_t most_keys, double dropout, int32_t is_causal, AtenTensorHandle seed,    \
       AtenTensorHandle offset, double *scale, AtenTensorHandle *dq,                   \
       AtenTensorHandle *dk, AtenTensorHandle *dv))                                    \
    X(efficient_gradient,                                                              \
      aoti_torch_cuda__scaled_dot_product_efficient_attention_backward,                \
      (AtenTensorHandle dout, AtenTensorHandle q, AtenTensorHandle k,                  \
       AtenTensorHandle v, AtenTensorHandle mask, AtenTensorHandle out,                \
       AtenTensorHandle lse, AtenTensorHandle seed, AtenTensorHandle offset,           \
       double dropout, const int32_t *wanted, int64_t wanted_count, int32_t is_causal, \
       double *scale, AtenTensorHandle *dq, AtenTensorHandle *dk,                      \
       AtenTensorHandle *dv, AtenTensorHandle *dmask))

struct cp_torch {
#define CP_TORCH_CALL_FIELD(field, name, arguments) AOTITorchError(*field) arguments;
#define CP_TORCH_NUMBER_FIELD(field, name, arguments) int32_t(*field) arguments;
    CP_TORCH_CALLS(CP_TORCH_CALL_FIELD)
    CP_TORCH_NUMBERS(CP_TORCH_NUMBER_FIELD)
    CP_TORCH_CUDA_CALLS(CP_TORCH_CALL_FIELD)
#undef CP_TORCH_CALL_FIELD
#undef CP_TORCH_NUMBER_FIELD
    /* Why the thread's last call failed; NULL before torch 2.13. */
    const char *(*last_error)(void);
    int64_t cudnn_version; /* 91501: 9.15.1; 0: none is loaded */
};

/* The torch that this process has loaded, with CUDA; NULL where there is none, or one
 * that lacks an entry. Asked once, by whoever comes first. */
const struct cp_torch *cp_torch_loaded(void);

/* Where tensors are, by torch's numbers. */
struct cp_torch_device {
    int32_t type, ordinal;
};

/* The axes (batch, row, head, dim) of a view as torch's ops have them: (batch, head, row,
 * dim). Strides are whole elements, below 0, which torch does not have, only where there is
 * one place. The memory stays the view's. */
CP_NODISCARD enum cp_code cp_torch_tensor(const struct cp_torch *torch,
                                          struct cp_torch_device device,
                                          const struct cp_view *view,
                                          AtenTensorHandle *out);

/* A tensor of torch's own memory, with the dtype, axes and strides of a view that has no
 * memory; without the last axis, which is 1, where `axes` is 3. */
CP_NODISCARD enum cp_code cp_torch_empty(const struct cp_torch *torch,
                                         struct cp_torch_device device,
                                         const struct cp_view *view, int64_t axes,
                                         AtenTensorHandle *out);

/* The way back: a tensor of at least three axes, (batch, head, row) and dim, which is 1
 * where it has no fourth. CP_ERR_INTERNAL for a dtype that does not attend. */
CP_NODISCARD enum cp_code cp_torch_view(const struct cp_torch *torch,
                                        AtenTensorHandle tensor, struct cp_view *out);

/* Frees the handle, accepts NULL and leaves NULL. */
void cp_torch_free(const struct cp_torch *torch, AtenTensorHandle *tensor);

/* Makes what torch said the thread's error: "torch cannot <what>: ...". */
enum cp_code cp_torch_fail(const struct cp_torch *torch, const char *what);

#endif
