/* Template: the scores of one tile of queries against one block of keys, shared by
 * attend and grad.
 *
 * Scores lie transposed, score[key][lane], one query a lane. */
#include "kernel/cpu/generic_real.h"
#include "kernel/kernel.h"

/* Where a tile stands in its call: rows count from the first row of the views. */
struct REAL_NAME(spot) {
    int64_t batch, head;    /* of q */
    int64_t query, queries; /* at most LANES */
    int64_t key, keys;
};

/* How many of the first `keys` keys the queries before `query_end` can see. */
static inline int64_t REAL_NAME(visible)(const struct cp_place *place,
                                         int64_t query_end, int64_t keys)
{
    if (!place->is_causal) {
        return keys;
    }
    int64_t seen = place->q_first + query_end - place->k_first;
    return seen < 0 ? 0 : (seen < keys ? seen : keys);
}

/* score += mask; -inf wins over whatever the score is. `row` takes as many numbers as
 * there are keys. */
static inline void REAL_NAME(add_mask)(const struct cp_view *mask,
                                       const struct REAL_NAME(spot) * at, REAL *row,
                                       REAL *score)
{
    const char *from = mask->data;
    from += mask->n[0] > 1 ? at->batch * mask->stride[0] : 0;
    from += mask->n[1] > 1 ? at->head * mask->stride[1] : 0;
    int64_t key_stride = mask->n[3] > 1 ? mask->stride[3] : 0;
    from += at->key * key_stride;
    bool is_for_all = mask->n[2] == 1;
    for (int64_t i = 0; i < (is_for_all ? 1 : at->queries); i++) {
        int64_t query = is_for_all ? 0 : at->query + i;
        REAL_NAME(load)(mask->dtype, from + query * mask->stride[2], key_stride,
                        at->keys, row);
        int64_t lane_first = is_for_all ? 0 : i;
        int64_t lane_end = is_for_all ? LANES : i + 1;
        for (int64_t key = 0; key < at->keys; key++) {
            for (int64_t lane = lane_first; lane < lane_end; lane++) {
                REAL *s = score + key * LANES + lane;
                *s = row[key] == -(REAL)INFINITY ? row[key] : *s + row[key];
            }
        }
    }
}

/* -inf for keys behind the query. */
static inline void REAL_NAME(add_causal)(const struct cp_place *place,
                                         const struct REAL_NAME(spot) * at, REAL *score)
{
    int64_t ahead = (place->k_first + at->key) - (place->q_first + at->query);
    for (int64_t key = 0; key < at->keys; key++) {
        int64_t hidden = key + ahead; /* lanes before it cannot see the key */
        for (int64_t lane = 0; lane < LANES; lane++) {
            REAL *s = score + key * LANES + lane;
            *s = lane < hidden ? -(REAL)INFINITY : *s;
        }
    }
}

/* score[key][lane] = scale * k . q + mask; k in rows, q transposed: q[dim][lane]. */
static inline void REAL_NAME(scores)(const struct cp_place *place,
                                     const struct cp_view *mask, double scale,
                                     const struct REAL_NAME(spot) * at,
                                     int64_t head_dim, const REAL *k, const REAL *q,
                                     REAL *row, REAL *score)
{
    int64_t count = at->keys * LANES;
    REAL_NAME(dots)(at->keys, head_dim, k, q, score);
    for (int64_t i = 0; i < count; i++) {
        score[i] *= (REAL)scale;
    }
    if (mask->data != NULL) {
        REAL_NAME(add_mask)(mask, at, row, score);
    }
    if (place->is_causal) {
        REAL_NAME(add_causal)(place, at, score);
    }
}
