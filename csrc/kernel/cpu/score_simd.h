/* Template: from queries, packed keys, positions and a mask to the scores of one tile, for the forward and the backward
 * pass alike: exp(score - lse) of the one then repeats what the other rounded. Included by one file per ISA. */
#ifndef CP_KERNEL_CPU_SCORE_SIMD_H
#define CP_KERNEL_CPU_SCORE_SIMD_H

#include <math.h>
#include <string.h>

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

/* Of one cell. */
static float bias_of(enum cp_dtype dtype, const char *cell)
{
    return _mm256_cvtss_f32(load_bias(dtype, cell, 0, 1));
}

/* Where the cells of GROUP rows of a mask begin, those of the first at `from`. Rows past `rows` are the last again: there
 * is nothing to read behind. Returns where the next row's begin. */
CP_INLINE const char *rows_of_mask(const struct stretch *s, const char *from,
                                   int64_t rows, const char *at[GROUP])
{
    for (int64_t i = 0; i < GROUP; i++) {
        at[i] = from;
        lanes8_prefetch(from + TILE_KEYS * s->key_stride);
        from += i + 1 < rows ? s->row_stride : 0;
    }
    return from;
}

/* What the mask adds to the scores of `keys` keys, GROUP at most, for `rows` rows, the cells of the first of which begin at
 * `from`: [GROUP][QUERIES]. */
CP_INLINE void load_biases(int vecs, enum cp_dtype dtype, const struct stretch *s,
                           const char *from, int64_t rows, int64_t keys, float *to)
{
    for (int64_t first = 0; first < vecs * LANES; first += GROUP) {
        const char *at[GROUP];
        __m256 bias[GROUP];
        from = rows_of_mask(s, from, rows - first, at);
        for (int64_t i = 0; i < GROUP; i++) {
            bias[i] = load_bias(dtype, at[i], s->key_stride, keys);
        }
        lanes8_transpose(bias);
        for (int64_t i = 0; i < GROUP; i++) {
            _mm256_storeu_ps(to + i * QUERIES + first, bias[i]);
        }
    }
}

