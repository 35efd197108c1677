/* NCCL's calls: communicators, groups until they are given to a stream, errors. */

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "sim_comm.h"

/* A call in an open group. */
struct entry {
    struct ncclComm *comm;
    cudaStream_t stream;
    struct transfer transfer;
};

/* All locked. */
static struct hub *hubs;
static struct ncclComm *comms; /* the dead ones too, until simgpu_reset */
static uint64_t id_count, draws;
static int split_count, split_settings[3];
static int version = 23203;
static int64_t fail_call_count = -1;
static ncclResult_t fail_call_result;

static _Thread_local struct entry *entries;
static _Thread_local int entry_count, entry_room, group_depth;
static _Thread_local ncclResult_t group_error;
static _Thread_local char thread_text[400];
static pthread_key_t group_key; /* set while the thread has a group open */

static uint64_t draw(void)
{
    draws += sim_settings.seed;
    return sim_random(&draws);
}

__attribute__((format(printf, 2, 3))) static ncclResult_t fail(ncclResult_t result,
                                                               const char *format, ...)
{
    va_list args;
    va_start(args, format);
    (void)vsnprintf(thread_text, sizeof thread_text, format, args);
    va_end(args);
    if (group_depth > 0) {
        group_error = result;
    }
    return result;
}

static ncclResult_t injected(const char *what)
{
    sim_lock();
    bool is_hit = fail_call_count >= 0 && fail_call_count-- == 0;
    ncclResult_t result = is_hit ? fail_call_result : ncclSuccess;
    sim_unlock();
    return is_hit ? fail(result, "%s was told to fail", what) : ncclSuccess;
}

static void end_thread(void *arg)
{
    (void)arg;
    free(entries);
    entries = NULL;
    sim_violate("a thread ends with an NCCL group open");
}

__attribute__((constructor)) static void make_group_key(void)
{
    (void)pthread_key_create(&group_key, end_thread);
}

void sim_nccl_check_waiting(const char *what)
{
    if (group_depth > 0) {
        sim_violate("%s while an NCCL group is open", what);
    }
}

/* The communicator is this thread's until comm_leave. */
static ncclResult_t comm_enter(struct ncclComm *comm, const char *what)
{
    sim_lock();
    bool is_dead = !comm || comm->magic != SIM_COMM;
    bool is_shared =
        !is_dead && comm->uses > 0 && !pthread_equal(comm->user, pthread_self());
    bool is_slow = draw() % 8 == 0;
    if (!is_dead) {
        comm->user = pthread_self();
        comm->uses += 1;
    }
    sim_unlock();
    if (is_dead) {
        sim_violate("%s on a communicator that was destroyed or aborted", what);
        return fail(ncclInvalidUsage, "%s: the communicator is gone", what);
    }
    if (is_shared) {
        sim_violate("%s on rank %d while another thread uses its communicator", what,
                    comm->rank);
    }
    if (is_slow && sim_settings.most_delay_us > 0) {
        sim_sleep_us(20); /* so that another thread's call meets this one */
    }
    return ncclSuccess;
}

static void comm_leave(struct ncclComm *comm)
{
    sim_lock();
    comm->uses -= 1;
    sim_unlock();
}

/* Locked. */
static void forget_deferred(struct ncclComm *comm)
{
    if (comm->deferred) {
        sim_group_drop(&comm->deferred->op);
        free(comm->deferred);
        comm->deferred = NULL;
    }
}

/* Locked. */
static void give_deferred(struct ncclComm *comm)
{
    struct group *group = comm->deferred;
    if (sim_capture_graph(comm->deferred_stream) != group->graph) {
        comm->error = ncclInternalError;
        (void)snprintf(comm->text, sizeof comm->text,
                       "a capture began or ended while a group was being enqueued");
        forget_deferred(comm);
        return;
    }
    comm->deferred = NULL;
    sim_enqueue_locked(comm->deferred_stream, &group->op);
}

