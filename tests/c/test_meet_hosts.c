/* The meeting over TCP: ranks as threads, late and in every order, among strangers, with
 * ranks that are missing or cannot be reached; and forks. */
#include <netinet/tcp.h>

#include "control/meet_hosts.c"
#include "ranks.h"

struct scene {
    const char *name, *host;
    int world;
    char port[8];
    int listener;
    int order[RANKS_MOST]; /* rank -> how many delays it comes late */
    int delay_us;
    double seconds;
    unsigned absent; /* bits of ranks that do not come */
    char text[RANKS_MOST][CP_STATUS_TEXT];
    enum cp_code code[RANKS_MOST];
    int64_t took_ns[RANKS_MOST];
    struct cp_hosts *hosts[RANKS_MOST];
};

/* Rank 0's listener, at a port that was free. */
static bool scene_listen(struct scene *scene)
{
    struct cp_root root = {.host = scene->host, .port = "0"};
    union cp_address name;
    socklen_t size = sizeof name;
    if (!CHECK_EQ_I64(cp_address_parse(root.host, root.port, &name), CP_OK)) {
        return false;
    }
    scene->listener = socket(name.any.sa_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (bind(scene->listener, &name.any, cp_address_bytes(&name)) != 0 ||
        listen(scene->listener, 100) != 0 ||
        getsockname(scene->listener, &name.any, &size) != 0) {
        (void)close(scene->listener);
        return false;
    }
    (void)snprintf(scene->port, sizeof scene->port, "%d",
                   ntohs(*cp_address_port(&name)));
    return true;
}

static const char *key_of(const struct scene *scene)
{
    static _Thread_local char key[200];
    (void)snprintf(key, sizeof key, "test_meet_hosts %d %llu %s", (int)getpid(),
                   (unsigned long long)test_seed, scene->name);
    return key;
}

static void body_meet(int rank, void *arg)
{
    struct scene *scene = arg;
    struct cp_root root = {.host = scene->host,
                           .port = scene->port,
                           .listener = rank == 0 ? scene->listener : -1};
    struct cp_meet_args args = {
        .key = key_of(scene), .rank = rank, .world = scene->world, .window_fd = -1};
    if ((scene->absent >> rank & 1) != 0) {
        return;
    }
    memset(args.hello.bytes, rank + 1, sizeof args.hello.bytes);
    ranks_sleep_us((int64_t)scene->order[rank] * scene->delay_us);
    int64_t start_ns = cp_now_ns();
    args.deadline = cp_deadline_in(scene->seconds);
    scene->code[rank] = cp_meet_hosts(&args, &root, &scene->hosts[rank]);
    scene->took_ns[rank] = cp_now_ns() - start_ns;
    if (scene->code[rank] != CP_OK) {
        memcpy(scene->text[rank], cp_last_error()->text, CP_STATUS_TEXT);
    }
}

/* Each line leads to whom it should, and nothing was left on it. */
static void check_lines(const struct scene *scene)
{
    for (int i = 0; i < scene->world * scene->world * CP_LINES; i++) {
        int line = i % CP_LINES, rank = i / CP_LINES / scene->world,
            peer = i / CP_LINES % scene->world;
        int fd = cp_hosts_line(scene->hosts[rank], (enum cp_line)line)[peer];
        unsigned char out[2] = {(unsigned char)rank, (unsigned char)line}, in[2] = {0};
        TEST_CONTEXT("rank %d to %d, line %d", rank, peer, line);
        CHECK_EQ_I64(cp_hosts_hello(scene->hosts[rank], peer)->bytes[0], peer + 1);
        CHECK_EQ_I64(
            cp_hosts_hello(scene->hosts[rank], peer)->bytes[CP_HELLO_BYTES - 1],
            peer + 1);
        if (rank == peer) {
            CHECK_EQ_I64(fd, -1);
            continue;
        }
        CHECK((fcntl(fd, F_GETFD) & FD_CLOEXEC) != 0);
        CHECK((fcntl(fd, F_GETFL) & O_NONBLOCK) != 0);
        int idle_s = 0, no_delay = 0;
        socklen_t size = sizeof idle_s;
        CHECK_EQ_I64(getsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &idle_s, &size), 0);
        CHECK_EQ_I64(getsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &no_delay, &size), 0);
        CHECK_EQ_I64(idle_s, 30);
        CHECK(no_delay != 0);
        CHECK_EQ_I64(send(fd, out, sizeof out, 0), sizeof out);
        int other = cp_hosts_line(scene->hosts[peer], (enum cp_line)line)[rank];
        struct pollfd poller = {.fd = other, .events = POLLIN};
        CHECK_EQ_I64(poll(&poller, 1, 5000), 1);
        CHECK_EQ_I64(recv(other, in, sizeof in, 0), sizeof in);
        CHECK_EQ_BYTES(in, out, sizeof in);
        CHECK_EQ_I64(recv(other, in, sizeof in, 0), -1);
    }
}

