/* Steps spread over threads give what one thread gives: the same bytes, and gradients whose sums were taken in another
 * order. */
#include "base/mem.h"
#include "exec/spread.h"
#include "kernel/kernel_cpu.h"
#include "layout.h"
#include "tensor/convert.h"
#include "test.h"

enum { BLOCKS_MOST = 64, THREADS_MOST = 5 };

static void *blocks[BLOCKS_MOST];
static int block_count;

static char *block_new(int64_t bytes)
{
    void *block = NULL;
    if (block_count == BLOCKS_MOST ||
        cp_mem_create((size_t)bytes, "a test", &block) != CP_OK) {
        abort();
    }
    blocks[block_count++] = block;
    return block;
}

static void blocks_end(int first)
{
    while (block_count > first) {
        cp_mem_destroy(&blocks[--block_count]);
    }
}

static void put(char *to, enum cp_dtype dtype, float x)
{
    uint16_t half = dtype == CP_DTYPE_FLOAT16 ? cp_f32_to_f16(x) : cp_f32_to_bf16(x);
    double wide = (double)x;
    bool truth = x > -0.5f;
    switch (cp_dtype_bytes(dtype)) {
    case 8:
        memcpy(to, &wide, sizeof wide);
        break;
    case 4:
        memcpy(to, &x, sizeof x);
        break;
    case 2:
        memcpy(to, &half, sizeof half);
        break;
    default:
        memcpy(to, &truth, sizeof truth);
    }
}

/* In any layout, with random numbers, or with zeros. */
static struct cp_view tensor(struct test_rng *rng, enum cp_dtype dtype, int64_t n0,
                             int64_t n1, int64_t n2, int64_t n3, bool is_random)
{
    const int64_t n[CP_AXES] = {n0, n1, n2, n3};
    int64_t first = 0, bytes = 0;
    struct cp_view view = layout_any(rng, dtype, n, &first, &bytes);
    view.data = block_new(bytes) + first;
    for (int64_t i = 0; is_random && i < cp_view_count(&view); i++) {
        int64_t rest = i;
        char *at = view.data;
        for (int axis = CP_AXES - 1; axis >= 0; axis--) {
            at += rest % n[axis] * view.stride[axis];
            rest /= n[axis];
        }
        put(at, dtype, test_rng_float(rng));
    }
    return view;
}

static struct cp_view panels(enum cp_dtype dtype, const struct cp_panel *panel,
                             const struct cp_view *like, int64_t dims)
{
    int64_t bytes = cp_panel_bytes(panel, like->n[1]);
    return (struct cp_view){
        .data = block_new(like->n[0] * like->n[2] * bytes),
        .dtype = dtype,
        .n = {like->n[0], like->n[1], like->n[2], dims},
        .stride = {like->n[2] * bytes, 0, bytes, 0},
    };
}

static int64_t panels_bytes(const struct cp_view *view)
{
    return view->n[0] * view->stride[0];
}

/* The same numbers, copied out of any layout. */
static void *dense(const struct cp_view *view, int64_t *bytes)
{
    struct cp_view to = cp_view_compact(NULL, view->dtype, view->n[0], view->n[1],
                                        view->n[2], view->n[3]);
    *bytes = cp_view_count(view) * cp_dtype_bytes(view->dtype);
    to.data = block_new(*bytes);
    struct cp_device *cpu = cp_device_cpu();
    CHECK_EQ_I64(cp_device_copy(cpu, &to, view, NULL), CP_OK);
    return to.data;
}

static void check_same(const struct cp_view *got, const struct cp_view *want)
{
    int64_t bytes = 0, same = 0;
    void *a = dense(got, &bytes), *b = dense(want, &same);
    CHECK_EQ_I64(bytes, same);
    CHECK_EQ_BYTES(a, b, (size_t)bytes);
}

