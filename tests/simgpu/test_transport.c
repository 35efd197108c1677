/* The choice of a transport: by facts, the same on all ranks. */
#include <cuda_runtime.h>
#include <string.h>

#include "simgpu.h"
#include "test.h"
#include "transport.h"

enum { WORLD = 3 };

/* Three processes of one host, whose GPUs reach each other. */
static void make_facts(struct cp_transport_facts facts[WORLD])
{
    memset(facts, 0, WORLD * sizeof *facts);
    for (int rank = 0; rank < WORLD; rank++) {
        struct cp_transport_facts *own = &facts[rank];
        own->gpu[0] = (char)(10 + rank);
        own->ordinal = rank;
        own->pid = (uint64_t)(100 + rank);
        own->ipc_space = 7;
        own->pid_space = 8;
        (void)snprintf(own->boot, sizeof own->boot, "this boot");
        (void)snprintf(own->name, sizeof own->name, "a GPU");
        for (int other = 0; other < WORLD; other++) {
            if (other != rank) {
                own->reached[own->reached_count][0] = (char)(10 + other);
                own->reached_count += 1;
            }
        }
    }
}

static void check_choice(const struct cp_transport_facts *facts, bool have_boards,
                         enum cp_transport_kind want)
{
    enum cp_transport_kind got = CP_TRANSPORT_AUTO;
    CHECK_EQ_I64(cp_transport_choose(facts, WORLD, have_boards, &got), CP_OK);
    CHECK_EQ_I64(got, want);
}

/* NCCL it is, and who asks for windows hears why not. */
static void check_barred(struct cp_transport_facts *facts, bool have_boards,
                         const char *why)
{
    enum cp_transport_kind got = CP_TRANSPORT_AUTO;
    check_choice(facts, have_boards, CP_TRANSPORT_NCCL);
    for (int rank = 0; rank < WORLD; rank++) {
        facts[rank].wish = CP_TRANSPORT_IPC;
    }
    CHECK_EQ_I64(cp_transport_choose(facts, WORLD, have_boards, &got), CP_ERR_VALUE);
    CHECK_STR_HAS(cp_last_error()->text, "CP_ATTN_TRANSPORT is ipc");
    CHECK_STR_HAS(cp_last_error()->text, why);
    CHECK_EQ_I64(got, CP_TRANSPORT_AUTO);
}

TEST(windows_where_all_reach_each_other)
{
    struct cp_transport_facts facts[WORLD];
    make_facts(facts);
    check_choice(facts, true, CP_TRANSPORT_IPC);
}

TEST(windows_on_one_gpu)
{
    struct cp_transport_facts facts[WORLD];
    make_facts(facts);
    for (int rank = 0; rank < WORLD; rank++) {
        facts[rank].gpu[0] = 10;
        facts[rank].reached_count = 0;
    }
    check_choice(facts, true, CP_TRANSPORT_IPC);
}

TEST(nccl_is_taken_where_it_is_asked_for)
{
    struct cp_transport_facts facts[WORLD];
    make_facts(facts);
    for (int rank = 0; rank < WORLD; rank++) {
        facts[rank].wish = CP_TRANSPORT_NCCL;
    }
    check_choice(facts, true, CP_TRANSPORT_NCCL);
}

TEST(each_obstacle_is_named)
{
    struct cp_transport_facts facts[WORLD];
    make_facts(facts);
    facts[2].reached_count = 1; /* rank 0's alone */
    check_barred(facts, true,
                 "the GPU of rank 2 (cuda:2, a GPU) has no peer access to "
                 "that of rank 1");
    make_facts(facts);
    facts[1].boot[0] = 'x';
    check_barred(facts, true, "ranks 1 and 0 are on different hosts");
    make_facts(facts);
    facts[2].ipc_space = 9;
    check_barred(facts, true, "ranks 2 and 0 are on different hosts, or in containers");
    make_facts(facts);
    facts[2].pid_space = 9;
    check_barred(facts, true, "in containers");
    make_facts(facts);
    for (int rank = 0; rank < WORLD; rank++) {
        facts[rank].boot[0] = '\0'; /* nobody knows his host */
    }
    check_barred(facts, true, "ranks 1 and 0 are on different hosts");
    make_facts(facts);
    check_barred(facts, false, "met over the network");
    make_facts(facts);
    facts[2].pid = facts[0].pid;
    facts[2].gpu[0] = facts[0].gpu[0];
    check_barred(facts, true, "ranks 2 and 0 are threads of one process on one GPU");
}

