/* Calls captured in graphs: launched again and again with other numbers, beside calls that
 * are not, closed before the graph has gone; and what cannot be captured. By NCCL and by
 * windows. */
#include "ipcs.h"
#include "plan/agree.h"

enum { GRAPHS = 2, ROUNDS = 3 };

/* What a rank has captured. */
struct tape {
    struct cp_view tensors[WORLD_SCENES][CP_TENSORS]; /* of the device */
    cudaGraphExec_t exec[GRAPHS];                     /* scenes in turns */
    cudaStream_t aside;
    cudaEvent_t event;
};

static pthread_barrier_t barrier;
static const struct world_transport *over; /* by which this pass of a test goes */

static void on_each(void (*test)(void))
{
    static const struct world_transport *const all[] = {&gpus, &ipcs, &ipcs_apart};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) {
        over = all[i];
        TEST_CONTEXT("%s", over->name);
        test();
    }
}

/* The last of them goes on first, alone. */
static bool meet(void)
{
    return pthread_barrier_wait(&barrier) == PTHREAD_BARRIER_SERIAL_THREAD;
}

/* A call on tensors that are there, as world_start. */
static enum cp_code call_on(struct world *w, int rank, const struct scene *scene,
                            enum cp_op op, const struct cp_view tensors[CP_TENSORS])
{
    struct cp_context *context = w->context[rank];
    struct cp_record record;
    scene_record(scene, rank, op, &record);
    record.call.want_lse = op == CP_OP_ATTENTION ? 1 : scene->want_lse;
    record.call.check = cp_lengths_hash(scene->rows, scene->keys, w->size);
    CP_TRY(cp_context_describe(context, w->transport->stream(w, rank), &record));
    CP_TRY(cp_context_begin(context, &record, NULL));
    return cp_context_execute(context, tensors);
}

static void begin_capture(cudaStream_t stream, enum cudaStreamCaptureMode mode)
{
    CHECK_EQ_I64(cudaStreamBeginCapture(stream, mode), cudaSuccess);
}

static cudaGraphExec_t end_capture(cudaStream_t stream)
{
    cudaGraph_t graph = NULL;
    cudaGraphExec_t exec = NULL;
    CHECK_EQ_I64(cudaStreamEndCapture(stream, &graph), cudaSuccess);
    CHECK_EQ_I64(cudaGraphInstantiate(&exec, graph, 0), cudaSuccess);
    CHECK_EQ_I64(cudaGraphDestroy(graph), cudaSuccess);
    return exec;
}

/* What was captured is for nobody. */
static void drop_capture(cudaStream_t stream)
{
    cudaGraph_t graph = NULL;
    CHECK_EQ_I64(cudaStreamEndCapture(stream, &graph), cudaSuccess);
    CHECK_EQ_I64(cudaGraphDestroy(graph), cudaSuccess);
}

/* Copies of a scene's tensors on the device. */
static void take_scene(struct world *w, int rank, struct cp_view tensors[CP_TENSORS])
{
    memcpy(tensors, w->scenes[0].tensors[rank], sizeof w->scenes[0].tensors[rank]);
    gpus_take(w, rank, tensors);
}

/* Forward and backward of every second scene. */
static void capture(struct world *w, int rank, struct tape *tape, int which)
{
    static const enum cp_op ops[] = {CP_OP_ATTENTION, CP_OP_ATTENTION_BACKWARD};
    const struct gpu *gpu = w->own[rank];
    begin_capture(gpu->stream, cudaStreamCaptureModeGlobal);
    for (int i = which; i < WORLD_SCENES; i += GRAPHS) {
        for (int pass = 0; pass < 2; pass++) {
            enum cp_code code =
                call_on(w, rank, &w->scenes[i], ops[pass], tape->tensors[i]);
            if (!CHECK_EQ_I64(code, CP_OK)) {
                (void)fprintf(stderr, "rank %d: %s\n", rank, cp_last_error()->text);
            }
        }
    }
    tape->exec[which] = end_capture(gpu->stream);
}

static void tape_begin(struct world *w, int rank, struct tape *tape)
{
    CHECK_EQ_I64(cudaSetDevice(rank), cudaSuccess);
    CHECK_EQ_I64(cudaStreamCreateWithFlags(&tape->aside, cudaStreamNonBlocking),
                 cudaSuccess);
    CHECK_EQ_I64(cudaEventCreateWithFlags(&tape->event, cudaEventDisableTiming),
                 cudaSuccess);
    for (int i = 0; i < WORLD_SCENES; i++) {
        memcpy(tape->tensors[i], w->scenes[i].tensors[rank], sizeof tape->tensors[i]);
        gpus_alloc(rank, tape->tensors[i]);
    }
    (void)meet(); /* nobody allocates while another captures */
    for (int which = 0; which < GRAPHS; which++) {
        capture(w, rank, tape, which);
    }
    (void)meet();
}

