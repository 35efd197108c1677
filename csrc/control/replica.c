/* Speaking and listening for one rank's page. */
#include "control/replica.h"

#include <poll.h>
#include <string.h>
#include <sys/socket.h>

#include "base/mem.h"
#include "base/worker.h"
#include "control/replica_wire.h"

/* How old news of a flight recorder may be. */
static const int64_t flight_ns = 100000000;

/* What the speaker knows of a peer. */
struct saying {
    struct cp_frame_passing passing;
    bool is_passing;  /* a frame is on its way */
    bool is_over;     /* the connection has ended */
    bool has_poison;  /* sent */
    uint64_t seq;     /* the last record sent */
    uint64_t edition; /* of the flight news sent */
};

/* What the listener knows of a peer. */
struct hearing {
    struct cp_frame_passing passing;
    _Atomic bool is_over; /* stored with release after all that came before */
};

struct peer {
    int fd; /* borrowed */
    struct saying saying;
    struct hearing hearing;
};

struct cp_replica {
    struct cp_page *page;  /* owned */
    struct cp_watch watch; /* bell and poison alone: for poisoning */
    struct cp_flight *flights;
    int rank, world;
    struct cp_worker speaker, listener;
    _Atomic bool is_ending;
    struct cp_flight_news news; /* the speaker's; the latest */
    uint64_t edition;           /* counts them */
    int64_t next_news_ns;
    struct pollfd *pollers; /* (1 + world), owned; the listener's */
    struct peer peer[];     /* (world) */
};

struct cp_page *cp_replica_page(struct cp_replica *replica)
{
    return replica->page;
}

bool cp_replica_is_dead(void *peers, int rank)
{
    struct cp_replica *replica = peers;
    /* acquire: pairs with the release in `hear`. */
    return atomic_load_explicit(&replica->peer[rank].hearing.is_over,
                                memory_order_acquire);
}

static bool is_ending(const struct cp_replica *replica)
{
    /* acquire: pairs with the release in cp_replica_close. */
    return atomic_load_explicit(&replica->is_ending, memory_order_acquire);
}

/* ---- the speaker ---- */

static bool is_poisoned(const struct cp_replica *replica)
{
    /* acquire: pairs with the release in cp_watch_poison. */
    return atomic_load_explicit(&replica->watch.poison->state, memory_order_acquire) ==
           CP_POISON_SET;
}

/* What the peer is to get next. True where there is something.
 *
 * A record may be read as long as this rank may not write over it: it does so only when
 * the peer's next record has come, and the peer writes that when it has this one. Poison
 * is looked for first and sent last: the records before it go before it. */
static bool choose(struct cp_replica *replica, struct saying *saying)
{
    struct cp_frame *frame = &saying->passing.frame;
    bool has_news_of_poison = is_poisoned(replica) && !saying->has_poison;
    if (cp_page_has(replica->page, replica->rank, saying->seq + 1)) {
        saying->seq++;
        cp_page_read(replica->page, replica->rank, saying->seq, &frame->body.record);
        cp_frame_seal(frame, CP_FRAME_RECORD);
        return true;
    }
    if (has_news_of_poison) {
        saying->has_poison = true;
        frame->body.poison = replica->watch.poison->status;
        cp_frame_seal(frame, CP_FRAME_POISON);
        return true;
    }
    if (saying->edition != replica->edition) {
        saying->edition = replica->edition;
        frame->body.flight.now_ns = cp_now_ns();
        frame->body.flight.news = replica->news;
        cp_frame_seal(frame, CP_FRAME_FLIGHT);
        return true;
    }
    return false;
}

static void say(struct cp_replica *replica, struct peer *peer)
{
    struct saying *saying = &peer->saying;
    while (!saying->is_over && (saying->is_passing || choose(replica, saying))) {
        enum cp_passage passage = cp_frame_send(peer->fd, &saying->passing);
        saying->is_passing = passage == CP_PASSING;
        saying->is_over = passage == CP_PASSED_AWAY;
        if (passage != CP_PASSED) {
            break;
        }
    }
}

static void read_flight(struct cp_replica *replica)
{
    struct cp_flight_news news;
    int64_t now_ns = cp_now_ns();
    if (now_ns < replica->next_news_ns) {
        return;
    }
    replica->next_news_ns = now_ns + flight_ns;
    cp_flight_tell(&replica->flights[replica->rank], &news);
    if (memcmp(&news, &replica->news, sizeof news) != 0) {
        replica->news = news;
        replica->edition++;
    }
}

/* A connection that takes nothing more is tried again at the next ring or news. */
static bool has_something_to_say(const void *arg)
{
    const struct cp_replica *replica = arg;
    bool poisoned = is_poisoned(replica);
    for (int rank = 0; rank < replica->world; rank++) {
        const struct saying *saying = &replica->peer[rank].saying;
        if (!saying->is_over && !saying->is_passing &&
            ((poisoned && !saying->has_poison) ||
             cp_page_has(replica->page, replica->rank, saying->seq + 1))) {
            return true;
        }
    }
    return is_ending(replica);
}

