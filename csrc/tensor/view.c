/* Boxes of boxes. */
#include "tensor/view.h"

struct cp_view cp_view_compact(void *data, enum cp_dtype dtype, int64_t n0, int64_t n1,
                               int64_t n2, int64_t n3)
{
    struct cp_view view = {.data = data, .dtype = dtype, .n = {n0, n1, n2, n3}};
    int64_t step = cp_dtype_bytes(dtype);
    for (int axis = CP_AXES - 1; axis >= 0; axis--) {
        view.stride[axis] = step;
        step *= view.n[axis];
    }
    return view;
}

struct cp_view cp_view_box(const struct cp_view *view, const int64_t first[CP_AXES],
                           const int64_t n[CP_AXES])
{
    struct cp_view box = *view;
    for (int axis = 0; axis < CP_AXES; axis++) {
        if (box.data != NULL) {
            box.data += first[axis] * view->stride[axis];
        }
        box.n[axis] = n[axis];
    }
    return box;
}

int64_t cp_view_count(const struct cp_view *view)
{
    return view->n[0] * view->n[1] * view->n[2] * view->n[3];
}

enum cp_code cp_view_check_same(const struct cp_view *a, const struct cp_view *b,
                                const char *verb)
{
    for (int i = 0; i < CP_AXES; i++) {
        if (a->n[i] != b->n[i] || a->n[i] < 0) {
            return cp_fail(
                CP_ERR_INTERNAL,
                "%s between boxes of different lengths on axis %d: %lld and %lld", verb,
                i, (long long)a->n[i], (long long)b->n[i]);
        }
    }
    return CP_OK;
}
