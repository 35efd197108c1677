/* Contexts of thread ranks: the whole path of a call (gate, agreement, plan, executor)
 * on windows, on the two-sided double and over TCP, many calls in a row, with every way
 * to disagree in between, and with every step of a schedule failing in turn. */
#include "base/mem.h"
#include "comm/comm_self.h"
#include "comm/comm_shm.h"
#include "comm_double.h"
#include "control/gate.h"
#include "exec/context.c"
#include "kernel/kernel_cpu.h"
#include "over_tcp.h"
#include "ranks.h"
#include "scene.h"
#include "tensor/convert.h"
#include "test.h"
#include "world.h"

enum { RESERVED = 1 << 24 };

static void windows_open(struct world *w)
{
    for (int rank = 0; rank < w->size; rank++) {
        CHECK_EQ_I64(cp_window_create(RESERVED, &w->windows[rank]), CP_OK);
    }
}

static void windows_close(struct world *w)
{
    for (int rank = 0; rank < w->size; rank++) {
        cp_window_close(&w->windows[rank]);
    }
}

static enum cp_code windows_join(struct world *w, int rank,
                                 struct cp_context_parts *parts)
{
    world_use_the_host(w, parts);
    return cp_comm_shm_create(w->windows, &w->watch[rank], &parts->comm);
}

static const struct world_transport windows = {
    .name = "windows",
    .open = windows_open,
    .close = windows_close,
    .join = windows_join,
    .leave = world_keep_nothing,
};

static void double_open(struct world *w)
{
    w->shared = double_hub_create(w->size, test_seed, 5);
}

static void double_close(struct world *w)
{
    struct double_hub *hub = w->shared;
    double_hub_destroy(&hub);
}

static enum cp_code double_join(struct world *w, int rank,
                                struct cp_context_parts *parts)
{
    world_use_the_host(w, parts);
    return cp_comm_double_create(w->shared, &w->watch[rank], &parts->comm);
}

static const struct world_transport two_sided = {
    .name = "two-sided",
    .open = double_open,
    .close = double_close,
    .join = double_join,
    .leave = world_keep_nothing,
};

static const struct world_transport *const transports[] = {&windows, &two_sided,
                                                           &over_tcp};
enum { TRANSPORTS = sizeof transports / sizeof transports[0] };

static const int shapes[][2] = {{2, 1}, {1, 2}, {3, 1}, {1, 3}, {2, 2}, {3, 2}, {2, 3}};

static void play_all(const struct world_transport *transport, int limit)
{
    for (size_t i = 0; i < sizeof shapes / sizeof shapes[0]; i++) {
        world_play(shapes[i][0], shapes[i][1], transport, CP_ANYTHING, limit, NULL);
        world_play(shapes[i][0], shapes[i][1], transport, CP_EVEN, limit, NULL);
    }
}

TEST(thread_ranks_on_windows)
{
    play_all(&windows, 0);
}

TEST(thread_ranks_on_the_two_sided_double)
{
    play_all(&two_sided, 0);
}

TEST(thread_ranks_over_tcp)
{
    play_all(&over_tcp, 0);
}

TEST(thread_ranks_with_the_best_kernel)
{
    play_all(&windows, cp_kernel_cpu_best());
}

/* ---- disagreement ---- */

/* What the last rank does differently; all ranks must get the same code, and the next
 * call must work. */
enum odd {
    ODD_DTYPE,
    ODD_DIM,
    ODD_BATCH,
    ODD_CAUSAL,
    ODD_SCALE,
    ODD_MASK,
    ODD_OWN_ERROR,
    ODD_OPERATION,
    ODD_ROWS,
    ODDS
};

struct quarrel {
    struct world w;
    enum cp_code codes[ODDS][SCENE_MOST_RANKS];
    int named[ODDS][SCENE_MOST_RANKS];
    bool is_own[ODDS][SCENE_MOST_RANKS];
};

