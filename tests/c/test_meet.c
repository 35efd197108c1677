/* The meeting: real processes, late and in every order, among strangers, with deaths;
 * and ranks as threads. */
#include "control/meet.c"
#include "control/meet_fork.c"
#include "control/meet_wire.c"
#include "ranks.h"
#include "test.h"

struct scene {
    int world;
    int order[RANKS_MOST]; /* rank -> how many delays it comes late */
    int delay_us;
    double seconds;
};

static const char *key_of(pid_t pid, const char *name)
{
    static _Thread_local char key[2000];
    (void)snprintf(key, sizeof key, "test_meet %d %llu %s", (int)pid,
                   (unsigned long long)test_seed, name);
    return key;
}

static struct cp_meet_args args_of(const char *key, int rank, int world, double seconds)
{
    struct cp_meet_args args = {
        .key = key, .rank = rank, .world = world, .deadline = cp_deadline_in(seconds)};
    memset(args.hello.bytes, rank + 1, sizeof args.hello.bytes);
    args.window_fd = memfd_create("window", MFD_CLOEXEC);
    char text[32];
    int length = snprintf(text, sizeof text, "window of %d", rank);
    CHECK(write(args.window_fd, text, (size_t)length) == length);
    return args;
}

/* Is everything there that a meeting promises? Marks the page, so that all must see
 * all. */
static void check_meeting(struct cp_meeting *meeting, int rank, int world)
{
    for (int peer = 0; peer < world; peer++) {
        TEST_CONTEXT("rank %d of %d about rank %d", rank, world, peer);
        CHECK_EQ_I64(cp_meeting_hello(meeting, peer)->bytes[0], peer + 1);
        CHECK_EQ_I64(cp_meeting_hello(meeting, peer)->bytes[CP_HELLO_BYTES - 1],
                     peer + 1);
        if (peer == rank) {
            CHECK_EQ_I64(cp_meeting_window_fd(meeting, peer), -1);
            continue;
        }
        char want[32], got[32] = "";
        (void)snprintf(want, sizeof want, "window of %d", peer);
        CHECK(pread(cp_meeting_window_fd(meeting, peer), got, sizeof got - 1, 0) > 0);
        CHECK_EQ_STR(got, want);
        CHECK((fcntl(cp_meeting_window_fd(meeting, peer), F_GETFD) & FD_CLOEXEC) != 0);
    }
    /* The bell's word counts the ranks that saw this page. */
    _Atomic uint32_t *word = &cp_page_bell(cp_meeting_page(meeting)->base)->count;
    atomic_fetch_add(word, 1);
    for (int waited = 0; waited < 5000 && atomic_load(word) < (uint32_t)world;
         waited++) {
        ranks_sleep_us(1000);
    }
    CHECK_EQ_U64(atomic_load(word), (uint64_t)world);
}

static void meet_and_check(const char *key, int rank, const struct scene *scene)
{
    struct cp_meeting *meeting = NULL;
    ranks_sleep_us((int64_t)scene->order[rank] * scene->delay_us);
    struct cp_meet_args args = args_of(key, rank, scene->world, scene->seconds);
    if (CHECK_EQ_I64(cp_meet(&args, &meeting), CP_OK)) {
        check_meeting(meeting, rank, scene->world);
        cp_meeting_close(&meeting);
    } else {
        printf("%s\n", cp_last_error()->text);
    }
    CHECK(meeting == NULL);
    (void)close(args.window_fd);
}

static void body_process(int rank, void *arg)
{
    meet_and_check(key_of(getppid(), "processes"), rank, arg);
    CHECK_EQ_I64(cp_mem_stats().live_blocks, 0);
}

static void body_thread(int rank, void *arg)
{
    meet_and_check(key_of(getpid(), "threads"), rank, arg);
}

static int count_fds(void)
{
    int count = 0;
    for (int fd = 0; fd < 256; fd++) {
        count += fcntl(fd, F_GETFD) >= 0;
    }
    return count;
}

TEST(one_rank)
{
    struct scene scene = {.world = 1, .seconds = 1.0};
    int before = count_fds();
    meet_and_check(key_of(getpid(), "one"), 0, &scene);
    CHECK_EQ_I64(count_fds(), before);
}

