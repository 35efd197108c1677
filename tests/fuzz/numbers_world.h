/* The ranks of numbers.h, and the memory that their numbers lie in. */
#ifndef CP_TESTS_FUZZ_NUMBERS_WORLD_H
#define CP_TESTS_FUZZ_NUMBERS_WORLD_H

#include "schedule/schedule.h"

enum {
    MOST_WORLD = 16,
    MOST_SIGNALS = 256, /* what a step's byte can say */
    MOST_BYTES = 1 << 18
};

/* What stands in memory where no number starts: bytes inside an element or a panel, and bytes that nobody
 * has written. */
static const uint64_t numbers_inside = UINT64_C(0x1d5a1d5a1d5a1d5a);
static const uint64_t numbers_nothing = UINT64_C(0xdeaddeaddeaddead);

struct memory {
    uint64_t *at; /* one number for each byte */
    int64_t bytes;
};

/* The bytes of a message, as they were when it was sent. */
struct copy {
    uint64_t *at;
    int64_t bytes;
};

/* From one rank to another: how many halves were posted, and what was sent. */
struct channel {
    int32_t sends, receives;
    struct copy *copies;
};

struct rank {
    const struct cp_schedule *schedule;
    struct memory window, scratch;
    struct memory tensors[2][CP_TENSORS]; /* inputs, outputs; compact */
    int32_t *lanes[CP_LANES];             /* indices of steps */
    int32_t counts[CP_LANES], cursors[CP_LANES];
    int32_t group_ends[CP_LANES]; /* behind the group that was posted, or 0 */
    int32_t *halves;              /* by step: its number in its channel; -1: no bytes */
    uint32_t signals[MOST_SIGNALS];
};

struct world {
    const struct cp_plan *plan;
    int size;
    uint64_t seed;
    struct rank ranks[MOST_WORLD];
    struct channel channels[MOST_WORLD][MOST_WORLD];
    int64_t q_first[MOST_WORLD], kv_first[MOST_WORLD], cut_first[MOST_WORLD];
    int64_t q_all, kv_all, cut_all;
    bool is_torn; /* a message whose halves differ, or one that goes nowhere */
};

/* Zeroed; ends the process where there is none. */
void *numbers_allocate(size_t count, size_t bytes);

/* A buffer where it lies. */
struct place {
    const struct cp_buffer *buffer;
    struct memory memory;
    int64_t first, stride[CP_AXES];
    int64_t item;                  /* bytes of an element, or of a panel */
    bool is_panel, may_be_written; /* by the rank, in a window by any */
};

struct place numbers_place(struct world *world, int rank, int32_t number);
uint64_t *numbers_at(const struct place *place, int64_t byte);
/* Where an element, or the panel that it is in, begins. */
int64_t numbers_byte(const struct place *place, const struct cp_box *box,
                     const int64_t at[CP_AXES]);
/* Only in the rank's own memory, and not in its inputs. */
void numbers_write_byte(const struct place *place, int64_t byte, uint64_t number);
/* `numbers_nothing` where no whole element is. */
uint64_t numbers_read(const struct place *place, const struct cp_box *box,
                      const int64_t at[CP_AXES]);
void numbers_write(const struct place *place, const struct cp_box *box,
                   const int64_t at[CP_AXES], uint64_t number);
/* The number of a row, if all its elements are of one row. */
uint64_t numbers_read_row(const struct place *place, const struct cp_box *box,
                          int64_t b, int64_t i, int64_t h);
void numbers_write_row(const struct place *place, const struct cp_box *box, int64_t b,
                       int64_t i, int64_t h, uint64_t row);

/* Runs all ranks' steps; false where nobody can go on before all are done. */
bool numbers_run(struct world *world);

static inline bool is_tensor(const struct cp_buffer *buffer)
{
    return buffer->kind == CP_BUFFER_INPUT || buffer->kind == CP_BUFFER_OUTPUT;
}

static inline int64_t count_of(const int64_t n[CP_AXES])
{
    return n[0] * n[1] * n[2] * n[3];
}

/* The place of number `index` of a box, in row-major order. */
static inline void spread(const int64_t n[CP_AXES], int64_t index, int64_t at[CP_AXES])
{
    for (int axis = CP_AXES - 1; axis >= 0; axis--) {
        at[axis] = index % n[axis];
        index /= n[axis];
    }
}

/* The same, of the box's rows. */
static inline void spread_rows(const struct cp_box *box, int64_t index,
                               int64_t at[CP_AXES])
{
    const int64_t n[CP_AXES] = {box->n[0], box->n[1], box->n[2], 1};
    spread(n, index, at);
}

static inline int64_t row_count(const struct cp_box *box)
{
    return box->n[0] * box->n[1] * box->n[2];
}

#endif
