/* Every CPU kernel that runs here against the oracle, over random calls.
 *
 * A call is made as the executor makes it: keys come in blocks cut at random, packed
 * into panels, heads in groups; tensors lie in memory in any order of their axes;
 * scratch is full of NaN; guard bytes stand around everything. */
#include "judge.h"
#include "kernel/kernel_cpu.h"
#include "layout.h"
#include "oracle.h"
#include "tensor/convert.h"
#include "test.h"

enum { GUARD = 192, GUARD_BYTE = 0xa5, BLOCKS_MAX = 64 };

/* ---- memory with guards ---- */

struct block {
    unsigned char *base;
    size_t bytes;
};

static struct block blocks[BLOCKS_MAX];
static int block_count;

/* Aligned to 64, every byte is `fill`. */
static void *block_new(int64_t bytes, int fill)
{
    size_t total = ((size_t)bytes + 2 * GUARD + 63) / 64 * 64;
    unsigned char *base = aligned_alloc(64, total);
    if (base == NULL || block_count == BLOCKS_MAX) {
        abort();
    }
    memset(base, GUARD_BYTE, total);
    memset(base + GUARD, fill, (size_t)bytes);
    blocks[block_count++] = (struct block){base, (size_t)bytes};
    return base + GUARD;
}

/* Frees all blocks from the given one on, and looks at their guards. */
static void blocks_end(int first)
{
    while (block_count > first) {
        struct block *block = &blocks[--block_count];
        bool is_whole = true;
        for (size_t i = 0; i < GUARD; i++) {
            is_whole = is_whole && block->base[i] == GUARD_BYTE;
            is_whole = is_whole && block->base[GUARD + block->bytes + i] == GUARD_BYTE;
        }
        CHECK(is_whole);
        free(block->base);
    }
}

/* ---- tensors: dense doubles here, views of any layout for the kernel ---- */

static void number_write(char *to, enum cp_dtype dtype, double x)
{
    float narrow = (float)x;
    uint16_t half =
        dtype == CP_DTYPE_FLOAT16 ? cp_f32_to_f16(narrow) : cp_f32_to_bf16(narrow);
    bool truth = x == 0; /* a mask: what is added is 0 where it is true */
    if (dtype == CP_DTYPE_FLOAT64) {
        memcpy(to, &x, sizeof x);
    } else if (dtype == CP_DTYPE_FLOAT32) {
        memcpy(to, &narrow, sizeof narrow);
    } else if (dtype == CP_DTYPE_BOOL) {
        memcpy(to, &truth, sizeof truth);
    } else {
        memcpy(to, &half, sizeof half);
    }
}

static double number_read(const char *from, enum cp_dtype dtype)
{
    double x = 0;
    float narrow = 0;
    uint16_t half = 0;
    if (dtype == CP_DTYPE_FLOAT64) {
        memcpy(&x, from, sizeof x);
    } else if (dtype == CP_DTYPE_FLOAT32) {
        memcpy(&narrow, from, sizeof narrow);
        x = (double)narrow;
    } else {
        memcpy(&half, from, sizeof half);
        x = (double)(dtype == CP_DTYPE_FLOAT16 ? cp_f16_to_f32(half)
                                               : cp_bf16_to_f32(half));
    }
    return x;
}

/* Visits all elements of a view in the order of its axes. */
static void view_fill(const struct cp_view *view, const double *from)
{
    for (int64_t a = 0; a < view->n[0]; a++) {
        for (int64_t b = 0; b < view->n[1]; b++) {
            for (int64_t c = 0; c < view->n[2]; c++) {
                for (int64_t d = 0; d < view->n[3]; d++) {
                    char *at = view->data + a * view->stride[0] + b * view->stride[1] +
                               c * view->stride[2] + d * view->stride[3];
                    number_write(at, view->dtype, from != NULL ? *from++ : 0.0);
                }
            }
        }
    }
}

static void view_read(const struct cp_view *view, double *to)
{
    for (int64_t a = 0; a < view->n[0]; a++) {
        for (int64_t b = 0; b < view->n[1]; b++) {
            for (int64_t c = 0; c < view->n[2]; c++) {
                for (int64_t d = 0; d < view->n[3]; d++) {
                    const char *at = view->data + a * view->stride[0] +
                                     b * view->stride[1] + c * view->stride[2] +
                                     d * view->stride[3];
                    *to++ = number_read(at, view->dtype);
                }
            }
        }
    }
}

/* Makes the elements of a view what they were in a new one. */
static void view_clear(const struct cp_view *view)
{
    for (int64_t i = 0; i < cp_view_count(view); i++) {
        int64_t rest = i;
        char *at = view->data;
        for (int axis = CP_AXES - 1; axis >= 0; axis--) {
            at += rest % view->n[axis] * view->stride[axis];
            rest /= view->n[axis];
        }
        memset(at, 0xff, (size_t)cp_dtype_bytes(view->dtype));
    }
}

/* A view in a block of its own. */
static struct cp_view view_new(struct test_rng *rng, enum cp_dtype dtype,
                               const int64_t n[CP_AXES])
{
    int64_t first = 0, bytes = 0;
    struct cp_view view = layout_any(rng, dtype, n, &first, &bytes);
    view.data = (char *)block_new(bytes, 0xff) + first;
    return view;
}

/* ---- one random call ---- */

struct problem {
    enum cp_dtype dtype;
    enum oracle_type type;
    struct oracle_input in;
    double *q, *k, *v, *mask, *dout, *dlse;
    enum cp_dtype mask_dtype;
    int64_t mask_n[CP_AXES];
    double *mask_values; /* before broadcasting, mask_n */
    double size;         /* of q and k: 1 makes ordinary logits */
    struct oracle_output truth, plain;
};

static double *numbers(int64_t count)
{
    double *data = calloc((size_t)count + 1, sizeof *data);
    if (data == NULL) {
        abort();
    }
    return data;
}

static double *random_numbers(struct test_rng *rng, int64_t count, double size,
                              enum oracle_type type)
{
    double *data = numbers(count);
    for (int64_t i = 0; i < count; i++) {
        double sum = 0; /* nearly normal */
        for (int j = 0; j < 3; j++) {
            sum += (double)test_rng_float(rng);
        }
        data[i] = oracle_round(sum * size, type);
    }
    return data;
}

static struct oracle_output output_new(const struct oracle_input *in)
{
    int64_t rows = in->batch * in->rows * in->heads,
            keys = in->batch * in->keys * in->kv_heads;
    return (struct oracle_output){
        .out = numbers(rows * in->value_dim),
        .lse = numbers(rows),
        .dq = numbers(rows * in->dim),
        .dk = numbers(keys * in->dim),
        .dv = numbers(keys * in->value_dim),
    };
}

static void output_free(struct oracle_output *out)
{
    free(out->out);
    free(out->lse);
    free(out->dq);
    free(out->dk);
    free(out->dv);
}

