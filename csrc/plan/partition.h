/* Who holds which rows and heads: the one place that cuts a length into shares. */
#ifndef CP_PLAN_PARTITION_H
#define CP_PLAN_PARTITION_H

#include <stdint.h>

struct cp_range {
    int64_t first, count;
};

/* Share `index` of `size` cut in `parts`: with q, m = divmod(size, parts) the first m
 * shares hold q + 1, the others q (torch.tensor_split). size >= 0, 0 <= index < parts.
 */
struct cp_range cp_share(int64_t size, int parts, int index);

/* The key/value heads that the query heads `heads` need when each serves `heads_per_kv`
 * of them. */
struct cp_range cp_kv_heads_of(struct cp_range heads, int64_t heads_per_kv);

#endif
