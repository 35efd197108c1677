/* The writers of schedules, one a file, and what those of attention share. */
#ifndef CP_SCHEDULE_WRITE_H
#define CP_SCHEDULE_WRITE_H

#include "schedule/builder.h"

/* Where the mask of this rank's rows comes from. */
enum cp_mask_source {
    CP_MASK_LOCAL,   /* the caller's own tensor has it */
    CP_MASK_OF_KEYS, /* it travels with the keys it belongs to */
    CP_MASK_OF_ROWS, /* it travels with the query rows, inside the Ulysses group */
};

/* What a writer of attention works with: the plan seen from one rank, and the arenas to
 * place buffers in. */
struct cp_writer {
    struct cp_builder builder;
    struct cp_arena window, scratch; /* the own ones */
    const struct cp_plan *plan;
    const struct cp_call *call;
    int rank, r, u;                  /* rank = r * U + u */
    int chunk;                       /* of the heads, that is being written */
    struct cp_range heads, kv_heads; /* that this rank answers for in it */
    struct cp_range rows;            /* of its Ulysses group */
    enum cp_dtype dtype, sum;        /* of the call, and of sums in it */
    bool is_backward;
    bool packs; /* keys are met in the kernel's panels */
    bool has_mask;
    enum cp_mask_source mask_source;
    int32_t mask;       /* the caller's; CP_NO_BUFFER: none */
    int32_t group_mask; /* rows of the group for the own heads, where they travel */
    int32_t arrived;    /* steps of lane `in` that the steps which compute wait for */
};

/* One block of keys as a step sees it. */
struct cp_block {
    int owner;            /* the rank whose keys they are */
    struct cp_range keys; /* global */
};

void cp_writer_init(struct cp_writer *writer, const struct cp_plan *plan, int rank);
/* What is written from now on is of that chunk of heads. */
void cp_writer_set_chunk(struct cp_writer *writer, int chunk);
/* All that lane `in` has so far is waited for by what computes from now on. */
void cp_writer_arrive(struct cp_writer *writer);

/* Buffers of the attention shapes: (B, rows, heads, D), with Dv for values, 1 for LSE
 * and delta. */
int32_t cp_writer_rows(struct cp_writer *writer, struct cp_arena *arena,
                       enum cp_layout layout, enum cp_tensor_role role, int64_t rows,
                       int64_t heads);
/* The same of k or v, as it is met. */
int32_t cp_writer_keys(struct cp_writer *writer, struct cp_arena *arena,
                       enum cp_tensor_role role, int64_t rows, int64_t heads);
/* What brings keys there: PACK or COPY. */
enum cp_step_op cp_writer_bring(const struct cp_writer *writer);
/* The same as the first, kept in the dtype of sums. */
int32_t cp_writer_sums(struct cp_writer *writer, struct cp_arena *arena,
                       enum cp_tensor_role role, int64_t rows, int64_t heads);
/* The same with rows outermost, so that some of the rows are one run of bytes. */
int32_t cp_writer_runs(struct cp_writer *writer, struct cp_arena *arena,
                       enum cp_tensor_role role, enum cp_dtype dtype, int64_t rows,
                       int64_t heads);
/* The caller's tensor of that role; CP_NO_BUFFER for an LSE, its gradient or a mask
 * that the call does not have. */
int32_t cp_writer_tensor(struct cp_writer *writer, enum cp_buffer_kind kind,
                         enum cp_tensor_role role);
/* A part of a mask: (B or 1, heads or 1, rows, keys), `axis` outermost. */
int32_t cp_writer_mask(struct cp_writer *writer, struct cp_arena *arena, int axis,
                       int64_t heads, int64_t rows, int64_t keys);
/* The element type of a role, outside sums. */
enum cp_dtype cp_writer_dtype(const struct cp_writer *writer, enum cp_tensor_role role);
/* Are the rows of this role those of keys? */
bool cp_writer_is_of_keys(const struct cp_writer *writer, enum cp_tensor_role role);

struct cp_box cp_writer_box(const struct cp_writer *writer, int32_t buffer);
struct cp_box cp_writer_heads(struct cp_box box, struct cp_range heads);
struct cp_box cp_writer_row_range(struct cp_box box, int64_t first, int64_t count);

bool cp_writer_mask_travels(const struct cp_writer *writer, enum cp_mask_source source);
/* The part of the mask that belongs to this rank's rows and heads and to the keys of
 * `block`. `of_keys`: the buffer that came with the block, where the mask travels with
 * keys; it begins at head `head_first` of the whole. No box where there is no mask. */
struct cp_box cp_writer_mask_box(const struct cp_writer *writer, int32_t of_keys,
                                 int64_t head_first, const struct cp_block *block);

/* Has rank `rank` anything to compute on this block in that chunk: rows, heads and keys, and
 * under causal order one allowed pair? */
bool cp_writer_is_live(const struct cp_writer *writer, int rank, int chunk,
                       const struct cp_block *block);
/* The steps that compute, on the compute lane, after what has arrived. */

/* This rank's rows and heads in a forward. */
struct cp_attended {
    int32_t state;
    struct cp_box q;
    struct cp_box out, lse; /* what becomes of them; the lse where it is wanted */
    int blocks;             /* that they meet */
    int met;                /* of them, so far */
};
/* The rows meet the next of their blocks: the first one begins, the last one ends. */
void cp_writer_attend(struct cp_writer *writer, struct cp_attended *rows,
                      struct cp_box k, struct cp_box v, struct cp_box mask,
                      const struct cp_block *block);
/* The result of rows that meet no block. Where they met any, it is there. */
void cp_writer_finish(struct cp_writer *writer, const struct cp_attended *rows);

/* This rank's rows and heads in a backward. */
struct cp_row_boxes {
    struct cp_box q, dout, lse, delta;
    struct cp_box dq; /* sum over all keys */
};
/* A block of keys in a backward. */
struct cp_key_boxes {
    struct cp_box k, v, mask;
    struct cp_box dk, dv; /* sums */
};
/* The block's gradient is added to dq, dk and dv. */
void cp_writer_grad(struct cp_writer *writer, const struct cp_row_boxes *rows,
                    const struct cp_key_boxes *keys, const struct cp_block *block);
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
                                                enum cp_transport transport,
                                                struct cp_schedule **out);
CP_NODISCARD enum cp_code cp_write_pull_backward(const struct cp_plan *plan, int rank,
                                                 enum cp_transport transport,
                                                 struct cp_schedule **out);
CP_NODISCARD enum cp_code cp_write_exchange_forward(const struct cp_plan *plan,
                                                    int rank,
                                                    enum cp_transport transport,
                                                    struct cp_schedule **out);
CP_NODISCARD enum cp_code cp_write_exchange_backward(const struct cp_plan *plan,
                                                     int rank,
                                                     enum cp_transport transport,
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
CP_NODISCARD enum cp_code cp_write_reduce_scatter_pull(const struct cp_plan *plan,
                                                       int rank,
                                                       struct cp_schedule **out);
CP_NODISCARD enum cp_code cp_write_reduce_scatter_two_sided(const struct cp_plan *plan,
                                                            int rank,
                                                            struct cp_schedule **out);

#endif