/* Locked: the state now. Gives a deferred group to its stream. */
static ncclResult_t comm_poll(struct ncclComm *comm)
{
    struct hub *hub = comm->hub;
    if (comm->state == COMM_CREATING) {
        if (hub->come < hub->world || sim_now_ns() < hub->ready_at_ns) {
            return ncclInProgress;
        }
        comm->state = COMM_READY;
    }
    if (comm->child && !comm->is_aborted) {
        if (comm_poll(comm->child) == ncclInProgress) {
            return ncclInProgress;
        }
        *comm->handle = comm->child;
        comm->child = NULL;
        split_count += 1;
    }
    if (comm->deferred && !comm->is_aborted) {
        comm->deferred_polls -= 1;
        if (comm->deferred_polls > 0) {
            return ncclInProgress;
        }
        give_deferred(comm);
    }
    if (hub->result != ncclSuccess) {
        (void)snprintf(comm->text, sizeof comm->text, "%.390s", hub->text);
        return hub->result;
    }
    if (comm->error == ncclSuccess && comm->state == COMM_FINALIZING) {
        if (comm->ended < comm->posted || comm->captured > 0) {
            return ncclInProgress;
        }
        comm->state = COMM_FINALIZED;
    }
    return comm->error;
}

/* For calls that a communicator takes only when it has nothing under way. */
static ncclResult_t comm_check(struct ncclComm *comm, const char *what)
{
    sim_lock();
    bool is_creating = comm->state == COMM_CREATING;
    bool is_busy = is_creating || comm->deferred || comm->child;
    bool is_final = comm->state >= COMM_FINALIZING;
    ncclResult_t result = is_busy ? ncclInvalidArgument : comm_poll(comm);
    sim_unlock();
    if (is_busy) {
        return fail(result, "%s before the previous operation returned ncclSuccess",
                    what);
    }
    if (is_final) {
        return fail(ncclInvalidUsage, "%s after ncclCommFinalize", what);
    }
    return result == ncclSuccess ? result
                                 : fail(result, "%s: %.300s", what, comm->text);
}

ncclResult_t ncclGetVersion(int *out)
{
    *out = version;
    return ncclSuccess;
}

ncclResult_t ncclGetUniqueId(ncclUniqueId *id)
{
    ncclResult_t result = injected("ncclGetUniqueId");
    if (result == ncclSuccess) {
        memset(id, 0, sizeof *id);
        sim_lock();
        id_count += 1;
        (void)snprintf(id->internal, sizeof id->internal, "simnccl %llu",
                       (unsigned long long)id_count);
        sim_unlock();
    }
    return result;
}

/* Locked. NULL: the id is nobody's, or for another world. */
static struct hub *hub_of(const ncclUniqueId *id, int world)
{
    struct hub *hub = hubs;
    while (hub && memcmp(hub->id, id->internal, sizeof hub->id) != 0) {
        hub = hub->next;
    }
    if (!hub && strncmp(id->internal, "simnccl ", 8) == 0) {
        hub = SIM_ROOM(struct hub);
        memcpy(hub->id, id->internal, sizeof hub->id);
        hub->number = atoi(id->internal + strlen("simnccl "));
        hub->world = world;
        hub->next = hubs;
        hubs = hub;
    }
    return hub && hub->world == world ? hub : NULL;
}

/* Locked. All ranks have come. */
static void hub_make(struct hub *hub)
{
    for (int a = 0; a < hub->world; a++) {
        for (int b = 0; b < a; b++) {
            if (hub->comms[a]->device == hub->comms[b]->device) {
                hub->result = ncclInvalidUsage;
                (void)snprintf(
                    hub->text, sizeof hub->text,
                    "Duplicate GPU detected : rank %d and rank %d both on CUDA "
                    "device %d",
                    b, a, hub->comms[a]->device);
            }
        }
    }
    hub->ready_at_ns =
        sim_now_ns() +
        (int64_t)(draw() % (uint64_t)(sim_settings.most_delay_us * 4000 + 1));
    sim_wake(&hub->changed);
}

/* The rank's end of a communicator; its ranks have not met yet. */
static ncclResult_t come(struct ncclComm **out, int world, const ncclUniqueId *id,
                         int rank, bool is_blocking, const char *what)
{
    ncclResult_t result = injected(what);
    if (result != ncclSuccess) {
        return result;
    }
    if (world < 1 || world > SIM_RANKS || rank < 0 || rank >= world) {
        return fail(ncclInvalidArgument, "%s: rank %d of %d", what, rank, world);
    }
    sim_lock();
    struct hub *hub = hub_of(id, world);
    if (!hub || hub->comms[rank]) {
        sim_unlock();
        return fail(ncclInvalidArgument, "%s: %s", what,
                    hub ? "this rank has come already" : "unknown id or other world");
    }
    struct ncclComm *comm = SIM_ROOM(struct ncclComm);
    comm->magic = SIM_COMM;
    comm->hub = hub;
    comm->rank = rank;
    comm->device = sim_current_device();
    comm->is_blocking = is_blocking;
    comm->next = comms;
    comms = comm;
    hub->comms[rank] = comm;
    hub->come += 1;
    if (hub->come == world) {
        hub_make(hub);
    }
    sim_unlock();
    *out = comm;
    return ncclSuccess;
}

