/* Groups on their streams: who meets whom, what moves when, and who waits for whom in a
 * circle. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "sim_comm.h"

enum { RECV_GARBAGE = 0xa5 };

static int64_t fail_group_count = -1;   /* locked */
static enum simnccl_order device_order; /* locked */

/* Of a device. Locked. */
struct line {
    struct group *first;   /* given and not ended, in that order */
    struct group *running; /* the last that began; NULL: it has ended */
};
static struct line lines[SIMGPU_DEVICES];

static bool is_over(const struct ncclComm *comm)
{
    return comm->is_aborted || comm->hub->result != ncclSuccess;
}

/* Locked: the group of another communicator that keeps the device, or that it does
 * before this one; NULL: there is none. */
static const struct group *ahead_of(const struct group *group)
{
    const struct line *line = &lines[group->comm->device];
    const struct group *first = line->first;
    if (device_order == SIMNCCL_TOGETHER || line->running) {
        return device_order == SIMNCCL_TOGETHER ? NULL : line->running;
    }
    if (device_order == SIMNCCL_AS_READY) {
        return NULL;
    }
    while (first != group && is_over(first->comm)) {
        first = first->next;
    }
    return first == group ? NULL : first;
}

static bool is_next_of_comm(const struct group *group)
{
    return group->number == group->comm->ended + 1;
}

void sim_group_number(struct group *group)
{
    struct ncclComm *comm = group->comm;
    group->number = comm->posted += 1;
    for (int i = 0; i < group->count; i++) {
        struct transfer *t = &group->transfers[i];
        t->number = t->is_send ? comm->sent[t->peer]++ : comm->received[t->peer]++;
    }
}

void sim_group_launch(struct sim_op *op, cudaStream_t stream)
{
    struct group *group = (struct group *)op;
    if (op->is_copy) {
        sim_group_number(group);
    }
    struct group **at = &lines[group->comm->device].first;
    while (*at) {
        at = &(*at)->next;
    }
    *at = group;
    sim_push(stream, op);
    sim_wake(&group->comm->hub->changed); /* who waits for it may be in a circle now */
}

void sim_group_drop(struct sim_op *op)
{
    struct group *group = (struct group *)op;
    if (group->graph) {
        group->comm->captured -= 1;
        sim_wake(&group->comm->hub->changed);
    }
}

/* Locked. The group has ended: others may begin. */
static void leave_line(struct group *group)
{
    struct line *line = &lines[group->comm->device];
    struct hub *hub = group->comm->hub;
    struct group **at = &line->first;
    while (*at != group) {
        at = &(*at)->next;
    }
    *at = group->next;
    line->running = line->running == group ? NULL : line->running;
    sim_wake(&hub->changed);
    for (struct group *g = line->first; g; g = g->next) {
        if (g->comm->hub != hub) {
            hub = g->comm->hub;
            sim_wake(&hub->changed);
        }
    }
}

/* Locked: the transfer of a group that has begun on `comm` which meets this one, posted
 * by `rank`; or NULL. */
static struct transfer *mate_of(const struct transfer *transfer, int rank,
                                const struct ncclComm *comm)
{
    if (!comm || !comm->running || !comm->running->has_begun ||
        comm->running->is_stuck) {
        return NULL;
    }
    for (int i = 0; i < comm->running->count; i++) {
        struct transfer *other = &comm->running->transfers[i];
        if (other->is_send != transfer->is_send && other->peer == rank &&
            other->number == transfer->number) {
            return other;
        }
    }
    return NULL;
}

static bool is_waiting(const struct group *group, const struct transfer *transfer)
{
    const struct ncclComm *comm = group->comm;
    return !transfer->is_done && !transfer->staging &&
           !mate_of(transfer, comm->rank, comm->hub->comms[transfer->peer]);
}

