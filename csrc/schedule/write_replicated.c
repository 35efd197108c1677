/* Attention where every rank has all keys: its own rows, all heads, nothing moves. */
#include "schedule/write.h"

static int32_t input(struct cp_writer *w, enum cp_tensor_role role)
{
    return cp_writer_tensor(w, CP_BUFFER_INPUT, role);
}

/* Keys that are packed at a time: about as many as kernels take through their cache at
 * once. All at once would be twice the caller's k and v where those are half-width. */
enum { PACKED_KEYS = 2048 };

/* Keys of the caller as they are met. */
static struct cp_box met(struct cp_writer *w, enum cp_tensor_role role,
                         struct cp_box keys)
{
    if (!w->packs) {
        return keys;
    }
    struct cp_box packed =
        cp_writer_box(w, cp_writer_keys(w, &w->scratch, role, keys.n[1], keys.n[2]));
    cp_build_move(&w->builder, CP_STEP_PACK, CP_LANE_COMPUTE, packed, keys);
    return packed;
}

/* The state takes up all keys, piece by piece through one place, or as they are. */
static void attend_keys(struct cp_writer *w, int32_t state)
{
    struct cp_range all = w->plan->kv_rows[w->rank];
    struct cp_box q = cp_writer_box(w, input(w, CP_TENSOR_Q));
    struct cp_box k = cp_writer_box(w, input(w, CP_TENSOR_K));
    struct cp_box v = cp_writer_box(w, input(w, CP_TENSOR_V));
    int64_t start = w->scratch.bytes;
    int64_t most = w->packs ? PACKED_KEYS : all.count;
    for (int64_t first = 0; first < all.count; first += most) {
        int64_t rest = all.count - first;
        int64_t keys = rest < most ? rest : most;
        struct cp_block block = {.owner = w->rank, .keys = {all.first + first, keys}};
        if (!cp_writer_is_live(w, w->rank, w->chunk, &block)) {
            return; /* nor is any behind it */
        }
        w->scratch.bytes = start;
        cp_writer_attend(w, state, q,
                         met(w, CP_TENSOR_K, cp_writer_row_range(k, first, keys)),
                         met(w, CP_TENSOR_V, cp_writer_row_range(v, first, keys)),
                         cp_writer_mask_box(w, CP_NO_BUFFER, 0, &block), &block);
    }
}

enum cp_code cp_write_replicated_forward(const struct cp_plan *plan, int rank,
                                         struct cp_schedule **out)
{
    struct cp_writer w;
    cp_writer_init(&w, plan, rank);
    int32_t result = cp_writer_tensor(&w, CP_BUFFER_OUTPUT, CP_TENSOR_OUT);
    int32_t lse = cp_writer_tensor(&w, CP_BUFFER_OUTPUT, CP_TENSOR_LSE);
    int32_t state = cp_writer_rows(&w, &w.scratch, CP_LAYOUT_STATE, CP_TENSOR_OUT,
                                   w.rows.count, w.heads.count);
    cp_build_zero(&w.builder, CP_LANE_COMPUTE, state);
    attend_keys(&w, state);
    cp_writer_finish(&w, state, cp_writer_box(&w, result), cp_writer_box(&w, lse));
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
    int32_t dout = input(&w, CP_TENSOR_DOUT);
    int32_t delta = cp_writer_rows(&w, &w.scratch, CP_LAYOUT_PLAIN, CP_TENSOR_DELTA,
                                   w.rows.count, heads);
    int32_t dq = cp_writer_sums(&w, &w.scratch, CP_TENSOR_DQ, w.rows.count, heads);
    struct cp_row_boxes rows = {
        .q = cp_writer_box(&w, input(&w, CP_TENSOR_Q)),
        .dout = cp_writer_box(&w, dout),
        .lse = cp_writer_box(&w, input(&w, CP_TENSOR_LSE)),
        .delta = cp_writer_box(&w, delta),
        .dq = cp_writer_box(&w, dq),
    };
    int32_t k = input(&w, CP_TENSOR_K);
    int32_t v = input(&w, CP_TENSOR_V);
    int32_t out_dq = cp_writer_tensor(&w, CP_BUFFER_OUTPUT, CP_TENSOR_DQ);
    int32_t dk = cp_writer_sums(&w, &w.scratch, CP_TENSOR_DK, block.keys.count,
                                w.call->kv_heads);
    int32_t dv = cp_writer_sums(&w, &w.scratch, CP_TENSOR_DV, block.keys.count,
                                w.call->kv_heads);
    cp_writer_delta(&w, CP_LANE_COMPUTE, delta, dout);
    cp_build_zero(b, CP_LANE_COMPUTE, dq);
    cp_build_zero(b, CP_LANE_COMPUTE, dk);
    cp_build_zero(b, CP_LANE_COMPUTE, dv);
    if (cp_writer_is_live(&w, rank, w.chunk, &block)) {
        struct cp_key_boxes keys = {
            .k = cp_writer_box(&w, k),
            .v = cp_writer_box(&w, v),
            .mask = cp_writer_mask_box(&w, CP_NO_BUFFER, 0, &block),
            .dk = cp_writer_box(&w, dk),
            .dv = cp_writer_box(&w, dv),
        };
        cp_writer_grad(&w, &rows, &keys, &block);
    }
    cp_build_move(b, CP_STEP_COPY, CP_LANE_COMPUTE, cp_writer_box(&w, out_dq), rows.dq);
    cp_writer_return_keys(&w, CP_LANE_COMPUTE, dk, dv);
    return cp_writer_take(&w, out);
}
