/* The verifier: it passes what the writers write over the whole grid, and refuses what is broken in any
 * one place. */
#include "base/mem.h"
#include "comm/comm.h"
#include "grid.h"
#include "order.h"
#include "plan/agree.h"
#include "schedule/verify.h"
#include "schedule/verify_buffer.h"
#include "schedule/verify_step.h"
#include "test.h"

_Static_assert((int)CP_WALK_SIGNALS == (int)CP_SIGNALS, "walk.h repeats comm.h");

enum { MAX_CALLS = 3 };

/* The schedules of one case. */
struct set {
    struct cp_plan *plan;
    struct cp_schedule *schedules[GRID_MAX_WORLD];
    int world;
};

static void set_destroy(struct set *set)
{
    for (int rank = 0; rank < set->world; rank++) {
        cp_schedule_destroy(&set->schedules[rank]);
    }
    cp_plan_destroy(&set->plan);
}

static enum cp_code fill_set(struct set *set, const struct grid_case *grid)
{
    struct cp_format format = grid_format(&grid->records[0].call);
    CP_TRY(cp_plan_create(grid->records, grid->world, &format, &set->plan));
    for (int rank = 0; rank < grid->world; rank++) {
        CP_TRY(cp_schedule_create(set->plan, rank, grid->transport,
                                  &set->schedules[rank]));
    }
    return CP_OK;
}

/* False, and the test has failed, where the writers refuse the case. */
static bool set_create(struct set *set, const struct grid_case *grid)
{
    char text[GRID_TEXT];
    *set = (struct set){.world = grid->world};
    grid_print(grid, text);
    TEST_CONTEXT("%.230s", text);
    if (fill_set(set, grid) != CP_OK) {
        CHECK_EQ_STR(cp_last_error()->text, "no error");
        set_destroy(set);
        return false;
    }
    return true;
}

static enum cp_code verify(const struct set *const *calls, int count,
                           struct cp_verify_report *report)
{
    const struct cp_schedule *all[MAX_CALLS * GRID_MAX_WORLD];
    int world = calls[0]->world;
    for (int call = 0; call < count; call++) {
        for (int rank = 0; rank < world; rank++) {
            all[call * world + rank] = calls[call]->schedules[rank];
        }
    }
    return cp_schedule_verify(all, count, world, report);
}

static void check_verified(const struct set *const *calls, int count,
                           int64_t *schedules)
{
    struct cp_verify_report report = {0, 0, 0};
    enum cp_code code = verify(calls, count, &report);
    if (code != CP_OK) {
        CHECK_EQ_STR(cp_last_error()->text, "proved");
    } else {
        int64_t steps = 0;
        for (int call = 0; call < count; call++) {
            for (int rank = 0; rank < calls[call]->world; rank++) {
                steps += calls[call]->schedules[rank]->step_count;
            }
        }
        CHECK_EQ_I64(report.steps, steps);
        *schedules += (int64_t)count * calls[0]->world;
    }
}

TEST(grid)
{
    enum { ROUNDS = 2 };
    int64_t schedules = 0;
    int64_t cases = grid_count() * ROUNDS;
    for (int64_t number = 0; number < cases; number++) {
        struct grid_case first;
        struct grid_case second;
        struct set a;
        struct set b;
        grid_make(number, test_seed, &first);
        if (!set_create(&a, &first)) {
            continue;
        }
        /* Two calls in a row: the same, another, or another and the first once more. */
        const struct set *calls[MAX_CALLS] = {&a, &a, &a};
        if (number % 3 == 0) {
            check_verified(calls, 2, &schedules);
            set_destroy(&a);
            continue;
        }
        grid_make_like(first.world, first.transport, number, test_seed, &second);
        if (set_create(&b, &second)) {
            calls[1] = &b;
            check_verified(calls, number % 3 == 1 ? 2 : 3, &schedules);
            set_destroy(&b);
        }
        set_destroy(&a);
    }
    printf("verified %lld schedules of %lld cases\n", (long long)schedules,
           (long long)cases);
}

/* ---- broken in one place ---- */

/* A copy of a rank's schedule that may be broken. */
static enum cp_code copy_schedule(const struct cp_schedule *from,
                                  struct cp_schedule **out)
{
    void *block = NULL;
    CP_TRY(cp_mem_create(sizeof *from, "a test", &block));
    struct cp_schedule *copy = block;
    *copy = *from;
    copy->buffers = NULL;
    copy->steps = NULL;
    /* Room for one step more. */
    size_t steps = (size_t)from->step_count * sizeof *from->steps;
    size_t buffers = (size_t)from->buffer_count * sizeof *from->buffers;
    enum cp_code code = cp_mem_create(steps + sizeof *from->steps, "a test", &block);
    if (code == CP_OK) {
        copy->steps = block;
        memcpy(copy->steps, from->steps, steps);
        code = cp_mem_create(buffers, "a test", &block);
    }
    if (code != CP_OK) {
        cp_schedule_destroy(&copy);
        return code;
    }
    copy->buffers = block;
    memcpy(copy->buffers, from->buffers, buffers);
    *out = copy;
    return CP_OK;
}

/* How many steps of its lane stand before step `index`. */
static int32_t place_on_lane(const struct cp_schedule *schedule, int32_t index)
{
    int32_t before = 0;
    for (int32_t i = 0; i < index; i++) {
        before += schedule->steps[i].lane == schedule->steps[index].lane;
    }
    return before;
}

/* Takes a step out; what comes after it counts one less. */
static void remove_step(struct cp_schedule *schedule, int32_t index)
{
    int lane = schedule->steps[index].lane;
    int32_t place = place_on_lane(schedule, index);
    for (int32_t i = 0; i < schedule->step_count; i++) {
        schedule->steps[i].after[lane] -= schedule->steps[i].after[lane] > place;
    }
    memmove(&schedule->steps[index], &schedule->steps[index + 1],
            (size_t)(schedule->step_count - index - 1) * sizeof *schedule->steps);
    schedule->step_count -= 1;
}

/* Puts a step in once more, right behind itself. */
static void repeat_step(struct cp_schedule *schedule, int32_t index)
{
    int lane = schedule->steps[index].lane;
    int32_t place = place_on_lane(schedule, index);
    for (int32_t i = 0; i < schedule->step_count; i++) {
        schedule->steps[i].after[lane] += schedule->steps[i].after[lane] > place;
    }
    memmove(&schedule->steps[index + 1], &schedule->steps[index],
            (size_t)(schedule->step_count - index) * sizeof *schedule->steps);
    schedule->step_count += 1;
}

/* One way to break a step; `at` says which arg, axis or lane, where there is a choice. */
enum fault {
    FAULT_REMOVE,
    FAULT_AFTER,
    FAULT_REPEAT,
    FAULT_VALUE,
    FAULT_PEER,
    FAULT_Q_FIRST,
    FAULT_K_FIRST,
    FAULT_HEAD_FIRST,
    FAULT_KV_HEAD_FIRST,
    FAULT_CAUSAL,
    FAULT_FIRST,
    FAULT_SHIFT_BOX,
    FAULT_CUT_BOX,
    FAULT_BUFFER,
    FAULTS
};

