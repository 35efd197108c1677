/* Starting a thread that takes no signals. */
#include "base/thread.h"

#include <errno.h>
#include <signal.h>
#include <string.h>

enum cp_code cp_thread_start(pthread_t *thread, void *(*run)(void *arg), void *arg)
{
    sigset_t all, before;
    char reason[64];
    /* A new thread has the signal mask of the one that makes it. */
    (void)sigfillset(&all);
    (void)pthread_sigmask(SIG_SETMASK, &all, &before);
    int error = pthread_create(thread, NULL, run, arg);
    (void)pthread_sigmask(SIG_SETMASK, &before, NULL);
    return error == 0 ? CP_OK
                      : cp_fail(error == ENOMEM ? CP_ERR_NO_MEMORY : CP_ERR_RUNTIME,
                                "cannot start a thread: %s",
                                strerror_r(error, reason, sizeof reason));
}