static enum oracle_type oracle_type_of(enum cp_dtype dtype)
{
    return dtype == CP_DTYPE_FLOAT64    ? ORACLE_F64
           : dtype == CP_DTYPE_FLOAT32  ? ORACLE_F32
           : dtype == CP_DTYPE_BFLOAT16 ? ORACLE_BF16
                                        : ORACLE_F16;
}

/* A mask in patches, as most are: of how many rows and keys, and what each of them is. */
enum { PATCH_HIDDEN, PATCH_SHOWN, PATCH_CONSTANT, PATCH_MIXED };

struct patches {
    int64_t rows, keys, of[4][8];
};

static struct patches random_patches(struct test_rng *rng)
{
    struct patches p = {.rows = 24 << test_rng_range(rng, 0, 1),
                        .keys = 64 << test_rng_range(rng, 0, 1)};
    for (int i = 0; i < 4 * 8; i++) {
        p.of[i / 8][i % 8] = test_rng_range(rng, 0, PATCH_MIXED);
    }
    return p;
}

/* Any broadcast shape; bool or added; holes, rows without a key, a stretch of keys that
 * nobody sees; patches. */
static void problem_mask(struct problem *p, struct test_rng *rng)
{
    struct oracle_input *in = &p->in;
    const int64_t full[CP_AXES] = {in->batch, in->heads, in->rows, in->keys};
    int64_t count = 1;
    for (int axis = 0; axis < CP_AXES; axis++) {
        p->mask_n[axis] = test_rng_range(rng, 0, 1) == 1 ? full[axis] : 1;
        count *= p->mask_n[axis];
    }
    const enum cp_dtype dtypes[] = {CP_DTYPE_BOOL, CP_DTYPE_FLOAT32, p->dtype};
    p->mask_dtype = dtypes[test_rng_range(rng, 0, 2)];
    enum oracle_type type = oracle_type_of(p->mask_dtype);
    p->mask_values = numbers(count);
    int64_t holes = test_rng_range(rng, 0, 9),
            dead_first = test_rng_range(rng, 0, in->keys);
    int64_t dead_end =
        dead_first + test_rng_range(rng, 0, 1) * test_rng_range(rng, 0, in->keys);
    bool is_dead = false, is_patched = test_rng_range(rng, 0, 2) == 0;
    struct patches patches = random_patches(rng);
    for (int64_t i = 0; i < count; i++) {
        int64_t key = i % (p->mask_n[3] > 0 ? p->mask_n[3] : 1);
        if (key == 0) {
            is_dead = test_rng_range(rng, 0, 9) == 0;
        }
        bool is_hidden = is_dead || test_rng_range(rng, 0, 9) < holes ||
                         (key >= dead_first && key < dead_end);
        double add = p->mask_dtype == CP_DTYPE_BOOL
                         ? 0
                         : oracle_round(4 * (double)test_rng_float(rng), type);
        p->mask_values[i] = is_hidden ? -HUGE_VAL : add;
        if (is_patched) {
            int64_t row = i / p->mask_n[3] % p->mask_n[2];
            switch (patches.of[row / patches.rows % 4][key / patches.keys % 8]) {
            case PATCH_HIDDEN:
                p->mask_values[i] = -HUGE_VAL;
                break;
            case PATCH_SHOWN:
                p->mask_values[i] = 0;
                break;
            case PATCH_CONSTANT:
                p->mask_values[i] = p->mask_dtype == CP_DTYPE_BOOL ? 0 : 0.5;
                break;
            case PATCH_MIXED:
                break;
            }
        }
    }
    p->mask = numbers(in->batch * in->heads * in->rows * in->keys);
    double *to = p->mask;
    for (int64_t b = 0; b < in->batch; b++) {
        for (int64_t h = 0; h < in->heads; h++) {
            for (int64_t i = 0; i < in->rows; i++) {
                for (int64_t j = 0; j < in->keys; j++) {
                    const int64_t at[CP_AXES] = {b, h, i, j};
                    int64_t place = 0;
                    for (int axis = 0; axis < CP_AXES; axis++) {
                        place = place * p->mask_n[axis] +
                                (p->mask_n[axis] > 1 ? at[axis] : 0);
                    }
                    *to++ = p->mask_values[place];
                }
            }
        }
    }
    in->mask = p->mask;
}

static const int64_t dims[] = {1, 3, 8, 16, 24, 40, 64, 65, 72, 80, 96, 128, 256};

static int64_t random_dim(struct test_rng *rng)
{
    return dims[test_rng_range(rng, 0, (int64_t)(sizeof dims / sizeof dims[0]) - 1)];
}

static void problem_shape(struct problem *p, struct test_rng *rng)
{
    struct oracle_input *in = &p->in;
    in->batch = test_rng_range(rng, 1, 3);
    in->rows = test_rng_range(rng, 0, 70);
    in->keys = test_rng_range(rng, 0, test_rng_range(rng, 0, 3) == 0 ? 300 : 90);
    in->kv_heads = test_rng_range(rng, 1, 3);
    in->heads = in->kv_heads * test_rng_range(rng, 1, 3);
    in->dim = random_dim(rng);
    in->value_dim = test_rng_range(rng, 0, 2) == 0 ? random_dim(rng) : in->dim;
    /* Bounds the time of the oracle. */
    while (in->batch * in->heads * in->rows * in->keys * (in->dim + in->value_dim) >
           1500000) {
        if (in->batch > 1) {
            in->batch--;
        } else if (in->kv_heads > 1) {
            in->heads = in->heads / in->kv_heads * (in->kv_heads - 1);
            in->kv_heads--;
        } else if (in->rows > 1) {
            in->rows /= 2;
        } else {
            in->keys /= 2;
        }
    }
}

/* Numbers for the shape, scale and size that are set. */
static void problem_numbers(struct problem *p, struct test_rng *rng, bool has_dlse,
                            bool has_mask)
{
    struct oracle_input *in = &p->in;
    int64_t rows = in->batch * in->rows * in->heads,
            keys = in->batch * in->keys * in->kv_heads;
    in->q = p->q = random_numbers(rng, rows * in->dim, p->size, p->type);
    in->k = p->k = random_numbers(rng, keys * in->dim, p->size, p->type);
    in->v = p->v = random_numbers(rng, keys * in->value_dim, 1, p->type);
    in->dout = p->dout = random_numbers(rng, rows * in->value_dim, 1, p->type);
    if (has_dlse) {
        in->dlse = p->dlse = random_numbers(rng, rows, 1, ORACLE_F32);
    }
    if (has_mask) {
        problem_mask(p, rng);
    }
}

