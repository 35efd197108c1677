/* Starting a thread that takes none of the process's signals. */
#include "base/thread.h"

#include <errno.h>
#include <signal.h>
#include <string.h>
#include <time.h>

enum cp_code cp_thread_fail(int error)
{
    char reason[64];
    return cp_fail(error == ENOMEM ? CP_ERR_NO_MEMORY : CP_ERR_RUNTIME,
                   "cannot start a thread: %s",
                   strerror_r(error, reason, sizeof reason));
}

enum cp_code cp_thread_start(pthread_t *thread, void *(*run)(void *arg), void *arg)
{
    /* Those of a thread's own faults: while they are blocked no handler would tell of them. */
    static const int faults[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGSYS};
    sigset_t blocked, before;
    (void)sigfillset(&blocked);
    for (size_t i = 0; i < sizeof faults / sizeof faults[0]; i++) {
        (void)sigdelset(&blocked, faults[i]);
    }
    /* A new thread has the signal mask of the one that makes it. */
    (void)pthread_sigmask(SIG_SETMASK, &blocked, &before);
    int error = pthread_create(thread, NULL, run, arg);
    (void)pthread_sigmask(SIG_SETMASK, &before, NULL);
    return error == 0 ? CP_OK : cp_thread_fail(error);
}

void cp_thread_cond_init(pthread_cond_t *cond)
{
    pthread_condattr_t clock;
    (void)pthread_condattr_init(&clock);
    (void)pthread_condattr_setclock(&clock, CLOCK_MONOTONIC); /* that of cp_now_ns */
    (void)pthread_cond_init(cond, &clock);
    (void)pthread_condattr_destroy(&clock);
}

int cp_thread_cond_wait(pthread_cond_t *cond, pthread_mutex_t *mutex, int64_t until_ns)
{
    const struct timespec until = {.tv_sec = (time_t)(until_ns / 1000000000),
                                   .tv_nsec = (long)(until_ns % 1000000000)};
    return pthread_cond_timedwait(cond, mutex, &until);
}
