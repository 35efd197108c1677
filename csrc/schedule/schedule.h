/* A schedule: what one rank does in one call, as a list of steps over numbered buffers.
 *
 * No pointers and no peers: a schedule can be printed, compared, proved
 * (schedule/verify.h) and interpreted. Steps run on lanes: a lane runs its steps in
 * order, and a step says for every other lane how many of that lane's steps must be
 * done before it. Everything about a new variant is in here; the executor knows nothing
 * of variants.
 *
 * Buffers are tensors of four axes (tensor/view.h), and steps name boxes of them, by
 * index and not by byte: the caller's tensors have strides that no schedule needs to
 * know. */
#ifndef CP_SCHEDULE_SCHEDULE_H
#define CP_SCHEDULE_SCHEDULE_H

#include <stdio.h>

#include "plan/plan.h"
#include "tensor/view.h"

enum cp_lane { CP_LANE_IN, CP_LANE_COMPUTE, CP_LANE_OUT, CP_LANES };

/* The caller's tensors. */
enum cp_tensor_role {
    CP_TENSOR_Q,     /* (B, s, H, D) */
    CP_TENSOR_K,     /* (B, t, H_kv, D) */
    CP_TENSOR_V,     /* (B, t, H_kv, Dv) */
    CP_TENSOR_MASK,  /* (B or 1, H or 1, rows, keys) */
    CP_TENSOR_OUT,   /* (B, s, H, Dv) */
    CP_TENSOR_LSE,   /* (B, s, H, 1) */
    CP_TENSOR_DOUT,  /* as out */
    CP_TENSOR_DLSE,  /* as lse */
    CP_TENSOR_DQ,    /* as q */
    CP_TENSOR_DK,    /* as k */
    CP_TENSOR_DV,    /* as v */
    CP_TENSOR_DELTA, /* as lse; never the caller's: rows of out * dout, less dlse */
    CP_TENSOR_WHOLE, /* gather: out, reduce_scatter: in; (outer, rows, 1, inner) */
    CP_TENSOR_SHARE, /* gather: in, reduce_scatter: out */
    CP_TENSORS
};

enum cp_buffer_kind {
    CP_BUFFER_INPUT,  /* the caller's tensor `role`, read only */
    CP_BUFFER_OUTPUT, /* the caller's tensor `role` */
    CP_BUFFER_WINDOW, /* in the window of `owner`; with CP_PUSH others may COPY into it */
    CP_BUFFER_SCRATCH, /* in this rank's workspace */
};

enum cp_layout {
    CP_LAYOUT_PLAIN, /* the strides say all */
    CP_LAYOUT_K,     /* panels of packed keys: a box must take all rows and dims */
    CP_LAYOUT_V,     /* panels of packed values */
    CP_LAYOUT_STATE, /* panels that attend carries; zero bytes are the empty state */
};

struct cp_buffer {
    uint8_t kind;   /* enum cp_buffer_kind */
    uint8_t layout; /* enum cp_layout */
    uint8_t dtype;  /* enum cp_dtype; of the values that a panel stands for */
    uint8_t role;   /* enum cp_tensor_role: what the content is, and which tensor of the
                       caller for input, output */
    int32_t owner;  /* the rank whose memory it is */
    int64_t offset_bytes, bytes; /* place in the window or the workspace; 0 for the
                                    caller's tensors */
    int64_t n[CP_AXES];
    int64_t stride_bytes[CP_AXES]; /* not for the caller's tensors */
};

enum { CP_NO_BUFFER = -1, CP_STEP_ARGS = 10 };

/* A box of a buffer; buffer CP_NO_BUFFER: not given. */
struct cp_box {
    int32_t buffer;
    int64_t first[CP_AXES], n[CP_AXES];
};

enum cp_step_op {
    CP_STEP_COPY,    /* DST = SRC, converted to DST's dtype */
    CP_STEP_REDUCE,  /* DST += SRC, same dtype */
    CP_STEP_ZERO,    /* DST = 0: a whole buffer */
    CP_STEP_PACK,    /* DST = SRC: a whole buffer of layout K or V */
    CP_STEP_PUBLISH, /* own counter `signal` becomes `value`: what was done before it on
                        its lane may be read */
    CP_STEP_AWAIT,   /* until counter `signal` of `peer` is at least `value` */
    CP_STEP_SEND,    /* SRC to `peer`: one unbroken run of bytes */
    CP_STEP_RECV,    /* DST from `peer`, likewise; steps of one `group` in a row move
                        together */
    CP_STEP_ATTEND, /* STATE, empty if it is the first, takes up the block; OUT and LSE, where
                        they are given, become the result, and STATE holds nothing any more */
    CP_STEP_FINISH, /* OUT, LSE = STATE: of rows that meet no block */
    CP_STEP_DELTA,  /* DELTA from OUT, DOUT, DLSE */
    CP_STEP_GRAD,   /* DQ, DK, DV += gradient of the block */
    CP_STEP_OPS
};

