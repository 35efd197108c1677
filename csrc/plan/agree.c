/* Comparing the records of all ranks, and saying in one sentence what does not fit. */
#include "plan/agree.h"

#include <inttypes.h>
#include <string.h>

#include "base/checked.h"
#include "base/hash.h"
#include "base/text.h"
#include "plan/mask_axis.h"
#include "plan/plan.h"
#include "tensor/dtype.h"

/* The fields of a call in the order in which a difference is named. `op` is first: the
 * others mean different things in different operations. */
#define CALL_FIELDS(X)                                                                 \
    X(place, "the device of its tensors")                                              \
    X(is_captured, "whether it is captured in a graph")                                \
    X(backend, "backend")                                                              \
    X(dtype, "dtype")                                                                  \
    X(batch, "batch size")                                                             \
    X(heads, "heads")                                                                  \
    X(kv_heads, "kv_heads")                                                            \
    X(head_dim, "head dim")                                                            \
    X(value_dim, "value head dim")                                                     \
    X(is_causal, "is_causal")                                                          \
    X(scale_bits, "scale")                                                             \
    X(mask_kind, "attn_mask")                                                          \
    X(mask_dtype, "attn_mask dtype")                                                   \
    X(mask_batch, "attn_mask batch size")                                              \
    X(mask_heads, "attn_mask heads")                                                   \
    X(enable_gqa, "enable_gqa")                                                        \
    X(kv_replicated, "kv")                                                             \
    X(want_lse, "return_lse (or in whether q, k or v require a gradient)")             \
    X(ndim, "number of dimensions")                                                    \
    X(dim, "dim")                                                                      \
    X(variant, "variant")                                                              \
    X(rotate, "rotate_method")                                                         \
    X(ring_degree, "ring_degree")                                                      \
    X(ulysses_degree, "ulysses_degree")                                                \
    X(format, "packed format of the kernel")                                           \
    X(check, check_name(zero))

/* What the check number stands for. */
static const char *check_name(const struct cp_call *call)
{
    return cp_call_is_attention(call) ? "seq_lens or kv_lens" : "what is agreed on";
}

static double scale_of(const struct cp_call *call)
{
    double scale = 0.0;
    memcpy(&scale, &call->scale_bits, sizeof scale);
    return scale;
}

static void print_place(char *text, size_t bytes, const struct cp_call *call)
{
    if (call->place == CP_ON_ACCELERATOR) {
        cp_text_append(text, bytes, ", on a GPU%s",
                       call->is_captured != 0 ? ", captured in a graph" : "");
    }
}

static void print_attention(char *text, size_t bytes, const struct cp_record *record)
{
    const struct cp_call *call = &record->call;
    cp_text_append(text, bytes, "%s(q %" PRId64 "x%" PRId64 "x%" PRId64 "x%" PRId64,
                   cp_op_name((enum cp_op)call->op), call->batch,
                   record->sizes[CP_SIZE_Q_ROWS], call->heads, call->head_dim);
    cp_text_append(text, bytes, ", k %" PRId64 "x%" PRId64 "x%" PRId64 "x%" PRId64,
                   call->batch, record->sizes[CP_SIZE_KV_ROWS], call->kv_heads,
                   call->head_dim);
    if (call->value_dim != call->head_dim) {
        cp_text_append(text, bytes, ", v head dim %" PRId64, call->value_dim);
    }
    cp_text_append(text, bytes, ", %s", cp_dtype_name((enum cp_dtype)call->dtype));
    cp_text_append(text, bytes, ", scale %.9g", scale_of(call));
    if (call->backend != CP_BACKEND_NATIVE) {
        cp_text_append(text, bytes, ", backend %s",
                       cp_backend_name((enum cp_backend)call->backend));
    }
    if (call->mask_kind != CP_MASK_NONE) {
        cp_text_append(text, bytes,
                       ", attn_mask %" PRId64 "x%" PRId64 "x%" PRId64 "x%" PRId64 " %s",
                       call->mask_batch, call->mask_heads,
                       record->sizes[CP_SIZE_MASK_ROWS],
                       record->sizes[CP_SIZE_MASK_KEYS],
                       cp_dtype_name((enum cp_dtype)call->mask_dtype));
    }
    cp_text_append(text, bytes, "%s%s%s%s", call->is_causal != 0 ? ", is_causal" : "",
                   call->kv_replicated != 0 ? ", kv replicated" : "",
                   call->enable_gqa != 0 ? ", enable_gqa" : "",
                   call->want_lse != 0 ? ", return_lse" : "");
    print_place(text, bytes, call);
    cp_text_append(text, bytes, ")");
}

