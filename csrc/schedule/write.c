/* What the writers of attention share: shapes, masks, positions. */
#include "schedule/write.h"

#include <string.h>

/* What a rank answers for: its group's rows and a share of the heads, or, where it
 * needs nobody's keys, its own rows and all heads. */
static struct cp_range rows_of(const struct cp_plan *plan, int rank)
{
    return plan->signature.call.kv_replicated != 0 ? plan->q_rows[rank]
                                                   : cp_plan_group_rows(plan, rank);
}

static struct cp_range heads_of(const struct cp_plan *plan, int rank, int chunk)
{
    struct cp_range all = {.first = 0, .count = plan->signature.call.heads};
    return plan->signature.call.kv_replicated != 0
               ? all
               : cp_plan_chunk_heads(plan, cp_plan_ulysses_rank(plan, rank), chunk);
}

static enum cp_mask_source mask_source_of(const struct cp_plan *plan)
{
    if (plan->mask_keys == CP_AXIS_OWN) {
        return CP_MASK_OF_KEYS;
    }
    bool is_shared = plan->ulysses > 1 && plan->signature.call.kv_replicated == 0;
    return plan->mask_rows == CP_AXIS_OWN && is_shared ? CP_MASK_OF_ROWS
                                                       : CP_MASK_LOCAL;
}

void cp_writer_init(struct cp_writer *writer, const struct cp_plan *plan, int rank)
{
    memset(writer, 0, sizeof *writer);
    cp_builder_init(&writer->builder, plan, rank);
    writer->window.kind = CP_BUFFER_WINDOW;
    writer->window.owner = rank;
    writer->scratch.kind = CP_BUFFER_SCRATCH;
    writer->scratch.owner = rank;
    writer->plan = plan;
    writer->call = &plan->signature.call;
    writer->rank = rank;
    writer->r = cp_plan_ring_rank(plan, rank);
    writer->u = cp_plan_ulysses_rank(plan, rank);
    cp_writer_set_chunk(writer, 0);
    writer->rows = rows_of(plan, rank);
    writer->dtype = (enum cp_dtype)writer->call->dtype;
    writer->sum = cp_dtype_sum(writer->dtype);
    writer->is_backward = writer->call->op == CP_OP_ATTENTION_BACKWARD;
    writer->packs = !writer->is_backward && !plan->format.has_plain_keys;
    writer->has_mask = writer->call->mask_kind != CP_MASK_NONE;
    writer->mask_source = mask_source_of(plan);
    writer->mask = cp_writer_tensor(writer, CP_BUFFER_INPUT, CP_TENSOR_MASK);
    writer->group_mask = CP_NO_BUFFER;
}

void cp_writer_set_chunk(struct cp_writer *writer, int chunk)
{
    writer->chunk = chunk;
    writer->heads = heads_of(writer->plan, writer->rank, chunk);
    writer->kv_heads = cp_kv_heads_of(writer->heads, writer->plan->heads_per_kv);
}

void cp_writer_arrive(struct cp_writer *writer)
{
    writer->arrived = writer->builder.lane_steps[CP_LANE_IN];
}

enum cp_code cp_writer_take(struct cp_writer *writer, struct cp_schedule **out)
{
    return cp_builder_take(&writer->builder, &writer->window, &writer->scratch, out);
}

/* Last axis and element type of a role. */
static int64_t dim_of(const struct cp_writer *writer, enum cp_tensor_role role)
{
    switch (role) {
    case CP_TENSOR_Q:
    case CP_TENSOR_K:
    case CP_TENSOR_DQ:
    case CP_TENSOR_DK:
        return writer->call->head_dim;
    case CP_TENSOR_V:
    case CP_TENSOR_OUT:
    case CP_TENSOR_DOUT:
    case CP_TENSOR_DV:
        return writer->call->value_dim;
    case CP_TENSOR_MASK:
    case CP_TENSOR_LSE:
    case CP_TENSOR_DLSE:
    case CP_TENSOR_DELTA:
    case CP_TENSOR_WHOLE:
    case CP_TENSOR_SHARE:
    case CP_TENSORS:
        break;
    }
    return 1;
}

