/* Random attention scenes and their judgement. */
#include "scene.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "oracle.h"
#include "tensor/convert.h"

static uint64_t next_random(uint64_t *state)
{
    uint64_t z = (*state += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

static int64_t below(uint64_t *state, int64_t limit)
{
    return (int64_t)(next_random(state) % (uint64_t)limit);
}

static double normal(uint64_t *state)
{
    double u = ((double)(next_random(state) >> 11) + 0.5) / 9007199254740992.0;
    double w = (double)(next_random(state) >> 11) / 9007199254740992.0;
    return sqrt(-2.0 * log(u)) * cos(6.283185307179586 * w);
}

static enum oracle_type type_of(enum cp_dtype dtype)
{
    return dtype == CP_DTYPE_FLOAT32    ? ORACLE_F32
           : dtype == CP_DTYPE_BFLOAT16 ? ORACLE_BF16
           : dtype == CP_DTYPE_FLOAT16  ? ORACLE_F16
                                        : ORACLE_F64;
}

static double *numbers(uint64_t *state, int64_t count, enum cp_dtype dtype)
{
    double *x = malloc((size_t)(count > 0 ? count : 1) * sizeof *x);
    for (int64_t i = 0; x != NULL && i < count; i++) {
        x[i] = oracle_round(normal(state), type_of(dtype));
    }
    return x;
}

static int64_t sum_of(const int64_t *x, int count)
{
    int64_t sum = 0;
    for (int i = 0; i < count; i++) {
        sum += x[i];
    }
    return sum;
}

static void choose_lengths(struct scene *s, uint64_t *state, int64_t *lengths)
{
    int64_t even = 1 + below(state, 9);
    int64_t shape = below(state, 4); /* 0: one rank has all, 1: 0 1 2 .., else any */
    int64_t lucky = below(state, s->world);
    for (int rank = 0; rank < s->world; rank++) {
        if (s->variant == CP_EVEN) {
            lengths[rank] = even;
        } else if (shape == 0) {
            lengths[rank] = rank == lucky ? even : 0;
        } else {
            lengths[rank] = shape == 1 ? rank : below(state, 11);
        }
    }
}

static bool is_all_ones(const int64_t *lengths, int count)
{
    for (int i = 0; i < count; i++) {
        if (lengths[i] != 1) {
            return false;
        }
    }
    return true;
}

static void choose(struct scene *s, uint64_t *state)
{
    static const enum cp_dtype dtypes[] = {CP_DTYPE_FLOAT64, CP_DTYPE_FLOAT64,
                                           CP_DTYPE_FLOAT32, CP_DTYPE_BFLOAT16,
                                           CP_DTYPE_FLOAT16};
    s->variant = below(state, 3) == 0 ? CP_EVEN : CP_ANYTHING;
    s->rotate = (int32_t)below(state, 3);
    s->chunks = (int32_t)below(state, 5);
    s->dtype = dtypes[below(state, 5)];
    s->batch = 1 + below(state, 2);
    s->kv_heads = 1 + below(state, 3);
    s->heads = s->kv_heads * (1 + below(state, 3));
    if (s->variant == CP_EVEN) {
        s->heads *= s->ulysses;
    }
    s->dim = 1 + below(state, 9);
    s->value_dim = below(state, 2) == 0 ? s->dim : 1 + below(state, 9);
    s->is_causal = below(state, 3) == 0;
    s->want_lse = below(state, 2) == 0;
    s->is_replicated = below(state, 8) == 0;
    s->scale = below(state, 2) == 0 ? 1.0 / sqrt((double)s->dim) : 0.3;
    choose_lengths(s, state, s->rows);
    if (below(state, 2) == 0) {
        memcpy(s->keys, s->rows, sizeof s->keys);
    } else {
        choose_lengths(s, state, s->keys);
    }
    for (int rank = 1; rank < s->world && s->is_replicated; rank++) {
        s->keys[rank] = s->keys[0];
    }
    s->mask_kind = (enum cp_mask_kind)below(state, 3);
    s->mask_rows = (enum cp_axis_kind)below(state, 3);
    s->mask_keys = (enum cp_axis_kind)below(state, 3);
    if (s->mask_rows == CP_AXIS_OWN && s->mask_keys == CP_AXIS_OWN) {
        s->mask_keys = CP_AXIS_WHOLE;
    }
    if (s->mask_rows == CP_AXIS_OWN && is_all_ones(s->keys, s->world)) {
        s->mask_keys = CP_AXIS_WHOLE; /* a key axis of 1 would be read as the own key */
    }
    s->mask_batch = below(state, 2) == 0 ? 1 : s->batch;
    s->mask_heads = below(state, 2) == 0 ? 1 : s->heads;
    s->all_rows = sum_of(s->rows, s->world);
    s->all_keys = s->is_replicated ? s->keys[0] : sum_of(s->keys, s->world);
}

/* The mask as given: (mask_batch, mask_heads, rows or 1, keys or 1). */
static int64_t mask_rows_of(const struct scene *s)
{
    return s->mask_rows == CP_AXIS_ONE ? 1 : s->all_rows;
}

static int64_t mask_keys_of(const struct scene *s)
{
    return s->mask_keys == CP_AXIS_ONE ? 1 : s->all_keys;
}

static enum cp_dtype mask_dtype(const struct scene *s)
{
    return s->mask_kind == CP_MASK_BOOL ? CP_DTYPE_BOOL : s->dtype;
}

static double *make_mask(struct scene *s, uint64_t *state)
{
    int64_t count = s->mask_batch * s->mask_heads * mask_rows_of(s) * mask_keys_of(s);
    double *mask = numbers(state, count, s->dtype);
    for (int64_t i = 0; i < count; i++) {
        int64_t dice = below(state, 10);
        if (s->mask_kind == CP_MASK_BOOL) {
            mask[i] = dice < 3 ? 0.0 : 1.0;
        } else if (dice == 0) {
            mask[i] = -(double)INFINITY;
        }
    }
    return mask;
}

/* What the oracle wants: a number for every score. */
static double *spread_mask(const struct scene *s)
{
    int64_t count = s->batch * s->heads * s->all_rows * s->all_keys;
    double *dense = malloc((size_t)(count > 0 ? count : 1) * sizeof *dense);
    int64_t at = 0;
    for (int64_t b = 0; b < s->batch; b++) {
        for (int64_t h = 0; h < s->heads; h++) {
            for (int64_t i = 0; i < s->all_rows; i++) {
                for (int64_t j = 0; j < s->all_keys; j++) {
                    int64_t mb = s->mask_batch == 1 ? 0 : b;
                    int64_t mh = s->mask_heads == 1 ? 0 : h;
                    int64_t mi = s->mask_rows == CP_AXIS_ONE ? 0 : i;
                    int64_t mj = s->mask_keys == CP_AXIS_ONE ? 0 : j;
                    double x =
                        s->mask[((mb * s->mask_heads + mh) * mask_rows_of(s) + mi) *
                                    mask_keys_of(s) +
                                mj];
                    bool is_bool = s->mask_kind == CP_MASK_BOOL;
                    dense[at++] = is_bool ? (x != 0.0 ? 0.0 : -(double)INFINITY) : x;
                }
            }
        }
    }
    return dense;
}

static const enum cp_tensor_role results[] = {CP_TENSOR_OUT, CP_TENSOR_LSE,
                                              CP_TENSOR_DQ, CP_TENSOR_DK, CP_TENSOR_DV};
enum { RESULTS = sizeof results / sizeof results[0] };

static bool is_of_keys(enum cp_tensor_role role)
{
    return role == CP_TENSOR_K || role == CP_TENSOR_V || role == CP_TENSOR_DK ||
           role == CP_TENSOR_DV;
}

static int64_t dim_of(const struct scene *s, enum cp_tensor_role role)
{
    if (role == CP_TENSOR_LSE || role == CP_TENSOR_DLSE) {
        return 1;
    }
    bool is_of_dim = role == CP_TENSOR_Q || role == CP_TENSOR_K ||
                     role == CP_TENSOR_DQ || role == CP_TENSOR_DK;
    return is_of_dim ? s->dim : s->value_dim;
}

static int64_t whole_count(const struct scene *s, enum cp_tensor_role role)
{
    int64_t heads = is_of_keys(role) ? s->kv_heads : s->heads;
    return s->batch * (is_of_keys(role) ? s->all_keys : s->all_rows) * heads *
           dim_of(s, role);
}

static void run_oracle(struct scene *s)
{
    double *dense = s->mask_kind == CP_MASK_NONE ? NULL : spread_mask(s);
    struct oracle_input in = {
        .batch = s->batch,
        .rows = s->all_rows,
        .keys = s->all_keys,
        .heads = s->heads,
        .kv_heads = s->kv_heads,
        .dim = s->dim,
        .value_dim = s->value_dim,
        .scale = s->scale,
        .is_causal = s->is_causal,
        .q = s->q,
        .k = s->k,
        .v = s->v,
        .mask = dense,
        .dout = s->dout,
        .dlse = s->want_lse ? s->dlse : NULL,
    };
    for (int i = 0; i < RESULTS; i++) {
        size_t bytes = (size_t)(whole_count(s, results[i]) + 1) * sizeof(double);
        s->truth[results[i]] = calloc(1, bytes);
        s->plain[results[i]] = calloc(1, bytes);
    }
    struct oracle_output truth = {.out = s->truth[CP_TENSOR_OUT],
                                  .lse = s->truth[CP_TENSOR_LSE],
                                  .dq = s->truth[CP_TENSOR_DQ],
                                  .dk = s->truth[CP_TENSOR_DK],
                                  .dv = s->truth[CP_TENSOR_DV]};
    struct oracle_output plain = {.out = s->plain[CP_TENSOR_OUT],
                                  .lse = s->plain[CP_TENSOR_LSE],
                                  .dq = s->plain[CP_TENSOR_DQ],
                                  .dk = s->plain[CP_TENSOR_DK],
                                  .dv = s->plain[CP_TENSOR_DV]};
    oracle_run(&in, ORACLE_F64, ORACLE_F64, &truth);
    s->ds_size = truth.ds_size;
    oracle_run(&in, s->dtype == CP_DTYPE_FLOAT64 ? ORACLE_F64 : ORACLE_F32,
               type_of(s->dtype), &plain);
    free(dense);
}

static void store(char *at, enum cp_dtype dtype, double x)
{
    float narrow = (float)x;
    if (dtype == CP_DTYPE_FLOAT64) {
        memcpy(at, &x, sizeof x);
    } else if (dtype == CP_DTYPE_FLOAT32) {
        memcpy(at, &narrow, sizeof narrow);
    } else if (dtype == CP_DTYPE_BOOL) {
        *at = (char)(x != 0.0);
    } else {
        uint16_t half =
            dtype == CP_DTYPE_BFLOAT16 ? cp_f32_to_bf16(narrow) : cp_f32_to_f16(narrow);
        memcpy(at, &half, sizeof half);
    }
}

static double load(const char *at, enum cp_dtype dtype)
{
    double wide = 0.0;
    float narrow = 0.0f;
    uint16_t half = 0;
    if (dtype == CP_DTYPE_FLOAT64) {
        memcpy(&wide, at, sizeof wide);
        return wide;
    }
    if (dtype == CP_DTYPE_FLOAT32) {
        memcpy(&narrow, at, sizeof narrow);
        return (double)narrow;
    }
    memcpy(&half, at, sizeof half);
    return (double)(dtype == CP_DTYPE_BFLOAT16 ? cp_bf16_to_f32(half)
                                               : cp_f16_to_f32(half));
}

static char *element(const struct cp_view *view, int64_t a, int64_t b, int64_t c,
                     int64_t d)
{
    return view->data + a * view->stride[0] + b * view->stride[1] +
           c * view->stride[2] + d * view->stride[3];
}

/* Memory for a view; now and then with the axes of rows and heads swapped, as callers
 * hand it in. */
static struct cp_view make_view(uint64_t *state, enum cp_dtype dtype, int64_t a,
                                int64_t b, int64_t c, int64_t d)
{
    size_t bytes = (size_t)(a * b * c * d * cp_dtype_bytes(dtype));
    void *data = malloc(bytes > 0 ? bytes : 1);
    if (below(state, 2) == 0) {
        return cp_view_compact(data, dtype, a, b, c, d);
    }
    struct cp_view swapped = cp_view_compact(data, dtype, a, c, b, d);
    int64_t rows = swapped.stride[2];
    swapped.stride[2] = swapped.stride[1];
    swapped.stride[1] = rows;
    swapped.n[1] = b;
    swapped.n[2] = c;
    return swapped;
}

static int64_t before(const int64_t *lengths, int rank)
{
    return sum_of(lengths, rank);
}

static enum cp_dtype dtype_of(const struct scene *s, enum cp_tensor_role role)
{
    return role == CP_TENSOR_LSE || role == CP_TENSOR_DLSE ? cp_dtype_sum(s->dtype)
                                                           : s->dtype;
}

/* A rank's tensor of the attention shape. */
static void place_tensor(struct scene *s, uint64_t *state, int rank,
                         enum cp_tensor_role role)
{
    bool of_keys = is_of_keys(role);
    s->tensors[rank][role] = make_view(
        state, dtype_of(s, role), s->batch, of_keys ? s->keys[rank] : s->rows[rank],
        of_keys ? s->kv_heads : s->heads, dim_of(s, role));
}

/* From the whole. */
static void fill_tensor(struct scene *s, int rank, enum cp_tensor_role role,
                        const double *whole)
{
    const struct cp_view view = s->tensors[rank][role];
    bool of_keys = is_of_keys(role);
    int64_t rows = view.n[1], heads = view.n[2], dim = view.n[3];
    int64_t first = !of_keys           ? before(s->rows, rank)
                    : s->is_replicated ? 0
                                       : before(s->keys, rank);
    int64_t all = of_keys ? s->all_keys : s->all_rows;
    for (int64_t b = 0; b < s->batch; b++) {
        for (int64_t i = 0; i < rows; i++) {
            for (int64_t h = 0; h < heads; h++) {
                for (int64_t d = 0; d < dim; d++) {
                    store(element(&view, b, i, h, d), view.dtype,
                          whole[((b * all + first + i) * heads + h) * dim + d]);
                }
            }
        }
    }
}

static void place_mask(struct scene *s, uint64_t *state, int rank)
{
    s->tensors[rank][CP_TENSOR_MASK] =
        make_view(state, mask_dtype(s), s->mask_batch, s->mask_heads,
                  s->mask_rows == CP_AXIS_OWN ? s->rows[rank] : mask_rows_of(s),
                  s->mask_keys == CP_AXIS_OWN ? s->keys[rank] : mask_keys_of(s));
}

static void fill_mask(struct scene *s, int rank)
{
    const struct cp_view view = s->tensors[rank][CP_TENSOR_MASK];
    int64_t rows = view.n[2], keys = view.n[3];
    int64_t row_first = s->mask_rows == CP_AXIS_OWN ? before(s->rows, rank) : 0;
    int64_t key_first =
        s->mask_keys == CP_AXIS_OWN && !s->is_replicated ? before(s->keys, rank) : 0;
    for (int64_t b = 0; b < s->mask_batch; b++) {
        for (int64_t h = 0; h < s->mask_heads; h++) {
            for (int64_t i = 0; i < rows; i++) {
                for (int64_t j = 0; j < keys; j++) {
                    store(element(&view, b, h, i, j), view.dtype,
                          s->mask[((b * s->mask_heads + h) * mask_rows_of(s) +
                                   row_first + i) *
                                      mask_keys_of(s) +
                                  key_first + j]);
                }
            }
        }
    }
}

static void draw_numbers(struct scene *scene, uint64_t *state)
{
    scene->q = numbers(state, whole_count(scene, CP_TENSOR_Q), scene->dtype);
    scene->k = numbers(state, whole_count(scene, CP_TENSOR_K), scene->dtype);
    scene->v = numbers(state, whole_count(scene, CP_TENSOR_V), scene->dtype);
    scene->dout = numbers(state, whole_count(scene, CP_TENSOR_DOUT), scene->dtype);
    scene->dlse =
        numbers(state, whole_count(scene, CP_TENSOR_DLSE), cp_dtype_sum(scene->dtype));
    if (scene->mask_kind != CP_MASK_NONE) {
        scene->mask = make_mask(scene, state);
    }
    run_oracle(scene);
}

static void free_numbers(struct scene *scene)
{
    for (int i = 0; i < RESULTS; i++) {
        free(scene->truth[results[i]]);
        free(scene->plain[results[i]]);
    }
    free(scene->q);
    free(scene->k);
    free(scene->v);
    free(scene->mask);
    free(scene->dout);
    free(scene->dlse);
}

static void fill_tensors(struct scene *scene)
{
    for (int rank = 0; rank < scene->world; rank++) {
        fill_tensor(scene, rank, CP_TENSOR_Q, scene->q);
        fill_tensor(scene, rank, CP_TENSOR_K, scene->k);
        fill_tensor(scene, rank, CP_TENSOR_V, scene->v);
        fill_tensor(scene, rank, CP_TENSOR_DOUT, scene->dout);
        fill_tensor(scene, rank, CP_TENSOR_DLSE, scene->dlse);
        if (scene->mask_kind != CP_MASK_NONE) {
            fill_mask(scene, rank);
        }
    }
}

void scene_create(struct scene *scene, uint64_t seed, int ring, int ulysses)
{
    uint64_t state = seed;
    memset(scene, 0, sizeof *scene);
    scene->world = ring * ulysses;
    scene->ring = ring;
    scene->ulysses = ulysses;
    choose(scene, &state);
    draw_numbers(scene, &state);
    for (int rank = 0; rank < scene->world; rank++) {
        place_tensor(scene, &state, rank, CP_TENSOR_Q);
        place_tensor(scene, &state, rank, CP_TENSOR_K);
        place_tensor(scene, &state, rank, CP_TENSOR_V);
        place_tensor(scene, &state, rank, CP_TENSOR_DOUT);
        place_tensor(scene, &state, rank, CP_TENSOR_DLSE);
        for (int i = 0; i < RESULTS; i++) {
            place_tensor(scene, &state, rank, results[i]);
        }
        if (scene->mask_kind != CP_MASK_NONE) {
            place_mask(scene, &state, rank);
        }
    }
    fill_tensors(scene);
}

void scene_redraw(struct scene *scene, uint64_t seed)
{
    uint64_t state = seed;
    free_numbers(scene);
    draw_numbers(scene, &state);
    fill_tensors(scene);
}

void scene_destroy(struct scene *scene)
{
    for (int rank = 0; rank < scene->world; rank++) {
        for (int role = 0; role < CP_TENSORS; role++) {
            free(scene->tensors[rank][role].data);
        }
    }
    free_numbers(scene);
}

void scene_record(const struct scene *scene, int rank, enum cp_op op,
                  struct cp_record *record)
{
    struct cp_call *call = &record->call;
    memset(record, 0, sizeof *record);
    call->op = (int32_t)op;
    call->batch = scene->batch;
    call->heads = scene->heads;
    call->kv_heads = scene->kv_heads;
    call->head_dim = scene->dim;
    call->value_dim = scene->value_dim;
    memcpy(&call->scale_bits, &scene->scale, sizeof scene->scale);
    call->dtype = (int32_t)scene->dtype;
    call->is_causal = scene->is_causal;
    call->want_lse =
        scene->want_lse || op == CP_OP_ATTENTION; /* the backward needs it */
    call->kv_replicated = scene->is_replicated;
    call->enable_gqa = 1;
    call->variant = scene->variant;
    call->rotate = scene->rotate;
    call->ring_degree = scene->ring;
    call->ulysses_degree = scene->ulysses;
    record->sizes[CP_SIZE_Q_ROWS] = scene->rows[rank];
    record->sizes[CP_SIZE_KV_ROWS] = scene->keys[rank];
    record->sizes[CP_SIZE_HEAD_CHUNKS] = scene->chunks;
    if (scene->mask_kind != CP_MASK_NONE) {
        call->mask_kind = (int32_t)scene->mask_kind;
        call->mask_dtype = (int32_t)mask_dtype(scene);
        call->mask_batch = scene->mask_batch;
        call->mask_heads = scene->mask_heads;
        record->sizes[CP_SIZE_MASK_ROWS] = scene->tensors[rank][CP_TENSOR_MASK].n[2];
        record->sizes[CP_SIZE_MASK_KEYS] = scene->tensors[rank][CP_TENSOR_MASK].n[3];
    }
}

void scene_print(const struct scene *scene, char *text, size_t bytes)
{
    static const char *const axes[] = {"one", "own", "whole"};
    char lengths[160] = "";
    size_t used = 0;
    for (int rank = 0; rank < scene->world && used < sizeof lengths; rank++) {
        int wrote = snprintf(lengths + used, sizeof lengths - used, " %d:%d",
                             (int)scene->rows[rank], (int)scene->keys[rank]);
        used += wrote > 0 ? (size_t)wrote : 0;
    }
    (void)snprintf(
        text, bytes,
        "%dx%d %s in %d B%d H%d/%d D%d/%d %s%s%s%s mask %d %s %s b%d h%d rows:keys%s",
        scene->ring, scene->ulysses, scene->variant == CP_EVEN ? "even" : "anything",
        (int)scene->chunks, (int)scene->batch, (int)scene->heads, (int)scene->kv_heads,
        (int)scene->dim, (int)scene->value_dim, cp_dtype_name(scene->dtype),
        scene->is_causal ? " causal" : "", scene->is_replicated ? " replicated" : "",
        scene->want_lse ? " lse" : "", (int)scene->mask_kind, axes[scene->mask_rows],
        axes[scene->mask_keys], (int)scene->mask_batch, (int)scene->mask_heads,
        lengths);
}

static bool belongs(enum cp_tensor_role role, enum cp_op op)
{
    bool is_forward = role == CP_TENSOR_OUT || role == CP_TENSOR_LSE;
    return is_forward == (op == CP_OP_ATTENTION);
}

void scene_poison(struct scene *scene, enum cp_op op)
{
    for (int rank = 0; rank < scene->world; rank++) {
        for (int i = 0; i < RESULTS; i++) {
            const struct cp_view *view = &scene->tensors[rank][results[i]];
            if (belongs(results[i], op)) {
                memset(view->data, 0xff,
                       (size_t)(cp_view_count(view) * cp_dtype_bytes(view->dtype)));
            }
        }
    }
}

static double epsilon(enum cp_dtype dtype)
{
    return dtype == CP_DTYPE_FLOAT64    ? 0x1p-52
           : dtype == CP_DTYPE_FLOAT32  ? 0x1p-23
           : dtype == CP_DTYPE_BFLOAT16 ? 0x1p-7
                                        : 0x1p-10;
}

static double gap(double a, double b)
{
    return a == b ? 0.0 : fabs(a - b);
}

/* The largest error allowed: so many times the plain method's own, never below a few
 * roundings. */
static double allowed(const struct scene *s, enum cp_tensor_role role)
{
    double plain = 0.0;
    double top = 1.0;
    if (role == CP_TENSOR_DQ || role == CP_TENSOR_DK) {
        /* Each term is scale * (dp - delta) * q or k, and normal numbers reach 4. */
        top = fmax(top, 4.0 * s->scale * s->ds_size);
    }
    for (int64_t i = 0; i < whole_count(s, role); i++) {
        double truth = s->truth[role][i];
        plain = fmax(plain, gap(s->plain[role][i], truth));
        top = isfinite(truth) ? fmax(top, fabs(truth)) : top;
    }
    double eps = epsilon(dtype_of(s, role));
    double few = s->dtype == CP_DTYPE_FLOAT64   ? 64.0
                 : s->dtype == CP_DTYPE_FLOAT32 ? 8.0
                                                : 2.0;
    if (role == CP_TENSOR_LSE && s->dtype != CP_DTYPE_FLOAT64) {
        few = 8.0;
    }
    double sum_over_ranks =
        role == CP_TENSOR_DK || role == CP_TENSOR_DV ? (double)s->world : 1.0;
    return fmax(3.0 * plain, few * eps * top) +
           (s->is_replicated ? sum_over_ranks * eps * top : 0.0);
}

/* Replicated keys: every rank has a part of dK and dV, and the parts add up to the
 * truth. */
static double answer(const struct scene *s, enum cp_tensor_role role, int rank,
                     int64_t b, int64_t i, int64_t h, int64_t d)
{
    const struct cp_view *own = &s->tensors[rank][role];
    if (!s->is_replicated || !is_of_keys(role)) {
        return load(element(own, b, i, h, d), own->dtype);
    }
    double sum = 0.0;
    for (int r = 0; r < s->world; r++) {
        const struct cp_view *view = &s->tensors[r][role];
        sum += load(element(view, b, i, h, d), view->dtype);
    }
    return sum;
}

static bool judge_tensor(const struct scene *s, int rank, enum cp_tensor_role role)
{
    const struct cp_view *view = &s->tensors[rank][role];
    bool of_keys = is_of_keys(role);
    int64_t first = !of_keys           ? before(s->rows, rank)
                    : s->is_replicated ? 0
                                       : before(s->keys, rank);
    int64_t all = of_keys ? s->all_keys : s->all_rows;
    double most = allowed(s, role);
    for (int64_t b = 0; b < view->n[0]; b++) {
        for (int64_t i = 0; i < view->n[1]; i++) {
            for (int64_t h = 0; h < view->n[2]; h++) {
                for (int64_t d = 0; d < view->n[3]; d++) {
                    double truth =
                        s->truth[role]
                                [((b * all + first + i) * view->n[2] + h) * view->n[3] +
                                 d];
                    double got = answer(s, role, rank, b, i, h, d);
                    if (!(gap(got, truth) <= most)) {
                        char text[400];
                        scene_print(s, text, sizeof text);
                        (void)fprintf(stderr,
                                      "rank %d tensor %d at %d %d %d %d: %.17g, truth "
                                      "%.17g, allowed %g; %s\n",
                                      rank, (int)role, (int)b, (int)i, (int)h, (int)d,
                                      got, truth, most, text);
                        return false;
                    }
                }
            }
        }
    }
    return true;
}

bool scene_judge(const struct scene *scene, enum cp_op op)
{
    for (int rank = 0; rank < scene->world; rank++) {
        for (int i = 0; i < RESULTS; i++) {
            if (belongs(results[i], op) && !judge_tensor(scene, rank, results[i])) {
                return false;
            }
        }
    }
    return true;
}