/* Sums of another order. */
static void check_near(const struct cp_view *got, const struct cp_view *want)
{
    int64_t bytes = 0;
    const char *a = dense(got, &bytes), *b = dense(want, &bytes);
    bool is_double = got->dtype == CP_DTYPE_FLOAT64;
    double top = 0, worst = 0;
    for (int64_t i = 0; i < cp_view_count(got); i++) {
        double x = is_double ? ((const double *)(const void *)a)[i]
                             : (double)((const float *)(const void *)a)[i];
        double y = is_double ? ((const double *)(const void *)b)[i]
                             : (double)((const float *)(const void *)b)[i];
        top = fabs(y) > top ? fabs(y) : top;
        worst = !(fabs(x - y) <= worst) ? fabs(x - y) : worst;
    }
    CHECK(worst <= (is_double ? 1e-14 : 3e-6) * top);
}

struct call {
    enum cp_dtype dtype;
    struct cp_format format;
    struct cp_attend_args attend;
    struct cp_finish_args finish;
    struct cp_view out, lse; /* as attention itself ends */
    struct cp_delta_args delta;
    struct cp_grad_args grad;
    struct cp_view k, v; /* plain */
};

struct sizes {
    int64_t batch, rows, keys, heads, head_first, group, head_dim, value_dim;
};

static struct sizes random_sizes(struct test_rng *rng)
{
    const int64_t dims[] = {16, 40, 64};
    return (struct sizes){
        .batch = test_rng_range(rng, 1, 2),
        .rows = test_rng_range(rng, 90, 400),
        .keys = test_rng_range(rng, 90, 400),
        .heads = test_rng_range(rng, 1, 6),
        .head_first = test_rng_range(rng, 0, 8),
        .group = test_rng_range(rng, 1, 3),
        .head_dim = dims[test_rng_range(rng, 0, 2)],
        .value_dim = dims[test_rng_range(rng, 0, 2)],
    };
}

/* Inputs, which all runs share. The heads need not be all of their key/value heads. */
static void call_init(struct call *call, struct test_rng *rng,
                      const struct cp_kernel_ops *kernel, enum cp_dtype dtype,
                      const struct sizes *sizes)
{
    int64_t B = sizes->batch, rows = sizes->rows, keys = sizes->keys;
    int64_t D = sizes->head_dim, Dv = sizes->value_dim, heads = sizes->heads;
    int64_t kv_first = sizes->head_first / sizes->group;
    int64_t kv_last = (sizes->head_first + heads - 1) / sizes->group;
    int64_t kv = heads > 0 ? kv_last - kv_first + 1 : 0;
    enum cp_dtype sum = cp_dtype_sum(dtype);
    memset(call, 0, sizeof *call);
    call->dtype = dtype;
    REQUIRE(kernel->describe(dtype, D, Dv, &call->format) == CP_OK);
    struct cp_view q = tensor(rng, dtype, B, rows, heads, D, true);
    struct cp_view mask = {.data = NULL};
    call->k = tensor(rng, dtype, B, keys, kv, D, true);
    call->v = tensor(rng, dtype, B, keys, kv, Dv, true);
    if (test_rng_range(rng, 0, 1) == 1) {
        bool is_of[CP_AXES];
        for (int axis = 0; axis < CP_AXES; axis++) {
            is_of[axis] = test_rng_range(rng, 0, 1) == 1;
        }
        mask = tensor(rng, test_rng_range(rng, 0, 1) == 1 ? CP_DTYPE_BOOL : dtype,
                      is_of[0] ? B : 1, is_of[1] ? heads : 1, is_of[2] ? rows : 1,
                      is_of[3] ? keys : 1, true);
    }
    struct cp_place place = {
        .q_first = test_rng_range(rng, 0, 300),
        .k_first = test_rng_range(rng, 0, 100),
        .head_first = sizes->head_first,
        .kv_head_first = kv_first,
        .heads_per_kv = sizes->group,
        .is_causal = test_rng_range(rng, 0, 1) == 1,
    };
    TEST_CONTEXT(
        "%s %s B %d rows %d keys %d heads %d+%d/%d D %d Dv %d causal %d mask %d",
        kernel->name, cp_dtype_name(dtype), (int)B, (int)rows, (int)keys,
        (int)place.head_first, (int)heads, (int)place.heads_per_kv, (int)D, (int)Dv,
        place.is_causal, mask.data != NULL);
    call->attend = (struct cp_attend_args){
        .q = q, .mask = mask, .place = place, .scale = 1.0 / sqrt((double)D)};
    call->delta = (struct cp_delta_args){
        .out = tensor(rng, dtype, B, rows, heads, Dv, true),
        .dout = tensor(rng, dtype, B, rows, heads, Dv, true),
        .dlse = tensor(rng, sum, B, rows, heads, 1, true),
    };
    call->grad = (struct cp_grad_args){
        .q = q,
        .k = call->k,
        .v = call->v,
        .dout = call->delta.dout,
        .lse = tensor(rng, sum, B, rows, heads, 1, true),
        .mask = mask,
        .place = place,
        .scale = call->attend.scale,
    };
}

