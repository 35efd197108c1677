/* Starting, waking and ending a thread. */
#include "base/worker.h"

#include <errno.h>
#include <stdint.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "base/thread.h"

enum cp_code cp_worker_start(struct cp_worker *worker, void *(*run)(void *arg),
                             void *arg)
{
    worker->wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (worker->wake_fd < 0) {
        return cp_thread_fail(errno);
    }
    enum cp_code code = cp_thread_start(&worker->thread, run, arg);
    if (code != CP_OK) {
        (void)close(worker->wake_fd);
        return code;
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
    cp_worker_leave(worker);
}

void cp_worker_detach(const struct cp_worker *worker)
{
    (void)pthread_detach(worker->thread);
}

void cp_worker_leave(struct cp_worker *worker)
{
    (void)close(worker->wake_fd);
    *worker = (struct cp_worker){.owner_pid = 0};
}