static ncclResult_t create(ncclComm_t *out, int world, const ncclUniqueId *id, int rank,
                           bool is_blocking)
{
    const char *what = "ncclCommInitRank";
    struct ncclComm *comm = NULL;
    ncclResult_t result = come(&comm, world, id, rank, is_blocking, what);
    if (result != ncclSuccess) {
        return result;
    }
    struct hub *hub = comm->hub;
    sim_lock();
    int64_t end = sim_now_ns() + (int64_t)(sim_settings.patience * 1e9);
    result = comm_poll(comm);
    while (is_blocking && result == ncclInProgress && sim_now_ns() < end) {
        (void)sim_wait_until(&hub->changed, sim_now_ns() + 1000000);
        result = comm_poll(comm);
    }
    int arrived = hub->come;
    sim_unlock();
    *out = comm;
    if (is_blocking && result == ncclInProgress) {
        sim_violate("%s of rank %d waited %.1f s; %d of %d ranks have come", what, rank,
                    sim_settings.patience, arrived, world);
    }
    return is_blocking && result != ncclSuccess
               ? fail(result, "%s: %.300s", what, comm->text)
               : (is_blocking ? ncclSuccess : ncclInProgress);
}

ncclResult_t ncclCommInitRank(ncclComm_t *comm, int world, ncclUniqueId id, int rank)
{
    return create(comm, world, &id, rank, true);
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t *comm, int world, ncclUniqueId id,
                                    int rank, ncclConfig_t *config)
{
    if (config && (config->magic != CP_NCCL_MAGIC || config->size != sizeof *config)) {
        return fail(ncclInvalidArgument, "the config was not initialized");
    }
    return create(comm, world, &id, rank, !config || config->blocking != 0);
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t *result)
{
    sim_lock();
    bool is_alive = comm && comm->magic == SIM_COMM;
    *result = is_alive ? comm_poll(comm) : ncclInvalidUsage;
    sim_unlock();
    if (!is_alive) {
        sim_violate("ncclCommGetAsyncError on a communicator that was destroyed or "
                    "aborted");
        return ncclInvalidUsage;
    }
    return ncclSuccess;
}

ncclResult_t ncclCommCount(ncclComm_t comm, int *count)
{
    *count = comm->hub->world;
    return ncclSuccess;
}

ncclResult_t ncclCommUserRank(ncclComm_t comm, int *rank)
{
    *rank = comm->rank;
    return ncclSuccess;
}

ncclResult_t ncclCommCuDevice(ncclComm_t comm, int *device)
{
    *device = comm->device;
    return ncclSuccess;
}

/* Locked. */
static void comm_bury(struct ncclComm *comm)
{
    if (comm->child) {
        comm_bury(comm->child);
    }
    comm->magic = SIM_GONE;
    forget_deferred(comm);
    comm->hub->comms[comm->rank] = NULL;
    sim_wake(&comm->hub->changed);
}

ncclResult_t ncclCommAbort(ncclComm_t comm)
{
    sim_nccl_check_waiting("ncclCommAbort");
    sim_lock();
    bool is_alive = comm && comm->magic == SIM_COMM;
    if (is_alive) {
        comm->is_aborted = true;
        forget_deferred(comm);
        sim_wake(&comm->hub->changed);
        while (comm->running || comm->captured > 0) {
            sim_wait(&comm->hub->changed);
        }
        comm_bury(comm);
    }
    sim_unlock();
    if (!is_alive) {
        sim_violate("ncclCommAbort on a communicator that was destroyed or aborted");
        return ncclInvalidUsage;
    }
    return ncclSuccess;
}

/* Until its groups have ended, and the graphs that have some are gone. */
static ncclResult_t comm_drain(struct ncclComm *comm, const char *what)
{
    int64_t end = sim_now_ns() + (int64_t)(sim_settings.patience * 1e9);
    char text[SIMGPU_TEXT - 200];
    sim_lock();
    while (comm->ended < comm->posted || comm->captured > 0) {
        (void)comm_poll(comm);
        if (!sim_wait_until(&comm->hub->changed, sim_now_ns() + 10000000) &&
            sim_now_ns() >= end) {
            sim_report_locked(text, sizeof text);
            sim_unlock();
            sim_violate("%s of rank %d waited %.1f s. %s", what, comm->rank,
                        sim_settings.patience, text);
            return ncclInternalError;
        }
    }
    sim_unlock();
    return ncclSuccess;
}

