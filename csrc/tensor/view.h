/* A borrowed box of memory with four axes, strides in bytes: what devices copy and
 * kernels read.
 *
 * Attention tensors are (batch, row, head, dim). A mask is (batch, head, row, key) with
 * length 1 on every axis that it does not have. In a packed panel or a kernel's state
 * only axes 0 and 2 have strides; what lies inside a panel is the kernel's own affair
 * (tensor/format.h). */
#ifndef CP_TENSOR_VIEW_H
#define CP_TENSOR_VIEW_H

#include <stdbool.h>
#include <stddef.h>

#include "base/status.h"
#include "tensor/dtype.h"

enum { CP_AXES = 4 };

struct cp_view {
    char *data; /* NULL: no tensor */
    int64_t n[CP_AXES];
    int64_t stride[CP_AXES]; /* bytes */
    enum cp_dtype dtype;
};

/* What is written and what is read. */
struct cp_copy {
    struct cp_view dst, src;
    bool is_with_peer; /* one of them is another rank's memory */
};

#ifdef __cplusplus
extern "C" {
#endif

/* Packed in the order of its axes; the strides of `n`. */
struct cp_view cp_view_compact(void *data, enum cp_dtype dtype, int64_t n0, int64_t n1,
                               int64_t n2, int64_t n3);
/* The box of `view` that starts at `first` and is `n` long; `view` must hold it. */
struct cp_view cp_view_box(const struct cp_view *view, const int64_t first[CP_AXES],
                           const int64_t n[CP_AXES]);
int64_t cp_view_count(const struct cp_view *view);
/* CP_ERR_INTERNAL, naming `verb`, unless both have the same lengths and none is below 0. */
CP_NODISCARD enum cp_code cp_view_check_same(const struct cp_view *a,
                                             const struct cp_view *b, const char *verb);

#ifdef __cplusplus
}
#endif

#endif
