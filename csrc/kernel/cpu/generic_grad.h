/* Template: the backward pass for one type of sums.
 *
 * A block of keys stays while every tile of queries passes by: dk and dv collect in
 * scratch, a tile's dq goes out at once. Cost: 10 D operations a score in five
 * products, bound by multiplication and addition. */
#include "kernel/cpu/generic_score.h"

enum { REAL_NAME(GRAD_BLOCK) = 64 }; /* keys */

/* A block of keys and a tile of queries in scratch. Rows of a product's right side and
 * result are padded: _wide. */
struct REAL_NAME(grad_tile) {
    int64_t head_dim, value_dim, head_wide, value_wide;
    REAL *q;      /* [head_dim][LANES] */
    REAL *dout;   /* [value_dim][LANES] */
    REAL *dq;     /* [head_dim][LANES] */
    REAL *weight; /* [GRAD_BLOCK][LANES]: exp(score - lse) */
    REAL *slope;  /* [GRAD_BLOCK][LANES]: gradient of the score */
    REAL *lse;    /* [LANES]; +inf for lanes without a gradient: their weights are 0 */
    REAL *delta;  /* [LANES] */
    REAL *q_rows; /* [LANES][head_wide] */
    REAL *dout_rows; /* [LANES][value_wide] */
    REAL *dk;        /* [GRAD_BLOCK][head_wide] */
    REAL *dv;        /* [GRAD_BLOCK][value_wide] */
    REAL *k;         /* [GRAD_BLOCK][head_dim] */
    REAL *v;         /* [GRAD_BLOCK][value_dim] */
    REAL *row; /* head_dim + value_dim + GRAD_BLOCK numbers on the way in or out */
};

static int64_t REAL_NAME(grad_bytes)(int64_t head_dim, int64_t value_dim)
{
    int64_t block = REAL_NAME(GRAD_BLOCK);
    int64_t wide = cp_round_up(head_dim, LANES) + cp_round_up(value_dim, LANES);
    int64_t lanes = 2 * head_dim + value_dim + 2 * block + 2 + wide;
    int64_t keys = wide + head_dim + value_dim + 1;
    int64_t numbers = lanes * LANES + keys * block + head_dim + value_dim;
    return cp_round_up(numbers * (int64_t)sizeof(REAL), CP_PANEL_ALIGN);
}

static struct REAL_NAME(grad_tile)
    REAL_NAME(grad_view)(void *scratch, int64_t head_dim, int64_t value_dim)
{
    int64_t block = REAL_NAME(GRAD_BLOCK);
    struct REAL_NAME(grad_tile) tile = {
        .head_dim = head_dim,
        .value_dim = value_dim,
        .head_wide = cp_round_up(head_dim, LANES),
        .value_wide = cp_round_up(value_dim, LANES),
        .q = scratch,
    };
    tile.dout = tile.q + head_dim * LANES;
    tile.dq = tile.dout + value_dim * LANES;
    tile.weight = tile.dq + head_dim * LANES;
    tile.slope = tile.weight + block * LANES;
    tile.lse = tile.slope + block * LANES;
    tile.delta = tile.lse + LANES;
    tile.q_rows = tile.delta + LANES;
    tile.dout_rows = tile.q_rows + LANES * tile.head_wide;
    tile.dk = tile.dout_rows + LANES * tile.value_wide;
    tile.dv = tile.dk + block * tile.head_wide;
    tile.k = tile.dv + block * tile.value_wide;
    tile.v = tile.k + block * head_dim;
    tile.row = tile.v + block * value_dim;
    return tile;
}

static inline char *REAL_NAME(row_of)(const struct cp_view *view, int64_t b, int64_t i,
                                      int64_t h)
{
    return view->data + b * view->stride[0] + i * view->stride[1] + h * view->stride[2];
}

/* One row into a lane of `across` and, padded with zeros, into a row of its own. */
static void REAL_NAME(load_both)(const struct cp_view *from,
                                 const struct REAL_NAME(spot) * at, int64_t lane,
                                 bool is_live, int64_t wide, REAL *across, REAL *along)
{
    int64_t dim = from->n[3];
    REAL *row = along + lane * wide;
    memset(row, 0, (size_t)wide * sizeof(REAL));
    if (is_live) {
        REAL_NAME(load)(from->dtype,
                        REAL_NAME(row_of)(from, at->batch, at->query + lane, at->head),
                        from->stride[3], dim, row);
    }
    for (int64_t i = 0; i < dim; i++) {
        across[i * LANES + lane] = row[i];
    }
}

