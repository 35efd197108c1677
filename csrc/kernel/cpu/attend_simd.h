/* Template: attention on packed panels, from tiles (tile_simd.h). Included by one file per ISA.
 *
 *   for each batch, kv head
 *     for each block of keys that stays in L2
 *       for each query head of the kv head
 *         for each tile of QUERIES rows          queries transposed and scaled into scratch, state in place
 *           for each TILE_KEYS keys of the block that some row of the tile may see
 *             scores, limit where needed, soften, weigh
 *
 * The block loop lies outside the rows: at 32,000 keys the panels of a head are 32 MB, and reading them once per
 * 48 rows would be bound by memory. A state is loaded and stored once per tile and TILE_KEYS.
 *
 * scratch:  queries [depth up to 8][QUERIES] | tile [TILE_KEYS][QUERIES] | highest, shrink [QUERIES] */
#ifndef CP_KERNEL_CPU_ATTEND_SIMD_H
#define CP_KERNEL_CPU_ATTEND_SIMD_H

#include "kernel/cpu/panel_simd.h"
#include "kernel/cpu/tile_simd.h"

/* Bytes of K and V in a block of keys. Queries and states pass by once per block, so it should be large, and it should
 * stay in L2 (1 or 2 MiB in today's servers): 256 KiB lose 8 % at D 128, from 512 KiB to 1 MiB nothing changes. */
enum { BLOCK_BYTES = 1024 * 1024 };

struct job {
    const struct cp_attend_args *args;
    struct layout layout;
    float *queries, *tile, *highest, *shrink; /* scratch */
    float query_high, query_low;              /* their sum multiplies the queries */
    float factor; /* the rest of the scale: multiplies the scores */
};

/* The keys that one query head meets in one block, and its mask. */
struct stretch {
    const float *k, *v;             /* panels, at the block's first key */
    const char *mask;               /* at the block's first key, row 0; NULL: none */
    int64_t row_stride, key_stride; /* of the mask */
    int64_t first, keys;            /* in the view */
};

static int64_t scratch_bytes(const struct layout *layout)
{
    return (cp_round_up(layout->depth, GROUP) + TILE_KEYS + 2) * QUERIES *
           (int64_t)sizeof(float);
}

static struct job job_of(const struct cp_attend_args *args)
{
    struct job job = {.args = args, .layout = layout_of(args->k.n[3], args->v.n[3])};
    job.queries = args->scratch;
    job.tile = job.queries + cp_round_up(job.layout.depth, GROUP) * QUERIES;
    job.highest = job.tile + TILE_KEYS * QUERIES;
    job.shrink = job.highest + QUERIES;
    if (WORD == 1) {
        /* Two floats, since the rounding of one would bend all scores the same way. */
        job.query_high = (float)args->scale;
        job.query_low = (float)(args->scale - (double)job.query_high);
        job.factor = 1.0f;
    } else {
        /* Half-width queries stay exact. A maximum needs a factor that is not negative; the sign goes to them. */
        job.query_high = args->scale < 0.0 ? -1.0f : 1.0f;
        job.factor = (float)fabs(args->scale);
    }
    return job;
}

CP_INLINE __m256 scale_words(const struct job *job, __m256 words)
{
    if (WORD == 1) {
        __m256 low = _mm256_mul_ps(words, _mm256_set1_ps(job->query_low));
        return _mm256_fmadd_ps(words, _mm256_set1_ps(job->query_high), low);
    }
    __m256i flip = _mm256_set1_epi32(job->query_high < 0.0f ? (int)0x80008000u : 0);
    return _mm256_xor_ps(words, _mm256_castsi256_ps(flip));
}

