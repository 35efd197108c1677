/* Groups of one size, one behind the other. */
#include "group_run.h"

static int64_t kv_head_of(const struct cp_place *place, int64_t head)
{
    return (place->head_first + head) / place->heads_per_kv - place->kv_head_first;
}

/* Where the heads end that use the same key head as `head`. */
static int64_t group_end(const struct cp_place *place, int64_t heads, int64_t head)
{
    int64_t kv_head = kv_head_of(place, head);
    while (head < heads && kv_head_of(place, head) == kv_head) {
        head++;
    }
    return head;
}

struct cp_group_run cp_group_run_at(const struct cp_place *place, int64_t heads,
                                    int64_t head)
{
    int64_t end = group_end(place, heads, head);
    int64_t group = end - head;
    while (end < heads && group_end(place, heads, end) - end == group) {
        end += group;
    }
    return (struct cp_group_run){
        .head = head,
        .heads = end - head,
        .kv_head = kv_head_of(place, head),
        .kv_heads = (end - head) / group,
    };
}