/* Numbers, and the truth about them. */
static void problem_fill(struct problem *p, struct test_rng *rng, bool has_dlse,
                         bool has_mask)
{
    const struct oracle_input *in = &p->in;
    problem_numbers(p, rng, has_dlse, has_mask);
    p->truth = output_new(in);
    p->plain = output_new(in);
    oracle_run(in, ORACLE_F64, ORACLE_F64, &p->truth);
    if (p->dtype != CP_DTYPE_FLOAT64) {
        oracle_run(in, ORACLE_F32, p->type, &p->plain);
    }
}

static void problem_init(struct problem *p, struct test_rng *rng, enum cp_dtype dtype)
{
    *p = (struct problem){.dtype = dtype, .type = oracle_type_of(dtype)};
    struct oracle_input *in = &p->in;
    problem_shape(p, rng);
    in->scale = (test_rng_range(rng, 0, 3) == 0 ? 1.3 : 1) / sqrt((double)in->dim);
    in->is_causal = test_rng_range(rng, 0, 2) == 0;
    in->q_first = test_rng_range(rng, 0, 1) * test_rng_range(rng, 0, 100);
    in->k_first = test_rng_range(rng, 0, 1) * test_rng_range(rng, 0, 100);
    int64_t kind = test_rng_range(rng, 0, 9);
    p->size = kind == 0 ? 1e-3 : (kind == 1 ? 20 : 1);
    bool has_dlse = test_rng_range(rng, 0, 1) == 1;
    problem_fill(p, rng, has_dlse, test_rng_range(rng, 0, 2) > 0);
    TEST_CONTEXT("%s B %d rows %d keys %d heads %d/%d D %d Dv %d%s%s mask %s "
                 "(%d,%d,%d,%d) size %g",
                 cp_dtype_name(dtype), (int)in->batch, (int)in->rows, (int)in->keys,
                 (int)in->heads, (int)in->kv_heads, (int)in->dim, (int)in->value_dim,
                 in->is_causal ? " causal" : "", in->dlse != NULL ? " dlse" : "",
                 cp_dtype_name(p->mask_dtype), (int)p->mask_n[0], (int)p->mask_n[1],
                 (int)p->mask_n[2], (int)p->mask_n[3], p->size);
}

static void problem_free(struct problem *p)
{
    free(p->q);
    free(p->k);
    free(p->v);
    free(p->mask);
    free(p->dout);
    free(p->dlse);
    free(p->mask_values);
    output_free(&p->truth);
    output_free(&p->plain);
}

/* ---- running it on a kernel ---- */

struct tensors {
    struct cp_view q, k, v, mask, dout, dlse, out, lse, delta, dq, dk, dv;
};

static struct cp_view tensor(struct test_rng *rng, enum cp_dtype dtype, int64_t n0,
                             int64_t n1, int64_t n2, int64_t n3, const double *values)
{
    const int64_t n[CP_AXES] = {n0, n1, n2, n3};
    struct cp_view view = view_new(rng, dtype, n);
    view_fill(&view, values);
    return view;
}

static struct tensors tensors_new(const struct problem *p, struct test_rng *rng)
{
    const struct oracle_input *in = &p->in;
    enum cp_dtype sum = cp_dtype_sum(p->dtype);
    int64_t B = in->batch, heads = in->heads, kv = in->kv_heads;
    struct tensors t = {
        .q = tensor(rng, p->dtype, B, in->rows, heads, in->dim, p->q),
        .k = tensor(rng, p->dtype, B, in->keys, kv, in->dim, p->k),
        .v = tensor(rng, p->dtype, B, in->keys, kv, in->value_dim, p->v),
        .dout = tensor(rng, p->dtype, B, in->rows, heads, in->value_dim, p->dout),
        .out = tensor(rng, p->dtype, B, in->rows, heads, in->value_dim, NULL),
        .lse = tensor(rng, sum, B, in->rows, heads, 1, NULL),
        .delta = tensor(rng, sum, B, in->rows, heads, 1, NULL),
        .dq = tensor(rng, sum, B, in->rows, heads, in->dim, NULL),
        .dk = tensor(rng, sum, B, in->keys, kv, in->dim, NULL),
        .dv = tensor(rng, sum, B, in->keys, kv, in->value_dim, NULL),
    };
    if (p->mask != NULL) {
        t.mask = view_new(rng, p->mask_dtype, p->mask_n);
        view_fill(&t.mask, p->mask_values);
    }
    if (p->dlse != NULL) {
        t.dlse = tensor(rng, sum, B, in->rows, heads, 1, p->dlse);
    }
    return t;
}

/* A stretch of rows, a group of query heads with the kv heads they need, and a stretch of
 * keys. */
struct cut {
    int64_t row, rows, head, heads, kv, kvs, key, keys;
};

/* All rows of heads from `head` on, some or all. */
static struct cut heads_from(struct test_rng *rng, const struct oracle_input *in,
                             int64_t head)
{
    int64_t per_kv = in->heads / in->kv_heads;
    struct cut cut = {.rows = in->rows, .head = head, .kv = head / per_kv};
    cut.heads = test_rng_range(rng, 1, in->heads - head);
    cut.kvs = (head + cut.heads - 1) / per_kv - cut.kv + 1;
    return cut;
}

static struct cp_place place_of(const struct problem *p, const struct cut *cut)
{
    const struct oracle_input *in = &p->in;
    return (struct cp_place){
        .q_first = in->q_first + cut->row,
        .k_first = in->k_first + cut->key,
        .head_first = cut->head,
        .kv_head_first = cut->kv,
        .heads_per_kv = in->heads / in->kv_heads,
        .is_causal = in->is_causal,
    };
}

static struct cp_view mask_part(const struct cp_view *mask, const struct cut *cut)
{
    struct cp_view part = *mask;
    if (part.data != NULL && part.n[1] > 1) {
        part = layout_part(&part, 1, cut->head, cut->heads);
    }
    if (part.data != NULL && part.n[2] > 1) {
        part = layout_part(&part, 2, cut->row, cut->rows);
    }
    if (part.data != NULL && part.n[3] > 1) {
        part = layout_part(&part, 3, cut->key, cut->keys);
    }
    return part;
}

static struct cp_view rows_part(const struct cp_view *view, const struct cut *cut)
{
    struct cp_view heads = layout_part(view, 2, cut->head, cut->heads);
    return layout_part(&heads, 1, cut->row, cut->rows);
}

static struct cp_view keys_part(const struct cp_view *view, const struct cut *cut)
{
    struct cp_view heads = layout_part(view, 2, cut->kv, cut->kvs);
    return layout_part(&heads, 1, cut->key, cut->keys);
}

/* Panels for a view of (B, rows, heads, n), sometimes with gaps between them. */
static struct cp_view panels_new(struct test_rng *rng, const struct cp_panel *panel,
                                 const struct cp_view *like, int fill)
{
    struct cp_view view = *like;
    int64_t bytes = cp_panel_bytes(panel, like->n[1]);
    int64_t gap = test_rng_range(rng, 0, 1) * CP_PANEL_ALIGN;
    bool is_head_major = test_rng_range(rng, 0, 1) == 1;
    view.stride[0] = (bytes + gap) * (is_head_major ? 1 : like->n[2]);
    view.stride[2] = (bytes + gap) * (is_head_major ? like->n[0] : 1);
    view.stride[1] = view.stride[3] = 0;
    view.data = block_new((bytes + gap) * like->n[0] * like->n[2], fill);
    return view;
}

