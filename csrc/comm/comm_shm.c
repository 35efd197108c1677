/* Windows of shared memory: memfds that their owners grow and their peers read in
 * place. */
#include "comm/comm_shm.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/checked.h"
#include "base/mem.h"
#include "base/point.h"

/* Pages are added in pieces: a signal undoes a piece, not everything. */
static const size_t piece_bytes = (size_t)32 << 20;

/* A huge page of x86-64, and of arm64 with pages of 4 KiB. Attention on keys that lie
 * in small pages is 5 % slower (measured, one core of a Sapphire Rapids). */
static const size_t huge_page = (size_t)2 << 20;
#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25 /* Linux 6.1 */
#endif

/* What lies in the first page of a window: one counter a cache line. */
struct counter {
    _Alignas(64) _Atomic uint64_t value;
};

struct comm_shm {
    struct cp_comm head;
    const struct cp_window *windows; /* borrowed; must outlive this */
    struct cp_watch *watch;          /* borrowed; must outlive this */
    uint64_t call;                   /* the number of the one under way */
    size_t usable; /* bytes of the own window, behind the counters, that have pages */
};

static size_t page_bytes(void)
{
    return (size_t)sysconf(_SC_PAGESIZE);
}

static enum cp_code fail_system(const char *what, size_t bytes)
{
    int error = errno;
    char reason[64];
    bool is_memory = error == ENOMEM || error == ENOSPC || error == EFBIG;
    return cp_fail(is_memory ? CP_ERR_NO_MEMORY : CP_ERR_RUNTIME,
                   "%s (%zu bytes of shared memory): %s", what, bytes,
                   strerror_r(error, reason, sizeof reason));
}

/* Behind the counters. */
static size_t room_bytes(const struct cp_window *window)
{
    return window->reserved - page_bytes();
}

/* Gives pages to a range of the file, or fails and leaves it as it was. A store can
 * then never meet SIGBUS. */
static enum cp_code add_pages(int fd, size_t offset, size_t bytes)
{
    for (size_t done = 0; done < bytes;) {
        size_t piece = bytes - done < piece_bytes ? bytes - done : piece_bytes;
        if (fallocate(fd, 0, (off_t)(offset + done), (off_t)piece) == 0) {
            done += piece;
        } else if (errno != EINTR) {
            enum cp_code code = fail_system("cannot grow a window", bytes);
            (void)fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
                            (off_t)offset, (off_t)bytes);
            return code;
        }
    }
    return CP_OK;
}

