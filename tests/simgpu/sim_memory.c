/* Memory of the simulated devices, and pinned memory of the host.
 *
 *    guard (256, 0xfb) | bytes (0xff when allocated and when freed) | guard
 *
 * What is freed stays out of use, up to a limit, so that late writes are found. */
#include <stdlib.h>
#include <string.h>

#include "sim.h"

enum { GUARD_BYTES = 256, GUARD = 0xfb, GARBAGE = 0xff, HOST = -1 };
static const size_t QUARANTINE_BYTES = (size_t)64 << 20;

struct block {
    unsigned char *room, *base; /* whole; what the caller has */
    size_t bytes;
    int device; /* or HOST */
    bool is_alive;
    struct block *next;
};

static struct block *blocks; /* locked; the newest first */

/* Locked. */
static struct block *block_around(const void *data, bool is_alive)
{
    const unsigned char *at = data;
    for (struct block *b = blocks; b; b = b->next) {
        if (b->is_alive == is_alive && at >= b->base - GUARD_BYTES &&
            at < b->base + b->bytes + GUARD_BYTES) {
            return b;
        }
    }
    return NULL;
}

/* Locked. Pinned memory of the host counts for the current device. */
static struct simgpu_stats *stats_of(int device)
{
    return &sim_stats[device == HOST ? sim_current_device() : device];
}

static bool is_filled(const unsigned char *data, size_t bytes, unsigned char value)
{
    size_t i = 0;
    while (i < bytes && data[i] == value) {
        i++;
    }
    return i == bytes;
}

/* The block's bytes mean nothing now. */
static void make_garbage(void *data, size_t bytes)
{
    if (!sim_settings.is_dry) {
        memset(data, GARBAGE, bytes);
    }
}

static bool guards_hold(const struct block *block)
{
    sim_allow(block->base - GUARD_BYTES, GUARD_BYTES);
    sim_allow(block->base + block->bytes, GUARD_BYTES);
    return is_filled(block->base - GUARD_BYTES, GUARD_BYTES, GUARD) &&
           is_filled(block->base + block->bytes, GUARD_BYTES, GUARD);
}

/* Zeroed bookkeeping around `bytes`; what they hold means nothing yet. */
static void *block_create(size_t bytes, int device)
{
    void *room = NULL;
    if (bytes > (size_t)1 << 40 ||
        posix_memalign(&room, GUARD_BYTES, bytes + 2 * GUARD_BYTES) != 0) {
        return NULL;
    }
    struct block *block = SIM_ROOM(struct block);
    block->room = room;
    block->base = block->room + GUARD_BYTES;
    block->bytes = bytes;
    block->device = device;
    block->is_alive = true;
    memset(block->room, GUARD, GUARD_BYTES);
    memset(block->base + bytes, GUARD, GUARD_BYTES);
    sim_forbid(block->room, GUARD_BYTES);
    sim_forbid(block->base + bytes, GUARD_BYTES);
    sim_lock();
    block->next = blocks;
    blocks = block;
    stats_of(device)->allocations += 1;
    sim_unlock();
    return block->base;
}

/* Takes it out of the list; false: it was written to after it had been freed. */
static bool block_destroy(struct block **at)
{
    struct block *block = *at;
    sim_allow(block->base, block->bytes);
    bool is_untouched =
        sim_settings.is_dry || is_filled(block->base, block->bytes, GARBAGE);
    *at = block->next;
    free(block->room);
    free(block);
    return is_untouched;
}

/* Gives back the oldest until those left have at most `bytes`. */
static void quarantine_shrink(size_t bytes)
{
    bool is_untouched = true;
    size_t held = 0;
    sim_lock();
    for (struct block **at = &blocks; *at;) {
        if ((*at)->is_alive || (held += (*at)->bytes) <= bytes) {
            at = &(*at)->next;
        } else {
            is_untouched = block_destroy(at) && is_untouched;
        }
    }
    sim_unlock();
    if (!is_untouched) {
        sim_violate("device memory was written to after it had been freed");
    }
}

