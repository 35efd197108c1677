/* Sends and receives between ranks of one process, late and in odd order on purpose. */
#include "comm_double.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

/* One posted half of a message. */
struct half {
    struct half *next;    /* in the order of posting, all ranks together */
    struct half *partner; /* the other half, once matched */
    int rank, peer;
    bool is_send;
    void *data;
    size_t bytes;
    uint64_t ticket;
    uint64_t due; /* tick at which the bytes move; set when matched */
};

struct double_hub {
    pthread_mutex_t mutex;
    int world;
    int most_ticks;
    uint64_t tick, random;
    struct half *halves;
    bool *is_closed; /* by rank */
};

struct comm_double {
    struct cp_comm head;
    struct double_hub *hub; /* borrowed; must outlive this */
    struct cp_watch *watch; /* borrowed; must outlive this */
    uint64_t last_ticket;
};

struct double_hub *double_hub_create(int world, uint64_t seed, int most_ticks)
{
    struct double_hub *hub = calloc(1, sizeof *hub);
    bool *is_closed = calloc((size_t)world, sizeof *is_closed);
    if (hub == NULL || is_closed == NULL ||
        pthread_mutex_init(&hub->mutex, NULL) != 0) {
        free(is_closed);
        free(hub);
        return NULL;
    }
    hub->world = world;
    hub->most_ticks = most_ticks;
    hub->random = seed;
    hub->is_closed = is_closed;
    return hub;
}

void double_hub_destroy(struct double_hub **hub)
{
    if (*hub == NULL) {
        return;
    }
    (void)pthread_mutex_destroy(&(*hub)->mutex);
    free((*hub)->is_closed);
    free(*hub);
    *hub = NULL;
}

bool double_hub_is_dead(void *peers, int rank)
{
    struct double_hub *hub = peers;
    (void)pthread_mutex_lock(&hub->mutex);
    bool is_dead = hub->is_closed[rank];
    (void)pthread_mutex_unlock(&hub->mutex);
    return is_dead;
}

int double_hub_pending(struct double_hub *hub)
{
    int count = 0;
    (void)pthread_mutex_lock(&hub->mutex);
    for (const struct half *half = hub->halves; half != NULL; half = half->next) {
        count++;
    }
    (void)pthread_mutex_unlock(&hub->mutex);
    return count;
}

/* splitmix64 */
static uint64_t random_below(struct double_hub *hub, uint64_t bound)
{
    uint64_t z = hub->random += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return (z ^ (z >> 31)) % bound;
}

static void remove_half(struct double_hub *hub, struct half *half)
{
    struct half **link = &hub->halves;
    while (*link != half) {
        link = &(*link)->next;
    }
    *link = half->next;
    free(half);
}

/* The first unmatched other half for `half` in posting order: between two ranks, order is everything. */
static struct half *find_partner(const struct double_hub *hub, const struct half *half)
{
    for (struct half *other = hub->halves; other != NULL; other = other->next) {
        if (other != half && other->partner == NULL && other->rank == half->peer &&
            other->peer == half->rank && other->is_send != half->is_send) {
            return other;
        }
    }
    return NULL;
}

/* One tick: what is due moves. */
static void turn(struct double_hub *hub)
{
    hub->tick++;
    for (struct half *half = hub->halves, *next = NULL; half != NULL; half = next) {
        next = half->next;
        if (!half->is_send || half->partner == NULL || half->due > hub->tick) {
            continue;
        }
        struct half *partner = half->partner;
        memcpy(partner->data, half->data, half->bytes);
        next = next == partner ? partner->next : next;
        remove_half(hub, partner);
        remove_half(hub, half);
    }
}

/* A rank that failed may free its memory: nothing of it may be read or written any more. */
static void drop_rank(struct double_hub *hub, int rank)
{
    for (struct half *half = hub->halves, *next = NULL; half != NULL; half = next) {
        next = half->next;
        if (half->rank == rank) {
            if (half->partner != NULL) {
                half->partner->partner = NULL;
            }
            remove_half(hub, half);
        }
    }
}

static struct comm_double *double_of(struct cp_comm *comm)
{
    return (struct comm_double *)comm;
}

