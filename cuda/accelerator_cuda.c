/* What a rank offers is which GPU it has, and which communicator of the caller's it could
 * be connected by; rank 0 adds the id by which NCCL's ranks meet where not all have one.
 * NCCL is opened once, by the first offer, and stays for the life of the process. */
#include "accelerator_cuda.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "capture.h"
#include "comm_nccl.h"
#include "cuda_check.h"
#include "device_cuda.h"
#include "kernel_cuda.h"

struct offer {
    ncclUniqueId id; /* rank 0's */
    char gpu[16];    /* its UUID */
    char name[256];
    char group[64]; /* "": none that fits */
    int32_t ordinal;
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

static enum cp_code describe(int ordinal, struct offer *offer)
{
    struct cudaDeviceProp properties;
    CP_TRY(cp_cuda_check_ordinal(ordinal));
    CP_TRY(cp_cuda_check(cudaGetDeviceProperties(&properties, ordinal),
                         "cudaGetDeviceProperties"));
    offer->ordinal = ordinal;
    memcpy(offer->gpu, properties.uuid.bytes, sizeof offer->gpu);
    (void)snprintf(offer->name, sizeof offer->name, "%.255s", properties.name);
    return CP_OK;
}

static enum cp_code cuda_offer(int ordinal, int rank, int world,
                               const struct cp_group *group, struct cp_offer *out)
{
    const struct cp_nccl *library = NULL;
    struct offer offer;
    memset(&offer, 0, sizeof offer);
    CP_TRY(describe(ordinal, &offer));
    CP_TRY(open_nccl(&library));
    if (rank == 0) {
        CP_TRY(cp_comm_nccl_id(library, &offer.id));
    }
    if (cp_nccl_parent_fits(library, group, rank, world, ordinal)) {
        memcpy(offer.group, group->name, sizeof offer.group);
    }
    memcpy(out->bytes, &offer, sizeof offer);
    return CP_OK;
}

static struct offer offer_of(const struct cp_connect_args *args, int rank)
{
    struct offer offer;
    memcpy(&offer, args->offers[rank].bytes, sizeof offer);
    offer.name[sizeof offer.name - 1] = '\0';
    return offer;
}

/* Newer NCCLs can be told to serve several ranks on one GPU. */
static bool may_share(void)
{
    const char *text = getenv("CP_ATTN_SHARED_GPU");
    return text != NULL && strcmp(text, "1") == 0;
}

static enum cp_code check_offers(const struct cp_connect_args *args)
{
    for (int rank = 1; rank < args->watch->world && !may_share(); rank++) {
        const struct offer own = offer_of(args, rank);
        for (int lower = 0; lower < rank; lower++) {
            const struct offer other = offer_of(args, lower);
            if (memcmp(own.gpu, other.gpu, sizeof own.gpu) == 0) {
                return cp_fail_rank(
                    CP_ERR_VALUE, rank,
                    "ranks %d and %d are on one GPU (cuda:%d and cuda:%d, %s); each "
                    "needs its own: call torch.cuda.set_device(LOCAL_RANK) before "
                    "tensors are made, or set CP_ATTN_SHARED_GPU=1 where NCCL allows "
                    "it",
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

static enum cp_code cuda_connect(const struct cp_connect_args *args,
                                 struct cp_device **device, struct cp_comm **comm)
{
    struct cp_device *made = NULL;
    CP_TRY(check_offers(args));
    struct cp_comm_nccl_args with = {
        .watch = args->watch,
        .id = offer_of(args, 0).id,
        .group = have_group(args) ? args->group : NULL,
        .device = args->ordinal,
        .timeout = args->timeout,
    };
    enum cp_code code = open_nccl(&with.nccl);
    if (code == CP_OK) {
        code = cp_device_cuda_create(args->ordinal, &made);
    }
    if (code != CP_OK) {
        struct cp_status reason = *cp_last_error(); /* the others are on their way */
        reason.rank = args->watch->rank;
        cp_watch_poison(args->watch, &reason);
        return code;
    }
    code = cp_comm_nccl_create(&with, comm);
    if (code != CP_OK) {
        cp_device_cuda_destroy(&made);
        return code;
    }
    *device = made;
    return CP_OK;
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
