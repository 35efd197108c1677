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
 * told so. All descriptors are closed in forked children, which would otherwise keep a dead rank's connections open:
 * every system call that makes or ends a descriptor runs under the lock that fork takes. */
#include "control/meet.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#include "base/mem.h"
#include "control/gate.h"

/* Changes with the wire form. Goes into the name, so that different versions do not even meet. */
static const char protocol[] = "cp_attn meeting 1";

enum {
    MOST_STRANGERS =
        64, /* accepted connections that have not said hello; the oldest goes when one more comes */
    MOST_FDS = 2, /* with a hello: the window, and from rank 0 the page */
};

static const int64_t first_pause_ns =
    200000; /* between attempts to connect; doubles up to */
static const int64_t longest_pause_ns = 10000000;
static const int64_t poll_ns = 50000000; /* how long an interruption may go unnoticed */
static const int64_t stranger_ns =
    2000000000; /* a rank says hello at once; whoever is late may come again */
static const int64_t rebind_ns =
    300000000; /* an earlier run's process may be about to end */

struct hash {
    uint64_t word[2];
};

/* What a connection carries, once each way. */
struct message {
    struct hash hash; /* of the meeting */
    int32_t from, to; /* ranks */
    struct cp_hello hello;
};

struct peer {
    int fd;        /* -1: none yet */
    int window_fd; /* -1: not met yet */
    bool is_met;
    int64_t retry_ns, pause_ns; /* lower ranks: when to connect again */
    struct cp_hello hello;
};

struct stranger {
    int fd;
    int64_t since_ns;
};

struct cp_meeting {
    struct cp_meeting *next; /* all meetings of this process */
    int rank, world;
    int listener;
    int own_window_fd;    /* borrowed; closed here only in a forked child */
    int page_fd;          /* rank 0's, until the meeting is complete */
    struct cp_page *page; /* mapping, owned */
    struct hash hash;
    int stranger_count;
    struct stranger stranger[MOST_STRANGERS];
    struct peer peer[]; /* world of them */
};

/* Guards the list and all descriptors of all meetings; held across fork. */
static pthread_mutex_t fork_mutex = PTHREAD_MUTEX_INITIALIZER;
static struct cp_meeting *meetings;
static pthread_once_t fork_once = PTHREAD_ONCE_INIT;
static int fork_error;

static void close_fd(int *fd)
{
    if (*fd >= 0) {
        (void)close(*fd);
        *fd = -1;
    }
}

static void close_all(struct cp_meeting *meeting)
{
    close_fd(&meeting->listener);
    close_fd(&meeting->page_fd);
    for (int i = 0; i < meeting->stranger_count; i++) {
        close_fd(&meeting->stranger[i].fd);
    }
    meeting->stranger_count = 0;
    for (int rank = 0; rank < meeting->world; rank++) {
        close_fd(&meeting->peer[rank].fd);
        close_fd(&meeting->peer[rank].window_fd);
    }
}

static void before_fork(void)
{
    (void)pthread_mutex_lock(&fork_mutex);
}

static void after_fork_in_parent(void)
{
    (void)pthread_mutex_unlock(&fork_mutex);
}

/* The child has neither connections nor mappings; a meeting is then an empty shell that can still be closed. */
static void after_fork_in_child(void)
{
    for (struct cp_meeting *meeting = meetings; meeting != NULL;
         meeting = meeting->next) {
        close_all(meeting);
        close_fd(&meeting->own_window_fd);
        meeting->page = NULL;
    }
    (void)pthread_mutex_unlock(&fork_mutex);
}

static void watch_forks(void)
{
    fork_error = pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child);
}

static enum cp_code fail_system(int rank, const char *what)
{
    int error = errno;
    char reason[64];
    return cp_fail_rank(error == ENOMEM ? CP_ERR_NO_MEMORY : CP_ERR_RUNTIME, rank,
                        "rank %d cannot %s to meet the other ranks: %s", rank, what,
                        strerror_r(error, reason, sizeof reason));
}

/* FNV-1a, twice with different starts, each mixed once more (splitmix64's finaliser). Names, no secrets: who may
 * come in is decided by user id. */
