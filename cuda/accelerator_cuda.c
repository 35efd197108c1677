/* What a rank offers are the facts by which the transport is chosen. Where that is NCCL, all
 * offer once more: which communicator of the caller's they could be connected by, and rank 0
 * the id by which NCCL's ranks meet where not all have one. NCCL is opened once, when an
 * offer needs it, and stays for the life of the process. */
#include "accelerator_cuda.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "capture.h"
#include "comm_ipc.h"
#include "comm_nccl.h"
#include "cuda_check.h"
#include "device_cuda.h"
#include "kernel_cuda.h"
#include "transport.h"

struct offer {
    struct cp_transport_facts facts;
    int32_t is_for_nccl; /* the rest is there */
    ncclUniqueId id;     /* rank 0's */
    char group[64];      /* "": none that fits */
};
_Static_assert(sizeof(struct offer) <= CP_OFFER_BYTES, "an offer must fit");

/* ---- NCCL ---- */

static pthread_mutex_t nccl_mutex = PTHREAD_MUTEX_INITIALIZER;
static const struct cp_nccl *nccl; /* guarded by nccl_mutex; never closed once open */

/* Not found is asked again: a framework may have brought it since. */
static enum cp_code open_nccl(const struct cp_nccl **out)
{
    (void)pthread_mutex_lock(&nccl_mutex);
    enum cp_code code = nccl == NULL ? cp_nccl_open(&nccl) : CP_OK;
    *out = nccl;
    (void)pthread_mutex_unlock(&nccl_mutex);
    return code;
}

/* ---- offers ---- */

/* What is of NCCL alone. */
static enum cp_code offer_nccl(int rank, int world, const struct cp_group *group,
                               struct offer *offer)
{
    const struct cp_nccl *library = NULL;
    CP_TRY(open_nccl(&library));
    offer->is_for_nccl = 1;
    if (rank == 0) {
        CP_TRY(cp_comm_nccl_id(library, &offer->id));
    }
    if (cp_nccl_parent_fits(library, group, rank, world, offer->facts.ordinal)) {
        memcpy(offer->group, group->name, sizeof offer->group);
    }
    return CP_OK;
}

/* Another round is for NCCL alone. */
static enum cp_code cuda_offer(int ordinal, int rank, int world,
                               const struct cp_group *group,
                               const struct cp_offer *before, struct cp_offer *out)
{
    struct offer offer;
    memset(&offer, 0, sizeof offer);
    CP_TRY(cp_transport_describe(ordinal, &offer.facts));
    if (before != NULL) {
        CP_TRY(offer_nccl(rank, world, group, &offer));
    }
    memcpy(out->bytes, &offer, sizeof offer);
    return CP_OK;
}

static struct offer offer_of(const struct cp_connect_args *args, int rank)
{
    struct offer offer;
    memcpy(&offer, args->offers[rank].bytes, sizeof offer);
    offer.facts.name[sizeof offer.facts.name - 1] = '\0';
    offer.facts.boot[sizeof offer.facts.boot - 1] = '\0';
    return offer;
}

/* Windows may be between ranks of one GPU, and newer NCCLs can be told to serve them. */
static bool may_share(void)
{
    const char *text = getenv("CP_ATTN_SHARED_GPU");
    return text != NULL && strcmp(text, "1") == 0;
}

/* Two ranks on one GPU are a launch gone wrong, unless somebody says that they are meant. */
static enum cp_code check_gpus(const struct cp_connect_args *args)
{
    for (int rank = 1; rank < args->watch->world && !may_share(); rank++) {
        const struct cp_transport_facts own = offer_of(args, rank).facts;
        for (int lower = 0; lower < rank; lower++) {
            const struct cp_transport_facts other = offer_of(args, lower).facts;
            if (memcmp(own.gpu, other.gpu, sizeof own.gpu) == 0) {
                return cp_fail_rank(
                    CP_ERR_VALUE, rank,
                    "ranks %d and %d are on one GPU (cuda:%d and cuda:%d, %s); each "
                    "needs its own: call torch.cuda.set_device(LOCAL_RANK) before "
                    "tensors are made, or set CP_ATTN_SHARED_GPU=1 if that is meant",
                    lower, rank, (int)other.ordinal, (int)own.ordinal, own.name);
            }
        }
    }
    return CP_OK;
}

/* Has every rank offered the same group? */
static bool have_group(const struct cp_connect_args *args)
{
    const struct offer first = offer_of(args, 0);
    for (int rank = 0; rank < args->watch->world; rank++) {
        const struct offer own = offer_of(args, rank);
        if (own.group[0] == '\0' ||
            memcmp(own.group, first.group, sizeof own.group) != 0) {
            return false;
        }
    }
    return true;
}

/* ---- the table ---- */

