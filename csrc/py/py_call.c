/* The steps of a call, and the arguments that both directions have in common. */
#include "py_call.h"

#include <float.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "plan/agree.h"
#include "plan/plan.h"
#include "py_args.h"
#include "py_device.h"

const char *const call_arg_names[ARG_COUNT] = {
    "q",         "k",       "v",          "context_or_config", "attn_mask",
    "is_causal", "scale",   "enable_gqa", "return_lse",        "kv",
    "seq_lens",  "kv_lens", "dropout_p",  "backend",
};

/* --- tensors --- */

int call_import(struct call *call, enum cp_tensor_role role, int arg, const char *name)
{
    if (call->values[arg] == NULL) {
        PyErr_Format(PyExc_TypeError, "attention() missing required argument '%s'",
                     name);
        return -1;
    }
    return array_import(call->state, call->values[arg], name, &call->arrays[role]);
}

enum cp_code call_check_kind(const struct call *call, enum cp_tensor_role role,
                             const char *name, enum cp_dtype dtype)
{
    const struct cp_tensor *q = &call->arrays[CP_TENSOR_Q].tensor;
    const struct cp_tensor *tensor = &call->arrays[role].tensor;
    char device[48];
    char own[48];
    CP_TRY(cp_tensor_check_device("q", q));
    if (!cp_tensor_are_together(tensor, q)) {
        return cp_fail(CP_ERR_VALUE,
                       "q is on %s and %s on %s; they must be on one device",
                       cp_tensor_print_device(q, device, sizeof device), name,
                       cp_tensor_print_device(tensor, own, sizeof own));
    }
    if (tensor->dtype != dtype) {
        return cp_fail(CP_ERR_TYPE,
                       "%s has dtype %s, but it must be %s, since q has dtype %s", name,
                       cp_dtype_name(tensor->dtype), cp_dtype_name(dtype),
                       cp_dtype_name(q->dtype));
    }
    return CP_OK;
}

static enum cp_code view_qkv(struct call *call)
{
    const struct cp_tensor *q = &call->arrays[CP_TENSOR_Q].tensor;
    CP_TRY(call_check_kind(call, CP_TENSOR_K, "k",
                           call->arrays[CP_TENSOR_K].tensor.dtype));
    CP_TRY(call_check_kind(call, CP_TENSOR_V, "v",
                           call->arrays[CP_TENSOR_V].tensor.dtype));
    if (!cp_dtype_attends(q->dtype)) {
        return cp_fail(CP_ERR_TYPE,
                       "q has dtype %s; allowed: float32, float64, bfloat16, float16",
                       cp_dtype_name(q->dtype));
    }
    CP_TRY(call_check_kind(call, CP_TENSOR_K, "k", q->dtype));
    CP_TRY(call_check_kind(call, CP_TENSOR_V, "v", q->dtype));
    CP_TRY(cp_tensor_view_attention("q", q, &call->views[CP_TENSOR_Q]));
    CP_TRY(cp_tensor_view_attention("k", &call->arrays[CP_TENSOR_K].tensor,
                                    &call->views[CP_TENSOR_K]));
    return cp_tensor_view_attention("v", &call->arrays[CP_TENSOR_V].tensor,
                                    &call->views[CP_TENSOR_V]);
}

static enum cp_code fail_sizes(const char *what, const char *first, int64_t a,
                               const char *second, int64_t b)
{
    return cp_fail(CP_ERR_VALUE, "%s of %s and %s differ: %" PRId64 " and %" PRId64,
                   what, first, second, a, b);
}

static enum cp_code check_heads(const struct cp_call *sizes)
{
    if (sizes->heads < 1 || sizes->kv_heads < 1 || sizes->head_dim < 1 ||
        sizes->value_dim < 1) {
        return cp_fail(
            CP_ERR_VALUE,
            "heads and head dims must be at least 1; q has %" PRId64
            " heads of dim %" PRId64 ", v has %" PRId64 " heads of dim %" PRId64,
            sizes->heads, sizes->head_dim, sizes->kv_heads, sizes->value_dim);
    }
    if (sizes->heads != sizes->kv_heads && sizes->enable_gqa == 0) {
        return cp_fail(CP_ERR_VALUE,
                       "q has %" PRId64 " heads and k has %" PRId64
                       "; pass enable_gqa=True if that is "
                       "meant",
                       sizes->heads, sizes->kv_heads);
    }
    if (sizes->heads % sizes->kv_heads != 0) {
        return cp_fail(CP_ERR_VALUE,
                       "the %" PRId64 " heads of q cannot be divided among the %" PRId64
                       " heads of k",
                       sizes->heads, sizes->kv_heads);
    }
    return CP_OK;
}

