/* In how many chunks a call cuts its heads where nobody has said it: as many as pay by the
 * cost walk. Pure, from what all ranks have told, so that all ranks choose alike. */
#ifndef CP_SCHEDULE_HEAD_CHUNKS_H
#define CP_SCHEDULE_HEAD_CHUNKS_H

#include "schedule/schedule.h"

/* Sets plan->chunks, before any schedule is made of the plan. One, unless all ranks are
 * devices of one generation whose speeds are known (machine.h), and more take at least 5 %
 * less. CP_ERR_NO_MEMORY, or CP_ERR_VALUE where a size overflows. */
CP_NODISCARD enum cp_code cp_head_chunks_choose(struct cp_plan *plan,
                                                enum cp_transport transport);

#endif
