/* Sentences, and the names of codes. */
#include "base/status.h"

#include <stdarg.h>
#include <stdio.h>

static enum cp_code fail(enum cp_code code, int rank, const char *format, va_list args)
    __attribute__((format(printf, 3, 0)));

static enum cp_code fail(enum cp_code code, int rank, const char *format, va_list args)
{
    struct cp_status status = {.code = (int32_t)code, .rank = rank};
    if (vsnprintf(status.text, sizeof status.text, format, args) < 0) {
        status.text[0] = '\0';
    }
    return cp_fail_as(&status);
}

enum cp_code cp_fail(enum cp_code code, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    (void)fail(code, -1, format, args);
    va_end(args);
    return code;
}

enum cp_code cp_fail_rank(enum cp_code code, int rank, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    (void)fail(code, rank, format, args);
    va_end(args);
    return code;
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
