/* The stand-in's one lock and its waiting, on futexes.
 *
 * Not pthread's: ThreadSanitizer knows those, and would take every meeting inside the
 * stand-in for an order that CUDA gives. These files are built without it; what CUDA does
 * order is told to it by sim_release and sim_acquire. */
#ifndef SIM_LOCK_H
#define SIM_LOCK_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct sim_cond {
    _Atomic uint32_t wakes;
};

void sim_lock(void);
void sim_unlock(void);
/* With the lock held; may return early. */
void sim_wait(struct sim_cond *cond);
/* False: that time is over. */
bool sim_wait_until(struct sim_cond *cond, int64_t at_ns);
void sim_wake(struct sim_cond *cond);

int64_t sim_now_ns(void);
void sim_sleep_us(int64_t us);

/* What happened before a release of `what` happened before a later acquire of it. */
void sim_release(void *what);
void sim_acquire(void *what);

/* For AddressSanitizer: may the program use these bytes? Nothing without it. */
void sim_forbid(void *data, size_t bytes);
void sim_allow(void *data, size_t bytes);

/* splitmix64 (Steele, Lea, Flood 2014). */
uint64_t sim_random(uint64_t *state);

#endif
