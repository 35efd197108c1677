/* Template: what happens to one tile of QUERIES x TILE_KEYS scores. Included by one file per ISA.
 *
 * Queries lie in the vector lanes, so keys and values are only broadcast, and maximum, sum and rescaling are per
 * lane: no horizontal step anywhere.
 *
 *   scores    tile[key][query]  = sum over d of K[d][key] * Q[d][query]           ROWS keys x `vecs` vectors of sums
 *   limit     masks, the causal edge, the end of the keys (only tiles that need it)
 *   soften    tile[key][query]  = exp(tile - max), max and total carried
 *   weigh     out[dim][query]   = out * shrink + sum over keys of V[key][dim] * tile[key][query]
 *
 * Keys and values come from L2: each inner loop fetches what the same loop needs one group later.
 *
 * Per score that is 2 * (D + Dv) operations in fused multiply-adds against 13 instructions in between, hence at
 * best 0.95 of the peak at D 128 and 0.90 at D 64 with two vector ports.
 *
 * The compiler's flags choose vec_avx2.h or vec_avx512.h, and so:
 *   LANES, VECS, ROWS                floats a vector; vectors of queries; rows of sums that fit the registers (a divisor
 *                                    of 8)
 *   WORD                             elements per word of a panel (panel_simd.h): 1 unless the including file says 2
 *   vec                              a vector of LANES floats
 *   vec_load, vec_store, vec_set, vec_broadcast, vec_add, vec_sub, vec_mul, vec_fma (a * b + c), vec_fms (a * b - c)
 *   vec_max (a, b)                   b where one is a NaN
 *   vec_keep (a, b, c, d)            a >= b ? c : d
 *   vec_see (bools, a, b)            a where the bool of the lane is not 0, else b
 *   vec_scale_exp (n, p, a, b)       a < b ? 0 : the float with the bits of p + (those of n << 23)
 *   vec_dot (sum, word a, word b)    sum + the products of a word's elements
 *   vec_pair (a, b)                  WORD 2: words of the rounded a and b
 *   vec_store_words (to, a)          WORD 2: the rounded lanes of a, each with its neighbour in one word */
#ifndef CP_KERNEL_CPU_TILE_SIMD_H
#define CP_KERNEL_CPU_TILE_SIMD_H

#include <float.h>
#include <math.h>

#ifndef WORD
#define WORD 1
#endif
#ifdef __AVX512F__
#include "kernel/cpu/vec_avx512.h"
#else
#include "kernel/cpu/vec_avx2.h"
#endif

enum {
    QUERIES = VECS * LANES,
    /* Words of a score summed at a time: the backward pass needs the digit that longer sums lose. */
    CHUNK = 32,
    /* The tile and the queries of D 128 fill an L1 of 48 KiB, half of it with AVX2. */
    TILE_KEYS = 128,
};

/* The maximum of a row without keys. Finite, so that -inf minus it is -inf, of which exp makes 0. */
#define MAX_OF_NONE (-FLT_MAX)

/* e^x for x <= 0; exactly 1 for 0, exactly 0 where the result would be subnormal and for -inf, NaN for NaN.
 * x * log2(e) = n + f with |f| <= 1/2; n is added to the exponent of 2^f. Its polynomial is the minimax one of degree
 * 6 with the first coefficient held at 1 (linear program over 2,001 Chebyshev points: relative error 2e-9, with the
 * rounding of its evaluation 8e-8, without bias). */
CP_INLINE vec vec_exp(vec x)
{
    const vec rounder =
        vec_set(0x1.8p23f); /* adding it leaves the nearest integer in the low bits */
    const vec log2_e = vec_set(0x1.715476p+0f);
    const vec lowest = vec_set(-0x1.5d589ep+6f); /* -126 / log2(e) */
    vec shifted = vec_fma(x, log2_e, rounder);
    vec f = vec_fms(x, log2_e, vec_sub(shifted, rounder));
    vec p = vec_fma(f, vec_set(0x1.41fbbep-13f), vec_set(0x1.5f3e54p-10f));
    p = vec_fma(p, f, vec_set(0x1.3b2d4cp-7f));
    p = vec_fma(p, f, vec_set(0x1.c6aee8p-5f));
    p = vec_fma(p, f, vec_set(0x1.ebfbdcp-3f));
    p = vec_fma(p, f, vec_set(0x1.62e430p-1f));
    p = vec_fma(p, f, vec_set(1.0f));
    return vec_scale_exp(shifted, p, x, lowest);
}

CP_INLINE void clear_sums(int vecs, vec sum[ROWS][VECS])
{
    CP_UNROLL
    for (int i = 0; i < ROWS; i++) {
        CP_UNROLL
        for (int j = 0; j < vecs; j++) {
            sum[i][j] = vec_set(0.0f);
        }
    }
}

