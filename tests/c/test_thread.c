/* A thread of the library's own takes no signals but of its faults, and says why there is none. */
#include <signal.h>

#include "base/thread.h"
#include "test.h"

static void *read_mask(void *arg)
{
    (void)pthread_sigmask(SIG_SETMASK, NULL, arg);
    return NULL;
}

TEST(signals_go_to_the_caller)
{
    sigset_t before, after, inside;
    pthread_t thread;
    (void)sigemptyset(&inside);
    (void)pthread_sigmask(SIG_SETMASK, NULL, &before);
    REQUIRE(cp_thread_start(&thread, read_mask, &inside) == CP_OK);
    (void)pthread_sigmask(SIG_SETMASK, NULL, &after);
    (void)pthread_join(thread, NULL);
    CHECK(sigismember(&inside, SIGINT) && sigismember(&inside, SIGTERM));
    CHECK(!sigismember(&inside, SIGSEGV) && !sigismember(&inside, SIGBUS));
    CHECK_EQ_I64(sigismember(&after, SIGINT), sigismember(&before, SIGINT));
}

TEST(no_room_for_a_stack_no_thread)
{
    pthread_attr_t before, large;
    pthread_t thread;
    sigset_t inside;
    REQUIRE(pthread_getattr_default_np(&before) == 0);
    REQUIRE(pthread_attr_init(&large) == 0);
    REQUIRE(pthread_attr_setstacksize(&large, (size_t)1 << 50) == 0);
    REQUIRE(pthread_setattr_default_np(&large) == 0);
    enum cp_code code = cp_thread_start(&thread, read_mask, &inside);
    (void)pthread_setattr_default_np(&before);
    (void)pthread_attr_destroy(&large);
    (void)pthread_attr_destroy(&before);
    CHECK(code == CP_ERR_RUNTIME || code == CP_ERR_NO_MEMORY);
    CHECK_STR_HAS(cp_last_error()->text, "cannot start a thread: ");
}
