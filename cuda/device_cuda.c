/* The table of a CUDA device. Every entry works on its own device, whatever the
 * thread's current one is, and leaves that as it was. */
#include "device_cuda.h"

#include <time.h>

#include "base/mem.h"
#include "capture.h"
#include "cuda_api.h"
#include "cuda_check.h"

struct cuda_device {
    struct cp_device head; /* first, so that the table's argument is this */
    int ordinal;
    cudaStream_t lane[CP_DEVICE_LANES];
    cudaEvent_t event[CP_DEVICE_EVENTS];
    struct cp_copy_engine engine;
};

enum cp_code cp_cuda_enter(int ordinal, int *before)
{
    CP_TRY(cp_cuda_check(cudaGetDevice(before), "cudaGetDevice"));
    return *before == ordinal ? CP_OK
                              : cp_cuda_check(cudaSetDevice(ordinal), "cudaSetDevice");
}

enum cp_code cp_cuda_leave(int ordinal, int before, enum cp_code code)
{
    if (before == ordinal) {
        return code;
    }
    cudaError_t error = cudaSetDevice(before);
    return code != CP_OK ? code : cp_cuda_check(error, "cudaSetDevice");
}

static struct cuda_device *of(struct cp_device *device)
{
    return (struct cuda_device *)device;
}

static enum cp_code check_alloc(cudaError_t error, const char *call, size_t bytes,
                                int ordinal, const char *what)
{
    if (error != cudaErrorMemoryAllocation) {
        return cp_cuda_check(error, call);
    }
    (void)cudaGetLastError();
    return cp_fail(CP_ERR_NO_MEMORY, "no memory for %s: %zu bytes on CUDA device %d",
                   what, bytes, ordinal);
}

enum cp_code cp_cuda_alloc(int ordinal, size_t bytes, const char *what, void **out)
{
    int before = ordinal;
    void *data = NULL;
    CP_TRY(cp_cuda_enter(ordinal, &before));
    /* 0 bytes are a block too. */
    cudaError_t error = cudaMalloc(&data, bytes > 0 ? bytes : 1);
    enum cp_code code = check_alloc(error, "cudaMalloc", bytes, ordinal, what);
    if (code == CP_OK) {
        *out = data;
    }
    return cp_cuda_leave(ordinal, before, code);
}

void cp_cuda_free(int ordinal, void *address_of_pointer)
{
    int before = ordinal;
    void **data = address_of_pointer;
    if (*data != NULL && cp_cuda_enter(ordinal, &before) == CP_OK) {
        (void)cp_cuda_check(cudaFree(*data), "cudaFree");
        (void)cp_cuda_leave(ordinal, before, CP_OK);
    }
    *data = NULL;
}

static enum cp_code cuda_alloc(struct cp_device *device, size_t bytes, const char *what,
                               void **out)
{
    return cp_cuda_alloc(of(device)->ordinal, bytes, what, out);
}

static void cuda_free(struct cp_device *device, void *address_of_pointer)
{
    cp_cuda_free(of(device)->ordinal, address_of_pointer);
}

static enum cp_code cuda_copy(struct cp_device *device, const struct cp_copy *copies,
                              int count, struct cp_stream *stream)
{
    int ordinal = of(device)->ordinal, before = ordinal;
    CP_TRY(cp_cuda_enter(ordinal, &before));
    return cp_cuda_leave(ordinal, before,
                         cp_cuda_copy(copies, count, &of(device)->engine, stream));
}

static enum cp_code cuda_add(struct cp_device *device, const struct cp_view *dst,
                             const struct cp_view *src, struct cp_stream *stream)
{
    int ordinal = of(device)->ordinal, before = ordinal;
    CP_TRY(cp_cuda_enter(ordinal, &before));
    return cp_cuda_leave(ordinal, before, cp_cuda_add(dst, src, stream));
}

static enum cp_code cuda_zero(struct cp_device *device, void *data, size_t bytes,
                              struct cp_stream *stream)
{
    int ordinal = of(device)->ordinal, before = ordinal;
    if (bytes == 0) {
        return CP_OK;
    }
    CP_TRY(cp_cuda_enter(ordinal, &before));
    cudaError_t error = cudaMemsetAsync(data, 0, bytes, (cudaStream_t)stream);
    return cp_cuda_leave(ordinal, before, cp_cuda_check(error, "cudaMemsetAsync"));
}

static enum cp_code cuda_enter(struct cp_device *device, int *before)
{
    return cp_cuda_enter(of(device)->ordinal, before);
}

static enum cp_code cuda_leave(struct cp_device *device, int before)
{
    return cp_cuda_leave(of(device)->ordinal, before, CP_OK);
}

/* The runtime has no wait that ends. */
static enum cp_code ask_until(cudaEvent_t event, struct cp_deadline deadline)
{
    const struct timespec moment = {.tv_nsec = 200000};
    enum cp_code code = cp_cuda_query(event, "what the device was given");
    while (code == CP_AGAIN && !cp_deadline_passed(deadline)) {
        (void)nanosleep(&moment, NULL);
        code = cp_cuda_query(event, "what the device was given");
    }
    return code;
}

