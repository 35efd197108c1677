/* The cost walk: times that are computed by hand, by speeds of which most are endless, and
 * what holds of all times over the grid. */
#include <math.h>

#include "base/mem.h"
#include "grid.h"
#include "schedule/cost.h"
#include "test.h"

/* K and V: 32 bytes a row; state: 40. Panels are whole multiples of 64 bytes. */
static const struct cp_format format = {
    .id = 1, .k = {1, 32}, .v = {1, 32}, .state = {1, 40}};

enum { HEADS = 4, KV_HEADS = 2, DIM = 8 };

/* A device that takes no time for anything. */
static const struct cp_speeds endless = {
    .attend_ops = HUGE_VAL,
    .grad_ops = HUGE_VAL,
    .processors = 1.0,
    .tile_rows = 1.0,
    .memory_bytes = HUGE_VAL,
    .link_bytes = HUGE_VAL,
};

/* The schedules of one call. */
struct world {
    struct cp_plan *plan;
    struct cp_schedule *schedules[GRID_MAX_WORLD];
    struct cp_cost costs[GRID_MAX_WORLD];
    int size;
};

static void open_plan(struct world *w, const struct cp_record *records, int size,
                      const struct cp_format *of, enum cp_transport transport)
{
    *w = (struct world){.size = size};
    CHECK_EQ_I64(cp_plan_create(records, size, of, &w->plan), CP_OK);
    for (int rank = 0; rank < size; rank++) {
        CHECK_EQ_I64(cp_schedule_create(w->plan, rank, transport, &w->schedules[rank]),
                     CP_OK);
    }
}

/* Attention of 4 rows on each rank, and of so many keys. */
static void open_world(struct world *w, int ring, int ulysses, bool is_causal,
                       enum cp_transport transport, const int64_t *keys)
{
    struct cp_record records[3];
    memset(records, 0, sizeof records);
    for (int rank = 0; rank < ring * ulysses; rank++) {
        struct cp_call *call = &records[rank].call;
        call->op = CP_OP_ATTENTION;
        call->dtype = CP_DTYPE_FLOAT32;
        call->batch = 1;
        call->heads = HEADS;
        call->kv_heads = KV_HEADS;
        call->head_dim = DIM;
        call->value_dim = DIM;
        call->variant = CP_ANYTHING;
        call->is_causal = is_causal;
        call->ring_degree = ring;
        call->ulysses_degree = ulysses;
        call->rotate = CP_ROTATE_ALLTOALL;
        records[rank].sizes[CP_SIZE_Q_ROWS] = 4;
        records[rank].sizes[CP_SIZE_KV_ROWS] = keys[rank];
    }
    open_plan(w, records, ring * ulysses, &format, transport);
}

static void open_pair(struct world *w, int ring, bool is_causal,
                      enum cp_transport transport, int64_t keys_0, int64_t keys_1)
{
    open_world(w, ring, 2 / ring, is_causal, transport,
               (const int64_t[]){keys_0, keys_1});
}

static void world_close(struct world *w)
{
    for (int rank = 0; rank < w->size; rank++) {
        cp_schedule_destroy(&w->schedules[rank]);
    }
    cp_plan_destroy(&w->plan);
}

static enum cp_code walk(struct world *w, const struct cp_speeds *speeds)
{
    const struct cp_schedule *all[GRID_MAX_WORLD];
    for (int rank = 0; rank < w->size; rank++) {
        all[rank] = w->schedules[rank];
    }
    return cp_cost_walk(all, w->size, speeds, w->costs);
}

static bool is_near(double got, double want)
{
    return fabs(got - want) <= 1e-9 * (1.0 + fabs(want));
}

/* Seconds by kind. */
struct want {
    double compute, copies, transfer, wait, host;
};

static void check_cost(const struct world *w, int rank, struct want seconds)
{
    const double want[CP_COST_KINDS] = {[CP_COST_COMPUTE] = seconds.compute,
                                        [CP_COST_COPIES] = seconds.copies,
                                        [CP_COST_TRANSFER] = seconds.transfer,
                                        [CP_COST_WAIT] = seconds.wait,
                                        [CP_COST_HOST] = seconds.host};
    double total = 0.0;
    for (int kind = 0; kind < CP_COST_KINDS; kind++) {
        if (!is_near(w->costs[rank].of_s[kind], want[kind])) {
            (void)test_fail(__FILE__, __LINE__, "rank %d: %g s of %s, not %g", rank,
                            w->costs[rank].of_s[kind],
                            cp_cost_name((enum cp_cost_kind)kind), want[kind]);
        }
        total += want[kind];
    }
    CHECK(is_near(w->costs[rank].total_s, total));
}

