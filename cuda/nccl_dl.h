/* The part of NCCL that is used, declared here and opened at run time.
 *
 * NCCL need not be there to build or to import; the copy that the framework has loaded
 * is preferred. Names and values are NCCL's own; nccl_check.c compares them with the
 * official header wherever that is at hand. */
#ifndef CP_CUDA_NCCL_DL_H
#define CP_CUDA_NCCL_DL_H

#include <cuda_runtime.h>
#include <limits.h>
#include <stddef.h>

#include "base/status.h"

typedef struct ncclComm *ncclComm_t;

enum { CP_NCCL_ID_BYTES = 128 };

typedef struct {
    char internal[CP_NCCL_ID_BYTES];
} ncclUniqueId;

typedef enum {
    ncclSuccess = 0,
    ncclUnhandledCudaError = 1,
    ncclSystemError = 2,
    ncclInternalError = 3,
    ncclInvalidArgument = 4,
    ncclInvalidUsage = 5,
    ncclRemoteError = 6,
    ncclInProgress = 7,
} ncclResult_t;

typedef enum {
    ncclInt8 = 0,
    ncclUint8 = 1,
} ncclDataType_t;

enum {
    CP_NCCL_OLDEST = 21800, /* 2.18.0, coded as ncclGetVersion codes it */
    CP_NCCL_UNDEFINED = INT_MIN,
};
#define CP_NCCL_MAGIC 0xcafebeefU

/* As of 2.18. A later NCCL reads as much as `size` says and takes its own defaults for
 * the rest. */
typedef struct {
    size_t size;
    unsigned int magic;
    unsigned int version;
    int blocking;
    int cgaClusterSize;
    int minCTAs;
    int maxCTAs;
    const char *netName;
    int splitShare;
} ncclConfig_t;

/* field of struct cp_nccl, NCCL's name, arguments; all return ncclResult_t. */
#define CP_NCCL_CALLS(X)                                                               \
    X(get_version, ncclGetVersion, (int *version))                                     \
    X(get_unique_id, ncclGetUniqueId, (ncclUniqueId * id))                             \
    X(comm_init_rank_config, ncclCommInitRankConfig,                                   \
      (ncclComm_t * comm, int world, ncclUniqueId id, int rank, ncclConfig_t *config)) \
    X(comm_split, ncclCommSplit,                                                       \
      (ncclComm_t comm, int color, int key, ncclComm_t *child, ncclConfig_t *config))  \
    X(comm_count, ncclCommCount, (ncclComm_t comm, int *count))                        \
    X(comm_user_rank, ncclCommUserRank, (ncclComm_t comm, int *rank))                  \
    X(comm_cu_device, ncclCommCuDevice, (ncclComm_t comm, int *device))                \
    X(comm_finalize, ncclCommFinalize, (ncclComm_t comm))                              \
    X(comm_destroy, ncclCommDestroy, (ncclComm_t comm))                                \
    X(comm_abort, ncclCommAbort, (ncclComm_t comm))                                    \
    X(comm_get_async_error, ncclCommGetAsyncError,                                     \
      (ncclComm_t comm, ncclResult_t * result))                                        \
    X(group_start, ncclGroupStart, (void))                                             \
    X(group_end, ncclGroupEnd, (void))                                                 \
    X(send, ncclSend,                                                                  \
      (const void *data, size_t count, ncclDataType_t type, int peer, ncclComm_t comm, \
       cudaStream_t stream))                                                           \
    X(recv, ncclRecv,                                                                  \
      (void *data, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,       \
       cudaStream_t stream))

/* The same for those that return a text. */
#define CP_NCCL_TEXTS(X)                                                               \
    X(get_error_string, ncclGetErrorString, (ncclResult_t result))                     \
    X(get_last_error, ncclGetLastError, (ncclComm_t comm))

struct cp_nccl {
#define CP_NCCL_CALL_FIELD(field, name, arguments) ncclResult_t(*field) arguments;
#define CP_NCCL_TEXT_FIELD(field, name, arguments) const char *(*field)arguments;
    CP_NCCL_CALLS(CP_NCCL_CALL_FIELD)
    CP_NCCL_TEXTS(CP_NCCL_TEXT_FIELD)
#undef CP_NCCL_CALL_FIELD
#undef CP_NCCL_TEXT_FIELD
};

/* CP_ERR_UNSUPPORTED with what to install where there is no NCCL, or one before 2.18.
 */
CP_NODISCARD enum cp_code cp_nccl_open(const struct cp_nccl **out);

/* Frees the table, accepts NULL and leaves NULL. The library stays: its threads may run
 * on. */
void cp_nccl_close(const struct cp_nccl **nccl);

/* Non-blocking creation and operations. */
ncclConfig_t cp_nccl_config(void);

/* Makes what NCCL returned the calling thread's error: "rank 1: cannot <what>: ...".
 * `comm` may be NULL. */
enum cp_code cp_nccl_fail(const struct cp_nccl *nccl, ncclComm_t comm,
                          ncclResult_t result, int rank, const char *what);

#endif
