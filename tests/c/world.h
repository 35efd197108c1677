/* Contexts of ranks that are threads of this process, on any transport, and scenes
 * played on them. */
#ifndef CP_TESTS_WORLD_H
#define CP_TESTS_WORLD_H

#include <sys/mman.h>

#include "base/mapping.h"
#include "base/mem.h"
#include "comm/comm_shm.h"
#include "control/gate.h"
#include "exec/context.h"
#include "kernel/kernel_cpu.h"
#include "ranks.h"
#include "scene.h"

enum { WORLD_SCENES = 12 };

struct world;

/* How the ranks move data and compute. */
struct world_transport {
    const char *name;
    /* What they share, before the first joins and after the last has left. */
    void (*open)(struct world *w);
    void (*close)(struct world *w);
    /* On the rank's own thread: its communicator, device and kernels, and its gate and
     * watch where the ranks do not share the world's page; and after its context is
     * gone, what of these is left. */
    enum cp_code (*join)(struct world *w, int rank, struct cp_context_parts *parts);
    void (*leave)(struct world *w, int rank);
    /* (optional) Where the device does not read the host's memory: `stream` is the one to
     * call on, `take` puts copies of the tensors in their place, `give` brings them back
     * to `host` once all that was enqueued there has happened. */
    struct cp_stream *(*stream)(struct world *w, int rank);
    void (*take)(struct world *w, int rank, struct cp_view tensors[CP_TENSORS]);
    void (*give)(struct world *w, int rank, const struct cp_view host[CP_TENSORS],
                 const struct cp_view tensors[CP_TENSORS]);
};

struct world {
    const struct world_transport *transport;
    int size, ring, ulysses;
    int32_t variant;
    int limit; /* of the kernels */
    void *page;
    struct cp_mapping *mapping; /* of the page */
    struct cp_recorder recorder[SCENE_MOST_RANKS];
    struct cp_watch watch[SCENE_MOST_RANKS];
    struct cp_window windows[SCENE_MOST_RANKS];
    void *shared;                /* the transport's own */
    void *own[SCENE_MOST_RANKS]; /* the transport's own, of each rank */
    struct cp_context *context[SCENE_MOST_RANKS];
    struct scene scenes[WORLD_SCENES];
};

static inline bool world_nobody_is_dead(void *peers, int rank)
{
    (void)peers;
    (void)rank;
    return false;
}

/* What transports of the host share. */
static inline void world_use_the_host(const struct world *w,
                                      struct cp_context_parts *parts)
{
    parts->device = cp_device_cpu();
    parts->kernels =
        (struct cp_kernel_list){.select = cp_kernel_cpu_select, .limit = w->limit};
}

static inline void world_keep_nothing(struct world *w, int rank)
{
    (void)w;
    (void)rank;
}

static inline void world_join(int rank, void *arg)
{
    struct world *w = arg;
    struct cp_context_config config = {.ring_degree = w->ring,
                                       .ulysses_degree = w->ulysses,
                                       .variant = w->variant,
                                       .timeout = 100.0};
    struct cp_context_parts parts = {
        .gate = {.page = w->page, .watch = &w->watch[rank]}};
    CHECK_EQ_I64(w->transport->join(w, rank, &parts), CP_OK);
    CHECK_EQ_I64(cp_context_create(&config, &parts, &w->context[rank]), CP_OK);
}

