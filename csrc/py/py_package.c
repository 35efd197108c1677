/* The GIL is taken for each of a package's functions: the core calls them in the middle of a call, without it. What
 * the package enqueues is on the framework's current stream, which is the call's (py_device.h). */
#include "py_package.h"

#include <string.h>

#include "base/mem.h"
#include "py_torch.h"

enum { RESULTS = 3 };

/* What a function returned, or memory, until the core has no more use for it. */
struct held {
    struct array arrays[RESULTS];
    void *loan; /* NULL: none */
};

/* ---- errors ---- */

/* Takes the exception that is set, but for the interrupted rank's own. */
static enum cp_code take_error(struct package *package)
{
    struct cp_status status;
    PyObject *error = error_keep();
    if (PyErr_GivenExceptionMatches(error, PyExc_KeyboardInterrupt)) {
        error_restore(error);
        return cp_fail_rank(CP_ERR_INTERRUPTED, package->rank,
                            "rank %d was interrupted (KeyboardInterrupt)",
                            package->rank);
    }
    error_to_status(package->state, error, package->rank, &status);
    Py_XSETREF(package->error, error);
    return cp_fail_rank((enum cp_code)status.code, package->rank,
                        "backend '%s': %.900s", cp_backend_name(package->backend),
                        status.text);
}

void package_explain(struct package *package)
{
    PyObject *raised = package->error == NULL ? NULL : error_take();
    if (raised != NULL) {
        PyException_SetCause(raised, Py_NewRef(package->error));
        error_restore(raised);
    }
}

/* ---- tensors in ---- */

struct lent {
    DLManagedTensorVersioned managed;
    int64_t shape[CP_AXES], strides[CP_AXES];
};

/* The memory stays the call's. May be called without the GIL. */
static void delete_lent(DLManagedTensorVersioned *managed)
{
    void *block = managed->manager_ctx;
    cp_mem_destroy(&block);
}

/* A view as a tensor of the caller's framework, of its first `ndim` axes: a new reference, or NULL with an exception. */
static PyObject *lend_view(const struct package *package, const struct cp_view *view,
                           int ndim)
{
    void *block = NULL;
    void *object = NULL;
    if (py_check(package->state,
                 cp_mem_create(sizeof(struct lent), "a tensor", &block)) < 0) {
        return NULL;
    }
    struct lent *lent = block;
    int64_t packed = 1;
    for (int axis = ndim - 1; axis >= 0; axis--) {
        /* Strides of axes with one place are of no account, and may be anything. */
        bool counts = view->n[axis] > 1;
        lent->shape[axis] = view->n[axis];
        lent->strides[axis] =
            counts ? view->stride[axis] / cp_dtype_bytes(view->dtype) : packed;
        packed *= view->n[axis];
    }
    const struct cp_tensor *like = &package->like->tensor;
    const DLDevice device = {(DLDeviceType)like->device_type, like->device_id};
    lent->managed = (DLManagedTensorVersioned){
        .version = {DLPACK_MAJOR_VERSION, DLPACK_MINOR_VERSION},
        .manager_ctx = lent,
        .deleter = delete_lent,
        .dl_tensor = cp_tensor_prototype(view->dtype, device, ndim, lent->shape),
    };
    lent->managed.dl_tensor.data = view->data;
    lent->managed.dl_tensor.strides = lent->strides;
    return package->like->api->managed_tensor_to_py_object_no_sync(&lent->managed,
                                                                   &object) < 0
               ? NULL
               : object;
}

/* ---- tensors out ---- */

/* One that has to have q's device, this dtype, and the lengths of `like`. */
struct wanted {
    const char *name;
    const struct cp_view *like;
    enum cp_dtype dtype;
    int64_t last; /* length of its last axis; that of an lse is not there */
    bool is_lse;
    struct cp_view *out;
};

static enum cp_code view_result(const struct array *array, const struct wanted *wanted)
{
    return wanted->is_lse
               ? cp_tensor_view_lse(wanted->name, &array->tensor, wanted->out)
               : cp_tensor_view_attention(wanted->name, &array->tensor, wanted->out);
}

