/* The trace file: how it begins, that ranks share it, what does not fit, what fails. */
#include <errno.h>
#include <fcntl.h>
#include <sys/stat.h>

#include "base/clock.h"
#include "base/mem.h"
#include "base/trace.h"
#include "ranks.h"
#include "test.h"

static char folder[64];

/* A path in a folder of its own. */
static const char *path_of(const char *name)
{
    static char path[128];
    (void)snprintf(folder, sizeof folder, "/tmp/cp_attn_trace.XXXXXX");
    if (mkdtemp(folder) == NULL) {
        abort();
    }
    (void)snprintf(path, sizeof path, "%s/%s", folder, name);
    return path;
}

/* Removes both; false where the folder holds anything else. */
static bool remove_all(const char *path)
{
    (void)unlink(path);
    return rmdir(folder) == 0;
}

static char *content_of(const char *path)
{
    struct stat file;
    int fd = open(path, O_RDONLY);
    if (fd < 0 || fstat(fd, &file) != 0) {
        abort();
    }
    char *text = calloc(1, (size_t)file.st_size + 1);
    if (text == NULL || read(fd, text, (size_t)file.st_size) != file.st_size) {
        abort();
    }
    (void)close(fd);
    return text;
}

static struct cp_span span_of(int call)
{
    return (struct cp_span){.begin_ns = 5000 * call,
                            .end_ns = 5000 * call + 2500,
                            .call = (uint64_t)call,
                            .op = CP_OP_ATTENTION,
                            .step = 3,
                            .peer = -1,
                            .name = "ATTEND"};
}

static int count_of(const char *text, const char *part)
{
    int count = 0;
    for (const char *at = strstr(text, part); at != NULL; at = strstr(at + 1, part)) {
        count++;
    }
    return count;
}

TEST(a_span_is_a_line)
{
    const char *path = path_of("trace.json");
    struct cp_trace *trace = NULL;
    struct cp_span span = span_of(7), wait = span_of(8);
    wait.step = -1;
    wait.peer = 2;
    REQUIRE(cp_trace_open(path, 3, &trace) == CP_OK);
    cp_trace_add(trace, &span, CP_OK);
    cp_trace_add(trace, &wait, CP_ERR_TIMEOUT);
    cp_trace_close(&trace);
    CHECK(trace == NULL);
    char *text = content_of(path);
    CHECK_EQ_I64(strncmp(text, "[\n{", 3), 0);
    CHECK_STR_HAS(text, "\"args\":{\"name\":\"rank 3\"}");
    CHECK_STR_HAS(text, "{\"name\":\"ATTEND\",\"cat\":\"attention\",\"ph\":\"X\","
                        "\"ts\":35.000,\"dur\":2.500,");
    CHECK_STR_HAS(text, "\"args\":{\"call\":7,\"step\":3}},\n");
    CHECK_STR_HAS(text,
                  "\"args\":{\"call\":8,\"peer\":2,\"error\":\"CommTimeout\"}},\n");
    free(text);
    CHECK(remove_all(path));
}

/* More than the buffer holds, from four ranks at once: every line whole. */
static void write_many(int rank, void *arg)
{
    const char *path = arg;
    struct cp_trace *trace = NULL;
    REQUIRE(cp_trace_open(path, rank, &trace) == CP_OK);
    for (int call = 1; call <= 1000; call++) {
        struct cp_span span = span_of(call);
        cp_trace_add(trace, &span, CP_OK);
    }
    cp_trace_close(&trace);
}

TEST(ranks_share_a_file_line_by_line)
{
    char path[128];
    (void)snprintf(path, sizeof path, "%s", path_of("trace.json"));
    ranks_as_processes(4, write_many, path);
    char *text = content_of(path);
    CHECK_EQ_I64(count_of(text, "\"ph\":\"X\""), 4000);
    CHECK_EQ_I64(count_of(text, "process_name"), 4);
    CHECK_EQ_I64(count_of(text, "["), 1);
    CHECK_EQ_I64(count_of(text, "\n"), 1 + 4 * 2 + 4000);
    CHECK_EQ_I64(count_of(text, "},\n{"), 4 * 2 + 4000 - 1);
    free(text);
    CHECK(remove_all(path));
}

