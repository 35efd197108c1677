/* Comparing accesses. */
#include "schedule/verify_access.h"

static bool boxes_meet(const struct cp_box *a, const struct cp_box *b)
{
    for (int axis = 0; axis < CP_AXES; axis++) {
        if (a->first[axis] >= b->first[axis] + b->n[axis] ||
            b->first[axis] >= a->first[axis] + a->n[axis]) {
            return false;
        }
    }
    return true;
}

static bool overlap(const struct cp_access *a, const struct cp_access *b)
{
    if (a->extent.lo >= b->extent.hi || b->extent.lo >= a->extent.hi) {
        return false;
    }
    return a->shape != b->shape || boxes_meet(a->box, b->box);
}

static enum cp_code check_list(const struct cp_access *list, const char *list_verb,
                               const struct cp_access *access, bool is_write,
                               const uint32_t *start)
{
    for (const struct cp_access *other = list; other != NULL; other = other->next) {
        if (other->done > start[other->process] && overlap(other, access)) {
            char place[CP_VERIFY_PLACE_TEXT];
            return cp_verify_fail(
                &access->at,
                "%s bytes %lld to %lld of what %s %s, and nothing orders "
                "the two",
                is_write ? "writes" : "reads", (long long)access->extent.lo,
                (long long)access->extent.hi, cp_verify_place(&other->at, place),
                list_verb);
        }
    }
    return CP_OK;
}

enum cp_code cp_access_add(struct cp_pool *pool, struct cp_access_log *log,
                           const struct cp_access *access, bool is_write,
                           const uint32_t *start)
{
    struct cp_access **list = is_write ? &log->writes : &log->reads;
    void *memory = NULL;
    CP_TRY(check_list(log->writes, "writes", access, is_write, start));
    if (is_write) {
        CP_TRY(check_list(log->reads, "reads", access, is_write, start));
    }
    CP_TRY(cp_pool_take(pool, 1, sizeof *access, &memory));
    struct cp_access *kept = memory;
    *kept = *access;
    kept->next = *list;
    *list = kept;
    return CP_OK;
}