/* One run: its own outputs, in layouts of their own. */
static void call_run(struct call *call, struct test_rng *rng,
                     const struct cp_kernel_ops *kernel, struct cp_pool *pool)
{
    const struct cp_view *q = &call->attend.q, *k = &call->k, *v = &call->v;
    const struct cp_format *format = &call->format;
    enum cp_dtype sum = cp_dtype_sum(call->dtype);
    int64_t scratch = format->scratch_bytes > format->grad_scratch_bytes
                          ? format->scratch_bytes
                          : format->grad_scratch_bytes;
    struct cp_spread spread = {
        .pool = pool,
        .device = cp_device_cpu(),
        .kernel = kernel,
        .format = format,
        .scratch_bytes = cp_round_up(scratch, CP_PANEL_ALIGN),
    };
    int64_t threads = cp_pool_threads(pool);
    char *room = block_new(spread.scratch_bytes * threads);
    memset(room, 0xff, (size_t)(spread.scratch_bytes * threads));
    call->attend.k = panels(call->dtype, &format->k, k, k->n[3]);
    call->attend.v = panels(call->dtype, &format->v, v, v->n[3]);
    call->attend.state = panels(call->dtype, &format->state, q, v->n[3]);
    call->attend.scratch = call->grad.scratch = room;
    CHECK_EQ_I64(cp_spread_pack(&spread, true, &call->attend.k, k, NULL), CP_OK);
    CHECK_EQ_I64(cp_spread_pack(&spread, false, &call->attend.v, v, NULL), CP_OK);
    struct cp_view *state = &call->attend.state;
    memset(state->data, 0xee, (size_t)panels_bytes(state));
    CHECK_EQ_I64(cp_spread_zero(&spread, state->data, panels_bytes(state), NULL),
                 CP_OK);
    CHECK_EQ_I64(cp_spread_attend(&spread, &call->attend, NULL), CP_OK);
    call->finish = (struct cp_finish_args){
        .state = *state,
        .out = tensor(rng, call->dtype, q->n[0], q->n[1], q->n[2], v->n[3], false),
        .lse = tensor(rng, sum, q->n[0], q->n[1], q->n[2], 1, false),
    };
    CHECK_EQ_I64(cp_spread_finish(&spread, &call->finish, NULL), CP_OK);
    struct cp_attend_args within = call->attend;
    memset(state->data, 0xff, (size_t)panels_bytes(state));
    within.is_first = true;
    within.out = call->out =
        tensor(rng, call->dtype, q->n[0], q->n[1], q->n[2], v->n[3], false);
    within.lse = call->lse = tensor(rng, sum, q->n[0], q->n[1], q->n[2], 1, false);
    CHECK_EQ_I64(cp_spread_attend(&spread, &within, NULL), CP_OK);
    call->delta.delta = call->grad.delta =
        tensor(rng, sum, q->n[0], q->n[1], q->n[2], 1, false);
    CHECK_EQ_I64(cp_spread_delta(&spread, &call->delta, NULL), CP_OK);
    call->grad.dq = tensor(rng, sum, q->n[0], q->n[1], q->n[2], q->n[3], false);
    call->grad.dk = tensor(rng, sum, k->n[0], k->n[1], k->n[2], k->n[3], false);
    call->grad.dv = tensor(rng, sum, v->n[0], v->n[1], v->n[2], v->n[3], false);
    CHECK_EQ_I64(cp_spread_grad(&spread, &call->grad, NULL), CP_OK);
}