/* Compares q, k and v, and writes their sizes into the record. */
static enum cp_code read_sizes(struct call *call)
{
    const int64_t *q = call->views[CP_TENSOR_Q].n;
    const int64_t *k = call->views[CP_TENSOR_K].n;
    const int64_t *v = call->views[CP_TENSOR_V].n;
    struct cp_call *sizes = &call->record.call;
    if (q[0] != k[0] || k[0] != v[0]) {
        return q[0] != k[0] ? fail_sizes("batch sizes", "q", q[0], "k", k[0])
                            : fail_sizes("batch sizes", "k", k[0], "v", v[0]);
    }
    if (k[1] != v[1]) {
        return fail_sizes("sequence lengths", "k", k[1], "v", v[1]);
    }
    if (k[2] != v[2]) {
        return fail_sizes("numbers of heads", "k", k[2], "v", v[2]);
    }
    if (q[3] != k[3]) {
        return fail_sizes("head dims", "q", q[3], "k", k[3]);
    }
    sizes->dtype = (int32_t)call->views[CP_TENSOR_Q].dtype;
    sizes->batch = q[0];
    sizes->heads = q[2];
    sizes->kv_heads = k[2];
    sizes->head_dim = q[3];
    sizes->value_dim = v[3];
    call->record.sizes[CP_SIZE_Q_ROWS] = q[1];
    call->record.sizes[CP_SIZE_KV_ROWS] = k[1];
    return check_heads(sizes);
}

static enum cp_code view_mask(struct call *call)
{
    const struct cp_tensor *mask = &call->arrays[CP_TENSOR_MASK].tensor;
    struct cp_call *sizes = &call->record.call;
    struct cp_view *view = &call->views[CP_TENSOR_MASK];
    bool is_bool = mask->dtype == CP_DTYPE_BOOL;
    CP_TRY(call_check_kind(call, CP_TENSOR_MASK, "attn_mask", mask->dtype));
    if (!is_bool && mask->dtype != CP_DTYPE_FLOAT32 &&
        (int32_t)mask->dtype != sizes->dtype) {
        return cp_fail(
            CP_ERR_TYPE,
            "attn_mask has dtype %s; allowed: bool, float32 or q's dtype, %s",
            cp_dtype_name(mask->dtype), cp_dtype_name((enum cp_dtype)sizes->dtype));
    }
    CP_TRY(cp_tensor_view_mask(mask, sizes->batch, sizes->heads, view));
    sizes->mask_kind = is_bool ? CP_MASK_BOOL : CP_MASK_ADD;
    sizes->mask_dtype = (int32_t)mask->dtype;
    sizes->mask_batch = view->n[0];
    sizes->mask_heads = view->n[1];
    call->record.sizes[CP_SIZE_MASK_ROWS] = view->n[2];
    call->record.sizes[CP_SIZE_MASK_KEYS] = view->n[3];
    return CP_OK;
}

static int parse_mask(struct call *call)
{
    if (!call_is_given(call->values[ARG_MASK])) {
        return 0;
    }
    if (call_import(call, CP_TENSOR_MASK, ARG_MASK, "attn_mask") < 0) {
        return -1;
    }
    return py_check(call->state, view_mask(call));
}

/* --- the other arguments --- */

static int parse_backend(PyObject *given, int32_t *out)
{
    char names[CP_STATUS_TEXT / 2];
    if (!PyUnicode_Check(given)) {
        PyErr_Format(PyExc_TypeError, "backend must be a str, not %s",
                     Py_TYPE(given)->tp_name);
        return -1;
    }
    const char *name = PyUnicode_AsUTF8(given);
    PyErr_Clear(); /* what cannot be encoded is no name of ours */
    *out = (int32_t)cp_backend_find(name == NULL ? "" : name);
    if (*out == CP_BACKEND_COUNT) {
        PyErr_Format(PyExc_ValueError, "backend=%R; allowed: %s", given,
                     cp_backend_print(false, names, sizeof names));
        return -1;
    }
    return 0;
}

static int parse_flags(struct call *call)
{
    struct cp_call *fields = &call->record.call;
    int is_causal = 0;
    int enable_gqa = 0;
    int return_lse = 0;
    if (args_flag(call->values[ARG_IS_CAUSAL], &is_causal) < 0 ||
        args_flag(call->values[ARG_ENABLE_GQA], &enable_gqa) < 0 ||
        args_flag(call->values[ARG_RETURN_LSE], &return_lse) < 0) {
        return -1;
    }
    fields->is_causal = is_causal;
    fields->enable_gqa = enable_gqa;
    fields->want_lse = return_lse;
    if (call->values[ARG_BACKEND] != NULL &&
        parse_backend(call->values[ARG_BACKEND], &fields->backend) < 0) {
        return -1;
    }
    PyObject *kv = call->values[ARG_KV];
    if (kv != NULL) {
        bool is_text = PyUnicode_Check(kv);
        fields->kv_replicated =
            is_text && PyUnicode_CompareWithASCIIString(kv, "replicated") == 0;
        if (!fields->kv_replicated &&
            !(is_text && PyUnicode_CompareWithASCIIString(kv, "sharded") == 0)) {
            PyErr_Format(PyExc_ValueError, "kv=%R; allowed: 'sharded', 'replicated'",
                         kv);
            return -1;
        }
    }
    return 0;
}

