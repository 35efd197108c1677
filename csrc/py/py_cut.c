/* The same arguments for all, then short ends: a shard is a copy of the own rows once the ranks have agreed, a gather an
 * exchange whose output can only be sized once they have, a reduce_scatter one whose output the caller has sized. */
#include "py_cut.h"

#include <limits.h>
#include <string.h>

#include "base/mem.h"
#include "plan/plan.h"
#include "py_args.h"
#include "py_device.h"
#include "py_output.h"
#include "py_torch.h"

const char context_shard_doc[] =
    "shard($self, /, x, dim)\n"
    "--\n\n"
    "Return this rank's part of a tensor that all ranks hold whole.\n\n"
    "With q, m = divmod(x.shape[dim], W) the first m ranks get q + 1 rows, the\n"
    "others q. All ranks must call.\n\n"
    "Parameters\n"
    "----------\n"
    "x : array\n"
    "    Equal in shape and dtype on all ranks; at most 8 dimensions, any dtype of\n"
    "    1 to 16 bytes.\n"
    "dim : int\n"
    "    Negative numbers count from the end.\n\n"
    "Returns\n"
    "-------\n"
    "array\n"
    "    A packed copy, of x's type. Its gradient is this slice, in zeros, of x's.\n\n"
    "Raises\n"
    "------\n"
    "TypeError\n"
    "    x is no array, or of a dtype that is not supported.\n"
    "ValueError\n"
    "    dim is not one of x's, or another rank's x or dim differs.";

const char context_gather_doc[] =
    "gather($self, /, x, dim)\n"
    "--\n\n"
    "Return all ranks' parts put together along dim, in the order of the ranks. All\n"
    "ranks must call.\n\n"
    "Parameters\n"
    "----------\n"
    "x : array\n"
    "    Equal in dtype and in shape except along dim, where any length will do.\n"
    "dim : int\n"
    "    Negative numbers count from the end.\n\n"
    "Returns\n"
    "-------\n"
    "array\n"
    "    Packed, of x's type. Gradients are those of a result that all ranks use\n"
    "    alike: x gets its own slice.\n\n"
    "Raises\n"
    "------\n"
    "MemoryError\n"
    "    A rank has no memory for the whole. All ranks raise, and the context stays\n"
    "    usable.\n"
    "TypeError\n"
    "    x is no array, or of a dtype that is not supported.\n"
    "ValueError\n"
    "    dim is not one of x's, or another rank's x or dim differs.";

const char context_gather_at_doc[] =
    "_gather_at($self, /, x, dim)\n"
    "--\n\n"
    "Return (gather(x, dim), where x begins in it), without recording for autograd.";

const char context_reduce_scatter_doc[] =
    "_reduce_scatter($self, /, x, dim, rows)\n"
    "--\n\n"
    "Return this rank's rows of the sum of all ranks' x, which is the gradient of a\n"
    "gather along dim, without recording for autograd.";

enum { CUT_X, CUT_DIM, CUT_ROWS, CUT_COUNT };
static const char *const cut_names[CUT_COUNT] = {"x", "dim", "rows"};

/* A shard, gather or reduce_scatter under way. All zero and the first two members: its start. */
struct cut {
    ContextObject *context;
    struct module_state *state;
    PyObject *values[CUT_COUNT];
    struct array x;
    struct output output;
    int dim;
    int64_t first; /* gather: where the own rows are in the whole */
    void *copy;    /* owned: x packed, where its strides do not make three axes */
    struct cp_view view;
    struct cp_record record;
};

static void cut_release(struct cut *cut)
{
    output_release(&cut->output);
    array_release(&cut->x);
    cp_mem_destroy(&cut->copy);
}

static int read_dim(struct cut *cut)
{
    int ndim = cut->x.tensor.ndim;
    int overflow = 0;
    PyObject *number = args_int(cut->values[CUT_DIM], "dim");
    if (number == NULL) {
        return -1;
    }
    long dim = PyLong_AsLongAndOverflow(number, &overflow);
    Py_DECREF(number);
    if (overflow != 0 || dim < -ndim || dim >= ndim) {
        char shape[160];
        PyErr_Format(PyExc_ValueError, "dim=%ld%s, but x has %d dimensions, shape %s",
                     overflow > 0   ? LONG_MAX
                     : overflow < 0 ? LONG_MIN
                                    : dim,
                     overflow != 0 ? " and beyond" : "", ndim,
                     cp_tensor_print_shape(&cut->x.tensor, shape, sizeof shape));
        return -1;
    }
    cut->dim = (int)(dim < 0 ? dim + ndim : dim);
    return 0;
}

