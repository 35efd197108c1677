/* Context: the C core's context as a Python object, and the one way in which calls reach it. */
#ifndef CP_PY_PY_CONTEXT_H
#define CP_PY_PY_CONTEXT_H

#include "py_config.h"

typedef struct {
    PyObject_HEAD struct cp_context *core; /* owned; NULL: closed */
    PyObject *config;                      /* a ConfigObject */
    PyObject *weakrefs;
    PyThreadState *thread; /* of the call that is in the core without the GIL */
    uint64_t begun;        /* calls that have come to the gate */
    int rank, world;
    int threads;
    bool
        is_compiled; /* code that torch has compiled calls: its pools lend nothing that stays */
} ContextObject;

PyTypeObject *context_type_create(PyObject *self);

/* Begins a method: RuntimeError, -1, when the context is closed or another call is under way. */
int context_enter(ContextObject *self);
void context_leave(ContextObject *self);

/* The gate. `error`: what this rank found wrong in its own arguments, taken, or NULL; it goes to all ranks and comes
 * back as the same object. 0, or -1 with an exception. */
int context_begin(ContextObject *self, const struct module_state *state,
                  struct cp_record *record, PyObject *error,
                  const struct cp_plan **plan);
/* After a failed call through Python code, `begun` being what it was before: the exception, taken, if it came before
 * the gate and has to be told there; else NULL. What ends the process is not told, but raised at once. */
PyObject *context_untold(const ContextObject *self, uint64_t begun);
/* After context_begin of a gather: whether all ranks have their output. `error` as there. */
int context_confirm(ContextObject *self, const struct module_state *state,
                    PyObject *error);
int context_execute(ContextObject *self, const struct module_state *state,
                    const struct cp_view *tensors);
/* After context_begin, when execute cannot follow: breaks the context with the exception that is set. */
void context_abandon(ContextObject *self);

#endif