static void check_call(const struct call *got, const struct call *want)
{
    const struct cp_attend_args *a = &got->attend, *b = &want->attend;
    CHECK_EQ_BYTES(a->k.data, b->k.data, (size_t)panels_bytes(&a->k));
    CHECK_EQ_BYTES(a->v.data, b->v.data, (size_t)panels_bytes(&a->v));
    /* Of the state, what belongs to a row: the rest of a group is whatever it was. */
    check_same(&got->finish.out, &want->finish.out);
    check_same(&got->finish.lse, &want->finish.lse);
    check_same(&got->out, &want->finish.out);
    check_same(&got->lse, &want->finish.lse);
    check_same(&got->delta.delta, &want->delta.delta);
    check_near(&got->grad.dq, &want->grad.dq);
    check_near(&got->grad.dk, &want->grad.dk);
    check_near(&got->grad.dv, &want->grad.dv);
}

static const enum cp_dtype dtypes[] = {CP_DTYPE_FLOAT32, CP_DTYPE_FLOAT64,
                                       CP_DTYPE_BFLOAT16, CP_DTYPE_FLOAT16};
enum { DTYPES = sizeof dtypes / sizeof dtypes[0] };

/* With one thread, and with those of the pool, for each kernel of the dtype. */
static void check_kernels(struct test_rng *rng, struct cp_pool *pool,
                          enum cp_dtype dtype, const struct sizes *fixed)
{
    for (int isa = 0; cp_kernel_cpu_at(isa) != NULL; isa++) {
        const struct cp_kernel_ops *kernel = cp_kernel_cpu_at(isa);
        struct cp_format format;
        if (!kernel->is_available() ||
            kernel->describe(dtype, 64, 64, &format) != CP_OK) {
            continue;
        }
        struct sizes sizes = fixed != NULL ? *fixed : random_sizes(rng);
        struct call want, got;
        call_init(&want, rng, kernel, dtype, &sizes);
        got = want;
        call_run(&want, rng, kernel, NULL);
        call_run(&got, rng, kernel, pool);
        check_call(&got, &want);
        blocks_end(0);
    }
}

TEST(attention_is_the_same_with_threads)
{
    struct test_rng rng = test_rng_init(1);
    for (int threads = 2; threads <= THREADS_MOST; threads++) {
        struct cp_pool *pool = NULL;
        REQUIRE(cp_pool_create(threads, &pool) == CP_OK);
        for (int i = 0; i < DTYPES; i++) {
            check_kernels(&rng, pool, dtypes[i], NULL);
        }
        cp_pool_destroy(&pool);
    }
}

/* Long in one axis, short or nothing in another. */
TEST(edges_are_the_same_with_threads)
{
    static const struct sizes edges[] = {
        {1500, 1, 48, 1, 0, 1, 16, 16}, {100, 16, 16, 3, 4, 3, 8, 40},
        {1, 1, 2200, 40, 3, 5, 16, 16}, {1, 3000, 1, 6, 1, 4, 64, 64},
        {1, 97, 97, 9, 0, 9, 16, 16},   {2, 0, 90, 2, 0, 1, 16, 16},
        {2, 90, 0, 2, 0, 1, 16, 16},    {0, 90, 90, 2, 0, 1, 16, 16},
        {2, 90, 90, 0, 0, 1, 16, 16},
    };
    struct test_rng rng = test_rng_init(4);
    struct cp_pool *pool = NULL;
    REQUIRE(cp_pool_create(3, &pool) == CP_OK);
    for (size_t i = 0; i < sizeof edges / sizeof edges[0]; i++) {
        check_kernels(&rng, pool, dtypes[test_rng_range(&rng, 0, DTYPES - 1)],
                      &edges[i]);
    }
    cp_pool_destroy(&pool);
}

/* ---- what a piece is ---- */

static _Atomic int64_t least_rows, deltas;

static enum cp_code note_delta(const struct cp_delta_args *args,
                               struct cp_stream *stream)
{
    (void)stream;
    int64_t rows = args->out.n[1];
    atomic_fetch_add(&deltas, 1);
    if (rows < atomic_load(&least_rows)) {
        atomic_store(&least_rows, rows); /* all are alike */
    }
    return CP_OK;
}

