/* Boxes of one tensor by their axes, others by the bytes of their buffers: places in an
 * arena are given away again. */
#include "schedule/box_meet.h"

static bool is_callers(const struct cp_buffer *buffer)
{
    return buffer->kind == CP_BUFFER_INPUT || buffer->kind == CP_BUFFER_OUTPUT;
}

/* Several numbers may stand for one tensor of the caller. */
static bool is_same_tensor(const struct cp_schedule *schedule, int32_t a, int32_t b)
{
    const struct cp_buffer *x = &schedule->buffers[a], *y = &schedule->buffers[b];
    return a == b || (is_callers(x) && is_callers(y) && x->role == y->role);
}

static bool share_places(const struct cp_box *a, const struct cp_box *b)
{
    bool is_shared = true;
    for (int axis = 0; axis < CP_AXES; axis++) {
        is_shared = is_shared && a->n[axis] > 0 && b->n[axis] > 0 &&
                    a->first[axis] < b->first[axis] + b->n[axis] &&
                    b->first[axis] < a->first[axis] + a->n[axis];
    }
    return is_shared;
}

static bool share_bytes(const struct cp_buffer *a, const struct cp_buffer *b)
{
    return a->kind == b->kind && a->owner == b->owner && !is_callers(a) &&
           a->offset_bytes < b->offset_bytes + b->bytes &&
           b->offset_bytes < a->offset_bytes + a->bytes;
}

bool cp_box_meets(const struct cp_schedule *schedule, const struct cp_box *a,
                  const struct cp_box *b)
{
    if (a->buffer == CP_NO_BUFFER || b->buffer == CP_NO_BUFFER) {
        return false;
    }
    return is_same_tensor(schedule, a->buffer, b->buffer)
               ? share_places(a, b)
               : share_bytes(&schedule->buffers[a->buffer],
                             &schedule->buffers[b->buffer]);
}

bool cp_copies_are_free(const struct cp_schedule *schedule, const struct cp_step *a,
                        const struct cp_step *b)
{
    return !cp_box_meets(schedule, &a->arg[CP_ARG_DST], &b->arg[CP_ARG_DST]) &&
           !cp_box_meets(schedule, &a->arg[CP_ARG_DST], &b->arg[CP_ARG_SRC]) &&
           !cp_box_meets(schedule, &a->arg[CP_ARG_SRC], &b->arg[CP_ARG_DST]);
}
