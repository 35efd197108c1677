/* The thread's one error sentence: the only thread-local of the library. */
#include "base/status.h"

#include <stdarg.h>
#include <stdio.h>

static _Thread_local struct cp_status last;

static void write_status(enum cp_code code, int rank, const char *format, va_list args)
    __attribute__((format(printf, 3, 0)));

static void write_status(enum cp_code code, int rank, const char *format, va_list args)
{
    last.code = (int32_t)code;
    last.rank = rank;
    if (vsnprintf(last.text, sizeof last.text, format, args) < 0) {
        last.text[0] = '\0';
    }
}

enum cp_code cp_fail(enum cp_code code, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    write_status(code, -1, format, args);
    va_end(args);
    return code;
}

enum cp_code cp_fail_rank(enum cp_code code, int rank, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    write_status(code, rank, format, args);
    va_end(args);
    return code;
}

enum cp_code cp_fail_as(const struct cp_status *status)
{
    last = *status;
    last.text[CP_STATUS_TEXT - 1] = '\0';
    return (enum cp_code)last.code;
}

const struct cp_status *cp_last_error(void)
{
    return &last;
}

const char *cp_code_name(enum cp_code code)
{
    switch (code) {
    case CP_OK:
        return "ok";
    case CP_AGAIN:
        return "again";
#define CP_STATUS_NAME(code, exception)                                                \
    case code:                                                                         \
        return #exception;
        CP_STATUS_MAP(CP_STATUS_NAME)
#undef CP_STATUS_NAME
    case CP_CODE_COUNT:
        break;
    }
    return "unknown code";
}
