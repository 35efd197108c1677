/* A chain of blocks; the first one is filled up. */
#include "schedule/verify_pool.h"

#include "base/checked.h"
#include "base/mem.h"

enum { POOL_BLOCK_BYTES = 1 << 17, POOL_ALIGN = 16 };

struct cp_pool_block {
    struct cp_pool_block *next;
    size_t used, bytes; /* of `data` */
    _Alignas(POOL_ALIGN) unsigned char data[];
};

static enum cp_code add_block(struct cp_pool *pool, size_t bytes)
{
    void *memory = NULL;
    size_t room = bytes > POOL_BLOCK_BYTES ? bytes : POOL_BLOCK_BYTES;
    CP_TRY(cp_mem_create(sizeof(struct cp_pool_block) + room, "a proof of schedules",
                         &memory));
    struct cp_pool_block *block = memory;
    block->bytes = room;
    block->next = pool->blocks;
    pool->blocks = block;
    return CP_OK;
}

enum cp_code cp_pool_take(struct cp_pool *pool, int64_t count, size_t element_bytes,
                          void **out)
{
    size_t bytes = 0;
    if (count < 0 || __builtin_mul_overflow((size_t)count, element_bytes, &bytes) ||
        bytes > SIZE_MAX / 4 || !cp_size_round_up(bytes, POOL_ALIGN, &bytes)) {
        return cp_fail(CP_ERR_NO_MEMORY, "a proof of schedules is too large");
    }
    if (pool->blocks == NULL || pool->blocks->bytes - pool->blocks->used < bytes) {
        CP_TRY(add_block(pool, bytes));
    }
    *out = pool->blocks->data + pool->blocks->used;
    pool->blocks->used += bytes;
    return CP_OK;
}

void cp_pool_fini(struct cp_pool *pool)
{
    while (pool->blocks != NULL) {
        struct cp_pool_block *block = pool->blocks;
        pool->blocks = block->next;
        cp_mem_destroy(&block);
    }
}
