/* Arrays in: anything that speaks DLPack, read in place. */
#ifndef CP_PY_PY_DLPACK_H
#define CP_PY_PY_DLPACK_H

#include "module.h"
#include "tensor/tensor_dlpack.h"

enum array_source {
    ARRAY_NONE,
    ARRAY_NUMPY,    /* NumPy's C API */
    ARRAY_EXCHANGE, /* DLPack's table of functions on the type */
    ARRAY_CAPSULE,  /* __dlpack__() */
};

/* An imported array. All zero: none. */
struct array {
    struct cp_tensor tensor;
    enum array_source source;
    PyObject *object; /* owned: whose memory it is, and whose type the answer gets */
    const DLPackExchangeAPI *api; /* for ARRAY_EXCHANGE */
    DLManagedTensor *plain;       /* owned, for ARRAY_CAPSULE: one of these two */
    DLManagedTensorVersioned *versioned;
};

/* Any dtype and any device. 0, or -1 with an exception: TypeError for what is no array, the producer's own where it
 * refuses. `name` is the argument's. */
int array_import(struct module_state *state, PyObject *object, const char *name,
                 struct array *out);
/* Calls the producer's deleter, once; accepts all zero, leaves all zero. */
void array_release(struct array *array);

#endif
