/* Three ways in, the cheapest first: NumPy's C API, DLPack's C exchange table, DLPack's capsules. */
#include "py_dlpack.h"

#include <string.h>

#include "py_numpy.h"
#include "py_torch.h"

static int describe(const struct module_state *state, const char *name,
                    const DLTensor *source, bool is_read_only, struct array *out)
{
    return py_check(state,
                    cp_tensor_from_dlpack(name, source, is_read_only, &out->tensor));
}

/* --- the exchange table --- */

/* The table of the object's type, or NULL, with an exception or without. */
static const DLPackExchangeAPI *find_api(const struct module_state *state,
                                         PyObject *object)
{
    PyObject *capsule =
        PyObject_GetAttr((PyObject *)Py_TYPE(object), state->names.exchange_api);
    if (capsule == NULL) {
        if (PyErr_ExceptionMatches(PyExc_AttributeError)) {
            PyErr_Clear();
        }
        return NULL;
    }
    const DLPackExchangeAPIHeader *header = NULL;
    if (PyCapsule_IsValid(capsule, "dlpack_exchange_api")) {
        header = PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
    }
    Py_DECREF(capsule); /* the table lives as long as the process */
    while (header != NULL && header->version.major != DLPACK_MAJOR_VERSION) {
        header = header->prev_api;
    }
    const DLPackExchangeAPI *api = (const DLPackExchangeAPI *)header;
    return api == NULL || api->dltensor_from_py_object_no_sync == NULL ? NULL : api;
}

static int read_exchange(const struct module_state *state, PyObject *object,
                         const char *name, struct array *out)
{
    DLTensor source;
    memset(&source, 0, sizeof source);
    if (out->api->dltensor_from_py_object_no_sync(object, &source) != 0) {
        return -1;
    }
    if (describe(state, name, &source, false, out) < 0) {
        return -1;
    }
    out->object = Py_NewRef(object);
    return 0;
}

static int import_exchange(const struct module_state *state, PyObject *object,
                           const char *name, bool is_torch, struct array *out)
{
    out->source = ARRAY_EXCHANGE;
    if (read_exchange(state, object, name, out) < 0) {
        return -1;
    }
    if (!is_torch) {
        return 0;
    }
    bool is_complex = out->tensor.dtype == CP_DTYPE_COMPLEX64 ||
                      out->tensor.dtype == CP_DTYPE_COMPLEX128;
    PyObject *resolved = torch_resolve(state, object, is_complex);
    int result = resolved == NULL ? -1 : 0;
    if (resolved != NULL && resolved != object) {
        Py_CLEAR(out->object);
        result = read_exchange(state, resolved, name, out);
    }
    Py_XDECREF(resolved);
    return result;
}

/* --- capsules --- */

/* Asks for a versioned capsule, then, where the keyword is unknown, for any. */
static PyObject *ask_capsule(const struct module_state *state, PyObject *object)
{
    PyObject *method = PyObject_GetAttr(object, state->names.dlpack);
    if (method == NULL) {
        return NULL;
    }
    PyObject *capsule = NULL;
    PyObject *version =
        Py_BuildValue("(ii)", DLPACK_MAJOR_VERSION, DLPACK_MINOR_VERSION);
    PyObject *keywords =
        version == NULL ? NULL : PyTuple_Pack(1, state->names.max_version);
    if (keywords != NULL) {
        capsule = PyObject_Vectorcall(method, &version, 0, keywords);
        if (capsule == NULL && PyErr_ExceptionMatches(PyExc_TypeError)) {
            PyErr_Clear();
            capsule = PyObject_CallNoArgs(method);
        }
    }
    Py_XDECREF(keywords);
    Py_XDECREF(version);
    Py_DECREF(method);
    return capsule;
}