static double slowest(struct world *w, const struct cp_speeds *speeds)
{
    double most = 0.0;
    CHECK_EQ_I64(walk(w, speeds), CP_OK);
    for (int rank = 0; rank < w->size; rank++) {
        most = fmax(most, w->costs[rank].total_s);
    }
    return most;
}

/* Two blocks of 4 x 4 pairs and 4 heads: 2 * 16 * 4 * (8 + 8) operations each. */
enum { BLOCK_OPS = 2048 };
/* Packed keys and values of 4 rows and 2 heads: 2 * 2 * 4 * 32. */
enum { BLOCK_BYTES = 512 };

TEST(compute_is_operations_in_whole_waves)
{
    struct world w;
    struct cp_speeds speeds = endless;
    open_pair(&w, 2, false, CP_TWO_SIDED, 4, 4);
    speeds.attend_ops = 1.0;
    CHECK_EQ_I64(walk(&w, &speeds), CP_OK);
    check_cost(&w, 0, (struct want){.compute = 2 * BLOCK_OPS});
    /* A tile for each head, and three at a time: two waves, half empty the second. */
    speeds.tile_rows = 4.0;
    speeds.processors = 3.0;
    CHECK_EQ_I64(walk(&w, &speeds), CP_OK);
    check_cost(&w, 1, (struct want){.compute = 2 * BLOCK_OPS * 1.5});
    world_close(&w);
}

TEST(hidden_pairs_cost_nothing)
{
    struct world w;
    struct cp_speeds speeds = endless;
    speeds.attend_ops = 2.0 * HEADS * 2 * DIM;
    open_pair(&w, 2, true, CP_PULL, 4, 4);
    CHECK_EQ_I64(walk(&w, &speeds), CP_OK);
    check_cost(&w, 0, (struct want){.compute = 10});
    check_cost(&w, 1, (struct want){.compute = 16 + 10});
    world_close(&w);
    /* Keys 6 to 8 are the second rank's, whose rows 4 to 7 see 0, 0, 1, 2 of them. */
    open_pair(&w, 2, true, CP_PULL, 6, 3);
    CHECK_EQ_I64(walk(&w, &speeds), CP_OK);
    check_cost(&w, 0, (struct want){.compute = 10});
    check_cost(&w, 1, (struct want){.compute = 5 + 6 + 6 + 6 + 3});
    world_close(&w);
}

/* An answer of 512 bytes is written and read, a state of 4 panels of 192 bytes carried from one
 * block to the next, and nothing else: 512 bytes of output. */
TEST(what_is_merged_is_carried_between_blocks_alone)
{
    struct world w;
    struct cp_speeds speeds = endless;
    speeds.is_merged = true;
    speeds.memory_bytes = 1.0;
    open_pair(&w, 2, false, CP_TWO_SIDED, 4, 4);
    CHECK_EQ_I64(walk(&w, &speeds), CP_OK);
    CHECK(is_near(w.costs[0].of_s[CP_COST_COMPUTE], 2 * 2 * 512 + 2 * 768 + 512));
    world_close(&w);
    open_pair(&w, 1, false, CP_TWO_SIDED, 4, 4);
    CHECK_EQ_I64(walk(&w, &speeds), CP_OK);
    CHECK(is_near(w.costs[0].of_s[CP_COST_COMPUTE], 2 * 512 + 512));
    world_close(&w);
}

