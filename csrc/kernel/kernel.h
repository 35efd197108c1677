/* The table that an attention kernel fills.
 *
 * A kernel carries a state per query row and head: the unnormalised output sum(exp(s -
 * m) * v), the maximum m of the scores s so far and the sum l = sum(exp(s - m)).
 * `attend` adds a block of keys to it, so a ring step, a gathered sequence and a plain
 * call are the same call. A state of zero bytes is the empty one (l = 0: no key yet, m
 * counts for nothing). Method: online softmax, Milakov and Gimelshein 2018
 * (arXiv:1805.02867), in the blocked form of FlashAttention (arXiv:2205.14135);
 * gradients as in FlashAttention-2 (arXiv:2307.08691, algorithm 2).
 *
 * All views are borrowed for the call. Functions of host kernels return when the work
 * is done and never fail on numbers; those of device kernels enqueue on `stream`. No
 * function allocates: scratch comes with the arguments. */
#ifndef CP_KERNEL_KERNEL_H
#define CP_KERNEL_KERNEL_H

#include "base/backend.h"
#include "base/status.h"
#include "tensor/format.h"
#include "tensor/view.h"

struct cp_stream;  /* a device's lane; NULL on the host */
struct cp_package; /* kernel/package.h */

/* Where a block of queries meets a block of keys. Positions and heads are those of the
 * whole tensor. */
struct cp_place {
    int64_t q_first, k_first; /* global rows: query i may see key j iff k_first + j <=
                                 q_first + i (causal) */
    int64_t head_first;       /* global query head of head 0 of the q view */
    int64_t kv_head_first;    /* global key/value head of head 0 of the k and v views */
    int64_t heads_per_kv;     /* query head h uses kv head h / heads_per_kv */
    bool is_causal;
};

/* Key and value head, counted in the k and v views, of a head of the q view. */
static inline int64_t cp_place_kv_head(const struct cp_place *place, int64_t head)
{
    return (place->head_first + head) / place->heads_per_kv - place->kv_head_first;
}

/* The heads of the q view, one of `heads`, that use a head of the k and v views: from `first` up to the result, which is
 * no more than `first` where there are none. */
static inline int64_t cp_place_heads(const struct cp_place *place, int64_t heads,
                                     int64_t kv_head, int64_t *first)
{
    int64_t from =
        (place->kv_head_first + kv_head) * place->heads_per_kv - place->head_first;
    int64_t end = from + place->heads_per_kv;
    *first = from < 0 ? 0 : from;
    return end < heads ? end : heads;
}

struct cp_attend_args {
    struct cp_view q;    /* (B, rows, heads, D), dtype of the call, any strides */
    struct cp_view k, v; /* (B, keys, kv heads, D) and (..., Dv): panels, n as given and
                            strides for axes 0 and 2; or plain, as the format says */
    struct cp_view mask; /* data NULL: none. (B or 1, heads or 1, rows or 1, keys or 1);
                            bool, float32 or q's dtype */
    struct cp_view state; /* panels of (B, rows, heads, Dv); always given */
    bool is_first;        /* no key was met before: what `state` holds means nothing */
    /* After the last keys the result, as `finish` has it, and what `state` holds then means
     * nothing. They overlap nothing else. out.data NULL: more keys follow; lse.data NULL: not
     * wanted. */
    struct cp_view out, lse;
    struct cp_place place;
    double scale;
    enum cp_backend backend;          /* of the call */
    const struct cp_package *package; /* of a backend that has one, or NULL */
    void *scratch; /* format.scratch_bytes, aligned to 64; contents mean nothing before
                      and after */
};

struct cp_finish_args {
    struct cp_view state; /* panels of (B, rows, heads, Dv) */
    struct cp_view out;   /* (B, rows, heads, Dv): state / l; 0 where l = 0 */
    struct cp_view lse;   /* (B, rows, heads, 1), natural log, float32 (float64 for
                             float64); -inf where l = 0; data NULL: not wanted */
};

struct cp_delta_args {
    struct cp_view out, dout; /* (B, rows, heads, Dv), dtype of the call */
    struct cp_view dlse;      /* (B, rows, heads, 1), sum dtype; data NULL: none */
    struct cp_view delta; /* (B, rows, heads, 1), sum dtype: sum over Dv of out * dout,
                             less dlse */
};

/* ds = p * (dout . v - delta), p = exp(s - lse); dv += p^T dout, dk += scale ds^T q, dq
 * += scale ds k. */
struct cp_grad_args {
    struct cp_view q, k, v,
        dout; /* plain, dtype of the call, any strides (k, v: kv heads) */
    struct cp_view lse, delta; /* (B, rows, heads, 1), sum dtype; rows with lse = -inf
                                  have no gradient */
    struct cp_view mask;       /* as in attend */
    struct cp_view dq, dk, dv; /* plain, sum dtype, added to */
    struct cp_place place;
    double scale;
    /* delta is less a dlse: it may be any number, also where dout is 0 */
    bool has_dlse;
    enum cp_backend backend;          /* as in attend */
    const struct cp_package *package; /* likewise */
    void *scratch;                    /* format.grad_scratch_bytes, aligned to 64 */
};

enum { CP_KERNEL_ABI = 5 };

struct cp_kernel_ops;

/* A list of kernels as its users see it: the best kernel for a call of that backend, not
 * above `limit`, which all ranks agreed on. CP_ERR_VALUE for a backend that is not for this
 * device, CP_ERR_UNSUPPORTED with the reason where no kernel takes the call. */
struct cp_kernel_list {
    enum cp_code (*select)(int limit, enum cp_backend backend, enum cp_dtype dtype,
                           int64_t head_dim, int64_t value_dim,
                           const struct cp_kernel_ops **out, struct cp_format *format);
    int limit;
};

struct cp_kernel_ops {
    const char *name; /* "generic", "avx2", ...: appears in messages */
    uint32_t abi;     /* CP_KERNEL_ABI */
    /* Can it run on this machine? */
    bool (*is_available)(void);
    /* CP_OK and the layouts, or CP_ERR_UNSUPPORTED with the reason. */
    enum cp_code (*describe)(enum cp_dtype dtype, int64_t head_dim, int64_t value_dim,
                             struct cp_format *out);
    /* src (B, keys, kv heads, D) plain -> dst panels. NULL where the format has none. */
    enum cp_code (*pack_k)(const struct cp_view *dst, const struct cp_view *src,
                           struct cp_stream *stream);
    enum cp_code (*pack_v)(const struct cp_view *dst, const struct cp_view *src,
                           struct cp_stream *stream);
    enum cp_code (*attend)(const struct cp_attend_args *args, struct cp_stream *stream);
    enum cp_code (*finish)(const struct cp_finish_args *args, struct cp_stream *stream);
    enum cp_code (*delta)(const struct cp_delta_args *args, struct cp_stream *stream);
    enum cp_code (*grad)(const struct cp_grad_args *args, struct cp_stream *stream);
};

#endif
