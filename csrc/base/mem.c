/* Counted, aligned, zeroed memory. */
#include "base/mem.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "base/checked.h"

static _Atomic int64_t live_blocks;
static _Atomic int64_t allocations;
static _Atomic int64_t fail_after =
    -1; /* counts down to the failing allocation; negative: off */

/* What the system gives as one page where it is asked to, on x86-64 and on arm64 with pages of 4 KiB. A kernel walks
 * megabytes of panels, states and scratch: with small pages it misses the TLB all the time. */
static const size_t huge_page = (size_t)2 << 20;

static bool must_fail(void)
{
    if (atomic_load_explicit(&fail_after, memory_order_relaxed) < 0) {
        return false;
    }
    return atomic_fetch_sub_explicit(&fail_after, 1, memory_order_relaxed) == 0;
}

/* `bytes` is a multiple of CP_ALIGNMENT. Blocks that can hold huge pages begin with one; their last, shorter part gets
 * small pages, so that no block takes more memory than it is long. */
static void *allocate(size_t bytes)
{
    void *block = NULL;
    bool is_huge = bytes >= huge_page;
    if (posix_memalign(&block, is_huge ? huge_page : (size_t)CP_ALIGNMENT, bytes) !=
        0) {
        return NULL;
    }
    if (is_huge) {
        /* A wish; where it is refused the block has small pages. */
        (void)madvise(block, bytes - bytes % huge_page, MADV_HUGEPAGE);
    }
    return block;
}

enum cp_code cp_mem_create(size_t bytes, const char *what, void **out)
{
    size_t rounded = 0;
    void *block = NULL;
    if (!must_fail() &&
        cp_size_round_up(bytes > 0 ? bytes : 1, CP_ALIGNMENT, &rounded)) {
        block = allocate(rounded);
    }
    if (block == NULL) {
        return cp_fail(CP_ERR_NO_MEMORY, "cannot allocate %zu bytes for %s", bytes,
                       what);
    }
    memset(block, 0, rounded);
    atomic_fetch_add_explicit(&live_blocks, 1, memory_order_relaxed);
    atomic_fetch_add_explicit(&allocations, 1, memory_order_relaxed);
    *out = block;
    return CP_OK;
}

enum cp_code cp_mem_create_array(int64_t count, size_t each, const char *what,
                                 void *address_of_pointer)
{
    size_t bytes = 0;
    void *block = NULL;
    if (count < 0 || __builtin_mul_overflow((size_t)count, each, &bytes)) {
        return cp_fail(CP_ERR_NO_MEMORY, "cannot allocate %lld times %zu bytes for %s",
                       (long long)count, each, what);
    }
    CP_TRY(cp_mem_create(bytes, what, &block));
    memcpy(address_of_pointer, &block, sizeof block);
    return CP_OK;
}

void cp_mem_destroy(void *address_of_pointer)
{
    void *block = NULL;
    void *null = NULL;
    memcpy(&block, address_of_pointer, sizeof block);
    if (block == NULL) {
        return;
    }
    free(block);
    atomic_fetch_sub_explicit(&live_blocks, 1, memory_order_relaxed);
    memcpy(address_of_pointer, &null, sizeof null);
}

struct cp_mem_stats cp_mem_stats(void)
{
    struct cp_mem_stats stats = {
        .live_blocks = atomic_load_explicit(&live_blocks, memory_order_relaxed),
        .allocations = atomic_load_explicit(&allocations, memory_order_relaxed),
    };
    return stats;
}

void cp_mem_fail_after(int64_t count)
{
    atomic_store_explicit(&fail_after, count, memory_order_relaxed);
}
