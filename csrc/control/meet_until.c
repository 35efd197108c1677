/* One loop for all meetings. */
#include "control/meet_until.h"

#include <errno.h>
#include <string.h>
#include <time.h>

#include "control/meet_fork.h"

static const int64_t poll_ns = 50000000; /* how long an interruption may go unnoticed */
static const int64_t first_pause_ns = 200000; /* between attempts to connect */
static const int64_t longest_pause_ns = 10000000;

void cp_meet_retry_later(struct cp_meet_retry *retry)
{
    int64_t pause_ns = retry->pause_ns > 0 ? 2 * retry->pause_ns : first_pause_ns;
    retry->pause_ns = pause_ns < longest_pause_ns ? pause_ns : longest_pause_ns;
    retry->at_ns = cp_now_ns() + retry->pause_ns;
}

enum cp_code cp_meet_fail_system(int rank, const char *what)
{
    int error = errno;
    char reason[64];
    return cp_fail_rank(error == ENOMEM ? CP_ERR_NO_MEMORY : CP_ERR_RUNTIME, rank,
                        "rank %d cannot %s to meet the other ranks: %s", rank, what,
                        strerror_r(error, reason, sizeof reason));
}

/* Sleeps until something may have changed. */
static void wait_for_news(const struct cp_meet_kind *kind, const void *meeting,
                          struct cp_deadline deadline, struct pollfd *pollers)
{
    int64_t now_ns = cp_now_ns();
    int64_t until_ns =
        now_ns + poll_ns < deadline.at_ns ? now_ns + poll_ns : deadline.at_ns;
    nfds_t count = kind->poll(meeting, pollers, &until_ns);
    int64_t left_ns = until_ns > now_ns ? until_ns - now_ns : 0;
    struct timespec left = {.tv_sec = (time_t)(left_ns / 1000000000),
                            .tv_nsec = (long)(left_ns % 1000000000)};
    (void)ppoll(pollers, count, &left, NULL);
}

enum cp_code cp_meet_until(const struct cp_meet_kind *kind, void *meeting,
                           const struct cp_meet_args *args, struct pollfd *pollers)
{
    for (;;) {
        cp_fork_lock();
        enum cp_code code = kind->once(meeting, args);
        cp_fork_unlock();
        CP_TRY(code);
        if (kind->is_complete(meeting)) {
            return CP_OK;
        }
        code = args->interrupt != NULL ? args->interrupt(args->interrupt_arg) : CP_OK;
        if (code != CP_OK) {
            return cp_fail_rank(
                code, args->rank,
                "rank %d was interrupted while it waited for the other ranks",
                args->rank);
        }
        if (cp_deadline_passed(args->deadline)) {
            return kind->fail_late(meeting, args);
        }
        wait_for_news(kind, meeting, args->deadline, pollers);
    }
}
