/* Where a context's calls are computed: the host, or an accelerator's device. */
#ifndef CP_EXEC_SIDE_H
#define CP_EXEC_SIDE_H

#include "base/pool.h"
#include "exec/accelerator.h"

/* Memory for what happens within a call. */
struct cp_workspace {
    void *data; /* owned, by the device or by `loan` */
    void *loan; /* owned; given back by `give_back`; NULL: none */
    void (*give_back)(void *loan);
    size_t bytes;
};

struct cp_side {
    struct cp_comm *comm; /* owned; NULL: the ranks are not connected there yet */
    struct cp_device *device;
    struct cp_kernel_list kernels;
    int threads;             /* that a call may use, the caller's with them; 0: one */
    struct cp_pool *pool;    /* owned; NULL: the caller's alone, or no call yet */
    struct cp_lender lender; /* of the next workspace; all zero: the device itself */
    const struct cp_package *package; /* of the call under way, or NULL; borrowed */
    int ordinal;                      /* the device's, for the lender */
    int generation;                   /* of the device; 0: the host */
    struct cp_workspace workspace;    /* private; of all calls but those captured */
    size_t window_bytes;              /* what others may read */

    /* Of the call under way. */
    struct cp_stream *stream;
    uint64_t capture; /* that it is part of (device/device.h); 0: of none */
    struct cp_workspace captured;
    bool may_be_forked; /* the lanes may still be part of a capture */
};

/* Has it no streams? An accelerator that is not connected yet has. */
static inline bool cp_side_is_host(const struct cp_side *side)
{
    return side->device != NULL && !cp_device_is_async(side->device);
}

/* Finds out whether a call on that stream is captured. CP_ERR_RUNTIME where the side's
 * own streams are part of another capture. */
CP_NODISCARD enum cp_code cp_side_look(struct cp_side *side,
                                       const struct cp_accelerator *accelerator,
                                       struct cp_stream *stream);

/* Room for the call under way. A workspace that grows is waited for, since the call before
 * may still be on it, for so many seconds. What fails leaves what there was. */
CP_NODISCARD enum cp_code cp_side_reserve(struct cp_side *side, size_t workspace_bytes,
                                          size_t window_bytes, double timeout);

/* The call under way, which is captured, is over: all that it does has been enqueued. */
void cp_side_end_captured(struct cp_side *side);

/* Closes the communicator, then frees the workspace; the device stays. `timeout`: seconds
 * that a wait may take at most. A workspace that the device is not through with by then is
 * left to it, until the end of the process. */
void cp_side_close(struct cp_side *side, double timeout);

/* The device becomes the thread's current one, and the one from before again. `code`: of
 * what was done in between, which goes before. */
CP_NODISCARD enum cp_code cp_side_enter(struct cp_side *side, int *before);
CP_NODISCARD enum cp_code cp_side_leave(struct cp_side *side, int before,
                                        enum cp_code code);

#endif
