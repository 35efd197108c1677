/* The thread's one error sentence: the only thread-local of the library. */
#include <string.h>

#include "base/status.h"

static _Thread_local struct cp_status last;

enum cp_code cp_fail_as(const struct cp_status *status)
{
    last.code = status->code;
    last.rank = status->rank;
    memmove(last.text, status->text, strnlen(status->text, sizeof last.text - 1) + 1);
    last.text[sizeof last.text - 1] = '\0';
    return (enum cp_code)last.code;
}

const struct cp_status *cp_last_error(void)
{
    return &last;
}
