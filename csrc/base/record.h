/* What a rank tells the others before a call moves data: plain numbers, the same layout
 * in every process.
 *
 * `struct cp_call` is what all ranks must agree on, `sizes` what may differ from rank
 * to rank. control/ carries records without reading them; plan/ compares them. */
#ifndef CP_BASE_RECORD_H
#define CP_BASE_RECORD_H

#include <stdatomic.h>
#include <stdbool.h>

#include "base/backend.h"
#include "base/status.h"

enum cp_op {
    CP_OP_NONE,
    CP_OP_ATTENTION,
    CP_OP_ATTENTION_BACKWARD,
    CP_OP_SHARD,
    CP_OP_GATHER,
    CP_OP_REDUCE_SCATTER, /* the gradient of a gather */
    CP_OP_AGREE, /* no data: every rank's error or none, and one number that must be
                    equal */
};

/* "attention", "attention backward", ...; never NULL. */
const char *cp_op_name(enum cp_op op);

enum cp_variant {
    CP_EVEN = 0,    /* equal rows on all ranks, heads divisible by U */
    CP_ANYTHING = 1 /* any rows, any heads */
};

enum cp_rotate {
    CP_ROTATE_AUTO,
    CP_ROTATE_ALLGATHER,
    CP_ROTATE_ALLTOALL,
};

/* Where a call's tensors are. */
enum cp_place_kind {
    CP_ON_HOST,
    CP_ON_ACCELERATOR, /* exec/accelerator.h */
};

enum cp_mask_kind {
    CP_MASK_NONE,
    CP_MASK_BOOL, /* one byte an element, non-zero: attend */
    CP_MASK_ADD,  /* added to the scaled score */
};

/* Places in `sizes`. */
enum cp_size {
    CP_SIZE_Q_ROWS,
    CP_SIZE_KV_ROWS,
    CP_SIZE_MASK_ROWS,   /* length of the mask's query axis as this rank gave it */
    CP_SIZE_MASK_KEYS,   /* length of its key axis */
    CP_SIZE_ROWS,        /* shard: length of the dimension that is cut; gather,
                          reduce_scatter: of the own part of it */
    CP_SIZE_HEAD_CHUNKS, /* attention: how many chunks this rank would cut the heads in;
                            0: as many as pay. All ranks say the same */
    CP_SIZE_GENERATION, /* attention: of this rank's device, 90 for sm_90; 0: the host */
    CP_SIZE_COUNT = 8
};

enum { CP_EXTENTS = 8 };

/* Fixed-width members only, 8-byte ones first: no padding, so that two calls compare by
 * their bytes. */
struct cp_call {
    int64_t batch;       /* B */
    int64_t heads;       /* H, query heads */
    int64_t kv_heads;    /* H_kv */
    int64_t head_dim;    /* D of q and k */
    int64_t value_dim;   /* Dv of v and out */
    int64_t mask_batch;  /* B or 1; 0 without a mask */
    int64_t mask_heads;  /* H or 1; 0 without a mask */
    uint64_t scale_bits; /* the scale, a double, bit for bit */
    uint64_t check;      /* hash of what else must be equal: seq_lens, an agreed text */
    uint64_t format; /* the kernel's packed layout: ranks that differ would misread each
                        other */
    int64_t extent[CP_EXTENTS]; /* of what is cut: its shape; 0 at `dim` in a gather */
    int32_t op;                 /* enum cp_op */
    int32_t dtype;      /* enum cp_dtype of q, k, v, or of the tensor that is cut */
    int32_t mask_kind;  /* enum cp_mask_kind */
    int32_t mask_dtype; /* enum cp_dtype; 0 without a mask */
    int32_t is_causal;
    int32_t want_lse;      /* forward: return it; backward: its gradient is given */
    int32_t kv_replicated; /* k and v are whole on every rank */
    int32_t enable_gqa;
    int32_t variant;        /* enum cp_variant */
    int32_t rotate;         /* enum cp_rotate */
    int32_t ring_degree;    /* R */
    int32_t ulysses_degree; /* U */
    int32_t ndim;           /* of what is cut */
    int32_t dim;            /* of what is cut */
    int16_t place;          /* enum cp_place_kind */
    int16_t is_captured;    /* what the call does is recorded, to be done later */
    int32_t backend;        /* enum cp_backend; 0 where nothing is attended */
};
_Static_assert(sizeof(struct cp_call) ==
                   offsetof(struct cp_call, backend) + sizeof(int32_t),
               "a call has no padding");

static inline bool cp_call_is_attention(const struct cp_call *call)
{
    return call->op == CP_OP_ATTENTION || call->op == CP_OP_ATTENTION_BACKWARD;
}

struct cp_record {
    _Atomic uint64_t
        seq; /* written last (release), read first (acquire): see control/gate.h */
    struct cp_call call;
    int64_t sizes[CP_SIZE_COUNT];
    struct cp_status status; /* code CP_OK: text not written */
};

#endif