static void tape_end(struct world *w, int rank, struct tape *tape)
{
    for (int which = 0; which < GRAPHS; which++) {
        CHECK_EQ_I64(cudaGraphExecDestroy(tape->exec[which]), cudaSuccess);
    }
    for (int i = 0; i < WORLD_SCENES; i++) {
        gpus_free(w->scenes[i].tensors[rank], tape->tensors[i]);
    }
    CHECK_EQ_I64(cudaStreamDestroy(tape->aside), cudaSuccess);
    CHECK_EQ_I64(cudaEventDestroy(tape->event), cudaSuccess);
}

static void follow(cudaStream_t stream, cudaStream_t first, cudaEvent_t event)
{
    CHECK_EQ_I64(cudaEventRecord(event, first), cudaSuccess);
    CHECK_EQ_I64(cudaStreamWaitEvent(stream, event, 0), cudaSuccess);
}

static void copy_all(struct world *w, int rank, const struct tape *tape, bool to_host)
{
    const struct gpu *gpu = w->own[rank];
    for (int i = 0; i < WORLD_SCENES; i++) {
        gpus_copy(gpu->stream, w->scenes[i].tensors[rank], tape->tensors[i], to_host);
    }
}

/* Launches both graphs, the second on a stream of its own, and a call that is in neither. */
static void launch(struct world *w, int rank, struct tape *tape, int round)
{
    const struct gpu *gpu = w->own[rank];
    const struct scene *eager = &w->scenes[round % WORLD_SCENES];
    copy_all(w, rank, tape, false);
    follow(tape->aside, gpu->stream, tape->event);
    CHECK_EQ_I64(cudaGraphLaunch(tape->exec[0], gpu->stream), cudaSuccess);
    if (round > 0) {
        CHECK_EQ_I64(call_on(w, rank, eager, CP_OP_ATTENTION,
                             tape->tensors[round % WORLD_SCENES]),
                     CP_OK);
    }
    follow(tape->aside, gpu->stream, tape->event); /* the call may be one of its */
    CHECK_EQ_I64(cudaGraphLaunch(tape->exec[1], tape->aside), cudaSuccess);
    follow(gpu->stream, tape->aside, tape->event);
    copy_all(w, rank, tape, true);
    CHECK_EQ_I64(cudaStreamSynchronize(gpu->stream), cudaSuccess);
}

/* One rank, for all. */
static void judge_and_redraw(struct world *w, int round)
{
    for (int i = 0; i < WORLD_SCENES; i++) {
        char text[400];
        scene_print(&w->scenes[i], text, sizeof text);
        TEST_CONTEXT("round %d: %.200s", round, text);
        CHECK(scene_judge(&w->scenes[i], CP_OP_ATTENTION));
        CHECK(scene_judge(&w->scenes[i], CP_OP_ATTENTION_BACKWARD));
        if (round + 1 < ROUNDS) {
            scene_redraw(&w->scenes[i], test_seed + (uint64_t)(round * 100 + i));
            scene_poison(&w->scenes[i], CP_OP_ATTENTION);
            scene_poison(&w->scenes[i], CP_OP_ATTENTION_BACKWARD);
        }
    }
}

static void play_rounds(int rank, void *arg)
{
    struct world *w = arg;
    struct tape *tape = calloc(1, sizeof *tape);
    if (tape == NULL) {
        abort();
    }
    tape_begin(w, rank, tape);
    for (int round = 0; round < ROUNDS; round++) {
        launch(w, rank, tape, round);
        if (meet()) {
            judge_and_redraw(w, round);
        }
        (void)meet();
    }
    tape_end(w, rank, tape);
    free(tape);
}

static void play(int ring, int ulysses, int32_t variant)
{
    (void)pthread_barrier_init(&barrier, NULL, (unsigned)(ring * ulysses));
    world_play_by(play_rounds, ring, ulysses, over, variant, 0, NULL);
    (void)pthread_barrier_destroy(&barrier);
}

TEST(rings)
{
    over = &gpus;
    play(2, 1, CP_EVEN);
    play(2, 1, CP_ANYTHING);
    play(4, 1, CP_ANYTHING);
}

TEST(ulysses)
{
    over = &gpus;
    play(1, 2, CP_EVEN);
    play(1, 3, CP_ANYTHING);
}

TEST(unified)
{
    over = &gpus;
    play(2, 2, CP_EVEN);
    play(2, 2, CP_ANYTHING);
}

