/* A rank's end of a group. The GIL is released around the core's join, begin and
 * execute, which touch no object. */
#include "py_context.h"

#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <structmember.h>

#include "base/hash.h"
#include "control/meet_hosts.h"
#include "py_args.h"
#include "py_cut.h"

/* --- without the GIL --- */

/* Called by the core at least ten times a second while it waits. */
static enum cp_code run_signal_handlers(void *arg)
{
    ContextObject *self = arg;
    PyEval_RestoreThread(self->thread);
    int result = PyErr_CheckSignals();
    enum cp_code code = CP_OK;
    if (result < 0) {
        PyObject *error = error_keep();
        code =
            cp_fail_rank(CP_ERR_INTERRUPTED, self->rank, "rank %d was interrupted (%s)",
                         self->rank, Py_TYPE(error)->tp_name);
        error_restore(error);
    }
    self->thread = PyEval_SaveThread();
    return code;
}

static enum cp_code join(ContextObject *self, const struct module_state *state,
                         const char *key, const struct cp_root *root, PyObject *error)
{
    struct cp_status found;
    struct cp_join_args args = {
        .key = key,
        .root = root,
        .rank = self->rank,
        .world = self->world,
        .threads = self->threads,
        .isa = getenv("CP_ATTN_ISA"),
        .head_chunks = getenv("CP_ATTN_HEAD_CHUNKS"),
        .trace = getenv("CP_ATTN_TRACE"),
        .debug = getenv("CP_ATTN_DEBUG"),
        .interrupt = run_signal_handlers,
        .interrupt_arg = self,
    };
    if (error != NULL) {
        error_to_status(state, error, self->rank, &found);
        args.error = &found;
    } else {
        args.config = config_to_core((ConfigObject *)self->config);
    }
    self->thread = PyEval_SaveThread();
    enum cp_code code = cp_context_join(&args, &self->core);
    PyEval_RestoreThread(self->thread);
    return code;
}

/* How an exchange ended to which this rank brought `error`, taken, or NULL: 0, or -1 with that very object, or with what
 * another rank brought. */
static int settle(ContextObject *self, const struct module_state *state,
                  enum cp_code code, PyObject *error)
{
    if (code == CP_OK && error == NULL) {
        return 0;
    }
    if (code == CP_OK) {
        cp_context_abandon(self->core); /* the core let an error pass */
    }
    bool is_own = code == CP_OK || cp_context_error_is_own(self->core);
    if (error != NULL && is_own && !PyErr_Occurred()) {
        error_restore(error);
        return -1;
    }
    Py_XDECREF(error);
    py_raise(state, code);
    return -1;
}

int context_begin(ContextObject *self, const struct module_state *state,
                  struct cp_record *record, PyObject *error,
                  const struct cp_plan **plan)
{
    self->begun++;
    if (error != NULL) {
        error_to_status(state, error, self->rank, &record->status);
    }
    self->thread = PyEval_SaveThread();
    enum cp_code code = cp_context_begin(self->core, record, plan);
    PyEval_RestoreThread(self->thread);
    return settle(self, state, code, error);
}

PyObject *context_untold(const ContextObject *self, uint64_t begun)
{
    bool is_untold = self->begun == begun && PyErr_Occurred() != NULL &&
                     PyErr_ExceptionMatches(PyExc_Exception);
    return is_untold ? error_take() : NULL;
}

int context_confirm(ContextObject *self, const struct module_state *state,
                    PyObject *error)
{
    struct cp_status found;
    if (error != NULL) {
        error_to_status(state, error, self->rank, &found);
    }
    self->thread = PyEval_SaveThread();
    enum cp_code code = cp_context_confirm(self->core, error != NULL ? &found : NULL);
    PyEval_RestoreThread(self->thread);
    return settle(self, state, code, error);
}

int context_execute(ContextObject *self, const struct module_state *state,
                    const struct cp_view *tensors)
{
    self->thread = PyEval_SaveThread();
    enum cp_code code = cp_context_execute(self->core, tensors);
    PyEval_RestoreThread(self->thread);
    return py_check(state, code);
}

/* --- one call at a time --- */

