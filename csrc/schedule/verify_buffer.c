/* Shapes, strides and places of buffers. */
#include "schedule/verify_buffer.h"

#include <string.h>

#include "base/checked.h"

static const int64_t *sizes_of(const struct cp_plan *plan, int rank)
{
    return plan->signature.sizes + (ptrdiff_t)rank * CP_SIZE_COUNT;
}

static void set_shape(int64_t n[CP_AXES], int64_t n0, int64_t n1, int64_t n2,
                      int64_t n3)
{
    n[0] = n0;
    n[1] = n1;
    n[2] = n2;
    n[3] = n3;
}

/* Tensors of a gather, or of the reduce_scatter that is its gradient. */
static bool cut_tensor(const struct cp_plan *plan, int rank, enum cp_buffer_kind kind,
                       enum cp_tensor_role role, int64_t n[CP_AXES])
{
    const struct cp_range *last = &plan->cut[plan->world - 1];
    bool is_whole = role == CP_TENSOR_WHOLE;
    bool is_input = is_whole == (plan->signature.call.op == CP_OP_REDUCE_SCATTER);
    set_shape(n, plan->outer,
              is_whole ? last->first + last->count : plan->cut[rank].count, 1,
              plan->inner);
    return (is_whole || role == CP_TENSOR_SHARE) &&
           is_input == (kind == CP_BUFFER_INPUT);
}

/* Is `role` the caller's in an attention call? */
static bool has_role(const struct cp_call *call, bool is_input,
                     enum cp_tensor_role role)
{
    bool is_backward = call->op == CP_OP_ATTENTION_BACKWARD;
    switch (role) {
    case CP_TENSOR_Q:
    case CP_TENSOR_K:
    case CP_TENSOR_V:
        return is_input;
    case CP_TENSOR_MASK:
        return is_input && call->mask_kind != CP_MASK_NONE;
    case CP_TENSOR_OUT:
        return is_input == is_backward;
    case CP_TENSOR_LSE:
        return is_input == is_backward && (is_backward || call->want_lse != 0);
    case CP_TENSOR_DOUT:
        return is_input && is_backward;
    case CP_TENSOR_DLSE:
        return is_input && is_backward && call->want_lse != 0;
    case CP_TENSOR_DQ:
    case CP_TENSOR_DK:
    case CP_TENSOR_DV:
        return !is_input && is_backward;
    case CP_TENSOR_DELTA:
    case CP_TENSOR_WHOLE:
    case CP_TENSOR_SHARE:
    case CP_TENSORS:
        break;
    }
    return false;
}

static void attention_shape(const struct cp_plan *plan, int rank,
                            enum cp_tensor_role role, int64_t n[CP_AXES])
{
    const struct cp_call *call = &plan->signature.call;
    const int64_t *sizes = sizes_of(plan, rank);
    bool is_value = role == CP_TENSOR_V || role == CP_TENSOR_OUT ||
                    role == CP_TENSOR_DOUT || role == CP_TENSOR_DV;
    bool is_kv = role == CP_TENSOR_K || role == CP_TENSOR_V || role == CP_TENSOR_DK ||
                 role == CP_TENSOR_DV;
    bool is_scalar = role == CP_TENSOR_LSE || role == CP_TENSOR_DLSE;
    if (role == CP_TENSOR_MASK) {
        set_shape(n, call->mask_batch, call->mask_heads, sizes[CP_SIZE_MASK_ROWS],
                  sizes[CP_SIZE_MASK_KEYS]);
        return;
    }
    set_shape(n, call->batch,
              is_kv ? plan->kv_rows[rank].count : plan->q_rows[rank].count,
              is_kv ? call->kv_heads : call->heads,
              is_scalar  ? 1
              : is_value ? call->value_dim
                         : call->head_dim);
}