static void print_cut(char *text, size_t bytes, const struct cp_record *record)
{
    const struct cp_call *call = &record->call;
    cp_text_append(text, bytes, "%s(", cp_op_name((enum cp_op)call->op));
    for (int axis = 0; axis < call->ndim && axis < CP_EXTENTS; axis++) {
        bool is_part = axis == call->dim && call->op != CP_OP_REDUCE_SCATTER;
        cp_text_append(text, bytes, "%s%" PRId64, axis > 0 ? "x" : "",
                       is_part ? record->sizes[CP_SIZE_ROWS] : call->extent[axis]);
    }
    cp_text_append(text, bytes, " %s, dim %d",
                   cp_dtype_name((enum cp_dtype)call->dtype), (int)call->dim);
    if (call->op == CP_OP_REDUCE_SCATTER) {
        cp_text_append(text, bytes, ", %" PRId64 " own rows",
                       record->sizes[CP_SIZE_ROWS]);
    }
    print_place(text, bytes, call);
    cp_text_append(text, bytes, ")");
}

void cp_call_print(const struct cp_record *record, char *text, size_t bytes)
{
    text[0] = '\0';
    switch ((enum cp_op)record->call.op) {
    case CP_OP_ATTENTION:
    case CP_OP_ATTENTION_BACKWARD:
        print_attention(text, bytes, record);
        return;
    case CP_OP_SHARD:
    case CP_OP_GATHER:
    case CP_OP_REDUCE_SCATTER:
        print_cut(text, bytes, record);
        return;
    case CP_OP_AGREE:
        cp_text_append(text, bytes, "agree()");
        return;
    case CP_OP_NONE:
        break;
    }
    cp_text_append(text, bytes, "no call");
}

static enum cp_code fail_difference(const struct cp_record *records, int rank,
                                    const char *field, enum cp_code code)
{
    char odd[160];
    char zero[160];
    cp_call_print(&records[rank], odd, sizeof odd);
    cp_call_print(&records[0], zero, sizeof zero);
    return cp_fail_rank(
        code, rank,
        "rank %d differs from rank 0 in %s: rank %d called %s, rank 0 called %s", rank,
        field, rank, odd, zero);
}

static enum cp_code compare_calls(const struct cp_record *records, int rank)
{
    const struct cp_call *odd = &records[rank].call;
    const struct cp_call *zero = &records[0].call;
    if (odd->op != zero->op) {
        return fail_difference(records, rank, "the operation", CP_ERR_VALUE);
    }
#define COMPARE(field, name)                                                           \
    if (odd->field != zero->field) {                                                   \
        return fail_difference(records, rank, name,                                    \
                               strcmp(name, "dtype") == 0 ? CP_ERR_TYPE                \
                                                          : CP_ERR_VALUE);             \
    }
    CALL_FIELDS(COMPARE)
#undef COMPARE
    if (memcmp(odd->extent, zero->extent, sizeof odd->extent) != 0) {
        return fail_difference(records, rank, "the shape", CP_ERR_VALUE);
    }
    return CP_OK;
}

static enum cp_code check_own_errors(const struct cp_record *records, int world)
{
    for (int rank = 0; rank < world; rank++) {
        const struct cp_status *status = &records[rank].status;
        if (status->code != CP_OK) {
            return cp_fail_rank((enum cp_code)status->code, rank, "rank %d: %s", rank,
                                status->text);
        }
    }
    return CP_OK;
}

