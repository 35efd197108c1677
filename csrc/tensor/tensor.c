/* Shapes, strides, and merging axes. */
#include "tensor/tensor.h"

#include <inttypes.h>
#include <string.h>

#include "base/checked.h"
#include "base/mem.h"
#include "base/text.h"

/* What stands for the address of no elements: aligned, not NULL (which means "no tensor" in a view), never read. */
static char *nowhere(void)
{
    return (char *)(uintptr_t)CP_ALIGNMENT;
}

const char *cp_tensor_print_shape(const struct cp_tensor *tensor, char *text,
                                  size_t bytes)
{
    text[0] = '\0';
    for (int axis = 0; axis < tensor->ndim; axis++) {
        cp_text_append(text, bytes, "%s%" PRId64, axis == 0 ? "(" : ", ",
                       tensor->shape[axis]);
    }
    cp_text_append(text, bytes, "%s",
                   tensor->ndim == 0   ? "()"
                   : tensor->ndim == 1 ? ",)"
                                       : ")");
    return text;
}

/* Packed strides; an axis of length 0 counts as 1, so that the strides stay apart. */
static bool fill_compact(struct cp_tensor *tensor)
{
    int64_t step = cp_dtype_bytes(tensor->dtype);
    for (int axis = tensor->ndim - 1; axis >= 0; axis--) {
        tensor->stride[axis] = step;
        int64_t n = tensor->shape[axis] > 1 ? tensor->shape[axis] : 1;
        if (!cp_mul_i64(step, n, &step)) {
            return false;
        }
    }
    return true;
}

static bool has_elements(const struct cp_tensor *tensor)
{
    for (int axis = 0; axis < tensor->ndim; axis++) {
        if (tensor->shape[axis] == 0) {
            return false;
        }
    }
    return true;
}

/* Do the elements and the bytes between the first and the last one fit the arithmetic? */
static bool fits(const struct cp_tensor *tensor)
{
    int64_t bytes = cp_dtype_bytes(tensor->dtype);
    int64_t low = 0;
    int64_t high = bytes;
    for (int axis = 0; axis < tensor->ndim; axis++) {
        int64_t reach = 0;
        if (!cp_mul_i64(bytes, tensor->shape[axis], &bytes)) {
            return false;
        }
        if (tensor->shape[axis] < 2) {
            continue;
        }
        if (!cp_mul_i64(tensor->shape[axis] - 1, tensor->stride[axis], &reach)) {
            return false;
        }
        int64_t *side = reach < 0 ? &low : &high;
        if (!cp_add_i64(*side, reach, side)) {
            return false;
        }
    }
    return low >= high - INT64_MAX;
}

/* An axis of fewer than two elements gets the stride with which it merges with the axis behind it. */
static void ignore_idle_strides(struct cp_tensor *tensor)
{
    for (int axis = tensor->ndim - 1; axis >= 0; axis--) {
        if (tensor->shape[axis] > 1) {
            continue;
        }
        int64_t step = cp_dtype_bytes(tensor->dtype);
        if (axis + 1 < tensor->ndim) {
            int64_t outer = 0;
            step = cp_mul_i64(tensor->shape[axis + 1], tensor->stride[axis + 1], &outer)
                       ? outer
                       : step;
        }
        tensor->stride[axis] = step;
    }
}

/* Is every element where loads of its type, or of its parts, may be? */
static bool is_aligned(const struct cp_tensor *tensor)
{
    int64_t bytes = cp_dtype_bytes(tensor->dtype);
    int64_t unit = bytes > 8 ? 8 : bytes;
    bool is_good = (uintptr_t)tensor->data % (uintptr_t)unit == 0;
    for (int axis = 0; axis < tensor->ndim; axis++) {
        is_good =
            is_good && (tensor->shape[axis] < 2 || tensor->stride[axis] % unit == 0);
    }
    return is_good;
}