static int count_fds(void)
{
    int count = 0;
    for (int fd = 0; fd < 512; fd++) {
        count += fcntl(fd, F_GETFD) >= 0;
    }
    return count;
}

static void close_scene(struct scene *scene)
{
    (void)close(scene->listener);
    for (int rank = 0; rank < scene->world; rank++) {
        cp_hosts_close(&scene->hosts[rank]);
        CHECK(scene->hosts[rank] == NULL);
    }
    CHECK_EQ_I64(cp_mem_stats().live_blocks, 0);
}

static void check_scene(struct scene *scene)
{
    bool all_met = true;
    for (int rank = 0; rank < scene->world; rank++) {
        TEST_CONTEXT("rank %d: %.200s", rank, scene->text[rank]);
        all_met = CHECK_EQ_I64(scene->code[rank], CP_OK) && all_met;
    }
    if (all_met) {
        check_lines(scene);
    }
    close_scene(scene);
}

TEST(ranks_1_to_6)
{
    int before = count_fds();
    for (int world = 1; world <= 6; world++) {
        struct scene scene = {
            .name = "1 to 6", .host = "127.0.0.1", .world = world, .seconds = 20.0};
        REQUIRE(scene_listen(&scene));
        ranks_as_threads(world, body_meet, &scene);
        check_scene(&scene);
    }
    CHECK_EQ_I64(count_fds(), before);
}

TEST(late_in_every_order)
{
    static const int orders[6][3] = {{0, 1, 2}, {0, 2, 1}, {1, 0, 2},
                                     {1, 2, 0}, {2, 0, 1}, {2, 1, 0}};
    for (int i = 0; i < 6; i++) {
        struct scene scene = {.name = "orders",
                              .host = "127.0.0.1",
                              .world = 3,
                              .delay_us = 30000,
                              .seconds = 20.0};
        memcpy(scene.order, orders[i], sizeof orders[i]);
        REQUIRE(scene_listen(&scene));
        ranks_as_threads(3, body_meet, &scene);
        check_scene(&scene);
    }
}

TEST(over_ipv6)
{
    struct scene scene = {.name = "ipv6", .host = "::1", .world = 3, .seconds = 20.0};
    if (!scene_listen(&scene)) {
        TEST_SKIP("no IPv6 here");
    }
    ranks_as_threads(3, body_meet, &scene);
    check_scene(&scene);
}

TEST(timeout_names_who_did_not_appear)
{
    int before = count_fds();
    struct scene scene = {.name = "absent",
                          .host = "127.0.0.1",
                          .world = 5,
                          .seconds = 0.3,
                          .absent = 1 << 1 | 1 << 3};
    REQUIRE(scene_listen(&scene));
    ranks_as_threads(5, body_meet, &scene);
    for (int rank = 0; rank < 5; rank += 2) {
        CHECK_EQ_I64(scene.code[rank], CP_ERR_TIMEOUT);
        CHECK_STR_HAS(scene.text[rank], "ranks 1, 3 of 5 did not appear to rank");
        CHECK_STR_HAS(scene.text[rank], "within 0.3 s. Check that");
        CHECK_STR_HAS(scene.text[rank], "reach 127.0.0.1 port ");
        CHECK_STR_HAS(scene.text[rank], scene.port);
        CHECK(scene.took_ns[rank] < 1500000000);
    }
    close_scene(&scene);
    CHECK_EQ_I64(count_fds(), before);
}

/* With nobody at the address, and with somebody who is not rank 0. */
TEST(timeout_without_rank_0)
{
    for (int is_silent = 0; is_silent < 2; is_silent++) {
        struct scene scene = {.name = "no root",
                              .host = "127.0.0.1",
                              .world = 3,
                              .seconds = 0.3,
                              .absent = 1};
        REQUIRE(scene_listen(&scene));
        if (!is_silent) {
            (void)close(scene.listener);
        }
        ranks_as_threads(3, body_meet, &scene);
        for (int rank = 1; rank < 3; rank++) {
            CHECK_EQ_I64(scene.code[rank], CP_ERR_TIMEOUT);
            CHECK_STR_HAS(scene.text[rank], "rank 0 of 3 did not appear to rank");
        }
        close_scene(&scene);
    }
}

