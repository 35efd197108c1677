/* Arrays out: answers in the type of the caller's own arrays. */
#ifndef CP_PY_PY_OUTPUT_H
#define CP_PY_PY_OUTPUT_H

#include "py_dlpack.h"

/* An array that will be written. All zero: none. */
struct output {
    PyObject *object; /* owned */
    struct cp_tensor tensor;
};

/* Packed memory for an answer to `like`. All that can fail fails here, before ranks meet. NULL: exception, -1. */
int output_create(const struct module_state *state, const struct array *like,
                  enum cp_dtype dtype, int ndim, const int64_t *shape,
                  struct output *out);
/* The written array as the caller gets it: a new reference, or NULL with an exception. Leaves `output` all zero. */
PyObject *output_finish(const struct module_state *state, const struct array *like,
                        struct output *output);
void output_release(struct output *output);

#endif