enum cp_code cp_tensor_normalize(const char *name, struct cp_tensor *tensor)
{
    char shape[160];
    if (tensor->ndim < 0 || tensor->ndim > CP_TENSOR_DIMS) {
        return cp_fail(CP_ERR_VALUE, "%s has %d dimensions; at most %d are supported",
                       name, tensor->ndim, CP_TENSOR_DIMS);
    }
    for (int axis = 0; axis < tensor->ndim; axis++) {
        if (tensor->shape[axis] < 0) {
            return cp_fail(CP_ERR_VALUE, "%s has shape %s: a length is negative", name,
                           cp_tensor_print_shape(tensor, shape, sizeof shape));
        }
    }
    bool is_empty = !has_elements(tensor);
    if (is_empty ? !fill_compact(tensor) : !fits(tensor)) {
        return cp_fail(CP_ERR_VALUE,
                       "%s has shape %s: more bytes than can be addressed", name,
                       cp_tensor_print_shape(tensor, shape, sizeof shape));
    }
    if (is_empty) {
        tensor->data = nowhere();
        return CP_OK;
    }
    if (tensor->data == NULL) {
        return cp_fail(CP_ERR_BUFFER, "%s has shape %s but no memory", name,
                       cp_tensor_print_shape(tensor, shape, sizeof shape));
    }
    if (!is_aligned(tensor)) {
        return cp_fail(
            CP_ERR_BUFFER,
            "%s has elements at addresses that are not aligned for %s; pass a copy",
            name, cp_dtype_name(tensor->dtype));
    }
    ignore_idle_strides(tensor);
    return CP_OK;
}

enum cp_code cp_tensor_init_compact(struct cp_tensor *tensor, void *data,
                                    enum cp_dtype dtype, int ndim, const int64_t *shape)
{
    struct cp_tensor packed = {.dtype = dtype, .device_type = 1, .ndim = ndim};
    bool is_good = ndim >= 0 && ndim <= CP_TENSOR_DIMS;
    for (int axis = 0; is_good && axis < ndim; axis++) {
        packed.shape[axis] = shape[axis];
        is_good = shape[axis] >= 0;
    }
    if (!is_good || !fill_compact(&packed) || !fits(&packed)) {
        return cp_fail(CP_ERR_VALUE,
                       "a tensor of %d dimensions is larger than can be addressed",
                       ndim);
    }
    packed.data = data == NULL ? nowhere() : data;
    *tensor = packed;
    return CP_OK;
}

int64_t cp_tensor_count(const struct cp_tensor *tensor)
{
    int64_t count = 1;
    for (int axis = 0; axis < tensor->ndim; axis++) {
        count *= tensor->shape[axis];
    }
    return count;
}

bool cp_tensor_is_compact(const struct cp_tensor *tensor)
{
    struct cp_tensor packed = *tensor;
    if (!has_elements(tensor)) {
        return true;
    }
    if (!fill_compact(&packed)) {
        return false;
    }
    for (int axis = 0; axis < tensor->ndim; axis++) {
        if (tensor->shape[axis] > 1 && tensor->stride[axis] != packed.stride[axis]) {
            return false;
        }
    }
    return true;
}

static enum cp_code fail_ndim(const char *name, const struct cp_tensor *tensor,
                              const char *want)
{
    char shape[160];
    return cp_fail(CP_ERR_VALUE, "%s has %d dimensions, shape %s; it must have %s",
                   name, tensor->ndim,
                   cp_tensor_print_shape(tensor, shape, sizeof shape), want);
}

/* The axes of the tensor become the last or first ones of a view; those in front of them have length 1. */
static struct cp_view plain_view(const struct cp_tensor *tensor)
{
    struct cp_view view = {
        .data = tensor->data, .dtype = tensor->dtype, .n = {1, 1, 1, 1}};
    for (int axis = 0; axis < CP_AXES; axis++) {
        view.stride[axis] = cp_dtype_bytes(tensor->dtype);
    }
    return view;
}

enum cp_code cp_tensor_view_attention(const char *name, const struct cp_tensor *tensor,
                                      struct cp_view *out)
{
    if (tensor->ndim != CP_AXES) {
        return fail_ndim(name, tensor, "4: (batch, sequence, heads, head dim)");
    }
    *out = plain_view(tensor);
    memcpy(out->n, tensor->shape, sizeof out->n);
    memcpy(out->stride, tensor->stride, sizeof out->stride);
    return CP_OK;
}

enum cp_code cp_tensor_view_lse(const char *name, const struct cp_tensor *tensor,
                                struct cp_view *out)
{
    if (tensor->ndim != CP_AXES - 1) {
        return fail_ndim(name, tensor, "3: (batch, sequence, heads)");
    }
    *out = plain_view(tensor);
    memcpy(out->n, tensor->shape, sizeof tensor->shape[0] * (CP_AXES - 1));
    memcpy(out->stride, tensor->stride, sizeof tensor->stride[0] * (CP_AXES - 1));
    return CP_OK;
}

/* Which axes of (batch, heads, rows, keys) a mask of so many dimensions has. */
static const int mask_axes[CP_AXES + 1][CP_AXES] = {
    [1] = {3},
    [2] = {0, 3},
    [3] = {0, 2, 3},
    [4] = {0, 1, 2, 3},
};