/* What a call does beside adding keys. */
struct ends {
    bool is_first;
    struct cp_view out, lse;
};

static void attend_cut(const struct problem *p, struct test_rng *rng,
                       const struct cp_kernel_ops *ops, const struct cp_format *format,
                       const struct tensors *t, const struct cut *cut,
                       const struct cp_view *state, const struct ends *ends)
{
    int first = block_count;
    struct cp_view k = keys_part(&t->k, cut), v = keys_part(&t->v, cut);
    struct cp_attend_args args = {
        .q = rows_part(&t->q, cut),
        .k = panels_new(rng, &format->k, &k, 0xff),
        .v = panels_new(rng, &format->v, &v, 0xff),
        .mask = mask_part(&t->mask, cut),
        .state = *state,
        .is_first = ends->is_first,
        .out = ends->out,
        .lse = ends->lse,
        .place = place_of(p, cut),
        .scale = p->in.scale,
        .scratch = block_new(format->scratch_bytes, 0xff),
    };
    CHECK(ops->pack_k(&args.k, &k, NULL) == CP_OK);
    CHECK(ops->pack_v(&args.v, &v, NULL) == CP_OK);
    CHECK(ops->attend(&args, NULL) == CP_OK);
    blocks_end(first);
}

static void grad_cut(const struct problem *p, const struct cp_kernel_ops *ops,
                     const struct cp_format *format, const struct tensors *t,
                     const struct cut *cut)
{
    int first = block_count;
    struct cp_grad_args args = {
        .q = rows_part(&t->q, cut),
        .k = keys_part(&t->k, cut),
        .v = keys_part(&t->v, cut),
        .dout = rows_part(&t->dout, cut),
        .lse = rows_part(&t->lse, cut),
        .delta = rows_part(&t->delta, cut),
        .mask = mask_part(&t->mask, cut),
        .dq = rows_part(&t->dq, cut),
        .dk = keys_part(&t->dk, cut),
        .dv = keys_part(&t->dv, cut),
        .place = place_of(p, cut),
        .scale = p->in.scale,
        .scratch = block_new(format->grad_scratch_bytes, 0xff),
    };
    CHECK(ops->grad(&args, NULL) == CP_OK);
    blocks_end(first);
}

/* Forward and, from its own results, backward of one group of heads. */
static void run_heads(const struct problem *p, struct test_rng *rng,
                      const struct cp_kernel_ops *ops, const struct cp_format *format,
                      const struct tensors *t, struct cut cut)
{
    int first = block_count;
    struct cp_view out = rows_part(&t->out, &cut);
    struct cp_view state = panels_new(rng, &format->state, &out, 0);
    const struct ends apart = {0};
    struct test_rng cuts = *rng;
    for (int pass = 0; pass < 2; pass++) {
        *rng = cuts;
        int64_t most = test_rng_range(rng, 0, 1) == 1 ? p->in.keys : p->in.keys / 3;
        for (cut.key = 0; cut.key < p->in.keys; cut.key += cut.keys) {
            cut.keys = test_rng_range(rng, 1, most > 0 ? most : 1);
            cut.keys =
                cut.keys < p->in.keys - cut.key ? cut.keys : p->in.keys - cut.key;
            if (pass == 0) {
                attend_cut(p, &cuts, ops, format, t, &cut, &state, &apart);
            } else {
                grad_cut(p, ops, format, t, &cut);
            }
        }
        if (pass == 0) {
            struct cut nothing = cut;
            nothing.key = nothing.keys = 0;
            attend_cut(p, &cuts, ops, format, t, &nothing, &state, &apart);
            struct cp_finish_args finish = {
                .state = state, .out = out, .lse = rows_part(&t->lse, &cut)};
            CHECK(ops->finish(&finish, NULL) == CP_OK);
            struct cp_delta_args delta = {
                .out = out,
                .dout = rows_part(&t->dout, &cut),
                .delta = rows_part(&t->delta, &cut),
            };
            if (t->dlse.data != NULL) {
                delta.dlse = rows_part(&t->dlse, &cut);
            }
            CHECK(ops->delta(&delta, NULL) == CP_OK);
        }
    }
    blocks_end(first);
}

/* Fills `got` with what the kernel answers. */
static void run_kernel(const struct problem *p, struct test_rng *rng,
                       const struct cp_kernel_ops *ops, const struct cp_format *format,
                       const struct oracle_output *got)
{
    int first = block_count;
    const struct oracle_input *in = &p->in;
    struct tensors t = tensors_new(p, rng);
    for (int64_t head = 0; head < in->heads;) {
        struct cut cut = heads_from(rng, in, head);
        run_heads(p, rng, ops, format, &t, cut);
        head += cut.heads;
    }
    view_read(&t.out, got->out);
    view_read(&t.lse, got->lse);
    view_read(&t.dq, got->dq);
    view_read(&t.dk, got->dk);
    view_read(&t.dv, got->dv);
    blocks_end(first);
}

/* ---- judging ---- */

static void problem_judge(const struct problem *p, const struct cp_kernel_ops *ops,
                          const struct oracle_output *got)
{
    const struct oracle_input *in = &p->in;
    const char *kernel = ops->name;
    int64_t rows = in->batch * in->rows * in->heads,
            keys = in->batch * in->keys * in->kv_heads;
    bool is_half = p->dtype == CP_DTYPE_BFLOAT16 || p->dtype == CP_DTYPE_FLOAT16;
    bool is_double = p->dtype == CP_DTYPE_FLOAT64;
    /* The rounding of a score is a relative error of its weight, half of the score in
     * size: of no account among the few roundings allowed while scores are ordinary. */
    double spread = p->truth.score_size > 4 ? p->truth.score_size / 4 : 1;
    double eps =
        judge_roundoff(p->dtype) * (is_double ? 64 : (is_half ? 1 : 8)) * spread;
    double lse_eps =
        judge_roundoff(cp_dtype_sum(p->dtype)) * (is_double ? 64 : 8) * spread;
    /* With float64 there is nothing better than the truth's own arithmetic to measure
     * with. */
    const struct oracle_output *plain = is_double ? &p->truth : &p->plain;
    const double *out_plain = plain->out, *lse_plain = plain->lse;
    struct oracle_output once = {0};
    if (is_half) { /* The plain forward computes in float32 and rounds once. */
        once = output_new(in);
        struct oracle_output forward = {.out = once.out, .lse = once.lse};
        oracle_run(in, ORACLE_F32, ORACLE_F32, &forward);
        for (int64_t i = 0; i < rows * in->value_dim; i++) {
            once.out[i] = oracle_round(once.out[i], p->type);
        }
        out_plain = once.out;
        lse_plain = once.lse;
    }
    judge(kernel, "out", rows * in->value_dim, got->out, p->truth.out, out_plain,
          is_half ? 3 : 2, eps, 1);
    judge(kernel, "lse", rows, got->lse, p->truth.lse, lse_plain, 2, lse_eps, 1);
    /* Gradients of scores are differences, dp - delta. Where one weight is nearly 1 the
     * plain method's errors of the two cancel, and those of any method that has delta
     * from the output do not. */
    double ds = fmax(in->scale * p->size * p->truth.ds_size, 1);
    /* A kernel that borrows its gradient has scores rounded in two ways, and weights
     * that do not quite add up to 1. */
    bool is_borrowed =
        ops != &cp_kernel_generic_ops && ops->grad == cp_kernel_generic_grad;
    double times = is_borrowed ? 6 : 3, few = is_borrowed ? 2 * eps : eps;
    judge(kernel, "dq", rows * in->dim, got->dq, p->truth.dq, plain->dq, times, few,
          ds);
    judge(kernel, "dk", keys * in->dim, got->dk, p->truth.dk, plain->dk, times, few,
          ds);
    judge(kernel, "dv", keys * in->value_dim, got->dv, p->truth.dv, plain->dv, times,
          few, 1);
    output_free(&once);
}

