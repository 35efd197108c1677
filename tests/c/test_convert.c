/* Scalar conversions against a slow oracle: the nearest of all values of the narrow
 * type, ties to the even one. */
#include <math.h>

#include "tensor/convert.h"
#include "test.h"

/* Exact value of a half with `fraction` bits after the point and exponent bias `bias`;
 * infinities as 2^(top + 1), which is where they lie for rounding. */
static double value_of(uint16_t half, int fraction, int bias)
{
    int exponent = (half & 0x7fff) >> fraction;
    int mantissa = half & ((1 << fraction) - 1);
    double magnitude =
        exponent == 0 ? ldexp(mantissa, 1 - bias - fraction)
                      : ldexp((1 << fraction) + mantissa, exponent - bias - fraction);
    return (half & 0x8000) != 0 ? -magnitude : magnitude;
}

/* Magnitudes grow with their bits: bisection for the last one that is not above, then
 * the nearer neighbour. */
static uint16_t round_slowly(double value, int fraction, int bias)
{
    uint16_t infinity = (uint16_t)(0x8000u - (1u << fraction));
    uint16_t sign = signbit(value) != 0 ? 0x8000 : 0;
    double magnitude = fabs(value);
    uint16_t low = 0, high = infinity;
    if (magnitude >= value_of(infinity, fraction, bias)) {
        return (uint16_t)(sign | infinity);
    }
    while (high - low > 1) {
        uint16_t middle = (uint16_t)((low + high) / 2);
        if (value_of(middle, fraction, bias) <= magnitude) {
            low = middle;
        } else {
            high = middle;
        }
    }
    double below = magnitude - value_of(low, fraction, bias),
           above = value_of(high, fraction, bias) - magnitude;
    bool takes_low = below < above || (below <= above && low % 2 == 0);
    return (uint16_t)(sign | (takes_low ? low : high));
}

TEST(all_halves_widen_exactly)
{
    for (uint32_t half = 0; half < 0x10000; half++) {
        float f16 = cp_f16_to_f32((uint16_t)half),
              bf16 = cp_bf16_to_f32((uint16_t)half);
        bool f16_special = (half & 0x7c00) == 0x7c00,
             bf16_special = (half & 0x7f80) == 0x7f80;
        if (f16_special) {
            CHECK_EQ_I64((half & 0x3ff) != 0, isnan(f16) != 0);
            CHECK_EQ_I64((half & 0x3ff) == 0, isinf(f16) != 0);
        } else {
            CHECK((double)f16 == value_of((uint16_t)half, 10, 15));
        }
        if (bf16_special) {
            CHECK_EQ_I64((half & 0x7f) != 0, isnan(bf16) != 0);
        } else {
            CHECK((double)bf16 == value_of((uint16_t)half, 7, 127));
        }
        CHECK_EQ_I64(signbit(f16) != 0, half >> 15);
        CHECK_EQ_I64(signbit(bf16) != 0, half >> 15);
    }
}

TEST(all_halves_come_back)
{
    for (uint32_t half = 0; half < 0x10000; half++) {
        if ((half & 0x7c00) != 0x7c00 || (half & 0x3ff) == 0) {
            CHECK_EQ_U64(cp_f32_to_f16(cp_f16_to_f32((uint16_t)half)), half);
            CHECK_EQ_U64(cp_f64_to_f16((double)cp_f16_to_f32((uint16_t)half)), half);
        }
        if ((half & 0x7f80) != 0x7f80 || (half & 0x7f) == 0) {
            CHECK_EQ_U64(cp_f32_to_bf16(cp_bf16_to_f32((uint16_t)half)), half);
            CHECK_EQ_U64(cp_f64_to_bf16((double)cp_bf16_to_f32((uint16_t)half)), half);
        }
    }
}

static void check_float(float value)
{
    TEST_CONTEXT("%a", (double)value);
    CHECK_EQ_U64(cp_f32_to_f16(value), round_slowly((double)value, 10, 15));
    CHECK_EQ_U64(cp_f32_to_bf16(value), round_slowly((double)value, 7, 127));
}

TEST(ties_and_their_neighbours)
{
    for (uint32_t half = 0; half < 0x7c00; half++) {
        float here = cp_f16_to_f32((uint16_t)half);
        float next = half + 1 < 0x7c00 ? cp_f16_to_f32((uint16_t)(half + 1)) : 65536.0f;
        float middle = here + (next - here) / 2.0f;
        check_float(middle);
        check_float(-middle);
        check_float(nextafterf(middle, 1e30f));
        check_float(nextafterf(middle, -1e30f));
    }
    for (uint32_t bits = 0x00008000u; bits < 0x7f800000u; bits += 0x00010000u) {
        check_float(cp_f32_from_bits(bits));
        check_float(cp_f32_from_bits(bits - 1));
        check_float(cp_f32_from_bits((bits + 1) | 0x80000000u));
    }
}