ncclResult_t ncclCommFinalize(ncclComm_t comm)
{
    const char *what = "ncclCommFinalize";
    sim_nccl_check_waiting(what);
    ncclResult_t result = comm_enter(comm, what);
    if (result != ncclSuccess) {
        return result;
    }
    result = comm_check(comm, what);
    if (result == ncclSuccess) {
        sim_lock();
        comm->state = COMM_FINALIZING;
        sim_unlock();
        result = comm->is_blocking ? comm_drain(comm, what) : ncclInProgress;
    }
    comm_leave(comm);
    return result;
}

ncclResult_t ncclCommDestroy(ncclComm_t comm)
{
    const char *what = "ncclCommDestroy";
    sim_nccl_check_waiting(what);
    ncclResult_t result = comm_enter(comm, what);
    if (result != ncclSuccess) {
        return result;
    }
    result = comm_drain(comm, what);
    comm_leave(comm);
    sim_lock();
    comm_bury(comm);
    sim_unlock();
    return result;
}

/* Locked, and again on return; false: an abort of the parent has ended it. */
static bool wait_for_child(struct ncclComm *parent, struct ncclComm *child)
{
    while (!parent->is_aborted && comm_poll(child) == ncclInProgress) {
        (void)sim_wait_until(&child->hub->changed, sim_now_ns() + 1000000);
    }
    return !parent->is_aborted;
}

/* Unlocked. The child of a blocking parent, once it is made. */
static ncclResult_t take_child(struct ncclComm *parent, struct ncclComm *child,
                               ncclComm_t *out)
{
    sim_lock();
    ncclResult_t result = ncclInternalError;
    if (wait_for_child(parent, child)) {
        result = child->hub->result;
        *out = child;
        split_count += 1;
    } else {
        comm_bury(child);
    }
    sim_unlock();
    return result;
}

/* Unlocked. */
static ncclResult_t give_child(struct ncclComm *parent, struct ncclComm *child,
                               ncclComm_t *out)
{
    sim_lock();
    parent->child = child;
    parent->handle = out;
    sim_unlock();
    return ncclInProgress;
}

ncclResult_t ncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t *out,
                           ncclConfig_t *config)
{
    const char *what = "ncclCommSplit";
    ncclUniqueId id;
    struct ncclComm *child = NULL;
    ncclResult_t result = comm_enter(comm, what);
    if (result != ncclSuccess) {
        return result;
    }
    result = comm_check(comm, what);
    comm_leave(comm);
    if (result == ncclSuccess && (color != 0 || key != comm->rank)) {
        result = fail(ncclInvalidArgument, "%s: only of all ranks as they are", what);
    }
    if (result != ncclSuccess) {
        return result;
    }
    sim_lock();
    bool is_outstanding = comm->ended < comm->posted;
    memset(&id, 0, sizeof id);
    /* The same on all ranks, by the order of their calls. */
    (void)snprintf(id.internal, sizeof id.internal, "simnccl %d%03d split",
                   comm->hub->number, ++comm->splits);
    if (config) {
        split_settings[0] = config->cgaClusterSize;
        split_settings[1] = config->minCTAs;
        split_settings[2] = config->maxCTAs;
    }
    sim_unlock();
    if (is_outstanding) {
        sim_violate("%s of rank %d with groups outstanding", what, comm->rank);
    }
    *out = NULL;
    bool is_blocking = config ? config->blocking != 0 : comm->is_blocking;
    result = come(&child, comm->hub->world, &id, comm->rank, is_blocking, what);
    if (result != ncclSuccess) {
        return result;
    }
    return comm->is_blocking ? take_child(comm, child, out)
                             : give_child(comm, child, out);
}

ncclResult_t ncclGroupStart(void)
{
    ncclResult_t result = injected("ncclGroupStart");
    if (result != ncclSuccess) {
        return result;
    }
    if (group_depth == 0) {
        group_error = ncclSuccess;
        (void)pthread_setspecific(group_key, &group_key);
    }
    group_depth += 1;
    return ncclSuccess;
}

