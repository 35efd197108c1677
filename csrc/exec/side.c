/* The workspace of a side, its own or lent, and its threads. */
#include "exec/side.h"

static const char workspace_name[] = "the workspace";

/* How long who closes waits for the device. The communicator has been closed by then, and
 * has ended what was under way or given it up; what is left is the end of one call, and
 * more than this it takes only where it has no end. Less would save a moment there, and
 * cost its memory wherever a device is merely slow. */
static const double close_s = 5.0;

/* ---- the workspace ---- */

/* A framework may have another use for the memory at once, and the device waits for all
 * its work before it frees any, however long that takes; so the work of the last call on
 * it has to be over. CP_AGAIN: it is not yet. */
static enum cp_code await_last_call(const struct cp_side *side, double seconds)
{
    struct cp_device *device = side->device;
    return side->workspace.data == NULL
               ? CP_OK
               : device->ops->wait(device, CP_DEVICE_EVENT_CALL,
                                   cp_deadline_in(seconds));
}

static void free_workspace(struct cp_side *side)
{
    struct cp_device *device = side->device;
    struct cp_workspace *workspace = &side->workspace;
    if (workspace->loan != NULL) {
        workspace->give_back(workspace->loan);
    } else if (device != NULL) {
        device->ops->free(device, &workspace->data);
    }
}

static enum cp_code borrow(const struct cp_side *side, size_t bytes,
                           struct cp_workspace *out)
{
    const struct cp_lender *lender = &side->lender;
    out->give_back = lender->give_back;
    return lender->lend(lender, side->ordinal, bytes, workspace_name, &out->data,
                        &out->loan);
}

static enum cp_code grow_workspace(struct cp_side *side, size_t bytes, double timeout)
{
    struct cp_device *device = side->device;
    struct cp_workspace bigger = {.bytes = bytes};
    enum cp_code code = await_last_call(side, timeout);
    if (code == CP_AGAIN) {
        return cp_fail(
            CP_ERR_DEVICE,
            "%s cannot grow to %zu bytes: for %.1f s the device has not come "
            "to the end of the call before",
            workspace_name, bytes, timeout);
    }
    CP_TRY(code);
    CP_TRY(side->lender.serves_contexts
               ? borrow(side, bytes, &bigger)
               : device->ops->alloc(device, bytes, workspace_name, &bigger.data));
    free_workspace(side);
    side->workspace = bigger;
    return CP_OK;
}

/* ---- the workspace of a call that is captured ---- */

/* It is the graph's alone: launches come when they like, so other calls must not share
 * it, and it lives as long as the graph. Like an intermediate result of the caller's
 * program it is taken and given back in the order of the stream. */
static enum cp_code take_captured(struct cp_side *side, size_t bytes)
{
    struct cp_device *device = side->device;
    struct cp_workspace *workspace = &side->captured;
    if (bytes == 0) {
        return CP_OK;
    }
    CP_TRY(side->lender.serves_captures
               ? borrow(side, bytes, workspace)
               : device->ops->alloc_in_order(device, bytes, workspace_name,
                                             side->stream, &workspace->data));
    workspace->bytes = bytes;
    return CP_OK;
}

static void free_captured(struct cp_side *side)
{
    struct cp_device *device = side->device;
    struct cp_workspace *workspace = &side->captured;
    if (workspace->loan != NULL) {
        workspace->give_back(workspace->loan);
    } else if (workspace->data != NULL) {
        device->ops->free_in_order(device, &workspace->data, side->stream);
    }
    *workspace = (struct cp_workspace){.data = NULL};
}

/* ---- calls ---- */

/* Lanes that have been part of a capture are so until it ends. */
static enum cp_code check_lanes(struct cp_side *side)
{
    struct cp_device *device = side->device;
    for (int lane = 0; lane < CP_DEVICE_LANES; lane++) {
        uint64_t capture = 0;
        CP_TRY(device->ops->capture(device, device->ops->lane(device, lane), &capture));
        if (capture != 0 && capture != side->capture) {
            return cp_fail(CP_ERR_RUNTIME,
                           "calls of this context are being captured in a graph on "
                           "another stream; end that capture before this call");
        }
    }
    side->may_be_forked = false;
    return CP_OK;
}

enum cp_code cp_side_look(struct cp_side *side,
                          const struct cp_accelerator *accelerator,
                          struct cp_stream *stream)
{
    struct cp_device *device = side->device;
    side->stream = stream;
    side->capture = 0;
    if (device == NULL) {
        return accelerator->capture(side->ordinal, stream, &side->capture);
    }
    CP_TRY(device->ops->capture(device, stream, &side->capture));
    return side->may_be_forked ? check_lanes(side) : CP_OK;
}

enum cp_code cp_side_reserve(struct cp_side *side, size_t workspace_bytes,
                             size_t window_bytes, double timeout)
{
    if (side->threads > 1 && side->pool == NULL) {
        CP_TRY(cp_pool_create(side->threads, &side->pool));
    }
    if (window_bytes > side->window_bytes) {
        CP_TRY(side->comm->ops->reserve(side->comm, window_bytes));
        side->window_bytes = window_bytes;
    }
    if (side->capture != 0) {
        return take_captured(side, workspace_bytes);
    }
    return workspace_bytes > side->workspace.bytes
               ? grow_workspace(side, workspace_bytes, timeout)
               : CP_OK;
}

void cp_side_end_captured(struct cp_side *side)
{
    free_captured(side);
    side->capture = 0;
}

void cp_side_close(struct cp_side *side, double timeout)
{
    if (side->comm != NULL) {
        side->comm->ops->close(&side->comm);
    }
    if (await_last_call(side, timeout < close_s ? timeout : close_s) != CP_AGAIN) {
        free_workspace(side);
    }
    side->workspace = (struct cp_workspace){.data = NULL};
    cp_pool_destroy(&side->pool);
}

enum cp_code cp_side_enter(struct cp_side *side, int *before)
{
    struct cp_device *device = side->device;
    return device->ops->enter != NULL ? device->ops->enter(device, before) : CP_OK;
}

enum cp_code cp_side_leave(struct cp_side *side, int before, enum cp_code code)
{
    struct cp_device *device = side->device;
    enum cp_code left =
        device->ops->leave != NULL ? device->ops->leave(device, before) : CP_OK;
    return code != CP_OK ? code : left;
}