static inline void world_open(struct world *w, int ring, int ulysses,
                              const struct world_transport *transport, int32_t variant,
                              int limit)
{
    memset(w, 0, sizeof *w);
    w->transport = transport;
    w->size = ring * ulysses;
    w->ring = ring;
    w->ulysses = ulysses;
    w->variant = variant;
    w->limit = limit;
    w->page = mmap(NULL, cp_page_bytes(w->size), PROT_READ | PROT_WRITE,
                   MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    REQUIRE(w->page != MAP_FAILED);
    CHECK_EQ_I64(cp_mapping_create(w->page, cp_page_bytes(w->size), &w->mapping),
                 CP_OK);
    struct cp_flight *flights = cp_page_flights(w->page, w->size);
    for (int rank = 0; rank < w->size; rank++) {
        w->recorder[rank] = (struct cp_recorder){.flight = &flights[rank]};
        w->watch[rank] = (struct cp_watch){.bell = cp_page_bell(w->page),
                                           .poison = cp_page_poison(w->page),
                                           .rank = rank,
                                           .world = w->size,
                                           .is_dead = world_nobody_is_dead,
                                           .recorder = &w->recorder[rank],
                                           .flights = flights};
    }
    transport->open(w);
    ranks_as_threads(w->size, world_join, w);
}

static inline void world_leave(int rank, void *arg)
{
    struct world *w = arg;
    cp_context_destroy(&w->context[rank]);
    CHECK(w->context[rank] == NULL);
    w->transport->leave(w, rank);
}

static inline void world_close(struct world *w)
{
    ranks_as_threads(w->size, world_leave, w);
    w->transport->close(w);
    cp_mapping_drop(&w->mapping);
}

/* A scene's tensors as one rank's call, made on `tensors`, which the transport has taken.
 */
static inline enum cp_code world_start(struct world *w, int rank, struct scene *scene,
                                       enum cp_op op,
                                       struct cp_view tensors[CP_TENSORS])
{
    const struct world_transport *transport = w->transport;
    struct cp_stream *stream =
        transport->stream != NULL ? transport->stream(w, rank) : NULL;
    struct cp_record record;
    memcpy(tensors, scene->tensors[rank], sizeof scene->tensors[rank]);
    scene_record(scene, rank, op, &record);
    record.call.want_lse = op == CP_OP_ATTENTION ? 1 : scene->want_lse;
    CP_TRY(cp_context_describe(w->context[rank], stream, &record));
    record.sizes[CP_SIZE_HEAD_CHUNKS] = scene->chunks;
    CP_TRY(cp_context_begin(w->context[rank], &record, NULL));
    if (transport->take != NULL) {
        transport->take(w, rank, tensors);
    }
    return cp_context_execute(w->context[rank], tensors);
}

/* The same; OK once all of it has happened. */
static inline enum cp_code world_call(struct world *w, int rank, struct scene *scene,
                                      enum cp_op op)
{
    struct cp_view tensors[CP_TENSORS];
    enum cp_code code = world_start(w, rank, scene, op, tensors);
    if (code == CP_OK && w->transport->give != NULL) {
        w->transport->give(w, rank, scene->tensors[rank], tensors);
    }
    return code;
}

static inline void world_play_rank(int rank, void *arg)
{
    struct world *w = arg;
    for (int round = 0; round < 2; round++) {
        for (int i = 0; i < WORLD_SCENES; i++) {
            enum cp_code code = world_call(w, rank, &w->scenes[i], CP_OP_ATTENTION);
            if (code == CP_OK) {
                code = world_call(w, rank, &w->scenes[i], CP_OP_ATTENTION_BACKWARD);
            }
            CHECK_EQ_I64(code, CP_OK);
            if (code != CP_OK) {
                (void)fprintf(stderr, "rank %d: %s\n", rank, cp_last_error()->text);
                return;
            }
        }
    }
}

/* WORLD_SCENES scenes of this variant that `takes` (optional) likes, each rank's calls
 * made by `play`, forward and backward, then judged. */
static inline void world_play_by(void (*play)(int rank, void *world), int ring,
                                 int ulysses, const struct world_transport *transport,
                                 int32_t variant, int limit,
                                 bool (*takes)(const struct scene *scene))
{
    struct world w;
    uint64_t seed = test_seed + (uint64_t)(ring * 64 + ulysses);
    world_open(&w, ring, ulysses, transport, variant, limit);
    for (int i = 0; i < WORLD_SCENES; i++) {
        do { /* the context has one variant */
            scene_destroy(&w.scenes[i]);
            scene_create(&w.scenes[i], seed++, ring, ulysses);
        } while (w.scenes[i].variant != variant ||
                 (takes != NULL && !takes(&w.scenes[i])));
        scene_poison(&w.scenes[i], CP_OP_ATTENTION);
        scene_poison(&w.scenes[i], CP_OP_ATTENTION_BACKWARD);
    }
    ranks_as_threads(w.size, play, &w);
    for (int i = 0; i < WORLD_SCENES; i++) {
        char text[400];
        scene_print(&w.scenes[i], text, sizeof text);
        TEST_CONTEXT("%s: %.200s", transport->name, text);
        CHECK(scene_judge(&w.scenes[i], CP_OP_ATTENTION));
        CHECK(scene_judge(&w.scenes[i], CP_OP_ATTENTION_BACKWARD));
        scene_destroy(&w.scenes[i]);
    }
    world_close(&w);
}

/* Each scene forward and backward, twice over: the second time all plans are known. */
static inline void world_play(int ring, int ulysses,
                              const struct world_transport *transport, int32_t variant,
                              int limit, bool (*takes)(const struct scene *scene))
{
    world_play_by(world_play_rank, ring, ulysses, transport, variant, limit, takes);
}

#endif
