/* How a call runs where nobody has said it: in how many chunks its heads are cut, and whether
 * the blocks of a ring come one by one or all at once, by the cost walk. Pure, from what all
 * ranks have told, so that all ranks choose alike. */
#ifndef CP_SCHEDULE_CHOOSE_H
#define CP_SCHEDULE_CHOOSE_H

#include "schedule/schedule.h"

/* Sets plan->chunks and plan->rotate, before any schedule is made of the plan. One chunk and
 * one by one, unless all ranks are devices of one generation whose speeds are known
 * (machine.h) and another choice takes at least 5 % less; all at once only where the blocks
 * stay under 256 MB. CP_ERR_NO_MEMORY, or CP_ERR_VALUE where a size overflows. */
CP_NODISCARD enum cp_code cp_schedule_choose(struct cp_plan *plan,
                                             enum cp_transport transport);

#endif