/* Places in `arg`, by op. */
enum { CP_ARG_DST = 0, CP_ARG_SRC = 1 };
enum {
    CP_ATTEND_STATE = 0,
    CP_ATTEND_Q,
    CP_ATTEND_K,
    CP_ATTEND_V,
    CP_ATTEND_MASK,
    CP_ATTEND_OUT,
    CP_ATTEND_LSE
};
enum { CP_FINISH_OUT = 0, CP_FINISH_STATE, CP_FINISH_LSE };
enum { CP_DELTA_DELTA = 0, CP_DELTA_OUT, CP_DELTA_DOUT, CP_DELTA_DLSE };
enum {
    CP_GRAD_DQ = 0,
    CP_GRAD_DK,
    CP_GRAD_DV,
    CP_GRAD_Q,
    CP_GRAD_K,
    CP_GRAD_V,
    CP_GRAD_DOUT,
    CP_GRAD_LSE,
    CP_GRAD_DELTA,
    CP_GRAD_MASK
};

struct cp_step {
    uint8_t op, lane;        /* enum cp_step_op, enum cp_lane */
    bool is_causal;          /* ATTEND, GRAD: the causal edge crosses this block */
    bool is_first;           /* ATTEND: the rows have met no block before */
    uint8_t signal;          /* PUBLISH, AWAIT */
    int32_t peer;            /* AWAIT, SEND, RECV */
    int32_t group;           /* SEND, RECV */
    uint32_t value;          /* PUBLISH, AWAIT: counted within the call, from 1 */
    int32_t after[CP_LANES]; /* how many steps of each other lane must be done before
                                this one */
    int64_t q_first,
        k_first; /* ATTEND, GRAD: global row and key of the block's first */
    int64_t head_first, kv_head_first; /* global heads of the boxes' first */
    struct cp_box arg[CP_STEP_ARGS];
};

static inline bool cp_step_is_message(const struct cp_step *step)
{
    return step->op == CP_STEP_SEND || step->op == CP_STEP_RECV;
}

/* How the steps reach what other ranks have. */
enum cp_transport {
    CP_PULL,  /* windows; keys are met where they lie */
    CP_FETCH, /* windows; a block of keys is brought here before it is met, one ahead */
    CP_PUSH, /* windows; ranks also write into those of others, where it spares a copy: in
                  a Ulysses group. As CP_FETCH otherwise */
    CP_TWO_SIDED, /* sends and receives */
};

struct cp_schedule {
    const struct cp_plan *plan; /* borrowed; outlives the schedule */
    int rank;
    enum cp_transport transport;
    struct cp_buffer *buffers;
    struct cp_step *steps; /* in an order that respects `after` when run one by one */
    int32_t buffer_count, step_count;
    int64_t window_bytes;  /* of the own window */
    int64_t scratch_bytes; /* of the workspace */
};

/* Writes the schedule of `rank`. CP_ERR_NO_MEMORY, or CP_ERR_VALUE where a size
 * overflows. */
CP_NODISCARD enum cp_code cp_schedule_create(const struct cp_plan *plan, int rank,
                                             enum cp_transport transport,
                                             struct cp_schedule **out);
void cp_schedule_destroy(struct cp_schedule **schedule);

/* The kernel's panel behind a layout; NULL for a plain one. */
const struct cp_panel *cp_schedule_panel(const struct cp_plan *plan,
                                         enum cp_layout layout);

/* What a box takes of its buffer; 0 for no box. */
int64_t cp_box_bytes(const struct cp_schedule *schedule, const struct cp_box *box);

const char *cp_step_name(enum cp_step_op op);
const char *cp_transport_name(enum cp_transport transport);
/* One line a buffer and a step. */
void cp_schedule_print(const struct cp_schedule *schedule, FILE *file);

#endif
