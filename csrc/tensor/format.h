/* A kernel's packed layouts as plain numbers, so that plans can size buffers without
 * knowing the kernel.
 *
 * Packed K and V, unless keys are met as they are, and the running state consist of one
 * panel per (batch, head); a panel of `rows` rows takes round_up(rows, align) * row_bytes
 * bytes. Panels start at multiples of CP_PANEL_ALIGN. */
#ifndef CP_TENSOR_FORMAT_H
#define CP_TENSOR_FORMAT_H

#include <stdbool.h>
#include <stdint.h>

#include "base/checked.h"

enum { CP_PANEL_ALIGN = 64 };

struct cp_panel {
    int64_t row_align; /* rows of a panel are rounded up to this; at least 1 */
    int64_t row_bytes;
};

struct cp_format {
    uint64_t id; /* names kernel family and layout; ranks compare it, 0 is never used */
    bool has_plain_keys;  /* k and v are met as tensors: there are no panels of them */
    struct cp_panel k, v; /* where packed keys and values lie */
    struct cp_panel
        state; /* what `attend` carries: unnormalised output, maximum, sum */
    int64_t scratch_bytes;      /* for one `attend` at a time */
    int64_t grad_scratch_bytes; /* for one `grad` at a time */
};

static inline int64_t cp_panel_bytes(const struct cp_panel *panel, int64_t rows)
{
    return cp_round_up(cp_round_up(rows, panel->row_align) * panel->row_bytes,
                       CP_PANEL_ALIGN);
}

#endif
