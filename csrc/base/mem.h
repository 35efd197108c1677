/* Every allocation of the library, counted, with a switch that makes the k-th one fail.
 *
 * Tests use both: a call in steady state allocates nothing, and for k = 0, 1, 2, ... a
 * failed allocation leaves a MemoryError and no live block. */
#ifndef CP_BASE_MEM_H
#define CP_BASE_MEM_H

#include <stddef.h>
#include <stdint.h>

#include "base/status.h"

enum { CP_ALIGNMENT = 64 }; /* a cache line, and the widest vector */

struct cp_mem_stats {
    int64_t live_blocks;
    int64_t allocations; /* since the start of the process */
};

/* Zeroed memory, aligned to CP_ALIGNMENT; 0 bytes give a block too. `what` names the
 * purpose in the error. */
CP_NODISCARD enum cp_code cp_mem_create(size_t bytes, const char *what, void **out);
/* The same for `count` things of `each` bytes: the address of the pointer to them. */
CP_NODISCARD enum cp_code cp_mem_create_array(int64_t count, size_t each,
                                              const char *what,
                                              void *address_of_pointer);

/* Takes the address of the pointer, accepts NULL in it, leaves NULL. */
void cp_mem_destroy(void *address_of_pointer);

struct cp_mem_stats cp_mem_stats(void);

/* The allocation after `count` more fails, once; negative: none does. For tests;
 * process-wide. */
void cp_mem_fail_after(int64_t count);

#endif
