/* Queues of messages, and the thread that moves them. */
#include "comm/comm_tcp.h"

#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <string.h>
#include <sys/socket.h>

#include "base/mem.h"
#include "base/worker.h"

/* What moves in one go: then the other connections have their turn, and who posts. */
static const size_t piece_bytes = (size_t)256 << 10;

/* One half of a message, posted and not complete. */
struct half {
    struct half *next; /* of its queue, or of the spare ones */
    char *data;        /* borrowed */
    uint64_t bytes;    /* of the message; goes before it */
    uint64_t heard;    /* receiving: the size that has come */
    size_t done;       /* bytes that have moved, those of the size included */
    uint64_t ticket;
};

/* Halves are made many at a time, and used again. */
struct chunk {
    struct chunk *next;
    struct half half[64];
};

/* In the order posted. */
struct queue {
    struct half *first, *last;
};

enum direction { IN, OUT, DIRECTIONS };

struct peer {
    int fd; /* borrowed; -1: the own rank, or the connection has ended */
    struct queue queue[DIRECTIONS];
};

struct comm_tcp {
    struct cp_comm head;
    /* As the caller's, but here a peer is dead when its data has ended, too: all that it
     * sent has come by then. */
    struct cp_watch watch;
    const struct cp_watch *callers; /* borrowed */
    struct cp_worker mover;
    _Atomic bool is_ending;
    _Atomic uint64_t done; /* all tickets up to this one are complete */
    pthread_mutex_t mutex; /* guards what follows, and what halves point at */
    uint64_t last_ticket;
    bool is_broken;         /* halves were dropped: nothing becomes complete any more */
    struct chunk *chunks;   /* owned: all halves */
    struct half *spare;     /* those in no queue */
    struct pollfd *pollers; /* (world), owned; the mover's */
    struct peer peer[];     /* (world) */
};

static struct comm_tcp *tcp_of(struct cp_comm *comm)
{
    return (struct comm_tcp *)comm;
}

/* ---- queues; all under the mutex ---- */

static void put_spare(struct comm_tcp *tcp, struct half *half)
{
    half->next = tcp->spare;
    tcp->spare = half;
}

static enum cp_code take_spare(struct comm_tcp *tcp, struct half **out)
{
    void *block = NULL;
    if (tcp->spare == NULL) {
        CP_TRY(cp_mem_create(sizeof *tcp->chunks, "messages", &block));
        struct chunk *chunk = block;
        chunk->next = tcp->chunks;
        tcp->chunks = chunk;
        for (size_t i = 0; i < sizeof chunk->half / sizeof chunk->half[0]; i++) {
            put_spare(tcp, &chunk->half[i]);
        }
    }
    *out = tcp->spare;
    tcp->spare = tcp->spare->next;
    return CP_OK;
}

static enum cp_code append(struct comm_tcp *tcp, const struct cp_xfer *xfer)
{
    struct half *half = NULL;
    if (xfer->peer < 0 || xfer->peer >= tcp->head.world) {
        return cp_fail(CP_ERR_INTERNAL, "rank %d posts to rank %d of %d",
                       tcp->head.rank, xfer->peer, tcp->head.world);
    }
    CP_TRY(take_spare(tcp, &half));
    *half = (struct half){
        .data = xfer->data, .bytes = xfer->bytes, .ticket = tcp->last_ticket};
    struct queue *queue = &tcp->peer[xfer->peer].queue[xfer->is_send ? OUT : IN];
    *(queue->first == NULL ? &queue->first : &queue->last->next) = half;
    queue->last = half;
    return CP_OK;
}

static void drop_first(struct comm_tcp *tcp, struct queue *queue)
{
    struct half *half = queue->first;
    queue->first = half->next;
    put_spare(tcp, half);
}

/* A rank that failed may free its memory: nothing of it is read or written any more. */
static void drop_all(struct comm_tcp *tcp)
{
    tcp->is_broken = true;
    for (int i = 0; i < tcp->head.world * DIRECTIONS; i++) {
        struct queue *queue = &tcp->peer[i / DIRECTIONS].queue[i % DIRECTIONS];
        while (queue->first != NULL) {
            drop_first(tcp, queue);
        }
    }
}