TEST(threads_2_to_6)
{
    int before = count_fds();
    for (int world = 2; world <= 6; world += 2) {
        struct scene scene = {.world = world, .seconds = 20.0};
        ranks_as_threads(world, body_thread, &scene);
    }
    CHECK_EQ_I64(count_fds(), before);
    CHECK_EQ_I64(cp_mem_stats().live_blocks, 0);
    CHECK(fork_entries == NULL);
}

TEST(processes_6)
{
    struct scene scene = {.world = 6, .seconds = 20.0};
    ranks_as_processes(6, body_process, &scene);
}

TEST(late_in_every_order)
{
    static const int orders[6][3] = {{0, 1, 2}, {0, 2, 1}, {1, 0, 2},
                                     {1, 2, 0}, {2, 0, 1}, {2, 1, 0}};
    for (int i = 0; i < 6; i++) {
        struct scene scene = {.world = 3, .delay_us = 30000, .seconds = 20.0};
        memcpy(scene.order, orders[i], sizeof orders[i]);
        ranks_as_processes(3, body_process, &scene);
    }
}

static void body_absent(int rank, void *arg)
{
    const struct scene *scene = arg;
    struct cp_meeting *meeting = NULL;
    if (rank == 1 || rank == 3) {
        return;
    }
    struct cp_meet_args args =
        args_of(key_of(getpid(), "absent"), rank, scene->world, 0.2);
    int64_t start = cp_now_ns();
    CHECK_EQ_I64(cp_meet(&args, &meeting), CP_ERR_TIMEOUT);
    CHECK(cp_now_ns() - start < 1500000000);
    CHECK_STR_HAS(cp_last_error()->text, "ranks 1, 3 of 4 did not appear");
    CHECK_STR_HAS(cp_last_error()->text, "within 0.2 s");
    CHECK_STR_HAS(cp_last_error()->text, "Check that");
    (void)close(args.window_fd);
}

TEST(timeout_names_who_did_not_appear)
{
    struct scene scene = {.world = 4};
    int before = count_fds();
    ranks_as_threads(4, body_absent, &scene);
    CHECK_EQ_I64(count_fds(), before);
}

static enum cp_code interrupt_at_third(void *arg)
{
    return ++*(int *)arg < 3 ? CP_OK : CP_ERR_INTERRUPTED;
}

TEST(interruption)
{
    int asked = 0;
    struct cp_meeting *meeting = NULL;
    struct cp_meet_args args = args_of(key_of(getpid(), "interrupt"), 0, 2, 20.0);
    args.interrupt = interrupt_at_third;
    args.interrupt_arg = &asked;
    int64_t start = cp_now_ns();
    CHECK_EQ_I64(cp_meet(&args, &meeting), CP_ERR_INTERRUPTED);
    CHECK(cp_now_ns() - start < 400000000);
    (void)close(args.window_fd);
}

TEST(a_rank_twice)
{
    struct cp_meeting *meeting = NULL, *second = NULL;
    const char *key = key_of(getpid(), "twice");
    struct cp_meet_args args = args_of(key, 0, 1, 5.0);
    REQUIRE(cp_meet(&args, &meeting) == CP_OK);
    CHECK_EQ_I64(cp_meet(&args, &second), CP_ERR_COMM);
    CHECK_STR_HAS(cp_last_error()->text, "rank 0 of 1 is already taken");
    CHECK(second == NULL);
    cp_meeting_close(&meeting);
    /* And when it has gone, the place is free. */
    CHECK_EQ_I64(cp_meet(&args, &meeting), CP_OK);
    cp_meeting_close(&meeting);
    (void)close(args.window_fd);
}

TEST(other_keys_and_worlds_do_not_meet)
{
    struct cp_wire_hash a = cp_wire_hash_of("a", 2), b = cp_wire_hash_of("b", 2),
                        c = cp_wire_hash_of("a", 3), again = cp_wire_hash_of("a", 2);
    CHECK(memcmp(&a, &b, sizeof a) != 0);
    CHECK(memcmp(&a, &c, sizeof a) != 0);
    CHECK_EQ_BYTES(&a, &again, sizeof a);
    CHECK(a.word[0] != a.word[1]);
    /* Any length. */
    char longest[1500];
    memset(longest, 'x', sizeof longest - 1);
    longest[sizeof longest - 1] = '\0';
    struct scene scene = {.world = 1, .seconds = 1.0};
    meet_and_check(longest, 0, &scene);
}