static const char *const fault_names[FAULTS] = {
    "step removed", "after removed", "step repeated", "await lowered", "peer changed",
    "q_first",      "k_first",       "head_first",    "kv_head_first", "is_causal",
    "is_first",     "box shifted",   "box cut short", "another buffer"};

static int choices_of(enum fault fault)
{
    return fault == FAULT_AFTER                                 ? CP_LANES
           : fault == FAULT_SHIFT_BOX || fault == FAULT_CUT_BOX ? CP_STEP_ARGS * CP_AXES
           : fault == FAULT_BUFFER                              ? CP_STEP_ARGS
                                                                : 1;
}

static bool has_arg(const struct cp_step *step, int arg)
{
    struct cp_op_args takes = cp_verify_op_args((enum cp_step_op)step->op);
    return (((takes.needs | takes.may) >> arg) & 1) != 0 &&
           step->arg[arg].buffer != CP_NO_BUFFER;
}

static bool can_break(const struct cp_schedule *schedule, int32_t index,
                      enum fault fault, int at)
{
    const struct cp_step *step = &schedule->steps[index];
    bool is_block = step->op == CP_STEP_ATTEND || step->op == CP_STEP_GRAD;
    switch (fault) {
    case FAULT_REMOVE:
    case FAULT_REPEAT:
        return true;
    case FAULT_AFTER:
        return step->after[at] > 0;
    case FAULT_VALUE:
        return step->op == CP_STEP_AWAIT;
    case FAULT_PEER:
        return step->op == CP_STEP_AWAIT || cp_step_is_message(step);
    case FAULT_Q_FIRST:
    case FAULT_K_FIRST:
    case FAULT_HEAD_FIRST:
    case FAULT_KV_HEAD_FIRST:
    case FAULT_CAUSAL:
        return is_block;
    case FAULT_FIRST:
        return step->op == CP_STEP_ATTEND;
    case FAULT_SHIFT_BOX:
    case FAULT_CUT_BOX:
        return has_arg(step, at / CP_AXES);
    case FAULT_BUFFER: /* keys that causal order hides travel all the same, and may be any */
        return has_arg(step, at) && schedule->plan->signature.call.is_causal == 0;
    case FAULTS:
        break;
    }
    return false;
}

static void break_step(struct cp_schedule *schedule, int32_t index, enum fault fault,
                       int at)
{
    struct cp_step *step = &schedule->steps[index];
    switch (fault) {
    case FAULT_REMOVE:
        remove_step(schedule, index);
        break;
    case FAULT_REPEAT:
        repeat_step(schedule, index);
        break;
    case FAULT_AFTER:
        step->after[at] = 0;
        break;
    case FAULT_VALUE:
        step->value -= 1;
        break;
    case FAULT_PEER:
        step->peer = (step->peer + 1) % schedule->plan->world;
        break;
    case FAULT_Q_FIRST:
        step->q_first += 1;
        break;
    case FAULT_K_FIRST:
        step->k_first += 1;
        break;
    case FAULT_HEAD_FIRST:
        step->head_first += 1;
        break;
    case FAULT_KV_HEAD_FIRST:
        step->kv_head_first += 1;
        break;
    case FAULT_CAUSAL:
        step->is_causal = !step->is_causal;
        break;
    case FAULT_FIRST:
        step->is_first = !step->is_first;
        break;
    case FAULT_SHIFT_BOX:
        step->arg[at / CP_AXES].first[at % CP_AXES] += 1;
        break;
    case FAULT_CUT_BOX:
        step->arg[at / CP_AXES].n[at % CP_AXES] -= 1;
        break;
    case FAULT_BUFFER:
        step->arg[at].buffer = (step->arg[at].buffer + 1) % schedule->buffer_count;
        break;
    case FAULTS:
        break;
    }
}

static bool is_key_sum(const struct cp_buffer *buffer)
{
    return buffer->role == CP_TENSOR_DK || buffer->role == CP_TENSOR_DV;
}

/* Two names of the same bytes of a window. */
static bool are_one(const struct cp_buffer *a, const struct cp_buffer *b)
{
    return a->kind == CP_BUFFER_WINDOW && b->kind == CP_BUFFER_WINDOW &&
           a->owner == b->owner && cp_verify_same_shape(a, b);
}

/* A mask for all heads comes with every chunk of them, to where the chunk but one before
 * had it. */
static bool is_mask_again(const struct cp_schedule *schedule,
                          const struct cp_step *step)
{
    const struct cp_call *call = &schedule->plan->signature.call;
    return schedule->plan->chunks > 2 && call->mask_heads == 1 &&
           step->op == CP_STEP_COPY &&
           schedule->buffers[step->arg[CP_ARG_DST].buffer].role == CP_TENSOR_MASK;
}

/* May the fault leave the proof whole? `set` holds the broken schedule; `step` is the right one's. What
 * only orders may go where the order stays, which order.h decides; the rest has its reason here. */
static bool is_harmless(const struct set *set, const struct cp_schedule *right,
                        const struct cp_step *step, enum fault fault, int at)
{
    const struct cp_schedule *broken[GRID_MAX_WORLD];
    bool only_orders = step->op == CP_STEP_AWAIT || step->op == CP_STEP_PUBLISH;
    for (int rank = 0; rank < set->world; rank++) {
        broken[rank] = set->schedules[rank];
    }
    switch (fault) {
    case FAULT_REMOVE:
        if (is_mask_again(right, step)) {
            return true;
        }
        return only_orders && order_is_safe(broken, set->world);
    case FAULT_VALUE:
    case FAULT_PEER:
        return only_orders && order_is_safe(broken, set->world);
    case FAULT_AFTER:
        return order_is_safe(broken, set->world);
    case FAULT_REPEAT: /* the same values in the same places again */
        return step->op == CP_STEP_COPY || step->op == CP_STEP_PACK ||
               step->op == CP_STEP_ZERO || step->op == CP_STEP_DELTA ||
               step->op == CP_STEP_FINISH || step->op == CP_STEP_AWAIT ||
               (step->op == CP_STEP_ATTEND && step->is_first);
    case FAULT_CAUSAL: /* an edge that no pair of the block crosses */
        return right->plan->signature.call.is_causal != 0 && !step->is_causal;
    case FAULT_BUFFER: { /* the same bytes, a copy of the same, or sums that nobody has added to yet */
        const struct cp_buffer *old = &right->buffers[step->arg[at].buffer];
        const struct cp_buffer *new =
            &right->buffers[(step->arg[at].buffer + 1) % right->buffer_count];
        return (are_one(old, new) || old->role == new->role ||
                (is_key_sum(old) && is_key_sum(new))) &&
               order_is_safe(broken, set->world);
    }
    case FAULT_Q_FIRST:
    case FAULT_K_FIRST:
    case FAULT_HEAD_FIRST:
    case FAULT_KV_HEAD_FIRST:
    case FAULT_FIRST:
    case FAULT_SHIFT_BOX:
    case FAULT_CUT_BOX:
    case FAULTS:
        break;
    }
    return false;
}

