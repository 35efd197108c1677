/* ContextParallelConfig: a value. Every field is one row of CONFIG_FIELDS; what a kind of field accepts, prints and
 * becomes is one row of `kinds`. */
#include "py_config.h"

#include <limits.h>
#include <math.h>
#include <stddef.h>
#include <string.h>
#include <structmember.h>

#include "plan/plan.h"
#include "py_args.h"

/* How a kind of field comes from Python and goes there. */
struct kind {
    const char *wants; /* for the TypeError */
    bool (*accepts)(PyObject *value);
    /* Writes the field at `place`; only for what `accepts` passed. What is out of range is written as something that
     * check_values refuses. */
    void (*read)(PyObject *value, void *place);
    PyObject *(*show)(const void *place); /* a new reference */
};

static bool is_int(PyObject *value)
{
    PyObject *number = args_int(value, "a field");
    if (number == NULL) {
        PyErr_Clear();
    }
    Py_XDECREF(number);
    return number != NULL;
}

static bool degree_accepts(PyObject *value)
{
    return value == Py_None || is_int(value);
}

static void degree_read(PyObject *value, void *place)
{
    if (value == Py_None) {
        return; /* the default is there already */
    }
    int overflow = 0;
    long degree = PyLong_AsLongAndOverflow(value, &overflow);
    PyErr_Clear(); /* an __index__ that gave a number before and gives none now: -1 */
    if (overflow > 0 || degree > INT_MAX) {
        degree = INT_MAX;
    } else if (overflow < 0 || degree < 0) {
        degree = 0;
    }
    *(int *)place = (int)degree;
}

static PyObject *degree_show(const void *place)
{
    return PyLong_FromLong(*(const int *)place);
}

static bool flag_accepts(PyObject *value)
{
    return PyBool_Check(value);
}

static void flag_read(PyObject *value, void *place)
{
    *(bool *)place = value == Py_True;
}

static PyObject *flag_show(const void *place)
{
    return PyBool_FromLong(*(const bool *)place);
}

static bool rotate_accepts(PyObject *value)
{
    return PyUnicode_Check(value);
}

static void rotate_read(PyObject *value, void *place)
{
    int rotate = 0;
    while (rotate < CP_ROTATES &&
           PyUnicode_CompareWithASCIIString(value, cp_rotate_names[rotate]) != 0) {
        rotate++;
    }
    *(int *)place = rotate;
}

static PyObject *rotate_show(const void *place)
{
    return PyUnicode_FromString(cp_rotate_names[*(const int *)place]);
}

static bool mesh_accepts(PyObject *value)
{
    return value == Py_None || PyObject_HasAttrString(value, "mesh_dim_names");
}

static void mesh_read(PyObject *value, void *place)
{
    *(PyObject **)place = value == Py_None ? NULL : Py_NewRef(value);
}

static PyObject *mesh_show(const void *place)
{
    PyObject *mesh = *(PyObject *const *)place;
    return Py_NewRef(mesh == NULL ? Py_None : mesh);
}

static bool seconds_accepts(PyObject *value)
{
    return PyFloat_Check(value) || is_int(value);
}

static void seconds_read(PyObject *value, void *place)
{
    double seconds = PyFloat_AsDouble(value);
    if (PyErr_Occurred()) {
        PyErr_Clear(); /* an int beyond all doubles */
        seconds = (double)INFINITY;
    }
    *(double *)place = seconds;
}

static PyObject *seconds_show(const void *place)
{
    return PyFloat_FromDouble(*(const double *)place);
}

enum { KIND_DEGREE, KIND_FLAG, KIND_ROTATE, KIND_MESH, KIND_SECONDS };

static const struct kind kinds[] = {
    [KIND_DEGREE] = {"an int or None", degree_accepts, degree_read, degree_show},
    [KIND_FLAG] = {"a bool", flag_accepts, flag_read, flag_show},
    [KIND_ROTATE] = {"a str", rotate_accepts, rotate_read, rotate_show},
    [KIND_MESH] = {"a torch DeviceMesh or None", mesh_accepts, mesh_read, mesh_show},
    [KIND_SECONDS] = {"a number of seconds", seconds_accepts, seconds_read,
                      seconds_show},
};