static const char *anything_flag(const struct cp_call *call)
{
    if (call->ring_degree > 1 && call->ulysses_degree > 1) {
        return "unified_anything";
    }
    return call->ring_degree > 1 ? "ring_anything" : "ulysses_anything";
}

static enum cp_code check_equal_rows(const struct cp_record *records, int world,
                                     enum cp_size which, const char *what)
{
    for (int rank = 1; rank < world; rank++) {
        if (records[rank].sizes[which] != records[0].sizes[which]) {
            return cp_fail_rank(
                CP_ERR_VALUE, rank,
                "%s: rank %d has %" PRId64 " rows and rank 0 has %" PRId64
                ", but ring_degree %d, ulysses_degree %d needs the same length on all "
                "ranks; use %s=True for uneven lengths",
                what, rank, records[rank].sizes[which], records[0].sizes[which],
                (int)records[0].call.ring_degree, (int)records[0].call.ulysses_degree,
                anything_flag(&records[0].call));
        }
    }
    return CP_OK;
}

static enum cp_code check_even(const struct cp_record *records, int world)
{
    const struct cp_call *call = &records[0].call;
    if (call->kv_replicated != 0) {
        return CP_OK;
    }
    CP_TRY(check_equal_rows(records, world, CP_SIZE_Q_ROWS, "q"));
    CP_TRY(check_equal_rows(records, world, CP_SIZE_KV_ROWS, "k, v"));
    if (call->heads % call->ulysses_degree != 0) {
        return cp_fail(
            CP_ERR_VALUE,
            "q: %" PRId64
            " heads cannot be divided by ulysses_degree %d; use %s=True for any "
            "number of heads",
            call->heads, (int)call->ulysses_degree, anything_flag(call));
    }
    return CP_OK;
}

static enum cp_code check_replicated(const struct cp_record *records, int world)
{
    for (int rank = 1; rank < world && records[0].call.kv_replicated != 0; rank++) {
        if (records[rank].sizes[CP_SIZE_KV_ROWS] != records[0].sizes[CP_SIZE_KV_ROWS]) {
            return cp_fail_rank(CP_ERR_VALUE, rank,
                                "kv=\"replicated\": rank %d has %" PRId64
                                " keys and rank 0 has %" PRId64
                                ", but replicated k and v are the same on all ranks",
                                rank, records[rank].sizes[CP_SIZE_KV_ROWS],
                                records[0].sizes[CP_SIZE_KV_ROWS]);
        }
    }
    return CP_OK;
}

/* What is added up is of a type that has a sum, and every row of it goes to one rank.
 */
static enum cp_code check_parts(const struct cp_record *records, int world)
{
    const struct cp_call *call = &records[0].call;
    int64_t whole = call->extent[call->dim];
    int64_t rows = 0;
    if (!cp_dtype_attends((enum cp_dtype)call->dtype)) {
        return cp_fail(CP_ERR_TYPE,
                       "reduce_scatter: x is of %s; float32, float64, bfloat16 and "
                       "float16 can be added up",
                       cp_dtype_name((enum cp_dtype)call->dtype));
    }
    for (int rank = 0; rank < world; rank++) {
        int64_t own = records[rank].sizes[CP_SIZE_ROWS];
        if (own < 0 || !cp_add_i64(rows, own, &rows)) {
            return cp_fail_rank(CP_ERR_VALUE, rank,
                                "reduce_scatter: rank %d asks for %" PRId64 " rows",
                                rank, own);
        }
    }
    if (rows != whole) {
        return cp_fail(CP_ERR_VALUE,
                       "reduce_scatter: x has %" PRId64 " rows along dim %d, but the "
                       "ranks' own rows are %" PRId64 " together",
                       whole, (int)call->dim, rows);
    }
    return CP_OK;
}

static enum cp_code check_mask(const struct cp_record *records, int world)
{
    enum cp_axis_kind rows = CP_AXIS_ONE;
    enum cp_axis_kind keys = CP_AXIS_ONE;
    return records[0].call.mask_kind == CP_MASK_NONE
               ? CP_OK
               : cp_mask_read(records, world, &rows, &keys);
}

