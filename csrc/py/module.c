/* cp_attn._C: the module itself. Everything it keeps is in its state. */
#include "module.h"

#include "base/backend.h"
#include "base/core.h"
#include "base/mem.h"
#include "py_attention.h"
#include "py_attention_backward.h"
#include "py_buffer.h"
#include "py_config.h"
#include "py_context.h"

PyMODINIT_FUNC PyInit__C(void);

PyDoc_STRVAR(
    mem_stats_doc,
    "_mem_stats($module, /)\n"
    "--\n\n"
    "Return (live blocks, allocations so far) of the library's own memory. For\n"
    "tests.");

static PyObject *mod_mem_stats(PyObject *Py_UNUSED(self), PyObject *Py_UNUSED(unused))
{
    struct cp_mem_stats stats = cp_mem_stats();
    return Py_BuildValue("(LL)", (long long)stats.live_blocks,
                         (long long)stats.allocations);
}

PyDoc_STRVAR(
    mem_fail_after_doc,
    "_mem_fail_after($module, count, /)\n"
    "--\n\n"
    "Let the allocation after `count` more fail, once; a negative count lets none\n"
    "fail. For tests.");

static PyObject *mod_mem_fail_after(PyObject *Py_UNUSED(self), PyObject *count)
{
    long long value = PyLong_AsLongLong(count);
    if (value == -1 && PyErr_Occurred()) {
        return NULL;
    }
    cp_mem_fail_after(value);
    Py_RETURN_NONE;
}

static PyMethodDef module_methods[] = {
    {"attention", (PyCFunction)(void (*)(void))mod_attention,
     METH_FASTCALL | METH_KEYWORDS, attention_doc},
    {"_attention_backward", (PyCFunction)(void (*)(void))mod_attention_backward,
     METH_FASTCALL | METH_KEYWORDS, attention_backward_doc},
    {"_mem_stats", mod_mem_stats, METH_NOARGS, mem_stats_doc},
    {"_mem_fail_after", mod_mem_fail_after, METH_O, mem_fail_after_doc},
    {NULL, NULL, 0, NULL},
};

static int names_init(struct module_names *names)
{
#define NAME_INIT(field, text)                                                         \
    names->field = PyUnicode_InternFromString(text);                                   \
    if (names->field == NULL) {                                                        \
        return -1;                                                                     \
    }
    MODULE_NAMES(NAME_INIT)
#undef NAME_INIT
    return 0;
}

static int types_init(PyObject *self, struct module_state *state)
{
    state->config_type = config_type_create(self);
    state->context_type = state->config_type == NULL ? NULL : context_type_create(self);
    state->buffer_type = state->context_type == NULL ? NULL : buffer_type_create(self);
    if (state->buffer_type == NULL || PyModule_AddType(self, state->config_type) < 0 ||
        PyModule_AddType(self, state->context_type) < 0 ||
        PyModule_AddType(self, state->buffer_type) < 0) {
        return -1;
    }
    return 0;
}

/* What cp_attn._cuda needs of this module. */
static int core_init(PyObject *self)
{
    static const struct cp_core core = {
        .abi = CP_CORE_ABI,
        .fail_as = cp_fail_as,
        .last_error = cp_last_error,
        .mem_create = cp_mem_create,
        .mem_destroy = cp_mem_destroy,
    };
    PyObject *capsule =
        PyCapsule_New((void *)(uintptr_t)&core, "cp_attn._C._core", NULL);
    int result = capsule == NULL ? -1 : PyModule_AddObjectRef(self, "_core", capsule);
    Py_XDECREF(capsule);
    return result;
}

/* A tuple of the names of backends. */
static PyObject *backend_names(bool on_host)
{
    PyObject *names = PyList_New(0);
    for (int i = 0; i < CP_BACKEND_COUNT && names != NULL; i++) {
        enum cp_backend backend = (enum cp_backend)i;
        if (on_host && !cp_backend_is_on_host(backend)) {
            continue;
        }
        PyObject *name = PyUnicode_FromString(cp_backend_name(backend));
        if (name == NULL || PyList_Append(names, name) < 0) {
            Py_CLEAR(names);
        }
        Py_XDECREF(name);
    }
    PyObject *tuple = names == NULL ? NULL : PyList_AsTuple(names);
    Py_XDECREF(names);
    return tuple;
}

