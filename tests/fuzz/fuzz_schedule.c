/* Calls from bytes, through agreement, plan, schedules and proof.
 *
 *   prove    small calls: what the ranks agree on can be planned and written for both kinds of
 *            communicator, and the verifier proves it, several calls in a row;
 *   starve   the same while one allocation fails: a MemoryError or none, nothing left behind, and no
 *            trace of it the next time;
 *   break    fields and steps of schedules are changed: the verifier says where they are wrong, or
 *            takes them, and then they must do all the same;
 *   inflate  sizes of any magnitude: a sentence, or a schedule whose buffers and boxes are in order.
 *
 * In each of them a field of one rank's call may differ from the others', which they must notice. What
 * the verifier takes is checked without it: numbers.h asks whether the outputs come out right, and
 * order.h, where there are few steps, whether no two may collide. */
#include <stddef.h>

#include "../c/grid.h"
#include "../c/order.h"
#include "fuzz.h"
#include "numbers.h"
#include "plan/agree.h"
#include "schedule/verify.h"
#include "schedule/verify_buffer.h"
#include "schedule/verify_step.h"
#include "tensor/tensor.h"

enum {
    MOST_WORLD = 8,
    MOST_CALLS = 3,
    MOST_CHANGES = 3,
    MOST_REPLICATED = 0xffff,
    MOST_CELLS = 1 << 16,
    MOST_ORDERED = 128 /* steps of all ranks; the work grows with the third power */
};

__extension__ typedef __int128 wide;

enum mode { MODE_PROVE, MODE_STARVE, MODE_BREAK, MODE_INFLATE, MODES };

/* What the ranks ask for. */
struct scene {
    struct fuzz_input *in;
    bool is_inflated;
    bool is_promise_broken; /* the lengths are not those that were promised */
    int world;
    struct cp_format format;
    struct cp_record records[MOST_WORLD];
};

/* What comes of it. */
struct set {
    struct cp_plan *plan;
    struct cp_schedule *schedules[MOST_WORLD];
    int world;
};

/* ---- scenes ---- */

/* A size: small, or in an inflated scene anything from `first` on. */
static int64_t read_size(const struct scene *scene, int64_t first, int64_t last)
{
    if (scene->is_inflated && fuzz_flag(scene->in)) {
        int64_t number = fuzz_number(scene->in);
        return number < first ? first : number;
    }
    return fuzz_range(scene->in, first, last);
}

/* A length, which in an inflated scene may be negative. */
static int64_t read_length(const struct scene *scene)
{
    return scene->is_inflated ? fuzz_number(scene->in) : fuzz_range(scene->in, 0, 6);
}

static int64_t read_divisor(struct fuzz_input *in, int64_t n)
{
    int64_t divisor = fuzz_range(in, 1, n < 255 ? n : 255);
    while (n % divisor != 0) {
        divisor -= 1;
    }
    return divisor;
}

/* Lengths of all ranks: equal, or each its own. */
static void read_rows(struct scene *scene, enum cp_size which)
{
    bool is_equal = fuzz_flag(scene->in);
    for (int rank = 0; rank < scene->world; rank++) {
        int64_t *sizes = scene->records[rank].sizes;
        sizes[which] =
            is_equal && rank > 0 ? scene->records[0].sizes[which] : read_length(scene);
    }
}

/* The sum as far as it can be counted; what cannot is for the ranks to refuse. */
static int64_t sum_of(const struct scene *scene, enum cp_size which)
{
    int64_t sum = 0;
    for (int rank = 0; rank < scene->world; rank++) {
        if (!cp_add_i64(sum, scene->records[rank].sizes[which], &sum)) {
            return INT64_MAX;
        }
    }
    return sum;
}

/* An axis of the mask: own, whole, one, or any length. */
static void read_mask_axis(struct scene *scene, enum cp_size which, enum cp_size own,
                           int64_t whole)
{
    int64_t kind = fuzz_range(scene->in, 0, 3);
    for (int rank = 0; rank < scene->world; rank++) {
        int64_t *sizes = scene->records[rank].sizes;
        sizes[which] = kind == 0   ? sizes[own]
                       : kind == 1 ? whole
                       : kind == 2 ? 1
                                   : read_length(scene);
    }
}

