/* Attention over sends and receives: an exchange inside the Ulysses group, a ring of
 * blocks, an exchange back.
 *
 * A block is the keys of one Ulysses group for the own heads, in U segments, one a
 * member. The ring passes blocks on (rotate "alltoall", two slots) or every rank gets
 * all of them at once ("allgather"). For three ranks, U = 1:
 *
 *     rank 0       rank 1       rank 2       on the way
 *     attend 0     attend 1     attend 2     0 to rank 2, 1 to rank 0, 2 to rank 1
 *     attend 1     attend 2     attend 0     1 to rank 2, 2 to rank 0, 0 to rank 1
 *     attend 2     attend 0     attend 1
 *
 * Backward, the sums of dK and dV travel with their block, one hop behind it, and take
 * one last hop home.
 *
 * All messages are on lane `in`, in one order, since messages between two ranks meet in
 * the order posted. */
#ifndef CP_SCHEDULE_WRITE_TWO_SIDED_H
#define CP_SCHEDULE_WRITE_TWO_SIDED_H

#include "schedule/write.h"

/* A block of keys as it lies here: buffers by member. */
struct cp_segment {
    int32_t k, v, mask;
    int32_t dk, dv; /* backward: sums that travel */
};

/* One tensor of query rows: the caller's, and the group's rows for the own heads. */
struct cp_row_tensor {
    enum cp_tensor_role role;
    int32_t own, gathered;
};

enum { CP_ROW_TENSORS = 4 };

/* Query rows on their way from one member to another. */
struct cp_parcel {
    int32_t rows[CP_ROW_TENSORS]; /* by row tensor */
    int32_t mask;
};

/* What is exchanged with one member of the group. */
struct cp_exchange {
    struct cp_segment keys; /* own keys, for the member's heads */
    struct cp_parcel to, from;
    int32_t result[2]; /* finished rows of the member, to be sent: by result tensor */
    int32_t home[2];   /* own rows finished by the member */
    struct cp_segment sums; /* backward: dK, dV of the own keys made by the member */
};

struct cp_two_sided {
    struct cp_writer w;
    struct cp_exchange *exchange; /* (ulysses) by member */
    struct cp_row_tensor rows[CP_ROW_TENSORS];
    int row_count;
    struct cp_segment *segments; /* (ring, ulysses): block of b, segment of m */
    int ring, ulysses;
    bool is_backward;
    int group;           /* number of the next group of messages */
    int32_t *block_done; /* (ring) steps of the compute lane after which block b is no
                            longer needed */
};

/* Rank (r, u); the segment of member m in the block of ring rank b; the keys of it. */
int cp_two_sided_rank_of(const struct cp_two_sided *t, int r, int u);
struct cp_segment *cp_two_sided_segment_of(struct cp_two_sided *t, int b, int m);
struct cp_block cp_two_sided_block_of(const struct cp_two_sided *t, int b, int m);

/* Buffers for dK and dV of the keys of `owner`, own heads. */
void cp_two_sided_declare_sums(struct cp_two_sided *t, struct cp_segment *segment,
                               struct cp_arena *arena, int owner);

/* After an error nothing is left. */
CP_NODISCARD enum cp_code cp_two_sided_init(struct cp_two_sided *t,
                                            const struct cp_plan *plan, int rank);

/* Ends the writer. */
CP_NODISCARD enum cp_code cp_two_sided_take(struct cp_two_sided *t,
                                            struct cp_schedule **out);

/* One message of the current group. */
void cp_two_sided_move_buffer(struct cp_two_sided *t, int32_t buffer, int peer,
                              bool is_send);

/* The member of the group that is `index` places further on. */
int cp_two_sided_member_at(const struct cp_two_sided *t, int index);

/* The first exchange: rows and keys go to the members that answer for their heads, all
 * in one group of messages. Leaves the group's rows in `rows[i].gathered`, and the own
 * block. */
void cp_two_sided_exchange_in(struct cp_two_sided *t, int32_t k, int32_t v);

/* Do all blocks come at once, rather than one by one? */
bool cp_two_sided_is_allgather(const struct cp_two_sided *t);

/* Ring rank of the block met in step j. */
int cp_two_sided_block_at(const struct cp_two_sided *t, int j);

/* Buffers for the blocks of other ring ranks: each its own, or two slots in turn. */
void cp_two_sided_declare_blocks(struct cp_two_sided *t);

/* The rank that is `distance` further on in the own ring. */
int cp_two_sided_ring_peer(const struct cp_two_sided *t, int distance);

/* All blocks in one group of messages. */
void cp_two_sided_gather_blocks(struct cp_two_sided *t);

/* Messages of the current group must wait until the compute lane is done with what they
 * overwrite or send. */
void cp_two_sided_group_after_compute(struct cp_two_sided *t, int32_t first_step,
                                      int32_t compute_steps);

/* Steps written so far. */
int32_t cp_two_sided_step_count(const struct cp_two_sided *t);

/* The block of step j moves on: from the neighbour into its slot, once the block that
 * the slot held is met. */
void cp_two_sided_pass_block(struct cp_two_sided *t, int j);

/* The last exchange: finished rows go home. results: buffers of the group's rows, own
 * heads; outs: the caller's. */
void cp_two_sided_exchange_out(struct cp_two_sided *t, const enum cp_tensor_role *roles,
                               const int32_t *results, const int32_t *outs, int count);

#endif