/* Rows of queries into [depth][QUERIES] words, scaled; lanes without a row are 0. */
static void load_queries(const struct job *job, const char *from, int64_t rows)
{
    const struct cp_view *q = &job->args->q;
    for (int64_t first = 0; first < QUERIES && first < rows; first += GROUP) {
        for (int64_t d = 0; d < job->layout.depth; d += GROUP) {
            __m256 row[GROUP];
            for (int64_t i = 0; i < GROUP; i++) {
                const char *at = from + (first + i) * q->stride[1];
                lanes8_prefetch(at + QUERIES * q->stride[1] +
                                d * WORD * q->stride[3]); /* of the next tile */
                row[i] = first + i < rows
                             ? scale_words(job, load_words(q->dtype, at, q->stride[3],
                                                           d * WORD, q->n[3]))
                             : _mm256_setzero_ps();
            }
            lanes8_transpose(row);
            for (int64_t i = 0; i < GROUP; i++) {
                _mm256_storeu_ps(job->queries + (d + i) * QUERIES + first, row[i]);
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

/* Adds the mask to `keys` keys from `key` of the stretch on, for rows from `row` on; multiplies by job->factor. */
static void add_mask(const struct job *job, const struct stretch *s, int64_t row,
                     int64_t rows, int64_t key, int64_t keys)
{
    enum cp_dtype dtype = job->args->mask.dtype;
    const __m256 factor = _mm256_set1_ps(job->factor);
    for (int64_t first = 0; first < rows; first += GROUP) {
        for (int64_t k = 0; k < keys; k += GROUP) {
            __m256 bias[GROUP];
            for (int64_t i = 0; i < GROUP; i++) {
                /* Lanes past the last row repeat it: there is nothing to read behind. */
                int64_t mask_row = row + (first + i < rows ? first + i : rows - 1);
                const char *from =
                    s->mask + mask_row * s->row_stride + (key + k) * s->key_stride;
                bias[i] = load_bias(dtype, from, s->key_stride, keys - k);
            }
            lanes8_transpose(bias);
            for (int64_t i = 0; i < GROUP && k + i < keys; i++) {
                float *cell = job->tile + (k + i) * QUERIES + first;
                _mm256_storeu_ps(
                    cell, _mm256_fmadd_ps(_mm256_loadu_ps(cell), factor, bias[i]));
            }
        }
    }
}

/* Up to TILE_KEYS keys from `key` of the stretch on for the rows whose queries are loaded. */
CP_INLINE void attend_tile(int vecs, const struct job *job, const struct stretch *s,
                           float *state, int64_t row, int64_t rows, int64_t key,
                           int64_t keys)
{
    const struct layout *layout = &job->layout;
    const struct cp_place *place = &job->args->place;
    const float *k = s->k + key / GROUP * layout->k_group,
                *v = s->v + key / V_KEYS * layout->v_group;
    float *max = state + layout->values * QUERIES, *total = max + QUERIES;
    float factor = job->factor;

    scores(vecs, k, job->queries, layout->depth, (keys + GROUP - 1) / GROUP, job->tile,
           job->highest);
    /* Query lane i may see key j of the tile iff edge + j <= i. */
    int64_t edge = place->k_first + s->first + key - place->q_first - row;
    bool is_edge = place->is_causal && edge + keys - 1 > 0;
    if (s->mask) {
        add_mask(job, s, row, rows, key, keys);
        factor = 1.0f;
    }
    if (s->mask || is_edge || keys % GROUP != 0) {
        limit(vecs, job->tile, keys, factor, is_edge ? edge : -TILE_KEYS, job->highest);
        factor = 1.0f;
    }
    soften(vecs, job->tile, keys, factor, job->highest, max, total, job->shrink);
    weigh(vecs, v, layout->v_group, job->tile, (keys + WORD - 1) / WORD, layout->values,
          state, job->shrink);
}

/* As attend_tile for all keys of a stretch, with no more vectors than the rows fill. */
static void attend_rows(const struct job *job, const struct stretch *s, float *state,
                        int64_t row, int64_t rows, int64_t keys)
{
    for (int64_t key = 0; key < keys; key += TILE_KEYS) {
        int64_t some = keys - key < TILE_KEYS ? keys - key : TILE_KEYS;
        if (rows > 2 * LANES) {
            attend_tile(3, job, s, state, row, rows, key, some);
        } else if (rows > LANES) {
            attend_tile(2, job, s, state, row, rows, key, some);
        } else {
            attend_tile(1, job, s, state, row, rows, key, some);
        }
    }
}

/* One query head against a stretch of keys. */
static void attend_head(const struct job *job, const struct stretch *s, int64_t b,
                        int64_t h)
{
    const struct cp_view *q = &job->args->q, *state = &job->args->state;
    const struct cp_place *place = &job->args->place;
    const char *from = q->data + b * q->stride[0] + h * q->stride[2];
    float *panel =
        (float *)(void *)(state->data + b * state->stride[0] + h * state->stride[2]);
    for (int64_t row = 0; row < q->n[1]; row += QUERIES) {
        int64_t rows = q->n[1] - row < QUERIES ? q->n[1] - row : QUERIES;
        int64_t keys = s->keys;
        if (place->is_causal) {
            /* What the last row sees; the rows before it see no more. */
            int64_t seen = place->q_first + row + rows - (place->k_first + s->first);
            keys = seen < keys ? seen : keys;
        }
        if (keys > 0) {
            load_queries(job, from + row * q->stride[1], rows);
            attend_rows(job, s, panel + row / QUERIES * job->layout.state_group, row,
                        rows, keys);
        }
    }
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

/* A block of keys of one kv head for the query heads that use it. */
static void attend_block(const struct job *job, const struct stretch *block, int64_t b,
                         int64_t kv_head)
{
    const struct cp_attend_args *args = job->args;
    const struct cp_place *place = &args->place;
    int64_t first =
        (place->kv_head_first + kv_head) * place->heads_per_kv - place->head_first;
    int64_t last = first + place->heads_per_kv;
    for (int64_t h = first < 0 ? 0 : first; h < last && h < args->q.n[2]; h++) {
        struct stretch s = *block;
        mask_stretch(&args->mask, &s, b, h);
        attend_head(job, &s, b, h);
    }
}

static enum cp_code attend(const struct cp_attend_args *args, struct cp_stream *stream)
{
    (void)stream;
    struct job job = job_of(args);
    const struct layout *layout = &job.layout;
    int64_t key_bytes = layout->k_group * 4 / GROUP + layout->v_group * 4 / V_KEYS;
    int64_t block_keys = BLOCK_BYTES / key_bytes / TILE_KEYS * TILE_KEYS;
    block_keys = block_keys < TILE_KEYS ? TILE_KEYS : block_keys;
    for (int64_t b = 0; b < args->k.n[0]; b++) {
        for (int64_t h = 0; h < args->k.n[2]; h++) {
            const char *k =
                args->k.data + b * args->k.stride[0] + h * args->k.stride[2];
            const char *v =
                args->v.data + b * args->v.stride[0] + h * args->v.stride[2];
            for (int64_t key = 0; key < args->k.n[1]; key += block_keys) {
                int64_t rest = args->k.n[1] - key;
                struct stretch block = {
                    .k = (const float *)(const void *)k + key / GROUP * layout->k_group,
                    .v =
                        (const float *)(const void *)v + key / V_KEYS * layout->v_group,
                    .first = key,
                    .keys = rest < block_keys ? rest : block_keys,
                };
                attend_block(&job, &block, b, h);
            }
        }
    }
    return CP_OK;
}

/* The layouts of a kernel whose formats begin at `family`; what the generic kernel refuses, this one does. */
static enum cp_code describe_format(int family, enum cp_dtype dtype, int64_t head_dim,
                                    int64_t value_dim, struct cp_format *out)
{
    struct cp_format generic;
    CP_TRY(cp_kernel_generic_ops.describe(dtype, head_dim, value_dim, &generic));
    struct layout layout = layout_of(head_dim, value_dim);
    *out = (struct cp_format){
        .id = (uint32_t)family + (uint32_t)dtype,
        .scratch_bytes = scratch_bytes(&layout),
        .grad_scratch_bytes = generic.grad_scratch_bytes,
    };
    panels_of(&layout, out);
    return CP_OK;
}

#endif
