/* By what the GPUs of the ranks are joined: windows between them (cuda/comm_ipc.h) or NCCL.
 *
 * Each rank tells facts of itself in its offer; the choice follows from the facts of all,
 * so it is the same on all ranks, as is the error where there is none to make. Windows are
 * chosen where all ranks are on one host and each pair has peer access, or is two processes
 * on one GPU; CP_ATTN_TRANSPORT (ipc, nccl, auto) forces it. */
#ifndef CP_CUDA_TRANSPORT_H
#define CP_CUDA_TRANSPORT_H

#include <stdbool.h>
#include <stdint.h>

#include "base/status.h"

enum cp_transport_kind { CP_TRANSPORT_AUTO, CP_TRANSPORT_IPC, CP_TRANSPORT_NCCL };

enum { CP_GPU_ID = 16, CP_REACHED = 16 };

struct cp_transport_facts {
    char gpu[CP_GPU_ID];                 /* its UUID */
    char reached[CP_REACHED][CP_GPU_ID]; /* of GPUs that this process sees, and whose
                                            memory this one reaches */
    char name[80];                       /* of the GPU */
    char boot[40]; /* of the running system: no two have the same; "": not known */
    uint64_t ipc_space, pid_space, pid; /* the process and its namespaces */
    int32_t reached_count, ordinal;
    int32_t wish; /* enum cp_transport_kind */
};

/* CP_ERR_VALUE where CP_ATTN_TRANSPORT has another value. */
CP_NODISCARD enum cp_code cp_transport_wish(enum cp_transport_kind *out);

/* Of this process with that device. */
CP_NODISCARD enum cp_code cp_transport_describe(int ordinal,
                                                struct cp_transport_facts *out);

/* Are these two threads of one process? */
bool cp_transport_is_local(const struct cp_transport_facts *one,
                           const struct cp_transport_facts *other);

/* `facts`: of all ranks, in their order. `have_boards`: they share memory of the host. */
CP_NODISCARD enum cp_code cp_transport_choose(const struct cp_transport_facts *facts,
                                              int world, bool have_boards,
                                              enum cp_transport_kind *out);

#endif