/* Calls of one dtype on every available kernel that takes them. */
static void many_calls(enum cp_dtype dtype, uint64_t stream, int count)
{
    struct test_rng rng = test_rng_init(stream);
    judge_worst = 0;
    for (int i = 0; i < count; i++) {
        struct problem p;
        problem_init(&p, &rng, dtype);
        struct oracle_output got = output_new(&p.in);
        const struct cp_kernel_ops *ops = NULL;
        for (int isa = 0; (ops = cp_kernel_cpu_at(isa)) != NULL; isa++) {
            struct cp_format format;
            if (ops->is_available() &&
                ops->describe(dtype, p.in.dim, p.in.value_dim, &format) == CP_OK) {
                struct test_rng layout = rng;
                run_kernel(&p, &layout, ops, &format, &got);
                problem_judge(&p, ops, &got);
            } else {
                CHECK(isa > 0);
            }
        }
        (void)test_rng_next(&rng);
        output_free(&got);
        problem_free(&p);
    }
    printf("%s: %d calls, worst error %.2f of what is allowed\n", cp_dtype_name(dtype),
           count, judge_worst);
}

TEST(float32)
{
    many_calls(CP_DTYPE_FLOAT32, 1, 220);
}

TEST(float64)
{
    many_calls(CP_DTYPE_FLOAT64, 2, 160);
}

TEST(bfloat16)
{
    many_calls(CP_DTYPE_BFLOAT16, 3, 80);
}

TEST(float16)
{
    many_calls(CP_DTYPE_FLOAT16, 4, 80);
}

/* ---- the oracle itself, and the kernels without it ---- */

/* f = out . dout + lse . dlse */
static double loss(const struct oracle_input *in, const struct oracle_output *out)
{
    int64_t rows = in->batch * in->rows * in->heads;
    double sum = 0;
    for (int64_t i = 0; i < rows * in->value_dim; i++) {
        sum += out->out[i] * in->dout[i];
    }
    for (int64_t i = 0; i < rows; i++) {
        sum +=
            in->dlse != NULL && isfinite(out->lse[i]) ? out->lse[i] * in->dlse[i] : 0;
    }
    return sum;
}

/* The change of the loss with each number of `x`, which is one of the inputs in `in`.
 */
static void differences(const char *kernel, const char *what,
                        const struct oracle_input *in, double *x, int64_t count,
                        const double *gradient)
{
    struct oracle_output out = output_new(in),
                         forward = {.out = out.out, .lse = out.lse};
    for (int64_t i = 0; i < count; i += 7) {
        const double step = 0x1p-17, before = x[i];
        x[i] = before + step;
        oracle_run(in, ORACLE_F64, ORACLE_F64, &forward);
        double up = loss(in, &forward);
        x[i] = before - step;
        oracle_run(in, ORACLE_F64, ORACLE_F64, &forward);
        double slope = (up - loss(in, &forward)) / (2 * step);
        x[i] = before;
        if (!(fabs(slope - gradient[i]) <= 1e-7 * (1 + fabs(slope)))) {
            (void)test_fail(__FILE__, __LINE__,
                            "%s: %s[%lld] is %.12g, by differences %.12g", kernel, what,
                            (long long)i, gradient[i], slope);
        }
    }
    output_free(&out);
}

TEST(gradients_by_finite_differences)
{
    struct test_rng rng = test_rng_init(5);
    struct problem p = {.dtype = CP_DTYPE_FLOAT64, .type = ORACLE_F64, .size = 1};
    p.in = (struct oracle_input){.batch = 2,
                                 .rows = 9,
                                 .keys = 11,
                                 .heads = 4,
                                 .kv_heads = 2,
                                 .dim = 5,
                                 .value_dim = 7,
                                 .scale = 0.4};
    p.in.is_causal = true;
    p.in.q_first = 3;
    p.in.k_first = 1;
    problem_fill(&p, &rng, true, true);
    struct oracle_output got = output_new(&p.in);
    const struct cp_kernel_ops *ops = NULL;
    for (int isa = -1; isa < 0 || (ops = cp_kernel_cpu_at(isa)) != NULL; isa++) {
        struct cp_format format;
        const struct oracle_output *gradient = &p.truth;
        if (ops != NULL) {
            if (!ops->is_available() ||
                ops->describe(p.dtype, p.in.dim, p.in.value_dim, &format) != CP_OK) {
                continue;
            }
            run_kernel(&p, &rng, ops, &format, &got);
            gradient = &got;
        }
        const char *name = ops != NULL ? ops->name : "oracle";
        int64_t rows = p.in.batch * p.in.rows * p.in.heads,
                keys = p.in.batch * p.in.keys * p.in.kv_heads;
        differences(name, "dq", &p.in, p.q, rows * p.in.dim, gradient->dq);
        differences(name, "dk", &p.in, p.k, keys * p.in.dim, gradient->dk);
        differences(name, "dv", &p.in, p.v, keys * p.in.value_dim, gradient->dv);
    }
    output_free(&got);
    problem_free(&p);
}

/* Thousands of keys: sums must not lose digits with length. Two key blocks a row of
 * unequal size. */
