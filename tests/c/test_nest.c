/* Simplified loops visit the same pairs of places as the plain ones, each once. */
#include "layout.h"
#include "tensor/nest.h"
#include "test.h"

enum { MOST = 400, ROOM = 1 << 16 };

static char source[ROOM], target[ROOM];

struct pair {
    const char *dst, *src;
};

static int compare(const void *a, const void *b)
{
    const struct pair *x = a, *y = b;
    return x->dst != y->dst ? (x->dst > y->dst) - (x->dst < y->dst)
                            : (x->src > y->src) - (x->src < y->src);
}

/* Every unit of the nest, sorted; a unit's number is its position in counted order. */
static int list_nest(const struct cp_nest *nest, struct pair *pairs)
{
    int64_t count = cp_nest_count(nest);
    for (int64_t unit = 0; unit < count; unit++) {
        int64_t rest = unit;
        pairs[unit] = (struct pair){nest->dst, nest->src};
        for (int i = 0; i < nest->count; i++) {
            int64_t along = rest % nest->axis[i].n;
            rest /= nest->axis[i].n;
            pairs[unit].dst += along * nest->axis[i].dst;
            pairs[unit].src += along * nest->axis[i].src;
        }
    }
    qsort(pairs, (size_t)count, sizeof pairs[0], compare);
    return (int)count;
}

static int list_views(const struct cp_view *dst, const struct cp_view *src,
                      struct pair *pairs)
{
    int count = 0;
    int64_t at[CP_AXES];
    const int64_t *n = dst->n;
    for (at[0] = 0; at[0] < n[0]; at[0]++) {
        for (at[1] = 0; at[1] < n[1]; at[1]++) {
            for (at[2] = 0; at[2] < n[2]; at[2]++) {
                for (at[3] = 0; at[3] < n[3]; at[3]++) {
                    struct pair pair = {dst->data, src->data};
                    for (int i = 0; i < CP_AXES; i++) {
                        pair.dst += at[i] * dst->stride[i];
                        pair.src += at[i] * src->stride[i];
                    }
                    pairs[count++] = pair;
                }
            }
        }
    }
    qsort(pairs, (size_t)count, sizeof pairs[0], compare);
    return count;
}

static void random_shape(struct test_rng *rng, int64_t n[CP_AXES])
{
    for (int i = 0; i < CP_AXES; i++) {
        n[i] = test_rng_range(rng, 1, 4);
    }
}

TEST(loops_visit_what_the_views_do)
{
    struct test_rng rng = test_rng_init(1);
    for (int i = 0; i < 3000; i++) {
        struct pair got[MOST], want[MOST];
        int64_t n[CP_AXES];
        random_shape(&rng, n);
        struct cp_view src = layout_in(&rng, source + ROOM / 2, CP_DTYPE_INT16, n);
        struct cp_view dst = layout_in(&rng, target + ROOM / 2, CP_DTYPE_FLOAT32, n);
        struct cp_nest nest = cp_nest_init(&dst, &src);
        int count = list_views(&dst, &src, want);
        CHECK(nest.count >= 1 && nest.count <= CP_AXES);
        REQUIRE(CHECK_EQ_I64(list_nest(&nest, got), count));
        CHECK_EQ_BYTES(got, want, (size_t)count * sizeof got[0]);
    }
}

TEST(what_is_one_run_is_one_loop)
{
    struct cp_view src = cp_view_compact(source, CP_DTYPE_FLOAT32, 2, 3, 4, 5);
    struct cp_view dst = cp_view_compact(target, CP_DTYPE_FLOAT32, 2, 3, 4, 5);
    struct cp_nest nest = cp_nest_init(&dst, &src);
    CHECK_EQ_I64(nest.count, 1);
    CHECK_EQ_I64(nest.axis[0].n, 120);
    dst.stride[0] *= 2; /* a gap between the halves */
    nest = cp_nest_init(&dst, &src);
    CHECK_EQ_I64(nest.count, 2);
    CHECK_EQ_I64(nest.axis[0].n, 60);
    CHECK_EQ_I64(nest.axis[1].n, 2);
    struct cp_view one = cp_view_compact(source, CP_DTYPE_FLOAT32, 1, 1, 1, 1);
    nest = cp_nest_init(&one, &one);
    CHECK_EQ_I64(nest.count, 1);
    CHECK_EQ_I64(cp_nest_count(&nest), 1);
}

/* Units of several elements, and of bytes, cover the same bytes. */
TEST(other_units_are_the_same_move)
{
    struct test_rng rng = test_rng_init(2);
    int widened = 0;
    for (int i = 0; i < 3000; i++) {
        int64_t n[CP_AXES], width = 0;
        random_shape(&rng, n);
        n[3] *= 4;
        struct cp_view src = layout_in(&rng, source + ROOM / 2, CP_DTYPE_INT16, n);
        struct cp_view dst = layout_in(&rng, target + ROOM / 2, CP_DTYPE_INT16, n);
        struct cp_nest nest = cp_nest_init(&dst, &src);
        struct cp_nest bytes = cp_nest_of_bytes(&nest);
        struct cp_nest wide = cp_nest_widen(&nest, 8, &width);
        CHECK_EQ_I64(cp_nest_count(&bytes), 2 * cp_nest_count(&nest));
        CHECK_EQ_I64(cp_nest_count(&wide) * width, cp_nest_count(&nest));
        CHECK_EQ_I64(wide.dst_bytes, 2 * width);
        CHECK(width == 1 || cp_nest_is_aligned(&wide));
        widened += width > 1;
        struct cp_nest bytes_of_wide = cp_nest_of_bytes(&wide);
        static struct pair all[2 * 4 * MOST], same[2 * 4 * MOST];
        int count = list_nest(&bytes, all);
        REQUIRE(CHECK_EQ_I64(list_nest(&bytes_of_wide, same), count));
        CHECK_EQ_BYTES(same, all, (size_t)count * sizeof all[0]);
    }
    CHECK(widened > 100);
}

static int list_halves(const struct cp_nest *nest, struct pair *pairs)
{
    struct cp_nest halves[2];
    if (cp_nest_count(nest) == 1) {
        pairs[0] = (struct pair){nest->dst, nest->src};
        return 1;
    }
    cp_nest_halve(nest, halves);
    int count = list_halves(&halves[0], pairs);
    return count + list_halves(&halves[1], pairs + count);
}

TEST(halves_are_the_whole)
{
    struct test_rng rng = test_rng_init(3);
    for (int i = 0; i < 1000; i++) {
        struct pair got[MOST], want[MOST];
        int64_t n[CP_AXES];
        random_shape(&rng, n);
        struct cp_view src = layout_in(&rng, source + ROOM / 2, CP_DTYPE_INT32, n);
        struct cp_view dst = layout_in(&rng, target + ROOM / 2, CP_DTYPE_INT32, n);
        struct cp_nest nest = cp_nest_init(&dst, &src);
        int count = list_nest(&nest, want);
        REQUIRE(CHECK_EQ_I64(list_halves(&nest, got), count));
        qsort(got, (size_t)count, sizeof got[0], compare);
        CHECK_EQ_BYTES(got, want, (size_t)count * sizeof got[0]);
    }
}
