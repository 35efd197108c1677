/* Pairing sends with receives. */
#include "schedule/verify_message.h"

#include <string.h>

/* Do elements follow each other alike in both? Axes of length 1 have no say. */
static bool same_order(const int64_t n[CP_AXES], const struct cp_buffer *a,
                       const struct cp_buffer *b)
{
    bool is_same = true;
    for (int axis = 0; axis < CP_AXES; axis++) {
        is_same =
            is_same && (n[axis] < 2 || a->stride_bytes[axis] == b->stride_bytes[axis]);
    }
    return is_same;
}

static enum cp_code check_pair(const struct cp_message *send,
                               const struct cp_message *receive)
{
    const struct cp_shape *from = &send->arg.content->shape;
    const struct cp_shape *to = &receive->arg.content->shape;
    int64_t sent = cp_verify_box_bytes(from, send->arg.box);
    int64_t received = cp_verify_box_bytes(to, receive->arg.box);
    char place[CP_VERIFY_PLACE_TEXT];
    if (sent != received) {
        return cp_verify_fail(&receive->at, "takes %lld bytes, but %s sends %lld",
                              (long long)received, cp_verify_place(&send->at, place),
                              (long long)sent);
    }
    if (memcmp(send->arg.box->n, receive->arg.box->n, sizeof send->arg.box->n) != 0 ||
        from->buffer.dtype != to->buffer.dtype ||
        from->buffer.layout != to->buffer.layout ||
        !same_order(send->arg.box->n, &from->buffer, &to->buffer)) {
        return cp_verify_fail(&receive->at, "reads the bytes of %s in another shape",
                              cp_verify_place(&send->at, place));
    }
    return CP_OK;
}

enum cp_code cp_channel_post(struct cp_channel *channel, struct cp_message *message,
                             const uint32_t *start)
{
    bool is_send = cp_message_is_send(message);
    const struct cp_message *before = channel->last[is_send];
    struct cp_message *other = channel->waiting;
    char place[CP_VERIFY_PLACE_TEXT];
    if (before != NULL && before->tick > start[before->process]) {
        return cp_verify_fail(&message->at,
                              "nothing orders it and %s, which is between "
                              "the same two ranks",
                              cp_verify_place(&before->at, place));
    }
    channel->last[is_send] = message;
    if (other == NULL || cp_message_is_send(other) == is_send) {
        if (other == NULL) {
            channel->waiting = message;
        } else {
            channel->last_waiting->next_in_queue = message;
        }
        channel->last_waiting = message;
        return CP_OK;
    }
    channel->waiting = other->next_in_queue;
    other->mate = message;
    message->mate = other;
    return is_send ? check_pair(message, other) : check_pair(other, message);
}
