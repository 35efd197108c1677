/* Devices, errors, violations, settings, counts. */
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "sim.h"

/* Patience: about ten times what the slowest test takes under ThreadSanitizer, and less than
 * tests have time. */
enum { FIRST_DEVICES = 2, FIRST_DELAY_US = 300, FIRST_PATIENCE_S = 100 };

struct sim_settings sim_settings = {.seed = 1,
                                    .most_delay_us = FIRST_DELAY_US,
                                    .devices = FIRST_DEVICES,
                                    .patience = FIRST_PATIENCE_S};
struct simgpu_stats sim_stats[SIMGPU_DEVICES];
_Thread_local bool sim_in_host_function;

static _Thread_local int current_device;
static _Thread_local cudaError_t last_error;

static cudaError_t broken[SIMGPU_DEVICES]; /* locked, as all below */
static int64_t fail_count = -1;
static const char *fail_function; /* NULL: any */
static cudaError_t fail_error;
static bool keeps_violations;
static int violation_count;
static char violation_text[SIMGPU_TEXT];

cudaError_t sim_error(cudaError_t error)
{
    if (error != cudaSuccess) {
        last_error = error;
    }
    return error;
}

cudaError_t sim_leave(void)
{
    sim_lock();
    cudaError_t error = broken[current_device];
    sim_unlock();
    return error;
}

cudaError_t sim_enter(const char *function)
{
    cudaError_t error = sim_leave();
    sim_lock();
    if (fail_count >= 0 && (!fail_function || strcmp(function, fail_function) == 0) &&
        fail_count-- == 0) {
        error = fail_error;
    }
    sim_unlock();
    if (sim_in_host_function) {
        sim_violate("a host function calls %s", function);
        error = cudaErrorNotSupported;
    }
    return error;
}

void sim_violate(const char *format, ...)
{
    char text[SIMGPU_TEXT];
    va_list args;
    va_start(args, format);
    (void)vsnprintf(text, sizeof text, format, args);
    va_end(args);
    sim_lock();
    memcpy(violation_text, text, sizeof text);
    violation_count += 1;
    bool is_kept = keeps_violations;
    sim_unlock();
    if (!is_kept) {
        (void)fprintf(stderr, "simgpu: %s\n", text);
        abort();
    }
}

void sim_break(int ordinal, cudaError_t error)
{
    sim_lock();
    broken[ordinal] = error;
    sim_unlock();
}

int sim_current_device(void)
{
    return current_device;
}

/* Half of the operations begin at once; a few come very late. */
void sim_delay(uint64_t *random)
{
    uint64_t draw = sim_random(random);
    int64_t most = sim_settings.most_delay_us;
    int64_t part = (int64_t)((draw >> 8) % 1000);
    switch (most == 0 ? 0 : draw % 8) {
    case 4:
    case 5:
        sim_sleep_us(most * part / 20000);
        break;
    case 6:
        sim_sleep_us(most * part / 4000);
        break;
    case 7:
        sim_sleep_us(most * part / 1000);
        break;
    default:
        break;
    }
}

void *sim_room(size_t bytes)
{
    void *room = calloc(1, bytes ? bytes : 1);
    if (!room) {
        (void)fprintf(stderr, "simgpu: no memory\n");
        abort();
    }
    return room;
}

void *sim_op_room(size_t bytes)
{
    struct sim_op *op = sim_room(bytes);
    op->bytes = bytes;
    return op;
}

void simgpu_seed(uint64_t seed)
{
    sim_settings.seed = seed;
}

void simgpu_set_delay(int most_us)
{
    sim_settings.most_delay_us = most_us;
}

void simgpu_set_device_count(int count)
{
    sim_settings.devices = count;
}

void simgpu_set_patience(double seconds)
{
    sim_settings.patience = seconds;
}

void simgpu_run_dry(void)
{
    sim_settings.is_dry = true;
}

void simgpu_fail_call(const char *function, int64_t count, cudaError_t error)
{
    sim_lock();
    fail_function = function;
    fail_count = count;
    fail_error = error;
    sim_unlock();
}

void simgpu_fail_after(int64_t count, cudaError_t error)
{
    simgpu_fail_call(NULL, count, error);
}

void simgpu_break_device(int ordinal, cudaError_t error)
{
    sim_break(ordinal, error);
}

void simgpu_keep_violations(bool keep)
{
    sim_lock();
    keeps_violations = keep;
    sim_unlock();
}

int simgpu_violations(void)
{
    sim_lock();
    int count = violation_count;
    sim_unlock();
    return count;
}

void simgpu_violation(char text[SIMGPU_TEXT])
{
    sim_lock();
    memcpy(text, violation_text, SIMGPU_TEXT);
    sim_unlock();
}

struct simgpu_stats simgpu_device_stats(int ordinal)
{
    sim_lock();
    struct simgpu_stats stats = sim_stats[ordinal];
    sim_unlock();
    return stats;
}

