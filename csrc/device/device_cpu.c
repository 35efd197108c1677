/* The host as a device: strided copies with conversion, sums, memory. Everything is
 * done when a function returns.
 *
 * A copy first becomes as few nested loops as can be (tensor/nest.h); a run of equal
 * dtypes without gaps is one memcpy. */
#include <string.h>

#include "base/mem.h"
#include "device/device.h"
#include "tensor/convert.h"
#include "tensor/nest.h"

/* One innermost loop: n elements from src to dst. */
typedef void (*run_function)(char *dst, int64_t dst_stride, const char *src,
                             int64_t src_stride, int64_t n);

/* The loops of `nest` up to `level`, from there inwards. */
static void walk(const struct cp_nest *nest, int level, char *dst, const char *src,
                 run_function run)
{
    const struct cp_nest_axis *axis = &nest->axis[level];
    if (level == 0) {
        run(dst, axis->dst, src, axis->src, axis->n);
        return;
    }
    for (int64_t i = 0; i < axis->n; i++) {
        walk(nest, level - 1, dst + i * axis->dst, src + i * axis->src, run);
    }
}

/* Elements are read and written by memcpy, since a borrowed tensor need not be aligned;
 * compilers make plain moves of it. The loop without strides is there to be vectorised.
 */
#define DEFINE_RUN(name, dst_type, src_type, expression)                               \
    static void name(char *restrict dst, int64_t dst_stride, const char *restrict src, \
                     int64_t src_stride, int64_t n)                                    \
    {                                                                                  \
        const int64_t dst_size = (int64_t)sizeof(dst_type),                            \
                      src_size = (int64_t)sizeof(src_type);                            \
        if (dst_stride == dst_size && src_stride == src_size) {                        \
            for (int64_t i = 0; i < n; i++) {                                          \
                src_type x;                                                            \
                dst_type y;                                                            \
                memcpy(&x, src + i * src_size, sizeof x);                              \
                y = (expression);                                                      \
                memcpy(dst + i * dst_size, &y, sizeof y);                              \
            }                                                                          \
            return;                                                                    \
        }                                                                              \
        for (int64_t i = 0; i < n; i++) {                                              \
            src_type x;                                                                \
            dst_type y;                                                                \
            memcpy(&x, src + i * src_stride, sizeof x);                                \
            y = (expression);                                                          \
            memcpy(dst + i * dst_stride, &y, sizeof y);                                \
        }                                                                              \
    }

/* Equal dtypes: bytes. */
#define DEFINE_RAW(bytes)                                                              \
    static void raw_##bytes(char *dst, int64_t dst_stride, const char *src,            \
                            int64_t src_stride, int64_t n)                             \
    {                                                                                  \
        if (dst_stride == (bytes) && src_stride == (bytes)) {                          \
            memcpy(dst, src, (size_t)n * (bytes));                                     \
            return;                                                                    \
        }                                                                              \
        for (int64_t i = 0; i < n; i++) {                                              \
            memcpy(dst + i * dst_stride, src + i * src_stride, (bytes));               \
        }                                                                              \
    }

DEFINE_RAW(1)
DEFINE_RAW(2)
DEFINE_RAW(4)
DEFINE_RAW(8)
DEFINE_RAW(16)

DEFINE_RUN(f64_from_f32, double, float, (double)x)
DEFINE_RUN(bf16_from_f32, uint16_t, float, cp_f32_to_bf16(x))
DEFINE_RUN(f16_from_f32, uint16_t, float, cp_f32_to_f16(x))
DEFINE_RUN(f32_from_f64, float, double, (float)x)
DEFINE_RUN(bf16_from_f64, uint16_t, double, cp_f64_to_bf16(x))
DEFINE_RUN(f16_from_f64, uint16_t, double, cp_f64_to_f16(x))
DEFINE_RUN(f32_from_bf16, float, uint16_t, cp_bf16_to_f32(x))
DEFINE_RUN(f64_from_bf16, double, uint16_t, (double)cp_bf16_to_f32(x))
DEFINE_RUN(f16_from_bf16, uint16_t, uint16_t, cp_f32_to_f16(cp_bf16_to_f32(x)))
DEFINE_RUN(f32_from_f16, float, uint16_t, cp_f16_to_f32(x))
DEFINE_RUN(f64_from_f16, double, uint16_t, (double)cp_f16_to_f32(x))
DEFINE_RUN(bf16_from_f16, uint16_t, uint16_t, cp_f32_to_bf16(cp_f16_to_f32(x)))

static const run_function convert[CP_DTYPE_COUNT][CP_DTYPE_COUNT] = {
    [CP_DTYPE_FLOAT64] = {[CP_DTYPE_FLOAT32] = f64_from_f32,
                          [CP_DTYPE_BFLOAT16] = f64_from_bf16,
                          [CP_DTYPE_FLOAT16] = f64_from_f16},
    [CP_DTYPE_FLOAT32] = {[CP_DTYPE_FLOAT64] = f32_from_f64,
                          [CP_DTYPE_BFLOAT16] = f32_from_bf16,
                          [CP_DTYPE_FLOAT16] = f32_from_f16},
    [CP_DTYPE_BFLOAT16] = {[CP_DTYPE_FLOAT32] = bf16_from_f32,
                           [CP_DTYPE_FLOAT64] = bf16_from_f64,
                           [CP_DTYPE_FLOAT16] = bf16_from_f16},
    [CP_DTYPE_FLOAT16] = {[CP_DTYPE_FLOAT32] = f16_from_f32,
                          [CP_DTYPE_FLOAT64] = f16_from_f64,
                          [CP_DTYPE_BFLOAT16] = f16_from_bf16},
};

