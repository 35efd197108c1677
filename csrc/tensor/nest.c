/* Simplifying and cutting nested loops. */
#include "tensor/nest.h"

static int64_t magnitude(int64_t stride)
{
    return stride < 0 ? -stride : stride;
}

/* Inner loops are those of the shorter strides, first of all in the destination. */
static bool is_inside(const struct cp_nest_axis *a, const struct cp_nest_axis *b)
{
    int64_t by_dst = magnitude(a->dst) - magnitude(b->dst);
    return by_dst != 0 ? by_dst < 0 : magnitude(a->src) < magnitude(b->src);
}

static void insert(struct cp_nest *nest, struct cp_nest_axis axis)
{
    int at = nest->count;
    for (; at > 0 && is_inside(&axis, &nest->axis[at - 1]); at--) {
        nest->axis[at] = nest->axis[at - 1];
    }
    nest->axis[at] = axis;
    nest->count++;
}

/* Neighbours that are one run on both sides become one loop. */
static void join(struct cp_nest *nest)
{
    int kept = 0;
    for (int i = 1; i < nest->count; i++) {
        struct cp_nest_axis *inner = &nest->axis[kept];
        const struct cp_nest_axis *outer = &nest->axis[i];
        if (outer->dst == inner->dst * inner->n &&
            outer->src == inner->src * inner->n) {
            inner->n *= outer->n;
        } else {
            nest->axis[++kept] = *outer;
        }
    }
    nest->count = kept + 1;
}

struct cp_nest cp_nest_init(const struct cp_view *dst, const struct cp_view *src)
{
    struct cp_nest nest = {
        .dst_bytes = cp_dtype_bytes(dst->dtype),
        .src_bytes = cp_dtype_bytes(src->dtype),
        .dst = dst->data,
        .src = src->data,
    };
    for (int i = 0; i < CP_AXES; i++) {
        if (dst->n[i] != 1) {
            insert(&nest, (struct cp_nest_axis){.n = dst->n[i],
                                                .dst = dst->stride[i],
                                                .src = src->stride[i]});
        }
    }
    if (nest.count == 0) {
        insert(&nest, (struct cp_nest_axis){
                          .n = 1, .dst = nest.dst_bytes, .src = nest.src_bytes});
    }
    join(&nest);
    return nest;
}

int64_t cp_nest_count(const struct cp_nest *nest)
{
    int64_t count = 1;
    for (int i = 0; i < nest->count; i++) {
        count *= nest->axis[i].n;
    }
    return count;
}

bool cp_nest_is_aligned(const struct cp_nest *nest)
{
    bool is_aligned = (uintptr_t)nest->dst % (uintptr_t)nest->dst_bytes == 0 &&
                      (uintptr_t)nest->src % (uintptr_t)nest->src_bytes == 0;
    for (int i = 0; i < nest->count; i++) {
        is_aligned = is_aligned && nest->axis[i].dst % nest->dst_bytes == 0 &&
                     nest->axis[i].src % nest->src_bytes == 0;
    }
    return is_aligned;
}

static bool is_dense(const struct cp_nest *nest)
{
    return nest->axis[0].dst == nest->dst_bytes && nest->axis[0].src == nest->src_bytes;
}

struct cp_nest cp_nest_of_bytes(const struct cp_nest *nest)
{
    struct cp_nest bytes = *nest;
    if (is_dense(nest)) {
        bytes.axis[0] = (struct cp_nest_axis){
            .n = nest->axis[0].n * nest->dst_bytes, .dst = 1, .src = 1};
    } else {
        for (int i = nest->count; i > 0; i--) {
            bytes.axis[i] = nest->axis[i - 1];
        }
        bytes.axis[0] = (struct cp_nest_axis){.n = nest->dst_bytes, .dst = 1, .src = 1};
        bytes.count++;
    }
    bytes.dst_bytes = bytes.src_bytes = 1;
    return bytes;
}

struct cp_nest cp_nest_widen(const struct cp_nest *nest, int64_t limit, int64_t *width)
{
    for (int64_t wide = is_dense(nest) ? limit : 1; wide > 1; wide /= 2) {
        struct cp_nest widened = *nest;
        widened.dst_bytes = nest->dst_bytes * wide;
        widened.src_bytes = nest->src_bytes * wide;
        widened.axis[0] = (struct cp_nest_axis){.n = nest->axis[0].n / wide,
                                                .dst = widened.dst_bytes,
                                                .src = widened.src_bytes};
        if (nest->axis[0].n % wide == 0 && cp_nest_is_aligned(&widened)) {
            *width = wide;
            return widened;
        }
    }
    *width = 1;
    return *nest;
}

void cp_nest_halve(const struct cp_nest *nest, struct cp_nest halves[2])
{
    int outermost = nest->count - 1;
    while (outermost > 0 && nest->axis[outermost].n == 1) {
        outermost--;
    }
    struct cp_nest_axis axis = nest->axis[outermost];
    int64_t n = axis.n / 2;
    halves[0] = halves[1] = *nest;
    halves[0].axis[outermost].n = n;
    halves[1].axis[outermost].n = axis.n - n;
    halves[1].dst += n * axis.dst;
    halves[1].src += n * axis.src;
}
