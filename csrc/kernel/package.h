/* The table by which kernels of an accelerator ask a package of Python to compute a block:
 * filled by whoever knows Python, for one call.
 *
 * Views are of the accelerator's memory, axes (batch, row, head, dim), without negative
 * strides, and borrowed. What comes back is the package's, and may be used by what the
 * call's stream is given before `release`. */
#ifndef CP_KERNEL_PACKAGE_H
#define CP_KERNEL_PACKAGE_H

#include "base/status.h"
#include "tensor/view.h"

/* A block whose rows see all of its keys or, where `is_causal`, as many keys as rows, row i
 * the keys 0 to i; each key head is used by equally many query heads, in order. */
struct cp_package_block {
    struct cp_view q, k, v;
    double scale;
    bool is_causal;
};

struct cp_package_answer {
    struct cp_view out; /* (B, rows, heads, Dv), dtype of the call */
    struct cp_view lse; /* (B, rows, heads, 1), natural log, dtype of sums */
    void *held;         /* for `release` */
};

/* What a backward pass is given besides the block. */
struct cp_package_outcome {
    struct cp_view dout, out; /* (B, rows, heads, Dv), dtype of the call */
    struct cp_view lse;       /* (B, rows, heads, 1), over all keys of the row */
};

struct cp_package_grads {
    struct cp_view dq, dk, dv; /* as q, k, v */
    void *held;
};

/* One call's. Any function may fail with the package's own error. */
struct cp_package {
    enum cp_code (*answer)(const struct cp_package *package,
                           const struct cp_package_block *block,
                           struct cp_package_answer *out);
    enum cp_code (*gradient)(const struct cp_package *package,
                             const struct cp_package_block *block,
                             const struct cp_package_outcome *outcome,
                             struct cp_package_grads *out);
    /* Memory of the package's framework. */
    enum cp_code (*room)(const struct cp_package *package, int64_t bytes, char **out,
                         void **held);
    /* Accepts NULL in it and leaves NULL. */
    void (*release)(const struct cp_package *package, void **held);
    void *owner; /* the filler's own */
};

#endif