int context_enter(ContextObject *self)
{
    /* The GIL is held: close, which enters too, does not free the core in between. */
    if (self->core == NULL) {
        PyErr_SetString(PyExc_RuntimeError, "the context is closed");
        return -1;
    }
    return py_check(type_state_of((PyObject *)self), cp_context_enter(self->core));
}

void context_leave(ContextObject *self)
{
    cp_context_leave(self->core);
}

void context_abandon(ContextObject *self)
{
    struct cp_status status;
    PyObject *error = error_keep();
    error_to_status(type_state_of((PyObject *)self), error, self->rank, &status);
    (void)cp_fail_as(&status);
    cp_context_abandon(self->core);
    error_restore(error);
}

/* --- the type --- */

/* Meets the others. With an error of its own a rank goes there to tell it, and raises
 * it unless a lower rank has one too. */
static int context_join(ContextObject *self, const struct module_state *state,
                        const char *key, const struct cp_root *root, PyObject *error)
{
    enum cp_code code = join(self, state, key, root, error);
    if (code == CP_OK) {
        return 0;
    }
    bool is_own = error != NULL &&
                  (code == CP_ERR_TIMEOUT || cp_last_error()->rank == self->rank);
    if (is_own && code != CP_ERR_INTERRUPTED) {
        error_restore(Py_NewRef(error));
        return -1;
    }
    return py_check(state, code);
}

/* (host, port, listener) where the ranks are on several hosts, or None: `is_given`. */
static int parse_root(PyObject *object, struct cp_root *root, bool *is_given)
{
    *is_given = object != Py_None;
    if (!*is_given) {
        return 0;
    }
    if (!PyTuple_Check(object)) {
        PyErr_Format(PyExc_TypeError,
                     "root must be (host, port, listener) or None, not %s",
                     Py_TYPE(object)->tp_name);
        return -1;
    }
    return PyArg_ParseTuple(object, "ssi;root must be (host, port, listener)",
                            &root->host, &root->port, &root->listener)
               ? 0
               : -1;
}

static PyObject *context_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *keywords[] = {"config", "rank", "world",   "key",
                               "error",  "root", "threads", NULL};
    const struct module_state *state = PyType_GetModuleState(type);
    PyObject *config = NULL;
    PyObject *error = Py_None;
    PyObject *where = Py_None;
    const char *key = NULL;
    int rank = 0;
    int world = 0;
    int threads = 1;
    struct cp_root root;
    bool has_root = false;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O|$iisOOi:Context", keywords,
                                     &config, &rank, &world, &key, &error, &where,
                                     &threads) ||
        parse_root(where, &root, &has_root) < 0) {
        return NULL;
    }
    if (key == NULL) {
        PyErr_SetString(PyExc_TypeError, "Context() needs rank, world and key");
        return NULL;
    }
    bool has_error = PyExceptionInstance_Check(error);
    const ConfigObject *fields = (ConfigObject *)config;
    if (!has_error && !PyObject_TypeCheck(config, state->config_type)) {
        PyErr_Format(PyExc_TypeError, "config must be a ContextParallelConfig, not %s",
                     Py_TYPE(config)->tp_name);
        return NULL;
    }
    if (rank < 0 || rank >= world ||
        (!has_error && (long)fields->ring_degree * fields->ulysses_degree != world)) {
        PyErr_Format(PyExc_ValueError, "rank=%d of world=%d does not fit the config %R",
                     rank, world, config);
        return NULL;
    }
    if (threads < 1 || threads > CP_POOL_MOST) {
        PyErr_Format(PyExc_ValueError, "threads=%d; allowed: 1 to %d", threads,
                     CP_POOL_MOST);
        return NULL;
    }
    ContextObject *self = (ContextObject *)type->tp_alloc(type, 0);
    if (self == NULL) {
        return NULL;
    }
    self->config = Py_NewRef(config);
    self->rank = rank;
    self->world = world;
    self->threads = threads;
    if (context_join(self, state, key, has_root ? &root : NULL,
                     has_error ? error : NULL) < 0) {
        Py_DECREF(self);
        return NULL;
    }
    return (PyObject *)self;
}

static int context_traverse(ContextObject *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(self->config);
    return 0;
}

static int context_clear(ContextObject *self)
{
    Py_CLEAR(self->config);
    return 0;
}

