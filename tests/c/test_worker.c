/* The thread of the library's own: started, woken, ended, in a forked child and without
 * memory. */
#include <fcntl.h>
#include <poll.h>
#include <sys/resource.h>

#include "base/worker.h"
#include "ranks.h"

struct sleeper {
    struct cp_worker worker;
    _Atomic int woken;
    _Atomic bool is_ending, has_signals;
};

/* Until it is told to end: counts how often it wakes. */
static void *sleep_and_count(void *arg)
{
    struct sleeper *sleeper = arg;
    sigset_t blocked;
    (void)pthread_sigmask(SIG_SETMASK, NULL, &blocked);
    atomic_store(&sleeper->has_signals,
                 !sigismember(&blocked, SIGINT) || !sigismember(&blocked, SIGTERM));
    while (!atomic_load(&sleeper->is_ending)) {
        struct pollfd poller = {.fd = sleeper->worker.wake_fd, .events = POLLIN};
        CHECK_EQ_I64(poll(&poller, 1, 20000), 1);
        cp_worker_heed(&sleeper->worker);
        atomic_fetch_add(&sleeper->woken, 1);
    }
    return NULL;
}

static void await_woken(struct sleeper *sleeper, int count)
{
    for (int i = 0; i < 5000 && atomic_load(&sleeper->woken) < count; i++) {
        ranks_sleep_us(1000);
    }
    CHECK_EQ_I64(atomic_load(&sleeper->woken), count);
}

TEST(wakes_once_for_each_time_and_ends)
{
    struct sleeper sleeper = {.woken = 0};
    sigset_t before, after;
    (void)pthread_sigmask(SIG_SETMASK, NULL, &before);
    REQUIRE(cp_worker_start(&sleeper.worker, sleep_and_count, &sleeper) == CP_OK);
    (void)pthread_sigmask(SIG_SETMASK, NULL, &after);
    CHECK_EQ_I64(sigismember(&after, SIGINT), sigismember(&before, SIGINT));
    for (int i = 1; i <= 3; i++) {
        cp_worker_wake(&sleeper.worker);
        await_woken(&sleeper, i);
    }
    CHECK(!atomic_load(&sleeper.has_signals));
    atomic_store(&sleeper.is_ending, true);
    int fd = sleeper.worker.wake_fd;
    cp_worker_end(&sleeper.worker);
    CHECK_EQ_I64(atomic_load(&sleeper.woken), 4);
    CHECK_EQ_I64(fcntl(fd, F_GETFD), -1);
    cp_worker_end(&sleeper.worker); /* none is there */
}

TEST(a_forked_child_waits_for_no_thread)
{
    if (TEST_UNDER_TSAN) {
        TEST_SKIP("forks after starting threads");
    }
    struct sleeper sleeper = {.woken = 0};
    REQUIRE(cp_worker_start(&sleeper.worker, sleep_and_count, &sleeper) == CP_OK);
    (void)fflush(stdout);
    pid_t pid = fork();
    if (pid == 0) {
        (void)alarm(5);
        cp_worker_end(&sleeper.worker);
        _exit(0);
    }
    CHECK_EQ_I64(ranks_end_of_process(pid), 0);
    ranks_sleep_us(20000);
    CHECK_EQ_I64(atomic_load(&sleeper.woken), 0); /* nor does it wake the parent's */
    atomic_store(&sleeper.is_ending, true);
    cp_worker_end(&sleeper.worker);
}

TEST(no_descriptor_no_thread)
{
    struct sleeper sleeper = {.woken = 0};
    struct rlimit before, none;
    REQUIRE(getrlimit(RLIMIT_NOFILE, &before) == 0);
    none = before;
    none.rlim_cur = 0;
    REQUIRE(setrlimit(RLIMIT_NOFILE, &none) == 0);
    enum cp_code code = cp_worker_start(&sleeper.worker, sleep_and_count, &sleeper);
    (void)setrlimit(RLIMIT_NOFILE, &before);
    CHECK_EQ_I64(code, CP_ERR_RUNTIME);
    CHECK_STR_HAS(cp_last_error()->text, "cannot start a thread");
    cp_worker_end(&sleeper.worker);
}
