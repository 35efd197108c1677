/* The stateful part of base/status.h and base/mem.h, answered by cp_attn._C. */
#include "core.h"

#include "base/mem.h"

static const struct cp_core *core;

enum cp_code cp_core_set(const struct cp_core *given)
{
    if (given->abi != CP_CORE_ABI) {
        return CP_ERR_INTERNAL;
    }
    core = given;
    return CP_OK;
}

enum cp_code cp_fail_as(const struct cp_status *status)
{
    return core->fail_as(status);
}

const struct cp_status *cp_last_error(void)
{
    return core->last_error();
}

enum cp_code cp_mem_create(size_t bytes, const char *what, void **out)
{
    return core->mem_create(bytes, what, out);
}

void cp_mem_destroy(void *address_of_pointer)
{
    core->mem_destroy(address_of_pointer);
}