static void read_mask(struct scene *scene)
{
    static const int32_t dtypes[] = {CP_DTYPE_BOOL, CP_DTYPE_FLOAT32, CP_DTYPE_NONE};
    struct fuzz_input *in = scene->in;
    struct cp_call *call = &scene->records[0].call;
    int64_t whole_keys = call->kv_replicated != 0
                             ? scene->records[0].sizes[CP_SIZE_KV_ROWS]
                             : sum_of(scene, CP_SIZE_KV_ROWS);
    call->mask_dtype = dtypes[fuzz_range(in, 0, 2)];
    call->mask_kind = call->mask_dtype == CP_DTYPE_BOOL ? CP_MASK_BOOL : CP_MASK_ADD;
    call->mask_dtype =
        call->mask_dtype == CP_DTYPE_NONE ? call->dtype : call->mask_dtype;
    call->mask_batch = fuzz_flag(in) ? 1 : call->batch;
    call->mask_heads = fuzz_flag(in) ? 1 : call->heads;
    read_mask_axis(scene, CP_SIZE_MASK_ROWS, CP_SIZE_Q_ROWS,
                   sum_of(scene, CP_SIZE_Q_ROWS));
    read_mask_axis(scene, CP_SIZE_MASK_KEYS, CP_SIZE_KV_ROWS, whole_keys);
}

/* The lengths as a caller promises them, or others. */
static void read_promise(struct scene *scene)
{
    int64_t q[MOST_WORLD];
    int64_t kv[MOST_WORLD];
    for (int rank = 0; rank < scene->world; rank++) {
        q[rank] = scene->records[rank].sizes[CP_SIZE_Q_ROWS];
        kv[rank] = scene->records[rank].sizes[CP_SIZE_KV_ROWS];
    }
    scene->is_promise_broken = fuzz_range(scene->in, 0, 3) == 3;
    q[0] ^= scene->is_promise_broken;
    scene->records[0].call.check = cp_lengths_hash(q, kv, scene->world);
}

/* As many chunks of heads on all ranks, or, seldom, one more on one of them. */
static void set_chunks(struct scene *scene, uint8_t number)
{
    for (int rank = 0; rank < scene->world; rank++) {
        scene->records[rank].sizes[CP_SIZE_HEAD_CHUNKS] =
            number % (CP_MAX_HEAD_CHUNKS + 2);
    }
    scene->records[0].sizes[CP_SIZE_HEAD_CHUNKS] += number == UINT8_MAX;
}

static void read_attention(struct scene *scene)
{
    struct fuzz_input *in = scene->in;
    struct cp_call *call = &scene->records[0].call;
    uint8_t flags = fuzz_byte(in);
    call->dtype = (int32_t)fuzz_range(in, CP_DTYPE_FLOAT32, CP_DTYPE_FLOAT16);
    call->batch = read_size(scene, 0, 2);
    call->heads = read_size(scene, 1, 9);
    call->kv_heads = (flags & 1) != 0 ? call->heads : read_divisor(in, call->heads);
    call->enable_gqa = call->heads != call->kv_heads;
    call->head_dim = fuzz_range(in, 1, 5);
    call->value_dim = (flags & 2) != 0 ? call->head_dim : fuzz_range(in, 1, 5);
    call->is_causal = (flags & 4) != 0;
    call->want_lse = (flags & 8) != 0;
    call->kv_replicated = (flags & 48) == 48;
    /* No step depends on the scale. */
    call->scale_bits = fuzz_byte(in);
    set_chunks(scene, (uint8_t)call->scale_bits);
    call->format = 1;
    scene->format = grid_format(call);
    scene->format.k.row_align = INT64_C(1) << fuzz_range(in, 0, 4);
    scene->format.v.row_align = INT64_C(1) << fuzz_range(in, 0, 4);
    scene->format.has_plain_keys = scene->format.k.row_align == 16; /* no panels */
    read_rows(scene, CP_SIZE_Q_ROWS);
    read_rows(scene, CP_SIZE_KV_ROWS);
    /* A schedule has steps for every 2048 replicated keys, if anybody looks at them. */
    for (int rank = 0; call->kv_replicated != 0 && rank < scene->world; rank++) {
        scene->records[rank].sizes[CP_SIZE_KV_ROWS] &=
            call->batch != 0 ? MOST_REPLICATED : INT64_MAX;
    }
    if ((flags & 64) != 0) {
        read_mask(scene);
    }
    if ((flags & 128) != 0) {
        read_promise(scene);
    }
}

