/* Appends spans to a trace file, in pieces of whole lines. */
#include "base/trace.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/mem.h"
#include "base/text.h"

enum { BUFFER = 32768, LINE = 512 };

/* How long a line may be kept back while calls go on. */
static const int64_t keep_ns = 500000000;

struct cp_trace {
    int fd; /* -1: writing failed, nothing is written any more */
    int rank;
    pid_t pid; /* of the process that opened it */
    int64_t flushed_ns;
    size_t used;
    char buffer[BUFFER];
};

static enum cp_code fail_open(const char *path)
{
    char reason[64];
    return cp_fail(CP_ERR_VALUE, "CP_ATTN_TRACE: cannot write \"%.200s\": %s", path,
                   strerror_r(errno, reason, sizeof reason));
}

/* The file as it begins, whole from the first moment that others can see it. */
static enum cp_code create(const char *path)
{
    char draft[4096];
    static const char head[] = "[\n";
    int length = snprintf(draft, sizeof draft, "%s.%ld", path, (long)getpid());
    if (length < 0 || (size_t)length >= sizeof draft) {
        errno = ENAMETOOLONG;
        return fail_open(path);
    }
    int fd = open(draft, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    if (fd < 0) {
        return fail_open(path);
    }
    bool is_written = write(fd, head, sizeof head - 1) == (ssize_t)(sizeof head - 1);
    /* Another rank may have been first, and then its file is the one. */
    bool is_there = is_written && (link(draft, path) == 0 || errno == EEXIST);
    enum cp_code code = is_there ? CP_OK : fail_open(path);
    (void)close(fd);
    (void)unlink(draft);
    return code;
}

static void write_all(struct cp_trace *trace)
{
    size_t done = 0;
    while (trace->fd >= 0 && done < trace->used) {
        ssize_t wrote = write(trace->fd, trace->buffer + done, trace->used - done);
        if (wrote >= 0) {
            done += (size_t)wrote;
        } else if (errno != EINTR) {
            /* A trace is no reason to end a computation. */
            char reason[64];
            (void)fprintf(stderr,
                          "cp_attn: rank %d cannot write its trace any more: %s\n",
                          trace->rank, strerror_r(errno, reason, sizeof reason));
            (void)close(trace->fd);
            trace->fd = -1;
        }
    }
    trace->used = 0;
    trace->flushed_ns = cp_now_ns();
}

static void append(struct cp_trace *trace, const char *line, int length)
{
    if (length <= 0 || (size_t)length >= LINE) {
        return;
    }
    if (trace->used + (size_t)length > BUFFER) {
        write_all(trace);
    }
    memcpy(trace->buffer + trace->used, line, (size_t)length);
    trace->used += (size_t)length;
}

enum cp_code cp_trace_open(const char *path, int rank, struct cp_trace **out)
{
    void *block = NULL;
    char line[LINE];
    int fd = open(path, O_WRONLY | O_APPEND | O_CLOEXEC);
    if (fd < 0 && errno == ENOENT) {
        CP_TRY(create(path));
        fd = open(path, O_WRONLY | O_APPEND | O_CLOEXEC);
    }
    if (fd < 0) {
        return fail_open(path);
    }
    enum cp_code code = cp_mem_create(sizeof(struct cp_trace), "a trace", &block);
    if (code != CP_OK) {
        (void)close(fd);
        return code;
    }
    struct cp_trace *trace = block;
    trace->fd = fd;
    trace->rank = rank;
    trace->pid = getpid();
    append(trace, line,
           snprintf(line, sizeof line,
                    "{\"name\":\"process_name\",\"ph\":\"M\",\"pid\":%ld,\"args\":"
                    "{\"name\":\"rank %d\"}},\n"
                    "{\"name\":\"process_sort_index\",\"ph\":\"M\",\"pid\":%ld,"
                    "\"args\":{\"sort_index\":%d}},\n",
                    (long)trace->pid, rank, (long)trace->pid, rank));
    *out = trace;
    return CP_OK;
}

void cp_trace_add(struct cp_trace *trace, const struct cp_span *span, enum cp_code code)
{
    char line[LINE];
    char more[96] = "";
    if (span->step >= 0) {
        cp_text_append(more, sizeof more, ",\"step\":%d", span->step);
    }
    if (span->peer >= 0) {
        cp_text_append(more, sizeof more, ",\"peer\":%d", span->peer);
    }
    if (code != CP_OK) {
        cp_text_append(more, sizeof more, ",\"error\":\"%s\"", cp_code_name(code));
    }
    append(trace, line,
           snprintf(line, sizeof line,
                    "{\"name\":\"%s\",\"cat\":\"%s\",\"ph\":\"X\",\"ts\":%.3f,\"dur\":"
                    "%.3f,\"pid\":%ld,\"tid\":%ld,\"args\":{\"call\":%" PRIu64
                    "%s}},\n",
                    span->name, cp_op_name((enum cp_op)span->op),
                    (double)span->begin_ns * 1e-3,
                    (double)(span->end_ns - span->begin_ns) * 1e-3, (long)trace->pid,
                    (long)syscall(SYS_gettid), span->call, more));
    if (code != CP_OK || span->end_ns - trace->flushed_ns > keep_ns) {
        write_all(trace);
    }
}

void cp_trace_flush(struct cp_trace *trace)
{
    if (trace->used > 0) {
        write_all(trace);
    }
}

void cp_trace_close(struct cp_trace **trace)
{
    struct cp_trace *t = *trace;
    if (t == NULL) {
        return;
    }
    if (t->pid == getpid()) {
        write_all(t);
    }
    if (t->fd >= 0) {
        (void)close(t->fd);
    }
    cp_mem_destroy(trace);
}
