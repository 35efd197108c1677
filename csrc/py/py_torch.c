/* Recognising torch's tensors and their peculiarities. */
#include "py_torch.h"

/* A part of torch that not every version has: NULL, without an exception, where it is not there. */
static PyObject *find_optional(const char *module_name, const char *attribute)
{
    PyObject *module = PyImport_ImportModule(module_name);
    if (module != NULL && attribute != NULL) {
        Py_SETREF(module, PyObject_GetAttrString(module, attribute));
    }
    if (module == NULL) {
        PyErr_Clear();
    }
    return module;
}

/* Fills in what the state knows of torch; 1 if it is there. */
static int find_torch(struct module_state *state)
{
    if (state->torch_tensor != NULL) {
        return 1;
    }
    PyObject *torch = PyImport_GetModule(state->names.torch);
    if (torch == NULL || torch == Py_None) {
        Py_XDECREF(torch);
        return PyErr_Occurred() ? -1 : 0;
    }
    PyObject *tensor = PyObject_GetAttrString(torch, "Tensor");
    PyObject *enabled = PyObject_GetAttrString(torch, "is_grad_enabled");
    PyObject *dispatch =
        tensor == NULL ? NULL : PyObject_GetAttr(tensor, state->names.torch_dispatch);
    Py_DECREF(torch);
    if (tensor != NULL && enabled != NULL && dispatch != NULL && PyType_Check(tensor)) {
        state->torch_is_wrapped =
            find_optional("torch._C._functorch", "is_functorch_wrapped_tensor");
        state->torch_forward_ad = find_optional("torch.autograd.forward_ad", NULL);
        state->torch_is_grad_enabled = enabled;
        state->torch_no_dispatch = dispatch;
        state->torch_tensor = tensor;
        return 1;
    }
    /* Something else of that name, or torch in the middle of its import. */
    PyErr_Clear();
    Py_XDECREF(dispatch);
    Py_XDECREF(enabled);
    Py_XDECREF(tensor);
    return 0;
}

int torch_is_tensor(struct module_state *state, PyObject *object)
{
    int found = find_torch(state);
    return found <= 0 ? found
                      : PyObject_TypeCheck(object, (PyTypeObject *)state->torch_tensor);
}

/* 0, 1, or -1. */
static int ask(PyObject *tensor, PyObject *question)
{
    PyObject *answer = PyObject_CallMethodNoArgs(tensor, question);
    int truth = answer == NULL ? -1 : PyObject_IsTrue(answer);
    Py_XDECREF(answer);
    return truth;
}

/* 0 outside of forward_ad.dual_level(), where nothing has a tangent; 1 inside, and where this torch does not say. */
static int may_have_tangent(const struct module_state *state)
{
    if (state->torch_forward_ad == NULL) {
        return 0;
    }
    PyObject *level =
        PyObject_GetAttr(state->torch_forward_ad, state->names.current_level);
    long number = level == NULL ? 0 : PyLong_AsLong(level);
    Py_XDECREF(level);
    if (PyErr_Occurred()) {
        PyErr_Clear();
        return 1;
    }
    return number >= 0;
}

/* Its derivative would be lost, since attention has only a backward one. */
static int check_tangent(const struct module_state *state, PyObject *tensor,
                         const char *name)
{
    if (!may_have_tangent(state)) {
        return 0;
    }
    PyObject *pair = PyObject_CallMethodOneArg(state->torch_forward_ad,
                                               state->names.unpack_dual, tensor);
    PyObject *tangent = pair == NULL ? NULL : PySequence_GetItem(pair, 1);
    bool has_tangent = tangent != NULL && tangent != Py_None;
    Py_XDECREF(tangent);
    Py_XDECREF(pair);
    PyErr_Clear(); /* a tensor that cannot even be asked fails later, with its reason */
    return !has_tangent
               ? 0
               : py_check(state,
                          cp_fail(CP_ERR_UNSUPPORTED,
                                  "%s carries a forward-mode tangent, and there is no "
                                  "forward-mode derivative here; pass "
                                  "torch.autograd.forward_ad.unpack_dual(%s).primal",
                                  name, name));
}

