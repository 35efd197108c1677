/* What a warm call costs, exactly: nothing on the host's side but one exchange at the
 * gate, and so many operations, groups and bytes of the device as the schedules say.
 * docs/gpu-results.md shows the same counts for the shapes of models. */
#include "costs.h"

enum { ROWS = 8, HEADS = 8, DIM = 16, BYTES = 2 };

static struct costs_case even(enum cp_op op, int ring, int ulysses)
{
    struct costs_case what = {.op = op,
                              .ring = ring,
                              .ulysses = ulysses,
                              .dtype = CP_DTYPE_BFLOAT16,
                              .batch = 1,
                              .heads = HEADS,
                              .dim = DIM};
    for (int rank = 0; rank < ring * ulysses; rank++) {
        what.rows[rank] = ROWS;
    }
    return what;
}

/* On each of the ranks. */
static void check_host_is_free(const struct costs *costs, int world)
{
    for (int rank = 0; rank < world; rank++) {
        CHECK_EQ_U64(costs[rank].stats.host_waits, 0);
        CHECK_EQ_U64(costs[rank].stats.allocations, 0);
        CHECK_EQ_U64(costs[rank].stats.frees, 0);
        CHECK_EQ_I64(costs[rank].host_allocations, 0);
        CHECK_EQ_U64(costs[rank].exchanges, 1);
    }
}

/* What the device is asked beyond the operations of the kinds. */
static int64_t others(const struct costs *costs)
{
    int64_t all =
        (int64_t)(costs->stats.launches + costs->stats.copies + costs->stats.memsets);
    for (int kind = 0; kind < TALLY_KINDS; kind++) {
        all -= (int64_t)costs->tally.operations[kind];
    }
    return all;
}

/* The device's operations: those of the kinds are all there are. */
static void check_operations(const struct costs *costs,
                             const uint64_t want[TALLY_KINDS])
{
    for (int kind = 0; kind < TALLY_KINDS; kind++) {
        CHECK_EQ_U64(costs->tally.operations[kind], want[kind]);
    }
}

static const struct {
    int ring, ulysses;
} layouts[] = {{1, 1}, {2, 1}, {4, 1}, {8, 1}, {1, 2},
               {1, 4}, {1, 8}, {2, 2}, {2, 4}, {4, 2}};
enum { LAYOUTS = sizeof layouts / sizeof *layouts };

TEST(forward)
{
    struct costs costs[SCENE_MOST_RANKS];
    for (int i = 0; i < LAYOUTS; i++) {
        int ring = layouts[i].ring, ulysses = layouts[i].ulysses;
        TEST_CONTEXT("forward %d x %d", ring, ulysses);
        struct costs_case what = even(CP_OP_ATTENTION, ring, ulysses);
        costs_play(&what, costs);
        check_host_is_free(costs, ring * ulysses);
        bool has_group = ulysses > 1;
        int64_t tensor_bytes = ROWS * HEADS * DIM * BYTES;
        /* q, k, v and out inside the group, then k and v of the group around the ring. */
        int64_t sent =
            4 * tensor_bytes * (ulysses - 1) / ulysses + (ring - 1) * 2 * tensor_bytes;
        for (int rank = 0; rank < ring * ulysses; rank++) {
            check_operations(
                &costs[rank],
                (uint64_t[TALLY_KINDS]){
                    [TALLY_ATTEND] = (uint64_t)ring,
                    /* q, k, v for all members and out of all; k and v alone for the
                     * next rank of a ring. */
                    [TALLY_COPY] = has_group ? 2 : ring > 1,
                });
            CHECK_EQ_I64(others(&costs[rank]), 0);
            CHECK_EQ_U64(costs[rank].window_bytes, 0);
            CHECK_EQ_U64(costs[rank].stats.groups, ring - 1 + (has_group ? 2 : 0));
            CHECK_EQ_U64(costs[rank].stats.sent_bytes, sent);
        }
    }
}

