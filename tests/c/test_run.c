/* The interpreter: all ranks' schedules in one thread, through the executor, against
 * float64 over the whole sequence. On windows (the pull schedules) and on the two-sided
 * double with random delays (send and receive). */
#include "base/mem.h"
#include "comm/comm_shm.h"
#include "comm_double.h"
#include "exec/run.h"
#include "kernel/kernel_cpu.h"
#include "plan/agree.h"
#include "scene.h"
#include "test.h"

enum { RESERVED = 1 << 24 };

/* A world of ranks that all live in this thread. */
struct world {
    int size;
    struct cp_bell bell;
    struct cp_poison poison;
    struct cp_watch watch[SCENE_MOST_RANKS];
    struct cp_window windows[SCENE_MOST_RANKS];
    struct double_hub *hub;
    struct cp_comm *comm[SCENE_MOST_RANKS];
    uint64_t seq;
};

static bool nobody_is_dead(void *peers, int rank)
{
    (void)peers;
    (void)rank;
    return false;
}

static void world_open(struct world *w, int size, enum cp_transport transport,
                       uint64_t seed)
{
    memset(w, 0, sizeof *w);
    w->size = size;
    w->hub = transport == CP_TWO_SIDED ? double_hub_create(size, seed, 5) : NULL;
    for (int rank = 0; rank < size; rank++) {
        w->watch[rank] = (struct cp_watch){.bell = &w->bell,
                                           .poison = &w->poison,
                                           .rank = rank,
                                           .world = size,
                                           .is_dead = nobody_is_dead};
        if (transport != CP_TWO_SIDED) {
            CHECK_EQ_I64(cp_window_create(RESERVED, &w->windows[rank]), CP_OK);
        }
    }
    for (int rank = 0; rank < size; rank++) {
        enum cp_code code =
            transport != CP_TWO_SIDED
                ? cp_comm_shm_create(w->windows, &w->watch[rank], &w->comm[rank])
                : cp_comm_double_create(w->hub, &w->watch[rank], &w->comm[rank]);
        CHECK_EQ_I64(code, CP_OK);
    }
}

static void world_close(struct world *w)
{
    for (int rank = 0; rank < w->size; rank++) {
        w->comm[rank]->ops->close(&w->comm[rank]);
        if (w->hub == NULL) {
            cp_window_close(&w->windows[rank]);
        }
    }
    double_hub_destroy(&w->hub);
}

/* One rank's part of a call. */
struct part {
    struct cp_plan *plan;
    struct cp_schedule *schedule;
    void *workspace;
    void *room;
    struct cp_run run;
};

static void part_open(struct part *part, struct world *w, const struct scene *scene,
                      int rank, const struct cp_record *records,
                      const struct cp_kernel_ops *kernel,
                      const struct cp_format *format, enum cp_transport transport)
{
    memset(part, 0, sizeof *part);
    CHECK_EQ_I64(cp_plan_create(records, w->size, format, &part->plan), CP_OK);
    CHECK_EQ_I64(cp_schedule_create(part->plan, rank, transport, &part->schedule),
                 CP_OK);
    size_t bytes = (size_t)cp_run_workspace_bytes(part->schedule, 1);
    CHECK_EQ_I64(cp_mem_create(bytes, "a test", &part->workspace), CP_OK);
    memset(part->workspace, 0xff, bytes); /* nothing may count on zeros */
    CHECK_EQ_I64(
        cp_mem_create(cp_run_room_bytes(part->schedule), "a test", &part->room), CP_OK);
    if (part->schedule->window_bytes > 0) {
        size_t window = (size_t)part->schedule->window_bytes;
        CHECK_EQ_I64(w->comm[rank]->ops->reserve(w->comm[rank], window), CP_OK);
        memset(w->comm[rank]->ops->window(w->comm[rank], rank), 0xff, window);
    }
    struct cp_run_env env = {.comm = w->comm[rank],
                             .device = cp_device_cpu(),
                             .kernel = kernel,
                             .scratch = part->workspace,
                             .seq = w->seq,
                             .operation = "a test"};
    cp_run_init(&part->run, &env, part->schedule, scene->tensors[rank], part->room);
}

static void part_close(struct part *part)
{
    cp_mem_destroy(&part->room);
    cp_mem_destroy(&part->workspace);
    cp_schedule_destroy(&part->schedule);
    cp_plan_destroy(&part->plan);
}