static void context_dealloc(ContextObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    if (self->weakrefs != NULL) {
        PyObject_ClearWeakRefs((PyObject *)self);
    }
    cp_context_destroy(&self->core);
    (void)context_clear(self);
    type->tp_free((PyObject *)self);
    Py_DECREF(type);
}

static PyObject *context_repr(ContextObject *self)
{
    return PyUnicode_FromFormat("<cp_attn.Context rank %d of %d, %s>", self->rank,
                                self->world, self->core == NULL ? "closed" : "open");
}

PyDoc_STRVAR(
    context_close_doc,
    "close($self, /)\n"
    "--\n\n"
    "Release everything. Waits for nobody; closing twice is allowed, and so is\n"
    "closing a broken context.\n\n"
    "All ranks should close: a rank that still calls afterwards gets a CommError.\n\n"
    "Raises\n"
    "------\n"
    "RuntimeError\n"
    "    Another thread is in a call.");

static PyObject *context_close(ContextObject *self, PyObject *Py_UNUSED(unused))
{
    if (self->core == NULL) {
        Py_RETURN_NONE;
    }
    if (context_enter(self) < 0) {
        return NULL;
    }
    cp_context_destroy(&self->core);
    Py_RETURN_NONE;
}

PyDoc_STRVAR(context_enter_doc, "__enter__($self, /)\n"
                                "--\n\n"
                                "Return the context.");

static PyObject *context_enter_block(ContextObject *self, PyObject *Py_UNUSED(unused))
{
    return Py_NewRef((PyObject *)self);
}

PyDoc_STRVAR(context_exit_doc, "__exit__($self, /, *exception)\n"
                               "--\n\n"
                               "Close the context.");

static PyObject *context_exit_block(ContextObject *self, PyObject *Py_UNUSED(exception))
{
    return context_close(self, NULL);
}

PyDoc_STRVAR(context_reduce_doc,
             "__reduce__($self, /)\n"
             "--\n\n"
             "Raise a TypeError: a context can be neither copied nor pickled.");

static PyObject *context_reduce(ContextObject *Py_UNUSED(self),
                                PyObject *Py_UNUSED(unused))
{
    PyErr_SetString(
        PyExc_TypeError,
        "a Context can be neither copied nor pickled: it is this process's place among "
        "the ranks. Copy or save a model before it is enabled, or after "
        "cp_attn.disable_parallelism(model); make a new context in each process with "
        "cp_attn.init(config)");
    return NULL;
}

PyDoc_STRVAR(
    context_agree_doc,
    "agree($self, /, error=None, text='')\n"
    "--\n\n"
    "Find out together whether any rank has an error. All ranks must call.\n\n"
    "Parameters\n"
    "----------\n"
    "error : BaseException or None\n"
    "    What this rank found. If any rank brings one, all raise: the rank itself\n"
    "    this very object, the others one of the same kind that names the rank.\n"
    "text : str\n"
    "    Something that must be equal on all ranks.\n\n"
    "Raises\n"
    "------\n"
    "ValueError\n"
    "    The texts differ.\n"
    "TypeError\n"
    "    `error` is no exception, `text` no string.");

enum { AGREE_ERROR, AGREE_TEXT, AGREE_COUNT };
static const char *const agree_names[AGREE_COUNT] = {"error", "text"};

static int agree_parse(PyObject *const *values, struct cp_record *record)
{
    PyObject *error = values[AGREE_ERROR];
    PyObject *text = values[AGREE_TEXT];
    if (error != NULL && error != Py_None && !PyExceptionInstance_Check(error)) {
        PyErr_Format(PyExc_TypeError, "error must be an exception or None, not %s",
                     Py_TYPE(error)->tp_name);
        return -1;
    }
    if (text != NULL) {
        Py_ssize_t bytes = 0;
        const char *words =
            PyUnicode_Check(text) ? PyUnicode_AsUTF8AndSize(text, &bytes) : NULL;
        if (words == NULL) {
            if (!PyErr_Occurred()) {
                PyErr_Format(PyExc_TypeError, "text must be a str, not %s",
                             Py_TYPE(text)->tp_name);
            }
            return -1;
        }
        /* Texts are compared across ranks by this number; 0: no text. */
        record->call.check =
            bytes == 0 ? 0
                       : cp_hash_not_zero(cp_hash(CP_HASH_START, words, (size_t)bytes));
    }
    return 0;
}

