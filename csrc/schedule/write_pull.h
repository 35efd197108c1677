/* Attention over windows: every rank publishes what it holds once, and reads what it
 * needs in place, or, where a device had to reach for every key anew, brings a block of keys
 * to itself while it meets the one before (CP_FETCH: keys are then published as they are,
 * and packed on the way where the kernel wants that).
 *
 * Rank (r, u) takes the query rows of its Ulysses group for its own heads and meets the
 * keys of all W windows, its own first, then its neighbours'. Ring is U = 1, Ulysses is
 * R = 1; uneven shares are only other numbers. For three ranks in a ring, each column
 * one rank:
 *
 *     rank 0            rank 1            rank 2
 *     pack, publish     pack, publish     pack, publish
 *     attend 0          attend 1          attend 2          begins
 *     attend 1          attend 2          attend 0
 *     attend 2          attend 0          attend 1          ends: out and lse
 *
 * With U > 1 the query rows come from the group's windows first, and the finished rows
 * go back the same way. Heads may be cut in chunks (plan.h), met one after the other: the
 * rows of one go back while the next one is met.
 *
 * Backward: step c W + j meets block j in chunk c. The partial dK, dV of step s goes into slot
 * s mod 2 of the computing rank's window; the block's owner adds it to its sums in the
 * order of the steps and says so, which frees the slot. So sums are the same in every run,
 * and a rank may be two steps ahead of an owner. With U > 1 the slots, and the
 * results of a forward, lie where the query rows were that the group has fetched by then,
 * those of all chunks. */
#ifndef CP_SCHEDULE_WRITE_PULL_H
#define CP_SCHEDULE_WRITE_PULL_H

#include "schedule/write.h"

/* The counters of a rank in one call. */
enum {
    CP_PULL_READY, /* 1: inputs are in the window; 2, U > 1: the group's rows are fetched */
    CP_PULL_RESULT, /* c + 1: finished rows (forward), dQ (backward) of chunk c are in the
                        window */
    CP_PULL_PARTIAL, /* s: the partial gradient of step s is in its slot */
    CP_PULL_ADDED,   /* s: the partial gradient that others made for this rank in their
                       step s is added */
};

/* What belongs to one chunk. */
struct cp_pull_chunk {
    /* U > 1: what the group reads in a rank's window */
    int32_t out, out_lse, dq; /* results; dq a sum */
    /* own */
    int32_t state;            /* forward */
    struct cp_row_boxes rows; /* the group's; forward q alone */
    int32_t group_mask;       /* of them */
    int32_t arrived;          /* steps of lane `in` that bring them */
};

/* What a rank's window holds: numbers of buffers. */
struct cp_pull_window {
    int32_t k, v;                /* packed (forward) or plain (backward) */
    int32_t mask;                /* the part that travels with keys or rows */
    int32_t q, dout, lse, delta; /* U > 1: rows that the group reads */
    struct cp_pull_chunk *chunks;
    int64_t slots_first; /* backward: offset of the slots */
};

/* Everything that both directions need. */
struct cp_pull {
    struct cp_writer w;
    struct cp_pull_window *window; /* (world) */
    struct cp_pull_chunk *chunks;  /* (world, plan->chunks) */
    bool is_shared;                /* U > 1: rows travel inside the group */
    bool is_fetched;       /* the group has the own rows, by the steps written so far */
    bool fetches;          /* keys are brought here */
    int64_t longest_block; /* keys of it */
    int32_t own_k, own_v;  /* the caller's */
    int64_t place_bytes[2]; /* fetches: where blocks are brought to, in turn */
    int32_t met[2]; /* steps of the compute lane after which they may be again */
};

/* Keys of a block, own kv heads of the chunk. */
struct cp_pull_keys {
    struct cp_box k, v;
};

/* The keys of a rank. */
struct cp_block cp_pull_block_of(const struct cp_pull *pull, int owner);

/* The member of the own Ulysses group that is `index` places further on. */
int cp_pull_group_member(const struct cp_pull *pull, int index);

/* Declares everybody's window. After an error nothing is left. */
CP_NODISCARD enum cp_code cp_pull_init(struct cp_pull *pull, const struct cp_plan *plan,
                                       int rank, enum cp_transport transport);

/* Ends the writer. */
CP_NODISCARD enum cp_code cp_pull_take(struct cp_pull *pull, struct cp_schedule **out);

/* The own keys go into the window, as others will want them. */
void cp_pull_publish_keys(struct cp_pull *pull);

/* The keys that are met in that step, once lane `in` has come so far; and says so when the
 * step has been written that meets them. */
struct cp_pull_keys cp_pull_bring_keys(struct cp_pull *pull, int owner, int step);
void cp_pull_met_keys(struct cp_pull *pull, int step);

/* Copies a tensor of the caller into the own window. */
void cp_pull_publish_copy(struct cp_pull *pull, int32_t to, int32_t from);

/* The first steps of every call: what others will read goes into the window. */
void cp_pull_publish_mask(struct cp_pull *pull);

/* The chunk's numbers in a window. */
struct cp_pull_chunk *cp_pull_chunk_of(const struct cp_pull *pull, int owner);

/* Makes room in `group_mask` for the mask rows of the group, where they travel. */
void cp_pull_declare_group_mask(struct cp_pull *pull);

/* Copies a member's rows, own heads of the chunk, to their place among the group's in `to`.
 * `from`: the member's window, or for the own rows the caller's tensor. */
void cp_pull_gather_rows(struct cp_pull *pull, int member, int32_t to, int32_t from);

/* The same for the rows of a mask, where they travel. */
void cp_pull_gather_mask(struct cp_pull *pull, int member);

/* The rows of all chunks, one after the other, as `rows_of` gathers a chunk's: then the group is
 * done with the rows in windows. */
void cp_pull_gather(struct cp_pull *pull,
                    struct cp_row_boxes (*rows_of)(struct cp_pull *pull,
                                                   const void *own),
                    const void *own);

/* Lane `in` goes on once the group has fetched the own rows. */
void cp_pull_await_fetched(struct cp_pull *pull);

/* What is computed from now on is of the chunk that is written, whose rows are those. */
const struct cp_pull_chunk *cp_pull_begin_chunk(struct cp_pull *pull);

/* Does this rank read rows of that member in this chunk? */
bool cp_pull_needs_rows_of(const struct cp_pull *pull, int member);

/* Lane `in` waits until a rank's inputs may be read. The first chunk has waited for all that any
 * chunk reads. */
void cp_pull_await_ready(struct cp_pull *pull, int owner);

/* Brings a member's result of the chunk for the own rows home: its heads of the caller's
 * tensor. */
void cp_pull_fetch_result(struct cp_pull *pull, int member, int32_t to, int32_t from);

/* Waits until a member's results may be read; false where there is nothing to read. */
bool cp_pull_await_result(struct cp_pull *pull, int member);

#endif
