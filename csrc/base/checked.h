/* Arithmetic on sizes that says when it overflows instead of wrapping. */
#ifndef CP_BASE_CHECKED_H
#define CP_BASE_CHECKED_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Each writes `out` and returns true, or returns false where the result does not fit.
 */
static inline bool cp_add_i64(int64_t a, int64_t b, int64_t *out)
{
    return !__builtin_add_overflow(a, b, out);
}

static inline bool cp_mul_i64(int64_t a, int64_t b, int64_t *out)
{
    return !__builtin_mul_overflow(a, b, out);
}

static inline bool cp_size_round_up(size_t size, size_t unit, size_t *out)
{
    size_t sum = 0;
    if (__builtin_add_overflow(size, unit - 1, &sum)) {
        return false;
    }
    *out = sum - sum % unit;
    return true;
}

/* Rounds a count known to be small; unit > 0. */
static inline int64_t cp_round_up(int64_t count, int64_t unit)
{
    return (count + unit - 1) / unit * unit;
}

#endif
