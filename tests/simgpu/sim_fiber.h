/* Fibers: the threads of a block, which take turns on the thread of their stream. */
#ifndef SIM_FIBER_H
#define SIM_FIBER_H

#include <stddef.h>

struct sim_fiber;

/* A fiber that runs body(arg) whenever it is entered; when body returns it is left and
 * may be entered again. */
struct sim_fiber *sim_fiber_create(void (*body)(void *arg), void *arg);
void sim_fiber_destroy(struct sim_fiber *fiber);
/* From the thread: runs it until it leaves. */
void sim_fiber_enter(struct sim_fiber *fiber);
/* From the fiber: back to the thread, until entered again. */
void sim_fiber_leave(struct sim_fiber *fiber);

#endif
