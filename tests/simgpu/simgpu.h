/* A simulated device: the part of the CUDA runtime that cuda/ uses, run by the host.
 *
 * Every stream is a thread with a queue. What CUDA promises holds, and nothing more:
 *
 *  - Order in a stream is that of the calls; between streams there is none but by events.
 *    An event stands for what its stream had been given when it was recorded; waiting for
 *    one never recorded is no wait. Work begins after a random delay (simgpu_seed).
 *  - The legacy default stream (NULL) follows all that the blocking streams of its device
 *    have been given, and they follow it. Non-blocking streams do neither.
 *  - Every copy is asynchronous to the host, from pageable memory too: the caller may not
 *    touch either side before he has waited. CUDA sometimes waits here by itself.
 *  - Memory is filled with 0xff (NaN in every float type) when allocated and when freed.
 *    cudaMallocAsync fills it in stream order. Writes before, behind, or after the free of
 *    a block are found when it is given back, by AddressSanitizer at once.
 *  - cudaFree waits for the device, and so for a transfer that hangs, and so does the closing
 *    of another process's memory, of which CUDA does not say so. A function given to
 *    cudaLaunchHostFunc may not call the runtime.
 *  - A kernel goes to a stream of the current device; so do memset and event records.
 *  - Memory of another process is touched by way of a handle: opening it in the process
 *    that has the memory is an error, closing what is not open and freeing what somebody
 *    has open are violations, and so are copies from and to what is not open. A device is
 *    of one process (simgpu_set_process). Kernels are not watched here.
 *  - A stream that is being captured runs nothing: what it is given becomes nodes of a graph,
 *    behind those that CUDA says. A launch runs the nodes on one to four threads of its own,
 *    in an order that it draws of those that the edges allow, each no sooner than its delay.
 *    What may not be done meanwhile (cudaMalloc, queries and host waits, by the thread's and
 *    the capture's mode), an event of outside awaited, a fork that is not joined are the
 *    errors that CUDA gives, and spoil the capture. Memory of cudaMallocAsync is the graph's,
 *    and has to be freed in it.
 *  - An error is the calling thread's last one until it is taken; a broken device answers
 *    every call with its error.
 *
 * Under ThreadSanitizer a stream is a thread whose only ties are those that CUDA gives:
 * calls, order in the stream, events, host waits. The stand-in's own locks are invisible
 * to it, so memory used on two streams without an event between is reported as a race,
 * and so is shared memory used by two threads of a block without a barrier between.
 *
 * A broken rule is a violation: a sentence on stderr, then abort, unless a test said that
 * it provokes one (simgpu_keep_violations). A host wait longer than simgpu_set_patience is
 * one, with what every stream is doing. */
#ifndef SIMGPU_H
#define SIMGPU_H

#include <cuda_runtime.h>
#include <stdbool.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum { SIMGPU_DEVICES = 16, SIMGPU_TEXT = 4000 };

/* Back to the start: waits for all streams, gives all memory back that was freed, forgets
 * violations, injected errors and counts; 2 devices, 100 s of patience. What is alive, the
 * seed and the delays stay. */
void simgpu_reset(void);

/* Delays follow from the seed and the number of a stream. */
void simgpu_seed(uint64_t seed);
/* The longest delay of one operation, in microseconds; 300 at first, 0: none. */
void simgpu_set_delay(int most_us);
/* What the stream runs begins so much later than it may, beside the random delay: whoever
 * should wait for it and does not is ahead of it. */
void simgpu_slow_stream(cudaStream_t stream, int us);
/* 2 at first. */
void simgpu_set_device_count(int count);
/* All devices are of process 0 at first. */
void simgpu_set_process(int device, int process);
/* Can the device reach that one's memory? Each can at first. */
void simgpu_set_peer_access(int device, int peer, bool can);
/* Is the link between them PCIe? It is NVLink at first. */
void simgpu_set_pcie(int device, int peer, bool is);
/* Has it been enabled? */
bool simgpu_has_peer_access(int device, int peer);
/* How long a host wait may last; 100 s at first. */
void simgpu_set_patience(double seconds);

/* Until simgpu_reset, work is counted, ordered and waited for as ever but does nothing:
 * kernels do not run, copies, memsets and messages move no byte, and memory is not
 * filled, so that large blocks take none of the host's. Late writes to freed memory go
 * unseen; every other rule is still checked. Begins while nothing is under way. */
void simgpu_run_dry(void);

/* The call after `count` more that fails, once, with this error; negative: none does. */
void simgpu_fail_after(int64_t count, cudaError_t error);
/* The same for calls of one function: "cudaEventRecord", or "kernel" for a launch. Of a
 * function that is made of others, theirs: cudaMemcpy is cudaMemcpyAsync and
 * cudaStreamSynchronize. The name is borrowed. */
void simgpu_fail_call(const char *function, int64_t count, cudaError_t error);
/* Every call for this device fails with this error until simgpu_reset. */
void simgpu_break_device(int ordinal, cudaError_t error);

/* Violations are kept instead of ending the process. */
void simgpu_keep_violations(bool keep);
int simgpu_violations(void);
/* The last one; "" where there is none. */
void simgpu_violation(char text[SIMGPU_TEXT]);

/* What has been asked of a device since the start or the last reset: numbers of 64 bits. */
struct simgpu_stats {
    uint64_t launches, copies, copied_bytes, memsets, set_bytes;
    uint64_t records, awaits; /* events */
    uint64_t host_waits;      /* synchronisations, cudaFree among them */
    uint64_t allocations, frees;
    uint64_t groups, sends, receives, sent_bytes; /* of NCCL */
};
struct simgpu_stats simgpu_device_stats(int ordinal);
struct simgpu_stats simgpu_stats(void); /* of all devices together */

/* What is alive; default streams do not count. */
struct simgpu_live {
    int blocks, streams, events, comms, mappings;
    int graphs; /* executable ones too */
};
struct simgpu_live simgpu_live(void);

#ifdef __cplusplus
}
#endif

#endif