/* _backends: by the kind of device, the names that a call there may ask for. */
static int backends_init(PyObject *self)
{
    PyObject *host = backend_names(true);
    PyObject *all = host == NULL ? NULL : backend_names(false);
    PyObject *backends =
        all == NULL ? NULL : Py_BuildValue("{s:O,s:O}", "cpu", host, "cuda", all);
    int result =
        backends == NULL ? -1 : PyModule_AddObjectRef(self, "_backends", backends);
    Py_XDECREF(backends);
    Py_XDECREF(all);
    Py_XDECREF(host);
    return result;
}

static int module_exec(PyObject *self)
{
    struct module_state *state = module_state_of(self);
    if (PyInterpreterState_Get() != PyInterpreterState_Main()) {
        PyErr_SetString(PyExc_ImportError,
                        "cp_attn cannot be used in a sub-interpreter");
        return -1;
    }
    if (names_init(&state->names) < 0 || errors_init(self, state) < 0 ||
        types_init(self, state) < 0) {
        return -1;
    }
    return core_init(self) < 0 || backends_init(self) < 0
               ? -1
               : PyModule_AddStringConstant(self, "__version__", CP_VERSION);
}

static int module_traverse(PyObject *self, visitproc visit, void *arg)
{
    struct module_state *state = module_state_of(self);
    Py_VISIT(state->config_type);
    Py_VISIT(state->context_type);
    Py_VISIT(state->buffer_type);
    for (int code = 0; code < CP_CODE_COUNT; code++) {
        Py_VISIT(state->error_of[code]);
    }
    Py_VISIT(state->torch_tensor);
    Py_VISIT(state->torch_no_dispatch);
    Py_VISIT(state->torch_is_grad_enabled);
    Py_VISIT(state->torch_is_wrapped);
    Py_VISIT(state->torch_forward_ad);
    return 0;
}

static int module_clear(PyObject *self)
{
    struct module_state *state = module_state_of(self);
    Py_CLEAR(state->config_type);
    Py_CLEAR(state->context_type);
    Py_CLEAR(state->buffer_type);
    for (int code = 0; code < CP_CODE_COUNT; code++) {
        Py_CLEAR(state->error_of[code]);
    }
    Py_CLEAR(state->torch_tensor);
    Py_CLEAR(state->torch_no_dispatch);
    Py_CLEAR(state->torch_is_grad_enabled);
    Py_CLEAR(state->torch_is_wrapped);
    Py_CLEAR(state->torch_forward_ad);
#define NAME_CLEAR(field, text) Py_CLEAR(state->names.field);
    MODULE_NAMES(NAME_CLEAR)
#undef NAME_CLEAR
    return 0;
}

static void module_free(void *self)
{
    (void)module_clear(self);
}

static PyModuleDef_Slot module_slots[] = {
    {Py_mod_exec, (void *)module_exec},
#if PY_VERSION_HEX >= 0x030c0000
    /* NumPy's table of functions is process-wide. */
    {Py_mod_multiple_interpreters, Py_MOD_MULTIPLE_INTERPRETERS_NOT_SUPPORTED},
#endif
#if PY_VERSION_HEX >= 0x030d0000
    {Py_mod_gil, Py_MOD_GIL_NOT_USED},
#endif
    {0, NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT,
    .m_name = "cp_attn._C",
    .m_doc = "The C core of cp_attn.",
    .m_size = sizeof(struct module_state),
    .m_methods = module_methods,
    .m_slots = module_slots,
    .m_traverse = module_traverse,
    .m_clear = module_clear,
    .m_free = module_free,
};

PyMODINIT_FUNC
PyInit__C(void) /* NOLINT(readability-identifier-naming): CPython's name */
{
    return PyModuleDef_Init(&module);
}