static void read_cut(struct scene *scene)
{
    struct fuzz_input *in = scene->in;
    struct cp_call *call = &scene->records[0].call;
    call->dtype = (int32_t)fuzz_range(in, CP_DTYPE_FLOAT32, CP_DTYPE_COUNT - 1);
    call->ndim = (int32_t)fuzz_range(in, 1, CP_EXTENTS);
    call->dim = (int32_t)fuzz_range(in, 0, call->ndim - 1);
    for (int axis = 0; axis < call->ndim; axis++) {
        call->extent[axis] = axis < 3 ? read_size(scene, 0, 3) : 1;
    }
    read_rows(scene, CP_SIZE_ROWS);
    if (call->op == CP_OP_GATHER) {
        call->extent[call->dim] = 0;
    } else if (call->op == CP_OP_REDUCE_SCATTER && fuzz_range(in, 0, 7) < 7) {
        call->extent[call->dim] = sum_of(scene, CP_SIZE_ROWS);
    }
}

/* One rank's call in one field, or its status, is another than the others'. */
static void read_oddity(struct scene *scene)
{
    struct fuzz_input *in = scene->in;
    struct cp_record *odd = &scene->records[fuzz_range(in, 0, scene->world - 1)];
    unsigned char *call = (unsigned char *)&odd->call;
    if (fuzz_range(in, 0, 7) == 7) {
        odd->status.code = (int32_t)fuzz_range(in, CP_ERR_VALUE, CP_CODE_COUNT - 1);
        memset(odd->status.text, (int)fuzz_range(in, 1, 255), CP_STATUS_TEXT - 1);
    } else {
        size_t at = fuzz_byte(in) % (sizeof odd->call / 4) * 4;
        int32_t number = (int32_t)fuzz_number(in);
        memcpy(call + at, &number, sizeof number);
    }
}

/* A scene of `world` ranks, or of any number where that is 0. */
static void read_scene(struct fuzz_input *in, int world, bool is_inflated,
                       struct scene *out)
{
    memset(out, 0, sizeof *out);
    out->in = in;
    out->is_inflated = is_inflated;
    out->world = world != 0 ? world : (int)fuzz_range(in, 1, MOST_WORLD);
    uint8_t oddity = fuzz_byte(in);
    struct cp_call *call = &out->records[0].call;
    call->op = (int32_t)fuzz_range(in, CP_OP_NONE, CP_OP_AGREE);
    call->variant = (int32_t)fuzz_range(in, CP_EVEN, CP_ANYTHING);
    call->rotate = (int32_t)fuzz_range(in, CP_ROTATE_AUTO, CP_ROTATE_ALLTOALL);
    call->ring_degree = (int32_t)read_divisor(in, out->world);
    call->ulysses_degree = out->world / call->ring_degree;
    if (cp_call_is_attention(call)) {
        read_attention(out);
    } else if (call->op != CP_OP_NONE && call->op != CP_OP_AGREE) {
        read_cut(out);
    }
    for (int rank = 1; rank < out->world; rank++) {
        out->records[rank].call = *call;
    }
    if (oddity >= 192 && out->world > 1) {
        read_oddity(out);
    }
}

/* ---- sets ---- */

static void destroy_set(struct set *set)
{
    for (int rank = 0; rank < set->world; rank++) {
        cp_schedule_destroy(&set->schedules[rank]);
    }
    cp_plan_destroy(&set->plan);
}

static bool has_schedule(const struct scene *scene)
{
    int32_t op = scene->records[0].call.op;
    return op != CP_OP_NONE && op != CP_OP_AGREE && op != CP_OP_SHARD;
}

static void check_plan(const struct scene *scene, const struct cp_plan *plan)
{
    FUZZ_CHECK(cp_plan_matches(plan, scene->records, scene->world), "no match");
    for (int rank = 0; rank < scene->world; rank++) {
        FUZZ_CHECK(plan->q_rows == NULL || (plan->q_rows[rank].count >= 0 &&
                                            plan->kv_rows[rank].count >= 0),
                   "rows of rank %d", rank);
        FUZZ_CHECK(plan->cut == NULL || plan->cut[rank].count >= 0, "rows of rank %d",
                   rank);
    }
}