TEST(long_sums)
{
    struct test_rng rng = test_rng_init(6);
    struct problem p = {.dtype = CP_DTYPE_FLOAT32, .type = ORACLE_F32, .size = 1};
    p.in = (struct oracle_input){
        .batch = 1, .rows = 33, .keys = 9001, .heads = 1, .kv_heads = 1};
    p.in.dim = p.in.value_dim = 16;
    p.in.scale = 0.25;
    problem_fill(&p, &rng, false, false);
    struct oracle_output got = output_new(&p.in);
    const struct cp_kernel_ops *ops = NULL;
    judge_worst = 0;
    for (int isa = 0; (ops = cp_kernel_cpu_at(isa)) != NULL; isa++) {
        struct cp_format format;
        if (ops->is_available() && ops->describe(p.dtype, 16, 16, &format) == CP_OK) {
            run_kernel(&p, &rng, ops, &format, &got);
            problem_judge(&p, ops, &got);
        }
    }
    printf("long sums: worst error %.2f of what is allowed\n", judge_worst);
    output_free(&got);
    problem_free(&p);
}

/* A state of zero bytes is a row without a key, and stays one when blocks without a
 * visible key are added. */
TEST(rows_without_a_key)
{
    const struct cp_kernel_ops *ops = NULL;
    for (int isa = 0; (ops = cp_kernel_cpu_at(isa)) != NULL; isa++) {
        for (int kind = 0; kind < 3; kind++) {
            struct cp_format format;
            if (!ops->is_available() ||
                ops->describe(CP_DTYPE_FLOAT32, 8, 8, &format) != CP_OK) {
                continue;
            }
            TEST_CONTEXT("%s, kind %d", ops->name, kind);
            struct test_rng rng = test_rng_init(7);
            double values[40 * 8] = {0};
            for (int i = 0; i < 40 * 8; i++) {
                values[i] = (double)test_rng_float(&rng);
            }
            const double hidden = -HUGE_VAL;
            struct cp_view q = tensor(&rng, CP_DTYPE_FLOAT32, 1, 40, 1, 8, values);
            struct cp_view out = tensor(&rng, CP_DTYPE_FLOAT32, 1, 40, 1, 8, values);
            struct cp_view lse = tensor(&rng, CP_DTYPE_FLOAT32, 1, 40, 1, 1, values);
            struct cp_attend_args args = {
                .q = q,
                .k = panels_new(&rng, &format.k, &q, 0xff),
                .v = panels_new(&rng, &format.v, &q, 0xff),
                .state = panels_new(&rng, &format.state, &q, 0),
                /* Kind 1: the keys come after all queries. */
                .place = {.k_first = 40, .heads_per_kv = 1, .is_causal = kind == 1},
                .scale = 1,
                .scratch = block_new(format.scratch_bytes, 0xff),
            };
            if (kind == 2) {
                args.mask = tensor(&rng, CP_DTYPE_BOOL, 1, 1, 1, 1, &hidden);
            }
            CHECK(ops->pack_k(&args.k, &q, NULL) == CP_OK);
            CHECK(ops->pack_v(&args.v, &q, NULL) == CP_OK);
            if (kind > 0) {
                CHECK(ops->attend(&args, NULL) == CP_OK);
                CHECK(ops->attend(&args, NULL) == CP_OK);
            }
            struct cp_finish_args finish = {
                .state = args.state, .out = out, .lse = lse};
            CHECK(ops->finish(&finish, NULL) == CP_OK);
            double outs[40 * 8], lses[40];
            view_read(&out, outs);
            view_read(&lse, lses);
            for (int i = 0; i < 40; i++) {
                CHECK(lses[i] == -HUGE_VAL);
                CHECK(outs[i * 8] == 0 && outs[i * 8 + 7] == 0);
            }
            finish.lse = (struct cp_view){0};
            CHECK(ops->finish(&finish, NULL) == CP_OK);
            blocks_end(0);
        }
    }
}

/* ---- states that begin and results that end within attend ---- */

enum { PARTS_MOST = 3 };

/* Some rows and heads of a problem, whose keys come in parts, some of them empty. */
struct forward {
    const struct problem *p;
    const struct cp_kernel_ops *ops;
    struct cp_format format;
    struct tensors t;
    struct cut cut;
    int64_t ends[PARTS_MOST]; /* of the parts */
    int parts;
    bool has_lse;
};

/* For all rows of the problem, all bytes 0xff; in the two blocks from `block` on. */
struct result {
    struct cp_view out, lse;
    int block;
};

static struct result result_new(struct test_rng *rng, const struct problem *p)
{
    const struct oracle_input *in = &p->in;
    const int64_t out[CP_AXES] = {in->batch, in->rows, in->heads, in->value_dim},
                  lse[CP_AXES] = {in->batch, in->rows, in->heads, 1};
    struct result result = {.block = block_count};
    result.out = view_new(rng, p->dtype, out);
    result.lse = view_new(rng, cp_dtype_sum(p->dtype), lse);
    return result;
}

static void check_untouched(const struct result *result)
{
    for (int i = 0; i < 2; i++) {
        const struct block *block = &blocks[result->block + i];
        bool is_untouched = true;
        for (size_t j = 0; j < block->bytes; j++) {
            is_untouched = is_untouched && block->base[GUARD + j] == 0xff;
        }
        CHECK(is_untouched);
    }
}

/* Either the state begins with zeros and ends in `finish`, or attend does both and the
 * state begins with NaN. */
static struct result forward_run(const struct forward *f, struct test_rng rng,
                                 bool is_within)
{
    struct result result = result_new(&rng, f->p);
    struct cp_finish_args finish = {.out = rows_part(&result.out, &f->cut)};
    finish.state =
        panels_new(&rng, &f->format.state, &finish.out, is_within ? 0xff : 0);
    struct cp_view lse = rows_part(&result.lse, &f->cut);
    struct cut cut = f->cut;
    for (int i = 0; i < f->parts; i++) {
        cut.keys = f->ends[i] - cut.key;
        struct ends ends = {.is_first = is_within && i == 0};
        if (is_within && i == f->parts - 1) {
            ends.out = finish.out;
        }
        /* An lse without an out is not looked at. */
        if (is_within && (f->has_lse || ends.out.data == NULL)) {
            ends.lse = lse;
        }
        attend_cut(f->p, &rng, f->ops, &f->format, &f->t, &cut, &finish.state, &ends);
        if (is_within && ends.out.data == NULL) {
            check_untouched(&result);
        }
        cut.key = f->ends[i];
    }
    if (!is_within) {
        finish.lse = f->has_lse ? lse : (struct cp_view){0};
        CHECK(f->ops->finish(&finish, NULL) == CP_OK);
    }
    return result;
}

/* The same bytes, and none outside the rows and heads asked for. */
static void check_forward(const struct forward *f, const struct test_rng *rng)
{
    int first = block_count;
    struct result want = forward_run(f, *rng, false);
    struct result got = forward_run(f, *rng, true);
    for (int i = 0; i < 2; i++) {
        const struct block *a = &blocks[got.block + i], *b = &blocks[want.block + i];
        CHECK_EQ_BYTES(a->base + GUARD, b->base + GUARD, a->bytes);
    }
    struct cp_view asked = rows_part(&got.out, &f->cut);
    view_clear(&asked);
    asked = rows_part(&got.lse, &f->cut);
    view_clear(&asked);
    check_untouched(&got);
    blocks_end(first);
}