/* A real number, or -1 with a TypeError that names the argument. */
static int parse_number(PyObject *value, const char *name, double *out)
{
    *out = PyFloat_AsDouble(value);
    if (*out != -1.0 || !PyErr_Occurred()) {
        return 0;
    }
    if (PyErr_ExceptionMatches(PyExc_TypeError)) {
        PyErr_Format(PyExc_TypeError, "%s must be a number, not %s", name,
                     Py_TYPE(value)->tp_name);
    } else if (PyErr_ExceptionMatches(PyExc_OverflowError)) {
        PyErr_Format(PyExc_ValueError, "%s is an int beyond what a float holds", name);
    }
    return -1;
}

/* Scores are of the type that sums have: a scale beyond it would make every one of them infinite or NaN. */
static int check_scale(const struct call *call, double scale, PyObject *given)
{
    enum cp_dtype dtype = (enum cp_dtype)call->record.call.dtype;
    if (!isfinite(scale)) {
        PyErr_Format(PyExc_ValueError, "scale=%S; allowed: any finite number", given);
        return -1;
    }
    if (cp_dtype_sum(dtype) == CP_DTYPE_FLOAT32 && fabs(scale) > (double)FLT_MAX) {
        PyErr_Format(PyExc_ValueError,
                     "scale=%S; allowed where q has dtype %s: up to 3.4e+38 in "
                     "magnitude, since its scores are float32",
                     given, cp_dtype_name(dtype));
        return -1;
    }
    return 0;
}

static int parse_numbers(struct call *call)
{
    double scale = 1.0 / sqrt((double)call->record.call.head_dim);
    double dropout = 0.0;
    PyObject *given = call->values[ARG_SCALE];
    if (call_is_given(given)) {
        if (parse_number(given, "scale", &scale) < 0 ||
            check_scale(call, scale, given) < 0) {
            return -1;
        }
    }
    given = call->values[ARG_DROPOUT];
    if (given != NULL && parse_number(given, "dropout_p", &dropout) < 0) {
        return -1;
    }
    if (dropout != 0.0) {
        PyErr_Format(PyExc_ValueError,
                     "dropout_p=%S; allowed: 0, since attention has no dropout here",
                     given);
        return -1;
    }
    memcpy(&call->record.call.scale_bits, &scale, sizeof scale);
    return 0;
}

/* Item `rank` of a list of lengths. */
static int parse_length(PyObject *list, const char *name, int rank, int64_t *out)
{
    char place[32];
    int overflow = 0;
    (void)snprintf(place, sizeof place, "%s[%d]", name, rank);
    PyObject *index = PyLong_FromLong(rank);
    PyObject *item = index == NULL ? NULL : PyObject_GetItem(list, index);
    PyObject *number = item == NULL ? NULL : args_int(item, place);
    Py_XDECREF(item);
    Py_XDECREF(index);
    if (number == NULL) {
        return -1;
    }
    long long length = PyLong_AsLongLongAndOverflow(number, &overflow);
    Py_DECREF(number);
    if (overflow != 0 || length < 0) {
        PyErr_Format(PyExc_ValueError, "%s is no length: it is %s", place,
                     overflow > 0 ? "too large" : "negative");
        return -1;
    }
    *out = length;
    return 0;
}

/* The lengths of all ranks, the own one of which is known. */
static int parse_lengths(const struct call *call, int arg, int64_t own,
                         int64_t *lengths)
{
    const char *name = call_arg_names[arg];
    const ContextObject *context = call->context;
    PyObject *list = call->values[arg];
    /* Torch's tensors are no sequences to C. Not any iterable: one without an end would keep all ranks waiting. */
    bool is_list =
        (PySequence_Check(list) || PyMapping_Check(list)) && !PyDict_Check(list);
    Py_ssize_t count = is_list ? PyObject_Size(list) : -1;
    if (count < 0) {
        PyErr_Format(PyExc_TypeError, "%s must be a sequence of ints, not %s", name,
                     Py_TYPE(list)->tp_name);
        return -1;
    }
    if (count != context->world) {
        PyErr_Format(PyExc_ValueError, "%s has %zd lengths for %d ranks", name, count,
                     context->world);
        return -1;
    }
    for (int rank = 0; rank < context->world; rank++) {
        if (parse_length(list, name, rank, &lengths[rank]) < 0) {
            return -1;
        }
    }
    if (lengths[context->rank] != own) {
        PyErr_Format(PyExc_ValueError, "%s says %lld for rank %d, whose length is %lld",
                     name, (long long)lengths[context->rank], context->rank,
                     (long long)own);
        return -1;
    }
    return 0;
}