static const struct {
    const char *name;
    const struct kind *kind;
    size_t offset;
} fields[] = {
#define CONFIG_ROW(name, kind, initial, help)                                          \
    {#name, &kinds[KIND_##kind], offsetof(ConfigObject, name)},
    CONFIG_FIELDS(CONFIG_ROW)
#undef CONFIG_ROW
};
enum { FIELD_COUNT = sizeof fields / sizeof fields[0] };

enum {
#define CONFIG_INDEX(name, kind, initial, help) FIELD_##name,
    CONFIG_FIELDS(CONFIG_INDEX)
#undef CONFIG_INDEX
};

static PyObject *show_field(const ConfigObject *self, size_t field)
{
    return fields[field].kind->show((const char *)self + fields[field].offset);
}

/* --- construction --- */

static int check_types(PyObject *const *given)
{
    for (size_t field = 0; field < FIELD_COUNT; field++) {
        if (given[field] != NULL && !fields[field].kind->accepts(given[field])) {
            PyErr_Format(PyExc_TypeError, "%s must be %s, not %R of type %s",
                         fields[field].name, fields[field].kind->wants, given[field],
                         Py_TYPE(given[field])->tp_name);
            return -1;
        }
    }
    return 0;
}

static int check_degrees(const ConfigObject *self, PyObject *const *given)
{
    const int degrees[] = {self->ring_degree, self->ulysses_degree};
    for (int field = FIELD_ring_degree; field <= FIELD_ulysses_degree; field++) {
        if (degrees[field] < 1 || degrees[field] > CP_MAX_WORLD) {
            PyErr_Format(PyExc_ValueError, "%s=%S; allowed: 1 to %d",
                         fields[field].name, given[field], CP_MAX_WORLD);
            return -1;
        }
    }
    if (self->ring_degree == 1 && self->ulysses_degree == 1) {
        PyErr_SetString(
            PyExc_ValueError,
            "ring_degree and ulysses_degree are both 1, so there is nothing to share; "
            "at least one must be greater than 1");
        return -1;
    }
    return 0;
}

/* A flag that needs the one degree above 1 and the other one equal to 1. */
static int check_flag(bool flag, const char *name, const char *own, int own_degree,
                      const char *other, int other_degree)
{
    if (flag && own_degree == 1) {
        PyErr_Format(PyExc_ValueError, "%s=True needs %s greater than 1, got %s=%d",
                     name, own, own, own_degree);
        return -1;
    }
    if (flag && other_degree > 1) {
        PyErr_Format(PyExc_ValueError,
                     "%s=True needs %s=1, got %s=%d; on two dimensions use "
                     "unified_anything=True",
                     name, other, other, other_degree);
        return -1;
    }
    return 0;
}

/* The order is the contract's. */
static int check_values(const ConfigObject *self, PyObject *const *given)
{
    if (check_degrees(self, given) < 0) {
        return -1;
    }
    if (self->rotate_method >= CP_ROTATES) {
        PyErr_Format(PyExc_ValueError,
                     "rotate_method=%R; allowed: 'auto', 'allgather', 'alltoall'",
                     given[FIELD_rotate_method]);
        return -1;
    }
    if (check_flag(self->ulysses_anything, "ulysses_anything", "ulysses_degree",
                   self->ulysses_degree, "ring_degree", self->ring_degree) < 0 ||
        check_flag(self->ring_anything, "ring_anything", "ring_degree",
                   self->ring_degree, "ulysses_degree", self->ulysses_degree) < 0) {
        return -1;
    }
    if (self->unified_anything &&
        (self->ring_degree == 1 || self->ulysses_degree == 1)) {
        PyErr_Format(PyExc_ValueError,
                     "unified_anything=True needs ring_degree and ulysses_degree "
                     "greater than 1, got ring_degree=%d, "
                     "ulysses_degree=%d; on one dimension use ring_anything=True or "
                     "ulysses_anything=True",
                     self->ring_degree, self->ulysses_degree);
        return -1;
    }
    if (!isfinite(self->timeout) || self->timeout <= 0.0) {
        PyErr_Format(PyExc_ValueError,
                     "timeout=%S; allowed: a finite number of seconds greater than 0",
                     given[FIELD_timeout]);
        return -1;
    }
    return 0;
}

static PyObject *config_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
#define CONFIG_KEYWORD(name, kind, initial, help) #name,
    static char *keywords[] = {CONFIG_FIELDS(CONFIG_KEYWORD) NULL};
#undef CONFIG_KEYWORD
    _Static_assert(FIELD_COUNT == 9, "the format below names as many");
    PyObject *given[FIELD_COUNT] = {NULL};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|OOOOOOO$OO:ContextParallelConfig",
                                     keywords, &given[0], &given[1], &given[2],
                                     &given[3], &given[4], &given[5], &given[6],
                                     &given[7], &given[8]) ||
        check_types(given) < 0) {
        return NULL;
    }
    ConfigObject *self = (ConfigObject *)type->tp_alloc(type, 0);
    if (self == NULL) {
        return NULL;
    }