enum cp_dtype cp_writer_dtype(const struct cp_writer *writer, enum cp_tensor_role role)
{
    bool is_row_scalar =
        role == CP_TENSOR_LSE || role == CP_TENSOR_DLSE || role == CP_TENSOR_DELTA;
    return is_row_scalar ? writer->sum : writer->dtype;
}

int32_t cp_writer_rows(struct cp_writer *writer, struct cp_arena *arena,
                       enum cp_layout layout, enum cp_tensor_role role, int64_t rows,
                       int64_t heads)
{
    const int64_t n[CP_AXES] = {writer->call->batch, rows, heads, dim_of(writer, role)};
    return cp_build_buffer(&writer->builder, arena, layout, role,
                           cp_writer_dtype(writer, role), n);
}

int32_t cp_writer_keys(struct cp_writer *writer, struct cp_arena *arena,
                       enum cp_tensor_role role, int64_t rows, int64_t heads)
{
    enum cp_layout packed = role == CP_TENSOR_K ? CP_LAYOUT_K : CP_LAYOUT_V;
    return cp_writer_rows(writer, arena, writer->packs ? packed : CP_LAYOUT_PLAIN, role,
                          rows, heads);
}

enum cp_step_op cp_writer_bring(const struct cp_writer *writer)
{
    return writer->packs ? CP_STEP_PACK : CP_STEP_COPY;
}

int32_t cp_writer_sums(struct cp_writer *writer, struct cp_arena *arena,
                       enum cp_tensor_role role, int64_t rows, int64_t heads)
{
    const int64_t n[CP_AXES] = {writer->call->batch, rows, heads, dim_of(writer, role)};
    return cp_build_buffer(&writer->builder, arena, CP_LAYOUT_PLAIN, role, writer->sum,
                           n);
}

int32_t cp_writer_runs(struct cp_writer *writer, struct cp_arena *arena,
                       enum cp_tensor_role role, enum cp_dtype dtype, int64_t rows,
                       int64_t heads)
{
    const int64_t n[CP_AXES] = {writer->call->batch, rows, heads, dim_of(writer, role)};
    return cp_build_runs(&writer->builder, arena, 1, role, dtype, n);
}

int32_t cp_writer_mask(struct cp_writer *writer, struct cp_arena *arena, int axis,
                       int64_t heads, int64_t rows, int64_t keys)
{
    const int64_t n[CP_AXES] = {writer->call->mask_batch,
                                writer->call->mask_heads == 1 ? 1 : heads, rows, keys};
    return cp_build_runs(&writer->builder, arena, axis, CP_TENSOR_MASK,
                         (enum cp_dtype)writer->call->mask_dtype, n);
}

bool cp_writer_is_of_keys(const struct cp_writer *writer, enum cp_tensor_role role)
{
    return role == CP_TENSOR_MASK ? writer->mask_source == CP_MASK_OF_KEYS
                                  : role == CP_TENSOR_K || role == CP_TENSOR_V ||
                                        role == CP_TENSOR_DK || role == CP_TENSOR_DV;
}

/* Does the call have this tensor of the caller? */
static bool has_tensor(const struct cp_writer *writer, enum cp_tensor_role role)
{
    bool is_lse = role == CP_TENSOR_LSE && writer->call->op == CP_OP_ATTENTION;
    if (is_lse || role == CP_TENSOR_DLSE) {
        return writer->call->want_lse != 0;
    }
    return role != CP_TENSOR_MASK || writer->has_mask;
}

