/* Exporting by DLPack. Every export holds a reference to the buffer, and gives it back in its deleter, which may be
 * called from any thread. */
#include "py_buffer.h"

#include <string.h>

#include "base/mem.h"
#include "exec/accelerator.h"
#include "tensor/tensor_dlpack.h"

typedef struct {
    PyObject_HEAD struct cp_tensor tensor;
    void *memory;                             /* owned */
    const struct cp_accelerator *accelerator; /* whose memory it is; NULL: the host's */
} BufferObject;

struct export {
    PyObject *owner; /* the buffer */
    int64_t shape[CP_TENSOR_DIMS], strides[CP_TENSOR_DIMS];
    union {
        DLManagedTensor plain;
        DLManagedTensorVersioned versioned;
    } managed;
};

static void export_destroy(struct export *export)
{
    /* After the interpreter there is nobody left to count references. */
    if (Py_IsInitialized()) {
        PyGILState_STATE gil = PyGILState_Ensure();
        Py_DECREF(export->owner);
        PyGILState_Release(gil);
    }
    cp_mem_destroy(&export);
}

static void delete_plain(DLManagedTensor *managed)
{
    export_destroy(managed->manager_ctx);
}

static void delete_versioned(DLManagedTensorVersioned *managed)
{
    export_destroy(managed->manager_ctx);
}

/* A capsule that nobody took over still owns its tensor; a taken one has another name. */
static void capsule_destroy(PyObject *capsule)
{
    if (PyCapsule_IsValid(capsule, "dltensor")) {
        delete_plain(PyCapsule_GetPointer(capsule, "dltensor"));
    } else if (PyCapsule_IsValid(capsule, "dltensor_versioned")) {
        delete_versioned(PyCapsule_GetPointer(capsule, "dltensor_versioned"));
    }
}

static DLDevice device_of(const BufferObject *self)
{
    return (DLDevice){(DLDeviceType)self->tensor.device_type, self->tensor.device_id};
}

static DLTensor describe(BufferObject *self, struct export *export)
{
    int64_t item_bytes = cp_dtype_bytes(self->tensor.dtype);
    for (int axis = 0; axis < self->tensor.ndim; axis++) {
        export->shape[axis] = self->tensor.shape[axis];
        export->strides[axis] = self->tensor.stride[axis] / item_bytes;
    }
    DLTensor tensor = cp_tensor_prototype(self->tensor.dtype, device_of(self),
                                          self->tensor.ndim, export->shape);
    tensor.data = self->memory;
    tensor.strides = export->strides;
    return tensor;
}

static PyObject *export_buffer(BufferObject *self, bool is_versioned)
{
    void *block = NULL;
    if (py_check(type_state_of((PyObject *)self),
                 cp_mem_create(sizeof(struct export), "a DLPack export", &block)) < 0) {
        return NULL;
    }
    struct export *export = block;
    export->owner = Py_NewRef((PyObject *)self);
    PyObject *capsule = NULL;
    if (is_versioned) {
        export->managed.versioned = (DLManagedTensorVersioned){
            .version = {DLPACK_MAJOR_VERSION, DLPACK_MINOR_VERSION},
            .manager_ctx = export,
            .deleter = delete_versioned,
            .dl_tensor = describe(self, export),
        };
        capsule = PyCapsule_New(&export->managed.versioned, "dltensor_versioned",
                                capsule_destroy);
    } else {
        export->managed.plain = (DLManagedTensor){
            .manager_ctx = export,
            .deleter = delete_plain,
            .dl_tensor = describe(self, export),
        };
        capsule = PyCapsule_New(&export->managed.plain, "dltensor", capsule_destroy);
    }
    if (capsule == NULL) {
        export_destroy(export);
    }
    return capsule;
}

/* What was written was enqueued on the default stream; the one that the taker names goes on behind it. DLPack's
 * numbers: 1 is the default stream, as is None, 2 each thread's own, -1 asks for no order. */
static int order_stream(BufferObject *self, PyObject *stream)
{
    if (self->accelerator == NULL || stream == Py_None) {
        return 0;
    }
    PyObject *number = PyNumber_Index(stream);
    bool is_ordered = false;
    void *address = NULL;
    if (number != NULL) {
        long small = PyLong_AsLong(number);
        PyErr_Clear();
        is_ordered = small == -1 || small == 0 || small == 1;
        address = is_ordered ? NULL : PyLong_AsVoidPtr(number);
        Py_DECREF(number);
    }
    if (PyErr_Occurred() || is_ordered) {
        return PyErr_Occurred() ? -1 : 0;
    }
    return py_check(type_state_of((PyObject *)self),
                    self->accelerator->follow(self->tensor.device_id, address, NULL));
}

PyDoc_STRVAR(buffer_dlpack_doc,
             "__dlpack__($self, /, *, stream=None, max_version=None, dl_device=None,\n"
             "           copy=None)\n"
             "--\n\n"
             "Return a DLPack capsule of this memory.\n\n"
             "Raises\n"
             "------\n"
             "BufferError\n"
             "    For another device than the one that it is on, and for a copy.");