/* Breaks one step of one rank and proves again. */
static void try_fault(struct set *set, int rank, int32_t index, enum fault fault,
                      int at, int64_t counts[FAULTS][2])
{
    struct cp_schedule *right = set->schedules[rank];
    const struct cp_step *step = &right->steps[index];
    struct cp_schedule *broken = NULL;
    const struct set *calls[] = {set};
    struct cp_verify_report report;
    REQUIRE(copy_schedule(right, &broken) == CP_OK);
    break_step(broken, index, fault, at);
    set->schedules[rank] = broken;
    enum cp_code code = verify(calls, 1, &report);
    counts[fault][code == CP_OK] += 1;
    /* What is refused must do harm, too: messages aside, whose group must agree on its `after`. */
    bool must_harm = fault == FAULT_AFTER && !cp_step_is_message(step);
    bool is_right = code == CP_OK
                        ? is_harmless(set, right, step, fault, at)
                        : !must_harm || !is_harmless(set, right, step, fault, at);
    if (!is_right) {
        (void)test_fail(__FILE__, __LINE__, "%s: rank %d step %d (%s) %s %d",
                        code == CP_OK ? "not caught" : cp_last_error()->text, rank,
                        (int)index, cp_step_name((enum cp_step_op)step->op),
                        fault_names[fault], at);
    }
    if (code != CP_OK) {
        CHECK_EQ_I64(code, CP_ERR_INTERNAL);
        CHECK_STR_HAS(cp_last_error()->text, "call 0 rank ");
    }
    set->schedules[rank] = right;
    cp_schedule_destroy(&broken);
}

/* Small worlds, rows and heads for every rank, and no key that causal order hides from every row: what
 * nobody looks at may be anything. */
static bool is_worth_breaking(const struct grid_case *grid)
{
    const struct cp_call *call = &grid->records[0].call;
    bool is_sum = call->op == CP_OP_REDUCE_SCATTER;
    enum cp_size own = is_sum ? CP_SIZE_ROWS : CP_SIZE_Q_ROWS;
    bool has_rows = grid->world >= 2 && grid->world <= 4;
    int64_t rows = 0;
    int64_t keys = 0;
    for (int rank = 0; rank < grid->world; rank++) {
        has_rows = has_rows && grid->records[rank].sizes[own] > 0;
        rows += grid->records[rank].sizes[own];
        keys += grid->records[rank].sizes[CP_SIZE_KV_ROWS];
    }
    bool has_attention =
        keys > 0 && rows >= keys && call->heads >= call->ulysses_degree;
    return has_rows && (is_sum || has_attention);
}

/* Every fault of some steps; of the many boxes fewer. */
static void break_steps(struct set *set, struct test_rng *rng,
                        int64_t counts[FAULTS][2])
{
    enum { STEPS_A_CASE = 24 };
    int64_t steps = 0;
    for (int rank = 0; rank < set->world; rank++) {
        steps += set->schedules[rank]->step_count;
    }
    for (int rank = 0; rank < set->world; rank++) {
        for (int32_t i = 0; i < set->schedules[rank]->step_count; i++) {
            bool is_drawn = test_rng_range(rng, 1, steps) <= STEPS_A_CASE;
            for (int fault = 0; fault < FAULTS && is_drawn; fault++) {
                for (int at = 0; at < choices_of((enum fault)fault); at++) {
                    bool is_box = choices_of((enum fault)fault) > CP_LANES;
                    if ((!is_box || test_rng_range(rng, 1, 4) == 1) &&
                        can_break(set->schedules[rank], i, (enum fault)fault, at)) {
                        try_fault(set, rank, i, (enum fault)fault, at, counts);
                    }
                }
            }
        }
    }
}

TEST(every_fault)
{
    enum { CASES = 60 };
    int64_t counts[FAULTS][2] = {{0}};
    struct test_rng rng = test_rng_init(7);
    for (int done = 0; done < CASES;) {
        struct grid_case grid;
        struct set set;
        grid_make(test_rng_range(&rng, 0, 8 * grid_count()), test_seed, &grid);
        if (is_worth_breaking(&grid) && set_create(&set, &grid)) {
            break_steps(&set, &rng, counts);
            set_destroy(&set);
            done += 1;
        }
    }
    for (int fault = 0; fault < FAULTS; fault++) {
        printf("%s: %lld caught, %lld redundant\n", fault_names[fault],
               (long long)counts[fault][0], (long long)counts[fault][1]);
        CHECK(counts[fault][0] > 0 || fault == FAULT_VALUE);
    }
}

/* ---- planted faults, each with the sentence that it must get ---- */

/* Four ranks, GQA, a mask with the ranks' own rows, an lse: two rows and keys each. */
static void plant(struct grid_case *grid, enum cp_op op, int ring,
                  enum cp_transport transport)
{
    *grid = (struct grid_case){.world = 4, .transport = transport};
    for (int rank = 0; rank < grid->world; rank++) {
        grid->records[rank].call = (struct cp_call){.op = (int32_t)op,
                                                    .dtype = CP_DTYPE_BFLOAT16,
                                                    .batch = 1,
                                                    .heads = 8,
                                                    .kv_heads = 4,
                                                    .head_dim = 3,
                                                    .value_dim = 2,
                                                    .mask_batch = 1,
                                                    .mask_heads = 8,
                                                    .mask_kind = CP_MASK_ADD,
                                                    .mask_dtype = CP_DTYPE_FLOAT32,
                                                    .is_causal = 1,
                                                    .want_lse = 1,
                                                    .enable_gqa = 1,
                                                    .variant = CP_ANYTHING,
                                                    .rotate = CP_ROTATE_ALLTOALL,
                                                    .ring_degree = ring,
                                                    .ulysses_degree = 4 / ring,
                                                    .format = 1};
        grid->records[rank].sizes[CP_SIZE_Q_ROWS] = 2;
        grid->records[rank].sizes[CP_SIZE_KV_ROWS] = 2;
        grid->records[rank].sizes[CP_SIZE_MASK_ROWS] = 2;
        grid->records[rank].sizes[CP_SIZE_MASK_KEYS] = 8;
    }
}

/* Four ranks give a tensor of 2 x 8 x 3, of which each gets two rows. */
static void plant_sum(struct grid_case *grid, int ring, enum cp_transport transport)
{
    *grid = (struct grid_case){.world = 4, .transport = transport};
    for (int rank = 0; rank < grid->world; rank++) {
        grid->records[rank].call = (struct cp_call){.op = CP_OP_REDUCE_SCATTER,
                                                    .dtype = CP_DTYPE_BFLOAT16,
                                                    .ndim = 3,
                                                    .dim = 1,
                                                    .extent = {2, 8, 3},
                                                    .variant = CP_ANYTHING,
                                                    .ring_degree = ring,
                                                    .ulysses_degree = 4 / ring};
        grid->records[rank].sizes[CP_SIZE_ROWS] = 2;
    }
}

