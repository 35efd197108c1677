/* Rows and keys are cut along the causal edge, heads where groups do not come out even. */
#include "block_parts.h"

static int64_t at_least(int64_t a, int64_t b)
{
    return a > b ? a : b;
}

static int64_t at_most(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

static void add_sight(struct cp_block_parts *parts, int64_t row, int64_t rows,
                      int64_t key, int64_t keys, bool is_diagonal)
{
    if (rows > 0 && keys > 0) {
        parts->sights[parts->sight_count++] = (struct cp_block_part){
            .row = row,
            .rows = rows,
            .key = key,
            .keys = keys,
            .is_diagonal = is_diagonal && rows > 1,
        };
    }
}

/* Row i sees the keys up to the one at its own position. */
static void cut_sights(struct cp_block_parts *parts, int64_t rows, int64_t keys)
{
    int64_t lead = parts->place.q_first - parts->place.k_first; /* keys before row 0 */
    if (!parts->place.is_causal || lead >= keys - 1) {
        add_sight(parts, 0, rows, 0, keys, false);
        return;
    }
    /* Of the rows at positions of keys: the first and the end. */
    int64_t first = at_most(at_least(-lead, 0), rows);
    int64_t end = at_least(at_most(keys - lead, rows), first);
    add_sight(parts, first, end - first, 0, first + lead, false);
    add_sight(parts, first, end - first, first + lead, end - first, true);
    add_sight(parts, end, rows - end, 0, at_most(end + lead, keys), false);
}

struct cp_block_parts cp_block_parts_of(const struct cp_place *place, int64_t rows,
                                        int64_t keys, int64_t heads, int64_t kv_heads)
{
    struct cp_block_parts parts = {
        .place = *place, .heads = heads, .kv_heads = kv_heads};
    cut_sights(&parts, rows, keys);
    return parts;
}

static int64_t kv_head_of(const struct cp_block_parts *parts, int64_t head)
{
    const struct cp_place *place = &parts->place;
    return (place->head_first + head) / place->heads_per_kv - place->kv_head_first;
}

/* The end of the heads from `head` on that use the same key head. */
static int64_t group_end(const struct cp_block_parts *parts, int64_t head)
{
    int64_t end = head + 1;
    while (end < parts->heads && kv_head_of(parts, end) == kv_head_of(parts, head)) {
        end++;
    }
    return end;
}

/* The longest run of whole groups of one size from the head on. */
static void fill_heads(const struct cp_block_parts *parts, struct cp_block_part *out)
{
    int64_t first = parts->head;
    int64_t end = group_end(parts, first);
    int64_t size = end - first;
    while (end < parts->heads && group_end(parts, end) - end == size) {
        end += size;
    }
    out->head = first;
    out->heads = end - first;
    out->kv_head = kv_head_of(parts, first);
    out->kv_heads = (end - first) / size;
}

bool cp_block_parts_next(struct cp_block_parts *parts, struct cp_block_part *out)
{
    if (parts->sight == parts->sight_count || parts->heads == 0) {
        return false;
    }
    *out = parts->sights[parts->sight];
    fill_heads(parts, out);
    parts->head += out->heads;
    if (parts->head == parts->heads) {
        parts->head = 0;
        parts->sight++;
    }
    return true;
}
