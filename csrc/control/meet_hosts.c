/* Ranks of several hosts find each other through rank 0 and connect.
 *
 *     rank r                                          rank 0
 *     listens at a port of its choice                 listens where all know
 *     connects, until somebody listens
 *     hello, own port         --------------------->  accepts; checks
 *     checks                  <---------------------  hello
 *     learns who is where     <---------------------  a notice of every rank that comes, or has
 *
 *     rank r                                          rank p < r
 *     hello                   --------------------->  accepts; checks
 *     checks                  <---------------------  hello
 *
 * The second part happens for both lines of a pair, but for the line to rank 0 on which
 * the first part did. A rank is through when it has both lines to all and, from rank 0,
 * the notices of all: then nothing is left unread on any line. */
#include "control/meet_hosts.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/mem.h"
#include "base/text.h"
#include "control/meet_fork.h"
#include "control/meet_guests.h"
#include "control/meet_tcp.h"
#include "control/meet_until.h"
#include "control/meet_wire.h"

/* A hello as it goes over a line. */
struct greeting {
    struct cp_wire_message message;
    int32_t line; /* enum cp_line */
    int32_t port; /* where the sender listens, in network order */
};

/* From rank 0: `rank` has come, and listens there. */
struct notice {
    int32_t rank;
    union cp_address where; /* as rank 0 sees it */
};

struct cp_hosts {
    struct cp_fork_entry fork;
    int world;
    int listener;
    struct cp_guests guests; /* none once all have met */
    struct cp_hello *hello;  /* (world) */
    int *fd[CP_LINES];       /* (world) */
};

/* What is known of another rank while all meet. */
struct peer {
    bool has_come; /* `where` is known */
    union cp_address where;
    bool is_met[CP_LINES];
    bool is_greeted[CP_LINES]; /* lower ranks: the own hello is out */
    struct cp_meet_retry retry[CP_LINES];
    int told; /* higher ranks, by rank 0: how many notices */
};

struct gathering {
    struct cp_wire self;
    struct cp_hosts *hosts;
    union cp_address root;
    int32_t port; /* of the own listener, in network order */
    int notice_count;
    struct notice *notices; /* (world) in the order of coming */
    struct peer *peer;      /* (world) */
};

/* ---- hellos ---- */

static bool greet(const struct gathering *g, int fd, int to, enum cp_line line,
                  const struct cp_hello *hello)
{
    struct greeting greeting = {.message = cp_wire_message_to(&g->self, to, hello),
                                .line = (int32_t)line,
                                .port = g->port};
    return cp_tcp_send(fd, &greeting, sizeof greeting);
}

static enum cp_wire_reading read_greeting(const struct gathering *g, int fd,
                                          struct greeting *greeting)
{
    enum cp_wire_reading reading = cp_tcp_read(fd, greeting, sizeof *greeting);
    return reading == CP_WIRE_HELLO &&
                   !(cp_wire_is_hello(&g->self, &greeting->message) &&
                     greeting->line >= 0 && greeting->line < CP_LINES)
               ? CP_WIRE_GARBAGE
               : reading;
}

/* ---- listening ---- */