TEST(too_many_ranks_have_no_windows)
{
    static struct cp_transport_facts facts[40];
    enum cp_transport_kind got = CP_TRANSPORT_AUTO;
    for (int rank = 0; rank < 40; rank++) {
        facts[rank].boot[0] = 'b';
        facts[rank].pid = (uint64_t)rank;
    }
    CHECK_EQ_I64(cp_transport_choose(facts, 32, true, &got), CP_OK);
    CHECK_EQ_I64(got, CP_TRANSPORT_IPC);
    CHECK_EQ_I64(cp_transport_choose(facts, 33, true, &got), CP_OK);
    CHECK_EQ_I64(got, CP_TRANSPORT_NCCL);
    for (int rank = 0; rank < 40; rank++) {
        facts[rank].wish = CP_TRANSPORT_IPC;
    }
    CHECK_EQ_I64(cp_transport_choose(facts, 33, true, &got), CP_ERR_VALUE);
    CHECK_STR_HAS(cp_last_error()->text, "there are 33 ranks; at most 32");
}

TEST(different_wishes_are_an_error_of_all)
{
    struct cp_transport_facts facts[WORLD];
    enum cp_transport_kind got = CP_TRANSPORT_AUTO;
    make_facts(facts);
    facts[2].wish = CP_TRANSPORT_NCCL;
    CHECK_EQ_I64(cp_transport_choose(facts, WORLD, true, &got), CP_ERR_VALUE);
    CHECK_EQ_STR(
        cp_last_error()->text,
        "CP_ATTN_TRANSPORT must be the same on all ranks: it is auto on rank 0 "
        "and nccl on rank 2");
    CHECK_EQ_I64(cp_last_error()->rank, 2);
}

TEST(threads_of_one_process_are_local)
{
    struct cp_transport_facts facts[WORLD];
    make_facts(facts);
    CHECK(!cp_transport_is_local(&facts[0], &facts[1]));
    facts[1].pid = facts[0].pid;
    CHECK(cp_transport_is_local(&facts[0], &facts[1]));
    facts[1].pid_space = 9; /* the same number in another container */
    CHECK(!cp_transport_is_local(&facts[0], &facts[1]));
    facts[2].pid = facts[0].pid;
    facts[2].boot[0] = 'x';
    CHECK(!cp_transport_is_local(&facts[0], &facts[2]));
}

TEST(a_rank_tells_what_its_gpu_reaches)
{
    struct cp_transport_facts facts;
    simgpu_reset();
    simgpu_set_device_count(4);
    simgpu_set_peer_access(1, 3, false);
    CHECK_EQ_I64(cp_transport_describe(1, &facts), CP_OK);
    CHECK_EQ_I64(facts.ordinal, 1);
    CHECK_EQ_I64(facts.reached_count, 2);
    CHECK_EQ_I64(facts.gpu[0], 2);
    CHECK_EQ_I64(facts.reached[0][0], 1);
    CHECK_EQ_I64(facts.reached[1][0], 3);
    CHECK_EQ_STR(facts.name, "simulated GPU");
    CHECK(facts.boot[0] != '\0' && facts.pid != 0 && facts.ipc_space != 0);
    CHECK(cp_transport_is_local(&facts, &facts));
    simgpu_reset();
}

TEST(the_wish_is_a_word)
{
    static const char *const words[] = {"auto", "ipc", "nccl"};
    enum cp_transport_kind got = CP_TRANSPORT_NCCL;
    CHECK_EQ_I64(unsetenv("CP_ATTN_TRANSPORT"), 0);
    CHECK_EQ_I64(cp_transport_wish(&got), CP_OK);
    CHECK_EQ_I64(got, CP_TRANSPORT_AUTO);
    for (int i = 0; i < 3; i++) {
        CHECK_EQ_I64(setenv("CP_ATTN_TRANSPORT", words[i], 1), 0);
        CHECK_EQ_I64(cp_transport_wish(&got), CP_OK);
        CHECK_EQ_I64(got, i);
    }
    CHECK_EQ_I64(setenv("CP_ATTN_TRANSPORT", "pigeons", 1), 0);
    CHECK_EQ_I64(cp_transport_wish(&got), CP_ERR_VALUE);
    CHECK_STR_HAS(cp_last_error()->text, "CP_ATTN_TRANSPORT is \"pigeons\"");
    CHECK_EQ_I64(unsetenv("CP_ATTN_TRANSPORT"), 0);
}
