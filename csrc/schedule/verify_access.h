/* Who touched which bytes when, and is that ordered?
 *
 * Time is a vector clock (Mattern 1989): one number for every lane of every rank. An access
 * is done at a tick of its own lane; what comes later must know that tick, or the two may meet
 * in some timing. Two accesses to the same bytes, one of them a write, must be so ordered. */
#ifndef CP_SCHEDULE_VERIFY_ACCESS_H
#define CP_SCHEDULE_VERIFY_ACCESS_H

#include "schedule/verify_buffer.h"
#include "schedule/verify_pool.h"

struct cp_access {
    struct cp_access *next;
    struct cp_verify_at at;
    const void *shape; /* equal pointers: the same buffer, compare boxes */
    const struct cp_box *box;
    struct cp_extent extent;
    int process;   /* lane of a rank */
    uint32_t done; /* the tick of `process` after which it is over */
};

/* The accesses to one arena: a window, a workspace, a tensor. */
struct cp_access_log {
    struct cp_access *reads, *writes;
};

static inline void cp_clock_join(uint32_t *clock, const uint32_t *other, int processes)
{
    for (int i = 0; i < processes; i++) {
        clock[i] = clock[i] > other[i] ? clock[i] : other[i];
    }
}

/* Adds `access`, which starts with the knowledge `start`, or says with whom it collides. */
CP_NODISCARD enum cp_code cp_access_add(struct cp_pool *pool, struct cp_access_log *log,
                                        const struct cp_access *access, bool is_write,
                                        const uint32_t *start);

#endif
