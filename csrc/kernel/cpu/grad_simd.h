/* Template: the backward pass, from the tiles of the forward one (tile_simd.h, score_simd.h). Included by one file per
 * ISA.
 *
 *   for each batch, kv head
 *     for each block of keys that stays in L2        packed into scratch, dk and dv collect there
 *       for each query head of the kv head
 *         for each tile of QUERIES rows              q and dout in scratch, as rows and across
 *           for each GRAD_KEYS keys of the block that some row of the tile may see
 *             tile[key][query]   = exp(score - lse)
 *             slope[key][query]  = tile * (dout . v - delta)
 *             dv[key][dim]      += sum over queries of tile * dout
 *             dk[key][dim]      += sum over queries of slope * q
 *             dq[dim][query]    += sum over keys of slope * k
 *
 * With WORD 2 what two factors have in common lies in pairs: dims for the scores, queries for dk and dv, keys for dq.
 * So queries, dout, k and slopes are there in both orders, and tile and slope are rounded where they are multiplied.
 *
 * Cost: 2 * (3 D + 2 Dv) operations a score, bound by fused multiply-adds. Each sum over queries or keys of one tile
 * begins at 0, so that long sums are made of short ones. The order of all sums follows from the shapes alone. */
#ifndef CP_KERNEL_CPU_GRAD_SIMD_H
#define CP_KERNEL_CPU_GRAD_SIMD_H

#include "kernel/cpu/score_simd.h"

enum {
    /* One tile of them, with the queries of D 128 or what collects there, leaves room in an L1 of 48 KiB. */
    GRAD_KEYS = 64,
    /* Of k, v, dk and dv in a block of keys: half of a small L2. */
    GRAD_BLOCK_BYTES = 512 * 1024,
};

/* What lies in scratch, in this order; words. deep: words of a row up to GROUP; wide: dims up to LANES. */
enum part {
    PART_K,       /* panel of the block: [keys / 8][deep][8 keys] and V_PAD */
    PART_V,       /* likewise */
    PART_K_PAIRS, /* WORD 2: k again, as a panel of values */
    PART_DK,      /* [keys of the block][wide] */
    PART_DV,      /* likewise */
    PART_QUERIES, /* [deep][QUERIES], scaled */
    PART_DOUT,    /* likewise, as it is */
    PART_DQ,      /* [dims up to GROUP][QUERIES] */
    PART_ROWS, /* WORD 2: rows of q or dout on their way in, [QUERIES][wide] elements */
    PART_Q_ROWS,    /* [QUERIES / WORD][wide], as they are */
    PART_DOUT_ROWS, /* likewise */
    PART_TILE, /* [GRAD_KEYS][QUERIES]; WORD 2: then words in the first half of each row */
    PART_SLOPE,       /* likewise */
    PART_SLOPE_PAIRS, /* WORD 2: [GRAD_KEYS / 2][QUERIES] */
    PART_HIGHEST,     /* [QUERIES], like the rest */
    PART_LSE,         /* +inf for lanes without a gradient: their weights are 0 */
    PART_DELTA,
    PART_ONES,
    PARTS
};

struct backward {
    const struct cp_grad_args *args;
    struct scorer scorer;
    int64_t head_wide, value_wide, k_group, v_group, pairs_group;
    int64_t block_keys;
    float *part[PARTS];
};

static int64_t wide_of(int64_t dims)
{
    return cp_round_up(dims, LANES);
}

static int64_t words_of(int64_t dims)
{
    return (dims + WORD - 1) / WORD;
}

static int64_t deep_of(int64_t dims)
{
    return cp_round_up(words_of(dims), GROUP);
}

static int64_t group_of(int64_t dims)
{
    return deep_of(dims) * GROUP + V_PAD;
}

/* V_KEYS keys of k as values. */
static int64_t pairs_group_of(int64_t dims)
{
    return cp_round_up(dims, GROUP) * GROUP + V_PAD;
}

static int64_t block_keys_of(int64_t head_dim, int64_t value_dim)
{
    int64_t key_bytes = 2 * (wide_of(head_dim) + wide_of(value_dim)) * 4;
    int64_t keys = GRAD_BLOCK_BYTES / key_bytes / GRAD_KEYS * GRAD_KEYS;
    return keys < GRAD_KEYS ? GRAD_KEYS : keys;
}