struct simgpu_stats simgpu_stats(void)
{
    struct simgpu_stats sum = {0};
    uint64_t *to = (uint64_t *)&sum;
    for (int device = 0; device < SIMGPU_DEVICES; device++) {
        struct simgpu_stats stats = simgpu_device_stats(device);
        const uint64_t *from = (const uint64_t *)&stats;
        for (size_t i = 0; i < sizeof sum / sizeof *to; i++) {
            to[i] += from[i];
        }
    }
    return sum;
}

struct simgpu_live simgpu_live(void)
{
    struct simgpu_live live = {.blocks = sim_memory_count(),
                               .comms = sim_nccl_count(),
                               .mappings = sim_ipc_count(),
                               .graphs = sim_graph_count()};
    sim_stream_count(&live);
    return live;
}

void simgpu_reset(void)
{
    sim_stream_reset();
    sim_graph_reset();
    sim_nccl_reset();
    sim_memory_reset();
    sim_ipc_reset();
    sim_lock();
    memset(broken, 0, sizeof broken);
    memset(sim_stats, 0, sizeof sim_stats);
    fail_count = -1;
    keeps_violations = false;
    violation_count = 0;
    violation_text[0] = '\0';
    sim_unlock();
    sim_settings.devices = FIRST_DEVICES;
    sim_settings.patience = FIRST_PATIENCE_S;
    sim_settings.is_dry = false;
    current_device = 0;
    last_error = cudaSuccess;
}

cudaError_t cudaGetDeviceCount(int *count)
{
    SIM_ENTER();
    *count = sim_settings.devices;
    return sim_error(*count > 0 ? cudaSuccess : cudaErrorNoDevice);
}

cudaError_t cudaGetDevice(int *ordinal)
{
    *ordinal = current_device;
    return cudaSuccess;
}

cudaError_t cudaSetDevice(int ordinal)
{
    if (ordinal < 0 || ordinal >= sim_settings.devices) {
        return sim_error(cudaErrorInvalidDevice);
    }
    /* A broken device answers from here on; going away from one must work. */
    current_device = ordinal;
    SIM_ENTER();
    return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute,
                                   int ordinal)
{
    SIM_ENTER();
    if (ordinal < 0 || ordinal >= sim_settings.devices) {
        return sim_error(cudaErrorInvalidDevice);
    }
    switch (attribute) {
    case cudaDevAttrMaxThreadsPerBlock:
        *value = 1024;
        return cudaSuccess;
    case cudaDevAttrMaxSharedMemoryPerBlock:
        *value = 48 << 10;
        return cudaSuccess;
    case cudaDevAttrWarpSize:
        *value = 32;
        return cudaSuccess;
    case cudaDevAttrMultiProcessorCount:
        *value = 4;
        return cudaSuccess;
    case cudaDevAttrComputeCapabilityMajor:
        *value = 9;
        return cudaSuccess;
    case cudaDevAttrComputeCapabilityMinor:
        *value = 0;
        return cudaSuccess;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
        *value = 227 << 10;
        return cudaSuccess;
    }
    return sim_error(cudaErrorInvalidValue);
}

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *out, int ordinal)
{
    SIM_ENTER();
    if (ordinal < 0 || ordinal >= sim_settings.devices) {
        return sim_error(cudaErrorInvalidDevice);
    }
    memset(out, 0, sizeof *out);
    (void)snprintf(out->name, sizeof out->name, "simulated GPU");
    out->uuid.bytes[0] = (char)(ordinal + 1);
    return cudaSuccess;
}

cudaError_t cudaDeviceGetPCIBusId(char *text, int bytes, int ordinal)
{
    SIM_ENTER();
    if (ordinal < 0 || ordinal >= sim_settings.devices) {
        return sim_error(cudaErrorInvalidDevice);
    }
    int length = snprintf(text, (size_t)bytes, "0000:%02x:00.0", ordinal + 1);
    return sim_error(length < bytes ? cudaSuccess : cudaErrorInvalidValue);
}

cudaError_t cudaRuntimeGetVersion(int *version)
{
    *version = CUDART_VERSION;
    return cudaSuccess;
}

cudaError_t cudaDriverGetVersion(int *version)
{
    *version = CUDART_VERSION;
    return cudaSuccess;
}

cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total_bytes)
{
    SIM_ENTER();
    *free_bytes = *total_bytes = (size_t)8 << 30;
    return cudaSuccess;
}

cudaError_t cudaGetLastError(void)
{
    cudaError_t error = last_error;
    last_error = cudaSuccess;
    return error;
}

cudaError_t cudaPeekAtLastError(void)
{
    return last_error;
}

const char *cudaGetErrorName(cudaError_t error)
{
    switch (error) {
#define ERROR_NAME(name, value, text)                                                  \
    case name:                                                                         \
        return #name;
        SIMGPU_ERRORS(ERROR_NAME)
    }
    return "unrecognized error code";
}

const char *cudaGetErrorString(cudaError_t error)
{
    switch (error) {
#define ERROR_TEXT(name, value, text)                                                  \
    case name:                                                                         \
        return text;
        SIMGPU_ERRORS(ERROR_TEXT)
    }
    return "unrecognized error code";
}
