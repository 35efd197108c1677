/* Memory that is mapped once and used by several, of whom the last unmaps it. */
#ifndef CP_BASE_MAPPING_H
#define CP_BASE_MAPPING_H

#include <stdatomic.h>
#include <stddef.h>

#include "base/status.h"

struct cp_mapping {
    void *base;
    size_t bytes;
    _Atomic int users;
};

/* Takes over what mmap gave; the caller is its first user. After CP_ERR_NO_MEMORY it is
 * his as before. */
CP_NODISCARD enum cp_code cp_mapping_create(void *base, size_t bytes,
                                            struct cp_mapping **out);
/* One user more, who drops it like the others, on any thread. */
struct cp_mapping *cp_mapping_share(struct cp_mapping *mapping);
/* One user less. Leaves NULL; accepts NULL. */
void cp_mapping_drop(struct cp_mapping **mapping);

#endif
