/* Growing lists of buffers and steps. */
#include "schedule/builder.h"

#include <string.h>

#include "base/checked.h"
#include "base/mem.h"

static void fail(struct cp_builder *builder, enum cp_code code)
{
    builder->code = code;
    builder->error = *cp_last_error();
}

void cp_builder_init(struct cp_builder *builder, const struct cp_plan *plan, int rank)
{
    void *block = NULL;
    memset(builder, 0, sizeof *builder);
    enum cp_code code = cp_mem_create(sizeof *builder->schedule, "a schedule", &block);
    if (code != CP_OK) {
        fail(builder, code);
        return;
    }
    builder->schedule = block;
    builder->schedule->plan = plan;
    builder->schedule->rank = rank;
}

enum cp_code cp_builder_take(struct cp_builder *builder, const struct cp_arena *window,
                             const struct cp_arena *scratch, struct cp_schedule **out)
{
    if (builder->code != CP_OK) {
        cp_schedule_destroy(&builder->schedule);
        return cp_fail_as(&builder->error);
    }
    builder->schedule->window_bytes = window->most;
    builder->schedule->scratch_bytes = scratch->most;
    *out = builder->schedule;
    builder->schedule = NULL;
    return CP_OK;
}

/* Makes room for one more element behind `count`. */
static bool grow(struct cp_builder *builder, void *array_address, int32_t count,
                 int32_t *capacity, size_t element_bytes)
{
    void *old = NULL;
    void *bigger = NULL;
    if (builder->code != CP_OK) {
        return false;
    }
    if (count < *capacity) {
        return true;
    }
    int32_t wanted = *capacity == 0 ? 32 : *capacity * 2;
    enum cp_code code =
        cp_mem_create((size_t)wanted * element_bytes, "a schedule", &bigger);
    if (code != CP_OK) {
        fail(builder, code);
        return false;
    }
    memcpy(&old, array_address, sizeof old);
    if (count > 0) {
        memcpy(bigger, old, (size_t)count * element_bytes);
    }
    cp_mem_destroy(array_address);
    memcpy(array_address, &bigger, sizeof bigger);
    *capacity = wanted;
    return true;
}

static struct cp_buffer *add_buffer(struct cp_builder *builder, int32_t *number)
{
    if (builder->code != CP_OK) {
        *number = 0;
        return NULL;
    }
    struct cp_schedule *schedule = builder->schedule;
    if (!grow(builder, &schedule->buffers, schedule->buffer_count,
              &builder->buffer_capacity, sizeof *schedule->buffers)) {
        *number = 0;
        return NULL;
    }
    *number = schedule->buffer_count;
    schedule->buffer_count += 1;
    return &schedule->buffers[*number];
}

int32_t cp_build_tensor(struct cp_builder *builder, enum cp_buffer_kind kind,
                        enum cp_tensor_role role, enum cp_dtype dtype,
                        const int64_t n[CP_AXES])
{
    int32_t number = 0;
    struct cp_buffer *buffer = add_buffer(builder, &number);
    if (buffer != NULL) {
        buffer->kind = (uint8_t)kind;
        buffer->role = (uint8_t)role;
        buffer->dtype = (uint8_t)dtype;
        buffer->owner = builder->schedule->rank;
        memcpy(buffer->n, n, sizeof buffer->n);
    }
    return number;
}

/* Strides and bytes of a plain buffer from its shape. False where they overflow. */
static bool lay_out_plain(struct cp_buffer *buffer, int outermost)
{
    static const int order[CP_AXES] = {0, 2, 1, 3};
    int64_t bytes = cp_dtype_bytes((enum cp_dtype)buffer->dtype);
    bool is_counted = true;
    for (int i = CP_AXES - 1; i >= 0; i--) {
        if (order[i] != outermost) {
            buffer->stride_bytes[order[i]] = bytes;
            is_counted = is_counted && cp_mul_i64(bytes, buffer->n[order[i]], &bytes);
        }
    }
    buffer->stride_bytes[outermost] = bytes;
    return is_counted && cp_mul_i64(bytes, buffer->n[outermost], &buffer->bytes);
}

/* The same of panels. */
static bool lay_out_panels(struct cp_buffer *buffer, const struct cp_panel *panel)
{
    int64_t probe = 0;
    if (!cp_add_i64(buffer->n[1], panel->row_align, &probe) ||
        !cp_mul_i64(cp_round_up(buffer->n[1], panel->row_align), panel->row_bytes,
                    &probe) ||
        !cp_add_i64(probe, CP_PANEL_ALIGN, &probe)) {
        return false;
    }
    buffer->stride_bytes[2] = cp_panel_bytes(panel, buffer->n[1]);
    return cp_mul_i64(buffer->stride_bytes[2], buffer->n[2],
                      &buffer->stride_bytes[0]) &&
           cp_mul_i64(buffer->stride_bytes[0], buffer->n[0], &buffer->bytes);
}