static PyObject *context_agree(ContextObject *self, PyObject *const *args,
                               Py_ssize_t nargs, PyObject *kwnames)
{
    static const struct arg_names spec = {"agree", agree_names, AGREE_COUNT,
                                          AGREE_COUNT};
    PyObject *values[AGREE_COUNT] = {NULL};
    struct cp_record record;
    memset(&record, 0, sizeof record);
    record.call.op = CP_OP_AGREE;
    if (context_enter(self) < 0) {
        return NULL;
    }
    const struct module_state *state = type_state_of((PyObject *)self);
    PyObject *error = NULL;
    if (py_check(state, cp_context_describe(self->core, NULL, &record)) < 0 ||
        args_collect(&spec, args, nargs, kwnames, values) < 0 ||
        agree_parse(values, &record) < 0) {
        error = error_keep();
    } else if (values[AGREE_ERROR] != NULL && values[AGREE_ERROR] != Py_None) {
        error = Py_NewRef(values[AGREE_ERROR]);
    }
    int result = context_begin(self, state, &record, error, NULL);
    context_leave(self);
    if (result < 0) {
        return NULL;
    }
    Py_RETURN_NONE;
}

PyDoc_STRVAR(
    context_memory_doc,
    "_memory($self, /)\n"
    "--\n\n"
    "Return (workspace, window): the bytes that this rank holds for its calls.");

static PyObject *context_memory(ContextObject *self, PyObject *Py_UNUSED(ignored))
{
    if (context_enter(self) < 0) {
        return NULL;
    }
    struct cp_context_memory memory = cp_context_memory(self->core);
    context_leave(self);
    return Py_BuildValue("(nn)", (Py_ssize_t)memory.workspace_bytes,
                         (Py_ssize_t)memory.window_bytes);
}

PyDoc_STRVAR(context_mark_compiled_doc, "_mark_compiled($self, /)\n"
                                        "--\n\n"
                                        "Take what stays from the device from now on, "
                                        "not from torch: while torch warms up\n"
                                        "compiled code, it allocates from a pool that "
                                        "only the code's outputs may stay in.");

static PyObject *context_mark_compiled(ContextObject *self,
                                       PyObject *Py_UNUSED(ignored))
{
    self->is_compiled = true;
    Py_RETURN_NONE;
}

/* --- attributes --- */

static PyObject *context_get_rank(ContextObject *self, void *Py_UNUSED(closure))
{
    return PyLong_FromLong(self->rank);
}

static PyObject *context_get_world_size(ContextObject *self, void *Py_UNUSED(closure))
{
    return PyLong_FromLong(self->world);
}

static PyObject *context_get_ring_rank(ContextObject *self, void *Py_UNUSED(closure))
{
    return PyLong_FromLong(self->rank / ((ConfigObject *)self->config)->ulysses_degree);
}

static PyObject *context_get_ulysses_rank(ContextObject *self, void *Py_UNUSED(closure))
{
    return PyLong_FromLong(self->rank % ((ConfigObject *)self->config)->ulysses_degree);
}

static PyObject *context_get_config(ContextObject *self, void *Py_UNUSED(closure))
{
    return Py_NewRef(self->config);
}

static PyObject *context_get_threads(ContextObject *self, void *Py_UNUSED(closure))
{
    return PyLong_FromLong(self->threads);
}

static PyObject *context_get_closed(ContextObject *self, void *Py_UNUSED(closure))
{
    return PyBool_FromLong(self->core == NULL);
}