static void make_odd(enum odd odd, struct cp_record *record)
{
    double scale = 0.123;
    switch (odd) {
    case ODD_DTYPE:
        record->call.dtype = CP_DTYPE_FLOAT16;
        break;
    case ODD_DIM:
        record->call.head_dim += 1;
        break;
    case ODD_BATCH:
        record->call.batch += 1;
        break;
    case ODD_CAUSAL:
        record->call.is_causal = !record->call.is_causal;
        break;
    case ODD_SCALE:
        memcpy(&record->call.scale_bits, &scale, sizeof scale);
        break;
    case ODD_MASK:
        record->call.mask_kind = CP_MASK_BOOL;
        record->call.mask_batch = 1;
        record->call.mask_heads = 1;
        record->call.mask_dtype = CP_DTYPE_BOOL;
        break;
    case ODD_OWN_ERROR:
        record->status.code = CP_ERR_BUFFER;
        (void)snprintf(record->status.text, sizeof record->status.text,
                       "q: it has no memory");
        break;
    case ODD_OPERATION:
        record->call.op = CP_OP_GATHER;
        break;
    case ODD_ROWS:
        record->sizes[CP_SIZE_Q_ROWS] += 1;
        break;
    case ODDS:
        break;
    }
}

static void quarrel(int rank, void *arg)
{
    struct quarrel *q = arg;
    struct scene *scene = &q->w.scenes[0];
    struct cp_context *context = q->w.context[rank];
    for (int odd = 0; odd < ODDS; odd++) {
        struct cp_record record;
        scene_record(scene, rank, CP_OP_ATTENTION, &record);
        CHECK_EQ_I64(cp_context_describe(context, &record), CP_OK);
        if (rank == q->w.size - 1) {
            make_odd((enum odd)odd, &record);
        }
        q->codes[odd][rank] = cp_context_begin(context, &record, NULL);
        q->named[odd][rank] = cp_last_error()->rank;
        q->is_own[odd][rank] = cp_context_error_is_own(context);
        CHECK_EQ_I64(world_call(&q->w, rank, scene, CP_OP_ATTENTION), CP_OK);
    }
}

static void quarrel_world(int ring, int ulysses,
                          const struct world_transport *transport)
{
    static struct quarrel q;
    memset(&q, 0, sizeof q);
    world_open(&q.w, ring, ulysses, transport, CP_EVEN, 0);
    uint64_t seed = test_seed;
    do {
        scene_destroy(&q.w.scenes[0]);
        scene_create(&q.w.scenes[0], seed++, ring, ulysses);
    } while (q.w.scenes[0].variant != CP_EVEN ||
             q.w.scenes[0].mask_kind != CP_MASK_NONE || q.w.scenes[0].is_replicated ||
             q.w.scenes[0].dtype == CP_DTYPE_FLOAT16);
    ranks_as_threads(q.w.size, quarrel, &q);
    for (int odd = 0; odd < ODDS; odd++) {
        enum cp_code expected = odd == ODD_DTYPE       ? CP_ERR_TYPE
                                : odd == ODD_OWN_ERROR ? CP_ERR_BUFFER
                                                       : CP_ERR_VALUE;
        for (int rank = 0; rank < q.w.size; rank++) {
            TEST_CONTEXT("odd %d, rank %d of %d", odd, rank, q.w.size);
            CHECK_EQ_I64(q.codes[odd][rank], expected);
            CHECK_EQ_I64(q.named[odd][rank], q.w.size - 1);
            CHECK_EQ_I64(q.is_own[odd][rank],
                         odd == ODD_OWN_ERROR && rank == q.w.size - 1);
        }
    }
    CHECK(scene_judge(&q.w.scenes[0], CP_OP_ATTENTION));
    scene_destroy(&q.w.scenes[0]);
    world_close(&q.w);
}

TEST(thread_ranks_that_disagree_get_the_same_error_and_go_on)
{
    for (int t = 0; t < TRANSPORTS; t++) {
        quarrel_world(2, 1, transports[t]);
        quarrel_world(3, 1, transports[t]);
        quarrel_world(1, 3, transports[t]);
        quarrel_world(3, 2, transports[t]);
    }
}

/* ---- gather ---- */

/* Begins, and lacks memory for the output on one rank, or on all: all get the error, one of them as its own,
 * and nobody is in a call any more. Then begins for good. */
static void begin_gather(struct world *w, int rank, int round,
                         const struct cp_record *record, const struct cp_plan **plan)
{
    struct cp_context *context = w->context[rank];
    struct cp_status error = {.code = CP_ERR_NO_MEMORY, .rank = rank};
    struct cp_view none[CP_TENSORS] = {{.data = NULL}};
    int odd = round % (w->size + 1); /* w->size: all of them */
    bool is_odd = odd == rank || odd == w->size;
    (void)snprintf(error.text, sizeof error.text, "no room for %d", round);
    CHECK_EQ_I64(cp_context_begin(context, record, plan), CP_OK);
    CHECK_EQ_I64(cp_context_confirm(context, is_odd ? &error : NULL), CP_ERR_NO_MEMORY);
    CHECK_EQ_I64(cp_last_error()->rank, odd == w->size ? 0 : odd);
    CHECK_STR_HAS(cp_last_error()->text, error.text);
    CHECK_EQ_I64(cp_context_error_is_own(context), odd % w->size == rank);
    CHECK_EQ_I64(cp_context_confirm(context, NULL), CP_ERR_INTERNAL);
    CHECK_EQ_I64(cp_context_execute(context, none, NULL), CP_ERR_INTERNAL);
    CHECK_EQ_I64(cp_context_check(context), CP_OK);
    CHECK_EQ_I64(cp_context_begin(context, record, plan), CP_OK);
    CHECK_EQ_I64(cp_context_confirm(context, NULL), CP_OK);
    CHECK(!cp_context_error_is_own(context));
}

