/* ContextParallelConfig as C sees it. */
#ifndef CP_PY_PY_CONFIG_H
#define CP_PY_PY_CONFIG_H

#include "exec/context.h"
#include "module.h"

/* field, kind, default, docstring; the last two are keyword-only. The order is that of diffusers. Kinds are in py_config.c. */
#define CONFIG_FIELDS(X)                                                               \
    X(ring_degree, DEGREE, 1, "Ranks in a ring.")                                      \
    X(ulysses_degree, DEGREE, 1, "Ranks in an all-to-all group.")                      \
    X(convert_to_fp32, FLAG, true,                                                     \
      "Running output and LSE in float32 between ring steps.")                         \
    X(rotate_method, ROTATE, CP_ROTATE_AUTO,                                           \
      "How keys and values travel: auto, allgather or alltoall.")                      \
    X(mesh, MESH, NULL,                                                                \
      "A torch DeviceMesh with the dimensions \"ring\" and \"ulysses\", or None.")     \
    X(ulysses_anything, FLAG, false,                                                   \
      "Any sequence length, any head count, along Ulysses.")                           \
    X(ring_anything, FLAG, false, "Any sequence length, along the ring.")              \
    X(timeout, SECONDS, 600.0, "Longest wait for a living peer, in seconds.")          \
    X(unified_anything, FLAG, false,                                                   \
      "Any sequence length and head count on both dimensions.")

#define CONFIG_TYPE_DEGREE int
#define CONFIG_TYPE_FLAG bool
#define CONFIG_TYPE_ROTATE int
#define CONFIG_TYPE_MESH PyObject *
#define CONFIG_TYPE_SECONDS double

typedef struct {
    PyObject_HEAD
#define CONFIG_MEMBER(name, kind, initial, help) CONFIG_TYPE_##kind name;
    CONFIG_FIELDS(CONFIG_MEMBER)
#undef CONFIG_MEMBER
} ConfigObject;

PyTypeObject *config_type_create(PyObject *self);

/* What the C core needs to know of it. */
struct cp_context_config config_to_core(const ConfigObject *config);

#endif
