/* Whose kernel computes a call: diffusers' names of attention backends, as far as calls can be given one. */
#ifndef CP_BASE_BACKEND_H
#define CP_BASE_BACKEND_H

#include <stdbool.h>
#include <stddef.h>

/* constant, diffusers' name, whether the host's kernels answer it too, whether a package of Python computes it */
#define CP_BACKENDS(X)                                                                 \
    X(CP_BACKEND_NATIVE, "native", true, false)                                        \
    X(CP_BACKEND_NATIVE_MATH, "_native_math", true, false)                             \
    X(CP_BACKEND_NATIVE_FLASH, "_native_flash", true, false)                           \
    X(CP_BACKEND_NATIVE_EFFICIENT, "_native_efficient", false, false)                  \
    X(CP_BACKEND_NATIVE_CUDNN, "_native_cudnn", false, false)                          \
    X(CP_BACKEND_FLASH, "flash", false, true)                                          \
    X(CP_BACKEND_FLASH_HUB, "flash_hub", false, true)                                  \
    X(CP_BACKEND_FLASH_VARLEN_HUB, "flash_varlen_hub", false, true)                    \
    X(CP_BACKEND_FLASH_3_HUB, "_flash_3_hub", false, true)                             \
    X(CP_BACKEND_FLASH_3_VARLEN_HUB, "_flash_3_varlen_hub", false, true)               \
    X(CP_BACKEND_SAGE, "sage", false, true)                                            \
    X(CP_BACKEND_SAGE_HUB, "sage_hub", false, true)

enum cp_backend {
#define CP_BACKEND_ENUM(constant, name, is_on_host, is_package) constant,
    CP_BACKENDS(CP_BACKEND_ENUM)
#undef CP_BACKEND_ENUM
        CP_BACKEND_COUNT
};

const char *cp_backend_name(enum cp_backend backend); /* never NULL */
bool cp_backend_is_on_host(enum cp_backend backend);
bool cp_backend_is_package(enum cp_backend backend);

/* CP_BACKEND_COUNT for a name that is none. */
enum cp_backend cp_backend_find(const char *name);

/* "native, _native_math, ...": all, or those that the host's kernels answer. Returns
 * `text`. */
const char *cp_backend_print(bool on_host, char *text, size_t bytes);

#endif