static void gather(int rank, void *arg)
{
    struct world *w = arg;
    for (int round = 0; round < 50; round++) {
        int64_t sizes[SCENE_MOST_RANKS];
        int64_t all = 0;
        for (int r = 0; r < w->size; r++) {
            sizes[r] = (r * 7 + round * 3) % 5;
            all += sizes[r];
        }
        int64_t first = 0;
        for (int r = 0; r < rank; r++) {
            first += sizes[r];
        }
        int32_t share[3 * 4 * 2];
        int32_t whole[3 * 64 * 2];
        struct cp_record record = {
            .call = {.op = CP_OP_GATHER, .dtype = CP_DTYPE_INT32, .ndim = 3, .dim = 1}};
        record.call.extent[0] = 3;
        record.call.extent[2] = 2;
        record.sizes[CP_SIZE_ROWS] = sizes[rank];
        for (int64_t o = 0; o < 3; o++) {
            for (int64_t i = 0; i < sizes[rank] * 2; i++) {
                share[o * sizes[rank] * 2 + i] =
                    (int32_t)(round * 10000 + o * 1000 + first * 2 + i);
            }
        }
        const struct cp_plan *plan = NULL;
        struct cp_view tensors[CP_TENSORS] = {{.data = NULL}};
        CHECK_EQ_I64(cp_context_describe(w->context[rank], &record), CP_OK);
        begin_gather(w, rank, round, &record, &plan);
        CHECK_EQ_I64(plan->cut[w->size - 1].first + plan->cut[w->size - 1].count, all);
        tensors[CP_TENSOR_SHARE] =
            cp_view_compact(share, CP_DTYPE_INT32, 3, sizes[rank], 1, 2);
        tensors[CP_TENSOR_WHOLE] = cp_view_compact(whole, CP_DTYPE_INT32, 3, all, 1, 2);
        memset(whole, 0xff, sizeof whole);
        CHECK_EQ_I64(cp_context_execute(w->context[rank], tensors, NULL), CP_OK);
        for (int64_t o = 0; o < 3; o++) {
            for (int64_t i = 0; i < all * 2; i++) {
                CHECK_EQ_I64(whole[o * all * 2 + i], round * 10000 + o * 1000 + i);
            }
        }
    }
}

TEST(thread_ranks_gather_any_sizes)
{
    for (size_t i = 0; i < sizeof shapes / sizeof shapes[0]; i++) {
        for (int t = 0; t < TRANSPORTS; t++) {
            struct world w;
            world_open(&w, shapes[i][0], shapes[i][1], transports[t], CP_ANYTHING, 0);
            ranks_as_threads(w.size, gather, &w);
            world_close(&w);
        }
    }
}

/* ---- reduce_scatter ---- */

/* Integers; bfloat16 has them, but not their sums on the way. */
static float part_of(int round, int rank, int64_t element)
{
    return rank == 0 ? 512.0F : (float)((element * 7 + rank * 5 + round) % 11);
}