TEST(rings_by_windows)
{
    over = &ipcs;
    play(2, 1, CP_EVEN);
    over = &ipcs_apart;
    play(3, 1, CP_ANYTHING);
}

TEST(ulysses_by_windows)
{
    over = &ipcs;
    play(1, 3, CP_ANYTHING);
    over = &ipcs_apart;
    play(1, 2, CP_EVEN);
}

TEST(unified_by_windows)
{
    over = &ipcs;
    play(2, 2, CP_EVEN);
}

/* ---- a communicator that graphs hold ---- */

static atomic_bool is_dead[RANKS_MOST];

static bool is_rank_dead(void *peers, int rank)
{
    (void)peers;
    return atomic_load(&is_dead[rank]);
}

static enum cp_code mortal_join(struct world *w, int rank,
                                struct cp_context_parts *parts)
{
    w->watch[rank].is_dead = is_rank_dead;
    return over->join(w, rank, parts);
}

static struct world_transport mortals;

/* A world of one scene, in which the ranks have something to tell each other. */
static void open_one(struct world *w, int ring, int ulysses)
{
    uint64_t seed = test_seed;
    mortals = *over;
    mortals.join = mortal_join;
    for (int rank = 0; rank < RANKS_MOST; rank++) {
        atomic_store(&is_dead[rank], false);
    }
    world_open(w, ring, ulysses, &mortals, CP_EVEN, 0);
    do {
        scene_destroy(&w->scenes[0]);
        scene_create(&w->scenes[0], seed++, ring, ulysses);
    } while (w->scenes[0].variant != CP_EVEN || w->scenes[0].is_replicated ||
             w->scenes[0].is_causal || w->scenes[0].all_rows == 0 ||
             w->scenes[0].all_keys == 0);
    scene_poison(&w->scenes[0], CP_OP_ATTENTION);
    (void)pthread_barrier_init(&barrier, NULL, (unsigned)w->size);
}

static void close_one(struct world *w)
{
    for (int rank = 0; rank < w->size; rank++) {
        atomic_store(&is_dead[rank], false); /* what it has open is open still */
    }
    (void)pthread_barrier_destroy(&barrier);
    scene_destroy(&w->scenes[0]);
    world_close(w);
}

/* One scene, by all ranks; `is_right`: (optional) are the answers? */
static void play_and_judge(int ring, int ulysses, void (*body)(int rank, void *world),
                           bool *is_right)
{
    struct world w;
    open_one(&w, ring, ulysses);
    ranks_as_threads(w.size, body, &w);
    if (is_right != NULL) {
        *is_right = scene_judge(&w.scenes[0], CP_OP_ATTENTION);
    }
    close_one(&w);
}

static void play_one(int ring, int ulysses, void (*body)(int rank, void *world))
{
    play_and_judge(ring, ulysses, body, NULL);
}

static bool is_played_right(int ring, int ulysses, void (*body)(int rank, void *world))
{
    bool is_right = false;
    play_and_judge(ring, ulysses, body, &is_right);
    return is_right;
}

/* The forward of scene 0. */
static cudaGraphExec_t capture_one(struct world *w, int rank,
                                   struct cp_view tensors[CP_TENSORS])
{
    const struct gpu *gpu = w->own[rank];
    cudaGraphExec_t exec = NULL;
    CHECK_EQ_I64(cudaSetDevice(rank), cudaSuccess);
    take_scene(w, rank, tensors);
    (void)meet();
    begin_capture(gpu->stream, cudaStreamCaptureModeGlobal);
    CHECK_EQ_I64(call_on(w, rank, &w->scenes[0], CP_OP_ATTENTION, tensors), CP_OK);
    exec = end_capture(gpu->stream);
    (void)meet();
    return exec;
}

/* It waits for nobody; what was captured goes on, and the last graph takes it along. */
static void close_early(int rank, void *arg)
{
    struct world *w = arg;
    const struct gpu *gpu = w->own[rank];
    struct cp_view tensors[CP_TENSORS];
    cudaGraphExec_t exec = capture_one(w, rank, tensors);
    CHECK_EQ_I64(cudaGraphLaunch(exec, gpu->stream), cudaSuccess);
    int64_t start_ns = cp_now_ns();
    cp_context_destroy(&w->context[rank]);
    CHECK(cp_now_ns() - start_ns < 1900000000); /* who waits gives up after 2 s */
    (void)meet();
    CHECK(over != &gpus || simgpu_live().comms == w->size);
    (void)meet();
    CHECK_EQ_I64(cudaGraphLaunch(exec, gpu->stream), cudaSuccess);
    gpus_give(w, rank, w->scenes[0].tensors[rank], tensors);
    CHECK_EQ_I64(cudaGraphExecDestroy(exec), cudaSuccess);
}

