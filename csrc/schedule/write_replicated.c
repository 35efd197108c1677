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

/* Keys from `first` on, as many as are met at a time. */
static struct cp_block block_at(const struct cp_writer *w, int64_t first)
{
    struct cp_range all = w->plan->kv_rows[w->rank];
    int64_t rest = all.count - first;
    int64_t keys = w->packs && rest > PACKED_KEYS ? PACKED_KEYS : rest;
    return (struct cp_block){.owner = w->rank, .keys = {all.first + first, keys}};
}

/* Behind one that is not live none is. */
static bool is_live(const struct cp_writer *w, const struct cp_block *block)
{
    return cp_writer_is_live(w, w->rank, w->chunk, block);
}

static int count_blocks(const struct cp_writer *w)
{
    int count = 0;
    struct cp_block block = block_at(w, 0);
    for (int64_t first = 0; is_live(w, &block); block = block_at(w, first)) {
        first += block.keys.count;
        count += 1;
    }
    return count;
}

/* The rows meet all keys, piece by piece through one place, or as they are. */
static void attend_keys(struct cp_writer *w, struct cp_attended *rows)
{
    struct cp_box k = cp_writer_box(w, input(w, CP_TENSOR_K));
    struct cp_box v = cp_writer_box(w, input(w, CP_TENSOR_V));
    int64_t start = w->scratch.bytes;
    int64_t first = 0;
    while (rows->met < rows->blocks) {
        struct cp_block block = block_at(w, first);
        int64_t keys = block.keys.count;
        w->scratch.bytes = start;
        cp_writer_attend(w, rows,
                         met(w, CP_TENSOR_K, cp_writer_row_range(k, first, keys)),
                         met(w, CP_TENSOR_V, cp_writer_row_range(v, first, keys)),
                         cp_writer_mask_box(w, CP_NO_BUFFER, 0, &block), &block);
        first += keys;
    }
}

enum cp_code cp_write_replicated_forward(const struct cp_plan *plan, int rank,
                                         struct cp_schedule **out)
{
    struct cp_writer w;
    cp_writer_init(&w, plan, rank);
    int32_t result = cp_writer_tensor(&w, CP_BUFFER_OUTPUT, CP_TENSOR_OUT);
    int32_t lse = cp_writer_tensor(&w, CP_BUFFER_OUTPUT, CP_TENSOR_LSE);
    struct cp_attended rows = {
        .state = cp_writer_rows(&w, &w.scratch, CP_LAYOUT_STATE, CP_TENSOR_OUT,
                                w.rows.count, w.heads.count),
        .q = cp_writer_box(&w, input(&w, CP_TENSOR_Q)),
        .out = cp_writer_box(&w, result),
        .lse = cp_writer_box(&w, lse),
        .blocks = count_blocks(&w),
    };
    attend_keys(&w, &rows);
    cp_writer_finish(&w, &rows);
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