static void note_done(struct comm_tcp *tcp)
{
    uint64_t done = tcp->last_ticket;
    for (int i = 0; i < tcp->head.world * DIRECTIONS; i++) {
        const struct half *half = tcp->peer[i / DIRECTIONS].queue[i % DIRECTIONS].first;
        if (half != NULL && half->ticket <= done) {
            done = half->ticket - 1;
        }
    }
    /* relaxed: written under the mutex only. */
    if (!tcp->is_broken &&
        atomic_load_explicit(&tcp->done, memory_order_relaxed) != done) {
        /* release: pairs with the acquire in `is_done`. */
        atomic_store_explicit(&tcp->done, done, memory_order_release);
        cp_bell_ring(tcp->watch.bell);
    }
}

/* ---- moving; all under the mutex ---- */

enum passage { MOVED, STUCK, ENDED, BROKEN };

/* One piece of the first message of a queue. The size goes before the rest of it. */
static enum passage move_piece(int fd, struct half *half, enum direction direction)
{
    const size_t size_bytes = sizeof half->bytes;
    uint64_t *size = direction == OUT ? &half->bytes : &half->heard;
    size_t head_left = half->done < size_bytes ? size_bytes - half->done : 0;
    size_t from = half->done + head_left - size_bytes;
    size_t left = half->bytes - from;
    struct iovec parts[2] = {
        {.iov_base = (char *)size + (size_bytes - head_left), .iov_len = head_left},
        {.iov_base = half->data + from,
         .iov_len = left < piece_bytes ? left : piece_bytes},
    };
    struct msghdr header = {.msg_iov = parts, .msg_iovlen = 2};
    ssize_t moved = direction == OUT ? sendmsg(fd, &header, MSG_NOSIGNAL | MSG_DONTWAIT)
                                     : recvmsg(fd, &header, MSG_DONTWAIT);
    if (moved < 0) {
        bool is_full = errno == EAGAIN || errno == EINTR;
        bool has_ended = errno == ECONNRESET || errno == EPIPE;
        return is_full ? STUCK : has_ended ? ENDED : BROKEN;
    }
    half->done += (size_t)moved;
    return moved > 0 ? MOVED : ENDED;
}

static enum cp_code fail_sizes(int from, uint64_t sent, int to, uint64_t expected)
{
    return cp_fail_rank(CP_ERR_INTERNAL, to,
                        "rank %d sends %llu bytes to rank %d, which expects %llu", from,
                        (unsigned long long)sent, to, (unsigned long long)expected);
}

/* Gets on with a queue of a peer. */
static enum cp_code get_on(struct comm_tcp *tcp, int rank, enum direction direction)
{
    struct peer *peer = &tcp->peer[rank];
    struct queue *queue = &peer->queue[direction];
    struct half *half = queue->first;
    if (half == NULL || peer->fd < 0) {
        return CP_OK;
    }
    enum passage passage = move_piece(peer->fd, half, direction);
    if (passage == BROKEN) {
        char reason[64];
        return cp_fail_rank(
            CP_ERR_COMM, rank, "the connection between ranks %d and %d broke: %s",
            tcp->head.rank, rank, strerror_r(errno, reason, sizeof reason));
    }
    if (passage == ENDED) {
        peer->fd = -1;
        cp_bell_ring(tcp->watch.bell); /* whoever waits for it may look */
    }
    if (direction == IN && half->done >= sizeof half->heard &&
        half->heard != half->bytes) {
        return fail_sizes(rank, half->heard, tcp->head.rank, half->bytes);
    }
    if (half->done == sizeof half->bytes + half->bytes) {
        drop_first(tcp, queue);
    }
    return CP_OK;
}

/* Messages to oneself. */
static enum cp_code move_own(struct comm_tcp *tcp)
{
    struct queue *in = &tcp->peer[tcp->head.rank].queue[IN];
    struct queue *out = &tcp->peer[tcp->head.rank].queue[OUT];
    while (in->first != NULL && out->first != NULL) {
        if (in->first->bytes != out->first->bytes) {
            return fail_sizes(tcp->head.rank, out->first->bytes, tcp->head.rank,
                              in->first->bytes);
        }
        memcpy(in->first->data, out->first->data, in->first->bytes);
        drop_first(tcp, in);
        drop_first(tcp, out);
    }
    return CP_OK;
}

/* ---- the mover ---- */

static bool is_ending(const struct comm_tcp *tcp)
{
    /* acquire: pairs with the release in `tcp_close`. */
    return atomic_load_explicit(&tcp->is_ending, memory_order_acquire);
}

