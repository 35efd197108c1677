/* Faults planted under whole calls are found: by wrong answers, or by a violation of the
 * stand-ins. Under ThreadSanitizer missing order is a report of its own (test_simgpu.c,
 * test_scenes.c), so these run without it. */
#include "gpus.h"
#include "ipcs.h"
#include "scene.h"

enum { TRIES = 40, ROOM = 256, SLOW_US = 4000 };

/* Of all ranks: tables with one entry changed, and what the sound one is. */
static struct cp_device_ops odd_device;
static struct cp_comm_ops odd_comm;
static struct cp_nccl odd_nccl;
static enum cp_code (*sound_await)(struct cp_device *device, struct cp_stream *stream,
                                   int event);
static enum cp_code (*sound_post)(struct cp_comm *comm, const struct cp_xfer *xfers,
                                  int count, struct cp_stream *stream,
                                  uint64_t *ticket);
static enum cp_code (*sound_publish)(struct cp_comm *comm, int signal, uint64_t value,
                                     struct cp_stream *stream);
static enum cp_code (*sound_begin)(struct cp_comm *comm,
                                   const struct cp_comm_call *call);
static struct cp_device *odd_home[SCENE_MOST_RANKS];

/* ---- the faults ---- */

static bool is_lane(struct cp_device *device, const struct cp_stream *stream)
{
    bool found = false;
    for (int lane = 0; lane < CP_DEVICE_LANES; lane++) {
        found = found || device->ops->lane(device, lane) == stream;
    }
    return found;
}

/* What computes does not wait for what has been received. */
static enum cp_code await_on_lanes_only(struct cp_device *device,
                                        struct cp_stream *stream, int event)
{
    return is_lane(device, stream) ? sound_await(device, stream, event) : CP_OK;
}

/* What moves data waits for the caller's inputs, but not for whoever still reads the
 * place that it fills. */
static enum cp_code await_the_caller_only(struct cp_device *device,
                                          struct cp_stream *stream, int event)
{
    return is_lane(device, stream) && event != CP_DEVICE_EVENT_CALL
               ? CP_OK
               : sound_await(device, stream, event);
}

/* The first two sends of a batch that are as long carry each other's bytes. */
static enum cp_code post_swapped(struct cp_comm *comm, const struct cp_xfer *xfers,
                                 int count, struct cp_stream *stream, uint64_t *ticket)
{
    struct cp_xfer odd[ROOM];
    int first = -1;
    bool is_swapped = false;
    if (count > ROOM) {
        abort();
    }
    memcpy(odd, xfers, (size_t)count * sizeof *odd);
    for (int i = 0; i < count && !is_swapped; i++) {
        if (!odd[i].is_send || odd[i].bytes == 0) {
            continue;
        }
        if (first >= 0 && odd[first].bytes == odd[i].bytes) {
            void *data = odd[first].data;
            odd[first].data = odd[i].data;
            odd[i].data = data;
            is_swapped = true;
        }
        first = first < 0 ? i : first;
    }
    return sound_post(comm, odd, count, stream, ticket);
}

/* What is published need not be there yet; the call has its turn. */
static enum cp_code publish_elsewhere(struct cp_comm *comm, int signal, uint64_t value,
                                      struct cp_stream *stream)
{
    struct cp_device *device = odd_home[comm->rank];
    struct cp_stream *lane = device->ops->lane(device, CP_LANE_OUT);
    (void)stream;
    CP_TRY(device->ops->await(device, lane, CP_DEVICE_EVENT_CALL));
    return sound_publish(comm, signal, value, lane);
}

/* A rank counts as having left a call when it has just begun, so that the others write to
 * their windows while it still reads there. */
static enum cp_code begin_and_leave(struct cp_comm *comm,
                                    const struct cp_comm_call *call)
{
    CP_TRY(sound_begin(comm, call));
    return comm->ops->end(comm, call->stream);
}

static ncclResult_t leave_open(void)
{
    return ncclSuccess;
}

/* ---- where they are planted ---- */

/* What has no order may come in the right one: so whoever should be waited for is late. */
static void slow_down(struct cp_stream *stream)
{
    simgpu_slow_stream((cudaStream_t)stream, SLOW_US);
}

static void slow_lanes(struct cp_device *device)
{
    for (int lane = 0; lane < CP_DEVICE_LANES; lane++) {
        slow_down(device->ops->lane(device, lane));
    }
}

static void plant_await(struct gpu *gpu,
                        enum cp_code (*await)(struct cp_device *device,
                                              struct cp_stream *stream, int event))
{
    odd_device = *gpu->device->ops; /* the same on all ranks */
    sound_await = odd_device.await;
    odd_device.await = await;
    gpu->device->ops = &odd_device;
}

static enum cp_code join_unordered(struct world *w, int rank,
                                   struct cp_context_parts *parts)
{
    enum cp_code code = gpus_join(w, rank, parts);
    plant_await(w->own[rank], await_on_lanes_only);
    slow_lanes(parts->device);
    return code;
}

static enum cp_code join_overtaking(struct world *w, int rank,
                                    struct cp_context_parts *parts)
{
    enum cp_code code = gpus_join(w, rank, parts);
    plant_await(w->own[rank], await_the_caller_only);
    slow_down(gpus_stream(w, rank));
    return code;
}

static enum cp_code join_swapping(struct world *w, int rank,
                                  struct cp_context_parts *parts)
{
    enum cp_code code = gpus_join(w, rank, parts);
    odd_comm = *parts->comm->ops;
    sound_post = odd_comm.post;
    odd_comm.post = post_swapped;
    parts->comm->ops = &odd_comm;
    return code;
}

