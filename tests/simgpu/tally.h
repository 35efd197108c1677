/* A CUDA device and its plain kernel that note, for the calling thread, what each entry
 * gave the device: how many operations, and how many bytes these write. */
#ifndef CP_TESTS_TALLY_H
#define CP_TESTS_TALLY_H

#include <string.h>

#include "device/device.h"
#include "kernel_cuda.h"
#include "simgpu.h"

/* The entries of struct cp_kernel_ops and struct cp_device_ops that do something. */
enum tally_kind {
    TALLY_ATTEND,
    TALLY_FINISH,
    TALLY_DELTA,
    TALLY_GRAD,
    TALLY_COPY, /* and pack */
    TALLY_ADD,
    TALLY_ZERO,
    TALLY_KINDS
};

struct tally {
    int device;
    uint64_t operations[TALLY_KINDS]; /* kernels, copies and memsets */
    int64_t written_bytes[TALLY_KINDS];
};

/* Where the calling thread's rank counts; NULL: nowhere. */
static _Thread_local struct tally *tally_here;

static uint64_t tally_operations(void)
{
    struct simgpu_stats stats = {0};
    if (tally_here != NULL) {
        stats = simgpu_device_stats(tally_here->device);
    }
    return stats.launches + stats.copies + stats.memsets;
}

/* `before`: tally_operations as the entry began; `code`: how it ended. */
static enum cp_code tally_note(enum tally_kind kind, uint64_t before, int64_t bytes,
                               enum cp_code code)
{
    if (tally_here != NULL) {
        tally_here->operations[kind] += tally_operations() - before;
        tally_here->written_bytes[kind] += bytes;
    }
    return code;
}

static int64_t tally_bytes(const struct cp_view *view)
{
    return view->data != NULL ? cp_view_count(view) * cp_dtype_bytes(view->dtype) : 0;
}

/* ---- the kernel ---- */

/* A row has n[3] outputs, maximum and sum. */
static int64_t tally_state_bytes(const struct cp_attend_args *args)
{
    const int64_t *n = args->state.n;
    int64_t row_bytes = (n[3] + 2) * cp_dtype_bytes(cp_dtype_sum(args->q.dtype));
    return n[0] * n[1] * n[2] * row_bytes;
}

static enum cp_code tally_attend(const struct cp_attend_args *args,
                                 struct cp_stream *stream)
{
    uint64_t before = tally_operations();
    return tally_note(TALLY_ATTEND, before,
                      args->out.data != NULL
                          ? tally_bytes(&args->out) + tally_bytes(&args->lse)
                          : tally_state_bytes(args),
                      cp_kernel_cuda_plain_ops.attend(args, stream));
}

static enum cp_code tally_finish(const struct cp_finish_args *args,
                                 struct cp_stream *stream)
{
    uint64_t before = tally_operations();
    return tally_note(TALLY_FINISH, before,
                      tally_bytes(&args->out) + tally_bytes(&args->lse),
                      cp_kernel_cuda_plain_ops.finish(args, stream));
}

static enum cp_code tally_delta(const struct cp_delta_args *args,
                                struct cp_stream *stream)
{
    uint64_t before = tally_operations();
    return tally_note(TALLY_DELTA, before, tally_bytes(&args->delta),
                      cp_kernel_cuda_plain_ops.delta(args, stream));
}

static enum cp_code tally_grad(const struct cp_grad_args *args,
                               struct cp_stream *stream)
{
    uint64_t before = tally_operations();
    int64_t bytes =
        tally_bytes(&args->dq) + tally_bytes(&args->dk) + tally_bytes(&args->dv);
    return tally_note(TALLY_GRAD, before, bytes,
                      cp_kernel_cuda_plain_ops.grad(args, stream));
}

static struct cp_kernel_ops tally_kernel;

static enum cp_code tally_select(int limit, enum cp_backend backend,
                                 enum cp_dtype dtype, int64_t head_dim,
                                 int64_t value_dim, const struct cp_kernel_ops **out,
                                 struct cp_format *format)
{
    CP_TRY(
        cp_kernel_cuda_select(limit, backend, dtype, head_dim, value_dim, out, format));
    *out = &tally_kernel;
    return CP_OK;
}

/* ---- the device ---- */

static struct cp_device_ops tally_device;
static const struct cp_device_ops *tally_inner;

static enum cp_code tally_copy(struct cp_device *device, const struct cp_copy *copies,
                               int count, struct cp_stream *stream)
{
    uint64_t before = tally_operations();
    int64_t bytes = 0;
    for (int i = 0; i < count; i++) {
        bytes += tally_bytes(&copies[i].dst);
    }
    return tally_note(TALLY_COPY, before, bytes,
                      tally_inner->copy(device, copies, count, stream));
}

static enum cp_code tally_add(struct cp_device *device, const struct cp_view *dst,
                              const struct cp_view *src, struct cp_stream *stream)
{
    uint64_t before = tally_operations();
    return tally_note(TALLY_ADD, before, tally_bytes(dst),
                      tally_inner->add(device, dst, src, stream));
}

static enum cp_code tally_zero(struct cp_device *device, void *data, size_t bytes,
                               struct cp_stream *stream)
{
    uint64_t before = tally_operations();
    return tally_note(TALLY_ZERO, before, (int64_t)bytes,
                      tally_inner->zero(device, data, bytes, stream));
}

/* The table in place of a CUDA device's own; all have the same. Not from two threads. */
static const struct cp_device_ops *tally_over(const struct cp_device_ops *inner)
{
    tally_kernel = cp_kernel_cuda_plain_ops;
    tally_kernel.attend = tally_attend;
    tally_kernel.finish = tally_finish;
    tally_kernel.delta = tally_delta;
    tally_kernel.grad = tally_grad;
    tally_inner = inner;
    tally_device = *inner;
    tally_device.copy = tally_copy;
    tally_device.add = tally_add;
    tally_device.zero = tally_zero;
    return &tally_device;
}

#endif