/* The innermost step: ROWS words, `step` apart, each times one row of `vecs` vectors. */
CP_INLINE void add_products(int vecs, vec sum[ROWS][VECS], const float *words,
                            int64_t step, const float *row)
{
    vec with[VECS];
    CP_UNROLL
    for (int j = 0; j < vecs; j++) {
        with[j] = vec_load(row + j * LANES);
    }
    CP_UNROLL
    for (int i = 0; i < ROWS; i++) {
        vec word = vec_broadcast(words + i * step);
        CP_UNROLL
        for (int j = 0; j < vecs; j++) {
            sum[i][j] = vec_dot(sum[i][j], word, with[j]);
        }
    }
}

/* ROWS keys of a group: `keys` points to the first one's word 0 (words are 8 apart). */
CP_INLINE void scores_rows(int vecs, const float *restrict keys, int64_t k_group,
                           const float *restrict queries, int64_t depth,
                           float *restrict tile, vec *restrict highest)
{
    vec sum[ROWS][VECS];
    int64_t d = 0;
    do {
        int64_t first = d, end = depth - d < CHUNK ? depth : d + CHUNK;
        clear_sums(vecs, sum);
        CP_UNROLL_SOME(4)
        for (; d < end; d++) {
            lanes8_prefetch(keys + k_group + d * 8);
            add_products(vecs, sum, keys + d * 8, 1, queries + d * QUERIES);
        }
        CP_UNROLL
        for (int i = 0; i < ROWS; i++) {
            CP_UNROLL
            for (int j = 0; j < vecs; j++) {
                float *cell = tile + i * QUERIES + j * LANES;
                sum[i][j] = first > 0 ? vec_add(sum[i][j], vec_load(cell)) : sum[i][j];
                vec_store(cell, sum[i][j]);
            }
        }
    } while (d < depth);
    CP_UNROLL
    for (int i = 0; i < ROWS; i++) {
        CP_UNROLL
        for (int j = 0; j < vecs; j++) {
            highest[j] = vec_max(highest[j], sum[i][j]);
        }
    }
}

/* Scores of whole groups of 8 keys, `k_group` words each, and per query the highest of them (times nothing yet). */
CP_INLINE void scores(int vecs, const float *keys, int64_t k_group,
                      const float *queries, int64_t depth, int64_t groups, float *tile,
                      float *highest)
{
    vec high[VECS];
    CP_UNROLL
    for (int j = 0; j < vecs; j++) {
        high[j] = vec_set(MAX_OF_NONE);
    }
    for (int64_t row = 0; row < groups * 8; row += ROWS) {
        const float *first = keys + row / 8 * k_group + row % 8;
        scores_rows(vecs, first, k_group, queries, depth, tile + row * QUERIES, high);
    }
    CP_UNROLL
    for (int j = 0; j < vecs; j++) {
        vec_store(highest + j * LANES, high[j]);
    }
}

/* The numbers of lanes, as many as any ISA has. */
static const float lane_numbers[48] = {0,  1,  2,  3,  4,  5,  6,  7,  8,  9,  10, 11,
                                       12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23,
                                       24, 25, 26, 27, 28, 29, 30, 31, 32, 33, 34, 35,
                                       36, 37, 38, 39, 40, 41, 42, 43, 44, 45, 46, 47};
_Static_assert((int)QUERIES <= 48, "a number for each lane");

CP_INLINE void clear_highest(int vecs, float *highest)
{
    CP_UNROLL
    for (int j = 0; j < vecs; j++) {
        vec_store(highest + j * LANES, vec_set(MAX_OF_NONE));
    }
}

/* What becomes of scores: [keys][QUERIES] of what is added to them, or of bools that let them be seen; at an edge key k is
 * hidden from the queries below first_query + k. */
struct limits {
    const float *bias; /* NULL: none */
    const char *bools; /* NULL: none */
    bool is_edge;
    int64_t first_query;
};

/* Multiplies `keys` rows of scores by `factor`, limits them, and carries the maxima of what is left. */
CP_INLINE void limit(int vecs, float *tile, int64_t keys, float factor,
                     struct limits limits, float *highest)
{
    const vec scale = vec_set(factor), hidden = vec_set(-INFINITY);
    vec high[VECS];
    CP_UNROLL
    for (int j = 0; j < vecs; j++) {
        high[j] = vec_load(highest + j * LANES);
    }
    for (int64_t k = 0; k < keys; k++) {
        int64_t first = limits.first_query + k;
        vec from = vec_set(first < 0         ? 0.0f
                           : first > QUERIES ? (float)QUERIES
                                             : (float)first);
        CP_UNROLL
        for (int j = 0; j < vecs; j++) {
            int64_t cell = k * QUERIES + j * LANES;
            vec score = vec_load(tile + cell);
            score = limits.bias != NULL
                        ? vec_fma(score, scale, vec_load(limits.bias + cell))
                        : vec_mul(score, scale);
            if (limits.bools != NULL) {
                score = vec_see(limits.bools + cell, score, hidden);
            }
            if (limits.is_edge) {
                score =
                    vec_keep(vec_load(lane_numbers + j * LANES), from, score, hidden);
            }
            high[j] = vec_max(high[j], score);
            vec_store(tile + cell, score);
        }
    }
    CP_UNROLL
    for (int j = 0; j < vecs; j++) {
        vec_store(highest + j * LANES, high[j]);
    }
}

