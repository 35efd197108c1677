/* cp_attn.attention: which context, through autograd or not, and what comes back. */
#include "py_attention.h"

#include <string.h>

#include "py_args.h"
#include "py_call.h"
#include "py_torch.h"

const char attention_doc[] =
    "attention($module, /, q, k, v, context_or_config, *, attn_mask=None,\n"
    "          is_causal=False, scale=None, enable_gqa=False, return_lse=False,\n"
    "          kv='sharded', seq_lens=None, kv_lens=None, dropout_p=0.0,\n"
    "          backend='native')\n"
    "--\n\n"
    "Compute this rank's rows of the attention over a sequence that all ranks\n"
    "share.\n\n"
    "Every rank of the context must call, each with its own part of the sequence,\n"
    "in rank order; empty parts too. Inputs are read in place, whatever their\n"
    "strides.\n\n"
    "Parameters\n"
    "----------\n"
    "q : array (B, s, H, D)\n"
    "    float32, float64, bfloat16 or float16, on the CPU or a CUDA device: torch,\n"
    "    NumPy, or anything that speaks DLPack.\n"
    "k : array (B, t, H_kv, D)\n"
    "v : array (B, t, H_kv, Dv)\n"
    "    q's dtype and device.\n"
    "context_or_config : Context or ContextParallelConfig\n"
    "    For a config, the process's context of that config is made at its first\n"
    "    use, by all ranks alike.\n"
    "attn_mask : array, optional\n"
    "    bool (True: attend), or q's dtype or float32 (added to the scaled scores):\n"
    "    (B or 1, H or 1, rows, keys), (B or 1, rows, keys), (B or 1, keys) or\n"
    "    (keys). rows are this rank's, all ranks' or 1, keys this rank's or all\n"
    "    ranks'.\n"
    "is_causal : bool\n"
    "    Row i of the whole sequence sees the keys 0 to i of it.\n"
    "scale : float, optional\n"
    "    By default D ** -0.5.\n"
    "enable_gqa : bool\n"
    "    Allows H_kv to be a divisor of H.\n"
    "return_lse : bool\n"
    "    Also return the logarithm of every row's sum of exponentials.\n"
    "kv : {'sharded', 'replicated'}\n"
    "    'replicated': k and v are whole on every rank, and no data moves.\n"
    "seq_lens, kv_lens : sequence of int, optional\n"
    "    All ranks' s and t, to be checked; kv_lens defaults to seq_lens, or to t\n"
    "    where kv is replicated.\n"
    "dropout_p : float\n"
    "    Only 0: there is no dropout.\n"
    "backend : str\n"
    "    Whose kernel computes, by diffusers' name; the same on all ranks.\n"
    "    'native' takes every call and chooses by itself; on the CPU\n"
    "    '_native_math' and '_native_flash' are the same. docs/gpu.md says what\n"
    "    others take: one that a package computes is refused for other calls.\n\n"
    "Returns\n"
    "-------\n"
    "out : array (B, s, H, Dv)\n"
    "    q's dtype and array type. A row that sees no key is 0.\n"
    "lse : array (B, s, H)\n"
    "    With return_lse: float32 (float64 for float64), natural logarithm; -inf\n"
    "    for a row that sees no key.\n\n"
    "Raises\n"
    "------\n"
    "TypeError, ValueError, BufferError, NotImplementedError\n"
    "    Arguments that are not as above, on this or another rank, or that differ\n"
    "    from another rank's. All ranks raise, and the context stays usable.\n"
    "RuntimeError\n"
    "    The context is closed, busy, or was made before a fork.\n"
    "CommTimeout, CommError\n"
    "    A rank did not come within the config's timeout, or died. The context is\n"
    "    broken.";

static int create_forward_outputs(struct call *call)
{
    const int64_t *q = call->views[CP_TENSOR_Q].n;
    const int64_t shape[CP_AXES] = {q[0], q[1], q[2], call->record.call.value_dim};
    enum cp_dtype dtype = call->views[CP_TENSOR_Q].dtype;
    if (call_create_output(call, CP_TENSOR_OUT, dtype, CP_AXES, shape) < 0) {
        return -1;
    }
    return call->record.call.want_lse
               ? call_create_output(call, CP_TENSOR_LSE, cp_dtype_sum(dtype),
                                    CP_AXES - 1, shape)
               : 0;
}

/* The process's context of a config, or the context itself; a new reference. */
static PyObject *find_context(const struct module_state *state, PyObject *given)
{
    if (Py_IS_TYPE(given, state->context_type)) {
        return Py_NewRef(given);
    }
    PyObject *contexts = PyImport_ImportModule("cp_attn._contexts");
    PyObject *context =
        contexts == NULL
            ? NULL
            : PyObject_CallMethodOneArg(contexts, state->names.context_for, given);
    Py_XDECREF(contexts);
    if (context != NULL && !Py_IS_TYPE(context, state->context_type)) {
        PyErr_Format(PyExc_TypeError,
                     "context_or_config must be a Context or a config, not %s",
                     Py_TYPE(given)->tp_name);
        Py_CLEAR(context);
    }
    return context;
}

