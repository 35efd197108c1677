/* Inboxes and windows: made, told, mapped, let go. */
#include "ipc_memory.h"

#include <string.h>

#include "base/checked.h"
#include "cuda_check.h"

/* What is shared is whole pieces of this size: the driver puts smaller blocks into one
 * that all are in, and a handle shows the whole of it. */
static const size_t piece_bytes = (size_t)2 << 20;

static struct cp_ipc_notice *notice_of(const struct cp_ipc_memory *memory, int rank)
{
    return (struct cp_ipc_notice *)(void *)memory->boards.of[rank].bytes;
}

static struct cp_ipc_notice *own_notice(const struct cp_ipc_memory *memory)
{
    return notice_of(memory, memory->rank);
}

/* ---- the own memory ---- */

static enum cp_code alloc(size_t bytes, const char *what, int rank, void **out,
                          cudaIpcMemHandle_t *handle)
{
    void *data = NULL;
    cudaError_t error = cudaMalloc(&data, bytes);
    if (error == cudaErrorMemoryAllocation) {
        (void)cudaGetLastError();
        return cp_fail_rank(CP_ERR_NO_MEMORY, rank,
                            "no memory for %s of rank %d: %zu bytes of its GPU", what,
                            rank, bytes);
    }
    CP_TRY(cp_cuda_check(error, "cudaMalloc"));
    enum cp_code code =
        cp_cuda_check(cudaIpcGetMemHandle(handle, data), "cudaIpcGetMemHandle");
    if (code != CP_OK) {
        (void)cudaFree(data);
        return code;
    }
    *out = data;
    return CP_OK;
}

static enum cp_code make_inbox(struct cp_ipc_memory *memory)
{
    struct cp_ipc_notice *notice = own_notice(memory);
    void *data = NULL;
    CP_TRY(alloc(piece_bytes, "the inbox", memory->rank, &data, &notice->inbox_handle));
    cudaError_t error = cudaMemset(data, 0, sizeof(struct cp_ipc_inbox));
    if (error == cudaSuccess) {
        error = cudaStreamSynchronize(NULL); /* before anybody writes there */
    }
    if (error != cudaSuccess) {
        (void)cudaFree(data);
        return cp_cuda_check(error, "cudaMemset");
    }
    memory->own_inbox = data;
    notice->inbox = data;
    return CP_OK;
}

/* Threads of one process that have different devices. */
static enum cp_code open_ways(const struct cp_ipc_memory *memory)
{
    const struct cp_ipc_peer *own = &memory->peer[memory->rank];
    for (int rank = 0; rank < memory->world; rank++) {
        const struct cp_ipc_peer *peer = &memory->peer[rank];
        if (!peer->is_local || peer->device == own->device) {
            continue;
        }
        cudaError_t error = cudaDeviceEnablePeerAccess(peer->device, 0);
        if (error == cudaErrorPeerAccessAlreadyEnabled) {
            (void)cudaGetLastError();
        } else {
            CP_TRY(cp_cuda_check(error, "cudaDeviceEnablePeerAccess"));
        }
    }
    return CP_OK;
}

enum cp_code cp_ipc_memory_init(struct cp_ipc_memory *memory,
                                const struct cp_watch *watch, struct cp_boards boards,
                                const struct cp_ipc_peer *peers)
{
    memset(memory, 0, sizeof *memory);
    memory->watch = watch;
    memory->boards = boards;
    memory->rank = watch->rank;
    memory->world = watch->world;
    memcpy(memory->peer, peers, (size_t)watch->world * sizeof *peers);
    CP_TRY(open_ways(memory));
    return make_inbox(memory);
}

enum cp_code cp_ipc_memory_reserve(struct cp_ipc_memory *memory, size_t bytes)
{
    struct cp_ipc_notice *notice = own_notice(memory);
    int rank = memory->rank;
    size_t least = 0, wanted = 0;
    void *data = NULL;
    cudaIpcMemHandle_t handle;
    if (bytes <= memory->own_bytes) {
        return CP_OK;
    }
    if (memory->own_windows == CP_IPC_WINDOWS ||
        !cp_size_round_up(bytes, piece_bytes, &least)) {
        return cp_fail_rank(CP_ERR_NO_MEMORY, rank, "a window cannot hold %zu bytes",
                            bytes);
    }
    wanted = least > 2 * memory->own_bytes ? least : 2 * memory->own_bytes;
    enum cp_code code = alloc(wanted, "the window", rank, &data, &handle);
    if (code == CP_ERR_NO_MEMORY && wanted > least) {
        wanted = least;
        code = alloc(wanted, "the window", rank, &data, &handle);
    }
    CP_TRY(code);
    memory->own_window[memory->own_windows] = data;
    memory->own_windows += 1;
    memory->own_bytes = wanted;
    notice->window_handle = handle;
    notice->window = data;
    notice->windows = (uint64_t)memory->own_windows;
    return CP_OK;
}

/* ---- that of others ---- */

static bool is_wanted(const struct cp_ipc_memory *memory, int rank)
{
    return atomic_load(&notice_of(memory, rank)->is_closing) != 0;
}

bool cp_ipc_memory_uses(const struct cp_ipc_memory *memory, int rank)
{
    return !memory->is_left[rank] && atomic_load(&own_notice(memory)->uses[rank]) != 0;
}

