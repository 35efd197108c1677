/* What must be known of torch: its exchange of tensors checks nothing, so it is checked here. Torch is never
 * imported, only recognised once somebody else has imported it. */
#ifndef CP_PY_PY_TORCH_H
#define CP_PY_PY_TORCH_H

#include "module.h"

/* 1 for a torch tensor, 0 for anything else, -1 with an exception. */
int torch_is_tensor(struct module_state *state, PyObject *object);

/* Refuses tensors that say more than their memory does: fake, distributed and other wrappers, and those with a
 * forward-mode tangent. */
int torch_check(const struct module_state *state, PyObject *tensor, const char *name);

/* Refuses what autograd could not record or save: what is no tensor (unless it `may_be_foreign`), what torch.func has
 * wrapped, inference tensors, forward-mode tangents. */
int torch_check_saved(struct module_state *state, PyObject *object, const char *name,
                      bool may_be_foreign);

/* After a tensor could not be read: says why in the place of the exception that is set, where the reason is known. */
void torch_explain(const struct module_state *state, PyObject *tensor,
                   const char *name);

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