static void sizes_of(int64_t head_dim, int64_t value_dim, int64_t sizes[PARTS])
{
    int64_t keys = block_keys_of(head_dim, value_dim);
    int64_t head_wide = wide_of(head_dim), value_wide = wide_of(value_dim);
    for (int i = PART_HIGHEST; i < PARTS; i++) {
        sizes[i] = QUERIES;
    }
    sizes[PART_K] = keys / GROUP * group_of(head_dim);
    sizes[PART_V] = keys / GROUP * group_of(value_dim);
    sizes[PART_K_PAIRS] = WORD == 1 ? 0 : keys / V_KEYS * pairs_group_of(head_dim);
    sizes[PART_DK] = keys * head_wide;
    sizes[PART_DV] = keys * value_wide;
    sizes[PART_QUERIES] = deep_of(head_dim) * QUERIES;
    sizes[PART_DOUT] = deep_of(value_dim) * QUERIES;
    sizes[PART_DQ] = cp_round_up(head_dim, GROUP) * QUERIES;
    sizes[PART_ROWS] =
        WORD == 1 ? 0
                  : QUERIES * (head_wide > value_wide ? head_wide : value_wide) / WORD;
    sizes[PART_Q_ROWS] = QUERIES / WORD * head_wide;
    sizes[PART_DOUT_ROWS] = QUERIES / WORD * value_wide;
    sizes[PART_TILE] = sizes[PART_SLOPE] = GRAD_KEYS * QUERIES;
    sizes[PART_SLOPE_PAIRS] = WORD == 1 ? 0 : GRAD_KEYS / WORD * QUERIES;
    for (int i = 0; i < PARTS; i++) {
        sizes[i] = cp_round_up(sizes[i], 64 / 4); /* whole lines */
    }
}

static int64_t grad_bytes(int64_t head_dim, int64_t value_dim)
{
    int64_t sizes[PARTS], sum = 0;
    sizes_of(head_dim, value_dim, sizes);
    for (int i = 0; i < PARTS; i++) {
        sum += sizes[i] * (int64_t)sizeof(float);
    }
    return sum;
}

static struct backward backward_of(const struct cp_grad_args *args)
{
    int64_t head_dim = args->q.n[3], value_dim = args->v.n[3], sizes[PARTS];
    struct backward job = {
        .args = args,
        .head_wide = wide_of(head_dim),
        .value_wide = wide_of(value_dim),
        .k_group = group_of(head_dim),
        .v_group = group_of(value_dim),
        .pairs_group = pairs_group_of(head_dim),
        .block_keys = block_keys_of(head_dim, value_dim),
    };
    float *at = args->scratch;
    sizes_of(head_dim, value_dim, sizes);
    for (int i = 0; i < PARTS; i++) {
        job.part[i] = at;
        at += sizes[i];
    }
    for (int i = 0; i < QUERIES; i++) {
        job.part[PART_ONES][i] = 1.0f;
    }
    job.scorer = (struct scorer){
        .place = &args->place,
        .mask = &args->mask,
        .scaling = scaling_of(args->scale),
        .depth = words_of(head_dim),
        .k_group = job.k_group,
        .queries = job.part[PART_QUERIES],
        .tile = job.part[PART_TILE],
        .highest = job.part[PART_HIGHEST],
    };
    return job;
}

static const char *row_at(const struct cp_view *view, int64_t b, int64_t row, int64_t h)
{
    return view->data + b * view->stride[0] + row * view->stride[1] +
           h * view->stride[2];
}

/* The keys of a block, of k or v, as a panel. */
static void load_panel(const struct cp_view *view, const struct stretch *s, int64_t b,
                       int64_t h, int64_t group, float *to)
{
    int64_t deep = deep_of(view->n[3]);
    for (int64_t key = 0; key < s->keys; key += GROUP) {
        pack_k_group(to + key / GROUP * group, deep, view,
                     row_at(view, b, s->first + key, h), s->keys - key);
    }
}