TEST(a_ring_hides_its_transfer_behind_the_block_before)
{
    struct world w;
    struct cp_speeds speeds = endless;
    open_pair(&w, 2, false, CP_TWO_SIDED, 4, 4);
    speeds.link_bytes = 1.0;
    speeds.link_s = 3.0;
    CHECK_EQ_I64(walk(&w, &speeds), CP_OK);
    check_cost(&w, 0, (struct want){.transfer = BLOCK_BYTES + 3});
    speeds.attend_ops = 2.0 * BLOCK_OPS / BLOCK_BYTES; /* half a transfer long */
    CHECK_EQ_I64(walk(&w, &speeds), CP_OK);
    check_cost(&w, 1,
               (struct want){.transfer = BLOCK_BYTES + 3, .compute = BLOCK_BYTES / 2});
    speeds.attend_ops = BLOCK_OPS / 600.0; /* longer than the transfer */
    CHECK_EQ_I64(walk(&w, &speeds), CP_OK);
    check_cost(&w, 1, (struct want){.compute = 1200});
    world_close(&w);
}

TEST(ranks_on_one_bridge_share_it)
{
    struct world w;
    struct cp_speeds speeds = endless;
    open_pair(&w, 2, false, CP_TWO_SIDED, 4, 4);
    speeds.link_bytes = 2.0;
    speeds.bridge_bytes = 2.0;
    CHECK(is_near(slowest(&w, &speeds), BLOCK_BYTES));
    speeds.bridge_bytes = 0.0;
    CHECK(is_near(slowest(&w, &speeds), BLOCK_BYTES / 2));
    world_close(&w);
}

/* Packing reads and writes 2 * 512 bytes for 4 keys, and three times as many for 12. */
enum { PACK_BYTES = 1024 };

TEST(who_needs_keys_waits_for_the_rank_that_is_later)
{
    const enum cp_transport transports[] = {CP_PULL, CP_TWO_SIDED};
    for (int i = 0; i < 2; i++) {
        struct world w;
        struct cp_speeds speeds = endless;
        open_pair(&w, 2, false, transports[i], 4, 12);
        speeds.memory_bytes = 1.0;
        CHECK_EQ_I64(walk(&w, &speeds), CP_OK);
        check_cost(&w, 0, (struct want){.copies = PACK_BYTES, .wait = 2 * PACK_BYTES});
        check_cost(&w, 1, (struct want){.copies = 3 * PACK_BYTES});
        world_close(&w);
    }
}

TEST(what_is_read_in_a_window_takes_the_link)
{
    struct world w;
    struct cp_speeds speeds = endless;
    open_pair(&w, 2, false, CP_PULL, 4, 4);
    speeds.link_bytes = 1.0;
    speeds.link_s = 3.0;
    CHECK_EQ_I64(walk(&w, &speeds), CP_OK);
    check_cost(&w, 1, (struct want){.wait = 3, .transfer = 3 + BLOCK_BYTES});
    speeds.is_uncached = true;
    speeds.tile_rows = 2.0; /* of 4 rows */
    CHECK_EQ_I64(walk(&w, &speeds), CP_OK);
    check_cost(&w, 1, (struct want){.wait = 3, .transfer = 3 + 2 * BLOCK_BYTES});
    world_close(&w);
}

/* Rank 2 has ten times the keys and is late. By then rank 0 has read the block of rank 1, and
 * nobody waits for that again. */
TEST(what_is_there_first_takes_the_bridge_first)
{
    struct world w;
    struct cp_speeds speeds = endless;
    open_world(&w, 3, 1, false, CP_PULL, (const int64_t[]){4, 4, 40});
    speeds.memory_bytes = 1.0;
    speeds.bridge_bytes = 1.0;
    double later = 2 * 10 * BLOCK_BYTES + 3 * BLOCK_BYTES;
    CHECK(is_near(slowest(&w, &speeds), 10 * PACK_BYTES + later));
    world_close(&w);
}

/* Two members of a group, 4 heads each, in so many chunks. */
static double time_of_chunks(enum cp_transport transport, int64_t chunks,
                             const struct cp_speeds *speeds)
{
    struct cp_record records[2];
    struct world w;
    memset(records, 0, sizeof records);
    for (int rank = 0; rank < 2; rank++) {
        struct cp_call *call = &records[rank].call;
        call->op = CP_OP_ATTENTION;
        call->dtype = CP_DTYPE_FLOAT32;
        call->batch = 1;
        call->heads = 2 * HEADS;
        call->kv_heads = 2 * HEADS;
        call->head_dim = DIM;
        call->value_dim = DIM;
        call->ring_degree = 1;
        call->ulysses_degree = 2;
        records[rank].sizes[CP_SIZE_Q_ROWS] = 4;
        records[rank].sizes[CP_SIZE_KV_ROWS] = 4;
        records[rank].sizes[CP_SIZE_HEAD_CHUNKS] = chunks;
    }
    open_plan(&w, records, 2, &format, transport);
    double seconds = slowest(&w, speeds);
    world_close(&w);
    return seconds;
}