/* Index of the nth step of that op, from 0; -1 from the back. */
static int32_t find_step(const struct cp_schedule *schedule, enum cp_step_op op,
                         int nth)
{
    int32_t found = -1;
    for (int32_t i = 0; i < schedule->step_count; i++) {
        if (schedule->steps[i].op == op) {
            found = i;
            if (nth-- == 0) {
                break;
            }
        }
    }
    return found;
}

/* What a planted fault does to the schedules of all ranks. */
typedef void (*spoil_fn)(struct cp_schedule *const *schedules);

static struct cp_step *the_step(struct cp_schedule *const *schedules, int rank,
                                enum cp_step_op op, int nth)
{
    return &schedules[rank]->steps[find_step(schedules[rank], op, nth)];
}

static void remove_nth(struct cp_schedule *const *schedules, int rank,
                       enum cp_step_op op, int nth)
{
    remove_step(schedules[rank], find_step(schedules[rank], op, nth));
}

static void swap_steps(struct cp_schedule *schedule, int32_t a, int32_t b)
{
    struct cp_step kept = schedule->steps[a];
    schedule->steps[a] = schedule->steps[b];
    schedule->steps[b] = kept;
}

static void drop_after(struct cp_schedule *const *s)
{
    struct cp_step *step = the_step(s, 2, CP_STEP_ATTEND, 1);
    memset(step->after, 0, sizeof step->after);
}

static void drop_await(struct cp_schedule *const *s)
{
    remove_nth(s, 2, CP_STEP_AWAIT, 0);
}

static void drop_attend(struct cp_schedule *const *s)
{
    remove_nth(s, 3, CP_STEP_ATTEND, 1);
}

static void repeat_attend(struct cp_schedule *const *s)
{
    repeat_step(s[3], find_step(s[3], CP_STEP_ATTEND, 1));
}

static void shift_keys(struct cp_schedule *const *s)
{
    the_step(s, 3, CP_STEP_ATTEND, 0)->k_first -= 1;
}

static void wrong_kv_heads(struct cp_schedule *const *s)
{
    struct cp_step *step = the_step(s, 3, CP_STEP_ATTEND, 0);
    step->arg[CP_ATTEND_K].first[2] -= 1;
}

static void other_kv_heads(struct cp_schedule *const *s)
{
    the_step(s, 3, CP_STEP_ATTEND, 0)->kv_head_first -= 1;
}

static void wrong_mask_rows(struct cp_schedule *const *s)
{
    struct cp_step *step = the_step(s, 1, CP_STEP_ATTEND, 0);
    step->arg[CP_ATTEND_MASK].first[3] = (step->arg[CP_ATTEND_MASK].first[3] + 2) % 8;
}

static void no_mask(struct cp_schedule *const *s)
{
    the_step(s, 1, CP_STEP_ATTEND, 0)->arg[CP_ATTEND_MASK].buffer = CP_NO_BUFFER;
}

static void no_causal_edge(struct cp_schedule *const *s)
{
    the_step(s, 1, CP_STEP_ATTEND, 0)->is_causal = false;
}

static void end_early(struct cp_schedule *const *s)
{
    struct cp_step *last = the_step(s, 3, CP_STEP_ATTEND, -1);
    struct cp_step *before = the_step(s, 3, CP_STEP_ATTEND, 2);
    before->arg[CP_ATTEND_OUT] = last->arg[CP_ATTEND_OUT];
    last->arg[CP_ATTEND_OUT].buffer = CP_NO_BUFFER;
    last->arg[CP_ATTEND_LSE].buffer = CP_NO_BUFFER;
}

static void no_end(struct cp_schedule *const *s)
{
    struct cp_step *last = the_step(s, 3, CP_STEP_ATTEND, -1);
    last->arg[CP_ATTEND_OUT].buffer = CP_NO_BUFFER;
    last->arg[CP_ATTEND_LSE].buffer = CP_NO_BUFFER;
}

static void lse_alone(struct cp_schedule *const *s)
{
    the_step(s, 3, CP_STEP_ATTEND, -1)->arg[CP_ATTEND_OUT].buffer = CP_NO_BUFFER;
}

static void begin_again(struct cp_schedule *const *s)
{
    the_step(s, 3, CP_STEP_ATTEND, 1)->is_first = true;
}

static void no_beginning(struct cp_schedule *const *s)
{
    the_step(s, 3, CP_STEP_ATTEND, 0)->is_first = false;
}

/* Queries that other rows of the same step are made of. */
static void result_over_queries(struct cp_schedule *const *s)
{
    struct cp_step *step = the_step(s, 1, CP_STEP_ATTEND, -1);
    struct cp_buffer *q = &s[1]->buffers[step->arg[CP_ATTEND_Q].buffer];
    const struct cp_buffer *out = &s[1]->buffers[step->arg[CP_ATTEND_OUT].buffer];
    q->kind = out->kind;
    q->offset_bytes = out->offset_bytes;
    s[1]->window_bytes += 64; /* a row of q is longer */
}

/* The group may still read the queries in whose place the results lie: its counter READY
 * (write_pull.h) says 2 when it has them. */
static void end_unfetched(struct cp_schedule *const *s)
{
    for (int32_t at = s[1]->step_count - 1; at >= 0; at--) {
        const struct cp_step *step = &s[1]->steps[at];
        if (step->op == CP_STEP_AWAIT && step->signal == 0 && step->value == 2) {
            s[1]->steps[at].value = 1;
        }
    }
}

static void out_of_bounds(struct cp_schedule *const *s)
{
    the_step(s, 0, CP_STEP_ATTEND, -1)->arg[CP_ATTEND_OUT].first[1] = 1;
}

static void outside_window(struct cp_schedule *const *s)
{
    s[2]->window_bytes -= 64;
}

static void outside_scratch(struct cp_schedule *const *s)
{
    s[2]->scratch_bytes -= 64;
}

static void wrong_peer_offset(struct cp_schedule *const *s)
{
    s[1]->buffers[the_step(s, 1, CP_STEP_ATTEND, 1)->arg[CP_ATTEND_K].buffer]
        .offset_bytes += 64;
}

static void write_at_peer(struct cp_schedule *const *s)
{
    struct cp_step *step = the_step(s, 1, CP_STEP_ATTEND, 1);
    the_step(s, 1, CP_STEP_PACK, 0)->arg[CP_ARG_DST] = step->arg[CP_ATTEND_K];
}

/* The host has it mapped for reading. */
static void copy_to_peer(struct cp_schedule *const *s)
{
    struct cp_step *step = the_step(s, 1, CP_STEP_COPY, 0);
    struct cp_box *to = &step->arg[CP_ARG_DST];
    for (int32_t i = 0; i < s[1]->buffer_count; i++) {
        const struct cp_buffer *buffer = &s[1]->buffers[i];
        if (buffer->kind == CP_BUFFER_WINDOW && buffer->owner == 0 &&
            memcmp(buffer->n, s[1]->buffers[to->buffer].n, sizeof buffer->n) == 0 &&
            buffer->layout == CP_LAYOUT_PLAIN) {
            to->buffer = i;
            return;
        }
    }
}

static void write_input(struct cp_schedule *const *s)
{
    struct cp_step *step = the_step(s, 1, CP_STEP_PACK, 0);
    step->arg[CP_ARG_DST] = step->arg[CP_ARG_SRC];
}