TEST(random_floats)
{
    struct test_rng rng = test_rng_init(1);
    for (int i = 0; i < 200000; i++) {
        uint32_t bits = (uint32_t)test_rng_next(&rng);
        if ((bits & 0x7f800000u) != 0x7f800000u) {
            check_float(cp_f32_from_bits(bits));
        }
        /* Exponents of float16's range come up rarely by themselves. */
        check_float(ldexpf(test_rng_float(&rng), (int)test_rng_range(&rng, -30, 18)));
    }
}

/* A double just beside a tie, which a float cannot tell from the tie: rounding twice
 * would go wrong. */
TEST(doubles_are_rounded_once)
{
    struct test_rng rng = test_rng_init(2);
    CHECK_EQ_U64(cp_f64_to_f16(1.0 + 0x1p-11 + 0x1p-50), 0x3c01);
    CHECK_EQ_U64(cp_f64_to_f16(1.0 + 0x1p-11), 0x3c00);
    CHECK_EQ_U64(cp_f64_to_bf16(1.0 + 0x1p-8 + 0x1p-50), 0x3f81);
    CHECK_EQ_U64(cp_f64_to_bf16(1.0 + 0x1p-8), 0x3f80);
    for (int i = 0; i < 200000; i++) {
        uint32_t half = (uint32_t)test_rng_range(&rng, 0, 0x7bfe);
        double middle = (value_of((uint16_t)half, 10, 15) +
                         value_of((uint16_t)(half + 1), 10, 15)) /
                        2.0;
        double beside = middle * (1.0 + (double)test_rng_range(&rng, -2, 2) * 0x1p-45);
        TEST_CONTEXT("%a", beside);
        CHECK_EQ_U64(cp_f64_to_f16(beside), round_slowly(beside, 10, 15));
        half = (uint32_t)test_rng_range(&rng, 0, 0x7f7e);
        middle = (value_of((uint16_t)half, 7, 127) +
                  value_of((uint16_t)(half + 1), 7, 127)) /
                 2.0;
        beside = -middle * (1.0 + (double)test_rng_range(&rng, -2, 2) * 0x1p-45);
        TEST_CONTEXT("%a", beside);
        CHECK_EQ_U64(cp_f64_to_bf16(beside), round_slowly(beside, 7, 127));
    }
    const double extremes[] = {
        0.0,      -0.0,           1e-320,          -1e-320,        0x1p-149,
        0x1p-150, 0x1.8p-150,     1e308,           -1e308,         65519.999999999,
        65520.0,  0x1.fffffep127, 0x1.ffffff8p127, 0x1.fefffffp127};
    for (size_t i = 0; i < sizeof extremes / sizeof extremes[0]; i++) {
        TEST_CONTEXT("%a", extremes[i]);
        CHECK_EQ_U64(cp_f64_to_f16(extremes[i]), round_slowly(extremes[i], 10, 15));
        CHECK_EQ_U64(cp_f64_to_bf16(extremes[i]), round_slowly(extremes[i], 7, 127));
    }
}

TEST(infinities_and_nans)
{
    CHECK_EQ_U64(cp_f32_to_f16(INFINITY), 0x7c00);
    CHECK_EQ_U64(cp_f32_to_f16(-INFINITY), 0xfc00);
    CHECK_EQ_U64(cp_f32_to_bf16(INFINITY), 0x7f80);
    CHECK_EQ_U64(cp_f64_to_f16((double)-INFINITY), 0xfc00);
    CHECK_EQ_U64(cp_f64_to_bf16((double)INFINITY), 0x7f80);
    for (uint32_t bits = 0x7f800001u; bits < 0x80000000u; bits += 0x1fffu) {
        uint16_t f16 = cp_f32_to_f16(cp_f32_from_bits(bits | 0x80000000u));
        uint16_t bf16 = cp_f32_to_bf16(cp_f32_from_bits(bits));
        CHECK_EQ_U64(f16 & 0xfe00, 0xfe00);
        CHECK_EQ_U64(bf16 & 0xffc0, 0x7fc0);
    }
    CHECK(isnan(cp_f16_to_f32(cp_f64_to_f16((double)NAN))));
    CHECK(isnan(cp_bf16_to_f32(cp_f64_to_bf16((double)NAN))));
}
