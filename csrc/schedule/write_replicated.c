/* Attention where every rank has all keys: its own rows, all heads, nothing moves. */
#include "schedule/write.h"

static struct cp_box local_mask(const struct cp_writer *w, int32_t mask,
                                const struct cp_block *block)
{
    if (!w->has_mask) {
        return cp_box_none();
    }
    int64_t row_first = w->plan->mask_rows == CP_AXIS_OWN ? w->rows.first : 0;
    return cp_writer_mask_box(w, mask, row_first, 0, block);
}

enum cp_code cp_write_replicated_forward(const struct cp_plan *plan, int rank,
                                         struct cp_schedule **out)
{
    struct cp_writer w;
    cp_writer_init(&w, plan, rank);
    struct cp_builder *b = &w.builder;
    struct cp_block block = {.owner = rank, .keys = plan->kv_rows[rank]};
    int32_t q = cp_writer_tensor(&w, CP_BUFFER_INPUT, CP_TENSOR_Q);
    int32_t k = cp_writer_tensor(&w, CP_BUFFER_INPUT, CP_TENSOR_K);
    int32_t v = cp_writer_tensor(&w, CP_BUFFER_INPUT, CP_TENSOR_V);
    int32_t mask =
        w.has_mask ? cp_writer_tensor(&w, CP_BUFFER_INPUT, CP_TENSOR_MASK) : 0;
    int32_t result = cp_writer_tensor(&w, CP_BUFFER_OUTPUT, CP_TENSOR_OUT);
    int32_t packed_k = cp_writer_rows(&w, &w.scratch, CP_LAYOUT_K, CP_TENSOR_K,
                                      block.keys.count, w.call->kv_heads);
    int32_t packed_v = cp_writer_rows(&w, &w.scratch, CP_LAYOUT_V, CP_TENSOR_V,
                                      block.keys.count, w.call->kv_heads);
    int32_t state = cp_writer_rows(&w, &w.scratch, CP_LAYOUT_STATE, CP_TENSOR_OUT,
                                   w.rows.count, w.heads.count);
    struct cp_box all = cp_writer_box(&w, state);
    cp_build_move(b, CP_STEP_PACK, CP_LANE_COMPUTE, cp_writer_box(&w, packed_k),
                  cp_writer_box(&w, k));
    cp_build_move(b, CP_STEP_PACK, CP_LANE_COMPUTE, cp_writer_box(&w, packed_v),
                  cp_writer_box(&w, v));
    cp_build_zero(b, CP_LANE_COMPUTE, state);
    if (cp_writer_is_live(&w, rank, &block)) {
        struct cp_step *step = cp_build_step(b, CP_STEP_ATTEND, CP_LANE_COMPUTE);
        step->arg[CP_ATTEND_STATE] = all;
        step->arg[CP_ATTEND_Q] = cp_writer_box(&w, q);
        step->arg[CP_ATTEND_K] = cp_writer_box(&w, packed_k);
        step->arg[CP_ATTEND_V] = cp_writer_box(&w, packed_v);
        step->arg[CP_ATTEND_MASK] = local_mask(&w, mask, &block);
        cp_writer_place(&w, step, &block);
    }
    if (!cp_box_is_empty(&all)) {
        int32_t lse = w.call->want_lse != 0
                          ? cp_writer_tensor(&w, CP_BUFFER_OUTPUT, CP_TENSOR_LSE)
                          : CP_NO_BUFFER;
        struct cp_step *step = cp_build_step(b, CP_STEP_FINISH, CP_LANE_COMPUTE);
        step->arg[CP_FINISH_STATE] = all;
        step->arg[CP_FINISH_OUT] = cp_writer_box(&w, result);
        if (lse != CP_NO_BUFFER) {
            step->arg[CP_FINISH_LSE] = cp_writer_box(&w, lse);
        }
    }
    return cp_writer_take(&w, out);
}

enum cp_code cp_write_replicated_backward(const struct cp_plan *plan, int rank,
                                          struct cp_schedule **out)
{
    struct cp_writer w;
    cp_writer_init(&w, plan, rank);
    struct cp_builder *b = &w.builder;
    struct cp_block block = {.owner = rank, .keys = plan->kv_rows[rank]};
    int64_t heads = w.call->heads;
    int32_t q = cp_writer_tensor(&w, CP_BUFFER_INPUT, CP_TENSOR_Q);
    int32_t k = cp_writer_tensor(&w, CP_BUFFER_INPUT, CP_TENSOR_K);
    int32_t v = cp_writer_tensor(&w, CP_BUFFER_INPUT, CP_TENSOR_V);
    int32_t dout = cp_writer_tensor(&w, CP_BUFFER_INPUT, CP_TENSOR_DOUT);
    int32_t lse = cp_writer_tensor(&w, CP_BUFFER_INPUT, CP_TENSOR_LSE);
    int32_t mask =
        w.has_mask ? cp_writer_tensor(&w, CP_BUFFER_INPUT, CP_TENSOR_MASK) : 0;
    int32_t out_dq = cp_writer_tensor(&w, CP_BUFFER_OUTPUT, CP_TENSOR_DQ);
    int32_t delta = cp_writer_rows(&w, &w.scratch, CP_LAYOUT_PLAIN, CP_TENSOR_DELTA,
                                   w.rows.count, heads);
    int32_t dq = cp_writer_sums(&w, &w.scratch, CP_TENSOR_DQ, w.rows.count, heads);
    int32_t dk = cp_writer_sums(&w, &w.scratch, CP_TENSOR_DK, block.keys.count,
                                w.call->kv_heads);
    int32_t dv = cp_writer_sums(&w, &w.scratch, CP_TENSOR_DV, block.keys.count,
                                w.call->kv_heads);
    cp_writer_delta(&w, CP_LANE_COMPUTE, delta, dout);
    cp_build_zero(b, CP_LANE_COMPUTE, dq);
    cp_build_zero(b, CP_LANE_COMPUTE, dk);
    cp_build_zero(b, CP_LANE_COMPUTE, dv);
    if (cp_writer_is_live(&w, rank, &block)) {
        struct cp_step *step = cp_build_step(b, CP_STEP_GRAD, CP_LANE_COMPUTE);
        step->arg[CP_GRAD_DQ] = cp_writer_box(&w, dq);
        step->arg[CP_GRAD_DK] = cp_writer_box(&w, dk);
        step->arg[CP_GRAD_DV] = cp_writer_box(&w, dv);
        step->arg[CP_GRAD_Q] = cp_writer_box(&w, q);
        step->arg[CP_GRAD_K] = cp_writer_box(&w, k);
        step->arg[CP_GRAD_V] = cp_writer_box(&w, v);
        step->arg[CP_GRAD_DOUT] = cp_writer_box(&w, dout);
        step->arg[CP_GRAD_LSE] = cp_writer_box(&w, lse);
        step->arg[CP_GRAD_DELTA] = cp_writer_box(&w, delta);
        step->arg[CP_GRAD_MASK] = local_mask(&w, mask, &block);
        cp_writer_place(&w, step, &block);
    }
    cp_build_move(b, CP_STEP_COPY, CP_LANE_COMPUTE, cp_writer_box(&w, out_dq),
                  cp_writer_box(&w, dq));
    cp_writer_return_keys(&w, CP_LANE_COMPUTE, dk, dv);
    return cp_writer_take(&w, out);
}