static int connect_stranger(const struct scene *scene)
{
    struct cp_root root = {.host = scene->host, .port = scene->port};
    union cp_address name;
    CHECK_EQ_I64(cp_address_parse(root.host, root.port, &name), CP_OK);
    int fd = socket(name.any.sa_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
    CHECK_EQ_I64(connect(fd, &name.any, cp_address_bytes(&name)), 0);
    return fd;
}

/* The rank `rank`, as far as it says so. */
static struct gathering impostor(const struct scene *scene, int rank)
{
    return (struct gathering){
        .self = {.hash = cp_wire_hash_of(key_of(scene), scene->world),
                 .rank = rank,
                 .world = scene->world}};
}

enum garbage {
    SILENT,
    BYTES,
    TOO_SHORT,
    CLOSES,
    WRONG_HASH,
    WRONG_TARGET,
    OWN_RANK,
    NO_RANK,
    NO_LINE,
    GARBAGE_COUNT
};

static void say(int fd, const struct scene *scene, enum garbage garbage)
{
    static const struct cp_hello hello;
    struct gathering as = impostor(scene, 1);
    char bytes[4000];
    memset(bytes, 7, sizeof bytes);
    switch (garbage) {
    case SILENT:
    case GARBAGE_COUNT:
        break;
    case BYTES:
        (void)cp_tcp_send(fd, bytes, sizeof bytes);
        break;
    case TOO_SHORT:
        (void)cp_tcp_send(fd, bytes, 100);
        break;
    case CLOSES:
        (void)cp_tcp_send(fd, bytes, 100);
        (void)shutdown(fd, SHUT_WR);
        break;
    case WRONG_HASH:
        as.self.hash.word[1]++;
        (void)greet(&as, fd, 0, CP_LINE_CONTROL, &hello);
        break;
    case WRONG_TARGET:
        (void)greet(&as, fd, 1, CP_LINE_CONTROL, &hello);
        break;
    case OWN_RANK:
        as.self.rank = 0;
        (void)greet(&as, fd, 0, CP_LINE_CONTROL, &hello);
        break;
    case NO_RANK:
        as.self.rank = scene->world;
        (void)greet(&as, fd, 0, CP_LINE_CONTROL, &hello);
        break;
    case NO_LINE:
        (void)greet(&as, fd, 0, CP_LINES, &hello);
        break;
    }
}

static void check_among_strangers(int count, bool only_silent)
{
    struct scene scene = {
        .name = "strangers", .host = "127.0.0.1", .world = 3, .seconds = 20.0};
    int fds[150];
    REQUIRE(scene_listen(&scene));
    for (int i = 0; i < count; i++) {
        fds[i] = connect_stranger(&scene);
        say(fds[i], &scene, only_silent ? SILENT : (enum garbage)(i % GARBAGE_COUNT));
    }
    ranks_as_threads(3, body_meet, &scene);
    for (int rank = 0; rank < 3; rank++) {
        CHECK(scene.took_ns[rank] < 5000000000);
    }
    check_scene(&scene);
    for (int i = 0; i < count; i++) {
        (void)close(fds[i]);
    }
}

TEST(strangers_are_dropped_and_disturb_nobody)
{
    check_among_strangers(3 * GARBAGE_COUNT, false);
}

TEST(more_silent_strangers_than_places)
{
    check_among_strangers(90, true); /* rank 0's queue holds 100 */
}

/* Cost in time, that is: waiting is sleeping, whatever strangers have begun to say. */
TEST(strangers_cost_no_time)
{
    struct scene scene = {
        .name = "idle", .host = "127.0.0.1", .world = 2, .seconds = 0.5, .absent = 2};
    struct timespec before, after;
    REQUIRE(scene_listen(&scene));
    int fd = connect_stranger(&scene);
    say(fd, &scene, TOO_SHORT);
    (void)clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &before);
    ranks_as_threads(2, body_meet, &scene);
    (void)clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &after);
    CHECK_EQ_I64(scene.code[0], CP_ERR_TIMEOUT);
    CHECK((double)(after.tv_sec - before.tv_sec) +
              1e-9 * (double)(after.tv_nsec - before.tv_nsec) <
          0.2);
    (void)close(fd);
    close_scene(&scene);
}