TEST(impossible_ranks)
{
    struct cp_meeting *meeting = NULL;
    struct cp_meet_args args = {.key = "x", .rank = 2, .world = 2, .window_fd = -1};
    CHECK_EQ_I64(cp_meet(&args, &meeting), CP_ERR_VALUE);
    args.rank = -1;
    CHECK_EQ_I64(cp_meet(&args, &meeting), CP_ERR_VALUE);
}

TEST(failed_allocations_leave_nothing)
{
    struct cp_meet_args args = args_of(key_of(getpid(), "memory"), 0, 1, 5.0);
    int before = count_fds();
    for (int k = 0; k < 2; k++) {
        struct cp_meeting *meeting = NULL;
        cp_mem_fail_after(k);
        CHECK_EQ_I64(cp_meet(&args, &meeting), CP_ERR_NO_MEMORY);
        cp_mem_fail_after(-1);
        CHECK(meeting == NULL);
        CHECK_EQ_I64(cp_mem_stats().live_blocks, 0);
        CHECK_EQ_I64(count_fds(), before);
    }
    (void)close(args.window_fd);
}

/* Strangers: connected to rank 0's listener before anybody else, saying nothing, or
 * anything but a hello. */
enum garbage {
    SILENT,
    BYTES,
    EMPTY,
    WRONG_HASH,
    WRONG_TARGET,
    OWN_RANK,
    NO_WINDOW,
    MANY_FDS,
    GARBAGE_COUNT
};

static int connect_stranger(const struct cp_wire *target, int rank)
{
    struct sockaddr_un name;
    socklen_t size = cp_wire_name(&target->hash, rank, &name);
    int fd = cp_wire_open();
    for (int i = 0; i < 5000 && connect(fd, (struct sockaddr *)&name, size) != 0; i++) {
        ranks_sleep_us(500);
    }
    return fd;
}

static void say(int fd, const struct cp_wire *as, enum garbage garbage,
                const struct cp_hello *hello)
{
    struct cp_wire liar = *as;
    char bytes[4000];
    memset(bytes, 7, sizeof bytes);
    switch (garbage) {
    case SILENT:
    case GARBAGE_COUNT:
        break;
    case BYTES:
        (void)!send(fd, bytes, sizeof bytes, MSG_NOSIGNAL);
        break;
    case EMPTY:
        (void)!send(fd, bytes, 0, MSG_NOSIGNAL);
        break;
    case WRONG_HASH:
        liar.hash.word[1]++;
        (void)cp_wire_send(&liar, fd, 0, hello);
        break;
    case WRONG_TARGET:
        (void)cp_wire_send(&liar, fd, 1, hello);
        break;
    case OWN_RANK:
        liar.rank = 0;
        liar.page_fd = liar.window_fd;
        (void)cp_wire_send(&liar, fd, 0, hello);
        break;
    case NO_WINDOW: {
        struct cp_wire_message message = {.hash = as->hash, .from = 1, .to = 0};
        (void)!send(fd, &message, sizeof message, MSG_NOSIGNAL);
        break;
    }
    case MANY_FDS: {
        /* As rank 0 does, but rank 1 has one descriptor to send. */
        struct cp_wire_message message = {.hash = as->hash, .from = 1, .to = 0};
        struct iovec part = {.iov_base = &message, .iov_len = sizeof message};
        union {
            struct cmsghdr align;
            char room[CMSG_SPACE(100 * sizeof(int))];
        } control;
        memset(&control, 0, sizeof control);
        struct msghdr header = {.msg_iov = &part,
                                .msg_iovlen = 1,
                                .msg_control = control.room,
                                .msg_controllen = sizeof control.room};
        struct cmsghdr *rights = CMSG_FIRSTHDR(&header);
        rights->cmsg_level = SOL_SOCKET;
        rights->cmsg_type = SCM_RIGHTS;
        rights->cmsg_len = CMSG_LEN(100 * sizeof(int));
        for (int i = 0; i < 100; i++) {
            memcpy(CMSG_DATA(rights) + (size_t)i * sizeof(int), &as->window_fd,
                   sizeof(int));
        }
        (void)!sendmsg(fd, &header, MSG_NOSIGNAL);
        break;
    }
    }
}

