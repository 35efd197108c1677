/* A stand-in for the part of the CUDA runtime that cuda/ uses, run by the host: the same
 * names, the same rules, made harsh. What holds, and what is checked, is in ../simgpu.h;
 * kernels and their launch are in simgpu_kernel.h. */
#ifndef SIMGPU_CUDA_RUNTIME_H
#define SIMGPU_CUDA_RUNTIME_H

#include <stddef.h>

#define CUDART_VERSION 13000
#define CUDART_CB

#ifdef __cplusplus
extern "C" {
#endif

/* The official values. */
#define SIMGPU_ERRORS(X)                                                               \
    X(cudaSuccess, 0, "no error")                                                      \
    X(cudaErrorInvalidValue, 1, "invalid argument")                                    \
    X(cudaErrorMemoryAllocation, 2, "out of memory")                                   \
    X(cudaErrorInitializationError, 3, "initialization error")                         \
    X(cudaErrorInvalidConfiguration, 9, "invalid configuration argument")              \
    X(cudaErrorInvalidMemcpyDirection, 21, "invalid copy direction for memcpy")        \
    X(cudaErrorInsufficientDriver, 35, "CUDA driver version is insufficient")          \
    X(cudaErrorNoDevice, 100, "no CUDA-capable device is detected")                    \
    X(cudaErrorInvalidDevice, 101, "invalid device ordinal")                           \
    X(cudaErrorMapBufferObjectFailed, 205, "mapping of buffer object failed")          \
    X(cudaErrorInvalidResourceHandle, 400, "invalid resource handle")                  \
    X(cudaErrorNotReady, 600, "device not ready")                                      \
    X(cudaErrorIllegalAddress, 700, "an illegal memory access was encountered")        \
    X(cudaErrorPeerAccessAlreadyEnabled, 704, "peer access is already enabled")        \
    X(cudaErrorLaunchFailure, 719, "unspecified launch failure")                       \
    X(cudaErrorNotSupported, 801, "operation not supported")                           \
    X(cudaErrorStreamCaptureUnsupported, 900,                                          \
      "operation not permitted when stream is capturing")                              \
    X(cudaErrorStreamCaptureInvalidated, 901,                                          \
      "operation failed due to a previous error during capture")                       \
    X(cudaErrorStreamCaptureMerge, 902,                                                \
      "operation would result in a merge of separate capture sequences")               \
    X(cudaErrorStreamCaptureUnmatched, 903,                                            \
      "capture was not ended in the same "                                             \
      "stream as it began")                                                            \
    X(cudaErrorStreamCaptureUnjoined, 904, "capturing stream has unjoined work")       \
    X(cudaErrorStreamCaptureIsolation, 905,                                            \
      "dependency created on uncaptured work in another stream")                       \
    X(cudaErrorStreamCaptureImplicit, 906,                                             \
      "operation would make the legacy stream depend on a capturing blocking stream")  \
    X(cudaErrorCapturedEvent, 907,                                                     \
      "operation not permitted on an event last "                                      \
      "recorded in a capturing stream")                                                \
    X(cudaErrorStreamCaptureWrongThread, 908,                                          \
      "attempt to terminate a thread-local "                                           \
      "capture sequence from another thread")                                          \
    X(cudaErrorUnknown, 999, "unknown error")

typedef enum cudaError {
#define SIMGPU_ERROR_ENUM(name, value, text) name = (value),
    SIMGPU_ERRORS(SIMGPU_ERROR_ENUM)
#undef SIMGPU_ERROR_ENUM
} cudaError_t;

typedef struct CUstream_st *cudaStream_t;
typedef struct CUevent_st *cudaEvent_t;
typedef struct CUgraph_st *cudaGraph_t;
typedef struct CUgraphExec_st *cudaGraphExec_t;
typedef struct CUgraphNode_st *cudaGraphNode_t;
typedef struct CUuserObject_st *cudaUserObject_t;
typedef struct cudaGraphEdgeData_st cudaGraphEdgeData;

#define cudaStreamLegacy ((cudaStream_t)0x1)
#define cudaStreamDefault 0x00
#define cudaStreamNonBlocking 0x01
#define cudaEventDefault 0x00
#define cudaEventBlockingSync 0x01
#define cudaEventDisableTiming 0x02
#define cudaEventWaitDefault 0x00
#define cudaHostAllocDefault 0x00
#define cudaHostAllocPortable 0x01
#define cudaHostAllocMapped 0x02
#define cudaIpcMemLazyEnablePeerAccess 0x01

enum cudaMemcpyKind {
    cudaMemcpyHostToHost = 0,
    cudaMemcpyHostToDevice = 1,
    cudaMemcpyDeviceToHost = 2,
    cudaMemcpyDeviceToDevice = 3,
    cudaMemcpyDefault = 4
};

enum cudaMemoryType {
    cudaMemoryTypeUnregistered = 0,
    cudaMemoryTypeHost = 1,
    cudaMemoryTypeDevice = 2,
    cudaMemoryTypeManaged = 3
};

struct cudaPointerAttributes {
    enum cudaMemoryType type;
    int device;
    void *devicePointer, *hostPointer;
};

enum cudaDeviceAttr {
    cudaDevAttrMaxThreadsPerBlock = 1,
    cudaDevAttrMaxSharedMemoryPerBlock = 8,
    cudaDevAttrWarpSize = 10,
    cudaDevAttrMultiProcessorCount = 16,
    cudaDevAttrComputeCapabilityMajor = 75,
    cudaDevAttrComputeCapabilityMinor = 76,
    cudaDevAttrMaxSharedMemoryPerBlockOptin = 97
};

typedef struct {
    char bytes[16];
} cudaUUID_t;

struct cudaDeviceProp {
    char name[256];
    cudaUUID_t uuid;
};

enum cudaStreamCaptureStatus {
    cudaStreamCaptureStatusNone = 0,
    cudaStreamCaptureStatusActive = 1,
    cudaStreamCaptureStatusInvalidated = 2
};

enum cudaStreamCaptureMode {
    cudaStreamCaptureModeGlobal = 0,
    cudaStreamCaptureModeThreadLocal = 1,
    cudaStreamCaptureModeRelaxed = 2
};

enum cudaUserObjectFlags { cudaUserObjectNoDestructorSync = 1 };

enum cudaUserObjectRetainFlags { cudaGraphUserObjectMove = 1 };

enum cudaFuncAttribute {
    cudaFuncAttributeMaxDynamicSharedMemorySize = 8,
    cudaFuncAttributePreferredSharedMemoryCarveout = 9
};

typedef struct {
    char reserved[64];
} cudaIpcMemHandle_t;

typedef void (*cudaHostFn_t)(void *data);

/* Devices and errors. */
cudaError_t cudaGetDeviceCount(int *count);
cudaError_t cudaGetDevice(int *ordinal);
cudaError_t cudaSetDevice(int ordinal);
cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute,
                                   int ordinal);
cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *out, int ordinal);
cudaError_t cudaDeviceGetPCIBusId(char *text, int bytes, int ordinal);
cudaError_t cudaDeviceSynchronize(void);
cudaError_t cudaRuntimeGetVersion(int *version);
cudaError_t cudaDriverGetVersion(int *version);
cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total_bytes);
cudaError_t cudaGetLastError(void);
cudaError_t cudaPeekAtLastError(void);
const char *cudaGetErrorName(cudaError_t error);
const char *cudaGetErrorString(cudaError_t error);

/* Memory. */
cudaError_t cudaMalloc(void **out, size_t bytes);
cudaError_t cudaFree(void *data);
cudaError_t cudaMallocAsync(void **out, size_t bytes, cudaStream_t stream);
cudaError_t cudaFreeAsync(void *data, cudaStream_t stream);
cudaError_t cudaMallocHost(void **out, size_t bytes);
cudaError_t cudaHostAlloc(void **out, size_t bytes, unsigned flags);
cudaError_t cudaFreeHost(void *data);
cudaError_t cudaHostGetDevicePointer(void **out, void *data, unsigned flags);
cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *out,
                                     const void *data);
cudaError_t cudaMemset(void *data, int value, size_t bytes);
cudaError_t cudaMemsetAsync(void *data, int value, size_t bytes, cudaStream_t stream);
cudaError_t cudaMemcpy(void *dst, const void *src, size_t bytes,
                       enum cudaMemcpyKind kind);
cudaError_t cudaMemcpyAsync(void *dst, const void *src, size_t bytes,
                            enum cudaMemcpyKind kind, cudaStream_t stream);
cudaError_t cudaMemcpy2DAsync(void *dst, size_t dst_pitch, const void *src,
                              size_t src_pitch, size_t width, size_t height,
                              enum cudaMemcpyKind kind, cudaStream_t stream);

/* Memory of other devices and other processes. */
cudaError_t cudaDeviceCanAccessPeer(int *out, int device, int peer);
enum cudaDeviceP2PAttr { cudaDevP2PAttrNativeAtomicSupported = 3 };
cudaError_t cudaDeviceGetP2PAttribute(int *out, enum cudaDeviceP2PAttr what, int device,
                                      int peer);
cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned flags);
cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t *out, void *data);
cudaError_t cudaIpcOpenMemHandle(void **out, cudaIpcMemHandle_t handle, unsigned flags);
cudaError_t cudaIpcCloseMemHandle(void *data);

/* Streams and events. */
cudaError_t cudaStreamCreate(cudaStream_t *out);
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *out, unsigned flags);
cudaError_t cudaStreamCreateWithPriority(cudaStream_t *out, unsigned flags,
                                         int priority);
cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest);
cudaError_t cudaStreamDestroy(cudaStream_t stream);
cudaError_t cudaStreamQuery(cudaStream_t stream);
cudaError_t cudaStreamSynchronize(cudaStream_t stream);
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags);
cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void *data);
cudaError_t cudaEventCreate(cudaEvent_t *out);
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *out, unsigned flags);
cudaError_t cudaEventDestroy(cudaEvent_t event);
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream);
cudaError_t cudaEventQuery(cudaEvent_t event);
cudaError_t cudaEventSynchronize(cudaEvent_t event);

/* Capture and graphs. */
cudaError_t cudaStreamBeginCapture(cudaStream_t stream,
                                   enum cudaStreamCaptureMode mode);
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *out);
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream,
                                     enum cudaStreamCaptureStatus *status,
                                     unsigned long long *id, cudaGraph_t *graph,
                                     const cudaGraphNode_t **dependencies,
                                     const cudaGraphEdgeData **edges, size_t *count);
cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *mode);
cudaError_t cudaGraphInstantiate(cudaGraphExec_t *out, cudaGraph_t graph,
                                 unsigned long long flags);
cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream);
cudaError_t cudaGraphDestroy(cudaGraph_t graph);
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec);
cudaError_t cudaUserObjectCreate(cudaUserObject_t *out, void *data,
                                 cudaHostFn_t destroy, unsigned references,
                                 unsigned flags);
cudaError_t cudaUserObjectRelease(cudaUserObject_t object, unsigned references);
cudaError_t cudaGraphRetainUserObject(cudaGraph_t graph, cudaUserObject_t object,
                                      unsigned references, unsigned flags);

/* Kernels. */
cudaError_t cudaFuncSetAttribute(const void *kernel, enum cudaFuncAttribute attribute,
                                 int value);

#ifdef __cplusplus
}
#include "simgpu_kernel.h"
#endif

#endif
