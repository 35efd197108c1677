/* ctx.shard and ctx.gather: a tensor cut along one dimension, and put together again; and the gradient of that. */
#ifndef CP_PY_PY_CUT_H
#define CP_PY_PY_CUT_H

#include "py_context.h"

extern const char context_shard_doc[];
extern const char context_gather_doc[];
extern const char context_gather_at_doc[];
extern const char context_reduce_scatter_doc[];

PyObject *context_shard(ContextObject *self, PyObject *const *args, Py_ssize_t nargs,
                        PyObject *kwnames);
PyObject *context_gather(ContextObject *self, PyObject *const *args, Py_ssize_t nargs,
                         PyObject *kwnames);
/* For autograd: (whole, first own row). */
PyObject *context_gather_at(ContextObject *self, PyObject *const *args,
                            Py_ssize_t nargs, PyObject *kwnames);
/* For autograd: the own rows of the sum of all ranks' tensors. */
PyObject *context_reduce_scatter(ContextObject *self, PyObject *const *args,
                                 Py_ssize_t nargs, PyObject *kwnames);

#endif
