/* The grid of cases that all tests of schedules walk: worlds of 1 to 16 ranks, every factoring in
 * ring and Ulysses, even and uneven lengths, heads, masks and the rest, drawn from a seed.
 *
 * A case is what the ranks would ask for: records, ready for cp_agree and cp_plan_create. Masks have
 * values too, the same for every way of cutting them. */
#ifndef CP_TESTS_GRID_H
#define CP_TESTS_GRID_H

#include <stddef.h>

#include "schedule/schedule.h"

enum { GRID_MAX_WORLD = 16, GRID_TEXT = 420 };

struct grid_case {
    int64_t number;
    uint64_t seed; /* of the mask's values */
    int world;
    enum cp_transport transport;
    struct cp_record records[GRID_MAX_WORLD];
};

/* Cases 0 .. count - 1 meet every combination of factoring, operation, transport with rotation, and
 * variant once; what else a case has is drawn anew for every number. */
int64_t grid_count(void);
void grid_make(int64_t number, uint64_t seed, struct grid_case *out);
/* The same, of this world. */
void grid_make_like(int world, enum cp_transport transport, int64_t number,
                    uint64_t seed, struct grid_case *out);
void grid_print(const struct grid_case *grid, char text[GRID_TEXT]);

/* A packed layout that stands for a kernel's where none runs. */
/* `call->format` of a kernel that meets keys as they are; 1: of one that packs. */
enum { GRID_PLAIN_KEYS = 2 };
struct cp_format grid_format(const struct cp_call *call);

/* What the mask adds to the score of global row and key; -INFINITY: hidden, one value in
 * four; 0 without a mask. On an axis that the mask does not have (length 1) the place is 0. */
double grid_mask_value(const struct grid_case *grid, int64_t batch, int64_t head,
                       int64_t row, int64_t key);

#endif
