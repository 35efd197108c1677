/* The communicator of one rank. */
#include "base/mem.h"
#include "comm/comm_self.h"
#include "test.h"

TEST(a_window_grows_in_place)
{
    struct cp_comm *comm = NULL;
    REQUIRE(cp_comm_self_create(&comm) == CP_OK);
    const struct cp_comm_ops *ops = comm->ops;
    CHECK(cp_comm_has_windows(comm));
    CHECK_EQ_I64(comm->world, 1);
    CHECK_EQ_I64(ops->reserve(comm, 100), CP_OK);
    unsigned char *bytes = ops->window(comm, 0);
    memset(bytes, 1, 100);
    CHECK_EQ_I64(ops->reserve(comm, (size_t)8 << 20), CP_OK);
    CHECK(ops->window(comm, 0) == bytes);
    memset(bytes + 100, 3, ((size_t)8 << 20) - 100);
    CHECK_EQ_I64(bytes[0], 1);
    CHECK_EQ_I64(bytes[99], 1);
    /* Less than there is changes nothing. */
    CHECK_EQ_I64(ops->reserve(comm, 1), CP_OK);
    CHECK_EQ_I64(bytes[((size_t)8 << 20) - 1], 3);
    ops->close(&comm);
    CHECK(comm == NULL);
    ops->close(&comm);
    CHECK_EQ_I64(cp_mem_stats().live_blocks, 0);
}

TEST(a_window_that_cannot_grow)
{
    struct cp_comm *comm = NULL;
    REQUIRE(cp_comm_self_create(&comm) == CP_OK);
    CHECK_EQ_I64(comm->ops->reserve(comm, SIZE_MAX), CP_ERR_NO_MEMORY);
    CHECK_EQ_I64(comm->ops->reserve(comm, (size_t)1 << 46), CP_ERR_NO_MEMORY);
    CHECK_STR_HAS(cp_last_error()->text, "cannot hold 70368744177664 bytes");
    CHECK_EQ_I64(comm->ops->reserve(comm, 64), CP_OK);
    comm->ops->close(&comm);
}

static enum cp_code ask(struct cp_comm *comm, int signal, uint64_t value)
{
    const struct cp_comm_wait wait = {.signal = signal, .value = value};
    return comm->ops->reached(comm, &wait, 1, NULL);
}

TEST(counters_and_waits)
{
    struct cp_comm *comm = NULL;
    REQUIRE(cp_comm_self_create(&comm) == CP_OK);
    const struct cp_comm_ops *ops = comm->ops;
    struct cp_comm_wait waits[2] = {{.signal = 1, .value = 4},
                                    {.signal = 2, .value = 9}};
    CHECK_EQ_I64(ask(comm, 1, 1), CP_AGAIN);
    CHECK_EQ_I64(ops->publish(comm, 1, 4, NULL), CP_OK);
    CHECK_EQ_I64(ask(comm, 1, 4), CP_OK);
    CHECK_EQ_I64(ask(comm, 1, 5), CP_AGAIN);
    CHECK_EQ_I64(ask(comm, 2, 4), CP_AGAIN);
    CHECK_EQ_I64(ops->reached(comm, waits, 1, NULL), CP_OK);
    CHECK_EQ_I64(ops->reached(comm, waits, 2, NULL), CP_AGAIN);
    CHECK_EQ_I64(ops->wait(comm, waits, 2, "attention", cp_deadline_in(0.0)), CP_OK);
    CHECK_EQ_I64(ops->wait(comm, waits + 1, 1, "attention", cp_deadline_in(0.0)),
                 CP_ERR_INTERNAL);
    CHECK_STR_HAS(cp_last_error()->text, "waits in attention");
    ops->close(&comm);
}

TEST(poison_stays)
{
    struct cp_comm *comm = NULL;
    REQUIRE(cp_comm_self_create(&comm) == CP_OK);
    struct cp_status first = {.code = CP_ERR_DEVICE, .text = "first"},
                     second = {.code = CP_ERR_COMM, .text = "second"};
    struct cp_comm_wait wait = {.signal = 0, .value = 1};
    comm->ops->poison(comm, &first);
    comm->ops->poison(comm, &second);
    CHECK_EQ_I64(comm->ops->wait(comm, &wait, 1, "x", cp_deadline_in(0.0)),
                 CP_ERR_DEVICE);
    CHECK_EQ_STR(cp_last_error()->text, "first");
    CHECK_EQ_I64(comm->ops->publish(comm, 0, 1, NULL), CP_OK);
    CHECK_EQ_I64(comm->ops->wait(comm, &wait, 1, "x", cp_deadline_in(0.0)), CP_OK);
    comm->ops->close(&comm);
}

TEST(failed_allocation_leaves_nothing)
{
    struct cp_comm *comm = NULL;
    cp_mem_fail_after(0);
    CHECK_EQ_I64(cp_comm_self_create(&comm), CP_ERR_NO_MEMORY);
    cp_mem_fail_after(-1);
    CHECK(comm == NULL);
    CHECK_EQ_I64(cp_mem_stats().live_blocks, 0);
}
