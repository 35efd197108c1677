/* Windows of shared memory: exact integers, growth under a reader's eyes,
 * windows that cannot grow, errors. Ranks are threads over one mapping (for
 * ThreadSanitizer) and processes over their own. */
#define CP_TEST_POINTS
#include <errno.h>
#include <fcntl.h>

#include "ranks.h"
#include "test.h"

/* A fallocate that can be told to fail. */
static _Atomic int fallocate_calls, fallocate_fails_at = -1, fallocate_errno;

static int test_fallocate(int fd, int mode, off_t offset, off_t bytes)
{
    if (mode == 0 && atomic_fetch_add(&fallocate_calls, 1) == fallocate_fails_at) {
        errno = fallocate_errno;
        return -1;
    }
    return fallocate(fd, mode, offset, bytes);
}

#include "base/watch.c"
#include "control/gate.c"
#define fallocate test_fallocate
#include "comm/comm_shm.c"
#undef fallocate
#include <sys/mman.h>
#include <sys/resource.h>

#include "control/meet.h"

static const size_t reserved = (size_t)64 << 20;

static _Thread_local struct test_rng delays;
static _Thread_local bool has_delays;

void cp_test_point(const char *name)
{
    (void)name;
    if (!has_delays) {
        return;
    }
    uint64_t dice = test_rng_next(&delays);
    if (dice % 64 == 0) {
        (void)sched_yield();
    } else if (dice % 4 == 2) {
        for (volatile uint64_t i = 0; i < (dice >> 32) % 500; i++) {
        }
    }
}

struct rig {
    struct cp_page *page;
    struct cp_window window[RANKS_MOST];
    int world, rounds;
    _Atomic int is_gone[RANKS_MOST];
};

static bool is_gone(void *peers, int rank)
{
    struct rig *rig = peers;
    return atomic_load(&rig->is_gone[rank]) != 0;
}

static bool rig_init(struct rig *rig, int world, int rounds)
{
    void *page = NULL;
    *rig = (struct rig){.world = world, .rounds = rounds};
    for (int rank = 0; rank < world; rank++) {
        if (!CHECK_EQ_I64(cp_window_create(reserved, &rig->window[rank]), CP_OK)) {
            return false;
        }
    }
    if (!CHECK_EQ_I64(cp_mem_create(cp_page_bytes(world), "a page", &page), CP_OK)) {
        return false;
    }
    rig->page = page;
    return true;
}

static void rig_fini(struct rig *rig)
{
    for (int rank = 0; rank < rig->world; rank++) {
        cp_window_close(&rig->window[rank]);
    }
    cp_mem_destroy(&rig->page);
}

static struct cp_watch watch_of(struct rig *rig, int rank)
{
    return (struct cp_watch){.bell = cp_page_bell(rig->page),
                             .poison = cp_page_poison(rig->page),
                             .rank = rank,
                             .world = rig->world,
                             .may_spin = rank % 2 == 0,
                             .is_dead = is_gone,
                             .peers = rig};
}

static uint32_t element(int rank, uint64_t round, size_t index)
{
    return (uint32_t)rank * 0x10000000u + (uint32_t)round * 0x10000u + (uint32_t)index;
}

/* 0, 1, odd, around a page, larger: the same for a rank and round everywhere. */
static size_t count_of(int rank, uint64_t round)
{
    static const size_t counts[] = {0, 1, 3, 1023, 1024, 1025, 4097, 257, 20001};
    return counts[((uint64_t)rank * 5 + round) % (sizeof counts / sizeof counts[0])];
}

/* Rounds as a context plays them: reserve, gate, write, publish, read all. Nothing says
 * that the window is free again but the gate of the round after. */
