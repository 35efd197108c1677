/* Where a proof stands: the place that every sentence begins with. */
#ifndef CP_SCHEDULE_VERIFY_AT_H
#define CP_SCHEDULE_VERIFY_AT_H

#include "schedule/schedule.h"

enum { CP_VERIFY_PLACE_TEXT = 64 };

struct cp_verify_at {
    int call, rank;
    int32_t step; /* index in the schedule; -1: no step in particular */
    enum cp_step_op op;
};

/* "call 0 rank 2 step 5 (ATTEND)". */
const char *cp_verify_place(const struct cp_verify_at *at,
                            char text[CP_VERIFY_PLACE_TEXT]);

/* CP_ERR_INTERNAL with the place, ": " and the sentence. */
enum cp_code cp_verify_fail(const struct cp_verify_at *at, const char *format, ...)
    __attribute__((format(printf, 2, 3)));

#endif