struct strangers {
    int world, count;
    bool only_silent;
    _Atomic int are_there, have_met;
};

static void body_among_strangers(int rank, void *arg)
{
    struct strangers *strangers = arg;
    const char *key = key_of(getpid(), "strangers");
    struct scene scene = {.world = strangers->world, .seconds = 20.0};
    if (rank < strangers->world) {
        /* Rank 0 listens at once; the others come when the strangers are there. */
        while (rank > 0 && !atomic_load(&strangers->are_there)) {
            ranks_sleep_us(1000);
        }
        meet_and_check(key, rank, &scene);
        atomic_fetch_add(&strangers->have_met, 1);
        return;
    }
    struct cp_wire target = {.rank = 1, .world = strangers->world, .page_fd = -1};
    struct cp_hello hello = {.bytes = {9}};
    int fds[200];
    target.hash = cp_wire_hash_of(key, strangers->world);
    target.window_fd = memfd_create("stranger", MFD_CLOEXEC);
    for (int i = 0; i < strangers->count; i++) {
        fds[i] = connect_stranger(&target, 0);
        say(fds[i], &target,
            strangers->only_silent ? SILENT : (enum garbage)(i % GARBAGE_COUNT),
            &hello);
    }
    atomic_store(&strangers->are_there, 1);
    for (int waited = 0;
         waited < 5000 && atomic_load(&strangers->have_met) < strangers->world;
         waited++) {
        ranks_sleep_us(1000);
    }
    for (int i = 0; i < strangers->count; i++) {
        (void)close(fds[i]);
    }
    (void)close(target.window_fd);
}

static void check_strangers(bool only_silent)
{
    struct strangers strangers = {.world = 3, .count = 120, .only_silent = only_silent};
    int before = count_fds();
    int64_t start = cp_now_ns();
    ranks_as_threads(4, body_among_strangers, &strangers);
    CHECK(cp_now_ns() - start <
          1900000000); /* nobody waited for a silent one's time to pass */
    CHECK_EQ_I64(count_fds(), before);
}

TEST(strangers_disturb_nobody)
{
    check_strangers(false);
}

TEST(more_silent_strangers_than_there_are_places)
{
    check_strangers(true);
}

/* Another user knows the name and says everything right, as rank 1. */
static void body_other_user(int rank, void *arg)
{
    struct cp_wire *target = arg;
    struct cp_hello hello = {.bytes = {9}};
    (void)rank;
    if (CHECK(setresuid(65534, 65534, 65534) == 0)) {
        int fd = connect_stranger(target, 0);
        (void)cp_wire_send(target, fd, 0, &hello);
        ranks_sleep_us(300000);
    }
}

static void body_admits_own_user(int rank, void *arg)
{
    struct scene scene = {.world = 2, .seconds = 20.0};
    (void)arg;
    ranks_sleep_us(rank * 150000);
    meet_and_check(key_of(getpid(), "users"), rank, &scene);
}

TEST(other_users_are_not_let_in)
{
    if (geteuid() != 0) {
        TEST_SKIP("only root can play another user");
    }
    struct cp_wire target = {.rank = 1,
                             .world = 2,
                             .page_fd = -1,
                             .hash = cp_wire_hash_of(key_of(getpid(), "users"), 2)};
    target.window_fd = memfd_create("stranger", MFD_CLOEXEC);
    pid_t other = ranks_start_process(0, body_other_user, &target);
    ranks_as_threads(2, body_admits_own_user, NULL);
    CHECK_EQ_I64(ranks_end_of_process(other), 0);
    (void)close(target.window_fd);
}

/* Death. A rank's child lives on; its parent's end must show all the same. */
struct death {
    _Atomic int has_met, child, checked;
    int how; /* 0: killed, 1: exit, 2: close */
};

