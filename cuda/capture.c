/* Asks CUDA about captures. */
#include "capture.h"

#include "cuda_check.h"
#include "device_cuda.h"

/* `graph` NULL: nobody asks. */
static cudaError_t ask(cudaStream_t stream, enum cudaStreamCaptureStatus *status,
                       unsigned long long *id, cudaGraph_t *graph)
{
#if CUDART_VERSION >= 13000
    return cudaStreamGetCaptureInfo(stream, status, id, graph, NULL, NULL, NULL);
#else
    return cudaStreamGetCaptureInfo_v2(stream, status, id, graph, NULL, NULL);
#endif
}

enum cp_code cp_cuda_capture(cudaStream_t stream, uint64_t *capture)
{
    enum cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    unsigned long long id = 0;
    cudaError_t error = ask(stream, &status, &id, NULL);
    if (error == cudaErrorStreamCaptureImplicit) {
        (void)cudaGetLastError();
        return cp_fail(
            CP_ERR_UNSUPPORTED,
            "another stream is being captured in a graph, and this call would "
            "be on the default stream, which cannot be; pass tensors of "
            "torch, whose calls are on torch's current stream");
    }
    CP_TRY(cp_cuda_check(error, "cudaStreamGetCaptureInfo"));
    if (status == cudaStreamCaptureStatusInvalidated) {
        return cp_fail(CP_ERR_RUNTIME,
                       "the capture that this call would be part of has failed before "
                       "it, by an operation that a capture forbids");
    }
    *capture = status == cudaStreamCaptureStatusActive ? id : 0;
    return CP_OK;
}

enum cp_code cp_cuda_capture_at(int ordinal, struct cp_stream *stream,
                                uint64_t *capture)
{
    int before = ordinal;
    CP_TRY(cp_cuda_enter(ordinal, &before));
    return cp_cuda_leave(ordinal, before,
                         cp_cuda_capture((cudaStream_t)stream, capture));
}

enum cp_code cp_cuda_capture_hold(cudaStream_t stream, cudaHostFn_t release,
                                  void *owner)
{
    enum cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    unsigned long long id = 0;
    cudaGraph_t graph = NULL;
    cudaUserObject_t object = NULL;
    cudaError_t error = ask(stream, &status, &id, &graph);
    if (error == cudaSuccess) {
        error = cudaUserObjectCreate(&object, owner, release, 1,
                                     cudaUserObjectNoDestructorSync);
    }
    if (error != cudaSuccess) {
        release(owner);
        return cp_cuda_check(error, "cudaUserObjectCreate for a graph");
    }
    error = cudaGraphRetainUserObject(graph, object, 1, cudaGraphUserObjectMove);
    if (error != cudaSuccess) {
        (void)cudaUserObjectRelease(object, 1); /* the last */
    }
    return cp_cuda_check(error, "cudaGraphRetainUserObject");
}

enum cudaStreamCaptureMode cp_cuda_capture_leave(void)
{
    enum cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    (void)cudaThreadExchangeStreamCaptureMode(&mode);
    return mode;
}

void cp_cuda_capture_enter(enum cudaStreamCaptureMode before)
{
    (void)cudaThreadExchangeStreamCaptureMode(&before);
}