/* Turns the ranks' runs in a random order until all are done. */
static bool run_all(struct part *parts, int world, uint64_t seed)
{
    bool done[SCENE_MOST_RANKS] = {false};
    int left = world;
    uint64_t state = seed;
    for (int64_t turn = 0; left > 0; turn++) {
        state = state * 6364136223846793005u + 1442695040888963407u;
        int rank = (int)((state >> 33) % (uint64_t)world);
        if (done[rank]) {
            continue;
        }
        enum cp_code code = cp_run_poll(&parts[rank].run);
        if (code != CP_OK && code != CP_AGAIN) {
            (void)fprintf(stderr, "rank %d: %s\n", rank, cp_last_error()->text);
            return false;
        }
        if (code == CP_OK) {
            done[rank] = true;
            left -= 1;
        }
        if (turn > 2000000) {
            (void)fprintf(stderr, "%d of %d ranks never end\n", left, world);
            return false;
        }
    }
    return true;
}

static bool play(struct world *w, struct scene *scene, enum cp_op op,
                 enum cp_transport transport, uint64_t seed)
{
    struct cp_record records[SCENE_MOST_RANKS];
    struct part parts[SCENE_MOST_RANKS];
    const struct cp_kernel_ops *kernel = NULL;
    struct cp_format format;
    CHECK_EQ_I64(cp_kernel_cpu_select(0, CP_BACKEND_NATIVE, scene->dtype, scene->dim,
                                      scene->value_dim, &kernel, &format),
                 CP_OK);
    for (int rank = 0; rank < w->size; rank++) {
        scene_record(scene, rank, op, &records[rank]);
        records[rank].call.want_lse = op == CP_OP_ATTENTION ? 1 : scene->want_lse;
        records[rank].call.format = format.id;
    }
    if (cp_agree(records, w->size) != CP_OK) {
        (void)fprintf(stderr, "not agreed: %s\n", cp_last_error()->text);
        return false;
    }
    w->seq += 1;
    scene_poison(scene, op);
    for (int rank = 0; rank < w->size; rank++) {
        part_open(&parts[rank], w, scene, rank, records, kernel, &format, transport);
    }
    bool fine = run_all(parts, w->size, seed) && scene_judge(scene, op);
    for (int rank = 0; rank < w->size; rank++) {
        part_close(&parts[rank]);
    }
    return fine;
}

/* Worlds of 1 to 12 ranks in every way to cut them. */
static const int shapes[][2] = {{1, 1}, {2, 1}, {1, 2}, {3, 1}, {1, 3}, {4, 1},
                                {1, 4}, {2, 2}, {5, 1}, {1, 5}, {3, 2}, {2, 3},
                                {7, 1}, {1, 7}, {2, 4}, {4, 2}, {3, 3}, {3, 4}};

static void play_shapes(enum cp_transport transport, int scenes)
{
    int count = 0;
    for (size_t shape = 0; shape < sizeof shapes / sizeof shapes[0]; shape++) {
        int ring = shapes[shape][0];
        int ulysses = shapes[shape][1];
        struct world w;
        if (transport == CP_TWO_SIDED && ring * ulysses == 1) {
            continue;
        }
        world_open(&w, ring * ulysses, transport, test_seed + shape);
        for (int i = 0; i < scenes; i++) {
            struct scene scene;
            char text[400];
            uint64_t seed = test_seed + shape * 1000003u + (uint64_t)i * 7919u;
            scene_create(&scene, seed, ring, ulysses);
            scene_print(&scene, text, sizeof text);
            TEST_CONTEXT("scene %d, seed %llu: %.180s", i, (unsigned long long)seed,
                         text);
            CHECK(play(&w, &scene, CP_OP_ATTENTION, transport, seed));
            CHECK(play(&w, &scene, CP_OP_ATTENTION_BACKWARD, transport, seed));
            scene_destroy(&scene);
            count += 1;
        }
        world_close(&w);
    }
    printf("  %d scenes, forward and backward\n", count);
}

TEST(pull_schedules_give_the_right_numbers)
{
    play_shapes(CP_PULL, 60);
}

TEST(fetch_schedules_give_the_right_numbers)
{
    play_shapes(CP_FETCH, 60);
}

TEST(push_schedules_give_the_right_numbers)
{
    play_shapes(CP_PUSH, 60);
}

TEST(two_sided_schedules_give_the_right_numbers)
{
    play_shapes(CP_TWO_SIDED, 60);
}
