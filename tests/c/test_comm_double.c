/* The test double itself: order, lateness, exact bytes, errors; ranks as threads and
 * polled in one thread. */
#include "all_to_all.h"
#include "comm_double.h"
#include "ranks.h"
#include "test.h"

struct rig {
    struct double_hub *hub;
    struct cp_bell bell;
    struct cp_poison poison;
    struct cp_watch watch[RANKS_MOST];
    struct cp_comm *comm[RANKS_MOST];
    int world, rounds;
};

static bool rig_init(struct rig *rig, int world, int most_ticks)
{
    *rig = (struct rig){.world = world,
                        .hub = double_hub_create(world, test_seed, most_ticks)};
    bool is_good = CHECK(rig->hub != NULL);
    for (int rank = 0; rank < world && is_good; rank++) {
        rig->watch[rank] = (struct cp_watch){.bell = &rig->bell,
                                             .poison = &rig->poison,
                                             .rank = rank,
                                             .world = world,
                                             .is_dead = double_hub_is_dead,
                                             .peers = rig->hub};
        is_good = CHECK_EQ_I64(
            cp_comm_double_create(rig->hub, &rig->watch[rank], &rig->comm[rank]),
            CP_OK);
    }
    return is_good;
}

static void rig_fini(struct rig *rig)
{
    for (int rank = 0; rank < rig->world; rank++) {
        if (rig->comm[rank] != NULL) {
            rig->comm[rank]->ops->close(&rig->comm[rank]);
        }
    }
    CHECK_EQ_I64(double_hub_pending(rig->hub), 0);
    double_hub_destroy(&rig->hub);
    CHECK(rig->hub == NULL);
}

static enum cp_code post_one(struct rig *rig, int rank, int peer, bool is_send,
                             void *data, size_t bytes, uint64_t *ticket)
{
    struct cp_xfer xfer = {
        .data = data, .bytes = bytes, .peer = peer, .is_send = is_send};
    return rig->comm[rank]->ops->post(rig->comm[rank], &xfer, 1, NULL, ticket);
}

TEST(only_sends_and_receives)
{
    struct rig rig;
    REQUIRE(rig_init(&rig, 1, 0));
    CHECK(!cp_comm_has_windows(rig.comm[0]));
    CHECK(rig.comm[0]->ops->publish == NULL && rig.comm[0]->ops->reached == NULL &&
          rig.comm[0]->ops->reserve == NULL);
    rig_fini(&rig);
}

TEST(nothing_comes_before_both_have_posted_and_ticks_have_passed)
{
    struct rig rig;
    REQUIRE(rig_init(&rig, 2, 40));
    int immediately = 0;
    for (int i = 0; i < 200; i++) {
        uint64_t send = 0, receive = 0;
        int from = 1000 + i, to = 0, polls = 0;
        CHECK_EQ_I64(post_one(&rig, 1, 0, false, &to, sizeof to, &receive), CP_OK);
        CHECK(to != 0); /* garbage, not what was there */
        CHECK(to != from);
        for (int k = 0; k < 50; k++) {
            CHECK_EQ_I64(rig.comm[1]->ops->test(rig.comm[1], receive), CP_AGAIN);
        }
        CHECK_EQ_I64(post_one(&rig, 0, 1, true, &from, sizeof from, &send), CP_OK);
        while (rig.comm[1]->ops->test(rig.comm[1], receive) == CP_AGAIN) {
            CHECK(to != from);
            polls++;
        }
        immediately += polls == 0;
        CHECK(polls <= 41);
        CHECK_EQ_I64(to, from);
        CHECK_EQ_I64(rig.comm[0]->ops->test(rig.comm[0], send), CP_OK);
    }
    CHECK(immediately < 50);
    rig_fini(&rig);
}

TEST(the_senders_memory_is_read_late)
{
    struct rig rig;
    uint64_t send = 0, receive = 0;
    int from = 1, to = 0;
    REQUIRE(rig_init(&rig, 2, 0));
    CHECK_EQ_I64(post_one(&rig, 0, 1, true, &from, sizeof from, &send), CP_OK);
    CHECK_EQ_I64(post_one(&rig, 1, 0, false, &to, sizeof to, &receive), CP_OK);
    from = 2; /* a schedule that does this is wrong, and must see it */
    while (rig.comm[1]->ops->test(rig.comm[1], receive) == CP_AGAIN) {
    }
    CHECK_EQ_I64(to, 2);
    rig_fini(&rig);
}

static void body_all_to_all(int rank, void *arg)
{
    struct rig *rig = arg;
    all_to_all(rig->comm[rank], rig->rounds);
}