static run_function raw_run(int64_t bytes)
{
    switch (bytes) {
    case 1:
        return raw_1;
    case 2:
        return raw_2;
    case 4:
        return raw_4;
    case 8:
        return raw_8;
    case 16:
        return raw_16;
    default:
        return NULL;
    }
}

static run_function copy_run(enum cp_dtype dst, enum cp_dtype src)
{
    if (dst == src) {
        return raw_run(cp_dtype_bytes(dst));
    }
    return dst < CP_DTYPE_COUNT && src < CP_DTYPE_COUNT ? convert[dst][src] : NULL;
}

static void apply(const struct cp_view *dst, const struct cp_view *src,
                  run_function run)
{
    if (cp_view_count(dst) == 0) {
        return;
    }
    struct cp_nest nest = cp_nest_init(dst, src);
    walk(&nest, nest.count - 1, nest.dst, nest.src, run);
}

static enum cp_code copy_one(const struct cp_view *dst, const struct cp_view *src)
{
    CP_TRY(cp_view_check_same(dst, src, "copy"));
    run_function run = copy_run(dst->dtype, src->dtype);
    if (run == NULL) {
        return cp_fail(CP_ERR_INTERNAL, "no conversion from %s to %s",
                       cp_dtype_name(src->dtype), cp_dtype_name(dst->dtype));
    }
    apply(dst, src, run);
    return CP_OK;
}

static enum cp_code cpu_copy(struct cp_device *device, const struct cp_copy *copies,
                             int count, struct cp_stream *stream)
{
    (void)device;
    (void)stream;
    for (int i = 0; i < count; i++) {
        CP_TRY(copy_one(&copies[i].dst, &copies[i].src));
    }
    return CP_OK;
}

#define DEFINE_ADD(name, type)                                                         \
    static void name(char *restrict dst, int64_t dst_stride, const char *restrict src, \
                     int64_t src_stride, int64_t n)                                    \
    {                                                                                  \
        const int64_t size = (int64_t)sizeof(type);                                    \
        bool is_dense = dst_stride == size && src_stride == size;                      \
        int64_t dst_step = is_dense ? size : dst_stride,                               \
                src_step = is_dense ? size : src_stride;                               \
        for (int64_t i = 0; i < n; i++) {                                              \
            type x;                                                                    \
            type y;                                                                    \
            memcpy(&x, src + i * src_step, sizeof x);                                  \
            memcpy(&y, dst + i * dst_step, sizeof y);                                  \
            y += x;                                                                    \
            memcpy(dst + i * dst_step, &y, sizeof y);                                  \
        }                                                                              \
    }

DEFINE_ADD(add_f32, float)
DEFINE_ADD(add_f64, double)

static enum cp_code cpu_add(struct cp_device *device, const struct cp_view *dst,
                            const struct cp_view *src, struct cp_stream *stream)
{
    (void)device;
    (void)stream;
    CP_TRY(cp_view_check_same(dst, src, "add"));
    if (dst->dtype != src->dtype ||
        (dst->dtype != CP_DTYPE_FLOAT32 && dst->dtype != CP_DTYPE_FLOAT64)) {
        return cp_fail(CP_ERR_INTERNAL,
                       "cannot add %s to %s; both must be float32 or both float64",
                       cp_dtype_name(src->dtype), cp_dtype_name(dst->dtype));
    }
    apply(dst, src, dst->dtype == CP_DTYPE_FLOAT32 ? add_f32 : add_f64);
    return CP_OK;
}

static enum cp_code cpu_zero(struct cp_device *device, void *data, size_t bytes,
                             struct cp_stream *stream)
{
    (void)device;
    (void)stream;
    if (bytes > 0) {
        memset(data, 0, bytes);
    }
    return CP_OK;
}

static enum cp_code cpu_alloc(struct cp_device *device, size_t bytes, const char *what,
                              void **out)
{
    (void)device;
    return cp_mem_create(bytes, what, out);
}

static void cpu_free(struct cp_device *device, void *address_of_pointer)
{
    (void)device;
    cp_mem_destroy(address_of_pointer);
}

static enum cp_code cpu_wait(struct cp_device *device, int event,
                             struct cp_deadline deadline)
{
    (void)device;
    (void)event;
    (void)deadline;
    return CP_OK;
}

static const struct cp_device_ops cpu_ops = {
    .name = "cpu",
    .abi = CP_DEVICE_ABI,
    .alloc = cpu_alloc,
    .free = cpu_free,
    .copy = cpu_copy,
    .add = cpu_add,
    .zero = cpu_zero,
    .wait = cpu_wait,
};

struct cp_device *cp_device_cpu(void)
{
    static struct cp_device cpu = {.ops = &cpu_ops};
    return &cpu;
}
