/* Template: packing, the forward pass and its end, for one type of sums.
 *
 * Panels hold plain rows: k of D sums, v of Dv, the state of Dv outputs, maximum and
 * sum. A tile of LANES queries is held transposed while it meets a stretch of keys
 * block by block; then the outputs need no horizontal sums. Stretches are outside the
 * tiles, so that the keys of one stay in the cache: the state is carried as between
 * ring steps. Cost: 4 D operations a score, bound by multiplication and addition. */
#include "kernel/cpu/generic_score.h"

enum {
    REAL_NAME(BLOCK) =
        64, /* keys whose scores exist at a time; also the terms of one partial sum */
    REAL_NAME(STRETCH) = 1024, /* keys that a tile meets before the next tile does */
};

/* One tile of queries in scratch. All arrays are [...][LANES]. */
struct REAL_NAME(tile) {
    int64_t head_dim, value_dim;
    REAL *q;     /* [head_dim] */
    REAL *out;   /* [value_dim] */
    REAL *score; /* [BLOCK], then the weights exp(score - max) */
    REAL *max;
    REAL *sum;
    REAL *shrink; /* of what was summed before the block, since the maximum grew */
    REAL *row;    /* max(head_dim, value_dim + 2, BLOCK) numbers on the way in or out */
};

static int64_t REAL_NAME(tile_bytes)(int64_t head_dim, int64_t value_dim)
{
    int64_t rows = head_dim + value_dim + REAL_NAME(BLOCK) + 3;
    int64_t row = head_dim + value_dim + 2 + REAL_NAME(BLOCK);
    return cp_round_up((rows * LANES + row) * (int64_t)sizeof(REAL), CP_PANEL_ALIGN);
}

static struct REAL_NAME(tile)
    REAL_NAME(tile_view)(void *scratch, int64_t head_dim, int64_t value_dim)
{
    struct REAL_NAME(tile)
        tile = {.head_dim = head_dim, .value_dim = value_dim, .q = scratch};
    tile.out = tile.q + head_dim * LANES;
    tile.score = tile.out + value_dim * LANES;
    tile.max = tile.score + REAL_NAME(BLOCK) * LANES;
    tile.sum = tile.max + LANES;
    tile.shrink = tile.sum + LANES;
    tile.row = tile.shrink + LANES;
    return tile;
}

/* Lanes without a query compute with zeros; nobody reads them. */
static void REAL_NAME(tile_load)(struct REAL_NAME(tile) * tile, const struct cp_view *q,
                                 const REAL *state, const struct REAL_NAME(spot) * at)
{
    for (int64_t lane = 0; lane < LANES; lane++) {
        if (lane < at->queries) {
            const char *from = q->data + at->batch * q->stride[0] +
                               (at->query + lane) * q->stride[1] +
                               at->head * q->stride[2];
            REAL_NAME(load)(q->dtype, from, q->stride[3], tile->head_dim, tile->row);
        } else {
            memset(tile->row, 0, (size_t)tile->head_dim * sizeof(REAL));
        }
        for (int64_t i = 0; i < tile->head_dim; i++) {
            tile->q[i * LANES + lane] = tile->row[i];
        }
        const REAL *row = state + lane * (tile->value_dim + 2);
        bool is_empty = lane >= at->queries || row[tile->value_dim + 1] == 0;
        for (int64_t i = 0; i < tile->value_dim; i++) {
            tile->out[i * LANES + lane] = is_empty ? 0 : row[i];
        }
        tile->max[lane] = is_empty ? -(REAL)INFINITY : row[tile->value_dim];
        tile->sum[lane] = is_empty ? 0 : row[tile->value_dim + 1];
    }
}

static void REAL_NAME(tile_store)(const struct REAL_NAME(tile) * tile, REAL *state,
                                  int64_t queries)
{
    for (int64_t lane = 0; lane < queries; lane++) {
        REAL *row = state + lane * (tile->value_dim + 2);
        for (int64_t i = 0; i < tile->value_dim; i++) {
            row[i] = tile->out[i * LANES + lane];
        }
        row[tile->value_dim] = tile->max[lane];
        row[tile->value_dim + 1] = tile->sum[lane];
    }
}

