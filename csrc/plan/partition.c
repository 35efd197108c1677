/* Shares of a length. */
#include "plan/partition.h"

struct cp_range cp_share(int64_t size, int parts, int index)
{
    int64_t quotient = size / parts;
    int64_t longer = size % parts;
    struct cp_range share = {
        .first = index * quotient + (index < longer ? index : longer),
        .count = quotient + (index < longer ? 1 : 0),
    };
    return share;
}

struct cp_range cp_kv_heads_of(struct cp_range heads, int64_t heads_per_kv)
{
    struct cp_range needed = {.first = heads.first / heads_per_kv, .count = 0};
    if (heads.count > 0) {
        int64_t last = (heads.first + heads.count - 1) / heads_per_kv;
        needed.count = last - needed.first + 1;
    }
    return needed;
}
