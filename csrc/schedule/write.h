/* The writers of schedules, one a file, and what those of attention share. */
#ifndef CP_SCHEDULE_WRITE_H
#define CP_SCHEDULE_WRITE_H

#include "schedule/builder.h"

/* What a writer of attention works with: the plan seen from one rank, and the arenas to
 * place buffers in. */
struct cp_writer {
    struct cp_builder builder;
    struct cp_arena window, scratch; /* the own ones */
    const struct cp_plan *plan;
    const struct cp_call *call;
    int rank, r, u;                  /* rank = r * U + u */
    struct cp_range heads, kv_heads; /* that this rank answers for */
    struct cp_range rows;            /* of its Ulysses group */
    enum cp_dtype dtype, sum;        /* of the call, and of sums in it */
    bool has_mask;
};

/* One block of keys as a step sees it. */
struct cp_block {
    int owner;            /* the rank whose keys they are */
    struct cp_range keys; /* global */
};

void cp_writer_init(struct cp_writer *writer, const struct cp_plan *plan, int rank);

/* Buffers of the attention shapes: (B, rows, heads, D), with Dv for values, 1 for LSE
 * and delta. */
int32_t cp_writer_rows(struct cp_writer *writer, struct cp_arena *arena,
                       enum cp_layout layout, enum cp_tensor_role role, int64_t rows,
                       int64_t heads);
/* The same, kept in the dtype of sums. */
int32_t cp_writer_sums(struct cp_writer *writer, struct cp_arena *arena,
                       enum cp_tensor_role role, int64_t rows, int64_t heads);
/* The caller's tensor of that role. */
int32_t cp_writer_tensor(struct cp_writer *writer, enum cp_buffer_kind kind,
                         enum cp_tensor_role role);
/* A part of a mask: (B or 1, heads or 1, rows, keys). */
int32_t cp_writer_mask(struct cp_writer *writer, struct cp_arena *arena, int64_t heads,
                       int64_t rows, int64_t keys);

struct cp_box cp_writer_box(const struct cp_writer *writer, int32_t buffer);
struct cp_box cp_writer_heads(struct cp_box box, struct cp_range heads);
struct cp_box cp_writer_row_range(struct cp_box box, int64_t first, int64_t count);

/* Where the mask of this rank's rows comes from. */
enum cp_mask_source {
    CP_MASK_LOCAL,   /* the caller's own tensor has it */
    CP_MASK_OF_KEYS, /* it travels with the keys it belongs to */
    CP_MASK_OF_ROWS, /* it travels with the query rows, inside the Ulysses group */
};
enum cp_mask_source cp_writer_mask_source(const struct cp_writer *writer);
/* Rows that a mask which travels with keys has. */
int64_t cp_writer_mask_rows(const struct cp_writer *writer);
/* The part of `mask` (a buffer) that belongs to this rank's rows and heads and to the
 * keys of `block`. The buffer starts at row `row_first` and head `head_first` of the
 * whole, and at the block's own first key where the mask travels with keys. */
struct cp_box cp_writer_mask_box(const struct cp_writer *writer, int32_t mask,
                                 int64_t row_first, int64_t head_first,
                                 const struct cp_block *block);

/* Has rank `rank` anything to compute on this block: rows, heads and keys, and under
 * causal order one allowed pair? */
bool cp_writer_is_live(const struct cp_writer *writer, int rank,
                       const struct cp_block *block);
/* Fills positions and the causal edge of an ATTEND or GRAD of this rank's rows with the
 * block. */
void cp_writer_place(const struct cp_writer *writer, struct cp_step *step,
                     const struct cp_block *block);

/* Backward: delta of the own rows into `delta`, from the caller's out, dlse and `dout`.
 */
void cp_writer_delta(struct cp_writer *writer, enum cp_lane lane, int32_t delta,
                     int32_t dout);
/* Backward: the finished sums of the own keys go to the caller on that lane, after all
 * of lanes in and compute. */
void cp_writer_return_keys(struct cp_writer *writer, enum cp_lane lane, int32_t dk,
                           int32_t dv);

CP_NODISCARD enum cp_code cp_writer_take(struct cp_writer *writer,
                                         struct cp_schedule **out);

/* The writers. */
CP_NODISCARD enum cp_code cp_write_pull_forward(const struct cp_plan *plan, int rank,
                                                struct cp_schedule **out);
CP_NODISCARD enum cp_code cp_write_pull_backward(const struct cp_plan *plan, int rank,
                                                 struct cp_schedule **out);
CP_NODISCARD enum cp_code cp_write_two_sided_forward(const struct cp_plan *plan,
                                                     int rank,
                                                     struct cp_schedule **out);
CP_NODISCARD enum cp_code cp_write_two_sided_backward(const struct cp_plan *plan,
                                                      int rank,
                                                      struct cp_schedule **out);
CP_NODISCARD enum cp_code cp_write_replicated_forward(const struct cp_plan *plan,
                                                      int rank,
                                                      struct cp_schedule **out);
CP_NODISCARD enum cp_code cp_write_replicated_backward(const struct cp_plan *plan,
                                                       int rank,
                                                       struct cp_schedule **out);
CP_NODISCARD enum cp_code cp_write_gather_pull(const struct cp_plan *plan, int rank,
                                               struct cp_schedule **out);
CP_NODISCARD enum cp_code cp_write_gather_two_sided(const struct cp_plan *plan,
                                                    int rank, struct cp_schedule **out);

#endif
