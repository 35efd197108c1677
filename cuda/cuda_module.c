/* cp_attn._cuda: gets the library's state from cp_attn._C, and hands it the accelerator. */
#include <Python.h>

#include "accelerator_cuda.h"
#include "core.h"

PyMODINIT_FUNC PyInit__cuda(void);

static int module_exec(PyObject *self)
{
    /* PyCapsule_Import gives borrowed memory of a module that is never unloaded. */
    const struct cp_core *core = PyCapsule_Import("cp_attn._C._core", 0);
    if (core == NULL) {
        return -1;
    }
    if (cp_core_set(core) != CP_OK) {
        PyErr_SetString(PyExc_ImportError,
                        "cp_attn._cuda and cp_attn._C are of different versions; "
                        "install cp_attn anew");
        return -1;
    }
    PyObject *capsule = PyCapsule_New((void *)(uintptr_t)&cp_accelerator_cuda,
                                      "cp_attn._cuda._accelerator", NULL);
    int result =
        capsule == NULL ? -1 : PyModule_AddObjectRef(self, "_accelerator", capsule);
    Py_XDECREF(capsule);
    return result;
}

static PyModuleDef_Slot module_slots[] = {
    {Py_mod_exec, (void *)module_exec},
#if PY_VERSION_HEX >= 0x030c0000
    {Py_mod_multiple_interpreters, Py_MOD_MULTIPLE_INTERPRETERS_NOT_SUPPORTED},
#endif
#if PY_VERSION_HEX >= 0x030d0000
    {Py_mod_gil, Py_MOD_GIL_NOT_USED},
#endif
    {0, NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT,
    .m_name = "cp_attn._cuda",
    .m_doc = "CUDA devices and NCCL for cp_attn._C.",
    .m_slots = module_slots,
};

PyMODINIT_FUNC
PyInit__cuda(void) /* NOLINT(readability-identifier-naming): CPython's name */
{
    return PyModuleDef_Init(&module);
}
