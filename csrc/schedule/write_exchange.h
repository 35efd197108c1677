/* Attention by exchange: an exchange inside the Ulysses group, a ring of blocks, an exchange
 * back. Over sends and receives; or over windows that ranks write to each other (CP_PUSH).
 *
 * What a group exchanges lies with its rows outermost, keys being rows too. So the part
 * of each member is one run of bytes in what holds the whole group's: it is received into
 * its place there, and sent from it on the way back. For two members:
 *
 *     member 0                    member 1                    on the way
 *     copy q k v, own heads       copy q k v, own heads
 *     copy q k v, heads of 1      copy q k v, heads of 0      rows of 0 to 1, of 1 to 0
 *     pack k v of both            pack k v of both
 *     attend, rows of both        attend, rows of both        rows of 1 to 1, of 0 to 0
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
 * Over windows the same copies that make a parcel put it where it belongs, in the window of
 * the member that needs it: that is all there is of the exchange but for a signal. Results
 * lie in the window of who made them, and are fetched from there into the caller's tensor, on
 * lane `out`, or added up where heads meet; blocks of the ring are fetched from where the
 * group put them. Chunks have places of their own in windows, all free when a call starts.
 *
 * Heads may be cut in chunks (plan.h), one after the other, so that one is exchanged while the
 * one before it is met and the one before that goes back. For three of them:
 *
 *     lane in        bring 0   bring 1   give back 0   bring 2   give back 1   give back 2
 *     compute                  meet 0    meet 1                  meet 2
 *
 * What a chunk makes in the workspace is in memory of its own, or of the chunk but one before
 * it. Lane `in` comes to that only behind what the chunk before gave back, and both lanes wait
 * there for each other. */
#ifndef CP_SCHEDULE_WRITE_EXCHANGE_H
#define CP_SCHEDULE_WRITE_EXCHANGE_H

#include "schedule/write.h"

/* A tensor that the group exchanges. */
struct cp_shared {
    enum cp_tensor_role role;
    enum cp_dtype dtype; /* that it travels in */
    int32_t own;         /* own rows, all heads */
    int32_t gathered; /* the group's rows, own heads of the chunk; CP_NO_BUFFER: as it
                            lies in `own` */
    int32_t sum;      /* of results: what is rounded into `gathered`, or `gathered`;
                            CP_NO_BUFFER: made in its place */
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
    int32_t parcels, result_parcels; /* the first of each; by windows, of all places */
    struct cp_key_block *blocks;     /* (ring) */
    int32_t sum;                     /* the state; backward, dq */
    int32_t in_end, compute_end; /* steps of these lanes when it has been given back */
};

/* The window of a rank, as far as it is given away. */
struct cp_exchange_window {
    struct cp_arena arena;
    int64_t chunk_first; /* where the chunk's places begin */
};

struct cp_exchange {
    struct cp_writer w;
    struct cp_exchange_window *windows;         /* (world); NULL: messages */
    enum cp_lane home;                          /* of the last exchange */
    struct cp_shared shared[CP_SHARED_TENSORS]; /* of the caller, by chunks */
    struct cp_shared results[CP_SHARED_RESULTS];
    int shared_count, result_count;
    struct cp_head_chunk *chunks; /* (plan->chunks) */
    struct cp_head_chunk *at;     /* the one that is being written */
    struct cp_key_block *blocks;  /* (plan->chunks, ring) */
    int ring, ulysses;
    int group; /* number of the next group of messages */
};

/* By windows: the counters of a rank in one call. */
enum {
    CP_EXCHANGE_BROUGHT, /* c + 1: own rows of chunk c are in all members' windows */
    CP_EXCHANGE_WHOLE,   /* R > 1, c + 1: the own window has the group's rows of it */
    CP_EXCHANGE_MADE,    /* c + 1: the own window has the results of it */
};

/* What forward and backward differ in. */
struct cp_exchange_direction {
    /* What is exchanged, and what all chunks have together; the first steps. */
    void (*begin)(struct cp_exchange *x);
    /* Buffers of the chunk that last while it is there, the sums of results among them. */
    void (*declare)(struct cp_exchange *x);
    /* Meets all blocks. */
    void (*meet)(struct cp_exchange *x);
    /* What is done before the last exchange of the chunk, and after that of the last one. */
    void (*finish)(struct cp_exchange *x);
    void (*end)(struct cp_exchange *x);
};