/* The block that begins there, taken out of use; violations and false otherwise. */
static bool block_free(void *data, bool is_host, const char *what)
{
    sim_lock();
    struct block *block = block_around(data, true);
    bool is_right = block && block->base == data && (block->device == HOST) == is_host;
    bool is_whole = is_right && guards_hold(block);
    bool is_open = is_right && sim_ipc_is_open(data);
    sim_unlock();
    if (is_right) {
        make_garbage(block->base, block->bytes);
        sim_lock();
        sim_forbid(block->base, block->bytes);
        block->is_alive = false;
        stats_of(block->device)->frees += 1;
        sim_unlock();
    }
    if (!is_right) {
        sim_violate("%s of %p, which is no living block of it", what, data);
        return false;
    }
    if (is_open) {
        sim_violate("%s of %p, which another process has open", what, data);
    }
    if (!is_whole) {
        sim_violate("%s of %p: bytes before or behind it were written to", what, data);
    }
    quarantine_shrink(QUARANTINE_BYTES);
    return true;
}

bool sim_memory_check(const void *data, size_t bytes, bool must_be_device, int device,
                      const char *what)
{
    const unsigned char *at = data;
    const char *fault = NULL;
    sim_lock();
    const struct block *block = block_around(data, true);
    if (!block && block_around(data, false)) {
        fault = "after it was freed";
    } else if (block && (at < block->base || bytes > block->bytes ||
                         (size_t)(at - block->base) > block->bytes - bytes)) {
        fault = "beyond its block";
    } else if (must_be_device && (!block || block->device == HOST)) {
        fault = "that is not of a device";
    } else if (block && block->device != HOST &&
               !sim_ipc_may_touch(block->base, block->device, device)) {
        fault = "of another process, which is not open here";
    }
    sim_unlock();
    if (fault) {
        sim_violate("%s of %zu bytes touches memory %s (%p)", what, bytes, fault, data);
        sim_break(device, cudaErrorIllegalAddress);
    }
    return !fault;
}

void sim_memory_free(void *data)
{
    (void)block_free(data, false, "the end of a graph");
}

int sim_memory_device(const void *data)
{
    sim_lock();
    const struct block *block = block_around(data, true);
    int device = block ? block->device : HOST;
    sim_unlock();
    return device;
}

void *sim_memory_base(const void *data)
{
    sim_lock();
    const struct block *block = block_around(data, true);
    void *base = block && block->device != HOST ? block->base : NULL;
    sim_unlock();
    return base;
}

int sim_memory_count(void)
{
    int count = 0;
    sim_lock();
    for (const struct block *b = blocks; b; b = b->next) {
        count += b->is_alive;
    }
    sim_unlock();
    return count;
}

void sim_memory_reset(void)
{
    quarantine_shrink(0);
}

cudaError_t cudaMalloc(void **out, size_t bytes)
{
    SIM_ENTER_UNSAFE();
    if (!out) {
        return sim_error(cudaErrorInvalidValue);
    }
    *out = NULL;
    if (bytes > 0) {
        *out = block_create(bytes, sim_current_device());
        if (!*out) {
            return sim_error(cudaErrorMemoryAllocation);
        }
        make_garbage(*out, bytes);
    }
    return cudaSuccess;
}

cudaError_t cudaFree(void *data)
{
    if (!data) {
        return cudaSuccess;
    }
    cudaError_t forbidden = sim_capture_forbids();
    if (forbidden != cudaSuccess) {
        return sim_error(forbidden);
    }
    int device = sim_memory_device(data);
    sim_lock();
    stats_of(device)->host_waits += 1;
    sim_unlock();
    if (device != HOST && sim_wait_for_device(device) != cudaSuccess) {
        return cudaPeekAtLastError();
    }
    if (!block_free(data, false, "cudaFree")) {
        return sim_error(cudaErrorInvalidValue);
    }
    return sim_error(sim_leave());
}

static cudaError_t host_alloc(void **out, size_t bytes)
{
    *out = block_create(bytes, HOST);
    if (!*out) {
        return sim_error(cudaErrorMemoryAllocation);
    }
    make_garbage(*out, bytes);
    return cudaSuccess;
}

