/* The plain and the own CUDA kernel, and the merge of blocks that others answer, against the
 * generic kernel of the CPU, over random calls.
 *
 * A call is made as the executor makes it: keys come in blocks cut at random, packed
 * into panels, heads in groups; tensors lie in memory in any order of their axes; guard
 * bytes stand around everything. Truth is the generic kernel in float64; what is
 * allowed is a few times its error in the dtype of the call. */
#include <cuda_runtime.h>

#include "cuda_api.h"
#include "device_cuda.h"
#include "judge.h"
#include "kernel/kernel_cpu.h"
#include "kernel/package.h"
#include "kernel_cuda.h"
#include "kernel_own.h"
#include "kernel_package.h"
#include "kernel_torch.h"
#include "layout.h"
#include "sim_torch.h"
#include "test.h"

enum { GUARD = 192, GUARD_BYTE = 0xa5, TENSORS = 12 };

/* ---- where a kernel works ---- */

/* When a call that one attend begins and ends leaves the state alone. */
enum leaves { NEVER, NOT_CAUSAL, ALWAYS };

/* The host, or the CUDA device with a stream. */
struct machine {
    const struct cp_kernel_ops *ops;
    const struct cp_package *package;
    enum leaves leaves_state;
    struct cp_device *device;
    cudaStream_t stream; /* of the device */
    bool is_cuda;
};

static struct machine host_machine(void)
{
    return (struct machine){.ops = &cp_kernel_generic_ops, .device = cp_device_cpu()};
}

static bool cuda_machine(struct machine *on)
{
    *on = (struct machine){.ops = &cp_kernel_cuda_plain_ops, .is_cuda = true};
    return CHECK(on->ops->is_available()) &&
           CHECK(cp_device_cuda_create(0, &on->device) == CP_OK) &&
           CHECK(cudaStreamCreateWithFlags(&on->stream, cudaStreamNonBlocking) ==
                 cudaSuccess);
}

static void cuda_machine_close(struct machine *on)
{
    CHECK(cudaStreamDestroy(on->stream) == cudaSuccess);
    cp_device_cuda_destroy(&on->device);
}

static struct cp_stream *stream_of(const struct machine *on)
{
    return (struct cp_stream *)on->stream;
}

/* A view on a machine, with the same bytes on the host. */
struct tensor {
    struct cp_view view, host;
    char *base; /* on the host, guards included; NULL: no tensor */
    void *there;
    int64_t inner, bytes; /* without and with guards */
};

/* The host's bytes stay as they are until the tensor comes back. */
static void tensor_up(const struct machine *on, const struct tensor *t)
{
    if (on->is_cuda) {
        CHECK(cudaMemcpyAsync(t->there, t->base, (size_t)t->bytes,
                              cudaMemcpyHostToDevice, on->stream) == cudaSuccess);
    }
}

static void tensor_down(const struct machine *on, const struct tensor *t)
{
    if (on->is_cuda) {
        CHECK(cudaMemcpyAsync(t->base, t->there, (size_t)t->bytes,
                              cudaMemcpyDeviceToHost, on->stream) == cudaSuccess);
        CHECK(cudaStreamSynchronize(on->stream) == cudaSuccess);
    }
}

/* `first` bytes from the start of `bytes` between the guards; all are `fill`, on the
 * host so far. */
static struct tensor tensor_at(const struct machine *on, struct cp_view view,
                               int64_t first, int64_t bytes, int fill)
{
    struct tensor t = {
        .host = view, .inner = bytes, .bytes = (bytes + 2 * GUARD + 63) / 64 * 64};
    t.base = aligned_alloc(64, (size_t)t.bytes);
    if (t.base == NULL) {
        abort();
    }
    memset(t.base, GUARD_BYTE, (size_t)t.bytes);
    memset(t.base + GUARD, fill, (size_t)bytes);
    t.host.data = t.base + GUARD + first;
    t.view = t.host;
    if (on->is_cuda) {
        CHECK(on->device->ops->alloc(on->device, (size_t)t.bytes, "a tensor",
                                     &t.there) == CP_OK);
        t.view.data = (char *)t.there + GUARD + first;
    }
    return t;
}

static void tensor_end(const struct machine *on, struct tensor *t)
{
    bool is_whole = true;
    if (t->base == NULL) {
        return;
    }
    tensor_down(on, t);
    for (int64_t i = 0; i < GUARD; i++) {
        is_whole = is_whole && (unsigned char)t->base[i] == GUARD_BYTE &&
                   (unsigned char)t->base[GUARD + t->inner + i] == GUARD_BYTE;
    }
    CHECK(is_whole);
    free(t->base);
    if (on->is_cuda) {
        on->device->ops->free(on->device, &t->there);
    }
}

/* A number of a view to or from a double; the host's copy converts. */
static void view_exchange(const struct cp_view *view, double *numbers, bool is_write)
{
    struct cp_device *cpu = cp_device_cpu();
    struct cp_view dense = cp_view_compact(numbers, CP_DTYPE_FLOAT64, view->n[0],
                                           view->n[1], view->n[2], view->n[3]);
    CHECK((is_write ? cp_device_copy(cpu, view, &dense, NULL)
                    : cp_device_copy(cpu, &dense, view, NULL)) == CP_OK);
}

/* `rng` NULL: packed, else in any order. `numbers` NULL: all bytes are 0xff. */
static struct tensor tensor_new(const struct machine *on, struct test_rng *rng,
                                enum cp_dtype dtype, const int64_t n[CP_AXES],
                                double *numbers)
{
    struct cp_view view = cp_view_compact(NULL, dtype, n[0], n[1], n[2], n[3]);
    int64_t first = 0, bytes = cp_view_count(&view) * cp_dtype_bytes(dtype);
    if (rng != NULL) {
        view = layout_any(rng, dtype, n, &first, &bytes);
    }
    struct tensor t = tensor_at(on, view, first, bytes, 0xff);
    if (numbers != NULL && dtype == CP_DTYPE_BOOL) {
        for (int64_t i = 0; i < cp_view_count(&view); i++) {
            char *at = t.host.data + i / (n[1] * n[2] * n[3]) * view.stride[0] +
                       i / (n[2] * n[3]) % n[1] * view.stride[1] +
                       i / n[3] % n[2] * view.stride[2] + i % n[3] * view.stride[3];
            *at = numbers[i] == 0; /* what is added is 0 where it is true */
        }
    } else if (numbers != NULL) {
        view_exchange(&t.host, numbers, true);
    }
    tensor_up(on, &t);
    return t;
}

/* ---- one random call ---- */

/* What begins and ends a row: zeros and finish, or attend itself, which may have no lse to give. */
enum ends { BY_FINISH, BY_ATTEND, WITHOUT_LSE };

struct problem {
    enum ends ends;
    enum cp_dtype dtype, mask_dtype; /* mask NONE: none */
    int64_t batch, rows, keys, heads, kv_heads, dim, value_dim;
    int64_t mask_n[CP_AXES];
    double scale, size;
    bool is_causal, has_dlse;
    bool is_whole;  /* the keys come in one block, the heads in one group */
    bool is_packed; /* tensors lie in the order of their axes */
    int64_t q_first, k_first;
    double *q, *k, *v, *mask, *dout, *dlse;
};

struct answer {
    double *out, *lse, *dq, *dk, *dv;
};

static double *numbers(int64_t count)
{
    double *data = calloc((size_t)count + 1, sizeof *data);
    if (data == NULL) {
        abort();
    }
    return data;
}