/* Breaks the context with the thread's own sentence and forgets what this rank has posted. */
static enum cp_code give_up(struct comm_double *self, enum cp_code code)
{
    cp_watch_poison(self->watch, cp_last_error());
    (void)pthread_mutex_lock(&self->hub->mutex);
    drop_rank(self->hub, self->head.rank);
    (void)pthread_mutex_unlock(&self->hub->mutex);
    return code;
}

static enum cp_code post_one_locked(struct comm_double *self,
                                    const struct cp_xfer *xfer, uint64_t ticket)
{
    struct double_hub *hub = self->hub;
    if (xfer->peer < 0 || xfer->peer >= self->head.world) {
        return cp_fail(CP_ERR_INTERNAL, "rank %d posts to rank %d of %d",
                       self->head.rank, xfer->peer, self->head.world);
    }
    struct half *half = calloc(1, sizeof *half);
    if (half == NULL) {
        return cp_fail(CP_ERR_NO_MEMORY, "no memory for a message");
    }
    *half = (struct half){
        .rank = self->head.rank,
        .peer = xfer->peer,
        .is_send = xfer->is_send,
        .data = xfer->data,
        .bytes = xfer->bytes,
        .ticket = ticket,
    };
    struct half **link = &hub->halves;
    while (*link != NULL) {
        link = &(*link)->next;
    }
    *link = half;
    if (!half->is_send) {
        memset(half->data, 0xa5, half->bytes);
    }
    struct half *partner = find_partner(hub, half);
    if (partner == NULL) {
        return CP_OK;
    }
    if (partner->bytes != half->bytes) {
        const struct half *send = half->is_send ? half : partner;
        return cp_fail_rank(CP_ERR_INTERNAL, self->head.rank,
                            "rank %d sends %zu bytes to rank %d, which expects %zu",
                            send->rank, send->bytes, send->peer,
                            half->is_send ? partner->bytes : half->bytes);
    }
    half->partner = partner;
    partner->partner = half;
    half->due = hub->tick + 1 + random_below(hub, (uint64_t)hub->most_ticks + 1);
    partner->due = half->due;
    return CP_OK;
}

static enum cp_code double_post(struct cp_comm *comm, const struct cp_xfer *xfers,
                                int count, struct cp_stream *stream, uint64_t *ticket)
{
    struct comm_double *self = double_of(comm);
    enum cp_code code = cp_watch_check(self->watch);
    (void)stream;
    if (code != CP_OK) {
        return give_up(self, code);
    }
    self->last_ticket++;
    (void)pthread_mutex_lock(&self->hub->mutex);
    for (int i = 0; i < count && code == CP_OK; i++) {
        if (xfers[i].bytes > 0) {
            code = post_one_locked(self, &xfers[i], self->last_ticket);
        }
    }
    (void)pthread_mutex_unlock(&self->hub->mutex);
    if (code != CP_OK) {
        return give_up(self, code);
    }
    cp_bell_ring(self->watch->bell);
    *ticket = self->last_ticket;
    return CP_OK;
}

static bool is_pending(const struct comm_double *self, const struct half *half,
                       uint64_t ticket)
{
    return half->rank == self->head.rank && half->ticket <= ticket;
}

static bool is_complete_locked(const struct comm_double *self, uint64_t ticket)
{
    for (const struct half *half = self->hub->halves; half != NULL; half = half->next) {
        if (is_pending(self, half, ticket)) {
            return false;
        }
    }
    return true;
}

/* Takes a turn, then looks. */
static bool is_complete(const struct comm_double *self, uint64_t ticket)
{
    (void)pthread_mutex_lock(&self->hub->mutex);
    turn(self->hub);
    bool complete = is_complete_locked(self, ticket);
    (void)pthread_mutex_unlock(&self->hub->mutex);
    return complete;
}

static enum cp_code double_test(struct cp_comm *comm, uint64_t ticket)
{
    struct comm_double *self = double_of(comm);
    if (is_complete(self, ticket)) {
        return CP_OK;
    }
    enum cp_code code = cp_watch_check(self->watch);
    return code == CP_OK ? CP_AGAIN : give_up(self, code);
}

struct double_wait {
    const struct comm_double *self;
    const struct cp_comm_wait *waits;
    int count;
};