/* On failure the set holds what there was; it is to be destroyed all the same. */
static enum cp_code create_set(const struct scene *scene, enum cp_transport transport,
                               struct set *set)
{
    *set = (struct set){.world = scene->world};
    CP_TRY(cp_plan_create(scene->records, scene->world, &scene->format, &set->plan));
    check_plan(scene, set->plan);
    for (int rank = 0; rank < scene->world && has_schedule(scene); rank++) {
        CP_TRY(cp_schedule_create(set->plan, rank, transport, &set->schedules[rank]));
    }
    return CP_OK;
}

static enum cp_code verify(const struct set *const *calls, int count)
{
    const struct cp_schedule *all[MOST_CALLS * MOST_WORLD];
    struct cp_verify_report report;
    int world = calls[0]->world;
    for (int call = 0; call < count; call++) {
        for (int rank = 0; rank < world; rank++) {
            all[call * world + rank] = calls[call]->schedules[rank];
        }
    }
    return cp_schedule_verify(all, count, world, &report);
}

/* Buffers and steps by themselves, which needs no memory. */
static enum cp_code check_alone(const struct set *set)
{
    const struct cp_schedule *of_call[MOST_WORLD];
    for (int rank = 0; rank < set->world; rank++) {
        of_call[rank] = set->schedules[rank];
    }
    for (int rank = 0; rank < set->world; rank++) {
        CP_TRY(cp_verify_buffers(of_call, 0, rank));
        CP_TRY(cp_verify_steps(of_call[rank], 0));
    }
    return CP_OK;
}

/* The verifier has taken the set: is it right to? */
static void check_taken(const struct set *set, uint64_t seed)
{
    const struct cp_schedule *of_call[MOST_WORLD] = {NULL};
    char text[NUMBERS_TEXT];
    int32_t steps = 0;
    for (int rank = 0; rank < set->world; rank++) {
        of_call[rank] = set->schedules[rank];
        steps += of_call[rank]->step_count;
    }
    FUZZ_CHECK(numbers_are_right(of_call, set->world, seed, text), "%s", text);
    FUZZ_CHECK(steps > MOST_ORDERED || order_is_safe(of_call, set->world),
               "two steps may collide");
}

/* Two scenes: one call of the first, both, or both and the first once more. */
static enum cp_code prove(const struct scene scenes[2], int count,
                          enum cp_transport transport)
{
    struct set sets[2] = {{.world = 0}, {.world = 0}};
    const struct set *const calls[MOST_CALLS] = {&sets[0], &sets[1], &sets[0]};
    enum cp_code code = create_set(&scenes[0], transport, &sets[0]);
    if (code == CP_OK && count > 1) {
        code = create_set(&scenes[1], transport, &sets[1]);
    }
    if (code == CP_OK && has_schedule(&scenes[0])) {
        code = verify(calls, count);
        for (int i = 0; code == CP_OK && i < (count > 1 ? 2 : 1); i++) {
            check_taken(&sets[i], (uint64_t)count);
        }
    }
    destroy_set(&sets[0]);
    destroy_set(&sets[1]);
    return code;
}

static void check_proved(const struct scene scenes[2], int count,
                         enum cp_transport transport)
{
    char text[2][200];
    cp_call_print(&scenes[0].records[0], text[0], sizeof text[0]);
    cp_call_print(&scenes[1].records[0], text[1], sizeof text[1]);
    FUZZ_CHECK(prove(scenes, count, transport) == CP_OK,
               "%d ranks, R=%d, %s, %d calls, rank 0: %s; %s: %s", scenes[0].world,
               (int)scenes[0].records[0].call.ring_degree, cp_transport_name(transport),
               count, text[0], count > 1 ? text[1] : "-", cp_last_error()->text);
}

/* ---- the modes ---- */

static bool are_equal(const struct scene *scene, enum cp_size which)
{
    bool are = true;
    for (int rank = 1; rank < scene->world; rank++) {
        are =
            are && scene->records[rank].sizes[which] == scene->records[0].sizes[which];
    }
    return are;
}

/* What the ranks have to refuse although their calls are equal. */
static bool is_refused(const struct scene *scene)
{
    const struct cp_call *call = &scene->records[0].call;
    if (call->op == CP_OP_REDUCE_SCATTER) {
        return call->extent[call->dim] != sum_of(scene, CP_SIZE_ROWS);
    }
    if (!cp_call_is_attention(call)) {
        return false;
    }
    if (scene->is_promise_broken || !are_equal(scene, CP_SIZE_HEAD_CHUNKS) ||
        scene->records[0].sizes[CP_SIZE_HEAD_CHUNKS] > CP_MAX_HEAD_CHUNKS ||
        (call->kv_replicated != 0 && !are_equal(scene, CP_SIZE_KV_ROWS))) {
        return true;
    }
    return call->variant == CP_EVEN && call->kv_replicated == 0 &&
           (!are_equal(scene, CP_SIZE_Q_ROWS) || !are_equal(scene, CP_SIZE_KV_ROWS) ||
            call->heads % call->ulysses_degree != 0);
}

