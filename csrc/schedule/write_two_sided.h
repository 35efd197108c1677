/* Attention over sends and receives: an exchange inside the Ulysses group, a ring of
 * blocks, an exchange back.
 *
 * What a group exchanges lies with its rows outermost, keys being rows too. So the part
 * of each member is one run of bytes in what holds the whole group's: it is received into
 * its place there, and sent from it on the way back. For two members:
 *
 *     member 0                    member 1                    on the way
 *     copy q k v, own heads       copy q k v, own heads
 *     copy q k v, heads of 1      copy q k v, heads of 0      rows of 0 to 1, of 1 to 0
 *     pack k v of both            pack k v of both
 *     attend                      attend
 *     finish rows of both         finish rows of both         rows of 1 to 1, of 0 to 0
 *     copy out, heads of 0, 1     copy out, heads of 0, 1
 *
 * A block is the keys of one Ulysses group for the own heads. The ring passes blocks on
 * (rotate "alltoall", two slots) or every rank gets all of them at once ("allgather"). For
 * three ranks, U = 1:
 *
 *     rank 0       rank 1       rank 2       on the way
 *     attend 0     attend 1     attend 2     0 to rank 2, 1 to rank 0, 2 to rank 1
 *     attend 1     attend 2     attend 0     1 to rank 2, 2 to rank 0, 0 to rank 1
 *     attend 2     attend 0     attend 1
 *
 * Backward, the sums of dK and dV travel with their block, one hop behind it, and take
 * one last hop home; then they go back to the members that own the keys.
 *
 * All messages are on lane `in`, in one order, since messages between two ranks meet in
 * the order posted. */
#ifndef CP_SCHEDULE_WRITE_TWO_SIDED_H
#define CP_SCHEDULE_WRITE_TWO_SIDED_H

#include "schedule/write.h"

/* A tensor that the group exchanges. */
struct cp_shared {
    enum cp_tensor_role role;
    enum cp_dtype dtype; /* that it travels in */
    int32_t own;         /* own rows, all heads */
    int32_t gathered;    /* the group's rows, own heads */
};

/* q, k, v, mask, dout, lse, delta */
enum { CP_SHARED_TENSORS = 7 };

/* A block of keys as it is met. */
struct cp_key_block {
    int32_t k, v, mask;
    int32_t dk, dv; /* backward: sums that travel */
    int32_t done;   /* steps of the compute lane after which it is no longer needed */
};

struct cp_two_sided {
    struct cp_writer w;
    struct cp_shared shared[CP_SHARED_TENSORS]; /* what the first exchange takes */
    int shared_count;
    struct cp_key_block *blocks; /* (ring) */
    int ring, ulysses;
    bool is_backward;
    int group;             /* number of the next group of messages */
    int64_t lasting_bytes; /* of the workspace: what lies before the first exchange's */
};

/* After an error nothing is left. */
CP_NODISCARD enum cp_code cp_two_sided_init(struct cp_two_sided *t,
                                            const struct cp_plan *plan, int rank);
/* Ends the writer. */
CP_NODISCARD enum cp_code cp_two_sided_take(struct cp_two_sided *t,
                                            struct cp_schedule **out);

/* Rank (r, u). */
int cp_two_sided_rank_of(const struct cp_two_sided *t, int r, int u);
/* Steps written so far. */
int32_t cp_two_sided_step_count(const struct cp_two_sided *t);
/* Messages of the current group must wait until the compute lane is done with what they
 * overwrite or send. */
void cp_two_sided_group_after_compute(struct cp_two_sided *t, int32_t first_step,
                                      int32_t compute_steps);

/* ---- the group: write_two_sided_exchange.c ---- */

/* One more tensor for the first exchange; and several of the caller's. */
void cp_two_sided_share(struct cp_two_sided *t, enum cp_tensor_role role, int32_t own);
void cp_two_sided_share_inputs(struct cp_two_sided *t, const enum cp_tensor_role *roles,
                               int count);
/* The first exchange: rows, and the mask where it travels, go to the members that answer
 * for their heads, all in one group of messages. */
void cp_two_sided_exchange_in(struct cp_two_sided *t);
/* The group's rows of a tensor of the first exchange. */
int32_t cp_two_sided_gathered(const struct cp_two_sided *t, enum cp_tensor_role role);
/* Makes room for the group's rows. */
void cp_two_sided_declare_gathered(struct cp_two_sided *t, struct cp_shared *shared);
/* All blocks are met: what is placed now, and written after them, lies where all that
 * came with the first exchange or after it was. */
void cp_two_sided_reuse(struct cp_two_sided *t);
/* The last exchange: what was made of the group's rows goes to `own` of those that own
 * them. Where heads meet, `own` of keys is a sum and grows. */
void cp_two_sided_exchange_out(struct cp_two_sided *t, const struct cp_shared *shared,
                               int count);
/* Do several members make a part of one dK, since the heads of both use its kv head? */
bool cp_two_sided_heads_meet(const struct cp_two_sided *t);

/* ---- the ring: write_two_sided.c ---- */

/* The keys of the block of ring rank b. */
struct cp_block cp_two_sided_block_of(const struct cp_two_sided *t, int b);
/* Makes the own block of what was gathered. */
void cp_two_sided_make_block(struct cp_two_sided *t);
/* Buffers for dK and dV of the block of ring rank b. */
void cp_two_sided_declare_sums(struct cp_two_sided *t, int b);
/* Buffers for the blocks of other ring ranks: each its own, or two slots in turn. */
void cp_two_sided_declare_blocks(struct cp_two_sided *t);

/* Do all blocks come at once, rather than one by one? */
bool cp_two_sided_is_allgather(const struct cp_two_sided *t);
/* Ring rank of the block met in step j. */
int cp_two_sided_block_at(const struct cp_two_sided *t, int j);
/* The rank that is `distance` further on in the own ring. */
int cp_two_sided_ring_peer(const struct cp_two_sided *t, int distance);
/* One message of the current group. */
void cp_two_sided_move_buffer(struct cp_two_sided *t, int32_t buffer, int peer,
                              bool is_send);
/* All blocks in one group of messages. */
void cp_two_sided_gather_blocks(struct cp_two_sided *t);
/* The block of step j moves on: from the neighbour into its slot, once the block that
 * the slot held is met. */
void cp_two_sided_pass_block(struct cp_two_sided *t, int j);

#endif