/* Turns scores into weights and moves maximum and sum on. */
static void REAL_NAME(tile_weigh)(struct REAL_NAME(tile) * tile, int64_t keys)
{
    REAL max[LANES], base[LANES], sum[LANES] = {0};
    memcpy(max, tile->max, sizeof max);
    for (int64_t key = 0; key < keys; key++) {
        const REAL *score = tile->score + key * LANES;
        for (int64_t lane = 0; lane < LANES; lane++) {
            max[lane] = score[lane] > max[lane] ? score[lane] : max[lane];
        }
    }
    /* A lane that has seen no key has no maximum to subtract; all its scores are -inf
     * and weigh 0. */
    for (int64_t lane = 0; lane < LANES; lane++) {
        base[lane] = max[lane] == -(REAL)INFINITY ? 0 : max[lane];
        tile->shrink[lane] = REAL_NAME(exp)(tile->max[lane] - base[lane]);
    }
    for (int64_t key = 0; key < keys; key++) {
        REAL *score = tile->score + key * LANES;
        for (int64_t lane = 0; lane < LANES; lane++) {
            score[lane] = REAL_NAME(exp)(score[lane] - base[lane]);
            sum[lane] += score[lane];
        }
    }
    for (int64_t lane = 0; lane < LANES; lane++) {
        tile->sum[lane] = tile->sum[lane] * tile->shrink[lane] + sum[lane];
    }
    memcpy(tile->max, max, sizeof max);
}

/* Adds keys at->key ... + at->keys to the tile; k and v are their panels from the first
 * key of the view. */
static void REAL_NAME(tile_attend)(struct REAL_NAME(tile) * tile,
                                   const struct cp_attend_args *args,
                                   const struct REAL_NAME(spot) * at, const REAL *k,
                                   const REAL *v)
{
    int64_t end = at->key + at->keys;
    for (int64_t key = at->key; key < end; key += REAL_NAME(BLOCK)) {
        struct REAL_NAME(spot) block = *at;
        block.key = key;
        block.keys = end - key < REAL_NAME(BLOCK) ? end - key : REAL_NAME(BLOCK);
        REAL_NAME(scores)(&args->place, &args->mask, args->scale, &block,
                          tile->head_dim, k + key * tile->head_dim, tile->q, tile->row,
                          tile->score);
        REAL_NAME(tile_weigh)(tile, block.keys);
        for (int64_t i = 0; i < tile->value_dim; i++) {
            for (int64_t lane = 0; lane < LANES; lane++) {
                tile->out[i * LANES + lane] *= tile->shrink[lane];
            }
        }
        REAL_NAME(product)(tile->value_dim, LANES, block.keys,
                           v + key * tile->value_dim, 1, tile->value_dim, tile->score,
                           LANES, tile->out, LANES);
    }
}

static void REAL_NAME(pack)(const struct cp_view *to, const struct cp_view *from)
{
    for (int64_t b = 0; b < from->n[0]; b++) {
        for (int64_t h = 0; h < from->n[2]; h++) {
            void *panel = to->data + b * to->stride[0] + h * to->stride[2];
            const char *rows = from->data + b * from->stride[0] + h * from->stride[2];
            for (int64_t i = 0; i < from->n[1]; i++) {
                REAL_NAME(load)(from->dtype, rows + i * from->stride[1],
                                from->stride[3], from->n[3],
                                (REAL *)panel + i * from->n[3]);
            }
        }
    }
}

/* One row of out and lse. Divides a few numbers at a time, since there is no scratch.
 */
static void REAL_NAME(finish_row)(const REAL *row, const struct cp_view *out,
                                  const struct cp_view *lse, int64_t b, int64_t i,
                                  int64_t h)
{
    enum { CHUNK = 64 };
    int64_t dim = out->n[3];
    REAL max = row[dim], sum = row[dim + 1];
    char *to = out->data + b * out->stride[0] + i * out->stride[1] + h * out->stride[2];
    for (int64_t first = 0; first < dim; first += CHUNK) {
        REAL part[CHUNK];
        int64_t n = dim - first < CHUNK ? dim - first : CHUNK;
        for (int64_t j = 0; j < n; j++) {
            part[j] = sum == 0 ? 0 : row[first + j] / sum;
        }
        REAL_NAME(store)(out->dtype, to + first * out->stride[3], out->stride[3], n,
                         part);
    }
    if (lse->data != NULL) {
        REAL value = sum == 0 ? -(REAL)INFINITY : max + REAL_LOG(sum);
        REAL_NAME(store)(lse->dtype,
                         lse->data + b * lse->stride[0] + i * lse->stride[1] +
                             h * lse->stride[2],
                         0, 1, &value);
    }
}