#if WORD == 2
/* The keys of a block as a panel of values; behind a block that is no whole number of groups there is no key. */
static void load_pairs(const struct backward *job, const struct stretch *s, int64_t b,
                       int64_t h)
{
    const struct cp_view *k = &job->args->k;
    for (int64_t key = 0; key < s->keys; key += V_KEYS) {
        pack_v_group(job->part[PART_K_PAIRS] + key / V_KEYS * job->pairs_group,
                     cp_round_up(k->n[3], GROUP), k, row_at(k, b, 0, h),
                     s->first + key);
    }
}
#endif

#if WORD == 1
/* Rows of q or dout, along their dims for dk and dv and across for the scores; rows without a gradient are 0, whatever
 * they hold. */
static void load_rows(const struct backward *job, const struct cp_view *view, int64_t b,
                      int64_t row, int64_t h, int64_t rows,
                      const struct scaling *scaling, float *along, float *across)
{
    const float *lse = job->part[PART_LSE];
    int64_t wide = wide_of(view->n[3]);
    for (int64_t i = 0; i < rows; i++) {
        const char *from = row_at(view, b, row + i, h);
        for (int64_t d = 0; d < wide; d += GROUP) {
            lanes8_prefetch(from + QUERIES * view->stride[1] + d * view->stride[3]);
            __m256 part = lse[i] < INFINITY
                              ? lanes8_load(view->dtype, from + d * view->stride[3],
                                            view->stride[3], view->n[3] - d)
                              : _mm256_setzero_ps();
            _mm256_storeu_ps(along + i * wide + d, part);
        }
    }
    struct cp_view found = cp_view_compact(along, CP_DTYPE_FLOAT32, 1, rows, 1, wide);
    load_queries(&found, found.data, rows, words_of(view->n[3]), scaling, across);
}
#else
static void load_rows(const struct backward *job, const struct cp_view *view, int64_t b,
                      int64_t row, int64_t h, int64_t rows,
                      const struct scaling *scaling, float *along, float *across)
{
    const float *lse = job->part[PART_LSE];
    int64_t wide = wide_of(view->n[3]), stride = view->stride[3];
    float *staged = job->part[PART_ROWS];
    for (int64_t i = 0; i < rows; i++) {
        const char *from = row_at(view, b, row + i, h);
        for (int64_t d = 0; d < wide; d += WORD * GROUP) {
            lanes8_prefetch(from + QUERIES * view->stride[1] + d * stride);
            __m256 part = lse[i] < INFINITY ? lanes8_load_pairs(from + d * stride,
                                                                stride, view->n[3] - d)
                                            : _mm256_setzero_ps();
            _mm256_storeu_ps(staged + (i * wide + d) / WORD, part);
        }
    }
    struct cp_view found = cp_view_compact(staged, view->dtype, 1, rows, 1, wide);
    load_queries(&found, found.data, rows, words_of(view->n[3]), scaling, across);
    for (int64_t i = 0; i < rows; i += WORD) {
        for (int64_t d = 0; d < wide; d += GROUP) {
            _mm256_storeu_ps(along + i / WORD * wide + d,
                             load_values(&found, found.data, i, d));
        }
    }
}
#endif

/* Everything that a tile of rows needs; its dq begins at 0. */
static void load_tile(const struct backward *job, int64_t b, int64_t row, int64_t h,
                      int64_t rows)
{
    const struct cp_grad_args *args = job->args;
    const struct scaling plain = {.high = 1.0f};
    float *lse = job->part[PART_LSE], *delta = job->part[PART_DELTA];
    int64_t head_dim = args->q.n[3];
    for (int64_t i = 0; i < QUERIES; i++) {
        lse[i] = INFINITY;
        delta[i] = 0.0f;
        if (i < rows) {
            memcpy(&lse[i], row_at(&args->lse, b, row + i, h), sizeof *lse);
            memcpy(&delta[i], row_at(&args->delta, b, row + i, h), sizeof *delta);
        }
        if (lse[i] == -INFINITY) {
            lse[i] = INFINITY;
            delta[i] = 0.0f;
        }
    }
    load_rows(job, &args->q, b, row, h, rows, &job->scorer.scaling,
              job->part[PART_Q_ROWS], job->part[PART_QUERIES]);
    load_rows(job, &args->dout, b, row, h, rows, &plain, job->part[PART_DOUT_ROWS],
              job->part[PART_DOUT]);
    memset(job->part[PART_DQ], 0,
           (size_t)(cp_round_up(head_dim, GROUP) * QUERIES) * sizeof(float));
}

