/* One list of errors, one sentence a thread. */
#include "base/status.h"
#include "ranks.h"
#include "test.h"

TEST(a_sentence_is_kept)
{
    CHECK_EQ_I64(cp_fail(CP_ERR_VALUE, "ring_degree %d does not divide %d", 3, 8),
                 CP_ERR_VALUE);
    CHECK_EQ_I64(cp_last_error()->code, CP_ERR_VALUE);
    CHECK_EQ_I64(cp_last_error()->rank, -1);
    CHECK_EQ_STR(cp_last_error()->text, "ring_degree 3 does not divide 8");
    CHECK_EQ_I64(cp_fail_rank(CP_ERR_COMM, 2, "gone"), CP_ERR_COMM);
    CHECK_EQ_I64(cp_last_error()->rank, 2);
    CHECK_EQ_STR(cp_last_error()->text, "gone");
}

TEST(a_long_sentence_is_cut)
{
    char text[2 * CP_STATUS_TEXT];
    memset(text, 'a', sizeof text - 1);
    text[sizeof text - 1] = '\0';
    CHECK_EQ_I64(cp_fail(CP_ERR_TYPE, "%s", text), CP_ERR_TYPE);
    CHECK_EQ_U64(strlen(cp_last_error()->text), CP_STATUS_TEXT - 1);
}

TEST(anothers_error_becomes_ones_own)
{
    struct cp_status theirs = {.code = CP_ERR_DEVICE, .rank = 4};
    memset(theirs.text, 'b',
           sizeof theirs.text); /* from another process: not even ended */
    CHECK_EQ_I64(cp_fail_as(&theirs), CP_ERR_DEVICE);
    CHECK_EQ_I64(cp_last_error()->rank, 4);
    CHECK_EQ_U64(strlen(cp_last_error()->text), CP_STATUS_TEXT - 1);
    /* A sentence may quote the one before. */
    CHECK_EQ_I64(cp_fail_as(cp_last_error()), CP_ERR_DEVICE);
}

static void body(int rank, void *arg)
{
    (void)arg;
    for (int i = 0; i < 1000; i++) {
        char want[40];
        (void)snprintf(want, sizeof want, "rank %d says %d", rank, i);
        CHECK_EQ_I64(cp_fail_rank(CP_ERR_COMM, rank, "rank %d says %d", rank, i),
                     CP_ERR_COMM);
        CHECK_EQ_STR(cp_last_error()->text, want);
    }
}

TEST(threads_have_their_own)
{
    ranks_as_threads(3, body, NULL);
}

TEST(every_code_has_a_name)
{
    CHECK_EQ_STR(cp_code_name(CP_OK), "ok");
    CHECK_EQ_STR(cp_code_name(CP_AGAIN), "again");
    CHECK_EQ_STR(cp_code_name(CP_ERR_VALUE), "ValueError");
    CHECK_EQ_STR(cp_code_name(CP_ERR_TIMEOUT), "CommTimeout");
    CHECK_EQ_STR(cp_code_name((enum cp_code)99), "unknown code");
    for (int code = 0; code < CP_CODE_COUNT; code++) {
        CHECK(strcmp(cp_code_name((enum cp_code)code), "unknown code") != 0);
    }
}

static enum cp_code step(enum cp_code code, int *steps)
{
    ++*steps;
    return code;
}

static enum cp_code try_both(enum cp_code first, int *steps)
{
    CP_TRY(step(first, steps));
    CP_TRY(step(CP_OK, steps));
    return CP_OK;
}

static enum cp_code try_with_cleanup(enum cp_code first, int *steps, int *cleaned)
{
    enum cp_code code = CP_OK;
    CP_TRY_GOTO(code, step(first, steps), done);
    CP_TRY_GOTO(code, step(CP_OK, steps), done);
done:
    ++*cleaned;
    return code;
}

TEST(try_forwards_the_first_failure)
{
    int steps = 0, cleaned = 0;
    CHECK_EQ_I64(try_both(CP_OK, &steps), CP_OK);
    CHECK_EQ_I64(steps, 2);
    CHECK_EQ_I64(try_both(CP_ERR_TYPE, &steps), CP_ERR_TYPE);
    CHECK_EQ_I64(steps, 3);
    CHECK_EQ_I64(try_with_cleanup(CP_OK, &steps, &cleaned), CP_OK);
    CHECK_EQ_I64(steps, 5);
    CHECK_EQ_I64(try_with_cleanup(CP_ERR_TYPE, &steps, &cleaned), CP_ERR_TYPE);
    CHECK_EQ_I64(steps, 6);
    CHECK_EQ_I64(cleaned, 2);
}
