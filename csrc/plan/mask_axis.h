/* How the axes of a mask are read, from the lengths that all ranks gave for them. */
#ifndef CP_PLAN_MASK_AXIS_H
#define CP_PLAN_MASK_AXIS_H

#include "plan/plan.h"

/* For each axis the lengths of all ranks are compared with the ranks' own rows (or
 * keys), then with the whole length, then with 1, in this order. CP_ERR_VALUE names the
 * axis and the lengths where none fits, or where the mask has own rows and own keys, so
 * that nothing says how rows meet the keys of other ranks. Replicated keys count as
 * whole. */
CP_NODISCARD enum cp_code cp_mask_read(const struct cp_record *records, int world,
                                       enum cp_axis_kind *rows,
                                       enum cp_axis_kind *keys);

#endif