/* What one vector of scores becomes: exp(score * factor - lse), and that times (slope - delta). */
CP_INLINE void differentiate_lanes(const float *tile, const float *slope, vec scale,
                                   vec base, vec less, vec *p, vec *ds)
{
    *p = vec_exp(vec_fma(vec_load(tile), scale, base));
    *ds = vec_mul(*p, vec_sub(vec_load(slope), less));
}

/* tile = exp(tile * factor - lse), slope = tile * (slope - delta), with WORD 2 as words; 0 in the rows that fill up the
 * last ROWS keys. */
CP_INLINE void differentiate(int vecs, float *tile, float *slope, float *pairs,
                             int64_t keys, float factor, const float *lse,
                             const float *delta)
{
    vec base[VECS], less[VECS], scale = vec_set(factor);
    CP_UNROLL
    for (int j = 0; j < vecs; j++) {
        base[j] = vec_sub(vec_set(0.0f), vec_load(lse + j * LANES));
        less[j] = vec_load(delta + j * LANES);
    }
#if WORD == 1
    (void)pairs;
    for (int64_t k = 0; k < keys; k++) {
        CP_UNROLL
        for (int j = 0; j < vecs; j++) {
            int64_t cell = k * QUERIES + j * LANES;
            vec p, ds;
            differentiate_lanes(tile + cell, slope + cell, scale, base[j], less[j], &p,
                                &ds);
            vec_store(tile + cell, p);
            vec_store(slope + cell, ds);
        }
    }
#else
    for (int64_t k = 0; k < keys; k += WORD) {
        CP_UNROLL
        for (int j = 0; j < vecs; j++) {
            int64_t cell = k * QUERIES + j * LANES,
                    word = k * QUERIES + j * LANES / WORD;
            vec p, even, odd = vec_set(0.0f);
            differentiate_lanes(tile + cell, slope + cell, scale, base[j], less[j], &p,
                                &even);
            vec_store_words(tile + word, p);
            vec_store_words(slope + word, even);
            if (k + 1 < keys) {
                cell += QUERIES;
                word += QUERIES;
                differentiate_lanes(tile + cell, slope + cell, scale, base[j], less[j],
                                    &p, &odd);
                vec_store_words(tile + word, p);
                vec_store_words(slope + word, odd);
            }
            vec_store(pairs + k / WORD * QUERIES + j * LANES, vec_pair(even, odd));
        }
    }
#endif
    for (int64_t k = keys; k < cp_round_up(keys, ROWS); k++) {
        memset(tile + k * QUERIES, 0, QUERIES * sizeof(float));
        memset(slope + k * QUERIES, 0, QUERIES * sizeof(float));
    }
}

/* ROWS keys x `vecs` vectors of dims: to[key][dim] += sum over queries of tile[key][query] * rows[query][dim]. */
CP_INLINE void collect_rows(int vecs, const float *restrict tile, int64_t words,
                            const float *restrict rows, int64_t wide,
                            float *restrict to)
{
    vec sum[ROWS][VECS];
    clear_sums(vecs, sum);
    CP_UNROLL
    for (int i = 0; i < ROWS; i++) {
        CP_UNROLL
        for (int j = 0; j < vecs; j++) {
            lanes8_prefetch(to + (ROWS + i) * wide + j * LANES);
        }
    }
    CP_UNROLL_SOME(2)
    for (int64_t q = 0; q < words; q++) {
        add_products(vecs, sum, tile + q, QUERIES, rows + q * wide);
    }
    CP_UNROLL
    for (int i = 0; i < ROWS; i++) {
        CP_UNROLL
        for (int j = 0; j < vecs; j++) {
            float *cell = to + i * wide + j * LANES;
            vec_store(cell, vec_add(vec_load(cell), sum[i][j]));
        }
    }
}