static enum cp_code cuda_wait(struct cp_device *device, int event,
                              struct cp_deadline deadline)
{
    int ordinal = of(device)->ordinal, before = ordinal;
    CP_TRY(cp_cuda_enter(ordinal, &before));
    /* Another thread's capture would refuse the question. */
    enum cudaStreamCaptureMode mode = cp_cuda_capture_leave();
    enum cp_code code = ask_until(of(device)->event[event], deadline);
    cp_cuda_capture_enter(mode);
    return cp_cuda_leave(ordinal, before, code);
}

static struct cp_stream *cuda_lane(struct cp_device *device, int lane)
{
    return (struct cp_stream *)of(device)->lane[lane];
}

static enum cp_code cuda_record(struct cp_device *device, struct cp_stream *stream,
                                int event)
{
    int ordinal = of(device)->ordinal, before = ordinal;
    CP_TRY(cp_cuda_enter(ordinal, &before));
    cudaError_t error = cudaEventRecord(of(device)->event[event], (cudaStream_t)stream);
    return cp_cuda_leave(ordinal, before, cp_cuda_check(error, "cudaEventRecord"));
}

/* An event that was never recorded makes nobody wait. */
static enum cp_code cuda_await(struct cp_device *device, struct cp_stream *stream,
                               int event)
{
    int ordinal = of(device)->ordinal, before = ordinal;
    CP_TRY(cp_cuda_enter(ordinal, &before));
    cudaError_t error =
        cudaStreamWaitEvent((cudaStream_t)stream, of(device)->event[event], 0);
    return cp_cuda_leave(ordinal, before, cp_cuda_check(error, "cudaStreamWaitEvent"));
}

static enum cp_code cuda_capture(struct cp_device *device, struct cp_stream *stream,
                                 uint64_t *capture)
{
    return cp_cuda_capture_at(of(device)->ordinal, stream, capture);
}

static enum cp_code cuda_alloc_in_order(struct cp_device *device, size_t bytes,
                                        const char *what, struct cp_stream *stream,
                                        void **out)
{
    int ordinal = of(device)->ordinal, before = ordinal;
    CP_TRY(cp_cuda_enter(ordinal, &before));
    cudaError_t error = cudaMallocAsync(out, bytes, (cudaStream_t)stream);
    return cp_cuda_leave(ordinal, before,
                         check_alloc(error, "cudaMallocAsync", bytes, ordinal, what));
}

static void cuda_free_in_order(struct cp_device *device, void *address_of_pointer,
                               struct cp_stream *stream)
{
    int ordinal = of(device)->ordinal, before = ordinal;
    void **data = address_of_pointer;
    if (*data != NULL && cp_cuda_enter(ordinal, &before) == CP_OK) {
        (void)cp_cuda_check(cudaFreeAsync(*data, (cudaStream_t)stream),
                            "cudaFreeAsync");
        (void)cp_cuda_leave(ordinal, before, CP_OK);
    }
    *data = NULL;
}

static const struct cp_device_ops cuda_ops = {
    .name = "cuda",
    .abi = CP_DEVICE_ABI,
    .alloc = cuda_alloc,
    .free = cuda_free,
    .copy = cuda_copy,
    .add = cuda_add,
    .zero = cuda_zero,
    .enter = cuda_enter,
    .leave = cuda_leave,
    .wait = cuda_wait,
    .lane = cuda_lane,
    .record = cuda_record,
    .await = cuda_await,
    .capture = cuda_capture,
    .alloc_in_order = cuda_alloc_in_order,
    .free_in_order = cuda_free_in_order,
};

enum cp_code cp_cuda_generation(int ordinal, int *out)
{
    int major = 0, minor = 0;
    CP_TRY(cp_cuda_check_ordinal(ordinal));
    CP_TRY(cp_cuda_check(
        cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, ordinal),
        "cudaDeviceGetAttribute"));
    CP_TRY(cp_cuda_check(
        cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, ordinal),
        "cudaDeviceGetAttribute"));
    *out = 10 * major + minor;
    return CP_OK;
}

enum cp_code cp_cuda_check_ordinal(int ordinal)
{
    int count = 0;
    cudaError_t error = cudaGetDeviceCount(&count);
    if (error == cudaErrorNoDevice || error == cudaErrorInsufficientDriver) {
        (void)cudaGetLastError();
        return cp_fail(CP_ERR_VALUE, "this process sees no CUDA device: %s",
                       cudaGetErrorString(error));
    }
    CP_TRY(cp_cuda_check(error, "cudaGetDeviceCount"));
    if (ordinal < 0 || ordinal >= count) {
        return cp_fail(CP_ERR_VALUE,
                       "CUDA device %d does not exist; this process sees %d, numbered "
                       "from 0",
                       ordinal, count);
    }
    return CP_OK;
}