/* The last thread is no rank: it says that it is rank 1, which has come already. */
static void body_twice(int rank, void *arg)
{
    static const struct cp_hello hello;
    struct scene *scene = arg;
    if (rank < scene->world) {
        body_meet(rank, scene);
        return;
    }
    ranks_sleep_us(150000);
    struct gathering as = impostor(scene, 1);
    int fd = connect_stranger(scene);
    struct pollfd poller = {.fd = fd, .events = POLLIN};
    char byte;
    CHECK(greet(&as, fd, 0, CP_LINE_CONTROL, &hello));
    CHECK_EQ_I64(poll(&poller, 1, 1000), 1);
    CHECK_EQ_I64(recv(fd, &byte, 1, 0), 0);
    (void)close(fd);
}

TEST(who_comes_second_is_dropped)
{
    struct scene scene = {.name = "twice",
                          .host = "127.0.0.1",
                          .world = 3,
                          .order = {0, 0, 1},
                          .delay_us = 400000,
                          .seconds = 20.0};
    REQUIRE(scene_listen(&scene));
    ranks_as_threads(4, body_twice, &scene);
    check_scene(&scene);
}

/* Rank 1 has come, and where it says it is nobody listens. */
TEST(a_rank_that_cannot_be_reached_is_named)
{
    static const struct cp_hello hello;
    struct scene scene = {.name = "unreachable",
                          .host = "127.0.0.1",
                          .world = 3,
                          .seconds = 0.5,
                          .absent = 1 << 1};
    REQUIRE(scene_listen(&scene));
    struct gathering as = impostor(&scene, 1);
    int fd[CP_LINES];
    as.port = htons(1);
    for (int line = 0; line < CP_LINES; line++) {
        fd[line] = connect_stranger(&scene);
        CHECK(greet(&as, fd[line], 0, (enum cp_line)line, &hello));
    }
    ranks_as_threads(3, body_meet, &scene);
    CHECK_EQ_I64(scene.code[0], CP_OK);
    CHECK_EQ_I64(scene.code[2], CP_ERR_TIMEOUT);
    CHECK_STR_HAS(scene.text[2],
                  "rank 2 of 3 and rank 1 at 127.0.0.1 port 1 have come to the "
                  "meeting, but could not connect to each other within 0.5 s");
    for (int line = 0; line < CP_LINES; line++) {
        (void)close(fd[line]);
    }
    close_scene(&scene);
}

/* A rank on rank 0's host may come over the loopback: for the others it is where rank 0
 * is. */
TEST(a_loopback_address_stands_for_rank_0s_host)
{
    int ends[2];
    REQUIRE(socketpair(AF_UNIX, SOCK_STREAM, 0, ends) == 0);
    struct cp_root root = {.host = "10.1.2.3", .port = "500"};
    struct cp_root near = {.host = "127.0.0.1", .port = "77"};
    struct cp_root far = {.host = "10.1.2.4", .port = "78"};
    int control[4] = {ends[0], -1, -1, -1};
    struct cp_hosts hosts = {.fd = {control, NULL}};
    struct peer peer[4] = {{.is_met = {true, false}}};
    struct gathering g = {
        .self = {.rank = 3, .world = 4}, .hosts = &hosts, .peer = peer};
    struct notice notices[2] = {{.rank = 1}, {.rank = 2}};
    CHECK_EQ_I64(cp_address_parse(root.host, root.port, &g.root), CP_OK);
    CHECK_EQ_I64(cp_address_parse(near.host, near.port, &notices[0].where), CP_OK);
    CHECK_EQ_I64(cp_address_parse(far.host, far.port, &notices[1].where), CP_OK);
    CHECK_EQ_I64(send(ends[1], notices, sizeof notices, 0), sizeof notices);
    hear_notices(&g);
    CHECK_EQ_I64(g.notice_count, 2);
    CHECK_EQ_U64(ntohl(peer[1].where.v4.sin_addr.s_addr), 0x0a010203);
    CHECK_EQ_I64(ntohs(peer[1].where.v4.sin_port), 77);
    CHECK_EQ_U64(ntohl(peer[2].where.v4.sin_addr.s_addr), 0x0a010204);
    CHECK_EQ_I64(ntohs(peer[2].where.v4.sin_port), 78);
    /* Nobody can make a rank write outside its list. */
    notices[0].rank = 4;
    CHECK_EQ_I64(send(ends[1], notices, sizeof notices[0], 0), sizeof notices[0]);
    hear_notices(&g);
    CHECK_EQ_I64(g.notice_count, 2);
    (void)close(ends[0]);
    (void)close(ends[1]);
}