static int64_t q_count(const struct problem *p)
{
    return p->batch * p->rows * p->heads;
}

static int64_t k_count(const struct problem *p)
{
    return p->batch * p->keys * p->kv_heads;
}

static struct answer answer_new(const struct problem *p)
{
    return (struct answer){.out = numbers(q_count(p) * p->value_dim),
                           .lse = numbers(q_count(p)),
                           .dq = numbers(q_count(p) * p->dim),
                           .dk = numbers(k_count(p) * p->dim),
                           .dv = numbers(k_count(p) * p->value_dim)};
}

static void answer_free(struct answer *answer)
{
    free(answer->out);
    free(answer->lse);
    free(answer->dq);
    free(answer->dk);
    free(answer->dv);
}

/* Nearly normal numbers that the dtype can hold. */
static double *random_numbers(struct test_rng *rng, int64_t count, double size,
                              enum cp_dtype dtype)
{
    double *data = numbers(count), *held = numbers(count);
    for (int64_t i = 0; i < count; i++) {
        double sum = 0;
        for (int j = 0; j < 3; j++) {
            sum += (double)test_rng_float(rng);
        }
        data[i] = sum * size;
    }
    struct cp_view view = cp_view_compact(held, dtype, 1, 1, 1, count);
    view_exchange(&view, data, true);
    view_exchange(&view, data, false);
    free(held);
    return data;
}

static void problem_mask(struct problem *p, struct test_rng *rng)
{
    const int64_t full[CP_AXES] = {p->batch, p->heads, p->rows, p->keys};
    const enum cp_dtype dtypes[] = {CP_DTYPE_BOOL, CP_DTYPE_FLOAT32, p->dtype};
    int64_t count = 1, holes = test_rng_range(rng, 0, 9);
    for (int axis = 0; axis < CP_AXES; axis++) {
        p->mask_n[axis] = test_rng_range(rng, 0, 1) == 1 ? full[axis] : 1;
        count *= p->mask_n[axis];
    }
    p->mask_dtype = dtypes[test_rng_range(rng, 0, 2)];
    bool is_bool = p->mask_dtype == CP_DTYPE_BOOL, is_dead = false;
    p->mask = random_numbers(rng, count, 2, is_bool ? CP_DTYPE_FLOAT32 : p->mask_dtype);
    for (int64_t i = 0; i < count; i++) {
        if (i % p->mask_n[3] == 0) { /* a row without a key */
            is_dead = test_rng_range(rng, 0, 9) == 0;
        }
        bool is_hidden = is_dead || test_rng_range(rng, 0, 9) < holes;
        p->mask[i] = is_hidden ? -HUGE_VAL : (is_bool ? 0 : p->mask[i]);
    }
}

static int64_t random_dim(struct test_rng *rng)
{
    static const int64_t dims[] = {1,  3,  6,  8,  16,  17,  20,  40, 64,
                                   65, 72, 96, 98, 128, 196, 255, 256};
    return dims[test_rng_range(rng, 0, (int64_t)(sizeof dims / sizeof dims[0]) - 1)];
}

static void problem_shape(struct problem *p, struct test_rng *rng)
{
    p->batch = test_rng_range(rng, 1, 3);
    p->rows = test_rng_range(rng, 0, test_rng_range(rng, 0, 3) == 0 ? 300 : 70);
    p->keys = test_rng_range(rng, 0, test_rng_range(rng, 0, 3) == 0 ? 300 : 90);
    p->kv_heads = test_rng_range(rng, 1, 3);
    p->heads = p->kv_heads * test_rng_range(rng, 1, 3);
    p->dim = random_dim(rng);
    p->value_dim = test_rng_range(rng, 0, 2) == 0 ? random_dim(rng) : p->dim;
    /* Bounds the time of a call. */
    while (q_count(p) * p->keys * (p->dim + p->value_dim) > 1500000) {
        if (p->batch > 1) {
            p->batch--;
        } else if (p->kv_heads > 1) {
            p->heads = p->heads / p->kv_heads * (p->kv_heads - 1);
            p->kv_heads--;
        } else if (p->rows > 1) {
            p->rows /= 2;
        } else {
            p->keys /= 2;
        }
    }
}

static void problem_fill(struct problem *p, struct test_rng *rng)
{
    p->q = random_numbers(rng, q_count(p) * p->dim, p->size, p->dtype);
    p->k = random_numbers(rng, k_count(p) * p->dim, p->size, p->dtype);
    p->v = random_numbers(rng, k_count(p) * p->value_dim, 1, p->dtype);
    p->dout = random_numbers(rng, q_count(p) * p->value_dim, 1, p->dtype);
    p->dlse = random_numbers(rng, q_count(p), 1, CP_DTYPE_FLOAT32);
}

static void problem_context(const struct problem *p)
{
    TEST_CONTEXT("%s B %d rows %d keys %d heads %d/%d D %d Dv %d%s%s mask %s "
                 "(%d,%d,%d,%d) size %g",
                 cp_dtype_name(p->dtype), (int)p->batch, (int)p->rows, (int)p->keys,
                 (int)p->heads, (int)p->kv_heads, (int)p->dim, (int)p->value_dim,
                 p->is_causal ? " causal" : "", p->has_dlse ? " dlse" : "",
                 cp_dtype_name(p->mask_dtype), (int)p->mask_n[0], (int)p->mask_n[1],
                 (int)p->mask_n[2], (int)p->mask_n[3], p->size);
}

static void problem_init(struct problem *p, struct test_rng *rng, enum cp_dtype dtype)
{
    *p = (struct problem){.dtype = dtype};
    problem_shape(p, rng);
    p->scale = (test_rng_range(rng, 0, 3) == 0 ? 1.3 : 1) / sqrt((double)p->dim);
    p->is_causal = test_rng_range(rng, 0, 2) == 0;
    p->q_first = test_rng_range(rng, 0, 1) * test_rng_range(rng, 0, 100);
    p->k_first = test_rng_range(rng, 0, 1) * test_rng_range(rng, 0, 100);
    int64_t kind = test_rng_range(rng, 0, 9);
    p->size = kind == 0 ? 1e-3 : (kind == 1 ? 20 : 1);
    p->has_dlse = test_rng_range(rng, 0, 1) == 1;
    problem_fill(p, rng);
    if (test_rng_range(rng, 0, 2) > 0 && q_count(p) * p->keys > 0) {
        problem_mask(p, rng);
    }
    problem_context(p);
}

static void problem_free(struct problem *p)
{
    free(p->q);
    free(p->k);
    free(p->v);
    free(p->mask);
    free(p->dout);
    free(p->dlse);
}

/* ---- running it ---- */

static int left_alone; /* states that were found as they were */

/* A call on a machine, in the dtype it is run in. */
struct call {
    const struct problem *p;
    const struct machine *on;
    struct test_rng rng;
    struct cp_format format;
    struct tensor t[TENSORS];
};

enum role { Q, K, V, MASK, DOUT, DLSE, OUT, LSE, DELTA, DQ, DK, DV };

/* A group of query heads with the kv heads they need, and a stretch of keys. */
struct cut {
    int64_t head, heads, kv, kvs, key, keys;
    bool is_behind; /* an empty one behind the keys */
};

