/* One attention over the ranks of a world, with random numbers, its truth in float64,
 * and the judgement of what the ranks answered: at most so many times the plain
 * method's own error. */
#ifndef CP_TESTS_SCENE_H
#define CP_TESTS_SCENE_H

#include "base/record.h"
#include "plan/plan.h"
#include "schedule/schedule.h"

enum { SCENE_MOST_RANKS = 16 };

struct scene {
    /* What is asked. */
    int world, ring, ulysses;
    int32_t variant, rotate, chunks;
    int64_t batch, heads, kv_heads, dim, value_dim;
    int64_t rows[SCENE_MOST_RANKS], keys[SCENE_MOST_RANKS];
    enum cp_dtype dtype;
    bool is_causal, want_lse, is_replicated;
    enum cp_mask_kind mask_kind;
    enum cp_axis_kind mask_rows, mask_keys;
    int64_t mask_batch, mask_heads;
    double scale;
    /* Numbers of the whole, dense doubles, and the truth. */
    int64_t all_rows, all_keys;
    double *q, *k, *v, *mask, *dout, *dlse;
    double ds_size; /* oracle.h: what dq and dk are sums of differences of */
    double *truth[CP_TENSORS], *plain[CP_TENSORS]; /* OUT, LSE, DQ, DK, DV */
    /* The ranks' own tensors, by role. */
    struct cp_view tensors[SCENE_MOST_RANKS][CP_TENSORS];
};

/* A random scene from `seed` for this world. */
void scene_create(struct scene *scene, uint64_t seed, int ring, int ulysses);
void scene_destroy(struct scene *scene);
/* Other numbers, in the same tensors. */
void scene_redraw(struct scene *scene, uint64_t seed);
/* What the rank tells at the gate; op CP_OP_ATTENTION or its backward. Kernel format
 * not set. */
void scene_record(const struct scene *scene, int rank, enum cp_op op,
                  struct cp_record *record);
/* "3x2 anything, rows 4 0 7, ..." */
void scene_print(const struct scene *scene, char *text, size_t bytes);
/* Poisons the outputs with NaN before a call; judges them after. The backward reads OUT
 * and LSE of the forward. */
void scene_poison(struct scene *scene, enum cp_op op);
bool scene_judge(const struct scene *scene, enum cp_op op);

#endif