/* Locked. The calls of the open group on this communicator. */
static struct group *group_create(struct ncclComm *comm, cudaStream_t stream)
{
    struct group *group =
        sim_op_room(sizeof *group + (size_t)entry_count * sizeof group->transfers[0]);
    group->op.name = "NCCL group";
    group->op.run = sim_group_run;
    group->op.describe = sim_group_describe;
    group->op.give = sim_group_launch;
    group->op.drop = sim_group_drop;
    group->comm = comm;
    group->graph = sim_capture_graph(stream);
    struct simgpu_stats *stats = &sim_stats[comm->device];
    for (int i = 0; i < entry_count; i++) {
        if (entries[i].comm != comm) {
            continue;
        }
        struct transfer *t = &group->transfers[group->count++];
        *t = entries[i].transfer;
        stats->sends += t->is_send;
        stats->receives += !t->is_send;
        stats->sent_bytes += t->is_send ? t->bytes : 0;
    }
    stats->groups += 1;
    if (group->graph) {
        comm->captured += 1;
    } else {
        sim_group_number(group);
    }
    return group;
}

/* Posts what the group has for the communicator of its entry `at`. */
static ncclResult_t post(int at)
{
    struct ncclComm *comm = entries[at].comm;
    cudaStream_t stream = entries[at].stream;
    sim_lock();
    if (comm->magic != SIM_COMM) {
        sim_unlock();
        sim_violate("ncclGroupEnd on a communicator that was destroyed or aborted");
        return ncclInvalidUsage;
    }
    struct group *group = group_create(comm, stream);
    bool is_deferred = !comm->is_blocking && draw() % 2 == 0;
    if (is_deferred) {
        sim_release(&group->op);
        comm->deferred = group;
        comm->deferred_stream = stream;
        comm->deferred_polls = 1 + (int)(draw() % 3);
    } else {
        sim_enqueue_locked(stream, &group->op);
    }
    sim_unlock();
    return is_deferred ? ncclInProgress : ncclSuccess;
}

static bool is_first_of_comm(int at)
{
    for (int i = 0; i < at; i++) {
        if (entries[i].comm == entries[at].comm) {
            return false;
        }
    }
    return true;
}

ncclResult_t ncclGroupEnd(void)
{
    if (group_depth == 0) {
        return fail(ncclInvalidUsage, "ncclGroupEnd: not in a group call");
    }
    if (group_depth > 1) {
        group_depth -= 1;
        return ncclSuccess;
    }
    (void)injected("ncclGroupEnd"); /* becomes the group's error */
    ncclResult_t result = group_error;
    group_depth = 0;
    (void)pthread_setspecific(group_key, NULL);
    for (int i = 0; i < entry_count && group_error == ncclSuccess; i++) {
        if (is_first_of_comm(i)) {
            ncclResult_t posted = post(i);
            result = posted == ncclSuccess ? result : posted;
        }
    }
    for (int i = 0; i < entry_count; i++) {
        comm_leave(entries[i].comm);
    }
    free(entries);
    entries = NULL;
    entry_count = entry_room = 0;
    return result;
}

/* The communicator stays this thread's until the group ends. */
static ncclResult_t add(struct entry entry, size_t count, ncclDataType_t type,
                        const char *what)
{
    struct ncclComm *comm = entry.comm;
    ncclResult_t result = injected(what);
    if (result != ncclSuccess) {
        return result;
    }
    result = comm_enter(comm, what);
    if (result != ncclSuccess) {
        return result;
    }
    result = comm_check(comm, what);
    entry.stream = sim_stream(entry.stream);
    entry.transfer.bytes = count;
    if (result != ncclSuccess) {
        /* said */
    } else if (type != ncclInt8 && type != ncclUint8) {
        result = fail(ncclInvalidArgument, "%s: only bytes here", what);
    } else if (entry.transfer.peer < 0 || entry.transfer.peer >= comm->hub->world) {
        result = fail(ncclInvalidArgument, "%s: peer %d of %d", what,
                      entry.transfer.peer, comm->hub->world);
    } else if (!entry.stream || entry.stream->device != comm->device) {
        result = fail(ncclInvalidArgument, "%s: a stream of another device", what);
    }
    for (int i = 0; result == ncclSuccess && i < entry_count; i++) {
        if (entries[i].comm == comm && entries[i].stream != entry.stream) {
            result = fail(ncclInvalidUsage, "%s: two streams in one group", what);
        }
    }
    if (result != ncclSuccess) {
        comm_leave(comm);
        return result;
    }
    if (entry_count == entry_room) {
        entry_room = entry_room * 2 + 8;
        struct entry *more = sim_room((size_t)entry_room * sizeof *more);
        if (entries) {
            memcpy(more, entries, (size_t)entry_count * sizeof *more);
        }
        free(entries);
        entries = more;
    }
    entries[entry_count++] = entry;
    return ncclSuccess;
}