static void body_mortal(int rank, void *arg)
{
    struct death *death = arg;
    struct cp_meeting *meeting = NULL;
    struct cp_meet_args args = args_of(key_of(getppid(), "death"), rank, 3, 20.0);
    if (!CHECK_EQ_I64(cp_meet(&args, &meeting), CP_OK)) {
        return;
    }
    if (rank == 1) {
        pid_t child = fork();
        if (child == 0) {
            /* The child holds no connection, no page, no window. */
            bool is_clean = meeting->page == NULL && meeting->self.window_fd == -1 &&
                            meeting->peer[0].fd == -1 && cp_meeting_is_dead(meeting, 0);
            cp_meeting_close(&meeting);
            (void)fcntl(args.window_fd, F_GETFD);
            atomic_store(&death->child,
                         is_clean && errno == EBADF ? (int)getpid() : -1);
            for (;;) {
                ranks_sleep_us(1000000);
            }
        }
        while (atomic_load(&death->child) == 0) {
            ranks_sleep_us(1000);
        }
        CHECK(!cp_meeting_is_dead(meeting, 0));
        while (atomic_load(&death->has_met) < 2) {
            ranks_sleep_us(1000);
        }
        if (death->how == 2) {
            cp_meeting_close(&meeting);
        }
        while (death->how != 1) { /* until it is killed */
            ranks_sleep_us(1000000);
        }
        return;
    }
    CHECK(!cp_meeting_is_dead(meeting, 1));
    CHECK(!cp_meeting_is_dead(meeting, rank));
    atomic_fetch_add(&death->has_met, 1);
    int64_t start = cp_now_ns();
    while (!cp_meeting_is_dead(meeting, 1) && cp_now_ns() - start < 3000000000) {
        ranks_sleep_us(200);
    }
    CHECK(cp_meeting_is_dead(meeting, 1));
    CHECK(
        cp_now_ns() - start <
        500000000); /* the killer needs a moment; seeing it takes no more than 0.1 s */
    CHECK(!cp_meeting_is_dead(meeting, 2 - rank));
    /* What the dead one had is still there. */
    CHECK_EQ_I64(cp_meeting_hello(meeting, 1)->bytes[0], 2);
    CHECK(fcntl(cp_meeting_window_fd(meeting, 1), F_GETFD) >= 0);
    atomic_fetch_add(&death->checked, 1);
    while (atomic_load(&death->checked) < 2) {
        ranks_sleep_us(1000);
    }
    cp_meeting_close(&meeting);
}

