/* Numbered batches between events. */
#include "nccl_batches.h"

#include <string.h>

#include "base/mem.h"
#include "cuda_check.h"

void cp_nccl_purpose_set(struct cp_nccl_purpose *purpose, int world,
                         const struct cp_xfer *xfers, int count, uint64_t call)
{
    purpose->call = call;
    memset(purpose->has_peer, 0, (size_t)world * sizeof *purpose->has_peer);
    for (int i = 0; i < count; i++) {
        if (xfers[i].bytes > 0) {
            purpose->has_peer[xfers[i].peer] = true;
        }
    }
}

static struct cp_nccl_batch *batch_of(struct cp_nccl_batches *batches, uint64_t number)
{
    return &batches->batch[number % CP_NCCL_BATCHES];
}

static enum cp_code create_event(cudaEvent_t *out)
{
    return cp_cuda_check(cudaEventCreateWithFlags(out, cudaEventDisableTiming),
                         "cudaEventCreateWithFlags for NCCL");
}

enum cp_code cp_nccl_batches_create(int world, struct cp_nccl_batches **out)
{
    void *block = NULL;
    enum cp_code code = CP_OK;
    size_t flags = CP_NCCL_BATCHES * (size_t)world * sizeof(bool);
    CP_TRY(cp_mem_create(sizeof(struct cp_nccl_batches) + flags, "batches", &block));
    struct cp_nccl_batches *batches = block;
    bool *has_peer = (bool *)(batches + 1);
    batches->world = world;
    for (int i = 0; i < CP_NCCL_BATCHES; i++) {
        struct cp_nccl_batch *batch = &batches->batch[i];
        batch->purpose.has_peer = has_peer + (size_t)i * (size_t)world;
        CP_TRY_GOTO(code, create_event(&batch->begin), done);
        CP_TRY_GOTO(code, create_event(&batch->end), done);
    }
    *out = batches;
    return CP_OK;
done:
    cp_nccl_batches_destroy(&batches);
    return code;
}

void cp_nccl_batches_destroy(struct cp_nccl_batches **batches)
{
    for (int i = 0; *batches != NULL && i < CP_NCCL_BATCHES; i++) {
        struct cp_nccl_batch *batch = &(*batches)->batch[i];
        if (batch->begin != NULL) {
            (void)cudaEventDestroy(batch->begin);
        }
        if (batch->end != NULL) {
            (void)cudaEventDestroy(batch->end);
        }
    }
    cp_mem_destroy(batches);
}

void cp_nccl_batches_forget(struct cp_nccl_batches **batches)
{
    cp_mem_destroy(batches);
}

bool cp_nccl_batches_has_room(const struct cp_nccl_batches *batches)
{
    return batches->posted - batches->ended < CP_NCCL_BATCHES;
}

enum cp_code cp_nccl_batches_begin(struct cp_nccl_batches *batches,
                                   const struct cp_xfer *xfers, int count,
                                   uint64_t call, cudaStream_t stream)
{
    struct cp_nccl_batch *batch = batch_of(batches, batches->posted + 1);
    cp_nccl_purpose_set(&batch->purpose, batches->world, xfers, count, call);
    return cp_cuda_check(cudaEventRecord(batch->begin, stream),
                         "cudaEventRecord before a batch");
}

enum cp_code cp_nccl_batches_end(struct cp_nccl_batches *batches, cudaStream_t stream)
{
    struct cp_nccl_batch *batch = batch_of(batches, batches->posted + 1);
    CP_TRY(cp_cuda_check(cudaEventRecord(batch->end, stream),
                         "cudaEventRecord behind a batch"));
    batches->posted += 1;
    return CP_OK;
}

enum cp_code cp_nccl_event_query(cudaEvent_t event)
{
    return cp_cuda_query(event, "a batch of NCCL, or the device's work before it,");
}

enum cp_code cp_nccl_batches_reap(struct cp_nccl_batches *batches)
{
    while (batches->ended < batches->posted) {
        enum cp_code code =
            cp_nccl_event_query(batch_of(batches, batches->ended + 1)->end);
        if (code != CP_OK) {
            return code == CP_AGAIN ? CP_OK : code;
        }
        batches->ended += 1;
    }
    return CP_OK;
}

const struct cp_nccl_batch *
cp_nccl_batches_oldest(const struct cp_nccl_batches *batches)
{
    return batches->ended < batches->posted
               ? &batches->batch[(batches->ended + 1) % CP_NCCL_BATCHES]
               : NULL;
}
