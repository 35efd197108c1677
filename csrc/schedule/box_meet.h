/* May two boxes of one rank share memory? What is yes of any two that are written, or
 * written and read, orders the steps that do so. */
#ifndef CP_SCHEDULE_BOX_MEET_H
#define CP_SCHEDULE_BOX_MEET_H

#include "schedule/schedule.h"

/* False only where no byte can be in both. Not given or empty: false. The caller's
 * tensors of different roles share none. */
bool cp_box_meets(const struct cp_schedule *schedule, const struct cp_box *a,
                  const struct cp_box *b);
/* May the second of two steps that move be done before the first, or with it? */
bool cp_copies_are_free(const struct cp_schedule *schedule, const struct cp_step *a,
                        const struct cp_step *b);

#endif