static enum cp_code check_result(const struct package *package,
                                 const struct array *array, const struct wanted *wanted)
{
    const int64_t *n = wanted->like->n;
    char shape[160];
    char device[48];
    bool is_right = cp_tensor_are_together(&array->tensor, &package->like->tensor) &&
                    array->tensor.dtype == wanted->dtype &&
                    view_result(array, wanted) == CP_OK && wanted->out->n[0] == n[0] &&
                    wanted->out->n[1] == n[1] && wanted->out->n[2] == n[2] &&
                    wanted->out->n[3] == wanted->last;
    return is_right
               ? CP_OK
               : cp_fail_rank(
                     CP_ERR_RUNTIME, package->rank,
                     "backend '%s': its package answered %s of shape %s, %s on %s; "
                     "expected were %lld rows of %lld heads, batch %lld, %s",
                     cp_backend_name(package->backend), wanted->name,
                     cp_tensor_print_shape(&array->tensor, shape, sizeof shape),
                     cp_dtype_name(array->tensor.dtype),
                     cp_tensor_print_device(&array->tensor, device, sizeof device),
                     (long long)n[1], (long long)n[2], (long long)n[0],
                     cp_dtype_name(wanted->dtype));
}

static void release(const struct cp_package *table, void **held)
{
    struct held *block = *held;
    const struct package *package = table->owner;
    if (block == NULL) {
        return;
    }
    PyGILState_STATE gil = PyGILState_Ensure();
    for (int i = 0; i < RESULTS; i++) {
        array_release(&block->arrays[i]);
    }
    PyGILState_Release(gil);
    if (block->loan != NULL) {
        package->lender.give_back(block->loan);
    }
    cp_mem_destroy(held);
}

/* The items of what a function returned, a tuple. */
static enum cp_code read_results(struct package *package, PyObject *results,
                                 const struct wanted *wanted, int count,
                                 struct held *held)
{
    if (!PyTuple_Check(results) || PyTuple_GET_SIZE(results) != count) {
        return cp_fail_rank(CP_ERR_INTERNAL, package->rank,
                            "cp_attn._packages gave a %s, not %d tensors",
                            Py_TYPE(results)->tp_name, count);
    }
    for (int i = 0; i < count; i++) {
        if (array_import(package->state, PyTuple_GET_ITEM(results, i), wanted[i].name,
                         &held->arrays[i]) < 0) {
            return take_error(package);
        }
        CP_TRY(check_result(package, &held->arrays[i], &wanted[i]));
    }
    return CP_OK;
}

/* ---- calls ---- */

enum { MOST_TENSORS = 6 };

/* What a function of cp_attn._packages is given, in this order behind backend, scale and is_causal. */
struct given {
    const struct cp_view *views[MOST_TENSORS];
    int ndim[MOST_TENSORS];
    int count;
};

static PyObject *make_args(const struct package *package,
                           const struct cp_package_block *block,
                           const struct given *given)
{
    PyObject *args = Py_BuildValue("[sdO]", cp_backend_name(package->backend),
                                   block->scale, block->is_causal ? Py_True : Py_False);
    for (int i = 0; i < given->count && args != NULL; i++) {
        PyObject *tensor = lend_view(package, given->views[i], given->ndim[i]);
        if (tensor == NULL || PyList_Append(args, tensor) < 0) {
            Py_CLEAR(args);
        }
        Py_XDECREF(tensor);
    }
    PyObject *tuple = args == NULL ? NULL : PyList_AsTuple(args);
    Py_XDECREF(args);
    return tuple;
}

static PyObject *call_function(const struct package *package, const char *name,
                               const struct cp_package_block *block,
                               const struct given *given)
{
    PyObject *function = PyObject_GetAttrString(package->module, name);
    PyObject *args = function == NULL ? NULL : make_args(package, block, given);
    PyObject *results = args == NULL ? NULL : PyObject_CallObject(function, args);
    Py_XDECREF(args);
    Py_XDECREF(function);
    return results;
}

/* Calls a function of cp_attn._packages; what it returns is in `held` until release. */
static enum cp_code ask(struct package *package, const char *name,
                        const struct cp_package_block *block, const struct given *given,
                        const struct wanted *wanted, int count, void **held)
{
    CP_TRY(cp_mem_create(sizeof(struct held), "what a package answers", held));
    PyGILState_STATE gil = PyGILState_Ensure();
    PyObject *results = call_function(package, name, block, given);
    enum cp_code code = results == NULL
                            ? take_error(package)
                            : read_results(package, results, wanted, count, *held);
    Py_XDECREF(results);
    PyGILState_Release(gil);
    if (code != CP_OK) {
        release(&package->table, held);
    }
    return code;
}

static enum cp_code answer(const struct cp_package *table,
                           const struct cp_package_block *block,
                           struct cp_package_answer *out)
{
    enum cp_dtype dtype = block->q.dtype;
    const struct given given = {
        .views = {&block->q, &block->k, &block->v},
        .ndim = {CP_AXES, CP_AXES, CP_AXES},
        .count = 3,
    };
    const struct wanted wanted[] = {
        {"out", &block->q, dtype, block->v.n[3], false, &out->out},
        {"lse", &block->q, cp_dtype_sum(dtype), 1, true, &out->lse},
    };
    return ask(table->owner, "answer", block, &given, wanted, 2, &out->held);
}

