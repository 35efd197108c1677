/* One list of errors, one sentence per failure.
 *
 * A function that can fail returns `enum cp_code` and writes its result last, on
 * success only. The line that detects a failure calls `cp_fail`, which writes the
 * sentence into the calling thread's one `struct cp_status`; every line above forwards
 * the code with CP_TRY. The same struct is the wire form: a rank's record carries it to
 * the other ranks. */
#ifndef CP_BASE_STATUS_H
#define CP_BASE_STATUS_H

#include <stdint.h>

/* code, Python exception. The only place to edit when an error is added. */
#define CP_STATUS_MAP(X)                                                               \
    X(CP_ERR_VALUE, ValueError)                                                        \
    X(CP_ERR_TYPE, TypeError)                                                          \
    X(CP_ERR_BUFFER, BufferError)                                                      \
    X(CP_ERR_UNSUPPORTED, NotSupported)                                                \
    X(CP_ERR_NO_MEMORY, MemoryError)                                                   \
    X(CP_ERR_RUNTIME, RuntimeError)                                                    \
    X(CP_ERR_DEVICE, DeviceError)                                                      \
    X(CP_ERR_COMM, CommError)                                                          \
    X(CP_ERR_TIMEOUT, CommTimeout)                                                     \
    X(CP_ERR_INTERRUPTED, KeyboardInterrupt)                                           \
    X(CP_ERR_INTERNAL, InternalError)

enum cp_code {
    CP_OK = 0,
    CP_AGAIN = 1, /* not an error: nothing to do yet, ask again */
#define CP_STATUS_ENUM(code, exception) code,
    CP_STATUS_MAP(CP_STATUS_ENUM)
#undef CP_STATUS_ENUM
        CP_CODE_COUNT
};

enum { CP_STATUS_TEXT = 1016 };

struct cp_status {
    int32_t code;              /* enum cp_code */
    int32_t rank;              /* the rank that failed, -1: nobody in particular */
    char text[CP_STATUS_TEXT]; /* one sentence, NUL-terminated, cut where it is too long
                                */
};

#define CP_NODISCARD __attribute__((warn_unused_result))

#define CP_TRY(expression)                                                             \
    do {                                                                               \
        enum cp_code cp_try_code = (expression);                                       \
        if (cp_try_code != CP_OK) {                                                    \
            return cp_try_code;                                                        \
        }                                                                              \
    } while (0)

/* For a function that owns something: one label, reached on success too, that releases
 * in reverse order. */
#define CP_TRY_GOTO(code, expression, label)                                           \
    do {                                                                               \
        (code) = (expression);                                                         \
        if ((code) != CP_OK) {                                                         \
            goto label;                                                                \
        }                                                                              \
    } while (0)

#ifdef __cplusplus
extern "C" {
#endif

/* Writes the calling thread's sentence (rank -1) and returns `code`. */
enum cp_code cp_fail(enum cp_code code, const char *format, ...)
    __attribute__((format(printf, 2, 3)));

/* The same with the rank that failed. */
enum cp_code cp_fail_rank(enum cp_code code, int rank, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

/* Makes another's status (a peer's record, the poison) the calling thread's own, and
 * returns its code. */
enum cp_code cp_fail_as(const struct cp_status *status);

/* The calling thread's last sentence: borrowed, valid until the thread's next failure.
 */
const struct cp_status *cp_last_error(void);

/* "ValueError" and so on; "ok", "again" for what is no error; never NULL. */
const char *cp_code_name(enum cp_code code);

#ifdef __cplusplus
}
#endif

#endif