/* `out` becomes the owner only when nothing can fail any more; before that, the capsule still is. */
static int take_capsule(const struct module_state *state, PyObject *capsule,
                        const char *name, struct array *out)
{
    if (PyCapsule_IsValid(capsule, "dltensor_versioned")) {
        DLManagedTensorVersioned *managed =
            PyCapsule_GetPointer(capsule, "dltensor_versioned");
        if (managed->version.major != DLPACK_MAJOR_VERSION) {
            PyErr_Format(PyExc_BufferError,
                         "%s.__dlpack__() answers in DLPack %u.%u; supported: %d.x",
                         name, managed->version.major, managed->version.minor,
                         DLPACK_MAJOR_VERSION);
            return -1;
        }
        bool is_read_only = (managed->flags & DLPACK_FLAG_BITMASK_READ_ONLY) != 0;
        if (describe(state, name, &managed->dl_tensor, is_read_only, out) < 0 ||
            PyCapsule_SetName(capsule, "used_dltensor_versioned") < 0) {
            return -1;
        }
        out->versioned = managed;
        return 0;
    }
    if (PyCapsule_IsValid(capsule, "dltensor")) {
        DLManagedTensor *managed = PyCapsule_GetPointer(capsule, "dltensor");
        if (describe(state, name, &managed->dl_tensor, false, out) < 0 ||
            PyCapsule_SetName(capsule, "used_dltensor") < 0) {
            return -1;
        }
        out->plain = managed;
        return 0;
    }
    if (PyCapsule_CheckExact(capsule)) {
        const char *got = PyCapsule_GetName(capsule);
        PyErr_Format(
            PyExc_BufferError,
            "%s.__dlpack__() gave a capsule named %s; a fresh one is named dltensor or "
            "dltensor_versioned",
            name, got == NULL ? "nothing" : got);
    } else {
        PyErr_Format(PyExc_BufferError, "%s.__dlpack__() gave a %s, not a capsule",
                     name, Py_TYPE(capsule)->tp_name);
    }
    return -1;
}

static int import_capsule(const struct module_state *state, PyObject *object,
                          const char *name, struct array *out)
{
    PyObject *capsule = ask_capsule(state, object);
    int result = capsule == NULL ? -1 : take_capsule(state, capsule, name, out);
    if (result == 0) {
        out->source = ARRAY_CAPSULE;
        out->object = Py_NewRef(object);
    }
    PyObject *error = error_take();
    Py_XDECREF(capsule);
    error_restore(error);
    return result;
}

/* Torch before the exchange table refuses tensors that ask for gradients, and knows nothing of ours. */
static int import_torch_capsule(const struct module_state *state, PyObject *object,
                                const char *name, struct array *out)
{
    PyObject *plain = PyObject_CallMethodNoArgs(object, state->names.detach);
    PyObject *resolved = plain == NULL ? NULL : torch_resolve(state, plain, true);
    int result = resolved == NULL ? -1 : import_capsule(state, resolved, name, out);
    Py_XDECREF(resolved);
    Py_XDECREF(plain);
    return result;
}

/* --- all of them --- */

static int import_torch(struct module_state *state, PyObject *object, const char *name,
                        struct array *out)
{
    if (torch_check(state, object, name) < 0) {
        return -1;
    }
    out->api = find_api(state, object);
    int result = -1;
    if (out->api != NULL) {
        result = import_exchange(state, object, name, true, out);
    } else if (!PyErr_Occurred()) {
        result = import_torch_capsule(state, object, name, out);
    }
    if (result < 0) {
        torch_explain(state, object, name);
    }
    return result;
}

static int import_any(struct module_state *state, PyObject *object, const char *name,
                      struct array *out)
{
    int is_numpy = numpy_is_array(state, object);
    if (is_numpy != 0) {
        out->source = ARRAY_NUMPY;
        if (is_numpy < 0 || numpy_import(state, object, name, &out->tensor) < 0) {
            return -1;
        }
        out->object = Py_NewRef(object);
        return 0;
    }
    int is_torch = torch_is_tensor(state, object);
    if (is_torch != 0) {
        return is_torch < 0 ? -1 : import_torch(state, object, name, out);
    }
    if (numpy_check(state, object, name) < 0) {
        return -1;
    }
    out->api = find_api(state, object);
    if (out->api != NULL || PyErr_Occurred()) {
        return out->api == NULL ? -1 : import_exchange(state, object, name, false, out);
    }
    if (PyType_Check(object) ||
        !PyObject_HasAttr((PyObject *)Py_TYPE(object), state->names.dlpack)) {
        PyErr_Format(
            PyExc_TypeError,
            "%s must be an array that speaks DLPack (torch, NumPy, JAX, ...), not %s",
            name, Py_TYPE(object)->tp_name);
        return -1;
    }
    return import_capsule(state, object, name, out);
}

int array_import(struct module_state *state, PyObject *object, const char *name,
                 struct array *out)
{
    struct array array;
    memset(&array, 0, sizeof array);
    if (import_any(state, object, name, &array) < 0) {
        array_release(&array);
        return -1;
    }
    *out = array;
    return 0;
}

void array_release(struct array *array)
{
    /* Deleters and destructors are foreign code, which may lose an exception that is set. */
    PyObject *error = error_take();
    if (array->plain != NULL && array->plain->deleter != NULL) {
        array->plain->deleter(array->plain);
    }
    if (array->versioned != NULL && array->versioned->deleter != NULL) {
        array->versioned->deleter(array->versioned);
    }
    Py_XDECREF(array->object);
    memset(array, 0, sizeof *array);
    error_restore(error);
}