int32_t cp_writer_tensor(struct cp_writer *writer, enum cp_buffer_kind kind,
                         enum cp_tensor_role role)
{
    const struct cp_call *call = writer->call;
    const struct cp_plan *plan = writer->plan;
    int rank = writer->rank;
    if (!has_tensor(writer, role)) {
        return CP_NO_BUFFER;
    }
    if (role == CP_TENSOR_MASK) {
        const int64_t n[CP_AXES] = {call->mask_batch, call->mask_heads,
                                    cp_plan_size(plan, rank, CP_SIZE_MASK_ROWS),
                                    cp_plan_size(plan, rank, CP_SIZE_MASK_KEYS)};
        return cp_build_tensor(&writer->builder, kind, role,
                               (enum cp_dtype)call->mask_dtype, n);
    }
    bool is_kv = cp_writer_is_of_keys(writer, role);
    const int64_t n[CP_AXES] = {
        call->batch, cp_plan_size(plan, rank, is_kv ? CP_SIZE_KV_ROWS : CP_SIZE_Q_ROWS),
        is_kv ? call->kv_heads : call->heads, dim_of(writer, role)};
    return cp_build_tensor(&writer->builder, kind, role, cp_writer_dtype(writer, role),
                           n);
}

struct cp_box cp_writer_box(const struct cp_writer *writer, int32_t buffer)
{
    return cp_box_all(&writer->builder, buffer);
}

struct cp_box cp_writer_heads(struct cp_box box, struct cp_range heads)
{
    return cp_box_part(box, 2, heads.first, heads.count);
}

struct cp_box cp_writer_row_range(struct cp_box box, int64_t first, int64_t count)
{
    return cp_box_part(box, 1, first, count);
}

bool cp_writer_mask_travels(const struct cp_writer *writer, enum cp_mask_source source)
{
    return writer->has_mask && writer->mask_source == source;
}

/* The same of a buffer that begins at row `row_first` and head `head_first`. */
static struct cp_box mask_part(const struct cp_writer *writer, int32_t buffer,
                               int64_t row_first, int64_t head_first,
                               const struct cp_block *block)
{
    struct cp_box box = cp_writer_box(writer, buffer);
    if (writer->call->mask_heads != 1) {
        box =
            cp_box_part(box, 1, writer->heads.first - head_first, writer->heads.count);
    }
    if (writer->plan->mask_rows != CP_AXIS_ONE) {
        box = cp_box_part(box, 2, writer->rows.first - row_first, writer->rows.count);
    }
    if (writer->plan->mask_keys == CP_AXIS_WHOLE) {
        box = cp_box_part(box, 3, block->keys.first, block->keys.count);
    }
    return box;
}

struct cp_box cp_writer_mask_box(const struct cp_writer *writer, int32_t of_keys,
                                 int64_t head_first, const struct cp_block *block)
{
    bool is_own = writer->plan->mask_rows == CP_AXIS_OWN;
    if (!writer->has_mask) {
        return cp_box_none();
    }
    switch (writer->mask_source) {
    case CP_MASK_OF_KEYS:
        return mask_part(writer, of_keys, 0, head_first, block);
    case CP_MASK_OF_ROWS:
        return mask_part(writer, writer->group_mask, writer->rows.first,
                         writer->heads.first, block);
    case CP_MASK_LOCAL:
        break;
    }
    return mask_part(writer, writer->mask, is_own ? writer->rows.first : 0, 0, block);
}

bool cp_writer_is_live(const struct cp_writer *writer, int rank, int chunk,
                       const struct cp_block *block)
{
    struct cp_range rows = rows_of(writer->plan, rank);
    struct cp_range heads = heads_of(writer->plan, rank, chunk);
    if (rows.count == 0 || heads.count == 0 || block->keys.count == 0 ||
        writer->call->batch == 0) {
        return false;
    }
    return writer->call->is_causal == 0 ||
           block->keys.first <= rows.first + rows.count - 1;
}

/* A step that meets the rows of this rank with a block. */
static struct cp_step *compute(struct cp_writer *writer, enum cp_step_op op,
                               const struct cp_block *block)
{
    int64_t last_key = block->keys.first + block->keys.count - 1;
    struct cp_step *step = cp_build_step(&writer->builder, op, CP_LANE_COMPUTE);
    step->after[CP_LANE_IN] = writer->arrived;
    step->q_first = writer->rows.first;
    step->k_first = block->keys.first;
    step->head_first = writer->heads.first;
    step->kv_head_first = writer->kv_heads.first;
    step->is_causal = writer->call->is_causal != 0 && last_key > writer->rows.first;
    return step;
}

