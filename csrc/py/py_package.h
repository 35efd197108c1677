/* Kernels that packages of Python have: whether a call may have one, and the table by which an accelerator asks it.
 *
 * What is known of each package is in cp_attn/_packages.py; here its functions get the accelerator's memory as tensors
 * of the caller's framework, without a copy, and what they answer is read in place. */
#ifndef CP_PY_PY_PACKAGE_H
#define CP_PY_PY_PACKAGE_H

#include "base/record.h"
#include "exec/accelerator.h"
#include "kernel/package.h"
#include "py_dlpack.h"

/* One call's. All zero: none. */
struct package {
    struct cp_package table; /* for cp_context_use */
    struct module_state *state;
    const struct array *like; /* borrowed, q: whose framework it is, and where */
    struct cp_lender lender;
    enum cp_backend backend;
    int rank;
    PyObject *module; /* owned: cp_attn._packages */
    PyObject *error;  /* owned: what a function of it raised; NULL: nothing */
};

/* For a call whose record is filled in, on an accelerator, by a package's backend: finds the package, and refuses what
 * it does not take. 0, or -1 with an exception. */
int package_open(struct package *package, struct module_state *state,
                 const struct array *like, const struct cp_lender *lender,
                 const struct cp_record *record, int rank);
void package_close(struct package *package);

/* Names what the package raised as the cause of the exception that is set. */
void package_explain(struct package *package);

/* Refuses gradients of a backend that has none; `backend` as the caller gave it, NULL: not at all. 0, or -1 with an
 * exception. */
int package_check_gradient(PyObject *backend);

#endif
