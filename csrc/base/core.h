/* What a module of its own needs of the one that holds the library's state: the thread's
 * error and the counted memory. All else in base/ and tensor/ has no state, so that such a
 * module carries a copy of it (cuda/core.c). */
#ifndef CP_BASE_CORE_H
#define CP_BASE_CORE_H

#include <stddef.h>
#include <stdint.h>

#include "base/status.h"

enum { CP_CORE_ABI = 1 };

struct cp_core {
    uint32_t abi; /* CP_CORE_ABI */
    /* As the functions of these names. */
    enum cp_code (*fail_as)(const struct cp_status *status);
    const struct cp_status *(*last_error)(void);
    enum cp_code (*mem_create)(size_t bytes, const char *what, void **out);
    void (*mem_destroy)(void *address_of_pointer);
};

#endif