bool cp_ipc_memory_leave(struct cp_ipc_memory *memory, int rank)
{
    bool is_last = cp_ipc_memory_uses(memory, rank) && is_wanted(memory, rank);
    memory->is_left[rank] = memory->is_left[rank] || is_last;
    return is_last;
}

bool cp_ipc_memory_is_kept(const struct cp_ipc_memory *memory, int rank)
{
    return atomic_load(&notice_of(memory, rank)->is_kept) != 0;
}

static enum cp_code map(struct cp_ipc_memory *memory, int rank, const char *what,
                        void *address, cudaIpcMemHandle_t handle, void **out)
{
    if (memory->peer[rank].is_local) {
        *out = address;
        return CP_OK;
    }
    cudaError_t error =
        cudaIpcOpenMemHandle(out, handle, cudaIpcMemLazyEnablePeerAccess);
    if (error != cudaSuccess) {
        (void)cudaGetLastError();
        return cp_fail_rank(CP_ERR_DEVICE, memory->rank,
                            "rank %d cannot map %s of rank %d: "
                            "cudaIpcOpenMemHandle says %s (%s)",
                            memory->rank, what, rank, cudaGetErrorString(error),
                            cudaGetErrorName(error));
    }
    memory->mapped[rank][memory->mappings[rank]] = *out;
    memory->mappings[rank] += 1;
    return CP_OK;
}

/* First said, then looked: its owner says first that it closes, and then looks here. */
static bool may_use(struct cp_ipc_memory *memory, int rank)
{
    if (memory->is_left[rank]) {
        return false;
    }
    atomic_store(&own_notice(memory)->uses[rank], 1);
    if (is_wanted(memory, rank)) {
        cp_ipc_memory_let_go(memory, rank);
        return false;
    }
    return true;
}

static enum cp_code attach_one(struct cp_ipc_memory *memory, int rank)
{
    const struct cp_ipc_notice *notice = notice_of(memory, rank);
    void *inbox = NULL;
    if (rank != memory->rank && !may_use(memory, rank)) {
        return cp_fail_rank(
            CP_ERR_COMM, rank,
            "rank %d has closed its context, whose memory rank %d was to "
            "map",
            rank, memory->rank);
    }
    if (memory->inbox[rank] == NULL) {
        CP_TRY(map(memory, rank, "the inbox", notice->inbox, notice->inbox_handle,
                   &inbox));
        memory->inbox[rank] = inbox;
    }
    if (memory->attached[rank] != notice->windows) {
        CP_TRY(map(memory, rank, "the window", notice->window, notice->window_handle,
                   &memory->window[rank]));
        memory->attached[rank] = notice->windows;
    }
    return CP_OK;
}

enum cp_code cp_ipc_memory_attach(struct cp_ipc_memory *memory)
{
    for (int rank = 0; rank < memory->world; rank++) {
        CP_TRY(attach_one(memory, rank));
    }
    return CP_OK;
}

void cp_ipc_memory_let_go(struct cp_ipc_memory *memory, int rank)
{
    for (int i = 0; i < memory->mappings[rank]; i++) {
        (void)cudaIpcCloseMemHandle(memory->mapped[rank][i]);
    }
    (void)cudaGetLastError();
    memory->mappings[rank] = 0;
    atomic_store(&own_notice(memory)->uses[rank], 0);
}

/* ---- the end ---- */

void cp_ipc_memory_keep(struct cp_ipc_memory *memory)
{
    (void)cp_mapping_share(memory->boards.in);
    atomic_store(&own_notice(memory)->is_kept, 1);
    memory->watch = NULL;
}

void cp_ipc_memory_ask_back(struct cp_ipc_memory *memory)
{
    atomic_store(&own_notice(memory)->is_closing, 1);
}

/* By that rank, as far as its notice says. Who has closed counts as dead, and may use it
 * all the same; who dies after that, or after this rank has closed, uses it for ever. */
static bool is_used_by(const struct cp_ipc_memory *memory, int rank)
{
    const struct cp_watch *watch = memory->watch;
    return rank != memory->rank &&
           atomic_load(&notice_of(memory, rank)->uses[memory->rank]) != 0 &&
           (watch == NULL || cp_ipc_memory_is_kept(memory, rank) ||
            !watch->is_dead(watch->peers, rank));
}

bool cp_ipc_memory_is_used(const struct cp_ipc_memory *memory)
{
    bool is_used = false;
    for (int rank = 0; rank < memory->world; rank++) {
        is_used = is_used || is_used_by(memory, rank);
    }
    return is_used;
}

void cp_ipc_memory_free(struct cp_ipc_memory *memory)
{
    for (int i = 0; i < memory->own_windows; i++) {
        (void)cudaFree(memory->own_window[i]);
    }
    (void)cudaFree(memory->own_inbox);
    (void)cudaGetLastError();
    memory->own_windows = 0;
    memory->own_inbox = NULL;
}

void cp_ipc_memory_fini(struct cp_ipc_memory *memory)
{
    if (!cp_ipc_memory_is_used(memory)) {
        cp_ipc_memory_free(memory);
    }
    if (memory->watch == NULL) {
        cp_mapping_drop(&memory->boards.in);
    }
    memset(memory, 0, sizeof *memory);
}