bool cp_verify_tensor(const struct cp_plan *plan, int rank, enum cp_buffer_kind kind,
                      enum cp_tensor_role role, int64_t n[CP_AXES],
                      enum cp_dtype *dtype)
{
    const struct cp_call *call = &plan->signature.call;
    *dtype = (enum cp_dtype)call->dtype;
    if (call->op == CP_OP_GATHER || call->op == CP_OP_REDUCE_SCATTER) {
        return cut_tensor(plan, rank, kind, role, n);
    }
    if ((call->op != CP_OP_ATTENTION && call->op != CP_OP_ATTENTION_BACKWARD) ||
        !has_role(call, kind == CP_BUFFER_INPUT, role)) {
        return false;
    }
    attention_shape(plan, rank, role, n);
    if (role == CP_TENSOR_MASK) {
        *dtype = (enum cp_dtype)call->mask_dtype;
    } else if (role == CP_TENSOR_LSE || role == CP_TENSOR_DLSE) {
        *dtype = cp_dtype_sum(*dtype);
    }
    return true;
}

static bool is_tensor(const struct cp_buffer *buffer)
{
    return buffer->kind == CP_BUFFER_INPUT || buffer->kind == CP_BUFFER_OUTPUT;
}

struct cp_shape cp_verify_shape(const struct cp_plan *plan,
                                const struct cp_buffer *buffer)
{
    struct cp_shape shape = {.buffer = *buffer};
    struct cp_buffer *of = &shape.buffer;
    const struct cp_panel *panel =
        cp_schedule_panel(plan, (enum cp_layout)buffer->layout);
    shape.unit_bytes = panel != NULL ? cp_panel_bytes(panel, buffer->n[1])
                                     : cp_dtype_bytes((enum cp_dtype)buffer->dtype);
    if (panel != NULL) {
        of->stride_bytes[1] = 0;
        of->stride_bytes[3] = 0;
    }
    if (is_tensor(buffer)) {
        int64_t step = shape.unit_bytes;
        for (int axis = CP_AXES - 1; axis >= 0; axis--) {
            of->stride_bytes[axis] = step;
            step *= of->n[axis];
        }
        of->offset_bytes = 0;
        of->bytes = step;
    }
    return shape;
}

bool cp_verify_same_shape(const struct cp_buffer *a, const struct cp_buffer *b)
{
    return a->offset_bytes == b->offset_bytes && a->layout == b->layout &&
           a->dtype == b->dtype &&
           (a->role == CP_TENSOR_MASK) == (b->role == CP_TENSOR_MASK) &&
           memcmp(a->n, b->n, sizeof a->n) == 0 &&
           memcmp(a->stride_bytes, b->stride_bytes, sizeof a->stride_bytes) == 0;
}

bool cp_verify_box_is_empty(const struct cp_box *box)
{
    return box->n[0] == 0 || box->n[1] == 0 || box->n[2] == 0 || box->n[3] == 0;
}

struct cp_extent cp_verify_extent(const struct cp_shape *shape,
                                  const struct cp_box *box)
{
    struct cp_extent extent = {shape->buffer.offset_bytes, 0};
    int64_t length = shape->unit_bytes;
    for (int axis = 0; axis < CP_AXES; axis++) {
        extent.lo += box->first[axis] * shape->buffer.stride_bytes[axis];
        length += (box->n[axis] - 1) * shape->buffer.stride_bytes[axis];
    }
    extent.hi = extent.lo + length;
    return extent;
}

int64_t cp_verify_box_bytes(const struct cp_shape *shape, const struct cp_box *box)
{
    bool is_plain = shape->buffer.layout == CP_LAYOUT_PLAIN;
    int64_t units = is_plain ? box->n[1] * box->n[3] : 1;
    return cp_verify_box_is_empty(box)
               ? 0
               : units * box->n[0] * box->n[2] * shape->unit_bytes;
}

/* No two elements on one byte: every axis steps over all that the finer ones take. The bytes
 * of the whole go to `out`; -1 where two meet or a number overflows. */