static void hash_bytes(struct hash *hash, const void *data, size_t bytes)
{
    const unsigned char *byte = data;
    for (size_t i = 0; i < bytes; i++) {
        for (int w = 0; w < 2; w++) {
            hash->word[w] = (hash->word[w] ^ byte[i]) * 0x100000001b3u;
        }
    }
}

static struct hash hash_of(const char *key, int world)
{
    struct hash hash = {{0xcbf29ce484222325u, 0x84222325cbf29ce4u}};
    int64_t numbers[] = {(int64_t)geteuid(), world, (int64_t)sizeof(struct message)};
    hash_bytes(&hash, protocol, sizeof protocol);
    hash_bytes(&hash, numbers, sizeof numbers);
    hash_bytes(&hash, key, strlen(key));
    for (int w = 0; w < 2; w++) {
        uint64_t z = hash.word[w];
        z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
        z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
        hash.word[w] = z ^ (z >> 31);
    }
    return hash;
}

/* An abstract name: a zero byte, then the text; its length counts. */
static socklen_t name_of(const struct cp_meeting *meeting, int rank,
                         struct sockaddr_un *out)
{
    *out = (struct sockaddr_un){.sun_family = AF_UNIX};
    int length =
        snprintf(out->sun_path + 1, sizeof out->sun_path - 1,
                 "cp_attn-%016llx%016llx-%d", (unsigned long long)meeting->hash.word[0],
                 (unsigned long long)meeting->hash.word[1], rank);
    return (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + (size_t)length);
}

static bool is_same_user(int fd)
{
    struct ucred peer;
    socklen_t size = sizeof peer;
    return getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &size) == 0 &&
           peer.uid == geteuid();
}

/* A seqpacket socket: a hello comes whole or not at all. */
static int open_socket(void)
{
    return socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
}

static enum cp_code listen_once(struct cp_meeting *meeting, bool *is_taken)
{
    struct sockaddr_un name;
    socklen_t size = name_of(meeting, meeting->rank, &name);
    enum cp_code code = CP_OK;
    *is_taken = false;
    (void)pthread_mutex_lock(&fork_mutex);
    meeting->listener = open_socket();
    if (meeting->listener < 0) {
        code = fail_system(meeting->rank, "open a socket");
    } else if (bind(meeting->listener, (struct sockaddr *)&name, size) != 0) {
        *is_taken = errno == EADDRINUSE;
        code = fail_system(meeting->rank, "bind a socket");
    } else if (listen(meeting->listener, meeting->world + MOST_STRANGERS) != 0) {
        code = fail_system(meeting->rank, "listen on a socket");
    }
    if (code != CP_OK) {
        close_fd(&meeting->listener);
    }
    (void)pthread_mutex_unlock(&fork_mutex);
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
            return cp_fail_rank(CP_ERR_COMM, meeting->rank,
                                "rank %d of %d is already taken: another process on "
                                "this host has come to the same "
                                "meeting with the same rank. Give every process its "
                                "own rank (RANK), and check "
                                "that no process of an earlier run is left",
                                meeting->rank, meeting->world);
        }
        struct timespec pause = {.tv_nsec = (long)longest_pause_ns};
        (void)nanosleep(&pause, NULL);
    }
}

static enum cp_code map_page(struct cp_meeting *meeting, int fd)
{
    size_t bytes = cp_page_bytes(meeting->world);
    void *page = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (page == MAP_FAILED) {
        return fail_system(meeting->rank, "map the shared page");
    }
    if (madvise(page, bytes, MADV_DONTFORK) != 0) {
        enum cp_code code =
            fail_system(meeting->rank, "keep the shared page out of forked children");
        (void)munmap(page, bytes);
        return code;
    }
    meeting->page = page;
    return CP_OK;
}

