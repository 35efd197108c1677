/* A device of each generation stands for all of it, by the link that most of them have.
 *
 * What a kernel reads in the memory of another device is kept by the cache of that device
 * alone, so attention that meets keys in a window takes the link for every tile of queries.
 *
 * Assumed, since nobody publishes it: 3 us between two kernels of a stream that wait for
 * each other; 3 us of the host for a launch and its event; 12 us until a group of NCCL's is
 * on its way, 3 us until a signal in a peer's memory is seen. */
#include "schedule/machine.h"

#define HOST_AND_LAUNCH .launch_s = 3e-6, .enqueue_s = 3e-6

/* H100 SXM5. Datasheet: 132 processors, 3.35 TB/s, NVLink 450 GB/s each way. Attention in
 * bfloat16, D 128: 648 TFLOP/s forward and 561 backward at 16,384 tokens (FlashAttention-3,
 * arXiv 2407.08608, figures 5 and 6). */
#define H100                                                                           \
    HOST_AND_LAUNCH, .attend_ops = 648e12, .grad_ops = 561e12, .processors = 132.0,    \
        .tile_rows = 128.0, .is_merged = true, .memory_bytes = 3.35e12

/* L20. Datasheet: 119.5 TFLOP/s in bfloat16, 92 processors, 864 GB/s, PCIe 4.0 x16.
 * Attention reaches 73 % of the peak forward and 63 % backward, as FlashAttention-2 does on
 * an A100 (arXiv 2307.08691). */
#define L20                                                                            \
    HOST_AND_LAUNCH, .attend_ops = 87e12, .grad_ops = 75e12, .processors = 92.0,       \
        .tile_rows = 128.0, .is_merged = true, .memory_bytes = 0.864e12

static const struct cp_machine machines[] = {
    {
        .name = "H100",
        .generation = 90,
        /* NVLink 4 by copies from a peer, and by NCCL's exchanges, of 450 GB/s. */
        .windows = {H100, .link_bytes = 378e9, .link_s = 3e-6, .is_uncached = true},
        .messages = {H100, .link_bytes = 300e9, .link_s = 12e-6},
    },
    {
        .name = "L20",
        .generation = 89,
        /* PCIe 4.0 x16, of 31.5 GB/s: what is read of a peer in long rows, and NCCL's. */
        .windows = {L20, .link_bytes = 24e9, .link_s = 3e-6, .is_uncached = true},
        .messages = {L20, .link_bytes = 20e9, .link_s = 12e-6},
    },
};

const struct cp_machine *cp_machine_of(int64_t generation)
{
    for (size_t i = 0; i < sizeof machines / sizeof *machines; i++) {
        if (machines[i].generation == generation) {
            return &machines[i];
        }
    }
    return NULL;
}