static void REAL_NAME(grad_load_tile)(struct REAL_NAME(grad_tile) * tile,
                                      const struct cp_grad_args *args,
                                      const struct REAL_NAME(spot) * at)
{
    for (int64_t lane = 0; lane < LANES; lane++) {
        bool is_live = lane < at->queries;
        REAL lse = 0, delta = 0;
        if (is_live) {
            int64_t query = at->query + lane;
            memcpy(&lse, REAL_NAME(row_of)(&args->lse, at->batch, query, at->head),
                   sizeof lse);
            memcpy(&delta, REAL_NAME(row_of)(&args->delta, at->batch, query, at->head),
                   sizeof delta);
            is_live = lse != -(REAL)INFINITY;
        }
        tile->lse[lane] = is_live ? lse : (REAL)INFINITY;
        tile->delta[lane] = is_live ? delta : 0;
        REAL_NAME(load_both)(&args->q, at, lane, is_live, tile->head_wide, tile->q,
                             tile->q_rows);
        REAL_NAME(load_both)(&args->dout, at, lane, is_live, tile->value_wide,
                             tile->dout, tile->dout_rows);
    }
}

static void REAL_NAME(grad_load_keys)(struct REAL_NAME(grad_tile) * tile,
                                      const struct cp_grad_args *args,
                                      const struct REAL_NAME(spot) * at,
                                      int64_t kv_head)
{
    const struct cp_view *k = &args->k, *v = &args->v;
    for (int64_t i = 0; i < at->keys; i++) {
        REAL_NAME(load)(k->dtype, REAL_NAME(row_of)(k, at->batch, at->key + i, kv_head),
                        k->stride[3], tile->head_dim, tile->k + i * tile->head_dim);
        REAL_NAME(load)(v->dtype, REAL_NAME(row_of)(v, at->batch, at->key + i, kv_head),
                        v->stride[3], tile->value_dim, tile->v + i * tile->value_dim);
    }
    memset(tile->dk, 0,
           (size_t)(REAL_NAME(GRAD_BLOCK) * tile->head_wide) * sizeof(REAL));
    memset(tile->dv, 0,
           (size_t)(REAL_NAME(GRAD_BLOCK) * tile->value_wide) * sizeof(REAL));
}

/* to[...] += factor * from[i * step] */
static void REAL_NAME(add_row)(const struct cp_view *view, char *to, double factor,
                               const REAL *from, int64_t step, REAL *row)
{
    REAL_NAME(load)(view->dtype, to, view->stride[3], view->n[3], row);
    for (int64_t i = 0; i < view->n[3]; i++) {
        row[i] += (REAL)factor * from[i * step];
    }
    REAL_NAME(store)(view->dtype, to, view->stride[3], view->n[3], row);
}

/* One tile against one block: adds to dk and dv in scratch and to dq in the call's
 * view. */
static void REAL_NAME(grad_tile)(struct REAL_NAME(grad_tile) * tile,
                                 const struct cp_grad_args *args,
                                 const struct REAL_NAME(spot) * at)
{
    REAL_NAME(scores)(&args->place, &args->mask, args->scale, at, tile->head_dim,
                      tile->k, tile->q, tile->row, tile->weight);
    REAL_NAME(dots)(at->keys, tile->value_dim, tile->v, tile->dout, tile->slope);
    for (int64_t key = 0; key < at->keys; key++) {
        REAL *weight = tile->weight + key * LANES, *slope = tile->slope + key * LANES;
        for (int64_t lane = 0; lane < LANES; lane++) {
            weight[lane] = REAL_NAME(exp)(weight[lane] - tile->lse[lane]);
            slope[lane] = weight[lane] * (slope[lane] - tile->delta[lane]);
        }
    }
    REAL_NAME(product)(at->keys, tile->value_wide, LANES, tile->weight, LANES, 1,
                       tile->dout_rows, tile->value_wide, tile->dv, tile->value_wide);
    REAL_NAME(product)(at->keys, tile->head_wide, LANES, tile->slope, LANES, 1,
                       tile->q_rows, tile->head_wide, tile->dk, tile->head_wide);
    memset(tile->dq, 0, (size_t)(tile->head_dim * LANES) * sizeof(REAL));
    REAL_NAME(product)(tile->head_dim, LANES, at->keys, tile->k, 1, tile->head_dim,
                       tile->slope, LANES, tile->dq, LANES);
    for (int64_t lane = 0; lane < at->queries; lane++) {
        char *to = REAL_NAME(row_of)(&args->dq, at->batch, at->query + lane, at->head);
        REAL_NAME(add_row)(&args->dq, to, args->scale, tile->dq + lane, LANES,
                           tile->row);
    }
}