static void play_a_context_is_closed_before_its_graph(void)
{
    CHECK(is_played_right(2, 1, close_early));
}

TEST(a_context_is_closed_before_its_graph)
{
    on_each(play_a_context_is_closed_before_its_graph);
}

/* Rank 0 has closed and counts as dead, but its graph lives: what it works on stays, though
 * rank 1 has closed too. */
static void close_beside_a_graph(int rank, void *arg)
{
    struct world *w = arg;
    const struct gpu *gpu = w->own[rank];
    struct cp_view tensors[CP_TENSORS];
    cudaGraphExec_t exec = capture_one(w, rank, tensors);
    CHECK_EQ_I64(cudaGraphLaunch(exec, gpu->stream), cudaSuccess);
    gpus_give(w, rank, w->scenes[0].tensors[rank], tensors);
    (void)meet();
    if (rank == 0) {
        cp_context_destroy(&w->context[rank]);
        atomic_store(&is_dead[0], true);
    }
    (void)meet();
    if (rank == 1) {
        CHECK_EQ_I64(cudaGraphExecDestroy(exec), cudaSuccess);
        cp_context_destroy(&w->context[rank]);
        ranks_sleep_us(300000);
        CHECK_EQ_I64(simgpu_live().mappings, 2); /* rank 0's: an inbox and a window */
    }
    (void)meet();
    if (rank == 0) {
        CHECK_EQ_I64(cudaGraphExecDestroy(exec), cudaSuccess);
    }
}

TEST(memory_stays_while_a_graph_works_on_it)
{
    over = &ipcs_apart;
    CHECK(is_played_right(2, 1, close_beside_a_graph));
}

/* Rank 0 closes while its launch waits for rank 1, which launches nothing: the deadline
 * ends it still, and where rank 1 has broken the context it ends at once. */
static void close_in_a_launch(struct world *w, int rank, bool is_broken)
{
    const struct gpu *gpu = w->own[rank];
    struct cp_view tensors[CP_TENSORS];
    cudaGraphExec_t exec = capture_one(w, rank, tensors);
    if (rank == 0) {
        CHECK_EQ_I64(cudaGraphLaunch(exec, gpu->stream), cudaSuccess);
    } else if (is_broken) {
        struct cp_status reason = {.code = CP_ERR_COMM, .rank = 1, .text = "no more"};
        cp_watch_poison(&w->watch[rank], &reason);
    }
    (void)meet();
    int64_t start_ns = cp_now_ns();
    cp_context_destroy(&w->context[rank]);
    CHECK_EQ_I64(cudaStreamSynchronize(gpu->stream), cudaSuccess);
    CHECK(cp_now_ns() - start_ns < 5000000000);
    gpus_free(w->scenes[0].tensors[rank], tensors);
    (void)meet();
    CHECK_EQ_I64(cudaGraphExecDestroy(exec), cudaSuccess);
}

static void close_in_a_late_launch(int rank, void *arg)
{
    close_in_a_launch(arg, rank, false);
}

static void close_in_a_broken_launch(int rank, void *arg)
{
    close_in_a_launch(arg, rank, true);
}

TEST(close_ends_a_launch_that_is_late)
{
    over = &ipcs;
    gpus_timeout = 0.5;
    play_one(2, 1, close_in_a_late_launch);
    gpus_timeout = 100.0;
}

static void play_a_broken_close(void)
{
    play_one(2, 1, close_in_a_broken_launch);
}

TEST(close_of_a_broken_context_ends_launches)
{
    on_each(play_a_broken_close);
}

/* The graph goes first. */
static void close_late(int rank, void *arg)
{
    struct world *w = arg;
    const struct gpu *gpu = w->own[rank];
    struct cp_view tensors[CP_TENSORS];
    cudaGraphExec_t exec = capture_one(w, rank, tensors);
    CHECK_EQ_I64(cudaGraphLaunch(exec, gpu->stream), cudaSuccess);
    gpus_give(w, rank, w->scenes[0].tensors[rank], tensors);
    CHECK_EQ_I64(cudaGraphExecDestroy(exec), cudaSuccess);
}

static void play_a_graph_goes_before_its_context(void)
{
    CHECK(is_played_right(1, 2, close_late));
}

TEST(a_graph_goes_before_its_context)
{
    on_each(play_a_graph_goes_before_its_context);
}

/* ---- calls before a capture ---- */

/* Until the gate opens. */
static void CUDART_CB wait_for_gate(void *arg)
{
    while (!atomic_load((atomic_bool *)arg)) {
        ranks_sleep_us(1000);
    }
}

/* A call that the device has not come to is watched while another is captured, which the
 * watching thread does not spoil. */
