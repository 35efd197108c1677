/* Are all steps ordered that touch the same bytes? The question of schedule/verify_access.h answered
 * in another way, over an explicit graph of all steps, to compare the two. One call only. */
#ifndef CP_TESTS_ORDER_H
#define CP_TESTS_ORDER_H

#include "schedule/schedule.h"

/* False too where the graph has a cycle or an AWAIT that nothing fulfils. */
bool order_is_safe(const struct cp_schedule *const *of_call, int world);

#endif
