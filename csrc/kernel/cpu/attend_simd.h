/* Template: attention on packed panels, from tiles (tile_simd.h). Included by one file per ISA.
 *
 *   for each batch, kv head
 *     for each block of keys that stays in L2
 *       for each query head of the kv head
 *         for each tile of QUERIES rows          queries transposed and scaled into scratch, state in place
 *           for each TILE_KEYS keys of the block that some row of the tile may see
 *             scores, limit where needed, soften, weigh
 *
 * A tile's state is emptied right before its first block and its result written right after its last one, while the
 * state is in the cache.
 *
 * The block loop lies outside the rows: at 32,000 keys the panels of a head are 32 MB, and reading them once per
 * 48 rows would be bound by memory. A state is loaded and stored once per tile and TILE_KEYS.
 *
 * scratch:  queries [depth up to 8][QUERIES] | tile [TILE_KEYS][QUERIES] | highest, shrink [QUERIES] */
#ifndef CP_KERNEL_CPU_ATTEND_SIMD_H
#define CP_KERNEL_CPU_ATTEND_SIMD_H

#include "kernel/cpu/pack_simd.h"
#include "kernel/cpu/score_simd.h"

/* Bytes of K and V in a block of keys. Queries and states pass by once per block, so it should be large, and it should
 * stay in L2 (1 or 2 MiB in today's servers): 256 KiB lose 8 % at D 128, from 512 KiB to 1 MiB nothing changes. */
enum { BLOCK_BYTES = 1024 * 1024 };

struct job {
    const struct cp_attend_args *args;
    struct layout layout;
    struct scorer scorer; /* its tile, queries and highest are scratch */
    float *shrink;        /* scratch */
};

/* A block of keys: its panels at the first of them. */
struct block {
    struct stretch stretch;
    const float *k, *v;
    bool is_first; /* the states are still to be emptied */
    bool is_last;  /* the results are to be written */
};

static int64_t scratch_bytes(const struct layout *layout)
{
    return (cp_round_up(layout->depth, GROUP) + TILE_KEYS + 2) * QUERIES *
           (int64_t)sizeof(float);
}

static struct job job_of(const struct cp_attend_args *args)
{
    struct job job = {.args = args, .layout = layout_of(args->k.n[3], args->v.n[3])};
    struct scorer *scorer = &job.scorer;
    *scorer = (struct scorer){
        .place = &args->place,
        .mask = &args->mask,
        .scaling = scaling_of(args->scale),
        .depth = job.layout.depth,
        .k_group = job.layout.k_group,
        .queries = args->scratch,
    };
    scorer->tile = scorer->queries + cp_round_up(scorer->depth, GROUP) * QUERIES;
    scorer->highest = scorer->tile + TILE_KEYS * QUERIES;
    job.shrink = scorer->highest + QUERIES;
    return job;
}

/* Up to TILE_KEYS keys from `key` of the block on for the rows whose queries are loaded. */
CP_INLINE void attend_tile(int vecs, const struct job *job, const struct block *block,
                           enum sight sight, float *state, int64_t row, int64_t rows,
                           int64_t key, int64_t keys)
{
    const struct layout *layout = &job->layout;
    const struct scorer *scorer = &job->scorer;
    const float *k = block->k + key / GROUP * layout->k_group,
                *v = block->v + key / V_KEYS * layout->v_group;
    float *max = state + layout->values * QUERIES, *total = max + QUERIES;
    float factor =
        score_tile(vecs, scorer, &block->stretch, sight, k, row, rows, key, keys);
    soften(vecs, scorer->tile, keys, factor, scorer->highest, max, total, job->shrink);
    weigh(vecs, v, layout->v_group, scorer->tile, (keys + WORD - 1) / WORD,
          layout->values, state, job->shrink);
}

/* As attend_tile for the first `keys` keys of a block, with no more vectors than the rows fill. */
static void attend_rows(const struct job *job, const struct block *block, float *state,
                        int64_t row, int64_t rows, int64_t keys)
{
    for (int64_t key = 0; key < keys; key += TILE_KEYS) {
        int64_t some = keys - key < TILE_KEYS ? keys - key : TILE_KEYS;
        enum sight sight =
            sight_of(&job->scorer, &block->stretch, row, rows, key, some);
        if (sight == SEES_NONE) {
            continue;
        }
        if (rows > 2 * LANES) {
            attend_tile(3, job, block, sight, state, row, rows, key, some);
        } else if (rows > LANES) {
            attend_tile(2, job, block, sight, state, row, rows, key, some);
        } else {
            attend_tile(1, job, block, sight, state, row, rows, key, some);
        }
    }
}

