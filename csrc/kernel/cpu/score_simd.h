/* Template: from queries, packed keys, positions and a mask to the scores of one tile, for the forward and the backward
 * pass alike: exp(score - lse) of the one then repeats what the other rounded. Included by one file per ISA. */
#ifndef CP_KERNEL_CPU_SCORE_SIMD_H
#define CP_KERNEL_CPU_SCORE_SIMD_H

#include <math.h>

#include "kernel/cpu/panel_simd.h"
#include "kernel/cpu/tile_simd.h"
#include "kernel/kernel.h"

/* How the scale enters: queries times (high + low), scores times factor. */
struct scaling {
    float high, low, factor;
};

/* What all tiles of a call share. */
struct scorer {
    const struct cp_place *place;
    const struct cp_view *mask;
    struct scaling scaling;
    int64_t depth, k_group;
    float *queries, *tile,
        *highest; /* [depth up to 8][QUERIES], [keys of a tile][QUERIES], [QUERIES] */
};

/* The keys that one query head meets in one block, and its mask. */
struct stretch {
    const char *mask;               /* at the block's first key, row 0; NULL: none */
    int64_t row_stride, key_stride; /* of the mask */
    int64_t first, keys;            /* in the view */
};

static struct scaling scaling_of(double scale)
{
    if (WORD == 1) {
        /* Two floats, since the rounding of one would bend all scores the same way. */
        float high = (float)scale;
        return (struct scaling){
            .high = high, .low = (float)(scale - (double)high), .factor = 1.0f};
    }
    /* Half-width queries stay exact. A maximum needs a factor that is not negative; the sign goes to them. */
    return (struct scaling){.high = scale < 0.0 ? -1.0f : 1.0f,
                            .factor = (float)fabs(scale)};
}

CP_INLINE __m256 scale_words(const struct scaling *scaling, __m256 words)
{
    if (WORD == 1) {
        __m256 low = _mm256_mul_ps(words, _mm256_set1_ps(scaling->low));
        return _mm256_fmadd_ps(words, _mm256_set1_ps(scaling->high), low);
    }
    __m256i flip = _mm256_set1_epi32(scaling->high < 0.0f ? (int)0x80008000u : 0);
    return _mm256_xor_ps(words, _mm256_castsi256_ps(flip));
}

/* Rows of queries from `from` on, of a view like `q`, into [depth up to 8][QUERIES] words, scaled; lanes without a row
 * are 0. */
static void load_queries(const struct cp_view *q, const char *from, int64_t rows,
                         int64_t depth, const struct scaling *scaling, float *to)
{
    for (int64_t first = 0; first < QUERIES && first < rows; first += GROUP) {
        for (int64_t d = 0; d < depth; d += GROUP) {
            __m256 row[GROUP];
            for (int64_t i = 0; i < GROUP; i++) {
                const char *at = from + (first + i) * q->stride[1];
                lanes8_prefetch(at + GROUP * q->stride[1] + d * WORD * q->stride[3]);
                row[i] =
                    first + i < rows
                        ? scale_words(scaling, load_words(q->dtype, at, q->stride[3],
                                                          d * WORD, q->n[3]))
                        : _mm256_setzero_ps();
            }
            lanes8_transpose(row);
            for (int64_t i = 0; i < GROUP; i++) {
                _mm256_storeu_ps(to + (d + i) * QUERIES + first, row[i]);
            }
        }
    }
}

/* Eight cells of a mask as what they add to scores. */
CP_INLINE __m256 load_bias(enum cp_dtype dtype, const char *from, int64_t stride,
                           int64_t count)
{
    const __m256 none = _mm256_set1_ps(-INFINITY), zero = _mm256_setzero_ps();
    __m256 cells = lanes8_load(dtype, from, stride, count);
    return dtype == CP_DTYPE_BOOL
               ? _mm256_blendv_ps(zero, none, _mm256_cmp_ps(cells, zero, _CMP_EQ_OQ))
               : cells;
}

/* What the mask adds to the scores of `keys` keys from `key` of the stretch on, GROUP at most, for `rows` rows from `row`
 * on: [GROUP][QUERIES]. */
CP_INLINE void load_biases(const struct scorer *scorer, const struct stretch *s,
                           int64_t row, int64_t rows, int64_t key, int64_t keys,
                           float *to)
{
    enum cp_dtype dtype = scorer->mask->dtype;
    for (int64_t first = 0; first < rows; first += GROUP) {
        __m256 bias[GROUP];
        for (int64_t i = 0; i < GROUP; i++) {
            /* Lanes past the last row repeat it: there is nothing to read behind. */
            int64_t mask_row = row + (first + i < rows ? first + i : rows - 1);
            const char *from = s->mask + mask_row * s->row_stride + key * s->key_stride;
            lanes8_prefetch(from + TILE_KEYS * s->key_stride);
            bias[i] = load_bias(dtype, from, s->key_stride, keys);
        }
        lanes8_transpose(bias);
        for (int64_t i = 0; i < GROUP; i++) {
            _mm256_storeu_ps(to + i * QUERIES + first, bias[i]);
        }
    }
}