TEST(backward)
{
    struct costs costs[SCENE_MOST_RANKS];
    for (int i = 0; i < LAYOUTS; i++) {
        int ring = layouts[i].ring, ulysses = layouts[i].ulysses;
        TEST_CONTEXT("backward %d x %d", ring, ulysses);
        struct costs_case what = even(CP_OP_ATTENTION_BACKWARD, ring, ulysses);
        costs_play(&what, costs);
        check_host_is_free(costs, ring * ulysses);
        bool has_group = ulysses > 1;
        int64_t tensor_bytes = ROWS * HEADS * DIM * BYTES;
        int64_t row_bytes = ROWS * HEADS * 4;
        /* q, k, v, dout, dq, dk, dv inside the group, and lse and delta in float32; then
         * around the ring k and v but for one hop, and the float32 sums of dk and dv. */
        int64_t sent = (7 * tensor_bytes + 2 * row_bytes) * (ulysses - 1) / ulysses +
                       (ring - 1) * 2 * tensor_bytes +
                       (ring > 1 ? ring * 4 * tensor_bytes : 0);
        for (int rank = 0; rank < ring * ulysses; rank++) {
            check_operations(
                &costs[rank],
                (uint64_t[TALLY_KINDS]){
                    [TALLY_DELTA] = 1,
                    [TALLY_GRAD] = (uint64_t)(2 * ring),
                    /* Six tensors for all members, 24 copies at once, and three of
                     * all; three sums are rounded. Without a group k and v, if they
                     * are sent at all, and the three. */
                    [TALLY_COPY] = has_group  ? (ulysses > 4 ? 4 : 3)
                                   : ring > 1 ? 2
                                              : 1,
                    [TALLY_ZERO] = 3,
                });
            CHECK_EQ_I64(others(&costs[rank]), 0);
            CHECK_EQ_U64(costs[rank].window_bytes, 0);
            CHECK_EQ_U64(costs[rank].stats.groups,
                         (ring > 1 ? 2 * ring - 1 : 0) + (has_group ? 2 : 0));
            CHECK_EQ_U64(costs[rank].stats.sent_bytes, sent);
        }
    }
}

/* Nothing is sent; signals are kernels: those that say something, those that wait. */
TEST(forward_by_windows)
{
    struct costs costs[SCENE_MOST_RANKS];
    for (int i = 0; i < LAYOUTS; i++) {
        int ring = layouts[i].ring, ulysses = layouts[i].ulysses;
        TEST_CONTEXT("forward %d x %d by windows", ring, ulysses);
        struct costs_case what = even(CP_OP_ATTENTION, ring, ulysses);
        what.by_windows = true;
        costs_play(&what, costs);
        check_host_is_free(costs, ring * ulysses);
        bool has_group = ulysses > 1;
        for (int rank = 0; rank < ring * ulysses; rank++) {
            check_operations(
                &costs[rank],
                (uint64_t[TALLY_KINDS]){
                    [TALLY_ATTEND] = (uint64_t)ring,
                    /* k and v of every other block come together. What others read
                     * is published at once; or a group's rows are put where they
                     * belong, and its results come, all in one launch. */
                    [TALLY_COPY] = (uint64_t)(ring - 1 + (has_group ? 2 : ring > 1)),
                });
            /* That the call has its turn, what there is, and that the call is over; then
             * each block. In a group that there are results, and twice all other members
             * at once; then the blocks are another signal. */
            int64_t signals = 3 + (ring - 1) + (has_group ? 3 + (ring > 1) : 0);
            CHECK_EQ_I64(others(&costs[rank]), signals);
            CHECK_EQ_U64(costs[rank].stats.groups, 0);
        }
    }
}

TEST(uneven_rows_cost_the_host_nothing_more)
{
    struct costs costs[SCENE_MOST_RANKS];
    for (int i = 0; i < 2 * LAYOUTS; i++) {
        for (int op = CP_OP_ATTENTION; op <= CP_OP_ATTENTION_BACKWARD; op++) {
            struct costs_case what = even((enum cp_op)op, layouts[i % LAYOUTS].ring,
                                          layouts[i % LAYOUTS].ulysses);
            TEST_CONTEXT("uneven %d x %d", what.ring, what.ulysses);
            what.by_windows = i >= LAYOUTS;
            what.variant = CP_ANYTHING;
            what.rows[0] += 3;
            what.heads += 1;
            costs_play(&what, costs);
            check_host_is_free(costs, what.ring * what.ulysses);
        }
    }
}

/* Counts do not depend on whether the work is done. */
TEST(dry_and_executed_calls_cost_the_same)
{
    struct costs dry[SCENE_MOST_RANKS], executed[SCENE_MOST_RANKS];
    for (int op = CP_OP_ATTENTION; op <= CP_OP_ATTENTION_BACKWARD; op++) {
        struct costs_case what = even((enum cp_op)op, 2, 2);
        what.variant = CP_ANYTHING;
        what.rows[3] += 1;
        costs_play(&what, dry);
        what.is_executed = true;
        costs_play(&what, executed);
        CHECK_EQ_BYTES(executed, dry, 4 * sizeof *dry);
    }
}