TEST(death_is_seen_even_with_a_living_child)
{
    struct death *death = mmap(NULL, sizeof *death, PROT_READ | PROT_WRITE,
                               MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    REQUIRE(death != MAP_FAILED);
    for (int how = 0; how < 3; how++) {
        pid_t pids[3];
        TEST_CONTEXT("end %d", how);
        *death = (struct death){.how = how};
        for (int rank = 0; rank < 3; rank++) {
            pids[rank] = ranks_start_process(rank, body_mortal, death);
        }
        if (how == 0) {
            while (atomic_load(&death->has_met) < 2 ||
                   atomic_load(&death->child) == 0) {
                ranks_sleep_us(1000);
            }
            (void)kill(pids[1], SIGKILL);
        }
        CHECK_EQ_I64(ranks_end_of_process(pids[0]), 0);
        CHECK_EQ_I64(ranks_end_of_process(pids[2]), 0);
        CHECK(atomic_load(&death->child) > 0);
        if (atomic_load(&death->child) > 0) {
            (void)kill(atomic_load(&death->child), SIGKILL);
        }
        (void)kill(pids[1], SIGKILL);
        (void)ranks_end_of_process(pids[1]);
    }
    (void)munmap(death, sizeof *death);
}

/* Rank 2 dies in its meeting, before rank 1 has come; started anew, it meets them all.
 */
static void body_restart(int rank, void *arg)
{
    _Atomic int *first_is_gone = arg;
    struct scene scene = {.world = 3, .seconds = 20.0};
    const char *key = key_of(getppid(), "restart");
    if (rank == 3) { /* the first rank 2 */
        struct cp_meeting *meeting = NULL;
        struct cp_meet_args args = args_of(key, 2, 3, 0.15);
        CHECK_EQ_I64(cp_meet(&args, &meeting), CP_ERR_TIMEOUT);
        CHECK_STR_HAS(cp_last_error()->text, "rank 1 of 3 did not appear");
        atomic_store(first_is_gone, 1);
        return;
    }
    while (rank != 0 && !atomic_load(first_is_gone)) {
        ranks_sleep_us(1000);
    }
    /* Once rank 1 comes, rank 0 is complete and lets nobody in any more. */
    ranks_sleep_us(rank == 1 ? 300000 : 0);
    meet_and_check(key, rank, &scene);
}

TEST(a_rank_started_anew_is_let_in)
{
    _Atomic int *first_is_gone =
        mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    REQUIRE(first_is_gone != MAP_FAILED);
    ranks_as_processes(4, body_restart, first_is_gone);
    (void)munmap(first_is_gone, 4096);
}

/* A rank that is ready first closes at once; the others' meeting still succeeds. */
static void body_hasty(int rank, void *arg)
{
    struct cp_meeting *meeting = NULL;
    (void)arg;
    ranks_sleep_us(rank * 10000);
    struct cp_meet_args args = args_of(key_of(getppid(), "hasty"), rank, 4, 5.0);
    if (!CHECK_EQ_I64(cp_meet(&args, &meeting), CP_OK)) {
        printf("%s\n", cp_last_error()->text);
        return;
    }
    for (int peer = 0; peer < 4; peer++) {
        CHECK_EQ_I64(cp_meeting_hello(meeting, peer)->bytes[0], peer + 1);
    }
    cp_meeting_close(&meeting);
}

TEST(who_closes_early_leaves_the_others_meeting_whole)
{
    for (int i = 0; i < 10; i++) {
        ranks_as_processes(4, body_hasty, NULL);
    }
}

/* While one thread forks again and again, meetings in another leave no descriptor in
 * the children. */
static void body_forks(int rank, void *arg)
{
    _Atomic int *stop = arg;
    if (rank == 2) {
        while (!atomic_load(stop)) {
            pid_t child = fork();
            if (child == 0) {
                for (struct cp_fork_entry *entry = fork_entries; entry != NULL;
                     entry = entry->next) {
                    const struct cp_meeting *meeting = (struct cp_meeting *)entry;
                    bool is_clean = meeting->listener == -1 && meeting->page == NULL &&
                                    meeting->guests.count == 0;
                    for (int peer = 0; peer < meeting->self.world; peer++) {
                        is_clean = is_clean && meeting->peer[peer].fd == -1 &&
                                   meeting->peer[peer].window_fd == -1;
                    }
                    if (!is_clean) {
                        _exit(1);
                    }
                }
                for (int fd = 3; fd < 64; fd++) {
                    struct sockaddr_un name;
                    socklen_t size = sizeof name;
                    if (getsockname(fd, (struct sockaddr *)&name, &size) == 0 &&
                        name.sun_family == AF_UNIX) {
                        _exit(2);
                    }
                }
                _exit(0);
            }
            CHECK_EQ_I64(ranks_end_of_process(child), 0);
        }
        return;
    }
    struct scene scene = {.world = 2, .seconds = 20.0};
    for (int i = 0; i < 40; i++) {
        char name[32];
        (void)snprintf(name, sizeof name, "fork %d", i);
        meet_and_check(key_of(getpid(), name), rank, &scene);
    }
    atomic_store(stop, 1);
}

TEST(forks_in_the_middle_of_meetings)
{
    _Atomic int stop = 0;
    if (TEST_UNDER_TSAN) {
        TEST_SKIP("ThreadSanitizer cannot follow a fork of several threads");
    }
    for (int fd = 3; fd < 64; fd++) {
        struct sockaddr_un name;
        socklen_t size = sizeof name;
        if (getsockname(fd, (struct sockaddr *)&name, &size) == 0) {
            TEST_SKIP("the test was started with sockets open");
        }
    }
    ranks_as_threads(3, body_forks, &stop);
}