static enum cp_code listen_anywhere(struct gathering *g)
{
    union cp_address name = {.any.sa_family = g->root.any.sa_family};
    int *listener = &g->hosts->listener;
    *listener = socket(name.any.sa_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (*listener < 0 || bind(*listener, &name.any, cp_address_bytes(&name)) != 0 ||
        listen(*listener, g->self.world + CP_GUESTS_MOST) != 0) {
        return cp_meet_fail_system(g->self.rank, "listen on a socket");
    }
    return CP_OK;
}

/* Rank 0's is there already, and the caller's: it stays open behind this one. */
static enum cp_code open_listener(struct gathering *g, int given)
{
    union cp_address name;
    socklen_t size = sizeof name;
    enum cp_code code = CP_OK;
    cp_fork_lock();
    if (given < 0) {
        code = listen_anywhere(g);
    } else {
        g->hosts->listener = fcntl(given, F_DUPFD_CLOEXEC, 0);
    }
    if (code == CP_OK && (!cp_tcp_prepare(g->hosts->listener) ||
                          getsockname(g->hosts->listener, &name.any, &size) != 0)) {
        code = cp_meet_fail_system(g->self.rank, "use its listening socket");
    }
    cp_fork_unlock();
    CP_TRY(code);
    g->port = *cp_address_port(&name);
    return CP_OK;
}

/* ---- meeting ---- */

static void meet_on(struct gathering *g, int rank, enum cp_line line, int fd,
                    const struct cp_hello *hello)
{
    g->hosts->fd[line][rank] = fd;
    g->hosts->hello[rank] = *hello;
    g->peer[rank].is_met[line] = true;
}

/* Rank 0: writes down where a rank is that has come to it. */
static bool note(struct gathering *g, int rank, int fd, int32_t port)
{
    struct notice notice;
    socklen_t size = sizeof notice.where;
    memset(&notice, 0, sizeof notice);
    notice.rank = rank;
    if (getpeername(fd, &notice.where.any, &size) != 0) {
        return false;
    }
    *cp_address_port(&notice.where) = (in_port_t)port;
    g->peer[rank].has_come = true;
    g->notices[g->notice_count++] = notice;
    return true;
}

/* A higher rank's hello has come on a guest's connection: answer it and keep both. */
static bool admit(struct gathering *g, struct cp_guest *guest,
                  const struct greeting *greeting, const struct cp_hello *own_hello)
{
    int from = greeting->message.from;
    enum cp_line line = (enum cp_line)greeting->line;
    if (from < g->self.rank || g->peer[from].is_met[line] ||
        !cp_tcp_prepare(guest->fd) || !greet(g, guest->fd, from, line, own_hello) ||
        (g->self.rank == 0 && line == CP_LINE_CONTROL &&
         !note(g, from, guest->fd, greeting->port))) {
        return false;
    }
    meet_on(g, from, line, guest->fd, &greeting->message.hello);
    guest->fd = -1;
    return true;
}

static void hear_guests(struct gathering *g, const struct cp_hello *own_hello)
{
    struct cp_guests *guests = &g->hosts->guests;
    for (int i = guests->count - 1; i >= 0; i--) {
        struct greeting greeting;
        enum cp_wire_reading reading = read_greeting(g, guests->guest[i].fd, &greeting);
        if (reading == CP_WIRE_NOTHING_YET && !cp_guest_is_late(&guests->guest[i])) {
            continue;
        }
        if (reading == CP_WIRE_HELLO) {
            (void)admit(g, &guests->guest[i], &greeting, own_hello);
        }
        cp_guests_drop(guests, i);
    }
}

/* Rank 0: every rank gets the notices that it has not had. One that cannot take them
 * has gone; the deadline will say so. */
static void tell(struct gathering *g)
{
    for (int rank = 1; rank < g->self.world; rank++) {
        struct peer *peer = &g->peer[rank];
        while (peer->is_met[CP_LINE_CONTROL] && peer->told < g->notice_count &&
               cp_tcp_send(g->hosts->fd[CP_LINE_CONTROL][rank], &g->notices[peer->told],
                           sizeof g->notices[0])) {
            peer->told++;
        }
    }
}

static bool read_notice(const struct gathering *g, struct notice *notice)
{
    return cp_tcp_read(g->hosts->fd[CP_LINE_CONTROL][0], notice, sizeof *notice) ==
               CP_WIRE_HELLO &&
           notice->rank > 0 && notice->rank < g->self.world;
}

/* Other ranks: where the others are. One that came to rank 0 by way of that host itself
 * is where rank 0 is. */
static void hear_notices(struct gathering *g)
{
    struct notice notice;
    while (g->peer[0].is_met[CP_LINE_CONTROL] && g->notice_count < g->self.world - 1 &&
           read_notice(g, &notice)) {
        struct peer *peer = &g->peer[notice.rank];
        peer->where = notice.where;
        if (cp_address_is_loopback(&notice.where)) {
            peer->where = g->root;
            *cp_address_port(&peer->where) = *cp_address_port(&notice.where);
        }
        peer->has_come = true;
        g->notice_count++;
    }
}

static void retry_later(struct gathering *g, int rank, enum cp_line line)
{
    cp_wire_close(&g->hosts->fd[line][rank]);
    g->peer[rank].is_greeted[line] = false;
    cp_meet_retry_later(&g->peer[rank].retry[line]);
}

static enum cp_code connect_to(struct gathering *g, int rank, enum cp_line line)
{
    const union cp_address *where = &g->peer[rank].where;
    int *fd = &g->hosts->fd[line][rank];
    *fd = socket(where->any.sa_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (*fd < 0 || !cp_tcp_prepare(*fd)) {
        return cp_meet_fail_system(g->self.rank, "open a socket");
    }
    if (connect(*fd, &where->any, cp_address_bytes(where)) != 0 &&
        errno != EINPROGRESS) {
        retry_later(g, rank, line);
    }
    return CP_OK;
}

/* On a connection that has been begun: the hello as soon as it is there, then the
 * answer. Whatever goes wrong goes right a little later, or the deadline says who is
 * missing. */
static void get_on(struct gathering *g, int rank, enum cp_line line,
                   const struct cp_hello *own_hello)
{
    int fd = g->hosts->fd[line][rank];
    struct peer *peer = &g->peer[rank];
    if (!peer->is_greeted[line]) {
        struct pollfd poller = {.fd = fd, .events = POLLOUT};
        if (poll(&poller, 1, 0) <= 0) {
            return;
        }
        peer->is_greeted[line] = greet(g, fd, rank, line, own_hello);
        if (!peer->is_greeted[line]) {
            retry_later(g, rank, line);
            return;
        }
    }
    struct greeting greeting;
    enum cp_wire_reading reading = read_greeting(g, fd, &greeting);
    if (reading == CP_WIRE_HELLO && greeting.message.from == rank &&
        greeting.line == (int32_t)line) {
        meet_on(g, rank, line, fd, &greeting.message.hello);
    } else if (reading != CP_WIRE_NOTHING_YET) {
        retry_later(g, rank, line);
    }
}

static enum cp_code reach(struct gathering *g, int rank, enum cp_line line,
                          const struct cp_hello *own_hello)
{
    const struct peer *peer = &g->peer[rank];
    const int *fd = &g->hosts->fd[line][rank];
    if (peer->is_met[line] || !peer->has_come) {
        return CP_OK;
    }
    if (*fd < 0 && cp_now_ns() >= peer->retry[line].at_ns) {
        CP_TRY(connect_to(g, rank, line));
    }
    if (*fd >= 0) {
        get_on(g, rank, line, own_hello);
    }
    return CP_OK;
}

static enum cp_code meet_once(void *arg, const struct cp_meet_args *args)
{
    struct gathering *g = arg;
    if (!cp_guests_accept(&g->hosts->guests, g->hosts->listener, NULL)) {
        return cp_meet_fail_system(g->self.rank, "accept a connection");
    }
    hear_guests(g, &args->hello);
    if (g->self.rank == 0) {
        tell(g);
    } else {
        hear_notices(g);
    }
    for (int rank = 0; rank < g->self.rank; rank++) {
        for (int line = 0; line < CP_LINES; line++) {
            CP_TRY(reach(g, rank, (enum cp_line)line, &args->hello));
        }
    }
    return CP_OK;
}

static bool is_met(const struct gathering *g, int rank)
{
    return rank == g->self.rank || (g->peer[rank].is_met[CP_LINE_CONTROL] &&
                                    g->peer[rank].is_met[CP_LINE_DATA]);
}

static bool is_complete(const void *arg)
{
    const struct gathering *g = arg;
    for (int rank = 0; rank < g->self.world; rank++) {
        if (!is_met(g, rank)) {
            return false;
        }
    }
    return g->notice_count == g->self.world - 1;
}

static nfds_t poll_all(const void *arg, struct pollfd *pollers, int64_t *until_ns)
{
    const struct gathering *g = arg;
    nfds_t count = cp_guests_poll(&g->hosts->guests, pollers);
    pollers[count++] = (struct pollfd){.fd = g->hosts->listener, .events = POLLIN};
    if (g->self.rank > 0 && g->peer[0].is_met[CP_LINE_CONTROL] &&
        g->notice_count < g->self.world - 1) {
        pollers[count++] =
            (struct pollfd){.fd = g->hosts->fd[CP_LINE_CONTROL][0], .events = POLLIN};
    }
    for (int i = 0; i < g->self.rank * CP_LINES; i++) {
        int rank = i / CP_LINES, line = i % CP_LINES, fd = g->hosts->fd[line][rank];
        const struct peer *peer = &g->peer[rank];
        if (peer->is_met[line] || !peer->has_come) {
            continue;
        }
        if (fd >= 0) {
            pollers[count++] = (struct pollfd){
                .fd = fd, .events = peer->is_greeted[line] ? POLLIN : POLLOUT};
        } else if (peer->retry[line].at_ns < *until_ns) {
            *until_ns = peer->retry[line].at_ns;
        }
    }
    return count;
}

static bool is_here(const struct gathering *g, int rank)
{
    return rank == 0 ? g->peer[0].is_met[CP_LINE_CONTROL] : g->peer[rank].has_come;
}

/* The ranks that have not come, or, where all have, those to which a line is missing. A
 * rank that cannot reach rank 0 knows of nobody else. */
static int list_missing(const struct gathering *g, bool have_all_come, char *text,
                        size_t size)
{
    bool is_blind = g->self.rank > 0 && !is_here(g, 0);
    int missing = 0;
    for (int rank = 0; rank < (is_blind ? 1 : g->self.world); rank++) {
        if (rank != g->self.rank &&
            !(have_all_come ? is_met(g, rank) : is_here(g, rank))) {
            char at[CP_ADDRESS_TEXT];
            bool is_tried = have_all_come && rank < g->self.rank;
            missing++;
            cp_text_append(text, size, "%s%d%s%s", missing > 1 ? ", " : "", rank,
                           is_tried ? " at " : "",
                           is_tried ? cp_address_print(&g->peer[rank].where, at) : "");
        }
    }
    return missing;
}

static enum cp_code fail_late(const void *arg, const struct cp_meet_args *args)
{
    const struct gathering *g = arg;
    char list[400] = "", at[CP_ADDRESS_TEXT];
    bool have_all_come = g->notice_count == g->self.world - 1;
    int missing = list_missing(g, have_all_come, list, sizeof list);
    if (have_all_come) {
        return cp_fail_rank(
            CP_ERR_TIMEOUT, g->self.rank,
            "rank %d of %d and %s %s have come to the meeting, but could not connect "
            "to each other within %.1f s. Check that their hosts let TCP connections "
            "to any port pass between them",
            g->self.rank, g->self.world, missing > 1 ? "ranks" : "rank", list,
            args->deadline.seconds);
    }
    return cp_fail_rank(
        CP_ERR_TIMEOUT, g->self.rank,
        "%s %s of %d did not appear to rank %d within %.1f s. Check that all processes "
        "were started and still run, with the same user id, world size, MASTER_ADDR, "
        "MASTER_PORT and version of cp_attn, and that their hosts reach %s, where rank "
        "0 listens",
        missing > 1 ? "ranks" : "rank", list, g->self.world, g->self.rank,
        args->deadline.seconds, cp_address_print(&g->root, at));
}

static const struct cp_meet_kind kind = {
    .once = meet_once,
    .is_complete = is_complete,
    .poll = poll_all,
    .fail_late = fail_late,
};

/* ---- the outcome ---- */

static void close_all(struct cp_hosts *hosts)
{
    cp_wire_close(&hosts->listener);
    cp_guests_drop_all(&hosts->guests);
    for (int rank = 0; rank < hosts->world; rank++) {
        for (int line = 0; line < CP_LINES; line++) {
            cp_wire_close(&hosts->fd[line][rank]);
        }
    }
}

static void clear_in_child(struct cp_fork_entry *entry)
{
    close_all((struct cp_hosts *)entry); /* its first member */
}

static enum cp_code create_hosts(int world, struct cp_hosts **out)
{
    void *block = NULL;
    size_t lines_bytes = (size_t)(world * CP_LINES) * sizeof(int);
    size_t hellos_bytes = (size_t)world * sizeof(struct cp_hello);
    CP_TRY(
        cp_mem_create(sizeof **out + lines_bytes + hellos_bytes, "a meeting", &block));
    struct cp_hosts *hosts = block;
    int *fds = (int *)(hosts + 1);
    hosts->world = world;
    hosts->listener = -1;
    hosts->hello = (struct cp_hello *)(fds + world * CP_LINES);
    for (int line = 0; line < CP_LINES; line++) {
        hosts->fd[line] = fds + line * world;
    }
    for (int i = 0; i < world * CP_LINES; i++) {
        fds[i] = -1;
    }
    hosts->fork.clear = clear_in_child;
    cp_fork_lock();
    cp_fork_add(&hosts->fork);
    cp_fork_unlock();
    *out = hosts;
    return CP_OK;
}

/* Room while all meet. */
struct room {
    struct gathering gathering;
    struct pollfd *pollers;
};

static enum cp_code create_room(int world, struct room **out)
{
    void *block = NULL;
    struct room *room = NULL;
    size_t pollers = (size_t)(2 + CP_GUESTS_MOST + world * CP_LINES);
    size_t ranks = (size_t)world;
    CP_TRY(cp_mem_create(sizeof *room + pollers * sizeof *room->pollers +
                             ranks * (sizeof(struct notice) + sizeof(struct peer)),
                         "a meeting", &block));
    room = block;
    room->gathering.peer = (struct peer *)(room + 1);
    room->gathering.notices = (struct notice *)(room->gathering.peer + ranks);
    room->pollers = (struct pollfd *)(room->gathering.notices + ranks);
    *out = room;
    return CP_OK;
}

enum cp_code cp_meet_hosts(const struct cp_meet_args *args, const struct cp_root *root,
                           struct cp_hosts **out)
{
    enum cp_code code = CP_OK;
    struct cp_hosts *hosts = NULL;
    struct room *room = NULL;
    if (args->world < 1 || args->rank < 0 || args->rank >= args->world ||
        (args->rank == 0) != (root->listener >= 0)) {
        return cp_fail(CP_ERR_VALUE, "rank %d of %d cannot be", args->rank,
                       args->world);
    }
    int fork_error = cp_fork_watch();
    if (fork_error != 0) {
        errno = fork_error;
        CP_TRY_GOTO(code, cp_meet_fail_system(args->rank, "register for forks"), done);
    }
    CP_TRY_GOTO(code, create_room(args->world, &room), done);
    CP_TRY_GOTO(code, create_hosts(args->world, &hosts), done);
    struct gathering *g = &room->gathering;
    g->hosts = hosts;
    g->self = (struct cp_wire){.hash = cp_wire_hash_of(args->key, args->world),
                               .rank = args->rank,
                               .world = args->world};
    hosts->hello[args->rank] = args->hello;
    CP_TRY_GOTO(code, cp_address_parse(root->host, root->port, &g->root), done);
    g->peer[0].where = g->root;
    g->peer[0].has_come = true;
    CP_TRY_GOTO(code, open_listener(g, root->listener), done);
    CP_TRY_GOTO(code, cp_meet_until(&kind, g, args, room->pollers), done);
    cp_fork_lock();
    cp_guests_drop_all(&hosts->guests);
    cp_wire_close(&hosts->listener);
    cp_fork_unlock();
    *out = hosts;
    hosts = NULL;
done:
    cp_hosts_close(&hosts);
    cp_mem_destroy(&room);
    return code;
}

void cp_hosts_close(struct cp_hosts **hosts)
{
    if (*hosts == NULL) {
        return;
    }
    cp_fork_lock();
    cp_fork_remove(&(*hosts)->fork);
    close_all(*hosts);
    cp_fork_unlock();
    cp_mem_destroy(hosts);
}

const struct cp_hello *cp_hosts_hello(const struct cp_hosts *hosts, int rank)
{
    return &hosts->hello[rank];
}

const int *cp_hosts_line(const struct cp_hosts *hosts, enum cp_line line)
{
    return hosts->fd[line];
}