static int64_t separate_bytes(const struct cp_shape *shape)
{
    const struct cp_buffer *buffer = &shape->buffer;
    bool is_done[CP_AXES] = {false};
    int64_t taken = shape->unit_bytes;
    for (int pass = 0; pass < CP_AXES; pass++) {
        int finest = -1;
        for (int axis = 0; axis < CP_AXES; axis++) {
            bool is_inside =
                buffer->layout != CP_LAYOUT_PLAIN && (axis == 1 || axis == 3);
            if (is_done[axis] || is_inside || buffer->n[axis] < 2) {
                continue;
            }
            if (finest < 0 ||
                buffer->stride_bytes[axis] < buffer->stride_bytes[finest]) {
                finest = axis;
            }
        }
        if (finest < 0) {
            break;
        }
        int64_t reach = 0;
        is_done[finest] = true;
        if (buffer->stride_bytes[finest] < taken ||
            !cp_mul_i64(buffer->stride_bytes[finest], buffer->n[finest] - 1, &reach) ||
            !cp_add_i64(reach, taken, &taken)) {
            return -1;
        }
    }
    return taken;
}

static enum cp_code fail_buffer(const struct cp_verify_at *at, int32_t number,
                                const char *what)
{
    return cp_verify_fail(at, "buffer %d %s", (int)number, what);
}

static enum cp_code check_tensor(const struct cp_verify_at *at, int32_t number,
                                 const struct cp_plan *plan,
                                 const struct cp_buffer *buffer)
{
    int64_t n[CP_AXES] = {0};
    enum cp_dtype dtype = CP_DTYPE_NONE;
    if (buffer->owner != at->rank) {
        return fail_buffer(at, number, "is a tensor of another rank's caller");
    }
    if (!cp_verify_tensor(plan, at->rank, (enum cp_buffer_kind)buffer->kind,
                          (enum cp_tensor_role)buffer->role, n, &dtype)) {
        return fail_buffer(at, number, "is a tensor that the call does not have");
    }
    if (memcmp(n, buffer->n, sizeof n) != 0 || dtype != (enum cp_dtype)buffer->dtype ||
        buffer->layout != CP_LAYOUT_PLAIN) {
        return fail_buffer(at, number,
                           "has not the shape or type of the caller's tensor");
    }
    return CP_OK;
}

/* Window and scratch: inside the arena of `room` bytes, on whole elements or panels. */
static enum cp_code check_place(const struct cp_verify_at *at, int32_t number,
                                const struct cp_plan *plan,
                                const struct cp_buffer *buffer, int64_t room)
{
    struct cp_shape shape = cp_verify_shape(plan, buffer);
    int64_t end = 0;
    int64_t unit =
        buffer->layout == CP_LAYOUT_PLAIN ? shape.unit_bytes : CP_PANEL_ALIGN;
    bool is_aligned = buffer->offset_bytes % unit == 0;
    struct cp_box all = {.n = {buffer->n[0], buffer->n[1], buffer->n[2], buffer->n[3]}};
    if (buffer->offset_bytes < 0 || buffer->bytes < 0 ||
        !cp_add_i64(buffer->offset_bytes, buffer->bytes, &end) || end > room) {
        return cp_verify_fail(at, "buffer %d ends at byte %lld of %lld", (int)number,
                              (long long)end, (long long)room);
    }
    if (cp_verify_box_is_empty(&all)) {
        return CP_OK;
    }
    int64_t taken = separate_bytes(&shape);
    for (int axis = 0; axis < CP_AXES; axis++) {
        is_aligned = is_aligned && shape.buffer.stride_bytes[axis] % unit == 0;
    }
    if (!is_aligned) {
        return fail_buffer(at, number, "does not start at whole elements or panels");
    }
    if (taken < 0) {
        return fail_buffer(at, number, "has two elements in one place");
    }
    if (taken > buffer->bytes) {
        return cp_verify_fail(at, "buffer %d takes %lld bytes and has %lld",
                              (int)number, (long long)taken, (long long)buffer->bytes);
    }
    return CP_OK;
}