cudaError_t cudaMallocHost(void **out, size_t bytes)
{
    SIM_ENTER_UNSAFE();
    return host_alloc(out, bytes);
}

cudaError_t cudaHostAlloc(void **out, size_t bytes, unsigned flags)
{
    SIM_ENTER_UNSAFE();
    (void)flags;
    return host_alloc(out, bytes);
}

cudaError_t cudaFreeHost(void *data)
{
    cudaError_t forbidden = sim_capture_forbids();
    if (forbidden != cudaSuccess) {
        return sim_error(forbidden);
    }
    if (data && (sim_wait_for_device(sim_current_device()) != cudaSuccess ||
                 !block_free(data, true, "cudaFreeHost"))) {
        return sim_error(cudaErrorInvalidValue);
    }
    return sim_error(sim_leave());
}

cudaError_t cudaHostGetDevicePointer(void **out, void *data, unsigned flags)
{
    SIM_ENTER();
    sim_lock();
    const struct block *block = block_around(data, true);
    bool is_host = block && block->device == HOST && block->base == data;
    sim_unlock();
    if (!is_host || flags != 0) {
        return sim_error(cudaErrorInvalidValue);
    }
    *out = data;
    return cudaSuccess;
}

cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *out,
                                     const void *data)
{
    SIM_ENTER();
    memset(out, 0, sizeof *out);
    sim_lock();
    const struct block *block = block_around(data, true);
    if (!block) {
        out->type = cudaMemoryTypeUnregistered;
        out->device = -2;
    } else if (block->device == HOST) {
        out->type = cudaMemoryTypeHost;
        out->device = sim_current_device();
        out->hostPointer = out->devicePointer = (void *)(uintptr_t)data;
    } else {
        out->type = cudaMemoryTypeDevice;
        out->device = block->device;
        out->devicePointer = (void *)(uintptr_t)data;
    }
    sim_unlock();
    return cudaSuccess;
}

cudaError_t cudaMallocAsync(void **out, size_t bytes, cudaStream_t stream)
{
    SIM_ENTER();
    stream = sim_stream(stream);
    if (!out || !stream) {
        return sim_error(cudaErrorInvalidValue);
    }
    *out = NULL;
    if (bytes > 0) {
        *out = block_create(bytes, stream->device);
        if (!*out) {
            return sim_error(cudaErrorMemoryAllocation);
        }
        sim_lock();
        cudaGraph_t graph = sim_capture_graph(stream);
        if (graph) {
            sim_graph_own(graph, *out);
        }
        sim_unlock();
        sim_fill(*out, GARBAGE, bytes, stream);
    }
    return cudaSuccess;
}

struct free_op {
    struct sim_op op;
    void *data;
};

static void run_free(struct sim_op *op, cudaStream_t stream)
{
    (void)stream;
    (void)block_free(((struct free_op *)op)->data, false, "cudaFreeAsync");
}

cudaError_t cudaFreeAsync(void *data, cudaStream_t stream)
{
    SIM_ENTER();
    stream = sim_stream(stream);
    if (!stream) {
        return sim_error(cudaErrorInvalidResourceHandle);
    }
    sim_lock();
    cudaGraph_t graph = data ? sim_capture_graph(stream) : NULL;
    const struct block *block = graph ? block_around(data, true) : NULL;
    size_t bytes = block ? block->bytes : 0;
    bool is_right = !graph || sim_graph_disown(graph, data);
    sim_unlock();
    if (!is_right) {
        sim_violate("a graph frees memory of outside (%p)", data);
        return sim_error(cudaErrorInvalidValue);
    }
    if (graph) {
        sim_fill(data, GARBAGE, bytes, stream); /* it stays the graph's */
    } else if (data) {
        struct free_op *self = SIM_OP(struct free_op);
        self->op.name = "free";
        self->op.run = run_free;
        self->data = data;
        sim_enqueue(stream, &self->op);
    }
    return cudaSuccess;
}