TEST(what_cannot_be)
{
    struct scene scene = {.name = "wrong", .host = "127.0.0.1", .world = 2};
    struct cp_hosts *hosts = NULL;
    int before = count_fds();
    struct cp_meet_args args = {.key = "x", .rank = 2, .world = 2};
    struct cp_root root = {.host = "127.0.0.1", .port = "1", .listener = -1};
    CHECK_EQ_I64(cp_meet_hosts(&args, &root, &hosts), CP_ERR_VALUE);
    args.rank = 0; /* without a listener */
    CHECK_EQ_I64(cp_meet_hosts(&args, &root, &hosts), CP_ERR_VALUE);
    REQUIRE(scene_listen(&scene));
    args.rank = 1; /* with one */
    root.listener = scene.listener;
    CHECK_EQ_I64(cp_meet_hosts(&args, &root, &hosts), CP_ERR_VALUE);
    root = (struct cp_root){.host = "rank0.example", .port = "1", .listener = -1};
    CHECK_EQ_I64(cp_meet_hosts(&args, &root, &hosts), CP_ERR_VALUE);
    CHECK_STR_HAS(cp_last_error()->text,
                  "rank0.example port 1 is no address of a host");
    CHECK(hosts == NULL);
    (void)close(scene.listener);
    CHECK_EQ_I64(count_fds(), before);
}

static enum cp_code interrupt_at_third(void *arg)
{
    return ++*(int *)arg < 3 ? CP_OK : CP_ERR_INTERRUPTED;
}

TEST(interruption)
{
    int asked = 0;
    struct scene scene = {.name = "interrupt", .host = "127.0.0.1", .world = 2};
    struct cp_hosts *hosts = NULL;
    REQUIRE(scene_listen(&scene));
    struct cp_root root = {
        .host = scene.host, .port = scene.port, .listener = scene.listener};
    struct cp_meet_args args = {.key = key_of(&scene),
                                .world = 2,
                                .deadline = cp_deadline_in(20.0),
                                .interrupt = interrupt_at_third,
                                .interrupt_arg = &asked};
    int64_t start_ns = cp_now_ns();
    CHECK_EQ_I64(cp_meet_hosts(&args, &root, &hosts), CP_ERR_INTERRUPTED);
    CHECK(cp_now_ns() - start_ns < 400000000);
    (void)close(scene.listener);
}

TEST(failed_allocations_leave_nothing)
{
    int before = count_fds();
    for (int k = 0; k < 2; k++) {
        struct scene scene = {.name = "memory", .host = "127.0.0.1", .world = 1};
        REQUIRE(scene_listen(&scene));
        cp_mem_fail_after(k);
        body_meet(0, &scene);
        cp_mem_fail_after(-1);
        CHECK_EQ_I64(scene.code[0], CP_ERR_NO_MEMORY);
        close_scene(&scene);
        CHECK_EQ_I64(count_fds(), before);
    }
}

/* A child that lives on has none of its parent's connections: the end shows at once. */
TEST(death_is_seen_even_with_a_living_child)
{
    if (TEST_UNDER_TSAN) {
        TEST_SKIP("ThreadSanitizer cannot follow a fork of several threads");
    }
    struct scene scene = {
        .name = "child", .host = "127.0.0.1", .world = 2, .seconds = 20.0};
    int gate[2];
    REQUIRE(scene_listen(&scene) && pipe(gate) == 0);
    ranks_as_threads(2, body_meet, &scene);
    REQUIRE(scene.code[0] == CP_OK && scene.code[1] == CP_OK);
    (void)fflush(stdout);
    pid_t pid = fork();
    if (pid == 0) {
        char byte;
        (void)close(gate[1]);
        (void)alarm(20);
        _exit(read(gate[0], &byte, 1) == 0 ? 0 : 1);
    }
    cp_hosts_close(&scene.hosts[1]);
    for (int line = 0; line < CP_LINES; line++) {
        struct pollfd poller = {
            .fd = cp_hosts_line(scene.hosts[0], (enum cp_line)line)[1],
            .events = POLLIN};
        char byte;
        CHECK_EQ_I64(poll(&poller, 1, 1000), 1);
        CHECK_EQ_I64(recv(poller.fd, &byte, 1, 0), 0);
    }
    (void)close(gate[1]);
    CHECK_EQ_I64(ranks_end_of_process(pid), 0);
    (void)close(gate[0]);
    close_scene(&scene);
}
