/* Finds the other ranks of this host and keeps one connection to each of them.
 *
 *     rank r                                        rank p < r
 *     binds and listens as ...-r                    binds and listens as ...-p
 *     connects to ...-p, until somebody listens
 *     hello, window          ------------------>    accepts; checks user and hello
 *     checks user and hello  <------------------    hello, window (rank 0: and the page)
 *     both: the connection stays open and silent; that it closes is the news
 *
 * One thread, non-blocking calls, one poll: a client that says nothing costs a place in a list for a while, no time.
 * A rank has met p once p's hello is read (and answered, by the lower one), so a rank may finish, and even close,
 * while others still meet: what it sent stays readable, and its end of each connection has nothing unread.
 * A connection that breaks before the hello has come is tried again: it may have been somebody else's, or the old
 * listener of a rank that is just starting anew.
 *
 * The listener stays open and unread as long as the meeting lasts, so that a second process with the same rank is
 * told so. All descriptors are closed in forked children (control/meet_fork.h). */
#include "control/meet.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "base/mem.h"
#include "base/text.h"
#include "control/gate.h"
#include "control/meet_fork.h"
#include "control/meet_guests.h"
#include "control/meet_until.h"
#include "control/meet_wire.h"

static const int64_t rebind_ns =
    300000000; /* an earlier run's process may be about to end */
static const int64_t rebind_pause_ns = 10000000;

struct peer {
    int fd;        /* -1: none yet */
    int window_fd; /* -1: not met yet */
    bool is_met;
    struct cp_meet_retry retry; /* lower ranks: when to connect again */
    struct cp_hello hello;
};

struct cp_meeting {
    struct cp_fork_entry fork;
    /* Its window is borrowed, and closed here only in a forked child; its page is there
     * until the meeting is complete. */
    struct cp_wire self;
    int listener;
    struct cp_mapping *page; /* owned */
    struct cp_guests guests;
    struct peer peer[]; /* world of them */
};

static void close_all(struct cp_meeting *meeting)
{
    cp_wire_close(&meeting->listener);
    cp_wire_close(&meeting->self.page_fd);
    cp_guests_drop_all(&meeting->guests);
    for (int rank = 0; rank < meeting->self.world; rank++) {
        cp_wire_close(&meeting->peer[rank].fd);
        cp_wire_close(&meeting->peer[rank].window_fd);
    }
}

/* The child has neither connections nor mappings; a meeting is then an empty shell that can still be closed. */
static void clear_in_child(struct cp_fork_entry *entry)
{
    struct cp_meeting *meeting = (struct cp_meeting *)entry; /* its first member */
    close_all(meeting);
    cp_wire_close(&meeting->self.window_fd);
    meeting->page = NULL;
}

static enum cp_code listen_once(struct cp_meeting *meeting, bool *is_taken)
{
    struct sockaddr_un name;
    socklen_t size = cp_wire_name(&meeting->self.hash, meeting->self.rank, &name);
    enum cp_code code = CP_OK;
    *is_taken = false;
    cp_fork_lock();
    meeting->listener = cp_wire_open();
    if (meeting->listener < 0) {
        code = cp_meet_fail_system(meeting->self.rank, "open a socket");
    } else if (bind(meeting->listener, (struct sockaddr *)&name, size) != 0) {
        *is_taken = errno == EADDRINUSE;
        code = cp_meet_fail_system(meeting->self.rank, "bind a socket");
    } else if (listen(meeting->listener, meeting->self.world + CP_GUESTS_MOST) != 0) {
        code = cp_meet_fail_system(meeting->self.rank, "listen on a socket");
    }
    if (code != CP_OK) {
        cp_wire_close(&meeting->listener);
    }
    cp_fork_unlock();
    return code;
}

static enum cp_code listen_as_own_rank(struct cp_meeting *meeting)
{
    int64_t give_up_ns = cp_now_ns() + rebind_ns;
    for (;;) {
        bool is_taken = false;
        enum cp_code code = listen_once(meeting, &is_taken);
        if (!is_taken) {
            return code;
        }
        if (cp_now_ns() >= give_up_ns) {
            return cp_fail_rank(CP_ERR_COMM, meeting->self.rank,
                                "rank %d of %d is already taken: another process on "
                                "this host has come to the same "
                                "meeting with the same rank. Give every process its "
                                "own rank (RANK), and check "
                                "that no process of an earlier run is left",
                                meeting->self.rank, meeting->self.world);
        }
        struct timespec pause = {.tv_nsec = (long)rebind_pause_ns};
        (void)nanosleep(&pause, NULL);
    }
}