static void reduce_scatter_round(struct world *w, int rank, int round,
                                 enum cp_dtype dtype)
{
    enum { OUTER = 3, INNER = 2, MOST_ROWS = 64 };
    struct cp_record record = {.call = {.op = CP_OP_REDUCE_SCATTER,
                                        .dtype = (int32_t)dtype,
                                        .ndim = 3,
                                        .dim = 1,
                                        .extent = {OUTER, 0, INNER}}};
    int64_t first = 0;
    int64_t all = 0;
    for (int r = 0; r < w->size; r++) {
        int64_t own = (r * 7 + round * 3) % 5;
        first += r < rank ? own : 0;
        all += own;
        record.sizes[CP_SIZE_ROWS] = r == rank ? own : record.sizes[CP_SIZE_ROWS];
    }
    record.call.extent[1] = all;
    int64_t rows = record.sizes[CP_SIZE_ROWS];
    float given[OUTER * MOST_ROWS * INNER];
    float got[OUTER * MOST_ROWS * INNER] = {0};
    uint16_t half[2][OUTER * MOST_ROWS * INNER];
    bool is_half = dtype == CP_DTYPE_BFLOAT16;
    for (int64_t i = 0; i < OUTER * all * INNER; i++) {
        given[i] = part_of(round, rank, i);
        half[0][i] = cp_f32_to_bf16(given[i]);
    }
    struct cp_view tensors[CP_TENSORS] = {{.data = NULL}};
    CHECK_EQ_I64(cp_context_describe(w->context[rank], &record), CP_OK);
    CHECK_EQ_I64(cp_context_begin(w->context[rank], &record, NULL), CP_OK);
    tensors[CP_TENSOR_WHOLE] =
        cp_view_compact(is_half ? (void *)half[0] : given, dtype, OUTER, all, 1, INNER);
    tensors[CP_TENSOR_SHARE] =
        cp_view_compact(is_half ? (void *)half[1] : got, dtype, OUTER, rows, 1, INNER);
    CHECK_EQ_I64(cp_context_execute(w->context[rank], tensors, NULL), CP_OK);
    for (int64_t o = 0; o < OUTER; o++) {
        for (int64_t i = 0; i < rows * INNER; i++) {
            float want = 0.0F;
            for (int r = 0; r < w->size; r++) {
                want += part_of(round, r, (o * all + first) * INNER + i);
            }
            float result = is_half ? cp_bf16_to_f32(half[1][o * rows * INNER + i])
                                   : got[o * rows * INNER + i];
            want = is_half ? cp_bf16_to_f32(cp_f32_to_bf16(want)) : want;
            CHECK(result == want);
        }
    }
}

static void reduce_scatter(int rank, void *arg)
{
    for (int round = 0; round < 50; round++) {
        reduce_scatter_round(arg, rank, round,
                             round % 2 == 0 ? CP_DTYPE_FLOAT32 : CP_DTYPE_BFLOAT16);
    }
}

TEST(thread_ranks_add_up_and_cut_any_sizes)
{
    for (size_t i = 0; i < sizeof shapes / sizeof shapes[0]; i++) {
        for (int t = 0; t < TRANSPORTS; t++) {
            struct world w;
            world_open(&w, shapes[i][0], shapes[i][1], transports[t], CP_ANYTHING, 0);
            ranks_as_threads(w.size, reduce_scatter, &w);
            world_close(&w);
        }
    }
}

/* ---- steady state, allocation failure, abandon ---- */

static void steady(int rank, void *arg)
{
    struct world *w = arg;
    for (int round = 0; round < 8; round++) {
        CHECK_EQ_I64(world_call(w, rank, &w->scenes[0], CP_OP_ATTENTION), CP_OK);
    }
}

TEST(thread_ranks_in_steady_state_allocate_nothing)
{
    for (int t = 0; t < TRANSPORTS; t++) {
        struct world w;
        world_open(&w, 3, 1, transports[t], CP_EVEN, 0);
        uint64_t seed = test_seed;
        do {
            scene_destroy(&w.scenes[0]);
            scene_create(&w.scenes[0], seed++, 3, 1);
        } while (w.scenes[0].variant != CP_EVEN || w.scenes[0].is_replicated);
        CHECK_EQ_I64((int64_t)cp_context_memory(w.context[0]).workspace_bytes, 0);
        CHECK_EQ_I64((int64_t)cp_context_memory(w.context[0]).window_bytes, 0);
        ranks_as_threads(w.size, steady, &w);
        int64_t before = cp_mem_stats().allocations;
        struct cp_context_memory held = cp_context_memory(w.context[0]);
        CHECK(held.workspace_bytes > 0);
        CHECK_EQ_I64(held.window_bytes > 0, transports[t] == &windows);
        ranks_as_threads(w.size, steady, &w);
        if (transports[t] != &two_sided) { /* it keeps messages in blocks of its own */
            CHECK_EQ_I64(cp_mem_stats().allocations, before);
        }
        struct cp_context_memory still = cp_context_memory(w.context[0]);
        CHECK_EQ_I64((int64_t)still.workspace_bytes, (int64_t)held.workspace_bytes);
        CHECK_EQ_I64((int64_t)still.window_bytes, (int64_t)held.window_bytes);
        scene_destroy(&w.scenes[0]);
        world_close(&w);
    }
}

