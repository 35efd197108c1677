/* One rank alone: private memory, a few counters, nobody to wait for. */
#include "comm/comm_self.h"

#include <errno.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/checked.h"
#include "base/mem.h"

/* Address space of the window, at most. Where less is allowed (RLIMIT_AS), halved until
 * it fits. */
static const size_t most_reserved = (size_t)64 << 30;
static const size_t least_reserved = (size_t)1 << 20;

struct comm_self {
    struct cp_comm head;
    char *base;      /* the window; pages become usable one after the other */
    size_t reserved; /* bytes of it */
    size_t usable;   /* bytes at its start that may be used */
    uint64_t call;   /* its number */
    uint64_t counter[CP_SIGNALS];
    struct cp_status poison; /* code CP_OK: none */
};

static struct comm_self *self_of(struct cp_comm *comm)
{
    return (struct comm_self *)comm;
}

static enum cp_code self_reserve(struct cp_comm *comm, size_t bytes)
{
    struct comm_self *self = self_of(comm);
    size_t wanted = 0;
    if (bytes <= self->usable) {
        return CP_OK;
    }
    if (!cp_size_round_up(bytes, (size_t)sysconf(_SC_PAGESIZE), &wanted) ||
        wanted > self->reserved) {
        return cp_fail(CP_ERR_NO_MEMORY,
                       "a window cannot hold %zu bytes; %zu are reserved", bytes,
                       self->reserved);
    }
    if (mprotect(self->base, wanted, PROT_READ | PROT_WRITE) != 0) {
        char reason[64];
        return cp_fail(CP_ERR_NO_MEMORY, "cannot make %zu bytes of a window usable: %s",
                       wanted, strerror_r(errno, reason, sizeof reason));
    }
    self->usable = wanted;
    return CP_OK;
}

static void *self_window(struct cp_comm *comm, int rank)
{
    (void)rank;
    return self_of(comm)->base;
}

static enum cp_code self_begin(struct cp_comm *comm, const struct cp_comm_call *call)
{
    self_of(comm)->call = call->seq;
    return CP_OK;
}

static bool has_reached(const struct comm_self *self, int signal, uint64_t value)
{
    return self->counter[signal] >= CP_COMM_COUNTER(self->call, value);
}

static enum cp_code self_publish(struct cp_comm *comm, int signal, uint64_t value,
                                 struct cp_stream *stream)
{
    struct comm_self *self = self_of(comm);
    (void)stream;
    self->counter[signal] = CP_COMM_COUNTER(self->call, value);
    return CP_OK;
}

static enum cp_code self_reached(struct cp_comm *comm, const struct cp_comm_wait *waits,
                                 int count, struct cp_stream *stream)
{
    bool have_all = true;
    (void)stream;
    for (int i = 0; i < count && have_all; i++) {
        have_all = has_reached(self_of(comm), waits[i].signal, waits[i].value);
    }
    return have_all ? CP_OK : CP_AGAIN;
}

static enum cp_code self_wait(struct cp_comm *comm, const struct cp_comm_wait *waits,
                              int count, const char *operation,
                              struct cp_deadline deadline)
{
    struct comm_self *self = self_of(comm);
    (void)deadline;
    for (int i = 0; i < count; i++) {
        if (!waits[i].is_ticket && has_reached(self, waits[i].signal, waits[i].value)) {
            return CP_OK;
        }
    }
    if (self->poison.code != CP_OK) {
        return cp_fail_as(&self->poison);
    }
    return cp_fail(CP_ERR_INTERNAL, "the only rank waits in %s for what nobody can do",
                   operation);
}

static void self_poison(struct cp_comm *comm, const struct cp_status *reason)
{
    struct comm_self *self = self_of(comm);
    if (self->poison.code == CP_OK) {
        self->poison = *reason;
    }
}

static void self_close(struct cp_comm **comm)
{
    if (*comm == NULL) {
        return;
    }
    struct comm_self *self = self_of(*comm);
    (void)munmap(self->base, self->reserved);
    cp_mem_destroy(comm);
}

static const struct cp_comm_ops self_ops = {
    .name = "self",
    .abi = CP_COMM_ABI,
    .reserve = self_reserve,
    .window = self_window,
    .begin = self_begin,
    .publish = self_publish,
    .reached = self_reached,
    .wait = self_wait,
    .poison = self_poison,
    .close = self_close,
};

enum cp_code cp_comm_self_create(struct cp_comm **out)
{
    void *block = NULL;
    CP_TRY(cp_mem_create(sizeof(struct comm_self), "a communicator", &block));
    struct comm_self *self = block;
    void *base = MAP_FAILED;
    size_t reserved = 2 * most_reserved;
    while (base == MAP_FAILED && reserved > least_reserved) {
        reserved /= 2;
        /* No access, so no memory is promised yet; the system says no in mprotect, not
         * by a signal. */
        base = mmap(NULL, reserved, PROT_NONE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    }
    if (base == MAP_FAILED) {
        char reason[64];
        enum cp_code code =
            cp_fail(CP_ERR_NO_MEMORY, "cannot reserve address space for a window: %s",
                    strerror_r(errno, reason, sizeof reason));
        cp_mem_destroy(&block);
        return code;
    }
    /* A wish, for what is made usable later: keys in small pages cost attention 5 %. */
    (void)madvise(base, reserved, MADV_HUGEPAGE);
    self->head = (struct cp_comm){.ops = &self_ops, .rank = 0, .world = 1};
    self->base = base;
    self->reserved = reserved;
    *out = &self->head;
    return CP_OK;
}