/* The same where the mask has one row for all queries. */
CP_INLINE void load_biases_of_keys(const struct scorer *scorer, const struct stretch *s,
                                   int64_t key, int64_t keys, float *to)
{
    float bias[GROUP];
    _mm256_storeu_ps(bias, load_bias(scorer->mask->dtype, s->mask + key * s->key_stride,
                                     s->key_stride, keys));
    for (int64_t i = 0; i < GROUP; i++) {
        for (int64_t lane = 0; lane < QUERIES; lane += LANES) {
            vec_store(to + i * QUERIES + lane, vec_set(bias[i]));
        }
    }
}

/* limit with the mask of the stretch, from `key` of it on. */
CP_INLINE void limit_with_mask(int vecs, const struct scorer *scorer,
                               const struct stretch *s, int64_t row, int64_t rows,
                               int64_t key, int64_t keys, int64_t edge)
{
    float bias[GROUP * QUERIES];
    for (int64_t k = 0; k < keys; k += GROUP) {
        int64_t some = keys - k < GROUP ? keys - k : GROUP;
        if (s->row_stride == 0) {
            load_biases_of_keys(scorer, s, key + k, some, bias);
        } else {
            load_biases(scorer, s, row, rows, key + k, some, bias);
        }
        limit(vecs, scorer->tile + k * QUERIES, some, scorer->scaling.factor, edge + k,
              bias, scorer->highest);
    }
}

/* Scores of `keys` keys from `key` of the stretch on, whose panel begins at `k`, for the rows whose queries are loaded.
 * The factor that they and the maxima still lack. */
CP_INLINE float score_tile(int vecs, const struct scorer *scorer,
                           const struct stretch *s, const float *k, int64_t row,
                           int64_t rows, int64_t key, int64_t keys)
{
    const struct cp_place *place = scorer->place;
    float factor = scorer->scaling.factor;
    scores(vecs, k, scorer->k_group, scorer->queries, scorer->depth,
           (keys + GROUP - 1) / GROUP, scorer->tile, scorer->highest);
    /* Query lane i may see key j of the tile iff edge + j <= i. */
    int64_t edge = place->k_first + s->first + key - place->q_first - row;
    bool is_edge = place->is_causal && edge + keys - 1 > 0;
    if (s->mask || is_edge || keys % GROUP != 0) {
        int64_t first_query = is_edge ? edge : -keys;
        clear_highest(vecs, scorer->highest);
        if (s->mask) {
            limit_with_mask(vecs, scorer, s, row, rows, key, keys, first_query);
        } else {
            limit(vecs, scorer->tile, keys, factor, first_query, NULL, scorer->highest);
        }
        factor = 1.0f;
    }
    return factor;
}

/* How many keys of the stretch the last of `rows` rows from `row` on sees; those before it see no more. */
static int64_t seen_keys(const struct cp_place *place, const struct stretch *s,
                         int64_t row, int64_t rows)
{
    if (!place->is_causal) {
        return s->keys;
    }
    int64_t seen = place->q_first + row + rows - (place->k_first + s->first);
    return seen < s->keys ? seen : s->keys;
}

static bool is_forbidden(enum cp_dtype dtype, const char *cell)
{
    __m256 bias = load_bias(dtype, cell, 0, 1);
    return _mm256_cvtss_f32(bias) == -INFINITY;
}

/* Gives the stretch its mask, unless that is only its length. */
static void mask_stretch(const struct cp_view *mask, struct stretch *s, int64_t b,
                         int64_t h)
{
    s->mask = NULL;
    if (!mask->data) {
        return;
    }
    int64_t stride[CP_AXES];
    for (int axis = 0; axis < CP_AXES; axis++) {
        stride[axis] = mask->n[axis] == 1 ? 0 : mask->stride[axis];
    }
    s->row_stride = stride[2];
    s->key_stride = stride[3];
    s->mask = mask->data + b * stride[0] + h * stride[1] + s->first * stride[3];
    if (mask->n[2] != 1) {
        return;
    }
    /* One row for all queries: keys that end in padding are fewer keys. */
    while (s->keys > 0 &&
           is_forbidden(mask->dtype, s->mask + (s->keys - 1) * s->key_stride)) {
        s->keys--;
    }
    bool is_all = mask->dtype == CP_DTYPE_BOOL;
    for (int64_t key = 0; is_all && key < s->keys; key++) {
        is_all = !is_forbidden(mask->dtype, s->mask + key * s->key_stride);
    }
    if (is_all) {
        s->mask = NULL;
    }
}

#endif
