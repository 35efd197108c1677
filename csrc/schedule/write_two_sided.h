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
 * the order posted.
 *
 * Heads may be cut in chunks (plan.h), one after the other, so that one is exchanged while the
 * one before it is met and the one before that goes back. For three of them:
 *
 *     lane in        bring 0   bring 1   give back 0   bring 2   give back 1   give back 2
 *     compute                  meet 0    meet 1                  meet 2
 *
 * What a chunk makes is in memory of its own, or of the chunk but one before it. Lane `in`
 * comes to that only behind what the chunk before gave back, and both lanes wait there for
 * each other. */
#ifndef CP_SCHEDULE_WRITE_TWO_SIDED_H
#define CP_SCHEDULE_WRITE_TWO_SIDED_H

#include "schedule/write.h"

/* A tensor that the group exchanges. */
struct cp_shared {
    enum cp_tensor_role role;
    enum cp_dtype dtype; /* that it travels in */
    int32_t own;         /* own rows, all heads */
    int32_t gathered; /* the group's rows, own heads of the chunk; CP_NO_BUFFER: as it
                            lies in `own` */
    int32_t sum;      /* of results: what is rounded into `gathered`, or `gathered` */
};

enum {
    CP_SHARED_TENSORS = 7, /* q, k, v, mask, dout, lse, delta */
    CP_SHARED_RESULTS = 3, /* out, lse; dq, dk, dv */
};

/* A block of keys as it is met. */
struct cp_key_block {
    int32_t k, v, mask;
    int32_t dk, dv; /* backward: sums that travel */
    int32_t done;   /* steps of the compute lane after which it is no longer needed */
};

/* What a chunk of heads works with. */
struct cp_head_chunk {
    struct cp_shared shared[CP_SHARED_TENSORS];  /* what the first exchange takes */
    struct cp_shared results[CP_SHARED_RESULTS]; /* what the last one gives back */
    int32_t parcels, result_parcels;             /* the first of each */
    struct cp_key_block *blocks;                 /* (ring) */
    int32_t sum;                                 /* the state; backward, dq */
    int32_t in_end, compute_end; /* steps of these lanes when it has been given back */
};

struct cp_two_sided {
    struct cp_writer w;
    struct cp_shared shared[CP_SHARED_TENSORS]; /* of the caller, by chunks */
    struct cp_shared results[CP_SHARED_RESULTS];
    int shared_count, result_count;
    struct cp_head_chunk *chunks; /* (plan->chunks) */
    struct cp_head_chunk *at;     /* the one that is being written */
    struct cp_key_block *blocks;  /* (plan->chunks, ring) */
    int ring, ulysses;
    bool is_backward;
    int group; /* number of the next group of messages */
};

/* What forward and backward differ in. */
struct cp_two_sided_direction {
    /* What is exchanged, and what all chunks have together; the first steps. */
    void (*begin)(struct cp_two_sided *t);
    /* Buffers of the chunk that last while it is there; and the results, which lie where
     * all that came with the first exchange or after it was. */
    void (*declare)(struct cp_two_sided *t);
    void (*declare_results)(struct cp_two_sided *t);
    /* Meets all blocks. */
    void (*meet)(struct cp_two_sided *t);
    /* What is done before the last exchange of the chunk, and after that of the last one. */
    void (*finish)(struct cp_two_sided *t);
    void (*end)(struct cp_two_sided *t);
};

/* Writes all chunks. */
CP_NODISCARD enum cp_code cp_two_sided_write(const struct cp_plan *plan, int rank,
                                             const struct cp_two_sided_direction *is,
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
/* One more result for the last exchange. */
void cp_two_sided_give(struct cp_two_sided *t, enum cp_tensor_role role,
                       enum cp_dtype dtype, int32_t own);

/* Buffers of the chunk for the first exchange: what lasts, then what lane `in` may use again
 * behind it, from where the arena ends then. */
void cp_two_sided_declare_exchange(struct cp_two_sided *t);
/* Room for the group's rows of a result, in the dtype that it travels in. */
void cp_two_sided_declare_gathered(struct cp_two_sided *t, struct cp_shared *result);
/* Buffers for the last exchange, beside these. */
void cp_two_sided_declare_parcels_home(struct cp_two_sided *t);

/* The first exchange: rows, and the mask where it travels, go to the members that answer
 * for their heads, all in one group of messages. */
void cp_two_sided_exchange_in(struct cp_two_sided *t);
/* The group's rows of a tensor of the first exchange. */
struct cp_box cp_two_sided_gathered(const struct cp_two_sided *t,
                                    enum cp_tensor_role role);
/* The own heads' part of a tensor of the caller, where there is no group. */
struct cp_box cp_two_sided_own(const struct cp_two_sided *t,
                               const struct cp_shared *shared);
/* The last exchange: what was made of the group's rows goes to `own` of those that own
 * them. Where heads meet, `own` of keys is a sum and grows. */
void cp_two_sided_exchange_out(struct cp_two_sided *t);
/* Do several members make a part of one dK, since the heads of both use its kv head? */
bool cp_two_sided_heads_meet(const struct cp_two_sided *t);

/* ---- the ring: write_two_sided_ring.c ---- */

/* The keys of the block of ring rank b. */
struct cp_block cp_two_sided_block_of(const struct cp_two_sided *t, int b);
/* Buffers for dK and dV of the block of ring rank b. */
void cp_two_sided_declare_sums(struct cp_two_sided *t, int b);
/* Buffers for the own block, and for those of other ring ranks: each its own, or two slots
 * in turn. */
void cp_two_sided_declare_blocks(struct cp_two_sided *t);
/* Makes the own block of what was gathered. */
void cp_two_sided_make_block(struct cp_two_sided *t);

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