/* One block of keys against all queries of a head. */
static void REAL_NAME(grad_block)(struct REAL_NAME(grad_tile) * tile,
                                  const struct cp_grad_args *args,
                                  struct REAL_NAME(spot) at)
{
    int64_t rows = args->q.n[1], keys = at.keys;
    int64_t kv_head = cp_place_kv_head(&args->place, at.head);
    REAL_NAME(grad_load_keys)(tile, args, &at, kv_head);
    for (at.query = 0; at.query < rows; at.query += LANES) {
        at.queries = rows - at.query < LANES ? rows - at.query : LANES;
        int64_t seen =
            REAL_NAME(visible)(&args->place, at.query + at.queries, args->k.n[1]) -
            at.key;
        at.keys = seen < keys ? seen : keys;
        if (at.keys > 0) {
            REAL_NAME(grad_load_tile)(tile, args, &at);
            REAL_NAME(grad_tile)(tile, args, &at);
        }
    }
    for (int64_t i = 0; i < keys; i++) {
        REAL_NAME(add_row)(&args->dk,
                           REAL_NAME(row_of)(&args->dk, at.batch, at.key + i, kv_head),
                           args->scale, tile->dk + i * tile->head_wide, 1, tile->row);
        REAL_NAME(add_row)(&args->dv,
                           REAL_NAME(row_of)(&args->dv, at.batch, at.key + i, kv_head),
                           1.0, tile->dv + i * tile->value_wide, 1, tile->row);
    }
}

static void REAL_NAME(grad)(const struct cp_grad_args *args)
{
    struct REAL_NAME(grad_tile) tile =
        REAL_NAME(grad_view)(args->scratch, args->q.n[3], args->v.n[3]);
    struct REAL_NAME(spot) at = {0};
    int64_t rows = args->k.n[1];
    for (at.batch = 0; at.batch < args->q.n[0]; at.batch++) {
        for (at.head = 0; at.head < args->q.n[2]; at.head++) {
            for (at.key = 0; at.key < rows; at.key += REAL_NAME(GRAD_BLOCK)) {
                int64_t left = rows - at.key;
                at.keys = left < REAL_NAME(GRAD_BLOCK) ? left : REAL_NAME(GRAD_BLOCK);
                REAL_NAME(grad_block)(&tile, args, at);
            }
        }
    }
}

/* sum(out * dout) - dlse of one row. Added up exactly as `dots` does: where a row sees
 * one key, dout . v and this cancel to the last bit, as they must. */
static void REAL_NAME(delta_row)(const struct cp_delta_args *args, int64_t b, int64_t i,
                                 int64_t h)
{
    enum { CHUNK = REAL_NAME(CHUNK) };
    const struct cp_view *out = &args->out, *dout = &args->dout;
    const char *x = REAL_NAME(row_of)(out, b, i, h),
               *y = REAL_NAME(row_of)(dout, b, i, h);
    REAL sum = 0;
    for (int64_t first = 0; first < out->n[3]; first += CHUNK) {
        REAL xs[CHUNK], ys[CHUNK], part = 0;
        int64_t n = out->n[3] - first < CHUNK ? out->n[3] - first : CHUNK;
        REAL_NAME(load)(out->dtype, x + first * out->stride[3], out->stride[3], n, xs);
        REAL_NAME(load)(dout->dtype, y + first * dout->stride[3], dout->stride[3], n,
                        ys);
        for (int64_t j = 0; j < n; j++) {
            part += xs[j] * ys[j];
        }
        sum += part;
    }
    if (args->dlse.data != NULL) {
        REAL dlse = 0;
        memcpy(&dlse, REAL_NAME(row_of)(&args->dlse, b, i, h), sizeof dlse);
        sum -= dlse;
    }
    memcpy(REAL_NAME(row_of)(&args->delta, b, i, h), &sum, sizeof sum);
}

static void REAL_NAME(delta)(const struct cp_delta_args *args)
{
    for (int64_t b = 0; b < args->out.n[0]; b++) {
        for (int64_t i = 0; i < args->out.n[1]; i++) {
            for (int64_t h = 0; h < args->out.n[2]; h++) {
                REAL_NAME(delta_row)(args, b, i, h);
            }
        }
    }
}