static void capture_behind(int rank, void *arg)
{
    struct world *w = arg;
    struct gpu *gpu = w->own[rank];
    cudaStream_t captured = gpu->stream, aside = NULL;
    struct cp_view tensors[2][CP_TENSORS];
    atomic_bool is_open = false;
    cudaGraph_t graph = NULL;
    cudaGraphExec_t exec = NULL;
    CHECK_EQ_I64(cudaSetDevice(rank), cudaSuccess);
    CHECK_EQ_I64(cudaStreamCreateWithFlags(&aside, cudaStreamNonBlocking), cudaSuccess);
    for (int i = 0; i < 2; i++) {
        take_scene(w, rank, tensors[i]);
    }
    CHECK_EQ_I64(cudaStreamSynchronize(captured), cudaSuccess);
    CHECK_EQ_I64(cudaLaunchHostFunc(aside, wait_for_gate, &is_open), cudaSuccess);
    gpu->stream = aside;
    CHECK_EQ_I64(call_on(w, rank, &w->scenes[0], CP_OP_ATTENTION, tensors[0]), CP_OK);
    gpu->stream = captured;
    (void)meet();
    begin_capture(captured, cudaStreamCaptureModeGlobal);
    CHECK_EQ_I64(call_on(w, rank, &w->scenes[0], CP_OP_ATTENTION, tensors[1]), CP_OK);
    ranks_sleep_us(200000);
    CHECK_EQ_I64(cudaStreamEndCapture(captured, &graph), cudaSuccess);
    (void)meet();
    CHECK_EQ_I64(cudaGraphInstantiate(&exec, graph, 0), cudaSuccess);
    CHECK_EQ_I64(cudaGraphDestroy(graph), cudaSuccess);
    atomic_store(&is_open, true);
    CHECK_EQ_I64(cudaStreamSynchronize(aside), cudaSuccess);
    CHECK_EQ_I64(cudaGraphLaunch(exec, captured), cudaSuccess);
    gpus_give(w, rank, w->scenes[0].tensors[rank], tensors[1]);
    gpus_free(w->scenes[0].tensors[rank], tensors[0]);
    CHECK_EQ_I64(cudaGraphExecDestroy(exec), cudaSuccess);
    CHECK_EQ_I64(cudaStreamDestroy(aside), cudaSuccess);
}

static void play_an_earlier_call_is_watched_while_one_is_captured(void)
{
    CHECK(is_played_right(2, 1, capture_behind));
}

TEST(an_earlier_call_is_watched_while_one_is_captured)
{
    on_each(play_an_earlier_call_is_watched_while_one_is_captured);
}

/* ---- what goes wrong while a graph is launched ---- */

/* Rank 1 does not launch, and breaks the context: rank 0's launch ends. */
static void break_launch(int rank, void *arg)
{
    struct world *w = arg;
    const struct gpu *gpu = w->own[rank];
    struct cp_view tensors[CP_TENSORS], more[CP_TENSORS];
    cudaGraphExec_t exec = capture_one(w, rank, tensors);
    if (rank == 0) {
        CHECK_EQ_I64(cudaGraphLaunch(exec, gpu->stream), cudaSuccess);
    } else {
        struct cp_status reason = {.code = CP_ERR_COMM, .rank = 1, .text = "no more"};
        cp_watch_poison(&w->watch[rank], &reason);
    }
    CHECK_EQ_I64(cudaStreamSynchronize(gpu->stream), cudaSuccess);
    CHECK_EQ_I64(world_start(w, rank, &w->scenes[0], CP_OP_ATTENTION, more),
                 CP_ERR_COMM);
    CHECK_STR_HAS(cp_last_error()->text, "no more");
    gpus_free(w->scenes[0].tensors[rank], tensors);
    CHECK_EQ_I64(cudaGraphExecDestroy(exec), cudaSuccess);
}

static void play_poison_ends_a_launch(void)
{
    play_one(2, 1, break_launch);
}

TEST(poison_ends_a_launch)
{
    on_each(play_poison_ends_a_launch);
}

/* Rank 1 does not launch: what ends rank 0's launch, and is said at the next call. */
static void launch_alone(struct world *w, int rank, bool dies)
{
    const struct gpu *gpu = w->own[rank];
    struct cp_view tensors[CP_TENSORS], more[CP_TENSORS];
    cudaGraphExec_t exec = capture_one(w, rank, tensors);
    CHECK_EQ_I64(cudaGraphLaunch(exec, gpu->stream), cudaSuccess); /* one that ends */
    CHECK_EQ_I64(cudaStreamSynchronize(gpu->stream), cudaSuccess);
    atomic_store(&is_dead[1], dies);
    (void)meet();
    if (rank == 0) {
        CHECK_EQ_I64(cudaGraphLaunch(exec, gpu->stream), cudaSuccess);
    }
    CHECK_EQ_I64(cudaStreamSynchronize(gpu->stream), cudaSuccess);
    (void)meet();
    CHECK_EQ_I64(world_start(w, rank, &w->scenes[0], CP_OP_ATTENTION, more),
                 CP_ERR_COMM);
    gpus_free(w->scenes[0].tensors[rank], tensors);
    CHECK_EQ_I64(cudaGraphExecDestroy(exec), cudaSuccess);
}