static PyObject *forward_answer(struct call *call)
{
    const struct array *like = &call->arrays[CP_TENSOR_Q];
    PyObject *out = output_finish(call->state, like, &call->outputs[CP_TENSOR_OUT]);
    if (out == NULL || !call->record.call.want_lse) {
        return out;
    }
    PyObject *lse = output_finish(call->state, like, &call->outputs[CP_TENSOR_LSE]);
    PyObject *both = lse == NULL ? NULL : PyTuple_Pack(2, out, lse);
    Py_XDECREF(lse);
    Py_DECREF(out);
    return both;
}

static int parse_forward(struct call *call)
{
    return call_parse(call) < 0 ? -1 : create_forward_outputs(call);
}

/* A gradient that would be lost is refused, whether or not the others are recorded. */
static int check_mask(const struct call *call)
{
    PyObject *mask = call->values[ARG_MASK];
    int needs_grad = call_is_given(mask) ? torch_needs_grad(call->state, &mask, 1) : 0;
    return needs_grad <= 0
               ? needs_grad
               : py_check(call->state,
                          cp_fail(CP_ERR_UNSUPPORTED,
                                  "attn_mask requires grad, but attention has no "
                                  "gradient for its mask; pass attn_mask.detach()"));
}

/* 1 where the call has to be recorded, 0, or -1. What autograd would refuse, it would refuse only once data has moved,
 * on this rank alone. */
static int check_recorded(const struct call *call)
{
    static const int saved[] = {ARG_Q, ARG_K, ARG_V, ARG_MASK};
    int needs_grad = torch_needs_grad(call->state, call->values, ARG_V + 1);
    if (check_mask(call) < 0 ||
        (needs_grad > 0 && package_check_gradient(call->values[ARG_BACKEND]) < 0)) {
        return -1;
    }
    for (size_t i = 0; needs_grad > 0 && i < sizeof saved / sizeof saved[0]; i++) {
        PyObject *value = call->values[saved[i]];
        bool is_mask = saved[i] == ARG_MASK;
        if ((!is_mask || call_is_given(value)) &&
            torch_check_saved(call->state, value, call_arg_names[saved[i]], is_mask) <
                0) {
            return -1;
        }
    }
    return needs_grad;
}

/* Through autograd, which calls this function again without recording. */
static PyObject *call_recorded(const struct call *call, PyObject *const *args,
                               Py_ssize_t nargs, PyObject *kwnames)
{
    PyObject *function = torch_function(call->state->names.attention);
    PyObject *answer =
        function == NULL ? NULL
                         : PyObject_Vectorcall(function, args, (size_t)nargs, kwnames);
    Py_XDECREF(function);
    return answer;
}

PyObject *mod_attention(PyObject *self, PyObject *const *args, Py_ssize_t nargs,
                        PyObject *kwnames)
{
    static const struct arg_names spec = {"attention", call_arg_names, ARG_COUNT,
                                          ARG_CONTEXT + 1};
    struct call call;
    memset(&call, 0, sizeof call);
    call.state = module_state_of(self);
    call.record.call.op = CP_OP_ATTENTION;
    PyObject *error = args_collect(&spec, args, nargs, kwnames, call.values) < 0
                          ? error_keep()
                          : NULL;
    if (call.values[ARG_CONTEXT] == NULL) {
        /* Nobody to tell it to. */
        if (error != NULL) {
            error_restore(error);
        } else {
            PyErr_SetString(
                PyExc_TypeError,
                "attention() missing required argument 'context_or_config'");
        }
        return NULL;
    }
    bool is_whole = call.values[ARG_Q] != NULL && call.values[ARG_K] != NULL &&
                    call.values[ARG_V] != NULL;
    /* What lacks an argument is refused at the gate, like any other error. */
    int needs_grad = error == NULL && is_whole ? check_recorded(&call) : 0;
    if (needs_grad < 0) {
        error = error_keep();
    }
    call.context = (ContextObject *)find_context(call.state, call.values[ARG_CONTEXT]);
    if (call.context == NULL) {
        Py_XDECREF(error);
        return NULL;
    }
    if (needs_grad > 0) {
        uint64_t begun = call.context->begun;
        PyObject *answer = call_recorded(&call, args, nargs, kwnames);
        error = answer == NULL ? context_untold(call.context, begun) : NULL;
        if (error == NULL) {
            Py_CLEAR(call.context);
            return answer;
        }
    }
    return call_run(&call, parse_forward, error, forward_answer);
}