/* Do the ranks agree? Then they do not differ in anything that a plan reads. */
static bool agree(const struct scene *scene)
{
    enum cp_code code = cp_agree(scene->records, scene->world);
    if (code != CP_OK) {
        fuzz_check_sentence(code, "");
        FUZZ_CHECK(cp_last_error()->rank < scene->world, "rank %d",
                   (int)cp_last_error()->rank);
        return false;
    }
    FUZZ_CHECK(!is_refused(scene), "they must not agree");
    for (int rank = 0; rank < scene->world; rank++) {
        const struct cp_record *record = &scene->records[rank];
        FUZZ_CHECK(
            memcmp(&record->call, &scene->records[0].call, sizeof record->call) == 0,
            "rank %d differs", rank);
        FUZZ_CHECK(record->status.code == CP_OK, "rank %d has an error", rank);
    }
    return true;
}

static void starve(const struct scene scenes[2], int count, enum cp_transport transport,
                   int64_t after)
{
    cp_mem_fail_after(after);
    enum cp_code code = prove(scenes, count, transport);
    cp_mem_fail_after(-1);
    FUZZ_CHECK(code == CP_OK || code == CP_ERR_NO_MEMORY, "%s", cp_last_error()->text);
    if (code != CP_OK) {
        fuzz_check_sentence(code, "cannot allocate");
    }
}

/* A number in place of 1, 4 or 8 bytes from `first` on, before `end`. */
static void change_field(struct fuzz_input *in, void *object, size_t first, size_t end)
{
    static const size_t widths[] = {8, 4, 1};
    size_t bytes = widths[fuzz_range(in, 0, 2)];
    size_t at = first + fuzz_byte(in) % (end - first) / bytes * bytes;
    int64_t number = fuzz_number(in);
    memcpy((unsigned char *)object + at, &number, bytes);
}

/* A box one further or one longer, of another buffer, or another step's. */
static void change_box(struct fuzz_input *in, const struct cp_schedule *schedule,
                       struct cp_step *step, const struct cp_step *other)
{
    struct cp_box *box = &step->arg[fuzz_range(in, 0, CP_STEP_ARGS - 1)];
    const struct cp_box *another = &other->arg[fuzz_range(in, 0, CP_STEP_ARGS - 1)];
    int64_t axis = fuzz_range(in, 0, CP_AXES - 1);
    switch (fuzz_range(in, 0, 4)) {
    case 0:
        box->first[axis] += fuzz_range(in, 0, 2) - 1;
        break;
    case 1:
        box->n[axis] -= 1;
        box->first[axis] += fuzz_range(in, 0, 1);
        break;
    case 2:
        box->buffer = fuzz_byte(in) % schedule->buffer_count;
        break;
    case 3:
        box->buffer = CP_NO_BUFFER;
        break;
    default:
        *box = *another;
        break;
    }
}

/* What a step waits for or says that it did. */
static void change_order(struct fuzz_input *in, const struct cp_schedule *schedule,
                         struct cp_step *step)
{
    int64_t by = fuzz_range(in, 0, 2) - 1;
    int64_t lane = fuzz_range(in, 0, CP_LANES - 1);
    switch (fuzz_range(in, 0, 5)) {
    case 0:
        step->after[lane] = 0;
        break;
    case 1:
        step->after[lane] += (int32_t)by;
        break;
    case 2:
        step->value += (uint32_t)by;
        break;
    case 3:
        step->peer = (step->peer + 1) % schedule->plan->world;
        break;
    case 4:
        step->group += (int32_t)by;
        break;
    default:
        step->lane = (uint8_t)lane;
        break;
    }
}

/* A bool of any byte is one of the two that it may be. */
static bool as_a_bool(const bool *flag)
{
    unsigned char byte = 0;
    memcpy(&byte, flag, 1);
    return (byte & 1) != 0;
}

