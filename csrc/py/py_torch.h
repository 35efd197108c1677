/* What must be known of torch: its exchange of tensors checks nothing, so it is checked here. Torch is never
 * imported, only recognised once somebody else has imported it. */
#ifndef CP_PY_PY_TORCH_H
#define CP_PY_PY_TORCH_H

#include "module.h"

/* 1 for a torch tensor, 0 for anything else, -1 with an exception. */
int torch_is_tensor(struct module_state *state, PyObject *object);

/* Refuses tensors whose memory is not theirs to read: fake, meta, distributed and other wrappers. */
int torch_check(const struct module_state *state, PyObject *tensor, const char *name);

/* A new reference to a tensor whose memory holds what it says: `tensor`, or a copy of it where its negative or
 * conjugate bit was set. */
PyObject *torch_resolve(const struct module_state *state, PyObject *tensor,
                        bool is_complex);

/* 1 if gradients are being recorded and a tensor among `objects` (NULL allowed) asks for them, 0, or -1 with an
 * exception. */
int torch_needs_grad(struct module_state *state, PyObject *const *objects, int count);

/* cp_attn._torch.<name>(...): a new reference, or NULL. */
PyObject *torch_function(PyObject *name);

#endif