static void launch_late(int rank, void *arg)
{
    launch_alone(arg, rank, false);
    CHECK_STR_HAS(cp_last_error()->text, "rank 0 waited more than 0.5 s for rank 1 in "
                                         "attention, call 1 (launched in a graph)");
}

static void play_a_launch_has_a_deadline(void)
{
    gpus_timeout = 0.5;
    play_one(2, 1, launch_late);
    gpus_timeout = 100.0;
}

TEST(a_launch_has_a_deadline)
{
    on_each(play_a_launch_has_a_deadline);
}

static void launch_to_the_dead(int rank, void *arg)
{
    launch_alone(arg, rank, true);
    CHECK_STR_HAS(cp_last_error()->text, "rank 1 is gone");
    CHECK_STR_HAS(
        cp_last_error()->text,
        "while rank 0 waited for it in attention, call 1 (launched in a graph)");
}

static void play_a_launch_notices_a_death(void)
{
    play_one(2, 1, launch_to_the_dead);
}

TEST(a_launch_notices_a_death)
{
    on_each(play_a_launch_notices_a_death);
}

/* Rank 0 waits for rank 1 nearly all the time, in each launch less than the deadline; then
 * nothing is launched for longer than that. */
static void launch_often(int rank, void *arg)
{
    struct world *w = arg;
    const struct gpu *gpu = w->own[rank];
    struct cp_view tensors[CP_TENSORS];
    cudaGraphExec_t exec = capture_one(w, rank, tensors);
    for (int launch = 0; launch < 12; launch++) {
        if (rank == 1) {
            ranks_sleep_us(100000);
        }
        CHECK_EQ_I64(cudaGraphLaunch(exec, gpu->stream), cudaSuccess);
        CHECK_EQ_I64(cudaStreamSynchronize(gpu->stream), cudaSuccess);
        (void)meet();
    }
    ranks_sleep_us(1100000);
    CHECK_EQ_I64(cp_context_check(w->context[rank]), CP_OK);
    gpus_give(w, rank, w->scenes[0].tensors[rank], tensors);
    CHECK_EQ_I64(cudaGraphExecDestroy(exec), cudaSuccess);
}

static void play_many_launches_are_not_one_late_one(void)
{
    gpus_timeout = 0.7;
    CHECK(is_played_right(2, 1, launch_often));
    gpus_timeout = 100.0;
}

TEST(many_launches_are_not_one_late_one)
{
    on_each(play_many_launches_are_not_one_late_one);
}

/* ---- launches that do not meet: what only windows can tell ---- */

/* Twice the same call, but another one each time. */
static void launch_another(int rank, void *arg)
{
    struct world *w = arg;
    const struct gpu *gpu = w->own[rank];
    struct cp_view tensors[2][CP_TENSORS], more[CP_TENSORS];
    cudaGraphExec_t exec[2];
    for (int i = 0; i < 2; i++) {
        exec[i] = capture_one(w, rank, tensors[i]);
    }
    CHECK_EQ_I64(cudaGraphLaunch(exec[rank], gpu->stream), cudaSuccess);
    CHECK_EQ_I64(cudaStreamSynchronize(gpu->stream), cudaSuccess);
    (void)meet();
    ranks_sleep_us(200000); /* the thread that notices looks now and then */
    (void)meet();
    CHECK_EQ_I64(world_start(w, rank, &w->scenes[0], CP_OP_ATTENTION, more),
                 CP_ERR_COMM);
    CHECK_STR_HAS(cp_last_error()->text,
                  "all ranks have to launch the same graphs in the same order");
    CHECK(
        strstr(
            cp_last_error()->text,
            "rank 1 was in attention, call 3 while rank 0 was in attention, call 1") !=
            NULL ||
        strstr(
            cp_last_error()->text,
            "rank 0 was in attention, call 1 while rank 1 was in attention, call 3") !=
            NULL);
    for (int i = 0; i < 2; i++) {
        gpus_free(w->scenes[0].tensors[rank], tensors[i]);
        CHECK_EQ_I64(cudaGraphExecDestroy(exec[i]), cudaSuccess);
    }
}