static PyObject *buffer_dlpack(BufferObject *self, PyObject *args, PyObject *kwargs)
{
    static char *keywords[] = {"stream", "max_version", "dl_device", "copy", NULL};
    PyObject *stream = Py_None;
    PyObject *max_version = Py_None;
    PyObject *device = Py_None;
    PyObject *copy = Py_None;
    long major = 0;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|$OOOO:__dlpack__", keywords,
                                     &stream, &max_version, &device, &copy)) {
        return NULL;
    }
    if (device != Py_None) {
        long type = 0;
        long id = 0;
        if (!PyArg_ParseTuple(device, "ll:dl_device", &type, &id)) {
            return NULL;
        }
        const DLDevice own = device_of(self);
        if (type != (long)own.device_type || id != (long)own.device_id) {
            PyErr_Format(PyExc_BufferError, "dl_device=%R; this memory is on (%d, %d)",
                         device, (int)own.device_type, (int)own.device_id);
            return NULL;
        }
    }
    if (copy == Py_True) {
        PyErr_SetString(PyExc_BufferError, "copy=True; this memory can only be shared");
        return NULL;
    }
    if (max_version != Py_None) {
        long minor = 0;
        if (!PyArg_ParseTuple(max_version, "ll:max_version", &major, &minor)) {
            return NULL;
        }
    }
    if (order_stream(self, stream) < 0) {
        return NULL;
    }
    return export_buffer(self, major >= DLPACK_MAJOR_VERSION);
}

PyDoc_STRVAR(buffer_dlpack_device_doc,
             "__dlpack_device__($self, /)\n"
             "--\n\n"
             "Return DLPack's type and number of the device: (1, 0) for the CPU.");

static PyObject *buffer_dlpack_device(BufferObject *self, PyObject *Py_UNUSED(unused))
{
    const DLDevice own = device_of(self);
    return Py_BuildValue("(ii)", (int)own.device_type, (int)own.device_id);
}

static PyObject *buffer_get_shape(BufferObject *self, void *Py_UNUSED(closure))
{
    PyObject *shape = PyTuple_New(self->tensor.ndim);
    for (int axis = 0; shape != NULL && axis < self->tensor.ndim; axis++) {
        PyObject *length = PyLong_FromLongLong(self->tensor.shape[axis]);
        if (length == NULL) {
            Py_CLEAR(shape);
        } else {
            PyTuple_SET_ITEM(shape, axis, length);
        }
    }
    return shape;
}

static PyObject *buffer_get_dtype(BufferObject *self, void *Py_UNUSED(closure))
{
    return PyUnicode_FromString(cp_dtype_name(self->tensor.dtype));
}

static PyObject *buffer_repr(BufferObject *self)
{
    char shape[160];
    return PyUnicode_FromFormat(
        "<cp_attn.Buffer %s %s>",
        cp_tensor_print_shape(&self->tensor, shape, sizeof shape),
        cp_dtype_name(self->tensor.dtype));
}

static void buffer_dealloc(BufferObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    if (self->accelerator != NULL) {
        self->accelerator->free(self->tensor.device_id, &self->memory);
    }
    cp_mem_destroy(&self->memory);
    type->tp_free((PyObject *)self);
    Py_DECREF(type);
}

static PyMethodDef buffer_methods[] = {
    {"__dlpack__", (PyCFunction)(void (*)(void))buffer_dlpack,
     METH_VARARGS | METH_KEYWORDS, buffer_dlpack_doc},
    {"__dlpack_device__", (PyCFunction)buffer_dlpack_device, METH_NOARGS,
     buffer_dlpack_device_doc},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef buffer_getset[] = {
    {"shape", (getter)buffer_get_shape, NULL, "Lengths of the dimensions.", NULL},
    {"dtype", (getter)buffer_get_dtype, NULL, "Name of the element type.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

PyDoc_STRVAR(
    buffer_doc,
    "An array that only DLPack can read: cp_attn's answer to arrays of a library\n"
    "that it does not know. Give it to any from_dlpack().");

static PyType_Slot buffer_slots[] = {
    SLOT_DOC(buffer_doc),
    {Py_tp_dealloc, (void *)buffer_dealloc},
    {Py_tp_repr, (void *)buffer_repr},
    {Py_tp_methods, buffer_methods},
    {Py_tp_getset, buffer_getset},
    {0, NULL},
};

static PyType_Spec buffer_spec = {
    .name = "cp_attn.Buffer",
    .basicsize = sizeof(BufferObject),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE |
             Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = buffer_slots,
};

PyTypeObject *buffer_type_create(PyObject *self)
{
    return (PyTypeObject *)PyType_FromModuleAndSpec(self, &buffer_spec, NULL);
}

static enum cp_code allocate(BufferObject *self, const struct cp_tensor *like,
                             enum cp_dtype dtype, int ndim, const int64_t *shape)
{
    CP_TRY(cp_tensor_init_compact(&self->tensor, NULL, dtype, ndim, shape));
    size_t bytes = (size_t)(cp_tensor_count(&self->tensor) * cp_dtype_bytes(dtype));
    if (self->accelerator != NULL) {
        self->tensor.device_type = like->device_type;
        self->tensor.device_id = like->device_id;
        CP_TRY(self->accelerator->alloc(like->device_id, bytes, "an output",
                                        &self->memory));
    } else {
        CP_TRY(cp_mem_create(bytes, "an output", &self->memory));
    }
    self->tensor.data = self->memory;
    return CP_OK;
}

PyObject *buffer_create(const struct module_state *state, const struct cp_tensor *like,
                        enum cp_dtype dtype, int ndim, const int64_t *shape,
                        struct cp_tensor *out)
{
    BufferObject *self =
        (BufferObject *)state->buffer_type->tp_alloc(state->buffer_type, 0);
    if (self == NULL) {
        return NULL;
    }
    self->accelerator = cp_tensor_is_on_host(like) ? NULL : state->accelerator;
    if (py_check(state, allocate(self, like, dtype, ndim, shape)) < 0) {
        Py_DECREF(self);
        return NULL;
    }
    *out = self->tensor;
    return (PyObject *)self;
}
