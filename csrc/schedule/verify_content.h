/* What the bytes of a call mean: a symbol for every row and head of every buffer.
 *
 * A cell is one (batch, row, head), or one element of a mask; the last axis is never cut, so a
 * cell stands for all of it. Its token names what it holds: "k of row 3, head 2, call 0", or
 * zeroes, or nothing that may be read. Sums carry a set as well: a state or dq the keys that
 * it took up, dk and dv the (query head, query row) pairs, what reduce_scatter adds the ranks
 * that gave their part. Buffers may share bytes: a write to
 * one leaves nothing that may be read in the cells of another. */
#ifndef CP_SCHEDULE_VERIFY_CONTENT_H
#define CP_SCHEDULE_VERIFY_CONTENT_H

#include "schedule/verify_buffer.h"
#include "schedule/verify_pool.h"

enum cp_mark {
    CP_MARK_NONE, /* never written, or written over */
    CP_MARK_ZERO,
    CP_MARK_STATE, /* of a row and head */
    CP_MARK_ROLE   /* + enum cp_tensor_role */
};

/* kind (5 bits), call (4), batch (10), a, b, c (15 each). a, b: row, head; of a mask: head,
 * row, key. */
typedef uint64_t cp_token;

enum {
    CP_TOKEN_CALLS = 1 << 4,
    CP_TOKEN_BATCHES = 1 << 10,
    CP_TOKEN_ROWS = (1 << 15) - 1, /* the last one is kept for CP_TOKEN_NO_ROW */
    CP_TOKEN_NO_ROW = CP_TOKEN_ROWS,
    CP_TOKEN_TEXT = 96
};

static inline cp_token cp_token_of(int mark, int call, int64_t batch, int64_t a,
                                   int64_t b, int64_t c)
{
    return (uint64_t)mark | (uint64_t)call << 5 | (uint64_t)batch << 9 |
           (uint64_t)a << 19 | (uint64_t)b << 34 | (uint64_t)c << 49;
}

static inline int cp_token_mark(cp_token token)
{
    return (int)(token & 31);
}

static inline int64_t cp_token_batch(cp_token token)
{
    return (int64_t)(token >> 9 & 1023);
}

static inline int64_t cp_token_a(cp_token token)
{
    return (int64_t)(token >> 19 & 32767);
}

static inline int64_t cp_token_b(cp_token token)
{
    return (int64_t)(token >> 34 & 32767);
}

/* "k of row 3, head 2 (batch 0, call 0)". */
const char *cp_token_print(cp_token token, char text[CP_TOKEN_TEXT]);

struct cp_content {
    struct cp_content *next; /* in its arena */
    struct cp_shape shape;
    int64_t cells[CP_AXES]; /* along the axes */
    cp_token *tokens;
    uint64_t *sets; /* NULL: no cell has one */
};

/* The contents of one call. */
struct cp_memory {
    struct cp_pool *pool;
    struct cp_content **arenas; /* by number */
    int64_t set_words;          /* of a set */
};

/* A box of a content, as a step's arg; content NULL: not given. */
struct cp_arg {
    struct cp_content *content;
    const struct cp_box *box;
};

/* The content of that shape in the arena, made where there is none. */
CP_NODISCARD enum cp_code cp_memory_content(struct cp_memory *memory, int arena,
                                            const struct cp_shape *shape,
                                            struct cp_content **out);
/* One that lies nowhere, as large as the box: a message on its way. */
CP_NODISCARD enum cp_code cp_memory_parcel(struct cp_memory *memory,
                                           const struct cp_shape *shape,
                                           const struct cp_box *box,
                                           struct cp_content **out);

/* After a write to `arg`: nothing may be read of it through other buffers of the arena. */
void cp_memory_wrote(struct cp_memory *memory, int arena, const struct cp_arg *arg);

/* Place of a cell in `tokens`. */
int64_t cp_content_cell(const struct cp_arg *arg, int64_t i0, int64_t i1, int64_t i2,
                        int64_t i3);

/* Sets. */
CP_NODISCARD enum cp_code cp_content_need_sets(const struct cp_memory *memory,
                                               struct cp_content *content);
uint64_t *cp_content_set(const struct cp_memory *memory,
                         const struct cp_content *content, int64_t cell);
/* Adds first .. last; returns the first one that was there already, or -1. */
int64_t cp_set_add(uint64_t *set, int64_t first, int64_t last);
int64_t cp_set_count(const uint64_t *set, int64_t first, int64_t last);

#endif