static void forward_init(struct forward *f, struct test_rng *rng,
                         const struct problem *p)
{
    const struct oracle_input *in = &p->in;
    *f = (struct forward){.p = p, .t = tensors_new(p, rng)};
    f->cut = heads_from(rng, in, test_rng_range(rng, 0, in->heads - 1));
    f->cut.row = test_rng_range(rng, 0, 1) * test_rng_range(rng, 0, in->rows / 2);
    f->cut.rows = in->rows - f->cut.row;
    f->cut.rows -= test_rng_range(rng, 0, 1) * test_rng_range(rng, 0, f->cut.rows / 2);
    f->parts = (int)test_rng_range(rng, 1, PARTS_MOST);
    int64_t end = 0;
    for (int i = 0; i < f->parts; i++) {
        /* Empty, all that is left, or some. */
        int64_t left = in->keys - end, kind = test_rng_range(rng, 0, 4);
        end += kind == 0 ? 0 : kind == 1 ? left : test_rng_range(rng, 0, left);
        f->ends[i] = i == f->parts - 1 ? in->keys : end;
        end = f->ends[i];
    }
    f->has_lse = test_rng_range(rng, 0, 2) > 0;
}

/* `is_long`: more keys than any kernel meets at a time, and dims that make them few. */
static void forward_problem(struct problem *p, struct test_rng *rng,
                            enum cp_dtype dtype, bool is_long)
{
    *p = (struct problem){.dtype = dtype, .type = oracle_type_of(dtype), .size = 1};
    struct oracle_input *in = &p->in;
    problem_shape(p, rng);
    if (is_long) {
        *in = (struct oracle_input){
            .batch = 1,
            .rows = test_rng_range(rng, 1, 60),
            .keys = test_rng_range(rng, 1100, 2300),
            .heads = 2,
            .kv_heads = test_rng_range(rng, 1, 2),
            .dim = test_rng_range(rng, 250, 256),
            .value_dim = test_rng_range(rng, 250, 256),
        };
    }
    in->scale = 1 / sqrt((double)in->dim);
    in->is_causal = test_rng_range(rng, 0, 1) == 1;
    in->q_first = test_rng_range(rng, 0, 1) * test_rng_range(rng, 0, in->keys);
    in->k_first =
        test_rng_range(rng, 0, 1) * test_rng_range(rng, 0, in->q_first + in->rows);
    problem_numbers(p, rng, false, test_rng_range(rng, 0, 1) == 1);
}

static void many_forwards(enum cp_dtype dtype, uint64_t stream, int count, bool is_long)
{
    struct test_rng rng = test_rng_init(stream);
    for (int i = 0; i < count; i++) {
        int first = block_count;
        struct problem p;
        struct forward f;
        forward_problem(&p, &rng, dtype, is_long);
        forward_init(&f, &rng, &p);
        for (int isa = 0; (f.ops = cp_kernel_cpu_at(isa)) != NULL; isa++) {
            const struct oracle_input *in = &p.in;
            if (!f.ops->is_available() ||
                f.ops->describe(dtype, in->dim, in->value_dim, &f.format) != CP_OK) {
                continue;
            }
            TEST_CONTEXT("%s %s B %d rows %d of %d keys %d in %d heads %d of %d/%d D "
                         "%d Dv %d at %d%s%d mask %d lse %d",
                         f.ops->name, cp_dtype_name(dtype), (int)in->batch,
                         (int)f.cut.rows, (int)in->rows, (int)in->keys, f.parts,
                         (int)f.cut.heads, (int)in->heads, (int)in->kv_heads,
                         (int)in->dim, (int)in->value_dim, (int)in->q_first,
                         in->is_causal ? " causal " : "/", (int)in->k_first,
                         in->mask != NULL, f.has_lse);
            check_forward(&f, &rng);
        }
        (void)test_rng_next(&rng);
        blocks_end(first);
        problem_free(&p);
    }
}

TEST(attend_begins_and_ends_by_itself)
{
    many_forwards(CP_DTYPE_FLOAT32, 9, 60, false);
    many_forwards(CP_DTYPE_FLOAT64, 10, 40, false);
    many_forwards(CP_DTYPE_BFLOAT16, 11, 60, false);
    many_forwards(CP_DTYPE_FLOAT16, 12, 40, false);
}

TEST(attend_begins_and_ends_by_itself_with_many_keys)
{
    many_forwards(CP_DTYPE_FLOAT32, 13, 6, true);
    many_forwards(CP_DTYPE_FLOAT64, 14, 4, true);
    many_forwards(CP_DTYPE_BFLOAT16, 15, 6, true);
    many_forwards(CP_DTYPE_FLOAT16, 16, 4, true);
}

/* The gradients of one call: dq, dk, dv in `out`, [41 * 5], [37 * 5], [37 * 3]. Every third row and the last have no
 * gradient, and hold `filler`. */
static void grad_beside(const struct cp_kernel_ops *ops, enum cp_dtype dtype,
                        double filler, double *out)
{
    enum { ROWS_OF_Q = 41, KEYS = 37, DIMS = 5, VALUES = 3 };
    const enum cp_dtype sum = cp_dtype_sum(dtype);
    struct test_rng rng = test_rng_init(8);
    struct cp_format format;
    double q[ROWS_OF_Q * DIMS], k[KEYS * DIMS], v[KEYS * VALUES],
        dout[ROWS_OF_Q * VALUES], lse[ROWS_OF_Q], delta[ROWS_OF_Q],
        zeros[ROWS_OF_Q * DIMS] = {0};
    double *const all[] = {q, k, v, dout, lse, delta};
    const int sizes[] = {ROWS_OF_Q * DIMS,   KEYS * DIMS, KEYS * VALUES,
                         ROWS_OF_Q * VALUES, ROWS_OF_Q,   ROWS_OF_Q};
    for (int i = 0; i < 6; i++) {
        for (int j = 0; j < sizes[i]; j++) {
            all[i][j] = (double)test_rng_float(&rng);
        }
    }
    for (int row = 0; row < ROWS_OF_Q; row++) {
        if (row % 3 != 0 && row != ROWS_OF_Q - 1) {
            continue;
        }
        lse[row] = -HUGE_VAL;
        delta[row] = filler;
        for (int d = 0; d < DIMS; d++) {
            q[row * DIMS + d] = filler;
        }
        for (int d = 0; d < VALUES; d++) {
            dout[row * VALUES + d] = filler;
        }
    }
    REQUIRE(ops->describe(dtype, DIMS, VALUES, &format) == CP_OK);
    struct cp_grad_args args = {
        .q = tensor(&rng, dtype, 1, ROWS_OF_Q, 1, DIMS, q),
        .k = tensor(&rng, dtype, 1, KEYS, 1, DIMS, k),
        .v = tensor(&rng, dtype, 1, KEYS, 1, VALUES, v),
        .dout = tensor(&rng, dtype, 1, ROWS_OF_Q, 1, VALUES, dout),
        .lse = tensor(&rng, sum, 1, ROWS_OF_Q, 1, 1, lse),
        .delta = tensor(&rng, sum, 1, ROWS_OF_Q, 1, 1, delta),
        .dq = tensor(&rng, sum, 1, ROWS_OF_Q, 1, DIMS, zeros),
        .dk = tensor(&rng, sum, 1, KEYS, 1, DIMS, zeros),
        .dv = tensor(&rng, sum, 1, KEYS, 1, VALUES, zeros),
        .place = {.heads_per_kv = 1},
        .scale = 0.4,
        .scratch = block_new(format.grad_scratch_bytes, 0xff),
    };
    CHECK(ops->grad(&args, NULL) == CP_OK);
    view_read(&args.dq, out);
    view_read(&args.dk, out + sizes[0]);
    view_read(&args.dv, out + sizes[0] + sizes[1]);
    blocks_end(0);
}