/* A rank gives its begun call up: all others learn why, now and at every later call. */
static void abandon(int rank, void *arg)
{
    struct world *w = arg;
    struct cp_record record;
    scene_record(&w->scenes[0], rank, CP_OP_ATTENTION, &record);
    CHECK_EQ_I64(cp_context_describe(w->context[rank], &record), CP_OK);
    CHECK_EQ_I64(cp_context_begin(w->context[rank], &record, NULL), CP_OK);
    if (rank == 1) {
        (void)cp_fail(CP_ERR_NO_MEMORY, "no room for the output");
        cp_context_abandon(w->context[rank]);
    } else {
        enum cp_code code =
            cp_context_execute(w->context[rank], w->scenes[0].tensors[rank], NULL);
        CHECK_EQ_I64(code, CP_ERR_NO_MEMORY);
        CHECK_STR_HAS(cp_last_error()->text, "no room for the output");
    }
    CHECK_EQ_I64(cp_context_begin(w->context[rank], &record, NULL), CP_ERR_COMM);
    CHECK_STR_HAS(cp_last_error()->text, "no room for the output");
    CHECK_EQ_I64(cp_context_check(w->context[rank]), CP_ERR_COMM);
}

TEST(thread_ranks_learn_of_a_call_given_up)
{
    struct world w;
    world_open(&w, 3, 1, &windows, CP_EVEN, 0);
    uint64_t seed = test_seed;
    do {
        scene_destroy(&w.scenes[0]);
        scene_create(&w.scenes[0], seed++, 3, 1);
    } while (w.scenes[0].variant != CP_EVEN || w.scenes[0].is_replicated ||
             w.scenes[0].is_causal);
    ranks_as_threads(w.size, abandon, &w);
    scene_destroy(&w.scenes[0]);
    world_close(&w);
}

/* ---- a step that fails in the middle of a schedule ---- */

/* A foreign table may fail anywhere. These do what the sound ones do, until it is this
 * thread's turn to fail. */
static _Thread_local const struct cp_kernel_ops *sound_kernel;
static _Thread_local int steps_left = -1; /* before the one that fails; -1: none does */
static _Thread_local bool has_dlse;       /* the call whose gradients are made */

static enum cp_code take_step(void)
{
    return steps_left >= 0 && steps_left-- == 0
               ? cp_fail(CP_ERR_DEVICE, "this step is broken")
               : CP_OK;
}

static enum cp_code broken_pack_k(const struct cp_view *dst, const struct cp_view *src,
                                  struct cp_stream *stream)
{
    CP_TRY(take_step());
    return sound_kernel->pack_k(dst, src, stream);
}

static enum cp_code broken_pack_v(const struct cp_view *dst, const struct cp_view *src,
                                  struct cp_stream *stream)
{
    CP_TRY(take_step());
    return sound_kernel->pack_v(dst, src, stream);
}

static enum cp_code broken_attend(const struct cp_attend_args *args,
                                  struct cp_stream *stream)
{
    CP_TRY(take_step());
    CHECK_EQ_I64(args->backend, CP_BACKEND_NATIVE_MATH);
    return sound_kernel->attend(args, stream);
}

static enum cp_code broken_finish(const struct cp_finish_args *args,
                                  struct cp_stream *stream)
{
    CP_TRY(take_step());
    return sound_kernel->finish(args, stream);
}

static enum cp_code broken_delta(const struct cp_delta_args *args,
                                 struct cp_stream *stream)
{
    CP_TRY(take_step());
    return sound_kernel->delta(args, stream);
}

static enum cp_code broken_grad(const struct cp_grad_args *args,
                                struct cp_stream *stream)
{
    CP_TRY(take_step());
    CHECK_EQ_I64(args->has_dlse, has_dlse);
    CHECK_EQ_I64(args->backend, CP_BACKEND_NATIVE_MATH);
    return sound_kernel->grad(args, stream);
}

static enum cp_code broken_copy(struct cp_device *device, const struct cp_copy *copies,
                                int count, struct cp_stream *stream)
{
    (void)device;
    CP_TRY(take_step());
    return cp_device_cpu()->ops->copy(cp_device_cpu(), copies, count, stream);
}

static enum cp_code broken_add(struct cp_device *device, const struct cp_view *dst,
                               const struct cp_view *src, struct cp_stream *stream)
{
    (void)device;
    CP_TRY(take_step());
    return cp_device_cpu()->ops->add(cp_device_cpu(), dst, src, stream);
}