/* Three axes around the dimension, over a packed copy where x's own strides do not merge into them. */
static enum cp_code make_view(struct cut *cut)
{
    if (cp_tensor_view_cut(&cut->x.tensor, cut->dim, &cut->view)) {
        return CP_OK;
    }
    if (!cp_tensor_is_on_host(&cut->x.tensor)) {
        return cp_fail(CP_ERR_UNSUPPORTED,
                       "x has strides that do not merge around dim %d, which is not "
                       "supported on a GPU; pass x.contiguous()",
                       cut->dim);
    }
    struct cp_tensor packed;
    int64_t bytes =
        cp_tensor_count(&cut->x.tensor) * cp_dtype_bytes(cut->x.tensor.dtype);
    CP_TRY(cp_mem_create((size_t)bytes, "a packed copy of x", &cut->copy));
    CP_TRY(cp_tensor_init_compact(&packed, cut->copy, cut->x.tensor.dtype,
                                  cut->x.tensor.ndim, cut->x.tensor.shape));
    cp_tensor_copy(&packed, &cut->x.tensor);
    if (!cp_tensor_view_cut(&packed, cut->dim, &cut->view)) {
        return cp_fail(CP_ERR_INTERNAL,
                       "a packed tensor does not merge into three axes");
    }
    return CP_OK;
}

/* The rows of the whole that this rank has: all of x's, or as many as it asks for. */
static int read_rows(struct cut *cut, int64_t *out)
{
    if (cut->record.call.op != CP_OP_REDUCE_SCATTER) {
        *out = cut->x.tensor.shape[cut->dim];
        return 0;
    }
    int overflow = 0;
    long long rows = PyLong_AsLongLongAndOverflow(cut->values[CUT_ROWS], &overflow);
    if (rows == -1 && PyErr_Occurred()) {
        return -1;
    }
    if (overflow != 0 || rows < 0) {
        PyErr_Format(PyExc_ValueError, "rows=%S is no number of rows",
                     cut->values[CUT_ROWS]);
        return -1;
    }
    *out = rows;
    return 0;
}

/* Everything that concerns x, dim and rows, for all operations. */
static int cut_parse(struct cut *cut)
{
    if (array_import(cut->state, cut->values[CUT_X], "x", &cut->x) < 0 ||
        py_check(cut->state, cp_tensor_check_device("x", &cut->x.tensor)) < 0 ||
        device_use(cut->state, cut->context, &cut->x, "x", NULL, &cut->record) < 0 ||
        read_dim(cut) < 0) {
        return -1;
    }
    struct cp_call *call = &cut->record.call;
    call->dtype = (int32_t)cut->x.tensor.dtype;
    call->ndim = cut->x.tensor.ndim;
    call->dim = cut->dim;
    for (int axis = 0; axis < call->ndim; axis++) {
        bool may_differ = axis == cut->dim && call->op == CP_OP_GATHER;
        call->extent[axis] = may_differ ? 0 : cut->x.tensor.shape[axis];
    }
    struct cp_stream *stream = NULL;
    if (read_rows(cut, &cut->record.sizes[CP_SIZE_ROWS]) < 0 ||
        device_stream(cut->state, &cut->x, &stream) < 0) {
        return -1;
    }
    return py_check(cut->state,
                    cp_context_describe(cut->context->core, stream, &cut->record));
}

static int raise_unmerged(void)
{
    PyErr_SetString(PyExc_SystemError,
                    "a packed tensor does not merge into three axes");
    return -1;
}

static int cut_create_output(struct cut *cut, int64_t rows)
{
    int64_t shape[CP_TENSOR_DIMS] = {0};
    memcpy(shape, cut->x.tensor.shape, sizeof shape);
    shape[cut->dim] = rows;
    return output_create(cut->state, &cut->x, cut->x.tensor.dtype, cut->x.tensor.ndim,
                         shape, &cut->output);
}

/* The rows of x, on the host, whatever its strides. */
static void shard_on_host(struct cut *cut, const struct cp_tensor *own)
{
    PyThreadState *thread = PyEval_SaveThread();
    cp_tensor_copy(&cut->output.tensor, own);
    PyEval_RestoreThread(thread);
}