static void play(struct cp_comm *comm, struct cp_gate *gate, int rounds)
{
    const struct cp_comm_ops *ops = comm->ops;
    for (uint64_t round = 1; round <= (uint64_t)rounds; round++) {
        struct cp_record mine = {.call = {.batch = 1}}, all[RANKS_MOST];
        size_t count = count_of(comm->rank, round);
        TEST_CONTEXT("rank %d, round %llu", comm->rank, (unsigned long long)round);
        if (!CHECK_EQ_I64(ops->reserve(comm, count * sizeof(uint32_t) + 1), CP_OK) ||
            !CHECK_EQ_I64(
                cp_gate_exchange(gate, &mine, all, "round", cp_deadline_in(20.0)),
                CP_OK)) {
            return;
        }
        /* One byte off, so that nothing is aligned. */
        char *own = (char *)ops->window(comm, comm->rank) + 1;
        for (size_t i = 0; i < count; i++) {
            uint32_t value = element(comm->rank, round, i);
            memcpy(own + i * sizeof value, &value, sizeof value);
        }
        CHECK_EQ_I64(ops->publish(comm, 0, round, NULL), CP_OK);
        for (int turn = 1; turn <= comm->world; turn++) {
            int peer = (comm->rank + turn) % comm->world;
            struct cp_comm_wait wait = {.peer = peer, .signal = 0, .value = round};
            if (!CHECK_EQ_I64(ops->wait(comm, &wait, 1, "round", cp_deadline_in(20.0)),
                              CP_OK)) {
                return;
            }
            CHECK_EQ_I64(ops->reached(comm, &wait, 1, NULL), CP_OK);
            const char *theirs = (const char *)ops->window(comm, peer) + 1;
            for (size_t i = 0; i < count_of(peer, round); i++) {
                uint32_t value = 0;
                memcpy(&value, theirs + i * sizeof value, sizeof value);
                if (value != element(peer, round, i)) {
                    (void)CHECK_EQ_U64(value, element(peer, round, i));
                    return;
                }
            }
        }
    }
}

static void body_thread(int rank, void *arg)
{
    struct rig *rig = arg;
    struct cp_watch watch = watch_of(rig, rank);
    struct cp_gate gate = {.page = rig->page, .watch = &watch};
    struct cp_comm *comm = NULL;
    delays = test_rng_init((uint64_t)rank + 1);
    has_delays = true;
    if (CHECK_EQ_I64(cp_comm_shm_create(rig->window, &watch, &comm), CP_OK)) {
        play(comm, &gate, rig->rounds);
        comm->ops->close(&comm);
    }
    has_delays = false;
}

static void check_threads(int world, int rounds)
{
    struct rig rig;
    if (rig_init(&rig, world, rounds)) {
        ranks_as_threads(world, body_thread, &rig);
        rig_fini(&rig);
    }
}

TEST(integers_2_threads)
{
    check_threads(2, 600);
}

TEST(integers_3_threads)
{
    check_threads(3, 400);
}

TEST(integers_6_threads)
{
    check_threads(6, 100);
}

static void body_process(int rank, void *arg)
{
    const struct rig *shape = arg;
    struct cp_window window[RANKS_MOST] = {{0}};
    struct cp_meeting *meeting = NULL;
    struct cp_comm *comm = NULL;
    char key[64];
    (void)snprintf(key, sizeof key, "test_comm_shm %d", (int)getppid());
    if (!CHECK_EQ_I64(cp_window_create(reserved, &window[rank]), CP_OK)) {
        return;
    }
    struct cp_meet_args args = {.key = key,
                                .rank = rank,
                                .world = shape->world,
                                .window_fd = window[rank].fd,
                                .deadline = cp_deadline_in(20.0)};
    if (!CHECK_EQ_I64(cp_meet(&args, &meeting), CP_OK)) {
        return;
    }
    for (int peer = 0; peer < shape->world; peer++) {
        if (peer != rank &&
            !CHECK_EQ_I64(
                cp_window_map(cp_meeting_window_fd(meeting, peer), &window[peer]),
                CP_OK)) {
            return;
        }
    }
    struct cp_page *page = cp_meeting_page(meeting)->base;
    struct cp_watch watch = {.bell = cp_page_bell(page),
                             .poison = cp_page_poison(page),
                             .rank = rank,
                             .world = shape->world,
                             .is_dead = cp_meeting_is_dead,
                             .peers = meeting};
    struct cp_gate gate = {.page = page, .watch = &watch};
    if (CHECK_EQ_I64(cp_comm_shm_create(window, &watch, &comm), CP_OK)) {
        play(comm, &gate, shape->rounds);
        comm->ops->close(&comm);
    }
    for (int peer = 0; peer < shape->world; peer++) {
        cp_window_close(&window[peer]);
    }
    cp_meeting_close(&meeting);
    CHECK_EQ_I64(cp_mem_stats().live_blocks, 0);
}

TEST(integers_between_processes)
{
    for (int world = 2; world <= 4; world += 2) {
        struct rig shape = {.world = world, .rounds = 300};
        ranks_as_processes(world, body_process, &shape);
    }
}

