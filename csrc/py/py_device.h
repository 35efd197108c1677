/* Tensors on GPUs: which accelerator serves them, and behind which stream of the caller's a call runs. */
#ifndef CP_PY_PY_DEVICE_H
#define CP_PY_PY_DEVICE_H

#include "py_context.h"
#include "py_dlpack.h"

/* Memory of the array's library; all zero where it lends none. */
struct cp_lender device_lender(struct module_state *state, const struct array *array);

/* Makes the context serve the array's device, with memory of its library where that lends any, and notes in the record
 * where the call is. `package`: of the call's backend, or NULL; borrowed until the call is over. 0, or -1 with an
 * exception. */
int device_use(struct module_state *state, ContextObject *context,
               const struct array *array, const char *name,
               const struct cp_package *package, struct cp_record *record);

/* The stream that a call on this array, its first, belongs on. NULL on the host. 0, or -1 with an exception. */
int device_stream(struct module_state *state, const struct array *array,
                  struct cp_stream **out);

/* That stream goes on behind those of the arrays; those without an object count for nothing. 0, or -1 with an
 * exception. */
int device_follow(struct module_state *state, struct cp_stream *stream,
                  const struct array *arrays, int count);

#endif
