/* Time that only goes forward, and deadlines on it. */
#ifndef CP_BASE_CLOCK_H
#define CP_BASE_CLOCK_H

#include <stdbool.h>
#include <stdint.h>

struct cp_deadline {
    int64_t at_ns;  /* on the clock of cp_now_ns */
    double seconds; /* what the caller allowed, for messages */
};

int64_t cp_now_ns(void);
struct cp_deadline cp_deadline_in(double seconds);
bool cp_deadline_passed(struct cp_deadline deadline);

#endif
