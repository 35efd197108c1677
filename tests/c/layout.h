/* Random layouts of tensors, for tests of what reads and writes strides. */
#ifndef CP_TESTS_LAYOUT_H
#define CP_TESTS_LAYOUT_H

#include "tensor/view.h"
#include "test.h"

/* Some layout of `n` from `room` on: axes in a random order, gaps, sometimes backwards. */
static inline struct cp_view layout_in(struct test_rng *rng, char *room,
                                       enum cp_dtype dtype, const int64_t n[CP_AXES])
{
    struct cp_view view = {.data = room, .dtype = dtype};
    int order[CP_AXES] = {0, 1, 2, 3};
    int64_t bytes = cp_dtype_bytes(dtype), step = bytes;
    bool is_dense = test_rng_range(rng, 0, 1) == 0;
    for (int i = CP_AXES - 1; i > 0; i--) {
        int other = (int)test_rng_range(rng, 0, i), swap = order[i];
        if (test_rng_range(rng, 0, 2) == 0) {
            order[i] = order[other];
            order[other] = swap;
        }
    }
    for (int i = CP_AXES - 1; i >= 0; i--) {
        int axis = order[i];
        view.n[axis] = n[axis];
        view.stride[axis] = step;
        step = step * n[axis] + (is_dense ? 0 : test_rng_range(rng, 0, 1) * bytes);
        if (!is_dense && test_rng_range(rng, 0, 3) == 0 && n[axis] > 0) {
            view.data += (n[axis] - 1) * view.stride[axis];
            view.stride[axis] = -view.stride[axis];
        }
    }
    return view;
}

/* A view without memory: half of them compact, the others with axes in any order, gaps
 * of whole strides and any axis backwards. It takes `bytes`, of which element 0 lies
 * `first` from the start. */
static inline struct cp_view layout_any(struct test_rng *rng, enum cp_dtype dtype,
                                        const int64_t n[CP_AXES], int64_t *first,
                                        int64_t *bytes)
{
    struct cp_view view = cp_view_compact(NULL, dtype, n[0], n[1], n[2], n[3]);
    int64_t size = cp_view_count(&view) * cp_dtype_bytes(dtype);
    *first = 0;
    if (test_rng_range(rng, 0, 1) == 1) {
        int order[CP_AXES] = {0, 1, 2, 3};
        size = cp_dtype_bytes(dtype);
        for (int i = CP_AXES - 1; i >= 0; i--) {
            int j = (int)test_rng_range(rng, 0, i), axis = order[j];
            order[j] = order[i];
            size *= test_rng_range(rng, 0, 3) == 0 ? 2 : 1;
            view.stride[axis] = size;
            size *= n[axis];
            if (n[axis] > 0 && test_rng_range(rng, 0, 7) == 0) {
                *first += view.stride[axis] * (n[axis] - 1);
                view.stride[axis] = -view.stride[axis];
            }
        }
    }
    *first = size > 0 ? *first : 0;
    *bytes = size;
    return view;
}

/* The part [first, first + count) of one axis. */
static inline struct cp_view layout_part(const struct cp_view *view, int axis,
                                         int64_t first, int64_t count)
{
    int64_t from[CP_AXES] = {0}, n[CP_AXES];
    memcpy(n, view->n, sizeof n);
    from[axis] = first;
    n[axis] = count;
    return cp_view_box(view, from, n);
}

#endif