TEST(a_file_that_exists_is_added_to)
{
    const char *path = path_of("trace.json");
    struct cp_trace *trace = NULL;
    struct cp_span span = span_of(1);
    for (int run = 0; run < 2; run++) {
        REQUIRE(cp_trace_open(path, 0, &trace) == CP_OK);
        cp_trace_add(trace, &span, CP_OK);
        cp_trace_close(&trace);
    }
    char *text = content_of(path);
    CHECK_EQ_I64(count_of(text, "\"ph\":\"X\""), 2);
    CHECK_EQ_I64(count_of(text, "["), 1);
    free(text);
    CHECK(remove_all(path));
}

TEST(a_file_that_cannot_be_is_refused_by_its_name)
{
    struct cp_trace *trace = NULL;
    int64_t blocks = cp_mem_stats().live_blocks;
    CHECK_EQ_I64(cp_trace_open("/nonexistent/folder/trace.json", 0, &trace),
                 CP_ERR_VALUE);
    CHECK_STR_HAS(cp_last_error()->text, "CP_ATTN_TRACE");
    CHECK_STR_HAS(cp_last_error()->text, "/nonexistent/folder/trace.json");
    CHECK_EQ_I64(cp_trace_open("/", 0, &trace), CP_ERR_VALUE);
    CHECK(trace == NULL);
    CHECK_EQ_I64(cp_mem_stats().live_blocks, blocks);
}

TEST(without_memory_nothing_stays_open)
{
    const char *path = path_of("trace.json");
    struct cp_trace *trace = NULL;
    int next = open("/dev/null", O_RDONLY);
    (void)close(next);
    cp_mem_fail_after(0);
    CHECK_EQ_I64(cp_trace_open(path, 0, &trace), CP_ERR_NO_MEMORY);
    cp_mem_fail_after(-1);
    CHECK(trace == NULL);
    CHECK(fcntl(next, F_GETFD) < 0 && errno == EBADF);
    CHECK(remove_all(path));
}

TEST(a_disk_that_is_full_ends_the_trace_and_nothing_else)
{
    struct cp_trace *trace = NULL;
    struct cp_span span = span_of(1);
    if (access("/dev/full", W_OK) != 0) {
        TEST_SKIP("no /dev/full here");
    }
    REQUIRE(cp_trace_open("/dev/full", 0, &trace) == CP_OK);
    for (int i = 0; i < 1000; i++) {
        cp_trace_add(trace, &span, CP_OK);
    }
    cp_trace_flush(trace);
    cp_trace_close(&trace);
}

TEST(lines_are_kept_back_for_half_a_second_at_most)
{
    const char *path = path_of("trace.json");
    struct cp_trace *trace = NULL;
    struct cp_span span = span_of(1);
    REQUIRE(cp_trace_open(path, 0, &trace) == CP_OK);
    cp_trace_flush(trace);
    span.begin_ns = span.end_ns = cp_now_ns();
    cp_trace_add(trace, &span, CP_OK);
    char *text = content_of(path);
    CHECK_EQ_I64(count_of(text, "\"ph\":\"X\""), 0);
    free(text);
    span.begin_ns = span.end_ns = cp_now_ns() + 600000000;
    cp_trace_add(trace, &span, CP_OK);
    text = content_of(path);
    CHECK_EQ_I64(count_of(text, "\"ph\":\"X\""), 2);
    free(text);
    cp_trace_close(&trace);
    CHECK(remove_all(path));
}

TEST(a_forked_child_writes_nothing_of_its_parents)
{
    const char *path = path_of("trace.json");
    struct cp_trace *trace = NULL;
    struct cp_span span = span_of(1);
    span.end_ns = cp_now_ns();
    REQUIRE(cp_trace_open(path, 0, &trace) == CP_OK);
    cp_trace_add(trace, &span, CP_OK);
    pid_t pid = fork();
    if (pid == 0) {
        cp_trace_close(&trace);
        _exit(0);
    }
    CHECK_EQ_I64(ranks_end_of_process(pid), 0);
    cp_trace_close(&trace);
    char *text = content_of(path);
    CHECK_EQ_I64(count_of(text, "\"ph\":\"X\""), 1);
    free(text);
    CHECK(remove_all(path));
}