static void poll_what_is_posted(struct comm_tcp *tcp)
{
    for (int rank = 0; rank < tcp->head.world; rank++) {
        const struct peer *peer = &tcp->peer[rank];
        short events = (short)((peer->queue[IN].first != NULL ? POLLIN : 0) |
                               (peer->queue[OUT].first != NULL ? POLLOUT : 0));
        tcp->pollers[rank] =
            (struct pollfd){.fd = events != 0 ? peer->fd : -1, .events = events};
    }
    tcp->pollers[tcp->head.rank] =
        (struct pollfd){.fd = tcp->mover.wake_fd, .events = POLLIN};
}

static enum cp_code move_what_can(struct comm_tcp *tcp)
{
    for (int rank = 0; rank < tcp->head.world; rank++) {
        if (rank != tcp->head.rank && tcp->pollers[rank].revents != 0) {
            CP_TRY(get_on(tcp, rank, IN));
            CP_TRY(get_on(tcp, rank, OUT));
        }
    }
    return CP_OK;
}

/* Breaks the context with the thread's own sentence. */
static void break_context(struct comm_tcp *tcp)
{
    cp_watch_poison(&tcp->watch, cp_last_error());
    drop_all(tcp);
}

static void *move_all(void *arg)
{
    struct comm_tcp *tcp = arg;
    while (!is_ending(tcp)) {
        (void)pthread_mutex_lock(&tcp->mutex);
        poll_what_is_posted(tcp);
        (void)pthread_mutex_unlock(&tcp->mutex);
        (void)poll(tcp->pollers, (nfds_t)tcp->head.world, -1);
        if (tcp->pollers[tcp->head.rank].revents != 0) {
            cp_worker_heed(&tcp->mover);
        }
        (void)pthread_mutex_lock(&tcp->mutex);
        if (move_what_can(tcp) != CP_OK) {
            break_context(tcp);
        }
        note_done(tcp);
        (void)pthread_mutex_unlock(&tcp->mutex);
    }
    return NULL;
}

/* ---- the caller's side ---- */

/* Breaks the context with the thread's own sentence, unless it is broken already. */
static enum cp_code give_up(struct comm_tcp *tcp, enum cp_code code)
{
    (void)pthread_mutex_lock(&tcp->mutex);
    break_context(tcp);
    (void)pthread_mutex_unlock(&tcp->mutex);
    return code;
}

static enum cp_code append_all(struct comm_tcp *tcp, const struct cp_xfer *xfers,
                               int count)
{
    for (int i = 0; i < count; i++) {
        if (xfers[i].bytes > 0) {
            CP_TRY(append(tcp, &xfers[i]));
        }
    }
    return move_own(tcp);
}

static enum cp_code tcp_post(struct cp_comm *comm, const struct cp_xfer *xfers,
                             int count, struct cp_stream *stream, uint64_t *ticket)
{
    struct comm_tcp *tcp = tcp_of(comm);
    (void)stream;
    enum cp_code code = cp_watch_check(&tcp->watch);
    if (code != CP_OK) {
        return give_up(tcp, code);
    }
    (void)pthread_mutex_lock(&tcp->mutex);
    tcp->last_ticket++;
    code = append_all(tcp, xfers, count);
    note_done(tcp);
    uint64_t mine = tcp->last_ticket;
    (void)pthread_mutex_unlock(&tcp->mutex);
    if (code != CP_OK) {
        return give_up(tcp, code);
    }
    cp_worker_wake(&tcp->mover);
    *ticket = mine;
    return CP_OK;
}

static bool is_done(const struct comm_tcp *tcp, uint64_t ticket)
{
    /* acquire: pairs with the release in `note_done`. */
    return atomic_load_explicit(&tcp->done, memory_order_acquire) >= ticket;
}

static enum cp_code tcp_test(struct cp_comm *comm, uint64_t ticket)
{
    struct comm_tcp *tcp = tcp_of(comm);
    if (is_done(tcp, ticket)) {
        return CP_OK;
    }
    enum cp_code code = cp_watch_check(&tcp->watch);
    return code == CP_OK ? CP_AGAIN : give_up(tcp, code);
}

struct tcp_wait {
    struct comm_tcp *tcp;
    const struct cp_comm_wait *waits;
    int count;
};

static bool any_is_done(const void *arg)
{
    const struct tcp_wait *wait = arg;
    for (int i = 0; i < wait->count; i++) {
        if (is_done(wait->tcp, wait->waits[i].value)) {
            return true;
        }
    }
    return false;
}

