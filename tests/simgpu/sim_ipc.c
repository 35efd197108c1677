/* Memory of other devices and of other processes: who may touch whose. */
#include <string.h>

#include "sim.h"

enum { MOST_OPEN = 1024 };
static const char mark[] = "simulated handle";

/* What a process has opened. */
struct opening {
    void *base;
    int process, count; /* 0: none */
};

static struct opening openings[MOST_OPEN]; /* locked, as all below */
static int process_of[SIMGPU_DEVICES];
static bool cannot_reach[SIMGPU_DEVICES][SIMGPU_DEVICES];
static bool is_pcie[SIMGPU_DEVICES][SIMGPU_DEVICES];
static bool is_enabled[SIMGPU_DEVICES][SIMGPU_DEVICES];

static struct opening *opening_of(const void *base, int process)
{
    for (int i = 0; i < MOST_OPEN; i++) {
        if (openings[i].count > 0 && openings[i].base == base &&
            (process < 0 || openings[i].process == process)) {
            return &openings[i];
        }
    }
    return NULL;
}

bool sim_ipc_is_open(const void *base)
{
    return opening_of(base, -1) != NULL;
}

bool sim_ipc_may_touch(const void *base, int owner, int device)
{
    return process_of[owner] == process_of[device] ||
           opening_of(base, process_of[device]) != NULL;
}

int sim_ipc_count(void)
{
    int count = 0;
    sim_lock();
    for (int i = 0; i < MOST_OPEN; i++) {
        count += openings[i].count;
    }
    sim_unlock();
    return count;
}

void sim_ipc_reset(void)
{
    sim_lock();
    memset(openings, 0, sizeof openings);
    memset(process_of, 0, sizeof process_of);
    memset(cannot_reach, 0, sizeof cannot_reach);
    memset(is_pcie, 0, sizeof is_pcie);
    memset(is_enabled, 0, sizeof is_enabled);
    sim_unlock();
}

void simgpu_set_process(int device, int process)
{
    sim_lock();
    process_of[device] = process;
    sim_unlock();
}

void simgpu_set_peer_access(int device, int peer, bool can)
{
    sim_lock();
    cannot_reach[device][peer] = !can;
    sim_unlock();
}

void simgpu_set_pcie(int device, int peer, bool is)
{
    sim_lock();
    is_pcie[device][peer] = is;
    sim_unlock();
}

bool simgpu_has_peer_access(int device, int peer)
{
    sim_lock();
    bool has = is_enabled[device][peer];
    sim_unlock();
    return has;
}

static bool is_device(int ordinal)
{
    return ordinal >= 0 && ordinal < sim_settings.devices;
}

/* Locked. A device does not count as its own peer. */
static bool can_reach(int device, int peer)
{
    return device != peer && !cannot_reach[device][peer];
}

cudaError_t cudaDeviceCanAccessPeer(int *out, int device, int peer)
{
    SIM_ENTER();
    if (!is_device(device) || !is_device(peer)) {
        return sim_error(cudaErrorInvalidDevice);
    }
    sim_lock();
    *out = can_reach(device, peer);
    sim_unlock();
    return cudaSuccess;
}

cudaError_t cudaDeviceGetP2PAttribute(int *out, enum cudaDeviceP2PAttr what, int device,
                                      int peer)
{
    SIM_ENTER();
    if (!is_device(device) || !is_device(peer) || device == peer) {
        return sim_error(cudaErrorInvalidDevice);
    }
    if (what != cudaDevP2PAttrNativeAtomicSupported) {
        return sim_error(cudaErrorInvalidValue);
    }
    sim_lock();
    *out = can_reach(device, peer) && !is_pcie[device][peer];
    sim_unlock();
    return cudaSuccess;
}

cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned flags)
{
    SIM_ENTER();
    int device = sim_current_device();
    if (flags != 0) {
        return sim_error(cudaErrorInvalidValue);
    }
    if (!is_device(peer)) {
        return sim_error(cudaErrorInvalidDevice);
    }
    sim_lock();
    bool can = can_reach(device, peer), was_enabled = is_enabled[device][peer];
    is_enabled[device][peer] = can;
    sim_unlock();
    if (!can) {
        return sim_error(cudaErrorInvalidDevice);
    }
    return sim_error(was_enabled ? cudaErrorPeerAccessAlreadyEnabled : cudaSuccess);
}

cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t *out, void *data)
{
    SIM_ENTER();
    void *base = sim_memory_base(data);
    if (!base) {
        return sim_error(cudaErrorInvalidValue);
    }
    memset(out, 0, sizeof *out);
    memcpy(out->reserved, mark, sizeof mark);
    memcpy(out->reserved + sizeof mark, &base, sizeof base);
    return cudaSuccess;
}

/* Locked. Once more where it is open: CUDA counts. */
static bool note_opening(void *base, int process)
{
    struct opening *opening = opening_of(base, process);
    for (int i = 0; i < MOST_OPEN && !opening; i++) {
        if (openings[i].count == 0) {
            opening = &openings[i];
            *opening = (struct opening){.base = base, .process = process};
        }
    }
    if (opening) {
        opening->count += 1;
    }
    return opening != NULL;
}

cudaError_t cudaIpcOpenMemHandle(void **out, cudaIpcMemHandle_t handle, unsigned flags)
{
    SIM_ENTER();
    void *base = NULL;
    int device = sim_current_device();
    if (flags != cudaIpcMemLazyEnablePeerAccess ||
        memcmp(handle.reserved, mark, sizeof mark) != 0) {
        return sim_error(cudaErrorInvalidValue);
    }
    memcpy(&base, handle.reserved + sizeof mark, sizeof base);
    if (sim_memory_base(base) != base) { /* it has been freed */
        return sim_error(cudaErrorInvalidResourceHandle);
    }
    int owner = sim_memory_device(base);
    sim_lock();
    bool is_own = process_of[owner] == process_of[device];
    bool is_reached = owner == device || can_reach(device, owner);
    bool is_noted = !is_own && is_reached && note_opening(base, process_of[device]);
    if (is_noted && owner != device) {
        is_enabled[device][owner] = true;
    }
    sim_unlock();
    if (is_own) {
        return sim_error(cudaErrorInvalidResourceHandle);
    }
    if (!is_noted) {
        return sim_error(cudaErrorMapBufferObjectFailed);
    }
    *out = base;
    return cudaSuccess;
}

cudaError_t cudaIpcCloseMemHandle(void *data)
{
    SIM_ENTER();
    int device = sim_current_device();
    if (sim_wait_for_device(device) != cudaSuccess) {
        return cudaPeekAtLastError();
    }
    sim_lock();
    struct opening *opening = opening_of(data, process_of[device]);
    if (opening) {
        opening->count -= 1;
    }
    sim_unlock();
    if (!opening) {
        sim_violate("memory of another process (%p) is closed that is not open", data);
        return sim_error(cudaErrorInvalidValue);
    }
    return sim_error(sim_leave());
}
