/* Runs one function on several ranks, as threads or as processes, for tests.
 *
 * A process rank reports by its exit status: 0 where none of its checks failed. */
#ifndef CP_TESTS_RANKS_H
#define CP_TESTS_RANKS_H

#include <pthread.h>
#include <sched.h>
#include <sys/wait.h>

#include "test.h"

enum { RANKS_MOST = 16 };

typedef void (*ranks_body)(int rank, void *arg);

struct ranks_thread {
    pthread_t thread;
    int rank;
    ranks_body body;
    void *arg;
};

static inline void *ranks_thread_main(void *arg)
{
    struct ranks_thread *self = arg;
    self->body(self->rank, self->arg);
    return NULL;
}

static inline void ranks_as_threads(int world, ranks_body body, void *arg)
{
    struct ranks_thread threads[RANKS_MOST];
    for (int rank = 0; rank < world; rank++) {
        threads[rank] = (struct ranks_thread){.rank = rank, .body = body, .arg = arg};
        if (pthread_create(&threads[rank].thread, NULL, ranks_thread_main,
                           &threads[rank]) != 0) {
            (void)fprintf(stderr, "no thread for rank %d\n", rank);
            abort();
        }
    }
    for (int rank = 0; rank < world; rank++) {
        (void)pthread_join(threads[rank].thread, NULL);
    }
}

static inline pid_t ranks_start_process(int rank, ranks_body body, void *arg)
{
    (void)fflush(stdout);
    pid_t pid = fork();
    if (pid == 0) {
        (void)alarm(60);
        atomic_store(&test_failures, 0);
        body(rank, arg);
        (void)fflush(stdout);
        _exit(atomic_load(&test_failures) != 0);
    }
    return pid;
}

/* Its exit status; 128 + signal where one ended it. */
static inline int ranks_end_of_process(pid_t pid)
{
    int status = 0;
    while (waitpid(pid, &status, 0) < 0) {
    }
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

static inline void ranks_as_processes(int world, ranks_body body, void *arg)
{
    pid_t pids[RANKS_MOST];
    for (int rank = 0; rank < world; rank++) {
        pids[rank] = ranks_start_process(rank, body, arg);
    }
    for (int rank = 0; rank < world; rank++) {
        CHECK_EQ_I64(ranks_end_of_process(pids[rank]), 0);
    }
}

static inline void ranks_sleep_us(int64_t us)
{
    struct timespec pause = {.tv_sec = (time_t)(us / 1000000),
                             .tv_nsec = (long)(us % 1000000) * 1000};
    (void)nanosleep(&pause, NULL);
}

#endif