#define CONFIG_DEFAULT(name, kind, initial, help) self->name = initial;
    CONFIG_FIELDS(CONFIG_DEFAULT)
#undef CONFIG_DEFAULT
    for (size_t field = 0; field < FIELD_COUNT; field++) {
        if (given[field] != NULL) {
            fields[field].kind->read(given[field], (char *)self + fields[field].offset);
        }
    }
    if (check_values(self, given) < 0) {
        Py_DECREF(self);
        return NULL;
    }
    return (PyObject *)self;
}

static int config_traverse(ConfigObject *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(self->mesh);
    return 0;
}

static int config_clear(ConfigObject *self)
{
    Py_CLEAR(self->mesh);
    return 0;
}

static void config_dealloc(ConfigObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    (void)config_clear(self);
    type->tp_free((PyObject *)self);
    Py_DECREF(type);
}

/* --- a value: compared, hashed, printed, pickled --- */

/* All fields as one tuple; a mesh counts by its identity. */
static PyObject *config_key(const ConfigObject *self)
{
    PyObject *key = PyTuple_New(FIELD_COUNT);
    for (size_t field = 0; key != NULL && field < FIELD_COUNT; field++) {
        bool is_mesh = field == FIELD_mesh && self->mesh != NULL;
        PyObject *value =
            is_mesh ? PyLong_FromVoidPtr(self->mesh) : show_field(self, field);
        if (value == NULL) {
            Py_CLEAR(key);
        } else {
            PyTuple_SET_ITEM(key, (Py_ssize_t)field, value);
        }
    }
    return key;
}

static Py_hash_t config_hash(ConfigObject *self)
{
    PyObject *key = config_key(self);
    if (key == NULL) {
        return -1;
    }
    Py_hash_t hash = PyObject_Hash(key);
    Py_DECREF(key);
    return hash;
}

static PyObject *config_richcompare(PyObject *self, PyObject *other, int op)
{
    if ((op != Py_EQ && op != Py_NE) || Py_TYPE(self) != Py_TYPE(other)) {
        Py_RETURN_NOTIMPLEMENTED;
    }
    PyObject *a = config_key((ConfigObject *)self);
    PyObject *b = config_key((ConfigObject *)other);
    PyObject *result = a == NULL || b == NULL ? NULL : PyObject_RichCompare(a, b, op);
    Py_XDECREF(a);
    Py_XDECREF(b);
    return result;
}

/* {field: value}. */
static PyObject *config_dict(const ConfigObject *self)
{
    PyObject *dict = PyDict_New();
    for (size_t field = 0; dict != NULL && field < FIELD_COUNT; field++) {
        PyObject *value = show_field(self, field);
        if (value == NULL ||
            PyDict_SetItemString(dict, fields[field].name, value) < 0) {
            Py_CLEAR(dict);
        }
        Py_XDECREF(value);
    }
    return dict;
}