/* v of rank 0 lies where its k is, and all ranks say so. */
static void two_in_one_place(struct cp_schedule *const *s)
{
    for (int rank = 0; rank < 4; rank++) {
        const struct cp_buffer *k = NULL;
        for (int32_t i = 0; i < s[rank]->buffer_count; i++) {
            struct cp_buffer *buffer = &s[rank]->buffers[i];
            if (buffer->kind == CP_BUFFER_WINDOW && buffer->owner == 0 &&
                buffer->layout == CP_LAYOUT_K) {
                k = buffer;
            }
            if (buffer->kind == CP_BUFFER_WINDOW && buffer->owner == 0 &&
                buffer->layout == CP_LAYOUT_V && k != NULL) {
                buffer->offset_bytes = k->offset_bytes;
            }
        }
    }
}

static void await_too_much(struct cp_schedule *const *s)
{
    the_step(s, 1, CP_STEP_AWAIT, 0)->value = 2;
}

static void await_no_counter(struct cp_schedule *const *s)
{
    the_step(s, 1, CP_STEP_AWAIT, 0)->signal = CP_SIGNALS;
}

static void publish_twice(struct cp_schedule *const *s)
{
    repeat_step(s[2], find_step(s[2], CP_STEP_PUBLISH, 0));
}

static void after_the_future(struct cp_schedule *const *s)
{
    the_step(s, 2, CP_STEP_ATTEND, 0)->after[CP_LANE_IN] = 1000;
}

/* Of the results, on a lane of its own, before anything is published. */
static void wait_in_front(struct cp_schedule *const *s)
{
    struct cp_step *steps = s[0]->steps;
    int32_t at = 0;
    while (steps[at].op != CP_STEP_AWAIT || steps[at].lane != CP_LANE_OUT) {
        at += 1;
    }
    struct cp_step await = steps[at];
    memmove(&steps[1], steps, (size_t)at * sizeof *steps);
    steps[0] = await;
}

/* The first wait for that counter. */
static void drop_await_of(struct cp_schedule *schedule, int signal)
{
    for (int32_t i = 0; i < schedule->step_count; i++) {
        if (schedule->steps[i].op == CP_STEP_AWAIT &&
            schedule->steps[i].signal == signal) {
            remove_step(schedule, i);
            return;
        }
    }
}

/* Rows that a member of the group has not put there yet. */
static void not_brought(struct cp_schedule *const *s)
{
    remove_nth(s, 1, CP_STEP_AWAIT, 1);
}

/* Of another group's block (the counters of write_exchange.h). */
static void drop_whole(struct cp_schedule *const *s)
{
    drop_await_of(s[2], 1);
}

static void drop_made(struct cp_schedule *const *s)
{
    drop_await_of(s[0], 2);
}

static void signal_first(struct cp_schedule *const *s)
{
    int32_t at = find_step(s[2], CP_STEP_PUBLISH, 0);
    struct cp_step put = s[2]->steps[at - 1];
    s[2]->steps[at - 1] = s[2]->steps[at];
    s[2]->steps[at] = put;
}

/* The rows of rank 1 where those of rank 2 go, both in the window of rank 0. */
static void put_where_another_puts(struct cp_schedule *const *s)
{
    for (int32_t i = 0; i < s[1]->step_count; i++) {
        struct cp_step *step = &s[1]->steps[i];
        const struct cp_buffer *to = &s[1]->buffers[step->arg[CP_ARG_DST].buffer];
        if (step->op == CP_STEP_COPY && to->owner == 0) {
            step->arg[CP_ARG_DST].first[1] += step->arg[CP_ARG_DST].n[1];
            return;
        }
    }
}

/* The counter of what an owner has added (write_pull.h): the third awaits the first's. */
static void reuse_slot(struct cp_schedule *const *s)
{
    drop_await_of(s[0], 3);
}

/* A slot where the group's rows are still being fetched. */
static void early_slot(struct cp_schedule *const *s)
{
    for (int32_t i = 0; i < s[0]->step_count; i++) {
        if (s[0]->steps[i].op == CP_STEP_AWAIT && s[0]->steps[i].value == 2) {
            remove_step(s[0], i);
            return;
        }
    }
}

static void drop_reduce(struct cp_schedule *const *s)
{
    remove_nth(s, 1, CP_STEP_REDUCE, 0);
}

static void repeat_reduce(struct cp_schedule *const *s)
{
    repeat_step(s[1], find_step(s[1], CP_STEP_REDUCE, 1));
}

static void drop_grad(struct cp_schedule *const *s)
{
    remove_nth(s, 3, CP_STEP_GRAD, 0);
}

static void no_zero(struct cp_schedule *const *s)
{
    remove_nth(s, 3, CP_STEP_ZERO, 0);
}

static void no_dlse(struct cp_schedule *const *s)
{
    the_step(s, 3, CP_STEP_DELTA, 0)->arg[CP_DELTA_DLSE].buffer = CP_NO_BUFFER;
}

static void drop_send(struct cp_schedule *const *s)
{
    remove_nth(s, 1, CP_STEP_SEND, -1);
}

static void swap_sends(struct cp_schedule *const *s)
{
    swap_steps(s[1], find_step(s[1], CP_STEP_SEND, 0),
               find_step(s[1], CP_STEP_SEND, 1));
}

/* Rank 1 says that its message has one byte run less, and so many bytes less. */
static void shorter_message(struct cp_schedule *const *s)
{
    the_step(s, 1, CP_STEP_SEND, 0)->arg[CP_ARG_SRC].n[2] -= 1;
}

static void send_on_other_lane(struct cp_schedule *const *s)
{
    struct cp_step *step = the_step(s, 1, CP_STEP_SEND, 2);
    step->lane = step->lane == CP_LANE_IN ? CP_LANE_OUT : CP_LANE_IN;
    for (int32_t i = 0; i < s[1]->step_count; i++) {
        memset(s[1]->steps[i].after, 0, sizeof s[1]->steps[i].after);
    }
}

static void change_group(struct cp_schedule *const *s)
{
    /* Sends alone first, on all ranks: a cycle where a send lasts until it is received. */
    for (int rank = 0; rank < 4; rank++) {
        for (int32_t i = 0; i < s[rank]->step_count; i++) {
            s[rank]->steps[i].group = i;
        }
    }
}

/* The keys of two members lie in each other's places. */
static void swap_places(struct cp_schedule *const *s)
{
    struct cp_step *first = NULL;
    for (int32_t i = 0; i < s[1]->step_count; i++) {
        struct cp_step *step = &s[1]->steps[i];
        const struct cp_box *place = &step->arg[CP_ARG_DST];
        if (step->op == CP_STEP_RECV &&
            s[1]->buffers[place->buffer].role == CP_TENSOR_K) {
            if (first != NULL) {
                struct cp_box kept = first->arg[CP_ARG_DST];
                first->arg[CP_ARG_DST] = *place;
                step->arg[CP_ARG_DST] = kept;
                return;
            }
            first = step;
        }
    }
}