static int is_wrapped(const struct module_state *state, PyObject *tensor)
{
    PyObject *answer = state->torch_is_wrapped == NULL
                           ? NULL
                           : PyObject_CallOneArg(state->torch_is_wrapped, tensor);
    int truth = answer == Py_True;
    Py_XDECREF(answer);
    PyErr_Clear();
    return truth;
}

static int refuse_wrapped(const char *name)
{
    PyErr_Format(PyExc_TypeError,
                 "%s is what torch.func (vmap, grad, jvp, functionalize) has made of a "
                 "tensor, and has no memory of its own; call from outside of the "
                 "transform",
                 name);
    return -1;
}

int torch_check(const struct module_state *state, PyObject *tensor, const char *name)
{
    if (check_tangent(state, tensor, name) < 0) {
        return -1;
    }
    if ((PyObject *)Py_TYPE(tensor) == state->torch_tensor) {
        return 0;
    }
    PyObject *dispatch =
        PyObject_GetAttr((PyObject *)Py_TYPE(tensor), state->names.torch_dispatch);
    if (dispatch == NULL) {
        return -1;
    }
    bool is_plain = dispatch == state->torch_no_dispatch;
    Py_DECREF(dispatch);
    if (!is_plain) {
        PyErr_Format(PyExc_TypeError,
                     "%s is a %s, whose values are not in memory of its own; pass a "
                     "plain torch.Tensor",
                     name, Py_TYPE(tensor)->tp_name);
        return -1;
    }
    return 0;
}

int torch_check_saved(struct module_state *state, PyObject *object, const char *name,
                      bool may_be_foreign)
{
    int is_tensor = torch_is_tensor(state, object);
    if (is_tensor <= 0) {
        if (is_tensor == 0 && !may_be_foreign) {
            PyErr_Format(PyExc_TypeError,
                         "%s must be a torch.Tensor like the one that requires grad, "
                         "since autograd saves q, k and v; it is a %s",
                         name, Py_TYPE(object)->tp_name);
        }
        return PyErr_Occurred() ? -1 : 0;
    }
    if (is_wrapped(state, object)) {
        return refuse_wrapped(name);
    }
    int is_inference = ask(object, state->names.is_inference);
    if (is_inference <= 0) {
        PyErr_Clear(); /* a torch without inference mode */
        return check_tangent(state, object, name);
    }
    PyErr_Format(PyExc_ValueError,
                 "%s is an inference tensor, which autograd cannot save; pass "
                 "%s.clone()",
                 name, name);
    return -1;
}

/* An attribute's value, or NULL without an exception. */
static PyObject *look(PyObject *object, const char *attribute)
{
    PyObject *value = PyObject_GetAttrString(object, attribute);
    if (value == NULL) {
        PyErr_Clear();
    }
    return value;
}

static bool is_set(PyObject *object, const char *attribute)
{
    PyObject *value = look(object, attribute);
    Py_XDECREF(value);
    return value == Py_True;
}

/* These set the reason and return true, or return false. */

static bool explain_values(PyObject *tensor, const char *name)
{
    /* A class of torch.nn.parameter whose shape is not known yet; nothing else of it can be asked. */
    PyObject *lazy = look((PyObject *)Py_TYPE(tensor), "cls_to_become");
    Py_XDECREF(lazy);
    if (lazy != NULL) {
        PyErr_Format(PyExc_TypeError, "%s is an %s: it has no values yet", name,
                     Py_TYPE(tensor)->tp_name);
        return true;
    }
    if (is_set(tensor, "is_meta")) {
        PyErr_Format(PyExc_TypeError, "%s is on the meta device: it has no values",
                     name);
        return true;
    }
    return false;
}

static bool explain_layout(PyObject *tensor, const char *name)
{
    if (is_set(tensor, "is_nested")) {
        PyErr_Format(PyExc_TypeError,
                     "%s is a nested tensor; pass %s.to_padded_tensor(0.0), and an "
                     "attn_mask that hides the padding",
                     name, name);
        return true;
    }
    if (is_set(tensor, "is_quantized")) {
        PyErr_Format(PyExc_TypeError, "%s is a quantized tensor; pass %s.dequantize()",
                     name, name);
        return true;
    }
    PyObject *layout = look(tensor, "layout");
    PyObject *text = layout == NULL ? NULL : PyObject_Str(layout);
    bool is_other = text != NULL && PyUnicode_Check(text) &&
                    PyUnicode_CompareWithASCIIString(text, "torch.strided") != 0;
    if (is_other) {
        PyErr_Format(PyExc_TypeError, "%s has layout %U; pass %s.to_dense()", name,
                     text, name);
    }
    Py_XDECREF(text);
    Py_XDECREF(layout);
    return is_other;
}

