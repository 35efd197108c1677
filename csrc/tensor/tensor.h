/* A borrowed description of somebody's tensor, of any number of dimensions up to eight, and how it becomes the four
 * axes that devices and kernels know. Nothing here owns memory or knows where a tensor comes from. */
#ifndef CP_TENSOR_TENSOR_H
#define CP_TENSOR_TENSOR_H

#include "base/status.h"
#include "tensor/view.h"

enum { CP_TENSOR_DIMS = 8 };

struct cp_tensor {
    char *data; /* first element; never NULL, also where there is no element */
    enum cp_dtype dtype;
    int device_type, device_id; /* DLPack's numbers */
    int ndim;
    bool is_read_only;
    int64_t shape[CP_TENSOR_DIMS];
    int64_t stride[CP_TENSOR_DIMS]; /* bytes */
};

/* Checks a tensor whose fields were filled in from outside, and makes its strides say nothing where they mean
 * nothing: those of axes with fewer than two elements become what a packed tensor would have. `name` is the
 * argument's, for messages. CP_ERR_VALUE for a size that overflows or is negative, CP_ERR_BUFFER for missing or
 * misaligned data. */
CP_NODISCARD enum cp_code cp_tensor_normalize(const char *name,
                                              struct cp_tensor *tensor);

/* Packed, in the order of its axes, in the host memory at `data` (NULL: to be filled in by the caller).
 * CP_ERR_VALUE where the size overflows. */
CP_NODISCARD enum cp_code cp_tensor_init_compact(struct cp_tensor *tensor, void *data,
                                                 enum cp_dtype dtype, int ndim,
                                                 const int64_t *shape);

int64_t cp_tensor_count(const struct cp_tensor *tensor); /* elements */
bool cp_tensor_is_compact(const struct cp_tensor *tensor);

/* "(1, 4, 2, 8)" into `text`, cut where it is too long; returns `text`. */
const char *cp_tensor_print_shape(const struct cp_tensor *tensor, char *text,
                                  size_t bytes);

/* (B, rows, heads, dim). CP_ERR_VALUE for any other number of dimensions. */
CP_NODISCARD enum cp_code cp_tensor_view_attention(const char *name,
                                                   const struct cp_tensor *tensor,
                                                   struct cp_view *out);

/* (B, rows, heads), with a last axis of length 1 put behind it. CP_ERR_VALUE for any other number of dimensions. */
CP_NODISCARD enum cp_code cp_tensor_view_lse(const char *name,
                                             const struct cp_tensor *tensor,
                                             struct cp_view *out);

/* A mask of 1 to 4 dimensions, (keys), (B or 1, keys), (B or 1, rows, keys) or (B or 1, H or 1, rows, keys), as
 * (B or 1, H or 1, rows, keys). CP_ERR_VALUE for a batch or head axis that fits neither `batch`, `heads` nor 1. */
CP_NODISCARD enum cp_code cp_tensor_view_mask(const struct cp_tensor *mask,
                                              int64_t batch, int64_t heads,
                                              struct cp_view *out);

/* (outer, rows, 1, inner) around dimension `dim`: what lies before it and what lies behind it become one axis each.
 * False where the strides do not allow that; a packed copy then does. */
bool cp_tensor_view_cut(const struct cp_tensor *tensor, int dim, struct cp_view *out);

/* The part of `tensor` that is `count` long from `first` on along `dim`; `tensor` must hold it. */
struct cp_tensor cp_tensor_narrow(const struct cp_tensor *tensor, int dim,
                                  int64_t first, int64_t count);

/* dst = src; same shape and dtype, any strides, no overlap. */
void cp_tensor_copy(const struct cp_tensor *dst, const struct cp_tensor *src);

#endif
