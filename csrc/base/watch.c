/* The one waiting mechanism: look, spin for a short time, sleep on the bell, and say who is missing. */
#include "base/watch.h"

#include <limits.h>
#include <linux/futex.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "base/point.h"
#include "base/text.h"
#include "base/thread.h"
#include "base/watch_report.h"

/* A wake-up by futex costs about 50 us on a busy host: as long as it may take to be woken, it pays to look. */
static const int64_t spin_ns = 50000;
/* A death rings no bell and an interruption neither: the longest sleep decides how soon either is seen. */
static const int64_t sleep_ns = 20000000;
/* A poison is written within microseconds; its writer may be stopped or killed in the middle of it. */
static const int64_t writing_ns = 100000000;

/* Not the private kind: the word may lie in memory that several processes share. Every outcome (woken, timed out,
 * word changed, signal) means the same to the caller: look again. */
static void futex_wait(_Atomic uint32_t *word, uint32_t expected, int64_t ns)
{
    struct timespec timeout = {.tv_sec = (time_t)(ns / 1000000000),
                               .tv_nsec = (long)(ns % 1000000000)};
    (void)syscall(SYS_futex, word, FUTEX_WAIT, expected, &timeout, NULL, 0);
}

/* No wake-up is lost. Ringer and sleeper both do a read-modify-write of `sleepers`, so one comes first:
 * - the ringer's: the sleeper's reads from it, and then sees at its next look all that was stored before the ring;
 * - the sleeper's: the ringer sees a sleeper and changes `count`. If the sleeper reads `count` after that, it sees
 *   what was stored before; if before, its futex_wait finds the word changed, or sleeps already and is woken.
 * A rank killed in its sleep leaves `sleepers` above zero: from then on a ring costs a system call, no more. */