/* The block is met before all of it came; results leave before they are made. */
static void meet_early(struct cp_schedule *const *s)
{
    the_step(s, 1, CP_STEP_ATTEND, 0)->after[CP_LANE_IN] = 0;
}

static void leave_unmade(struct cp_schedule *const *s)
{
    for (int32_t i = 0; i < s[1]->step_count; i++) {
        if (cp_step_is_message(&s[1]->steps[i])) {
            s[1]->steps[i].after[CP_LANE_COMPUTE] = 0;
        }
    }
}

static void rows_of_another(struct cp_schedule *const *s)
{
    the_step(s, 1, CP_STEP_REDUCE, 0)->arg[CP_ARG_SRC].first[1] += 2;
}

static void two_parts_of_one(struct cp_schedule *const *s)
{
    the_step(s, 1, CP_STEP_REDUCE, 1)->arg[CP_ARG_SRC] =
        the_step(s, 1, CP_STEP_REDUCE, 0)->arg[CP_ARG_SRC];
}

static void start_again(struct cp_schedule *const *s)
{
    the_step(s, 1, CP_STEP_REDUCE, 1)->op = CP_STEP_COPY;
}

static void leave_early(struct cp_schedule *const *s)
{
    swap_steps(s[1], find_step(s[1], CP_STEP_REDUCE, -1),
               find_step(s[1], CP_STEP_COPY, -1));
}

/* The sum is kept in the dtype of the call, and taken up again from there. */
static void round_the_sum(struct cp_schedule *const *s)
{
    int32_t sum = the_step(s, 1, CP_STEP_REDUCE, 0)->arg[CP_ARG_DST].buffer;
    s[1]->buffers[sum].dtype = CP_DTYPE_BFLOAT16;
}

static void rows_beyond(struct cp_schedule *const *s)
{
    the_step(s, 2, CP_STEP_ATTEND, 0)->q_first = INT64_MAX;
}

static void keys_beyond(struct cp_schedule *const *s)
{
    the_step(s, 2, CP_STEP_ATTEND, 0)->k_first = 7;
}

static void attend_in_a_sum(struct cp_schedule *const *s)
{
    struct cp_step *step = the_step(s, 1, CP_STEP_REDUCE, 0);
    for (int arg = CP_ATTEND_K; arg <= CP_ATTEND_V; arg++) {
        step->arg[arg] = step->arg[CP_ARG_SRC];
    }
    step->op = CP_STEP_ATTEND;
}

static void panel_in_a_sum(struct cp_schedule *const *s)
{
    int32_t sum = the_step(s, 1, CP_STEP_REDUCE, 0)->arg[CP_ARG_DST].buffer;
    s[1]->buffers[sum].layout = CP_LAYOUT_K;
}

static void endless_panel(struct cp_schedule *const *s)
{
    int32_t state = the_step(s, 1, CP_STEP_ATTEND, 0)->arg[CP_ATTEND_STATE].buffer;
    s[1]->buffers[state].n[1] = INT64_MAX;
}

static void other_rank(struct cp_schedule *const *s)
{
    s[1]->rank = 2;
}

struct planted {
    const char *what;
    spoil_fn spoil;
    enum cp_op op;
    int ring;
    enum cp_transport transport;
    const char *place, *sentence;
};

