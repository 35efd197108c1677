/* A plan: from the records of all ranks, who holds which rows and heads, how the mask
 * is read, how large each block is. Pure arithmetic; immutable once made; every rank
 * makes the same one.
 *
 * Rank (r, u) is number r * U + u. Its Ulysses group is the ranks (r, *), which hold a
 * contiguous stretch of the sequence: row_first(r, 0) onwards. It answers for the rows
 * of its whole group and the query heads heads[u]. */
#ifndef CP_PLAN_PLAN_H
#define CP_PLAN_PLAN_H

#include <stddef.h>

#include "base/record.h"
#include "plan/partition.h"
#include "tensor/dtype.h"
#include "tensor/format.h"

enum { CP_MAX_WORLD = 1024, CP_MAX_HEAD_CHUNKS = 64 };

/* How an axis of the mask is read. */
enum cp_axis_kind {
    CP_AXIS_ONE,   /* length 1: the same for every row or key */
    CP_AXIS_OWN,   /* the rank's own rows or keys */
    CP_AXIS_WHOLE, /* all rows or keys of the sequence */
};

/* What the plan of a call depends on, and nothing else: the key of the plan cache. */
struct cp_signature {
    struct cp_call call;
    int world;
    int64_t *sizes; /* (world, CP_SIZE_COUNT), owned */
};

struct cp_plan {
    struct cp_signature signature;
    struct cp_format format;  /* of the kernel that will run; zero where none does */
    int world, ring, ulysses; /* W = R * U */
    struct cp_range *q_rows;  /* (world), global positions */
    struct cp_range
        *kv_rows; /* (world); all of them 0 .. S_kv where k and v are replicated */
    struct cp_range *heads;    /* (ulysses) query heads that rank (r, u) answers for */
    struct cp_range *kv_heads; /* (ulysses) key/value heads that these need */
    int64_t heads_per_kv;      /* H / H_kv */
    int chunks; /* in which attention cuts the heads of every rank, so that one moves while
                   another is met; at least 1. As many as were asked for; where nobody did,
                   schedule/choose.h may still say so */
    enum cp_rotate
        rotate; /* how blocks of a ring come, never AUTO: one by one (ALLTOALL)
                              where nobody has said it, or as that file says */
    enum cp_axis_kind mask_rows, mask_keys;
    double scale;
    /* shard, gather, reduce_scatter: the tensor as (outer, rows, 1, inner) */
    struct cp_range *cut; /* (world) rows of every rank */
    int64_t outer, inner;
};

static inline int cp_plan_ring_rank(const struct cp_plan *plan, int rank)
{
    return rank / plan->ulysses;
}

static inline int cp_plan_ulysses_rank(const struct cp_plan *plan, int rank)
{
    return rank % plan->ulysses;
}

/* What `rank` told of its own sizes. */
static inline int64_t cp_plan_size(const struct cp_plan *plan, int rank,
                                   enum cp_size which)
{
    return plan->signature.sizes[(size_t)rank * CP_SIZE_COUNT + which];
}

/* Global rows, and keys that are not replicated, of the Ulysses group that `rank` belongs
 * to. */
struct cp_range cp_plan_group_rows(const struct cp_plan *plan, int rank);
struct cp_range cp_plan_group_keys(const struct cp_plan *plan, int rank);

/* In how many chunks the heads can be cut so that some rank has a part of each. */
int cp_plan_most_chunks(const struct cp_plan *plan);

/* Chunk `chunk` of the heads that rank (r, u) answers for: of its query heads, and of the
 * key/value heads that these need. A key/value head is in one chunk, with all of the
 * rank's query heads that use it. Chunks may be empty. */
struct cp_range cp_plan_chunk_heads(const struct cp_plan *plan, int u, int chunk);
struct cp_range cp_plan_chunk_kv_heads(const struct cp_plan *plan, int u, int chunk);

/* From records that cp_agree has passed. `format` is read for attention only.
 * CP_ERR_NO_MEMORY, or CP_ERR_VALUE where a size overflows. */
CP_NODISCARD enum cp_code cp_plan_create(const struct cp_record *records, int world,
                                         const struct cp_format *format,
                                         struct cp_plan **out);
void cp_plan_destroy(struct cp_plan **plan);

/* Does this plan answer these records? */
bool cp_plan_matches(const struct cp_plan *plan, const struct cp_record *records,
                     int world);

#endif
