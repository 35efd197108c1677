/* Sentences that name the place. */
#include "schedule/verify_at.h"

#include <stdarg.h>
#include <stdio.h>

const char *cp_verify_place(const struct cp_verify_at *at,
                            char text[CP_VERIFY_PLACE_TEXT])
{
    if (at->step < 0) {
        (void)snprintf(text, CP_VERIFY_PLACE_TEXT, "call %d rank %d", at->call,
                       at->rank);
    } else {
        (void)snprintf(text, CP_VERIFY_PLACE_TEXT, "call %d rank %d step %d (%s)",
                       at->call, at->rank, (int)at->step, cp_step_name(at->op));
    }
    return text;
}

enum cp_code cp_verify_fail(const struct cp_verify_at *at, const char *format, ...)
{
    char place[CP_VERIFY_PLACE_TEXT];
    char sentence[CP_STATUS_TEXT];
    va_list args;
    va_start(args, format);
    if (vsnprintf(sentence, sizeof sentence, format, args) < 0) {
        sentence[0] = '\0';
    }
    va_end(args);
    return cp_fail(CP_ERR_INTERNAL, "%s: %s", cp_verify_place(at, place), sentence);
}
