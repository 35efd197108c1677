/* A block of attention, cut into parts that any library's kernel can take: all rows of a
 * part see all of its keys, or it is a diagonal of equal lengths; and each of its key heads
 * is used by equally many of its query heads, in order.
 *
 * Parts of one block are parts of its sum, so that they are merged like blocks. */
#ifndef CP_CUDA_BLOCK_PARTS_H
#define CP_CUDA_BLOCK_PARTS_H

#include "kernel/kernel.h"

/* Places within the block. */
struct cp_block_part {
    int64_t row, rows;
    int64_t key, keys;
    int64_t head, heads;
    int64_t kv_head, kv_heads;
    bool is_diagonal; /* rows == keys, row i sees keys 0 to i */
};

enum {
    CP_SIGHTS = 3
}; /* keys that all rows see, the diagonal, rows that see all keys */

struct cp_block_parts {
    struct cp_place place;
    int64_t heads, kv_heads;
    struct cp_block_part sights[CP_SIGHTS]; /* rows and keys alone */
    int sight_count;
    int sight;    /* the next part's */
    int64_t head; /* likewise */
};

/* What rows see of keys at `place`, for these numbers of them. */
struct cp_block_parts cp_block_parts_of(const struct cp_place *place, int64_t rows,
                                        int64_t keys, int64_t heads, int64_t kv_heads);

/* False where there is none left. No part is empty. */
bool cp_block_parts_next(struct cp_block_parts *parts, struct cp_block_part *out);

#endif