static enum cp_code create_page(struct cp_meeting *meeting)
{
    off_t bytes = (off_t)cp_page_bytes(meeting->world);
    enum cp_code code = CP_OK;
    (void)pthread_mutex_lock(&fork_mutex);
    meeting->page_fd = memfd_create("cp_attn page", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (meeting->page_fd < 0 || ftruncate(meeting->page_fd, bytes) != 0 ||
        fallocate(meeting->page_fd, 0, 0, bytes) != 0 ||
        fcntl(meeting->page_fd, F_ADD_SEALS,
              F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
        code = fail_system(meeting->rank, "create the shared page");
    } else {
        code = map_page(meeting, meeting->page_fd);
    }
    (void)pthread_mutex_unlock(&fork_mutex);
    if (code == CP_OK) {
        cp_page_init(meeting->page, meeting->world);
    }
    return code;
}

/* A page that could shrink would be a SIGBUS in waiting. */
static bool is_page(const struct cp_meeting *meeting, int fd)
{
    struct stat file;
    int seals = fcntl(fd, F_GET_SEALS);
    return seals >= 0 && (seals & F_SEAL_SHRINK) != 0 && fstat(fd, &file) == 0 &&
           (size_t)file.st_size >= cp_page_bytes(meeting->world);
}

/* The socket is new and its buffer empty: this does not block, and fails only where the peer has gone. */
static bool send_hello(const struct cp_meeting *meeting, int fd, int to,
                       const struct cp_hello *hello)
{
    struct message message = {
        .hash = meeting->hash, .from = meeting->rank, .to = to, .hello = *hello};
    struct iovec part = {.iov_base = &message, .iov_len = sizeof message};
    union {
        struct cmsghdr align;
        char bytes[CMSG_SPACE(MOST_FDS * sizeof(int))];
    } control = {.bytes = {0}};
    int fds[MOST_FDS] = {meeting->own_window_fd, meeting->page_fd};
    size_t fds_bytes = (meeting->rank == 0 ? 2 : 1) * sizeof(int);
    struct msghdr header = {
        .msg_iov = &part,
        .msg_iovlen = 1,
        .msg_control = control.bytes,
        .msg_controllen = CMSG_SPACE(fds_bytes),
    };
    struct cmsghdr *rights = CMSG_FIRSTHDR(&header);
    rights->cmsg_level = SOL_SOCKET;
    rights->cmsg_type = SCM_RIGHTS;
    rights->cmsg_len = CMSG_LEN(fds_bytes);
    memcpy(CMSG_DATA(rights), fds, fds_bytes);
    return sendmsg(fd, &header, MSG_NOSIGNAL | MSG_DONTWAIT) == (ssize_t)sizeof message;
}

enum reading { READ_HELLO, READ_NOTHING_YET, READ_TOO_FEW_FDS, READ_GARBAGE };

/* Takes the descriptors out of a received header; those that are too many are closed. */
static int take_fds(struct msghdr *header, int fds[MOST_FDS])
{
    int count = 0;
    for (struct cmsghdr *part = CMSG_FIRSTHDR(header); part != NULL;
         part = CMSG_NXTHDR(header, part)) {
        if (part->cmsg_level != SOL_SOCKET || part->cmsg_type != SCM_RIGHTS) {
            continue;
        }
        size_t here = (part->cmsg_len - CMSG_LEN(0)) / sizeof(int);
        for (size_t i = 0; i < here; i++) {
            int fd = -1;
            memcpy(&fd, CMSG_DATA(part) + i * sizeof fd, sizeof fd);
            if (count < MOST_FDS) {
                fds[count++] = fd;
            } else {
                (void)close(fd);
            }
        }
    }
    return count;
}

/* On READ_HELLO, `fds` are the caller's: the window, and from rank 0 the page. */
static enum reading read_hello(const struct cp_meeting *meeting, int fd,
                               struct message *message, int fds[MOST_FDS])
{
    struct iovec part = {.iov_base = message, .iov_len = sizeof *message};
    union {
        struct cmsghdr align;
        char bytes[CMSG_SPACE(MOST_FDS * sizeof(int))];
    } control;
    struct msghdr header = {
        .msg_iov = &part,
        .msg_iovlen = 1,
        .msg_control = control.bytes,
        .msg_controllen = sizeof control.bytes,
    };
    ssize_t got = recvmsg(fd, &header, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
    if (got < 0) {
        return errno == EAGAIN || errno == EINTR ? READ_NOTHING_YET : READ_GARBAGE;
    }
    int count = take_fds(&header, fds);
    enum reading reading = READ_GARBAGE;
    if (got == (ssize_t)sizeof *message && (header.msg_flags & MSG_TRUNC) == 0 &&
        message->to == meeting->rank &&
        memcmp(&message->hash, &meeting->hash, sizeof message->hash) == 0 &&
        message->from >= 0 && message->from < meeting->world &&
        message->from != meeting->rank) {
        bool is_whole = count == (message->from == 0 ? 2 : 1) &&
                        (header.msg_flags & MSG_CTRUNC) == 0;
        reading = is_whole ? READ_HELLO : READ_TOO_FEW_FDS;
    }
    if (reading != READ_HELLO) {
        for (int i = 0; i < count; i++) {
            close_fd(&fds[i]);
        }
    }
    return reading;
}

static bool is_hung_up(int fd)
{
    struct pollfd poller = {.fd = fd, .events = POLLRDHUP};
    return fd < 0 ||
           (poll(&poller, 1, 0) > 0 &&
            (poller.revents & (POLLRDHUP | POLLHUP | POLLERR | POLLNVAL)) != 0);
}

static void drop_stranger(struct cp_meeting *meeting, int index)
{
    close_fd(&meeting->stranger[index].fd);
    meeting->stranger_count--;
    memmove(&meeting->stranger[index], &meeting->stranger[index + 1],
            (size_t)(meeting->stranger_count - index) * sizeof meeting->stranger[0]);
}

static enum cp_code accept_strangers(struct cp_meeting *meeting)
{
    for (int i = 0; i < MOST_STRANGERS; i++) {
        int fd = accept4(meeting->listener, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
        if (fd < 0) {
            if (errno == EAGAIN || errno == EINTR || errno == ECONNABORTED) {
                return CP_OK;
            }
            return fail_system(meeting->rank, "accept a connection");
        }
        if (!is_same_user(fd)) {
            close_fd(&fd);
            continue;
        }
        if (meeting->stranger_count == MOST_STRANGERS) {
            drop_stranger(meeting, 0);
        }
        meeting->stranger[meeting->stranger_count++] =
            (struct stranger){.fd = fd, .since_ns = cp_now_ns()};
    }
    return CP_OK;
}

/* A higher rank's hello has come on a stranger's connection: answer it and keep both. */
static bool admit(struct cp_meeting *meeting, struct stranger *stranger,
                  const struct message *message, const int fds[MOST_FDS],
                  const struct cp_hello *own_hello)
{
    struct peer *peer = &meeting->peer[message->from];
    /* Who comes twice has been started anew, if the first is gone; otherwise the second is not who it says. */
    if (message->from < meeting->rank || (peer->is_met && !is_hung_up(peer->fd)) ||
        !send_hello(meeting, stranger->fd, message->from, own_hello)) {
        return false;
    }
    close_fd(&peer->fd);
    close_fd(&peer->window_fd);
    peer->fd = stranger->fd;
    peer->window_fd = fds[0];
    peer->hello = message->hello;
    peer->is_met = true;
    stranger->fd = -1;
    return true;
}

static void hear_strangers(struct cp_meeting *meeting, const struct cp_hello *own_hello)
{
    for (int i = meeting->stranger_count - 1; i >= 0; i--) {
        struct stranger *stranger = &meeting->stranger[i];
        struct message message;
        int fds[MOST_FDS] = {-1, -1};
        enum reading reading = read_hello(meeting, stranger->fd, &message, fds);
        if (reading == READ_NOTHING_YET &&
            cp_now_ns() - stranger->since_ns < stranger_ns) {
            continue;
        }
        if (reading == READ_HELLO &&
            !admit(meeting, stranger, &message, fds, own_hello)) {
            close_fd(&fds[0]);
            close_fd(&fds[1]);
        }
        drop_stranger(meeting, i);
    }
}

static void retry_later(struct peer *peer)
{
    close_fd(&peer->fd);
    peer->retry_ns = cp_now_ns() + peer->pause_ns;
    peer->pause_ns =
        peer->pause_ns * 2 < longest_pause_ns ? peer->pause_ns * 2 : longest_pause_ns;
}

static enum cp_code connect_to(struct cp_meeting *meeting, int rank,
                               const struct cp_hello *own_hello)
{
    struct peer *peer = &meeting->peer[rank];
    struct sockaddr_un name;
    socklen_t size = name_of(meeting, rank, &name);
    peer->fd = open_socket();
    if (peer->fd < 0) {
        return fail_system(meeting->rank, "open a socket");
    }
    /* Whatever goes wrong (nobody listens yet, its queue is full, it ends just now) goes right a little later, or
     * the deadline says who did not come. */
    if (connect(peer->fd, (struct sockaddr *)&name, size) != 0 ||
        !is_same_user(peer->fd) || !send_hello(meeting, peer->fd, rank, own_hello)) {
        retry_later(peer);
    }
    return CP_OK;
}

static enum cp_code hear_answer(struct cp_meeting *meeting, int rank)
{
    struct peer *peer = &meeting->peer[rank];
    struct message message;
    int fds[MOST_FDS] = {-1, -1};
    enum reading reading = read_hello(meeting, peer->fd, &message, fds);
    enum cp_code code = CP_OK;
    if (reading == READ_NOTHING_YET) {
        return CP_OK;
    }
    if (reading == READ_TOO_FEW_FDS) {
        return cp_fail_rank(CP_ERR_RUNTIME, meeting->rank,
                            "rank %d cannot take over rank %d's descriptors; is the "
                            "limit of open files "
                            "(ulimit -n) too low?",
                            meeting->rank, rank);
    }
    if (reading == READ_HELLO && message.from == rank &&
        (rank != 0 || is_page(meeting, fds[1]))) {
        code = rank == 0 ? map_page(meeting, fds[1]) : CP_OK;
        peer->window_fd = fds[0];
        peer->hello = message.hello;
        peer->is_met = true;
        fds[0] = -1;
    } else {
        retry_later(peer);
    }
    close_fd(&fds[0]);
    close_fd(&fds[1]);
    return code;
}

/* Everything that can be done without waiting. */
static enum cp_code meet_once_locked(struct cp_meeting *meeting,
                                     const struct cp_hello *own_hello)
{
    CP_TRY(accept_strangers(meeting));
    hear_strangers(meeting, own_hello);
    for (int rank = 0; rank < meeting->rank; rank++) {
        struct peer *peer = &meeting->peer[rank];
        if (!peer->is_met && peer->fd < 0 && cp_now_ns() >= peer->retry_ns) {
            CP_TRY(connect_to(meeting, rank, own_hello));
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
    for (int rank = 0; rank < meeting->world; rank++) {
        missing += rank != meeting->rank && !meeting->peer[rank].is_met;
    }
    return missing;
}

static enum cp_code fail_late(const struct cp_meeting *meeting,
                              struct cp_deadline deadline)
{
    char list[160] = "";
    size_t used = 0;
    int missing = count_missing(meeting);
    for (int rank = 0; rank < meeting->world; rank++) {
        if (rank != meeting->rank && !meeting->peer[rank].is_met &&
            used < sizeof list) {
            int added = snprintf(list + used, sizeof list - used, "%s%d",
                                 used > 0 ? ", " : "", rank);
            used += added > 0 ? (size_t)added : 0;
        }
    }
    return cp_fail_rank(
        CP_ERR_TIMEOUT, meeting->rank,
        "%s %s of %d did not appear to rank %d within %.1f s. Check that all processes "
        "were started "
        "and still run, on this host and as the same user, with the same world size, "
        "MASTER_ADDR and MASTER_PORT (or job id), and the same version of cp_attn",
        missing > 1 ? "ranks" : "rank", list, meeting->world, meeting->rank,
        deadline.seconds);
}

/* Sleeps until something may have changed. `pollers` has room for all. */
static void wait_for_news(const struct cp_meeting *meeting, struct pollfd *pollers,
                          struct cp_deadline deadline)
{
    nfds_t count = 0;
    int64_t now_ns = cp_now_ns();
    int64_t until_ns =
        now_ns + poll_ns < deadline.at_ns ? now_ns + poll_ns : deadline.at_ns;
    pollers[count++] = (struct pollfd){.fd = meeting->listener, .events = POLLIN};
    for (int i = 0; i < meeting->stranger_count; i++) {
        pollers[count++] =
            (struct pollfd){.fd = meeting->stranger[i].fd, .events = POLLIN};
    }
    for (int rank = 0; rank < meeting->rank; rank++) {
        const struct peer *peer = &meeting->peer[rank];
        if (peer->is_met) {
            continue;
        }
        if (peer->fd >= 0) {
            pollers[count++] = (struct pollfd){.fd = peer->fd, .events = POLLIN};
        } else if (peer->retry_ns < until_ns) {
            until_ns = peer->retry_ns;
        }
    }
    int64_t left_ns = until_ns > now_ns ? until_ns - now_ns : 0;
    struct timespec left = {.tv_sec = (time_t)(left_ns / 1000000000),
                            .tv_nsec = (long)(left_ns % 1000000000)};
    (void)ppoll(pollers, count, &left, NULL);
}

static enum cp_code meet_all(struct cp_meeting *meeting,
                             const struct cp_meet_args *args, struct pollfd *pollers)
{
    for (;;) {
        (void)pthread_mutex_lock(&fork_mutex);
        enum cp_code code = meet_once_locked(meeting, &args->hello);
        (void)pthread_mutex_unlock(&fork_mutex);
        CP_TRY(code);
        if (count_missing(meeting) == 0) {
            return CP_OK;
        }
        code = args->interrupt != NULL ? args->interrupt(args->interrupt_arg) : CP_OK;
        if (code != CP_OK) {
            return cp_fail_rank(
                code, meeting->rank,
                "rank %d was interrupted while it waited for the other ranks",
                meeting->rank);
        }
        if (cp_deadline_passed(args->deadline)) {
            return fail_late(meeting, args->deadline);
        }
        wait_for_news(meeting, pollers, args->deadline);
    }
}

static void join_list(struct cp_meeting *meeting)
{
    (void)pthread_mutex_lock(&fork_mutex);
    meeting->next = meetings;
    meetings = meeting;
    (void)pthread_mutex_unlock(&fork_mutex);
}

static void leave_list(struct cp_meeting *meeting)
{
    (void)pthread_mutex_lock(&fork_mutex);
    for (struct cp_meeting **link = &meetings; *link != NULL; link = &(*link)->next) {
        if (*link == meeting) {
            *link = meeting->next;
            break;
        }
    }
    close_all(meeting);
    (void)pthread_mutex_unlock(&fork_mutex);
}

enum cp_code cp_meet(const struct cp_meet_args *args, struct cp_meeting **out)
{
    enum cp_code code = CP_OK;
    struct cp_meeting *meeting = NULL;
    void *block = NULL, *pollers = NULL;
    if (args->world < 1 || args->rank < 0 || args->rank >= args->world) {
        return cp_fail(CP_ERR_VALUE, "rank %d of %d cannot be", args->rank,
                       args->world);
    }
    (void)pthread_once(&fork_once, watch_forks);
    if (fork_error != 0) {
        errno = fork_error;
        return fail_system(args->rank, "register for forks");
    }
    CP_TRY_GOTO(code,
                cp_mem_create((size_t)(1 + MOST_STRANGERS + args->world) *
                                  sizeof(struct pollfd),
                              "a meeting", &pollers),
                done);
    CP_TRY_GOTO(
        code,
        cp_mem_create(sizeof *meeting + (size_t)args->world * sizeof meeting->peer[0],
                      "a meeting", &block),
        done);
    meeting = block;
    meeting->rank = args->rank;
    meeting->world = args->world;
    meeting->listener = -1;
    meeting->own_window_fd = args->window_fd;
    meeting->page_fd = -1;
    meeting->hash = hash_of(args->key, args->world);
    for (int rank = 0; rank < args->world; rank++) {
        meeting->peer[rank] =
            (struct peer){.fd = -1, .window_fd = -1, .pause_ns = first_pause_ns};
    }
    meeting->peer[args->rank].hello = args->hello;
    join_list(meeting);
    CP_TRY_GOTO(code, listen_as_own_rank(meeting), done);
    if (args->rank == 0) {
        CP_TRY_GOTO(code, create_page(meeting), done);
    }
    CP_TRY_GOTO(code, meet_all(meeting, args, pollers), done);
    (void)pthread_mutex_lock(&fork_mutex);
    close_fd(&meeting->page_fd);
    while (meeting->stranger_count > 0) {
        drop_stranger(meeting, meeting->stranger_count - 1);
    }
    (void)pthread_mutex_unlock(&fork_mutex);
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
    leave_list(*meeting);
    if ((*meeting)->page != NULL) {
        (void)munmap((*meeting)->page, cp_page_bytes((*meeting)->world));
    }
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

void *cp_meeting_page(const struct cp_meeting *meeting)
{
    return meeting->page;
}

bool cp_meeting_is_dead(void *peers, int rank)
{
    const struct cp_meeting *meeting = peers;
    return rank != meeting->rank && is_hung_up(meeting->peer[rank].fd);
}