static bool explain_dtype(PyObject *error, PyObject *tensor, const char *name)
{
    /* The only TypeError that reading a tensor gives; it knows DLPack's numbers only. */
    PyObject *dtype = PyErr_GivenExceptionMatches(error, PyExc_TypeError)
                          ? look(tensor, "dtype")
                          : NULL;
    if (dtype == NULL) {
        return false;
    }
    PyErr_Format(PyExc_TypeError, "%s has dtype %S, which is not supported", name,
                 dtype);
    Py_DECREF(dtype);
    return true;
}

/* Torch's own errors go on for a page of C++ frames. */
static bool explain_shortly(PyObject *error, const char *name)
{
    PyObject *text = Py_IS_TYPE(error, (PyTypeObject *)PyExc_RuntimeError)
                         ? PyObject_Str(error)
                         : NULL;
    if (text == NULL) {
        PyErr_Clear();
        return false;
    }
    Py_ssize_t end = PyUnicode_FindChar(text, '\n', 0, PyUnicode_GET_LENGTH(text), 1);
    PyObject *line = end < 0 ? Py_NewRef(text) : PyUnicode_Substring(text, 0, end);
    Py_DECREF(text);
    PyErr_Clear();
    if (line != NULL) {
        PyErr_Format(PyExc_RuntimeError, "%s cannot be read: %U", name, line);
        Py_DECREF(line);
    }
    return line != NULL;
}

void torch_explain(const struct module_state *state, PyObject *tensor, const char *name)
{
    PyObject *error = error_keep();
    if ((is_wrapped(state, tensor) && refuse_wrapped(name) < 0) ||
        explain_values(tensor, name) || explain_layout(tensor, name) ||
        explain_dtype(error, tensor, name) || explain_shortly(error, name)) {
        Py_DECREF(error);
    } else {
        error_restore(error);
    }
}

PyObject *torch_resolve(const struct module_state *state, PyObject *tensor,
                        bool is_complex)
{
    int is_neg = ask(tensor, state->names.is_neg);
    int is_conj = is_complex && is_neg >= 0 ? ask(tensor, state->names.is_conj) : 0;
    if (is_neg < 0 || is_conj < 0) {
        return NULL;
    }
    PyObject *result = Py_NewRef(tensor);
    if (is_neg) {
        Py_SETREF(result, PyObject_CallMethodNoArgs(result, state->names.resolve_neg));
    }
    if (is_conj && result != NULL) {
        Py_SETREF(result, PyObject_CallMethodNoArgs(result, state->names.resolve_conj));
    }
    return result;
}

static int requires_grad(struct module_state *state, PyObject *object)
{
    int is_tensor = object == NULL ? 0 : torch_is_tensor(state, object);
    if (is_tensor <= 0) {
        return is_tensor;
    }
    PyObject *flag = PyObject_GetAttr(object, state->names.requires_grad);
    int truth = flag == NULL ? -1 : PyObject_IsTrue(flag);
    Py_XDECREF(flag);
    return truth;
}

int torch_needs_grad(struct module_state *state, PyObject *const *objects, int count)
{
    int needs = find_torch(state);
    if (needs <= 0) {
        return needs;
    }
    needs = 0;
    for (int i = 0; i < count && needs == 0; i++) {
        needs = requires_grad(state, objects[i]);
    }
    if (needs <= 0) {
        return needs;
    }
    PyObject *enabled = PyObject_CallNoArgs(state->torch_is_grad_enabled);
    needs = enabled == NULL ? -1 : PyObject_IsTrue(enabled);
    Py_XDECREF(enabled);
    return needs;
}

PyObject *torch_function(PyObject *name)
{
    PyObject *torch = PyImport_ImportModule("cp_attn._torch");
    PyObject *function = torch == NULL ? NULL : PyObject_GetAttr(torch, name);
    Py_XDECREF(torch);
    return function;
}