static void call_tensor(struct call *c, enum role role, enum cp_dtype dtype, int64_t n1,
                        int64_t n2, int64_t n3, double *values)
{
    const int64_t n[CP_AXES] = {c->p->batch, n1, n2, n3};
    c->t[role] = tensor_new(c->on, c->p->is_packed ? NULL : &c->rng, dtype, n, values);
}

static bool call_init(struct call *c, const struct problem *p, const struct machine *on,
                      struct test_rng rng, enum cp_dtype dtype)
{
    *c = (struct call){.p = p, .on = on, .rng = rng};
    if (!CHECK(on->ops->describe(dtype, p->dim, p->value_dim, &c->format) == CP_OK)) {
        return false;
    }
    enum cp_dtype sum = cp_dtype_sum(dtype);
    double *zeros = numbers((q_count(p) + k_count(p)) * (p->dim + p->value_dim));
    call_tensor(c, Q, dtype, p->rows, p->heads, p->dim, p->q);
    call_tensor(c, K, dtype, p->keys, p->kv_heads, p->dim, p->k);
    call_tensor(c, V, dtype, p->keys, p->kv_heads, p->value_dim, p->v);
    call_tensor(c, DOUT, dtype, p->rows, p->heads, p->value_dim, p->dout);
    call_tensor(c, DLSE, sum, p->rows, p->heads, 1, p->dlse);
    call_tensor(c, OUT, dtype, p->rows, p->heads, p->value_dim, NULL);
    call_tensor(c, LSE, sum, p->rows, p->heads, 1, NULL);
    call_tensor(c, DELTA, sum, p->rows, p->heads, 1, NULL);
    call_tensor(c, DQ, sum, p->rows, p->heads, p->dim, zeros);
    call_tensor(c, DK, sum, p->keys, p->kv_heads, p->dim, zeros);
    call_tensor(c, DV, sum, p->keys, p->kv_heads, p->value_dim, zeros);
    if (p->mask != NULL) {
        bool is_own = p->mask_dtype == p->dtype;
        c->t[MASK] =
            tensor_new(on, &c->rng, is_own ? dtype : p->mask_dtype, p->mask_n, p->mask);
    }
    free(zeros);
    return true;
}

static struct cp_place place_of(const struct problem *p, const struct cut *cut)
{
    return (struct cp_place){
        .q_first = p->q_first,
        .k_first = p->k_first + cut->key,
        .head_first = cut->head,
        .kv_head_first = cut->kv,
        .heads_per_kv = p->heads / p->kv_heads,
        .is_causal = p->is_causal,
    };
}

static struct cp_view mask_part(const struct call *c, const struct cut *cut)
{
    struct cp_view mask = c->t[MASK].view;
    if (mask.data != NULL && mask.n[1] > 1) {
        mask = layout_part(&mask, 1, cut->head, cut->heads);
    }
    if (mask.data != NULL && mask.n[3] > 1) {
        mask = layout_part(&mask, 3, cut->key, cut->keys);
    }
    return mask;
}

static struct cp_view heads_part(const struct call *c, enum role role,
                                 const struct cut *cut)
{
    return layout_part(&c->t[role].view, 2, cut->head, cut->heads);
}

static struct cp_view keys_part(const struct call *c, enum role role,
                                const struct cut *cut)
{
    struct cp_view heads = layout_part(&c->t[role].view, 2, cut->kv, cut->kvs);
    return layout_part(&heads, 1, cut->key, cut->keys);
}

/* Panels for a view of (B, rows, heads, n), sometimes with gaps between them; on the
 * host so far. */
static struct tensor panels_new(struct call *c, const struct cp_panel *panel,
                                const struct cp_view *like, int fill)
{
    struct cp_view view = *like;
    int64_t gap = test_rng_range(&c->rng, 0, 1) * CP_PANEL_ALIGN;
    int64_t bytes = cp_panel_bytes(panel, like->n[1]) + gap;
    bool is_head_major = test_rng_range(&c->rng, 0, 1) == 1;
    view.stride[0] = bytes * (is_head_major ? 1 : like->n[2]);
    view.stride[2] = bytes * (is_head_major ? like->n[0] : 1);
    view.stride[1] = view.stride[3] = 0;
    return tensor_at(c->on, view, 0, bytes * like->n[0] * like->n[2], fill);
}

static struct tensor scratch_new(const struct call *c, int64_t bytes)
{
    struct tensor t = tensor_at(c->on, (struct cp_view){.data = NULL}, 0, bytes, 0xff);
    tensor_up(c->on, &t);
    return t;
}

/* Keys as the kernel meets them: what it packs, in `room`, or as they are. */
static struct cp_view met(struct call *c, const struct cp_panel *panel,
                          enum cp_code (*pack)(const struct cp_view *dst,
                                               const struct cp_view *src,
                                               struct cp_stream *stream),
                          const struct cp_view *keys, struct tensor *room)
{
    if (c->format.has_plain_keys) {
        CHECK(pack == NULL);
        *room = scratch_new(c, 0);
        return *keys;
    }
    *room = panels_new(c, panel, keys, 0xff);
    tensor_up(c->on, room);
    CHECK(pack(&room->view, keys, stream_of(c->on)) == CP_OK);
    return room->view;
}

/* `is_last` counts where attend ends by itself. */
static void attend_cut(struct call *c, const struct cut *cut,
                       const struct cp_view *state, bool is_last)
{
    struct cp_stream *stream = stream_of(c->on);
    struct cp_view k = keys_part(c, K, cut), v = keys_part(c, V, cut);
    struct tensor k_panels, v_panels;
    struct tensor scratch = scratch_new(c, c->format.scratch_bytes);
    struct cp_attend_args args = {
        .q = heads_part(c, Q, cut),
        .k = met(c, &c->format.k, c->on->ops->pack_k, &k, &k_panels),
        .v = met(c, &c->format.v, c->on->ops->pack_v, &v, &v_panels),
        .mask = mask_part(c, cut),
        .state = *state,
        .place = place_of(c->p, cut),
        .scale = c->p->scale,
        .package = c->on->package,
        .scratch = scratch.view.data,
    };
    if (c->p->ends != BY_FINISH) {
        args.is_first = cut->key == 0 && !cut->is_behind;
        args.out = is_last ? heads_part(c, OUT, cut) : args.out;
        args.lse =
            is_last && c->p->ends == BY_ATTEND ? heads_part(c, LSE, cut) : args.lse;
    }
    CHECK(c->on->ops->attend(&args, stream) == CP_OK);
    tensor_end(c->on, &scratch);
    tensor_end(c->on, &v_panels);
    tensor_end(c->on, &k_panels);
}

static void grad_cut(struct call *c, const struct cut *cut)
{
    struct tensor scratch = scratch_new(c, c->format.grad_scratch_bytes);
    struct cp_grad_args args = {
        .q = heads_part(c, Q, cut),
        .k = keys_part(c, K, cut),
        .v = keys_part(c, V, cut),
        .dout = heads_part(c, DOUT, cut),
        .lse = heads_part(c, LSE, cut),
        .delta = heads_part(c, DELTA, cut),
        .mask = mask_part(c, cut),
        .dq = heads_part(c, DQ, cut),
        .dk = keys_part(c, DK, cut),
        .dv = keys_part(c, DV, cut),
        .place = place_of(c->p, cut),
        .scale = c->p->scale,
        .has_dlse = c->p->has_dlse,
        .scratch = scratch.view.data,
    };
    CHECK(c->on->ops->grad(&args, stream_of(c->on)) == CP_OK);
    tensor_end(c->on, &scratch);
}

