/* The gradient of attention, for the autograd function in cp_attn/_torch.py. */
#include "py_attention_backward.h"

#include <string.h>

#include "py_call.h"

const char attention_backward_doc[] =
    "_attention_backward($module, context, q, k, v, out, lse, dout, dlse, attn_mask,\n"
    "                    is_causal, scale, enable_gqa, kv, backend, /)\n"
    "--\n\n"
    "Return (dq, dk, dv) for what attention was given and returned; dlse may be\n"
    "None. All ranks must call.";

static int create_backward_outputs(struct call *call)
{
    static const enum cp_tensor_role roles[][2] = {{CP_TENSOR_DQ, CP_TENSOR_Q},
                                                   {CP_TENSOR_DK, CP_TENSOR_K},
                                                   {CP_TENSOR_DV, CP_TENSOR_V}};
    for (size_t row = 0; row < sizeof roles / sizeof roles[0]; row++) {
        const struct cp_view *like = &call->views[roles[row][1]];
        if (call_create_output(call, roles[row][0], like->dtype, CP_AXES, like->n) <
            0) {
            return -1;
        }
    }
    return 0;
}

/* A tensor that belongs to the output: as many rows and heads as q, v's head dim or, for the LSE, none. */
static enum cp_code view_like_out(struct call *call, enum cp_tensor_role role,
                                  const char *name, bool is_lse)
{
    const struct cp_tensor *tensor = &call->arrays[role].tensor;
    const struct cp_view *q = &call->views[CP_TENSOR_Q];
    struct cp_view *view = &call->views[role];
    int64_t last = is_lse ? 1 : call->record.call.value_dim;
    CP_TRY(
        call_check_kind(call, role, name, is_lse ? cp_dtype_sum(q->dtype) : q->dtype));
    CP_TRY(is_lse ? cp_tensor_view_lse(name, tensor, view)
                  : cp_tensor_view_attention(name, tensor, view));
    if (view->n[0] != q->n[0] || view->n[1] != q->n[1] || view->n[2] != q->n[2] ||
        view->n[3] != last) {
        char shape[160];
        return cp_fail(CP_ERR_VALUE,
                       "%s has shape %s, which does not belong to q and v", name,
                       cp_tensor_print_shape(tensor, shape, sizeof shape));
    }
    return CP_OK;
}

static int import_like_out(struct call *call, enum cp_tensor_role role, int arg,
                           const char *name, bool is_lse)
{
    if (call_import(call, role, arg, name) < 0) {
        return -1;
    }
    return py_check(call->state, view_like_out(call, role, name, is_lse));
}

static int parse_backward(struct call *call)
{
    bool has_dlse = call_is_given(call->values[ARG_DLSE]);
    if (call_parse(call) < 0 ||
        import_like_out(call, CP_TENSOR_OUT, ARG_OUT, "out", false) < 0 ||
        import_like_out(call, CP_TENSOR_LSE, ARG_LSE, "lse", true) < 0 ||
        import_like_out(call, CP_TENSOR_DOUT, ARG_DOUT, "dout", false) < 0) {
        return -1;
    }
    if (has_dlse && import_like_out(call, CP_TENSOR_DLSE, ARG_DLSE, "dlse", true) < 0) {
        return -1;
    }
    call->record.call.want_lse = has_dlse;
    return create_backward_outputs(call);
}

static PyObject *backward_answer(struct call *call)
{
    const struct array *like = &call->arrays[CP_TENSOR_Q];
    PyObject *dq = output_finish(call->state, like, &call->outputs[CP_TENSOR_DQ]);
    PyObject *dk = dq == NULL
                       ? NULL
                       : output_finish(call->state, like, &call->outputs[CP_TENSOR_DK]);
    PyObject *dv = dk == NULL
                       ? NULL
                       : output_finish(call->state, like, &call->outputs[CP_TENSOR_DV]);
    PyObject *all = dv == NULL ? NULL : PyTuple_Pack(3, dq, dk, dv);
    Py_XDECREF(dv);
    Py_XDECREF(dk);
    Py_XDECREF(dq);
    return all;
}

PyObject *mod_attention_backward(PyObject *self, PyObject *const *args,
                                 Py_ssize_t nargs, PyObject *kwnames)
{
    static const int order[] = {ARG_CONTEXT, ARG_Q,         ARG_K,     ARG_V,
                                ARG_OUT,     ARG_LSE,       ARG_DOUT,  ARG_DLSE,
                                ARG_MASK,    ARG_IS_CAUSAL, ARG_SCALE, ARG_ENABLE_GQA,
                                ARG_KV,      ARG_BACKEND};
    enum { ORDERED = sizeof order / sizeof order[0] };
    struct call call;
    memset(&call, 0, sizeof call);
    call.state = module_state_of(self);
    call.record.call.op = CP_OP_ATTENTION_BACKWARD;
    if (nargs != ORDERED || (kwnames != NULL && PyTuple_GET_SIZE(kwnames) > 0)) {
        PyErr_Format(PyExc_TypeError,
                     "_attention_backward() takes %d positional arguments",
                     (int)ORDERED);
        return NULL;
    }
    for (int arg = 0; arg < ORDERED; arg++) {
        call.values[order[arg]] = args[arg];
    }
    if (!Py_IS_TYPE(call.values[ARG_CONTEXT], call.state->context_type)) {
        PyErr_Format(PyExc_TypeError, "context must be a Context, not %s",
                     Py_TYPE(call.values[ARG_CONTEXT])->tp_name);
        return NULL;
    }
    call.context = (ContextObject *)Py_NewRef(call.values[ARG_CONTEXT]);
    return call_run(&call, parse_backward, NULL, backward_answer);
}