static enum cp_code broken_zero(struct cp_device *device, void *data, size_t bytes,
                                struct cp_stream *stream)
{
    (void)device;
    CP_TRY(take_step());
    return cp_device_cpu()->ops->zero(cp_device_cpu(), data, bytes, stream);
}

static const struct cp_kernel_ops broken_kernel = {
    .name = "broken",
    .abi = CP_KERNEL_ABI,
    .pack_k = broken_pack_k,
    .pack_v = broken_pack_v,
    .attend = broken_attend,
    .finish = broken_finish,
    .delta = broken_delta,
    .grad = broken_grad,
};

/* Only in the place of a device while a call executes. */
static const struct cp_device_ops broken_device_ops = {.name = "broken",
                                                       .abi = CP_DEVICE_ABI,
                                                       .copy = broken_copy,
                                                       .add = broken_add,
                                                       .zero = broken_zero};

struct breakage {
    struct world w;
    enum cp_op op;
    int odd, step; /* of that rank, it is broken */
    bool is_through[SCENE_MOST_RANKS];
};

static enum cp_code call_broken(struct world *w, int rank, enum cp_op op)
{
    static struct cp_device broken_device = {.ops = &broken_device_ops};
    struct cp_context *context = w->context[rank];
    struct cp_record record;
    scene_record(&w->scenes[0], rank, op, &record);
    record.call.backend = CP_BACKEND_NATIVE_MATH;
    CP_TRY(cp_context_describe(context, &record));
    CP_TRY(cp_context_begin(context, &record, NULL));
    struct cp_plan_entry *entry = context->call;
    sound_kernel = entry->kernel;
    has_dlse = w->scenes[0].want_lse;
    entry->kernel = &broken_kernel;
    context->sides[CP_ON_HOST].device = &broken_device;
    enum cp_code code = cp_context_execute(context, w->scenes[0].tensors[rank], NULL);
    entry->kernel = sound_kernel;
    context->sides[CP_ON_HOST].device = cp_device_cpu();
    return code;
}

/* Whoever still needs the odd rank gets its error in this call, all others at the next
 * one; from then on all know that the context is broken. */
static void break_step(int rank, void *arg)
{
    struct breakage *b = arg;
    if (b->op == CP_OP_ATTENTION_BACKWARD) {
        CHECK_EQ_I64(world_call(&b->w, rank, &b->w.scenes[0], CP_OP_ATTENTION), CP_OK);
    }
    steps_left = rank == b->odd ? b->step : -1;
    enum cp_code code = call_broken(&b->w, rank, b->op);
    bool has_fewer_steps = steps_left >= 0;
    steps_left = -1;
    if (rank == b->odd) {
        CHECK_EQ_I64(code, has_fewer_steps ? CP_OK : CP_ERR_DEVICE);
    }
    for (int later = 0; later < 2; later++) {
        CHECK(code == CP_OK || code == CP_ERR_DEVICE || later > 0);
        if (code != CP_OK) {
            CHECK_STR_HAS(cp_last_error()->text, "this step is broken");
            CHECK(cp_last_error()->rank == b->odd || (rank == b->odd && later == 0));
        }
        code = world_call(&b->w, rank, &b->w.scenes[0], CP_OP_ATTENTION);
    }
    CHECK(code == CP_OK || code == CP_ERR_COMM);
    b->is_through[rank] = code == CP_OK;
}

/* True where the odd rank has fewer steps, and the call goes through everywhere. */
static bool break_world(struct breakage *b, int ring, int ulysses,
                        const struct world_transport *transport)
{
    struct scene scene = b->w.scenes[0];
    world_open(&b->w, ring, ulysses, transport, scene.variant, 0);
    b->w.scenes[0] = scene;
    ranks_as_threads(ring * ulysses, break_step, b);
    for (int rank = 0; rank < ring * ulysses; rank++) {
        TEST_CONTEXT("%s, %dx%d, op %d, rank %d; broken is step %d of rank %d",
                     transport->name, ring, ulysses, b->op, rank, b->step, b->odd);
        CHECK_EQ_I64(b->is_through[rank], b->is_through[b->odd]);
    }
    world_close(&b->w);
    b->w.scenes[0] = scene;
    return b->is_through[b->odd];
}

