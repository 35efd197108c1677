/* One batch: copies for the own rank, one group for the others. */
#include "nccl_post.h"

#include "cuda_check.h"

static bool is_own(const struct cp_xfer *xfer, int rank, bool is_send)
{
    return xfer->peer == rank && xfer->is_send == is_send && xfer->bytes > 0;
}

/* The first one at or behind `from`; `count`: there is none. */
static int next_own(const struct cp_xfer *xfers, int count, int rank, bool is_send,
                    int from)
{
    while (from < count && !is_own(&xfers[from], rank, is_send)) {
        from += 1;
    }
    return from;
}

/* Sends and receives of the own rank meet in order. */
static enum cp_code check_own(const struct cp_xfer *xfers, int count, int rank)
{
    int send = next_own(xfers, count, rank, true, 0);
    int receive = next_own(xfers, count, rank, false, 0);
    while (send < count && receive < count) {
        if (xfers[send].bytes != xfers[receive].bytes) {
            return cp_fail_rank(CP_ERR_INTERNAL, rank,
                                "rank %d sends %zu bytes to itself and expects %zu",
                                rank, xfers[send].bytes, xfers[receive].bytes);
        }
        send = next_own(xfers, count, rank, true, send + 1);
        receive = next_own(xfers, count, rank, false, receive + 1);
    }
    return send == receive
               ? CP_OK
               : cp_fail_rank(CP_ERR_INTERNAL, rank,
                              "rank %d posts half of a message to itself", rank);
}

enum cp_code cp_nccl_parts_of(const struct cp_xfer *xfers, int count, int rank,
                              int world, struct cp_nccl_parts *out)
{
    struct cp_nccl_parts parts = {false, false};
    for (int i = 0; i < count; i++) {
        if (xfers[i].peer < 0 || xfers[i].peer >= world) {
            return cp_fail_rank(CP_ERR_INTERNAL, rank, "rank %d posts to rank %d of %d",
                                rank, xfers[i].peer, world);
        }
        bool has_bytes = xfers[i].bytes > 0;
        parts.has_own = parts.has_own || (has_bytes && xfers[i].peer == rank);
        parts.has_others = parts.has_others || (has_bytes && xfers[i].peer != rank);
    }
    CP_TRY(check_own(xfers, count, rank));
    *out = parts;
    return CP_OK;
}

enum cp_code cp_nccl_copy_own(const struct cp_xfer *xfers, int count, int rank,
                              cudaStream_t stream)
{
    int receive = 0;
    for (int send = next_own(xfers, count, rank, true, 0); send < count;
         send = next_own(xfers, count, rank, true, send + 1)) {
        receive = next_own(xfers, count, rank, false, receive);
        CP_TRY(cp_cuda_check(cudaMemcpyAsync(xfers[receive].data, xfers[send].data,
                                             xfers[send].bytes,
                                             cudaMemcpyDeviceToDevice, stream),
                             "cudaMemcpyAsync to the own rank"));
        receive += 1;
    }
    return CP_OK;
}

ncclResult_t cp_nccl_group(const struct cp_nccl *nccl, ncclComm_t comm,
                           const struct cp_xfer *xfers, int count, int rank,
                           cudaStream_t stream)
{
    ncclResult_t result = nccl->group_start();
    if (result != ncclSuccess) {
        return result;
    }
    for (int i = 0; i < count && result == ncclSuccess; i++) {
        const struct cp_xfer *xfer = &xfers[i];
        if (xfer->bytes == 0 || xfer->peer == rank) {
            continue;
        }
        result = xfer->is_send ? nccl->send(xfer->data, xfer->bytes, ncclUint8,
                                            xfer->peer, comm, stream)
                               : nccl->recv(xfer->data, xfer->bytes, ncclUint8,
                                            xfer->peer, comm, stream);
        result = result == ncclInProgress ? ncclSuccess : result;
    }
    /* A group is the thread's: it has to end even where a part of it failed. */
    ncclResult_t ended = nccl->group_end();
    return result == ncclSuccess ? ended : result;
}
