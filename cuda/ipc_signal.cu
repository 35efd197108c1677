/* The kernels of signals: a thread for each rank, where all are meant. */
#include "ipc_signal.h"
#include "launch.h"
#include "system_word.cuh"

namespace
{

static_assert((int)CP_IPC_SIGNALS <= (int)CP_IPC_LINE, "a line has all signals");

/* A thread that waits looks again after a pause that grows up to this; a microsecond is
 * what a signal takes over NVLink. */
constexpr unsigned FIRST_PAUSE_NS = 32, LONGEST_PAUSE_NS = 1024;
/* The host's memory lies behind PCIe: it is looked at once in so many looks. */
constexpr unsigned LOOKS = 64;

__device__ cp_ipc_inbox *own_inbox(const cp_ipc_ends &ends)
{
    return ends.inbox[ends.rank];
}

__device__ uint64_t epoch_of(const cp_ipc_ends &ends, int rank)
{
    return cp_load_system(&own_inbox(ends)->from[rank][CP_IPC_EPOCH]);
}

/* Is the peer in this rank's epoch, but in another call? Then nothing that follows is to be
 * believed. Until this rank leaves the epoch, the peer stays in it and its words as they
 * are. */
__device__ bool is_odd(const cp_ipc_ends &ends, int peer)
{
    cp_ipc_inbox *own = own_inbox(ends);
    cp_ipc_note *note = &ends.desk->odd[peer];
    if (epoch_of(ends, peer) != epoch_of(ends, ends.rank)) {
        return false;
    }
    uint64_t its = cp_load_system(&own->from[peer][CP_IPC_CALL]);
    uint64_t mine = cp_load_system(&own->from[ends.rank][CP_IPC_CALL]);
    if (its == mine) {
        return false;
    }
    cp_store_system(&note->call, mine);
    cp_store_system(&note->value, its);
    return true;
}

/* Is the peer in none of its calls? */
__device__ bool is_outside(const cp_ipc_ends &ends, int peer)
{
    return cp_load_system(&own_inbox(ends)->from[peer][CP_IPC_LEFT]) >=
           epoch_of(ends, peer);
}

/* Need this wait not go on? In a broken context a call still waits for its turn, lest it
 * write to a peer that is in the call before. */
__device__ bool is_given_up(const cp_ipc_ends &ends, int peer, bool is_inside)
{
    uint64_t over = cp_load_system(&ends.desk->is_over);
    return (over & CP_IPC_OVER_TURNS) != 0 ||
           ((over & CP_IPC_OVER_INSIDE) != 0 && (is_inside || is_outside(ends, peer)));
}

__device__ void wait(const cp_ipc_ends &ends, int peer, int signal, uint64_t value,
                     uint64_t call)
{
    cp_ipc_inbox *own = own_inbox(ends);
    const uint64_t *counter = &own->from[peer][signal];
    cp_ipc_note *note = &ends.desk->note[peer][signal];
    unsigned pause_ns = FIRST_PAUSE_NS, looks = 0;
    bool is_over = false;
    bool is_inside = signal != CP_IPC_LEFT; /* of an epoch */
    while (cp_load_system(counter) < value && !is_over) {
        looks += 1;
        if (looks % LOOKS == 0) {
            cp_store_system(&note->call, call);
            cp_store_system(&note->value, value);
            is_over =
                (is_inside && is_odd(ends, peer)) || is_given_up(ends, peer, is_inside);
        }
        __nanosleep(pause_ns);
        pause_ns = pause_ns < LONGEST_PAUSE_NS ? 2 * pause_ns : LONGEST_PAUSE_NS;
    }
    if (looks >= LOOKS) {
        cp_store_system(&note->value, 0);
    }
    if (is_over || (is_inside && is_odd(ends, peer))) {
        cp_store_system(&own->is_broken, 1);
    }
}

__global__ void begin_kernel(cp_ipc_ends ends, uint64_t call)
{
    __shared__ uint64_t turn;
    int peer = (int)threadIdx.x;
    if (peer == 0) {
        turn = cp_count_up(&own_inbox(ends)->come);
    }
    __syncthreads();
    uint64_t epoch = turn;
    wait(ends, peer, CP_IPC_LEFT, epoch - 1, call);
    __syncthreads(); /* until all have left */
    uint64_t *line = ends.inbox[peer]->from[ends.rank];
    cp_store_system(&line[CP_IPC_CALL], call);
    cp_store_system(&line[CP_IPC_EPOCH], epoch);
}

__global__ void end_kernel(cp_ipc_ends ends)
{
    cp_store_system(&ends.inbox[threadIdx.x]->from[ends.rank][CP_IPC_LEFT],
                    epoch_of(ends, ends.rank));
}

__global__ void publish_kernel(cp_ipc_ends ends, int signal, uint64_t value)
{
    if (cp_load_system(&own_inbox(ends)->is_broken) == 0) {
        cp_store_system(&ends.inbox[threadIdx.x]->from[ends.rank][signal],
                        CP_COMM_COUNTER(epoch_of(ends, ends.rank), value));
    }
}

__global__ void wait_kernel(cp_ipc_ends ends, cp_ipc_waits waits, uint64_t call)
{
    const cp_ipc_wait &own = waits.of[threadIdx.x];
    wait(ends, own.peer, own.signal,
         CP_COMM_COUNTER(epoch_of(ends, ends.rank), own.value), call);
}

} // namespace

enum cp_code cp_ipc_begin(const struct cp_ipc_ends *ends, uint64_t call,
                          struct cp_stream *stream)
{
    return cp_cuda_launch_waiting(begin_kernel, 1, (unsigned)ends->world, stream, *ends,
                                  call);
}

enum cp_code cp_ipc_end(const struct cp_ipc_ends *ends, struct cp_stream *stream)
{
    return cp_cuda_launch(end_kernel, 1, (unsigned)ends->world, stream, *ends);
}

enum cp_code cp_ipc_publish(const struct cp_ipc_ends *ends, int signal, uint64_t value,
                            struct cp_stream *stream)
{
    return cp_cuda_launch(publish_kernel, 1, (unsigned)ends->world, stream, *ends,
                          signal, value);
}

enum cp_code cp_ipc_await(const struct cp_ipc_ends *ends,
                          const struct cp_ipc_waits *waits, uint64_t call,
                          struct cp_stream *stream)
{
    return cp_cuda_launch(wait_kernel, 1, (unsigned)waits->count, stream, *ends, *waits,
                          call);
}