/* What ends the forward pass of a group of heads and begins its backward pass. */
static void finish_and_delta(const struct call *c, const struct cut *cut,
                             const struct cp_view *state)
{
    struct cp_finish_args finish = {.state = *state,
                                    .out = heads_part(c, OUT, cut),
                                    .lse = heads_part(c, LSE, cut)};
    CHECK(c->on->ops->finish(&finish, stream_of(c->on)) == CP_OK);
    struct cp_delta_args delta = {
        .out = finish.out,
        .dout = heads_part(c, DOUT, cut),
        .delta = heads_part(c, DELTA, cut),
    };
    if (c->p->has_dlse) {
        delta.dlse = heads_part(c, DLSE, cut);
    }
    CHECK(c->on->ops->delta(&delta, stream_of(c->on)) == CP_OK);
}

/* Zeros, or NaN with a sum of 0: both are the empty state. The two kernels lay it out
 * alike. */
static struct tensor state_new(struct call *c, const struct cut *cut)
{
    struct cp_view out = heads_part(c, OUT, cut);
    bool is_dirty = test_rng_range(&c->rng, 0, 1) == 1;
    struct tensor t = panels_new(c, &c->format.state, &out, is_dirty ? 0xff : 0);
    int64_t row_bytes = c->format.state.row_bytes;
    int64_t number_bytes = row_bytes / (c->p->value_dim + 2);
    for (int64_t b = 0; b < t.host.n[0]; b++) {
        for (int64_t h = 0; h < t.host.n[2]; h++) {
            for (int64_t i = 1; i <= t.host.n[1]; i++) {
                memset(t.host.data + b * t.host.stride[0] + h * t.host.stride[2] +
                           i * row_bytes - number_bytes,
                       0, (size_t)number_bytes);
            }
        }
    }
    tensor_up(c->on, &t);
    return t;
}

/* All bytes are as tensor_at left them. */
static bool is_untouched(const struct call *c, const struct tensor *t)
{
    bool is = true;
    tensor_down(c->on, t);
    for (int64_t i = 0; i < t->inner; i++) {
        is = is && (unsigned char)t->base[GUARD + i] == 0xff;
    }
    return is;
}

/* Forward alone, with nothing in the state that means anything. */
static void run_ends(struct call *c, struct cut cut)
{
    int64_t all = c->p->keys, calls = test_rng_range(&c->rng, 1, 3), done = 0;
    bool is_behind = all > 0 && test_rng_range(&c->rng, 0, 2) == 0;
    struct cp_view out = heads_part(c, OUT, &cut);
    struct tensor state = panels_new(c, &c->format.state, &out, 0xff);
    tensor_up(c->on, &state);
    do {
        int64_t most = all - cut.key;
        cut.keys =
            c->p->is_whole || ++done == calls ? most : test_rng_range(&c->rng, 0, most);
        cut.keys = cut.keys == 0 && most > 0 ? 1 : cut.keys;
        bool is_last = cut.keys == most && !is_behind;
        bool is_only = is_last && cut.key == 0;
        attend_cut(c, &cut, &state.view, is_last);
        if (is_only && (c->on->leaves_state == ALWAYS ||
                        (c->on->leaves_state == NOT_CAUSAL && !c->p->is_causal))) {
            CHECK(is_untouched(c, &state));
            left_alone++;
        }
        cut.key += cut.keys;
    } while (cut.key < all);
    if (is_behind) {
        cut.key = cut.keys = 0;
        cut.is_behind = true;
        attend_cut(c, &cut, &state.view, true);
    }
    tensor_end(c->on, &state);
}

static void run_heads(struct call *c, struct cut cut)
{
    if (c->p->ends != BY_FINISH) {
        run_ends(c, cut);
        return;
    }
    int64_t all = c->p->keys;
    int64_t most = test_rng_range(&c->rng, 0, 1) == 1 ? all : all / 3;
    struct tensor state = state_new(c, &cut);
    struct test_rng cuts = c->rng;
    for (int pass = 0; pass < 2; pass++) {
        struct test_rng here = cuts;
        for (cut.key = 0; cut.key < all; cut.key += cut.keys) {
            cut.keys =
                c->p->is_whole ? all : test_rng_range(&here, 1, most > 0 ? most : 1);
            cut.keys = cut.keys < all - cut.key ? cut.keys : all - cut.key;
            if (pass == 0) {
                attend_cut(c, &cut, &state.view, false);
            } else {
                grad_cut(c, &cut);
            }
        }
        cut.key = cut.keys = 0; /* a block may be empty */
        if (pass == 0) {
            attend_cut(c, &cut, &state.view, false);
            finish_and_delta(c, &cut, &state.view);
        } else {
            grad_cut(c, &cut);
        }
    }
    tensor_end(c->on, &state);
}

static void call_read(struct call *c, enum role role, double *to)
{
    tensor_down(c->on, &c->t[role]);
    view_exchange(&c->t[role].host, to, false);
}

/* Fills `answer` with what the kernel of that machine says. Equal generators make equal
 * layouts and cuts. */
static void run(const struct problem *p, const struct machine *on, struct test_rng rng,
                enum cp_dtype dtype, struct answer *answer)
{
    struct call c;
    if (!call_init(&c, p, on, rng, dtype)) {
        return;
    }
    int64_t per_kv = p->heads / p->kv_heads;
    struct cut cut = {0};
    for (cut.head = 0; cut.head < p->heads; cut.head += cut.heads) {
        cut.heads =
            p->is_whole ? p->heads : test_rng_range(&c.rng, 1, p->heads - cut.head);
        cut.kv = cut.head / per_kv;
        cut.kvs = (cut.head + cut.heads - 1) / per_kv - cut.kv + 1;
        run_heads(&c, cut);
    }
    call_read(&c, OUT, answer->out);
    call_read(&c, LSE, answer->lse);
    call_read(&c, DQ, answer->dq);
    call_read(&c, DK, answer->dk);
    call_read(&c, DV, answer->dv);
    for (int role = 0; role < TENSORS; role++) {
        tensor_end(on, &c.t[role]);
    }
}

/* ---- judging ---- */

static double largest(const double *data, int64_t count)
{
    double top = 0;
    for (int64_t i = 0; i < count; i++) {
        top = isfinite(data[i]) && fabs(data[i]) > top ? fabs(data[i]) : top;
    }
    return top;
}

static bool is_half(enum cp_dtype dtype)
{
    return dtype == CP_DTYPE_BFLOAT16 || dtype == CP_DTYPE_FLOAT16;
}

/* The rounding of a score is a relative error of its weight, half of the score in size: of no
 * account among the few roundings allowed while scores are ordinary. */
static double spread_of(const struct problem *p, const struct answer *truth)
{
    return 1 + largest(truth->lse, q_count(p)) / 4;
}

static double eps_of(const struct problem *p, const struct answer *truth)
{
    return judge_roundoff(p->dtype) * (is_half(p->dtype) ? 1 : 16) *
           spread_of(p, truth);
}

static void judge_forward(const struct problem *p, const char *name,
                          const struct answer *got, const struct answer *plain,
                          const struct answer *truth)
{
    int64_t rows = q_count(p);
    double lse_eps = judge_roundoff(cp_dtype_sum(p->dtype)) * 16 * spread_of(p, truth);
    judge(name, "out", rows * p->value_dim, got->out, truth->out, plain->out, 3,
          eps_of(p, truth), 1);
    judge(name, "lse", rows, got->lse, truth->lse, plain->lse, 3, lse_eps, 1);
}