/* The owner grows its window again and again while the peer reads what was there: nothing
 * moves or changes. */
static void body_growth(int rank, void *arg)
{
    struct rig *rig = arg;
    struct cp_watch watch = watch_of(rig, rank);
    struct cp_comm *comm = NULL;
    if (!CHECK_EQ_I64(cp_comm_shm_create(rig->window, &watch, &comm), CP_OK)) {
        return;
    }
    const struct cp_comm_ops *ops = comm->ops;
    for (uint64_t step = 1; step <= 200; step++) {
        size_t first = (size_t)(step - 1) * 5000, end = (size_t)step * 5000;
        if (rank == 0) {
            if (!CHECK_EQ_I64(ops->reserve(comm, end), CP_OK)) {
                break;
            }
            memset((char *)ops->window(comm, 0) + first, (int)step, end - first);
            CHECK_EQ_I64(ops->publish(comm, 3, step, NULL), CP_OK);
        } else {
            struct cp_comm_wait wait = {.peer = 0, .signal = 3, .value = step};
            if (!CHECK_EQ_I64(ops->wait(comm, &wait, 1, "growth", cp_deadline_in(20.0)),
                              CP_OK)) {
                break;
            }
            const unsigned char *bytes = ops->window(comm, 0);
            for (uint64_t earlier = 1; earlier <= step; earlier++) {
                CHECK_EQ_I64(bytes[(earlier - 1) * 5000], (unsigned char)earlier);
                CHECK_EQ_I64(bytes[earlier * 5000 - 1], (unsigned char)earlier);
            }
        }
    }
    ops->close(&comm);
}

TEST(growth_while_a_peer_reads)
{
    struct rig rig;
    if (rig_init(&rig, 2, 0)) {
        ranks_as_threads(2, body_growth, &rig);
        rig_fini(&rig);
    }
}

TEST(a_tiny_reservation_cannot_grow)
{
    struct cp_window window = {0};
    struct cp_bell bell = {0};
    struct cp_poison poison = {0};
    struct cp_watch watch = {.bell = &bell, .poison = &poison, .world = 1};
    struct cp_comm *comm = NULL;
    CHECK_EQ_I64(cp_window_create(100, &window), CP_ERR_VALUE);
    CHECK_EQ_I64(cp_window_create(SIZE_MAX, &window), CP_ERR_VALUE);
    REQUIRE(cp_window_create(3 * page_bytes(), &window) == CP_OK);
    REQUIRE(cp_comm_shm_create(&window, &watch, &comm) == CP_OK);
    CHECK_EQ_I64(comm->ops->reserve(comm, page_bytes()), CP_OK);
    CHECK_EQ_I64(comm->ops->reserve(comm, 2 * page_bytes() + 1), CP_ERR_NO_MEMORY);
    CHECK_STR_HAS(cp_last_error()->text, "cannot hold");
    CHECK_EQ_I64(comm->ops->reserve(comm, SIZE_MAX), CP_ERR_NO_MEMORY);
    CHECK_EQ_I64(comm->ops->reserve(comm, 2 * page_bytes()), CP_OK);
    /* It does not overlap the counters. */
    memset(comm->ops->window(comm, 0), 1, 2 * page_bytes());
    const struct cp_comm_wait wait = {.signal = CP_SIGNALS - 1, .value = 1};
    CHECK_EQ_I64(comm->ops->reached(comm, &wait, 1, NULL), CP_AGAIN);
    comm->ops->close(&comm);
    cp_window_close(&window);
    CHECK(window.base == NULL);
    cp_window_close(&window);
}

static int64_t file_bytes(int fd)
{
    struct stat file = {0};
    CHECK(fstat(fd, &file) == 0);
    return (int64_t)file.st_blocks * 512;
}

