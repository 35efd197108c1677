/* A call of attention, forward or backward, in the order that all ranks rely on: the context; then all arguments and
 * outputs, where an error is kept; the gate, where it is told; the work. */
#ifndef CP_PY_PY_CALL_H
#define CP_PY_PY_CALL_H

#include "py_context.h"
#include "py_output.h"
#include "py_package.h"

enum {
    ARG_Q,
    ARG_K,
    ARG_V,
    ARG_CONTEXT,
    ARG_MASK,
    ARG_IS_CAUSAL,
    ARG_SCALE,
    ARG_ENABLE_GQA,
    ARG_RETURN_LSE,
    ARG_KV,
    ARG_SEQ_LENS,
    ARG_KV_LENS,
    ARG_DROPOUT,
    ARG_BACKEND,
    ARG_COUNT,
    /* backward only */
    ARG_OUT = ARG_COUNT,
    ARG_LSE,
    ARG_DOUT,
    ARG_DLSE,
    ARG_ALL
};

extern const char *const call_arg_names[ARG_COUNT];

/* One call under way. */
struct call {
    struct module_state *state;
    ContextObject *context;    /* owned */
    PyObject *values[ARG_ALL]; /* borrowed; NULL or None: not given */
    struct array arrays[CP_TENSORS];
    struct output outputs[CP_TENSORS];
    struct cp_view views[CP_TENSORS];
    struct cp_record record;
    struct cp_stream *stream;
    struct package package; /* of its backend */
};

static inline bool call_is_given(PyObject *value)
{
    return value != NULL && value != Py_None;
}

/* Where these return int: 0, or -1 with an exception. */

/* Imports the tensor of an argument. */
int call_import(struct call *call, enum cp_tensor_role role, int arg, const char *name);

/* CP_OK where the tensor is on q's device and of this dtype. */
enum cp_code call_check_kind(const struct call *call, enum cp_tensor_role role,
                             const char *name, enum cp_dtype dtype);

/* Reads what both directions have in common: everything but outputs and incoming gradients. */
int call_parse(struct call *call);

/* Makes an output of q's array type, and its view. */
int call_create_output(struct call *call, enum cp_tensor_role role, enum cp_dtype dtype,
                       int ndim, const int64_t *shape);

/* Takes the call through all its steps and releases it. `parse`: fills in everything, or leaves an exception.
 * `error`: an earlier exception, taken, or NULL. `answer`: what the caller gets. */
PyObject *call_run(struct call *call, int (*parse)(struct call *), PyObject *error,
                   PyObject *(*answer)(struct call *));

#endif