/* Runs the problem on both, and once more for the truth. Allowed is three times the
 * generic kernel's error in the same dtype. */
static void compare(const struct problem *p, struct test_rng rng,
                    const struct machine *cuda)
{
    struct machine host = host_machine();
    struct answer got = answer_new(p), plain = answer_new(p), truth = answer_new(p);
    run(p, cuda, rng, p->dtype, &got);
    run(p, &host, rng, p->dtype, &plain);
    run(p, &host, rng, CP_DTYPE_FLOAT64, &truth);
    int64_t rows = q_count(p), keys = k_count(p);
    double eps = eps_of(p, &truth);
    /* The gradient of a score is a difference of two numbers of this size. */
    double slope = largest(p->dout, rows * p->value_dim) * sqrt((double)p->value_dim) *
                   p->scale * p->size;
    judge_forward(p, cuda->ops->name, &got, &plain, &truth);
    judge(cuda->ops->name, "dq", rows * p->dim, got.dq, truth.dq, plain.dq, 3, eps,
          slope);
    judge(cuda->ops->name, "dk", keys * p->dim, got.dk, truth.dk, plain.dk, 3, eps,
          slope);
    judge(cuda->ops->name, "dv", keys * p->value_dim, got.dv, truth.dv, plain.dv, 3,
          eps, 1);
    answer_free(&got);
    answer_free(&plain);
    answer_free(&truth);
}

/* Forward alone, and begun and ended by attend, the answer is as good; without an lse to give it
 * is the same, and none is given. */
static void compare_ends(const struct problem *p, struct test_rng rng,
                         const struct machine *cuda)
{
    struct machine host = host_machine();
    struct problem ended = *p, mute = *p;
    struct answer got = answer_new(p), same = answer_new(p);
    struct answer plain = answer_new(p), truth = answer_new(p);
    ended.ends = BY_ATTEND;
    mute.ends = WITHOUT_LSE;
    run(&ended, cuda, rng, p->dtype, &got);
    run(&mute, cuda, rng, p->dtype, &same);
    run(p, &host, rng, p->dtype, &plain);
    run(p, &host, rng, CP_DTYPE_FLOAT64, &truth);
    int64_t rows = q_count(p);
    judge_forward(p, cuda->ops->name, &got, &plain, &truth);
    CHECK_EQ_BYTES(got.out, same.out, (size_t)(rows * p->value_dim) * sizeof *got.out);
    for (int64_t i = 0; i < rows; i++) {
        CHECK(isnan(same.lse[i]));
    }
    answer_free(&got);
    answer_free(&same);
    answer_free(&plain);
    answer_free(&truth);
}

static void many_calls(const struct cp_kernel_ops *ops, enum cp_dtype dtype,
                       uint64_t stream, int count)
{
    struct test_rng rng = test_rng_init(stream);
    struct machine cuda;
    REQUIRE(cuda_machine(&cuda));
    cuda.ops = ops;
    judge_worst = 0;
    for (int i = 0; i < count; i++) {
        struct problem p;
        problem_init(&p, &rng, dtype);
        compare(&p, rng, &cuda);
        (void)test_rng_next(&rng);
        problem_free(&p);
    }
    printf("%s, %s: %d calls, worst error %.2f of what is allowed\n", ops->name,
           cp_dtype_name(dtype), count, judge_worst);
    cuda_machine_close(&cuda);
}

TEST(float32)
{
    many_calls(&cp_kernel_cuda_plain_ops, CP_DTYPE_FLOAT32, 1, 60);
}

TEST(float64)
{
    many_calls(&cp_kernel_cuda_plain_ops, CP_DTYPE_FLOAT64, 2, 40);
}

TEST(bfloat16)
{
    many_calls(&cp_kernel_cuda_plain_ops, CP_DTYPE_BFLOAT16, 3, 40);
}

TEST(float16)
{
    many_calls(&cp_kernel_cuda_plain_ops, CP_DTYPE_FLOAT16, 4, 40);
}

/* Any call shows ThreadSanitizer a barrier that is missing. */
enum { OWN_CALLS = TEST_UNDER_TSAN ? 8 : 30, OWN_SPECIALS = TEST_UNDER_TSAN ? 2 : 10 };

TEST(own_float32)
{
    many_calls(&cp_kernel_own_ops, CP_DTYPE_FLOAT32, 36, OWN_CALLS);
}

TEST(own_bfloat16)
{
    many_calls(&cp_kernel_own_ops, CP_DTYPE_BFLOAT16, 30, OWN_CALLS);
}

TEST(own_float16)
{
    many_calls(&cp_kernel_own_ops, CP_DTYPE_FLOAT16, 31, OWN_CALLS);
}

/* Dims, rows and keys just below, at and above what the own kernel's tiles, chunks and lanes
 * have; each dim meets each count at times, with the rest at random. */
static void own_edges(enum cp_dtype dtype, uint64_t stream, int calls)
{
    static const int64_t dims[] = {1,  2,  15,  16,  17,  31,  33, 63,
                                   64, 65, 127, 128, 129, 255, 256};
    static const int64_t counts[] = {1,  7,  8,  15, 16, 17, 23, 24, 25,
                                     31, 32, 33, 63, 64, 65, 95, 96, 97};
    enum {
        DIMS = sizeof dims / sizeof dims[0],
        COUNTS = sizeof counts / sizeof counts[0]
    };
    struct test_rng rng = test_rng_init(stream);
    struct machine cuda;
    REQUIRE(cuda_machine(&cuda));
    cuda.ops = &cp_kernel_own_ops;
    judge_worst = 0;
    for (int i = 0; i < calls; i++) {
        struct problem p = {.dtype = dtype, .batch = 1, .size = 1};
        p.dim = dims[i % DIMS];
        p.value_dim =
            i / DIMS % 2 == 0 ? p.dim : dims[test_rng_range(&rng, 0, DIMS - 1)];
        p.rows = counts[test_rng_range(&rng, 0, COUNTS - 1)];
        p.keys = counts[test_rng_range(&rng, 0, COUNTS - 1)];
        p.kv_heads = 1;
        p.heads = test_rng_range(&rng, 1, 2);
        p.scale = 1 / sqrt((double)p.dim);
        p.is_causal = test_rng_range(&rng, 0, 1) == 1;
        p.q_first = test_rng_range(&rng, 0, 40);
        p.k_first = test_rng_range(&rng, 0, 40);
        problem_fill(&p, &rng);
        if (test_rng_range(&rng, 0, 1) == 1) {
            problem_mask(&p, &rng);
        }
        problem_context(&p);
        compare(&p, rng, &cuda);
        (void)test_rng_next(&rng);
        problem_free(&p);
    }
    printf("%s, %s, edges: %d calls, worst error %.2f of what is allowed\n",
           cuda.ops->name, cp_dtype_name(dtype), calls, judge_worst);
    cuda_machine_close(&cuda);
}

TEST(own_edges_float32)
{
    own_edges(CP_DTYPE_FLOAT32, 37, 2 * OWN_CALLS);
}

TEST(own_edges_bfloat16)
{
    own_edges(CP_DTYPE_BFLOAT16, 38, OWN_CALLS);
}

/* A row that sees one key has weight 1, whatever its score is: in float32 dout . v and
 * delta are the same number, and no gradient is left of q and k. */