enum cp_code cp_tensor_view_mask(const struct cp_tensor *mask, int64_t batch,
                                 int64_t heads, struct cp_view *out)
{
    char shape[160];
    if (mask->ndim < 1 || mask->ndim > CP_AXES) {
        return fail_ndim(
            "attn_mask", mask,
            "1 to 4: (keys), (batch, keys), (batch, rows, keys) or (batch, heads, "
            "rows, keys)");
    }
    struct cp_view view = plain_view(mask);
    for (int axis = 0; axis < mask->ndim; axis++) {
        view.n[mask_axes[mask->ndim][axis]] = mask->shape[axis];
        view.stride[mask_axes[mask->ndim][axis]] = mask->stride[axis];
    }
    if (view.n[0] != 1 && view.n[0] != batch) {
        return cp_fail(CP_ERR_VALUE,
                       "attn_mask has shape %s: its batch axis is %" PRId64
                       ", allowed: %" PRId64 " or 1%s",
                       cp_tensor_print_shape(mask, shape, sizeof shape), view.n[0],
                       batch,
                       mask->ndim == 2 ? " (two dimensions are batch and keys)" : "");
    }
    if (view.n[1] != 1 && view.n[1] != heads) {
        return cp_fail(CP_ERR_VALUE,
                       "attn_mask has shape %s: its head axis is %" PRId64
                       ", allowed: %" PRId64 " or 1",
                       cp_tensor_print_shape(mask, shape, sizeof shape), view.n[1],
                       heads);
    }
    *out = view;
    return CP_OK;
}

/* Axes first .. last - 1 as one axis; false where their strides do not continue each other. */
static bool merge(const struct cp_tensor *tensor, int first, int last, int64_t *n,
                  int64_t *stride)
{
    int64_t next = 0; /* the stride with which an axis further out continues this one */
    bool is_begun = false;
    *n = 1;
    *stride = cp_dtype_bytes(tensor->dtype);
    for (int axis = last - 1; axis >= first; axis--) {
        int64_t length = tensor->shape[axis];
        if (length == 1) {
            continue;
        }
        if (!is_begun) {
            *stride = tensor->stride[axis];
            is_begun = true;
        } else if (tensor->stride[axis] != next) {
            return false;
        }
        *n *= length;
        if (!cp_mul_i64(tensor->stride[axis], length > 0 ? length : 1, &next)) {
            return false;
        }
    }
    return true;
}

bool cp_tensor_view_cut(const struct cp_tensor *tensor, int dim, struct cp_view *out)
{
    struct cp_view view = plain_view(tensor);
    if (!merge(tensor, 0, dim, &view.n[0], &view.stride[0]) ||
        !merge(tensor, dim + 1, tensor->ndim, &view.n[3], &view.stride[3])) {
        return false;
    }
    view.n[1] = tensor->shape[dim];
    view.stride[1] = tensor->stride[dim];
    *out = view;
    return true;
}

struct cp_tensor cp_tensor_narrow(const struct cp_tensor *tensor, int dim,
                                  int64_t first, int64_t count)
{
    struct cp_tensor part = *tensor;
    part.shape[dim] = count;
    if (count > 0 && has_elements(tensor)) {
        part.data += first * tensor->stride[dim];
    }
    return part;
}

/* Copies the axes from `axis` on; the innermost ones as one run of bytes where both sides allow it. */
static void copy_axes(const struct cp_tensor *dst, const struct cp_tensor *src,
                      int axis, int run_axis, size_t run_bytes, char *to,
                      const char *from)
{
    if (axis == run_axis) {
        memcpy(to, from, run_bytes);
        return;
    }
    for (int64_t i = 0; i < dst->shape[axis]; i++) {
        copy_axes(dst, src, axis + 1, run_axis, run_bytes, to + i * dst->stride[axis],
                  from + i * src->stride[axis]);
    }
}

void cp_tensor_copy(const struct cp_tensor *dst, const struct cp_tensor *src)
{
    if (!has_elements(dst)) {
        return;
    }
    int run_axis = dst->ndim;
    int64_t run = cp_dtype_bytes(dst->dtype);
    while (run_axis > 0 &&
           (dst->shape[run_axis - 1] == 1 ||
            (dst->stride[run_axis - 1] == run && src->stride[run_axis - 1] == run))) {
        run_axis--;
        run *= dst->shape[run_axis];
    }
    copy_axes(dst, src, 0, run_axis, (size_t)run, dst->data, src->data);
}
