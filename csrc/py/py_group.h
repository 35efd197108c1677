/* The caller's process group: what the ranks' GPUs may be connected by. */
#ifndef CP_PY_PY_GROUP_H
#define CP_PY_PY_GROUP_H

#include "py_context.h"

/* While the context's ranks are not connected on their GPUs: tells it what the mesh of its config has for the GPU of
 * that number. 0, or -1 with an exception. */
int group_offer(ContextObject *context, int ordinal);

#endif
