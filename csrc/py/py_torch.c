/* Recognising torch's tensors and their peculiarities. */
#include "py_torch.h"

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

int torch_check(const struct module_state *state, PyObject *tensor, const char *name)
{
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

/* 0, 1, or -1. */
static int ask(PyObject *tensor, PyObject *question)
{
    PyObject *answer = PyObject_CallMethodNoArgs(tensor, question);
    int truth = answer == NULL ? -1 : PyObject_IsTrue(answer);
    Py_XDECREF(answer);
    return truth;
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
