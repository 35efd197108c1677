/* A thread of the library's own, beside the caller's: signals go to the others, and a
 * descriptor wakes it out of poll. */
#ifndef CP_BASE_WORKER_H
#define CP_BASE_WORKER_H

#include <pthread.h>
#include <sys/types.h>

#include "base/status.h"

/* All-zero: none was started. */
struct cp_worker {
    pthread_t thread;
    pid_t owner_pid; /* of the process that has the thread; 0: none was started */
    int wake_fd;     /* readable after cp_worker_wake */
};

/* Runs `run` until it returns. CP_ERR_RUNTIME. */
CP_NODISCARD enum cp_code cp_worker_start(struct cp_worker *worker,
                                          void *(*run)(void *arg), void *arg);

/* Any thread may wake it. */
void cp_worker_wake(struct cp_worker *worker);
/* In the worker, once it has seen `wake_fd` readable: that much is known. */
void cp_worker_heed(struct cp_worker *worker);

/* Wakes it and waits until it has returned: whatever tells it to has been set. Accepts
 * one that was not started. In a forked child, which has no such thread, it waits for
 * nothing. */
void cp_worker_end(struct cp_worker *worker);

/* Nobody will wait for it: it goes on by itself, and closes what it has by cp_worker_leave
 * when it is done. The struct may be a copy. */
void cp_worker_detach(const struct cp_worker *worker);
/* In a detached worker, the last that it does with the struct. */
void cp_worker_leave(struct cp_worker *worker);

#endif
