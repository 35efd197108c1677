/* Groups of one size, one behind the other. */
#include "group_run.h"

/* Where the heads end that use the same key head as `head`. */
static int64_t group_end(const struct cp_place *place, int64_t heads, int64_t head)
{
    int64_t kv_head = cp_place_kv_head(place, head);
    while (head < heads && cp_place_kv_head(place, head) == kv_head) {
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
        .kv_head = cp_place_kv_head(place, head),
        .kv_heads = (end - head) / group,
    };
}
