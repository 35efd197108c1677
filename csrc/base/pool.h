/* The threads of a rank. A job is cut into pieces, and each of the threads, the caller's
 * among them, takes the next ones until none is left.
 *
 * The others look for a job for some microseconds after the last one, then sleep: jobs of
 * one call come close together, and between calls the cores are the caller's. One that
 * wakes too late finds no piece left, and nobody waits for it. */
#ifndef CP_BASE_POOL_H
#define CP_BASE_POOL_H

#include <stdint.h>

#include "base/status.h"

enum { CP_POOL_MOST = 1024 };

struct cp_pool;

/* One piece of a job. `worker`: the number of the thread, from 0 (the caller) on, below
 * cp_pool_threads. An error is the job's; the other pieces are done all the same. */
typedef enum cp_code cp_pool_work(void *arg, int64_t piece, int worker);

/* `threads`: with the caller's, from 1 to CP_POOL_MOST. CP_ERR_NO_MEMORY or
 * CP_ERR_RUNTIME where the system has no more. */
CP_NODISCARD enum cp_code cp_pool_create(int threads, struct cp_pool **out);

/* Waits for the threads to end; in a forked child there are none. Accepts NULL in it. */
void cp_pool_destroy(struct cp_pool **pool);

/* 1 for NULL: the caller alone. */
int cp_pool_threads(const struct cp_pool *pool);

/* Does pieces 0 to `pieces` - 1, in any order, and returns when all are done: CP_OK, or one
 * of the errors. All threads round, and keep denormals, as the caller does. Where there is
 * one thread it does them one by one, up to the first error. One job at a time. */
CP_NODISCARD enum cp_code cp_pool_run(struct cp_pool *pool, int64_t pieces,
                                      cp_pool_work *work, void *arg);

#endif