/* Writes all chunks. */
CP_NODISCARD enum cp_code cp_exchange_write(const struct cp_plan *plan, int rank,
                                            enum cp_transport transport,
                                            const struct cp_exchange_direction *is,
                                            struct cp_schedule **out);

/* Rank (r, u). */
int cp_exchange_rank_of(const struct cp_exchange *x, int r, int u);
/* Steps written so far. */
int32_t cp_exchange_step_count(const struct cp_exchange *x);
/* Messages of the current group must wait until the compute lane is done with what they
 * overwrite or send. */
void cp_exchange_group_after_compute(struct cp_exchange *x, int32_t first_step,
                                     int32_t compute_steps);

/* ---- the group: write_exchange_group.c ---- */

/* One more tensor for the first exchange; and several of the caller's. */
void cp_exchange_share(struct cp_exchange *x, enum cp_tensor_role role, int32_t own);
void cp_exchange_share_inputs(struct cp_exchange *x, const enum cp_tensor_role *roles,
                              int count);
/* One more result for the last exchange. */
void cp_exchange_give(struct cp_exchange *x, enum cp_tensor_role role,
                      enum cp_dtype dtype, int32_t own);

/* Buffers of the chunk for the first exchange: what lasts, then what lane `in` may use again
 * behind it, from where the arena ends then. */
void cp_exchange_declare_there(struct cp_exchange *x);
/* Buffers for the last exchange. */
void cp_exchange_declare_back(struct cp_exchange *x);

/* The first exchange: rows, and the mask where it travels, go to the members that answer
 * for their heads, all in one group of messages. */
void cp_exchange_there(struct cp_exchange *x);
/* The group's rows of a tensor of the first exchange. */
struct cp_box cp_exchange_gathered(const struct cp_exchange *x,
                                   enum cp_tensor_role role);
/* By windows: the same at any rank. */
struct cp_box cp_exchange_gathered_at(const struct cp_exchange *x, int rank,
                                      enum cp_tensor_role role);
/* The own heads' part of a tensor of the caller, where there is no group. */
struct cp_box cp_exchange_own(const struct cp_exchange *x,
                              const struct cp_shared *shared);
/* The last exchange: what was made of the group's rows goes to `own` of those that own
 * them. Where heads meet, `own` of keys is a sum and grows. */
void cp_exchange_back(struct cp_exchange *x);
/* Do several members make a part of one dK, since the heads of both use its kv head? */
bool cp_exchange_heads_meet(const struct cp_exchange *x);

/* ---- the ring: write_exchange_ring.c ---- */

/* The keys of the block of ring rank b; and its k or v as it is met. */
struct cp_block cp_exchange_block_of(const struct cp_exchange *x, int b);
struct cp_box cp_exchange_keys(const struct cp_exchange *x, int b,
                               enum cp_tensor_role role);
/* Buffers for dK and dV of the block of ring rank b. */
void cp_exchange_declare_sums(struct cp_exchange *x, int b);
/* Buffers for the own block, and for those of other ring ranks: each its own, or two slots
 * in turn. */
void cp_exchange_declare_blocks(struct cp_exchange *x);
/* Makes the own block of what was gathered. */
void cp_exchange_make_own_block(struct cp_exchange *x);

/* Do all blocks come at once, rather than one by one? */
bool cp_exchange_is_allgather(const struct cp_exchange *x);
/* Ring rank of the block met in step j. */
int cp_exchange_block_at(const struct cp_exchange *x, int j);
/* The rank that is `distance` further on in the own ring. */
int cp_exchange_ring_peer(const struct cp_exchange *x, int distance);
/* One message of the current group. */
void cp_exchange_move_buffer(struct cp_exchange *x, int32_t buffer, int peer,
                             bool is_send);
/* All blocks in one group of messages. */
void cp_exchange_gather_blocks(struct cp_exchange *x);
/* The block of step j moves on: from the neighbour into its slot, once the block that
 * the slot held is met. */
void cp_exchange_pass_block(struct cp_exchange *x, int j);

#endif
