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

/* Built-in classes that the core has no code for. They travel as the codes from CP_CODE_COUNT on, which the core hands
 * on as numbers. All of them can be made of one text, and mean on another rank what they meant on this one: nothing
 * that ends a loop or a process. */
static PyObject **const builtin_errors[] = {
    &PyExc_ArithmeticError,
    &PyExc_AssertionError,
    &PyExc_AttributeError,
    &PyExc_BlockingIOError,
    &PyExc_BrokenPipeError,
    &PyExc_ChildProcessError,
    &PyExc_ConnectionAbortedError,
    &PyExc_ConnectionError,
    &PyExc_ConnectionRefusedError,
    &PyExc_ConnectionResetError,
    &PyExc_DeprecationWarning,
    &PyExc_EOFError,
    &PyExc_FileExistsError,
    &PyExc_FileNotFoundError,
    &PyExc_FloatingPointError,
    &PyExc_FutureWarning,
    &PyExc_ImportError,
    &PyExc_IndexError,
    &PyExc_InterruptedError,
    &PyExc_IsADirectoryError,
    &PyExc_KeyError,
    &PyExc_LookupError,
    &PyExc_ModuleNotFoundError,
    &PyExc_NameError,
    &PyExc_NotADirectoryError,
    &PyExc_NotImplementedError,
    &PyExc_OSError,
    &PyExc_OverflowError,
    &PyExc_PermissionError,
    &PyExc_ProcessLookupError,
    &PyExc_RecursionError,
    &PyExc_ReferenceError,
    &PyExc_RuntimeWarning,
    &PyExc_SystemError,
    &PyExc_TimeoutError,
    &PyExc_UserWarning,
    &PyExc_Warning,
    &PyExc_ZeroDivisionError,
};
enum { BUILTIN_ERRORS = sizeof builtin_errors / sizeof builtin_errors[0] };

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

/* Borrowed. */
static PyObject *class_of(const struct module_state *state, int32_t code)
{
    if (code >= CP_CODE_COUNT && code < CP_CODE_COUNT + BUILTIN_ERRORS) {
        return *builtin_errors[code - CP_CODE_COUNT];
    }
    bool is_known = code > CP_AGAIN && code < CP_CODE_COUNT;
    return state->error_of[is_known ? code : CP_ERR_INTERNAL];
}

void py_raise(const struct module_state *state, enum cp_code code)
{
    const struct cp_status *status = cp_last_error();
    if (code == CP_ERR_INTERRUPTED && PyErr_Occurred()) {
        return; /* the handler that interrupted has set its own */
    }
    /* Somebody else's interruption is no KeyboardInterrupt of this process. */
    PyObject *type =
        class_of(state, (int32_t)(code == CP_ERR_INTERRUPTED ? CP_ERR_COMM : code));
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

/* CP_OK for a class that has no code. KeyboardInterrupt is nobody's but the interrupted rank's. */
static int32_t code_of_class(const struct module_state *state, PyObject *type)
{
    for (int32_t code = CP_AGAIN + 1; code < CP_CODE_COUNT + BUILTIN_ERRORS; code++) {
        if (code != CP_ERR_INTERRUPTED && class_of(state, code) == type) {
            return code;
        }
    }
    return CP_OK;
}

/* Of the class itself or of the nearest one that it derives from. */
static int32_t code_of(const struct module_state *state, PyObject *error)
{
    PyObject *classes = Py_TYPE(error)->tp_mro;
    int32_t code = CP_OK;
    for (Py_ssize_t i = 0; code == CP_OK && i < PyTuple_GET_SIZE(classes); i++) {
        code = code_of_class(state, PyTuple_GET_ITEM(classes, i));
    }
    return code == CP_OK ? (int32_t)CP_ERR_RUNTIME : code;
}

void error_to_status(const struct module_state *state, PyObject *error, int rank,
                     struct cp_status *status)
{
    status->code = code_of(state, error);
    status->rank = rank;
    PyObject *text = PyObject_Str(error);
    const char *words = text == NULL ? NULL : PyUnicode_AsUTF8(text);
    if (words == NULL) {
        PyErr_Clear();
        words = "(no text)";
    }
    /* The class is told only where the code does not say it, or nothing else is said. */
    const char *name = Py_TYPE(error)->tp_name;
    const PyTypeObject *heard = (PyTypeObject *)class_of(state, status->code);
    bool is_told = words[0] == '\0' || strcmp(name, heard->tp_name) != 0;
    (void)snprintf(status->text, sizeof status->text, "%s%s%s", is_told ? name : "",
                   is_told && words[0] != '\0' ? ": " : "", words);
    Py_XDECREF(text);
}