/* What a rank reads in a peer's window must be a buffer of that peer. */
static enum cp_code check_peer(const struct cp_verify_at *at, int32_t number,
                               const struct cp_buffer *buffer,
                               const struct cp_schedule *owner)
{
    for (int32_t i = 0; i < owner->buffer_count; i++) {
        const struct cp_buffer *theirs = &owner->buffers[i];
        if (theirs->kind == CP_BUFFER_WINDOW && theirs->owner == buffer->owner &&
            cp_verify_same_shape(theirs, buffer)) {
            return CP_OK;
        }
    }
    return cp_verify_fail(at, "buffer %d is no buffer in the window of rank %d",
                          (int)number, (int)buffer->owner);
}

/* Can the elements be counted, and the bytes of what they lie in? A call without a kernel has no
 * panels. */
static bool has_sizes(const struct cp_plan *plan, const struct cp_buffer *buffer)
{
    const int64_t *n = buffer->n;
    const struct cp_panel *panel =
        cp_schedule_panel(plan, (enum cp_layout)buffer->layout);
    int64_t count = 1;
    int64_t bytes = 0;
    for (int axis = 0; axis < CP_AXES; axis++) {
        if (n[axis] < 0 || !cp_mul_i64(count, n[axis] > 1 ? n[axis] : 1, &count)) {
            return false;
        }
    }
    if (panel == NULL) {
        return cp_mul_i64(count, cp_dtype_bytes((enum cp_dtype)buffer->dtype), &bytes);
    }
    if (panel->row_align < 1 || !cp_add_i64(n[1], panel->row_align, &bytes) ||
        !cp_mul_i64(bytes, panel->row_bytes, &bytes) ||
        !cp_add_i64(bytes, CP_PANEL_ALIGN, &bytes)) {
        return false;
    }
    bytes = cp_panel_bytes(panel, n[1]);
    return cp_mul_i64(bytes, n[0], &bytes) && cp_mul_i64(bytes, n[2], &bytes);
}

static enum cp_code check_buffer(const struct cp_schedule *const *of_call,
                                 const struct cp_verify_at *at, int32_t number)
{
    const struct cp_schedule *schedule = of_call[at->rank];
    const struct cp_buffer *buffer = &schedule->buffers[number];
    if (!has_sizes(schedule->plan, buffer) || buffer->kind > CP_BUFFER_SCRATCH ||
        buffer->layout > CP_LAYOUT_STATE || buffer->role >= CP_TENSORS ||
        cp_dtype_bytes((enum cp_dtype)buffer->dtype) == 0 || buffer->owner < 0 ||
        buffer->owner >= schedule->plan->world) {
        return fail_buffer(at, number, "has a field that means nothing");
    }
    switch ((enum cp_buffer_kind)buffer->kind) {
    case CP_BUFFER_INPUT:
    case CP_BUFFER_OUTPUT:
        return check_tensor(at, number, schedule->plan, buffer);
    case CP_BUFFER_WINDOW:
        CP_TRY(check_place(at, number, schedule->plan, buffer,
                           of_call[buffer->owner]->window_bytes));
        return check_peer(at, number, buffer, of_call[buffer->owner]);
    case CP_BUFFER_SCRATCH:
        if (buffer->owner != at->rank) {
            return fail_buffer(at, number, "is in another rank's workspace");
        }
        return check_place(at, number, schedule->plan, buffer, schedule->scratch_bytes);
    }
    return CP_OK;
}

enum cp_code cp_verify_buffers(const struct cp_schedule *const *of_call, int call,
                               int rank)
{
    struct cp_verify_at at = {.call = call, .rank = rank, .step = -1};
    for (int32_t number = 0; number < of_call[rank]->buffer_count; number++) {
        CP_TRY(check_buffer(of_call, &at, number));
    }
    return CP_OK;
}