/* A field of the step or of a box is any number; positions are any or the next one. */
static void change_step(struct fuzz_input *in, struct cp_step *step)
{
    int64_t *positions[] = {&step->q_first, &step->k_first, &step->head_first,
                            &step->kv_head_first};
    int64_t *position = positions[fuzz_range(in, 0, 3)];
    int64_t arg = fuzz_range(in, 0, CP_STEP_ARGS - 1);
    switch (fuzz_range(in, 0, 5)) {
    case 0:
        *position = fuzz_number(in);
        break;
    case 1:
        *position += fuzz_range(in, 0, 2) - 1;
        break;
    case 2:
        step->is_causal = !step->is_causal;
        break;
    case 3:
        step->is_first = !step->is_first;
        break;
    case 4:
        change_field(in, &step->arg[arg], 0, sizeof step->arg[arg]);
        break;
    default:
        change_field(in, step, 0, offsetof(struct cp_step, arg));
        break;
    }
    step->is_causal = as_a_bool(&step->is_causal);
    step->is_first = as_a_bool(&step->is_first);
}

/* A length or stride, another's place, more or fewer bytes, or any field. */
static void change_buffer(struct fuzz_input *in, const struct cp_schedule *schedule,
                          struct cp_buffer *buffer)
{
    const struct cp_buffer *other =
        &schedule->buffers[fuzz_byte(in) % schedule->buffer_count];
    int64_t axis = fuzz_range(in, 0, CP_AXES - 1);
    switch (fuzz_range(in, 0, 6)) {
    case 0:
        buffer->n[axis] = fuzz_number(in);
        break;
    case 1:
        buffer->stride_bytes[axis] = other->stride_bytes[fuzz_range(in, 0, 3)];
        break;
    case 2:
        buffer->offset_bytes = other->offset_bytes;
        break;
    case 3:
        buffer->offset_bytes += 1;
        break;
    case 4:
        buffer->bytes -= 1;
        break;
    case 5:
        buffer->role = other->role;
        break;
    default:
        change_field(in, buffer, 0, sizeof *buffer);
        break;
    }
}

static void change_schedule(struct fuzz_input *in, struct cp_schedule *schedule)
{
    int32_t *counts[] = {&schedule->buffer_count, &schedule->step_count};
    int64_t *sizes[] = {&schedule->window_bytes, &schedule->scratch_bytes};
    int64_t *size = sizes[fuzz_flag(in)];
    switch (fuzz_range(in, 0, 3)) {
    case 0:
        schedule->rank = (int)fuzz_number(in);
        break;
    case 1:
        *size = fuzz_number(in);
        break;
    case 2:
        *size -= 1;
        break;
    default:
        *counts[fuzz_flag(in)] -= 1;
        break;
    }
}

/* What comes after step `at` of its lane counts `by` more. */
static void recount(struct cp_schedule *schedule, int32_t at, int32_t by)
{
    int lane = schedule->steps[at].lane;
    int32_t place = 0;
    for (int32_t i = 0; i < at; i++) {
        place += schedule->steps[i].lane == lane;
    }
    for (int32_t i = 0; i < schedule->step_count; i++) {
        int32_t *after = &schedule->steps[i].after[lane];
        *after += *after > place ? by : 0;
    }
}

static void remove_step(struct cp_schedule *schedule, int32_t at)
{
    struct cp_step *steps = schedule->steps;
    recount(schedule, at, -1);
    schedule->step_count -= 1;
    memmove(&steps[at], &steps[at + 1],
            (size_t)(schedule->step_count - at) * sizeof *steps);
}

/* Once more, right behind itself. */
static void repeat_step(struct cp_schedule *schedule, int32_t at)
{
    void *block = NULL;
    size_t count = (size_t)schedule->step_count;
    enum cp_code code =
        cp_mem_create((count + 1) * sizeof *schedule->steps, "a step", &block);
    FUZZ_CHECK(code == CP_OK, "%s", cp_last_error()->text);
    struct cp_step *steps = block;
    size_t first = (size_t)at + 1;
    recount(schedule, at, 1);
    memcpy(steps, schedule->steps, first * sizeof *steps);
    memcpy(&steps[first], &schedule->steps[at], (count - first + 1) * sizeof *steps);
    cp_mem_destroy(&schedule->steps);
    schedule->steps = steps;
    schedule->step_count += 1;
}

