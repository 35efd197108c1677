/* What the rows, heads and mask elements of a call are called in a proof, and whether a cell
 * of a step's arg has the name that it should. */
#ifndef CP_SCHEDULE_VERIFY_NAME_H
#define CP_SCHEDULE_VERIFY_NAME_H

#include "schedule/verify_content.h"

struct cp_meaning {
    struct cp_memory *memory;
    const struct cp_plan *plan;
    int call;
};

/* Rows of the whole sequence, of queries and of keys. */
int64_t cp_name_queries(const struct cp_plan *plan);
int64_t cp_name_keys(const struct cp_plan *plan);
/* Keys of the sequence that a row may see. */
int64_t cp_name_keys_of_row(const struct cp_plan *plan, int64_t row);

/* Words that a set of this plan needs. */
int64_t cp_name_set_words(const struct cp_plan *plan);
/* CP_ERR_INTERNAL where a plan is too large for tokens. */
CP_NODISCARD enum cp_code cp_name_check_size(const struct cp_plan *plan, int call);

/* ---- names ---- */

cp_token cp_name_row(const struct cp_meaning *meaning, enum cp_tensor_role role,
                     int64_t batch, int64_t row, int64_t head);
/* Of a result whose row sees no key. */
cp_token cp_name_no_row(const struct cp_meaning *meaning, enum cp_tensor_role role);
cp_token cp_name_mask(const struct cp_meaning *meaning, int64_t batch, int64_t head,
                      int64_t row, int64_t key);
/* The name of row 0 of a tensor of `rank`. */
int64_t cp_name_first_row(const struct cp_plan *plan, int rank,
                          enum cp_tensor_role role);
/* What the rows of a tensor that is cut are called: where ranks add theirs, sums. */
enum cp_tensor_role cp_name_cut(const struct cp_plan *plan);
bool cp_name_is_cut(enum cp_tensor_role role);
/* Is a value of this meaning a sum, kept in more bits than what it is the sum of? */
bool cp_name_is_sum(int mark);

/* ---- what a cell should hold: CP_ERR_INTERNAL says what it holds ---- */

/* `name`: of the arg, in the sentence. */
CP_NODISCARD enum cp_code cp_expect(const struct cp_verify_at *at, const char *name,
                                    const struct cp_arg *arg, int64_t cell,
                                    cp_token wanted);
/* An output is written once; sums grow in place. */
CP_NODISCARD enum cp_code cp_expect_free(const struct cp_verify_at *at,
                                         const struct cp_arg *dst, int64_t cell);
/* The cell of a sum becomes one of `wanted`, if it is still zero. */
CP_NODISCARD enum cp_code cp_expect_sum(const struct cp_verify_at *at, const char *name,
                                        const struct cp_arg *arg, int64_t cell,
                                        cp_token wanted);
/* Adds the elements first .. last to the set of a cell, which has none of them yet. */
CP_NODISCARD enum cp_code cp_take_up(const struct cp_meaning *meaning,
                                     const struct cp_verify_at *at, const char *name,
                                     const struct cp_arg *arg, int64_t cell,
                                     int64_t first, int64_t last, const char *element);

#endif