TEST(one_key_leaves_no_slope)
{
    const struct cp_kernel_ops *const ops[] = {&cp_kernel_cuda_plain_ops,
                                               &cp_kernel_own_ops};
    const int64_t dims[] = {1, 17, 64, 72, 128, 255};
    struct test_rng rng = test_rng_init(39);
    struct machine cuda;
    REQUIRE(cuda_machine(&cuda));
    for (int i = 0; i < 12; i++) {
        struct problem p = {.dtype = CP_DTYPE_FLOAT32,
                            .batch = 2,
                            .rows = 35,
                            .keys = 1,
                            .heads = 3,
                            .kv_heads = 1,
                            .dim = dims[i / 2],
                            .value_dim = dims[i / 2],
                            .scale = 0.25,
                            .size = 1};
        cuda.ops = ops[i % 2];
        problem_fill(&p, &rng);
        problem_context(&p);
        struct answer got = answer_new(&p);
        run(&p, &cuda, rng, p.dtype, &got);
        CHECK(largest(got.dq, q_count(&p) * p.dim) == 0);
        CHECK(largest(got.dk, k_count(&p) * p.dim) == 0);
        CHECK(largest(got.dv, k_count(&p) * p.value_dim) > 0);
        answer_free(&got);
        problem_free(&p);
    }
    cuda_machine_close(&cuda);
}

/* ---- blocks answered by themselves, and merged ---- */

/* The plain kernel as any other that answers one block at a time: its out and lse, then
 * the merge. Rows that a mask leaves without a key have lse -inf. */
static enum cp_code attend_and_merge(const struct cp_attend_args *args,
                                     struct cp_stream *stream)
{
    const int64_t *n = args->state.n;
    enum cp_dtype sum = cp_dtype_sum(args->q.dtype);
    int64_t rows = n[0] * n[1] * n[2];
    int64_t sum_bytes = cp_dtype_bytes(sum);
    int64_t by_batch = args->state.stride[0] * n[0];
    int64_t by_head = args->state.stride[2] * n[2];
    int64_t state_bytes = by_batch > by_head ? by_batch : by_head;
    int64_t out_bytes = cp_round_up(rows * n[3] * cp_dtype_bytes(args->q.dtype), 64);
    cudaStream_t on = (cudaStream_t)stream;
    char *room = NULL;
    if (!CHECK(cudaMallocAsync((void **)&room,
                               (size_t)(state_bytes + out_bytes + rows * sum_bytes + 1),
                               on) == cudaSuccess)) {
        return CP_ERR_NO_MEMORY;
    }
    CHECK(cudaMemsetAsync(room, 0, (size_t)state_bytes, on) == cudaSuccess);
    struct cp_attend_args alone = *args;
    alone.state.data = room;
    struct cp_finish_args finish = {
        .state = alone.state,
        .out =
            cp_view_compact(room + state_bytes, args->q.dtype, n[0], n[1], n[2], n[3]),
        .lse =
            cp_view_compact(room + state_bytes + out_bytes, sum, n[0], n[1], n[2], 1),
    };
    struct cp_merge_args merge = {
        .out = finish.out,
        .lse = finish.lse,
        .state = args->state,
        .is_first = args->is_first,
        .result = args->out,
        .result_lse = args->lse,
    };
    alone.is_first = false;
    alone.out.data = alone.lse.data = NULL;
    CHECK(cp_cuda_attend(&alone, stream) == CP_OK);
    CHECK(cp_cuda_finish(&finish, stream) == CP_OK);
    CHECK(cp_cuda_merge(&merge, stream) == CP_OK);
    CHECK(cudaFreeAsync(room, on) == cudaSuccess);
    return CP_OK;
}

TEST(merged_blocks_are_one_attention)
{
    const enum cp_dtype dtypes[] = {CP_DTYPE_FLOAT32, CP_DTYPE_FLOAT64,
                                    CP_DTYPE_BFLOAT16, CP_DTYPE_FLOAT16};
    struct cp_kernel_ops ops = cp_kernel_cuda_plain_ops;
    ops.name = "merged";
    ops.attend = attend_and_merge;
    for (uint64_t i = 0; i < sizeof dtypes / sizeof dtypes[0]; i++) {
        many_calls(&ops, dtypes[i], 10 + i, 30);
    }
}

/* ---- torch's ops ---- */

/* A call of which torch may take blocks: seldom a mask or a dlse, dims of 8, at times the
 * diagonal of a causal one. */
static void problem_for_torch(struct problem *p, struct test_rng *rng,
                              enum cp_dtype dtype)
{
    problem_init(p, rng, dtype);
    while (p->dim % 8 != 0 || p->value_dim % 8 != 0 ||
           (p->mask != NULL && test_rng_range(rng, 0, 9) > 0)) {
        problem_free(p);
        problem_init(p, rng, dtype);
    }
    p->has_dlse = p->has_dlse && test_rng_range(rng, 0, 3) == 0;
    if (p->is_causal && p->rows <= p->keys && test_rng_range(rng, 0, 1) == 0) {
        p->is_whole = true;
        p->keys = p->rows;
        p->q_first = p->k_first;
    }
}

/* `cudnn`: the version that torch has. */
static void torch_calls(uint64_t stream, int64_t cudnn, int count,
                        struct simtorch_counts *counts)
{
    const enum cp_dtype dtypes[] = {CP_DTYPE_BFLOAT16, CP_DTYPE_FLOAT16,
                                    CP_DTYPE_FLOAT32};
    struct test_rng rng = test_rng_init(stream);
    struct machine cuda;
    REQUIRE(cuda_machine(&cuda));
    simtorch_load(true);
    simtorch_set_cudnn(cudnn);
    simtorch_set_stream(cuda.stream);
    cuda.ops = &cp_kernel_torch_ops;
    CHECK(cuda.ops->is_available());
    judge_worst = 0;
    for (int i = 0; i < count; i++) {
        struct problem p;
        problem_for_torch(&p, &rng, dtypes[i % 3]);
        p.is_whole = p.is_whole || i % 2 == 0;
        p.is_packed = i % 4 > 0;
        compare(&p, rng, &cuda);
        (void)test_rng_next(&rng);
        problem_free(&p);
    }
    *counts = simtorch_counts();
    printf("flash %d, efficient %d, cudnn %d, causal %d, grouped %d; gradients: flash "
           "%d, efficient %d; worst error %.2f of what is allowed\n",
           counts->flash, counts->efficient, counts->cudnn, counts->causal,
           counts->grouped, counts->flash_gradient, counts->efficient_gradient,
           judge_worst);
    CHECK_EQ_I64(counts->refused, 0);
    CHECK_EQ_I64(counts->alive, 0);
    simtorch_load(false);
    cuda_machine_close(&cuda);
}

TEST(torch_answers_blocks)
{
    struct simtorch_counts counts = {0};
    torch_calls(20, 0, 60, &counts);
    CHECK(counts.flash > 10 && counts.efficient > 5);
    CHECK(counts.causal > 2 && counts.grouped > 5);
    CHECK(counts.flash_gradient > 10 && counts.efficient_gradient > 5);
    CHECK_EQ_I64(counts.cudnn, 0);
}

TEST(torch_answers_blocks_with_cudnn)
{
    struct simtorch_counts counts = {0};
    torch_calls(21, 91501, 40, &counts);
    CHECK(counts.cudnn > 10 && counts.flash_gradient > 10);
}

/* ---- attention that begins and ends by itself ---- */

