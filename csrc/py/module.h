/* What the files of cp_attn._C share: the state of the module, and how errors cross the border to Python. */
#ifndef CP_PY_MODULE_H
#define CP_PY_MODULE_H

#include <Python.h>

#include <stdbool.h>

#include "base/status.h"

struct cp_accelerator;

/* Strings that are looked up in every call, interned once: field and text. */
#define MODULE_NAMES(X)                                                                \
    X(dlpack, "__dlpack__")                                                            \
    X(max_version, "max_version")                                                      \
    X(exchange_api, "__dlpack_c_exchange_api__")                                       \
    X(array_namespace, "__array_namespace__")                                          \
    X(from_dlpack, "from_dlpack")                                                      \
    X(torch_dispatch, "__torch_dispatch__")                                            \
    X(requires_grad, "requires_grad")                                                  \
    X(detach, "detach")                                                                \
    X(is_neg, "is_neg")                                                                \
    X(is_conj, "is_conj")                                                              \
    X(resolve_neg, "resolve_neg")                                                      \
    X(resolve_conj, "resolve_conj")                                                    \
    X(is_inference, "is_inference")                                                    \
    X(current_level, "_current_level")                                                 \
    X(unpack_dual, "unpack_dual")                                                      \
    X(torch, "torch")                                                                  \
    X(numpy, "numpy")                                                                  \
    X(numpy_ma, "numpy.ma")                                                            \
    X(context_for, "context_for")                                                      \
    X(attention, "attention")                                                          \
    X(shard, "shard")                                                                  \
    X(gather, "gather")

struct module_names {
#define NAME_FIELD(field, text) PyObject *field;
    MODULE_NAMES(NAME_FIELD)
#undef NAME_FIELD
};

struct module_state {
    PyTypeObject *config_type, *context_type, *buffer_type;
    PyObject
        *error_of[CP_CODE_COUNT]; /* the exception class of every code of the core */
    struct module_names names;
    /* Of torch; NULL until a tensor of it was seen. */
    PyObject *torch_tensor, *torch_no_dispatch, *torch_is_grad_enabled;
    PyObject *torch_is_wrapped, *torch_forward_ad; /* NULL: this torch has none */
    const struct cp_accelerator *accelerator; /* of cp_attn._cuda; NULL: not asked for
                                                 yet */
    int has_numpy;                            /* NumPy's C API has been loaded */
};

/* A docstring as a slot's value: slots are not const, and nobody writes to this one. */
#define SLOT_DOC(doc) {Py_tp_doc, (void *)(uintptr_t)(doc)}

static inline struct module_state *module_state_of(PyObject *self)
{
    return (struct module_state *)PyModule_GetState(self);
}

/* For an instance of a type that cannot be subclassed. */
static inline struct module_state *type_state_of(PyObject *self)
{
    return (struct module_state *)PyType_GetModuleState(Py_TYPE(self));
}

/* Makes the exceptions and adds them to the module. */
int errors_init(PyObject *self, struct module_state *state);

/* 0 for CP_OK, else -1 and py_raise. */
int py_check(const struct module_state *state, enum cp_code code);
/* Sets the exception of `code` with the thread's last sentence. */
void py_raise(const struct module_state *state, enum cp_code code);

/* The exception that is set, as an object: a new reference; none is set afterwards. NULL where none was. */
PyObject *error_take(void);
/* The reverse; takes the reference. NULL: none is set. */
void error_restore(PyObject *error);
/* error_take after something said that it failed: never NULL. */
PyObject *error_keep(void);

/* Writes what other ranks shall hear of a Python exception. */
void error_to_status(const struct module_state *state, PyObject *error, int rank,
                     struct cp_status *status);

#endif
