/* Starting, waking and ending a thread. */
#include "base/worker.h"

#include <errno.h>
#include <signal.h>
#include <stdint.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

static enum cp_code fail_system(int error)
{
    char reason[64];
    return cp_fail(error == ENOMEM ? CP_ERR_NO_MEMORY : CP_ERR_RUNTIME,
                   "cannot start a thread: %s",
                   strerror_r(error, reason, sizeof reason));
}

/* A new thread has the signal mask of the one that makes it. */
static int create_without_signals(pthread_t *thread, void *(*run)(void *arg), void *arg)
{
    sigset_t all, before;
    (void)sigfillset(&all);
    (void)pthread_sigmask(SIG_SETMASK, &all, &before);
    int error = pthread_create(thread, NULL, run, arg);
    (void)pthread_sigmask(SIG_SETMASK, &before, NULL);
    return error;
}

enum cp_code cp_worker_start(struct cp_worker *worker, void *(*run)(void *arg),
                             void *arg)
{
    worker->wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (worker->wake_fd < 0) {
        return fail_system(errno);
    }
    int error = create_without_signals(&worker->thread, run, arg);
    if (error != 0) {
        (void)close(worker->wake_fd);
        return fail_system(error);
    }
    worker->owner_pid = getpid();
    return CP_OK;
}

void cp_worker_wake(struct cp_worker *worker)
{
    const uint64_t one = 1;
    /* Fails only where the counter is full: awake already. */
    ssize_t written = write(worker->wake_fd, &one, sizeof one);
    (void)written;
}

void cp_worker_heed(struct cp_worker *worker)
{
    uint64_t count = 0;
    ssize_t got = read(worker->wake_fd, &count, sizeof count);
    (void)got;
}

void cp_worker_end(struct cp_worker *worker)
{
    if (worker->owner_pid == 0) {
        return;
    }
    if (worker->owner_pid == getpid()) {
        cp_worker_wake(worker);
        (void)pthread_join(worker->thread, NULL);
    }
    (void)close(worker->wake_fd);
    *worker = (struct cp_worker){.owner_pid = 0};
}
