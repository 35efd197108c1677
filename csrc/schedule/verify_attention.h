/* What attention's own steps do to the meaning of bytes. `args` are the step's, by place. */
#ifndef CP_SCHEDULE_VERIFY_ATTENTION_H
#define CP_SCHEDULE_VERIFY_ATTENTION_H

#include "schedule/verify_name.h"

/* A row's state takes up the keys of the block that the row may see. */
CP_NODISCARD enum cp_code cp_meaning_attend(const struct cp_meaning *meaning,
                                            const struct cp_verify_at *at,
                                            const struct cp_step *step,
                                            const struct cp_arg args[CP_STEP_ARGS]);
/* A result is there once its row has met all keys that it may see. */
CP_NODISCARD enum cp_code cp_meaning_finish(const struct cp_meaning *meaning,
                                            const struct cp_verify_at *at,
                                            const struct cp_arg args[CP_STEP_ARGS]);
CP_NODISCARD enum cp_code cp_meaning_delta(const struct cp_meaning *meaning,
                                           const struct cp_verify_at *at,
                                           const struct cp_arg args[CP_STEP_ARGS]);
/* dq takes up keys as a state does; dk and dv the pairs of query row and head. */
CP_NODISCARD enum cp_code cp_meaning_grad(const struct cp_meaning *meaning,
                                          const struct cp_verify_at *at,
                                          const struct cp_step *step,
                                          const struct cp_arg args[CP_STEP_ARGS]);

#endif
