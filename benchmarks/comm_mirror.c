/* Batches of a rank that stands before a mirror. */
#include "comm_mirror.h"

#include "tensor/view.h"

static enum cp_code copy(struct cp_device *device, const struct cp_xfer *to,
                         const struct cp_xfer *from, struct cp_stream *stream)
{
    int64_t bytes = (int64_t)to->bytes;
    struct cp_view dst = cp_view_compact(to->data, CP_DTYPE_UINT8, 1, 1, 1, bytes);
    struct cp_view src = cp_view_compact(from->data, CP_DTYPE_UINT8, 1, 1, 1, bytes);
    return cp_device_copy(device, &dst, &src, stream);
}

/* The first half of that kind at or behind `from`; `count`: there is none. */
static int next(const struct cp_xfer *xfers, int count, bool is_send, int from)
{
    while (from < count && xfers[from].is_send != is_send) {
        from += 1;
    }
    return from;
}

static enum cp_code mirror_post(struct cp_comm *comm, const struct cp_xfer *xfers,
                                int count, struct cp_stream *stream, uint64_t *ticket)
{
    struct comm_mirror *self = (struct comm_mirror *)comm;
    int send = next(xfers, count, true, 0), receive = next(xfers, count, false, 0);
    while (send < count && receive < count) {
        if (xfers[send].bytes != xfers[receive].bytes) {
            break;
        }
        CP_TRY(copy(self->device, &xfers[receive], &xfers[send], stream));
        send = next(xfers, count, true, send + 1);
        receive = next(xfers, count, false, receive + 1);
    }
    *ticket = 0;
    return send == count && receive == count
               ? CP_OK
               : cp_fail(CP_ERR_UNSUPPORTED,
                         "a batch that sends other sizes than it receives");
}

static enum cp_code mirror_test(struct cp_comm *comm, uint64_t ticket)
{
    (void)comm;
    (void)ticket;
    return CP_OK; /* in the order of the stream */
}

static enum cp_code mirror_wait(struct cp_comm *comm, const struct cp_comm_wait *waits,
                                int count, const char *operation,
                                struct cp_deadline deadline)
{
    (void)comm;
    (void)waits;
    (void)count;
    (void)deadline;
    return cp_fail(CP_ERR_INTERNAL, "%s waits on the host", operation);
}

static void mirror_poison(struct cp_comm *comm, const struct cp_status *reason)
{
    (void)comm;
    (void)reason;
}

static void mirror_close(struct cp_comm **comm)
{
    *comm = NULL;
}

void comm_mirror_init(struct comm_mirror *self, int world, struct cp_device *device)
{
    static const struct cp_comm_ops ops = {
        .name = "mirror",
        .abi = CP_COMM_ABI,
        .post = mirror_post,
        .test = mirror_test,
        .wait = mirror_wait,
        .poison = mirror_poison,
        .close = mirror_close,
    };
    *self = (struct comm_mirror){.head = {.ops = &ops, .rank = 0, .world = world},
                                 .device = device};
}
