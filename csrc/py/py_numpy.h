/* NumPy through its C API, loaded when the first array is met and not before. */
#ifndef CP_PY_PY_NUMPY_H
#define CP_PY_PY_NUMPY_H

#include "module.h"
#include "tensor/tensor.h"

/* 1 for a plain numpy.ndarray, 0 for anything else, -1 with an exception. Subclasses may mean something else by their
 * memory, so they go through DLPack. */
int numpy_is_array(struct module_state *state, PyObject *object);

/* For what it said 0 to: refuses masked arrays, whose memory does not say what is masked. */
int numpy_check(const struct module_state *state, PyObject *object, const char *name);

/* For what numpy_is_array said 1 to: borrows the array's memory. */
int numpy_import(const struct module_state *state, PyObject *array, const char *name,
                 struct cp_tensor *out);

/* A new packed array, or NULL with an exception. */
PyObject *numpy_create(const struct module_state *state, enum cp_dtype dtype, int ndim,
                       const int64_t *shape, struct cp_tensor *out);

#endif