TEST(ranks_that_launch_different_graphs_are_told)
{
    if (TEST_UNDER_TSAN) {
        TEST_SKIP("what is read after a wait that was ended is a race");
    }
    over = &ipcs;
    play_one(2, 1, launch_another);
    over = &ipcs_apart;
    play_one(1, 2, launch_another);
}

/* Two launches, the second with other numbers; rank 1 is late with it. */
static void launch_twice(int rank, void *arg)
{
    struct world *w = arg;
    const struct gpu *gpu = w->own[rank];
    struct cp_view tensors[CP_TENSORS];
    cudaGraphExec_t exec = capture_one(w, rank, tensors);
    CHECK_EQ_I64(cudaGraphLaunch(exec, gpu->stream), cudaSuccess);
    CHECK_EQ_I64(cudaStreamSynchronize(gpu->stream), cudaSuccess);
    if (meet()) {
        scene_redraw(&w->scenes[0], test_seed + 1);
        scene_poison(&w->scenes[0], CP_OP_ATTENTION);
    }
    (void)meet();
    gpus_copy(gpu->stream, w->scenes[0].tensors[rank], tensors, false);
    CHECK_EQ_I64(cudaStreamSynchronize(gpu->stream), cudaSuccess);
    (void)meet();
    ranks_sleep_us(rank == 1 ? 200000 : 0);
    CHECK_EQ_I64(cudaGraphLaunch(exec, gpu->stream), cudaSuccess);
    gpus_give(w, rank, w->scenes[0].tensors[rank], tensors);
    CHECK_EQ_I64(cudaGraphExecDestroy(exec), cudaSuccess);
}

static bool are_launches_right(const struct world_transport *transport)
{
    over = transport;
    return is_played_right(2, 1, launch_twice);
}

static struct cp_comm_ops odd_comm; /* the same on all ranks */
static enum cp_code (*sound_begin)(struct cp_comm *comm,
                                   const struct cp_comm_call *call);

/* A planted fault: launches have no epoch of their own. */
static enum cp_code begin_uncaptured(struct cp_comm *comm,
                                     const struct cp_comm_call *call)
{
    return call->capture == 0 ? sound_begin(comm, call) : CP_OK;
}

static enum cp_code join_stale(struct world *w, int rank,
                               struct cp_context_parts *parts)
{
    enum cp_code code = ipcs_join(w, rank, parts);
    odd_comm = *parts->comm->ops;
    sound_begin = odd_comm.begin;
    odd_comm.begin = begin_uncaptured;
    parts->comm->ops = &odd_comm;
    return code;
}

TEST(a_stale_epoch_is_found)
{
    struct world_transport stale = ipcs;
    if (TEST_UNDER_TSAN) {
        TEST_SKIP("ThreadSanitizer would report the race itself");
    }
    stale.join = join_stale;
    CHECK(are_launches_right(&ipcs));
    /* Old keys of rank 1 may change nothing in a scene: a mask can hide them. */
    uint64_t seed = test_seed;
    bool is_found = false;
    for (int i = 0; i < 20 && !is_found; i++) {
        test_seed = seed + (uint64_t)(100 * i);
        is_found = !are_launches_right(&stale);
    }
    test_seed = seed;
    CHECK(is_found);
}

/* ---- what cannot be captured ---- */

static void lack_lengths(int rank, void *arg)
{
    struct world *w = arg;
    const struct gpu *gpu = w->own[rank];
    struct cp_record record;
    CHECK_EQ_I64(cudaSetDevice(rank), cudaSuccess);
    begin_capture(gpu->stream, cudaStreamCaptureModeThreadLocal);
    scene_record(&w->scenes[0], rank, CP_OP_ATTENTION, &record);
    CHECK_EQ_I64(
        cp_context_describe(w->context[rank], (struct cp_stream *)gpu->stream, &record),
        CP_OK);
    CHECK_EQ_I64(record.call.is_captured, 1);
    CHECK_EQ_I64(cp_context_begin(w->context[rank], &record, NULL), CP_ERR_VALUE);
    CHECK_STR_HAS(cp_last_error()->text, "pass seq_lens=");
    drop_capture(gpu->stream);
    /* And the context goes on. */
    CHECK_EQ_I64(world_call(w, rank, &w->scenes[0], CP_OP_ATTENTION), CP_OK);
}

static void play_uneven_lengths_have_to_be_told(void)
{
    struct world w;
    uint64_t seed = test_seed;
    world_open(&w, 2, 1, over, CP_ANYTHING, 0);
    do {
        scene_destroy(&w.scenes[0]);
        scene_create(&w.scenes[0], seed++, 2, 1);
    } while (w.scenes[0].variant != CP_ANYTHING || w.scenes[0].is_replicated);
    ranks_as_threads(w.size, lack_lengths, &w);
    CHECK(scene_judge(&w.scenes[0], CP_OP_ATTENTION));
    scene_destroy(&w.scenes[0]);
    world_close(&w);
}

