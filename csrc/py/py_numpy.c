/* The one file that sees NumPy's headers: its table of functions is a static variable of the file that includes
 * them, and process-wide, which is why the module refuses sub-interpreters. */
#include "py_numpy.h"

#include <numpy/arrayobject.h>

static const struct {
    enum cp_dtype dtype;
    int number;
} dtypes[] = {
    {CP_DTYPE_FLOAT32, NPY_FLOAT32},       {CP_DTYPE_FLOAT64, NPY_FLOAT64},
    {CP_DTYPE_FLOAT16, NPY_FLOAT16},       {CP_DTYPE_BOOL, NPY_BOOL},
    {CP_DTYPE_UINT8, NPY_UINT8},           {CP_DTYPE_INT8, NPY_INT8},
    {CP_DTYPE_INT16, NPY_INT16},           {CP_DTYPE_INT32, NPY_INT32},
    {CP_DTYPE_INT64, NPY_INT64},           {CP_DTYPE_COMPLEX64, NPY_COMPLEX64},
    {CP_DTYPE_COMPLEX128, NPY_COMPLEX128},
};
enum { DTYPES = sizeof dtypes / sizeof dtypes[0] };

static int load(struct module_state *state)
{
    PyObject *numpy = PyImport_GetModule(state->names.numpy);
    if (numpy == NULL || numpy == Py_None) {
        Py_XDECREF(numpy);
        return PyErr_Occurred() ? -1 : 0;
    }
    Py_DECREF(numpy);
    if (_import_array() < 0) {
        return -1;
    }
    state->has_numpy = 1;
    return 0;
}

int numpy_is_array(struct module_state *state, PyObject *object)
{
    if (!state->has_numpy && load(state) < 0) {
        return -1;
    }
    return state->has_numpy && PyArray_CheckExact(object);
}

int numpy_check(const struct module_state *state, PyObject *object, const char *name)
{
    if (!state->has_numpy || !PyArray_Check(object)) {
        return 0;
    }
    /* Where a masked array is, its module has been imported. */
    PyObject *module = PyImport_GetModule(state->names.numpy_ma);
    PyObject *type =
        module == NULL ? NULL : PyObject_GetAttrString(module, "MaskedArray");
    int is_masked = type == NULL ? 0 : PyObject_IsInstance(object, type);
    Py_XDECREF(type);
    Py_XDECREF(module);
    if (is_masked > 0) {
        PyErr_Format(PyExc_TypeError,
                     "%s is a masked array, whose mask would be lost; pass "
                     "%s.filled(value), or %s.data (what attention shall not see is "
                     "said with attn_mask)",
                     name, name, name);
    }
    return PyErr_Occurred() ? -1 : 0;
}

int numpy_import(const struct module_state *state, PyObject *array, const char *name,
                 struct cp_tensor *out)
{
    PyArrayObject *source = (PyArrayObject *)array;
    struct cp_tensor tensor = {
        .data = PyArray_DATA(source),
        .device_type = 1,
        .ndim = PyArray_NDIM(source),
        .is_read_only = !PyArray_ISWRITEABLE(source),
    };
    for (int row = 0; row < DTYPES; row++) {
        /* By equivalence: long and long long are two numbers for one type. */
        if (PyArray_EquivTypenums(PyArray_TYPE(source), dtypes[row].number)) {
            tensor.dtype = dtypes[row].dtype;
            break;
        }
    }
    if (tensor.dtype == CP_DTYPE_NONE || !PyArray_ISNOTSWAPPED(source)) {
        PyErr_Format(PyExc_TypeError, "%s has dtype %S, which is not supported", name,
                     (PyObject *)PyArray_DESCR(source));
        return -1;
    }
    for (int axis = 0; axis < tensor.ndim && axis < CP_TENSOR_DIMS; axis++) {
        tensor.shape[axis] = PyArray_DIM(source, axis);
        tensor.stride[axis] = PyArray_STRIDE(source, axis);
    }
    if (py_check(state, cp_tensor_normalize(name, &tensor)) < 0) {
        return -1;
    }
    *out = tensor;
    return 0;
}

PyObject *numpy_create(const struct module_state *state, enum cp_dtype dtype, int ndim,
                       const int64_t *shape, struct cp_tensor *out)
{
    npy_intp dims[CP_TENSOR_DIMS] = {0};
    int row = 0;
    while (row < DTYPES && dtypes[row].dtype != dtype) {
        row++;
    }
    if (row == DTYPES) {
        PyErr_Format(PyExc_TypeError, "NumPy has no dtype %s", cp_dtype_name(dtype));
        return NULL;
    }
    for (int axis = 0; axis < ndim; axis++) {
        dims[axis] = (npy_intp)shape[axis];
    }
    PyObject *array = PyArray_SimpleNew(ndim, dims, dtypes[row].number);
    if (array != NULL && numpy_import(state, array, "a new array", out) < 0) {
        Py_CLEAR(array);
    }
    return array;
}