/* A kernel takes rows by the vector: a batch of short sequences is cut between them. */
TEST(delta_is_cut_where_it_is_long)
{
    static const struct cp_kernel_ops kernel = {.delta = note_delta};
    struct cp_pool *pool = NULL;
    REQUIRE(cp_pool_create(3, &pool) == CP_OK);
    struct cp_spread spread = {.pool = pool, .kernel = &kernel};
    struct cp_view out = cp_view_compact(block_new((int64_t)1000 * 16 * 64 * 4),
                                         CP_DTYPE_FLOAT32, 1000, 16, 1, 64);
    struct cp_delta_args args = {.out = out, .dout = out};
    atomic_store(&least_rows, INT64_MAX);
    atomic_store(&deltas, 0);
    CHECK_EQ_I64(cp_spread_delta(&spread, &args, NULL), CP_OK);
    CHECK(atomic_load(&deltas) > 3);
    CHECK_EQ_I64(atomic_load(&least_rows), 16);
    blocks_end(0);
    cp_pool_destroy(&pool);
}

TEST(copies_and_sums_are_the_same_with_threads)
{
    struct test_rng rng = test_rng_init(2);
    struct cp_pool *pool = NULL;
    REQUIRE(cp_pool_create(3, &pool) == CP_OK);
    for (int i = 0; i < 12; i++) {
        struct cp_spread spread = {.pool = pool, .device = cp_device_cpu()};
        int64_t n[3], dims = test_rng_range(&rng, 30, 70);
        for (int axis = 0; axis < 3; axis++) {
            n[axis] = test_rng_range(&rng, 1, 3);
        }
        n[test_rng_range(&rng, 0, 2)] = test_rng_range(&rng, 900, 1500);
        struct cp_view src =
            tensor(&rng, CP_DTYPE_FLOAT32, n[0], n[1], n[2], dims, true);
        struct cp_view one =
            tensor(&rng, CP_DTYPE_FLOAT32, n[0], n[1], n[2], dims, false);
        struct cp_view half =
            tensor(&rng, CP_DTYPE_BFLOAT16, n[0], n[1], n[2], dims, false);
        struct cp_view want = half, two = one;
        want.data = block_new(cp_view_count(&half) * 8);
        want = cp_view_compact(want.data, CP_DTYPE_BFLOAT16, n[0], n[1], n[2], dims);
        two = cp_view_compact(block_new(cp_view_count(&one) * 4), CP_DTYPE_FLOAT32,
                              n[0], n[1], n[2], dims);
        struct cp_device *cpu = cp_device_cpu();
        const struct cp_copy copies[] = {{.dst = one, .src = src},
                                         {.dst = half, .src = src}};
        CHECK_EQ_I64(cp_spread_copy(&spread, copies, 2, NULL), CP_OK);
        check_same(&one, &src);
        CHECK_EQ_I64(cp_device_copy(cpu, &want, &src, NULL), CP_OK);
        check_same(&half, &want);
        CHECK_EQ_I64(cp_spread_add(&spread, &one, &src, NULL), CP_OK);
        CHECK_EQ_I64(cp_device_copy(cpu, &two, &src, NULL), CP_OK);
        CHECK_EQ_I64(cpu->ops->add(cpu, &two, &src, NULL), CP_OK);
        check_same(&one, &two);
        blocks_end(0);
    }
    cp_pool_destroy(&pool);
}

/* What a device refuses comes back from whichever thread met it. */
TEST(an_error_of_one_thread_is_the_steps)
{
    struct test_rng rng = test_rng_init(3);
    struct cp_pool *pool = NULL;
    REQUIRE(cp_pool_create(3, &pool) == CP_OK);
    struct cp_spread spread = {.pool = pool, .device = cp_device_cpu()};
    struct cp_view src = tensor(&rng, CP_DTYPE_FLOAT32, 1, 2000, 4, 64, true);
    struct cp_view dst = tensor(&rng, CP_DTYPE_BOOL, 1, 2000, 4, 64, false);
    const struct cp_copy copy = {.dst = dst, .src = src};
    CHECK_EQ_I64(cp_spread_copy(&spread, &copy, 1, NULL), CP_ERR_INTERNAL);
    CHECK_STR_HAS(cp_last_error()->text, "no conversion from float32 to bool");
    blocks_end(0);
    cp_pool_destroy(&pool);
}