void sim_group_describe(const struct sim_op *op, char *text, size_t bytes)
{
    const struct group *group = (const struct group *)op;
    const struct ncclComm *comm = group->comm;
    int at = snprintf(text, bytes, "communicator %d: rank %d, group %llu",
                      comm->hub->number, comm->rank, (unsigned long long)group->number);
    if (!is_next_of_comm(group)) {
        (void)snprintf(text + at, bytes - (size_t)at, " waits for group %llu",
                       (unsigned long long)comm->ended + 1);
        return;
    }
    const struct group *ahead = comm->running == group ? NULL : ahead_of(group);
    if (ahead) {
        (void)snprintf(text + at, bytes - (size_t)at,
                       " waits for group %llu of communicator %d on device %d",
                       (unsigned long long)ahead->number, ahead->comm->hub->number,
                       comm->device);
        return;
    }
    const char *word = " waits";
    for (int i = 0; i < group->count && (size_t)at + 1 < bytes; i++) {
        const struct transfer *t = &group->transfers[i];
        if (group->has_begun && is_waiting(group, t)) {
            at +=
                snprintf(text + at, bytes - (size_t)at, "%s to %s %zu bytes %s rank %d",
                         word, t->is_send ? "send" : "receive", t->bytes,
                         t->is_send ? "to" : "from", t->peer);
            word = ",";
        }
    }
}

/* Locked: the rank's group that its peers can wait for; NULL: it has given none. */
static const struct group *next_of(const struct ncclComm *comm)
{
    const struct group *group = comm ? lines[comm->device].first : NULL;
    while (group && group->comm != comm) {
        group = group->next;
    }
    return group;
}

/* Locked: does it wait for one that is still taken to be in a circle? */
static bool waits_in_circle(const struct group *group)
{
    const struct ncclComm *comm = group->comm;
    if (comm->running != group) {
        const struct group *ahead = ahead_of(group);
        return ahead && ahead->is_in_circle;
    }
    for (int i = 0; i < group->count && group->has_begun && !group->is_stuck; i++) {
        const struct transfer *t = &group->transfers[i];
        const struct group *other = next_of(comm->hub->comms[t->peer]);
        if (is_waiting(group, t) && other && other->is_in_circle) {
            return true;
        }
    }
    return false;
}

/* Locked. Marks the groups that wait for each other, over peers and over devices: the
 * largest set of which each waits for one in it. False: nobody is in it. */
static bool find_circle(void)
{
    bool has_changed = true, is_any = false;
    for (int device = 0; device < SIMGPU_DEVICES; device++) {
        for (struct group *g = lines[device].first; g; g = g->next) {
            g->is_in_circle = is_next_of_comm(g) && !is_over(g->comm);
        }
    }
    while (has_changed) {
        has_changed = is_any = false;
        for (int device = 0; device < SIMGPU_DEVICES; device++) {
            for (struct group *g = lines[device].first; g; g = g->next) {
                bool is_out = g->is_in_circle && !waits_in_circle(g);
                g->is_in_circle = g->is_in_circle && !is_out;
                has_changed = has_changed || is_out;
                is_any = is_any || g->is_in_circle;
            }
        }
    }
    return is_any;
}

/* Locked. All ranks fail with this text. */
static void break_hub(struct hub *hub, const char *text)
{
    if (hub->result == ncclSuccess) {
        (void)snprintf(hub->text, sizeof hub->text, "%s", text);
        hub->result = ncclInternalError;
        sim_wake(&hub->changed);
    }
}

/* Locked, and again on return. False: there is no circle. */
static bool break_circle(void)
{
    char text[SIM_HUB_TEXT];
    if (!find_circle()) {
        return false;
    }
    size_t at = (size_t)snprintf(text, sizeof text, "deadlock");
    for (int device = 0; device < SIMGPU_DEVICES; device++) {
        for (struct group *g = lines[device].first; g; g = g->next) {
            char what[300];
            if (g->is_in_circle && at + 1 < sizeof text) {
                sim_group_describe(&g->op, what, sizeof what);
                at += (size_t)snprintf(text + at, sizeof text - at, "; %s", what);
            }
        }
    }
    for (int device = 0; device < SIMGPU_DEVICES; device++) {
        for (struct group *g = lines[device].first; g; g = g->next) {
            if (g->is_in_circle) {
                break_hub(g->comm->hub, text);
            }
        }
    }
    sim_unlock();
    sim_violate("%s", text);
    sim_lock();
    return true;
}

static size_t moved_bytes(const struct transfer *transfer)
{
    return sim_settings.is_dry ? 0 : transfer->bytes;
}

