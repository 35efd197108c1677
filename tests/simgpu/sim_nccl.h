/* A stand-in for NCCL over the simulated streams: the entries that cuda/nccl_dl.h
 * declares, with NCCL's signatures, made harsh.
 *
 *  - A rank executes the groups of a communicator one at a time in the order posted, on
 *    whatever streams they are; being next gives no order of memory between two streams.
 *  - A device executes the groups of different communicators one at a time too, in the
 *    order in which it was given them, over all streams: a group keeps the device while
 *    it waits for its peers. Two ranks that give their devices the groups of two
 *    communicators in opposite orders wait for each other. simnccl_set_order has others.
 *  - The n-th send from a to b meets the n-th receive of b from a. Nothing moves before
 *    both ranks execute the groups that have them. The receiver's memory is filled with
 *    garbage when its group begins, the sender's is read as late as possible; a send ends
 *    once it has been read.
 *  - A non-blocking communicator is made when all ranks have come and some time has
 *    passed; ncclCommGetAsyncError tells. After half of its groups ncclGroupEnd returns
 *    ncclInProgress: the group is given to the stream by a later ncclCommGetAsyncError,
 *    as NCCL's own thread would, and until then every other call is refused.
 *  - ncclCommSplit makes a communicator of all ranks of another, which it then has nothing
 *    to do with. A blocking parent's waits for all ranks, for ever if they do not come; a
 *    non-blocking one's is made once the parent's ncclCommGetAsyncError says so, and until
 *    then there is no handle. An abort of the parent ends either.
 *  - ncclCommAbort ends what is being moved and may come from any thread, as may
 *    ncclCommGetAsyncError; ncclCommDestroy waits for all groups. The handle is dead
 *    after either.
 *  - A group that is posted on a stream which is being captured becomes a node. Each launch
 *    of the graph posts it anew, in the order of the launches. Finalizing, destroying and
 *    aborting wait until all graphs that have groups of the communicator are gone.
 *  - Two ranks on one device: ncclInvalidUsage for all.
 *
 * Violations (simgpu.h): sizes that differ, a group left open by a thread that ends or
 * waits for the device, a split with groups outstanding on the parent, one communicator used by two threads at once, a dead handle
 * used, memory that is not the device's, and ranks that wait for each other in a circle,
 * over one communicator or several, with what each waits for; all ranks' async error is
 * then ncclInternalError. A rank that never posts is no violation: its peers wait until
 * they abort. */
#ifndef SIM_NCCL_H
#define SIM_NCCL_H

#include "../../cuda/nccl_dl.h"

#ifdef __cplusplus
extern "C" {
#endif

#define SIM_NCCL_CALL(field, name, arguments) ncclResult_t name arguments;
#define SIM_NCCL_TEXT(field, name, arguments) const char *name arguments;
CP_NCCL_CALLS(SIM_NCCL_CALL)
CP_NCCL_TEXTS(SIM_NCCL_TEXT)
#undef SIM_NCCL_CALL
#undef SIM_NCCL_TEXT
ncclResult_t ncclCommInitRank(ncclComm_t *comm, int world, ncclUniqueId id, int rank);

/* All of them as cuda/ takes them. */
const struct cp_nccl *simnccl_table(void);

/* How the groups of several communicators share a device; that at first, and after
 * simgpu_reset. Set while no group is under way. */
enum simnccl_order {
    SIMNCCL_AS_GIVEN, /* what NCCL_LAUNCH_ORDER_IMPLICIT=1 promises */
    SIMNCCL_AS_READY, /* without it: one at a time, the first that its stream comes to */
    SIMNCCL_TOGETHER, /* the same where the device has room for all of them; circles
                         through the order of streams are not found then */
};
void simnccl_set_order(enum simnccl_order order);

/* How many communicators ranks have got by ncclCommSplit since the start or simgpu_reset. */
int simnccl_splits(void);
/* What the last of these was asked for: cgaClusterSize, minCTAs, maxCTAs. */
void simnccl_split_settings(int settings[3]);

/* What simnccl_version says: 2.32.3 at first. */
void simnccl_set_version(int version);
/* The group after `count` more that begins moves nothing: its communicator's async error
 * becomes ncclRemoteError, and it hangs until ncclCommAbort. Negative: none. */
void simnccl_fail_after(int64_t count);
/* The call after `count` more returns this and does nothing, once; creation, groups,
 * sends and receives count. Negative: none. */
void simnccl_fail_call_after(int64_t count, ncclResult_t result);

#ifdef __cplusplus
}
#endif

#endif
