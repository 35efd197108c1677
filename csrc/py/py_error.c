/* Exceptions: our own classes, codes to exceptions and back. */
#include <stdio.h>
#include <string.h>

#include "module.h"

/* name, base of our own or NULL, built-in base or NULL, docstring */
static const struct {
    const char *name, *base;
    PyObject **builtin;
    const char *doc;
} own_errors[] = {
    {"Error", NULL, &PyExc_Exception,
     "What all exceptions of cp_attn have in common; errors in arguments are built-in "
     "ones."},
    {"CommError", "Error", NULL,
     "The ranks cannot talk to each other any more: one of them died, failed or was "
     "interrupted.\n\n"
     "The context is broken: every later call raises this again, close() works."},
    {"CommTimeout", "CommError", &PyExc_TimeoutError,
     "A rank did not answer within the config's timeout."},
    {"DeviceError", "Error", NULL, "A device failed."},
    {"NotSupported", "Error", &PyExc_NotImplementedError,
     "Right as asked, but not possible here."},
    {"InternalError", "Error", NULL, "A bug in cp_attn."},
};

static PyObject *make_error(PyObject *self, size_t row)
{
    PyObject *base = NULL;
    PyObject *bases = NULL;
    PyObject *error = NULL;
    char full_name[64];
    if (own_errors[row].base != NULL) {
        base = PyObject_GetAttrString(self, own_errors[row].base);
        if (base == NULL) {
            return NULL;
        }
    }
    PyObject *builtin =
        own_errors[row].builtin == NULL ? NULL : *own_errors[row].builtin;
    if (base != NULL && builtin != NULL) {
        bases = PyTuple_Pack(2, base, builtin);
    } else {
        bases = PyTuple_Pack(1, base != NULL ? base : builtin);
    }
    if (bases != NULL) {
        (void)snprintf(full_name, sizeof full_name, "cp_attn.%s", own_errors[row].name);
        error = PyErr_NewExceptionWithDoc(full_name, own_errors[row].doc, bases, NULL);
    }
    Py_XDECREF(bases);
    Py_XDECREF(base);
    return error;
}

/* The class that a code raises: one of the module's own, else a built-in. */
static PyObject *find_error(PyObject *self, const char *name)
{
    PyObject *own = PyDict_GetItemString(PyModule_GetDict(self), name);
    if (own != NULL) {
        return Py_NewRef(own);
    }
    return Py_XNewRef(PyDict_GetItemString(PyEval_GetBuiltins(), name));
}

int errors_init(PyObject *self, struct module_state *state)
{
    for (size_t row = 0; row < sizeof own_errors / sizeof own_errors[0]; row++) {
        PyObject *error = make_error(self, row);
        if (error == NULL ||
            PyModule_AddObjectRef(self, own_errors[row].name, error) < 0) {
            Py_XDECREF(error);
            return -1;
        }
        Py_DECREF(error);
    }
#define FIND_ERROR(code, exception)                                                    \
    state->error_of[code] = find_error(self, #exception);                              \
    if (state->error_of[code] == NULL) {                                               \
        PyErr_Format(PyExc_SystemError, "no exception is called %s", #exception);      \
        return -1;                                                                     \
    }
    CP_STATUS_MAP(FIND_ERROR)
#undef FIND_ERROR
    return 0;
}

void py_raise(const struct module_state *state, enum cp_code code)
{
    const struct cp_status *status = cp_last_error();
    if (code == CP_ERR_INTERRUPTED && PyErr_Occurred()) {
        return; /* the handler that interrupted has set its own */
    }
    /* Somebody else's interruption is no KeyboardInterrupt of this process. */
    enum cp_code own = code == CP_ERR_INTERRUPTED ? CP_ERR_COMM : code;
    PyObject *type =
        own > CP_AGAIN && own < CP_CODE_COUNT ? state->error_of[own] : NULL;
    if (type == NULL) {
        type = state->error_of[CP_ERR_INTERNAL];
    }
    /* A sentence may have been cut in the middle of a character. */
    PyObject *text =
        PyUnicode_DecodeUTF8(status->text, (Py_ssize_t)strlen(status->text), "replace");
    if (text != NULL) {
        PyErr_SetObject(type, text);
        Py_DECREF(text);
    }
}

int py_check(const struct module_state *state, enum cp_code code)
{
    if (code == CP_OK) {
        return 0;
    }
    py_raise(state, code);
    return -1;
}

PyObject *error_take(void)
{
#if PY_VERSION_HEX >= 0x030c0000
    return PyErr_GetRaisedException();
#else
    PyObject *type = NULL;
    PyObject *value = NULL;
    PyObject *traceback = NULL;
    PyErr_Fetch(&type, &value, &traceback);
    if (type == NULL) {
        return NULL;
    }
    PyErr_NormalizeException(&type, &value, &traceback);
    if (traceback != NULL) {
        (void)PyException_SetTraceback(value, traceback);
    }
    Py_XDECREF(type);
    Py_XDECREF(traceback);
    return value;
#endif
}

void error_restore(PyObject *error)
{
    if (error == NULL) {
        PyErr_Clear();
        return;
    }
#if PY_VERSION_HEX >= 0x030c0000
    PyErr_SetRaisedException(error);
#else
    PyErr_Restore(Py_NewRef((PyObject *)Py_TYPE(error)), error,
                  PyException_GetTraceback(error));
#endif
}

PyObject *error_keep(void)
{
    if (!PyErr_Occurred()) {
        PyErr_SetString(PyExc_SystemError, "something failed without an exception");
    }
    return error_take();
}

static enum cp_code code_of(PyObject *error)
{
    /* Classes before those that they derive from. */
    const struct {
        PyObject *type;
        enum cp_code code;
    } rows[] = {
        {PyExc_NotImplementedError, CP_ERR_UNSUPPORTED},
        {PyExc_ValueError, CP_ERR_VALUE},
        {PyExc_TypeError, CP_ERR_TYPE},
        {PyExc_BufferError, CP_ERR_BUFFER},
        {PyExc_MemoryError, CP_ERR_NO_MEMORY},
    };
    for (size_t row = 0; row < sizeof rows / sizeof rows[0]; row++) {
        if (PyErr_GivenExceptionMatches(error, rows[row].type)) {
            return rows[row].code;
        }
    }
    return CP_ERR_RUNTIME;
}

void error_to_status(PyObject *error, int rank, struct cp_status *status)
{
    status->code = (int32_t)code_of(error);
    status->rank = rank;
    PyObject *text = PyObject_Str(error);
    const char *words = text == NULL ? NULL : PyUnicode_AsUTF8(text);
    if (words == NULL) {
        PyErr_Clear();
        words = "(no text)";
    }
    const char *name = Py_TYPE(error)->tp_name;
    /* The class is told only where the code does not say it. */
    if (strcmp(name, cp_code_name((enum cp_code)status->code)) == 0) {
        (void)snprintf(status->text, sizeof status->text, "%s", words);
    } else {
        (void)snprintf(status->text, sizeof status->text, "%s: %s", name, words);
    }
    Py_XDECREF(text);
}
