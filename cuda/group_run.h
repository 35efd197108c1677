/* Query heads of a block in runs of whole groups: kernels that share key heads among
 * equally many query heads each, counted from the first, can take one. */
#ifndef CP_CUDA_GROUP_RUN_H
#define CP_CUDA_GROUP_RUN_H

#include "kernel/kernel.h"

/* A rank's share of the heads may begin and end in the middle of a group. */
enum { CP_MOST_RUNS = 3 };

/* Places within the block. */
struct cp_group_run {
    int64_t head, heads;
    int64_t kv_head, kv_heads; /* heads / kv_heads use each, in order */
};

/* The longest run from `head` on, one of `heads`. */
struct cp_group_run cp_group_run_at(const struct cp_place *place, int64_t heads,
                                    int64_t head);

#endif