/* As collect_rows for all keys and dims. The last vectors of a row go in twos: one alone would wait for itself. */
static void collect(const float *tile, int64_t keys, int64_t words, const float *rows,
                    int64_t wide, float *to)
{
    for (int64_t key = 0; key < keys; key += ROWS) {
        const float *from = tile + key * QUERIES;
        float *row = to + key * wide;
        int64_t d = 0, left = wide / LANES;
        for (; left > 4 || left == 3; left -= 3, d += 3 * LANES) {
            collect_rows(3, from, words, rows + d, wide, row + d);
        }
        for (; left > 1; left -= 2, d += 2 * LANES) {
            collect_rows(2, from, words, rows + d, wide, row + d);
        }
        if (left > 0) {
            collect_rows(1, from, words, rows + d, wide, row + d);
        }
    }
}

/* dq[dim][query] += sum over `keys` keys of slope[key][query] * k[key][dim] */
CP_INLINE void collect_queries(int vecs, const struct backward *job, const float *k,
                               const float *slope, int64_t key, int64_t keys)
{
    float *dq = job->part[PART_DQ];
    const float *ones = job->part[PART_ONES];
#if WORD == 1
    const struct order order = {
        .dim_step = GROUP, .row_step = 1, .group = job->k_group};
    (void)key;
    for (int64_t d = 0; d < job->args->q.n[3]; d += ROWS) {
        weigh_rows(vecs, k + d * GROUP, order, slope, keys, dq + d * QUERIES, ones);
    }
#else
    (void)k;
    (void)slope;
    weigh(vecs, job->part[PART_K_PAIRS] + key / V_KEYS * job->pairs_group,
          job->pairs_group, job->part[PART_SLOPE_PAIRS], words_of(keys),
          cp_round_up(job->args->q.n[3], GROUP), dq, ones);
#endif
}

/* Up to GRAD_KEYS keys from `key` of the block on for the rows that are loaded. */
CP_INLINE void grad_tile(int vecs, const struct backward *job, const struct stretch *s,
                         enum sight sight, int64_t row, int64_t rows, int64_t key,
                         int64_t keys)
{
    const struct scorer *scorer = &job->scorer;
    float *tile = scorer->tile, *slope = job->part[PART_SLOPE];
    const float *k = job->part[PART_K] + key / GROUP * job->k_group,
                *v = job->part[PART_V] + key / GROUP * job->v_group;
    float factor = score_tile(vecs, scorer, s, sight, k, row, rows, key, keys);
    scores(vecs, v, job->v_group, job->part[PART_DOUT], words_of(job->args->v.n[3]),
           (keys + GROUP - 1) / GROUP, slope, scorer->highest);
    differentiate(vecs, tile, slope, job->part[PART_SLOPE_PAIRS], keys, factor,
                  job->part[PART_LSE], job->part[PART_DELTA]);
    collect(tile, keys, words_of(rows), job->part[PART_DOUT_ROWS], job->value_wide,
            job->part[PART_DV] + key * job->value_wide);
    collect(slope, keys, words_of(rows), job->part[PART_Q_ROWS], job->head_wide,
            job->part[PART_DK] + key * job->head_wide);
    collect_queries(vecs, job, k, slope, key, keys);
}

/* to += factor * from */
CP_INLINE void add_lanes(const struct cp_view *view, char *to, int64_t d, __m256 factor,
                         __m256 from)
{
    char *at = to + d * view->stride[3];
    int64_t count = view->n[3] - d;
    __m256 before = lanes8_load(CP_DTYPE_FLOAT32, at, view->stride[3], count);
    lanes8_store(CP_DTYPE_FLOAT32, at, view->stride[3], count,
                 _mm256_fmadd_ps(from, factor, before));
}

static void add_dq(const struct backward *job, int64_t b, int64_t row, int64_t h,
                   int64_t rows)
{
    const struct cp_view *dq = &job->args->dq;
    const __m256 scale = _mm256_set1_ps((float)job->args->scale);
    for (int64_t first = 0; first < rows; first += GROUP) {
        for (int64_t d = 0; d < dq->n[3]; d += GROUP) {
            __m256 lanes[GROUP];
            for (int64_t i = 0; i < GROUP; i++) {
                lanes[i] =
                    _mm256_loadu_ps(job->part[PART_DQ] + (d + i) * QUERIES + first);
            }
            lanes8_transpose(lanes);
            for (int64_t i = 0; i < GROUP && first + i < rows; i++) {
                char *to = dq->data + b * dq->stride[0] +
                           (row + first + i) * dq->stride[1] + h * dq->stride[2];
                add_lanes(dq, to, d, scale, lanes[i]);
            }
        }
    }
}

