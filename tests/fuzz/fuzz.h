/* What the fuzz targets share: their entry, numbers from the input, and a check that ends the process.
 *
 * A target reads its case from the front of the input, a byte or a few at a time, so that a change of
 * one byte changes one thing; where the input is over, zeroes follow.
 *
 * An expression takes from the input at most once, and a second take waits for the next statement: C
 * does not say which operand, argument or initialiser comes first, and an input must mean the same to
 * every compiler. */
#ifndef CP_TESTS_FUZZ_H
#define CP_TESTS_FUZZ_H

#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "base/status.h"

/* A target has this one; libFuzzer or driver.c has `main` and calls it. */
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes);

/* Survives NDEBUG. libFuzzer keeps the input of a process that aborts. */
#define FUZZ_CHECK(cond, ...)                                                          \
    ((cond) ? (void)0 : fuzz_fail(__FILE__, __LINE__, #cond, __VA_ARGS__))

__attribute__((format(printf, 4, 5), noreturn)) static inline void
fuzz_fail(const char *file, int line, const char *cond, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    (void)fprintf(stderr, "%s:%d: not true: %s: ", file, line, cond);
    (void)vfprintf(stderr, format, args);
    (void)fputc('\n', stderr);
    va_end(args);
    abort();
}

struct fuzz_input {
    const uint8_t *at;
    size_t left;
};

static inline uint8_t fuzz_byte(struct fuzz_input *in)
{
    if (in->left == 0) {
        return 0;
    }
    in->left -= 1;
    return *in->at++;
}

/* first <= result <= last; one byte, so at most 256 apart. */
static inline int64_t fuzz_range(struct fuzz_input *in, int64_t first, int64_t last)
{
    return first + fuzz_byte(in) % (last - first + 1);
}

static inline bool fuzz_flag(struct fuzz_input *in)
{
    return (fuzz_byte(in) & 1) != 0;
}

static inline uint64_t fuzz_word(struct fuzz_input *in)
{
    uint64_t word = 0;
    for (int i = 0; i < 8; i++) {
        word |= (uint64_t)fuzz_byte(in) << (8 * i);
    }
    return word;
}

/* Any number: a small one of either sign, one beside a power of two, one beside the ends, or eight
 * bytes. */
static inline int64_t fuzz_number(struct fuzz_input *in)
{
    uint8_t kind = fuzz_byte(in);
    uint64_t number = 0;
    if (kind < 128) {
        number = (uint64_t)kind - (kind < 120 ? 0 : 128);
    } else if (kind < 224) {
        int power = kind < 192 ? kind & 63 : 63;
        number = (UINT64_C(1) << power) + fuzz_byte(in) / 8 - 16;
    } else {
        number = fuzz_word(in);
    }
    return (int64_t)number;
}

/* The last error is a sentence of this thread: terminated, not empty, printable, and with `part` in it. */
static inline void fuzz_check_sentence(enum cp_code code, const char *part)
{
    const struct cp_status *status = cp_last_error();
    FUZZ_CHECK(code > CP_AGAIN && code < CP_CODE_COUNT, "code %d", (int)code);
    FUZZ_CHECK(status->code == (int32_t)code, "%d, returned %d", (int)status->code,
               (int)code);
    FUZZ_CHECK(memchr(status->text, '\0', CP_STATUS_TEXT) != NULL, "not terminated");
    FUZZ_CHECK(strlen(status->text) > 10, "\"%s\"", status->text);
    FUZZ_CHECK(strstr(status->text, part) != NULL, "\"%s\" is not in \"%s\"", part,
               status->text);
}

#endif