TEST(all_to_all_between_threads)
{
    for (int world = 1; world <= 5; world += 2) {
        struct rig rig;
        REQUIRE(rig_init(&rig, world, 10));
        rig.rounds = 150;
        ranks_as_threads(world, body_all_to_all, &rig);
        rig_fini(&rig);
    }
}

TEST(different_sizes_are_an_error_on_all_ranks)
{
    struct rig rig;
    uint64_t ticket = 0, other = 0;
    char data[16] = {0}, more[16];
    REQUIRE(rig_init(&rig, 2, 0));
    CHECK_EQ_I64(post_one(&rig, 0, 1, true, data, 12, &ticket), CP_OK);
    CHECK_EQ_I64(post_one(&rig, 1, 0, false, more, 16, &other), CP_ERR_INTERNAL);
    CHECK_STR_HAS(cp_last_error()->text,
                  "rank 0 sends 12 bytes to rank 1, which expects 16");
    CHECK_EQ_I64(rig.comm[0]->ops->test(rig.comm[0], ticket), CP_ERR_INTERNAL);
    CHECK_STR_HAS(cp_last_error()->text, "which expects 16");
    rig_fini(&rig);
}

TEST(deadline_death_and_poison)
{
    struct rig rig;
    uint64_t ticket = 0;
    char data[8] = {0};
    REQUIRE(rig_init(&rig, 3, 0));
    CHECK_EQ_I64(post_one(&rig, 0, 2, true, data, 8, &ticket), CP_OK);
    struct cp_comm_wait wait = {.is_ticket = true, .value = ticket};
    CHECK_EQ_I64(
        rig.comm[0]->ops->wait(rig.comm[0], &wait, 1, "step 2", cp_deadline_in(0.02)),
        CP_ERR_TIMEOUT);
    CHECK_STR_HAS(cp_last_error()->text, "rank 2 did not come to step 2");
    CHECK_EQ_I64(double_hub_pending(rig.hub), 0); /* nobody reads `data` any more */
    CHECK_EQ_I64(post_one(&rig, 1, 0, true, data, 8, &ticket), CP_ERR_TIMEOUT);
    rig_fini(&rig);

    REQUIRE(rig_init(&rig, 3, 0));
    CHECK_EQ_I64(post_one(&rig, 0, 2, false, data, 8, &ticket), CP_OK);
    rig.comm[2]->ops->close(&rig.comm[2]);
    CHECK_EQ_I64(
        rig.comm[0]->ops->wait(rig.comm[0], &wait, 1, "step 2", cp_deadline_in(5.0)),
        CP_ERR_COMM);
    CHECK_STR_HAS(cp_last_error()->text, "rank 2 is gone");
    rig_fini(&rig);

    REQUIRE(rig_init(&rig, 2, 0));
    struct cp_status reason = {.code = CP_ERR_DEVICE, .text = "rank 1 lost its device"};
    CHECK_EQ_I64(post_one(&rig, 0, 1, false, data, 8, &ticket), CP_OK);
    rig.comm[1]->ops->poison(rig.comm[1], &reason);
    CHECK_EQ_I64(rig.comm[0]->ops->test(rig.comm[0], ticket), CP_ERR_DEVICE);
    CHECK_EQ_STR(cp_last_error()->text, "rank 1 lost its device");
    struct cp_comm_wait counter = {.peer = 1, .value = 1};
    CHECK_EQ_I64(
        rig.comm[0]->ops->wait(rig.comm[0], &counter, 1, "x", cp_deadline_in(0.0)),
        CP_ERR_INTERNAL);
    rig_fini(&rig);
}

/* Equal seeds, equal runs, where one thread polls. */
TEST(polling_is_repeatable)
{
    int polls[2][50];
    for (int run = 0; run < 2; run++) {
        struct rig rig;
        REQUIRE(rig_init(&rig, 2, 100));
        for (int i = 0; i < 50; i++) {
            uint64_t send = 0, receive = 0;
            int from = i, to = 0;
            CHECK_EQ_I64(post_one(&rig, 0, 1, true, &from, sizeof from, &send), CP_OK);
            CHECK_EQ_I64(post_one(&rig, 1, 0, false, &to, sizeof to, &receive), CP_OK);
            polls[run][i] = 0;
            while (rig.comm[1]->ops->test(rig.comm[1], receive) == CP_AGAIN) {
                polls[run][i]++;
            }
        }
        rig_fini(&rig);
    }
    CHECK_EQ_BYTES(polls[0], polls[1], sizeof polls[0]);
}