static int shard_on_device(struct cut *cut, struct cp_range rows)
{
    struct cp_view out;
    const int64_t first[CP_AXES] = {0, rows.first, 0, 0};
    const int64_t n[CP_AXES] = {cut->view.n[0], rows.count, 1, cut->view.n[3]};
    struct cp_view own = cp_view_box(&cut->view, first, n);
    if (!cp_tensor_view_cut(&cut->output.tensor, cut->dim, &out)) {
        return raise_unmerged();
    }
    return py_check(cut->state, cp_context_copy(cut->context->core, &out, &own));
}

static int shard_run(struct cut *cut, int parsed)
{
    struct cp_range rows = {0, 0};
    bool is_on_host = parsed < 0 || cp_tensor_is_on_host(&cut->x.tensor);
    if (parsed == 0 && !is_on_host) {
        parsed = py_check(cut->state, make_view(cut));
    }
    if (parsed == 0) {
        rows = cp_share(cut->x.tensor.shape[cut->dim], cut->context->world,
                        cut->context->rank);
        parsed = cut_create_output(cut, rows.count);
    }
    if (context_begin(cut->context, cut->state, &cut->record,
                      parsed < 0 ? error_keep() : NULL, NULL) < 0) {
        return -1;
    }
    if (!is_on_host) {
        return shard_on_device(cut, rows);
    }
    struct cp_tensor own =
        cp_tensor_narrow(&cut->x.tensor, cut->dim, rows.first, rows.count);
    shard_on_host(cut, &own);
    return 0;
}

static int64_t rows_of_all(const struct cp_plan *plan)
{
    return plan->cut[plan->world - 1].first + plan->cut[plan->world - 1].count;
}

/* Moves and computes; `output` is the tensor of `to`, x that of `from`. After context_begin. */
static int cut_execute(struct cut *cut, enum cp_tensor_role to,
                       enum cp_tensor_role from)
{
    struct cp_view tensors[CP_TENSORS];
    memset(tensors, 0, sizeof tensors);
    tensors[from] = cut->view;
    if (!cp_tensor_view_cut(&cut->output.tensor, cut->dim, &tensors[to])) {
        (void)raise_unmerged();
        context_abandon(cut->context);
        return -1;
    }
    return context_execute(cut->context, cut->state, tensors);
}

static int reduce_scatter_run(struct cut *cut, int parsed)
{
    if (parsed == 0) {
        parsed = py_check(cut->state, make_view(cut));
    }
    if (parsed == 0) {
        parsed = cut_create_output(cut, cut->record.sizes[CP_SIZE_ROWS]);
    }
    if (context_begin(cut->context, cut->state, &cut->record,
                      parsed < 0 ? error_keep() : NULL, NULL) < 0) {
        return -1;
    }
    return cut_execute(cut, CP_TENSOR_SHARE, CP_TENSOR_WHOLE);
}

static int gather_run(struct cut *cut, int parsed)
{
    const struct cp_plan *plan = NULL;
    if (parsed == 0) {
        parsed = py_check(cut->state, make_view(cut));
    }
    if (context_begin(cut->context, cut->state, &cut->record,
                      parsed < 0 ? error_keep() : NULL, &plan) < 0) {
        return -1;
    }
    cut->first = plan->cut[cut->context->rank].first;
    int created = cut_create_output(cut, rows_of_all(plan));
    if (context_confirm(cut->context, cut->state, created < 0 ? error_keep() : NULL) <
        0) {
        return -1;
    }
    return cut_execute(cut, CP_TENSOR_WHOLE, CP_TENSOR_SHARE);
}

static int cut_run(struct cut *cut, int parsed)
{
    int32_t op = cut->record.call.op;
    return op == CP_OP_GATHER           ? gather_run(cut, parsed)
           : op == CP_OP_REDUCE_SCATTER ? reduce_scatter_run(cut, parsed)
                                        : shard_run(cut, parsed);
}

/* `collected`: -1 where the exception of bad arguments is set. */
static PyObject *cut_call(struct cut *cut, int collected)
{
    PyObject *error = collected < 0 ? error_keep() : NULL;
    if (context_enter(cut->context) < 0) {
        Py_XDECREF(error);
        return NULL;
    }
    if (error != NULL) {
        error_restore(error);
    }
    int parsed = collected < 0 ? -1 : cut_parse(cut);
    int result = cut_run(cut, parsed);
    context_leave(cut->context);
    PyObject *answer =
        result < 0 ? NULL : output_finish(cut->state, &cut->x, &cut->output);
    cut_release(cut);
    return answer;
}

