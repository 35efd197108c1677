/* Groups on their streams: who meets whom, what moves when, and who waits for whom in a
 * circle. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "sim_comm.h"

enum { RECV_GARBAGE = 0xa5 };

static int64_t fail_group_count = -1; /* locked */

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
    int at = snprintf(text, bytes, "rank %d, group %llu", comm->rank,
                      (unsigned long long)group->number);
    if (comm->running != group) {
        (void)snprintf(text + at, bytes - (size_t)at, " waits for group %llu",
                       (unsigned long long)comm->ended + 1);
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

/* Locked: does the rank wait for one of `stuck`? */
static bool waits_for(const struct ncclComm *comm, const bool stuck[SIM_RANKS])
{
    const struct group *group = comm ? comm->running : NULL;
    if (!group || !group->has_begun || group->is_stuck) {
        return false;
    }
    for (int i = 0; i < group->count; i++) {
        const struct transfer *t = &group->transfers[i];
        if (is_waiting(group, t) && stuck[t->peer]) {
            return true;
        }
    }
    return false;
}

/* Locked. A rank is stuck if it waits for one that is in another group and stuck itself:
 * the largest such set. Fills the hub's text and says true where there is one. */
static bool find_deadlock(struct hub *hub)
{
    bool stuck[SIM_RANKS];
    bool has_changed = true, is_any = false;
    for (int rank = 0; rank < SIM_RANKS; rank++) {
        stuck[rank] = rank < hub->world;
    }
    while (has_changed) {
        has_changed = false;
        for (int rank = 0; rank < hub->world; rank++) {
            if (stuck[rank] && !waits_for(hub->comms[rank], stuck)) {
                stuck[rank] = false;
                has_changed = true;
            }
        }
    }
    size_t at = (size_t)snprintf(hub->text, sizeof hub->text, "deadlock");
    for (int rank = 0; rank < hub->world && at + 1 < sizeof hub->text; rank++) {
        if (stuck[rank]) {
            char text[300];
            sim_group_describe(&hub->comms[rank]->running->op, text, sizeof text);
            at += (size_t)snprintf(hub->text + at, sizeof hub->text - at, "; %s", text);
            is_any = true;
        }
    }
    if (!is_any) {
        hub->text[0] = '\0';
    }
    return is_any;
}

/* Locked, and again on return. All ranks fail with the hub's text. */
static void break_hub(struct hub *hub)
{
    char text[sizeof hub->text];
    if (hub->result == ncclSuccess) {
        memcpy(text, hub->text, sizeof text);
        hub->result = ncclInternalError;
        sim_wake(&hub->changed);
        sim_unlock();
        sim_violate("%s", text);
        sim_lock();
    }
}

static bool is_over(const struct ncclComm *comm)
{
    return comm->is_aborted || comm->hub->result != ncclSuccess;
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
        (void)snprintf(
            comm->hub->text, sizeof comm->hub->text,
            "rank %d sends %zu bytes to rank %d, which receives %zu "
            "(groups %llu and %llu)",
            comm->rank, send->bytes, send->peer, mate->bytes,
            (unsigned long long)group->number,
            (unsigned long long)comm->hub->comms[send->peer]->running->number);
        break_hub(comm->hub);
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
    while (comm->ended + 1 != group->number && !is_over(comm)) {
        sim_wait(&hub->changed);
    }
    if (!is_over(comm)) {
        comm->running = group;
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
        if (find_deadlock(hub)) {
            break_hub(hub);
        } else {
            sim_wait(&hub->changed);
        }
    }
    for (int i = 0; i < group->count; i++) {
        free(group->transfers[i].staging);
    }
    comm->running = NULL;
    comm->ended += 1;
    sim_wake(&hub->changed);
    sim_unlock();
}

void simnccl_fail_after(int64_t count)
{
    sim_lock();
    fail_group_count = count;
    sim_unlock();
}