static enum cp_code map_window(int fd, size_t bytes, int protection, char **out)
{
    /* A huge page of the file is one of the mapping only where the mapping begins at a
     * multiple of it: take address space with room to spare, map in the middle, give
     * the ends back. */
    char *room = mmap(NULL, bytes + huge_page, PROT_NONE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (room == MAP_FAILED) {
        return fail_system("cannot map a window", bytes);
    }
    size_t before = (huge_page - (uintptr_t)room % huge_page) % huge_page;
    void *base = mmap(room + before, bytes, protection,
                      MAP_SHARED | MAP_NORESERVE | MAP_FIXED, fd, 0);
    if (base == MAP_FAILED) {
        enum cp_code code = fail_system("cannot map a window", bytes);
        (void)munmap(room, bytes + huge_page);
        return code;
    }
    if (before > 0) {
        (void)munmap(room, before);
    }
    (void)munmap(room + before + bytes, huge_page - before);
    /* A forked child has no business here, and would keep the memory in use. */
    if (madvise(base, bytes, MADV_DONTFORK) != 0) {
        enum cp_code code =
            fail_system("cannot keep a window out of forked children", bytes);
        (void)munmap(base, bytes);
        return code;
    }
    *out = base;
    return CP_OK;
}

enum cp_code cp_window_create(size_t reserved, struct cp_window *out)
{
    enum cp_code code = CP_OK;
    char *base = NULL;
    int fd = -1;
    size_t bytes = 0;
    if (!cp_size_round_up(reserved, page_bytes(), &bytes) || bytes < 2 * page_bytes()) {
        return cp_fail(CP_ERR_VALUE, "a window of %zu bytes cannot be; at least %zu",
                       reserved, 2 * page_bytes());
    }
    fd = memfd_create("cp_attn window", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (fd < 0) {
        code = fail_system("cannot create a window", bytes);
        goto done;
    }
    if (ftruncate(fd, (off_t)bytes) != 0) {
        code = fail_system("cannot reserve a window", bytes);
        goto done;
    }
    /* What peers have mapped can never vanish under them. */
    if (fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
        code = fail_system("cannot seal a window", bytes);
        goto done;
    }
    CP_TRY_GOTO(code, add_pages(fd, 0, page_bytes()), done);
    CP_TRY_GOTO(code, map_window(fd, bytes, PROT_READ | PROT_WRITE, &base), done);
    *out = (struct cp_window){
        .fd = fd, .owner_pid = getpid(), .base = base, .reserved = bytes};
    fd = -1;
done:
    if (fd >= 0) {
        (void)close(fd);
    }
    return code;
}

enum cp_code cp_window_map(int fd, struct cp_window *out)
{
    char *base = NULL;
    struct stat file;
    if (fstat(fd, &file) != 0) {
        return fail_system("cannot examine a peer's window", 0);
    }
    int seals = fcntl(fd, F_GET_SEALS);
    if (seals < 0 || (seals & F_SEAL_SHRINK) == 0) {
        return cp_fail(CP_ERR_COMM, "a peer's window is not sealed against shrinking");
    }
    if ((size_t)file.st_size < 2 * page_bytes()) {
        return cp_fail(CP_ERR_COMM, "a peer's window has only %lld bytes",
                       (long long)file.st_size);
    }
    CP_TRY(map_window(fd, (size_t)file.st_size, PROT_READ, &base));
    *out = (struct cp_window){.fd = -1,
                              .owner_pid = getpid(),
                              .base = base,
                              .reserved = (size_t)file.st_size};
    return CP_OK;
}

void cp_window_close(struct cp_window *window)
{
    /* In a forked child the mapping is not there, its addresses may be somebody else's
     * by now, and the descriptor was closed by the meeting's fork handler. */
    if (window->base != NULL && window->owner_pid == getpid()) {
        (void)munmap(window->base, window->reserved);
        if (window->fd >= 0) {
            (void)close(window->fd);
        }
    }
    *window = (struct cp_window){0};
}

static struct comm_shm *shm_of(struct cp_comm *comm)
{
    return (struct comm_shm *)comm;
}

static struct counter *counter_of(const struct comm_shm *shm, int rank, int signal)
{
    struct counter *counters = (void *)shm->windows[rank].base;
    return &counters[signal];
}

/* Turns a range of the own window, all of which has pages, into huge pages as far as it
 * holds whole ones. A wish: this is the one way that works where the system keeps huge
 * pages from shared memory in general, and it may be refused. */
static void use_huge_pages(const struct cp_window *window, size_t first, size_t end)
{
    first += (huge_page - first % huge_page) % huge_page;
    end -= end % huge_page;
    if (first < end) {
        (void)madvise(window->base + first, end - first, MADV_COLLAPSE);
    }
}

static enum cp_code shm_reserve(struct cp_comm *comm, size_t bytes)
{
    struct comm_shm *shm = shm_of(comm);
    const struct cp_window *own = &shm->windows[comm->rank];
    size_t usable = shm->usable, wanted = 0;
    if (bytes <= usable) {
        return CP_OK;
    }
    if (!cp_size_round_up(bytes, page_bytes(), &wanted) || wanted > room_bytes(own)) {
        return cp_fail_rank(CP_ERR_NO_MEMORY, comm->rank,
                            "a window cannot hold %zu bytes; %zu are reserved", bytes,
                            room_bytes(own));
    }
    size_t first = page_bytes(), old_end = first + usable;
    CP_TRY(add_pages(own->fd, old_end, wanted - usable));
    shm->usable = wanted;
    /* Again from the huge page in which the old pages ended. */
    old_end -= old_end % huge_page;
    use_huge_pages(own, old_end > first ? old_end : first, first + wanted);
    return CP_OK;
}

static void *shm_window(struct cp_comm *comm, int rank)
{
    return shm_of(comm)->windows[rank].base + page_bytes();
}

static enum cp_code shm_begin(struct cp_comm *comm, const struct cp_comm_call *call)
{
    shm_of(comm)->call = call->seq;
    return CP_OK;
}

static enum cp_code shm_publish(struct cp_comm *comm, int signal, uint64_t value,
                                struct cp_stream *stream)
{
    struct comm_shm *shm = shm_of(comm);
    (void)stream;
    CP_POINT("shm: before publishing");
    /* release: pairs with the acquire in `has_reached`. */
    atomic_store_explicit(&counter_of(shm, comm->rank, signal)->value,
                          CP_COMM_COUNTER(shm->call, value), memory_order_release);
    CP_POINT("shm: before ringing");
    cp_bell_ring(shm->watch->bell);
    return CP_OK;
}

static bool has_reached(const struct comm_shm *shm, int peer, int signal,
                        uint64_t value)
{
    /* acquire: pairs with the release in `shm_publish`. */
    return atomic_load_explicit(&counter_of(shm, peer, signal)->value,
                                memory_order_acquire) >=
           CP_COMM_COUNTER(shm->call, value);
}

struct shm_wait {
    const struct comm_shm *shm;
    const struct cp_comm_wait *waits;
    int count;
};

static bool is_fulfilled(const struct shm_wait *wait, int index)
{
    const struct cp_comm_wait *one = &wait->waits[index];
    return has_reached(wait->shm, one->peer, one->signal, one->value);
}

static enum cp_code shm_reached(struct cp_comm *comm, const struct cp_comm_wait *waits,
                                int count, struct cp_stream *stream)
{
    const struct shm_wait wait = {shm_of(comm), waits, count};
    bool have_all = true;
    (void)stream;
    for (int i = 0; i < count && have_all; i++) {
        have_all = is_fulfilled(&wait, i);
    }
    return have_all ? CP_OK : CP_AGAIN;
}

static bool any_is_fulfilled(const void *arg)
{
    const struct shm_wait *wait = arg;
    for (int i = 0; i < wait->count; i++) {
        if (is_fulfilled(wait, i)) {
            return true;
        }
    }
    return false;
}

static bool waits_for(const void *arg, int rank)
{
    const struct shm_wait *wait = arg;
    for (int i = 0; i < wait->count; i++) {
        if (wait->waits[i].peer == rank && !is_fulfilled(wait, i)) {
            return true;
        }
    }
    return false;
}

static enum cp_code shm_wait(struct cp_comm *comm, const struct cp_comm_wait *waits,
                             int count, const char *operation,
                             struct cp_deadline deadline)
{
    struct comm_shm *shm = shm_of(comm);
    struct shm_wait arg = {.shm = shm, .waits = waits, .count = count};
    struct cp_wait wait = {
        .is_ready = any_is_fulfilled,
        .needs = waits_for,
        .arg = &arg,
        .operation = operation,
    };
    for (int i = 0; i < count; i++) {
        if (waits[i].is_ticket) {
            return cp_fail(CP_ERR_INTERNAL,
                           "%s waits for a ticket, and shm gives out none", operation);
        }
    }
    return cp_watch_wait(shm->watch, &wait, deadline);
}

static void shm_poison(struct cp_comm *comm, const struct cp_status *reason)
{
    cp_watch_poison(shm_of(comm)->watch, reason);
}

static void shm_close(struct cp_comm **comm)
{
    cp_mem_destroy(comm);
}

static const struct cp_comm_ops shm_ops = {
    .name = "shm",
    .abi = CP_COMM_ABI,
    .reserve = shm_reserve,
    .window = shm_window,
    .begin = shm_begin,
    .publish = shm_publish,
    .reached = shm_reached,
    .wait = shm_wait,
    .poison = shm_poison,
    .close = shm_close,
};

enum cp_code cp_comm_shm_create(const struct cp_window *windows, struct cp_watch *watch,
                                struct cp_comm **out)
{
    void *block = NULL;
    CP_TRY(cp_mem_create(sizeof(struct comm_shm), "a communicator", &block));
    struct comm_shm *shm = block;
    shm->head =
        (struct cp_comm){.ops = &shm_ops, .rank = watch->rank, .world = watch->world};
    shm->windows = windows;
    shm->watch = watch;
    *out = &shm->head;
    return CP_OK;
}
