/* Is an answer as good as can be asked? Measured by the error of a plain method in the
 * same dtype. */
#ifndef CP_TESTS_JUDGE_H
#define CP_TESTS_JUDGE_H

#include "tensor/dtype.h"
#include "test.h"

static inline double judge_roundoff(enum cp_dtype dtype)
{
    return dtype == CP_DTYPE_FLOAT64    ? 0x1p-52
           : dtype == CP_DTYPE_FLOAT32  ? 0x1p-23
           : dtype == CP_DTYPE_BFLOAT16 ? 0x1p-7
                                        : 0x1p-10;
}

/* Worst error so far in units of what is allowed. */
static double judge_worst;

/* Allowed is so many times the plain method's error, and never less than `few`, a
 * relative error of the largest value, or of `size` where that is more. */
static inline void judge(const char *who, const char *what, int64_t count,
                         const double *got, const double *truth, const double *plain,
                         double times, double few, double size)
{
    double yardstick = 0, top = size, worst = 0;
    int64_t where = 0;
    for (int64_t i = 0; i < count; i++) {
        double error = plain[i] == truth[i] ? 0 : fabs(plain[i] - truth[i]);
        yardstick = error > yardstick && isfinite(error) ? error : yardstick;
        top = fabs(truth[i]) > top && isfinite(truth[i]) ? fabs(truth[i]) : top;
    }
    double allowed = times * yardstick > few * top ? times * yardstick : few * top;
    for (int64_t i = 0; i < count; i++) {
        double error = got[i] == truth[i] ? 0 : fabs(got[i] - truth[i]) / allowed;
        error = isfinite(error) ? error : HUGE_VAL;
        if (error > worst) {
            worst = error;
            where = i;
        }
    }
    judge_worst = worst > judge_worst ? worst : judge_worst;
    if (worst > 1) {
        (void)test_fail(__FILE__, __LINE__,
                        "%s: %s[%lld] is %.9g, truth %.9g: %.2f times what is allowed",
                        who, what, (long long)where, got[where], truth[where], worst);
    }
}

#endif