/* Changes one thing. */
static void change(struct fuzz_input *in, struct cp_schedule *schedule)
{
    struct cp_step *steps = schedule->steps;
    int32_t count = schedule->step_count;
    if (count == 0 || schedule->buffer_count == 0) {
        return;
    }
    int32_t at = fuzz_byte(in) % count;
    int32_t other = fuzz_byte(in) % count;
    struct cp_step kept = steps[at];
    switch (fuzz_range(in, 0, 10)) {
    case 0:
        change_schedule(in, schedule);
        break;
    case 1:
        remove_step(schedule, at);
        break;
    case 2:
        repeat_step(schedule, at);
        break;
    case 3:
        steps[at] = steps[other];
        break;
    case 4:
        steps[at] = steps[other];
        steps[other] = kept;
        break;
    case 5:
    case 6:
        change_box(in, schedule, &steps[at], &steps[other]);
        break;
    case 7:
        change_order(in, schedule, &steps[at]);
        break;
    case 8:
        change_step(in, &steps[at]);
        break;
    default:
        change_buffer(in, schedule,
                      &schedule->buffers[fuzz_byte(in) % schedule->buffer_count]);
        break;
    }
}

/* Cells that a proof would hold, as far as they matter: a buffer may have become of any size. */
static int64_t cells_of(const struct set *set)
{
    int64_t cells = 0;
    for (int rank = 0; rank < set->world; rank++) {
        for (int32_t i = 0; i < set->schedules[rank]->buffer_count; i++) {
            int64_t own = 1;
            for (int axis = 0; axis < CP_AXES && own <= MOST_CELLS; axis++) {
                int64_t n = set->schedules[rank]->buffers[i].n[axis];
                own *= n < 1 ? 1 : n < MOST_CELLS ? n : MOST_CELLS;
            }
            cells += own;
        }
    }
    return cells;
}

static void break_schedule(const struct scene *scene, enum cp_transport transport)
{
    struct set set;
    const struct set *const calls[] = {&set, &set};
    struct fuzz_input *in = scene->in;
    enum cp_code code = create_set(scene, transport, &set);
    FUZZ_CHECK(code == CP_OK, "%s", cp_last_error()->text);
    int64_t changes = fuzz_range(in, 0, MOST_CHANGES);
    for (int64_t i = 0; i < changes; i++) {
        change(in, set.schedules[fuzz_range(in, 0, set.world - 1)]);
    }
    bool is_small = cells_of(&set) <= MOST_CELLS;
    int count = (int)fuzz_range(in, 1, 2);
    code = is_small ? verify(calls, count) : check_alone(&set);
    if (code == CP_OK && is_small) {
        check_taken(&set, (uint64_t)fuzz_byte(in));
    }
    if (code != CP_OK) {
        FUZZ_CHECK(changes > 0 && code == CP_ERR_INTERNAL, "%d: %s", (int)code,
                   cp_last_error()->text);
        fuzz_check_sentence(code, "call 0 rank ");
    }
    destroy_set(&set);
}

/* Can a tensor of this shape be, of any dtype? */
static bool is_shape(int ndim, const int64_t *shape)
{
    struct cp_tensor tensor;
    return cp_tensor_init_compact(&tensor, NULL, CP_DTYPE_COMPLEX128, ndim, shape) ==
           CP_OK;
}

/* Could all ranks have given what they say? */
static bool can_be(const struct scene *scene)
{
    const struct cp_call *call = &scene->records[0].call;
    int64_t dim = call->head_dim > call->value_dim ? call->head_dim : call->value_dim;
    int64_t cut[CP_EXTENTS];
    memcpy(cut, call->extent, sizeof cut);
    cut[call->dim] = sum_of(scene, CP_SIZE_ROWS);
    bool is_good = is_shape(call->ndim, cut);
    for (int rank = 0; rank < scene->world; rank++) {
        const int64_t *sizes = scene->records[rank].sizes;
        const int64_t q[] = {call->batch, sizes[CP_SIZE_Q_ROWS], call->heads, dim};
        const int64_t kv[] = {call->batch, sizes[CP_SIZE_KV_ROWS], call->kv_heads, dim};
        const int64_t mask[] = {call->mask_batch, call->mask_heads,
                                sizes[CP_SIZE_MASK_ROWS], sizes[CP_SIZE_MASK_KEYS]};
        cut[call->dim] = sizes[CP_SIZE_ROWS];
        is_good = is_good && is_shape(CP_AXES, q) && is_shape(CP_AXES, kv) &&
                  is_shape(CP_AXES, mask) && is_shape(call->ndim, cut);
    }
    return is_good;
}

