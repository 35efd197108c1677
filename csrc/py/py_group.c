/* A mesh is torch's, so cp_attn._groups looks into it. */
#include "py_group.h"

#include <string.h>

/* Of `found`: a tuple of cp_attn._groups.find, or None. */
static int parse(PyObject *found, struct cp_group *out)
{
    unsigned long long communicator = 0, library = 0;
    const char *name = NULL;
    int *settings = out->settings;
    if (found == Py_None) {
        return 0;
    }
    if (!PyArg_ParseTuple(found, "KKsiii:find", &communicator, &library, &name,
                          &settings[0], &settings[1], &settings[2])) {
        return -1;
    }
    if (strlen(name) >= sizeof out->name) {
        return 0; /* it could not be told from another */
    }
    out->communicator = (void *)(uintptr_t)communicator;
    out->library = (const void *)(uintptr_t)library;
    memcpy(out->name, name, strlen(name));
    return 0;
}

int group_offer(ContextObject *context, int ordinal)
{
    PyObject *mesh = ((ConfigObject *)context->config)->mesh;
    struct cp_group group;
    memset(&group, 0, sizeof group);
    if (mesh == NULL || cp_context_is_connected(context->core)) {
        return 0;
    }
    PyObject *module = PyImport_ImportModule("cp_attn._groups");
    PyObject *found = module == NULL
                          ? NULL
                          : PyObject_CallMethod(module, "find", "Oiii", mesh,
                                                context->rank, context->world, ordinal);
    int result = found == NULL ? -1 : parse(found, &group);
    Py_XDECREF(found);
    Py_XDECREF(module);
    if (result == 0) {
        cp_context_set_group(context->core, &group);
    }
    return result;
}