static enum cp_code check_chunks(const struct cp_record *records, int world)
{
    int64_t zero = records[0].sizes[CP_SIZE_HEAD_CHUNKS];
    for (int rank = 0; rank < world; rank++) {
        int64_t own = records[rank].sizes[CP_SIZE_HEAD_CHUNKS];
        if (own < 0 || own > CP_MAX_HEAD_CHUNKS) {
            return cp_fail_rank(CP_ERR_VALUE, rank,
                                "rank %d would cut the heads in %" PRId64
                                " chunks; from 1 to %d are possible, and 0 for as many "
                                "as pay",
                                rank, own, CP_MAX_HEAD_CHUNKS);
        }
        if (own != zero) {
            return cp_fail_rank(CP_ERR_VALUE, rank,
                                "rank %d would cut the heads in %" PRId64
                                " chunks, rank 0 in %" PRId64
                                ", and all ranks have to cut them alike",
                                rank, own, zero);
        }
    }
    return CP_OK;
}

static enum cp_code check_lengths(const struct cp_record *records, int world)
{
    uint64_t promised = records[0].call.check;
    if (promised == 0) {
        return CP_OK;
    }
    int64_t q_rows[CP_MAX_WORLD] = {0};
    int64_t kv_rows[CP_MAX_WORLD] = {0};
    for (int rank = 0; rank < world; rank++) {
        q_rows[rank] = records[rank].sizes[CP_SIZE_Q_ROWS];
        kv_rows[rank] = records[rank].sizes[CP_SIZE_KV_ROWS];
    }
    if (cp_lengths_hash(q_rows, kv_rows, world) != promised) {
        return cp_fail(
            CP_ERR_VALUE,
            "seq_lens, kv_lens: they are not the lengths of q and k on the ranks "
            "(rank 0 has %" PRId64 " and %" PRId64 ")",
            q_rows[0], kv_rows[0]);
    }
    return CP_OK;
}

/* A graph keeps the lengths of all ranks, also those that this rank's own arguments do not
 * show: who changes his captures anew while the others replay, unless all are told. */
static enum cp_code check_captured(const struct cp_call *call)
{
    bool needs_lengths = call->is_captured != 0 && call->op == CP_OP_ATTENTION &&
                         call->variant == CP_ANYTHING && call->kv_replicated == 0;
    return !needs_lengths || call->check != 0
               ? CP_OK
               : cp_fail(
                     CP_ERR_VALUE,
                     "attention with %s=True is captured in a graph, which keeps the "
                     "lengths of all ranks; pass seq_lens=, the lengths of all "
                     "ranks, and kv_lens= where those of k and v are others",
                     anything_flag(call));
}

enum cp_code cp_agree(const struct cp_record *records, int world)
{
    CP_TRY(check_own_errors(records, world));
    for (int rank = 1; rank < world; rank++) {
        CP_TRY(compare_calls(records, rank));
    }
    const struct cp_call *call = &records[0].call;
    if (call->op == CP_OP_REDUCE_SCATTER) {
        return check_parts(records, world);
    }
    if (!cp_call_is_attention(call)) {
        return CP_OK;
    }
    CP_TRY(check_chunks(records, world));
    CP_TRY(check_replicated(records, world));
    if (call->variant == CP_EVEN) {
        CP_TRY(check_even(records, world));
    }
    CP_TRY(check_captured(call));
    CP_TRY(check_lengths(records, world));
    return check_mask(records, world);
}

uint64_t cp_lengths_hash(const int64_t *q_rows, const int64_t *kv_rows, int world)
{
    uint64_t hash = CP_HASH_START;
    for (int rank = 0; rank < world; rank++) {
        hash = cp_hash(hash, &q_rows[rank], sizeof q_rows[rank]);
        hash = cp_hash(hash, &kv_rows[rank], sizeof kv_rows[rank]);
    }
    return cp_hash_not_zero(hash); /* 0: nothing promised */
}
