/* cp_attn.Buffer: memory of our own that any array library can take over by DLPack. It is how an answer gets to a
 * library that offers no way to allocate, and the answer itself where there is no library to give it to. */
#ifndef CP_PY_PY_BUFFER_H
#define CP_PY_PY_BUFFER_H

#include "module.h"
#include "tensor/tensor.h"

PyTypeObject *buffer_type_create(PyObject *self);

/* Packed, on the device of `like`; zeroed on the host. NULL with an exception. */
PyObject *buffer_create(const struct module_state *state, const struct cp_tensor *like,
                        enum cp_dtype dtype, int ndim, const int64_t *shape,
                        struct cp_tensor *out);

#endif
