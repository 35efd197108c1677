/* The plans and schedules that a context has made, by signature, so that a call in
 * steady state makes nothing. */
#ifndef CP_EXEC_PLAN_CACHE_H
#define CP_EXEC_PLAN_CACHE_H

#include "kernel/kernel.h"
#include "schedule/schedule.h"

/* A model alternates between a handful of signatures, a server that takes any picture
 * size between some more. */
enum { CP_PLAN_CACHE_SIZE = 64 };

struct cp_plan_entry {
    struct cp_plan *plan;               /* owned; NULL: free */
    struct cp_schedule *schedule;       /* owned */
    const struct cp_kernel_ops *kernel; /* NULL for gather */
    int64_t used;                       /* when last, in calls */
};

struct cp_plan_cache {
    struct cp_plan_entry entry[CP_PLAN_CACHE_SIZE];
    int64_t calls;
};

/* NULL where these records have no plan yet. */
struct cp_plan_entry *cp_plan_cache_find(struct cp_plan_cache *cache,
                                         const struct cp_record *records, int world);
/* Takes what the entry owns, in the place of the one that was not used for longest. */
struct cp_plan_entry *cp_plan_cache_add(struct cp_plan_cache *cache,
                                        const struct cp_plan_entry *entry);
void cp_plan_entry_clear(struct cp_plan_entry *entry);
void cp_plan_cache_clear(struct cp_plan_cache *cache);

#endif