static int cut_collect(struct cut *cut, const struct arg_names *spec,
                       PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    if (args_collect(spec, args, nargs, kwnames, cut->values) < 0) {
        return -1;
    }
    for (int arg = 0; arg < spec->count; arg++) {
        if (cut->values[arg] == NULL) {
            PyErr_Format(PyExc_TypeError, "%s() missing required argument '%s'",
                         spec->function, cut_names[arg]);
            return -1;
        }
    }
    return 0;
}

/* Through autograd, which calls `shard` or `_gather_at` without recording. */
static PyObject *cut_recorded(const struct cut *cut)
{
    const struct module_names *names = &cut->state->names;
    PyObject *function = torch_function(
        cut->record.call.op == CP_OP_GATHER ? names->gather : names->shard);
    PyObject *answer = NULL;
    /* An int, as torch's own functions want it; what is none is told at the gate. */
    PyObject *dim = args_int(cut->values[CUT_DIM], "dim");
    if (dim == NULL) {
        PyErr_Clear();
        dim = Py_NewRef(cut->values[CUT_DIM]);
    }
    if (function != NULL) {
        answer = PyObject_CallFunctionObjArgs(function, (PyObject *)cut->context,
                                              cut->values[CUT_X], dim, NULL);
        Py_DECREF(function);
    }
    Py_DECREF(dim);
    return answer;
}

static struct cut cut_start(ContextObject *context, enum cp_op op)
{
    struct cut cut;
    memset(&cut, 0, sizeof cut);
    cut.context = context;
    cut.state = type_state_of((PyObject *)context);
    cut.record.call.op = (int32_t)op;
    return cut;
}

static PyObject *cut_method(ContextObject *self, enum cp_op op,
                            const struct arg_names *spec, PyObject *const *args,
                            Py_ssize_t nargs, PyObject *kwnames)
{
    struct cut cut = cut_start(self, op);
    int collected = cut_collect(&cut, spec, args, nargs, kwnames);
    int needs_grad =
        collected == 0 ? torch_needs_grad(cut.state, &cut.values[CUT_X], 1) : 0;
    if (needs_grad > 0 &&
        torch_check_saved(cut.state, cut.values[CUT_X], cut_names[CUT_X], false) < 0) {
        needs_grad = -1;
    }
    if (needs_grad > 0) {
        uint64_t begun = self->begun;
        PyObject *answer = cut_recorded(&cut);
        PyObject *error = answer == NULL ? context_untold(self, begun) : NULL;
        if (error == NULL) {
            return answer;
        }
        error_restore(error);
        needs_grad = -1;
    }
    return cut_call(&cut, needs_grad < 0 ? -1 : collected);
}

PyObject *context_shard(ContextObject *self, PyObject *const *args, Py_ssize_t nargs,
                        PyObject *kwnames)
{
    static const struct arg_names spec = {"shard", cut_names, CUT_ROWS, CUT_ROWS};
    return cut_method(self, CP_OP_SHARD, &spec, args, nargs, kwnames);
}

PyObject *context_gather(ContextObject *self, PyObject *const *args, Py_ssize_t nargs,
                         PyObject *kwnames)
{
    static const struct arg_names spec = {"gather", cut_names, CUT_ROWS, CUT_ROWS};
    return cut_method(self, CP_OP_GATHER, &spec, args, nargs, kwnames);
}

PyObject *context_gather_at(ContextObject *self, PyObject *const *args,
                            Py_ssize_t nargs, PyObject *kwnames)
{
    static const struct arg_names spec = {"gather", cut_names, CUT_ROWS, CUT_ROWS};
    struct cut cut = cut_start(self, CP_OP_GATHER);
    PyObject *whole = cut_call(&cut, cut_collect(&cut, &spec, args, nargs, kwnames));
    return whole == NULL ? NULL : Py_BuildValue("(NL)", whole, (long long)cut.first);
}

PyObject *context_reduce_scatter(ContextObject *self, PyObject *const *args,
                                 Py_ssize_t nargs, PyObject *kwnames)
{
    static const struct arg_names spec = {"_reduce_scatter", cut_names, CUT_COUNT,
                                          CUT_COUNT};
    struct cut cut = cut_start(self, CP_OP_REDUCE_SCATTER);
    return cut_call(&cut, cut_collect(&cut, &spec, args, nargs, kwnames));
}
