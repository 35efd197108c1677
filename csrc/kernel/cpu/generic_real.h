/* Template: the arithmetic under the generic kernel, for one type of sums (REAL).
 *
 * Included once per type, after CP_REAL_IS_DOUBLE is defined as 0 or 1 (alone it stands
 * for float). REAL_NAME(x) gives x a suffix per type. Everything that costs time is
 * `product`, whose inner loop is eight vectors of 16 bytes: what every x86-64 and arm64
 * has, written with the compilers' vector types because neither gcc nor clang keeps
 * plain arrays in registers reliably. */
#include <math.h>
#include <string.h>

#include "tensor/convert.h"
#include "tensor/view.h"

#ifndef CP_REAL_IS_DOUBLE
#define CP_REAL_IS_DOUBLE 0
#endif

#undef REAL
#undef REAL_BITS
#undef REAL_NAME
#undef REAL_LOG
#undef REAL_LITERAL
#undef REAL_MANTISSA
#undef REAL_EXP_LOW
#undef REAL_EXP_HIGH
#undef REAL_EXP_TERMS
#undef REAL_ROUNDER
#undef REAL_LN2_HIGH
#undef REAL_LN2_LOW
#undef LANES
#if CP_REAL_IS_DOUBLE
#define REAL double
#define REAL_BITS uint64_t
#define REAL_NAME(name) name##_f64
#define REAL_LITERAL(x) x
#define REAL_LOG log
#define REAL_MANTISSA 52
#define REAL_EXP_LOW (-708.0)
#define REAL_EXP_HIGH 709.0
#define REAL_EXP_TERMS 14
#define REAL_ROUNDER 6755399441055744.0 /* 1.5 * 2^52 */
#define REAL_LN2_HIGH                                                                  \
    6.93147180369123816490e-01 /* 32 bits: times an exponent it stays exact */
#define REAL_LN2_LOW 1.90821492927058770002e-10
#else
#define REAL float
#define REAL_BITS uint32_t
#define REAL_NAME(name) name##_f32
#define REAL_LITERAL(x) x##f
#define REAL_LOG logf
#define REAL_MANTISSA 23
#define REAL_EXP_LOW (-87.0f)
#define REAL_EXP_HIGH 88.0f
#define REAL_EXP_TERMS 8
#define REAL_ROUNDER 12582912.0f /* 1.5 * 2^23 */
#define REAL_LN2_HIGH 0.693359375f
#define REAL_LN2_LOW -2.12194440e-4f
#endif
/* Numbers that `product` handles side by side. A tile has this many queries, one a
 * lane. */
#define LANES (8 * 16 / (int64_t)sizeof(REAL))

enum { REAL_NAME(CHUNK) = 16 }; /* terms of one partial dot product */

typedef REAL REAL_NAME(vec) __attribute__((vector_size(16), may_alias));

/* exp(x) within 1 ulp by a Taylor series around the nearest multiple of ln 2, without a
 * branch, so that loops over it are vectorised. Below the normal numbers it is 0, NaN
 * stays NaN. */
static inline REAL REAL_NAME(exp)(REAL x)
{
    static const REAL inverse_factorial[] = {
        REAL_LITERAL(1.0),
        REAL_LITERAL(1.0),
        REAL_LITERAL(0.5),
        REAL_LITERAL(1.6666666666666666667e-1),
        REAL_LITERAL(4.1666666666666666667e-2),
        REAL_LITERAL(8.3333333333333333333e-3),
        REAL_LITERAL(1.3888888888888888889e-3),
        REAL_LITERAL(1.9841269841269841270e-4),
        REAL_LITERAL(2.4801587301587301587e-5),
        REAL_LITERAL(2.7557319223985890653e-6),
        REAL_LITERAL(2.7557319223985890653e-7),
        REAL_LITERAL(2.5052108385441718775e-8),
        REAL_LITERAL(2.0876756987868098979e-9),
        REAL_LITERAL(1.6059043836821614599e-10),
    };
    union {
        REAL real;
        REAL_BITS bits;
    } power, result;
    REAL top = x > REAL_EXP_HIGH ? REAL_EXP_HIGH : x;
    /* Adding and taking away the rounder leaves the nearest integer, also in the low
     * bits of the sum. */
    power.real = top * REAL_LITERAL(1.44269504088896340736) + REAL_ROUNDER;
    REAL n = power.real - REAL_ROUNDER;
    REAL r = top - n * REAL_LN2_HIGH - n * REAL_LN2_LOW;
    REAL sum = inverse_factorial[REAL_EXP_TERMS - 1];
    for (int i = REAL_EXP_TERMS - 2; i >= 0; i--) {
        sum = sum * r + inverse_factorial[i];
    }
    result.real = sum;
    result.bits += power.bits << REAL_MANTISSA;
    return x < REAL_EXP_LOW ? 0 : result.real;
}