static const struct planted planted[] = {
    {"after dropped", drop_after, CP_OP_ATTENTION, 4, CP_PULL, "rank 2 step",
     "nothing orders the two"},
    {"await dropped", drop_await, CP_OP_ATTENTION, 4, CP_PULL, "rank 2 step",
     "nothing orders the two"},
    {"attend dropped", drop_attend, CP_OP_ATTENTION, 4, CP_PULL, "rank 3 step",
     "has met 5 of 7 keys"},
    {"attend twice", repeat_attend, CP_OP_ATTENTION, 4, CP_PULL, "rank 3 step",
     "a second time"},
    {"k_first", shift_keys, CP_OP_ATTENTION, 4, CP_PULL, "rank 3 step",
     "holds k of row"},
    {"kv head box", wrong_kv_heads, CP_OP_ATTENTION, 1, CP_PULL, "rank 3 step",
     "holds k of row"},
    {"kv head", other_kv_heads, CP_OP_ATTENTION, 1, CP_PULL, "rank 3 step",
     "use kv heads"},
    {"mask keys", wrong_mask_rows, CP_OP_ATTENTION, 2, CP_PULL, "rank 1 step",
     "holds mask of head"},
    {"no mask", no_mask, CP_OP_ATTENTION, 2, CP_PULL, "rank 1 step",
     "mask is not given"},
    {"no causal edge", no_causal_edge, CP_OP_ATTENTION, 4, CP_PULL, "rank 1 step",
     "no causal edge"},
    {"ends early", end_early, CP_OP_ATTENTION, 4, CP_PULL, "rank 3 step",
     "has met 5 of 7 keys"},
    {"no end", no_end, CP_OP_ATTENTION, 4, CP_PULL, "rank 3",
     "read before it is written"},
    {"lse alone", lse_alone, CP_OP_ATTENTION, 4, CP_PULL, "rank 3 step",
     "an lse without an out"},
    {"begins again", begin_again, CP_OP_ATTENTION, 4, CP_PULL, "rank 3 step",
     "has met 6 of 7 keys"},
    {"no beginning", no_beginning, CP_OP_ATTENTION, 4, CP_PULL, "rank 3 step",
     "read before it is written"},
    {"result over queries", result_over_queries, CP_OP_ATTENTION, 1, CP_PULL,
     "rank 1 step", "nothing orders the two"},
    {"result over unfetched queries", end_unfetched, CP_OP_ATTENTION, 1, CP_PULL,
     "rank ", "nothing orders the two"},
    {"the same beside a ring", end_unfetched, CP_OP_ATTENTION, 2, CP_PULL, "rank ",
     "nothing orders the two"},
    {"result over queries, two-sided", result_over_queries, CP_OP_ATTENTION, 1,
     CP_TWO_SIDED, "rank 1 step", "nothing orders the two"},
    {"out of bounds", out_of_bounds, CP_OP_ATTENTION, 4, CP_PULL, "rank 0 step",
     "on axis 1 of buffer"},
    {"window too small", outside_window, CP_OP_ATTENTION, 4, CP_PULL, "rank ",
     "ends at byte"},
    {"workspace too small", outside_scratch, CP_OP_ATTENTION, 4, CP_PULL, "rank 2",
     "ends at byte"},
    {"peer's offset", wrong_peer_offset, CP_OP_ATTENTION, 2, CP_PULL, "rank 1",
     "in the window of rank"},
    {"written at a peer", write_at_peer, CP_OP_ATTENTION, 2, CP_PULL, "rank 1 step",
     "writes in the window of"},
    {"copied to a peer", copy_to_peer, CP_OP_ATTENTION, 2, CP_PULL, "rank 1 step",
     "writes in the window of"},
    {"put unawaited", not_brought, CP_OP_ATTENTION, 1, CP_PUSH, "rank ",
     "nothing orders the two"},
    {"put unawaited, backward", not_brought, CP_OP_ATTENTION_BACKWARD, 1, CP_PUSH,
     "rank ", "nothing orders the two"},
    {"block unawaited", drop_whole, CP_OP_ATTENTION, 2, CP_PUSH, "rank ",
     "nothing orders the two"},
    {"put behind the signal", signal_first, CP_OP_ATTENTION, 1, CP_PUSH, "rank ",
     "nothing orders the two"},
    {"put where another puts", put_where_another_puts, CP_OP_ATTENTION, 1, CP_PUSH,
     "rank ", "nothing orders the two"},
    {"sum of a put gradient unawaited", drop_made, CP_OP_ATTENTION_BACKWARD, 1, CP_PUSH,
     "rank ", "nothing orders the two"},
    {"result unawaited", drop_made, CP_OP_ATTENTION, 1, CP_PUSH, "rank ",
     "nothing orders the two"},
    {"input written", write_input, CP_OP_ATTENTION, 4, CP_PULL, "rank 1 step",
     "only lent"},
    {"two buffers in one place", two_in_one_place, CP_OP_ATTENTION, 4, CP_PULL, "rank ",
     "read before it is"},
    {"await of too much", await_too_much, CP_OP_ATTENTION, 4, CP_PULL, "rank 1 step",
     "nobody can go on"},
    {"await of nothing", await_no_counter, CP_OP_ATTENTION, 4, CP_PULL, "rank 1 step",
     "such a counter"},
    {"published twice", publish_twice, CP_OP_ATTENTION, 4, CP_PULL, "rank 2 step",
     "goes from 1 to 1"},
    {"after the future", after_the_future, CP_OP_ATTENTION, 4, CP_PULL, "rank 2 step",
     "comes after 1000"},
    {"slot reused early", reuse_slot, CP_OP_ATTENTION_BACKWARD, 1, CP_PULL, "rank ",
     "nothing orders the two"},
    {"slot over rows", early_slot, CP_OP_ATTENTION_BACKWARD, 2, CP_PULL, "rank ",
     "nothing orders the two"},
    {"reduce dropped", drop_reduce, CP_OP_ATTENTION_BACKWARD, 1, CP_PULL, "rank 1",
     "pairs"},
    {"reduce twice", repeat_reduce, CP_OP_ATTENTION_BACKWARD, 1, CP_PULL, "rank 1 step",
     "has already"},
    {"grad dropped", drop_grad, CP_OP_ATTENTION_BACKWARD, 4, CP_PULL, "rank 3",
     "has 6 of 7 keys"},
    {"not zeroed", no_zero, CP_OP_ATTENTION_BACKWARD, 4, CP_PULL, "rank 3 step",
     "read before it is written"},
    {"dlse left out", no_dlse, CP_OP_ATTENTION_BACKWARD, 4, CP_PULL, "rank 3 step",
     "gradient of the lse"},
    {"send dropped", drop_send, CP_OP_ATTENTION, 4, CP_TWO_SIDED, "rank ",
     "nobody can go on"},
    {"sends swapped", swap_sends, CP_OP_ATTENTION, 4, CP_TWO_SIDED, "rank 0 step",
     "in another shape"},
    {"bytes changed", shorter_message, CP_OP_ATTENTION, 4, CP_TWO_SIDED, "rank 0 step",
     "sends"},
    {"send on another lane", send_on_other_lane, CP_OP_ATTENTION, 4, CP_TWO_SIDED,
     "rank 1 step", "orders"},
    {"one message a group", change_group, CP_OP_ATTENTION, 4, CP_TWO_SIDED,
     "rank 0 step", "does not receive"},
    {"grad dropped, two-sided", drop_grad, CP_OP_ATTENTION_BACKWARD, 4, CP_TWO_SIDED,
     "rank ", "has 6 of 7 keys"},
    {"members' places swapped", swap_places, CP_OP_ATTENTION, 1, CP_TWO_SIDED,
     "rank 1 step", "holds k of row"},
    {"met before it came", meet_early, CP_OP_ATTENTION, 1, CP_TWO_SIDED, "rank 1 step",
     "nothing orders the two"},
    {"sent before it is made", leave_unmade, CP_OP_ATTENTION, 1, CP_TWO_SIDED,
     "rank 1 step", "nothing orders the two"},
    {"waits in front", wait_in_front, CP_OP_ATTENTION, 1, CP_PULL,
     "rank 0 step 0 (AWAIT)", "comes behind step 0 in the list"},
    {"part left out", drop_reduce, CP_OP_REDUCE_SCATTER, 4, CP_PULL, "rank 1",
     "has 3 of 4 ranks"},
    {"part added twice", repeat_reduce, CP_OP_REDUCE_SCATTER, 2, CP_PULL, "rank 1 step",
     "has already"},
    {"another rank's part", two_parts_of_one, CP_OP_REDUCE_SCATTER, 1, CP_TWO_SIDED,
     "rank 1 step", "has already"},
    {"another rank's rows", rows_of_another, CP_OP_REDUCE_SCATTER, 4, CP_PULL,
     "rank 1 step", "not whole of row"},
    {"sum begun again", start_again, CP_OP_REDUCE_SCATTER, 4, CP_TWO_SIDED, "rank 1",
     "has 2 of 4 ranks"},
    {"sum returned early", leave_early, CP_OP_REDUCE_SCATTER, 4, CP_TWO_SIDED, "rank 1",
     "has 3 of 4 ranks"},
    {"sum rounded", round_the_sum, CP_OP_REDUCE_SCATTER, 4, CP_PULL, "rank 1 step",
     "cannot take float32"},
    {"part read unawaited", drop_await, CP_OP_REDUCE_SCATTER, 4, CP_PULL, "rank 2 step",
     "nothing orders the two"},
    {"rows beyond the last", rows_beyond, CP_OP_ATTENTION, 4, CP_PULL, "rank 2 step",
     "position that the call does not have"},
    {"keys beyond the last", keys_beyond, CP_OP_ATTENTION, 4, CP_PULL, "rank 2 step",
     "position that the call does not have"},
    {"attend in a sum", attend_in_a_sum, CP_OP_REDUCE_SCATTER, 4, CP_PULL,
     "rank 1 step", "the call is no attention"},
    {"panel in a sum", panel_in_a_sum, CP_OP_REDUCE_SCATTER, 4, CP_PULL, "rank 1",
     "means nothing"},
    {"endless panel", endless_panel, CP_OP_ATTENTION, 4, CP_PULL, "rank 1",
     "means nothing"},
    {"another rank's", other_rank, CP_OP_ATTENTION, 4, CP_PULL, "rank 1",
     "schedule of rank 2"},
};