TEST(thread_ranks_get_the_error_of_any_step_that_fails)
{
    static struct breakage b;
    int broken = 0;
    for (int i = 0; i < 2 * (int)(sizeof shapes / sizeof shapes[0]); i++) {
        const int *shape = shapes[i / 2];
        scene_create(&b.w.scenes[0], test_seed + (uint64_t)i, shape[0], shape[1]);
        for (int run = 0; run < 4; run++) {
            b.op = run < 2 ? CP_OP_ATTENTION : CP_OP_ATTENTION_BACKWARD;
            b.odd = (i + run) % (shape[0] * shape[1]);
            b.step = 0;
            while (!break_world(&b, shape[0], shape[1],
                                transports[(i + run) % TRANSPORTS])) {
                b.step += 1;
            }
            broken += b.step;
        }
        scene_destroy(&b.w.scenes[0]);
    }
    CHECK(broken > 200);
}

/* ---- a window that cannot grow ---- */

static enum cp_code reserve_nothing(struct cp_comm *comm, size_t bytes)
{
    (void)comm;
    return cp_fail(CP_ERR_NO_MEMORY, "no room for %zu bytes", bytes);
}

/* The last rank's cannot, twice: all hear of it and go on. Then it can. */
static void outgrow(int rank, void *arg)
{
    struct world *w = arg;
    struct cp_context *context = w->context[rank];
    const struct cp_comm_ops *sound = context->sides[CP_ON_HOST].comm->ops;
    struct cp_comm_ops tight = *sound;
    tight.reserve = reserve_nothing;
    for (int attempt = 0; attempt < 2; attempt++) {
        struct cp_record record = {.call = {.op = CP_OP_AGREE}};
        context->sides[CP_ON_HOST].comm->ops = rank == w->size - 1 ? &tight : sound;
        CHECK_EQ_I64(world_call(w, rank, &w->scenes[0], CP_OP_ATTENTION),
                     CP_ERR_NO_MEMORY);
        context->sides[CP_ON_HOST].comm->ops = sound;
        CHECK_EQ_I64(cp_last_error()->rank, w->size - 1);
        CHECK_STR_HAS(cp_last_error()->text, "no room for ");
        CHECK_EQ_I64(cp_context_describe(context, &record), CP_OK);
        CHECK_EQ_I64(cp_context_begin(context, &record, NULL), CP_OK);
    }
    CHECK_EQ_I64(world_call(w, rank, &w->scenes[0], CP_OP_ATTENTION), CP_OK);
}

TEST(thread_ranks_agree_on_a_window_that_cannot_grow)
{
    for (size_t i = 0; i < sizeof shapes / sizeof shapes[0]; i++) {
        struct world w;
        uint64_t seed = test_seed + i;
        world_open(&w, shapes[i][0], shapes[i][1], &windows, CP_ANYTHING, 0);
        do {
            scene_destroy(&w.scenes[0]);
            scene_create(&w.scenes[0], seed++, shapes[i][0], shapes[i][1]);
        } while (w.scenes[0].variant != CP_ANYTHING || w.scenes[0].is_replicated ||
                 w.scenes[0].keys[w.size - 1] == 0);
        ranks_as_threads(w.size, outgrow, &w);
        CHECK(scene_judge(&w.scenes[0], CP_OP_ATTENTION));
        scene_destroy(&w.scenes[0]);
        world_close(&w);
    }
}

/* ---- threads that cannot start ---- */

/* On the last rank: all hear of it and go on. Then they can. */
static void start_threads(int rank, void *arg)
{
    struct world *w = arg;
    bool is_last = rank == w->size - 1;
    pthread_attr_t before, large;
    if (is_last) {
        w->context[rank]->sides[CP_ON_HOST].threads = 3;
        CHECK_EQ_I64(pthread_getattr_default_np(&before), 0);
        CHECK_EQ_I64(pthread_attr_init(&large), 0);
        CHECK_EQ_I64(pthread_attr_setstacksize(&large, (size_t)1 << 50), 0);
        CHECK_EQ_I64(pthread_setattr_default_np(&large), 0);
    }
    enum cp_code code = world_call(w, rank, &w->scenes[0], CP_OP_ATTENTION);
    CHECK(code == CP_ERR_RUNTIME || code == CP_ERR_NO_MEMORY);
    CHECK_EQ_I64(cp_last_error()->rank, w->size - 1);
    CHECK_STR_HAS(cp_last_error()->text, "cannot start a thread: ");
    if (is_last) {
        (void)pthread_setattr_default_np(&before);
        (void)pthread_attr_destroy(&before);
        (void)pthread_attr_destroy(&large);
    }
    CHECK_EQ_I64(world_call(w, rank, &w->scenes[0], CP_OP_ATTENTION), CP_OK);
    CHECK_EQ_I64(cp_pool_threads(w->context[rank]->sides[CP_ON_HOST].pool),
                 is_last ? 3 : 1);
}

