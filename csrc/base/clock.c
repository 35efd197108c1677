/* CLOCK_MONOTONIC in nanoseconds. */
#include "base/clock.h"

#include <time.h>

int64_t cp_now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

struct cp_deadline cp_deadline_in(double seconds)
{
    /* Above this (292 years) the sum would overflow; nobody waits longer. */
    const double longest = 4e9;
    double kept = seconds < longest ? seconds : longest;
    kept = kept > 0.0 ? kept : 0.0;
    struct cp_deadline deadline = {
        .at_ns = cp_now_ns() + (int64_t)(kept * 1e9),
        .seconds = seconds,
    };
    return deadline;
}

bool cp_deadline_passed(struct cp_deadline deadline)
{
    return cp_now_ns() >= deadline.at_ns;
}
