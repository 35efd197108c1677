/* A strided copy as the fewest nested loops: axes of length 1 go, the others are sorted
 * by their strides, and neighbours that are one run on both sides are joined. For
 * devices that move units of several elements, in the widest units that both sides
 * allow. */
#ifndef CP_TENSOR_NEST_H
#define CP_TENSOR_NEST_H

#include "tensor/view.h"

/* One more than a view's: elements may have to be moved as runs of smaller units. */
enum { CP_NEST_AXES = CP_AXES + 1 };

struct cp_nest_axis {
    int64_t n, dst, src; /* length, strides in bytes */
};

/* The innermost loop comes first; there is at least one. */
struct cp_nest {
    struct cp_nest_axis axis[CP_NEST_AXES];
    int count;
    int64_t dst_bytes, src_bytes; /* of a unit: an element, or several side by side */
    char *dst;
    const char *src;
};

#ifdef __cplusplus
extern "C" {
#endif

/* Units are elements. Both views have the same n, none of it 0. */
struct cp_nest cp_nest_init(const struct cp_view *dst, const struct cp_view *src);
int64_t cp_nest_count(const struct cp_nest *nest);
/* Is every unit at a multiple of its size, on both sides? */
bool cp_nest_is_aligned(const struct cp_nest *nest);
/* Equal dtypes: the same move with a byte as unit. */
struct cp_nest cp_nest_of_bytes(const struct cp_nest *nest);
/* The same with units of as many old ones as can be, at most `limit`, a power of two:
 * they lie side by side on both sides, divide the innermost loop and stay aligned.
 * `width` says how many. */
struct cp_nest cp_nest_widen(const struct cp_nest *nest, int64_t limit, int64_t *width);
/* Two that are the same move together: the outermost loop that is longer than 1 cut in
 * the middle. There is one. */
void cp_nest_halve(const struct cp_nest *nest, struct cp_nest halves[2]);

#ifdef __cplusplus
}
#endif

#endif