static void REAL_NAME(finish)(const struct cp_finish_args *args)
{
    const struct cp_view *state = &args->state, *out = &args->out;
    for (int64_t b = 0; b < out->n[0]; b++) {
        for (int64_t h = 0; h < out->n[2]; h++) {
            const void *rows =
                state->data + b * state->stride[0] + h * state->stride[2];
            for (int64_t i = 0; i < out->n[1]; i++) {
                REAL_NAME(finish_row)((const REAL *)rows + i * (out->n[3] + 2), out,
                                      &args->lse, b, i, h);
            }
        }
    }
}

/* A tile of queries and the stretch of keys that begins at at->key: its state is emptied
 * before the first key that ever is, its results are written after the last one. */
static void REAL_NAME(attend_stretch)(struct REAL_NAME(tile) * tile,
                                      const struct cp_attend_args *args,
                                      const struct REAL_NAME(spot) * at, const REAL *k,
                                      const REAL *v, REAL *rows)
{
    int64_t row_size = tile->value_dim + 2;
    if (args->is_first && at->key == 0) {
        memset(rows, 0, (size_t)(at->queries * row_size) * sizeof *rows);
    }
    if (at->keys > 0) {
        REAL_NAME(tile_load)(tile, &args->q, rows, at);
        REAL_NAME(tile_attend)(tile, args, at, k, v);
        REAL_NAME(tile_store)(tile, rows, at->queries);
    }
    if (args->out.data != NULL && args->k.n[1] - at->key <= REAL_NAME(STRETCH)) {
        for (int64_t i = 0; i < at->queries; i++) {
            REAL_NAME(finish_row)(rows + i * row_size, &args->out, &args->lse,
                                  at->batch, at->query + i, at->head);
        }
    }
}

/* One query head; a stretch without a key where there are no keys, for the states and
 * results. */
static void REAL_NAME(attend_head)(struct REAL_NAME(tile) * tile,
                                   const struct cp_attend_args *args, int64_t batch,
                                   int64_t head)
{
    const struct cp_view *q = &args->q, *k = &args->k, *v = &args->v,
                         *state = &args->state;
    int64_t kv_head = cp_place_kv_head(&args->place, head);
    const void *keys = k->data + batch * k->stride[0] + kv_head * k->stride[2];
    const void *values = v->data + batch * v->stride[0] + kv_head * v->stride[2];
    void *states = state->data + batch * state->stride[0] + head * state->stride[2];
    struct REAL_NAME(spot) at = {.batch = batch, .head = head};
    do {
        for (at.query = 0; at.query < q->n[1]; at.query += LANES) {
            int64_t left = q->n[1] - at.query;
            at.queries = left < LANES ? left : LANES;
            int64_t seen =
                REAL_NAME(visible)(&args->place, at.query + at.queries, k->n[1]) -
                at.key;
            at.keys = seen < REAL_NAME(STRETCH) ? seen : REAL_NAME(STRETCH);
            REAL_NAME(attend_stretch)(tile, args, &at, keys, values,
                                      (REAL *)states +
                                          at.query * (tile->value_dim + 2));
        }
        at.key += REAL_NAME(STRETCH);
    } while (at.key < k->n[1]);
}

static void REAL_NAME(attend)(const struct cp_attend_args *args)
{
    const struct cp_view *q = &args->q;
    struct REAL_NAME(tile) tile =
        REAL_NAME(tile_view)(args->scratch, q->n[3], args->v.n[3]);
    for (int64_t b = 0; b < q->n[0]; b++) {
        for (int64_t h = 0; h < q->n[2]; h++) {
            REAL_NAME(attend_head)(&tile, args, b, h);
        }
    }
}
