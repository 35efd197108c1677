/* Messages that are put together from parts. */
#ifndef CP_BASE_TEXT_H
#define CP_BASE_TEXT_H

#include <stddef.h>

/* Adds to the string in `text`, which has room for `size` bytes; what does not fit is
 * cut, and the string is terminated all the same. */
void cp_text_append(char *text, size_t size, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

#endif
