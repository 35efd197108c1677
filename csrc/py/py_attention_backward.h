/* The gradient of cp_attn.attention. */
#ifndef CP_PY_PY_ATTENTION_BACKWARD_H
#define CP_PY_PY_ATTENTION_BACKWARD_H

#include "module.h"

extern const char attention_backward_doc[];

PyObject *mod_attention_backward(PyObject *self, PyObject *const *args,
                                 Py_ssize_t nargs, PyObject *kwnames);

#endif
