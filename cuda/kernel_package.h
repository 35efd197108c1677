/* Kernels of Python packages as a kernel. */
#ifndef CP_CUDA_KERNEL_PACKAGE_H
#define CP_CUDA_KERNEL_PACKAGE_H

#include "kernel/kernel.h"

/* Asks the package that comes with the arguments. Its layouts are those of the plain kernel.
 * Which calls a package takes has been judged before; any block of those is answered. */
extern const struct cp_kernel_ops cp_kernel_package_ops;

#endif
