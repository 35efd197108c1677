/* From records to ranges. */
#include "plan/plan.h"

#include <string.h>

#include "base/checked.h"
#include "base/mem.h"
#include "plan/mask_axis.h"

/* What the ranks of a group hold together. */
static struct cp_range range_of_group(const struct cp_plan *plan,
                                      const struct cp_range *of_ranks, int rank)
{
    int first = cp_plan_ring_rank(plan, rank) * plan->ulysses;
    struct cp_range range = of_ranks[first];
    for (int u = 1; u < plan->ulysses; u++) {
        range.count += of_ranks[first + u].count;
    }
    return range;
}

struct cp_range cp_plan_group_rows(const struct cp_plan *plan, int rank)
{
    return range_of_group(plan, plan->q_rows, rank);
}

struct cp_range cp_plan_group_keys(const struct cp_plan *plan, int rank)
{
    return range_of_group(plan, plan->kv_rows, rank);
}

int cp_plan_most_chunks(const struct cp_plan *plan)
{
    int64_t most = 1;
    for (int u = 0; u < plan->ulysses; u++) {
        most = plan->kv_heads[u].count > most ? plan->kv_heads[u].count : most;
    }
    return most < CP_MAX_HEAD_CHUNKS ? (int)most : CP_MAX_HEAD_CHUNKS;
}

struct cp_range cp_plan_chunk_kv_heads(const struct cp_plan *plan, int u, int chunk)
{
    struct cp_range heads = cp_share(plan->kv_heads[u].count, plan->chunks, chunk);
    heads.first += plan->kv_heads[u].first;
    return heads;
}

struct cp_range cp_plan_chunk_heads(const struct cp_plan *plan, int u, int chunk)
{
    struct cp_range own = plan->heads[u];
    struct cp_range of_kv = cp_plan_chunk_kv_heads(plan, u, chunk);
    int64_t first = of_kv.first * plan->heads_per_kv;
    int64_t end = first + of_kv.count * plan->heads_per_kv;
    first = first > own.first ? first : own.first;
    end = end < own.first + own.count ? end : own.first + own.count;
    struct cp_range heads = {.first = first, .count = end > first ? end - first : 0};
    return heads;
}

void cp_plan_destroy(struct cp_plan **plan)
{
    if (*plan == NULL) {
        return;
    }
    cp_mem_destroy(&(*plan)->signature.sizes);
    cp_mem_destroy(&(*plan)->q_rows);
    cp_mem_destroy(&(*plan)->kv_rows);
    cp_mem_destroy(&(*plan)->heads);
    cp_mem_destroy(&(*plan)->kv_heads);
    cp_mem_destroy(&(*plan)->cut);
    cp_mem_destroy(plan);
}

bool cp_plan_matches(const struct cp_plan *plan, const struct cp_record *records,
                     int world)
{
    if (plan->world != world || memcmp(&plan->signature.call, &records[0].call,
                                       sizeof plan->signature.call) != 0) {
        return false;
    }
    for (int rank = 0; rank < world; rank++) {
        if (memcmp(&plan->signature.sizes[rank * CP_SIZE_COUNT], records[rank].sizes,
                   sizeof records[rank].sizes) != 0) {
            return false;
        }
    }
    return true;
}

static enum cp_code create_array(int count, size_t element_bytes, void *out)
{
    void *block = NULL;
    CP_TRY(cp_mem_create((size_t)count * element_bytes, "a plan", &block));
    memcpy(out, &block, sizeof block);
    return CP_OK;
}

/* Rows of every rank, one after the other. */
static enum cp_code lay_rows(const struct cp_record *records, int world,
                             enum cp_size which, struct cp_range *rows)
{
    int64_t first = 0;
    for (int rank = 0; rank < world; rank++) {
        rows[rank].first = first;
        rows[rank].count = records[rank].sizes[which];
        if (rows[rank].count < 0 || !cp_add_i64(first, rows[rank].count, &first)) {
            return cp_fail_rank(CP_ERR_VALUE, rank,
                                "the lengths of the ranks up to rank %d do not add up "
                                "to a number of rows",
                                rank);
        }
    }
    return CP_OK;
}

