/* A library with an exchange table allocates itself, NumPy through its C API; any other gets our memory to take over
 * once it has been written, since it may copy. */
#include "py_output.h"

#include <stdio.h>
#include <string.h>

#include "py_buffer.h"
#include "py_numpy.h"

/* The error callback of the allocators; the exception class is given by name. Torch's messages go on for a page. */
static void set_error(void *Py_UNUSED(context), const char *kind, const char *message)
{
    char line[320] = "";
    if (message != NULL) {
        (void)snprintf(line, sizeof line, ": %.*s", (int)strcspn(message, "\n"),
                       message);
    }
    PyGILState_STATE gil = PyGILState_Ensure();
    PyObject *type =
        PyDict_GetItemString(PyEval_GetBuiltins(), kind == NULL ? "" : kind);
    PyErr_Format(type != NULL && PyExceptionClass_Check(type) ? type
                                                              : PyExc_RuntimeError,
                 "an output could not be allocated%s", line);
    PyGILState_Release(gil);
}

static int create_exchange(const struct module_state *state, const struct array *like,
                           enum cp_dtype dtype, int ndim, const int64_t *shape,
                           struct output *out)
{
    const DLPackExchangeAPI *api = like->api;
    int64_t lengths[CP_TENSOR_DIMS] = {0};
    DLManagedTensorVersioned *managed = NULL;
    memcpy(lengths, shape, (size_t)ndim * sizeof lengths[0]);
    DLDevice device = {kDLCPU, 0};
    if (!cp_tensor_is_on_host(&like->tensor)) {
        device =
            (DLDevice){(DLDeviceType)like->tensor.device_type, like->tensor.device_id};
    }
    DLTensor prototype = cp_tensor_prototype(dtype, device, ndim, lengths);
    if (api->managed_tensor_allocator(&prototype, &managed, NULL, set_error) != 0) {
        return -1;
    }
    enum cp_code code =
        cp_tensor_from_dlpack("an output", &managed->dl_tensor, false, &out->tensor);
    if (code == CP_ERR_BUFFER) {
        code = cp_fail(CP_ERR_BUFFER,
                       "an output has no memory; call from outside of modes and "
                       "transforms that make arrays without any (torch's "
                       "FakeTensorMode, torch.func)");
    }
    if (code == CP_OK && !cp_tensor_is_compact(&out->tensor)) {
        code = cp_fail(CP_ERR_INTERNAL, "an output is not packed");
    }
    if (py_check(state, code) < 0) {
        managed->deleter(managed);
        return -1;
    }
    void *object = NULL;
    if (api->managed_tensor_to_py_object_no_sync(managed, &object) != 0) {
        return -1;
    }
    out->object = object;
    return 0;
}

int output_create(const struct module_state *state, const struct array *like,
                  enum cp_dtype dtype, int ndim, const int64_t *shape,
                  struct output *out)
{
    switch (like->source) {
    case ARRAY_EXCHANGE:
        return create_exchange(state, like, dtype, ndim, shape, out);
    case ARRAY_NUMPY:
        out->object = numpy_create(state, dtype, ndim, shape, &out->tensor);
        break;
    case ARRAY_CAPSULE:
    case ARRAY_NONE:
        out->object =
            buffer_create(state, &like->tensor, dtype, ndim, shape, &out->tensor);
        break;
    }
    return out->object == NULL ? -1 : 0;
}

/* The namespace that has the caller's array type, by the array API standard or by the name of its package; a new
 * reference, NULL without an exception where there is none. */
static PyObject *find_namespace(const struct module_state *state, PyObject *object)
{
    PyObject *space = PyObject_CallMethodNoArgs(object, state->names.array_namespace);
    if (space != NULL) {
        return space;
    }
    PyErr_Clear();
    PyObject *name = PyObject_GetAttrString((PyObject *)Py_TYPE(object), "__module__");
    if (name != NULL && PyUnicode_Check(name)) {
        Py_ssize_t dot =
            PyUnicode_FindChar(name, '.', 0, PyUnicode_GET_LENGTH(name), 1);
        PyObject *package =
            dot < 0 ? Py_NewRef(name) : PyUnicode_Substring(name, 0, dot);
        space = package == NULL ? NULL : PyImport_GetModule(package);
        Py_XDECREF(package);
    }
    Py_XDECREF(name);
    PyErr_Clear();
    return space;
}

static PyObject *hand_over(const struct module_state *state, const struct array *like,
                           PyObject *buffer)
{
    PyObject *space = find_namespace(state, like->object);
    PyObject *from_dlpack =
        space == NULL ? NULL : PyObject_GetAttr(space, state->names.from_dlpack);
    Py_XDECREF(space);
    if (from_dlpack == NULL) {
        PyErr_Clear();
        return Py_NewRef(buffer);
    }
    PyObject *array = PyObject_CallOneArg(from_dlpack, buffer);
    Py_DECREF(from_dlpack);
    return array;
}

PyObject *output_finish(const struct module_state *state, const struct array *like,
                        struct output *output)
{
    PyObject *object = output->object;
    memset(output, 0, sizeof *output);
    if (object != NULL && like->source == ARRAY_CAPSULE) {
        Py_SETREF(object, hand_over(state, like, object));
    }
    return object;
}

void output_release(struct output *output)
{
    Py_XDECREF(output->object);
    memset(output, 0, sizeof *output);
}
