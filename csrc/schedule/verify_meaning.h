/* What steps do to the meaning of bytes: the rules of attention, in symbols.
 *
 * All boxes have passed verify_step.h. `args` are the step's, by place. */
#ifndef CP_SCHEDULE_VERIFY_MEANING_H
#define CP_SCHEDULE_VERIFY_MEANING_H

#include "schedule/verify_name.h"

/* Fills one of the caller's tensors of `rank`. */
CP_NODISCARD enum cp_code cp_meaning_fill(const struct cp_meaning *meaning, int rank,
                                          struct cp_content *input);

/* DST = SRC. */
CP_NODISCARD enum cp_code cp_meaning_copy(const struct cp_meaning *meaning,
                                          const struct cp_verify_at *at,
                                          const struct cp_arg *dst,
                                          const struct cp_arg *src);

/* Any step but SEND, RECV, PUBLISH and AWAIT. */
CP_NODISCARD enum cp_code cp_meaning_step(const struct cp_meaning *meaning,
                                          const struct cp_verify_at *at,
                                          const struct cp_step *step,
                                          const struct cp_arg args[CP_STEP_ARGS]);

/* At the end of the call: has every element of this output its own value? */
CP_NODISCARD enum cp_code cp_meaning_check_output(const struct cp_meaning *meaning,
                                                  const struct cp_verify_at *at,
                                                  const struct cp_content *output);

#endif
