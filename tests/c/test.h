/* The C tests' own framework. A file that includes this header and has TEST(name) { ... }
 * blocks is a program; main is below. Checks survive NDEBUG, print both values, work in
 * any thread, and do not end their test: they are expressions, true when they hold.
 * The last line is `N passed, N failed`. */
#ifndef CP_TESTS_TEST_H
#define CP_TESTS_TEST_H

#include <math.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

/* The Makefile sets it to 1 in MODE=tsan, for tests that fork after starting threads. */
#ifndef TEST_UNDER_TSAN
#define TEST_UNDER_TSAN 0
#endif

struct test_case {
    const char *name;
    void (*run)(void);
    struct test_case *next;
};

static struct test_case *test_first, **test_last = &test_first;
static const char *test_name = "";                /* the test that runs now */
static const char *test_skipped;                  /* its reason, or NULL */
static atomic_int test_failures;                  /* of this test, all threads */
static uint64_t test_seed;                        /* of the run; printed first */
static _Thread_local char test_context_text[240]; /* of TEST_CONTEXT */

#define TEST(id)                                                                       \
    static void test_run_##id(void);                                                   \
    __attribute__((constructor)) static void test_add_##id(void)                       \
    {                                                                                  \
        static struct test_case self = {#id, test_run_##id, NULL};                     \
        *test_last = &self;                                                            \
        test_last = &self.next;                                                        \
    }                                                                                  \
    static void test_run_##id(void)

/* Ends the test, visibly and without counting it as passed. */
#define TEST_SKIP(reason)                                                              \
    do {                                                                               \
        test_skipped = (reason);                                                       \
        return;                                                                        \
    } while (0)

/* What this thread is at: printed with its failures until the next one or the test's end.
 * TEST_CONTEXT("ranks %d, rows %d", ranks, rows); */
#define TEST_CONTEXT(...)                                                              \
    ((void)snprintf(test_context_text, sizeof test_context_text, __VA_ARGS__))

#define CHECK(cond)                                                                    \
    ((cond) ? true : test_fail(__FILE__, __LINE__, "not true: %s", #cond))
#define CHECK_EQ_I64(got, want)                                                        \
    test_eq_i64((int64_t)(got), (int64_t)(want), #got, __FILE__, __LINE__)
#define CHECK_EQ_U64(got, want)                                                        \
    test_eq_u64((uint64_t)(got), (uint64_t)(want), #got, __FILE__, __LINE__)
#define CHECK_NEAR(got, want, tolerance)                                               \
    test_near((double)(got), (double)(want), (double)(tolerance), #got, __FILE__,      \
              __LINE__)
#define CHECK_EQ_STR(got, want) test_eq_str(got, want, #got, __FILE__, __LINE__)
#define CHECK_STR_HAS(text, part) test_str_has(text, part, #text, __FILE__, __LINE__)
#define CHECK_EQ_BYTES(got, want, bytes)                                               \
    test_eq_bytes(got, want, bytes, #got, __FILE__, __LINE__)
/* A check or condition that the rest of the test cannot do without; in void functions. */
#define REQUIRE(check)                                                                 \
    do {                                                                               \
        if (!CHECK(check)) {                                                           \
            return;                                                                    \
        }                                                                              \
    } while (0)

__attribute__((format(printf, 3, 4))) static inline bool
test_fail(const char *file, int line, const char *format, ...)
{
    char text[1000];
    va_list args;
    va_start(args, format);
    (void)vsnprintf(text, sizeof text, format, args);
    va_end(args);
    /* A loop over a large array should not bury its first failures. */
    if (atomic_fetch_add(&test_failures, 1) < 20) {
        printf("%s:%d: %s (%s): %s\n", file, line, test_name, test_context_text, text);
        (void)fflush(stdout);
    }
    return false;
}

static inline bool test_eq_i64(int64_t a, int64_t b, const char *what, const char *file,
                               int line)
{
    return a == b || test_fail(file, line, "%s is %lld, want %lld", what, (long long)a,
                               (long long)b);
}

static inline bool test_eq_u64(uint64_t a, uint64_t b, const char *what,
                               const char *file, int line)
{
    return a == b || test_fail(file, line, "%s is %llu, want %llu", what,
                               (unsigned long long)a, (unsigned long long)b);
}

static inline bool test_near(double a, double b, double tolerance, const char *what,
                             const char *file, int line)
{
    bool near = a == b || (isnan(a) && isnan(b)) || fabs(a - b) <= tolerance;
    return near || test_fail(file, line, "%s is %.17g, want %.17g within %.3g", what, a,
                             b, tolerance);
}

static inline bool test_eq_str(const char *a, const char *b, const char *what,
                               const char *file, int line)
{
    bool same = a && b ? strcmp(a, b) == 0 : a == b;
    return same || test_fail(file, line, "%s is \"%s\", want \"%s\"", what,
                             a ? a : "(null)", b ? b : "(null)");
}

static inline bool test_str_has(const char *a, const char *part, const char *what,
                                const char *file, int line)
{
    return (a && strstr(a, part)) ||
           test_fail(file, line, "%s is \"%s\", without \"%s\"", what, a ? a : "(null)",
                     part);
}

static inline bool test_eq_bytes(const void *a, const void *b, size_t bytes,
                                 const char *what, const char *file, int line)
{
    const unsigned char *x = a, *y = b;
    size_t i = 0;
    while (i < bytes && x[i] == y[i]) {
        i++;
    }
    return i == bytes || test_fail(file, line, "byte %zu of %zu of %s is %d, want %d",
                                   i, bytes, what, x[i], y[i]);
}

/* splitmix64 (Steele, Lea, Flood 2014): equal seeds and streams give equal numbers. */
struct test_rng {
    uint64_t state;
};

static inline struct test_rng test_rng_init(uint64_t stream)
{
    return (struct test_rng){test_seed ^ (stream * 0xd1342543de82ef95u)};
}

static inline uint64_t test_rng_next(struct test_rng *rng)
{
    uint64_t z = rng->state += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

/* first <= result <= last */
static inline int64_t test_rng_range(struct test_rng *rng, int64_t first, int64_t last)
{
    return first + (int64_t)(test_rng_next(rng) % (uint64_t)(last - first + 1));
}

/* -1 <= result < 1 */
static inline float test_rng_float(struct test_rng *rng)
{
    return (float)(test_rng_next(rng) >> 40) * 0x1p-23f - 1.0f;
}

/* Only what a signal handler may call; stdout was flushed when the test began. */
static inline void test_late(int signal_number)
{
    static const char words[] = ": the deadline passed (CP_TEST_DEADLINE seconds)\n";
    (void)signal_number;
    ssize_t written = write(2, test_name, strlen(test_name));
    written += write(2, words, sizeof words - 1);
    _exit(written > 0 ? 2 : 3);
}

/* Returns the failed checks. */
static inline int test_run(const struct test_case *test)
{
    const char *seconds = getenv("CP_TEST_DEADLINE");
    test_name = test->name;
    test_skipped = NULL;
    test_context_text[0] = '\0';
    atomic_store(&test_failures, 0);
    (void)fflush(stdout);
    (void)alarm(seconds ? (unsigned)strtoul(seconds, NULL, 10) : 60);
    test->run();
    (void)alarm(0);
    return atomic_load(&test_failures);
}

int main(int argc, char **argv)
{
    const char *only = NULL, *seed = getenv("CP_TEST_SEED");
    int passed = 0, failed = 0, found = 0;
    bool is_list = argc == 2 && strcmp(argv[1], "--list") == 0;
    for (int i = 1; !is_list && i < argc; i += 2) {
        bool is_only = strcmp(argv[i], "--only") == 0;
        if (i + 1 == argc || (!is_only && strcmp(argv[i], "--seed") != 0)) {
            (void)fprintf(stderr, "usage: %s [--list] [--only NAME] [--seed N]\n",
                          *argv);
            return 2;
        }
        *(is_only ? &only : &seed) = argv[i + 1];
    }
    test_seed = seed ? strtoull(seed, NULL, 0)
                     : (uint64_t)time(NULL) * 1000003u + (uint64_t)getpid();
    if (!is_list) {
        printf("%s: seed %llu\n", *argv, (unsigned long long)test_seed);
    }
    (void)signal(SIGALRM, test_late);
    for (const struct test_case *t = test_first; t; t = t->next) {
        if (is_list) {
            puts(t->name);
        } else if (!only || strcmp(only, t->name) == 0) {
            int failures = test_run(t);
            found++;
            failed += failures > 0;
            passed += failures == 0 && !test_skipped;
            if (failures) {
                printf("FAILED %s: %d checks; again: --only %s --seed %llu\n", t->name,
                       failures, t->name, (unsigned long long)test_seed);
            } else if (test_skipped) {
                printf("SKIPPED %s: %s\n", t->name, test_skipped);
            }
        }
    }
    if (!is_list) {
        failed += found == 0;
        printf("%s%d passed, %d failed\n", found ? "" : "no such test\n", passed,
               failed);
    }
    return failed != 0;
}

#endif
