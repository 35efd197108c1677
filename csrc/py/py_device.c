/* cp_attn._cuda is imported when the first tensor on a GPU comes. */
#include "py_device.h"

#include <string.h>

#include "py_group.h"
#include "py_torch.h"

/* "q is on cuda:0, but " and why that does not do: the sentence of `code`. */
static enum cp_code fail_place(const struct cp_tensor *tensor, const char *name,
                               enum cp_code code)
{
    char device[48];
    char reason[CP_STATUS_TEXT];
    memcpy(reason, cp_last_error()->text, sizeof reason);
    return cp_fail(code, "%s is on %s, but %.800s", name,
                   cp_tensor_print_device(tensor, device, sizeof device), reason);
}

/* Takes the exception that is set, an ImportError. */
static enum cp_code fail_import(void)
{
    PyObject *error = error_take();
    PyObject *text = error == NULL ? NULL : PyObject_Str(error);
    const char *reason = text == NULL ? NULL : PyUnicode_AsUTF8(text);
    enum cp_code code =
        cp_fail(CP_ERR_VALUE,
                "this cp_attn serves tensors on cpu alone (%.400s); with nvcc 12.8 or "
                "later, install it with CP_ATTN_CUDA=1",
                reason == NULL ? "cp_attn._cuda cannot be imported" : reason);
    Py_XDECREF(text);
    Py_XDECREF(error);
    PyErr_Clear();
    return code;
}

/* The accelerator of a device that is not the host. NULL with an exception where cp_attn was built without it. */
static const struct cp_accelerator *find_accelerator(struct module_state *state,
                                                     const struct cp_tensor *tensor,
                                                     const char *name)
{
    if (state->accelerator != NULL) {
        return state->accelerator;
    }
    PyObject *module = PyImport_ImportModule("cp_attn._cuda");
    PyObject *capsule =
        module == NULL ? NULL : PyObject_GetAttrString(module, "_accelerator");
    Py_XDECREF(module); /* an extension module stays for the life of the process */
    if (capsule != NULL) {
        state->accelerator =
            PyCapsule_GetPointer(capsule, "cp_attn._cuda._accelerator");
        Py_DECREF(capsule);
    }
    if (state->accelerator == NULL && PyErr_ExceptionMatches(PyExc_ImportError)) {
        (void)py_check(state, fail_place(tensor, name, fail_import()));
    }
    return state->accelerator;
}

/* ---- memory of the caller's framework ---- */

/* The error callback of its allocator, which may run without the GIL. */
static void note_error(void *Py_UNUSED(context), const char *Py_UNUSED(kind),
                       const char *message)
{
    const char *line = message == NULL ? "no reason given" : message;
    (void)cp_fail(CP_ERR_NO_MEMORY, "%.*s", (int)strcspn(line, "\n"), line);
}

static enum cp_code lend(const struct cp_lender *lender, int ordinal, size_t bytes,
                         const char *what, void **out, void **loan)
{
    const DLPackExchangeAPI *api = lender->framework;
    int64_t shape[1] = {(int64_t)bytes};
    DLTensor prototype =
        cp_tensor_prototype(CP_DTYPE_UINT8, (DLDevice){kDLCUDA, ordinal}, 1, shape);
    DLManagedTensorVersioned *managed = NULL;
    if (api->managed_tensor_allocator(&prototype, &managed, NULL, note_error) != 0) {
        char reason[CP_STATUS_TEXT];
        memcpy(reason, cp_last_error()->text, sizeof reason);
        return cp_fail(CP_ERR_NO_MEMORY,
                       "no memory for %s: %zu bytes on cuda:%d: %.700s", what, bytes,
                       ordinal, reason);
    }
    *out = (char *)managed->dl_tensor.data + managed->dl_tensor.byte_offset;
    *loan = managed;
    return CP_OK;
}

static void give_back(void *loan)
{
    DLManagedTensorVersioned *managed = loan;
    managed->deleter(managed);
}