static PyObject *config_repr(ConfigObject *self)
{
    const char *dot = strrchr(Py_TYPE(self)->tp_name, '.');
    PyObject *text =
        PyUnicode_FromFormat("%s(", dot == NULL ? Py_TYPE(self)->tp_name : dot + 1);
    for (size_t field = 0; text != NULL && field < FIELD_COUNT; field++) {
        PyObject *value = show_field(self, field);
        PyObject *longer =
            value == NULL
                ? NULL
                : PyUnicode_FromFormat("%U%s%s=%R", text, field == 0 ? "" : ", ",
                                       fields[field].name, value);
        Py_XDECREF(value);
        Py_SETREF(text, longer);
    }
    if (text != NULL) {
        PyUnicode_AppendAndDel(&text, PyUnicode_FromString(")"));
    }
    return text;
}

PyDoc_STRVAR(config_reduce_doc,
             "__reduce__($self, /)\n"
             "--\n\n"
             "Pickle support. A config with a mesh cannot be pickled: TypeError.");

static PyObject *config_reduce(ConfigObject *self, PyObject *Py_UNUSED(unused))
{
    if (self->mesh != NULL) {
        PyErr_SetString(PyExc_TypeError, "a ContextParallelConfig with a mesh cannot "
                                         "be pickled: a mesh belongs to its "
                                         "process");
        return NULL;
    }
    PyObject *result = NULL;
    PyObject *rebuild = NULL;
    PyObject *extra = NULL;
    PyObject *kwargs = config_dict(self);
    PyObject *copyreg = kwargs == NULL ? NULL : PyImport_ImportModule("copyreg");
    if (copyreg != NULL) {
        rebuild = PyObject_GetAttrString(copyreg, "__newobj_ex__");
    }
    if (rebuild != NULL) {
        /* What a subclass may have put into its instances. */
        extra = PyObject_GetAttrString((PyObject *)self, "__dict__");
        if (extra == NULL) {
            PyErr_Clear();
            extra = Py_NewRef(Py_None);
        }
        result = Py_BuildValue("O(O()O)O", rebuild, (PyObject *)Py_TYPE(self), kwargs,
                               extra);
    }
    Py_XDECREF(extra);
    Py_XDECREF(rebuild);
    Py_XDECREF(copyreg);
    Py_XDECREF(kwargs);
    return result;
}

PyDoc_STRVAR(config_copy_doc, "__copy__($self, /)\n"
                              "--\n\n"
                              "Return the config itself: it cannot change.");
PyDoc_STRVAR(config_deepcopy_doc, "__deepcopy__($self, memo, /)\n"
                                  "--\n\n"
                                  "Return the config itself: it cannot change.");

static PyObject *config_copy(PyObject *self, PyObject *Py_UNUSED(memo))
{
    return Py_NewRef(self);
}

/* --- attributes --- */

static PyObject *config_get_field(ConfigObject *self, void *closure)
{
    return show_field(self, (size_t)closure);
}

static PyObject *config_get_mesh_shape(ConfigObject *self, void *Py_UNUSED(closure))
{
    return Py_BuildValue("(ii)", self->ring_degree, self->ulysses_degree);
}

static PyObject *config_get_mesh_dim_names(ConfigObject *Py_UNUSED(self),
                                           void *Py_UNUSED(closure))
{
    return Py_BuildValue("(ss)", "ring", "ulysses");
}

static PyObject *config_get_tensor_parallel_config(ConfigObject *Py_UNUSED(self),
                                                   void *Py_UNUSED(closure))
{
    Py_RETURN_NONE;
}