TEST(rows_without_a_gradient_may_hold_anything)
{
    const enum cp_dtype dtypes[] = {CP_DTYPE_FLOAT32, CP_DTYPE_FLOAT64,
                                    CP_DTYPE_BFLOAT16, CP_DTYPE_FLOAT16};
    const double fillers[] = {(double)NAN, HUGE_VAL, -1e4};
    enum { NUMBERS = 41 * 5 + 37 * 5 + 37 * 3 };
    const struct cp_kernel_ops *ops = NULL;
    for (int isa = 0; (ops = cp_kernel_cpu_at(isa)) != NULL; isa++) {
        for (size_t i = 0; i < sizeof dtypes / sizeof dtypes[0]; i++) {
            struct cp_format format;
            double want[NUMBERS], got[NUMBERS];
            if (!ops->is_available() ||
                ops->describe(dtypes[i], 5, 3, &format) != CP_OK) {
                continue;
            }
            grad_beside(ops, dtypes[i], 0.0, want);
            for (int j = 0; j < 3; j++) {
                TEST_CONTEXT("%s %s beside %g", ops->name, cp_dtype_name(dtypes[i]),
                             fillers[j]);
                grad_beside(ops, dtypes[i], fillers[j], got);
                CHECK_EQ_BYTES(got, want, sizeof want);
            }
        }
    }
}

/* ---- the list ---- */

TEST(list_is_ascending_and_named)
{
    int count = 0;
    for (const struct cp_kernel_ops *ops = NULL;
         (ops = cp_kernel_cpu_at(count)) != NULL; count++) {
        CHECK(ops->abi == CP_KERNEL_ABI);
        CHECK_EQ_STR(cp_kernel_cpu_name(count), ops->name);
        int isa = -1;
        if (ops->is_available()) {
            CHECK(cp_kernel_cpu_parse(ops->name, &isa) == CP_OK);
            CHECK_EQ_I64(isa, count);
        } else {
            CHECK(cp_kernel_cpu_parse(ops->name, &isa) == CP_ERR_VALUE);
            CHECK_EQ_I64(isa, -1);
        }
    }
    CHECK(count >= 1);
    CHECK_EQ_STR(cp_kernel_cpu_name(0), "generic");
    CHECK_EQ_STR(cp_kernel_cpu_name(-1), "unknown");
    CHECK_EQ_STR(cp_kernel_cpu_name(count), "unknown");
    CHECK(cp_kernel_cpu_best() >= 0 && cp_kernel_cpu_best() < count);
    CHECK(cp_kernel_cpu_at(cp_kernel_cpu_best())->is_available());
    int isa = -1;
    CHECK(cp_kernel_cpu_parse(NULL, &isa) == CP_OK);
    CHECK_EQ_I64(isa, cp_kernel_cpu_best());
    CHECK(cp_kernel_cpu_parse("AVX-1024", &isa) == CP_ERR_VALUE);
    CHECK_STR_HAS(cp_last_error()->text, "AVX-1024");
    CHECK_STR_HAS(cp_last_error()->text, "generic");
}

TEST(backends_of_the_host)
{
    for (int i = 0; i < CP_BACKEND_COUNT; i++) {
        enum cp_backend backend = (enum cp_backend)i;
        const struct cp_kernel_ops *ops = NULL;
        struct cp_format format;
        enum cp_code code =
            cp_kernel_cpu_select(99, backend, CP_DTYPE_FLOAT32, 8, 8, &ops, &format);
        CHECK_EQ_I64(code, cp_backend_is_on_host(backend) ? CP_OK : CP_ERR_VALUE);
        CHECK((code == CP_OK) == (ops != NULL));
        if (code != CP_OK) {
            CHECK_STR_HAS(cp_last_error()->text, cp_backend_name(backend));
            CHECK_STR_HAS(cp_last_error()->text,
                          "cannot run on cpu; compatible ones are native, "
                          "_native_math, _native_flash");
        }
    }
}

TEST(selection)
{
    for (int limit = -1; limit <= cp_kernel_cpu_best() + 2; limit++) {
        for (int dtype = CP_DTYPE_NONE; dtype < CP_DTYPE_COUNT; dtype++) {
            const struct cp_kernel_ops *ops = NULL;
            struct cp_format format = {0}, described = {0};
            enum cp_code code = cp_kernel_cpu_select(
                limit, CP_BACKEND_NATIVE, (enum cp_dtype)dtype, 65, 3, &ops, &format);
            CHECK_EQ_I64(code, cp_dtype_attends((enum cp_dtype)dtype)
                                   ? CP_OK
                                   : CP_ERR_UNSUPPORTED);
            if (code != CP_OK) {
                CHECK(ops == NULL);
                continue;
            }
            if (!CHECK(ops != NULL)) {
                return;
            }
            CHECK(ops->is_available());
            CHECK(limit > 0 || ops == &cp_kernel_generic_ops);
            CHECK(ops->describe((enum cp_dtype)dtype, 65, 3, &described) == CP_OK);
            CHECK(format.id != 0 && format.id == described.id);
            CHECK(format.k.row_align >= 1 && format.v.row_align >= 1 &&
                  format.state.row_align >= 1);
        }
    }
    const struct cp_kernel_ops *ops = NULL;
    struct cp_format format;
    CHECK(cp_kernel_cpu_select(99, CP_BACKEND_NATIVE, CP_DTYPE_FLOAT32, 0, 8, &ops,
                               &format) == CP_ERR_UNSUPPORTED);
    CHECK(cp_kernel_cpu_select(99, CP_BACKEND_NATIVE, CP_DTYPE_FLOAT32, 8, 1 << 20,
                               &ops, &format) == CP_ERR_UNSUPPORTED);
    CHECK(ops == NULL);
}