/* Have windows and workspaces room for what was laid out in them, in numbers that do not overflow? */
static void check_room(const struct set *set)
{
    for (int rank = 0; rank < set->world; rank++) {
        const struct cp_schedule *schedule = set->schedules[rank];
        for (int32_t i = 0; i < schedule->buffer_count; i++) {
            const struct cp_buffer *buffer = &schedule->buffers[i];
            const int64_t *n = buffer->n;
            const struct cp_panel *panel =
                cp_schedule_panel(set->plan, (enum cp_layout)buffer->layout);
            bool is_window = buffer->kind == CP_BUFFER_WINDOW;
            wide bytes =
                panel != NULL
                    ? (wide)n[0] * n[2]
                    : (wide)n[0] * n[2] * cp_dtype_bytes((enum cp_dtype)buffer->dtype);
            wide rows =
                panel != NULL ? (wide)panel->row_bytes * n[1] : (wide)n[3] * n[1];
            if (buffer->kind == CP_BUFFER_INPUT || buffer->kind == CP_BUFFER_OUTPUT) {
                continue;
            }
            FUZZ_CHECK(buffer->offset_bytes >= 0 && buffer->bytes >= bytes * rows &&
                           (wide)buffer->offset_bytes + buffer->bytes <=
                               (is_window ? set->schedules[buffer->owner]->window_bytes
                                          : schedule->scratch_bytes),
                       "rank %d: buffer %d has no room", rank, (int)i);
        }
    }
}

/* What was written, if anything was, has every buffer and box inside what it lies in. */
static void inflate(const struct scene *scene, enum cp_transport transport)
{
    struct set set;
    enum cp_code code = create_set(scene, transport, &set);
    if (code != CP_OK) {
        FUZZ_CHECK(code == CP_ERR_VALUE, "%s", cp_last_error()->text);
        fuzz_check_sentence(code, "");
    } else if (has_schedule(scene)) {
        check_room(&set);
    }
    if (code == CP_OK && has_schedule(scene) && can_be(scene)) {
        FUZZ_CHECK(check_alone(&set) == CP_OK, "%s", cp_last_error()->text);
    }
    destroy_set(&set);
}

/* One call, or several in a row with another one among them. */
static void prove_calls(const struct scene *first, enum mode mode, int count,
                        enum cp_transport transport, int64_t after)
{
    struct scene scenes[2];
    memcpy(&scenes[0], first, sizeof scenes[0]);
    read_scene(first->in, first->world, false, &scenes[1]);
    if (!agree(&scenes[1]) || !has_schedule(&scenes[0]) || !has_schedule(&scenes[1])) {
        count = 1;
    }
    if (mode == MODE_STARVE) {
        starve(scenes, count, transport, after);
    }
    check_proved(scenes, count, transport == CP_TWO_SIDED ? CP_PULL : transport);
    check_proved(scenes, count, CP_TWO_SIDED);
}

static void run(const struct scene *scene, enum mode mode, int count,
                enum cp_transport transport, int64_t after)
{
    switch (mode) {
    case MODE_PROVE:
    case MODE_STARVE:
        prove_calls(scene, mode, count, transport, after);
        return;
    case MODE_BREAK:
        if (has_schedule(scene)) {
            break_schedule(scene, transport);
        }
        return;
    case MODE_INFLATE:
        inflate(scene, transport);
        return;
    case MODES:
        break;
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    struct fuzz_input in = {data, bytes};
    struct scene scene;
    int64_t live = cp_mem_stats().live_blocks;
    enum mode mode = (enum mode)fuzz_range(&in, 0, MODES - 1);
    uint8_t road = fuzz_byte(&in);
    enum cp_transport transport = (road & 1) == 0   ? CP_TWO_SIDED
                                  : (road & 2) == 0 ? CP_PULL
                                  : (road & 4) == 0 ? CP_FETCH
                                                    : CP_PUSH;
    int count = (int)fuzz_range(&in, 1, MOST_CALLS);
    int64_t after = fuzz_byte(&in);
    read_scene(&in, 0, mode == MODE_INFLATE, &scene);
    if (agree(&scene)) {
        run(&scene, mode, count, transport, after);
    }
    FUZZ_CHECK(cp_mem_stats().live_blocks == live, "memory is left behind");
    return 0;
}