static enum cp_code connect_by_nccl(const struct cp_connect_args *args,
                                    const struct cp_transport_facts *facts,
                                    struct cp_comm **out)
{
    struct cp_comm_nccl_args with = {
        .watch = args->watch,
        .id = offer_of(args, 0).id,
        .group = have_group(args) ? args->group : NULL,
        .device = args->ordinal,
        .timeout = args->timeout,
    };
    (void)facts;
    CP_TRY(open_nccl(&with.nccl));
    return cp_comm_nccl_create(&with, out);
}

static enum cp_code connect_by_ipc(const struct cp_connect_args *args,
                                   const struct cp_transport_facts *facts,
                                   struct cp_comm **out)
{
    struct cp_ipc_peer peers[CP_IPC_RANKS];
    for (int rank = 0; rank < args->watch->world; rank++) {
        peers[rank] = (struct cp_ipc_peer){
            .device = facts[rank].ordinal,
            .is_local = cp_transport_is_local(&facts[rank], &facts[args->watch->rank]),
        };
    }
    struct cp_comm_ipc_args with = {
        .watch = args->watch,
        .boards = args->boards,
        .peers = peers,
        .device = args->ordinal,
        .timeout = args->timeout,
    };
    return cp_comm_ipc_create(&with, out);
}

/* What the offers show to be wrong is the same on all ranks. */
static enum cp_code choose(const struct cp_connect_args *args,
                           const struct cp_transport_facts *facts,
                           enum cp_transport_kind *out)
{
    CP_TRY(
        cp_transport_choose(facts, args->watch->world, args->boards.of != NULL, out));
    return facts[0].wish == CP_TRANSPORT_IPC ? CP_OK : check_gpus(args);
}

/* What goes wrong on this rank alone: the others are on their way. */
static void give_up(const struct cp_connect_args *args)
{
    struct cp_status reason = *cp_last_error();
    reason.rank = reason.rank < 0 ? args->watch->rank : reason.rank;
    cp_watch_poison(args->watch, &reason);
}

static enum cp_code connect(const struct cp_connect_args *args,
                            const struct cp_transport_facts *facts,
                            enum cp_transport_kind kind, struct cp_device **device,
                            struct cp_comm **comm)
{
    struct cp_device *made = NULL;
    enum cp_code code = cp_device_cuda_create(args->ordinal, &made);
    if (code == CP_OK) {
        code = kind == CP_TRANSPORT_IPC ? connect_by_ipc(args, facts, comm)
                                        : connect_by_nccl(args, facts, comm);
    }
    if (code != CP_OK) {
        give_up(args);
        cp_device_cuda_destroy(&made);
        return code;
    }
    *device = made;
    return CP_OK;
}

static enum cp_code cuda_connect(const struct cp_connect_args *args,
                                 struct cp_device **device, struct cp_comm **comm)
{
    int world = args->watch->world;
    enum cp_transport_kind kind = CP_TRANSPORT_NCCL;
    void *block = NULL;
    enum cp_code code = cp_mem_create((size_t)world * sizeof(struct cp_transport_facts),
                                      "offers", &block);
    if (code != CP_OK) {
        give_up(args);
        return code;
    }
    struct cp_transport_facts *facts = block;
    for (int rank = 0; rank < world; rank++) {
        facts[rank] = offer_of(args, rank).facts;
    }
    code = choose(args, facts, &kind);
    if (code == CP_OK && kind == CP_TRANSPORT_NCCL &&
        offer_of(args, 0).is_for_nccl == 0) {
        code = CP_AGAIN;
    }
    if (code == CP_OK) {
        code = connect(args, facts, kind, device, comm);
    }
    cp_mem_destroy(&block);
    return code;
}

static enum cp_code cuda_follow(int ordinal, struct cp_stream *stream,
                                struct cp_stream *before)
{
    int current = ordinal;
    cudaEvent_t event = NULL;
    CP_TRY(cp_cuda_enter(ordinal, &current));
    cudaError_t error = cudaEventCreateWithFlags(&event, cudaEventDisableTiming);
    if (error == cudaSuccess) {
        error = cudaEventRecord(event, (cudaStream_t)before);
    }
    if (error == cudaSuccess) {
        error = cudaStreamWaitEvent((cudaStream_t)stream, event, 0);
    }
    if (event != NULL) {
        (void)cudaEventDestroy(event); /* once it has happened */
    }
    return cp_cuda_leave(ordinal, current,
                         cp_cuda_check(error, "ordering two streams"));
}

const struct cp_accelerator cp_accelerator_cuda = {
    .name = "cuda",
    .abi = CP_ACCELERATOR_ABI,
    .kernels = {.select = cp_kernel_cuda_select},
    .check = cp_cuda_check_ordinal,
    .generation = cp_cuda_generation,
    .offer = cuda_offer,
    .connect = cuda_connect,
    .close = cp_device_cuda_destroy,
    .alloc = cp_cuda_alloc,
    .free = cp_cuda_free,
    .capture = cp_cuda_capture_at,
    .follow = cuda_follow,
};
