/* The two kernels of a signal: a thread for each rank. */
#include "ipc_signal.h"
#include "launch.h"
#include "system_word.cuh"

namespace
{

/* A thread that waits looks again after a pause that grows up to this; a microsecond is
 * what a signal takes over NVLink. */
constexpr unsigned FIRST_PAUSE_NS = 32, LONGEST_PAUSE_NS = 1024;
/* The host's memory lies behind PCIe: it is looked at once in so many looks. */
constexpr unsigned LOOKS = 64;

__global__ void publish_kernel(cp_ipc_ends ends, int signal, uint64_t value)
{
    int to = (int)threadIdx.x;
    bool is_broken = cp_load_system(&ends.inbox[ends.rank]->is_broken) != 0;
    if (!is_broken || signal == CP_IPC_LEFT) {
        cp_store_system(&ends.inbox[to]->from[ends.rank][signal], value);
    }
}

__global__ void wait_kernel(cp_ipc_ends ends, uint32_t peers, int signal,
                            uint64_t value, uint64_t call)
{
    unsigned peer = threadIdx.x;
    cp_ipc_inbox *own = ends.inbox[ends.rank];
    const uint64_t *counter = &own->from[peer][signal];
    cp_ipc_note *note = &ends.desk->note[peer][signal];
    unsigned pause_ns = FIRST_PAUSE_NS, looks = 0;
    if (!(peers >> peer & 1)) {
        return;
    }
    while (cp_load_system(counter) < value) {
        looks += 1;
        if (looks % LOOKS == 0) {
            cp_store_system(&note->call, call);
            cp_store_system(&note->value, value);
            if (cp_load_system(&ends.desk->is_over) != 0) {
                cp_store_system(&own->is_broken, 1);
                break;
            }
        }
        __nanosleep(pause_ns);
        pause_ns = pause_ns < LONGEST_PAUSE_NS ? 2 * pause_ns : LONGEST_PAUSE_NS;
    }
    if (looks >= LOOKS) {
        cp_store_system(&note->value, 0);
    }
}

} // namespace

enum cp_code cp_ipc_publish(const struct cp_ipc_ends *ends, int signal, uint64_t value,
                            struct cp_stream *stream)
{
    return cp_cuda_launch(publish_kernel, 1, (unsigned)ends->world, stream, *ends,
                          signal, value);
}

enum cp_code cp_ipc_await(const struct cp_ipc_ends *ends, uint32_t peers, int signal,
                          uint64_t value, uint64_t call, struct cp_stream *stream)
{
    return cp_cuda_launch(wait_kernel, 1, (unsigned)ends->world, stream, *ends, peers,
                          signal, value, call);
}