static enum cp_code join_open(struct world *w, int rank, struct cp_context_parts *parts)
{
    return gpus_join_by(&odd_nccl, w, rank, parts);
}

static enum cp_code join_hasty(struct world *w, int rank,
                               struct cp_context_parts *parts)
{
    enum cp_code code = ipcs_join(w, rank, parts);
    odd_comm = *parts->comm->ops;
    sound_publish = odd_comm.publish;
    odd_comm.publish = publish_elsewhere;
    slow_down(gpus_stream(w, rank));
    odd_home[rank] = parts->device;
    parts->comm->ops = &odd_comm;
    return code;
}

static enum cp_code join_and_begin_by(
    enum cp_code (*begin)(struct cp_comm *comm, const struct cp_comm_call *call),
    struct world *w, int rank, struct cp_context_parts *parts)
{
    enum cp_code code = ipcs_join(w, rank, parts);
    odd_comm = *parts->comm->ops;
    sound_begin = odd_comm.begin;
    odd_comm.begin = begin;
    parts->comm->ops = &odd_comm;
    return code;
}

static enum cp_code join_leaving(struct world *w, int rank,
                                 struct cp_context_parts *parts)
{
    enum cp_code code = join_and_begin_by(begin_and_leave, w, rank, parts);
    if (rank == 0) { /* is a call behind */
        slow_down(gpus_stream(w, rank));
        slow_lanes(parts->device);
    }
    return code;
}

/* ---- are they found? ---- */

static void play(int rank, void *arg)
{
    struct world *w = arg;
    static const enum cp_op ops[] = {CP_OP_ATTENTION, CP_OP_ATTENTION_BACKWARD};
    struct cp_view tensors[2][CP_TENSORS];
    for (int pass = 0; pass < 2; pass++) {
        /* Places in the workspace, and windows, are used again. */
        for (int i = 0; i < 2; i++) {
            (void)world_start(w, rank, &w->scenes[i], ops[pass], tensors[i]);
        }
        for (int i = 0; i < 2; i++) {
            gpus_give(w, rank, w->scenes[i].tensors[rank], tensors[i]);
        }
    }
}

static bool is_right(struct world *w)
{
    bool is_right = true;
    for (int i = 0; i < 2; i++) {
        is_right = is_right && scene_judge(&w->scenes[i], CP_OP_ATTENTION) &&
                   scene_judge(&w->scenes[i], CP_OP_ATTENTION_BACKWARD);
    }
    return is_right;
}

static bool is_found(const struct world_transport *transport, int ring, int ulysses,
                     uint64_t seed)
{
    struct world w;
    world_open(&w, ring, ulysses, transport, CP_EVEN, 0);
    simgpu_keep_violations(true);
    simgpu_seed(seed);
    for (int i = 0; i < 2; i++) {
        do {
            scene_destroy(&w.scenes[i]);
            scene_create(&w.scenes[i], seed++, ring, ulysses);
        } while (w.scenes[i].variant != CP_EVEN || w.scenes[i].is_replicated ||
                 w.scenes[i].rows[0] < 2);
        scene_poison(&w.scenes[i], CP_OP_ATTENTION);
        scene_poison(&w.scenes[i], CP_OP_ATTENTION_BACKWARD);
    }
    ranks_as_threads(w.size, play, &w);
    bool found = !is_right(&w) || simgpu_violations() > 0;
    for (int i = 0; i < 2; i++) {
        scene_destroy(&w.scenes[i]);
    }
    world_close(&w);
    simgpu_keep_violations(false);
    return found;
}

/* The same layouts without a fault are right, and with it they are not, at the latest
 * after some tries: a scene may have nothing that the fault spoils. */
static void check_found_on(struct world_transport transport,
                           enum cp_code (*join)(struct world *w, int rank,
                                                struct cp_context_parts *parts),
                           int ring, int ulysses)
{
    if (TEST_UNDER_TSAN) {
        TEST_SKIP("ThreadSanitizer would report the race itself");
    }
    CHECK(!is_found(&transport, ring, ulysses, test_seed));
    transport.join = join;
    bool found = false;
    for (int i = 0; i < TRIES && !found; i++) {
        found = is_found(&transport, ring, ulysses, test_seed + (uint64_t)i * 100);
    }
    CHECK(found);
}

static void check_found(enum cp_code (*join)(struct world *w, int rank,
                                             struct cp_context_parts *parts),
                        int ring, int ulysses)
{
    check_found_on(gpus, join, ring, ulysses);
}

TEST(a_missing_event_is_found)
{
    check_found(join_unordered, 3, 1);
    check_found(join_unordered, 1, 3);
}

TEST(a_place_filled_too_early_is_found)
{
    check_found(join_overtaking, 4, 1);
    check_found(join_overtaking, 1, 2);
}

TEST(a_swapped_send_is_found)
{
    check_found(join_swapping, 2, 1);
    check_found(join_swapping, 2, 2);
}

TEST(a_group_left_open_is_found)
{
    odd_nccl = *simnccl_table();
    odd_nccl.group_end = leave_open;
    check_found(join_open, 2, 1);
}

TEST(a_signal_before_its_data_is_found)
{
    check_found_on(ipcs, join_hasty, 2, 1);
    check_found_on(ipcs, join_hasty, 1, 3);
}

TEST(a_window_reused_early_is_found)
{
    simgpu_set_delay(0); /* of the others */
    check_found_on(ipcs, join_leaving, 3, 1);
    check_found_on(ipcs, join_leaving, 2, 2);
    simgpu_set_delay(300);
}