TEST(memory_that_runs_out_is_an_error_and_given_back)
{
    struct cp_window window = {0};
    struct cp_bell bell = {0};
    struct cp_poison poison = {0};
    struct cp_watch watch = {.bell = &bell, .poison = &poison, .world = 1};
    struct cp_comm *comm = NULL;
    REQUIRE(cp_window_create((size_t)256 << 30, &window) == CP_OK);
    REQUIRE(cp_comm_shm_create(&window, &watch, &comm) == CP_OK);
    CHECK_EQ_I64(comm->ops->reserve(comm, 1000), CP_OK);
    memset(comm->ops->window(comm, 0), 7, 1000);
    int64_t before = file_bytes(window.fd);
    CHECK(before <= 4 * (int64_t)page_bytes());
    fallocate_calls = 0;
    fallocate_fails_at = 1; /* the second piece */
    fallocate_errno = ENOSPC;
    CHECK_EQ_I64(comm->ops->reserve(comm, 2 * piece_bytes), CP_ERR_NO_MEMORY);
    CHECK_STR_HAS(cp_last_error()->text, "No space left");
    CHECK_EQ_I64(file_bytes(window.fd), before);
    CHECK_EQ_I64(((char *)comm->ops->window(comm, 0))[999], 7);
    /* A signal is no error. */
    fallocate_calls = 0;
    fallocate_errno = EINTR;
    CHECK_EQ_I64(comm->ops->reserve(comm, 2 * piece_bytes), CP_OK);
    CHECK(file_bytes(window.fd) >= (int64_t)(2 * piece_bytes));
    CHECK_EQ_I64(((char *)comm->ops->window(comm, 0))[999], 7);
    fallocate_calls = 0;
    fallocate_fails_at = 0;
    fallocate_errno = ENOMEM;
    struct cp_window second = {0};
    CHECK_EQ_I64(cp_window_create(reserved, &second), CP_ERR_NO_MEMORY);
    CHECK(second.base == NULL);
    fallocate_fails_at = -1;
    comm->ops->close(&comm);
    cp_window_close(&window);
}

static void body_limits(int rank, void *arg)
{
    struct rlimit limit = {.rlim_cur = (rlim_t)1 << 20, .rlim_max = (rlim_t)1 << 20};
    struct cp_window window = {0};
    (void)rank;
    (void)arg;
    (void)signal(SIGXFSZ, SIG_IGN);
    CHECK(setrlimit(RLIMIT_FSIZE, &limit) == 0);
    int next = open("/dev/null", O_RDONLY | O_CLOEXEC);
    CHECK_EQ_I64(cp_window_create(reserved, &window), CP_ERR_NO_MEMORY);
    CHECK_STR_HAS(cp_last_error()->text, "File too large");
    int again = open("/dev/null", O_RDONLY | O_CLOEXEC);
    CHECK_EQ_I64(again, next + 1); /* no descriptor was left open */
}

TEST(a_limit_on_file_sizes_is_an_error)
{
    ranks_as_processes(1, body_limits, NULL);
}

TEST(a_window_is_sealed_and_a_peers_is_for_reading)
{
    struct cp_window own = {0}, peer = {0};
    REQUIRE(cp_window_create(reserved, &own) == CP_OK);
    CHECK(ftruncate(own.fd, 0) != 0);
    CHECK(ftruncate(own.fd, (off_t)(2 * reserved)) != 0);
    CHECK((fcntl(own.fd, F_GETFD) & FD_CLOEXEC) != 0);
    REQUIRE(cp_window_map(own.fd, &peer) == CP_OK);
    CHECK_EQ_U64(peer.reserved, own.reserved);
    own.base[0] = 42;
    CHECK_EQ_I64(peer.base[0], 42);
    CHECK(mprotect(peer.base, 4096, PROT_READ) == 0);
    /* What was published stays readable when the owner is gone. */
    cp_window_close(&own);
    CHECK_EQ_I64(peer.base[0], 42);
    cp_window_close(&peer);
}

TEST(what_is_no_window_is_refused)
{
    struct cp_window window = {0};
    int fd = memfd_create("unsealed", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    CHECK(ftruncate(fd, 1 << 20) == 0);
    CHECK_EQ_I64(cp_window_map(fd, &window), CP_ERR_COMM);
    CHECK_STR_HAS(cp_last_error()->text, "not sealed");
    CHECK(ftruncate(fd, 4096) == 0 && fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK) == 0);
    CHECK_EQ_I64(cp_window_map(fd, &window), CP_ERR_COMM);
    CHECK_STR_HAS(cp_last_error()->text, "only 4096 bytes");
    (void)close(fd);
    CHECK_EQ_I64(cp_window_map(-1, &window), CP_ERR_RUNTIME);
    CHECK(window.base == NULL);
}

