/* Least recently used goes first. */
#include "exec/plan_cache.h"

void cp_plan_entry_clear(struct cp_plan_entry *entry)
{
    cp_schedule_destroy(&entry->schedule);
    cp_plan_destroy(&entry->plan);
    entry->kernel = NULL;
    entry->used = 0;
}

struct cp_plan_entry *cp_plan_cache_find(struct cp_plan_cache *cache,
                                         const struct cp_record *records, int world)
{
    cache->calls += 1;
    for (int i = 0; i < CP_PLAN_CACHE_SIZE; i++) {
        struct cp_plan_entry *entry = &cache->entry[i];
        if (entry->plan != NULL && cp_plan_matches(entry->plan, records, world)) {
            entry->used = cache->calls;
            return entry;
        }
    }
    return NULL;
}

struct cp_plan_entry *cp_plan_cache_add(struct cp_plan_cache *cache,
                                        const struct cp_plan_entry *entry)
{
    struct cp_plan_entry *oldest = &cache->entry[0];
    for (int i = 1; i < CP_PLAN_CACHE_SIZE; i++) {
        if (cache->entry[i].used < oldest->used) {
            oldest = &cache->entry[i];
        }
    }
    cp_plan_entry_clear(oldest);
    *oldest = *entry;
    oldest->used = cache->calls;
    return oldest;
}

void cp_plan_cache_clear(struct cp_plan_cache *cache)
{
    for (int i = 0; i < CP_PLAN_CACHE_SIZE; i++) {
        cp_plan_entry_clear(&cache->entry[i]);
    }
}