/* c (m x n) += a (m x k) * b (k x n). n is a multiple of LANES, rows of b and c are
 * aligned to 16 bytes and b_row, c_row numbers apart; a lies anyhow. The sum over k
 * starts from zero, so long sums are made of short ones. */
static inline void REAL_NAME(product)(int64_t m, int64_t n, int64_t k, const REAL *a,
                                      int64_t a_row, int64_t a_column, const REAL *b,
                                      int64_t b_row, REAL *c, int64_t c_row)
{
    for (int64_t j = 0; j < n; j += LANES) {
        for (int64_t i = 0; i < m; i++) {
            const REAL *from = a + i * a_row;
            REAL_NAME(vec)
            s0 = {0}, s1 = s0, s2 = s0, s3 = s0, s4 = s0, s5 = s0, s6 = s0, s7 = s0;
            for (int64_t l = 0; l < k; l++) {
                const REAL_NAME(vec) *with =
                    (const REAL_NAME(vec) *)(b + l * b_row + j);
                REAL x = from[l * a_column];
                s0 += x * with[0];
                s1 += x * with[1];
                s2 += x * with[2];
                s3 += x * with[3];
                s4 += x * with[4];
                s5 += x * with[5];
                s6 += x * with[6];
                s7 += x * with[7];
            }
            REAL_NAME(vec) *to = (REAL_NAME(vec) *)(c + i * c_row + j);
            to[0] += s0;
            to[1] += s1;
            to[2] += s2;
            to[3] += s3;
            to[4] += s4;
            to[5] += s5;
            to[6] += s6;
            to[7] += s7;
        }
    }
}

/* to[row][lane] = rows . across[dim][lane], each sum made of sums over CHUNK dims: sums
 * of hundreds of numbers of either sign would lose another digit, which the backward
 * pass, a difference of two of them, cannot spare. */
static inline void REAL_NAME(dots)(int64_t count, int64_t dim, const REAL *rows,
                                   const REAL *across, REAL *to)
{
    memset(to, 0, (size_t)(count * LANES) * sizeof(REAL));
    for (int64_t first = 0; first < dim; first += REAL_NAME(CHUNK)) {
        int64_t n = dim - first < REAL_NAME(CHUNK) ? dim - first : REAL_NAME(CHUNK);
        REAL_NAME(product)(count, LANES, n, rows + first, dim, 1,
                           across + first * LANES, LANES, to, LANES);
    }
}

/* n numbers of any float dtype, `stride` bytes apart. Bool gives what is added to a
 * score: 0, or -inf for false. */
static inline void REAL_NAME(load)(enum cp_dtype dtype, const char *from,
                                   int64_t stride, int64_t n, REAL *to)
{
    if (dtype == CP_DTYPE_FLOAT32) {
        for (int64_t i = 0; i < n; i++) {
            float x = 0;
            memcpy(&x, from + i * stride, sizeof x);
            to[i] = (REAL)x;
        }
    } else if (dtype == CP_DTYPE_FLOAT64) {
        for (int64_t i = 0; i < n; i++) {
            double x = 0;
            memcpy(&x, from + i * stride, sizeof x);
            to[i] = (REAL)x;
        }
    } else if (dtype == CP_DTYPE_BOOL) {
        for (int64_t i = 0; i < n; i++) {
            to[i] = from[i * stride] != 0 ? 0 : -(REAL)INFINITY;
        }
    } else {
        for (int64_t i = 0; i < n; i++) {
            uint16_t x = 0;
            memcpy(&x, from + i * stride, sizeof x);
            to[i] = (REAL)(dtype == CP_DTYPE_BFLOAT16 ? cp_bf16_to_f32(x)
                                                      : cp_f16_to_f32(x));
        }
    }
}

/* The other way, rounding once. */
static inline void REAL_NAME(store)(enum cp_dtype dtype, char *to, int64_t stride,
                                    int64_t n, const REAL *from)
{
    if (dtype == CP_DTYPE_FLOAT32) {
        for (int64_t i = 0; i < n; i++) {
            float x = (float)from[i];
            memcpy(to + i * stride, &x, sizeof x);
        }
    } else if (dtype == CP_DTYPE_FLOAT64) {
        for (int64_t i = 0; i < n; i++) {
            double x = (double)from[i];
            memcpy(to + i * stride, &x, sizeof x);
        }
    } else {
        for (int64_t i = 0; i < n; i++) {
            float wide = (float)from[i];
            uint16_t x =
                dtype == CP_DTYPE_BFLOAT16 ? cp_f32_to_bf16(wide) : cp_f32_to_f16(wide);
            memcpy(to + i * stride, &x, sizeof x);
        }
    }
}