static void body_child(int rank, void *arg)
{
    struct cp_window *window = arg;
    unsigned char present = 0;
    (void)rank;
    /* The mapping is not there (mincore says ENOMEM), and closing must not unmap what
     * may be there instead. */
    CHECK(mincore(window->base, 4096, &present) != 0 && errno == ENOMEM);
    void *other = mmap(window->base, 4096, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
    CHECK(other == (void *)window->base);
    char *address = window->base;
    cp_window_close(window);
    address[0] = 1;
}

TEST(a_forked_child_has_no_window)
{
    struct cp_window window = {0};
    REQUIRE(cp_window_create(reserved, &window) == CP_OK);
    ranks_as_processes(1, body_child, &window);
    window.base[0] = 1;
    cp_window_close(&window);
}

static void body_broken(int rank, void *arg)
{
    struct rig *rig = arg;
    struct cp_watch watch = watch_of(rig, rank);
    struct cp_comm *comm = NULL;
    struct cp_comm_wait wait = {
        .peer = (rank + 1) % rig->world, .signal = 0, .value = 1};
    if (!CHECK_EQ_I64(cp_comm_shm_create(rig->window, &watch, &comm), CP_OK)) {
        return;
    }
    if (rank == 0) {
        struct cp_status reason = {
            .code = CP_ERR_DEVICE, .rank = 0, .text = "rank 0 lost its device"};
        ranks_sleep_us(3000);
        comm->ops->poison(comm, &reason);
    } else {
        CHECK_EQ_I64(comm->ops->wait(comm, &wait, 1, "step 3", cp_deadline_in(20.0)),
                     CP_ERR_DEVICE);
        CHECK_EQ_STR(cp_last_error()->text, "rank 0 lost its device");
    }
    comm->ops->close(&comm);
}

TEST(poison_reaches_all)
{
    struct rig rig;
    if (rig_init(&rig, 3, 0)) {
        ranks_as_threads(3, body_broken, &rig);
        rig_fini(&rig);
    }
}

TEST(any_of_several_waits_ends_it_and_errors_name_the_peer)
{
    struct rig rig;
    if (!rig_init(&rig, 3, 0)) {
        return;
    }
    struct cp_watch watch[3] = {watch_of(&rig, 0), watch_of(&rig, 1),
                                watch_of(&rig, 2)};
    struct cp_comm *comm[3] = {NULL};
    struct cp_comm_wait waits[2] = {{.peer = 1, .signal = 0, .value = 5},
                                    {.peer = 2, .signal = 1, .value = 5}};
    struct cp_comm_wait ticket = {.is_ticket = true, .value = 1};
    for (int rank = 0; rank < 3; rank++) {
        REQUIRE(cp_comm_shm_create(rig.window, &watch[rank], &comm[rank]) == CP_OK);
    }
    CHECK_EQ_I64(comm[0]->ops->wait(comm[0], &ticket, 1, "x", cp_deadline_in(0.0)),
                 CP_ERR_INTERNAL);
    CHECK_EQ_I64(comm[2]->ops->publish(comm[2], 1, 5, NULL), CP_OK);
    atomic_store(&rig.is_gone[1], 1);
    CHECK_EQ_I64(comm[0]->ops->wait(comm[0], waits, 2, "step 3", cp_deadline_in(1.0)),
                 CP_OK);
    CHECK_EQ_I64(comm[0]->ops->wait(comm[0], waits, 1, "step 3", cp_deadline_in(1.0)),
                 CP_ERR_COMM);
    CHECK_STR_HAS(cp_last_error()->text, "rank 1 is gone");
    CHECK_STR_HAS(cp_last_error()->text, "step 3");
    /* What rank 2 published before is there, though the communicator is broken. */
    CHECK_EQ_I64(
        comm[0]->ops->wait(comm[0], waits + 1, 1, "step 4", cp_deadline_in(1.0)),
        CP_OK);
    for (int rank = 0; rank < 3; rank++) {
        comm[rank]->ops->close(&comm[rank]);
    }
    rig_fini(&rig);
}

TEST(failed_allocation_leaves_nothing)
{
    struct cp_comm *comm = NULL;
    struct cp_watch watch = {.world = 1};
    cp_mem_fail_after(0);
    CHECK_EQ_I64(cp_comm_shm_create(NULL, &watch, &comm), CP_ERR_NO_MEMORY);
    cp_mem_fail_after(-1);
    CHECK(comm == NULL);
}
