/* One rank's attention on one GPU, without peers: the plan, schedule, executor, device and
 * kernels of a call, over a mirror (comm_mirror.h). For benchmarks/gpu_library.py, which
 * loads it beside torch; errors are told by bench_error. */
#include <math.h>
#include <string.h>

#include "base/mem.h"
#include "comm_mirror.h"
#include "cuda_api.h"
#include "device_cuda.h"
#include "exec/run.h"
#include "kernel_cuda.h"
#include "plan/agree.h"

#define API __attribute__((visibility("default")))

enum { MOST_RANKS = 64 };

/* What a call is; every rank has as many rows. */
struct bench_call {
    int32_t ordinal; /* of the GPU */
    int32_t ring, ulysses;
    int32_t
        without_attention; /* nothing attends: what is left is the way of the data */
    int64_t batch, rows, heads, dim;
    char dtype[16];
};

struct bench {
    struct bench_call call;
    struct cp_device *device;
    struct comm_mirror comm;
    struct cp_kernel_ops kernel;
    struct cp_plan *plan;
    struct cp_schedule *schedule;
    void *workspace; /* of the device */
    void *room;
    enum cp_dtype dtype;
    struct cp_panel state; /* of the kernel */
};

API void bench_close(struct bench **address);
API int bench_open(const struct bench_call *call, struct bench **out);
API int bench_run(struct bench *bench, void *q, void *k, void *v, void *out,
                  void *stream);
API int bench_merge(struct bench *bench, int blocks, void *const *outs,
                    void *const *lses, void *out, void *stream);
API int64_t bench_workspace_bytes(const struct bench *bench);
API const char *bench_kernel(const struct bench *bench);
API const char *bench_error(void);

static enum cp_dtype dtype_of(const char *name)
{
    for (int dtype = 0; dtype < CP_DTYPE_COUNT; dtype++) {
        if (strcmp(cp_dtype_name((enum cp_dtype)dtype), name) == 0) {
            return (enum cp_dtype)dtype;
        }
    }
    return CP_DTYPE_NONE;
}

static enum cp_code attend_nothing(const struct cp_attend_args *args,
                                   struct cp_stream *stream)
{
    (void)args;
    (void)stream;
    return CP_OK;
}

static enum cp_code select_kernel(struct bench *bench, struct cp_format *format)
{
    const struct cp_kernel_ops *kernel = NULL;
    int64_t dim = bench->call.dim;
    CP_TRY(cp_kernel_cuda_select(0, CP_BACKEND_NATIVE, bench->dtype, dim, dim, &kernel,
                                 format));
    bench->kernel = *kernel;
    bench->state = format->state;
    if (bench->call.without_attention) {
        bench->kernel.attend = attend_nothing;
    }
    return CP_OK;
}

static enum cp_code make_plan(struct bench *bench, const struct cp_format *format)
{
    const struct bench_call *call = &bench->call;
    struct cp_record records[MOST_RANKS];
    int world = call->ring * call->ulysses;
    double scale = 1.0 / sqrt((double)call->dim);
    memset(records, 0, sizeof records);
    for (int rank = 0; rank < world; rank++) {
        struct cp_record *record = &records[rank];
        record->call = (struct cp_call){
            .op = CP_OP_ATTENTION,
            .batch = call->batch,
            .heads = call->heads,
            .kv_heads = call->heads,
            .head_dim = call->dim,
            .value_dim = call->dim,
            .dtype = (int32_t)bench->dtype,
            .ring_degree = call->ring,
            .ulysses_degree = call->ulysses,
            .format = format->id,
            .place = CP_ON_ACCELERATOR,
        };
        memcpy(&record->call.scale_bits, &scale, sizeof scale);
        record->sizes[CP_SIZE_Q_ROWS] = record->sizes[CP_SIZE_KV_ROWS] = call->rows;
    }
    CP_TRY(cp_agree(records, world));
    CP_TRY(cp_plan_create(records, world, format, &bench->plan));
    return cp_schedule_create(bench->plan, 0, CP_TWO_SIDED, &bench->schedule);
}

static enum cp_code check(const struct bench_call *call)
{
    bool is_right = call->ring >= 1 && call->ulysses >= 1 &&
                    (int64_t)call->ring * call->ulysses <= MOST_RANKS &&
                    dtype_of(call->dtype) != CP_DTYPE_NONE;
    return is_right ? CP_OK
                    : cp_fail(CP_ERR_VALUE, "%d x %d ranks of %.15s: at most %d ranks",
                              (int)call->ring, (int)call->ulysses, call->dtype,
                              (int)MOST_RANKS);
}