/* Links have two ways: what rank 0 writes takes its way out, and rank 1's way in, as what rank
 * 1 reads there does. */
TEST(what_is_written_in_a_window_takes_the_link)
{
    struct cp_speeds speeds = endless;
    speeds.link_bytes = 1.0;
    /* Both bring 3 tensors of 512 bytes at once, then each reads one. */
    CHECK(is_near(time_of_chunks(CP_PUSH, 1, &speeds), 1536 + 512));
    speeds.bridge_bytes = 1.0;
    CHECK(is_near(time_of_chunks(CP_PUSH, 1, &speeds), 2 * (1536 + 512)));
}

/* A tensor's part for the other member has 512 bytes, and attention takes 2048 s. */
TEST(chunks_of_heads_move_while_others_are_met)
{
    struct cp_speeds speeds = endless;
    speeds.link_bytes = 1.0;
    speeds.attend_ops = 4.0;
    /* q, k, v; attention; out */
    CHECK(is_near(time_of_chunks(CP_TWO_SIDED, 1, &speeds), 1536 + 2048 + 512));
    /* half of q, k, v; attention, at whose half one half of out goes; the other half */
    CHECK(is_near(time_of_chunks(CP_TWO_SIDED, 2, &speeds), 768 + 2048 + 256));
    CHECK(is_near(time_of_chunks(CP_TWO_SIDED, 4, &speeds), 384 + 2048 + 128));
    /* The same, but that both ends do not wait for each other to begin. */
    CHECK(is_near(time_of_chunks(CP_PUSH, 1, &speeds), 1536 + 2048 + 512));
    CHECK(is_near(time_of_chunks(CP_PUSH, 2, &speeds), 768 + 2048 + 256));
    /* k and v are read while they are met */
    CHECK(is_near(time_of_chunks(CP_PULL, 1, &speeds), 512 + 2048 + 512));
    /* behind the rows of all chunks, in whose place the results are */
    CHECK(is_near(time_of_chunks(CP_PULL, 2, &speeds), 512 + 2048 + 256));
    CHECK(is_near(time_of_chunks(CP_PULL, 4, &speeds), 512 + 2048 + 128));
}

TEST(nothing_starts_before_the_host_has_enqueued_it)
{
    struct world w;
    struct cp_speeds speeds = endless;
    /* Two packs, a group of messages, two blocks. */
    open_pair(&w, 2, false, CP_TWO_SIDED, 4, 4);
    speeds.enqueue_s = 1.0;
    CHECK_EQ_I64(walk(&w, &speeds), CP_OK);
    check_cost(&w, 0, (struct want){.host = 5});
    speeds.launch_s =
        10.0; /* all but the messages, one after the other from the first on */
    CHECK_EQ_I64(walk(&w, &speeds), CP_OK);
    CHECK(w.costs[0].total_s >= 4 * 10.0 && w.costs[0].total_s <= 5 + 4 * 10.0);
    world_close(&w);
}

TEST(a_dependency_that_is_missing_changes_the_time)
{
    struct world w;
    struct cp_speeds speeds = endless;
    open_pair(&w, 2, false, CP_TWO_SIDED, 4, 4);
    speeds.link_bytes = 1.0;
    speeds.attend_ops = 2.0 * BLOCK_OPS / BLOCK_BYTES;
    double right = slowest(&w, &speeds);
    for (int rank = 0; rank < 2; rank++) {
        for (int32_t at = 0; at < w.schedules[rank]->step_count; at++) {
            struct cp_step *step = &w.schedules[rank]->steps[at];
            if (step->op == CP_STEP_ATTEND) {
                step->after[CP_LANE_IN] = 0;
            }
        }
    }
    CHECK(is_near(slowest(&w, &speeds), right - BLOCK_BYTES / 2));
    world_close(&w);
}