TEST(thread_ranks_agree_on_threads_that_cannot_start)
{
    for (int t = 0; t < TRANSPORTS; t++) {
        struct world w;
        uint64_t seed = test_seed;
        world_open(&w, 2, 1, transports[t], CP_ANYTHING, 0);
        do {
            scene_destroy(&w.scenes[0]);
            scene_create(&w.scenes[0], seed++, 2, 1);
        } while (w.scenes[0].variant != CP_ANYTHING || w.scenes[0].is_replicated);
        ranks_as_threads(w.size, start_threads, &w);
        CHECK(scene_judge(&w.scenes[0], CP_OP_ATTENTION));
        scene_destroy(&w.scenes[0]);
        world_close(&w);
    }
}

/* A new signature needs memory; where it fails on one rank, no rank moves a byte, and
 * all go on. */
struct shortage {
    struct world w;
    enum cp_code codes[SCENE_MOST_RANKS];
};

static void call_short(int rank, void *arg)
{
    struct shortage *s = arg;
    s->codes[rank] = world_call(&s->w, rank, &s->w.scenes[0], CP_OP_ATTENTION);
}

TEST(thread_ranks_agree_on_a_failed_allocation)
{
    static struct shortage s;
    int failures = 0;
    for (int64_t count = 0;; count++) {
        world_open(&s.w, 3, 1, &windows, CP_EVEN, 0);
        uint64_t seed = test_seed;
        do {
            scene_destroy(&s.w.scenes[0]);
            scene_create(&s.w.scenes[0], seed++, 3, 1);
        } while (s.w.scenes[0].variant != CP_EVEN || s.w.scenes[0].is_replicated);
        cp_mem_fail_after(count);
        ranks_as_threads(s.w.size, call_short, &s);
        cp_mem_fail_after(-1);
        bool failed = s.codes[0] != CP_OK;
        for (int rank = 0; rank < s.w.size; rank++) {
            CHECK_EQ_I64(s.codes[rank], failed ? CP_ERR_NO_MEMORY : CP_OK);
        }
        ranks_as_threads(s.w.size, call_short, &s);
        for (int rank = 0; rank < s.w.size; rank++) {
            CHECK_EQ_I64(s.codes[rank], CP_OK);
        }
        CHECK(scene_judge(&s.w.scenes[0], CP_OP_ATTENTION));
        scene_destroy(&s.w.scenes[0]);
        world_close(&s.w);
        memset(&s, 0, sizeof s);
        if (!failed) {
            break;
        }
        failures += 1;
    }
    CHECK(failures > 10);
}

TEST(tables_of_another_version_are_refused)
{
    struct cp_context_config config = {
        .ring_degree = 1, .ulysses_degree = 1, .timeout = 1.0};
    struct cp_comm *comm = NULL;
    struct cp_context *context = NULL;
    REQUIRE(cp_comm_self_create(&comm) == CP_OK);
    struct cp_comm_ops older = *comm->ops;
    const struct cp_comm_ops *ops = comm->ops;
    older.abi--;
    comm->ops = &older;
    struct cp_context_parts parts = {.comm = comm, .device = cp_device_cpu()};
    CHECK_EQ_I64(cp_context_create(&config, &parts, &context), CP_ERR_INTERNAL);
    CHECK_STR_HAS(cp_last_error()->text, "version 1 of its interface, not 2");
    CHECK(context == NULL);
    comm->ops = ops;
    ops->close(&comm);
}

TEST(creation_survives_every_failed_allocation)
{
    int64_t live = cp_mem_stats().live_blocks;
    struct cp_context_config config = {
        .ring_degree = 1, .ulysses_degree = 1, .timeout = 1.0};
    for (int64_t count = 0;; count++) {
        struct cp_comm *comm = NULL;
        struct cp_context *context = NULL;
        CHECK_EQ_I64(cp_comm_self_create(&comm), CP_OK);
        cp_mem_fail_after(count);
        struct cp_context_parts parts = {.comm = comm, .device = cp_device_cpu()};
        enum cp_code code = cp_context_create(&config, &parts, &context);
        cp_mem_fail_after(-1);
        cp_context_destroy(&context);
        CHECK_EQ_I64(cp_mem_stats().live_blocks, live);
        if (code == CP_OK) {
            CHECK(count > 0);
            break;
        }
        CHECK_EQ_I64(code, CP_ERR_NO_MEMORY);
    }
}