static void *speak(void *arg)
{
    struct cp_replica *replica = arg;
    for (bool is_last = false; !is_last;) {
        is_last = is_ending(replica); /* what was stored before that still goes out */
        read_flight(replica);
        for (int rank = 0; rank < replica->world; rank++) {
            say(replica, &replica->peer[rank]);
        }
        cp_bell_sleep(replica->watch.bell, has_something_to_say, replica, flight_ns);
    }
    return NULL;
}

/* ---- the listener ---- */

static void store(struct cp_replica *replica, int rank, const struct cp_frame *frame)
{
    switch ((enum cp_frame_kind)frame->head.kind) {
    case CP_FRAME_RECORD:
        cp_page_write(replica->page, rank, frame->body.record.seq, &frame->body.record);
        break;
    case CP_FRAME_POISON:
        cp_watch_poison(&replica->watch, &frame->body.poison);
        break;
    case CP_FRAME_FLIGHT:
        cp_flight_hear(&replica->flights[rank], &frame->body.flight.news,
                       cp_now_ns() - frame->body.flight.now_ns);
        break;
    }
}

static void hear(struct cp_replica *replica, int rank)
{
    struct peer *peer = &replica->peer[rank];
    enum cp_passage passage = CP_PASSED;
    while (passage == CP_PASSED) {
        passage = cp_frame_receive(peer->fd, &peer->hearing.passing);
        if (passage == CP_PASSED) {
            store(replica, rank, &peer->hearing.passing.frame);
        }
    }
    if (passage == CP_PASSED_AWAY) {
        replica->pollers[rank].fd = -1;
        /* release: pairs with the acquire in cp_replica_is_dead. */
        atomic_store_explicit(&peer->hearing.is_over, true, memory_order_release);
        cp_bell_ring(replica->watch.bell);
    }
}

static void hear_all(struct cp_replica *replica)
{
    for (int rank = 0; rank < replica->world; rank++) {
        if (rank != replica->rank && replica->pollers[rank].revents != 0) {
            hear(replica, rank);
        }
    }
}

static void *listen_to_all(void *arg)
{
    struct cp_replica *replica = arg;
    struct pollfd *pollers = replica->pollers;
    for (int rank = 0; rank < replica->world; rank++) {
        pollers[rank] = (struct pollfd){.fd = replica->peer[rank].fd, .events = POLLIN};
    }
    pollers[replica->rank].fd = replica->listener.wake_fd;
    while (!is_ending(replica)) {
        (void)poll(pollers, (nfds_t)replica->world, -1);
        hear_all(replica);
    }
    /* A connection that is closed with something unread is torn down instead, and may
     * take with it what was sent last. */
    (void)poll(pollers, (nfds_t)replica->world, 0);
    hear_all(replica);
    return NULL;
}

/* ---- both ---- */

static enum cp_code create(const int *connections, int rank, int world,
                           struct cp_replica **out)
{
    struct cp_replica *replica = NULL;
    void *block = NULL;
    CP_TRY(cp_mem_create(sizeof *replica + (size_t)world * sizeof replica->peer[0],
                         "a page", &block));
    replica = block;
    *out = replica;
    replica->rank = rank;
    replica->world = world;
    for (int other = 0; other < world; other++) {
        replica->peer[other].fd = other == rank ? -1 : connections[other];
        replica->peer[other].saying.is_over = other == rank;
    }
    CP_TRY(cp_mem_create(cp_page_bytes(world), "a page", &block));
    replica->page = block;
    replica->flights = cp_page_flights(replica->page, world);
    replica->watch = (struct cp_watch){.bell = cp_page_bell(replica->page),
                                       .poison = cp_page_poison(replica->page)};
    CP_TRY(cp_mem_create((size_t)world * sizeof *replica->pollers, "a page", &block));
    replica->pollers = block;
    CP_TRY(cp_worker_start(&replica->listener, listen_to_all, replica));
    return cp_worker_start(&replica->speaker, speak, replica);
}

enum cp_code cp_replica_open(const int *connections, int rank, int world,
                             struct cp_replica **out)
{
    struct cp_replica *replica = NULL;
    enum cp_code code = create(connections, rank, world, &replica);
    if (code != CP_OK) {
        cp_replica_close(&replica);
        return code;
    }
    *out = replica;
    return CP_OK;
}

void cp_replica_close(struct cp_replica **replica)
{
    struct cp_replica *r = *replica;
    if (r == NULL) {
        return;
    }
    /* release: pairs with the acquire in `is_ending`. */
    atomic_store_explicit(&r->is_ending, true, memory_order_release);
    if (r->page != NULL) {
        cp_bell_ring(r->watch.bell);
    }
    cp_worker_end(&r->speaker);
    cp_worker_end(&r->listener);
    cp_mem_destroy(&r->pollers);
    cp_mem_destroy(&r->page);
    cp_mem_destroy(replica);
}