TEST(planted_faults)
{
    for (size_t i = 0; i < sizeof planted / sizeof *planted; i++) {
        const struct planted *fault = &planted[i];
        struct grid_case grid;
        struct set set;
        struct set right;
        struct cp_verify_report report = {0, 0, 0};
        if (fault->op == CP_OP_REDUCE_SCATTER) {
            plant_sum(&grid, fault->ring, fault->transport);
        } else {
            plant(&grid, fault->op, fault->ring, fault->transport);
        }
        REQUIRE(set_create(&set, &grid) && set_create(&right, &grid));
        TEST_CONTEXT("%s", fault->what);
        /* In the second call, the first being right: the sentence must say so. */
        const struct set *calls[] = {&right, &set};
        CHECK_EQ_I64(verify(calls, 2, &report), CP_OK);
        struct cp_schedule *spoilt[GRID_MAX_WORLD];
        for (int rank = 0; rank < set.world; rank++) {
            REQUIRE(copy_schedule(set.schedules[rank], &spoilt[rank]) == CP_OK);
            cp_schedule_destroy(&set.schedules[rank]);
            set.schedules[rank] = spoilt[rank];
        }
        fault->spoil(spoilt);
        report.steps = -1;
        if (CHECK_EQ_I64(verify(calls, 2, &report), CP_ERR_INTERNAL)) {
            CHECK_STR_HAS(cp_last_error()->text, "call 1 ");
            CHECK_STR_HAS(cp_last_error()->text, fault->place);
            CHECK_STR_HAS(cp_last_error()->text, fault->sentence);
        }
        CHECK_EQ_I64(report.steps, -1);
        set_destroy(&set);
        set_destroy(&right);
    }
    printf("refused %d planted faults\n", (int)(sizeof planted / sizeof *planted));
}

/* ---- the rest ---- */

/* Replicated keys that are packed in several pieces, and causal rows that do not see all of them. */
TEST(keys_in_pieces)
{
    int64_t schedules = 0;
    for (int kind = 0; kind < 4; kind++) {
        bool is_causal = kind % 2 != 0, is_plain = kind / 2 != 0;
        struct grid_case grid;
        struct set set;
        plant(&grid, CP_OP_ATTENTION, 2, CP_PULL);
        for (int rank = 0; rank < grid.world; rank++) {
            struct cp_record *record = &grid.records[rank];
            record->call.heads = 2;
            record->call.kv_heads = 1;
            record->call.mask_heads = 1;
            record->call.is_causal = is_causal;
            record->call.kv_replicated = 1;
            record->call.format = is_plain ? GRID_PLAIN_KEYS : 1;
            record->sizes[CP_SIZE_Q_ROWS] = 2 + 900 * rank;
            record->sizes[CP_SIZE_KV_ROWS] = 5000;
            record->sizes[CP_SIZE_MASK_ROWS] = 1;
            record->sizes[CP_SIZE_MASK_KEYS] = 5000;
        }
        if (set_create(&set, &grid)) {
            const struct set *calls[] = {&set, &set};
            check_verified(calls, 2, &schedules);
            /* Rows 2 to 3 of the causal call meet one piece, row 5000 three; or all as
             * they are. */
            for (int rank = 0; rank < grid.world; rank++) {
                int64_t last =
                    set.plan->q_rows[rank].first + set.plan->q_rows[rank].count - 1;
                int pieces = is_plain || (is_causal && last < 2048) ? 1
                             : is_causal && last < 4096             ? 2
                                                                    : 3;
                int32_t found =
                    find_step(set.schedules[rank], CP_STEP_ATTEND, pieces - 1);
                CHECK(found >= 0 &&
                      found == find_step(set.schedules[rank], CP_STEP_ATTEND, -1));
            }
            set_destroy(&set);
        }
    }
    CHECK_EQ_I64(schedules, 4 * 2 * 4);
}

/* Rows that meet no key at all: no step attends, and what would order others is missing. */
TEST(no_keys)
{
    const enum cp_op ops[] = {CP_OP_ATTENTION, CP_OP_ATTENTION_BACKWARD};
    int64_t schedules = 0;
    for (int number = 0; number < 12; number++) {
        struct grid_case grid;
        struct set set;
        plant(&grid, ops[number % 2], 1 << number / 2 % 3,
              number < 6 ? CP_PULL : CP_TWO_SIDED);
        for (int rank = 0; rank < grid.world; rank++) {
            grid.records[rank].sizes[CP_SIZE_KV_ROWS] = 0;
            grid.records[rank].sizes[CP_SIZE_MASK_KEYS] = 0;
        }
        if (set_create(&set, &grid)) {
            const struct set *calls[] = {&set, &set, &set};
            check_verified(calls, MAX_CALLS, &schedules);
            set_destroy(&set);
        }
    }
    CHECK_EQ_I64(schedules, 12 * MAX_CALLS * 4);
}

TEST(failed_allocations)
{
    struct grid_case grid;
    struct set set;
    plant(&grid, CP_OP_ATTENTION_BACKWARD, 2, CP_PULL);
    REQUIRE(set_create(&set, &grid));
    const struct set *calls[] = {&set, &set};
    int64_t live = cp_mem_stats().live_blocks;
    enum cp_code code = CP_ERR_NO_MEMORY;
    int64_t count = 0;
    for (; code == CP_ERR_NO_MEMORY; count++) {
        struct cp_verify_report report;
        cp_mem_fail_after(count);
        code = verify(calls, 2, &report);
        CHECK_EQ_I64(cp_mem_stats().live_blocks, live);
    }
    cp_mem_fail_after(-1);
    CHECK_EQ_I64(code, CP_OK);
    CHECK(count > 2);
    set_destroy(&set);
}

TEST(report)
{
    struct grid_case grid;
    struct set set;
    struct cp_verify_report report = {0, 0, 0};
    struct cp_verify_report twice = {0, 0, 0};
    plant(&grid, CP_OP_ATTENTION, 2, CP_PULL);
    REQUIRE(set_create(&set, &grid));
    const struct set *calls[] = {&set, &set, &set};
    CHECK_EQ_I64(verify(calls, 1, &report), CP_OK);
    CHECK_EQ_I64(verify(calls, 3, &twice), CP_OK);
    CHECK_EQ_I64(twice.steps, 3 * report.steps);
    CHECK_EQ_I64(report.window_bytes, set.schedules[0]->window_bytes);
    CHECK_EQ_I64(report.scratch_bytes, set.schedules[0]->scratch_bytes);
    set_destroy(&set);
}

/* What the call before left in a window is never taken for this call's. */
TEST(stale_contents)
{
    struct grid_case grid;
    struct set set;
    struct set lazy;
    struct cp_verify_report report;
    plant(&grid, CP_OP_ATTENTION, 4, CP_PULL);
    REQUIRE(set_create(&set, &grid) && set_create(&lazy, &grid));
    /* It publishes without packing: the bytes of the call before lie there. */
    int32_t pack = find_step(lazy.schedules[2], CP_STEP_PACK, 0);
    struct cp_schedule *broken = NULL;
    REQUIRE(copy_schedule(lazy.schedules[2], &broken) == CP_OK);
    cp_schedule_destroy(&lazy.schedules[2]);
    lazy.schedules[2] = broken;
    remove_step(broken, pack);
    const struct set *calls[] = {&set, &set, &lazy};
    CHECK_EQ_I64(verify(calls, 3, &report), CP_ERR_INTERNAL);
    CHECK_STR_HAS(cp_last_error()->text, "call 2 ");
    CHECK_STR_HAS(cp_last_error()->text, "read before it is written");
    set_destroy(&set);
    set_destroy(&lazy);
}