static enum cp_code gradient(const struct cp_package *table,
                             const struct cp_package_block *block,
                             const struct cp_package_outcome *outcome,
                             struct cp_package_grads *out)
{
    enum cp_dtype dtype = block->q.dtype;
    const struct given given = {
        .views = {&block->q, &block->k, &block->v, &outcome->dout, &outcome->out,
                  &outcome->lse},
        .ndim = {CP_AXES, CP_AXES, CP_AXES, CP_AXES, CP_AXES, CP_AXES - 1},
        .count = 6,
    };
    const struct wanted wanted[] = {
        {"dq", &block->q, dtype, block->q.n[3], false, &out->dq},
        {"dk", &block->k, dtype, block->k.n[3], false, &out->dk},
        {"dv", &block->v, dtype, block->v.n[3], false, &out->dv},
    };
    return ask(table->owner, "gradient", block, &given, wanted, 3, &out->held);
}

static enum cp_code room(const struct cp_package *table, int64_t bytes, char **out,
                         void **held)
{
    static const char what[] = "a gradient";
    const struct package *package = table->owner;
    void *memory = NULL;
    CP_TRY(cp_mem_create(sizeof(struct held), what, held));
    struct held *block = *held;
    enum cp_code code =
        package->lender.lend(&package->lender, package->like->tensor.device_id,
                             (size_t)bytes, what, &memory, &block->loan);
    if (code != CP_OK) {
        cp_mem_destroy(held);
        return code;
    }
    *out = memory;
    return CP_OK;
}

/* ---- a call's package ---- */

/* Blocks are handed to it as tensors by the framework's exchange table. */
static int check_framework(struct module_state *state, const struct array *like,
                           enum cp_backend backend)
{
    int is_torch = torch_is_tensor(state, like->object);
    if (is_torch < 0) {
        return -1;
    }
    if (is_torch == 0 || like->source != ARRAY_EXCHANGE ||
        like->api->managed_tensor_to_py_object_no_sync == NULL) {
        return py_check(state,
                        cp_fail(CP_ERR_UNSUPPORTED,
                                "backend '%s' takes tensors of torch alone, of a torch "
                                "that has DLPack's exchange table; 'native' takes "
                                "others",
                                cp_backend_name(backend)));
    }
    return 0;
}

/* cp_attn._packages says what a package takes. */
static int check_call(const struct package *package, const struct cp_record *record)
{
    const struct cp_call *call = &record->call;
    int generation = 0;
    if (py_check(package->state, package->state->accelerator->generation(
                                     package->like->tensor.device_id, &generation)) <
        0) {
        return -1;
    }
    PyObject *answer = PyObject_CallMethod(
        package->module, "check", "ssLLLLOOi", cp_backend_name(package->backend),
        cp_dtype_name((enum cp_dtype)call->dtype), (long long)call->head_dim,
        (long long)call->value_dim, (long long)call->heads, (long long)call->kv_heads,
        call->mask_kind != CP_MASK_NONE ? Py_True : Py_False,
        call->op == CP_OP_ATTENTION_BACKWARD ? Py_True : Py_False, generation);
    Py_XDECREF(answer);
    return answer == NULL ? -1 : 0;
}

int package_open(struct package *package, struct module_state *state,
                 const struct array *like, const struct cp_lender *lender,
                 const struct cp_record *record, int rank)
{
    enum cp_backend backend = (enum cp_backend)record->call.backend;
    if (check_framework(state, like, backend) < 0) {
        return -1;
    }
    PyObject *module = PyImport_ImportModule("cp_attn._packages");
    if (module == NULL) {
        return -1;
    }
    *package = (struct package){
        .table = {answer, gradient, room, release, package},
        .state = state,
        .like = like,
        .lender = *lender,
        .backend = backend,
        .rank = rank,
        .module = module,
    };
    return check_call(package, record);
}

void package_close(struct package *package)
{
    Py_CLEAR(package->module);
    Py_CLEAR(package->error);
}

int package_check_gradient(PyObject *backend)
{
    const char *name =
        backend != NULL && PyUnicode_Check(backend) ? PyUnicode_AsUTF8(backend) : NULL;
    PyErr_Clear(); /* what is no name is refused with the other arguments */
    if (name == NULL || !cp_backend_is_package(cp_backend_find(name))) {
        return 0;
    }
    PyObject *module = PyImport_ImportModule("cp_attn._packages");
    PyObject *answer = module == NULL
                           ? NULL
                           : PyObject_CallMethod(module, "check_gradient", "s", name);
    Py_XDECREF(module);
    Py_XDECREF(answer);
    return answer == NULL ? -1 : 0;
}
