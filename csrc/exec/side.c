/* The workspace of a side, its own or lent, and its threads. */
#include "exec/side.h"

/* A framework may have another use for the memory at once, so the work of the last call on
 * it has to be over. */
static void free_workspace(struct cp_side *side)
{
    struct cp_device *device = side->device;
    if (side->loan != NULL) {
        (void)device->ops->wait(device, CP_DEVICE_EVENT_CALL);
        side->give_back(side->loan);
        side->loan = NULL;
        side->workspace = NULL;
    }
    if (device != NULL) {
        device->ops->free(device, &side->workspace);
    }
    side->workspace_bytes = 0;
}

static enum cp_code grow_workspace(struct cp_side *side, size_t bytes)
{
    static const char what[] = "the workspace";
    struct cp_device *device = side->device;
    const struct cp_lender *lender = &side->lender;
    void *bigger = NULL;
    void *loan = NULL;
    CP_TRY(lender->lend != NULL
               ? lender->lend(lender, side->ordinal, bytes, what, &bigger, &loan)
               : device->ops->alloc(device, bytes, what, &bigger));
    free_workspace(side);
    side->workspace = bigger;
    side->workspace_bytes = bytes;
    side->loan = loan;
    side->give_back = lender->give_back;
    return CP_OK;
}

enum cp_code cp_side_reserve(struct cp_side *side, size_t workspace_bytes,
                             size_t window_bytes)
{
    if (side->threads > 1 && side->pool == NULL) {
        CP_TRY(cp_pool_create(side->threads, &side->pool));
    }
    if (workspace_bytes > side->workspace_bytes) {
        CP_TRY(grow_workspace(side, workspace_bytes));
    }
    if (window_bytes > side->window_bytes) {
        CP_TRY(side->comm->ops->reserve(side->comm, window_bytes));
        side->window_bytes = window_bytes;
    }
    return CP_OK;
}

void cp_side_close(struct cp_side *side)
{
    if (side->comm != NULL) {
        side->comm->ops->close(&side->comm);
    }
    free_workspace(side);
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