TEST(ranks_that_wait_for_each_other_are_an_error)
{
    struct world w;
    open_pair(&w, 2, false, CP_TWO_SIDED, 4, 4);
    int32_t steps = w.schedules[1]->step_count;
    w.schedules[1]->step_count = 0;
    CHECK_EQ_I64(walk(&w, &endless), CP_ERR_INTERNAL);
    CHECK_STR_HAS(cp_last_error()->text, "wait for each other");
    w.schedules[1]->step_count = steps;
    world_close(&w);
}

TEST(every_failed_allocation_leaves_nothing)
{
    struct world w;
    open_pair(&w, 2, false, CP_TWO_SIDED, 4, 4);
    int64_t live = cp_mem_stats().live_blocks;
    for (int64_t count = 0;; count++) {
        cp_mem_fail_after(count);
        enum cp_code code = walk(&w, &endless);
        cp_mem_fail_after(-1);
        CHECK_EQ_I64(cp_mem_stats().live_blocks, live);
        if (code == CP_OK) {
            CHECK_EQ_I64(count, 4);
            break;
        }
        CHECK_EQ_I64(code, CP_ERR_NO_MEMORY);
    }
    world_close(&w);
}

/* Slower in any one thing is never faster: two ranks, so that nothing can overtake. */
TEST(a_slower_machine_is_not_faster)
{
    const struct cp_speeds speeds = {
        .attend_ops = 10.0,
        .grad_ops = 10.0,
        .processors = 2.0,
        .tile_rows = 2.0,
        .memory_bytes = 7.0,
        .launch_s = 1.0,
        .enqueue_s = 1.0,
        .link_bytes = 3.0,
        .link_s = 1.0,
        .bridge_bytes = 5.0,
    };
    for (int i = 0; i < 4; i++) {
        struct world w;
        open_pair(&w, i / 2 + 1, false, i % 2 == 0 ? CP_PULL : CP_TWO_SIDED, 4, 7);
        double before = slowest(&w, &speeds);
        struct cp_speeds slower[7];
        for (int j = 0; j < 7; j++) {
            slower[j] = speeds;
        }
        slower[0].attend_ops /= 2.0;
        slower[1].memory_bytes /= 2.0;
        slower[2].launch_s *= 2.0;
        slower[3].enqueue_s *= 2.0;
        slower[4].link_bytes /= 2.0;
        slower[5].link_s *= 2.0;
        slower[6].bridge_bytes /= 2.0;
        for (int j = 0; j < 7; j++) {
            CHECK(slowest(&w, &slower[j]) >= before);
        }
        world_close(&w);
    }
}

/* Whatever the schedules: the parts are the whole, nobody is done before his own work is,
 * and a machine that is slower in all takes so much longer. */
TEST(grid)
{
    struct cp_speeds speeds = {
        .attend_ops = 100.0,
        .grad_ops = 100.0,
        .processors = 4.0,
        .tile_rows = 2.0,
        .is_merged = true,
        .memory_bytes = 50.0,
        .launch_s = 0.5,
        .enqueue_s = 0.25,
        .link_bytes = 20.0,
        .link_s = 0.5,
    };
    struct cp_speeds half = speeds;
    half.attend_ops /= 2.0;
    half.grad_ops /= 2.0;
    half.memory_bytes /= 2.0;
    half.link_bytes /= 2.0;
    half.launch_s *= 2.0;
    half.enqueue_s *= 2.0;
    half.link_s *= 2.0;
    for (int64_t number = 0; number < grid_count(); number += 7) {
        struct grid_case grid;
        struct world w;
        char text[GRID_TEXT];
        grid_make(number, test_seed, &grid);
        grid_print(&grid, text);
        TEST_CONTEXT("%.230s", text);
        struct cp_format of = grid_format(&grid.records[0].call);
        open_plan(&w, grid.records, grid.world, &of, grid.transport);
        double once = slowest(&w, &speeds);
        for (int rank = 0; rank < w.size; rank++) {
            double sum = 0.0;
            for (int kind = 0; kind < CP_COST_KINDS; kind++) {
                CHECK(w.costs[rank].of_s[kind] >= 0.0);
                sum += w.costs[rank].of_s[kind];
            }
            CHECK(is_near(w.costs[rank].total_s, sum));
        }
        CHECK(is_near(slowest(&w, &half), 2.0 * once));
        world_close(&w);
    }
}