/* Nothing of this ticket waits for a peer any more; at most for a tick. */
static bool is_matched_locked(const struct comm_double *self, uint64_t ticket)
{
    for (const struct half *half = self->hub->halves; half != NULL; half = half->next) {
        if (is_pending(self, half, ticket) && half->partner == NULL) {
            return false;
        }
    }
    return true;
}

static bool any_is_matched(const void *arg)
{
    const struct double_wait *wait = arg;
    bool matched = false;
    (void)pthread_mutex_lock(&wait->self->hub->mutex);
    for (int i = 0; i < wait->count && !matched; i++) {
        matched = is_matched_locked(wait->self, wait->waits[i].value);
    }
    (void)pthread_mutex_unlock(&wait->self->hub->mutex);
    return matched;
}

static bool waits_for(const void *arg, int rank)
{
    const struct double_wait *wait = arg;
    bool needed = false;
    (void)pthread_mutex_lock(&wait->self->hub->mutex);
    for (const struct half *half = wait->self->hub->halves; half != NULL;
         half = half->next) {
        for (int i = 0; i < wait->count; i++) {
            needed = needed || (is_pending(wait->self, half, wait->waits[i].value) &&
                                half->partner == NULL && half->peer == rank);
        }
    }
    (void)pthread_mutex_unlock(&wait->self->hub->mutex);
    return needed;
}

static enum cp_code double_wait(struct cp_comm *comm, const struct cp_comm_wait *waits,
                                int count, const char *operation,
                                struct cp_deadline deadline)
{
    struct comm_double *self = double_of(comm);
    struct double_wait arg = {.self = self, .waits = waits, .count = count};
    struct cp_wait wait = {
        .is_ready = any_is_matched,
        .needs = waits_for,
        .arg = &arg,
        .operation = operation,
    };
    for (int i = 0; i < count; i++) {
        if (!waits[i].is_ticket) {
            (void)cp_fail(CP_ERR_INTERNAL,
                          "%s waits for a counter, and this communicator has none",
                          operation);
            return give_up(self, CP_ERR_INTERNAL);
        }
    }
    for (;;) {
        enum cp_code code = cp_watch_wait(self->watch, &wait, deadline);
        if (code != CP_OK) {
            return give_up(self, code);
        }
        for (int i = 0; i < count; i++) {
            if (is_complete(self, waits[i].value)) {
                return CP_OK;
            }
        }
        struct timespec tick = {.tv_nsec = 5000};
        (void)nanosleep(&tick, NULL);
    }
}

static void double_poison(struct cp_comm *comm, const struct cp_status *reason)
{
    struct comm_double *self = double_of(comm);
    cp_watch_poison(self->watch, reason);
    (void)pthread_mutex_lock(&self->hub->mutex);
    drop_rank(self->hub, comm->rank);
    (void)pthread_mutex_unlock(&self->hub->mutex);
}

static void double_close(struct cp_comm **comm)
{
    if (*comm == NULL) {
        return;
    }
    struct comm_double *self = double_of(*comm);
    (void)pthread_mutex_lock(&self->hub->mutex);
    drop_rank(self->hub, self->head.rank);
    self->hub->is_closed[self->head.rank] = true;
    (void)pthread_mutex_unlock(&self->hub->mutex);
    cp_bell_ring(self->watch->bell);
    free(self);
    *comm = NULL;
}

static const struct cp_comm_ops double_ops = {
    .name = "double",
    .abi = CP_COMM_ABI,
    .post = double_post,
    .test = double_test,
    .wait = double_wait,
    .poison = double_poison,
    .close = double_close,
};

enum cp_code cp_comm_double_create(struct double_hub *hub, struct cp_watch *watch,
                                   struct cp_comm **out)
{
    struct comm_double *self = calloc(1, sizeof *self);
    if (self == NULL) {
        return cp_fail(CP_ERR_NO_MEMORY, "no memory for a communicator");
    }
    self->head = (struct cp_comm){
        .ops = &double_ops, .rank = watch->rank, .world = watch->world};
    self->hub = hub;
    self->watch = watch;
    *out = &self->head;
    return CP_OK;
}
