/* cp_attn.attention. */
#ifndef CP_PY_PY_ATTENTION_H
#define CP_PY_PY_ATTENTION_H

#include "module.h"

extern const char attention_doc[];

PyObject *mod_attention(PyObject *self, PyObject *const *args, Py_ssize_t nargs,
                        PyObject *kwnames);

#endif