void cp_bell_ring(struct cp_bell *bell)
{
    CP_POINT("bell: before sleepers");
    /* acq_rel: pairs with the one in cp_bell_sleep. */
    if (atomic_fetch_add_explicit(&bell->sleepers, 0, memory_order_acq_rel) == 0) {
        return;
    }
    CP_POINT("bell: before count");
    /* release: pairs with the acquire in cp_bell_sleep. */
    atomic_fetch_add_explicit(&bell->count, 1, memory_order_release);
    (void)syscall(SYS_futex, &bell->count, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

void cp_bell_sleep(struct cp_bell *bell, bool (*has_news)(const void *arg),
                   const void *arg, int64_t ns)
{
    /* acq_rel: pairs with the one in cp_bell_ring. */
    atomic_fetch_add_explicit(&bell->sleepers, 1, memory_order_acq_rel);
    CP_POINT("watch: before count");
    /* acquire: pairs with the release in cp_bell_ring. */
    uint32_t count = atomic_load_explicit(&bell->count, memory_order_acquire);
    CP_POINT("watch: before last look");
    if (!has_news(arg)) {
        CP_POINT("watch: before sleep");
        futex_wait(&bell->count, count, ns);
    }
    /* relaxed: one sleeper less needs no order. */
    atomic_fetch_sub_explicit(&bell->sleepers, 1, memory_order_relaxed);
}

/* Whoever waits, and for what. */
struct waiter {
    const struct cp_watch *watch;
    const struct cp_wait *wait;
};

static bool is_ready_or_poisoned(const void *arg)
{
    const struct waiter *waiter = arg;
    return waiter->wait->is_ready(waiter->wait->arg) ||
           cp_watch_is_poisoned(waiter->watch);
}

void cp_watch_poison(struct cp_watch *watch, const struct cp_status *status)
{
    struct cp_poison *poison = watch->poison;
    uint32_t none = CP_POISON_NONE;
    /* relaxed: only decides who writes; readers synchronise with the release below. */
    if (!atomic_compare_exchange_strong_explicit(
            &poison->state, &none, CP_POISON_WRITING, memory_order_relaxed,
            memory_order_relaxed)) {
        return;
    }
    CP_POINT("poison: writing");
    poison->status = *status;
    poison->status.text[CP_STATUS_TEXT - 1] = '\0';
    /* release: pairs with the acquire in cp_watch_check. */
    atomic_store_explicit(&poison->state, CP_POISON_SET, memory_order_release);
    cp_bell_ring(watch->bell);
}

bool cp_watch_is_poisoned(const struct cp_watch *watch)
{
    /* acquire: pairs with the release in cp_watch_poison. */
    return atomic_load_explicit(&watch->poison->state, memory_order_acquire) !=
           CP_POISON_NONE;
}

enum cp_code cp_watch_check(const struct cp_watch *watch)
{
    struct cp_poison *poison = watch->poison;
    int64_t give_up_ns = 0;
    for (;;) {
        /* acquire: pairs with the release in cp_watch_poison. */
        uint32_t state = atomic_load_explicit(&poison->state, memory_order_acquire);
        if (state == CP_POISON_NONE) {
            return CP_OK;
        }
        if (state == CP_POISON_SET) {
            return cp_fail_as(&poison->status);
        }
        if (give_up_ns == 0) {
            give_up_ns = cp_now_ns() + writing_ns;
        } else if (cp_now_ns() >= give_up_ns) {
            return cp_fail(
                CP_ERR_COMM,
                "the context is broken; the rank that found out ended before it "
                "could say why");
        }
        (void)sched_yield();
    }
}

/* Poisons with the calling thread's sentence. Where somebody was first, his sentence becomes the thread's own. */
static enum cp_code break_context(struct cp_watch *watch)
{
    struct cp_status mine = *cp_last_error();
    cp_watch_poison(watch, &mine);
    return cp_watch_check(watch);
}

/* "rank 2", "ranks 1, 3"; what does not fit is cut. False where nobody is missing. */
static bool name_missing(const struct cp_watch *watch, const struct cp_wait *wait,
                         char *text, size_t size)
{
    char list[248] = "";
    int missing = 0;
    for (int rank = 0; rank < watch->world; rank++) {
        if (rank != watch->rank && wait->needs(wait->arg, rank)) {
            missing++;
            cp_text_append(list, sizeof list, "%s%d", missing > 1 ? ", " : "", rank);
        }
    }
    cp_text_append(text, size, "%s %s", missing > 1 ? "ranks" : "rank", list);
    return missing > 0;
}

static enum cp_code fail_late(struct cp_watch *watch, const struct cp_wait *wait,
                              struct cp_deadline deadline)
{
    char missing[256] = "";
    char all[CP_STATUS_TEXT];
    cp_watch_report(watch, all, sizeof all);
    if (name_missing(watch, wait, missing, sizeof missing)) {
        (void)cp_fail_rank(CP_ERR_TIMEOUT, watch->rank,
                           "%s did not come to %s within %.1f s%s", missing,
                           wait->operation, deadline.seconds, all);
    } else {
        (void)cp_fail_rank(CP_ERR_TIMEOUT, watch->rank,
                           "rank %d did not finish %s within %.1f s%s", watch->rank,
                           wait->operation, deadline.seconds, all);
    }
    return break_context(watch);
}

/* For whoever looks at a job that stands still (CP_ATTN_DEBUG). */
static void report(const struct cp_watch *watch, const struct cp_wait *wait,
                   double seconds)
{
    char all[CP_STATUS_TEXT];
    cp_watch_report(watch, all, sizeof all);
    (void)fprintf(stderr, "cp_attn: rank %d has waited %.1f s in %s%s\n", watch->rank,
                  seconds, wait->operation, all);
    (void)fflush(stderr);
}

/* CP_AGAIN: all whom this waits for are alive, or what they owe has arrived meanwhile. */
static enum cp_code look_for_deaths(struct cp_watch *watch, const struct cp_wait *wait)
{
    for (int rank = 0; rank < watch->world; rank++) {
        if (rank == watch->rank || !wait->needs(wait->arg, rank) ||
            !watch->is_dead(watch->peers, rank)) {
            continue;
        }
        CP_POINT("watch: somebody is dead");
        /* All that the dead rank stored, it stored before it died, so these looks are final. What it published is
         * used; a reason that it left is in the poison already and so wins over the mere fact. */
        if (wait->is_ready(wait->arg)) {
            return CP_AGAIN;
        }
        if (!wait->needs(wait->arg, rank)) {
            continue;
        }
        char last[CP_FLIGHT_PHRASE] = "";
        double seconds = 0.0;
        if (watch->flights != NULL) {
            cp_flight_phrase(&watch->flights[rank], cp_now_ns(), last, &seconds);
        }
        (void)cp_fail_rank(CP_ERR_COMM, rank,
                           "rank %d is gone (its process ended or it closed its "
                           "context) while rank %d waited for it in %s%s%s",
                           rank, watch->rank, wait->operation,
                           last[0] != '\0' ? "; it was last seen " : "", last);
        return break_context(watch);
    }
    return CP_AGAIN;
}

static enum cp_code look_for_interrupt(struct cp_watch *watch,
                                       const struct cp_wait *wait)
{
    enum cp_code code =
        watch->interrupt != NULL ? watch->interrupt(watch->interrupt_arg) : CP_OK;
    if (code == CP_OK) {
        return CP_OK;
    }
    /* Only this rank was interrupted: the others get an error of their kind. */
    struct cp_status reason = {.code = CP_ERR_COMM, .rank = watch->rank};
    (void)snprintf(reason.text, sizeof reason.text, "rank %d was interrupted in %s",
                   watch->rank, wait->operation);
    cp_watch_poison(watch, &reason);
    return cp_fail_rank(code, watch->rank, "%s", reason.text);
}

/* One that is still waited for; -1: none. */
static int first_needed(const struct cp_watch *watch, const struct cp_wait *wait)
{
    for (int rank = 0; rank < watch->world; rank++) {
        if (rank != watch->rank && wait->needs(wait->arg, rank)) {
            return rank;
        }
    }
    return -1;
}

static enum cp_code look_and_sleep(struct cp_watch *watch, const struct cp_wait *wait,
                                   struct cp_deadline deadline)
{
    const struct waiter waiter = {.watch = watch, .wait = wait};
    int64_t start_ns = 0, interrupt_ns = 0, report_ns = 0;
    int64_t debug_ns = (int64_t)(watch->debug_s * 1e9);
    for (;;) {
        if (wait->is_ready(wait->arg)) {
            return CP_OK;
        }
        CP_POINT("watch: not ready");
        enum cp_code code = cp_watch_check(watch);
        if (code != CP_OK) {
            /* Once more: who went on from here may have broken the context between the two looks. */
            return wait->is_ready(wait->arg) ? CP_OK : code;
        }
        int64_t now_ns = cp_now_ns();
        if (start_ns == 0) {
            start_ns = now_ns;
            interrupt_ns = now_ns + sleep_ns;
            report_ns = now_ns + debug_ns;
        }
        /* The looks that cost system calls wait until spinning is over. */
        if (watch->may_spin && now_ns - start_ns < spin_ns && now_ns < deadline.at_ns) {
            cp_thread_pause();
            continue;
        }
        code = look_for_deaths(watch, wait);
        if (code != CP_AGAIN) {
            return wait->is_ready(wait->arg) ? CP_OK : code; /* as above */
        }
        now_ns = cp_now_ns();
        /* Asking may be dear (the GIL): not in short waits, and not at every ring. */
        if (now_ns >= interrupt_ns || now_ns >= deadline.at_ns) {
            CP_TRY(look_for_interrupt(watch, wait));
            interrupt_ns = now_ns + sleep_ns;
            cp_recorder_still(watch->recorder, first_needed(watch, wait));
        }
        if (debug_ns > 0 && now_ns >= report_ns) {
            report(watch, wait, (double)(now_ns - start_ns) * 1e-9);
            report_ns = now_ns + debug_ns;
        }
        now_ns = cp_now_ns();
        if (now_ns >= deadline.at_ns) {
            return wait->is_ready(wait->arg) ? CP_OK : fail_late(watch, wait, deadline);
        }
        int64_t left_ns = deadline.at_ns - now_ns;
        cp_bell_sleep(watch->bell, is_ready_or_poisoned, &waiter,
                      left_ns < sleep_ns ? left_ns : sleep_ns);
    }
}

enum cp_code cp_watch_wait(struct cp_watch *watch, const struct cp_wait *wait,
                           struct cp_deadline deadline)
{
    if (wait->is_ready(wait->arg)) {
        return CP_OK;
    }
    cp_recorder_begin(watch->recorder, cp_wait_name, -1, first_needed(watch, wait));
    enum cp_code code = look_and_sleep(watch, wait, deadline);
    cp_recorder_end(watch->recorder);
    return code;
}