/* Alone, a call is a group of one. */
static ncclResult_t call(struct entry entry, size_t count, ncclDataType_t type,
                         const char *what)
{
    bool is_alone = group_depth == 0;
    group_error = is_alone ? ncclSuccess : group_error;
    group_depth += is_alone;
    ncclResult_t result = add(entry, count, type, what);
    if (is_alone) {
        ncclResult_t ended = ncclGroupEnd();
        result = result == ncclSuccess ? ended : result;
    }
    return result;
}

ncclResult_t ncclSend(const void *data, size_t count, ncclDataType_t type, int peer,
                      ncclComm_t comm, cudaStream_t stream)
{
    struct entry entry = {.comm = comm, .stream = stream};
    entry.transfer.data = (unsigned char *)(uintptr_t)data;
    entry.transfer.peer = peer;
    entry.transfer.is_send = true;
    return call(entry, count, type, "ncclSend");
}

ncclResult_t ncclRecv(void *data, size_t count, ncclDataType_t type, int peer,
                      ncclComm_t comm, cudaStream_t stream)
{
    struct entry entry = {.comm = comm, .stream = stream};
    entry.transfer.data = data;
    entry.transfer.peer = peer;
    return call(entry, count, type, "ncclRecv");
}

const char *ncclGetErrorString(ncclResult_t result)
{
    switch (result) {
    case ncclSuccess:
        return "no error";
    case ncclUnhandledCudaError:
        return "unhandled cuda error";
    case ncclSystemError:
        return "unhandled system error";
    case ncclInternalError:
        return "internal error";
    case ncclInvalidArgument:
        return "invalid argument";
    case ncclInvalidUsage:
        return "invalid usage";
    case ncclRemoteError:
        return "remote process exited or there was a network error";
    case ncclInProgress:
        return "NCCL operation in progress";
    }
    return "unknown result code";
}

/* The thread's own last failure; where it had none, the communicator's. */
const char *ncclGetLastError(ncclComm_t comm)
{
    return thread_text[0] || !comm ? thread_text : comm->text;
}

const struct cp_nccl *simnccl_table(void)
{
    static const struct cp_nccl table = {
#define TABLE_ENTRY(field, name, arguments) .field = name,
        CP_NCCL_CALLS(TABLE_ENTRY) CP_NCCL_TEXTS(TABLE_ENTRY)
#undef TABLE_ENTRY
    };
    return &table;
}

void simnccl_set_version(int value)
{
    version = value;
}

void simnccl_fail_call_after(int64_t count, ncclResult_t result)
{
    sim_lock();
    fail_call_count = count;
    fail_call_result = result;
    sim_unlock();
}

int simnccl_splits(void)
{
    sim_lock();
    int count = split_count;
    sim_unlock();
    return count;
}

void simnccl_split_settings(int settings[3])
{
    sim_lock();
    memcpy(settings, split_settings, sizeof split_settings);
    sim_unlock();
}

int sim_nccl_count(void)
{
    int count = 0;
    sim_lock();
    for (struct ncclComm *c = comms; c; c = c->next) {
        count += c->magic == SIM_COMM;
    }
    sim_unlock();
    return count;
}

void sim_nccl_reset(void)
{
    simnccl_fail_after(-1);
    simnccl_set_order(SIMNCCL_AS_GIVEN);
    sim_lock();
    fail_call_count = -1;
    split_count = 0;
    version = 23203;
    for (struct ncclComm **at = &comms; *at;) {
        struct ncclComm *comm = *at;
        if (comm->magic == SIM_COMM) {
            at = &comm->next;
        } else {
            *at = comm->next;
            free(comm);
        }
    }
    for (struct hub **at = &hubs; *at;) {
        struct hub *hub = *at;
        bool is_used = false;
        for (int rank = 0; rank < hub->world; rank++) {
            is_used = is_used || hub->comms[rank];
        }
        if (is_used) {
            at = &hub->next;
        } else {
            *at = hub->next;
            free(hub);
        }
    }
    sim_unlock();
}
