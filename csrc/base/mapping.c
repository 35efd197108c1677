/* Counting users. */
#include "base/mapping.h"

#include <sys/mman.h>

#include "base/mem.h"

enum cp_code cp_mapping_create(void *base, size_t bytes, struct cp_mapping **out)
{
    void *block = NULL;
    CP_TRY(cp_mem_create(sizeof(struct cp_mapping), "a mapping", &block));
    struct cp_mapping *mapping = block;
    mapping->base = base;
    mapping->bytes = bytes;
    atomic_init(&mapping->users, 1);
    *out = mapping;
    return CP_OK;
}

struct cp_mapping *cp_mapping_share(struct cp_mapping *mapping)
{
    /* relaxed: who shares it uses it himself. */
    (void)atomic_fetch_add_explicit(&mapping->users, 1, memory_order_relaxed);
    return mapping;
}

void cp_mapping_drop(struct cp_mapping **mapping)
{
    struct cp_mapping *dropped = *mapping;
    *mapping = NULL;
    /* acq_rel: what the others did there comes before the end. */
    if (dropped != NULL &&
        atomic_fetch_sub_explicit(&dropped->users, 1, memory_order_acq_rel) == 1) {
        (void)munmap(dropped->base, dropped->bytes);
        cp_mem_destroy(&dropped);
    }
}