static enum cp_code plan_attention(struct cp_plan *plan,
                                   const struct cp_record *records)
{
    const struct cp_call *call = &plan->signature.call;
    CP_TRY(create_array(plan->world, sizeof *plan->q_rows, &plan->q_rows));
    CP_TRY(create_array(plan->world, sizeof *plan->kv_rows, &plan->kv_rows));
    CP_TRY(create_array(plan->ulysses, sizeof *plan->heads, &plan->heads));
    CP_TRY(create_array(plan->ulysses, sizeof *plan->kv_heads, &plan->kv_heads));
    CP_TRY(lay_rows(records, plan->world, CP_SIZE_Q_ROWS, plan->q_rows));
    CP_TRY(lay_rows(records, plan->world, CP_SIZE_KV_ROWS, plan->kv_rows));
    for (int rank = 0; rank < plan->world && call->kv_replicated != 0; rank++) {
        plan->kv_rows[rank].first = 0;
    }
    plan->heads_per_kv = call->kv_heads > 0 ? call->heads / call->kv_heads : 1;
    for (int u = 0; u < plan->ulysses; u++) {
        plan->heads[u] = cp_share(call->heads, plan->ulysses, u);
        plan->kv_heads[u] = cp_kv_heads_of(plan->heads[u], plan->heads_per_kv);
    }
    if (call->kv_replicated == 0 && records[0].sizes[CP_SIZE_HEAD_CHUNKS] > 1) {
        int most = cp_plan_most_chunks(plan);
        int64_t asked = records[0].sizes[CP_SIZE_HEAD_CHUNKS];
        plan->chunks = asked < most ? (int)asked : most;
    }
    memcpy(&plan->scale, &call->scale_bits, sizeof plan->scale);
    return call->mask_kind == CP_MASK_NONE
               ? CP_OK
               : cp_mask_read(records, plan->world, &plan->mask_rows, &plan->mask_keys);
}

static enum cp_code plan_cut(struct cp_plan *plan, const struct cp_record *records)
{
    const struct cp_call *call = &plan->signature.call;
    CP_TRY(create_array(plan->world, sizeof *plan->cut, &plan->cut));
    plan->outer = 1;
    plan->inner = 1;
    for (int axis = 0; axis < call->ndim; axis++) {
        int64_t *side = axis < call->dim ? &plan->outer : &plan->inner;
        if (axis != call->dim && !cp_mul_i64(*side, call->extent[axis], side)) {
            return cp_fail(CP_ERR_VALUE,
                           "the shape has more elements than can be counted");
        }
    }
    return lay_rows(records, plan->world, CP_SIZE_ROWS, plan->cut);
}

static enum cp_code fill(struct cp_plan *plan, const struct cp_record *records,
                         const struct cp_format *format)
{
    plan->signature.call = records[0].call;
    plan->signature.world = plan->world;
    plan->ring = records[0].call.ring_degree;
    plan->ulysses = records[0].call.ulysses_degree;
    plan->chunks = 1;
    plan->rotate = records[0].call.rotate == CP_ROTATE_ALLGATHER ? CP_ROTATE_ALLGATHER
                                                                 : CP_ROTATE_ALLTOALL;
    if ((int64_t)plan->ring * plan->ulysses != plan->world) {
        return cp_fail(CP_ERR_INTERNAL,
                       "ring_degree %d times ulysses_degree %d is not %d ranks",
                       plan->ring, plan->ulysses, plan->world);
    }
    CP_TRY(create_array(plan->world * CP_SIZE_COUNT, sizeof *plan->signature.sizes,
                        &plan->signature.sizes));
    for (int rank = 0; rank < plan->world; rank++) {
        memcpy(&plan->signature.sizes[rank * CP_SIZE_COUNT], records[rank].sizes,
               sizeof records[rank].sizes);
    }
    switch ((enum cp_op)records[0].call.op) {
    case CP_OP_ATTENTION:
    case CP_OP_ATTENTION_BACKWARD:
        plan->format = *format;
        return plan_attention(plan, records);
    case CP_OP_GATHER:
    case CP_OP_REDUCE_SCATTER:
        return plan_cut(plan, records);
    case CP_OP_SHARD:
    case CP_OP_AGREE:
    case CP_OP_NONE:
        break;
    }
    return CP_OK;
}

enum cp_code cp_plan_create(const struct cp_record *records, int world,
                            const struct cp_format *format, struct cp_plan **out)
{
    struct cp_plan *plan = NULL;
    void *block = NULL;
    if (world < 1 || world > CP_MAX_WORLD) {
        return cp_fail(CP_ERR_VALUE, "%d ranks: at most %d are supported", world,
                       CP_MAX_WORLD);
    }
    CP_TRY(cp_mem_create(sizeof *plan, "a plan", &block));
    plan = block;
    plan->world = world;
    enum cp_code code = fill(plan, records, format);
    if (code != CP_OK) {
        cp_plan_destroy(&plan);
        return code;
    }
    *out = plan;
    return CP_OK;
}