static int parse_promises(struct call *call)
{
    int64_t q_rows[CP_MAX_WORLD] = {0};
    int64_t kv_rows[CP_MAX_WORLD] = {0};
    struct cp_record *record = &call->record;
    bool has_kv = call_is_given(call->values[ARG_KV_LENS]);
    if (!call_is_given(call->values[ARG_SEQ_LENS])) {
        if (has_kv) {
            PyErr_SetString(PyExc_ValueError,
                            "kv_lens needs seq_lens, the lengths of q");
        }
        return has_kv ? -1 : 0;
    }
    if (parse_lengths(call, ARG_SEQ_LENS, record->sizes[CP_SIZE_Q_ROWS], q_rows) < 0 ||
        (has_kv && parse_lengths(call, ARG_KV_LENS, record->sizes[CP_SIZE_KV_ROWS],
                                 kv_rows) < 0)) {
        return -1;
    }
    for (int rank = 0; !has_kv && rank < call->context->world; rank++) {
        kv_rows[rank] =
            record->call.kv_replicated ? record->sizes[CP_SIZE_KV_ROWS] : q_rows[rank];
    }
    record->call.check = cp_lengths_hash(q_rows, kv_rows, call->context->world);
    return 0;
}

/* The device of the tensors, and the package of the backend where a package computes there. */
static int use_device(struct call *call)
{
    const struct array *q = &call->arrays[CP_TENSOR_Q];
    const struct cp_lender lender = device_lender(call->state, q);
    bool has_package =
        cp_backend_is_package((enum cp_backend)call->record.call.backend);
    if (device_use(call->state, call->context, q, "q",
                   has_package ? &call->package.table : NULL, &call->record) < 0) {
        return -1;
    }
    return !has_package || call->record.call.place == CP_ON_HOST
               ? 0
               : package_open(&call->package, call->state, q, &lender, &call->record,
                              call->context->rank);
}

int call_parse(struct call *call)
{
    if (call_import(call, CP_TENSOR_Q, ARG_Q, "q") < 0 ||
        call_import(call, CP_TENSOR_K, ARG_K, "k") < 0 ||
        call_import(call, CP_TENSOR_V, ARG_V, "v") < 0 || parse_flags(call) < 0 ||
        py_check(call->state, view_qkv(call)) < 0 ||
        py_check(call->state, read_sizes(call)) < 0 || parse_numbers(call) < 0 ||
        parse_mask(call) < 0 || parse_promises(call) < 0) {
        return -1;
    }
    if (use_device(call) < 0 ||
        device_stream(call->state, &call->arrays[CP_TENSOR_Q], &call->stream) < 0) {
        return -1;
    }
    return py_check(call->state, cp_context_describe(call->context->core, call->stream,
                                                     &call->record));
}

int call_create_output(struct call *call, enum cp_tensor_role role, enum cp_dtype dtype,
                       int ndim, const int64_t *shape)
{
    struct output *output = &call->outputs[role];
    if (output_create(call->state, &call->arrays[CP_TENSOR_Q], dtype, ndim, shape,
                      output) < 0) {
        return -1;
    }
    enum cp_code code =
        ndim == CP_AXES
            ? cp_tensor_view_attention("out", &output->tensor, &call->views[role])
            : cp_tensor_view_lse("lse", &output->tensor, &call->views[role]);
    return py_check(call->state, code);
}

/* --- the steps --- */

static void call_release(struct call *call)
{
    for (int role = 0; role < CP_TENSORS; role++) {
        output_release(&call->outputs[role]);
        array_release(&call->arrays[role]);
    }
    package_close(&call->package);
    Py_CLEAR(call->context);
}

static int call_execute(struct call *call)
{
    if (device_follow(call->state, call->stream, call->arrays, CP_TENSORS) < 0) {
        context_abandon(call->context);
        return -1;
    }
    int result = context_execute(call->context, call->state, call->views);
    if (result < 0) {
        package_explain(&call->package);
    }
    return result;
}

PyObject *call_run(struct call *call, int (*parse)(struct call *), PyObject *error,
                   PyObject *(*answer)(struct call *))
{
    if (context_enter(call->context) < 0) {
        Py_XDECREF(error);
        call_release(call);
        return NULL;
    }
    if (error == NULL && parse(call) < 0) {
        error = error_keep();
    }
    int result = context_begin(call->context, call->state, &call->record, error, NULL);
    if (result == 0) {
        result = call_execute(call);
    }
    context_leave(call->context);
    PyObject *object = result < 0 ? NULL : answer(call);
    call_release(call);
    return object;
}