static int32_t place(struct cp_builder *builder, struct cp_arena *arena,
                     enum cp_layout layout, int outermost, enum cp_tensor_role role,
                     enum cp_dtype dtype, const int64_t n[CP_AXES])
{
    int32_t number = cp_build_tensor(builder, arena->kind, role, dtype, n);
    if (builder->code != CP_OK) {
        return number;
    }
    struct cp_buffer *buffer = &builder->schedule->buffers[number];
    const struct cp_panel *panel = cp_schedule_panel(builder->schedule->plan, layout);
    int64_t end = 0;
    buffer->layout = (uint8_t)layout;
    buffer->owner = arena->owner;
    buffer->offset_bytes = arena->bytes;
    if (!(panel != NULL ? lay_out_panels(buffer, panel)
                        : lay_out_plain(buffer, outermost)) ||
        !cp_add_i64(arena->bytes, buffer->bytes, &end) ||
        !cp_add_i64(end, CP_PANEL_ALIGN, &end)) {
        fail(builder,
             cp_fail(CP_ERR_VALUE,
                     "a buffer of this call has more bytes than can be counted"));
        return number;
    }
    arena->bytes = cp_round_up(end - CP_PANEL_ALIGN, CP_PANEL_ALIGN);
    arena->most = arena->bytes > arena->most ? arena->bytes : arena->most;
    return number;
}

int32_t cp_build_buffer(struct cp_builder *builder, struct cp_arena *arena,
                        enum cp_layout layout, enum cp_tensor_role role,
                        enum cp_dtype dtype, const int64_t n[CP_AXES])
{
    return place(builder, arena, layout, 0, role, dtype, n);
}

int32_t cp_build_runs(struct cp_builder *builder, struct cp_arena *arena, int axis,
                      enum cp_tensor_role role, enum cp_dtype dtype,
                      const int64_t n[CP_AXES])
{
    return place(builder, arena, CP_LAYOUT_PLAIN, axis, role, dtype, n);
}

struct cp_box cp_box_none(void)
{
    struct cp_box box = {.buffer = CP_NO_BUFFER};
    return box;
}

struct cp_box cp_box_all(const struct cp_builder *builder, int32_t buffer)
{
    struct cp_box box = {.buffer = buffer};
    if (builder->code == CP_OK && buffer != CP_NO_BUFFER) {
        memcpy(box.n, builder->schedule->buffers[buffer].n, sizeof box.n);
    }
    return box;
}

struct cp_box cp_box_part(struct cp_box box, int axis, int64_t first, int64_t count)
{
    box.first[axis] += first;
    box.n[axis] = count;
    return box;
}

bool cp_box_is_empty(const struct cp_box *box)
{
    return box->n[0] == 0 || box->n[1] == 0 || box->n[2] == 0 || box->n[3] == 0;
}

struct cp_step *cp_build_step(struct cp_builder *builder, enum cp_step_op op,
                              enum cp_lane lane)
{
    struct cp_step *step = &builder->spare;
    if (builder->code == CP_OK) {
        struct cp_schedule *schedule = builder->schedule;
        if (grow(builder, &schedule->steps, schedule->step_count,
                 &builder->step_capacity, sizeof *schedule->steps)) {
            step = &schedule->steps[schedule->step_count];
            schedule->step_count += 1;
            builder->lane_steps[lane] += 1;
        }
    }
    memset(step, 0, sizeof *step);
    step->op = (uint8_t)op;
    step->lane = (uint8_t)lane;
    memcpy(step->after, builder->floor[lane], sizeof step->after);
    for (int arg = 0; arg < CP_STEP_ARGS; arg++) {
        step->arg[arg] = cp_box_none();
    }
    return step;
}

void cp_build_after(struct cp_builder *builder, struct cp_step *step,
                    enum cp_lane other)
{
    step->after[other] = builder->lane_steps[other];
}

struct cp_step *cp_build_move(struct cp_builder *builder, enum cp_step_op op,
                              enum cp_lane lane, struct cp_box dst, struct cp_box src)
{
    if (cp_box_is_empty(&dst)) {
        return &builder->spare;
    }
    struct cp_step *step = cp_build_step(builder, op, lane);
    step->arg[CP_ARG_DST] = dst;
    step->arg[CP_ARG_SRC] = src;
    return step;
}

struct cp_step *cp_build_zero(struct cp_builder *builder, enum cp_lane lane,
                              int32_t buffer)
{
    struct cp_box all = cp_box_all(builder, buffer);
    if (cp_box_is_empty(&all)) {
        return &builder->spare;
    }
    struct cp_step *step = cp_build_step(builder, CP_STEP_ZERO, lane);
    step->arg[CP_ARG_DST] = all;
    return step;
}

void cp_build_publish(struct cp_builder *builder, enum cp_lane lane, int signal,
                      uint32_t value)
{
    struct cp_step *step = cp_build_step(builder, CP_STEP_PUBLISH, lane);
    step->signal = (uint8_t)signal;
    step->value = value;
}

void cp_build_await(struct cp_builder *builder, enum cp_lane lane, int peer, int signal,
                    uint32_t value)
{
    struct cp_step *step = cp_build_step(builder, CP_STEP_AWAIT, lane);
    step->peer = peer;
    step->signal = (uint8_t)signal;
    step->value = value;
}

void cp_build_send(struct cp_builder *builder, enum cp_lane lane, int group, int peer,
                   struct cp_box src)
{
    if (!cp_box_is_empty(&src)) {
        struct cp_step *step = cp_build_step(builder, CP_STEP_SEND, lane);
        step->group = group;
        step->peer = peer;
        step->arg[CP_ARG_SRC] = src;
    }
}

void cp_build_recv(struct cp_builder *builder, enum cp_lane lane, int group, int peer,
                   struct cp_box dst)
{
    if (!cp_box_is_empty(&dst)) {
        struct cp_step *step = cp_build_step(builder, CP_STEP_RECV, lane);
        step->group = group;
        step->peer = peer;
        step->arg[CP_ARG_DST] = dst;
    }
}