/* tile = exp(tile * factor - max) for `keys` rows; state: max and total, shrink: what the old sums are worth now.
 * With WORD 2 two rows become one row of words, in place (it is written behind what is read). */
CP_INLINE void soften(int vecs, float *tile, int64_t keys, float factor,
                      const float *highest, float *max, float *total, float *shrink)
{
    vec base[VECS], sum[VECS], scale = vec_set(factor);
    CP_UNROLL
    for (int j = 0; j < vecs; j++) {
        vec none = vec_set(MAX_OF_NONE), before = vec_load(total + j * LANES);
        vec old = vec_keep(vec_set(0.0f), before, none, vec_load(max + j * LANES));
        vec now = vec_max(old, vec_mul(vec_load(highest + j * LANES), scale));
        vec factor_of_old = vec_exp(vec_sub(old, now));
        vec_store(shrink + j * LANES, factor_of_old);
        vec_store(max + j * LANES, now);
        vec_store(total + j * LANES, vec_mul(before, factor_of_old));
        base[j] = vec_sub(vec_set(0.0f), now);
        sum[j] = vec_set(0.0f);
    }
#if WORD == 1
    for (int64_t k = 0; k < keys; k++) {
        CP_UNROLL
        for (int j = 0; j < vecs; j++) {
            float *cell = tile + k * QUERIES + j * LANES;
            vec p = vec_exp(vec_fma(vec_load(cell), scale, base[j]));
            sum[j] = vec_add(sum[j], p);
            vec_store(cell, p);
        }
    }
#else
    for (int64_t k = 0; k < keys; k += 2) {
        CP_UNROLL
        for (int j = 0; j < vecs; j++) {
            const float *cell = tile + k * QUERIES + j * LANES;
            vec even = vec_exp(vec_fma(vec_load(cell), scale, base[j]));
            vec odd = vec_set(0.0f);
            if (k + 1 < keys) {
                odd = vec_exp(vec_fma(vec_load(cell + QUERIES), scale, base[j]));
            }
            sum[j] = vec_add(sum[j], vec_add(even, odd));
            vec_store(tile + k / 2 * QUERIES + j * LANES, vec_pair(even, odd));
        }
    }
#endif
    CP_UNROLL
    for (int j = 0; j < vecs; j++) {
        vec_store(total + j * LANES, vec_add(vec_load(total + j * LANES), sum[j]));
    }
}

/* How the words of one group of 8 rows of a panel lie: for the dims of one row, and for the rows of one dim. */
struct order {
    int64_t dim_step, row_step, group;
};

/* ROWS dims of the output; `values` points to their words of the first row, `words` rows of the tile count. */
CP_INLINE void weigh_rows(int vecs, const float *restrict values, struct order order,
                          const float *restrict tile, int64_t words,
                          float *restrict out, const float *restrict shrink)
{
    vec sum[ROWS][VECS];
    clear_sums(vecs, sum);
    for (; words > 0; words -= 8) {
        int64_t rows = words < 8 ? words : 8;
        CP_UNROLL_SOME(2)
        for (int64_t r = 0; r < rows; r++) {
            lanes8_prefetch(values + order.group + r * 8);
            add_products(vecs, sum, values + r * order.row_step, order.dim_step,
                         tile + r * QUERIES);
        }
        values += order.group;
        tile += 8 * QUERIES;
    }
    CP_UNROLL
    for (int i = 0; i < ROWS; i++) {
        CP_UNROLL
        for (int j = 0; j < vecs; j++) {
            float *cell = out + i * QUERIES + j * LANES;
            vec_store(cell,
                      vec_fma(vec_load(cell), vec_load(shrink + j * LANES), sum[i][j]));
        }
    }
}

/* A panel of values: [dims / 8][8 rows][8 dims] in each group. */
CP_INLINE void weigh(int vecs, const float *values, int64_t v_group, const float *tile,
                     int64_t words, int64_t dims, float *out, const float *shrink)
{
    const struct order order = {.dim_step = 1, .row_step = 8, .group = v_group};
    for (int64_t d = 0; d < dims; d += ROWS) {
        weigh_rows(vecs, values + d / 8 * 64 + d % 8, order, tile, words,
                   out + d * QUERIES, shrink);
    }
}

#endif
