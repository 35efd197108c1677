#include "sim_lock.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

/* There only where the program is built with the sanitizer. */
__attribute__((weak)) void __tsan_acquire(void *what);
__attribute__((weak)) void __tsan_release(void *what);
__attribute__((weak)) void AnnotateIgnoreReadsBegin(const char *file, int line);
__attribute__((weak)) void AnnotateIgnoreReadsEnd(const char *file, int line);
__attribute__((weak)) void AnnotateIgnoreWritesBegin(const char *file, int line);
__attribute__((weak)) void AnnotateIgnoreWritesEnd(const char *file, int line);
__attribute__((weak)) void __asan_poison_memory_region(void const volatile *data,
                                                       size_t bytes);
__attribute__((weak)) void __asan_unpoison_memory_region(void const volatile *data,
                                                         size_t bytes);

/* 0 free, 1 held, 2 held and waited for (Drepper, "Futexes are tricky", mutex 2). */
static _Atomic uint32_t lock_state;

static void futex_wait(_Atomic uint32_t *word, uint32_t seen, const struct timespec *at)
{
    (void)syscall(SYS_futex, word, FUTEX_WAIT_BITSET_PRIVATE, seen, at, NULL,
                  FUTEX_BITSET_MATCH_ANY);
}

/* Behind the lock is bookkeeping only, and ThreadSanitizer sees what libc does to it
 * without knowing the lock. */
static void hide(void)
{
    if (AnnotateIgnoreReadsBegin) {
        AnnotateIgnoreReadsBegin(__FILE__, __LINE__);
        AnnotateIgnoreWritesBegin(__FILE__, __LINE__);
    }
}

static void show(void)
{
    if (AnnotateIgnoreReadsBegin) {
        AnnotateIgnoreWritesEnd(__FILE__, __LINE__);
        AnnotateIgnoreReadsEnd(__FILE__, __LINE__);
    }
}

void sim_lock(void)
{
    uint32_t state = 0;
    if (!atomic_compare_exchange_strong(&lock_state, &state, 1)) {
        while (atomic_exchange(&lock_state, 2) != 0) {
            futex_wait(&lock_state, 2, NULL);
        }
    }
    hide();
}

void sim_unlock(void)
{
    show();
    if (atomic_exchange(&lock_state, 0) == 2) {
        (void)syscall(SYS_futex, &lock_state, FUTEX_WAKE_PRIVATE, 1, NULL, NULL, 0);
    }
}

bool sim_wait_until(struct sim_cond *cond, int64_t at_ns)
{
    struct timespec at = {.tv_sec = (time_t)(at_ns / 1000000000),
                          .tv_nsec = (long)(at_ns % 1000000000)};
    uint32_t seen = atomic_load(&cond->wakes);
    sim_unlock();
    futex_wait(&cond->wakes, seen, at_ns < 0 ? NULL : &at);
    sim_lock();
    return at_ns < 0 || sim_now_ns() < at_ns;
}

void sim_wait(struct sim_cond *cond)
{
    (void)sim_wait_until(cond, -1);
}

void sim_wake(struct sim_cond *cond)
{
    (void)atomic_fetch_add(&cond->wakes, 1);
    (void)syscall(SYS_futex, &cond->wakes, FUTEX_WAKE_PRIVATE, INT32_MAX, NULL, NULL,
                  0);
}

int64_t sim_now_ns(void)
{
    struct timespec now;
    (void)clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

void sim_sleep_us(int64_t us)
{
    struct timespec pause = {.tv_sec = (time_t)(us / 1000000),
                             .tv_nsec = (long)(us % 1000000) * 1000};
    if (us > 0) {
        (void)nanosleep(&pause, NULL);
    }
}

void sim_release(void *what)
{
    if (__tsan_release) {
        __tsan_release(what);
    }
}

void sim_acquire(void *what)
{
    if (__tsan_acquire) {
        __tsan_acquire(what);
    }
}

void sim_forbid(void *data, size_t bytes)
{
    if (__asan_poison_memory_region) {
        __asan_poison_memory_region(data, bytes);
    }
}

void sim_allow(void *data, size_t bytes)
{
    if (__asan_unpoison_memory_region) {
        __asan_unpoison_memory_region(data, bytes);
    }
}

uint64_t sim_random(uint64_t *state)
{
    uint64_t z = *state += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}