static void many_ends(struct machine *cuda, enum cp_dtype dtype, uint64_t stream,
                      int count, bool is_for_torch)
{
    struct test_rng rng = test_rng_init(stream);
    left_alone = 0;
    judge_worst = 0;
    for (int i = 0; i < count; i++) {
        struct problem p;
        if (is_for_torch) {
            problem_for_torch(&p, &rng, dtype);
        } else {
            problem_init(&p, &rng, dtype);
        }
        p.is_whole = p.is_whole || i % 3 == 0;
        p.is_packed = is_for_torch && i % 4 > 0;
        compare_ends(&p, rng, cuda);
        (void)test_rng_next(&rng);
        problem_free(&p);
    }
    printf("%s, %s, ends: %d calls, %d states left alone, worst error %.2f of what is "
           "allowed\n",
           cuda->ops->name, cp_dtype_name(dtype), count, left_alone, judge_worst);
    CHECK((left_alone > 0) == (cuda->leaves_state != NEVER));
}

TEST(attend_begins_and_ends_by_itself)
{
    const enum cp_dtype dtypes[] = {CP_DTYPE_FLOAT32, CP_DTYPE_BFLOAT16,
                                    CP_DTYPE_FLOAT16, CP_DTYPE_FLOAT64};
    struct cp_kernel_ops merged = cp_kernel_cuda_plain_ops;
    merged.name = "merged";
    merged.attend = attend_and_merge;
    struct machine cuda;
    REQUIRE(cuda_machine(&cuda));
    for (uint64_t i = 0; i < 4; i++) {
        cuda.ops = &cp_kernel_cuda_plain_ops;
        cuda.leaves_state = NEVER;
        many_ends(&cuda, dtypes[i], 50 + i, 40, false);
        cuda.ops = &merged;
        cuda.leaves_state = ALWAYS;
        many_ends(&cuda, dtypes[i], 60 + i, 20, false);
        if (dtypes[i] != CP_DTYPE_FLOAT64) {
            cuda.ops = &cp_kernel_own_ops;
            many_ends(&cuda, dtypes[i], 70 + i, OWN_CALLS, false);
        }
    }
    cuda_machine_close(&cuda);
}

TEST(blocks_that_torch_answers_begin_and_end_by_themselves)
{
    const enum cp_dtype dtypes[] = {CP_DTYPE_FLOAT32, CP_DTYPE_BFLOAT16,
                                    CP_DTYPE_FLOAT16};
    struct machine cuda;
    REQUIRE(cuda_machine(&cuda));
    simtorch_load(true);
    simtorch_set_stream(cuda.stream);
    cuda.ops = &cp_kernel_torch_ops;
    cuda.leaves_state = NOT_CAUSAL;
    for (uint64_t i = 0; i < 3; i++) {
        many_ends(&cuda, dtypes[i], 80 + i, 40, true);
    }
    struct simtorch_counts counts = simtorch_counts();
    CHECK(counts.flash > 10 && counts.efficient > 5 && counts.causal > 5);
    CHECK_EQ_I64(counts.refused, 0);
    CHECK_EQ_I64(counts.alive, 0);
    simtorch_load(false);
    cuda_machine_close(&cuda);
}

/* A package that is the plain kernel. */
struct plain_package {
    struct cp_package package;
    struct cp_stream *stream;
    int answers, causal;
};

static enum cp_code package_answer(const struct cp_package *package,
                                   const struct cp_package_block *block,
                                   struct cp_package_answer *out)
{
    struct plain_package *own = package->owner;
    const int64_t *n = block->q.n;
    int64_t dim = block->v.n[3], rows = n[0] * n[1] * n[2];
    enum cp_dtype dtype = block->q.dtype, sum = cp_dtype_sum(dtype);
    int64_t row_bytes = (dim + 2) * cp_dtype_bytes(sum);
    int64_t state_bytes = cp_round_up(rows * row_bytes, 64);
    int64_t out_bytes = cp_round_up(rows * dim * cp_dtype_bytes(dtype), 64);
    char *room = NULL;
    CHECK(block->k.n[1] > 0 && rows > 0);
    CHECK(!block->is_causal || block->k.n[1] == n[1]);
    if (!CHECK(cudaMallocAsync(
                   (void **)&room,
                   (size_t)(state_bytes + out_bytes + rows * cp_dtype_bytes(sum)),
                   (cudaStream_t)own->stream) == cudaSuccess)) {
        return CP_ERR_NO_MEMORY;
    }
    *out = (struct cp_package_answer){
        .out = cp_view_compact(room + state_bytes, dtype, n[0], n[1], n[2], dim),
        .lse =
            cp_view_compact(room + state_bytes + out_bytes, sum, n[0], n[1], n[2], 1),
        .held = room,
    };
    struct cp_attend_args args = {
        .q = block->q,
        .k = block->k,
        .v = block->v,
        .state = cp_view_compact(room, sum, n[0], n[1], n[2], dim),
        .is_first = true,
        .place = {.heads_per_kv = n[2] / block->k.n[2], .is_causal = block->is_causal},
        .scale = block->scale,
    };
    args.state.stride[2] = n[1] * row_bytes;
    args.state.stride[0] = n[2] * n[1] * row_bytes;
    struct cp_finish_args finish = {
        .state = args.state, .out = out->out, .lse = out->lse};
    own->answers++;
    own->causal += block->is_causal;
    CP_TRY(cp_cuda_attend(&args, own->stream));
    return cp_cuda_finish(&finish, own->stream);
}

static void package_release(const struct cp_package *package, void **held)
{
    struct plain_package *own = package->owner;
    CHECK(cudaFreeAsync(*held, (cudaStream_t)own->stream) == cudaSuccess);
    *held = NULL;
}

TEST(blocks_that_a_package_answers_begin_and_end_by_themselves)
{
    const enum cp_dtype dtypes[] = {CP_DTYPE_FLOAT32, CP_DTYPE_BFLOAT16,
                                    CP_DTYPE_FLOAT16};
    struct machine cuda;
    REQUIRE(cuda_machine(&cuda));
    struct plain_package own = {
        .package = {.answer = package_answer,
                    .release = package_release,
                    .owner = &own},
        .stream = stream_of(&cuda),
    };
    cuda.ops = &cp_kernel_package_ops;
    cuda.package = &own.package;
    cuda.leaves_state = NOT_CAUSAL;
    for (uint64_t i = 0; i < 3; i++) {
        struct test_rng rng = test_rng_init(90 + i);
        left_alone = 0;
        for (int call = 0; call < 40; call++) {
            struct problem p;
            problem_init(&p, &rng, dtypes[i]);
            free(p.mask); /* packages take none */
            p.mask = NULL;
            p.mask_dtype = CP_DTYPE_NONE;
            p.is_causal = call % 2 == 0;
            problem_context(&p);
            compare_ends(&p, rng, &cuda);
            (void)test_rng_next(&rng);
            problem_free(&p);
        }
        CHECK(left_alone > 0);
    }
    CHECK(own.answers > own.causal && own.causal > 10);
    cuda_machine_close(&cuda);
}