static PyGetSetDef config_getset[] = {
#define CONFIG_GETTER(name, kind, initial, help)                                       \
    {#name, (getter)config_get_field, NULL, help, (void *)FIELD_##name},
    CONFIG_FIELDS(CONFIG_GETTER)
#undef CONFIG_GETTER
        {"mesh_shape", (getter)config_get_mesh_shape, NULL,
         "(ring_degree, ulysses_degree).", NULL},
    {"mesh_dim_names", (getter)config_get_mesh_dim_names, NULL,
     "(\"ring\", \"ulysses\").", NULL},
    {"tensor_parallel_config", (getter)config_get_tensor_parallel_config, NULL,
     "None: diffusers' loader asks for it.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMethodDef config_methods[] = {
    {"__reduce__", (PyCFunction)(void (*)(void))config_reduce, METH_NOARGS,
     config_reduce_doc},
    {"__copy__", config_copy, METH_NOARGS, config_copy_doc},
    {"__deepcopy__", config_copy, METH_O, config_deepcopy_doc},
    {NULL, NULL, 0, NULL},
};

PyDoc_STRVAR(
    config_doc,
    "ContextParallelConfig(ring_degree=None, ulysses_degree=None,\n"
    "                      convert_to_fp32=True, rotate_method='auto', mesh=None,\n"
    "                      ulysses_anything=False, ring_anything=False, *,\n"
    "                      timeout=600.0, unified_anything=False)\n"
    "--\n\n"
    "How a sequence is shared among ranks. Cannot change; equal configs are\n"
    "interchangeable.\n\n"
    "Parameters\n"
    "----------\n"
    "ring_degree, ulysses_degree : int or None\n"
    "    Ranks in a ring and in an all-to-all group, R and U; None is 1. R * U\n"
    "    ranks work together.\n"
    "convert_to_fp32 : bool\n"
    "    Running output and LSE in float32 between ring steps (float64 stays\n"
    "    float64). The kernels here always do.\n"
    "rotate_method : {'auto', 'allgather', 'alltoall'}\n"
    "    How keys and values travel in the ring: all at once, or block by block.\n"
    "    'auto': block by block; on GPUs of one host whose speeds are known all at\n"
    "    once where a model of the call finds that faster.\n"
    "mesh : torch DeviceMesh or None\n"
    "    Its dimensions \"ring\" and \"ulysses\" are looked up by name; others are\n"
    "    allowed.\n"
    "ulysses_anything : bool\n"
    "    Any sequence length and head count; needs U > 1 and R = 1.\n"
    "ring_anything : bool\n"
    "    Any sequence length; needs R > 1 and U = 1.\n"
    "timeout : float\n"
    "    Longest wait for a living peer, in seconds. A dead one is noticed at once.\n"
    "unified_anything : bool\n"
    "    Any sequence length and head count on both dimensions; needs R > 1 and U >\n"
    "    1.\n\n"
    "Raises\n"
    "------\n"
    "TypeError\n"
    "    A field of the wrong type.\n"
    "ValueError\n"
    "    A degree below 1, both degrees 1, an unknown rotate_method, a flag that\n"
    "    does not go with the degrees, a timeout that is not finite and positive.");

static PyType_Slot config_slots[] = {
    SLOT_DOC(config_doc),
    {Py_tp_new, (void *)config_new},
    {Py_tp_dealloc, (void *)config_dealloc},
    {Py_tp_traverse, (void *)config_traverse},
    {Py_tp_clear, (void *)config_clear},
    {Py_tp_hash, (void *)config_hash},
    {Py_tp_richcompare, (void *)config_richcompare},
    {Py_tp_repr, (void *)config_repr},
    {Py_tp_methods, config_methods},
    {Py_tp_getset, config_getset},
    {0, NULL},
};

static PyType_Spec config_spec = {
    .name = "cp_attn.ContextParallelConfig",
    .basicsize = sizeof(ConfigObject),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC |
             Py_TPFLAGS_IMMUTABLETYPE,
    .slots = config_slots,
};

PyTypeObject *config_type_create(PyObject *self)
{
    return (PyTypeObject *)PyType_FromModuleAndSpec(self, &config_spec, NULL);
}

struct cp_context_config config_to_core(const ConfigObject *config)
{
    bool is_anything =
        config->ring_anything || config->ulysses_anything || config->unified_anything;
    return (struct cp_context_config){
        .ring_degree = config->ring_degree,
        .ulysses_degree = config->ulysses_degree,
        .variant = is_anything ? CP_ANYTHING : CP_EVEN,
        .rotate = config->rotate_method,
        .timeout = config->timeout,
    };
}