/* Locked, and again on return. Reads the sender's memory and gives it to the receive. */
static void give(struct group *group, struct transfer *send, struct transfer *mate,
                 cudaStream_t stream)
{
    struct ncclComm *comm = group->comm;
    if (mate->bytes != send->bytes) {
        char text[200];
        (void)snprintf(
            text, sizeof text,
            "rank %d sends %zu bytes to rank %d, which receives %zu "
            "(groups %llu and %llu)",
            comm->rank, send->bytes, send->peer, mate->bytes,
            (unsigned long long)group->number,
            (unsigned long long)comm->hub->comms[send->peer]->running->number);
        break_hub(comm->hub, text);
        sim_unlock();
        sim_violate("%s", text);
        sim_lock();
        return;
    }
    sim_unlock();
    sim_delay(&stream->random);
    unsigned char *staging = sim_room(moved_bytes(send));
    memcpy(staging, send->data, moved_bytes(send));
    sim_release(staging);
    sim_lock();
    /* The peer may have aborted meanwhile. */
    mate = mate_of(send, comm->rank, comm->hub->comms[send->peer]);
    if (mate) {
        mate->staging = staging;
        send->is_done = true;
        sim_wake(&comm->hub->changed);
    } else {
        free(staging);
    }
}

/* Locked, and again on return. */
static void take(struct transfer *receive, cudaStream_t stream)
{
    sim_unlock();
    sim_delay(&stream->random);
    sim_acquire(receive->staging);
    memcpy(receive->data, receive->staging, moved_bytes(receive));
    free(receive->staging);
    sim_lock();
    receive->staging = NULL;
    receive->is_done = true;
}

/* Locked, and again on return. One step of the group from a random place; false: nothing
 * can be done. */
static bool advance(struct group *group, cudaStream_t stream)
{
    struct ncclComm *comm = group->comm;
    int first = (int)(sim_random(&stream->random) % (uint64_t)group->count);
    for (int i = 0; i < group->count; i++) {
        struct transfer *t = &group->transfers[(first + i) % group->count];
        struct transfer *mate =
            t->is_send ? mate_of(t, comm->rank, comm->hub->comms[t->peer]) : NULL;
        if (!t->is_done && mate) {
            give(group, t, mate, stream);
            return true;
        }
        if (!t->is_done && t->staging) {
            take(t, stream);
            return true;
        }
    }
    return false;
}

static bool is_complete(const struct group *group)
{
    for (int i = 0; i < group->count; i++) {
        if (!group->transfers[i].is_done) {
            return false;
        }
    }
    return true;
}

/* Unlocked. The receivers' memory means nothing from now on. */
static bool begin_group(struct group *group, cudaStream_t stream)
{
    for (int i = 0; i < group->count; i++) {
        struct transfer *t = &group->transfers[i];
        if (t->bytes > 0 && !sim_memory_check(t->data, t->bytes, true, stream->device,
                                              t->is_send ? "ncclSend" : "ncclRecv")) {
            return false;
        }
        if (!t->is_send) {
            memset(t->data, RECV_GARBAGE, moved_bytes(t));
        }
    }
    sim_delay(&stream->random);
    return true;
}

void sim_group_run(struct sim_op *op, cudaStream_t stream)
{
    struct group *group = (struct group *)op;
    struct ncclComm *comm = group->comm;
    struct hub *hub = comm->hub;
    sim_lock();
    while (!is_over(comm) && (!is_next_of_comm(group) || ahead_of(group))) {
        sim_wait(&hub->changed);
    }
    if (!is_over(comm)) {
        comm->running = lines[comm->device].running = group;
        sim_unlock();
        bool is_right = begin_group(group, stream);
        sim_lock();
        if (fail_group_count >= 0 && fail_group_count-- == 0) {
            comm->error = ncclRemoteError;
            (void)snprintf(comm->text, sizeof comm->text, "group %llu was told to fail",
                           (unsigned long long)group->number);
            group->is_stuck = true;
        } else if (!is_right) {
            comm->error = ncclUnhandledCudaError;
            (void)snprintf(comm->text, sizeof comm->text, "illegal memory access");
            group->is_stuck = true;
        }
        group->has_begun = true;
        sim_wake(&hub->changed);
    }
    while (!is_over(comm) && (group->is_stuck || !is_complete(group))) {
        if (!group->is_stuck && advance(group, stream)) {
            continue;
        }
        if (!break_circle()) {
            sim_wait(&hub->changed);
        }
    }
    for (int i = 0; i < group->count; i++) {
        free(group->transfers[i].staging);
    }
    comm->running = NULL;
    comm->ended += 1;
    leave_line(group);
    sim_unlock();
}

void simnccl_set_order(enum simnccl_order order)
{
    sim_lock();
    device_order = order;
    sim_unlock();
}

void simnccl_fail_after(int64_t count)
{
    sim_lock();
    fail_group_count = count;
    sim_unlock();
}