/* One query head against a block of keys. */
static void attend_head(const struct job *job, const struct block *block, int64_t b,
                        int64_t h)
{
    const struct cp_view *q = &job->args->q, *state = &job->args->state;
    const struct scorer *scorer = &job->scorer;
    const struct layout *layout = &job->layout;
    const char *from = q->data + b * q->stride[0] + h * q->stride[2];
    float *panel =
        (float *)(void *)(state->data + b * state->stride[0] + h * state->stride[2]);
    for (int64_t row = 0; row < q->n[1]; row += QUERIES) {
        int64_t rows = q->n[1] - row < QUERIES ? q->n[1] - row : QUERIES;
        int64_t keys = seen_keys(scorer->place, &block->stretch, row, rows);
        float *group = panel + row / QUERIES * layout->state_group;
        if (block->is_first) {
            memset(group, 0, (size_t)layout->state_group * sizeof *group);
        }
        if (keys > 0) {
            load_queries(q, from + row * q->stride[1], rows, scorer->depth,
                         &scorer->scaling, scorer->queries);
            attend_rows(job, block, group, row, rows, keys);
        }
        if (block->is_last) {
            finish_group(group, layout, &job->args->out, &job->args->lse, b, row, rows,
                         h);
        }
    }
}

/* A block of keys of one kv head for the query heads that use it. */
static void attend_block(const struct job *job, struct block block, int64_t b,
                         int64_t kv_head)
{
    const struct cp_attend_args *args = job->args;
    int64_t keys = block.stretch.keys, h = 0;
    int64_t end = cp_place_heads(&args->place, args->q.n[2], kv_head, &h);
    for (; h < end; h++) {
        block.stretch.keys = keys;
        mask_stretch(&args->mask, &block.stretch, b, h);
        attend_head(job, &block, b, h);
    }
}

/* One kv head; a block without a key where there are no keys, for the states and results. */
static void attend_kv_head(const struct job *job, int64_t block_keys, int64_t b,
                           int64_t kv_head)
{
    const struct cp_attend_args *args = job->args;
    const struct layout *layout = &job->layout;
    const char *k = args->k.data + b * args->k.stride[0] + kv_head * args->k.stride[2];
    const char *v = args->v.data + b * args->v.stride[0] + kv_head * args->v.stride[2];
    int64_t key = 0;
    do {
        int64_t rest = args->k.n[1] - key;
        struct block block = {
            .k = (const float *)(const void *)k + key / GROUP * layout->k_group,
            .v = (const float *)(const void *)v + key / V_KEYS * layout->v_group,
            .stretch = {.first = key, .keys = rest < block_keys ? rest : block_keys},
            .is_first = args->is_first && key == 0,
            .is_last = args->out.data && rest <= block_keys,
        };
        attend_block(job, block, b, kv_head);
        key += block_keys;
    } while (key < args->k.n[1]);
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
            attend_kv_head(&job, block_keys, b, h);
        }
    }
    return CP_OK;
}

/* The layouts of a kernel whose formats begin at `family`, with the scratch of its `grad`; what the generic kernel refuses, this one does. */
static enum cp_code describe_format(int family, enum cp_dtype dtype, int64_t head_dim,
                                    int64_t value_dim,
                                    int64_t (*grad_bytes)(int64_t, int64_t),
                                    struct cp_format *out)
{
    struct cp_format generic;
    CP_TRY(cp_kernel_generic_ops.describe(dtype, head_dim, value_dim, &generic));
    struct layout layout = layout_of(head_dim, value_dim);
    *out = (struct cp_format){
        .id = (uint64_t)family + (uint64_t)dtype,
        .scratch_bytes = scratch_bytes(&layout),
        .grad_scratch_bytes = grad_bytes(head_dim, value_dim),
    };
    panels_of(&layout, out);
    return CP_OK;
}

#endif