static PyGetSetDef context_getset[] = {
    {"threads", (getter)context_get_threads, NULL,
     "Threads that calls on the host compute with, the caller's with them.", NULL},
    {"rank", (getter)context_get_rank, NULL,
     "This rank's number in the region: ring_rank * U + ulysses_rank.", NULL},
    {"world_size", (getter)context_get_world_size, NULL, "Ranks in the region, R * U.",
     NULL},
    {"ring_rank", (getter)context_get_ring_rank, NULL, "Place in the ring.", NULL},
    {"ulysses_rank", (getter)context_get_ulysses_rank, NULL,
     "Place in the all-to-all group.", NULL},
    {"config", (getter)context_get_config, NULL,
     "The ContextParallelConfig that it was made for.", NULL},
    {"closed", (getter)context_get_closed, NULL, "True after close().", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMemberDef context_members[] = {
    {"__weaklistoffset__", T_PYSSIZET, offsetof(ContextObject, weakrefs), READONLY,
     NULL},
    {NULL, 0, 0, 0, NULL},
};

#define FASTCALL(function)                                                             \
    (PyCFunction)(void (*)(void)) function, METH_FASTCALL | METH_KEYWORDS

static PyMethodDef context_methods[] = {
    {"shard", FASTCALL(context_shard), context_shard_doc},
    {"gather", FASTCALL(context_gather), context_gather_doc},
    {"_gather_at", FASTCALL(context_gather_at), context_gather_at_doc},
    {"_reduce_scatter", FASTCALL(context_reduce_scatter), context_reduce_scatter_doc},
    {"_memory", (PyCFunction)context_memory, METH_NOARGS, context_memory_doc},
    {"_mark_compiled", (PyCFunction)context_mark_compiled, METH_NOARGS,
     context_mark_compiled_doc},
    {"agree", FASTCALL(context_agree), context_agree_doc},
    {"close", (PyCFunction)(void (*)(void))context_close, METH_NOARGS,
     context_close_doc},
    {"__reduce__", (PyCFunction)(void (*)(void))context_reduce, METH_NOARGS,
     context_reduce_doc},
    {"__enter__", (PyCFunction)(void (*)(void))context_enter_block, METH_NOARGS,
     context_enter_doc},
    {"__exit__", (PyCFunction)(void (*)(void))context_exit_block, METH_VARARGS,
     context_exit_doc},
    {NULL, NULL, 0, NULL},
};

PyDoc_STRVAR(
    context_doc,
    "Context(config, *, rank, world, key, error=None, root=None, threads=1)\n"
    "--\n\n"
    "One rank's end of a group of ranks that compute together; made by\n"
    "cp_attn.init(config).\n\n"
    "Waits at least 60 s until all ranks that call with the same key are there. A\n"
    "context manager; serves one thread at a time.\n\n"
    "Parameters\n"
    "----------\n"
    "config : ContextParallelConfig\n"
    "rank, world : int\n"
    "    This rank's number, and how many there are: ring_degree * ulysses_degree.\n"
    "key : str\n"
    "    Names the job, the members and which of their contexts this is; equal on\n"
    "    all ranks.\n"
    "error : BaseException or None\n"
    "    What this rank has found wrong already; raised on all ranks.\n"
    "root : tuple or None\n"
    "    Where ranks of several hosts meet: rank 0's host as a number, its port as a\n"
    "    text, and on rank 0 the descriptor of a socket that listens there, else -1.\n"
    "    None: all ranks are on this host.\n"
    "threads : int\n"
    "    What calls on the host compute with, the caller's thread with them; each\n"
    "    rank has its own number.\n\n"
    "Raises\n"
    "------\n"
    "CommTimeout\n"
    "    A rank did not appear.\n"
    "ValueError\n"
    "    The ranks came with different configs, or CP_ATTN_ISA, CP_ATTN_HEAD_CHUNKS,\n"
    "    CP_ATTN_DEBUG or CP_ATTN_TRACE has a value that cannot be used.");

static PyType_Slot context_slots[] = {
    SLOT_DOC(context_doc),
    {Py_tp_new, (void *)context_new},
    {Py_tp_dealloc, (void *)context_dealloc},
    {Py_tp_traverse, (void *)context_traverse},
    {Py_tp_clear, (void *)context_clear},
    {Py_tp_repr, (void *)context_repr},
    {Py_tp_methods, context_methods},
    {Py_tp_getset, context_getset},
    {Py_tp_members, context_members},
    {0, NULL},
};

static PyType_Spec context_spec = {
    .name = "cp_attn.Context",
    .basicsize = sizeof(ContextObject),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = context_slots,
};

PyTypeObject *context_type_create(PyObject *self)
{
    return (PyTypeObject *)PyType_FromModuleAndSpec(self, &context_spec, NULL);
}
