/* Compares the declarations of nccl_dl.h with the official header, wherever that is on
 * the include path; elsewhere it checks nothing. Our declarations get other names here,
 * since both headers use NCCL's. */
#define ncclComm_t ours_comm
#define ncclUniqueId ours_unique_id
#define ncclResult_t ours_result
#define ncclSuccess ours_success
#define ncclUnhandledCudaError ours_unhandled_cuda_error
#define ncclSystemError ours_system_error
#define ncclInternalError ours_internal_error
#define ncclInvalidArgument ours_invalid_argument
#define ncclInvalidUsage ours_invalid_usage
#define ncclRemoteError ours_remote_error
#define ncclInProgress ours_in_progress
#define ncclDataType_t ours_data_type
#define ncclInt8 ours_int8
#define ncclUint8 ours_uint8
#define ncclConfig_t ours_config
#include "nccl_dl.h"
#undef ncclComm_t
#undef ncclUniqueId
#undef ncclResult_t
#undef ncclSuccess
#undef ncclUnhandledCudaError
#undef ncclSystemError
#undef ncclInternalError
#undef ncclInvalidArgument
#undef ncclInvalidUsage
#undef ncclRemoteError
#undef ncclInProgress
#undef ncclDataType_t
#undef ncclInt8
#undef ncclUint8
#undef ncclConfig_t

#if __has_include(<nccl.h>)
#include <nccl.h>

#define SAME_VALUE(ours, theirs)                                                       \
    _Static_assert((int)(ours) == (int)(theirs), #ours " is " #theirs)
SAME_VALUE(ours_success, ncclSuccess);
SAME_VALUE(ours_unhandled_cuda_error, ncclUnhandledCudaError);
SAME_VALUE(ours_system_error, ncclSystemError);
SAME_VALUE(ours_internal_error, ncclInternalError);
SAME_VALUE(ours_invalid_argument, ncclInvalidArgument);
SAME_VALUE(ours_invalid_usage, ncclInvalidUsage);
SAME_VALUE(ours_remote_error, ncclRemoteError);
SAME_VALUE(ours_in_progress, ncclInProgress);
SAME_VALUE(ours_int8, ncclInt8);
SAME_VALUE(ours_uint8, ncclUint8);
SAME_VALUE(CP_NCCL_UNDEFINED, NCCL_CONFIG_UNDEF_INT);
SAME_VALUE(CP_NCCL_OLDEST, NCCL_VERSION(2, 18, 0));
SAME_VALUE(CP_NCCL_ID_BYTES, NCCL_UNIQUE_ID_BYTES);
_Static_assert(CP_NCCL_MAGIC == NCCL_API_MAGIC, "the magic number");

#define SAME_SIZE(ours, theirs)                                                        \
    _Static_assert(sizeof(ours) == sizeof(theirs) &&                                   \
                       _Alignof(ours) == _Alignof(theirs),                             \
                   #ours " has the size of " #theirs)
SAME_SIZE(ours_comm, ncclComm_t);
SAME_SIZE(ours_unique_id, ncclUniqueId);
SAME_SIZE(ours_result, ncclResult_t);
SAME_SIZE(ours_data_type, ncclDataType_t);

/* Theirs may have more fields behind ours. */
#define SAME_FIELD(field)                                                              \
    _Static_assert(offsetof(ours_config, field) == offsetof(ncclConfig_t, field) &&    \
                       sizeof(((ours_config *)0)->field) ==                            \
                           sizeof(((ncclConfig_t *)0)->field),                         \
                   "ncclConfig_t." #field)
SAME_FIELD(size);
SAME_FIELD(magic);
SAME_FIELD(version);
SAME_FIELD(blocking);
SAME_FIELD(cgaClusterSize);
SAME_FIELD(minCTAs);
SAME_FIELD(maxCTAs);
SAME_FIELD(netName);
SAME_FIELD(splitShare);
_Static_assert(sizeof(ours_config) <= sizeof(ncclConfig_t), "ours is the older one");

/* The arguments of our table, with their types in the place of ours, make exactly their
 * functions. */
#define SAME_CALL(field, name, arguments)                                              \
    _Static_assert(_Generic(&name, ncclResult_t(*) arguments: 1, default: 0),          \
                   #name " has these arguments");
#define SAME_TEXT(field, name, arguments)                                              \
    _Static_assert(_Generic(&name, const char *(*)arguments: 1, default: 0),           \
                   #name " has these arguments");
CP_NCCL_CALLS(SAME_CALL)
CP_NCCL_TEXTS(SAME_TEXT)
#endif