void cp_writer_attend(struct cp_writer *writer, struct cp_attended *rows,
                      struct cp_box k, struct cp_box v, struct cp_box mask,
                      const struct cp_block *block)
{
    struct cp_step *step = compute(writer, CP_STEP_ATTEND, block);
    step->is_first = rows->met == 0;
    step->arg[CP_ATTEND_STATE] = cp_writer_box(writer, rows->state);
    step->arg[CP_ATTEND_Q] = rows->q;
    step->arg[CP_ATTEND_K] = k;
    step->arg[CP_ATTEND_V] = v;
    step->arg[CP_ATTEND_MASK] = mask;
    rows->met += 1;
    if (rows->met == rows->blocks) {
        step->arg[CP_ATTEND_OUT] = rows->out;
        step->arg[CP_ATTEND_LSE] = rows->lse;
    }
}

void cp_writer_finish(struct cp_writer *writer, const struct cp_attended *rows)
{
    struct cp_box all = cp_writer_box(writer, rows->state);
    if (rows->blocks == 0 && !cp_box_is_empty(&all)) {
        cp_build_zero(&writer->builder, CP_LANE_COMPUTE, rows->state);
        struct cp_step *step =
            cp_build_step(&writer->builder, CP_STEP_FINISH, CP_LANE_COMPUTE);
        step->after[CP_LANE_IN] = writer->arrived;
        step->arg[CP_FINISH_STATE] = all;
        step->arg[CP_FINISH_OUT] = rows->out;
        step->arg[CP_FINISH_LSE] = rows->lse;
    }
}

void cp_writer_grad(struct cp_writer *writer, const struct cp_row_boxes *rows,
                    const struct cp_key_boxes *keys, const struct cp_block *block)
{
    struct cp_step *step = compute(writer, CP_STEP_GRAD, block);
    step->arg[CP_GRAD_DQ] = rows->dq;
    step->arg[CP_GRAD_DK] = keys->dk;
    step->arg[CP_GRAD_DV] = keys->dv;
    step->arg[CP_GRAD_Q] = rows->q;
    step->arg[CP_GRAD_K] = keys->k;
    step->arg[CP_GRAD_V] = keys->v;
    step->arg[CP_GRAD_DOUT] = rows->dout;
    step->arg[CP_GRAD_LSE] = rows->lse;
    step->arg[CP_GRAD_DELTA] = rows->delta;
    step->arg[CP_GRAD_MASK] = keys->mask;
}

void cp_writer_delta(struct cp_writer *writer, enum cp_lane lane, int32_t delta,
                     int32_t dout)
{
    struct cp_box to = cp_writer_box(writer, delta);
    int32_t out = cp_writer_tensor(writer, CP_BUFFER_INPUT, CP_TENSOR_OUT);
    int32_t dlse = cp_writer_tensor(writer, CP_BUFFER_INPUT, CP_TENSOR_DLSE);
    if (!cp_box_is_empty(&to)) {
        struct cp_step *step = cp_build_step(&writer->builder, CP_STEP_DELTA, lane);
        step->arg[CP_DELTA_DELTA] = to;
        step->arg[CP_DELTA_OUT] = cp_writer_box(writer, out);
        step->arg[CP_DELTA_DOUT] = cp_writer_box(writer, dout);
        step->arg[CP_DELTA_DLSE] = cp_writer_box(writer, dlse);
    }
}

void cp_writer_return_keys(struct cp_writer *writer, enum cp_lane lane, int32_t dk,
                           int32_t dv)
{
    const int32_t from[2] = {dk, dv};
    const enum cp_tensor_role roles[2] = {CP_TENSOR_DK, CP_TENSOR_DV};
    for (int i = 0; i < 2; i++) {
        int32_t to = cp_writer_tensor(writer, CP_BUFFER_OUTPUT, roles[i]);
        struct cp_step *step =
            cp_build_move(&writer->builder, CP_STEP_COPY, lane,
                          cp_writer_box(writer, to), cp_writer_box(writer, from[i]));
        cp_build_after(&writer->builder, step,
                       lane == CP_LANE_IN ? CP_LANE_COMPUTE : CP_LANE_IN);
    }
}
