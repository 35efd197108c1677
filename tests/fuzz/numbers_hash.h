/* The numbers that rows, pairs and sums are, for numbers.h. */
#ifndef CP_TESTS_FUZZ_NUMBERS_HASH_H
#define CP_TESTS_FUZZ_NUMBERS_HASH_H

#include "schedule/schedule.h"

static inline uint64_t mix(uint64_t a, uint64_t b)
{
    uint64_t z = a * UINT64_C(0x9e3779b97f4a7c15) + b + UINT64_C(0x632be59bd9b4e019);
    z = (z ^ (z >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ (z >> 27)) * UINT64_C(0x94d049bb133111eb);
    return z ^ (z >> 31);
}

/* Of a row and head, or of an element of a mask. */
static inline uint64_t number_of(enum cp_tensor_role role, int64_t a, int64_t b,
                                 int64_t c, int64_t d)
{
    uint64_t number = mix(0, (uint64_t)role);
    number = mix(number, (uint64_t)a);
    number = mix(number, (uint64_t)b);
    number = mix(number, (uint64_t)c);
    return mix(number, (uint64_t)d);
}

/* Element `d` of a row: a multiple, so that elements add up as rows do. */
static inline uint64_t element_of(uint64_t row, int64_t d)
{
    return row * (uint64_t)(2 * d + 1);
}

/* A sum in the bits of what it is the sum of: nothing to add to any more. */
static inline uint64_t rounded(uint64_t number)
{
    return number == 0 ? 0 : mix(number, 1);
}

static inline uint64_t result_of(uint64_t state, enum cp_tensor_role role)
{
    return mix(mix(state, 2), (uint64_t)role);
}

static inline uint64_t delta_of(uint64_t out, uint64_t dout, uint64_t dlse)
{
    return mix(mix(mix(3, out), dout), dlse);
}

/* A query row that meets a key. */
struct pair {
    uint64_t q, k, v, mask;
    uint64_t dout, lse, delta; /* backward */
};

static inline uint64_t state_of(const struct pair *pair)
{
    return mix(mix(mix(mix(4, pair->q), pair->k), pair->v), pair->mask);
}

static inline uint64_t grad_of(const struct pair *pair, enum cp_tensor_role role)
{
    uint64_t number = mix(mix(mix(5, state_of(pair)), pair->dout), pair->lse);
    return mix(mix(number, pair->delta), (uint64_t)role);
}

#endif