/* Torch's allocator has a pool for each graph that is being captured, which what is freed meanwhile goes back to. Of
 * others nothing is known. */
struct cp_lender device_lender(struct module_state *state, const struct array *array)
{
    struct cp_lender lender = {.lend = NULL};
    if (array->source == ARRAY_EXCHANGE) {
        lender = (struct cp_lender){
            .lend = lend,
            .give_back = give_back,
            .framework = array->api,
            .serves_contexts = true,
            .serves_captures = torch_is_tensor(state, array->object) == 1,
        };
        PyErr_Clear();
    }
    return lender;
}

int device_use(struct module_state *state, ContextObject *context,
               const struct array *array, const char *name,
               const struct cp_package *package, struct cp_record *record)
{
    const struct cp_tensor *tensor = &array->tensor;
    struct cp_lender lender = device_lender(state, array);
    if (cp_tensor_is_on_host(tensor)) {
        record->call.place = CP_ON_HOST;
        return 0;
    }
    const struct cp_accelerator *accelerator = find_accelerator(state, tensor, name);
    if (accelerator == NULL) {
        return -1;
    }
    lender.serves_contexts = lender.serves_contexts && !context->is_compiled;
    enum cp_code code =
        cp_context_use(context->core, accelerator, tensor->device_id, &lender, package);
    if (code != CP_OK) {
        return py_check(state, fail_place(tensor, name, code));
    }
    record->call.place = CP_ON_ACCELERATOR;
    return group_offer(context, tensor->device_id);
}

/* Of a torch without an exchange table, which hands its memory out as if nothing ran there. */
static int torch_stream(int ordinal, struct cp_stream **out)
{
    PyObject *cuda = PyImport_ImportModule("torch.cuda");
    PyObject *stream =
        cuda == NULL ? NULL : PyObject_CallMethod(cuda, "current_stream", "i", ordinal);
    PyObject *number =
        stream == NULL ? NULL : PyObject_GetAttrString(stream, "cuda_stream");
    *out = number == NULL ? NULL : PyLong_AsVoidPtr(number);
    Py_XDECREF(number);
    Py_XDECREF(stream);
    Py_XDECREF(cuda);
    return PyErr_Occurred() ? -1 : 0;
}

/* The stream behind which the array's memory may be used. */
static int stream_of(struct module_state *state, const struct array *array,
                     struct cp_stream **out)
{
    const struct cp_tensor *tensor = &array->tensor;
    void *stream = NULL;
    if (array->source == ARRAY_EXCHANGE && array->api->current_work_stream != NULL) {
        if (array->api->current_work_stream((DLDeviceType)tensor->device_type,
                                            tensor->device_id, &stream) != 0) {
            return -1;
        }
        *out = stream;
        return 0;
    }
    int is_torch = torch_is_tensor(state, array->object);
    if (is_torch != 0) {
        return is_torch < 0 ? -1 : torch_stream(tensor->device_id, out);
    }
    *out = NULL; /* who is asked for no stream makes it safe on the default one */
    return 0;
}

int device_stream(struct module_state *state, const struct array *array,
                  struct cp_stream **out)
{
    *out = NULL;
    return cp_tensor_is_on_host(&array->tensor) ? 0 : stream_of(state, array, out);
}

int device_follow(struct module_state *state, struct cp_stream *stream,
                  const struct array *arrays, int count)
{
    for (int i = 0; i < count; i++) {
        const struct array *array = &arrays[i];
        struct cp_stream *before = NULL;
        if (array->object == NULL || cp_tensor_is_on_host(&array->tensor)) {
            continue;
        }
        if (stream_of(state, array, &before) < 0 ||
            (before != stream &&
             py_check(state, state->accelerator->follow(array->tensor.device_id, stream,
                                                        before)) < 0)) {
            return -1;
        }
    }
    return 0;
}
