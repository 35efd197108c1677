/* One step by itself: has it the boxes that its op takes, inside their buffers, of sizes,
 * types and layouts that fit together? */
#ifndef CP_SCHEDULE_VERIFY_STEP_H
#define CP_SCHEDULE_VERIFY_STEP_H

#include "schedule/verify_buffer.h"
#include "schedule/walk.h"

/* Which args an op takes, one bit each. What is written may be read as well. */
struct cp_op_args {
    unsigned needs, may;
    unsigned writes;
};

struct cp_op_args cp_verify_op_args(enum cp_step_op op);

/* Checks all steps of a schedule whose buffers are in order. */
CP_NODISCARD enum cp_code cp_verify_steps(const struct cp_schedule *schedule, int call);

#endif