static enum cp_code map_page(struct cp_meeting *meeting, int fd)
{
    size_t bytes = cp_page_bytes(meeting->self.world);
    void *page = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (page == MAP_FAILED) {
        return cp_meet_fail_system(meeting->self.rank, "map the shared page");
    }
    enum cp_code code =
        madvise(page, bytes, MADV_DONTFORK) != 0
            ? cp_meet_fail_system(meeting->self.rank,
                                  "keep the shared page out of forked children")
            : cp_mapping_create(page, bytes, &meeting->page);
    if (code != CP_OK) {
        (void)munmap(page, bytes);
    }
    return code;
}

static enum cp_code create_page(struct cp_meeting *meeting)
{
    off_t bytes = (off_t)cp_page_bytes(meeting->self.world);
    enum cp_code code = CP_OK;
    cp_fork_lock();
    meeting->self.page_fd =
        memfd_create("cp_attn page", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (meeting->self.page_fd < 0 || ftruncate(meeting->self.page_fd, bytes) != 0 ||
        fallocate(meeting->self.page_fd, 0, 0, bytes) != 0 ||
        fcntl(meeting->self.page_fd, F_ADD_SEALS,
              F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
        code = cp_meet_fail_system(meeting->self.rank, "create the shared page");
    } else {
        code = map_page(meeting, meeting->self.page_fd);
    }
    cp_fork_unlock();
    return code;
}

/* A page that could shrink would be a SIGBUS in waiting. */
static bool is_page(const struct cp_meeting *meeting, int fd)
{
    struct stat file;
    int seals = fcntl(fd, F_GET_SEALS);
    return seals >= 0 && (seals & F_SEAL_SHRINK) != 0 && fstat(fd, &file) == 0 &&
           (size_t)file.st_size >= cp_page_bytes(meeting->self.world);
}

/* A higher rank's hello has come on a guest's connection: answer it and keep both. */
static bool admit(struct cp_meeting *meeting, struct cp_guest *guest,
                  const struct cp_wire_message *message, const int fds[CP_WIRE_FDS],
                  const struct cp_hello *own_hello)
{
    struct peer *peer = &meeting->peer[message->from];
    /* Who comes twice has been started anew, if the first is gone; otherwise the second is not who it says. */
    if (message->from < meeting->self.rank ||
        (peer->is_met && !cp_wire_is_hung_up(peer->fd)) ||
        !cp_wire_send(&meeting->self, guest->fd, message->from, own_hello)) {
        return false;
    }
    cp_wire_close(&peer->fd);
    cp_wire_close(&peer->window_fd);
    peer->fd = guest->fd;
    peer->window_fd = fds[0];
    peer->hello = message->hello;
    peer->is_met = true;
    guest->fd = -1;
    return true;
}

static void hear_guests(struct cp_meeting *meeting, const struct cp_hello *own_hello)
{
    for (int i = meeting->guests.count - 1; i >= 0; i--) {
        struct cp_guest *guest = &meeting->guests.guest[i];
        struct cp_wire_message message;
        int fds[CP_WIRE_FDS] = {-1, -1};
        enum cp_wire_reading reading =
            cp_wire_read(&meeting->self, guest->fd, &message, fds);
        if (reading == CP_WIRE_NOTHING_YET && !cp_guest_is_late(guest)) {
            continue;
        }
        if (reading == CP_WIRE_HELLO &&
            !admit(meeting, guest, &message, fds, own_hello)) {
            cp_wire_close(&fds[0]);
            cp_wire_close(&fds[1]);
        }
        cp_guests_drop(&meeting->guests, i);
    }
}

static void retry_later(struct peer *peer)
{
    cp_wire_close(&peer->fd);
    cp_meet_retry_later(&peer->retry);
}

static enum cp_code connect_to(struct cp_meeting *meeting, int rank,
                               const struct cp_hello *own_hello)
{
    struct peer *peer = &meeting->peer[rank];
    struct sockaddr_un name;
    socklen_t size = cp_wire_name(&meeting->self.hash, rank, &name);
    peer->fd = cp_wire_open();
    if (peer->fd < 0) {
        return cp_meet_fail_system(meeting->self.rank, "open a socket");
    }
    /* Whatever goes wrong (nobody listens yet, its queue is full, it ends just now) goes right a little later, or
     * the deadline says who did not come. */
    if (connect(peer->fd, (struct sockaddr *)&name, size) != 0 ||
        !cp_wire_is_same_user(peer->fd) ||
        !cp_wire_send(&meeting->self, peer->fd, rank, own_hello)) {
        retry_later(peer);
    }
    return CP_OK;
}

static enum cp_code hear_answer(struct cp_meeting *meeting, int rank)
{
    struct peer *peer = &meeting->peer[rank];
    struct cp_wire_message message;
    int fds[CP_WIRE_FDS] = {-1, -1};
    enum cp_wire_reading reading =
        cp_wire_read(&meeting->self, peer->fd, &message, fds);
    enum cp_code code = CP_OK;
    if (reading == CP_WIRE_NOTHING_YET) {
        return CP_OK;
    }
    if (reading == CP_WIRE_TOO_FEW_FDS) {
        return cp_fail_rank(CP_ERR_RUNTIME, meeting->self.rank,
                            "rank %d cannot take over rank %d's descriptors; is the "
                            "limit of open files "
                            "(ulimit -n) too low?",
                            meeting->self.rank, rank);
    }
    if (reading == CP_WIRE_HELLO && message.from == rank &&
        (rank != 0 || is_page(meeting, fds[1]))) {
        code = rank == 0 ? map_page(meeting, fds[1]) : CP_OK;
        peer->window_fd = fds[0];
        peer->hello = message.hello;
        peer->is_met = true;
        fds[0] = -1;
    } else {
        retry_later(peer);
    }
    cp_wire_close(&fds[0]);
    cp_wire_close(&fds[1]);
    return code;
}

static enum cp_code meet_once(void *arg, const struct cp_meet_args *args)
{
    struct cp_meeting *meeting = arg;
    if (!cp_guests_accept(&meeting->guests, meeting->listener, cp_wire_is_same_user)) {
        return cp_meet_fail_system(meeting->self.rank, "accept a connection");
    }
    hear_guests(meeting, &args->hello);
    for (int rank = 0; rank < meeting->self.rank; rank++) {
        struct peer *peer = &meeting->peer[rank];
        if (!peer->is_met && peer->fd < 0 && cp_now_ns() >= peer->retry.at_ns) {
            CP_TRY(connect_to(meeting, rank, &args->hello));
        }
        if (!peer->is_met && peer->fd >= 0) {
            CP_TRY(hear_answer(meeting, rank));
        }
    }
    return CP_OK;
}

static int count_missing(const struct cp_meeting *meeting)
{
    int missing = 0;
    for (int rank = 0; rank < meeting->self.world; rank++) {
        missing += rank != meeting->self.rank && !meeting->peer[rank].is_met;
    }
    return missing;
}

static bool is_complete(const void *arg)
{
    return count_missing(arg) == 0;
}

static enum cp_code fail_late(const void *arg, const struct cp_meet_args *args)
{
    const struct cp_meeting *meeting = arg;
    char list[160] = "";
    int missing = count_missing(meeting);
    for (int rank = 0; rank < meeting->self.world; rank++) {
        if (rank != meeting->self.rank && !meeting->peer[rank].is_met) {
            cp_text_append(list, sizeof list, "%s%d", list[0] != '\0' ? ", " : "",
                           rank);
        }
    }
    return cp_fail_rank(
        CP_ERR_TIMEOUT, meeting->self.rank,
        "%s %s of %d did not appear to rank %d within %.1f s. Check that all processes "
        "were started "
        "and still run, on this host and as the same user, with the same world size, "
        "MASTER_ADDR and MASTER_PORT (or job id), and the same version of cp_attn",
        missing > 1 ? "ranks" : "rank", list, meeting->self.world, meeting->self.rank,
        args->deadline.seconds);
}

static nfds_t poll_all(const void *arg, struct pollfd *pollers, int64_t *until_ns)
{
    const struct cp_meeting *meeting = arg;
    nfds_t count = cp_guests_poll(&meeting->guests, pollers);
    pollers[count++] = (struct pollfd){.fd = meeting->listener, .events = POLLIN};
    for (int rank = 0; rank < meeting->self.rank; rank++) {
        const struct peer *peer = &meeting->peer[rank];
        if (peer->is_met) {
            continue;
        }
        if (peer->fd >= 0) {
            pollers[count++] = (struct pollfd){.fd = peer->fd, .events = POLLIN};
        } else if (peer->retry.at_ns < *until_ns) {
            *until_ns = peer->retry.at_ns;
        }
    }
    return count;
}

static const struct cp_meet_kind kind = {
    .once = meet_once,
    .is_complete = is_complete,
    .poll = poll_all,
    .fail_late = fail_late,
};

enum cp_code cp_meet(const struct cp_meet_args *args, struct cp_meeting **out)
{
    enum cp_code code = CP_OK;
    struct cp_meeting *meeting = NULL;
    void *block = NULL, *pollers = NULL;
    if (args->world < 1 || args->rank < 0 || args->rank >= args->world) {
        return cp_fail(CP_ERR_VALUE, "rank %d of %d cannot be", args->rank,
                       args->world);
    }
    int fork_error = cp_fork_watch();
    if (fork_error != 0) {
        errno = fork_error;
        return cp_meet_fail_system(args->rank, "register for forks");
    }
    CP_TRY_GOTO(code,
                cp_mem_create((size_t)(1 + CP_GUESTS_MOST + args->world) *
                                  sizeof(struct pollfd),
                              "a meeting", &pollers),
                done);
    CP_TRY_GOTO(
        code,
        cp_mem_create(sizeof *meeting + (size_t)args->world * sizeof meeting->peer[0],
                      "a meeting", &block),
        done);
    meeting = block;
    meeting->self.rank = args->rank;
    meeting->self.world = args->world;
    meeting->listener = -1;
    meeting->self.window_fd = args->window_fd;
    meeting->self.page_fd = -1;
    meeting->self.hash = cp_wire_hash_of(args->key, args->world);
    for (int rank = 0; rank < args->world; rank++) {
        meeting->peer[rank] = (struct peer){.fd = -1, .window_fd = -1};
    }
    meeting->peer[args->rank].hello = args->hello;
    meeting->fork.clear = clear_in_child;
    cp_fork_lock();
    cp_fork_add(&meeting->fork);
    cp_fork_unlock();
    CP_TRY_GOTO(code, listen_as_own_rank(meeting), done);
    if (args->rank == 0) {
        CP_TRY_GOTO(code, create_page(meeting), done);
    }
    CP_TRY_GOTO(code, cp_meet_until(&kind, meeting, args, pollers), done);
    cp_fork_lock();
    cp_wire_close(&meeting->self.page_fd);
    cp_guests_drop_all(&meeting->guests);
    cp_fork_unlock();
    *out = meeting;
    meeting = NULL;
done:
    cp_meeting_close(&meeting);
    cp_mem_destroy(&pollers);
    return code;
}

void cp_meeting_close(struct cp_meeting **meeting)
{
    if (*meeting == NULL) {
        return;
    }
    cp_fork_lock();
    cp_fork_remove(&(*meeting)->fork);
    close_all(*meeting);
    cp_fork_unlock();
    cp_mapping_drop(&(*meeting)->page);
    cp_mem_destroy(meeting);
}

const struct cp_hello *cp_meeting_hello(const struct cp_meeting *meeting, int rank)
{
    return &meeting->peer[rank].hello;
}

int cp_meeting_window_fd(const struct cp_meeting *meeting, int rank)
{
    return meeting->peer[rank].window_fd;
}

struct cp_mapping *cp_meeting_page(const struct cp_meeting *meeting)
{
    return meeting->page;
}

bool cp_meeting_is_dead(void *peers, int rank)
{
    const struct cp_meeting *meeting = peers;
    return rank != meeting->self.rank && cp_wire_is_hung_up(meeting->peer[rank].fd);
}
