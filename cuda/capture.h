/* Streams that are being captured in a CUDA graph: which are, and what outlives them. */
#ifndef CP_CUDA_CAPTURE_H
#define CP_CUDA_CAPTURE_H

#include <cuda_runtime.h>
#include <stdint.h>

#include "base/status.h"

struct cp_stream;

/* As the entry of struct cp_device_ops. The default stream is the current device's. */
CP_NODISCARD enum cp_code cp_cuda_capture(cudaStream_t stream, uint64_t *capture);
/* The same of that device. */
CP_NODISCARD enum cp_code cp_cuda_capture_at(int ordinal, struct cp_stream *stream,
                                             uint64_t *capture);

/* `release` is called once with `owner`, from a thread of CUDA's and at any time, when the
 * graph that the stream is captured in and all that is made of it have gone; also where
 * this fails. It may not call CUDA and must not wait long. */
CP_NODISCARD enum cp_code cp_cuda_capture_hold(cudaStream_t stream,
                                               cudaHostFn_t release, void *owner);

/* From now on this thread may do what captures forbid, since none of it is meant to be part
 * of them; and as before. */
enum cudaStreamCaptureMode cp_cuda_capture_leave(void);
void cp_cuda_capture_enter(enum cudaStreamCaptureMode before);

#endif