static bool waits_for(const void *arg, int rank)
{
    const struct tcp_wait *wait = arg;
    struct comm_tcp *tcp = wait->tcp;
    bool needed = false;
    (void)pthread_mutex_lock(&tcp->mutex);
    for (int i = 0; i < wait->count * DIRECTIONS; i++) {
        const struct half *half = tcp->peer[rank].queue[i % DIRECTIONS].first;
        needed = needed ||
                 (half != NULL && half->ticket <= wait->waits[i / DIRECTIONS].value);
    }
    (void)pthread_mutex_unlock(&tcp->mutex);
    return needed;
}

/* For the watch. A reason that a dead rank left has come before its control line ended,
 * the data before its data line. */
static bool is_dead(void *peers, int rank)
{
    struct comm_tcp *tcp = peers;
    (void)pthread_mutex_lock(&tcp->mutex);
    bool has_ended = tcp->peer[rank].fd < 0;
    (void)pthread_mutex_unlock(&tcp->mutex);
    return has_ended && tcp->callers->is_dead(tcp->callers->peers, rank);
}

static enum cp_code tcp_wait(struct cp_comm *comm, const struct cp_comm_wait *waits,
                             int count, const char *operation,
                             struct cp_deadline deadline)
{
    struct comm_tcp *tcp = tcp_of(comm);
    struct tcp_wait arg = {.tcp = tcp, .waits = waits, .count = count};
    struct cp_wait wait = {
        .is_ready = any_is_done,
        .needs = waits_for,
        .arg = &arg,
        .operation = operation,
    };
    for (int i = 0; i < count; i++) {
        if (!waits[i].is_ticket) {
            (void)cp_fail(CP_ERR_INTERNAL, "%s waits for a counter, and tcp has none",
                          operation);
            return give_up(tcp, CP_ERR_INTERNAL);
        }
    }
    enum cp_code code = cp_watch_wait(&tcp->watch, &wait, deadline);
    return code == CP_OK ? CP_OK : give_up(tcp, code);
}

static void tcp_poison(struct cp_comm *comm, const struct cp_status *reason)
{
    struct comm_tcp *tcp = tcp_of(comm);
    cp_watch_poison(&tcp->watch, reason);
    (void)pthread_mutex_lock(&tcp->mutex);
    drop_all(tcp);
    (void)pthread_mutex_unlock(&tcp->mutex);
}

static void tcp_close(struct cp_comm **comm)
{
    if (*comm == NULL) {
        return;
    }
    struct comm_tcp *tcp = tcp_of(*comm);
    /* release: pairs with the acquire in `is_ending`. */
    atomic_store_explicit(&tcp->is_ending, true, memory_order_release);
    cp_worker_end(&tcp->mover);
    while (tcp->chunks != NULL) {
        struct chunk *chunk = tcp->chunks;
        tcp->chunks = chunk->next;
        cp_mem_destroy(&chunk);
    }
    (void)pthread_mutex_destroy(&tcp->mutex);
    cp_mem_destroy(&tcp->pollers);
    cp_mem_destroy(comm);
}

static const struct cp_comm_ops tcp_ops = {
    .name = "tcp",
    .abi = CP_COMM_ABI,
    .post = tcp_post,
    .test = tcp_test,
    .wait = tcp_wait,
    .poison = tcp_poison,
    .close = tcp_close,
};

enum cp_code cp_comm_tcp_create(const int *connections, struct cp_watch *watch,
                                struct cp_comm **out)
{
    void *block = NULL;
    struct cp_comm *comm = NULL;
    enum cp_code code = CP_OK;
    size_t ranks = (size_t)watch->world;
    CP_TRY(cp_mem_create(sizeof(struct comm_tcp) + ranks * sizeof(struct peer),
                         "a communicator", &block));
    struct comm_tcp *tcp = block;
    comm = &tcp->head;
    tcp->head =
        (struct cp_comm){.ops = &tcp_ops, .rank = watch->rank, .world = watch->world};
    tcp->callers = watch;
    tcp->watch = *watch;
    tcp->watch.is_dead = is_dead;
    tcp->watch.peers = tcp;
    for (int rank = 0; rank < watch->world; rank++) {
        tcp->peer[rank].fd = rank == watch->rank ? -1 : connections[rank];
    }
    (void)pthread_mutex_init(&tcp->mutex, NULL); /* with no attributes it cannot fail */
    CP_TRY_GOTO(code,
                cp_mem_create(ranks * sizeof *tcp->pollers, "a communicator", &block),
                done);
    tcp->pollers = block;
    CP_TRY_GOTO(code, cp_worker_start(&tcp->mover, move_all, tcp), done);
    *out = comm;
    comm = NULL;
done:
    tcp_close(&comm);
    return code;
}