TEST(uneven_lengths_have_to_be_told)
{
    on_each(play_uneven_lengths_have_to_be_told);
}

/* Rank 1 does not capture what rank 0 does. */
static void capture_alone(int rank, void *arg)
{
    struct world *w = arg;
    const struct gpu *gpu = w->own[rank];
    struct cp_view tensors[CP_TENSORS];
    CHECK_EQ_I64(cudaSetDevice(rank), cudaSuccess);
    memset(tensors, 0, sizeof tensors);
    if (rank == 0) {
        begin_capture(gpu->stream, cudaStreamCaptureModeThreadLocal);
    }
    CHECK_EQ_I64(call_on(w, rank, &w->scenes[0], CP_OP_ATTENTION, tensors),
                 CP_ERR_VALUE);
    CHECK_STR_HAS(cp_last_error()->text,
                  "rank 1 differs from rank 0 in whether it is captured in a graph");
    if (rank == 0) {
        drop_capture(gpu->stream);
    }
}

static void play_all_ranks_capture_or_none(void)
{
    play_one(2, 1, capture_alone);
}

TEST(all_ranks_capture_or_none)
{
    on_each(play_all_ranks_capture_or_none);
}

/* A call on another stream, while one of a capture has the lanes. */
static void call_beside(int rank, void *arg)
{
    struct world *w = arg;
    struct gpu *gpu = w->own[rank];
    cudaStream_t captured = gpu->stream, aside = NULL;
    struct cp_view tensors[CP_TENSORS];
    struct cp_record record;
    CHECK_EQ_I64(cudaSetDevice(rank), cudaSuccess);
    CHECK_EQ_I64(cudaStreamCreateWithFlags(&aside, cudaStreamNonBlocking), cudaSuccess);
    take_scene(w, rank, tensors);
    CHECK_EQ_I64(cudaStreamSynchronize(captured), cudaSuccess);
    begin_capture(captured, cudaStreamCaptureModeThreadLocal);
    CHECK_EQ_I64(call_on(w, rank, &w->scenes[0], CP_OP_ATTENTION, tensors), CP_OK);
    scene_record(&w->scenes[0], rank, CP_OP_ATTENTION, &record);
    CHECK_EQ_I64(
        cp_context_describe(w->context[rank], (struct cp_stream *)aside, &record),
        CP_ERR_RUNTIME);
    CHECK_STR_HAS(cp_last_error()->text, "end that capture before");
    drop_capture(captured);
    gpu->stream = aside;
    CHECK_EQ_I64(call_on(w, rank, &w->scenes[0], CP_OP_ATTENTION, tensors), CP_OK);
    gpus_give(w, rank, w->scenes[0].tensors[rank], tensors);
    gpu->stream = captured;
    CHECK_EQ_I64(cudaStreamDestroy(aside), cudaSuccess);
}

static void play_a_call_beside_a_capture_is_refused(void)
{
    CHECK(is_played_right(2, 1, call_beside));
}

TEST(a_call_beside_a_capture_is_refused)
{
    on_each(play_a_call_beside_a_capture_is_refused);
}

/* Something before the call has spoilt the capture. */
static void call_spoilt(int rank, void *arg)
{
    struct world *w = arg;
    const struct gpu *gpu = w->own[rank];
    struct cp_record record;
    cudaGraph_t graph = NULL;
    CHECK_EQ_I64(cudaSetDevice(rank), cudaSuccess);
    begin_capture(gpu->stream, cudaStreamCaptureModeThreadLocal);
    CHECK_EQ_I64(cudaStreamSynchronize(gpu->stream), cudaErrorStreamCaptureUnsupported);
    (void)cudaGetLastError();
    scene_record(&w->scenes[0], rank, CP_OP_ATTENTION, &record);
    CHECK_EQ_I64(
        cp_context_describe(w->context[rank], (struct cp_stream *)gpu->stream, &record),
        CP_ERR_RUNTIME);
    CHECK_STR_HAS(cp_last_error()->text, "has failed before it");
    CHECK_EQ_I64(cudaStreamEndCapture(gpu->stream, &graph),
                 cudaErrorStreamCaptureInvalidated);
    (void)cudaGetLastError();
}

static void play_a_spoilt_capture_is_said_to_be(void)
{
    play_one(2, 1, call_spoilt);
}

TEST(a_spoilt_capture_is_said_to_be)
{
    on_each(play_a_spoilt_capture_is_said_to_be);
}
