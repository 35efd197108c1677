/* Threads of the library's own: signals go to the caller's, save those of their
 * own faults. */
#ifndef CP_BASE_THREAD_H
#define CP_BASE_THREAD_H

#include <pthread.h>
#include <stdint.h>

#include "base/status.h"

/* CP_ERR_NO_MEMORY or CP_ERR_RUNTIME where the system has none to give. */
CP_NODISCARD enum cp_code cp_thread_start(pthread_t *thread, void *(*run)(void *arg),
                                          void *arg);

/* Why there is none: `error` is an errno. CP_ERR_NO_MEMORY or CP_ERR_RUNTIME. */
enum cp_code cp_thread_fail(int error);

/* A condition whose timed waits are by cp_now_ns. */
void cp_thread_cond_init(pthread_cond_t *cond);
/* Waits for it, at the latest until that time; what pthread_cond_timedwait says. */
int cp_thread_cond_wait(pthread_cond_t *cond, pthread_mutex_t *mutex, int64_t until_ns);

/* Tells the core that its thread looks at memory again and again. */
static inline void cp_thread_pause(void)
{
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("yield");
#endif
}

#endif