/* The same of GROUP bools side by side in each row, as they are. */
CP_INLINE void load_bools(int vecs, const struct stretch *s, const char *from,
                          int64_t rows, char *to)
{
    for (int64_t first = 0; first < vecs * LANES; first += GROUP) {
        const char *at[GROUP];
        __m128i bools[GROUP], pairs[GROUP / 2];
        from = rows_of_mask(s, from, rows - first, at);
        for (int64_t i = 0; i < GROUP; i++) {
            bools[i] = _mm_loadl_epi64((const __m128i *)(const void *)at[i]);
        }
        lanes8_transpose_bytes(bools, pairs);
        for (int64_t i = 0; i < GROUP; i++) {
            __m128i one = i % 2 == 0 ? pairs[i / 2] : _mm_srli_si128(pairs[i / 2], 8);
            _mm_storel_epi64((__m128i *)(void *)(to + i * QUERIES + first), one);
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

/* limit, compiled for each kind of limits. */
CP_INLINE void limit_by(int vecs, const struct scorer *scorer, int64_t key,
                        int64_t keys, const float *bias, const char *bools,
                        int64_t edge)
{
    float *tile = scorer->tile + key * QUERIES, factor = scorer->scaling.factor;
    if (edge + keys - 1 > 0) {
        struct limits limits = {bias, bools, true, edge};
        limit(vecs, tile, keys, factor, limits, scorer->highest);
    } else {
        struct limits limits = {bias, bools, false, 0};
        limit(vecs, tile, keys, factor, limits, scorer->highest);
    }
}

/* limit where a mask of floats with a row for each query is all that limits: whole groups of keys, the cells of a row side
 * by side. Eight queries at a time, so that what is transposed is added at once. Rows of a mask often meet in few sets of
 * L1, which keeps eight but not all of a tile: they are fetched into L2 two tiles ahead, and into L1 eight rows ahead. */
CP_INLINE void add_biases(enum cp_dtype dtype, const struct scorer *scorer,
                          const struct stretch *s, const char *from, int64_t rows,
                          int64_t lanes, int64_t keys)
{
    const __m256 scale = _mm256_set1_ps(scorer->scaling.factor);
    const int64_t bytes = lanes8_bytes(dtype), next_tile = TILE_KEYS * bytes;
    for (int64_t first = 0; first < lanes; first += GROUP) {
        const char *at[GROUP];
        from = rows_of_mask(s, from, rows - first, at);
        int64_t next = first + GROUP < lanes ? GROUP * s->row_stride
                                             : next_tile - first * s->row_stride;
        float *cell = scorer->tile + first;
        __m256 high = _mm256_loadu_ps(scorer->highest + first);
        for (int64_t k = 0; k < keys; k += GROUP) {
            __m256 score[GROUP];
            CP_UNROLL
            for (int64_t i = 0; i < GROUP; i++) {
                const char *cells = at[i] + k * bytes;
                lanes8_prefetch_far(cells + 2 * next_tile);
                lanes8_prefetch(cells + next);
                score[i] = load_bias(dtype, cells, bytes, GROUP);
            }
            lanes8_transpose(score);
            CP_UNROLL
            for (int64_t i = 0; i < GROUP; i++) {
                score[i] = _mm256_fmadd_ps(_mm256_loadu_ps(cell), scale, score[i]);
                high = _mm256_max_ps(high, score[i]);
                _mm256_storeu_ps(cell, score[i]);
                cell += QUERIES;
            }
        }
        _mm256_storeu_ps(scorer->highest + first, high);
    }
}

/* The same, compiled for each dtype. */
static void add_floats(const struct scorer *scorer, const struct stretch *s,
                       const char *from, int64_t rows, int64_t lanes, int64_t keys)
{
    if (scorer->mask->dtype == CP_DTYPE_FLOAT32) {
        add_biases(CP_DTYPE_FLOAT32, scorer, s, from, rows, lanes, keys);
    } else if (scorer->mask->dtype == CP_DTYPE_BFLOAT16) {
        add_biases(CP_DTYPE_BFLOAT16, scorer, s, from, rows, lanes, keys);
    } else {
        add_biases(CP_DTYPE_FLOAT16, scorer, s, from, rows, lanes, keys);
    }
}

/* With the mask of the stretch, from `key` of it on. */
CP_INLINE void limit_with_mask(int vecs, const struct scorer *scorer,
                               const struct stretch *s, int64_t row, int64_t rows,
                               int64_t key, int64_t keys, int64_t edge)
{
    enum cp_dtype dtype = scorer->mask->dtype;
    bool are_bools = dtype == CP_DTYPE_BOOL && s->key_stride == 1;
    float bias[GROUP * QUERIES];
    char bools[GROUP * QUERIES];
    const char *first = s->mask + row * s->row_stride + key * s->key_stride;
    int64_t added = 0;
    if (dtype != CP_DTYPE_BOOL && s->row_stride != 0 &&
        s->key_stride == lanes8_bytes(dtype) && edge + keys - 1 <= 0) {
        added = keys / GROUP * GROUP;
        add_floats(scorer, s, first, rows, vecs * LANES, added);
    }
    for (int64_t k = added; k < keys; k += GROUP) {
        int64_t some = keys - k < GROUP ? keys - k : GROUP;
        const char *from = first + k * s->key_stride;
        if (s->row_stride == 0) {
            load_biases_of_keys(scorer, s, key + k, some, bias);
            limit_by(vecs, scorer, k, some, bias, NULL, edge + k);
        } else if (are_bools && some == GROUP) {
            load_bools(vecs, s, from, rows, bools);
            limit_by(vecs, scorer, k, some, NULL, bools, edge + k);
        } else {
            load_biases(vecs, dtype, s, from, rows, some, bias);
            limit_by(vecs, scorer, k, some, bias, NULL, edge + k);
        }
    }
}

/* What the mask lets a tile see. */
enum sight { SEES_NONE, SEES_SOME, SEES_ALL };

/* Masks are rarely random: of most tiles they hide nothing, or all. */
static enum sight sight_of(const struct scorer *scorer, const struct stretch *s,
                           int64_t row, int64_t rows, int64_t key, int64_t keys)
{
    if (!s->mask) {
        return SEES_ALL;
    }
    size_t bytes = (size_t)lanes8_bytes(scorer->mask->dtype);
    const char *first = s->mask + row * s->row_stride + key * s->key_stride;
    if (s->key_stride != (int64_t)bytes) {
        return SEES_SOME;
    }
    for (int64_t i = 0; i < (s->row_stride == 0 ? 1 : rows); i++) {
        const char *cells = first + i * s->row_stride;
        if (memcmp(cells, first, bytes) != 0 ||
            memcmp(cells, cells + bytes, (size_t)(keys - 1) * bytes) != 0) {
            return SEES_SOME;
        }
    }
    float bias = bias_of(scorer->mask->dtype, first);
    return bias == -INFINITY ? SEES_NONE : bias == 0.0f ? SEES_ALL : SEES_SOME;
}

/* Scores of `keys` keys from `key` of the stretch on, whose panel begins at `k`, for the rows whose queries are loaded.
 * The factor that they and the maxima still lack. */
CP_INLINE float score_tile(int vecs, const struct scorer *scorer,
                           const struct stretch *s, enum sight sight, const float *k,
                           int64_t row, int64_t rows, int64_t key, int64_t keys)
{
    const struct cp_place *place = scorer->place;
    float factor = scorer->scaling.factor;
    scores(vecs, k, scorer->k_group, scorer->queries, scorer->depth,
           (keys + GROUP - 1) / GROUP, scorer->tile, scorer->highest);
    /* Query lane i may see key j of the tile iff edge + j <= i. */
    int64_t edge = place->k_first + s->first + key - place->q_first - row;
    bool is_edge = place->is_causal && edge + keys - 1 > 0;
    if (sight == SEES_SOME || is_edge || keys % GROUP != 0) {
        int64_t first_query = is_edge ? edge : -keys;
        clear_highest(vecs, scorer->highest);
        if (sight == SEES_SOME) {
            limit_with_mask(vecs, scorer, s, row, rows, key, keys, first_query);
        } else {
            limit_by(vecs, scorer, 0, keys, NULL, NULL, first_query);
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
    return bias_of(dtype, cell) == -INFINITY;
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