static enum cp_code fill(struct bench *bench)
{
    struct cp_format format;
    const struct bench_call *call = &bench->call;
    CP_TRY(check(call));
    bench->dtype = dtype_of(call->dtype);
    CP_TRY(cp_device_cuda_create(call->ordinal, &bench->device));
    comm_mirror_init(&bench->comm, call->ring * call->ulysses, bench->device);
    CP_TRY(select_kernel(bench, &format));
    CP_TRY(make_plan(bench, &format));
    /* A run has a state of its own, so merging alone has room too. */
    CP_TRY(cp_cuda_alloc(call->ordinal, (size_t)bench_workspace_bytes(bench),
                         "a benchmark", &bench->workspace));
    return cp_mem_create(cp_run_room_bytes(bench->schedule), "a benchmark",
                         &bench->room);
}

int bench_open(const struct bench_call *call, struct bench **out)
{
    void *block = NULL;
    enum cp_code code = cp_mem_create(sizeof **out, "a benchmark", &block);
    if (code == CP_OK) {
        struct bench *bench = block;
        bench->call = *call;
        code = fill(bench);
        if (code != CP_OK) {
            bench_close(&bench);
        }
        *out = bench;
    }
    return (int)code;
}

/* The device is idle. */
void bench_close(struct bench **address)
{
    struct bench *bench = *address;
    if (bench == NULL) {
        return;
    }
    cp_mem_destroy(&bench->room);
    if (bench->workspace != NULL) {
        cp_cuda_free(bench->call.ordinal, &bench->workspace);
    }
    cp_schedule_destroy(&bench->schedule);
    cp_plan_destroy(&bench->plan);
    cp_device_cuda_destroy(&bench->device);
    cp_mem_destroy(address);
}

/* Tensors (batch, rows, heads, dim), contiguous. Enqueues. */
int bench_run(struct bench *bench, void *q, void *k, void *v, void *out, void *stream)
{
    const struct bench_call *call = &bench->call;
    struct cp_view tensors[CP_TENSORS];
    struct cp_run run;
    int before = 0;
    struct cp_view whole = cp_view_compact(NULL, bench->dtype, call->batch, call->rows,
                                           call->heads, call->dim);
    struct cp_run_env env = {
        .comm = &bench->comm.head,
        .device = bench->device,
        .kernel = &bench->kernel,
        .scratch = bench->workspace,
        .stream = stream,
        .seq = 1,
        .operation = "a benchmark",
    };
    void *const data[] = {q, k, v, out};
    const enum cp_tensor_role roles[] = {CP_TENSOR_Q, CP_TENSOR_K, CP_TENSOR_V,
                                         CP_TENSOR_OUT};
    memset(tensors, 0, sizeof tensors);
    for (int i = 0; i < 4; i++) {
        tensors[roles[i]] = whole;
        tensors[roles[i]].data = data[i];
    }
    cp_run_init(&run, &env, bench->schedule, tensors, bench->room);
    enum cp_code code = cp_cuda_enter(call->ordinal, &before);
    if (code == CP_OK) {
        code = cp_cuda_leave(call->ordinal, before, cp_run_finish(&run, 60.0));
    }
    return (int)code;
}

/* ---- merging alone ---- */

static enum cp_code merge(struct bench *bench, int blocks, void *const *outs,
                          void *const *lses, void *out, struct cp_stream *stream)
{
    const struct bench_call *call = &bench->call;
    enum cp_dtype sum = cp_dtype_sum(bench->dtype);
    int64_t b = call->batch, rows = call->rows, heads = call->heads, dim = call->dim;
    int64_t panel_bytes = cp_panel_bytes(&bench->state, rows);
    struct cp_view whole = cp_view_compact(out, bench->dtype, b, rows, heads, dim);
    struct cp_view state = cp_view_compact(bench->workspace, sum, b, rows, heads, dim);
    state.stride[0] = heads * panel_bytes;
    state.stride[2] = panel_bytes;
    CP_TRY(bench->device->ops->zero(bench->device, bench->workspace,
                                    (size_t)(b * heads * panel_bytes), stream));
    for (int block = 0; block < blocks; block++) {
        struct cp_merge_args args = {
            .out = whole,
            .lse = cp_view_compact(lses[block], sum, b, rows, heads, 1),
            .state = state,
        };
        args.out.data = outs[block];
        CP_TRY(cp_cuda_merge(&args, stream));
    }
    struct cp_finish_args finish = {.state = state, .out = whole};
    return bench->kernel.finish(&finish, stream);
}

/* Folds that many answers of a library's kernel, (batch, rows, heads, dim) and (batch,
 * rows, heads), into an empty state, and finishes it. Enqueues. */
int bench_merge(struct bench *bench, int blocks, void *const *outs, void *const *lses,
                void *out, void *stream)
{
    int before = 0;
    enum cp_code code = cp_cuda_enter(bench->call.ordinal, &before);
    if (code == CP_OK) {
        code = cp_cuda_leave(bench->call.ordinal, before,
                             merge(bench, blocks, outs, lses, out, stream));
    }
    return (int)code;
}

int64_t bench_workspace_bytes(const struct bench *bench)
{
    return cp_run_workspace_bytes(bench->schedule, 1);
}

const char *bench_kernel(const struct bench *bench)
{
    return bench->kernel.name;
}

const char *bench_error(void)
{
    return cp_last_error()->text;
}
