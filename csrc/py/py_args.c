/* Positional and keyword arguments by a table of names. */
#include "py_args.h"

static int find_name(const struct arg_names *spec, PyObject *name)
{
    for (int arg = 0; arg < spec->count; arg++) {
        if (PyUnicode_CompareWithASCIIString(name, spec->names[arg]) == 0) {
            return arg;
        }
    }
    return -1;
}

/* The first complaint stays. */
static int complain(int result, const char *format, const char *function,
                    PyObject *name)
{
    if (result == 0) {
        PyErr_Format(PyExc_TypeError, format, function, name);
    }
    return -1;
}

int args_collect(const struct arg_names *spec, PyObject *const *args, Py_ssize_t nargs,
                 PyObject *kwnames, PyObject **values)
{
    int result = 0;
    Py_ssize_t keywords = kwnames == NULL ? 0 : PyTuple_GET_SIZE(kwnames);
    for (Py_ssize_t arg = 0; arg < nargs && arg < spec->positional; arg++) {
        values[arg] = args[arg];
    }
    if (nargs > spec->positional) {
        PyErr_Format(PyExc_TypeError,
                     "%s() takes %d positional arguments but %zd were given",
                     spec->function, spec->positional, nargs);
        result = -1;
    }
    for (Py_ssize_t keyword = 0; keyword < keywords; keyword++) {
        PyObject *name = PyTuple_GET_ITEM(kwnames, keyword);
        int arg = find_name(spec, name);
        if (arg < 0) {
            result = complain(result, "%s() got an unexpected keyword argument '%U'",
                              spec->function, name);
        } else if (values[arg] != NULL) {
            result = complain(result, "%s() got multiple values for argument '%U'",
                              spec->function, name);
        } else {
            values[arg] = args[nargs + keyword];
        }
    }
    return result;
}

PyObject *args_int(PyObject *value, const char *name)
{
    if (PyIndex_Check(value) && !PyBool_Check(value)) {
        PyObject *number = PyNumber_Index(value);
        /* What has __index__ may still have none for its own value, as a float array. */
        if (number != NULL || !PyErr_ExceptionMatches(PyExc_TypeError)) {
            return number;
        }
    }
    PyErr_Format(PyExc_TypeError, "%s must be an int, not %s", name,
                 Py_TYPE(value)->tp_name);
    return NULL;
}

int args_flag(PyObject *value, int *out)
{
    int truth = value == NULL ? *out : PyObject_IsTrue(value);
    if (truth < 0) {
        return -1;
    }
    *out = truth;
    return 0;
}
