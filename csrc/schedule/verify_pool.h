/* Memory of a proof: taken piece by piece, given back all at once. */
#ifndef CP_SCHEDULE_VERIFY_POOL_H
#define CP_SCHEDULE_VERIFY_POOL_H

#include <stddef.h>
#include <stdint.h>

#include "base/status.h"

struct cp_pool_block;

/* All-zero is the empty pool. */
struct cp_pool {
    struct cp_pool_block *blocks;
};

/* Zeroed room for `count` elements, aligned for any of them. */
CP_NODISCARD enum cp_code cp_pool_take(struct cp_pool *pool, int64_t count,
                                       size_t element_bytes, void **out);
void cp_pool_fini(struct cp_pool *pool);

#endif