/* Streams that do not synchronise with the default stream, and before others where the
 * device must choose: what they carry is short and somebody waits for it. The lane that
 * computes is given the caller's stream instead of its own. */
static enum cp_code make_lanes(struct cuda_device *device)
{
    int least = 0, greatest = 0;
    CP_TRY(cp_cuda_check(cudaDeviceGetStreamPriorityRange(&least, &greatest),
                         "cudaDeviceGetStreamPriorityRange"));
    for (int lane = 0; lane < CP_DEVICE_LANES; lane++) {
        CP_TRY(cp_cuda_check(cudaStreamCreateWithPriority(
                                 &device->lane[lane], cudaStreamNonBlocking, greatest),
                             "cudaStreamCreateWithPriority"));
    }
    return CP_OK;
}

static enum cp_code make_events(struct cuda_device *device)
{
    for (int event = 0; event < CP_DEVICE_EVENTS; event++) {
        CP_TRY(cp_cuda_check(
            cudaEventCreateWithFlags(&device->event[event], cudaEventDisableTiming),
            "cudaEventCreateWithFlags"));
    }
    return CP_OK;
}

/* A copy engine takes no multiprocessor from kernels that compute, but begins later by a few
 * microseconds, in which NVLink moves a megabyte. Rows cost it more: short ones waste what a
 * link carries at once, and over PCIe it is slow with any. */
enum {
    ENGINE_PIECE = 1024 * 1024,
    ENGINE_PLANE = 30 * 1024 * 1024,
    ENGINE_ROW = 1024,
};

/* Only NVLink has atomics. What cannot be told counts as PCIe. */
static bool is_nvlink(int ordinal, int peer)
{
    int has_atomics = 0;
    cudaError_t error = cudaDeviceGetP2PAttribute(
        &has_atomics, cudaDevP2PAttrNativeAtomicSupported, ordinal, peer);
    (void)cudaGetLastError();
    return error == cudaSuccess && has_atomics != 0;
}

static enum cp_code find_engine(int ordinal, struct cp_copy_engine *out)
{
    int count = 0;
    *out = (struct cp_copy_engine){.least_piece = ENGINE_PIECE,
                                   .least_plane = ENGINE_PLANE,
                                   .least_row = ENGINE_ROW};
    CP_TRY(cp_cuda_check(cudaGetDeviceCount(&count), "cudaGetDeviceCount"));
    for (int peer = 0; peer < count; peer++) {
        int can = 0;
        if (peer == ordinal) {
            continue;
        }
        CP_TRY(cp_cuda_check(cudaDeviceCanAccessPeer(&can, ordinal, peer),
                             "cudaDeviceCanAccessPeer"));
        if (can != 0 && !is_nvlink(ordinal, peer)) {
            out->least_plane = INT64_MAX;
        }
    }
    return CP_OK;
}

void cp_device_cuda_set_engine(struct cp_device *device,
                               const struct cp_copy_engine *engine)
{
    of(device)->engine = *engine;
}

/* On its own device. What was not made is NULL. */
static void release(struct cuda_device *device)
{
    for (int event = 0; event < CP_DEVICE_EVENTS; event++) {
        if (device->event[event] != NULL) {
            (void)cudaEventDestroy(device->event[event]);
        }
    }
    for (int lane = 0; lane < CP_DEVICE_LANES; lane++) {
        if (device->lane[lane] != NULL) {
            (void)cudaStreamDestroy(device->lane[lane]);
        }
    }
    (void)cudaGetLastError();
}

enum cp_code cp_device_cuda_create(int ordinal, struct cp_device **out)
{
    int before = ordinal;
    void *block = NULL;
    CP_TRY(cp_cuda_check_ordinal(ordinal));
    CP_TRY(cp_cuda_enter(ordinal, &before));
    enum cp_code code =
        cp_mem_create(sizeof(struct cuda_device), "a CUDA device", &block);
    struct cuda_device *device = block;
    if (code == CP_OK) {
        device->head.ops = &cuda_ops;
        device->ordinal = ordinal;
        code = make_lanes(device);
    }
    if (code == CP_OK) {
        code = make_events(device);
    }
    if (code == CP_OK) {
        code = find_engine(ordinal, &device->engine);
    }
    code = cp_cuda_leave(ordinal, before, code);
    if (code != CP_OK) {
        struct cp_device *half = device != NULL ? &device->head : NULL;
        cp_device_cuda_destroy(&half);
        return code;
    }
    *out = &device->head;
    return CP_OK;
}

void cp_device_cuda_destroy(struct cp_device **device)
{
    if (*device == NULL) {
        return;
    }
    struct cuda_device *mine = of(*device);
    int before = mine->ordinal;
    if (cp_cuda_enter(mine->ordinal, &before) == CP_OK) {
        release(mine);
        (void)cp_cuda_leave(mine->ordinal, before, CP_OK);
    }
    cp_mem_destroy(&mine);
    *device = NULL;
}