/* Thousands of keys: sums must not lose digits with length. */
TEST(long_sums)
{
    const struct cp_kernel_ops *const ops[] = {&cp_kernel_cuda_plain_ops,
                                               &cp_kernel_own_ops};
    struct test_rng rng = test_rng_init(6);
    struct machine cuda;
    REQUIRE(cuda_machine(&cuda));
    struct problem p = {.dtype = CP_DTYPE_FLOAT32,
                        .batch = 1,
                        .rows = 33,
                        .keys = 9001,
                        .heads = 1,
                        .kv_heads = 1,
                        .dim = 16,
                        .value_dim = 16,
                        .scale = 0.25,
                        .size = 1};
    problem_fill(&p, &rng);
    for (int i = 0; i < 2; i++) {
        cuda.ops = ops[i];
        compare(&p, rng, &cuda);
    }
    problem_free(&p);
    cuda_machine_close(&cuda);
}

/* NaN and infinity in any input: what is NaN, infinite or a number is the same as with
 * the generic kernel. Its gradients have more NaN, since it multiplies zeros that stand
 * for no row, and it looks at some keys behind a query: those are not asked for. */
static void special_numbers(const struct cp_kernel_ops *ops, enum cp_dtype dtype,
                            uint64_t stream, int count)
{
    struct test_rng rng = test_rng_init(stream);
    struct machine host = host_machine(), cuda;
    REQUIRE(cuda_machine(&cuda));
    cuda.ops = ops;
    for (int i = 0; i < count; i++) {
        struct problem p;
        problem_init(&p, &rng, dtype);
        p.is_causal = false;
        p.scale /= p.size > 1 ? p.size * p.size : 1; /* no weight underflows */
        double *const inputs[] = {p.q, p.k, p.v, p.dout};
        const int64_t counts[] = {q_count(&p) * p.dim, k_count(&p) * p.dim,
                                  k_count(&p) * p.value_dim, q_count(&p) * p.value_dim};
        const double special[] = {(double)NAN, HUGE_VAL, -HUGE_VAL};
        int which = (int)test_rng_range(&rng, 0, 3);
        for (int k = 0; k < 3 && counts[which] > 0; k++) {
            inputs[which][test_rng_range(&rng, 0, counts[which] - 1)] =
                special[test_rng_range(&rng, 0, 2)];
        }
        struct answer got = answer_new(&p), want = answer_new(&p);
        run(&p, &cuda, rng, p.dtype, &got);
        run(&p, &host, rng, p.dtype, &want);
        const struct {
            const char *what;
            const double *got, *want;
            int64_t count;
        } all[] = {{"out", got.out, want.out, counts[3]},
                   {"lse", got.lse, want.lse, q_count(&p)},
                   {"dq", got.dq, want.dq, counts[0]},
                   {"dk", got.dk, want.dk, counts[1]},
                   {"dv", got.dv, want.dv, counts[2]}};
        for (size_t k = 0; k < sizeof all / sizeof all[0]; k++) {
            for (int64_t j = 0; j < all[k].count; j++) {
                double x = all[k].got[j], y = all[k].want[j];
                bool is_forward = k < 2;
                bool is_same = isnan(y) ? isnan(x) || !is_forward
                                        : !isnan(x) && isinf(x) == isinf(y) &&
                                              (!isinf(y) || x == y);
                if (!is_same) {
                    (void)test_fail(__FILE__, __LINE__,
                                    "special in input %d: %s[%lld] is %g, want %g",
                                    which, all[k].what, (long long)j, x, y);
                }
            }
        }
        (void)test_rng_next(&rng);
        answer_free(&got);
        answer_free(&want);
        problem_free(&p);
    }
    cuda_machine_close(&cuda);
}

TEST(special_numbers_spread_as_on_the_host)
{
    special_numbers(&cp_kernel_cuda_plain_ops, CP_DTYPE_FLOAT32, 8, 20);
    special_numbers(&cp_kernel_cuda_plain_ops, CP_DTYPE_BFLOAT16, 9, 20);
    special_numbers(&cp_kernel_own_ops, CP_DTYPE_FLOAT32, 40, 2 * OWN_SPECIALS);
    special_numbers(&cp_kernel_own_ops, CP_DTYPE_BFLOAT16, 32, OWN_SPECIALS);
    special_numbers(&cp_kernel_own_ops, CP_DTYPE_FLOAT16, 33, OWN_SPECIALS);
}

/* Sums are made in the same order in every run. */
static void same_gradients(const struct cp_kernel_ops *ops, enum cp_dtype dtype,
                           uint64_t stream)
{
    struct test_rng rng = test_rng_init(stream);
    struct machine cuda;
    REQUIRE(cuda_machine(&cuda));
    cuda.ops = ops;
    for (int i = 0; i < 5; i++) {
        struct problem p;
        problem_init(&p, &rng, dtype);
        struct answer a = answer_new(&p), b = answer_new(&p);
        run(&p, &cuda, rng, p.dtype, &a);
        run(&p, &cuda, rng, p.dtype, &b);
        size_t keys = (size_t)k_count(&p) * sizeof(double);
        size_t rows = (size_t)q_count(&p) * sizeof(double);
        CHECK_EQ_BYTES(a.dq, b.dq, rows * (size_t)p.dim);
        CHECK_EQ_BYTES(a.dk, b.dk, keys * (size_t)p.dim);
        CHECK_EQ_BYTES(a.dv, b.dv, keys * (size_t)p.value_dim);
        answer_free(&a);
        answer_free(&b);
        problem_free(&p);
    }
    cuda_machine_close(&cuda);
}

TEST(gradients_are_the_same_in_every_run)
{
    same_gradients(&cp_kernel_cuda_plain_ops, CP_DTYPE_FLOAT32, 34);
    same_gradients(&cp_kernel_own_ops, CP_DTYPE_FLOAT32, 41);
    same_gradients(&cp_kernel_own_ops, CP_DTYPE_BFLOAT16, 35);
}

TEST(selection)
{
    for (int dtype = CP_DTYPE_NONE; dtype < CP_DTYPE_COUNT; dtype++) {
        const struct cp_kernel_ops *ops = NULL;
        struct cp_format format = {0};
        enum cp_code code = cp_kernel_cuda_select(
            0, CP_BACKEND_NATIVE, (enum cp_dtype)dtype, 65, 3, &ops, &format);
        bool attends = cp_dtype_attends((enum cp_dtype)dtype);
        CHECK_EQ_I64(code, attends ? CP_OK : CP_ERR_UNSUPPORTED);
        bool is_own = attends && dtype != CP_DTYPE_FLOAT64;
        CHECK(ops == (is_own    ? &cp_kernel_own_ops
                      : attends ? &cp_kernel_cuda_plain_ops
                                : NULL));
        if (attends) {
            int64_t sum = cp_dtype_bytes(cp_dtype_sum((enum cp_dtype)dtype));
            CHECK_EQ_I64(format.id, CP_FORMAT_CUDA_PLAIN + dtype);
            CHECK(format.has_plain_keys);
            CHECK_EQ_I64(cp_panel_bytes(&format.state, 64), 64 * 5 * sum);
            CHECK(ops->abi == CP_KERNEL_ABI);
            CHECK_EQ_STR(ops->name, is_own ? "cuda_own" : "cuda_plain");
        }
    }
    const struct cp_kernel_ops *ops = NULL;
    struct cp_format format;
    CHECK(cp_kernel_cuda_select(0, CP_BACKEND_NATIVE, CP_DTYPE_FLOAT32, 0, 8, &ops,
                                &format) == CP_ERR_UNSUPPORTED);
    CHECK(cp_kernel_cuda_select(0, CP_BACKEND_NATIVE, CP_DTYPE_FLOAT32, 8, 1 << 20,
                                &ops, &format) == CP_ERR_UNSUPPORTED);
    CHECK(ops == NULL);
}
