/* Copies and memsets. */
#include <string.h>

#include "sim.h"

/* A copy of `height` rows; a plain one has one row. */
struct copy_op {
    struct sim_op op;
    unsigned char *dst;
    const unsigned char *src;
    size_t dst_pitch, src_pitch, width, height;
    enum cudaMemcpyKind kind;
};

static void run_copy(struct sim_op *op, cudaStream_t stream)
{
    const struct copy_op *self = (const struct copy_op *)op;
    enum cudaMemcpyKind kind = self->kind;
    bool from_device =
        kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice;
    bool to_device = kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice;
    size_t src_bytes = (self->height - 1) * self->src_pitch + self->width;
    size_t dst_bytes = (self->height - 1) * self->dst_pitch + self->width;
    if (!sim_memory_check(self->src, src_bytes, from_device, stream->device,
                          "the source of a copy") ||
        !sim_memory_check(self->dst, dst_bytes, to_device, stream->device,
                          "the target of a copy")) {
        return;
    }
    if (self->src < self->dst + dst_bytes && self->dst < self->src + src_bytes) {
        sim_violate("a copy of %zu bytes from and to overlapping memory", self->width);
        return;
    }
    for (size_t row = 0; row < self->height && !sim_settings.is_dry; row++) {
        /* In two pieces, so that whoever looks too early sees half of it. */
        size_t half = self->width / 2;
        unsigned char *dst = self->dst + row * self->dst_pitch;
        const unsigned char *src = self->src + row * self->src_pitch;
        memcpy(dst, src, half);
        if (row == self->height / 2) {
            sim_delay(&stream->random);
        }
        memcpy(dst + half, src + half, self->width - half);
    }
}

static cudaError_t copy(struct copy_op what, cudaStream_t stream)
{
    stream = sim_stream(stream);
    if (!stream) {
        return sim_error(cudaErrorInvalidResourceHandle);
    }
    if (what.kind > cudaMemcpyDefault) {
        return sim_error(cudaErrorInvalidMemcpyDirection);
    }
    if (what.width == 0 || what.height == 0) {
        return cudaSuccess;
    }
    if (!what.dst || !what.src ||
        (what.height > 1 &&
         (what.dst_pitch < what.width || what.src_pitch < what.width))) {
        return sim_error(cudaErrorInvalidValue);
    }
    struct copy_op *self = SIM_OP(struct copy_op);
    what.op = self->op;
    *self = what;
    self->op.name = "copy";
    self->op.run = run_copy;
    sim_lock();
    sim_stats[stream->device].copies += 1;
    sim_stats[stream->device].copied_bytes += what.width * what.height;
    sim_unlock();
    sim_enqueue(stream, &self->op);
    return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void *dst, const void *src, size_t bytes,
                            enum cudaMemcpyKind kind, cudaStream_t stream)
{
    SIM_ENTER();
    return copy(
        (struct copy_op){
            .dst = dst, .src = src, .width = bytes, .height = 1, .kind = kind},
        stream);
}

cudaError_t cudaMemcpy2DAsync(void *dst, size_t dst_pitch, const void *src,
                              size_t src_pitch, size_t width, size_t height,
                              enum cudaMemcpyKind kind, cudaStream_t stream)
{
    SIM_ENTER();
    return copy((struct copy_op){.dst = dst,
                                 .src = src,
                                 .dst_pitch = dst_pitch,
                                 .src_pitch = src_pitch,
                                 .width = width,
                                 .height = height,
                                 .kind = kind},
                stream);
}

cudaError_t cudaMemcpy(void *dst, const void *src, size_t bytes,
                       enum cudaMemcpyKind kind)
{
    cudaError_t forbidden = sim_capture_forbids();
    if (forbidden != cudaSuccess) {
        return sim_error(forbidden);
    }
    cudaError_t error = cudaMemcpyAsync(dst, src, bytes, kind, NULL);
    return error == cudaSuccess ? cudaStreamSynchronize(NULL) : error;
}

struct set_op {
    struct sim_op op;
    void *data;
    size_t bytes;
    int value;
};

static void run_set(struct sim_op *op, cudaStream_t stream)
{
    const struct set_op *self = (const struct set_op *)op;
    if (sim_memory_check(self->data, self->bytes, true, stream->device, "a memset") &&
        !sim_settings.is_dry) {
        memset(self->data, self->value, self->bytes);
    }
}

void sim_fill(void *data, int value, size_t bytes, cudaStream_t stream)
{
    struct set_op *self = SIM_OP(struct set_op);
    self->op.name = "memset";
    self->op.run = run_set;
    self->data = data;
    self->bytes = bytes;
    self->value = value;
    sim_enqueue(stream, &self->op);
}

cudaError_t cudaMemsetAsync(void *data, int value, size_t bytes, cudaStream_t stream)
{
    SIM_ENTER();
    stream = sim_stream(stream);
    if (!stream || stream->device != sim_current_device()) {
        return sim_error(cudaErrorInvalidResourceHandle);
    }
    if (bytes > 0) {
        sim_lock();
        sim_stats[stream->device].memsets += 1;
        sim_stats[stream->device].set_bytes += bytes;
        sim_unlock();
        sim_fill(data, value, bytes, stream);
    }
    return cudaSuccess;
}

cudaError_t cudaMemset(void *data, int value, size_t bytes)
{
    cudaError_t forbidden = sim_capture_forbids();
    if (forbidden != cudaSuccess) {
        return sim_error(forbidden);
    }
    return cudaMemsetAsync(data, value, bytes, NULL);
}