/* dk or dv of a block from scratch to the call's tensor. */
static void add_keys(const struct cp_view *view, const struct stretch *s, int64_t b,
                     int64_t h, double factor, const float *from, int64_t wide)
{
    const __m256 times = _mm256_set1_ps((float)factor);
    for (int64_t key = 0; key < s->keys; key++) {
        char *to = view->data + b * view->stride[0] +
                   (s->first + key) * view->stride[1] + h * view->stride[2];
        for (int64_t d = 0; d < view->n[3]; d += GROUP) {
            add_lanes(view, to, d, times, _mm256_loadu_ps(from + key * wide + d));
        }
    }
}

/* One query head against a block of keys. */
static void grad_head(const struct backward *job, const struct stretch *s, int64_t b,
                      int64_t h)
{
    int64_t end = job->args->q.n[1];
    for (int64_t row = 0; row < end; row += QUERIES) {
        int64_t rows = end - row < QUERIES ? end - row : QUERIES;
        int64_t seen = seen_keys(&job->args->place, s, row, rows);
        if (seen <= 0) {
            continue;
        }
        load_tile(job, b, row, h, rows);
        for (int64_t key = 0; key < seen; key += GRAD_KEYS) {
            int64_t keys = seen - key < GRAD_KEYS ? seen - key : GRAD_KEYS;
            enum sight sight = sight_of(&job->scorer, s, row, rows, key, keys);
            if (sight == SEES_NONE) {
                continue;
            }
            if (rows > 2 * LANES) {
                grad_tile(3, job, s, sight, row, rows, key, keys);
            } else if (rows > LANES) {
                grad_tile(2, job, s, sight, row, rows, key, keys);
            } else {
                grad_tile(1, job, s, sight, row, rows, key, keys);
            }
        }
        add_dq(job, b, row, h, rows);
    }
}

/* One block of keys of a kv head. */
static void grad_block(const struct backward *job, const struct stretch *block,
                       int64_t b, int64_t kv_head)
{
    const struct cp_grad_args *args = job->args;
    int64_t keys = cp_round_up(block->keys, GROUP), h = 0;
    int64_t end = cp_place_heads(&args->place, args->q.n[2], kv_head, &h);
    load_panel(&args->k, block, b, kv_head, job->k_group, job->part[PART_K]);
    load_panel(&args->v, block, b, kv_head, job->v_group, job->part[PART_V]);
#if WORD == 2
    load_pairs(job, block, b, kv_head);
#endif
    memset(job->part[PART_DK], 0, (size_t)(keys * job->head_wide) * sizeof(float));
    memset(job->part[PART_DV], 0, (size_t)(keys * job->value_wide) * sizeof(float));
    for (; h < end; h++) {
        struct stretch s = *block;
        mask_stretch(&args->mask, &s, b, h);
        grad_head(job, &s, b, h);
    }
    add_keys(&args->dk, block, b, kv_head, args->scale, job->part[PART_DK],
             job->head_wide);
    add_keys(&args->dv, block, b, kv_head, 1.0, job->part[PART_DV], job->value_wide);
}

static void grad(const struct cp_grad_args *args)
{
    struct backward job = backward_of(args);
    int64_t keys = args->k.n[1], rows = args->q.n[1];
    for (int64_t b = 0; b < args->k.n[0]; b++) {
        for (int64_t h = 0; h < args->k.n[2]; h++) {
            struct stretch block = {.keys = job.block_keys};
            for (; block.first < keys; block.first += job.block_keys) {
                if (keys - block.first < block.keys) {
                    block.keys = keys - block.first;
                }
                if (rows > 0 && seen_keys(&args->place, &block, 0, rows) > 0) {
                    grad_block(&job, &block, b, h);
                }
            }
        }
    }
}

#endif
