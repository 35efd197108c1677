/* Arguments of a fast call, sorted by name. */
#ifndef CP_PY_PY_ARGS_H
#define CP_PY_PY_ARGS_H

#include "module.h"

/* What a function takes: the first `positional` names by position or name, the others by name only. */
struct arg_names {
    const char *function;
    const char *const *names;
    int count, positional;
};

/* Puts borrowed references into `values` (count of them, NULL where not given). Fills in all that it can place, also
 * where it returns -1 with a TypeError. */
int args_collect(const struct arg_names *spec, PyObject *const *args, Py_ssize_t nargs,
                 PyObject *kwnames, PyObject **values);

/* A whole number is what has __index__, NumPy's too, but no bool. A new reference to an int, or NULL with an exception:
 * a TypeError that names the argument. */
PyObject *args_int(PyObject *value, const char *name);

/* 0 or 1 into `out`; `value` NULL leaves it. */
int args_flag(PyObject *value, int *out);

#endif
